"""Steps after which a model is less exact than before them, found by running it on some inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from anesurgery.checking.exactness import Yardstick, less_exact
from anesurgery.errors import SurgeryError
from anesurgery.mil import Program
from anesurgery.placement.certifying import arithmetic_of
from anesurgery.rewriting.passes import Pass, run_pass
from anesurgery.rewriting.session import Session


def yardstick(program: Program, session: Session) -> Yardstick:
    """What a program means on the inputs of a session, or on sampled ones."""
    samples = session.inputs
    inputs = () if samples is None else (samples,) if isinstance(samples, Mapping) else tuple(samples)
    return Yardstick(program, arithmetic_of(session.target), inputs, session.images, session.seed)


def inexact_steps(
    steps: Sequence[Pass], again: Callable[[], Program], after: tuple[Program, Session], measured: Yardstick
) -> dict[str, str]:
    """The steps that make outputs less exact in fp16 or in the engine's arithmetic, by name, and by how much.

    Each is judged beside the model right before it. Nothing is run step by step where the end is as exact as
    the beginning.

    Args:
        steps: in the order in which they run.
        again: makes the program anew, as it was before the first step.
        after: the program after them, and the session in which they ran.
        measured: what the program means.
    """
    program, session = after
    start = measured.measure(measured.program)
    end = None if start is None else measured.measure(program, session.contract)
    if start is None or end is None or not less_exact(start, end):
        return {}
    losses: dict[str, str] = {}
    kept: list[Pass] = []
    best = start
    for step in steps:
        now = _after((*kept, step), again, session, measured)
        loss = "" if now is None else less_exact(best, now)
        if loss and not step.rounds:  # what rounds has a gate of its own
            losses[step.name] = loss
        else:
            kept, best = [*kept, step], best if now is None else now
    return losses


def _after(
    steps: Sequence[Pass], again: Callable[[], Program], session: Session, measured: Yardstick
) -> dict[str, float] | None:
    """How exact the program is after some steps; None where the last one does nothing, or fails."""
    program, own = again(), session.again(prove_sites=False)
    edits = 0
    try:
        for step in steps:
            edits = len(own.changes)
            run_pass(step, program, own)
    except SurgeryError:
        return None
    return measured.measure(program, own.contract) if len(own.changes) > edits else None
