"""Apply passes or a recipe to a model, check the result, and save it: `apply` and `Surgery`."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from anesurgery import registry
from anesurgery.checking.comparison import Comparison
from anesurgery.compressing.chunks import read_subject
from anesurgery.display import drawn
from anesurgery.doors import check_fields, door
from anesurgery.errors import ProofError, Refusal, SurgeryError, UnknownName, Unsuited, warn
from anesurgery.files import progress
from anesurgery.files.interface import Interface
from anesurgery.files.interface_change import call_of
from anesurgery.files.writing import check_place
from anesurgery.mil import Program, exclusive
from anesurgery.network_editing.neural_network import NeuralNetwork
from anesurgery.placement.durations import Change, Time, change
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.standing import Standing
from anesurgery.placement.target import Target
from anesurgery.rewriting.exact_steps import Judged, exact_steps, yardstick
from anesurgery.rewriting.gate import Watch, passing
from anesurgery.rewriting.host import pass_pipeline
from anesurgery.rewriting.order import in_order
from anesurgery.rewriting.passes import PROOFS, Pass, run_on, subject_of
from anesurgery.rewriting.reached_repairs import Repairs, repairs_of
from anesurgery.rewriting.recoding import KEEP, check_choice, is_lossy, recoding_notes
from anesurgery.rewriting.required import check_assumed, check_grades, check_interface, check_requirement
from anesurgery.rewriting.session import Report, Session, refusal_lines
from anesurgery.rewriting.subject import Comparing, Graph, Subject, kept_off

OPTIONS = ("member", "assume", "target", "prove", "require", "compressed", "inputs", "quiet", "seed")
"""Options of `apply`; every other option of a recipe's call goes to its steps."""


