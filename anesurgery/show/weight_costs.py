"""Show what compressing each weight costs, and which mode each weight is to get."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from anesurgery.byte_counts import byte_words
from anesurgery.compressing.assignment import Option, Proposal
from anesurgery.compressing.sensitivity import Sensitivity
from anesurgery.display import short_name
from anesurgery.semantics.reading import in_decibels
from anesurgery.show.console import plain, shows
from anesurgery.show.summary import counted

ROWS = 40
"""Weights of a table; JSON has all."""


@shows("Sensitivity")
def sensitivity_group(costs: Sensitivity) -> Group:
    """A row for each weight, the KL divergence of each mode in nats; where outputs have no rows, PSNR in dB."""
    by_kl = any(o.kl for row in costs.rows for o in row.options.values())
    table = Table("weight", "read by", "size", *costs.modes, box=box.SIMPLE_HEAD)
    for row in costs.rows[:ROWS]:
        cells = [_cell(row.options.get(mode), by_kl) for mode in costs.modes]
        table.add_row(plain(short_name(row.weight)), ", ".join(row.readers), byte_words(row.bytes), *cells)
    more = [plain(f"... and {len(costs.rows) - ROWS} more")] if len(costs.rows) > ROWS else []
    what = "KL divergence in nats" if by_kl else "PSNR in dB"
    share = "" if costs.complete else f", {len(costs.rows)} of {costs.total} weights"
    tried = f"{counted(costs.samples, 'sample')}{share}"
    words = f"loss of the outputs if one weight is compressed: {what}; {tried}"
    return Group(plain(words, style="bold"), table, *more)


def _cell(option: Option | None, by_kl: bool) -> str:
    if option is None:
        return "-"
    return f"{option.kl:.2g}" if by_kl else f"{option.psnr:.1f}"


@shows("Proposal")
def proposal_group(proposal: Proposal) -> Group:
    """How many weights get which mode, and what that is estimated to cost."""
    counts = Counter(proposal.modes.values())
    table = Table("mode", "weights", box=box.SIMPLE_HEAD)
    for mode, count in sorted(counts.items()):
        table.add_row(mode, str(count))
    share = f"{byte_words(proposal.bytes)} of {byte_words(proposal.plain_bytes)}"
    size = f"weights take {share}, {proposal.bits:.2f} bits a number"
    cost = f"estimated from each weight alone: KL {proposal.kl:.3g} nats, {in_decibels(proposal.psnr, 'PSNR ')}"
    return Group(plain(size, style="bold"), plain(cost), table)


def result_json(costs: Sensitivity, proposal: Proposal | None) -> dict[str, Any]:
    """Both as plain data."""
    return costs.to_json() | ({} if proposal is None else {"proposal": proposal.to_json()})
