"""The ops that make the numbers of integers and conditions in floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anesurgery.facts.whole_numbers import makes_whole, operands_of
from anesurgery.mil import Array, Maker, Operation, Var, constant, np_dtype, op_inputs, operands
from anesurgery.ops import JOINING, LOGICAL


def _literal(parameter: Any) -> Any:
    """A parameter as it can be given before the constant that holds it."""
    value = constant(parameter) if isinstance(parameter, Var) else None
    return parameter if value is None else value


def _is_view(op: Operation) -> bool:
    """Does a cast or an identity keep the number?"""
    kinds = np_dtype(op.x).kind, np_dtype(op.outputs[0]).kind
    return kinds[0] in "iub" and (kinds[1] in "iu" or kinds[0] == "b")


class Floats:
    """The floats of integers and conditions, each made once for all edits."""

    def __init__(self, maker: Any, dtype: np.dtype[Any]) -> None:
        self.maker, self.dtype = maker, dtype
        self.name = {np.dtype(np.float16): "fp16", np.dtype(np.float32): "fp32"}[dtype]
        self.made: dict[Var, Any] = {}

    def of(self, var: Var) -> Any:
        """Give the numbers of a value as floats."""
        if var not in self.made:
            self.made[var] = self._of(var)
        return self.made[var]

    def _of(self, var: Var) -> Any:
        if (value := constant(var)) is not None:
            stored: Array = np.asarray(value).astype(self.dtype)
            return stored if stored.ndim else stored[()]
        op = makes_whole(var)
        if op is not None and op.op_type in ("cast", "identity") and _is_view(op):
            return self.of(op.x)
        if op is None or (op.op_type == "cast" and np_dtype(op.x).kind == "f"):
            reads, build = [var], lambda maker: self.cast(maker, var, op)
        else:
            sides = [(name, self.of(v)) for name, v in operands_of(op)]
            others = [v for name, v in operands(op) if name not in dict(sides)]
            operands_read = [*others, *(v for _, v in sides)]
            reads = [v for v in operands_read if isinstance(v, Var) and constant(v) is None]
            build = lambda maker: self.build(maker, op, sides)  # noqa: E731
        return self.maker.shared_value((var, "as", self.name), reads or [var], build)

    def cast(self, maker: Maker, var: Var, op: Operation | None) -> Var:
        """A value that has to be cast; what cuts a fraction off becomes a rounding towards zero."""
        if op is None:
            return maker.cast(x=var, dtype=self.name)
        if np_dtype(var).kind == "b":
            return maker.cast(x=maker.not_equal(x=op.x, y=np_dtype(op.x).type(0)), dtype=self.name)
        whole = maker.mul(x=maker.sign(x=op.x), y=maker.floor(x=maker.abs(x=op.x)))
        return whole if np_dtype(whole) == self.dtype else maker.cast(x=whole, dtype=self.name)

    def build(self, maker: Maker, op: Operation, sides: Sequence[tuple[str, Any]]) -> Var:
        """The op that stands for one of integers or conditions."""
        values = [v for _, v in sides]
        one = self.dtype.type(1)
        result: Var
        if op.op_type == "cast":
            result = maker.cast(x=maker.not_equal(x=values[0], y=self.dtype.type(0)), dtype=self.name)
        elif op.op_type == "mod":
            whole = maker.floor_div(x=values[0], y=values[1])
            result = maker.sub(x=values[0], y=maker.mul(x=whole, y=values[1]))
        elif op.op_type == "logical_not":
            result = maker.sub(x=one, y=values[0])
        elif op.op_type == "logical_xor":
            result = maker.abs(x=maker.sub(x=values[0], y=values[1]))
        elif op.op_type in LOGICAL:
            result = getattr(maker, {"logical_and": "minimum", "logical_or": "maximum"}[op.op_type])(
                x=values[0], y=values[1]
            )
        else:
            inputs = {k: _literal(v) for k, v in op_inputs(op).items()}
            inputs |= dict(sides)
            if op.op_type in JOINING:
                inputs["values"] = tuple(values)
            result = getattr(maker, op.op_type)(**inputs)
        return result
