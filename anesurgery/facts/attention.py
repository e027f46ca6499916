"""Find the mask operands between attention scores and their softmax, and say which values they come from.

`mask_chain(softmax)` walks back from the softmax through the ops that apply masks (`add`, `select`, ...) and
returns a `Chain`; `masks.take_apart` then says what the masks do. At each op the operand that comes from a
matrix product carries the scores; masks never do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.errors import NO_MATCH, Refusal
from anesurgery.interpret.attentions import Attention, is_computed, read_values, recognise
from anesurgery.mil import Operation, Var, constant, is_symbolic, np_dtype, operands, producer
from anesurgery.ops import CARRIERS, LOGICAL, SHARING, names
from anesurgery.semantics.intervals import LEAST_SCALE
from anesurgery.semantics.intervals import MASKED as MASKED
from anesurgery.semantics.reading import is_float, readers_after

EXACT_FACTOR = 1e-6
"""Relative rounding error up to which a factor is stored as one number."""

MASKING = CARRIERS | LOGICAL | names("add mul sub select maximum minimum real_div logical_not tile")
"""Ops that mask arithmetic is written with."""

AFFINE = frozenset({"add", "sub", "mul", "select", "cast", "identity", "maximum"})
"""Ops that may stand between the scores and the softmax, with one operand that depends on the scores."""

TAIL = frozenset({"cast", "identity", "reshape", "mul", "real_div"})
"""Ops that may stand between the last mask and the softmax; they stay."""


@dataclass(frozen=True)
class Chain:
    """The ops that apply masks between the scores and the softmax, or the mask operand of fused attention."""

    scores: Var
    """The scores. For fused attention the query stands here: it has the rank and dtype of the scores."""
    masks: tuple[Var, ...]
    """The mask operands, the first one applied first."""
    ops: tuple[Operation, ...] = ()
    """The ops that apply the masks, the first one first; empty for fused attention."""
    tail: tuple[Operation, ...] = ()
    """The ops between the masked scores and the softmax."""
    size: tuple[int, int] = (0, 0)
    """(queries, keys)."""


def softmaxes_after(var: Var) -> Iterator[Operation]:
    """Yield the softmaxes and fused attentions that read a value, directly or through scales and masks."""
    return (op for op in readers_after(var, MASKING) if op.op_type in SHARING)


def attention_of(product: Operation) -> Attention | None:
    """Return the attention whose scores a matmul computes; None where there is none."""
    found = (recognise(op) for op in softmaxes_after(product.outputs[0]) if op.op_type == "softmax")
    return next((a for a in found if a is not None and a.product is product), None)


def mask_chain(op: Operation) -> Chain | Refusal:
    """Return the mask ops of a softmax over the last axis, or of fused attention.

    Returns:
        The chain; a refusal that says why it cannot be read; `NO_MATCH` where nothing is masked.
    """
    if op.op_type == "scaled_dot_product_attention":
        return fused_chain(op)
    if constant(op.axis) not in (-1, op.x.rank - 1):
        return NO_MATCH
    return chain_to(op.x)


def chain_to(end: Var) -> Chain | Refusal:
    """Return the chain of mask ops before `end`, which a softmax reads.

    Returns:
        The chain; a refusal that says why it cannot be read; `NO_MATCH` where there are no mask ops.
    """
    tail: list[Operation] = []
    while (op := producer(end, *TAIL)) is not None and _may_follow_mask(op):
        tail.append(op)
        end = op.x if isinstance(op.x, Var) and constant(op.x) is None else op.y
    ops: list[Operation] = []
    masks: list[list[Var]] = []
    start = end
    while (op := producer(start, *AFFINE)) is not None and (split := _scores_and_masks(op)) is not None:
        start, others = split
        ops.append(op)
        masks.append(others)
    while ops and _is_narrowing_cast(ops[-1]):
        start = ops[-1].outputs[0]
        del ops[-1], masks[-1]
    if not any(masks):
        return NO_MATCH
    size = end.shape[-2:]
    if len(size) < 2 or any(is_symbolic(d) for d in size):
        return Refusal(f"the scores have the symbolic shape {tuple(map(str, end.shape))}", end.op)
    return Chain(
        start,
        masks=tuple(v for others in reversed(masks) for v in others),
        ops=tuple(op for op in reversed(ops) if op.op_type not in ("cast", "identity")),
        tail=tuple(reversed(tail)),
        size=(int(size[0]), int(size[1])),
    )


def fused_chain(op: Operation) -> Chain | Refusal:
    """Return the mask operand of fused attention as a chain.

    Returns:
        The chain; a refusal where the number of queries or keys is symbolic; `NO_MATCH` where there is no mask.
    """
    mask = op.inputs.get("attn_mask")
    if mask is None:
        return NO_MATCH
    size = (op.query.shape[-2], op.key.shape[-2])
    if any(is_symbolic(d) for d in size):
        return Refusal(f"the query has the symbolic shape {tuple(map(str, op.query.shape))}", op)
    return Chain(fused_operands(op)["query"], masks=(mask,), size=(int(size[0]), int(size[1])))


def fused_operands(op: Operation) -> dict[str, Var]:
    """Return query, key and value of fused attention; fp16 values that were cast only for the mask's dtype."""
    given = {name: op.inputs[name] for name in ("query", "key", "value")}
    casts = [producer(v, "cast") for v in given.values()]
    if all(c is not None and np_dtype(c.x) == np.float16 for c in casts):
        return {name: var.op.x for name, var in given.items()}
    return given


