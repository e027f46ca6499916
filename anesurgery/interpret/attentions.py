"""Recognise attention in a program, and compute it at once: a softmax over two products, or the fused op.

The one recogniser: the interpreter computes at once what it finds; recipes and inspections ask what is there.
It stands in this room, the lowest of those that need it.
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

SCORING = CONTRACTIONS | NORMS
"""Ops that scores are made with, and masks never."""


@dataclass(frozen=True)
class Attention:
    """One attention, from the product of queries and keys on."""

    weights: Operation
    """The softmax, or the fused op."""
    product: Operation | None = None
    """Queries times keys (matmul or einsum); None for the fused op."""
    between: tuple[Operation, ...] = ()
    """What scales and masks the scores, in the order in which it runs."""
    sums: tuple[Operation, ...] = ()
    """The products that read the weights."""

    @property
    def is_whole(self) -> bool:
        """Are values summed with the weights, or is it a softmax over products and no more?"""
        return self.product is None or bool(self.sums)


def attentions(program: Program | Block) -> Iterator[Attention]:
    """Every whole attention of a program or block, in file order."""
    recognised = (recognise(op) for op in walk_ops(program))
    return (a for a in recognised if a is not None and a.is_whole)


def recognise(op: Operation) -> Attention | None:
    """The attention whose weights an op makes, as a softmax over products of dynamic values or fused."""
    if op.op_type == "scaled_dot_product_attention":
        return Attention(op)
    between: list[Operation] = []
    maker = producer(op.x) if op.op_type == "softmax" else None
    while maker is not None and maker.op_type in BETWEEN:
        between.append(maker)
        scores = _carrying(maker)
        maker = None if scores is None else producer(scores)
    if maker is None or maker.op_type not in ("matmul", "einsum"):
        return None
    if any(is_stored(v) for _, v in operands(maker) if v.rank > 1):
        return None
    return Attention(op, maker, tuple(reversed(between)), tuple(_sums(op.outputs[0])))


def _carrying(op: Operation) -> Var | None:
    """The operand of an op that carries the scores: it comes from a product, and masks never do."""
    vars_ = [v for name, v in operands(op) if name in ("x", "a", "y", "b") and not is_stored(v)]
    if len(vars_) < 2:
        return vars_[0] if vars_ else None
    near = [v for v in vars_ if _is_scaled_product(v)]
    return next(iter(near or [v for v in vars_ if is_computed(v)]), None)


def _is_scaled_product(var: Var) -> bool:
    op = producer(var)
    while op is not None and op.op_type in SCALES | {"tanh"}:
        op = producer(op.x)
    return op is not None and op.op_type in ("matmul", "einsum")


def _sums(weights: Var) -> Iterator[Operation]:
    """The products that read the weights, scaled or seen in another shape."""
    for op in consumers(weights):
        if op.op_type in ("matmul", "einsum"):
            yield op
        elif op.op_type in SCALES:
            yield from _sums(op.outputs[0])


def is_computed(var: Var, limit: int = 400) -> bool:
    """Does a value come from a matrix product or its like (as scores do, and masks do not)?"""
    seen, stack = {var}, [var]
    while stack and len(seen) < limit:
        op = stack.pop().op
        if op is None or op.op_type in ("const", "shape"):
            continue
        if op.op_type in SCORING:
            return True
        fresh = [v for v in read_values(op) if v not in seen]
        seen.update(fresh)
        stack += fresh
    return bool(stack)


def read_values(op: Operation) -> list[Var]:
    """The operands whose values an op reads, and not only their fixed shape."""
    by_shape = {"shape": "x", "fill_like": "ref_tensor"}.get(op.op_type)
    return [v for name, v in operands(op) if name != by_shape or static_shape(v) is None]


Tensor = torch.Tensor
RANK = 4
"""Axes of (batch, heads, rows, width), the one form that torch computes as a whole."""


@dataclass
class Fusible:
    """One attention that torch can compute at once: its ops, and what it reads."""

    ops: list[Operation]
    reads: list[tuple[str, Var]]
    options: dict[str, Any]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    turned: bool = False,
) -> Tensor:
    """softmax(query keyᵀ * scale + mask) value; a boolean mask keeps where it is true."""
    key = key if turned else key.transpose(-1, -2)
    if mask is not None:
        shows, seen = _seen(mask)
        if seen < key.shape[-2] and _finite(key[..., seen:, :]) and _finite(value[..., seen:, :]):
            key, value, mask = key[..., :seen, :], value[..., :seen, :], mask[..., :seen]
    else:
        shows = True
    return _attend(query, key, value, mask, scale, shows)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, shows: bool
) -> Tensor:
    """The same for keys that are not transposed; does each row of the mask keep something?"""
    batch, heads, rows, width = query.shape
    groups = heads // key.shape[1]
    if groups > 1 and rows > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    elif groups > 1:
        if mask is not None and mask.ndim > 2 and mask.shape[-3] == heads:
            mask = mask.reshape(*mask.shape[:-3], -1, groups, mask.shape[-1])
        attended = _attend(query.reshape(batch, -1, groups, width), key, value, mask, scale, shows)
        return attended.reshape(batch, heads, 1, -1)
    if mask is not None:  # torch's fused kernel wants four axes
        mask = mask.reshape((1,) * (RANK - mask.ndim) + mask.shape)
    if shows or mask is None:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    scores = query @ key.transpose(-1, -2) * scale
    hidden = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(hidden, -1) @ value


def _seen(mask: Tensor) -> tuple[bool, int]:
    """Does every row of a mask keep something; and how many keys, up to the last one that a row keeps?"""
    if not mask.ndim or mask.shape[-1] < 2:
        keeps = mask if mask.dtype == torch.bool else mask > -torch.inf
        return bool(keeps.all()), sys.maxsize
    keeps = (mask if mask.dtype == torch.bool else mask > -torch.inf).reshape(-1, mask.shape[-1])
    places = keeps.any(0).nonzero()
    return bool(keeps.any(-1).all()), int(places[-1]) + 1 if len(places) else 1


def _finite(x: Tensor) -> bool:
    """Are all its numbers finite, and their sum? What is not makes NaN of a row, hidden or not."""
    return bool(x.sum().isfinite())


def find(ops: Sequence[Operation], keep: set[Var]) -> list[Fusible]:
    """The attentions among the ops of a block, none of whose inner values are in `keep`."""
    present = set(ops)
    candidates = (_around(op) for op in ops if op.op_type == "softmax")
    return [
        a
        for a in candidates
        if a is not None and present.issuperset(a.ops) and all(_inner(op.outputs[0], keep) for op in a.ops[:-1])
    ]


def _inner(var: Var, keep: set[Var]) -> bool:
    """Is it read by one op and nothing else?"""
    return var not in keep and not is_output(var) and len(var.child_ops) == 1


def _around(softmax: Operation) -> Fusible | None:
    """The attention that a softmax is part of, where torch computes the same sum."""
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
    turned = _flag(first, "transpose_y")
    sources, repeats = [first.y, last.y], list[Operation]()
    before = [_before_repeat(v) for v in sources] if turned else []
    if len(groups := [b[0].shape[1] for b in before if b is not None]) == 2 and groups[0] == groups[1]:
        sources = [b[0] for b in before if b is not None]
        repeats = [op for b in before if b is not None for op in b[1]]
    reads = [("query", first.x), *zip(("key", "value"), sources, strict=True), *mask]
    ops = [*repeats, first, *attention.between, softmax, last]
    return Fusible(ops, reads, {"scale": scale, "turned": turned})


def _before_repeat(var: Var) -> tuple[Var, list[Operation]] | None:
    """The heads that are repeated, each for its group, and the ops that do so and serve nothing else."""
    ops, heads = list[Operation](), var
    for op_type in ("reshape", "tile", "expand_dims"):
        op = producer(heads, op_type)
        if op is None or is_output(heads) or len(heads.child_ops) != 1:
            return None
        ops.insert(0, op)
        heads = op.x
    wide = ops[1].outputs[0].shape
    if heads.rank != RANK or tuple(wide) != (*heads.shape[:2], wide[2], *heads.shape[2:]):
        return None
    repeated = tuple(ops[0].outputs[0].shape) == (*heads.shape[:2], 1, *heads.shape[2:])
    merged = (heads.shape[0], heads.shape[1] * wide[2], *heads.shape[2:])
    return (heads, ops) if repeated and tuple(var.shape) == merged else None


def _scale_and_mask(
    first: Operation, between: Sequence[Operation]
) -> tuple[float, list[tuple[str, Var]]] | None:
    """What stands between product and softmax: one number and at most one mask; None where it is more."""
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
    """The other operand of an op of two."""
    return op.y if op.x is var else op.x


def _flag(op: Operation, name: str) -> bool:
    return bool(constant(op.inputs.get(name)))


def _fits(first: Operation, last: Operation, softmax: Operation) -> bool:
    """Do torch's shapes hold: four axes, the first two alike, and a mask that enlarges nothing?"""
    tensors = (first.x, first.y, last.y)
    shapes = [tuple(v.shape) for v in tensors]
    scores = tuple(first.outputs[0].shape)
    return (
        all(len(s) == RANK and s[:2] == shapes[0][:2] for s in shapes)
        and all(types.is_float(v.dtype) for v in tensors)
        and tuple(softmax.x.shape) == scores
    )
