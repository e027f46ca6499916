"""Apply passes or a recipe to a model, check the result, and save it: `apply` and `Surgery`."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from anesurgery import registry
from anesurgery.checking.comparison import Comparison
from anesurgery.display import drawn
from anesurgery.doors import check_fields, door
from anesurgery.errors import (
    IsPipeline,
    NotExpressible,
    ProofError,
    Refusal,
    SurgeryError,
    UnknownName,
    Unsuited,
    warn,
)
from anesurgery.files import progress
from anesurgery.files.interface import call_of
from anesurgery.files.writing import check_place
from anesurgery.interpret.sampling import check_seed
from anesurgery.mil import Program, exclusive
from anesurgery.network_editing.neural_network import NeuralNetwork
from anesurgery.placement.durations import Change, Time, change
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.score import Score
from anesurgery.placement.target import Target
from anesurgery.rewriting.both_formats import (
    CORE_ML,
    SINGLE_FORMATS,
    Both,
    check_both,
    check_format,
    in_format,
    write_beside,
)
from anesurgery.rewriting.checks import FLOP, WRONG, Outputs
from anesurgery.rewriting.choosing import ASKED, Chosen, Wish, choose, is_clearly_faster
from anesurgery.rewriting.edit_plan import Plan, Planned
from anesurgery.rewriting.host import pass_pipeline
from anesurgery.rewriting.ml_program import Comparing, Graph, Subject, layers_off_ane, read_subject
from anesurgery.rewriting.passes import PROOFS, Pass, in_order, run_on, subject_of
from anesurgery.rewriting.proving import (
    check_assumed,
    check_grades,
    check_inputs,
    check_interface,
    check_requirement,
    prove_model,
)
from anesurgery.rewriting.session import Report, Session, check_choice, is_lossy, recoding_notes
from anesurgery.rewriting.step_trials import Trial

OPTIONS = ("member", "assume", "target", "prove", "require", "compressed", "inputs", "gate", "quiet", "seed")
"""Options of `apply`; every other option of a recipe's call goes to its steps."""


