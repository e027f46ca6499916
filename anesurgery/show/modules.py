"""Show a package beside its PyTorch module: a row for each call of a submodule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group
from rich.table import Table

from anesurgery.checking.against_torch import AgainstTorch, ModuleRow
from anesurgery.placement.certifying import GATE
from anesurgery.show.certificates import decibels
from anesurgery.show.console import plain, shows
from anesurgery.show.summary import counted

STYLES = {"parts": "bold red", "carries": "yellow", "rounds": "yellow", "not kept": "dim", "agrees": ""}
ROWS = 60
"""Rows that are shown; `rows` and `to_json` have them all."""


@shows("AgainstTorch")
def modules_group(comparison: AgainstTorch) -> Group:
    """A sentence and a table, for a rich console."""
    arithmetics = list(comparison.rows[0].psnr) if comparison.rows else []
    table = Table("module", "class", "", *(f"{name} dB" for name in arithmetics), "value", box=box.SIMPLE_HEAD)
    for row in comparison.rows[:ROWS]:
        numbers = [f"{row.psnr[name]:.0f}" for name in arithmetics]
        name, kind, value = map(plain, (row.name or "(whole)", row.kind, row.value or ""))
        table.add_row(name, kind, row.state, *numbers, value, style=STYLES[row.state])
    left = len(comparison.rows) - ROWS
    more = [plain(f"and {counted(left, 'row')} more in `rows`")] if left > 0 else []
    return Group(plain(words(comparison), style="bold"), table, *more)


def words(comparison: AgainstTorch) -> str:
    """Where they part, in a sentence."""
    if (first := comparison.first) is None:
        kept = sum(row.state == "agrees" for row in comparison.rows)
        every = counted(len(comparison.rows), "call")
        rest = ", the rest as far as rounding shows" if kept < len(comparison.rows) else ""
        agree = f"package and PyTorch agree: {kept} of {every} to {comparison.gate:g} dB in fp32{rest}"
        return "; ".join([agree, *_falls(comparison.rows)])
    name = first.name or "the whole module"
    near = f"{first.psnr['fp32']:.1f} dB in fp32, at {first.value}" if first.value else "no value is like it"
    return f"package and PyTorch part in {name} ({first.kind}): {near}"


def _falls(rows: Sequence[ModuleRow]) -> Iterator[str]:
    """The first module that is right in fp32 and wrong in another arithmetic, for each of these."""
    for arithmetic in rows[0].psnr if rows else ():
        first = next((row for row in rows if row.psnr[arithmetic] < GATE <= row.psnr["fp32"]), None)
        if first is not None:
            name = first.name or "the whole module"
            near = decibels(first.psnr[arithmetic]) + " dB" * math.isfinite(first.psnr[arithmetic])
            yield f"in {arithmetic} {name} ({first.kind}) is the first below {GATE:g} dB: {near}"
