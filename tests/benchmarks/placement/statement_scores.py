"""Score public statements that can be asked of a model: how many inspect answers, and how many of these right.

The statements are the tables of `tests/support`. "Not known" is no answer, and a wrong answer is a defect. The
list has a line for each statement about a later report: what is said of it, and why nothing where nothing is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anesurgery as ane
from anesurgery.placement import Inspection
from anesurgery.placement.durations import change
from anesurgery.placement.rules import whole_model

SUPPORT = Path(__file__).resolve().parents[2] / "support"
NO_TIME, NO_UNIT = "no time: ", ("fitted", "is not known here")


@dataclass(frozen=True)
class Answer:
    """What `inspect` says of a statement.

    Attributes:
        name: of the statement.
        said: the answer; None where it is not known.
        seen: what the statement says.
        why: why it is not known.
    """

    name: str
    said: Any
    seen: Any
    why: str = ""

    @property
    def verdict(self) -> str:
        """ "agreed", "contradicted" (with confidence), or "unknown"."""
        return "unknown" if self.said is None else "agreed" if self.said == self.seen else "contradicted"


@dataclass(frozen=True)
class Score:
    """The answers to some statements."""

    answers: tuple[Answer, ...]

    @property
    def asked(self) -> int:
        """How many statements."""
        return len(self.answers)

    @property
    def answered(self) -> int:
        """How many of them have an answer."""
        return sum(a.said is not None for a in self.answers)

    @property
    def wrong(self) -> tuple[str, ...]:
        """The names of those answered wrongly."""
        return tuple(a.name for a in self.answers if a.verdict == "contradicted")

    @property
    def coverage(self) -> float:
        """Share that was answered."""
        return self.answered / self.asked

    @property
    def precision(self) -> float:
        """Share of the answers that agree."""
        return 1 - len(self.wrong) / self.answered if self.answered else 1.0

    def __str__(self) -> str:
        return f"{self.asked} statements: {self.coverage:.1%} answered, {self.precision:.1%} of these right"


def answer(row: Any) -> Answer:
    """Ask `inspect` about a statement (`tests/support/statement.py`), or about two forms of a model."""
    found = _inspected(row, row.build)
    other = getattr(row, "other", None)
    if other is None:
        said = row.read(found)
        return Answer(row.name, said, row.seen, "" if said is not None else why(found))
    beside = _inspected(row, other)
    if found.time is None or beside.time is None:
        return Answer(row.name, None, row.seen, why_no_time(found if found.time is None else beside))
    ratio = change(beside.time, found.time)
    said = "faster" if ratio.high < 1 else "slower" if ratio.low > 1 else None
    return Answer(row.name, said, row.seen, ratio.verdict)


def _inspected(row: Any, build: Any) -> Inspection:
    return ane.inspect(build(), row.target, compute_units=row.units, inputs=row.inputs)


def why(found: Inspection) -> str:
    """Why the units of ops are not known, from the most general reason to the least."""
    whole = {rule.id for rule in whole_model.RULES}
    if doubts := [f.rule for f in found.findings if f.rule in whole]:
        return f"doubtful as a whole: {', '.join(doubts)}"
    if gpu := [note for note in found.notes if any(words in note for words in NO_UNIT)]:
        return gpu[0]
    doubtful = dict.fromkeys(f.rule for row in found.ops if row.legal is None for f in row.findings)
    if doubtful:
        return f"doubtful ops: {', '.join(doubtful)}"
    return "estimates do not decide"


def why_no_time(found: Inspection) -> str:
    """The note that says why there is no time."""
    return next((note for note in found.notes if note.startswith(NO_TIME)), "no time")


def scored(statements: Iterable[Any]) -> Score:
    """Ask `inspect` about each statement."""
    return Score(tuple(map(answer, statements)))


def of_reports(reports: Iterable[Any]) -> Iterator[Answer]:
    """The answers to reports; those that are outside have none, those of which nothing can be asked no "
    "answer."""
    for report in reports:
        if report.silent:
            yield Answer(report.id, None, "", report.silent)
        elif not report.outside:
            yield from map(answer, report.asked)


def main() -> None:
    """Print the score of every table, and what is said of each report."""
    sys.path.insert(0, str(SUPPORT))
    import statements_of_models as models
    import statements_of_ops as ops
    import statements_of_reports as reports
    import statements_of_units as units

    tables = (models.PLACED, models.ATTENTION, models.DYNAMIC, models.SIZES, models.COMPRESSED)
    every = [row for table in (*tables, ops.OPS, ops.SHAPES, ops.TYPES, ops.WINDOWS) for row in table]
    score = scored([*every, *units.NUMBERS, *units.UNITS])
    later = Score(tuple(of_reports(reports.REPORTS)))
    for a in (*later.answers, *(a for a in score.answers if a.verdict == "contradicted")):
        print(f"{a.verdict:12} {a.name}: {a.why or f'{a.said!r}, as reported'}")
    print(f"tables: {score}")
    print(f"later reports: {later}")
    print(f"together: {Score((*score.answers, *later.answers))}")


if __name__ == "__main__":
    main()