@dataclass(kw_only=True, repr=False)
class Surgery(Report):
    """The result of `apply`: the changed model, its edits, and the proof."""

    subject: Subject
    """The model after."""
    original: Subject
    """The model as given."""
    plan: Plan
    """The steps in the order in which they ran, why each is there, and what was left out."""
    before: dict[str, int]
    """Number of ops (or layers) by type in the model as given."""
    after: dict[str, int]
    """Number of ops (or layers) by type in the changed model."""
    inspected: tuple[tuple[Inspection, ...], tuple[Inspection, ...]] = ((), ())
    """The inspections before and after. Only for neural networks, where inspecting is cheap."""
    times: tuple[Time | None, Time | None] = (None, None)
    """The estimated times before and after."""
    scores: tuple[Score | None, Score | None] = (None, None)
    """The scores before and after on the target, or on all chips; None where nobody asked or knows."""
    proof: Comparison | None = None
    """The comparison of whole models, when it was asked for."""

    @property
    def steps(self) -> tuple[Pass, ...]:
        """The passes, in the order in which they ran."""
        return self.plan.passes

    @property
    def program(self) -> Program:
        """The changed model as a MIL program.

        Raises:
            LoadError: it is a neural network, and no program can be made of it.
        """
        return self.subject.program

    def below(self, gate: float) -> bool:
        """Are outputs on the given inputs below a gate in dB?"""
        near = self.plan.outputs[1]
        return near is not None and min(near.values()) < gate

    @property
    def time(self) -> Change | None:
        """The estimated times before and after, and the band of their ratio. None if a side has no time."""
        before, after = self.times
        return None if before is None or after is None else change(before, after)

    @cached_property
    def placed(self) -> tuple[Inspection, Inspection] | None:
        """The inspections before and after on the target; None where no target was named."""
        if self.target is None:
            return None
        chip = Target.parse(self.target)
        before, after = self.original.advised_as_given(chip), self.subject.advised(chip)
        return Inspection.of_parts(before, chip), Inspection.of_parts(after, chip)

    @property
    def summary(self) -> str:
        """The edits and the gain, in one sentence."""
        return str(self.to_json()["summary"])

    @property
    def details(self) -> str:
        """The whole report: the basis of each grade, and the steps that found nothing to change."""
        return str(drawn(self, "details"))

    @cached_property
    def model(self) -> Any:
        """The changed model as a coremltools MLModel, in a temporary package where its format asks for one."""
        return self.subject.mlmodel()

    @exclusive()
    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the model atomically, and the artifacts beside it.

        Args:
            path: ends in .mlpackage, in .mlmodel for the layers of a network, or in .aimodel for Core AI.
            overwrite: may what is there be replaced?

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

    @exclusive()
    def save_both(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Both:
        """Write the model for Core ML, and for Core AI beside it, and compare the two.

        Args:
            path: of the Core ML model; that of the other has the suffix .aimodel in its place.
            overwrite: may what is there be replaced?

        Returns:
            Both places, how well the outputs agree, and what a Core AI model cannot hold.

        Raises:
            LoadError: as `save`; or Apple's package `coreai-core` is not installed.
            NotExpressible: Core AI lacks an op of the model.
            ProofError: the two do not agree; the Core ML model was written alone.
        """
        target = Path(path).expanduser().absolute()
        check_both(self.subject.source, target, overwrite, self.subject.suffix)
        return write_beside(self.save(target, overwrite=overwrite), overwrite=overwrite)


@door("inputs", "target", "seed", modules=True)
@exclusive()
def plan(
    model: Any,
    passes: Any,
    *,
    target: str | None = None,
    inputs: Any = None,
    member: str | int | None = None,
    assume: Mapping[str, tuple[int, int]] | None = None,
    compressed: str = "keep",
    gate: float = WRONG,
    seed: int = 0,
) -> Plan:
    """Show what `apply` would do to a model, and why. Nothing is edited or proved.

    Args:
        model: as `apply` takes it.
        passes: as `apply` takes it. Passes that you name are always in the plan.
        target: chip and OS; a recipe is judged on the newest chips by default.
        inputs: arrays by input name, or a list of these. Repairs that they do not need are left out.
        member: of a pipeline, the one model to edit.
        assume: least and largest value of integer inputs.
        compressed: as `apply` takes it.
        gate: outputs below this PSNR, in dB, count as wrong.
        seed: of all random numbers.

    Returns:
        The `Plan`: steps with options and reasons, what was left out, the expected times. `apply` takes it in
        the place of a recipe; `to_json` and `Plan.from_json` keep it.

    Raises:
        LoadError: the model cannot be read.
        UnknownName: no such pass or recipe.
        SurgeryError: an option does not fit, or a recipe is strict and not for this model.
    """
    options = {"target": target, "member": member, "assume": assume, "inputs": inputs, "gate": gate}
    return _chosen(model, passes, rescue=False, compressed=compressed, seed=seed, **options)[1].plan


@door("inputs", "target", "seed", modules=True)
@exclusive()
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
    gate: float = WRONG,
    quiet: bool = False,
    seed: int = 0,
) -> Surgery:
    """Apply passes to a model; the model given is not changed.

    Args:
        model: path of a package, .mlmodel or folder of chunks, MLModel, MIL Program or chain, whose chunks are
            edited one after the other; passes over layers need a neural network. A PyTorch module (with
            `inputs`) or exported program is converted first.
        passes: a name of a pass or recipe, a Pass, a Recipe, a `Plan`, or a list of passes and recipes. In a
            list, the steps of a recipe are judged as they are alone, and the passes beside it are asked for by
            name.
        target: chip and OS ("M1/macOS 14"): A recipe takes the options that suit the target, and undoes steps
            that lose something there. It must gain something on the target, by default on one of the newest
            chips, or the model stays as it is. Passes that you name are always run; a warning (SurgeryWarning)
            says what they lose.
        member: of a pipeline, the one model to edit, by name or number; each by default.
        assume: least and largest value of integer inputs, {"input_ids": (0, 50256)}, that passes may rely on.
        prove: "sites" compares both sides of every edit and gives the best grade that it reaches; "model"
            compares whole models in the arithmetic as stored (fp16); "both", as
            `compare(prove=True)` does too; or None.
        require: the grade that every edit must reach: "checked", "exhaustive", "proved" or "bits".
        compressed: if edits compute with compressed weights: "keep" (refuse), "decode" or "reencode" them.
            Decoded weights are plain numbers, others have the form they had; the notes state the error.
        inputs: arrays by input name, for comparing whole models and for choosing repairs; random by default. A
            list serves passes that calibrate, and its first element is compared.
        gate: the least PSNR in dB of the final outputs on `inputs`, against fp32. If they end below it, the
            first line of the report says so.
        quiet: no progress bar (it vanishes by itself when the output is not a terminal).
        seed: of all random numbers.

    Returns:
        The `Surgery`: the changed `model` and `program`, the `plan`, `changes` with the check of each,
        `refusals` with their reasons, notes, and estimated times in milliseconds if a target is named. Its
        `save` writes the package.

    Raises:
        LoadError: the model cannot be read.
        UnknownName: no such pass or recipe.
        PassError: a pass raised or left an invalid model; its `surgery` has the edits before it, if possible.
        ProofError: numbers are outside the promised tolerance, or an edit has a lower grade than required.
        SurgeryError: a recipe is not for this model, and is strict or changed nothing.
    """
    check_requirement(require, prove)
    options = {"target": target, "member": member, "assume": assume, "inputs": inputs, "gate": gate}
    options |= {"prove": prove, "compressed": compressed, "seed": seed, "quiet": quiet}
    job, chosen = _chosen(model, passes, rescue=True, **options)
    surgery, session = job.edited(chosen)
    return job.check(surgery, session, require)


