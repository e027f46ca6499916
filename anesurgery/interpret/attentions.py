"""Find attention in a program, a softmax over products or the fused op, and compute it at once.

`attentions` and `recognise` serve recipes and inspections; `find` and `attend` serve `core.Plan`, which
computes the attention that it finds by torch's fused kernel. The file is in this room as it is the lowest that
needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.mil import (
    Block,
    Operation,
    Program,
    Var,
    constant,
    consumers,
    is_output,
    is_stored,
    operands,
    producer,
    static_shape,
    types,
    walk_ops,
)
from anesurgery.ops import CARRIERS, CONTRACTIONS, NORMS

BETWEEN = CARRIERS | {"add", "sub", "mul", "real_div", "select", "maximum", "minimum", "tanh"}
"""Ops that may stand between the product of queries and keys and the softmax: scales, soft caps and masks."""

SCALES = CARRIERS | {"mul", "real_div"}
"""Ops that may scale the scores, or give them another shape."""

SHAPE_ONLY_OPERANDS = {"shape": "x", "fill_like": "ref_tensor"}
"""Op type -> the operand of which only the shape is read."""

SCORING = CONTRACTIONS | NORMS
"""Ops that scores are computed with, and masks never."""

MOST_SEARCHED = 400
"""The most values that are searched upstream of one. A choice: masks are computed from fewer."""


@dataclass(frozen=True)
class Attention:
    """One attention, from the product of queries and keys on."""

    weights: Operation
    """The softmax, or the fused op."""
    product: Operation | None = None
    """Queries times keys (matmul or einsum); None for the fused op."""
    between: tuple[Operation, ...] = ()
    """The ops that scale and mask the scores, in the order in which they run."""
    sums: tuple[Operation, ...] = ()
    """The products that read the softmax: they sum the values."""

    @property
    def is_whole(self) -> bool:
        """Does it sum values, rather than being only a softmax over products?"""
        return self.product is None or bool(self.sums)


def attentions(program: Program | Block) -> Iterator[Attention]:
    """Yield every whole attention of a program or block, in file order."""
    recognised = (recognise(op) for op in walk_ops(program))
    return (a for a in recognised if a is not None and a.is_whole)


def recognise(op: Operation) -> Attention | None:
    """Return the attention of a softmax over products of dynamic values, or of a fused op; None for others."""
    if op.op_type == "scaled_dot_product_attention":
        return Attention(op)
    between: list[Operation] = []
    before = producer(op.x) if op.op_type == "softmax" else None
    while before is not None and before.op_type in BETWEEN:
        between.append(before)
        scores = _scores_operand(before)
        before = None if scores is None else producer(scores)
    if before is None or before.op_type not in ("matmul", "einsum"):
        return None
    if any(is_stored(v) for _, v in operands(before) if v.rank > 1):
        return None
    return Attention(op, before, tuple(reversed(between)), tuple(_sums(op.outputs[0])))


def _scores_operand(op: Operation) -> Var | None:
    """Return the operand of an op that has the scores: it comes from a product, and masks never do."""
    vars_ = [v for name, v in operands(op) if name in ("x", "a", "y", "b") and not is_stored(v)]
    if len(vars_) < 2:
        return vars_[0] if vars_ else None
    products = [v for v in vars_ if _is_scaled_product(v)]
    return next(iter(products or [v for v in vars_ if is_computed(v)]), None)


def _is_scaled_product(var: Var) -> bool:
    """Is a value a product, perhaps scaled or with a soft cap?"""
    op = producer(var)
    while op is not None and op.op_type in SCALES | {"tanh"}:
        op = producer(op.x)
    return op is not None and op.op_type in ("matmul", "einsum")


def _sums(weights: Var) -> Iterator[Operation]:
    """Yield the products that read the weights, also scaled, in another shape, or with zeros by a mask."""
    for op in consumers(weights):
        if op.op_type in ("matmul", "einsum"):
            yield op
        elif op.op_type in SCALES or (op.op_type == "select" and _is_zero(op.a if op.b is weights else op.b)):
            yield from _sums(op.outputs[0])


def _is_zero(var: Var) -> bool:
    """Is a value a constant of zeros?"""
    value = constant(var)
    return value is not None and not np.any(value)


def is_computed(var: Var) -> bool:
    """Does a value come from a product or a norm, as scores do, not masks? True at `MOST_SEARCHED` values."""
    seen, stack = {var}, [var]
    while stack and len(seen) < MOST_SEARCHED:
        op = stack.pop().op
        if op is None or op.op_type in ("const", "shape"):
            continue
        if op.op_type in SCORING:
            return True
        new = [v for v in read_values(op) if v not in seen]
        seen.update(new)
        stack += new
    return bool(stack)


def read_values(op: Operation) -> list[Var]:
    """Return the operands whose values an op reads, rather than only their static shape."""
    by_shape = SHAPE_ONLY_OPERANDS.get(op.op_type)
    return [v for name, v in operands(op) if name != by_shape or static_shape(v) is None]


Tensor = torch.Tensor
RANK = 4
"""Axes of (batch, heads, rows, width), the only form that torch's fused kernel computes."""


