"""Mixtures of experts: how many tokens each one has, and the products of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.frontend.arguments import argument, dtype_of, inputs_of, known_value, promoted
from anesurgery.mil import Var, is_symbolic, mb, types


def histogram(context: Any, node: Any) -> None:
    """`torch.histc(x, bins, min, max)`: how many elements lie in each of some equal parts of a range."""
    x, bins = inputs_of(context, node)[0], int(known_value(argument(context, node, 1, "bins", 100)))
    low, high = (float(known_value(argument(context, node, i, k, 0))) for i, k in ((2, "min"), (3, "max")))
    if not low < high or is_symbolic(np.prod(x.shape)):
        raise NotImplementedError(f"{node.name}: histc of {x.shape} from {low:g} to {high:g}")
    values = mb.cast(x=mb.reshape(x=x, shape=[1, -1]), dtype="fp32")
    at = mb.mul(x=mb.sub(x=values, y=np.float32(low)), y=np.float32(bins / (high - low)))
    at = mb.select(cond=mb.equal(x=values, y=np.float32(high)), a=np.float32(bins - 1), b=mb.floor(x=at))
    hits = mb.cast(x=mb.equal(x=at, y=np.arange(bins, dtype=np.float32)[:, None]), dtype="fp32")
    context.add(mb.cast(x=mb.reduce_sum(x=hits, axes=[1]), dtype=dtype_of(x), name=node.name))


def grouped_product(context: Any, node: Any) -> None:
    """`torch.nn.functional.grouped_mm(x, w, offs=ends)`: rows up to each end times the matrix of their group.

    Every row is multiplied by every matrix, and the right product is chosen: all experts of a mixture compute.
    """
    x, weight = promoted(inputs_of(context, node)[:2])
    ends = argument(context, node, 2, "offs")
    if x.rank != 2 or weight.rank != 3 or not isinstance(ends, Var):
        raise NotImplementedError(f"{node.name}: grouped_mm of shapes {x.shape} and {weight.shape}")
    groups, rows = int(weight.shape[0]), int(x.shape[0])
    places = np.arange(rows, dtype=np.int32)[None]
    before = mb.cast(x=mb.less_equal(x=mb.expand_dims(x=ends, axes=[1]), y=places), dtype="int32")
    group = mb.reduce_sum(x=before, axes=[0])
    products = mb.matmul(x=mb.expand_dims(x=x, axes=[0]), y=weight)
    own = mb.equal(x=mb.expand_dims(x=group, axes=[0]), y=np.arange(groups, dtype=np.int32)[:, None])
    zero = types.nptype_from_builtin(x.dtype)(0)
    chosen = mb.select(cond=mb.expand_dims(x=own, axes=[2]), a=products, b=zero)
    context.add(mb.reduce_sum(x=chosen, axes=[0], name=node.name))