def _chosen(model: Any, passes: Any, *, rescue: bool, **options: Any) -> tuple[_Job, Chosen]:
    """The job and its plan: for the layers of a network, or for its ML Program, whichever gains more.

    Args:
        model: as the caller gave it.
        passes: as `apply` takes them.
        rescue: as `_Job.chosen` takes it.
        options: of `_Job.of`.
    """
    recipe = _recipe(passes)
    on_layers = "" if recipe is None else recipe.on_layers
    program: tuple[_Job, Chosen] | SurgeryError
    try:
        job = _Job.of(model, passes, **options)
        program = (job, job.chosen(rescue=rescue))
    except (IsPipeline, NotExpressible) as error:
        if not on_layers:
            raise
        program = error
    if isinstance(program, tuple) and not (on_layers and job.given.was_network):
        return program
    try:
        job = _Job.of(model, on_layers, **options)
        layers = (job, job.chosen(rescue=rescue))
    except SurgeryError:
        if isinstance(program, SurgeryError):
            raise program from None
        return program
    return layers if isinstance(program, SurgeryError) or _stays_layers(program, layers[1]) else program


def _stays_layers(program: tuple[_Job, Chosen], layers: Chosen) -> bool:
    """Are edits of layers better than the ML Program of a network, which rounds values?

    They are if they gain something, unless the ML Program repairs wrong numbers or is clearly faster.
    """
    job, chosen = program
    if not layers.plan.steps or not chosen.plan.steps:
        return bool(layers.plan.steps)
    ends = [None if one.end is None else one.end.score_if_any for one in (chosen, layers)]
    faster = is_clearly_faster(*ends)
    if faster is None:
        faster = is_clearly_faster(ends[0], job.given.as_given(Target.parse(job.session.target)))
    return not (chosen.plan.wrong or faster)