@dataclass
class Fusible:
    """One attention that torch can compute at once."""

    ops: list[Operation]
    """Its ops, in order; the last gives the result."""
    reads: list[tuple[str, Var]]
    """(parameter of `attend`, value) of its inputs."""
    options: dict[str, Any]
    """The other parameters of `attend`."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    key_is_transposed: bool = True,
) -> Tensor:
    """Return softmax(query key^T * scale + mask) value; a boolean mask keeps where it is true.

    Keys behind the last one that any row keeps are left out, if their numbers are finite.

    Args:
        query: [batch, heads, rows, width].
        key: [batch, groups, columns, width], or [batch, groups, width, columns] with `key_is_transposed` False:
            the operand of a matmul without transpose_y.
        value: [batch, groups, columns, width].
        mask: broadcasts to [batch, heads, rows, columns].
        scale: of the scores.
        key_is_transposed: does the matmul transpose the key?
    """
    key = key if key_is_transposed else key.transpose(-1, -2)
    if mask is None:
        return _attend(query, key, value, None, scale, True)
    every_row_keeps, seen = _kept_keys(mask)
    if seen < key.shape[-2] and _is_finite(key[..., seen:, :]) and _is_finite(value[..., seen:, :]):
        key, value, mask = key[..., :seen, :], value[..., :seen, :], mask[..., :seen]
    return _attend(query, key, value, mask, scale, every_row_keeps)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, every_row_keeps: bool
) -> Tensor:
    """Return the attention; the fused kernel needs a mask of which each row keeps something."""
    batch, heads, rows, width = query.shape
    groups = heads // key.shape[1]
    if groups > 1 and rows > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    elif groups > 1:
        if mask is not None and mask.ndim > 2 and mask.shape[-3] == heads:
            mask = mask.reshape(*mask.shape[:-3], -1, groups, mask.shape[-1])
        attended = _attend(query.reshape(batch, -1, groups, width), key, value, mask, scale, every_row_keeps)
        return attended.reshape(batch, heads, 1, -1)
    if mask is not None:  # torch's fused kernel wants four axes
        mask = mask.reshape((1,) * (RANK - mask.ndim) + mask.shape)
    if every_row_keeps or mask is None:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    scores = query @ key.transpose(-1, -2) * scale
    hidden = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(hidden, -1) @ value


def _kept_keys(mask: Tensor) -> tuple[bool, int]:
    """Return if every row of a mask keeps a key, and the number of keys up to the last that any row keeps."""
    keeps = mask if mask.dtype == torch.bool else mask != -torch.inf  # NaN hides nothing
    if not mask.ndim or mask.shape[-1] < 2:
        return bool(keeps.all()), sys.maxsize
    keeps = keeps.reshape(-1, mask.shape[-1])
    kept = keeps.any(0).nonzero()
    return bool(keeps.any(-1).all()), int(kept[-1]) + 1 if len(kept) else 1


def _is_finite(x: Tensor) -> bool:
    """Are all numbers finite, and their sum? Others make NaN of a row even where the mask hides them."""
    return bool(x.sum().isfinite())


def find(ops: Sequence[Operation], keep: set[Var]) -> list[Fusible]:
    """Return the attentions of a block that can be computed at once: no inner value is in `keep`."""
    present = set(ops)
    candidates = (_around(op) for op in ops if op.op_type == "softmax")
    return [
        a
        for a in candidates
        if a is not None and present.issuperset(a.ops) and all(_inner(op.outputs[0], keep) for op in a.ops[:-1])
    ]


def _inner(var: Var, keep: set[Var]) -> bool:
    """Does one op read a value, and nothing else?"""
    return var not in keep and not is_output(var) and len(var.child_ops) == 1


def _around(softmax: Operation) -> Fusible | None:
    """Return the attention of a softmax, if torch's kernel computes the same; else None."""
    attention = recognise(softmax)
    first = attention.product if attention is not None else None
    if attention is None or first is None or first.op_type != "matmul" or _flag(first, "transpose_x"):
        return None
    last = attention.sums[0] if attention.sums and attention.sums[0].op_type == "matmul" else None
    if last is None or last.x is not softmax.outputs[0] or _flag(last, "transpose_y"):
        return None
    if _flag(last, "transpose_x") or constant(softmax.axis) not in (-1, RANK - 1):
        return None
    if not _fits(first, last, softmax) or (between := _scale_and_mask(first, attention.between)) is None:
        return None
    scale, mask = between
    is_transposed = _flag(first, "transpose_y")
    key, value, repeats = _without_repeats(first.y, last.y) if is_transposed else (first.y, last.y, [])
    reads = [("query", first.x), ("key", key), ("value", value), *mask]
    ops = [*repeats, first, *attention.between, softmax, last]
    return Fusible(ops, reads, {"scale": scale, "key_is_transposed": is_transposed})


