"""Python numbers among the operands of an op: they get the element type of the op's first float operand.

`mb.add(x=x, y=1.5)` means the same for fp16 and fp32 values of `x`. coremltools gives every Python number fp32
or int32, which an op with fp16 operands refuses. What numpy makes of Python numbers, fp64 and int64,
no MIL value has: these are such numbers too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from anesurgery import mil
from anesurgery.errors import Refused
from anesurgery.mil import Array, Parameter, Var

UNTYPED = (np.dtype(np.float64), np.dtype(np.int64))
"""What numpy computes Python numbers in, and no MIL value has."""
FEW = 64
"""More numbers than a hand writes: tables and weights, of which what is tiny may become 0."""


def typed(op_type: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of an op with an element type for each Python number, or list of them.

    A number gets the type of the operands with which it must agree; where there are none, of the first float
    operand, if the parameter takes that. What coremltools reads as integers (axes, sizes) stays.

    Args:
        op_type: the type of the op, in the opset of the current function.
        inputs: the inputs by name: values, numpy arrays and numbers, Python's own numbers, strings.

    Raises:
        Refused: a number is infinite or zero in that type, and is not so itself.
    """
    parameters = mil.parameters(op_type)
    ordered = {name: inputs[name] for name in parameters if name in inputs}
    kinds = {name: kind for name, value in ordered.items() if (kind := _dtype(value)) is not None}
    floats = [kind for value in inputs.values() if (kind := _dtype(value)) is not None and kind.kind == "f"]
    result = dict(inputs)
    for name in (name for name, value in ordered.items() if _is_number(value)):
        parameter = parameters[name]
        peers = [kinds[n] for n in kinds if parameter.group and parameters[n].group == parameter.group]
        agreed = [kind for kind in peers if kind.kind == "f"] or peers
        free = floats if _wants_float(parameter, inputs[name]) else []
        if wanted := next((kind for kind in (*agreed, *free) if kind in parameter.dtypes), None):
            result[name] = _as_type(name, inputs[name], wanted)
    return result


def _dtype(value: Any) -> np.dtype[Any] | None:
    """The element type that an operand has by itself, of a tuple that of its first value; else None."""
    if isinstance(value, Var):
        return mil.np_dtype(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return None if value.dtype in UNTYPED else value.dtype
    if isinstance(value, (list, tuple)):
        return next((_dtype(v) for v in value if isinstance(v, (Var, np.ndarray))), None)
    return None


def _numbers(value: Any) -> Iterator[Any]:
    """What a number, or a nested list of them, consists of."""
    for item in value if isinstance(value, (list, tuple)) else ():
        yield from _numbers(item)
    if not isinstance(value, (list, tuple)):
        yield value


def _is_number(value: Any) -> bool:
    """Is it a Python number, or a list or array that holds nothing else? Truth values are no numbers."""
    if isinstance(value, np.ndarray):
        return value.dtype in UNTYPED
    leaves = list(_numbers(value))
    return bool(leaves) and all(type(leaf) in (int, float, np.float64, np.int64) for leaf in leaves)


def _wants_float(parameter: Parameter, value: Any) -> bool:
    """Is it a float anyway? An integer stays one where the parameter takes integers."""
    return np.asarray(value).dtype.kind == "f" or all(d.kind == "f" for d in parameter.dtypes)


def _as_type(name: str, value: Any, dtype: np.dtype[Any]) -> Any:
    """The numbers in a type; fractions stay as they are where the type has none, and coremltools says so.

    Raises:
        Refused: a number is infinite or zero in that type, and is not so itself.
    """
    numbers = np.asarray(value, np.float64 if dtype.kind == "f" else None)
    if dtype.kind != "f":
        limits = np.iinfo(dtype) if dtype.kind in "iu" and numbers.dtype.kind in "iu" else None
        fits = limits is not None and bool(((limits.min <= numbers) & (numbers <= limits.max)).all())
        return numbers.astype(dtype)[()] if fits else value
    with np.errstate(over="ignore", under="ignore"):
        held = numbers.astype(dtype)
    lost = _lost(numbers, held)
    if lost.any():
        words = f"{name}={numbers[lost][0]:g} is {held[lost][0]:g} in {dtype}"
        raise Refused(f"{words}, which the other operands have")
    return held[()]


def _lost(numbers: Array, held: Array) -> Array:
    """Which numbers became infinite; and, of those that are written out, which became 0."""
    infinite = np.isinf(held) & ~np.isinf(numbers)
    return infinite if numbers.size > FEW else infinite | ((held == 0) & (numbers != 0))
