"""Public statements about the Neural Engine, each with a model of its own: `inspect` says so, or does not know.

A row names the statement (the id of the project's table of evidence), builds what it speaks about, and gives
the chip, the OS and what was seen. Where `sure` is set, "unknown" is no answer. What is known of single ops on
an M4 is scored by `make placement`, and the open reports have a file of their own (`test_reports.py`).
"""

from __future__ import annotations

import pytest
from statement import Statement
from statements_of_models import ATTENTION, COMPRESSED, DYNAMIC, PLACED, SIZES
from statements_of_ops import OPS, SHAPES, TYPES, WINDOWS
from statements_of_units import NUMBERS, UNITS

import anesurgery as ane
from anesurgery.placement.verdicts import Legality

TABLE = [*NUMBERS, *UNITS, *PLACED, *TYPES, *SHAPES, *OPS, *WINDOWS, *ATTENTION, *DYNAMIC, *SIZES, *COMPRESSED]


@pytest.mark.one_of(10)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_statement_is_not_contradicted(row: Statement) -> None:
    said = row.read(ane.inspect(row.build(), row.target, compute_units=row.units, inputs=row.inputs))
    assert said == row.seen or (said is None and not row.sure)


def test_no_statement_is_written_twice() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)


def test_without_the_rules_statements_are_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: every op that a table knows is legal."""
    monkeypatch.setattr(Legality, "verdict", lambda self, op: (True, None))
    limits = [row for row in WINDOWS if row.seen is False and row.sure]
    said = [row.read(ane.inspect(row.build(), row.target)) for row in limits]
    assert len(limits) >= 8
    assert all(said)
