"""Fit the table of `inspect`'s times to published measurements, and write the page that shows its errors.

    python tests/benchmarks/latency.py --page docs/latency.md
    python tests/benchmarks/latency.py --models DIR    # features anew, of packages named as in the rows

Rows stand in latency_rows.json; what each model asks for, in latency_features.json, and a fit needs no model.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from anesurgery.placement.target import CHIPS
from anesurgery.placement.timing import TABLE, Load, OpLoad, load_of, microseconds

HERE = Path(__file__).resolve().parent
ROWS, FEATURES = HERE / "latency_rows.json", HERE / "latency_features.json"
READS_WEIGHTS = "lm_head"
"""One product with a vector: what its rows say is the rate at which weights are read."""
COVERAGE = 0.8
OLD, LONG, FIXED = 14, (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0), (0.0, 100.0, 200.0, 300.0, 400.0, 500.0)
"""Values tried; a fixed cost is fitted of generations up to `OLD`, and of later ones apart."""
Row = dict[str, Any]


def family_of(chip: str) -> int:
    """The generation of a chip by the name under which it is sold."""
    return CHIPS[chip.split()[0]].family


def read_rows() -> list[Row]:
    """The rows on the Neural Engine, and those of phones whose source does not say which units it asked for."""
    return [r for r in json.loads(ROWS.read_text()) if r["units"] in ("CPU_AND_NE", "not stated")]


def read_features() -> dict[str, Load]:
    """What each model asks for on each generation, by "model H16"."""
    stored = json.loads(FEATURES.read_text())
    return {k: Load(tuple(OpLoad(*op) for op in v["ops"]), v["switches"]) for k, v in stored.items()}


def write_features(models: Path) -> None:
    """Judge each model that a row names, and store what it asks for."""
    from anesurgery.loading import load
    from anesurgery.placement.shaped import judge_shaped
    from anesurgery.placement.target import Target
    from anesurgery.placement.verdicts import choose

    stored: dict[str, Any] = {}
    for row in read_rows():
        key, path = key_of(row), models / f"{row['model']}.mlpackage"
        if key in stored or not path.exists():
            continue
        target = Target.parse(row["chip"])
        judged = judge_shaped(load(path), None, target, ()).judged
        found = load_of(judged, choose(judged, target)[0])
        ops = [[round(v, 4) if isinstance(v, float) else v for v in asdict(op).values()] for op in found.ops]
        stored[key] = {"switches": found.switches, "ops": ops}
    FEATURES.write_text(json.dumps(stored, separators=(",", ":")).replace('},"', '},\n"') + "\n")


def key_of(row: Row) -> str:
    """The key of a row's features."""
    return f"{row['model']} H{family_of(row['chip'])}"


def estimate(row: Row, features: dict[str, Load], factors: dict[str, Any]) -> float:
    """Milliseconds of a row's model on its chip."""
    return sum(microseconds(features[key_of(row)], factors, family_of(row["chip"]), row["chip"]).values()) / 1e3


def bandwidths(rows: Iterable[Row], features: dict[str, Load]) -> dict[str, float]:
    """GB/s by chip."""
    heads = (r for r in rows if r["model"].startswith(READS_WEIGHTS))
    return {r["chip"]: round(features[key_of(r)].ops[0].weight / r["ms"] / 1e6, 2) for r in heads}


def _factor(rows: Sequence[Row], features: dict[str, Load], factors: dict[str, Any], family: int) -> float:
    """The factor of a generation for which the mean of the errors of its rows is 0, in logs."""
    factor = 1.0
    for _ in range(9):
        factors["factor"][str(family)] = factor
        factor *= math.exp(fmean(math.log(r["ms"] / estimate(r, features, factors)) for r in rows))
    return round(factor, 3)


def fit_with(rows: Sequence[Row], features: dict[str, Load], rates: dict[str, float], *values: float) -> Any:
    """The factors of each generation, when attention over long sequences and fixed costs are given."""
    whole = [r for r in rows if not r["model"].startswith(READS_WEIGHTS)]
    families = sorted({family_of(r["chip"]) for r in whole})
    long, old, new = values
    fixed = {str(f): old if f <= OLD else new for f in families}
    factors: dict[str, Any] = {"factor": {}, "bandwidth": rates, "long": long, "fixed_us": fixed}
    for family in families:
        mine = [r for r in whole if family_of(r["chip"]) == family]
        factors["factor"][str(family)] = _factor(mine, features, factors, family)
    return factors


def errors(rows: Sequence[Row], features: dict[str, Load], factors: dict[str, Any]) -> list[float]:
    """Logarithms of measured over estimated."""
    return [math.log(r["ms"] / estimate(r, features, factors)) for r in rows]


def usable(rows: Iterable[Row], features: dict[str, Load], factors: dict[str, Any]) -> list[Row]:
    """The rows of models that were built, of generations that have a factor, and with rates of reading."""
    known = [r for r in rows if key_of(r) in features and str(family_of(r["chip"])) in factors["factor"]]
    return known if factors["bandwidth"] else []


