"""What a model becomes after some steps, tried on copies and without proofs, and how it stands then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from anesurgery.errors import Refusal, SurgeryError
from anesurgery.files.interface import InterfaceChange
from anesurgery.placement.evidence import Finding
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.standing import Standing
from anesurgery.placement.target import Target
from anesurgery.rewriting.ml_program import Subject
from anesurgery.rewriting.passes import Pass, run_on
from anesurgery.rewriting.session import Session

LEAST = 100
"""A smaller program counts as one of so many ops: what does not grow takes as long. Chosen, not measured."""


@dataclass(eq=False)
class Trial:
    """A model after some steps, each of which changed it; how it stands is looked at when somebody asks."""

    model: Subject | None
    """None where a later step edited it, since it is too large for a copy."""
    target: Target
    steps: tuple[Pass, ...]
    session: Session
    """In which the last step ran: its changes, refusals and declared interface changes."""
    before: Trial | None = None
    """Without the last step."""
    stood: Standing | None = None
    """As it is known already."""
    spare: Subject | None = None
    """A copy of the model that no step has changed."""

    @property
    def way(self) -> list[Trial]:
        """The trials that lead here, a step each, and this one; without the model as given."""
        return [] if self.before is None else [*self.before.way, self]

    @cached_property
    def contract(self) -> tuple[InterfaceChange, ...]:
        """What the steps declare of the interface."""
        return tuple(change for trial in self.way for change in trial.session.contract)

    @property
    def retyped(self) -> int:
        """Inputs and outputs of which callers give or take another type."""
        return sum(change.retypes for change in self.contract)

    @property
    def changing(self) -> tuple[Pass, ...]:
        """The steps that change what the model takes or gives, beyond the type."""
        return tuple(t.steps[-1] for t in self.way if any(not change.retypes for change in t.session.contract))

    @cached_property
    def size(self) -> int:
        """How many ops the model has; constants do not count."""
        return sum(self.held.op_counts.values())

    @property
    def held(self) -> Subject:
        """The model, where it is still there."""
        assert self.model is not None
        return self.model

    @cached_property
    def standing(self) -> Standing | None:
        """What is legal and where it runs; None where that is not estimated."""
        if self.stood is not None:
            return self.stood
        seen = self.__dict__.get("inspections")
        return self.held.standing(self.target) if seen is None else Standing.of(seen)

    def release(self) -> None:
        """Let copies go that have weights of their own; how the model stands is told before."""
        for trial in self.way:
            if trial.model is not None and not trial.model.shares_weights:
                trial.stood, trial.model, trial.spare = trial.standing, None, None

    @property
    def stands(self) -> Standing:
        """The same of a model of which it is estimated."""
        assert self.standing is not None
        return self.standing

    @cached_property
    def inspections(self) -> list[Inspection]:
        """The inspection of each function, with advice."""
        return self.held.advised(self.target)

    @cached_property
    def advised(self) -> Standing:
        """The standing with every finding counted; of layers the rules say all at once."""
        return Standing.of(self.inspections) if self.model is not None else self.stands

    @property
    def findings(self) -> list[Finding]:
        """The findings of all functions."""
        return [f for part in self.inspections for f in part.all_findings]


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

    @property
    def exhausted(self) -> bool:
        """Did the trials run out, or the ops of the models that may be tried?"""
        return self.left <= 0 or self.ops <= 0

    def after(self, old: Trial, step: Pass) -> Trial | Idle:
        """A model one step further; idle where the step changes nothing, fails, or may not be tried."""
        steps = (*old.steps, step)
        if steps not in self.reached:
            if self.exhausted:
                return Idle()
            found = self.reached[steps] = self._tried(old, step)
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

    def _tried(self, old: Trial, step: Pass) -> Trial | Idle:
        model, own = self._model(old), self.session.again(prove_sites=False)
        try:
            run_on(step, model, own)
        except SurgeryError as error:
            return Idle(tuple(own.refusals), error)
        if own.changes:
            return Trial(model, old.target, (*old.steps, step), own, old)
        if old.model is None:
            old.model = model
        else:
            old.spare = model
        return Idle(tuple(own.refusals))

    def _model(self, trial: Trial) -> Subject:
        """A model to edit: a copy; of one that is too large for a copy itself, made anew when it is needed."""
        if trial.model is None:
            assert trial.before is not None
            model = self._model(trial.before)
            run_on(trial.steps[-1], model, self.session.again(prove_sites=False))
            return model
        if trial.before is None or trial.model.shares_weights:
            spare, trial.spare = trial.spare, None
            return trial.model.clone() if spare is None else spare
        trial.stood, _ = trial.standing, trial.size  # told before the model goes
        model, trial.model = trial.model, None
        return model
