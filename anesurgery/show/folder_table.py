"""Show what was said of each model in a folder: a row each."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table

from anesurgery.checking.ranges import Ranges
from anesurgery.display import short_name
from anesurgery.placement.folders import Folder
from anesurgery.placement.inspection import Inspection
from anesurgery.show.console import plain, shows
from anesurgery.show.summary import counted


@shows("Folder")
def folder_group(folder: Folder) -> Group:
    """A row for each model."""
    table = Table("model", "in a sentence", box=box.SIMPLE_HEAD)
    for name, one in folder.models.items():
        table.add_row(plain(short_name(name)), plain(_sentence(one)))
    refused = len(folder.refused)
    more = f", {refused} refused" if refused else ""
    return Group(plain(f"{folder.path}: {counted(len(folder.models), 'model')}{more}", style="bold"), table)


def _sentence(one: Inspection | Ranges | str) -> str:
    if isinstance(one, str):
        return f"refused: {one}"
    if isinstance(one, Inspection):
        return one.summary
    first = ", ".join(f"{row.name} in {arithmetic}" for arithmetic, row in one.first.items())
    return one.verdict + (f": first {first}" if first else "")
