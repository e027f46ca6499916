"""Find the integers at which two sides differ by giving them all at once: one id of 50,000 may tell them apart.

An index of three places takes 50,000 numbers in 17,000 rounds. Most ops that read it take any number of places,
so that one run of a longer index meets all of them. What is found so is then given in a round of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from anesurgery.checking.lengths import drawn_shape
from anesurgery.errors import InterpretError
from anesurgery.interpret.sampling import LOOKUPS
from anesurgery.mil import Array, Operation, Var, constant, np_dtype

Run = Callable[[torch.Tensor], Sequence[tuple[torch.Tensor, torch.Tensor]]]
"""Gives what both sides make of an index."""

FEW = 8
"""Integers that are looked at again, those where both sides are furthest apart: one would show it."""
TOGETHER = 1 << 20
"""Elements of all values at a time: 4 MiB of fp32, about what a core keeps in its cache."""
MOST = 1 << 25
"""The same for all integers: 128 MiB of fp32, a fraction of a second. A choice."""


def apart_at(run: Run, var: Var, values: range, ops: Sequence[Operation]) -> list[int]:
    """The integers at which two sides differ; none where ops do not take a longer index, or it takes too long.

    Args:
        run: computes both sides.
        var: the index.
        values: the integers that it may be.
        ops: of both sides.
    """
    shape = list(drawn_shape(var))
    if not shape or not math.prod(shape) or not values:
        return []
    axis = int(np.argmax(shape))
    made = sum(math.prod(drawn_shape(v)) for op in ops if op.op_type != "const" for v in op.outputs)
    each = max(1, made // shape[axis])
    if each * len(values) > MOST:
        return []
    off = np.zeros(0)
    for first in range(0, len(values), max(2, TOGETHER // each)):
        part = values[first : first + max(2, TOGETHER // each)]
        here = np.array(part, np_dtype(var)).reshape([-1 if a == axis else 1 for a in range(len(shape))])
        index = np.broadcast_to(here, [len(part) if a == axis else n for a, n in enumerate(shape)])
        try:
            pairs = run(torch.from_numpy(np.array(index)))
        except InterpretError:
            return []
        off = np.concatenate([off, np.max([_off(a, b, len(part)) for a, b in pairs], axis=0)])
    furthest = np.argsort(-off, kind="stable")[:FEW]
    return [values[int(i)] for i in furthest if off[i] > 0]


def rows_read(ops: Sequence[Operation]) -> range:
    """The rows of all constant tables that ops look up, one after the other, as shards of one table lie."""
    tables = {op.inputs[LOOKUPS[op.op_type][1]] for op in ops if op.op_type in LOOKUPS}
    shapes = [np.shape(constant(v)) for v in tables if constant(v) is not None]
    return range(sum(max(shape, default=0) for shape in shapes))


def _off(old: torch.Tensor, new: torch.Tensor, count: int) -> Array:
    """How far apart both are for each integer; nothing where no one axis has a place for each."""
    axes = [a for a, n in enumerate(old.shape) if n == count]
    if old.shape != new.shape or len(axes) != 1:
        return np.zeros(count)
    apart = (old.double() - new.double()).abs().nan_to_num(torch.inf)
    apart[(old == new) | ((old != old) & (new != new))] = 0
    return np.asarray(apart.movedim(axes[0], 0).reshape(count, -1).amax(1))
