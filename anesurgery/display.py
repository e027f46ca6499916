"""Draw a result by what `anesurgery.show` registers for its type: results know no renderer.

The renderers are imported by name when something is drawn for the first time, as passes are when they are run.
"""

from __future__ import annotations

import importlib
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from anesurgery.errors import SurgeryError

RENDERERS = tuple(
    f"anesurgery.show.{name}" for name in ("reports", "surgeries", "terminal", "page", "chains", "compressions")
)
"""The modules that register renderers."""

Form: TypeAlias = Literal["report", "rich", "text", "details", "html", "json", "page", "plot"]
"""Its parts, what rich prints, the same as text, in full, a notebook cell, plain data, a page, a picture."""

_DRAWN: dict[tuple[str, Form], Callable[..., Any]] = {}


LONGEST = 400
"""Characters of a word that are printed; only a name from a hostile model has more."""


def printable(text: object) -> str:
    """Text that may go to a terminal: lines stay, what cannot be printed is replaced, endless words are cut."""
    words = re.sub(rf"\S{{{LONGEST},}}", lambda word: short_name(word[0], LONGEST), str(text))
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in words)


def counted(number: int, what: str) -> str:
    """A number of things in words: "1 chunk", "2 chunks"."""
    plural = what + ("es" if what.endswith(("ch", "ss")) else "s")
    return f"{number:,} {what if number == 1 else plural}"


def finite(value: Any) -> Any:
    """Plain data as JSON can hold it: what is infinite or NaN as a word."""
    if isinstance(value, dict):
        return {key: finite(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(held) for held in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def written(value: Any) -> Any:
    """The value of an option as JSON shows it: what JSON does not hold as Python writes it."""
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def folded(text: str, width: int = 80) -> str:
    """Fold text into lines that fit.

    Paragraphs are filled again, tables of Markdown become columns, and indented lines go on deeper.
    """
    filled: list[str] = []
    for kind, group in itertools.groupby(text.splitlines(), key=_kind_of_line):
        lines = list(group)
        if kind == "table":
            filled += _columns(lines, width)
        elif kind == "paragraph":
            filled += textwrap.wrap(" ".join(lines), width, break_long_words=False, break_on_hyphens=False)
        else:
            for line in lines:
                deeper = line[: len(line) - len(line.lstrip())] + "    "
                filled += textwrap.wrap(line, width, subsequent_indent=deeper, break_on_hyphens=False) or [""]
    return "\n".join(filled)


def _kind_of_line(line: str) -> Literal["table", "indented", "paragraph"]:
    """Return how `folded` treats a line; an empty line and an item of a list count as indented."""
    if line.startswith("|"):
        return "table"
    return "indented" if not line or line[0] in " *" else "paragraph"


def _columns(lines: Sequence[str], width: int) -> list[str]:
    """Return a table of Markdown as columns; cells that do not fit go on below in their column."""
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if set(line) - set("|-: ")
    ]
    count = len(rows[0])
    longest = [max(len(row[i]) for row in rows) for i in range(count)]
    room = width - 2 * (count - 1)
    widths = [min(size, room // count) for size in longest]
    widths[-1] = max(room - sum(widths[:-1]), 1)
    printed = []
    for row in [rows[0], ["-" * size for size in map(min, longest, widths)], *rows[1:]]:
        cells = [textwrap.wrap(cell, size) or [""] for cell, size in zip(row, widths, strict=True)]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            printed.append(
                "  ".join(part.ljust(size) for part, size in zip(parts, widths, strict=True)).rstrip()
            )
    return printed


def short_name(name: str, length: int = 28) -> str:
    """The name of an op; of a long one the beginning and the end, which tells more."""
    head = length // 3
    return name if len(name) <= length else f"{name[:head]}…{name[head + 1 - length :]}"


def draws(kind: str, form: Form) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that draws results of the class named `kind`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _DRAWN[kind, form] = function
        return function

    return register


def drawn(value: Any, form: Form, *more: Any) -> Any:
    """A result in one of the forms.

    Raises:
        KeyError: nothing draws its class in that form.
    """
    for module in RENDERERS:
        importlib.import_module(module)
    kinds = [cls.__name__ for cls in type(value).__mro__]
    renderer = next(((kind, form) for kind in kinds if (kind, form) in _DRAWN), (kinds[0], form))
    return _DRAWN[renderer](value, *more)


class Drawn:
    """A result that prints as text in a terminal, and as HTML in a notebook."""

    def __str__(self) -> str:
        return str(drawn(self, "text"))

    def __rich__(self) -> Any:
        return drawn(self, "rich")

    def _repr_html_(self) -> str:
        return str(drawn(self, "html"))


# Bytes in words have decimal units, as Finder and Xcode have them.

KB, MB, GB = 10**3, 10**6, 10**9
"""Bytes."""
UNITS = {"TB": 1000 * GB, "GB": GB, "MB": MB, "kB": KB}
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)B?\s*", re.IGNORECASE)
LARGEST = 999.5
"""From here on three digits are not enough for a number, and the next unit is taken."""


def read_size(size: float | str | None) -> int:
    """A number of bytes, given as a number or in words.

    Raises:
        SurgeryError: it is neither, or not above 0.
    """
    parts = SIZE.fullmatch(str(size))
    if parts is None or float(parts[1]) <= 0:
        raise SurgeryError(f"max_bytes={size!r} is not a size; give bytes, or as '950 MB'")
    return int(float(parts[1]) * {"": 1, "K": KB, "M": MB, "G": GB}[parts[2].upper()])


def byte_words(count: float) -> str:
    """Return bytes in words, with three digits: "1.5 MB"; 999,700 bytes are "1 MB"."""
    for unit, factor in UNITS.items():
        if count >= factor * LARGEST / 1000:
            return f"{count / factor:.3g} {unit}"
    return "1 byte" if count == 1 else f"{count:.0f} bytes"
