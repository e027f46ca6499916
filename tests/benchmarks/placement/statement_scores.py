"""Score public statements that can be asked of a model: how many inspect answers, and how many of these right.

The statements are the tables of `tests/support`; "not known" is no answer, and a wrong answer is listed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anesurgery as ane

SUPPORT = Path(__file__).resolve().parents[2] / "support"


@dataclass(frozen=True)
class Score:
    """How many statements were asked and answered, and the names of those answered wrongly."""

    asked: int
    answered: int
    wrong: tuple[str, ...]

    @property
    def coverage(self) -> float:
        """Share that was answered."""
        return self.answered / self.asked

    @property
    def precision(self) -> float:
        """Share of the answers that agree."""
        return 1 - len(self.wrong) / self.answered if self.answered else 1.0


def scored(statements: Iterable[Any]) -> Score:
    """Ask `inspect` about each statement (`tests/support/statement.py`)."""
    asked, answered, wrong = 0, 0, []
    for row in statements:
        found = ane.inspect(row.build(), row.target, compute_units=row.units, inputs=row.inputs)
        said, asked = row.read(found), asked + 1
        answered += said is not None
        if said is not None and said != row.seen:
            wrong.append(row.name)
    return Score(asked, answered, tuple(wrong))


def main() -> None:
    """Print the score of every table."""
    sys.path.insert(0, str(SUPPORT))
    import statements_of_models as models
    import statements_of_ops as ops
    import statements_of_units as units

    tables = (models.PLACED, models.ATTENTION, models.DYNAMIC, models.SIZES, models.COMPRESSED)
    every = [row for table in (*tables, ops.OPS, ops.SHAPES, ops.TYPES, ops.WINDOWS) for row in table]
    score = scored([*every, *units.NUMBERS, *units.UNITS])
    print(f"{score.asked} statements: {score.coverage:.1%} answered, {score.precision:.1%} of these right")
    for name in score.wrong:
        print(f"wrong: {name}")


if __name__ == "__main__":
    main()
