"""A product, a mask, a softmax and a product become fused attention; the reverse of `decompose_attention`.

Before::

    main(%x: 1x2x4x16, %v: 1x2x4x16, %mask: 1x1x4x4) {
      %query: 1x2x4x16 = mul(x=%x, y=0.25)
      %scores: 1x2x4x4 = matmul(x=%query, y=%x, transpose_y=True)
      %masked: 1x2x4x4 = add(x=%scores, y=%mask)
      %weights: 1x2x4x4 = softmax(x=%masked)
      %y: 1x2x4x16 = matmul(x=%weights, y=%v)
      return %y
    }

After::

    main(%x: 1x2x4x16, %v: 1x2x4x16, %mask: 1x1x4x4) {
      %y: 1x2x4x16 = scaled_dot_product_attention(query=%x, key=%x, value=%v, attn_mask=%mask)
      return %y
    }

The factors on the query, the key and the scores are combined. The fused op multiplies by 1/sqrt(width) itself;
the query is multiplied by whatever factor remains.

Refuses when the program is older than iOS 18, when scores or weights of attention are read elsewhere, when
anything other than factors and added masks stands between them, when a factor comes after a mask, when heads of
keys or values are broadcast, when a mask is of another type or the same for all keys, and when a shape is
dynamic.

Why it helps: Core ML's GPU kernels take this op. On the Neural Engine Core ML preferred it only from about 2
million elements for each of query, key and value (measured, M4, macOS 27.0.1, 751K), and it gave NaN under OS
26.1 (reported: pytorch/executorch issue 15833). So recipes use it only on request.

Grade: proved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.regions import heads

SAME = 1e-3
"""Relative difference up to which a factor is the rounding of another one in fp16: two steps, which are 2^-11
each."""


@dataclass(frozen=True)
class FuseAttention(Rewrite):
    """`scaled_dot_product_attention` instead of its parts."""

    name = "fuse_attention"
    kinds = frozenset({"matmul"})
    """The product that sums the values."""
    follows = ("fold_constants", "causal_mask_tensor", "padding_mask_tensor")
    tolerance = an.Tolerance(SAME)
    """A scale that fp16 rounds is exact in the fused op."""
    tolerates_nonfinite = False
    """The fused op gives other numbers for rows that a mask hides entirely."""
    shares_inner = True

    def check(self, m: Match) -> Match | Refusal:
        """Is it the end of an attention with which the fused op agrees?"""
        core = heads.core_of(m.root)
        if not isinstance(core, heads.Core):
            return core
        reason = _unfit(core)
        masks, factor = list[Var](), 1.0
        for op, carried in core.between:
            others = list(core.others(op, carried).values())
            value = an.number(others[0]) if others else None
            if op.op_type == "add" and len(others) == 1:
                masks += others
            elif op.op_type in ("mul", "real_div") and value and (op.op_type == "mul" or carried == "x"):
                factor *= value if op.op_type == "mul" else 1 / value
                reason = reason or (f"%{op.outputs[0].name} is scaled after a mask" if masks else "")
            else:
                reason = reason or f"{op.op_type} stands between the scores and the softmax"
        reason = reason or _wrong_mask(core, masks)
        if reason:
            return Refusal(reason, m.root)
        limits = dict.fromkeys(_factors(core), an.fp16.LARGEST)  # beyond, one order of factors overflows
        return m.bind(ops=tuple(core.ops), core=core, masks=masks, factor=factor, limits=limits)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the fused op."""
        (query, by_query), (key, by_key) = _unscaled(m.core.product.x), _unscaled(_keys(mb, m.core))
        width = int(query.shape[-1])
        rest = m.factor * by_query * by_key * math.sqrt(width)
        if abs(rest - 1) > (SAME if an.np_dtype(query) == np.float16 else 1e-6):
            query = mb.mul(x=query, y=an.np_dtype(query).type(rest))
        mask = None
        for term in m.masks:
            mask = term if mask is None else mb.add(x=mask, y=term)
        masked = {} if mask is None else {"attn_mask": mask}
        return mb.scaled_dot_product_attention(query=query, key=key, value=m.root.y, **masked)


