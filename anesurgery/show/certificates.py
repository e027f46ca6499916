"""Show a certificate of numbers: a sentence, the outputs, and the ops where errors enter."""

from __future__ import annotations

import math

from rich import box
from rich.console import Group
from rich.table import Table

from anesurgery.checking.grades import OutputComparison
from anesurgery.display import short_name
from anesurgery.placement.certifying import Certificate
from anesurgery.placement.choices import Choice
from anesurgery.show.console import plain, shows

STYLES = {"holds": "bold green", "at risk": "bold yellow", "fails": "bold red"}
CELL = 28
"""Characters of a name at most."""
ROWS = 12
"""Ops that are shown, about a screen with what is around; `rows` and `to_json` have them all."""


@shows("Certificate")
def certificate_group(certificate: Certificate) -> Group:
    """A sentence and two tables, for a rich console."""
    arithmetics = list(certificate.outputs)
    outputs = Table("output", *(f"{a} dB" for a in arithmetics), box=box.SIMPLE_HEAD)
    for several in zip(*certificate.outputs.values(), strict=True):
        outputs.add_row(plain(several[0].name), *map(_nearness, several))
    both = f"dB ({', '.join(arithmetics)})"
    ops = Table("where errors enter", "op type", f"own {both}", f"grown {both}", "repair", box=box.SIMPLE_HEAD)
    for row in certificate.enters[:ROWS]:
        numbers = [
            ", ".join(decibels(side.get(a, math.nan)) for a in arithmetics) for side in (row.own, row.grown)
        ]
        ops.add_row(
            plain(short_name(row.name, CELL)), plain(row.op_type), *numbers, plain(", ".join(row.repairs))
        )
    first = plain(
        f"{certificate.verdict}: {certificate.why} ({tried(certificate)})", style=STYLES[certificate.verdict]
    )
    said = [choice.words + _kept_by(choice) for choice in certificate.choices[:ROWS]]
    notes = [plain(f"note: {note}", style="cyan") for note in certificate.notes]
    return Group(first, *map(plain, said), outputs, ops, *notes)


def _nearness(output: OutputComparison) -> str:
    """How near an output is; which share is not finite, where some of it is not."""
    count = output.bad + output.undefined
    return f"{count / (output.compared + count):.0%} not finite" if count else decibels(output.psnr)


def _kept_by(choice: Choice) -> str:
    """Which ops keep a choice, and what that costs."""
    if not choice.exact_ops:
        return ""
    ops = ",".join(choice.exact_ops)
    return f"\n  kept by {len(choice.exact_ops)} ops in fp32 ({choice.cost}): widen_to_fp32 ops={ops}"


def tried(certificate: Certificate) -> str:
    """How many sets of inputs were tried, in words."""
    sets = f"{certificate.samples} set{'s' if certificate.samples > 1 else ''} of inputs"
    return f"{sets}, {certificate.searched} more searched" if certificate.searched else sets


def decibels(value: float) -> str:
    """A PSNR in words; empty where there is none."""
    if math.isnan(value):
        return ""
    if math.isinf(value):
        return "identical" if value > 0 else "not finite"
    return f"{value:.0f}"
