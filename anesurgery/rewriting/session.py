"""The `Session` of one application of passes, and its `Report`: edits, refusals, notes, recoded weights."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from anesurgery.checking.grades import EarlierChecks, SiteCheck
from anesurgery.checking.lengths import Declared, declared_lengths
from anesurgery.checking.output_comparison import psnr
from anesurgery.display import Drawn, byte_words, drawn
from anesurgery.errors import Named, Refusal, SurgeryError
from anesurgery.files import arrays
from anesurgery.files.interface import InterfaceChange
from anesurgery.files.writing import check_place
from anesurgery.mil import Array, Function, Operation, Var, remove_input, walk_ops
from anesurgery.regions.reencoding import stored_bytes

Graph: TypeAlias = Any
"""What `Pass.run` edits in place: a MIL `Program`, or a `Network` of layers."""

KEEP, DECODE, REENCODE = "keep", "decode", "reencode"
CHOICES = (KEEP, DECODE, REENCODE)
"""What `compressed=` may be."""
ROUNDED = "a compressed weight is rounded again, as the notes say; whole models are compared"
"""Why there is no site proof of an edit with a weight that was encoded again."""
INTERFACE = "inputs or outputs change on purpose; compare the whole models"
"""Why there is no site proof of an edit that a pass declares."""
SHAPE = "the output's shape changes on purpose; compare the whole models"
"""Why there is no site proof of an edit none of whose new values has the shape of the old one."""


@dataclass(frozen=True)
class Recoded:
    """A new weight in the place of a compressed one."""

    name: str
    """The name of the old weight."""
    before: int
    """Bytes that were stored."""
    after: int
    psnr: float
    """PSNR in dB of the stored numbers against the computed ones; infinite where they are equal."""

    @classmethod
    def of(cls, old: Var, new: Var, computed: Array, stored: Array) -> Recoded:
        """Compare the stored numbers with the computed ones."""
        wide = computed.astype(np.float64)
        rms = math.sqrt(float(np.mean((wide - stored.astype(np.float64)) ** 2))) if wide.size else 0.0
        noise = psnr(float(np.abs(wide).max(initial=0.0)), rms)
        return cls(old.name, stored_bytes(old), stored_bytes(new), noise)


def check_choice(compressed: str) -> None:
    """Check that `compressed` is one of the choices.

    Raises:
        SurgeryError: it is not.
    """
    if compressed not in CHOICES:
        raise SurgeryError(f"compressed={compressed!r}; it may be {', '.join(map(repr, CHOICES))}")


def _in_use(recoded: Mapping[Var, Recoded]) -> list[Recoded]:
    """Return the recoded weights that the model still has."""
    return [r for var, r in recoded.items() if var.op is not None and var.op.enclosing_block is not None]


def is_lossy(recoded: Mapping[Var, Recoded]) -> bool:
    """Has the model weights with other numbers than were computed?"""
    return any(r.psnr < math.inf for r in _in_use(recoded))


def recoding_notes(recoded: Mapping[Var, Recoded], how: str) -> list[str]:
    """Return the note about weights that were stored anew: how many, how, the largest error, and the bytes."""
    rows = sorted(_in_use(recoded), key=lambda r: r.psnr)
    if not rows:
        return []
    many = f"{len(rows)} compressed weight{'s' if len(rows) > 1 else ''}"
    done = "stored as plain numbers" if how == DECODE else "decoded, and encoded again in the form each had"
    size = f"{byte_words(sum(r.before for r in rows))} become {byte_words(sum(r.after for r in rows))}"
    worst = rows[0]
    error = "without error" if worst.psnr == math.inf else f"at worst {worst.psnr:.1f} dB (%{worst.name})"
    return [f"{many} that passes compute with: {done}, {error}; {size}"]


@dataclass(frozen=True)
class Needs:
    """A precondition of an edit that a run on some inputs showed, and that nothing shows for all inputs."""

    value: str
    """The name of the value that comes nearest to its limit."""
    most: float
    """The largest magnitude up to which the edit holds."""
    reached: float
    """The largest that was seen."""
    inputs: str
    """The inputs of the run, in words."""

    def __str__(self) -> str:
        return f"holds up to {self.most:g}; on {self.inputs} %{self.value} reaches {self.reached:.4g}"


@dataclass(frozen=True)
class Change:
    """One edit: which pass, at which op, which ops it removed and added, and its proof."""

    pass_name: str
    where: str
    """The name of the op, value or input that was edited."""
    before: tuple[str, ...]
    """The ops that were removed, by type and name: ``select mask_12``."""
    after: tuple[str, ...]
    """The ops that were added, likewise."""
    bindings: str = ""
    """The values that the pattern bound, or other words about the edit."""
    proof: SiteCheck | None = None
    unchecked: str = ""
    """Why there is no site proof, when one was wanted."""
    needs: Needs | None = None
    """The precondition that only a run has shown."""
    assumes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Input -> the least and the largest integer that an option of the pass let it rely on."""


