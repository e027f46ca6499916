"""How far estimates are off: on the cases that their rates come from, and on cases that are left out.

A case is an op whose estimate was published. Left out, it is estimated with the rate of the other cases of its
class (op type, unit and rate); a class of one case has no other, and cannot be checked that way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from anesurgery.placement.calibration import cross_validated_errors
from anesurgery.placement.inspection import Inspection, OpRow

PUBLISHED = {"ane": "ane", "bnns": "cpu"}
"""Name of a unit in the records -> ours."""


STEPPED = ("conv", "conv_transpose", "linear")
"""Op types with a rate for each class."""


@dataclass(frozen=True)
class Point:
    """One estimate that was published, and ours."""

    op: str
    unit: str
    rate: float
    """Operations per microsecond, where an op type has several rates; otherwise 0."""
    published: float
    ours: float

    @property
    def ratio(self) -> float:
        """How many times larger the published one is."""
        return self.published / self.ours


def of_row(row: OpRow, unit: str | None, published: float | None) -> Iterator[Point]:
    """The point of an op, where both estimates exist and a choice depends on them."""
    if row.legal is False:  # only the CPU runs it
        return
    ours = None if row.estimate is None else {"ane": row.estimate.ane, "cpu": row.estimate.cpu}.get(unit or "")
    if ours and published and unit:
        rate = float(f"{row.flop / ours:.3g}") if row.op_type in STEPPED else 0.0
        yield Point(row.op_type, unit, rate, published, ours)


def of_case(record: dict[str, Any], found: Inspection) -> Iterator[Point]:
    """The points of a lone op."""
    row = found.ops[record.get("tested_op_index", 0)]
    for name, unit in PUBLISHED.items():
        yield from of_row(row, unit, (record.get("est_us") or {}).get(name))


def of_graph(model: dict[str, Any] | None, found: Inspection) -> Iterator[Point]:
    """The points of a graph of which each op was recorded."""
    if model is None or len(model["ops"]) != len(found.ops):
        return
    for row, op in zip(found.ops, model["ops"], strict=True):
        if op["op"].rpartition(".")[2] == row.op_type:
            yield from of_row(row, op["preferred"], op.get("est_us"))


def recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """The recorded graphs by name."""
    text = (folder / "models_open.json").read_text(encoding="utf-8")
    return {model["model"]: model for model in json.loads(text)["models"]}


def estimates(points: Iterable[Point]) -> Table:
    """The error of each op type and unit that is a sum of products, and of all others together."""
    table = Table(
        *("op", "unit", "cases", "factor, in-sample", "factor, held out", "alone"),
        title="time estimates: largest error factor",
    )
    groups: dict[tuple[str, str], set[Point]] = {}
    for point in points:
        products = point.op in (*STEPPED, "matmul")
        groups.setdefault((point.op if products else "all others", point.unit), set()).add(point)
    for (op, unit), own in sorted(groups.items()):
        classes: dict[tuple[str, float], list[float]] = {}
        for point in distinct(own):
            classes.setdefault((point.op, point.rate), []).append(point.ratio)
        inside = max(max(r, 1 / r) for ratios in classes.values() for r in ratios)
        outside = [
            off for ratios in classes.values() if len(ratios) > 1 for off in cross_validated_errors(ratios)
        ]
        alone = sum(len(ratios) == 1 for ratios in classes.values())
        count = sum(map(len, classes.values()))
        worst = f"{max(outside):.2f}" if outside else "-"
        table.add_row(op, unit.upper(), str(count), f"{inside:.2f}", worst, str(alone))
    return table


def distinct(points: Iterable[Point]) -> list[Point]:
    """One point of those that are the same to three digits: recorded twice, it would check itself."""
    return list({(p.op, p.unit, p.rate, f"{p.ours:.3g}"): p for p in points}.values())
