"""Apply passes or a recipe to a model, prove the result, and save it: `apply` and `Surgery`."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from anesurgery import registry
from anesurgery.checking.comparison import Comparison, compare
from anesurgery.display import Drawn, drawn
from anesurgery.errors import InterfaceError, ProofError, Refusal, SurgeryError, UnknownName
from anesurgery.files import arrays
from anesurgery.files.interface import Interface
from anesurgery.files.interface_change import InterfaceChange
from anesurgery.files.package import Loaded, save, to_mlmodel
from anesurgery.files.writing import check_place
from anesurgery.loading import clone, interface, load
from anesurgery.mil import Array, Program, exclusive, walk_ops
from anesurgery.rewriting.gate import passing
from anesurgery.rewriting.host import pass_pipeline
from anesurgery.rewriting.passes import PROOFS, Pass, Pipeline, refusal_lines, run_pass
from anesurgery.rewriting.session import Change, Session

OPTIONS = ("target", "prove", "inputs", "quiet", "seed")
"""Options of `apply`; every other option of a recipe's call goes to its steps."""


@dataclass
class Surgery(Drawn):
    """The result of `apply`: the changed program, what was done to it, and the proof."""

    loaded: Loaded
    steps: tuple[Pass, ...]
    changes: list[Change]
    refusals: list[tuple[str, Refusal]]
    contract: list[InterfaceChange]
    before: dict[str, int]
    """Number of ops by type in the model as it came."""
    after: dict[str, int]
    target: str | None = None
    proof: Comparison | None = None
    """The comparison of whole models, when it was asked for."""
    artifacts: dict[str, Array] = field(default_factory=dict)
    """Arrays that left the model and are written beside it on `save`, by file name."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by step."""
    notes: list[str] = field(default_factory=list)
    """What else the caller should know."""

    @property
    def program(self) -> Program:
        """The changed MIL program."""
        return self.loaded.program

    @property
    def model(self) -> Any:
        """The changed model as a coremltools MLModel in a temporary package; made anew on each use."""
        return to_mlmodel(self.loaded)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the package atomically, and the artifacts beside it.

        Raises:
            LoadError: the path, or that of an artifact, exists, is the input or in it, or cannot be written.
        """
        target = Path(path).expanduser().absolute()
        beside = {target.with_name(f"{target.stem}.{name}.npy"): a for name, a in self.artifacts.items()}
        for place in beside:
            check_place(place, overwrite, self.loaded.source)
        written = save(self.loaded, target, overwrite=overwrite)
        for place, array in beside.items():
            arrays.write_one(place, array, overwrite)
        return written

    def to_json(self) -> dict[str, Any]:
        """Plain data: what `--json` prints."""
        found: dict[str, Any] = drawn(self, "json")
        return found

    def __repr__(self) -> str:
        return str(self)


@exclusive
def apply(
    model: Any,
    passes: Any,
    *,
    target: str | None = None,
    prove: str | None = "sites",
    inputs: Mapping[str, Array] | None = None,
    quiet: bool = False,
    seed: int = 0,
) -> Surgery:
    """Apply passes to a model; the model given is not changed.

    Args:
        model: path of a package or .mlmodel, MLModel, or MIL Program; passes over layers need a neural network.
        passes: a name of a pass or recipe, a Pass, a Recipe, or a list of these.
        target: chip and OS the model is meant for ("M1/macOS 14"); recorded.
        prove: "sites" runs both sides of every edit on random numbers, "model" compares whole models in the
            arithmetic as stored (fp16), "both", or None.
        inputs: for the comparison of whole models; sampled by default.
        quiet: no progress bar (it vanishes by itself when the output is no terminal).
        seed: of all random numbers.

    Raises:
        LoadError: the model cannot be read.
        UnknownName: no such pass or recipe.
        PassError: a pass raised or left an invalid program.
        ProofError: the numbers after are outside what was promised.
        SurgeryError: a recipe that is not for this model changed nothing.
    """
    if prove not in PROOFS:
        raise SurgeryError(f"prove={prove!r}; it may be {', '.join(map(repr, PROOFS))}")
    recipe = _recipe(passes)
    steps = tuple(steps_of(recipe if recipe is not None else passes))
    if on_layers(steps):
        from anesurgery.neuralnetwork.editing.operating import apply_layers  # it needs this module

        return apply_layers(model, steps, target=target, prove=prove, inputs=inputs, quiet=quiet, seed=seed)
    started = time.perf_counter()
    loaded = clone(load(model)) if isinstance(model, (Program, Loaded)) else load(model)
    session = Session(target=target, prove_sites=prove in ("sites", "both"), seed=seed)
    session.timings["load"] = time.perf_counter() - started
    misfit = recipe.applies_to(loaded.program) if recipe is not None else None
    if recipe is not None and misfit is not None:
        session.refusals.append((recipe.name, misfit))
    before, ops = interface(loaded), op_counts(loaded.program)
    original = clone(loaded) if recipe is not None and target is not None else None
    _run(steps, loaded, session, quiet)
    if original is not None:
        loaded, session = _gated(steps, original, loaded, session, quiet)
    check_interface(before, interface(loaded), session)
    if misfit is not None and not session.changes:
        raise SurgeryError(_nothing_applied(recipe, misfit, session))
    surgery = Surgery(
        loaded,
        steps,
        session.changes,
        session.refusals,
        session.contract,
        ops,
        op_counts(loaded.program),
        target,
        artifacts=session.artifacts,
        timings=session.timings,
        notes=[*loaded.notes, *session.notes],
    )
    if prove in ("model", "both"):
        gate = recipe.psnr if recipe is not None else 60.0
        surgery.proof = _prove_model(model, surgery, inputs, gate, seed)
    return surgery


def _run(steps: Sequence[Pass], loaded: Loaded, session: Session, quiet: bool) -> None:
    for step in tqdm(steps, unit=" passes", disable=True if quiet else None, leave=False):
        loaded.check_source()
        run_pass(step, loaded.program, session)


def _gated(
    steps: Sequence[Pass], original: Loaded, loaded: Loaded, session: Session, quiet: bool
) -> tuple[Loaded, Session]:
    """The model after the steps that lose nothing on the target: as it is, or made anew without the others."""
    assert session.target is not None
    kept, refusals = passing(steps, original.program, loaded.program, session.target)
    if not refusals:
        return loaded, session
    again = dataclasses.replace(
        Session(session.target, session.prove_sites, session.seed), proven=session.proven, refusals=refusals
    )
    _run(kept, original, again, quiet)
    return original, again


def on_layers(steps: Sequence[Pass]) -> bool:
    """Is one of the steps for the layers of a neural network?"""
    from anesurgery.neuralnetwork.editing.layer_pass import LayerPass

    return any(isinstance(step, LayerPass) for step in steps)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of `apply`, and options for the steps of a recipe."""
    ours = {k: v for k, v in options.items() if k in OPTIONS}
    return ours, {k: v for k, v in options.items() if k not in OPTIONS}