def _may_follow_mask(op: Operation) -> bool:
    """Does an op treat all scores alike, so that it may stay behind the mask?"""
    if op.op_type == "reshape":
        return tuple(op.x.shape[-2:]) == tuple(op.outputs[0].shape[-2:])
    if op.op_type in ("cast", "identity"):
        return is_float(op.x) and is_float(op.outputs[0])
    scale = constant(op.y) if constant(op.y) is not None else constant(op.x)
    if scale is None or np.size(scale) != 1 or (op.op_type == "real_div" and scale is op.x.val):
        return False
    factor = 1 / float(scale) if op.op_type == "real_div" and scale else float(scale)
    return factor >= LEAST_SCALE


def _is_narrowing_cast(op: Operation) -> bool:
    """Is an op an identity, or a cast that narrows the scores (not one that widens them for the mask)?"""
    if op.op_type == "identity":
        return True
    return op.op_type == "cast" and np_dtype(op.outputs[0]).itemsize < np_dtype(op.x).itemsize


def in_factors(value: float, dtype: np.dtype[np.generic]) -> list[np.generic]:
    """Return a factor as one number of a dtype, or as two whose product is nearer if one would be rounded."""
    kind: Any = dtype.type
    if abs(float(kind(value)) / value - 1) <= EXACT_FACTOR:
        return [kind(value)]
    seconds = (1 + np.arange(1024) / 1024).astype(dtype)
    firsts = (value / seconds.astype(np.float64)).astype(dtype)
    best = np.abs(firsts.astype(np.float64) * seconds.astype(np.float64) - value).argmin()
    return [kind(firsts[best]), kind(seconds[best])]


def _scores_and_masks(op: Operation) -> tuple[Var, list[Var]] | None:
    """Return (operand with the scores, mask operands) of an op; None where it applies no mask."""
    vars_ = [v for name, v in operands(op) if name in ("x", "y", "a", "b", "cond")]
    if op.op_type in ("cast", "identity"):
        return (op.x, []) if is_float(op.x) and is_float(op.outputs[0]) else None
    with_scores = [v for v in vars_ if is_computed(v)]
    if not with_scores:  # scores that come from outside
        with_scores = [v for v in vars_ if runtime_inputs([v])]
    if len(with_scores) != 1 or not is_float(with_scores[0]):
        return None
    masks = [v for v in vars_ if v is not with_scores[0]]
    if op.op_type == "maximum":  # a floor under masked scores
        return (with_scores[0], []) if all(_is_scalar_up_to(v, MASKED) for v in masks) else None
    if op.op_type in ("mul", "add", "sub") and all(_is_scalar_up_to(v) for v in masks):
        return None  # a scale or a shift of all scores
    if op.op_type == "sub" and with_scores[0] is op.y:
        return None
    return with_scores[0], masks


def _is_scalar_up_to(var: Var, most: float = np.inf) -> bool:
    """Is a value a constant with one element that is at most `most`?"""
    value = constant(var)
    return value is not None and np.size(value) == 1 and float(np.max(value)) <= most


def runtime_inputs(vars_: Iterable[Var]) -> list[Var]:
    """Return the program inputs that values depend on, without those of which only a static shape is read."""
    return [v for v in _sources(vars_) if v.op is None]


def shapes_read(vars_: Iterable[Var], stop: Iterable[Var]) -> list[Var]:
    """Return the values of which only the static shape is read on the way from `stop` to some values."""
    return [v for v in _sources(vars_, stop) if v.op is not None]


def _sources(vars_: Iterable[Var], stop: Iterable[Var] = ()) -> list[Var]:
    """Return the inputs that values depend on, and the values of which only the static shape is read."""
    sources: dict[Var, None] = {}
    seen: set[Var] = set(stop)
    stack = list(vars_)
    while stack:
        var = stack.pop()
        if var in seen:
            continue
        seen.add(var)
        if var.op is None:
            sources[var] = None
            continue
        read = read_values(var.op)
        stack += read
        sources |= {v: None for _, v in operands(var.op) if v not in read and v.op is not None}
    return [v for v in sources if v.op is None or v not in seen]  # of those in `seen` the numbers are read, too