@dataclass(kw_only=True, repr=False)
class Report(Drawn):
    """What passes did to a model, and what they could not do."""

    target: str | None = None
    """Chip and OS that the model is meant for."""
    changes: list[Change] = field(default_factory=list)
    refusals: list[tuple[str, Refusal]] = field(default_factory=list)
    """(name of a pass, why it did not act at a place)."""
    notes: list[str] = field(default_factory=list)
    """Further sentences for the caller."""
    contract: list[InterfaceChange] = field(default_factory=list)
    """The declared interface changes: what callers of the model must do otherwise."""
    artifacts: dict[str, Array] = field(default_factory=dict)
    """Arrays that left the model, by name; they are written beside it."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by step."""
    wrong: str = ""
    """What the first line says of wrong numbers: how wrong outputs still are, or what was repaired; else ""."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data: what `--json` prints."""
        return drawn(self, "json")

    def __repr__(self) -> str:
        return str(self)

    def artifact_places(self, package: str | os.PathLike[str]) -> dict[Path, Array]:
        """Return the arrays that left the model, by where they go: `<package>.<name>.npy`."""
        place = Path(package).expanduser().absolute()
        return {arrays.path_beside(place, name): array for name, array in self.artifacts.items()}

    def save_artifacts(self, package: str | os.PathLike[str], *, overwrite: bool = False) -> list[Path]:
        """Write the arrays that left the model beside its package.

        Raises:
            LoadError: something is there already.
        """
        places = self.artifact_places(package)
        for place in places:
            check_place(place, overwrite)
        for place, array in places.items():
            arrays.write_one(place, array, overwrite)
        return list(places)


class Mark(NamedTuple):
    """The state of a session and a function before a rewrite: see `Session.marked`."""

    inputs: set[str]
    """The inputs of the function."""
    contract: int
    """The number of declared interface changes."""
    dropped_inputs: int
    """The number of inputs that passes removed."""
    artifacts: dict[str, Array]


