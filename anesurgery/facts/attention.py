"""Follow attention scores back from the softmax, through what applies a mask to them, and write the rest again.

Which operand carries the scores? The one that comes from a matrix product; masks never do.
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
from anesurgery.semantics.reading import readers_after

EXACT_FACTOR = 1e-6
"""Relative error up to which a rounded factor is taken as it is."""

MASKING = CARRIERS | LOGICAL | names("add mul sub select maximum minimum real_div logical_not")
"""Ops that mask arithmetic is written with."""

AFFINE = frozenset({"add", "sub", "mul", "select", "cast", "identity", "maximum"})
"""Ops that may stand between the scores and the softmax, with one operand that depends on the scores."""

TAIL = frozenset({"cast", "identity", "reshape", "mul", "real_div"})
"""Ops that may stand between the last mask and the softmax; they stay."""


@dataclass(frozen=True)
class Chain:
    """From the scores to the softmax, or the mask operand of fused attention."""

    scores: Var
    """For fused attention: the query, which has the rank and the type of the scores."""
    masks: tuple[Var, ...]
    """The operands that come from elsewhere, from the scores on."""
    ops: tuple[Operation, ...] = ()
    """What the masks are applied with, from the scores on; none for fused attention."""
    tail: tuple[Operation, ...] = ()
    """What stands between the masked scores and the softmax."""
    size: tuple[int, int] = (0, 0)
    """Queries and keys."""


def softmaxes_after(var: Var) -> Iterator[Operation]:
    """The softmaxes, and fused attentions, that read a value, or what scales and masks make of it."""
    return (op for op in readers_after(var, MASKING) if op.op_type in SHARING)


def attention_of(product: Operation) -> Attention | None:
    """The attention whose scores a product makes."""
    found = (recognise(op) for op in softmaxes_after(product.outputs[0]) if op.op_type == "softmax")
    return next((a for a in found if a is not None and a.product is product), None)


def mask_chain(op: Operation) -> Chain | Refusal:
    """The mask ops of a softmax over the last axis, or of the fused op.

    Returns:
        The chain; a refusal with why it cannot be read; `NO_MATCH` where nothing is masked.
    """
    if op.op_type == "scaled_dot_product_attention":
        return fused_chain(op)
    if constant(op.axis) not in (-1, op.x.rank - 1):
        return NO_MATCH
    return chain_to(op.x)


def chain_to(end: Var) -> Chain | Refusal:
    """The chain of mask ops before a softmax's operand.

    Returns:
        The chain; a refusal with why it cannot be read; `NO_MATCH` where there are no mask ops.
    """
    tail: list[Operation] = []
    while (op := producer(end, *TAIL)) is not None and _stays(op):
        tail.append(op)
        end = op.x if isinstance(op.x, Var) and constant(op.x) is None else op.y
    ops: list[Operation] = []
    masks: list[list[Var]] = []
    start = end
    while (op := producer(start, *AFFINE)) is not None and (split := _split(op)) is not None:
        start, others = split
        ops.append(op)
        masks.append(others)
    while ops and _narrows(ops[-1]):
        start = ops[-1].outputs[0]
        del ops[-1], masks[-1]
    if not any(masks):
        return NO_MATCH
    size = end.shape[-2:]
    if len(size) < 2 or any(is_symbolic(d) for d in size):
        return Refusal(f"the scores have the symbolic shape {tuple(map(str, end.shape))}", end.op)
    return Chain(
        start,
        tuple(v for others in reversed(masks) for v in others),
        tuple(op for op in reversed(ops) if op.op_type not in ("cast", "identity")),
        tuple(reversed(tail)),
        (int(size[0]), int(size[1])),
    )


def fused_chain(op: Operation) -> Chain | Refusal:
    """The mask operand of fused attention.

    Returns:
        The chain; a refusal where the number of queries or keys is symbolic; `NO_MATCH` where there is no mask.
    """
    mask = op.inputs.get("attn_mask")
    if mask is None:
        return NO_MATCH
    size = (op.query.shape[-2], op.key.shape[-2])
    if any(is_symbolic(d) for d in size):
        return Refusal(f"the query has the symbolic shape {tuple(map(str, op.query.shape))}", op)
    return Chain(fused_operands(op)["query"], (mask,), size=(int(size[0]), int(size[1])))


def fused_operands(op: Operation) -> dict[str, Var]:
    """Query, key and value of fused attention, as they were before all were widened for the mask's sake."""
    given = {name: op.inputs[name] for name in ("query", "key", "value")}
    casts = [producer(v, "cast") for v in given.values()]
    if all(c is not None and np_dtype(c.x) == np.float16 for c in casts):
        return {name: var.op.x for name, var in given.items()}
    return given