@dataclass(kw_only=True, repr=False)
class Surgery(Report):
    """The result of `apply`: the changed model, what was done to it, and the proof."""

    subject: Subject
    """The model after."""
    original: Subject | None
    """The model as given, where something needed it: a comparison of whole models, a caller's own."""
    steps: tuple[Pass, ...]
    """The passes, in the order in which they ran."""
    before: dict[str, int]
    """Number of ops (or layers) by type in the model as given."""
    after: dict[str, int]
    """The same of the changed model."""
    inspected: tuple[tuple[Inspection, ...], tuple[Inspection, ...]] = ((), ())
    """The inspections before and after; of neural networks alone, which cost next to nothing."""
    times: tuple[Time | None, Time | None] = (None, None)
    """The estimated times before and after."""
    stands: tuple[Standing | None, Standing | None] = (None, None)
    """How the model stood and stands on the target, or on all chips; None where nobody asked or knows."""
    proof: Comparison | None = None
    """The comparison of whole models, when it was asked for."""

    @property
    def program(self) -> Program:
        """The changed model as a MIL program.

        Raises:
            LoadError: it is a neural network, and no program can be made of it.
        """
        return self.subject.program

    @property
    def time(self) -> Change | None:
        """The estimated times before and after, and the band of their ratio; None where a side has none."""
        before, after = self.times
        return None if before is None or after is None else change(before, after)

    @property
    def details(self) -> str:
        """The report with what each grade rests on, and the steps that found nothing to change."""
        return str(drawn(self, "details"))

    @cached_property
    def model(self) -> Any:
        """The changed model as a coremltools MLModel, in a temporary package where its format asks for one."""
        return self.subject.mlmodel()

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the model atomically, and the artifacts beside it.

        Raises:
            LoadError: the path, or that of an artifact, exists, is the input or in it, has another suffix, or
                cannot be written.
        """
        target = Path(path).expanduser().absolute()
        for place in self.artifact_places(target):
            check_place(place, overwrite, self.subject.source)
        self.subject.save(target, overwrite=overwrite, edited=bool(self.changes))
        self.save_artifacts(target, overwrite=overwrite)
        return target


@door("inputs", "target", "seed")
@exclusive
def apply(
    model: Any,
    passes: Any,
    *,
    target: str | None = None,
    member: str | int | None = None,
    assume: Mapping[str, tuple[int, int]] | None = None,
    prove: str | None = "sites",
    require: str | None = None,
    compressed: str = "keep",
    inputs: Any = None,
    quiet: bool = False,
    seed: int = 0,
) -> Surgery:
    """Apply passes to a model; the model given is not changed.

    Args:
        model: path of a package, .mlmodel or folder of chunks, MLModel, MIL Program or chain, whose chunks are
            edited one after the other; passes over layers need a neural network.
        passes: a name of a pass or recipe, a Pass, a Recipe, or a list of these. In a list, the steps of
            a recipe are judged as they are alone, and the passes beside it are asked for by name.
        target: chip and OS ("M1/macOS 14"): steps of a recipe take the options that suit it, and one that
            loses something there is undone; what was asked for by name is done, with a warning (SurgeryWarning)
            that says what it loses there. Every chip by default.
        member: of a pipeline, the one model to edit, by name or number; each by default.
        assume: least and largest value of integer inputs, {"input_ids": (0, 50256)}, that passes may rely on.
        prove: "sites" compares both sides of every edit and gives the best grade that it reaches; "model"
            compares whole models in the arithmetic as stored (fp16); "both", as
            `compare(prove=True)` does too; or None.
        require: the grade that every edit must reach: "checked", "exhaustive", "proved" or "bits".
        compressed: "keep" refuses edits that compute with the values of compressed weights, "decode" stores
            plain numbers, "reencode" encodes them in the form they had; the notes state the error.
        inputs: arrays by input name, for the comparison of whole models, sampled by default; or a list of such,
            which passes that calibrate take, and of which the first is compared by.
        quiet: no progress bar (it vanishes by itself when the output is not a terminal).
        seed: of all random numbers.

    Returns:
        The `Surgery`: the changed `model` and `program`, `changes` with the check of each, `refusals` with
        their reasons, notes, and estimated times in milliseconds where a target is named. Its `save` writes the
        package.

    Raises:
        LoadError: the model cannot be read.
        UnknownName: no such pass or recipe.
        PassError: a pass raised or left an invalid model; its `surgery` holds the edits before it, if it can.
        ProofError: the numbers after are outside what was promised, or an edit has a lower grade than required;
            likewise.
        SurgeryError: a recipe is not for this model, and is strict or changed nothing.
    """
    _check_options(target, prove, require, compressed)
    recipe = _recipe(passes)
    steps = in_order(tuple(steps_of(passes if recipe is None else recipe.aimed_at(target))))
    started = time.perf_counter()
    subject = read_subject(model, subject_of(steps)).only(member)
    stays = prove in ("model", "both") or subject.must_stay or compressed != KEEP
    original, edited = (subject, subject.clone()) if stays else (None, subject)
    start = _Start.of(subject, original, recipe, target)
    check_assumed(assume or {}, edited.chosen)
    session = Session(target=target, prove_sites=prove in ("sites", "both"), seed=seed, assume=assume or {})
    session.inputs, session.named = _listed(inputs), _named(passes)
    session.images, session.wired, session.compressed = start.interface.images, edited.wired, compressed
    session.timings["load"] = time.perf_counter() - started
    misfits = _misfits(recipe, edited, session)
    reached, steps = _led(None if misfits else recipe, edited, session, steps)
    try:
        _run(steps, edited, session, quiet, start.watch)
    except SurgeryError as error:
        _rescue(error, start, edited, steps, session)
        raise
    end, worse = None, ""
    if recipe is not None and (session.changes or not misfits):
        edited, session, end = _gated(model, start, edited, steps, session, recipe, reached)
        worse = edited.worse_than_layers(target or "any")
    if recipe is not None and worse:
        original = edited = NeuralNetwork.read(model)
        start, end, session = _Start.of(edited, edited, None, target), None, session.again()
        session.refusals.append((recipe.name, Refusal(f"the neural network stays as it is: {worse}")))
    if misfits and not session.changes:
        raise SurgeryError(_nothing_applied(recipe, misfits, session))
    if recipe is None and session.changes:
        end = _warned_of_loss(start.standing, edited, session)
    check_interface(start.interface, edited.interface, session)
    surgery = _surgery(start, edited, steps, session, end)
    check_grades(surgery.changes, require)
    if original is not None and ((lossy := is_lossy(session.recoded)) or prove in ("model", "both")):
        gate = -math.inf if lossy else 60.0 if recipe is None else recipe.psnr
        how = {"gate": gate, "prove": prove == "both" and not lossy, "assume": session.assume, "seed": seed}
        _prove_model(original, surgery, session, quiet, **how)
    return surgery


def _check_options(target: str | None, prove: str | None, require: str | None, compressed: str) -> None:
    """Raise the error of the first option that `apply` does not take."""
    if prove not in PROOFS:
        raise SurgeryError(f"prove={prove!r}; it may be {', '.join(map(repr, PROOFS))}")
    Target.parse(target)
    check_requirement(require, prove)
    check_choice(compressed)


def _listed(inputs: Any) -> Any:
    """Several samples as a list; what else is given as it is.

    Raises:
        SurgeryError: there is none among them.
    """
    if isinstance(inputs, Mapping) or not isinstance(inputs, Iterable):
        return inputs
    samples = list(inputs)
    if not samples:
        raise SurgeryError("inputs has no sample; give a dictionary of arrays by input name, or a list of such")
    return samples


@dataclass(frozen=True)
class _Start:
    """What is known of a model before its edits; the model itself where something needs it."""

    model: Subject | None
    interface: Interface
    op_counts: dict[str, int]
    inspected: tuple[Inspection, ...]
    watch: Watch | None
    """Of what a recipe is applied to."""
    standing: Standing | None
    """None without a target, and where it is not estimated."""
    time: Time | None

    @classmethod
    def of(
        cls, subject: Subject, original: Subject | None, recipe: Recipe | None, target: str | None
    ) -> _Start:
        watch = None if recipe is None else Watch.of(subject, target)
        stands = watch.start if watch else subject.standing(target) if target else None
        time = subject.time(target) if stands is None else stands.time
        return cls(original, subject.interface, subject.op_counts, subject.inspect(target), watch, stands, time)


def _led(
    recipe: Recipe | None, edited: Subject, session: Session, steps: list[Pass]
) -> tuple[list[Repairs], list[Pass]]:
    """The repairs of a recipe that inputs reach, and its steps after them, but for those of the same name."""
    reached = [] if recipe is None else list(repairs_of(recipe.repairs, edited, session))
    first = {step.name: step for one in reached for step in one.steps}
    return reached, in_order((*first.values(), *(step for step in steps if step.name not in first)))


def _run(
    steps: Sequence[Pass], edited: Subject, session: Session, quiet: bool, watch: Watch | None = None
) -> None:
    for k, step in enumerate(
        bar := tqdm(steps, unit=" passes", disable=True if quiet else None, leave=False), 1
    ):
        bar.set_description(step.name)
        progress.step(f"{step.name}, {k} of {len(steps)}")
        edited.check_source()
        run_on(step, edited, session)
        if watch is not None:
            watch.see(step, edited, session)
    edited.finish()


def _rescue(
    error: SurgeryError, start: _Start, edited: Subject, steps: Sequence[Pass], session: Session
) -> None:
    """Let an error carry the edits before it, if the place where it was raised was left as it was."""
    if not error.undone or not session.changes or session.dropped_inputs:
        return
    with suppress(Exception):  # then the model is not whole, and the error says enough
        edited.finish()
        for graph in edited.graphs:
            edited.validate(graph)
        check_interface(start.interface, edited.interface, session)
        error.surgery = _surgery(start, edited, steps, session)
        error.args = (f"{error}; the error's `surgery` holds the {len(session.changes)} edits made before it",)


def _gated(
    model: Any,
    start: _Start,
    edited: Subject,
    steps: Sequence[Pass],
    session: Session,
    recipe: Recipe,
    reached: Sequence[Repairs],
) -> tuple[Subject, Session, Standing | None]:
    """The model after the steps that pass the gate, made anew if some do not, and how it stands."""

    def again() -> Subject:
        if start.model is not None:
            return start.model.clone()
        edited.check_source()
        return read_subject(model, subject_of(steps)).only(edited.member)

    assert start.watch is not None
    wanted = {step.name: one.needed for one in reached for step in one.steps}
    wanted |= dict.fromkeys(recipe.chosen, "was asked for")
    passed = passing(steps, start.watch, again, edited, session, wanted)
    if passed.steps != list(steps):
        session = session.again()
        session.refusals += passed.refusals
        edited = again()
        _run(passed.steps, edited, session, quiet=True)
    said = len(session.notes)
    judged = _judged(passed.steps, again, edited, session) if recipe.exact else None
    if judged is not None and list(judged.steps) != list(passed.steps):
        notes, session = session.notes[said:], session.again()
        session.notes += notes
        words = "undone: {}; apply it by itself to have it"
        losses = [(name, Refusal(words.format(loss))) for name, loss in judged.losses.items()]
        session.refusals += [*passed.refusals, *losses]
        edited = again()
        _run(judged.steps, edited, session, quiet=True)
        passed.end = edited.standing(session.target or "any")
    passed.warn(session)
    session.notes += map(str, reached)
    session.wrong = "; ".join(filter(None, (one.headline(session.changes) for one in reached)))
    session.repairs += [step for one in reached for step in one.steps]
    session.refusals = [(name, r) for name, r in session.refusals if not r.idle or name in recipe.chosen]
    return edited, session, passed.end


def _judged(
    steps: Sequence[Pass], again: Callable[[], Subject], edited: Subject, session: Session
) -> Judged | None:
    """The steps after which a program is as exact as before them; None where that cannot be told."""
    if not session.changes or [type(graph) for graph in edited.graphs] != [Program]:
        return None
    (after,), (before,) = edited.chosen, again().chosen
    measured = yardstick(before, session)
    return exact_steps(steps, lambda: again().chosen[0], (after, session), measured)


def _warned_of_loss(before: Standing | None, edited: Subject, session: Session) -> Standing | None:
    """How a model stands now. What is asked for by name is done; what is lost by it on the target is said.

    Where one call became several, their time says nothing of the one.
    """
    if before is None or call_of(session.contract) is not None:
        return None
    after = edited.standing(session.target or "any")
    if after is not None and (loss := after.loss(before)):
        names = ", ".join(dict.fromkeys(change.pass_name for change in session.changes))
        words = f"{names}: asked for, and done although {loss}"
        session.notes.append(words)
        warn(words)
    return after


def _surgery(
    start: _Start, edited: Subject, steps: Sequence[Pass], session: Session, end: Standing | None = None
) -> Surgery:
    """What was done, with what the caller should know of it.

    Args:
        start: the model before.
        edited: the model after.
        steps: that ran.
        session: in which they ran.
        end: how it stands after them, where that is known already.
    """
    for words in session.alarms:
        warn(words)
    after = None if start.time is None else edited.time(session.target) if end is None else end.time
    inspected = (start.inspected, edited.inspect(session.target))
    recoded = recoding_notes(session.recoded, session.compressed)
    used = {change.pass_name for change in session.changes}
    parts = [part for step in steps for part in step.parts()]
    caveats = [f"{part.name}: {part.caveat}" for part in parts if part.caveat and part.name in used]
    return Surgery(
        **{f.name: getattr(session, f.name) for f in dataclasses.fields(Report) if f.name != "notes"},
        subject=edited,
        original=start.model,
        steps=tuple(steps),
        before=start.op_counts,
        after=edited.op_counts,
        inspected=inspected,
        times=(start.time, after),
        stands=(start.standing, end),
        notes=[*edited.notes(start.model or edited), *kept_off(*inspected), *session.notes, *recoded, *caveats],
    )


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of `apply`, and options for the steps of a recipe."""
    ours = {k: v for k, v in options.items() if k in OPTIONS}
    return ours, {k: v for k, v in options.items() if k not in OPTIONS}


