"""Show the sizes that were chosen, as a table and a plot: what a call costs, against the number of sizes."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from anesurgery.byte_counts import byte_words
from anesurgery.display import draws
from anesurgery.show.console import plain, shows
from anesurgery.show.plots import picture
from anesurgery.splitting.size_choice import SizeChoice

BAR = 24
"""Characters of the longest bar."""


@shows("SizeChoice")
def choice_group(sized: SizeChoice) -> Group:
    """A row for each number of sizes, with a bar as long as the expected value."""
    known = sized.best.bytes is not None
    table = Table("sizes", _what(sized), "", "padding", *["package"] * known, "which", box=box.SIMPLE_HEAD)
    largest = max(choice.expected for choice in sized.choices) or 1.0
    for choice in sized.choices:
        bar = "#" * round(BAR * choice.expected / largest)
        which = ", ".join(map(str, choice.sizes))
        size = [] if choice.bytes is None else [byte_words(choice.bytes)]
        cost = f"{choice.expected:.4g}"
        table.add_row(str(len(choice.sizes)), cost, bar, f"{choice.padding:.1%}", *size, which)
    words = f"best sizes: {', '.join(map(str, sized.sizes))}"
    return Group(
        plain(words, style="bold"),
        table,
        plain("each size is compiled when it is first loaded, which takes time"),
    )


def _what(sized: SizeChoice) -> str:
    return "expected time" if sized.timed else "expected positions"


@draws("SizeChoice", "plot")
def choice_plot(sized: SizeChoice, kind: str = "png") -> bytes:
    """The expected value against the number of sizes, and the size of the package where it is known.

    Args:
        sized: the choice.
        kind: "png", "svg" or "pdf".

    Raises:
        SurgeryError: matplotlib is not installed.
    """

    def draw(axes: Any) -> None:
        counts = [len(choice.sizes) for choice in sized.choices]
        axes.plot(counts, [choice.expected for choice in sized.choices], marker="o")
        axes.set(xlabel="sizes", ylabel=_what(sized), xticks=counts, ylim=(0, None))
        stored = [choice.bytes for choice in sized.choices if choice.bytes is not None]
        if stored:
            other = axes.twinx()
            other.plot(counts, [size / 1e6 for size in stored], marker="s", linestyle=":", color="grey")
            other.set(ylabel="MB of the package (dotted)", ylim=(0, None))

    return picture(draw, kind)
