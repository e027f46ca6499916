"""Wrong rows: a bound, an axis, a sign or a number of a row is another, and the checks of rows find it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import row_checks
from random_ops import RECIPES, Sample, chain, dtypes_of, latest, sample

from anesurgery import ops
from anesurgery.errors import Refusal
from anesurgery.facts import token_axes
from anesurgery.ops import UNARY
from anesurgery.regions import views
from anesurgery.semantics import degrees
from anesurgery.semantics.bounds import ANY
from anesurgery.semantics.rows import ALWAYS, CONTRACTED, MIXED, OF_WHOLE, SPECS, OpSpec, range_of_x

TRIED = 60
"""Random programs of an op with a wrong row, at most."""
WRONG = 40
"""Wrong rows that are drawn."""

FAR = 1e4
"""What stands for an infinite end where a bound is moved inwards."""

SAME = frozenset(
    {
        "exponents[layer_norm]: another sign",  # of the exponent 0
        "UNROUNDED[clamped_relu]: it has the trait",  # it does, with the parameters that are drawn
        "tokens[scaled_dot_product_attention]: another axis",  # random masks are not causal: it is refused
    }
)
"""Changes that say nothing else."""


@dataclass(frozen=True)
class WrongRow:
    """A row of a table, how it is changed, and the check that must find it."""

    table: str
    rows: dict[str, Any]
    op_type: str
    what: str
    change: Callable[[Any], Any]
    check: Callable[[Sample], str]
    key: str = ""
    """Of the row, where that is not the op type."""

    def __str__(self) -> str:
        return f"{self.table}[{self.op_type}]: {self.what}"


def _middle(low: float, high: float) -> float:
    return (max(low, -FAR) + min(high, FAR)) / 2


BOUNDS: dict[str, Callable[[float, float], tuple[float, float]]] = {
    "a lower bound too high": lambda low, high: (
        _middle(low, high) if low < high else low + 1,
        high + (low == high),
    ),
    "an upper bound too low": lambda low, high: (
        low - (low == high),
        _middle(low, high) if low < high else high - 1,
    ),
    "another sign": lambda low, high: (-high, -low) if low != -high else (low / 2, high / 2),
}


def _bounds(change: Callable[[float, float], Any]) -> Callable[[OpSpec], OpSpec]:
    def changed(row: OpSpec) -> OpSpec:
        def ask(op: Any, ranges: Any) -> Any:
            assert row.range is not None
            interval = row.range if isinstance(row.range, tuple) else row.range(op, ranges)
            return interval if interval == ANY else change(*interval)

        return dataclasses.replace(row, range=ask)

    return changed


def _other_places(row: OpSpec) -> OpSpec:
    """Every axis goes to where the next one goes."""

    def axes(op: Any) -> Any:
        operands = row.axes(op) if row.axes is not None else None
        return operands and tuple(
            dataclasses.replace(o, places=(*o.places[1:], *o.places[:1])) for o in operands
        )

    return dataclasses.replace(row, axes=axes)


def _in_any_order(row: OpSpec) -> OpSpec:
    """Every axis whose order matters is said to be summed over."""

    def axes(op: Any) -> Any:
        operands = row.axes(op) if row.axes is not None else None
        return operands and tuple(
            dataclasses.replace(o, places=tuple(CONTRACTED if p == MIXED else p for p in o.places))
            for o in operands
        )

    return dataclasses.replace(row, axes=axes)


def _of_another_result(row: OpSpec) -> OpSpec:
    return dataclasses.replace(row, positions=1 - (row.positions or 0), range=None)


def _twice(row: OpSpec) -> OpSpec:
    return dataclasses.replace(row, work=lambda op: 2 * row.work(op) if row.work is not None else 0)


def _labels_on_another_axis(row: Any) -> Any:
    def changed(op: Any, tokens: Any) -> Any:
        labels, rank = row(op, tokens), op.outputs[0].rank
        return labels if isinstance(labels, Refusal) else {(axis + 1) % rank: k for axis, k in labels.items()}

    return changed


def _scaled_by(change: Callable[[int], int]) -> Callable[[Any], Any]:
    def changing(row: Any) -> Any:
        def changed(op: Any, of: Any) -> Any:
            scaled = row(op, of)
            return scaled and dataclasses.replace(scaled, result=change(scaled.result))

        return changed

    return changing


def _joined_by_mistake(row: Any) -> Any:
    def changed(op: Any) -> Any:
        frame = row(op)
        if not isinstance(frame, views.Frame) or all(frame.joins):
            return frame
        first = frame.joins.index(False)
        return dataclasses.replace(frame, joins=tuple(j or i == first for i, j in enumerate(frame.joins)))

    return changed


FRACTIONS = ops.UNARY & RECIPES.keys() - ops.UNROUNDED - ops.names("atanh square thresholded_relu")
"""Ops that make fractions of whole numbers."""


ROUNDED = (
    FRACTIONS
    | ops.PRODUCTS
    | ops.names("add mul pow real_div sub")
    | ops.names("reduce_mean reduce_prod reduce_sum reduce_sum_square cumsum softmax")
)
"""Ops that round what they compute."""
ORDERED = ops.names(
    "argsort band_part cumsum gather layer_norm pad reduce_argmax reverse softmax split tile topk"
)
"""Ops along whose axis the order matters."""


def _takes(op_type: str, dtype: str) -> bool:
    return dtype in dtypes_of(op_type, latest(op_type))


def _said_to_be_whole(row: OpSpec) -> OpSpec:
    return dataclasses.replace(row, whole=OF_WHOLE)


def _said_to_be_always_whole(row: OpSpec) -> OpSpec:
    return dataclasses.replace(row, whole=ALWAYS)


def _said_of(op_type: str) -> Callable[[frozenset[str]], frozenset[str]]:
    return lambda trait: trait | {op_type}


def wrong_traits() -> Iterator[WrongRow]:
    """Ops that are said to have a trait which they lack, or to read along another parameter."""
    traits, lacks = vars(ops), "it has the trait"
    for op_type in sorted(FRACTIONS):
        yield WrongRow("whole", SPECS, op_type, lacks, _said_to_be_whole, row_checks.makes_fractions)
        check = row_checks.moves_other_numbers
        yield WrongRow("MOVING", traits, op_type, lacks, _said_of(op_type), check, "MOVING")
    for op_type in sorted(ROUNDED):
        check = row_checks.rounds_its_results
        yield WrongRow("UNROUNDED", traits, op_type, lacks, _said_of(op_type), check, "UNROUNDED")
    for op_type in ops.ALONG:
        check = row_checks.mixes_other_axes
        yield WrongRow("ALONG", ops.ALONG, op_type, "another parameter", lambda name: "other", check)


def wrong_rows() -> Iterator[WrongRow]:
    """Every row of every table, changed in each way that fits the table."""
    yield from wrong_traits()
    for op_type, row in SPECS.items():
        yield from wrong_meanings(op_type, row)
    axis, sign = "another axis", "another sign"
    for op_type in token_axes.RULES:
        yield WrongRow(
            "tokens", token_axes.RULES, op_type, axis, _labels_on_another_axis, row_checks.mixes_tokens
        )
    for op_type in views.FRAMES.keys() - UNARY:  # whose axes may all be merged
        yield WrongRow("frames", views.FRAMES, op_type, axis, _joined_by_mistake, row_checks.differs_as_a_view)
    for op_type in degrees.DEGREES:
        for what, change_of in ((sign, lambda e: -e), ("another exponent", lambda e: e + 1)):
            yield WrongRow(
                "exponents", degrees.DEGREES, op_type, what, _scaled_by(change_of), row_checks.scales_otherwise
            )


def wrong_meanings(op_type: str, row: OpSpec) -> Iterator[WrongRow]:
    """The range, the axes and the work of an op, each stated otherwise."""
    for what, change in BOUNDS.items():
        changed = _bounds(change)
        if isinstance(row.range, tuple) or row.range not in (None, range_of_x):
            yield WrongRow("range", SPECS, op_type, what, changed, row_checks.outside_its_interval)
        if row.whole is not None and row.range is not None and _takes(op_type, "int32"):
            yield WrongRow("integers", SPECS, op_type, what, changed, row_checks.outside_its_integers)
    if row.axes is not None:
        yield WrongRow("axes", SPECS, op_type, "another axis", _other_places, row_checks.mixes_axes)
    if op_type in ORDERED:
        yield WrongRow("axes", SPECS, op_type, "in any order", _in_any_order, row_checks.mixes_axes)
    if row.whole == OF_WHOLE and _takes(op_type, "fp32"):
        check, always = row_checks.makes_fractions, _said_to_be_always_whole
        yield WrongRow("whole", SPECS, op_type, "of any numbers", always, check)
    if row.positions is not None and len(latest_results(op_type)) > 1:
        check, other = row_checks.outside_its_interval, _of_another_result
        yield WrongRow("positions", SPECS, op_type, "another result", other, check)
    if op_type in row_checks.COUNTED:
        yield WrongRow("work", SPECS, op_type, "twice as much", _twice, row_checks.counts_otherwise)


def latest_results(op_type: str) -> Sequence[Any]:
    """The results of an op."""
    return sample(op_type, "results").op.outputs


def differing() -> list[WrongRow]:
    """The wrong rows that say something else, by their names."""
    return sorted((w for w in wrong_rows() if str(w) not in SAME), key=str)


def is_found(wrong: WrongRow, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Does the check of its table give a counterexample for a wrong row?"""
    integers = wrong.check is row_checks.outside_its_integers
    key = wrong.key or wrong.op_type
    monkeypatch.setitem(wrong.rows, key, wrong.change(wrong.rows[key]))
    try:
        drawn = (sample(wrong.op_type, f"wrong.{i}", ("int32",) if integers else ()) for i in range(TRIED))
        return any(wrong.check(one) for one in (*chains(wrong), *drawn))
    finally:
        monkeypatch.undo()


def chains(wrong: WrongRow) -> Iterator[Sample]:
    """Forms of a few ops, for rows that say something of these only."""
    for i in range(TRIED if wrong.op_type == "pow" and wrong.table == "range" else 0):
        yield chain("raised", f"wrong.{i}")


@pytest.mark.parametrize("wrong", random.Random(27).sample(differing(), WRONG), ids=str)
def test_a_wrong_row_is_found(wrong: WrongRow, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_found(wrong, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", differing(), ids=str)
def test_every_wrong_row_is_found(wrong: WrongRow, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_found(wrong, monkeypatch)


def test_rows_that_are_said_to_be_the_same_exist() -> None:
    assert {str(w) for w in wrong_rows()} >= SAME
