"""Show a certificate of numbers: a sentence, the outputs, and the ops where errors enter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from anesurgery.checking.grades import OutputComparison
from anesurgery.display import short_name
from anesurgery.placement.certifying import Certificate
from anesurgery.placement.choices import Choice
from anesurgery.show.console import shows
from anesurgery.show.report import Report, Table, notes

STYLES = {"holds": "bold green", "at risk": "bold yellow", "fails": "bold red"}
ROWS = 12
"""Ops that are shown, about a screen with what is around; `rows` and `to_json` have them all."""


@shows("Certificate")
def certificate_report(certificate: Certificate) -> Report:
    """A sentence and two tables."""
    arithmetics = list(certificate.outputs)
    every = zip(*certificate.outputs.values(), strict=True)
    outputs = [(several[0].name, *map(_nearness, several)) for several in every]
    both = f"dB ({', '.join(arithmetics)})"
    ops = [
        (short_name(row.name), row.op_type, own, grown, ", ".join(row.repairs))
        for row in certificate.enters[:ROWS]
        for own, grown in [[_each(side, arithmetics) for side in (row.own, row.grown)]]
    ]
    return Report(
        f"{certificate.verdict}: {certificate.why} ({tried(certificate)})",
        [
            *(line for choice in certificate.choices[:ROWS] for line in (choice.words, *_kept_by(choice))),
            Table(("output", *(f"{a} dB" for a in arithmetics)), outputs),
            Table(("where errors enter", "op type", f"own {both}", f"grown {both}", "repair"), ops),
            *notes(certificate.notes),
        ],
        STYLES[certificate.verdict],
    )


def _each(side: Mapping[str, float], arithmetics: Sequence[str]) -> str:
    return ", ".join(decibels(side.get(a, math.nan)) for a in arithmetics)


def _nearness(output: OutputComparison) -> str:
    """How near an output is; which share is not finite, where some of it is not."""
    count = output.bad + output.undefined
    return f"{count / (output.compared + count):.0%} not finite" if count else decibels(output.psnr)


def _kept_by(choice: Choice) -> list[str]:
    """Which ops keep a choice, and what that costs."""
    if not (ops := choice.exact_ops):
        return []
    return [f"  kept by {len(ops)} ops in fp32 ({choice.cost}): widen_to_fp32 ops={','.join(ops)}"]


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
