"""What steps do to the outputs of a model: which repairs it needs, and which steps cost digits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from anesurgery.checking.comparison import compare
from anesurgery.checking.exactness import MOST_FLOP, Near, Yardstick, less_exact
from anesurgery.files.package import Loaded
from anesurgery.mil import Program, walk_ops
from anesurgery.placement.certifying import arithmetic_of
from anesurgery.placement.rules import faulty_ops
from anesurgery.placement.rules.faulty_ops import CLAIMS
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import Session
from anesurgery.rewriting.step_trials import Trial, Trials
from anesurgery.semantics.reading import in_decibels

WRONG = 40.0
"""PSNR in dB below which outputs count as wrong: the gate of a certificate."""
HALVES = 6.0
"""dB by which a repair must bring outputs nearer: half the error is left. A choice: less is rounding."""
RIGHT = 60.0
"""PSNR in dB from which one repair needs no other beside it: what recipes promise of outputs."""
FLOP = 32 * MOST_FLOP
"""A program of more is not run for this: three runs tell that outputs are right, each of some seconds."""


@dataclass
class Outputs:
    """The outputs of a model, by which others made of it are judged."""

    measures: Sequence[Yardstick]
    """What each program of it means."""
    gate: float = WRONG
    """PSNR in dB below which they are wrong."""
    seen: dict[tuple[Pass, ...], Near | None] = field(default_factory=dict)

    @classmethod
    def of(cls, start: Trial, session: Session, gate: float, **how: Any) -> Outputs:
        """On the inputs of a session, or on drawn ones; for each program of a pipeline on drawn ones."""
        programs = [graph for graph in start.held.chosen if isinstance(graph, Program)]
        inputs = session.samples if len(programs) == 1 else []
        engine = arithmetic_of(session.target)
        return cls([Yardstick(p, engine, inputs, session.images, session.seed, **how) for p in programs], gate)

    @property
    def can_run(self) -> bool:
        """Are all programs small enough to be run for this?"""
        return all(one.is_small for one in self.measures)

    def near(self, trial: Trial) -> Near | None:
        """How near the outputs of a trial are to what the model means; None where that cannot be told."""
        if trial.steps not in self.seen:
            each = [one.measure(program, trial.contract) for one, program in self._pairs(trial)]
            told = [one for one in each if one is not None]
            names = told[0] if told and len(told) == len(each) else ()
            near = Near({n: min(one[n] for one in told) for n in names})
            near.notes = tuple(note for one in told for note in one.notes)
            self.seen[trial.steps] = near or None
        return self.seen[trial.steps]

    def before_and_after(self, start: Trial, end: Trial) -> tuple[Near | None, Near | None]:
        """How near outputs are at both ends of a plan, of the results that are left at the end."""
        later = [change for change in end.contract if not change.retypes]
        if not later:
            return self.near(start), self.near(end)
        if len(self.measures) != 1:  # a pipeline keeps its results
            return None, None
        (one, before), (_, after) = *self._pairs(start), *self._pairs(end)
        return one.seen_as(before, (), later), one.seen_as(after, end.contract)

    def undefined(self, trial: Trial) -> int:
        """On how many inputs of one number everywhere outputs in fp16 are not finite."""
        return sum(one.undefined(program, trial.contract) for one, program in self._pairs(trial))

    def _pairs(self, trial: Trial) -> list[tuple[Yardstick, Any]]:
        return list(zip(self.measures, trial.held.chosen, strict=True)) if self.measures else []

    def wrong(self, near: Near | None) -> str:
        """How wrong outputs are and why, in words; "" where they are right as they are, or nobody knows."""
        low = [f"{in_decibels(v)} in {name}" for name, v in (near or {}).items() if v < self.gate]
        said = [f"outputs are wrong still on the inputs at hand, {', '.join(low)}"] if low else []
        why = next(filter(None, (one.why_far() for one in self.measures if low)), "")
        return "; ".join(filter(None, [*said, *(near.notes if near else ()), why]))

    def loss(self, old: Trial, new: Trial) -> str:
        """How outputs are less exact, in words; "" too where wrong ones become right, and all are then."""
        was, now = self.near(old), self.near(new)
        return "" if was is None or now is None or self._mends(was, now) else less_exact(was, now)

    def repaired(self, old: Trial, new: Trial) -> bool:
        """Are outputs clearly nearer in an arithmetic in which they were wrong, and nowhere further off?"""
        was, now = self.near(old) or Near(), self.near(new)
        if now is None or min(now.values()) == -float("inf"):
            return False
        nearer = any(old < now[name] >= old + HALVES for name, old in was.items() if old < self.gate)
        return nearer and not self.loss(old, new)

    def _mends(self, was: Near, now: Near) -> bool:
        return min(now.values()) >= RIGHT and any(old < self.gate <= now[name] for name, old in was.items())


GATE = 60.0
"""PSNR in dB that outputs must keep where a step rounds: what recipes promise."""


def too_far(old: Trial, new: Trial) -> str:
    """What rounding does to outputs on a sampled input, where it is more than `GATE` allows, in words; else "".

    The description of the model before says which inputs are images: their pixels go from 0 to 255.
    """
    steps = new.steps[len(old.steps) :]
    pairs = zip(old.held.chosen, new.held.chosen, strict=True) if any(step.rounds for step in steps) else ()
    for graph, other in pairs:
        before = Loaded(graph, old.held.spec_of(graph))
        how = partial(compare, before, other, precision="fp16", contract=new.contract, gate=GATE)
        each = (how(function=name) for name in graph.functions)
        if (failed := next((one for one in each if not one.ok), None)) is not None:
            undefined = next((o.failure for o in failed.outputs if o.failure), "")
            return f"{undefined or f'it keeps {failed.psnr:.1f} dB of {GATE:g}'} on a sampled input"
    return ""


@dataclass(frozen=True)
class Repairs:
    """Steps that repair numbers, and why they stay whatever they cost."""

    steps: tuple[Pass, ...]
    why: str
    """What goes wrong without them; or, where no step helps, what is wrong."""
    needed: str = "repairs what goes wrong on the inputs at hand"
    """After the name of a step."""
    faults: tuple[str, ...] = ()
    """The rules that report an op wrong on the target, where no run here shows it to be so."""

    def __str__(self) -> str:
        names = ", ".join(step.name for step in self.steps)
        return f"{names}: {self.why}" if names else self.why

    @property
    def headline(self) -> str:
        """Why the first line may say that the model is slower; "" where outputs tell it themselves."""
        return f"repaired, as reported wrong on this target: {', '.join(self.faults)}" if self.faults else ""


def repairs_of(steps: Sequence[Pass], start: Trial, trials: Trials, outputs: Outputs) -> Iterator[Repairs]:
    """What a model needs of some repairs, in the order in which they run.

    Nothing is run of a model without a finding about its numbers, unless inputs are given. Ops that reports
    call wrong on the target are repaired as well where no arithmetic computes what they give, or where no
    inputs are given: random numbers are small, and show nothing of it.
    """
    samples = trials.session.samples
    if not steps or not outputs.measures:
        return
    judged = samples or outputs.can_run
    found = start.findings if judged else start.found_by(faulty_ops.RULES)
    if not samples and not any(finding.kind == "numeric" for finding in found):
        return
    claims = {f.rule: f.remedy for f in found if f.rule in CLAIMS}
    own = [_of_claims(step, claims) for step in steps]
    reached = _reached(own, start, trials, outputs)
    yield from () if reached is None else (reached,)
    shown = {rule for rule in claims if samples and CLAIMS[rule].wrong is not None}
    left = {rule: remedy for rule, remedy in claims.items() if rule not in shown}
    done = () if reached is None else reached.steps
    if named := tuple(step for step in own if step.name in left.values() and step not in done):
        rules = tuple(rule for rule, remedy in left.items() if remedy in {step.name for step in named})
        reachable = any(CLAIMS[rule].wrong is not None for rule in rules)
        unless = "; give inputs to see whether they reach it" if reachable else ""
        why = f"{', '.join(rules)} was reported on this target{unless}"
        yield Repairs(named, why, "repairs what was reported wrong on the target", rules)


def _of_claims(step: Pass, claims: Mapping[str, str | None]) -> Pass:
    """A step that repairs faults by name, of those alone that are claimed of the target."""
    names = tuple(CLAIMS[rule].name for rule, remedy in claims.items() if remedy == step.name)
    return replace(step, **{"only": names}) if names and "only" in step.options() else step


def _reached(steps: Sequence[Pass], start: Trial, trials: Trials, outputs: Outputs) -> Repairs | None:
    """The fewest of some repairs that bring wrong outputs nearer to what the model means.

    All run at first, as two hazards of one model hide each other; then each is left out once, the last one
    first, and stays away where the outputs are as near without it, or right, and the model scores no worse:
    what one repair keeps on the engine another may take off it. What leaves outputs that are not finite repairs
    nothing.

    Returns:
        None where the outputs are right as they are, or cannot be told; no steps where none helps.
    """
    before, end = outputs.near(start), start
    if before is None or min(before.values()) >= outputs.gate:
        return None
    for step in steps:
        new = trials.after(end, step)
        end = new if isinstance(new, Trial) and not new.session.contract else end
    if not outputs.repaired(start, end):
        words = f"{outputs.wrong(before)}, and no single repair helps"
        return Repairs((), f"{words}: certify says where errors enter")
    for step in reversed(end.steps):
        other = trials.without(start, end, step)
        near = None if other is None else outputs.near(other)
        enough = {name: min(value, RIGHT) for name, value in (outputs.near(end) or {}).items()}
        if other and near is not None and not less_exact(enough, near) and not other.score.loss(end.score):
            end = other
    after = outputs.near(end) or Near()
    wrong = {name: old for name, old in before.items() if old < outputs.gate}
    gains = ", ".join(f"{in_decibels(v)} -> {in_decibels(after[name])} in {name}" for name, v in wrong.items())
    words = f"without it outputs are wrong on the inputs at hand, {gains} of what the model means"
    return Repairs(end.steps, words)


@dataclass
class Exact:
    """What is left of some steps where those that cost digits are taken back."""

    end: Trial
    losses: dict[str, str] = field(default_factory=dict)
    """Name of a step that does not stay -> by how much outputs would be less exact."""
    notes: list[str] = field(default_factory=list)
    """What stays although it costs digits."""


def exact(start: Trial, end: Trial, trials: Trials, outputs: Outputs) -> Exact:
    """The steps after which outputs are as exact in fp16 and in the engine's arithmetic.

    Each is judged beside the model right before it; nothing is run step by step where the end is as exact as
    the beginning. One that costs more than rounding is tried in its gentler form, if it has one; else it
    goes. Where no inputs are given, a repair stays that leaves outputs right: drawn numbers are small, and show
    no hazard.
    """
    was, now = outputs.near(start), outputs.near(end)
    if was is None or now is None or not less_exact(was, now):
        return Exact(end)
    left = Exact(start)
    for step in end.steps[len(start.steps) :]:
        if not isinstance(new := trials.after(left.end, step), Trial):
            continue
        loss, gentler = outputs.loss(left.end, new), step.gentler()
        gentle = trials.after(left.end, gentler) if loss and gentler is not None else None
        if isinstance(gentle, Trial) and not outputs.loss(left.end, gentle):
            new, loss = gentle, ""
        if loss and not step.rounds:  # that has a gate of its own
            repaired = "" if trials.session.samples else hazards_of(new)
            if not repaired or min((outputs.near(new) or {"": 0.0}).values()) < RIGHT:
                left.losses[step.name] = loss
                continue
            left.notes.append(f"{step.name}: {loss}; kept, as it repairs what may go wrong: {repaired}")
        left.end = new
    return left


def hazards_of(new: Trial) -> str:
    """The rules by which numbers may go wrong in ops that the last step takes away, or that name it."""
    assert new.before is not None
    findings = [finding for finding in new.before.findings if finding.kind == "numeric"]
    names = {words.split()[-1] for change in new.session.changes for words in change.before}
    ops = [op for graph in new.before.held.chosen for op in walk_ops(graph) if op.name in names]
    edited = names.union(v.name for op in ops for v in op.outputs)  # a finding names an op by what it makes
    remedied = [f.rule for f in findings if f.remedy == new.steps[-1].name or f.op in edited]
    return ", ".join(dict.fromkeys(remedied))