def edit(given: Subject, steps: Sequence[Pass], session: Session, *, quiet: bool = True) -> Subject:
    """A copy of a model after some steps.

    Args:
        given: it is not changed.
        steps: in the order in which they run.
        session: is told of each change; says whether sites are proved.
        quiet: no progress bar.

    Raises:
        SurgeryError: a step failed, or a check of a site; what was edited before it stands in `error.edited`.
    """
    edited = given.clone()
    for k, step in enumerate(bar := tqdm(steps, unit=" passes", disable=quiet or None, leave=False), 1):
        bar.set_description(step.name)
        progress.step(f"{step.name}, {k} of {len(steps)}")
        edited.check_source()
        try:
            run_on(step, edited, session)
        except SurgeryError as error:
            error.step, error.edited = step, edited
            raise
    edited.finish()
    return edited


@dataclass
class _Job:
    """One call: the model as given, what is asked for, and how it is checked."""

    model: Any
    """The model as the caller gave it."""
    given: Subject
    wish: Wish
    recipe: Recipe | None
    """None where passes are asked for by name, or a plan is given."""
    session: Session
    """The session of the model; each edit has one of its own, which knows the same proofs."""
    prove: str | None
    gate: float
    quiet: bool
    plan: Plan | None = None
    """The plan as the caller gave it; None to choose one."""
    failure: SurgeryError | None = None
    """Why the steps of a recipe could not be chosen."""

    @classmethod
    def of(
        cls,
        model: Any,
        passes: Any,
        *,
        target: str | None,
        member: str | int | None,
        assume: Mapping[str, tuple[int, int]] | None,
        inputs: Any,
        gate: float,
        compressed: str,
        seed: int,
        prove: str | None = None,
        quiet: bool = True,
    ) -> _Job:
        """Read the model; raise the error of the first option that does not fit."""
        if prove not in PROOFS:
            raise SurgeryError(f"prove={prove!r}; it may be {', '.join(map(repr, PROOFS))}")
        if math.isnan(gate):
            raise SurgeryError("gate=nan; give a PSNR in dB")
        check_choice(compressed)
        check_seed(seed)
        made = passes if isinstance(passes, Plan) else None
        target = made.target if made is not None and target is None else target
        Target.parse(target)
        started = time.perf_counter()
        recipe, wish = _wished(passes, target)
        given = read_subject(model, subject_of(wish.steps)).only(member)
        check_assumed(assume or {}, given.chosen)
        session = Session(target=target, prove_sites=prove in ("sites", "both"), seed=seed, assume=assume or {})
        session.inputs, session.named = _listed(inputs), _named(passes)
        check_inputs(session.inputs, given)
        session.images, session.wired, session.compressed = given.interface.images, given.wired, compressed
        session.timings["load"] = time.perf_counter() - started
        return cls(model, given, wish, recipe, session, prove, gate, quiet, made)

    @cached_property
    def counted(self) -> dict[str, int]:
        """Number of ops by type, or of layers where the file holds a neural network."""
        return NeuralNetwork.read(self.model).op_counts if self.given.was_network else self.given.op_counts

    def chosen(self, *, rescue: bool = False) -> Chosen:
        """The plan for the model; see `_chosen`."""
        found = self._chosen(rescue)
        return replace(found, plan=replace(found.plan, ops=self.counted))

    def _chosen(self, rescue: bool) -> Chosen:
        """The plan: of a recipe what is chosen, of passes by name these.

        Args:
            rescue: where a step fails, the steps as they are, whose error then holds the edits before it.

        Raises:
            SurgeryError: a step of the recipe fails, or it is strict and not for the model.
        """
        if self.plan is not None:
            return Chosen(self.plan.held_for(self.counted, self.session.target))
        if self.recipe is None:
            return self._as_asked()
        misfits = [r for graph in self.given.chosen if (r := self.recipe.applies_to(graph)) is not None]
        is_unsuited = bool(misfits) and len(misfits) == len(self.given.chosen)
        if is_unsuited and self.recipe.strict:
            raise Unsuited(f"{self.recipe.name} is not for this model: {misfits[0]}")
        try:
            wish = replace(self.wish, repairs=()) if is_unsuited else self.wish
            chosen = choose(self.given, wish, self.session, self.gate)
        except SurgeryError as error:
            if not rescue:
                raise
            self.failure = error
            # the edits before it are those of the steps as they are
            return self._as_asked()
        if is_unsuited and not chosen.plan.steps:
            raise SurgeryError(f"{self.recipe.name} changed nothing: {misfits[0]}; auto is for any model")
        left = (*((self.recipe.name, why) for why in misfits), *chosen.plan.left_out)
        return replace(chosen, plan=replace(chosen.plan, left_out=left))

    def _as_asked(self) -> Chosen:
        """Return the plan of passes that were all asked for by name: there is nothing to choose."""
        steps = tuple(Planned(step, ASKED) for step in self.wish.steps)
        return Chosen(Plan(self.wish.name, self.session.target, steps))

    def edited(self, chosen: Chosen) -> tuple[Surgery, Session]:
        """The model after the steps of a plan, with the check of each edit.

        A step that nobody asked for goes where its check fails.

        Raises:
            SurgeryError: a step that was asked for failed, or its check.
        """
        while True:
            session = self.session.again()
            session.timings = dict(self.session.timings)
            try:
                edited = self._edit(chosen, session)
                if self.failure is not None:  # what could not be judged is not done
                    raise self.failure
                check_interface(self.given.interface, edited.interface, session)
                return self._surgery(chosen, edited, session), session
            except SurgeryError as error:
                failed = error.step
                if isinstance(error, ProofError) and failed in chosen.plan.searched:
                    chosen = replace(chosen, plan=chosen.plan.without(failed, str(error)), end=None)
                    continue
                self._rescue(chosen, session, error)
                raise

    def _edit(self, chosen: Chosen, session: Session) -> Subject:
        """What the search left, where no site is proved: the same steps led there."""
        end = chosen.end
        if session.prove_sites or end is None or end.model is None:
            if end is not None:
                end.release()
            return edit(self.given, chosen.plan.passes, session, quiet=self.quiet)
        for trial in end.path:
            session.absorb(trial.session)
        model = end.model if end.path else self.given.clone()
        model.finish()
        return model

    def _rescue(self, chosen: Chosen, session: Session, error: SurgeryError) -> None:
        """Let an error carry the edits before it, if the place where it was raised was left as it was."""
        edited = error.edited
        if not error.undone or edited is None or not session.changes or session.dropped_inputs:
            return
        with suppress(Exception):  # then the model is not whole, and the error says enough
            edited.finish()
            for graph in edited.graphs:
                edited.validate(graph)
            check_interface(self.given.interface, edited.interface, session)
            error.surgery = self._surgery(replace(chosen, end=None), edited, session)
            words = f"the error's `surgery` holds the {len(session.changes)} edits made before it"
            error.args = (f"{error}; {words}",)

    def _surgery(self, chosen: Chosen, edited: Subject, session: Session) -> Surgery:
        """What was done, with what the caller should know of it."""
        plan, target = self._measured(chosen, edited, session), Target.parse(self.session.target)
        idle = (self.recipe is not None or self.plan is not None) and not session.changes
        if idle and self.given.was_network:  # nothing was gained by making a program of it
            edited = self.given = NeuralNetwork.read(self.model)
        before, after = self._scores(chosen, edited, session, target)
        for words in (*session.alarms, *plan.warnings):
            warn(words)
        inspected = (self.given.inspect(session.target), edited.inspect(session.target))
        ours = [part for step in plan.passes for part in step.parts()]
        used = {change.pass_name for change in session.changes}
        caveats = [f"{part.name}: {part.caveat}" for part in ours if part.caveat and part.name in used]
        report = {f.name: getattr(session, f.name) for f in dataclasses.fields(Report)}
        report["refusals"] = [*plan.left_out, *(r for r in session.refusals if self._says(*r))]
        report["notes"] = [
            *edited.notes(self.given),
            *layers_off_ane(*inspected),
            *plan.notes,
            *plan.warnings,
            *session.notes,
            *recoding_notes(session.recoded, session.compressed),
            *caveats,
        ]
        report["wrong"] = plan.wrong
        return Surgery(
            **report,
            subject=edited,
            original=self.given,
            plan=plan,
            before=self.given.op_counts,
            after=edited.op_counts,
            inspected=inspected,
            times=(None if before is None else before.time, None if after is None else after.time),
            scores=(before, after),
        )

    def _measured(self, chosen: Chosen, edited: Subject, session: Session) -> Plan:
        """The plan with how near outputs are on the inputs given, where no trial led to this model.

        Of passes by name, which may calibrate with many inputs, on the first of them.
        """
        plan, samples = chosen.plan, session.samples
        if chosen.end is not None or not samples:
            return plan
        own = self.session.again()
        own.inputs = samples[:1] if self.recipe is None and self.plan is None else samples
        start = Trial(self.given, Target.parse(own.target), own)
        end = Trial(edited, start.target, session, plan.passes, start) if session.changes else start
        outputs = Outputs.of(start, own, self.gate, seeds=1, most_flop=FLOP)
        near = (outputs.near(start), outputs.near(end))
        return replace(plan, outputs=near, wrong=outputs.wrong_words(near[1]))

    def _says(self, name: str, refusal: Refusal) -> bool:
        """Does a report have a refusal? Recipes that run a pass for safety alone say nothing of idle ones."""
        return self.recipe is None or not refusal.idle or name in self.wish.asked

    def _scores(
        self, chosen: Chosen, edited: Subject, session: Session, target: Target
    ) -> tuple[Score | None, Score | None]:
        """The scores before and after on the target; None where nobody asked, or one call became several."""
        if self.session.target is None or call_of(session.contract) is not None:
            return None, None
        tried = chosen.start is not None and chosen.start.model is self.given and not self.given.was_network
        before = chosen.start.score_if_any if tried and chosen.start else self.given.as_given(target)
        if edited is self.given or before is None:
            return before, before
        after = edited.score(target) if chosen.end is None else chosen.end.score_if_any
        named = self.recipe is None and (self.plan is None or not chosen.plan.judged)
        if named and after is not None and session.changes and (loss := after.loss(before)):
            names = ", ".join(dict.fromkeys(change.pass_name for change in session.changes))
            why = "asked for" if self.plan is None else "in the plan"
            session.alarm(f"{names}: {why}, and done although {loss}")
        return before, after

    def check(self, surgery: Surgery, session: Session, require: str | None) -> Surgery:
        """See to the grades, and compare whole models where that was asked for, or weights were stored anew.

        Raises:
            ProofError: an edit has a lower grade than required, or the outputs differ by more than promised.
        """
        check_grades(surgery.changes, require)
        lossy = is_lossy(session.recoded)
        if not (lossy or self.prove in ("model", "both")):
            return surgery
        gate = -math.inf if lossy else 60.0 if self.recipe is None else self.recipe.psnr
        assume = {n: ends for c in surgery.changes for n, ends in c.assumes.items()} | dict(session.assume)
        used = {change.pass_name for change in surgery.changes}
        parts = [part for step in surgery.steps for part in step.parts() if part.name in used]
        exact = gate > -math.inf and all(part.tolerance.is_exact for part in parts)
        prove, started = self.prove == "both" and not lossy, time.perf_counter()
        how = Comparing(surgery.contract, gate, exact, prove, assume, session.seed)
        with tqdm(total=1, desc="comparing", bar_format="{desc}", disable=self.quiet or None, leave=False):
            surgery.proof, notes = prove_model(self.given, surgery.subject, session, how)
        surgery.notes += notes
        surgery.timings["prove model"] = time.perf_counter() - started
        return surgery


