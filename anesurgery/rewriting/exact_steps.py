"""Steps after which a model is less exact than before them, found by running it on some inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from anesurgery.checking.exactness import Yardstick, less_exact
from anesurgery.errors import SurgeryError
from anesurgery.files.copying import copied
from anesurgery.files.interface_change import InterfaceChange
from anesurgery.mil import Program
from anesurgery.placement.certifying import arithmetic_of
from anesurgery.placement.standing import placed
from anesurgery.placement.target import Target
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

    Each runs once, and is judged beside the model right before it. Nothing is run step by step where the end is
    as exact as the beginning. A step that repairs what a finding says of the numbers stays, and a note of the
    session says what it costs: a hazard that the samples do not reach is worse than a loss of digits.

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
    latest, best, contract = again(), start, list[InterfaceChange]()
    for step in steps:
        if (trial := _tried(step, latest, session)) is None:
            continue
        edited, own = trial
        declared = [*contract, *own.contract]
        now = measured.measure(edited, declared)
        loss = "" if now is None else less_exact(best, now)
        if loss and (repaired := _repaired(latest, step, own)):
            session.notes.append(f"{step.name}: {loss}; kept, as it repairs what may go wrong: {repaired}")
        elif loss and not step.rounds:  # what rounds has a gate of its own
            losses[step.name] = loss
            continue
        latest, contract, best = edited, declared, best if now is None else now
    return losses


def _repaired(program: Program, step: Pass, session: Session) -> str:
    """The rules by which numbers may go wrong in ops that a step takes away, or that name it as the remedy."""
    inspections = placed(program, Target.parse(session.target or "any"), advice=True)
    findings = [finding for one in inspections for finding in one.all_findings if finding.kind == "numeric"]
    own = [change for change in session.changes if change.pass_name == step.name]
    edited = {words.split()[-1] for change in own for words in change.before}
    return ", ".join(dict.fromkeys(f.rule for f in findings if f.remedy == step.name or f.op in edited))


def _tried(step: Pass, program: Program, session: Session) -> tuple[Program, Session] | None:
    """A copy of a program after a step, and the session of it; None where it does nothing, or fails."""
    edited, own = copied(program), session.again(prove_sites=False)
    try:
        run_pass(step, edited, own)
    except SurgeryError:
        return None
    return (edited, own) if own.changes else None
