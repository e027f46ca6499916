"""The example of the passes over caches: a state of eight rows, of which each call writes one."""

from __future__ import annotations

import numpy as np

from anesurgery.mil import Var, mb, types
from anesurgery.rewriting.example_programs import example

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