def _recipe(passes: Any) -> Recipe | None:
    """The recipe whose steps are judged; of a list with recipes, all of these, and the passes asked for."""
    if isinstance(passes, str) and passes in registry.recipe_names():
        return find_recipe(passes)
    if isinstance(passes, (str, Pass, Recipe, type)) or not isinstance(passes, Iterable):
        return passes if isinstance(passes, Recipe) else None
    held = [(one, _recipe(one)) for one in passes]
    recipes = [recipe for _, recipe in held if recipe is not None]
    named = [step for one, recipe in held if recipe is None for step in steps_of(one)]
    return _joined(recipes, named) if recipes else None


def _named(passes: Any) -> frozenset[str]:
    """The names of the passes that the caller asked for, beside recipes or alone."""
    if _recipe(passes) is None:
        return frozenset(part.name for step in steps_of(passes) for part in (step, *step.parts()))
    several = () if isinstance(passes, (str, Pass, Recipe, type)) else passes
    return frozenset().union(*map(_named, several))


def _joined(recipes: Sequence[Recipe], named: Sequence[Pass]) -> Recipe:
    """Several recipes and passes as one: what is named takes the place of the same step of a recipe."""
    names = {part.name for step in named for part in (step, *step.parts())}
    steps = [step for recipe in recipes for step in recipe.steps if step.name not in names]
    return Recipe(
        name=" and ".join([*(recipe.name for recipe in recipes), *(step.name for step in named)]),
        steps=(*dict.fromkeys(steps), *named),
        applies_to=lambda graph: next((r for one in recipes if (r := one.applies_to(graph)) is not None), None),
        psnr=min(recipe.psnr for recipe in recipes),
        strict=any(recipe.strict for recipe in recipes),
        chosen=frozenset(names).union(*(recipe.chosen for recipe in recipes)),
        exact=any(recipe.exact for recipe in recipes),
        repairs=tuple(dict.fromkeys(step for recipe in recipes for step in recipe.repairs)),
    )


