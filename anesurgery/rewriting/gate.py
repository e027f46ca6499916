"""The gate of a recipe: a step that makes a model stand worse on its target is left out, and reported.

What the caller asked for by name is done all the same, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from anesurgery.errors import LoadError, Refusal, SurgeryError, warn
from anesurgery.placement.standing import Standing
from anesurgery.placement.target import Target
from anesurgery.rewriting.passes import Pass, run_on
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

    def warn(self, session: Session) -> None:
        """Say so to the caller, and in the notes."""
        session.notes += self.warnings
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

    All of them, where the whole recipe loses nothing; else each is run on a copy and left out if something is
    lost by it: an op that was legal on the ANE, a share of the flop or ops there, or much time by the estimate.
    Without a target only what must hold for all chips at once counts: legality, and the share of the flop.

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
    if start is None or not session.changes:
        return Passed(list(steps))
    end = standing(after, session.target)
    if end is None or not _loss(start, end, session.target):
        return Passed(list(steps))
    model, passed = again(), Passed([])
    if standing(model, session.target) != start:
        raise LoadError(f"{model.source} was changed while the recipe was applied; run it again")
    given = start
    for step in steps:
        trial, own = model.clone(), session.again(prove_sites=False)
        run_on(step, trial, own)
        end = standing(trial, session.target) if own.changes else start
        loss = "" if end is None or step.essential else _loss(start, end, session.target)
        if loss and end is not None and _is_known(step, model, session.target):
            loss = end.lowered(start, ("flop",)) or _loss(given, end, session.target)
        if loss and step.name in asked:
            passed.warnings.append(f"{step.name} was asked for, and is kept although {loss}")
        elif loss:
            passed.refusals.append((step.name, Refusal(f"undone: {loss}; ask for it by name to have it")))
            continue
        model, start = trial, end or start
        passed.steps.append(step)
    return passed


def _is_known(step: Pass, model: Subject, target: str | None) -> bool:
    """Was a gain measured on the target? Then the step may cost ops that other steps brought onto the ANE."""
    return target is not None and any(step.known_gain(g, Target.parse(target)) for g in model.chosen)


def standing(model: Subject, target: str | None) -> Standing | None:
    """How a model stands on a target, or on all chips at once."""
    return model.standing(target or "any")


def _loss(start: Standing, end: Standing, target: str | None) -> str:
    return end.loss(start) if target else end.lowered(start, ("flop",))
