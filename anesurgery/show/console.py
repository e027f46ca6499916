"""The one way to a terminal: names from models have no markup, and what cannot be printed is replaced."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from anesurgery.display import draws, printable

WIDTH = 80
"""Columns of what is not a terminal."""

Drawing: TypeAlias = Callable[..., RenderableType]
"""Gives what rich prints of a result."""


class PlainConsole(Console):
    """A console for text that holds names from models: they cannot style it, move the cursor, or break it.

    In a notebook too it writes where it is told to; a cell shows what `_repr_html_` gives.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, force_jupyter=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments to print; those with text of a model have nothing in them that a terminal obeys."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def plain(words: object, style: str = "") -> Text:
    """Text from a model in a line: no markup is read in it, and what cannot be printed is replaced."""
    return Text(printable(words).replace("\n", "�"), style=style)


def as_text(shown: Any) -> str:
    """Something that rich shows, as plain text."""
    file = io.StringIO()
    PlainConsole(file=file, width=WIDTH, color_system=None).print(shown, crop=False)
    return file.getvalue().rstrip()


def as_html(shown: Any) -> str:
    """Something that rich shows, for a notebook cell."""
    console = PlainConsole(file=io.StringIO(), width=WIDTH, record=True)
    console.print(shown)
    return console.export_html(inline_styles=True, code_format="<pre style='line-height:1.2'>{code}</pre>")


def shows(kind: str) -> Callable[[Drawing], Drawing]:
    """Register a function that draws results of the class named `kind`: as text, and in a notebook cell."""

    def register(drawing: Drawing) -> Drawing:
        draws(kind, "rich")(drawing)
        draws(kind, "text")(lambda result: as_text(drawing(result)))
        draws(kind, "html")(lambda result: as_html(drawing(result)))
        return drawing

    return register
