"""The gate of a recipe: a step that makes a program stand worse on its target is left out, and reported."""

from __future__ import annotations

from collections.abc import Sequence

from anesurgery.errors import Refusal
from anesurgery.loading import clone
from anesurgery.mil import Program
from anesurgery.placement.standing import Standing, stand
from anesurgery.placement.target import Target
from anesurgery.rewriting.passes import Pass, run_pass
from anesurgery.rewriting.session import Session


def passing(
    steps: Sequence[Pass], before: Program, after: Program, target: str
) -> tuple[list[Pass], list[tuple[str, Refusal]]]:
    """The steps of a recipe that pass its gate, and why the others do not.

    All of them, where the whole recipe loses nothing; else each is run on a copy and left out if something is
    lost by it: an op that was legal on the ANE, or a share of the flop or ops there.

    Args:
        steps: of the recipe.
        before: the program before the first step; it is not changed.
        after: the program after the last one.
        target: chips and OS.
    """
    aim = Target.parse(target)
    start = _standing(before, aim)
    if not _standing(after, aim).loss(start):
        return list(steps), []
    program, kept, refusals = before, list[Pass](), list[tuple[str, Refusal]]()
    for step in steps:
        trial, session = clone(program).program, Session(target=target)
        run_pass(step, trial, session)
        end = _standing(trial, aim) if session.changes else start
        if loss := end.loss(start):
            refusals.append((step.name, Refusal(f"undone: {loss}; run it by name to have it")))
        else:
            program, start = trial, end
            kept.append(step)
    return kept, refusals


def _standing(program: Program, target: Target) -> Standing:
    return stand(program, target)[0]