def _without_repeats(key: Var, value: Var) -> tuple[Var, Var, list[Operation]]:
    """Return keys and values before their heads are repeated for grouped queries, and the ops that repeat them.

    If not both are repeated alike, they are returned as they are.
    """
    keys, values = _before_repeat(key), _before_repeat(value)
    if keys is None or values is None or keys[0].shape[1] != values[0].shape[1]:
        return key, value, []
    return keys[0], values[0], [*keys[1], *values[1]]


def _before_repeat(var: Var) -> tuple[Var, list[Operation]] | None:
    """Return the heads before each is repeated for its group, and the ops that do so; None for other values.

    These are expand_dims, tile and reshape, and nothing else reads their results.
    """
    ops, heads = list[Operation](), var
    for op_type in ("reshape", "tile", "expand_dims"):
        op = producer(heads, op_type)
        if op is None or is_output(heads) or len(heads.child_ops) != 1:
            return None
        ops.insert(0, op)
        heads = op.x
    tiled = ops[1].outputs[0].shape
    if heads.rank != RANK or tuple(tiled) != (*heads.shape[:2], tiled[2], *heads.shape[2:]):
        return None
    expanded = (*heads.shape[:2], 1, *heads.shape[2:])
    merged = (heads.shape[0], heads.shape[1] * tiled[2], *heads.shape[2:])
    return (heads, ops) if tuple(ops[0].outputs[0].shape) == expanded and tuple(var.shape) == merged else None


def _scale_and_mask(
    first: Operation, between: Sequence[Operation]
) -> tuple[float, list[tuple[str, Var]]] | None:
    """Return the scale and at most one mask between product and softmax; None where there is more."""
    scores, scale, rest = first.outputs[0], 1.0, list(between)
    if rest and rest[0].op_type == "mul":
        factor = constant(_other(rest[0], scores))
        if factor is None or np.size(factor) != 1:
            return None
        scores, scale = rest.pop(0).outputs[0], float(np.reshape(factor, ()))
    if not rest:
        return scale, []
    (op, *more) = rest
    if more:
        return None
    if op.op_type == "add":
        return scale, [("mask", _other(op, scores))]
    hides = op.op_type == "select" and op.a is scores and constant(op.b) is not None
    return (scale, [("mask", op.cond)]) if hides and np.all(constant(op.b) == -np.inf) else None


def _other(op: Operation, var: Var) -> Var:
    """Return the other operand of an op of two."""
    return op.y if op.x is var else op.x


def _flag(op: Operation, name: str) -> bool:
    """Return a boolean input of an op."""
    return bool(constant(op.inputs.get(name)))


def _fits(first: Operation, last: Operation, softmax: Operation) -> bool:
    """Do torch's shapes hold: four axes, the first two equal, and a mask that enlarges nothing?"""
    tensors = (first.x, first.y, last.y)
    shapes = [tuple(v.shape) for v in tensors]
    scores = tuple(first.outputs[0].shape)
    return (
        all(len(s) == RANK and s[:2] == shapes[0][:2] for s in shapes)
        and all(types.is_float(v.dtype) for v in tensors)
        and tuple(softmax.x.shape) == scores
    )