def _misfits(recipe: Recipe | None, model: Subject, session: Session) -> list[Refusal]:
    """Why a recipe is not for a model, which is noted.

    Raises:
        Unsuited: it is not, and it is strict.
    """
    if recipe is None:
        return []
    reasons = [r for graph in model.chosen if (r := recipe.applies_to(graph)) is not None]
    if reasons and recipe.strict:
        raise Unsuited(f"{recipe.name} is not for this model: {reasons[0]}")
    session.refusals += [(recipe.name, r) for r in reasons]
    return reasons


def _nothing_applied(recipe: Recipe | None, misfits: Sequence[Refusal], session: Session) -> str:
    reasons = refusal_lines([r for r in session.refusals if r[1] not in misfits])
    return "; ".join([f"{recipe and recipe.name} changed nothing: {misfits[0]}", *reasons])


def _prove_model(original: Subject, surgery: Surgery, session: Session, quiet: bool, **how: Any) -> None:
    """Compare the models as a whole; the worst comparison is the proof. A gate of minus infinity only measures.

    Raises:
        ProofError: the outputs differ by more than promised.
    """
    started = time.perf_counter()
    inputs = session.inputs[0] if isinstance(session.inputs, list) else session.inputs
    used, gate = {change.pass_name for change in surgery.changes}, how["gate"]
    exact = gate > -math.inf and all(
        part.tolerance.rtol == 0 for step in surgery.steps for part in step.parts() if part.name in used
    )
    how["assume"] = {n: ends for c in surgery.changes for n, ends in c.assumes.items()} | dict(how["assume"])
    comparing = Comparing(surgery.contract, exact=exact, **how)
    with tqdm(total=1, desc="comparing", bar_format="{desc}", disable=quiet or None, leave=False):
        results = surgery.subject.compare(original, inputs, comparing)
        if not all(r.ok for r in results if isinstance(r, Comparison)):
            again = partial(surgery.subject.compare, inputs=inputs, how=comparing)
            results = _beside_repairs(original, surgery, session, again, results)
    surgery.notes += [f"not compared as a whole: {r}" for r in results if isinstance(r, Refusal)]
    compared = [r for r in results if isinstance(r, Comparison)]
    for result in (r for r in compared if not r.ok):
        raise ProofError(f"the outputs are not shown to agree: {result.verdict}")
    surgery.notes += [result.instead for result in compared if result.instead]
    surgery.proof = min(compared, key=lambda r: r.psnr, default=None)
    if gate == -math.inf and surgery.proof is not None:
        surgery.notes.append(f"outputs with the weights stored anew: {surgery.proof.psnr:.1f} dB")
    surgery.timings["prove model"] = time.perf_counter() - started