def _factors(core: heads.Core) -> list[Var]:
    """Return queries, keys and values, and the queries and keys before they were transposed and scaled."""
    read, key = [core.product.x, core.product.y, core.total.y], an.producer(core.product.y, "transpose")
    read += [] if key is None else [key.x]
    return [*read, *(_unscaled(v)[0] for v in read)]


def _unfit(core: heads.Core) -> str:
    """Why the products are not those of the fused op."""
    product, total = core.product, core.total
    if (opset := _opset(total)) < an.ct.target.iOS18:
        return f"the program is of {opset.name}, the fused op of iOS18"
    if product.op_type != "matmul" or an.flag(product, "transpose_x"):
        return "the queries are transposed"
    if total.x is not core.softmax.outputs[0] or an.flag(total, "transpose_x") or an.flag(total, "transpose_y"):
        return "the values are not summed as weights times values"
    factors = [product.x, product.y, total.y]
    if (dynamic := next((v for v in factors if an.static_shape(v) is None), None)) is not None:
        return f"%{dynamic.name} has a dynamic shape"
    if len({tuple(v.shape[:-2]) for v in factors}) > 1 or product.x.rank < 3:
        shapes = ", ".join(an.shape_in_words(v.shape) for v in factors)
        return f"query, key and value have other leading axes: {shapes}"
    return ""


def _opset(op: an.Operation) -> Any:
    """Return the opset of the function that holds an op."""
    block = op.enclosing_block
    while not isinstance(block, an.Function):
        assert block is not None
        assert block.outer_op is not None
        block = block.outer_op.enclosing_block
    return block.opset_version


def _wrong_mask(core: heads.Core, masks: list[Var]) -> str:
    """Why the fused op cannot add these masks."""
    scores = core.softmax.x
    for mask in masks:
        shape = an.static_shape(mask)
        if shape is None or an.np_dtype(mask) != an.np_dtype(scores):
            return f"the mask %{mask.name} is dynamic in shape, or holds {an.np_dtype(mask)}"
        if not shape or shape[-1] != scores.shape[-1]:
            return f"the mask %{mask.name} of shape {shape} is the same for all keys"
    return ""


def _keys(mb: Builder, core: heads.Core) -> Var:
    """Return the keys as (tokens, width)."""
    key: Var = core.product.y
    if an.flag(core.product, "transpose_y"):
        return key
    turned, perm = an.producer(key, "transpose"), [*range(key.rank - 2), key.rank - 1, key.rank - 2]
    if turned is not None and an.reading.permutation(turned) == perm:
        return turned.x
    return mb.transpose(x=key, perm=perm)


def _unscaled(var: Var) -> tuple[Var, float]:
    """A value without a factor that it was multiplied by, and that factor."""
    op = an.producer(var, "mul")
    for name, other in an.operands(op) if op is not None else ():
        if (value := an.number(other)) is not None and op is not None:
            kept: Var = op.y if name == "x" else op.x
            if an.static_shape(kept) == an.static_shape(var):
                return kept, value
    return var, 1.0


@an.example((1, 2, 4, 16), (1, 2, 4, 16), (1, 1, 4, 4), opset="iOS18")
def example(x: Var, v: Var, mask: Var) -> Var:
    """Two heads of width 16 with a mask that is an input."""
    query = mb.mul(x=x, y=np.float32(0.25), name="query")
    scores = mb.matmul(x=query, y=x, transpose_y=True, name="scores")
    weights = mb.softmax(x=mb.add(x=scores, y=mask, name="masked"), axis=-1, name="weights")
    return mb.matmul(x=weights, y=v, name="y")