def _stays(op: Operation) -> bool:
    """Does an op treat all scores alike, so that it may stay after the mask?"""
    if op.op_type == "reshape":
        return tuple(op.x.shape[-2:]) == tuple(op.outputs[0].shape[-2:])
    if op.op_type in ("cast", "identity"):
        return is_float(op.x) and is_float(op.outputs[0])
    scale = constant(op.y) if constant(op.y) is not None else constant(op.x)
    if scale is None or np.size(scale) != 1 or (op.op_type == "real_div" and scale is op.x.val):
        return False
    factor = 1 / float(scale) if op.op_type == "real_div" and scale else float(scale)
    return factor >= LEAST_SCALE


def _narrows(op: Operation) -> bool:
    """Is this a cast that makes the scores what they are (and not one that the mask asked for)?"""
    if op.op_type == "identity":
        return True
    return op.op_type == "cast" and np_dtype(op.outputs[0]).itemsize < np_dtype(op.x).itemsize


def in_factors(value: float, dtype: np.dtype[np.generic]) -> list[np.generic]:
    """A factor as one number of a type; where that is rounded, as two whose product is nearer to it."""
    kind: Any = dtype.type
    if abs(float(kind(value)) / value - 1) <= EXACT_FACTOR:
        return [kind(value)]
    seconds = (1 + np.arange(1024) / 1024).astype(dtype)
    firsts = (value / seconds.astype(np.float64)).astype(dtype)
    best = np.abs(firsts.astype(np.float64) * seconds.astype(np.float64) - value).argmin()
    return [kind(firsts[best]), kind(seconds[best])]


def is_float(var: Var) -> bool:
    """Does a value hold floats?"""
    return np_dtype(var).kind == "f"


def _split(op: Operation) -> tuple[Var, list[Var]] | None:
    """The operand that carries the scores, and the mask operands; None where no mask is applied."""
    vars_ = [v for name, v in operands(op) if name in ("x", "y", "a", "b", "cond")]
    if op.op_type in ("cast", "identity"):
        return (op.x, []) if is_float(op.x) and is_float(op.outputs[0]) else None
    carrying = [v for v in vars_ if is_computed(v)]
    if not carrying:  # scores that come from outside
        carrying = [v for v in vars_ if runtime_inputs([v])]
    if len(carrying) != 1 or not is_float(carrying[0]):
        return None
    others = [v for v in vars_ if v is not carrying[0]]
    if op.op_type == "maximum":  # a floor under masked scores
        return (carrying[0], []) if all(_is_scalar(v, MASKED) for v in others) else None
    if op.op_type in ("mul", "add", "sub") and all(_is_scalar(v) for v in others):
        return None  # a scale or a shift of all scores
    if op.op_type == "sub" and carrying[0] is op.y:
        return None
    return carrying[0], others


def _is_scalar(var: Var, most: float = np.inf) -> bool:
    value = constant(var)
    return value is not None and np.size(value) == 1 and float(np.max(value)) <= most


def runtime_inputs(vars_: Iterable[Var]) -> list[Var]:
    """The inputs of the program that some values depend on; not those of which only a fixed shape is read."""
    return [v for v in _sources(vars_) if v.op is None]


def shapes_read(vars_: Iterable[Var], stop: Iterable[Var]) -> list[Var]:
    """The values of which only the fixed shape is read, on the way from `stop` to some values."""
    return [v for v in _sources(vars_, stop) if v.op is not None]


def _sources(vars_: Iterable[Var], stop: Iterable[Var] = ()) -> list[Var]:
    """Where values come from: inputs (without an op), and values of which only the fixed shape is read."""
    found: dict[Var, None] = {}
    seen: set[Var] = set(stop)
    stack = list(vars_)
    while stack:
        var = stack.pop()
        if var in seen:
            continue
        seen.add(var)
        if var.op is None:
            found[var] = None
            continue
        read = read_values(var.op)
        stack += read
        found |= {v: None for _, v in operands(var.op) if v not in read and v.op is not None}
    return [v for v in found if v.op is None or v not in seen]  # of what is in both, the numbers count