def _beside_repairs(
    original: Subject,
    surgery: Surgery,
    session: Session,
    compared: Callable[[Subject], Sequence[Comparison | Refusal]],
    results: Sequence[Comparison | Refusal],
) -> Sequence[Comparison | Refusal]:
    """What else was done, compared with the model after the steps alone that repair numbers.

    Those are checked at each site, and a note says on which inputs the model before them is told apart.

    Args:
        original: the model before.
        surgery: what was done.
        session: in which it was done.
        compared: compares what was done with another model.
        results: of the comparison with the model before.

    Returns:
        The new results; `results` where an edit of the repairs was not checked at its site, where the repairs
        alone do not account for the failure, or where numbers that are finite on both sides differ on plain
        inputs too.
    """
    repairs = list(dict.fromkeys(session.repairs))
    names = list(dict.fromkeys(step.name for step in repairs))
    edits = [change for change in session.changes if change.pass_name in names]
    failures = [r for r in results if isinstance(r, Comparison) and not r.ok]
    if not edits or any(change.proof is None for change in edits):
        return results
    if any(row.psnr < failure.gate for failure in failures for row in failure.outputs):
        return results
    repaired = original.clone()
    try:
        _run(repairs, repaired, session.again(prove_sites=False), quiet=True)
        beside = compared(repaired)
    except SurgeryError:
        return results
    if not all(r.ok for r in beside if isinstance(r, Comparison)):
        return results
    words = f"the outputs agree but for what {', '.join(names)} repairs, which is checked at each site"
    surgery.notes += [f"{words}: {failure.verdict}" for failure in failures]
    return [_measured(was, now) for was, now in zip(results, beside, strict=True)]


