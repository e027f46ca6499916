"""Show the sizes that were chosen: what a call costs on average, against the number of sizes."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table

from anesurgery.show.console import plain, shows
from anesurgery.splitting.size_choice import SizeChoice

BAR = 24
"""Characters of the longest bar."""


@shows("SizeChoice")
def choice_group(sized: SizeChoice) -> Group:
    """A row for each number of sizes, with a bar as long as the expected value."""
    what = "expected time" if sized.timed else "expected positions"
    table = Table("sizes", what, "", "padding", "which", box=box.SIMPLE_HEAD)
    largest = max(choice.expected for choice in sized.choices) or 1.0
    for choice in sized.choices:
        bar = "#" * round(BAR * choice.expected / largest)
        which = ", ".join(map(str, choice.sizes))
        table.add_row(str(len(choice.sizes)), f"{choice.expected:.4g}", bar, f"{choice.padding:.1%}", which)
    words = f"best sizes: {', '.join(map(str, sized.sizes))}"
    return Group(
        plain(words, style="bold"),
        table,
        plain("each size is compiled when it is first loaded, which takes time"),
    )
