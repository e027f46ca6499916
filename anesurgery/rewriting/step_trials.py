"""What a model becomes after some steps, tried on copies and without proofs, and how it scores then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from anesurgery.errors import Refusal, SurgeryError
from anesurgery.files.interface import InterfaceChange
from anesurgery.placement.evidence import Finding, Rule
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.score import Score
from anesurgery.placement.target import Target
from anesurgery.placement.verdicts import Known
from anesurgery.rewriting.ml_program import Subject
from anesurgery.rewriting.passes import Pass, run_on
from anesurgery.rewriting.session import Session

LEAST = 100
"""A smaller program counts as one of so many ops: what does not grow takes as long. Chosen, not measured."""


@dataclass(eq=False)
class Trial:
    """A model after some steps, each of which changed it; it is scored when somebody asks."""

    model: Subject | None
    """None where a later step edited it, since it is too large for a copy."""
    target: Target
    session: Session
    """In which the last step ran: its changes, refusals and declared interface changes."""
    steps: tuple[Pass, ...] = ()
    before: Trial | None = None
    """Without the last step."""
    known: Known = field(default_factory=Known)
    """The verdicts of all trials of the model."""

    @property
    def way(self) -> list[Trial]:
        """The trials that lead here, a step each, and this one; without the model as given."""
        return [] if self.before is None else [*self.before.way, self]

    @cached_property
    def contract(self) -> tuple[InterfaceChange, ...]:
        """What the steps declare of the interface."""
        return tuple(change for trial in self.way for change in trial.session.contract)

    @property
    def changes_results(self) -> bool:
        """Does the last step change what the model takes or gives, beyond the type?"""
        return any(not change.retypes for change in self.session.contract)

    @property
    def cost_to_callers(self) -> tuple[int, int]:
        """How many types of inputs and outputs change, and how many steps change more than that."""
        return sum(change.retypes for change in self.contract), sum(t.changes_results for t in self.way)

    @cached_property
    def size(self) -> int:
        """How many ops the model has; constants do not count."""
        return sum(self.held.op_counts.values())

    @property
    def held(self) -> Subject:
        """The model; it is made again where it was given away."""
        if self.model is None:
            self.model = self.remade()
        return self.model

    def remade(self) -> Subject:
        """The last step, run again on a copy of the model before it."""
        assert self.before is not None
        before = self.before
        model = before.remade() if before.model is None else before.model.clone()
        run_on(self.steps[-1], model, self.session.again(prove_sites=False))
        return model

    @cached_property
    def scored(self) -> Score | None:
        """The score, findings left out; None where there is none."""
        if "inspections" in vars(self):
            return Score.of(self.inspections)
        with self.known.within():
            return self.held.score(self.target)

    @property
    def score(self) -> Score:
        """The score of a model that has one."""
        assert self.scored is not None
        return self.scored

    @cached_property
    def inspections(self) -> list[Inspection]:
        """The inspection of each function, with advice."""
        with self.known.within():
            return self.held.advised(self.target)

    @property
    def findings(self) -> list[Finding]:
        """The findings of all functions."""
        return [f for part in self.inspections for f in part.all_findings]

    def found_by(self, rules: Sequence[Rule]) -> list[Finding]:
        """What some rules say of the ops; the others are not asked."""
        with self.known.within():
            return self.held.found_by(rules, self.target)

    @property
    def advised(self) -> Score:
        """The score with every finding counted."""
        return self.score if self.model is None else replace(self.score, findings=len(self.findings))

    def let_go(self) -> None:
        """Give the model away: what is asked of it later is told before."""
        _, _, self.model = self.scored, self.size, None

    def release(self) -> None:
        """Let copies go that have weights of their own."""
        for trial in self.way:
            if trial.model is not None and not trial.model.shares_weights:
                trial.let_go()


@dataclass(frozen=True)
class Idle:
    """A step that changed nothing, or failed."""

    refusals: tuple[tuple[str, Refusal], ...] = ()
    error: SurgeryError | None = None


@dataclass
class Trials:
    """The trials of one plan: the same steps from the model as given are run once."""

    session: Session
    """For the model; it collects nothing here."""
    left: float = math.inf
    """Steps that may still be run."""
    ops: float = math.inf
    """Ops of the models that may still be tried, all together."""
    reached: dict[tuple[Pass, ...], Trial | Idle] = field(default_factory=dict)
    spare: dict[Trial, Subject] = field(default_factory=dict)
    """Copies that a step did not change, by the trial they are copies of."""

    @property
    def exhausted(self) -> bool:
        """Did the trials run out, or the ops of the models that may be tried?"""
        return self.left <= 0 or self.ops <= 0

    def after(self, old: Trial, step: Pass, *, in_place: bool = False) -> Trial | Idle:
        """A model one step further; idle where the step changes nothing, fails, or may not be tried.

        Args:
            old: the model before.
            step: what is tried.
            in_place: edit the model of `old` itself, if it is a copy, which is made again when it is needed.
        """
        steps = (*old.steps, step)
        if steps not in self.reached:
            if self.exhausted:
                return Idle()
            with old.known.within():
                found = self.reached[steps] = self._tried(old, step, in_place)
            self.left -= 1
            if self.ops < math.inf:
                self.ops -= (found if isinstance(found, Trial) else old).size
        return self.reached[steps]

    def led(self, start: Trial, steps: Sequence[Pass]) -> Trial | Idle:
        """A model after some steps; those that change nothing are left out, one that fails ends it."""
        end = start
        for step in steps:
            new = self.after(end, step)
            if isinstance(new, Trial):
                end = new
            elif new.error is not None:
                return new
        return end

    def without(self, start: Trial, end: Trial, step: Pass) -> Trial | None:
        """A model without one step of those since a start; None where another fails then."""
        other = self.led(start, [one for one in end.steps[len(start.steps) :] if one is not step])
        return other if isinstance(other, Trial) else None

    def _tried(self, old: Trial, step: Pass, in_place: bool) -> Trial | Idle:
        model, own = self._model(old, in_place), self.session.again(prove_sites=False)
        try:
            run_on(step, model, own)
        except SurgeryError as error:
            return Idle(tuple(own.refusals), error)
        if own.changes:
            return Trial(model, old.target, own, (*old.steps, step), old, old.known)
        if old.model is None:
            old.model = model
        else:
            self.spare = {old: model}  # of one trial: mostly the next step is tried on it too
        return Idle(tuple(own.refusals))

    def _model(self, trial: Trial, in_place: bool) -> Subject:
        """A model to edit: a copy, or that of the trial in place or where it is too large for a copy."""
        if trial.model is None:
            return trial.remade()
        shared = trial.model.shares_weights
        if trial.before is None or (shared and not in_place):
            return self.spare.pop(trial, None) or trial.model.clone()
        model = trial.model
        if not shared:
            trial.let_go()
        trial.model = None
        return model