def _measured(was: Comparison | Refusal, now: Comparison | Refusal) -> Comparison | Refusal:
    """A comparison beside the repairs, with the figures against the model before, where those are finite."""
    if (
        not isinstance(was, Comparison)
        or not isinstance(now, Comparison)
        or any(o.failure for o in was.outputs)
    ):
        return now
    return dataclasses.replace(was, proof=now.proof)


@dataclass(frozen=True)
class Recipe:
    """Steps for a family of models, sorted by what they declare. Calling it gives the changed model.

    Raises:
        SurgeryError: a field is not of its type, or the orders that two passes declare contradict each other.
    """

    name: str
    """By which reports know it; those of the library are found by it."""
    steps: tuple[Pass, ...]
    """The passes, which are sorted by what they declare."""
    applies_to: Callable[[Graph], Refusal | None] = lambda graph: None
    """Why the recipe is not for a graph (a MIL program, or a network of layers), or None."""
    psnr: float = 60.0
    """Promised PSNR in dB of the outputs against the unmodified model, in fp16 as stored."""
    strict: bool = False
    """Is a model that it is not for left as it is, and refused with an error?"""
    chosen: frozenset[str] = frozenset()
    """Names of the steps that the caller asked for, or whose options he chose; the gate does not undo these."""
    exact: bool = False
    """Is a step undone after which sampled inputs give outputs further from what the model means?"""
    repairs: tuple[Pass, ...] = ()
    """Of these, the fewest run first without which outputs are wrong on the inputs given or sampled."""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "steps", tuple(in_order(self.steps)))

    def with_options(self, **options: Any) -> Recipe:
        """The recipe with other options.

        Args:
            options: `<pass>=False` leaves a step or repair out, True keeps it; `<pass>={"option": value}` sets
                options; a bare option name goes to the one step that has it (`multiple=32`).

        Raises:
            UnknownName: no step has that name or option.
            SurgeryError: a step is given neither a boolean nor options.
        """
        steps, repairs = list(self.steps), list(self.repairs)
        for key, value in options.items():
            here, there = (key in (step.name for step in own) for own in (self.steps, self.repairs))
            there &= isinstance(value, (bool, dict))
            repairs = _changed(repairs, key, value) if there else repairs
            steps = self._with_option(steps, key, value) if here or not there else steps
        asked = {step.name for key in options for step in self.steps if key in (step.name, *step.options())}
        chosen = self.chosen | {step.name for step in steps if step not in self.steps} | asked
        return dataclasses.replace(self, steps=tuple(steps), chosen=chosen, repairs=tuple(repairs))

    def aimed_at(self, target: str | None) -> Recipe:
        """The recipe for a target: steps with their default options take those that suit it, or go.

        Args:
            target: chip and OS; what suits every chip by default.
        """
        aim = Target.parse(target)
        fixed = [step.name in self.chosen or str(step) != step.name for step in self.steps]
        pairs = zip(self.steps, fixed, strict=True)
        steps = [s for step, stays in pairs for s in ((step,) if stays else step.variants(aim))]
        return dataclasses.replace(self, steps=tuple(steps))

    def _with_option(self, steps: list[Pass], key: str, value: Any) -> list[Pass]:
        names = [step.name for step in self.steps]
        if key in names and isinstance(value, (bool, dict)):
            return _changed(steps, key, value)
        owners = [step for step in steps if key in step.options()]
        if len(owners) != 1:
            names += [step.name for step in self.repairs]
            if key in names:
                raise SurgeryError(f"{key}={value!r}; give True, False, or a dictionary of its options")
            names_and_options = [*names, *(option for step in steps for option in step.options())]
            raise UnknownName(f"option of {self.name}:", key, names_and_options)
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

    def pipeline(self, base: Any = None, *, target: str | None = None, **options: Any) -> Any:
        """A coremltools PassPipeline with the steps in it, for `ct.convert(pass_pipeline=...)`; no gate.

        Its `report` tells afterwards what the steps did, what they refused and what callers must change, and
        `report.save_artifacts(package)` writes the arrays that left the model beside its package.
        """
        return pass_pipeline(self.with_options(**options).aimed_at(target).steps, base)

    def __str__(self) -> str:
        lines = [f"{self.name}:", *(f"  {i}. {s}" for i, s in enumerate(self.steps, 1))]
        if self.repairs:
            lines.append(f"  first, where outputs are wrong without: {', '.join(s.name for s in self.repairs)}")
        return "\n".join(lines)


