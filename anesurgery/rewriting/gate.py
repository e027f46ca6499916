"""The gate of a recipe: of its steps, the set that makes a model fastest on its target; others are reported.

What the caller asked for by name, or the inputs at hand need, is done all the same, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

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
    end: Standing | None = None
    """How the model stands after them; None where that is not known."""
    refusals: list[tuple[str, Refusal]] = field(default_factory=list)
    """The name of each other one, and why it does not."""
    warnings: list[str] = field(default_factory=list)
    """What is lost by steps that stay whatever they cost."""
    notes: list[str] = field(default_factory=list)
    """What stays although the estimate speaks against it, with the measurement; what grows, and for what."""

    def warn(self, session: Session) -> None:
        """Say so to the caller, and in the notes."""
        session.notes += [*self.notes, *self.warnings]
        for words in self.warnings:
            warn(words)


@dataclass(frozen=True)
class Way:
    """How a model stands after some steps, each of which changes it."""

    steps: tuple[Pass, ...]
    end: Standing
    before: Way | None = None
    """Without the last step, where that is known."""

    def and_then(self, step: Pass, after: Standing) -> Way:
        """One step further."""
        return Way((*self.steps, step), after, self)


@dataclass
class Watch:
    """How a model stands after each step of a recipe that changes it, while all are run one after the other.

    Without a chip there is no time, and only the end is looked at.
    """

    start: Standing | None
    """None where nothing of it is estimated."""
    target: str | None
    counts: dict[str, int]
    """Its ops by type."""
    stood: list[tuple[Pass, Standing]] = field(default_factory=list)
    edits: int = 0
    touched: dict[str, set[str]] = field(default_factory=dict)
    """By name of a step, the later ones that replaced something that it made."""
    makers: dict[str, str] = field(default_factory=dict)
    """By op, the step that made it."""

    @classmethod
    def of(cls, model: Subject, target: str | None) -> Watch:
        """Before the first step."""
        return cls(standing(model, target), target, model.op_counts)

    def see(self, step: Pass, model: Subject, session: Session) -> None:
        """After a step; what was not changed stands as before."""
        edits, self.edits = self.edits, len(session.changes)
        if self.start is not None and edits < self.edits:
            after = standing(model, self.target) if self.target else self.start
            self.stood += [] if after is None else [(step, after)]
            for change in session.changes[edits:]:
                for maker in {self.makers.get(op, step.name) for op in change.before} - {step.name}:
                    self.touched.setdefault(maker, set()).add(step.name)
                self.makers |= dict.fromkeys(change.after, step.name)

    def whole(self, model: Subject) -> Way | None:
        """All steps that changed the model; None where nothing of it is estimated."""
        end = self.start if self.target or not self.stood else standing(model, self.target)
        if self.start is None or end is None:
            return None
        way = Way((), self.start)
        for step, after in self.stood:
            way = way.and_then(step, after)
        return way if self.target else replace(way, end=end)


def passing(
    steps: Sequence[Pass],
    watch: Watch,
    again: Callable[[], Subject],
    after: Subject,
    session: Session,
    wanted: Mapping[str, str] | None = None,
) -> Passed:
    """The steps of a recipe that pass its gate, and why the others do not.

    Each that edits is left out if something is lost by it: an op that was legal on the ANE, time, or size
    without a clear gain in time; what comes after it is run again without it, on a copy. Then each of those
    that stay and made something larger is left out once, as long as trials last, since a later step may do
    without it; and each that was left out, or did nothing, is tried once more after the others. Without a
    target there is no time, and legality counts, and the share of the flop on all chips at once.

    Args:
        steps: of the recipe.
        watch: how the model stood before the first step and after each.
        again: makes the model anew, as it was before the first step.
        after: the model after the last one.
        session: in which they were run.
        wanted: names of the steps that stay whatever they cost, and why, after their name.

    Raises:
        LoadError: `again` gives another model: the file was changed since.
    """
    whole = watch.whole(after)
    if whole is None or watch.start is None or not whole.steps:
        return Passed(list(steps), watch.start)
    if session.target is None and not whole.end.leaves(watch.start):
        return Passed(list(steps), whole.end)

    def before() -> Subject:
        model = again()
        if model.op_counts != watch.counts:
            raise LoadError(f"{model.source} was changed while the recipe was applied; run it again")
        return model

    touched = frozenset(watch.touched)
    return Gate(steps, Way((), watch.start), whole, Bench(before, session), wanted or {}, touched).passed()


def standing(model: Subject, target: str | None) -> Standing | None:
    """How a model stands on a target, or on all chips at once."""
    return model.standing(target or "any")


@dataclass
class Bench:
    """A copy of the model on which steps are run, without proofs; a fresh one where the next do not follow."""

    again: Callable[[], Subject]
    """Makes the model as it was before the first step."""
    session: Session
    model: Subject | None = None
    steps: tuple[Pass, ...] = ()
    """Those that changed the copy."""
    stood: dict[tuple[Pass, ...], Standing | None] = field(default_factory=dict)

    @cached_property
    def original(self) -> Subject:
        """The model before the first step."""
        return self.again()

    def after(self, steps: tuple[Pass, ...]) -> Subject:
        """The model after some steps; those that change nothing are not among `steps` then.

        Raises:
            SurgeryError: one fails.
        """
        if self.model is None or steps[: len(self.steps)] != self.steps:
            self.model, self.steps = self.original.clone(), ()
        for step in steps[len(self.steps) :]:
            own, model = self.session.again(prove_sites=False), self.model
            self.model = None  # what a step that fails leaves is of no use
            run_on(step, model, own)
            self.model, self.steps = model, (*self.steps, step) if own.changes else self.steps
        return self.model

    def way(self, steps: tuple[Pass, ...]) -> Way | str:
        """Those steps that change the model, and how it stands then; or why that is not known.

        Raises:
            LoadError: the model cannot be read again.
        """
        original = self.original  # what speaks against it speaks against no step
        try:
            model = self.after(steps) if steps else original
        except SurgeryError as error:
            return f"on what the steps before it left, it failed: {error}"
        if self.steps not in self.stood:
            self.stood[self.steps] = standing(model, self.session.target)
        stands = self.stood[self.steps]
        return "nothing is known of what it leaves" if stands is None else Way(self.steps, stands)


@dataclass
class Gate:
    """The steps of one recipe, judged."""

    recipe: Sequence[Pass]
    start: Way
    """No step at all."""
    whole: Way
    """All steps that edited the model."""
    bench: Bench
    wanted: Mapping[str, str]
    """Name of a step that stays whatever it costs -> why, in words that follow its name."""
    touched: frozenset[str] = frozenset()
    """Names of the steps of which later ones replaced something."""
    losses: dict[str, str] = field(default_factory=dict)
    """What speaks against each step that is left out, by name."""
    said: Passed = field(default_factory=lambda: Passed([]))

    def __post_init__(self) -> None:
        self.session = self.bench.session
        self.trials = len(self.whole.steps) + 4
        """Steps that may still be left out, or put last, to see whether that is of use."""
        self.strict = False
        """May no step leave a model that is slower than the one as given, whatever later ones gain?"""

    def passed(self) -> Passed:
        """The steps that stay, and what is said of all."""
        end = self.best()
        slower = self.said.notes or self.said.warnings  # measured, or wanted: it may take longer
        if self.session.target and not slower and end.end.dearer(self.start.end):
            self.strict, self.losses, self.said = True, {}, Passed([])
            end = self.best()
        self.said.end = end.end
        self.said.notes += end.end.paid(self.start.end) if self.session.target else []
        if not self.losses and end.steps == self.whole.steps:
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

    def best(self) -> Way:
        """The set of steps that stays."""
        end = self.greedy()
        if self.losses and not self.loss(self.start, self.whole) and self.whole.end.gain(end.end):
            end, self.losses = self.whole, {}
        return self.later(self.pruned(end) if self.session.target else end)

    def greedy(self) -> Way:
        """Each step in turn, if it loses nothing; what was run already is not run again."""
        end = self.start
        for ran in self._ways(self.whole)[1:]:
            step, follows = ran.steps[-1], ran.steps[:-1] == end.steps
            trial = end.and_then(step, ran.end) if follows and self.session.target else self.further(end, step)
            if trial is None:
                continue
            if loss := self.held_against(step, end, trial):
                self.losses[step.name] = loss
            else:
                end = trial
        return end

    @staticmethod
    def _ways(end: Way | None) -> list[Way]:
        """The ways from the start to an end."""
        way = []
        while end is not None:
            way.append(end)
            end = end.before
        return way[::-1]

    def further(self, old: Way, step: Pass) -> Way | None:
        """One step more; None where it changes nothing, or fails, which is noted."""
        new = self.bench.way((*old.steps, step))
        if isinstance(new, str):
            self.losses[step.name] = new
            return None
        return old.and_then(step, new.end) if new.steps != old.steps else None

    def held_against(self, step: Pass, old: Way, new: Way) -> str:
        """Why a step is left out; "" where it stays, which is said where the estimate speaks against it."""
        loss = "" if step.essential else self.loss(old, new)
        if loss and not new.end.leaves(old.end) and (gain := self.measured(step, old)):
            self.said.notes.append(f"{step.name}: {overruled(gain, loss)}")
            return ""
        if loss and step.name in self.wanted:
            self.said.warnings.append(f"{step.name} {self.wanted[step.name]}, and is kept although {loss}")
            return ""
        return loss

    def loss(self, old: Way, new: Way) -> str:
        """Without a chip there is no time: then the rules of all chips, and the flop, are all that counts."""
        if not self.session.target:
            return new.end.leaves(old.end)
        return new.end.loss(old.end) or (new.end.dearer(self.start.end) if self.strict else "")

    def measured(self, step: Pass, way: Way) -> str:
        """A gain by it that was measured on the target, for what some steps make of the model; "" for none."""
        if self.session.target is None or type(step).known_gain is Pass.known_gain:
            return ""
        target, model = Target.parse(self.session.target), self.bench.after(way.steps)
        return next(filter(None, (step.known_gain(graph, target) for graph in model.chosen)), "")

    def pruned(self, end: Way) -> Way:
        """Without the steps that later ones made useless: the model stands better, or is smaller, without."""
        for step in [b.steps[-1] for a, b in pairwise(self._ways(end)[:-1]) if self.doubtful(a, b)]:
            bound = step.essential or step.name in self.wanted or self.trials <= 0
            if bound or self.measured(step, self.start):
                continue
            self.trials -= 1
            other = self.bench.way(tuple(one for one in end.steps if one is not step))
            if isinstance(other, str) or other.end.loss(end.end):
                continue
            if better := other.end.gain(end.end) or other.end.smaller(end.end):
                self.losses[step.name] = f"the steps after it do as well without it ({better})"
                end = other
        return end

    def doubtful(self, old: Way, new: Way) -> bool:
        """May the model stand better without the last step, after those that follow it?

        Where it gained no time, or made something much larger, or larger in any way and a later step replaced
        something that it made.
        """
        grown, step = new.end.growth(old.end), new.steps[-1]
        return (
            new.end.slower(old.end)
            or any(new.end.outgrows(old.end, what) for what in grown)
            or (bool(grown) and step.name in self.touched)
        )

    def later(self, end: Way) -> Way:
        """With those steps that pay after the others: left out before, or without effect on what was left."""
        for step in self.recipe if self.losses else ():
            useless = self.losses.get(step.name, "").startswith("the steps after")
            if step in end.steps or useless or self.trials <= 0:
                continue
            trial = self.further(end, step)
            self.trials -= trial is not None
            if trial is None or self.held_against(step, end, trial):
                continue
            if self.session.target is None or trial.end.gain(end.end):
                end = trial
                self.losses.pop(step.name, None)
        return end