@dataclass(kw_only=True, repr=False)
class Session(Report):
    """One application of passes: its report, its settings, and what is collected on the way."""

    prove_sites: bool = False
    images: frozenset[str] = frozenset()
    """The inputs and outputs that are images, which keep their type."""
    wired: bool = False
    """Are its graphs the members of a pipeline, whose interfaces must stay?"""
    whole: Any = None
    """The model, a `Subject`, of which a graph is edited; None where a graph alone is."""
    inputs: Any = None
    """What the caller gave to compare by, or to calibrate with: arrays by input name, or a list of such."""
    graph: Graph = None
    """The graph that is edited."""
    spec: Any = None
    """The specification that describes its inputs; None for the layers of a neural network."""
    seed: int = 0
    """The seed of the numbers on which sites are compared."""
    compressed: str = KEEP
    """How compressed weights are stored whose values a pass computes with."""
    recoded: dict[Var, Recoded] = field(default_factory=dict)
    """New weight -> what replacing a compressed weight by it lost."""
    assume: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Input -> the least and the largest value that the caller will give."""
    named: frozenset[str] = frozenset()
    """Names of the passes that the caller asked for, and no recipe chose."""
    alarms: list[str] = field(default_factory=list)
    """What passes that were asked for by name lose: each is a note too, and a warning at the end."""
    ran: list[str] = field(default_factory=list)
    """Names of the passes that have run."""
    repairs: list[Any] = field(default_factory=list)
    """The passes that have mended numbers, with their options."""
    checks: dict[str, EarlierChecks] = field(default_factory=dict)
    """Step, as text -> the checks of its edits."""
    reached: dict[tuple[str, ...], dict[tuple[str, bool], float]] = field(default_factory=dict)
    """The largest values of the runs of `needs`, by the program that ran."""
    names: dict[Function, dict[str, int]] = field(default_factory=dict)
    """The names that a function has or had, of which new ones must differ -> the last number behind each."""
    dropped_inputs: list[tuple[Function, str]] = field(default_factory=list)
    """Inputs that a pass removed on purpose."""
    shared: dict[tuple[Any, ...], Var] = field(default_factory=dict)
    """Constants and values that several edits use, by function and key."""
    shared_ops: dict[tuple[Any, ...], list[Operation]] = field(default_factory=dict)
    """The ops that make the shared values."""

    @property
    def declared(self) -> Declared:
        """The lengths that `spec` declares for dynamic axes."""
        return declared_lengths(self.graph, self.spec)

    @property
    def samples(self) -> list[Mapping[str, Array]]:
        """The sets of inputs that the caller gave."""
        return [self.inputs] if isinstance(self.inputs, Mapping) else list(self.inputs or ())

    def again(self, *, prove_sites: bool | None = None) -> Session:
        """Return a session for the same model and target that has collected nothing.

        It shares the site proofs and the observed ranges. `whole`, `graph`, `spec` and the names of the graph
        are set when passes run on one.
        """
        return Session(
            target=self.target,
            prove_sites=self.prove_sites if prove_sites is None else prove_sites,
            images=self.images,
            wired=self.wired,
            inputs=self.inputs,
            spec=self.spec,
            seed=self.seed,
            assume=self.assume,
            named=self.named,
            compressed=self.compressed,
            checks=self.checks,
            reached=self.reached,
        )

    def absorb(self, other: Session) -> None:
        """Take over what another session collected."""
        for name in ("changes", "refusals", "notes", "contract", "alarms", "ran", "repairs", "dropped_inputs"):
            getattr(self, name).extend(getattr(other, name))
        self.artifacts |= other.artifacts
        self.recoded |= other.recoded
        for name, seconds in other.timings.items():
            self.timings[name] = self.timings.get(name, 0.0) + seconds

    def alarm(self, words: str) -> None:
        """Add a note that the caller is also warned of, once, after all passes have run."""
        if words not in self.alarms:
            self.alarms.append(words)
            self.notes.append(words)

    def marked(self, function: Function) -> Mark:
        """Return what `reset` needs to undo what a rewrite declares."""
        return Mark(set(function.inputs), len(self.contract), len(self.dropped_inputs), dict(self.artifacts))

    def reset(self, function: Function, mark: Mark) -> None:
        """Remove the inputs, interface changes and arrays that were added since `marked`."""
        for name in set(function.inputs) - mark.inputs:
            remove_input(function, name)
        del self.contract[mark.contract :], self.dropped_inputs[mark.dropped_inputs :]
        self.artifacts = mark.artifacts

    def refuse(self, step: str, why: Refusal | str, where: Named | None = None) -> None:
        """Record that a pass left something as it was.

        Args:
            step: the name of the pass.
            why: the reason, with the value on which it rests.
            where: the op or layer, where the reason is given in words.
        """
        self.refusals.append((step, why if isinstance(why, Refusal) else Refusal(why, where)))

    def declare(
        self, pass_name: str, where: str, change: InterfaceChange, before: Sequence[str], after: Sequence[str]
    ) -> None:
        """Record an edit that changes the interface on purpose, for which only whole models can be compared.

        Args:
            pass_name: of the pass.
            where: the input, output, state or function.
            change: what callers must do otherwise.
            before: names of what was removed.
            after: names of what was added.
        """
        self.contract.append(change)
        edit = Change(pass_name, where, tuple(before), tuple(after), change.words, unchecked=INTERFACE)
        self.changes.append(edit)

    def fresh_name(self, function: Function, wish: str) -> str:
        """Return a name that no op or value of the function has or had: the wish, or it with a number."""
        if function not in self.names:
            taken = {op.name for op in walk_ops(function)} | set(function.inputs)
            taken |= {v.name for op in walk_ops(function) for v in op.outputs}
            self.names[function] = dict.fromkeys(taken, 0)
        numbers, name = self.names[function], wish
        while name in numbers:
            numbers[wish] += 1
            name = f"{wish}_{numbers[wish]}"
        numbers[name] = 0
        return name


def needs_notes(changes: Iterable[Change]) -> list[str]:
    """Return a note for each pass whose edits have `Needs`: the one that comes nearest to its limit."""
    nearest: dict[str, Needs] = {}
    for change in changes:
        old, new = nearest.get(change.pass_name), change.needs
        if new is not None and (old is None or new.reached / new.most > old.reached / old.most):
            nearest[change.pass_name] = new
    return [f"{name}: {needs}" for name, needs in nearest.items()]


def counts(changes: Iterable[Change]) -> dict[str, int]:
    """Return the number of edits by pass, in the order of first application."""
    return dict(Counter(change.pass_name for change in changes))
