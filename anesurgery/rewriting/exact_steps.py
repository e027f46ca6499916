"""Steps after which a model is less exact than before them, found by running it on some inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from anesurgery.checking.exactness import Yardstick, less_exact
from anesurgery.errors import SurgeryError
from anesurgery.files.copying import copied
from anesurgery.files.interface_change import InterfaceChange
from anesurgery.mil import Program, walk_ops
from anesurgery.placement.certifying import arithmetic_of
from anesurgery.placement.standing import placed
from anesurgery.placement.target import Target
from anesurgery.rewriting.passes import Pass, run_pass
from anesurgery.rewriting.session import Change, Session


def yardstick(program: Program, session: Session) -> Yardstick:
    """What a program means on the inputs of a session, or on sampled ones."""
    return Yardstick(program, arithmetic_of(session.target), session.samples, session.images, session.seed)


@dataclass(frozen=True)
class Judged:
    """What is left of some steps.

    Attributes:
        steps: those that stay, some of them in a gentler form.
        losses: name of a step that does not stay -> by how much outputs would be less exact.
    """

    steps: tuple[Pass, ...]
    losses: Mapping[str, str]


def exact_steps(
    steps: Sequence[Pass], again: Callable[[], Program], after: tuple[Program, Session], measured: Yardstick
) -> Judged:
    """The steps that leave outputs as exact in fp16 and in the engine's arithmetic.

    Each runs once, and is judged beside the model right before it. Nothing is run step by step where the end is
    as exact as the beginning. A step that repairs what a finding says of the numbers is tried in its gentler
    form, if it has one; else it stays, and a note of the session says what it costs: a hazard that the samples
    do not reach is worse than a loss of digits.

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
        return Judged(tuple(steps), {})
    losses, kept = dict[str, str](), list[Pass]()
    latest = _Latest(again(), start)
    for step in steps:
        trial = _tried(step, latest, session, measured)
        if trial is None or not trial.loss:
            kept, latest = [*kept, step], latest if trial is None else trial
            continue
        repaired, gentler = _repaired(latest.program, step, trial.changes, session), step.gentler()
        other = _tried(gentler, latest, session, measured) if repaired and gentler is not None else None
        if gentler is not None and other is not None and not other.loss:
            kept, latest = [*kept, gentler], other
        elif repaired:
            session.notes.append(
                f"{step.name}: {trial.loss}; kept, as it repairs what may go wrong: {repaired}"
            )
            kept, latest = [*kept, step], trial
        elif step.rounds:  # it has a gate of its own
            kept, latest = [*kept, step], trial
        else:
            losses[step.name] = trial.loss
    return Judged(tuple(kept), losses)


@dataclass(frozen=True)
class _Latest:
    """The program after the steps that stay, and how exact it is."""

    program: Program
    exact: dict[str, float]
    contract: tuple[InterfaceChange, ...] = ()
    changes: tuple[Change, ...] = ()
    """Of the last step."""
    loss: str = ""
    """What that one costs."""


def _tried(step: Pass, latest: _Latest, session: Session, measured: Yardstick) -> _Latest | None:
    """A copy of a program after a step; None where it does nothing, or fails."""
    edited, own = copied(latest.program), session.again(prove_sites=False)
    try:
        run_pass(step, edited, own)
    except SurgeryError:
        return None
    if not own.changes:
        return None
    contract = (*latest.contract, *own.contract)
    now = measured.measure(edited, contract)
    loss = "" if now is None else less_exact(latest.exact, now)
    return _Latest(edited, latest.exact if now is None else now, contract, tuple(own.changes), loss)


def _repaired(program: Program, step: Pass, changes: Sequence[Change], session: Session) -> str:
    """The rules by which numbers may go wrong in ops that a step takes away, or that name it as the remedy."""
    inspections = placed(program, Target.parse(session.target or "any"), advice=True)
    findings = [finding for one in inspections for finding in one.all_findings if finding.kind == "numeric"]
    names = {words.split()[-1] for change in changes for words in change.before}
    ops = [op for function in program.functions.values() for op in walk_ops(function) if op.name in names]
    edited = names.union(v.name for op in ops for v in op.outputs)  # a finding names an op by what it makes
    return ", ".join(dict.fromkeys(f.rule for f in findings if f.remedy == step.name or f.op in edited))
