"""A certificate as one HTML file that needs no network: the ops with their data flow, coloured by error.

An op unfolds to its numbers in each arithmetic as histograms, and to the passes that repair it. It is plain
HTML and SVG; a script only unfolds what a link names, and colours by the other error. Names are escaped by
jinja2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anesurgery.display import draws
from anesurgery.placement.certifying import Certificate
from anesurgery.placement.op_errors import BINS, Histogram, OpError
from anesurgery.show.certificates import ROWS, decibels, tried
from anesurgery.show.page import environment

BANDS = (
    ("80 dB and more", 80.0),
    ("60 to 80", 60.0),
    ("40 to 60", 40.0),
    ("20 to 40", 20.0),
    ("less", -math.inf),
)
"""In words, and from how many dB on."""
WIDTH, HEIGHT = 240, 72
"""Of a histogram."""
LANES = 8
"""Rails that are drawn apart; further ones share the last, so that a narrow page has room for the names."""


@dataclass(frozen=True)
class Rail:
    """What is drawn beside an op.

    Attributes:
        lane: where the op stands.
        passing: lanes of values that come from above and are read below.
        incoming: lanes of the values that it reads.
        after: lanes that go on below it.
    """

    lane: int
    passing: tuple[int, ...]
    incoming: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class Bars:
    """A histogram of one arithmetic over that of exact numbers.

    Attributes:
        arithmetic: the other one.
        exact: path of the area in exact arithmetic.
        other: path of the line in the other one.
        outside: elements of the other one that no bin holds.
    """

    arithmetic: str
    exact: str
    other: str
    outside: int


@dataclass(frozen=True)
class Line:
    """An op as the template needs it.

    Attributes:
        row: its errors.
        rail: what is drawn beside it.
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
    """A certificate as an HTML document."""
    at = {row.name: k for k, row in enumerate(certificate.rows)}
    return (
        environment()
        .get_template("certificate.html")
        .render(
            found=certificate,
            lines=[
                line(row, rail) for row, rail in zip(certificate.rows, rails(certificate.rows), strict=True)
            ],
            outputs=list(zip(*certificate.outputs.values(), strict=True)),
            worst=[(at[row.name], row) for row in certificate.enters[:ROWS] if row.worst < BANDS[0][1]],
            bands=[words for words, _ in BANDS],
            tried=tried(certificate),
            decibels=decibels,
            status={"holds": 0, "at risk": 1, "fails": 2}[certificate.verdict],
            width=WIDTH,
            height=HEIGHT,
        )
    )


def line(row: OpError, rail: Rail) -> Line:
    """An op as it is shown."""
    drawn = row.histogram
    others = [] if drawn is None else [bars(drawn, a) for a in drawn.counts if a != "fp32"]
    return Line(row, rail, band(row.worst), band(min(row.grown.values(), default=math.inf)), others)


def band(psnr: float) -> int:
    """The number of the band in which an error lies; 0 is the best."""
    return next(k for k, (_, least) in enumerate(BANDS) if psnr >= least)


def bars(drawn: Histogram, arithmetic: str) -> Bars:
    """The two histograms on one scale."""
    most = max(*drawn.counts["fp32"], *drawn.counts[arithmetic], 1)
    exact, other = (_steps(drawn.counts[a], most) for a in ("fp32", arithmetic))
    return Bars(
        arithmetic, f"M0 {HEIGHT}{exact}V{HEIGHT}z", f"M0 {HEIGHT}{other}V{HEIGHT}", drawn.outside[arithmetic]
    )


def _steps(counts: tuple[int, ...], most: int) -> str:
    wide = WIDTH // BINS
    return "".join(f"V{HEIGHT - n / most * (HEIGHT - 4):.1f}H{(k + 1) * wide}" for k, n in enumerate(counts))


def rails(rows: Sequence[OpError]) -> list[Rail]:
    """A rail for each row, in file order."""
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
