"""Show a certificate of numbers: a sentence, the outputs, and the ops where errors enter; or all as a page.

The page is one HTML file that needs no network: the ops with their data flow, coloured by error. An op unfolds
to histograms of its values in each arithmetic, and to the passes that repair it. It is plain HTML and SVG; a
script only unfolds an op that a link names, and changes the colouring. Names are escaped by jinja2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from anesurgery.checking.output_comparison import OutputComparison
from anesurgery.display import counted, draws, short_name
from anesurgery.placement.certifying import Certificate
from anesurgery.placement.choices import Choice
from anesurgery.placement.op_errors import BINS, Histogram, OpError
from anesurgery.show.console import shows
from anesurgery.show.page import environment
from anesurgery.show.report import Report, Table, notes

STYLES = {"holds": "bold green", "at risk": "bold yellow", "fails": "bold red"}
ROWS = 12
"""The most ops that are shown, about a screen; `rows` and `to_json` have them all."""


@shows("Certificate")
def certificate_report(certificate: Certificate) -> Report:
    """Report a certificate as a sentence and two tables."""
    arithmetics = list(certificate.outputs)
    every = zip(*certificate.outputs.values(), strict=True)
    outputs = [(several[0].name, *map(_output_words, several)) for several in every]
    both = f"dB ({', '.join(arithmetics)})"
    ops = [
        (short_name(row.name), row.op_type, own, grown, ", ".join(row.repairs))
        for row in certificate.enters[:ROWS]
        for own, grown in [[_decibels_of_all(side, arithmetics) for side in (row.own, row.grown)]]
    ]
    return Report(
        f"{certificate.verdict}: {certificate.why} ({tried_words(certificate)})",
        [
            *(
                op_line
                for choice in certificate.choices[:ROWS]
                for op_line in (choice.words, *_kept_by(choice))
            ),
            Table(("output", *(f"{a} dB" for a in arithmetics)), outputs),
            Table(("where errors enter", "op type", f"alone {both}", f"carried {both}", "repair"), ops),
            *notes(certificate.notes),
        ],
        STYLES[certificate.verdict],
    )


def _decibels_of_all(side: Mapping[str, float], arithmetics: Sequence[str]) -> str:
    return ", ".join(decibels(side.get(a, math.nan)) for a in arithmetics)


def _output_words(output: OutputComparison) -> str:
    """Return how near an output is, or which share of it is not finite."""
    count = output.bad + output.undefined
    where = " in fp32" if output.only_reference == count else ""
    return f"{count / (output.compared + count):.0%} not finite{where}" if count else decibels(output.psnr)


def _kept_by(choice: Choice) -> list[str]:
    """Return which ops keep a choice, and what that costs."""
    if not (ops := choice.exact_ops):
        return []
    return [f"  kept by {counted(len(ops), 'op')} in fp32 ({choice.cost}): widen_to_fp32 ops={','.join(ops)}"]


def tried_words(certificate: Certificate) -> str:
    """Return how many sets of inputs were tried, in words."""
    sets = f"{certificate.samples} set{'s' if certificate.samples > 1 else ''} of inputs"
    return f"{sets}, {certificate.searched} more searched" if certificate.searched else sets


def decibels(value: float) -> str:
    """Return a PSNR in words; "" where there is none."""
    if math.isnan(value):
        return ""
    if math.isinf(value):
        return "identical" if value > 0 else "not finite"
    return f"{value:.0f}"


BANDS = (
    ("80 dB and more", 80.0),
    ("60 to 80", 60.0),
    ("40 to 60", 40.0),
    ("20 to 40", 20.0),
    ("less", -math.inf),
)
"""Bands of errors: (words, the least PSNR in dB)."""
WIDTH, HEIGHT = 240, 72
"""The size of a histogram in pixels."""
LANES = 8
"""The most rails side by side; further ones share the last, so that names have room on a narrow page."""


@dataclass(frozen=True)
class Rail:
    """The lines of data flow beside an op.

    Attributes:
        lane: the lane of the op itself.
        passing: lanes of values from above that are read below.
        incoming: lanes of the values that it reads.
        after: lanes that continue below it.
    """

    lane: int
    passing: tuple[int, ...]
    incoming: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class Bars:
    """A histogram of one arithmetic over that of exact numbers.

    Attributes:
        arithmetic: the other arithmetic.
        exact: SVG path of the area, in exact arithmetic.
        other: SVG path of the line, in the other arithmetic.
        outside: elements in the other arithmetic that no bin holds.
    """

    arithmetic: str
    exact: str
    other: str
    outside: int


@dataclass(frozen=True)
class OpLine:
    """An op as the template needs it.

    Attributes:
        row: its errors.
        rail: the data flow beside it.
        own: band of the error that it adds.
        grown: band of the error that it ends with.
        bars: a histogram for each arithmetic but the exact one.
    """

    row: OpError
    rail: Rail
    own: int
    grown: int
    bars: list[Bars]


@draws("Certificate", "page")
def certificate_page(certificate: Certificate) -> str:
    """Return a certificate as an HTML document."""
    at = {row.name: k for k, row in enumerate(certificate.rows)}
    return (
        environment()
        .get_template("certificate.html")
        .render(
            found=certificate,
            lines=[
                op_line(row, rail) for row, rail in zip(certificate.rows, rails(certificate.rows), strict=True)
            ],
            outputs=list(zip(*certificate.outputs.values(), strict=True)),
            worst=[(at[row.name], row) for row in certificate.enters[:ROWS] if row.worst < BANDS[0][1]],
            bands=[words for words, _ in BANDS],
            tried=tried_words(certificate),
            decibels=decibels,
            status={"holds": 0, "at risk": 1, "fails": 2}[certificate.verdict],
            width=WIDTH,
            height=HEIGHT,
        )
    )


def op_line(row: OpError, rail: Rail) -> OpLine:
    """Return an op as the template needs it."""
    drawn = row.histogram
    others = [] if drawn is None else [bars(drawn, a) for a in drawn.counts if a != "fp32"]
    return OpLine(row, rail, band(row.worst), band(min(row.grown.values(), default=math.inf)), others)


def band(psnr: float) -> int:
    """Return the number of the band of an error; 0 is the best."""
    return next(k for k, (_, least) in enumerate(BANDS) if psnr >= least)


def bars(drawn: Histogram, arithmetic: str) -> Bars:
    """Return two histograms on one scale."""
    most = max(*drawn.counts["fp32"], *drawn.counts[arithmetic], 1)
    exact, other = (_steps(drawn.counts[a], most) for a in ("fp32", arithmetic))
    return Bars(
        arithmetic, f"M0 {HEIGHT}{exact}V{HEIGHT}z", f"M0 {HEIGHT}{other}V{HEIGHT}", drawn.outside[arithmetic]
    )


def _steps(counts: tuple[int, ...], most: int) -> str:
    wide = WIDTH // BINS
    return "".join(f"V{HEIGHT - n / most * (HEIGHT - 4):.1f}H{(k + 1) * wide}" for k, n in enumerate(counts))


def rails(rows: Sequence[OpError]) -> list[Rail]:
    """Return a rail for each row, in file order."""
    at = {row.name: k for k, row in enumerate(rows)}
    reads = [[at[name] for name in row.reads if name in at and at[name] < k] for k, row in enumerate(rows)]
    last = {source: k for k, sources in enumerate(reads) for source in sources}
    lanes: dict[int, int] = {}
    drawn = []
    for k, sources in enumerate(reads):
        incoming = _drawn(lanes[s] for s in sources)
        before = {s: lane for s, lane in lanes.items() if last[s] > k}
        lane = next(n for n in range(len(before) + 1) if n not in before.values())
        lanes = before | ({k: lane} if k in last else {})
        drawn.append(Rail(_drawn([lane])[0], _drawn(before.values()), incoming, _drawn(lanes.values())))
    return drawn


def _drawn(lanes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({min(lane, LANES - 1) for lane in lanes}))
