"""Print reports in a terminal with rich, safely: names from models hold no markup and no control characters."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, TypeAlias, TypeVar

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from anesurgery.display import Form, draws, printable
from anesurgery.show.report import Line, Listing, Report, Table

WIDTH = 80
"""Width in columns where the output is no terminal."""

SHOWN = 30
"""The most entries of a list; the page has them all."""
CELL, GAP = 28, "  "
"""The most characters of a list's column, and the gap between two columns."""

K = TypeVar("K")
Looks: TypeAlias = Mapping[K, tuple[str, str]]
Reporter: TypeAlias = Callable[..., Report]
"""A function from a result to its report."""


class PlainConsole(Console):
    """A console for text with names from models: they cannot style it, move the cursor, or break it.

    It writes to its file in a notebook too; notebook cells show `_repr_html_`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, force_jupyter=False, **options)

    def print(self, *parts: Any, **options: Any) -> None:
        """Print reports, and what rich prints."""
        written = (group(part) if isinstance(part, (Report, Table, Listing, Line)) else part for part in parts)
        super().print(*written, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments to print, with control characters of models replaced."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def plain(words: object, style: str = "") -> Text:
    """Return text from a model on one line, without markup and control characters."""
    return Text(printable(words).replace("\n", "�"), style=style)


def group(*parts: Any) -> Group:
    """Return reports and their parts as rich prints them."""
    return Group(*itertools.chain.from_iterable(map(_as_rich, parts)))


def _as_rich(part: Any) -> Iterable[Any]:
    if isinstance(part, Report):
        yield plain(part.title, part.style) if isinstance(part.title, str) else part.title
        yield from group(*part.parts).renderables
    elif isinstance(part, Table):
        filled = part.filled
        ruled = box.SIMPLE_HEAD if part.ruled and part.head else None
        edge = part.edge and bool(part.head)
        columns = [Column(name, overflow="fold") for name in filled.head]  # a long name goes on below
        table = RichTable(*columns, box=ruled, show_header=bool(part.head), pad_edge=edge)
        for row, style in itertools.zip_longest(filled.rows, part.styles):
            table.add_row(*map(_as_rich_text, row), style=style)
        yield from [table] * bool(table.row_count)
    elif isinstance(part, Listing):
        yield from _listing_lines(part) if part.entries else ()
    else:
        yield _as_rich_text(part)


def _listing_lines(listing: Listing) -> Iterable[Any]:
    """Yield a line of columns for each entry, and its sentences below it."""
    rows = [[_as_rich_text(cell) for cell in cells] for cells, _ in listing.entries[:SHOWN]]
    head = [Text(name, "dim underline") for name in listing.head]
    widths = [min(max(cell.cell_len for cell in column), CELL) for column in zip(head, *rows, strict=True)]
    while sum(widths) + len(GAP) * (len(widths) - 1) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    yield _columns(head, widths)
    for row, (_, sentences) in zip(rows, listing.entries, strict=False):
        yield _columns(row, widths)
        yield from (Padding(_as_rich_text(one), (0, 0, 0, 4), expand=False) for one in sentences)
    if (left := len(listing.entries) - SHOWN) > 0:
        yield Text(f"and {left:,} more; the page has all", "dim")


def _columns(cells: list[Text], widths: list[int]) -> Text:
    """Return a row of columns; what is longer than its column goes on below."""
    wrapped = [cell.wrap(Console(), width, overflow="fold") for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for parts in itertools.zip_longest(*wrapped, fillvalue=Text()):
        padded = [part.copy() for part in parts]
        for part, width in zip(padded, widths, strict=True):
            part.truncate(width, pad=True)
        lines.append(Text(GAP).join(padded))
        lines[-1].rstrip()
    return Text("\n").join(lines)


def _as_rich_text(part: Any) -> Any:
    """Return a part of a report as rich prints it; words become text."""
    if isinstance(part, Line):
        words = plain(part.words, part.style)
        return Padding(words, (0, 0, 0, part.indent), expand=False) if part.indent else words
    return part if hasattr(part, "__rich_console__") or hasattr(part, "__rich__") else plain(part)


def bars(
    rows: Sequence[tuple[str, Sequence[tuple[K, int]]]],
    legend: Mapping[K, str],
    looks: Mapping[K, tuple[str, str]],
) -> Text:
    """Return bars below each other, and a legend, whose lines break between its entries.

    Args:
        rows: (label, runs of cells) of each bar; a run is (kind of cell, how many).
        legend: kind of cell -> its meaning.
        looks: kind of cell -> (glyph, colour).
    """
    shown = Text()
    for label, cells in rows:
        shown.append(label)
        for kind, count in cells:
            shown.append(looks[kind][0] * count, looks[kind][1])
        shown.append("\n" if shown else "")
    column = 0
    for kind, words in legend.items():
        if column and column + 2 + len(words) > WIDTH:
            shown.rstrip()
            shown.append("\n")
            column = 0
        shown.append(*looks[kind]).append(f" {words}   ")
        column += 5 + len(words)
    shown.rstrip()
    return shown


def as_text(*parts: Any) -> str:
    """Return a report, or something that rich prints, as plain text."""
    file = io.StringIO()
    PlainConsole(file=file, width=WIDTH, color_system=None).print(*parts, crop=False)
    return file.getvalue().rstrip()


def as_html(*parts: Any) -> str:
    """Return reports for a notebook cell: sentences, and tables in which nothing is cut.

    What rich draws, such as a bar, is what a terminal shows.
    """
    return "".join(itertools.chain.from_iterable(map(_html_parts, parts)))


def _html_parts(part: Any) -> Iterable[str]:
    if isinstance(part, Report):
        yield from _html_parts(Line(part.title, part.style) if isinstance(part.title, str) else part.title)
        yield from map(as_html, part.parts)
    elif isinstance(part, Table):
        yield _html_table(part.filled)
    elif isinstance(part, Listing):
        rows = [(*cells, "\n".join(map(_said, sentences))) for cells, sentences in part.entries]
        yield _html_table(Table((*part.head, "why"), rows).filled)
    elif hasattr(part, "__rich_console__") or hasattr(part, "__rich__"):
        console = PlainConsole(file=io.StringIO(), width=WIDTH, record=True)
        console.print(part)
        yield console.export_html(inline_styles=True, code_format="<pre style='line-height:1.2'>{code}</pre>")
    else:
        line = part if isinstance(part, Line) else Line(part)
        look = Style.parse(line.style).get_html_style()
        yield f'<div style="margin-left: {line.indent}ch; {look}">{escape(printable(line.words))}</div>'


def _html_table(table: Table) -> str:
    """Return a table, which scrolls in a narrow cell; lines of a cell stay lines."""
    if not table.rows:
        return ""
    look = ' style="text-align: left; vertical-align: top; padding: 2px 8px; white-space: pre-line"'
    head = "".join(f"<th{look}>{escape(name)}</th>" for name in table.head)
    cells = ["".join(f"<td{look}>{escape(_said(cell))}</td>" for cell in row) for row in table.rows]
    rows = "".join(f"<tr>{row}</tr>" for row in (head, *cells) if row)
    return f'<div style="overflow-x: auto" tabindex="0" role="region"><table>{rows}</table></div>'


def _said(cell: object) -> str:
    return printable(cell.words if isinstance(cell, Line) else cell)


def shows(kind: str, *forms: Form) -> Callable[[Reporter], Reporter]:
    """Register a function that reports on results of the class named `kind`.

    Args:
        kind: name of the class.
        forms: "report", "rich", "text", "html" for a notebook cell, or "details"; the first four by default.
    """
    writers: dict[Form, Callable[[Report], Any]] = {
        "report": lambda report: report,
        "rich": group,
        "html": as_html,
    }

    def register(reporter: Reporter) -> Reporter:
        for form in forms or ("report", "rich", "text", "html"):
            write = writers.get(form, as_text)
            draws(kind, form)(lambda result, write=write: write(reporter(result)))
        return reporter

    return register