def _listed(inputs: Any) -> Any:
    """Several samples as a list, and one that is no dictionary too, which `check_inputs` refuses.

    Raises:
        SurgeryError: there is none among them.
    """
    if inputs is None or isinstance(inputs, Mapping):
        return inputs
    if isinstance(inputs, str) or not isinstance(inputs, Iterable):
        return [inputs]
    samples = list(inputs)
    if not samples:
        raise SurgeryError(
            "inputs has no sample; give a dictionary of arrays by input name, or a list of dictionaries"
        )
    return samples


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


def _wished(passes: Any, target: str | None) -> tuple[Recipe | None, Wish]:
    """The recipe whose steps are judged, if there is one, and what is asked for."""
    if isinstance(passes, Plan):
        return None, Wish(passes.recipe, passes.passes)
    recipe = _recipe(passes)
    if recipe is None:
        steps = tuple(in_order(tuple(steps_of(passes))))
        return None, Wish(", ".join(step.name for step in steps), steps, frozenset(s.name for s in steps))
    suited = recipe.for_target(target)
    return recipe, Wish(recipe.name, suited.steps, recipe.chosen, recipe.repairs, recipe.exact)


def _named(passes: Any) -> frozenset[str]:
    """The names of the passes that the caller asked for, beside recipes or alone."""
    if isinstance(passes, Plan):
        return frozenset()
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


