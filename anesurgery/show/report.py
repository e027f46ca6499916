"""The parts of a report: a title, and below it lines, tables and lists.

Other files fill them; `console` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Line:
    """Words on a line or in a cell, with their look in a terminal ("bold", "cyan", "dim") and their indent."""

    words: object
    style: str = ""
    indent: int = 0


@dataclass(frozen=True)
class Table:
    """A table of words or lines; it is not shown without rows."""

    head: Sequence[str]
    """Names of the columns."""
    rows: Iterable[Sequence[object]]
    """One cell for each column."""
    ruled: bool = True
    """Draw a line below the head."""
    edge: bool = True
    """Leave a blank before the first column."""
    styles: Sequence[str] = ()
    """The look of each row; plain where there are none."""

    @property
    def filled(self) -> Table:
        """The table without the columns in which no row says anything."""
        rows = [tuple(row) for row in self.rows]
        said = [any(_words(row[k]) not in ("", "-") for row in rows) for k in range(len(self.head))]
        if not rows or not self.head:
            return replace(self, rows=rows)
        return replace(
            self,
            head=[name for name, is_said in zip(self.head, said, strict=True) if is_said],
            rows=[[cell for cell, is_said in zip(row, said, strict=True) if is_said] for row in rows],
        )


def _words(cell: object) -> str:
    return str(cell.words if isinstance(cell, Line) else cell)


@dataclass(frozen=True)
class Listing:
    """A table whose rows have sentences below them, in the whole width."""

    head: Sequence[str]
    """Names of the columns."""
    entries: Sequence[tuple[Sequence[object], Sequence[object]]]
    """(the cells of a row, its sentences)."""


@dataclass(frozen=True)
class Report:
    """A report on a result."""

    title: Any
    """A sentence, or a rich text."""
    parts: Sequence[Any] = ()
    """Words, `Line`, `Table`, `Listing`, another report, or something that rich prints, such as a bar."""
    style: str = "bold"
    """The look of the title."""


def notes(words: Iterable[object]) -> list[Line]:
    """Return a line for each note."""
    return [Line(f"note: {one}", "cyan") for one in words]


def first_rows(
    rows: Sequence[Any], most: int, words: str = "... and {} more"
) -> tuple[Sequence[Any], list[str]]:
    """Return the first rows of many, and a line that says how many are left out."""
    left = len(rows) - most
    return rows[:most], [words.format(left)] if left > 0 else []
