"""A program of one linear layer of fp16, with any names of input and output, as a part of a pipeline has."""

from __future__ import annotations

from typing import Any

from anesurgery.mil import Array, Program, Var, ct, mb, types


def linear_layer(
    numbers: Array, rows: int, source: str = "x", to: str = "y", opset: Any = ct.target.iOS18
) -> Program:
    """`to = numbers @ source`, of so many rows."""

    @mb.program(input_specs=[mb.TensorSpec((rows, numbers.shape[1]), dtype=types.fp16)], opset_version=opset)
    def program(x: Var) -> Var:
        return mb.linear(x=x, weight=numbers, name=to)

    function = program.functions["main"]
    function._input_dict[source] = function._input_dict.pop("x")
    function.inputs[source].name = source
    return program
