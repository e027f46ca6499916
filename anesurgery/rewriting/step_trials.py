"""Run steps on copies of a model, without proofs, and score the results; the same steps are run once.

A `Trial` is a model after some steps. `Trials` keeps all trials of one plan. Copies share weights with the
model where they can; a model too large for a second copy is given away to the next step, and rebuilt when
somebody asks for it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

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
"""`search` counts a smaller program as one of so many ops, since each trial has a fixed cost. A choice."""


class CostToCallers(NamedTuple):
    """What callers of a model have to change."""

    changed_types: int
    """Inputs and outputs whose type changes."""
    changed_results: int
    """Steps that change more than types."""


@dataclass(eq=False)
class Trial:
    """A model after some steps, each of which changed it. Its score is computed on demand."""

    model: Subject | None
    """None after it was given away; see `subject`."""
    target: Target
    session: Session
    """The session of the last step: its changes, refusals and declared interface changes."""
    steps: tuple[Pass, ...] = ()
    before: Trial | None = None
    """The trial without the last step; None for the model as given."""
    known: Known = field(default_factory=Known)
    """Verdicts about ops, shared by all trials of the model."""

    @property
    def path(self) -> list[Trial]:
        """The trials that lead here, one for each step, this one included; the model as given is not."""
        return [] if self.before is None else [*self.before.path, self]

    @cached_property
    def contract(self) -> tuple[InterfaceChange, ...]:
        """The interface changes that the steps declare."""
        return tuple(change for trial in self.path for change in trial.session.contract)

    @property
    def changes_results(self) -> bool:
        """Does the last step change inputs or outputs in more than their types?"""
        return any(not change.retypes for change in self.session.contract)

    @property
    def cost_to_callers(self) -> CostToCallers:
        """What callers have to change for the steps."""
        changed_types = sum(change.retypes for change in self.contract)
        return CostToCallers(changed_types, sum(trial.changes_results for trial in self.path))

    @cached_property
    def size(self) -> int:
        """The number of ops of the model, without constants."""
        return sum(self.subject.op_counts.values())

    @property
    def subject(self) -> Subject:
        """The model; it is rebuilt if it was given away."""
        if self.model is None:
            self.model = self.rebuilt_model()
        return self.model

    def rebuilt_model(self) -> Subject:
        """Run the last step again on a copy of the model before it."""
        assert self.before is not None
        before = self.before
        model = before.rebuilt_model() if before.model is None else before.model.clone()
        run_on(self.steps[-1], model, self.session.again(prove_sites=False))
        return model

    @cached_property
    def score_if_any(self) -> Score | None:
        """The score without findings; None for a model that has none, such as a tree ensemble."""
        if "inspections" in vars(self):
            return Score.of(self.inspections)
        with self.known.within():
            return self.subject.score(self.target)

    @property
    def score(self) -> Score:
        """The score of a model that has one."""
        assert self.score_if_any is not None
        return self.score_if_any

    @cached_property
    def inspections(self) -> list[Inspection]:
        """The inspection of each function, with advice."""
        with self.known.within():
            return self.subject.advised(self.target)

    @property
    def findings(self) -> list[Finding]:
        """The findings of all functions."""
        return [f for part in self.inspections for f in part.all_findings]

    def found_by(self, rules: Sequence[Rule]) -> list[Finding]:
        """Return the findings of some rules only, which is quicker than all."""
        with self.known.within():
            return self.subject.found_by(rules, self.target)

    @property
    def score_with_findings(self) -> Score:
        """The score with the number of findings in it; without it if the model was given away."""
        return self.score if self.model is None else replace(self.score, findings=len(self.findings))

    def give_model_away(self) -> None:
        """Drop the model, after its score and size are computed."""
        _, _, self.model = self.score_if_any, self.size, None

    def release(self) -> None:
        """Drop all models on the path that have weights of their own."""
        for trial in self.path:
            if trial.model is not None and not trial.model.shares_weights:
                trial.give_model_away()


@dataclass(frozen=True)
class Idle:
    """The outcome of a step that changed nothing, or failed."""

    refusals: tuple[tuple[str, Refusal], ...] = ()
    error: SurgeryError | None = None


@dataclass
class Trials:
    """All trials of one plan, by their steps."""

    session: Session
    """The session of the plan; each trial gets one of its own from it."""
    left: float = math.inf
    """The number of steps that may still be run."""
    ops: float = math.inf
    """The sum of ops of models that may still be tried."""
    reached: dict[tuple[Pass, ...], Trial | Idle] = field(default_factory=dict)
    """Steps -> the trial after them, so that the same steps are run once."""
    spare: dict[Trial, Subject] = field(default_factory=dict)
    """Trial -> a copy of its model that a step did not change, for the next step; one entry at most."""

    def limit(self, steps: float, ops: float) -> None:
        """Set the two budgets: see `left` and `ops`."""
        self.left, self.ops = steps, ops

    @property
    def exhausted(self) -> bool:
        """Is one of the two budgets, steps and ops, used up?"""
        return self.left <= 0 or self.ops <= 0

    def after(self, old: Trial, step: Pass) -> Trial | Idle:
        """Return the trial after one more step; `Idle` if it changes nothing, fails, or the budget is used up.

        Args:
            old: the trial before.
            step: the pass to run.
        """
        steps = (*old.steps, step)
        if steps not in self.reached:
            if self.exhausted:
                return Idle()
            with old.known.within():
                found = self.reached[steps] = self._run(old, step)
            self.left -= 1
            if self.ops < math.inf:
                self.ops -= (found if isinstance(found, Trial) else old).size
        return self.reached[steps]

    def earlier(self, steps: tuple[Pass, ...]) -> Trial | None:
        """Return the trial after some steps if these were run, and the last one changed the model."""
        trial = self.reached.get(steps)
        return trial if isinstance(trial, Trial) else None

    def after_all(self, start: Trial, steps: Sequence[Pass]) -> Trial | Idle:
        """Return the trial after the steps that change something and fit the budget; `Idle` if one fails."""
        end = start
        for step in steps:
            new = self.after(end, step)
            if isinstance(new, Trial):
                end = new
            elif new.error is not None:
                return new
        return end

    def without(self, start: Trial, end: Trial, step: Pass) -> Trial | None:
        """Return the trial without one of the steps since a start; None if another one fails then."""
        other = self.after_all(start, [one for one in end.steps[len(start.steps) :] if one is not step])
        return other if isinstance(other, Trial) else None

    def _run(self, old: Trial, step: Pass) -> Trial | Idle:
        model, own = self._model_to_edit(old), self.session.again(prove_sites=False)
        try:
            run_on(step, model, own)
        except SurgeryError as error:
            return Idle(tuple(own.refusals), error)
        if broken := model.broken_links if own.changes else "":
            return Idle(((step.name, Refusal(broken)),))
        if own.changes:
            return Trial(model, old.target, own, (*old.steps, step), old, old.known)
        if old.model is None:
            old.model = model
        else:
            self.spare = {old: model}  # of one trial: mostly the next step is tried on it too
        return Idle(tuple(own.refusals))

    def _model_to_edit(self, trial: Trial) -> Subject:
        """Return a model to edit: a copy, or the model of the trial itself if it is too large to copy."""
        if trial.model is None:
            return trial.rebuilt_model()
        if trial.before is None or trial.model.shares_weights:
            return self.spare.pop(trial, None) or trial.model.clone()
        model = trial.model
        trial.give_model_away()
        return model
