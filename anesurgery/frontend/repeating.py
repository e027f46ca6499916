"""Values that are repeated or copied: `repeat_interleave`, the key heads of grouped attention, `flip`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anesurgery.frontend.arguments import Convert, argument, inputs_of, known_value
from anesurgery.mil import Var, is_symbolic, mb


def repeating(host: Convert) -> Convert:
    """The converter, by one tile; each element as often as it is told, where that is known.

    A trace computes the number of repeats from sizes, and coremltools computes it as a float.
    """

    def repeat_interleave(context: Any, node: Any) -> None:
        x, repeats = inputs_of(context, node)[:2]
        times = known_value(repeats)
        if times is None or not isinstance(x, Var) or any(map(is_symbolic, x.shape)):
            host(context, node)
            return
        axis = known_value(argument(context, node, 2, "dim"))
        if axis is None:
            x, axis = mb.reshape(x=x, shape=[-1]), 0
        counts = np.ravel(times).astype(np.int64)
        convert = _evenly if (counts == counts[0]).all() else _unevenly
        context.add(convert(x, int(axis) % x.rank, counts, node.name))

    return repeat_interleave


def _evenly(x: Var, axis: int, counts: Any, name: str) -> Var:
    times, shape = int(counts[0]), [int(n) for n in x.shape]
    if times == 1:
        return mb.identity(x=x, name=name)
    before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    rows = mb.reshape(x=x, shape=[before, shape[axis], 1, after])
    shape[axis] *= times
    return mb.reshape(x=mb.tile(x=rows, reps=[1, 1, times, 1]), shape=shape, name=name)


def _unevenly(x: Var, axis: int, counts: Any, name: str) -> Var:
    places = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    return mb.gather(x=x, indices=places, axis=axis, name=name)


def with_grouped_heads(host: Convert) -> Convert:
    """Attention with fewer key than query heads (`enable_gqa=True`): the key and value heads are repeated."""

    def scaled_dot_product_attention(context: Any, node: Any) -> None:
        if bool(known_value(argument(context, node, 7, "enable_gqa", False))):
            query = inputs_of(context, node)[0]
            for position in (1, 2):
                _repeat_heads(context, node, position, int(query.shape[-3]))
        host(context, node)

    return scaled_dot_product_attention


def _repeat_heads(context: Any, node: Any, position: int, heads: int) -> None:
    x = inputs_of(context, node)[position]
    groups = int(x.shape[-3])
    if groups == heads:
        return
    shape = [-1 if is_symbolic(size) else int(size) for size in x.shape]
    if x.rank not in (3, 4) or heads % groups or shape.count(-1) > 1:
        raise NotImplementedError(
            f"{node.name}: enable_gqa with {heads} query heads over keys or values of shape {x.shape}"
        )
    axis = x.rank - 3  # of the heads; each is followed by its copies
    reps = [heads // groups if i == axis + 1 else 1 for i in range(x.rank + 1)]
    wide = mb.tile(x=mb.expand_dims(x=x, axes=[axis + 1]), reps=reps)
    name = f"{node.name}_heads_{position}"
    shape[axis] = heads
    context.add(mb.reshape(x=wide, shape=shape, name=name))
    inputs = list(node.inputs)
    inputs[position] = name
    node.inputs = inputs


def copying(host: Convert) -> Convert:
    """`x.flip(axes)` of known values is a copy: torch takes no array that runs backwards."""

    def flip(context: Any, node: Any) -> None:
        x, axes = map(known_value, inputs_of(context, node)[:2])
        if isinstance(x, np.ndarray):
            context.add(mb.const(val=np.flip(x, tuple(axes)).copy(), name=node.name))
        else:
            host(context, node)

    return flip
