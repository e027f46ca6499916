"""Recognise attention in a program: a softmax over products of two dynamic values, or the fused op.

The one recogniser: the interpreter computes at once what it finds; recipes and inspections ask what is there.
It stands in this room, the lowest of those that need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from anesurgery.mil import (
    Block,
    Operation,
    Program,
    Var,
    consumers,
    is_stored,
    operands,
    producer,
    static_shape,
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
