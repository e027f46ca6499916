"""Passes, pipelines of passes, and what applying them gives back.

A pass edits a program in place inside a `Session`, which collects changes, refusals and declared interface
changes. Users call `apply`, which works on a program of its own and returns a `Surgery`.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from anesurgery.checking.site import EXACT, Tolerance
from anesurgery.errors import PassError, Refusal, SurgeryError
from anesurgery.mil import Program, exclusive, quiet_host
from anesurgery.placement.target import Target
from anesurgery.rewriting.session import Change, Session

PROOFS = ("sites", "model", "both", None)
"""What `prove=` may be."""


@dataclass(frozen=True)
class Pass:
    """A named edit of a program; the dataclass fields are its options."""

    name: ClassVar[str]
    needs_after: ClassVar[tuple[str, ...]] = ()
    """Names of passes that must come later in the same pipeline."""
    tolerance: ClassVar[Tolerance] = EXACT
    """What holds at each of its sites in fp32."""

    def requires(self, program: Program) -> Refusal | None:
        """Why the pass cannot work on this program at all, or None."""
        return None

    def run(self, program: Program, session: Session) -> None:
        """Edit `program` in place."""
        raise NotImplementedError

    def ensures(self, program: Program) -> Refusal | None:
        """What is wrong with the program after the pass, or None."""
        return None

    @classmethod
    def variants(cls, target: Target) -> tuple[Pass, ...]:
        """What `auto` tries for a target: the pass with its defaults, unless a pass says otherwise."""
        return (cls(),)

    def options(self) -> dict[str, Any]:
        """The options by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def __str__(self) -> str:
        changed = ", ".join(
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"{self.name}({changed})" if changed else self.name


Observer = Callable[[Pass, Program], None]


@dataclass(frozen=True)
class Pipeline(Pass):
    """Several passes in a row, themselves a pass."""

    name: ClassVar[str] = "pipeline"
    steps: tuple[Pass, ...] = ()
    until_stable: bool = False
    """Repeat the steps until a round changes nothing."""
    limit: int = 10
    """Rounds after which a pipeline that never becomes stable is an error."""
    observer: Observer | None = None
    """Called with each pass and the program after it."""

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        for i, step in enumerate(self.steps):
            for needed in step.needs_after:
                if needed in names[:i] and needed not in names[i + 1 :]:
                    raise PassError(f"{needed} must run after {step.name}; move it behind step {i + 1}")

    def run(self, program: Program, session: Session) -> None:
        """Run the steps in order; an error names the passes that ran before it."""
        done: list[str] = []
        for _ in range(self.limit if self.until_stable else 1):
            edits = len(session.changes)
            for step in self.steps:
                try:
                    run_pass(step, program, session)
                except PassError as error:
                    raise PassError(f"{error} (ran before it: {', '.join(done) or 'nothing'})") from error
                done.append(step.name)
                if self.observer is not None:
                    self.observer(step, program)
            if not self.until_stable or len(session.changes) == edits:
                return
        raise PassError(f"the pipeline still changes the program after {self.limit} rounds: {', '.join(done)}")


@exclusive
def run_pass(step: Pass, program: Program, session: Session) -> None:
    """Check, run, validate: the contract around every pass.

    Raises:
        PassError: the pass raised, or left a program that is not valid; the cause is chained.
    """
    if (refusal := step.requires(program)) is not None:
        session.refusals.append((step.name, refusal))
        return
    started, edits = time.perf_counter(), len(session.changes)
    try:
        with quiet_host():
            step.run(program, session)
            if len(session.changes) > edits and not isinstance(step, Pipeline):
                for function in program.functions.values():
                    function.validate(force_validate=True)
    except SurgeryError:
        raise
    except Exception as error:
        raise PassError(
            f"pass {step.name} failed: {type(error).__name__}: {error}; the model given to it is unchanged"
        ) from error
    if (refusal := step.ensures(program)) is not None:
        raise PassError(f"pass {step.name} did not keep its promise: {refusal}")
    spent = time.perf_counter() - started
    session.timings[step.name] = session.timings.get(step.name, 0.0) + spent


def counts(changes: Iterable[Change]) -> dict[str, int]:
    """Number of edits by pass, in the order of first application."""
    return dict(Counter(change.pass_name for change in changes))


def grouped_refusals(refusals: Sequence[tuple[str, Refusal]]) -> list[tuple[str, str, int, str]]:
    """Rows (pass, reason, count, name of the first op), one for each distinct reason."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, refusal in refusals:
        where = refusal.where.name if refusal.where is not None else ""
        rows.setdefault((name, refusal.reason), []).append(where)
    return [(name, reason, len(where), where[0]) for (name, reason), where in rows.items()]


def refusal_lines(refusals: Sequence[tuple[str, Refusal]]) -> list[str]:
    """One line for each distinct reason: ``pass: reason (3 times, first at op)``."""
    lines = []
    for name, reason, times, where in grouped_refusals(refusals):
        at = f" ({'at' if times == 1 else f'{times} times, first at'} {where})" if where else ""
        lines.append(f"{name}: {reason}{at}")
    return lines
