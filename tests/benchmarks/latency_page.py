"""docs/latency.md: what was measured, what is estimated without it, and how far that is off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np
import time_fit as fitting
from time_fit import Fitted, LeftOut

from anesurgery.compressing.weight_forms import PAIRS, form_ratio
from anesurgery.placement.calibration import Row
from anesurgery.placement.timing import FORMS

HEAD = """# Times on the Neural Engine

`make latency` writes this page and the table behind `inspect(...).time`.
The measured times are from public sources, or were sent to us ([on a Mac](on-a-mac.md)). We build the models
from their configurations, with random weights (`make latency OPTIONS=--rebuild`).

How we estimate a time:

* For an op on the engine, we multiply Core ML's own estimate by a factor for the generation. If reading the
  weights of the op takes longer, we use that time instead.
* A prediction has a fixed overhead, and so has each switch between units.
* We multiply times of matrix products and softmax over 1,024 or more positions by {long:.2f}.
* Each op on the critical path takes at least {floor:.2f} us. Core ML's own estimate for a small op is 0.007 us.
  On an M4, an op of a decoding step really takes 5.3 us, including reading its weights. So estimates of many
  small ops are uncertain.
* For an op on the CPU, we use Core ML's estimate, or the time to read its weights if that is longer.
* For an `.mlmodel` of the older format, we use the times of equivalent fp16 ops.