def find_recipe(name: str) -> Recipe:
    """A recipe by name.

    Raises:
        UnknownName: no such recipe; near matches are listed.
    """
    return getattr(registry.recipe_module(name), name)


def _changed(steps: Iterable[Pass], name: str, value: bool | dict[str, Any]) -> list[Pass]:
    """Steps of which one is left out, stays, or has other options."""
    if isinstance(value, bool):
        return [step for step in steps if value or step.name != name]
    return [_set(step, value) if step.name == name else step for step in steps]


def _set(step: Pass, options: dict[str, Any]) -> Pass:
    registry.check_options(step.name, options, list(step.options()))
    return dataclasses.replace(step, **options)


def steps_of(passes: Any) -> Iterable[Pass]:
    """Passes from what a user may give: a name, a Pass, a Recipe, or a list of them."""
    if isinstance(passes, Recipe):
        yield from passes.steps
    elif isinstance(passes, Pass):
        yield passes
    elif isinstance(passes, str) and passes in registry.recipe_names():
        yield from find_recipe(passes).steps
    elif isinstance(passes, str) and passes in registry.pass_names():
        yield registry.make_pass(passes)
    elif isinstance(passes, type) and issubclass(passes, Pass):
        yield passes()
    elif isinstance(passes, Iterable) and not isinstance(passes, str):
        for step in passes:
            yield from steps_of(step)
    else:
        name = passes if isinstance(passes, str) else repr(passes)
        raise UnknownName("pass or recipe", name, [*registry.pass_names(), *registry.recipe_names()])
