"""A report: a title, and below it lines, tables and bars. It has no look of its own; `console` writes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Line:
    """Words in a line or in a cell, how they look in a terminal ("bold", "cyan", "dim"), and their indent."""

    words: object
    style: str = ""
    indent: int = 0


@dataclass(frozen=True)
class Table:
    """Cells, which are words or lines, below the names of columns; without rows it is not shown.

    Attributes:
        head: names of the columns.
        rows: as many cells each.
        ruled: has the head a line below it?
        edge: is there a blank before the first column?
        styles: how each row looks; plain where there are none.
    """

    head: Sequence[str]
    rows: Iterable[Sequence[object]]
    ruled: bool = True
    edge: bool = True
    styles: Sequence[str] = ()


@dataclass(frozen=True)
class Listing:
    """A table whose rows have sentences below them, which have the whole width.

    Attributes:
        head: names of the columns.
        entries: the cells of a row, and its sentences.
    """

    head: Sequence[str]
    entries: Sequence[tuple[Sequence[object], Sequence[object]]]


@dataclass(frozen=True)
class Report:
    """What is said of a result.

    Attributes:
        title: a sentence, or text with looks of its own.
        parts: words, `Line`, `Table`, `Listing`, a report below this one, or what rich shows, such as a bar.
        style: of the title.
    """

    title: Any
    parts: Sequence[Any] = ()
    style: str = "bold"


def notes(words: Iterable[object]) -> list[Line]:
    """What the reader must know."""
    return [Line(f"note: {one}", "cyan") for one in words]


def first(rows: Sequence[Any], most: int, words: str = "... and {} more") -> tuple[Sequence[Any], list[str]]:
    """The first rows of many, and a line that says how many are left out."""
    left = len(rows) - most
    return rows[:most], [words.format(left)] if left > 0 else []
