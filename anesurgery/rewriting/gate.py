"""The gate of a recipe: of its steps, the set that makes a model fastest on its target; others are reported.

What the caller asked for by name is done all the same, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from anesurgery.errors import LoadError, Refusal, SurgeryError, warn
from anesurgery.placement.standing import Standing
from anesurgery.placement.target import Target
from anesurgery.rewriting.passes import Pass, run_on
from anesurgery.rewriting.search import overruled
from anesurgery.rewriting.session import Session
from anesurgery.rewriting.subject import Subject


@dataclass
class Passed:
    """What the gate of a recipe says of its steps."""

    steps: list[Pass]
    """Those that stay."""
    refusals: list[tuple[str, Refusal]] = field(default_factory=list)
    """The name of each other one, and why it does not."""
    warnings: list[str] = field(default_factory=list)
    """What is lost by steps that stay since they were asked for by name."""
    notes: list[str] = field(default_factory=list)
    """What stays although the estimate speaks against it, with the measurement; what grows, and for what."""

    def warn(self, session: Session) -> None:
        """Say so to the caller, and in the notes."""
        session.notes += [*self.notes, *self.warnings]
        for words in self.warnings:
            warn(words)


def passing(
    steps: Sequence[Pass],
    start: Standing | None,
    again: Callable[[], Subject],
    after: Subject,
    session: Session,
    asked: Collection[str] = (),
) -> Passed:
    """The steps of a recipe that pass its gate, and why the others do not.

    Each that edits is run on a copy and left out if something is lost by it: an op that was legal on the ANE,
    time, or size without a clear gain in time. Then each of those that stay and made something larger is left
    out once, as long as trials last, since a later step may do without it; and each that was left out, or did
    nothing, is tried once more after the others. Without a target there is no time, and legality counts, and
    the share of the flop on all chips at once.

    Args:
        steps: of the recipe.
        start: how the model stood before the first step; None where that is not estimated.
        again: makes the model anew, as it was before the first step.
        after: the model after the last one.
        session: in which they were run.
        asked: names of the steps that the caller asked for.

    Raises:
        LoadError: `again` gives another model: the file was changed since.
        SurgeryError: it was a neural network, and less of it could run on the ANE as an ML Program.
    """
    if start is not None and (words := after.worse_than_layers(session.target or "any")):
        raise SurgeryError(words)
    edited = {change.pass_name for change in session.changes}
    editing = [step for step in steps if edited & {step.name, *(part.name for part in step.parts())}]
    end = standing(after, session.target) if start is not None and editing else None
    if start is None or end is None:
        return Passed(list(steps))
    if not _loss(start, end, session.target) and (len(editing) == 1 or session.target is None):
        return Passed(list(steps), notes=end.paid(start))
    return Gate(steps, editing, session, asked).passed(again(), start, end)


def _loss(start: Standing, end: Standing, target: str | None) -> str:
    """Without a chip there is no time: then the rules of all chips, and the flop, are all that counts."""
    return end.loss(start) if target else end.leaves(start)


def standing(model: Subject, target: str | None) -> Standing | None:
    """How a model stands on a target, or on all chips at once."""
    return model.standing(target or "any")


@dataclass(frozen=True)
class At:
    """A model, how it stands, and the steps that led there from each model before it."""

    model: Subject
    standing: Standing
    steps: tuple[Pass, ...] = ()
    path: tuple[At, ...] = ()


@dataclass
class Gate:
    """The steps of one recipe, judged: what is run here is run on copies, without proofs."""

    recipe: Sequence[Pass]
    editing: Sequence[Pass]
    """Those that edited the model when all were run."""
    session: Session
    asked: Collection[str]
    losses: dict[str, str] = field(default_factory=dict)
    """What speaks against each step that is left out, by name."""
    said: Passed = field(default_factory=lambda: Passed([]))
    trials: int = 0
    """Steps that may still be run to see whether another is of use."""

    def passed(self, model: Subject, given: Standing, whole: Standing) -> Passed:
        """The steps that stay, and what is said of all.

        Args:
            model: as it was before the first step.
            given: how it stood.
            whole: how it stands after all steps.
        """
        if standing(model, self.session.target) != given:
            raise LoadError(f"{model.source} was changed while the recipe was applied; run it again")
        self.trials = len(self.editing) + 8
        start = At(model, given)
        end = self.greedy(start)
        if self.losses and not whole.loss(given) and whole.gain(end.standing):
            end, self.losses = self.all_of(start, self.editing) or end, {}
        end = self.later(self.pruned(end) if self.session.target else end)
        self.said.notes += end.standing.paid(given)
        if not self.losses and end.steps == tuple(self.editing):
            self.said.steps = list(self.recipe)
            return self.said
        self.said.steps = list(end.steps)
        self.said.refusals = [
            (name, Refusal(f"undone: {loss}; ask for it by name to have it"))
            for name, loss in self.losses.items()
        ]
        ran = {part.name for step in end.steps for part in (step, *step.parts())} | set(self.losses)
        self.said.refusals += [refused for refused in self.session.refusals if refused[0] not in ran]
        return self.said

    def greedy(self, start: At) -> At:
        """Each step in turn, if it loses nothing."""
        end = start
        for step in self.editing:
            if (trial := self.after(end, step)) is None:
                continue
            if loss := self.held_against(step, end, trial):
                self.losses[step.name] = loss
            else:
                end = trial
        return end

    def held_against(self, step: Pass, old: At, new: At) -> str:
        """Why a step is left out; "" where it stays, which is said where the estimate speaks against it."""
        loss = "" if step.essential else _loss(old.standing, new.standing, self.session.target)
        if loss and (known := self.measured(step, old.model)) and not new.standing.leaves(old.standing):
            self.said.notes.append(f"{step.name}: {overruled(known, loss)}")
            return ""
        if loss and step.name in self.asked:
            self.said.warnings.append(f"{step.name} was asked for, and is kept although {loss}")
            return ""
        return loss

    def measured(self, step: Pass, model: Subject) -> str:
        """A gain by it that was measured on the target; "" for none."""
        if self.session.target is None:
            return ""
        target = Target.parse(self.session.target)
        return next(filter(None, (step.known_gain(graph, target) for graph in model.chosen)), "")

    def pruned(self, end: At) -> At:
        """Without the steps that later ones made useless: the model stands better, or is smaller, without them.

        Only a step by which something grew can be in the way of others.
        """
        path = (*end.path, end)
        grew = [step for i, step in enumerate(end.steps[:-1]) if path[i + 1].standing.growth(path[i].standing)]
        for step in grew:
            bound = step.essential or step.name in self.asked or bool(self.measured(step, end.path[0].model))
            place = end.steps.index(step)
            other = None if bound else self.all_of(end.path[place], end.steps[place + 1 :])
            if other is None or other.standing.loss(end.standing):
                continue
            if better := other.standing.gain(end.standing) or other.standing.smaller(end.standing):
                self.losses[step.name] = f"the steps after it do as well without it ({better})"
                end = other
        return end

    def later(self, end: At) -> At:
        """With those steps that pay after the others: left out before, or without effect on what was left."""
        if not self.losses:
            return end
        for step in self.recipe:
            if step in end.steps or self.losses.get(step.name, "").startswith("the steps after"):
                continue
            trial = self.after(end, step)
            loss = trial is not None and self.held_against(step, end, trial)
            gains = self.session.target is None or (trial is not None and trial.standing.gain(end.standing))
            if trial is not None and not loss and gains:
                end = trial
                self.losses.pop(step.name, None)
        return end

    def all_of(self, start: At, steps: Sequence[Pass]) -> At | None:
        """After some steps; None where the trials do not last."""
        if len(steps) > self.trials:
            return None
        self.trials -= len(steps)
        for step in steps:
            start = self.after(start, step) or start
        return start

    def after(self, old: At, step: Pass) -> At | None:
        """The model after one more step, which is run on a copy; None where it changes nothing or fails."""
        trial, own = old.model.clone(), self.session.again(prove_sites=False)
        try:
            run_on(step, trial, own)
        except SurgeryError as error:
            self.losses[step.name] = f"on what the steps before it left, it failed: {error}"
            return None
        stands = standing(trial, self.session.target) if own.changes else None
        if stands is None:
            return None
        return At(trial, stands, (*old.steps, step), (*old.path, old))