We give no time for several target generations at once, `ALL`, `CPU_AND_GPU`, variable shapes, or loops of
unknown length. We also give none for a generation, or a form of weights on it, that nobody measured.
"""


def page(fitted: Fitted, skipped: Sequence[str]) -> str:
    """The page.

    Args:
        fitted: the table, and rows that were left out.
        skipped: why files in docs/measurements/ gave no row.
    """
    table = fitted.table
    parts = [HEAD.format(long=table["long"], floor=table["floor_us"]), _errors(fitted), _ratios(fitted)]
    parts += [_generations(table), _rates(table), _forms(table), _rows(fitted)]
    parts += (
        ["## Files that gave no row\n\n" + "\n".join(f"* {why}" for why in skipped) + "\n"] if skipped else []
    )
    return "\n".join(parts)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(cells)} |" for cells in (head, *lines)]
    return "\n".join([rows[0], "|---" * len(head) + "|", *rows[1:], ""])


def spearman(found: Sequence[LeftOut]) -> float:
    """The correlation of the ranks of measured times and of estimates without them."""
    ms = np.array([one.row.ms for one in found])
    told = ms / np.exp([one.error for one in found])
    return float(np.corrcoef(ms.argsort().argsort(), told.argsort().argsort())[0, 1])


def coverage(rows: Sequence[LeftOut], by: Callable[[Row], str]) -> float:
    """The share of left-out rows in a band whose reach was found without rows of their kind."""
    inside = []
    for one in rows:
        others = [other for other in rows if by(other.row) != by(one.row)]
        inside.append(abs(one.z) <= fitting.reach_of(others))
    return fmean(inside)


def _errors(fitted: Fitted) -> str:
    lines = []
    for name, found in fitted.left.items():
        off = [math.exp(abs(one.error)) for one in found]
        inside = coverage(found, fitting.KINDS[name])
        figures = (
            f"{median(off):.2f}",
            f"{np.quantile(off, 0.9):.2f}",
            f"{spearman(found):.3f}",
            f"{inside:.0%}",
        )
        lines.append((f"each {name}", str(len(found)), *figures))
    words = (
        "Each error is a factor: measured over estimated time, or the inverse if that is larger. For each "
        "model, chip or source, we took the fit and the 80% interval from the others. *90 %* is the "
        "90% quantile, and *Spearman* the rank correlation. For models and sources, we skip "
        "`lm_head` (see Reading weights), because only its times give a chip's read bandwidth.\n"
    )
    head = "left out", "rows", "median", "90 %", "Spearman", "inside the 80%"
    return "\n".join(["## Errors\n", words, _table(head, lines)])


def _ratios(fitted: Fitted) -> str:
    stated, wrong, inside = fitting.ratios([one.row for one in fitted.left["model"]], fitted.table)
    return (
        "## Ratios\n\nRatios of two times are more accurate than the times, because shared errors cancel. "
        "We looked at pairs of models that the same source measured on the same chip. In "
        f"{stated} pairs, we predicted which model is faster, and were wrong in {wrong}. "
        f"{inside:.0%} of the measured ratios lie in the 80% interval.\n"
    )


def _generations(table: dict[str, Any]) -> str:
    lines = [
        (
            f"H{name}",
            f"{factor:.2f}",
            f"{math.exp(table['deviation'][name]):.2f}",
            f"{table['fixed_us'][name]:.0f}",
            f"{table['switch_us'][name]:.0f}",
            str(table["measurements"][name]),
        )
        for name, factor in table["factor"].items()
    ]
    words = (
        "Unless the measurements say otherwise, we assume that factors change steadily over the "
        "generations, and that fixed overheads stay near the published ones. For the M6 (H18), no whole model "
        "was measured.\n"
    )
    head = "engine", "factor", "standard deviation, as a factor", "fixed, us", "switch of unit, us", "rows"
    return "\n".join(["## Generations\n", words, _table(head, lines)])


def _rates(table: dict[str, Any]) -> str:
    lines = [(chip, f"{rate:.0f}") for chip, rate in table["bandwidth"].items()]
    words = (
        "A product of one row of 4,096 numbers with a table of 128,256 rows (`lm_head`) takes as long as "
        "reading the table. For other chips, we use the nearest generation of the same class (plain; or Pro, "
        "Max and Ultra).\n"
    )
    return "\n".join(["## Reading weights\n", words, _table(("chip", "GB/s"), lines)])


def _forms(table: dict[str, Any]) -> str:
    pairs = [p for p in fitting.read_json(PAIRS) if p["what"] in table["forms"]]
    lines = [
        (p["what"], p["of"], str(p["rows"]), p["chip"], f"{form_ratio(p):.2f}", p["note"], p["source"])
        for p in pairs
    ]
    head = "form", "bound by", "positions", "chip", "time after / before", "what", "source"
    used = []
    for name, form in table["forms"].items():
        computing = f"{form.get('computing', 1.0):.2f}" if "computing" in form else "not measured"
        grows = f" times (positions / 16) ^ {form['grows']:.2f}" if form.get("grows") else ""
        families = ", ".join(f"H{f}" for f in form["computing_families"]) or "none"
        used.append(
            (
                FORMS[name],
                f"{computing}{grows}",
                families,
                f"{form.get('reading', 1.0):.2f}",
                ", ".join(f"H{f}" for f in form["families"]),
                f"{math.exp(form['off']):.2f}",
            )
        )
    factors = (
        "weights",
        "computing, relative to fp16",
        "measured on",
        "reading, relative to the stored bytes",
        "measured on",
        "standard deviation, as a factor",
    )
    return "\n".join(["## Forms of weights\n", _table(factors, used), _table(head, lines)])


def _rows(fitted: Fitted) -> str:
    lines = []
    for one in [*fitted.left["model"]] + [o for o in fitted.left["chip"] if not fitting.is_whole(o.row)]:
        row, told = one.row, fitting.judged(one.row, fitted.table)
        inside = "yes" if abs(one.z) <= fitted.table["reach"] else "no"
        cells = f"{row.ms:.3g}", f"{row.ms / math.exp(told.error):.3g}", f"{math.exp(told.error):.2f}"
        lines.append((row.model, row.chip, *cells, f"{math.exp(one.error):.2f}", inside, row.units, row.source))
    words = (
        "*Ratio* is measured over estimated time. *Left out* is the ratio from a fit without this model (for "
        "`lm_head`, without this chip). If a source does not say which units it allowed, we assume all.\n"
    )
    head = (
        "model",
        "chip",
        "measured ms",
        "estimated ms",
        "ratio",
        "left out",
        "inside the 80%",
        "units",
        "source",
    )
    return "\n".join(["## Measurements\n", words, _table(head, lines)])