def op_counts(program: Program) -> dict[str, int]:
    """Number of ops by type, constants left out, the most frequent first."""
    found: dict[str, int] = {}
    for op in walk_ops(program):
        if op.op_type != "const":
            found[op.op_type] = found.get(op.op_type, 0) + 1
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def check_interface(before: Interface, after: Interface, session: Session) -> None:
    """What goes in comes out, but for what was declared.

    Raises:
        InterfaceError: an undeclared difference, in words.
    """
    declared = {name for change in session.contract for name in change.names}
    if difference := before.difference(after, ignore=declared):
        raise InterfaceError(f"the interface changed without being declared: {difference}")


def _recipe(passes: Any) -> Recipe | None:
    if isinstance(passes, str) and passes in registry.recipe_names():
        return find_recipe(passes)
    return passes if isinstance(passes, Recipe) else None


def _nothing_applied(recipe: Recipe | None, misfit: Refusal, session: Session) -> str:
    assert recipe is not None
    reasons = refusal_lines([r for r in session.refusals if r[1] is not misfit])
    return "; ".join([f"{recipe.name} changed nothing: {misfit}", *reasons])


def _prove_model(
    model: Any, surgery: Surgery, inputs: Mapping[str, Array] | None, gate: float, seed: int
) -> Comparison:
    started = time.perf_counter()
    result = compare(
        model, surgery.program, inputs, precision="fp16", contract=surgery.contract, gate=gate, seed=seed
    )
    surgery.timings["prove model"] = time.perf_counter() - started
    if not result.ok:
        raise ProofError(f"the outputs are not shown to agree: {result.verdict}")
    return result


