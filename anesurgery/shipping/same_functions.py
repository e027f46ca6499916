"""Whether two functions are the same, op by op: names apart, and shapes and slices by what they come to."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np

from anesurgery.mil import Function, Operation, Var, constant
from anesurgery.semantics.reading import each_axis, slice_places

TOLD = {"reshape": {"shape"}, "slice_by_index": {"begin", "end", "stride", "begin_mask", "end_mask"}}
"""Parameters that may say the same in several ways: the shapes of the results show it, and `_sliced_alike`."""


def first_difference(one: Function, other: Function) -> str:
    """The name of the first op that is not in the other function too; "" where all are.

    Args:
        one: a function; its inputs are in the order of the other's.
        other: the same, or not.
    """
    partners = dict(zip(one.inputs.values(), other.inputs.values(), strict=False))
    for a, b in zip_longest(*([op for op in f.operations if op.op_type != "const"] for f in (one, other))):
        if a is None or b is None or not _alike(a, b, partners):
            return str((a or b).name)
        partners.update(zip(a.outputs, b.outputs, strict=True))
    same = len(one.outputs) == len(other.outputs) and all(map(_of(partners), one.outputs, other.outputs))
    return "" if same else "an output"


def _alike(a: Operation, b: Operation, partners: dict[Var, Var]) -> bool:
    """Is it the same op, of the same values?"""
    shapes = [[(v.shape, v.dtype) for v in op.outputs] for op in (a, b)]
    if a.op_type != b.op_type or shapes[0] != shapes[1] or a.blocks or b.blocks:
        return False
    if a.op_type == "slice_by_index" and not _sliced_alike(a, b):
        return False
    told, defaults, same = TOLD.get(a.op_type, set()), dict(a.default_inputs().items()), _of(partners)
    for name in (a.inputs.keys() | b.inputs.keys()) - told:
        x, y = (_list(op.inputs.get(name)) for op in (a, b))
        if not x or not y:
            stated = [v.val for v in (*x, *y)]
            if any(not _equal(val, defaults.get(name)) for val in stated):
                return False
        elif len(x) != len(y) or not all(map(same, x, y)):
            return False
    return True


def _list(value: Any) -> tuple[Any, ...]:
    """What an operand holds, one or several."""
    return () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _of(partners: dict[Var, Var]) -> Any:
    """Says of two values whether they are the same: made by the same op, or equal constants."""

    def same(x: Var, y: Var) -> bool:
        held, other = constant(x), constant(y)
        if held is None or other is None:
            return held is other and partners.get(x) is y
        return _equal(held, other)

    return same


def _equal(x: Any, y: Any) -> bool:
    """Are two constants equal, bit for bit?"""
    a, b = np.asarray(x), np.asarray(y)
    if a.dtype.kind in "US" or b.dtype.kind in "US":
        return bool(np.array_equal(a, b))
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def _sliced_alike(a: Operation, b: Operation) -> bool:
    """Do two slices take the same places? Where they begin and end must be known."""
    places = slice_places(a)
    steps = [each_axis(op, "stride", 1) for op in (a, b)]
    return places is not None and places == slice_places(b) and steps[0] == steps[1]