def fit(rows: Sequence[Row], features: dict[str, Load]) -> dict[str, Any]:
    """The factors with the least sum of errors; one value after the other, from plain ones."""
    rates = bandwidths(rows, features)
    whole = [r for r in rows if not r["model"].startswith(READS_WEIGHTS)]

    def loss(values: Sequence[float]) -> float:
        return sum(map(abs, errors(whole, features, fit_with(rows, features, rates, *values))))

    best = [1.0, 0.0, 0.0]
    for place, choices in ((0, LONG), (1, FIXED), (2, FIXED)):
        best = min(([*best[:place], c, *best[place + 1 :]] for c in choices), key=loss)
    return dict(fit_with(rows, features, rates, *best))


def left_out(rows: Sequence[Row], features: dict[str, Load], by: str) -> list[tuple[Row, float]]:
    """Each row with the error of a fit that saw no row of the same model (or chip)."""
    found = []
    for value in dict.fromkeys(r[by] for r in rows):
        factors = fit([r for r in rows if r[by] != value], features)
        mine = usable([r for r in rows if r[by] == value], features, factors)
        found += list(zip(mine, errors(mine, features, factors), strict=True))
    return found


def band_of(left: Iterable[float]) -> float:
    """The factor within which 80 % of left-out rows lie."""
    return float(np.exp(np.quantile(np.abs(list(left)), COVERAGE, method="higher")))


def coverage(left: Sequence[tuple[Row, float]]) -> float:
    """The share of left-out rows that lie in a band which their own model had no part in."""
    inside = []
    for row, error in left:
        others = [e for r, e in left if r["model"] != row["model"]]
        inside.append(abs(error) <= math.log(band_of(others)))
    return fmean(inside)


def fitted(rows: Sequence[Row], features: dict[str, Load]) -> tuple[dict[str, Any], str]:
    """The table, and the page about it."""
    rows = [r for r in rows if key_of(r) in features]
    factors, models, chips = fit(rows, features), *(left_out(rows, features, by) for by in ("model", "chip"))
    factors["band"] = round(band_of(e for _, e in models), 3)
    factors["measurements"], factors["source"] = {}, {}
    for family in factors["factor"]:
        mine = [r for r in usable(rows, features, factors) if str(family_of(r["chip"])) == family]
        factors["measurements"][family] = len(mine)
        factors["source"][family] = "; ".join(dict.fromkeys(r["source"] for r in mine))
    return factors, page(rows, features, factors, models, chips)


def spearman(left: Sequence[tuple[Row, float]]) -> float:
    """The correlation of the ranks of measured and left-out estimates."""
    ms = np.array([r["ms"] for r, _ in left])
    told = ms / np.exp([e for _, e in left])
    return float(np.corrcoef(ms.argsort().argsort(), told.argsort().argsort())[0, 1])


def summary(words: str, left: Sequence[tuple[Row, float]]) -> str:
    """A row of the table of errors."""
    off = [math.exp(abs(e)) for _, e in left]
    inside = coverage(left)
    numbers = f"{median(off):.2f} | {np.quantile(off, 0.9):.2f} | {spearman(left):.3f} | {inside:.0%}"
    return f"| {words} | {len(left)} | {numbers} |"


def page(
    rows: Sequence[Row], features: dict[str, Load], factors: dict[str, Any], models: Any, chips: Any
) -> str:
    """docs/latency.md."""
    shown = usable(rows, features, factors)
    seen = {id(r): e for r, e in models}
    lines = [HEAD, summary("each model left out", models), summary("each chip left out", chips), ROWS_HEAD]
    for row in shown:
        told = estimate(row, features, factors)
        left = f"{math.exp(seen[id(row)]):.2f}" if id(row) in seen else "none"
        cells = row["model"], row["chip"], f"{row['ms']:.3g}", f"{told:.3g}", f"{row['ms'] / told:.2f}", left
        lines.append(f"| {' | '.join(cells)} | {row['units']} | {row['source']} |")
    return "\n".join(lines) + "\n"


HEAD = """# Times on the Neural Engine

Written by `make latency`, as the table of factors is. `inspect` estimates milliseconds from Core ML's own
estimates; this page compares them with published times. Errors are factors, of rows that the fit did not see:
median, 90 % of rows, the correlation of ranks (Spearman), and the share within a band of 80 %.
One product with a vector (`lm_head`) gives the rates at which weights are read; without it there is none: it
is not among the models left out.

| left out | rows | median | 90 % | Spearman | in the band |
|---|---|---|---|---|---|"""
ROWS_HEAD = """
A ratio is measured / estimated; the last one is of a fit without the model. Where a source does not say which
units it asked for, Core ML chose among all. Compressed weights, ALL and the GPU, and generations without
a row have no estimate. Changes of the unit count as for Core ML's segmenter: no published time tells
them apart.

| model | chip | measured ms | estimated ms | ratio | left out | units | source |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    """Fit, and write the table and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="a folder of packages: what they ask for is judged anew")
    parser.add_argument("--page", type=Path, default=HERE.parents[1] / "docs" / "latency.md")
    options = parser.parse_args()
    if options.models is not None:
        write_features(options.models)
    factors, text = fitted(read_rows(), read_features())
    TABLE.write_text(json.dumps(factors, indent=1) + "\n")
    options.page.write_text(text)


if __name__ == "__main__":
    main()
