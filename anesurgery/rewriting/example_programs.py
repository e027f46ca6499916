"""The small programs with which passes show what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anesurgery.mil import Program, Var, ct, mb, types


def example(
    *inputs: Sequence[int] | Any, dtype: str = "fp32", opset: str | None = None
) -> Callable[[Callable[..., Any]], Callable[[], Program]]:
    """Make of a function over values one that builds its program.

    ::

        @an.example((2, 3), dtype="fp16")
        def example(x: Var) -> Var:
            \"\"\"A root, squared.\"\"\"
            return mb.square(x=mb.sqrt(x=x, name="root"), name="y")

    Args:
        inputs: for each input its shape, or what coremltools' builder takes as its description.
        dtype: what inputs that are given by their shapes hold: "fp32", "fp16", "int32" or "bool".
        opset: the oldest system that reads the program, as "iOS18"; iOS 13 by default.
    """

    def of(body: Callable[..., Any]) -> Callable[[], Program]:
        def build() -> Program:
            element = getattr(types, dtype)
            specs = [mb.TensorSpec(i, element) if isinstance(i, (tuple, list)) else i for i in inputs]
            target = None if opset is None else getattr(ct.target, opset)
            return mb.program(input_specs=specs, opset_version=target)(body)

        build.__name__, build.__doc__, build.__module__ = body.__name__, body.__doc__, body.__module__
        return build

    return of


ROW, PLACE = mb.TensorSpec((1, 4), types.fp16), mb.TensorSpec((1,), types.int32)
cache_inputs = (ROW, PLACE, mb.StateTensorSpec((8, 4), dtype=types.fp16))
"""A row of four numbers, its place, and the state of which it becomes a row."""


@example(*cache_inputs, opset="iOS18")
def cache_example(n: Var, at: Var, cache: Var) -> Var:
    """A cache of four numbers for each of eight tokens."""
    b = mb.concat(values=(at, np.array([0], np.int32)), axis=0, name="b")
    e = mb.add(x=b, y=np.array([1, 4], np.int32), name="e")
    u = mb.slice_update(x=mb.read_state(input=cache, name="h"), update=n, begin=b, end=e, name="u")
    a = mb.coreml_update_state(state=cache, value=u, name="a")
    return mb.reduce_sum(x=a, axes=[0], keep_dims=True, name="sum")