@dataclass(frozen=True)
class Recipe:
    """Steps for a family of models, in the order that the passes declare. Calling it returns the changed model.

    Raises:
        SurgeryError: a field is not of its type, or the orders that two passes declare contradict each other.
    """

    name: str
    """The name in reports; recipes of the library are found by it."""
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
    """Repairs of which the fewest run first that make outputs right, on given or random inputs."""
    on_layers: str = ""
    """Name of the recipe for the layers of an `.mlmodel`, used unless its ML Program is clearly faster."""

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

    def for_target(self, target: str | None) -> Recipe:
        """The recipe for a target: steps with their default options take those that suit it, or go.

        Args:
            target: chip and OS; what suits every chip by default.
        """
        chip = Target.parse(target)
        fixed = [step.name in self.chosen or str(step) != step.name for step in self.steps]
        pairs = zip(self.steps, fixed, strict=True)
        steps = [s for step, stays in pairs for s in ((step,) if stays else step.variants(chip))]
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
            known = dict.fromkeys([*names, *(option for step in steps for option in step.options())])
            raise UnknownName(f"option of {self.name}:", key, list(known))
        return [_set(step, {key: value}) if step is owners[0] else step for step in steps]

    def __call__(self, model: Any, inputs: Any = None, *, format: str = CORE_ML, **options: Any) -> Any:
        """Apply the recipe: path or MLModel in, MLModel out. What was gained, and where, is said on stderr.

        Args:
            model: path of a package, MLModel, MIL program, or a PyTorch module with `inputs`.
            inputs: as `anesurgery.apply` takes them.
            format: "coreml", or "coreai" for a `CoreAI`, whose `save` writes an .aimodel.
            options: those of `anesurgery.apply` (`target`, `prove`, `quiet`), all others go to the steps.

        Raises:
            SurgeryError: nothing applied at all, or a promise was not kept.
            UnknownName: there is no such format; both are written by `Surgery.save_both`.
        """
        check_format(format, SINGLE_FORMATS)
        ours, theirs = split_options(options)
        surgery = apply(model, self.with_options(**theirs), inputs=inputs, **ours)
        if not ours.get("quiet"):
            print(f"{self.name}: {surgery.summary}", file=sys.stderr)
        return in_format(surgery.model, format)

    def pipeline(self, base: Any = None, *, target: str | None = None, **options: Any) -> Any:
        """A coremltools PassPipeline with the steps in it, for `ct.convert(pass_pipeline=...)`; no gate.

        Its `report` lists the edits, the refusals, and what callers must change.
        `report.save_artifacts(package)` writes arrays that left the model beside its package.
        """
        return pass_pipeline(self.with_options(**options).for_target(target).steps, base)

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
    elif isinstance(passes, Plan):
        yield from passes.passes
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
        raise UnknownName(
            "pass or recipe", name, [*registry.pass_names(), *registry.recipe_names()], "anesurgery list"
        )
