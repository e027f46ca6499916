"""Attention written out in ops is computed at once, without its table of weights, where that is the same sum.

Before::

    %scores = matmul(x=%query, y=%key, transpose_y=True)     # or a key that is already transposed
    %scaled = mul(x=%scores, y=0.125)                        # or not
    %masked = add(x=%scaled, y=%mask)                        # or select(cond=%mask, a=%scaled, b=-inf), or not
    %weights = softmax(x=%masked)
    %result = matmul(x=%weights, y=%value)

After::

    %result = F.scaled_dot_product_attention(%query, %key, %value, %mask, scale=0.125)

Left alone when a value between is read elsewhere, and in arithmetics that round each op. A run that is listened
to computes op by op. A row that its mask hides altogether is NaN in the written form and 0 in torch's: for such
a mask, found while the program runs, the written form is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.mil import Operation, Var, constant, consumers, is_output, producer, types

Tensor = torch.Tensor
RANK = 4


@dataclass
class Attention:
    """One attention: its ops, and what it reads."""

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
    if mask is not None:  # torch's fused kernel wants four axes
        mask = mask.reshape((1,) * (RANK - mask.ndim) + mask.shape)
    if mask is None or _shows(mask):
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    scores = query @ key.transpose(-1, -2) * scale
    hidden = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(hidden, -1) @ value


def _shows(mask: Tensor) -> bool:
    """Does every row of a mask keep something?"""
    if mask.dtype == torch.bool:
        return bool(mask.any(-1).all())
    return bool((mask.amax(-1) > -torch.inf).all())


def find(ops: Sequence[Operation], keep: set[Var]) -> list[Attention]:
    """The attentions among the ops of a block, none of whose inner values are in `keep`."""
    present = set(ops)
    found = (_around(op) for op in ops if op.op_type == "softmax")
    return [
        a
        for a in found
        if a is not None and present.issuperset(a.ops) and all(_inner(op.outputs[0], keep) for op in a.ops[:-1])
    ]


def _inner(var: Var, keep: set[Var]) -> bool:
    """Is it read by one op and nothing else?"""
    return var not in keep and not is_output(var) and len(var.child_ops) == 1


def _around(softmax: Operation) -> Attention | None:
    """The attention that a softmax is part of."""
    readers = consumers(softmax.outputs[0])
    last = readers[0] if readers and readers[0].op_type == "matmul" else None
    if last is None or last.x is not softmax.outputs[0] or _flag(last, "transpose_y"):
        return None
    if _flag(last, "transpose_x") or constant(softmax.axis) not in (-1, RANK - 1):
        return None
    for masking, scores, mask in _masked(softmax.x):
        scaling, product, scale = _scaled(scores)
        first = producer(product, "matmul")
        if first is None or not _fits(first, last, softmax) or _flag(first, "transpose_x"):
            continue
        reads = [("query", first.x), ("key", first.y), ("value", last.y)]
        return Attention(
            [first, *scaling, *masking, softmax, last],
            reads if mask is None else [*reads, ("mask", mask)],
            {"scale": scale, "turned": _flag(first, "transpose_y")},
        )
    return None


def _masked(var: Var) -> Iterator[tuple[list[Operation], Var, Var | None]]:
    """The ways to read a value as masked scores: the op that masks, the scores, the mask."""
    if (add := producer(var, "add")) is not None:
        yield [add], add.x, add.y
        yield [add], add.y, add.x
    select = producer(var, "select")
    if select is not None and (other := constant(select.b)) is not None and np.all(other == -np.inf):
        yield [select], select.a, select.cond
    yield [], var, None


def _scaled(var: Var) -> tuple[list[Operation], Var, float]:
    """A value as a product times a number: the op that multiplies, the product, the number."""
    mul = producer(var, "mul")
    for scores, factor in ((mul.x, mul.y), (mul.y, mul.x)) if mul is not None else ():
        if mul is not None and (found := constant(factor)) is not None and np.size(found) == 1:
            return [mul], scores, float(np.reshape(found, ()))
    return [], var, 1.0


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