@dataclass(frozen=True)
class Recipe:
    """Steps for a family of models. Calling it on a model gives the changed model."""

    name: str
    steps: tuple[Pass, ...]
    applies_to: Callable[[Program], Refusal | None] = lambda program: None
    """Why the recipe is not for a program, or None."""
    psnr: float = 60.0
    """Promised PSNR in dB of the outputs against the unmodified model, in fp16 as stored."""

    def __post_init__(self) -> None:
        Pipeline(self.steps)  # checks the order once

    def with_options(self, **options: Any) -> Recipe:
        """The recipe with other options.

        Args:
            options: `<pass>=False` leaves a step out, True keeps it; `<pass>={"option": value}` sets options;
                a bare option name goes to the one step that has it (`multiple=32`).

        Raises:
            UnknownName: no step has that name or option.
        """
        steps = list(self.steps)
        for key, value in options.items():
            steps = self._with_option(steps, key, value)
        return dataclasses.replace(self, steps=tuple(steps))

    def _with_option(self, steps: list[Pass], key: str, value: Any) -> list[Pass]:
        names = [step.name for step in self.steps]
        if key in names and isinstance(value, bool):
            return [step for step in steps if value or step.name != key]
        if key in names and isinstance(value, dict):
            return [_set(step, value) if step.name == key else step for step in steps]
        owners = [step for step in steps if key in step.options()]
        if len(owners) != 1:
            known = [*names, *(option for step in steps for option in step.options())]
            raise UnknownName(f"option of {self.name}:", key, known)
        return [_set(step, {key: value}) if step is owners[0] else step for step in steps]

    def __call__(self, model: Any, **options: Any) -> Any:
        """Apply the recipe: path or MLModel in, MLModel out.

        Args:
            model: path of a package, MLModel, or MIL program.
            options: those of `anesurgery.apply` (`target`, `prove`, `quiet`), all others go to the steps.

        Raises:
            SurgeryError: nothing applied at all, or a promise was not kept.
        """
        ours, theirs = split_options(options)
        return apply(model, self.with_options(**theirs), **ours).model

    def pipeline(self, base: Any = None, **options: Any) -> Any:
        """A coremltools PassPipeline with the steps in it, for `ct.convert(pass_pipeline=...)`."""
        return pass_pipeline(self.with_options(**options).steps, base)

    def __str__(self) -> str:
        return "\n".join([f"{self.name}:", *(f"  {i}. {s}" for i, s in enumerate(self.steps, 1))])


def find_recipe(name: str) -> Recipe:
    """A recipe by name.

    Raises:
        UnknownName: no such recipe; near matches are listed.
    """
    found: Recipe = getattr(registry.recipe_module(name), name)
    return found


def _set(step: Pass, options: dict[str, Any]) -> Pass:
    registry.check_options(step.name, options, list(step.options()))
    return dataclasses.replace(step, **options)


def steps_of(passes: Any) -> Iterable[Pass]:
    """Passes from what a user may give: a name, a Pass, a Recipe, or a list of them."""
    if isinstance(passes, Recipe):
        yield from passes.steps
    elif isinstance(passes, Pass):
        yield passes
    elif isinstance(passes, str):
        if passes in registry.recipe_names():
            yield from find_recipe(passes).steps
        else:
            yield registry.make_pass(passes)
    elif isinstance(passes, type) and issubclass(passes, Pass):
        yield passes()
    else:
        for step in passes:
            yield from steps_of(step)
