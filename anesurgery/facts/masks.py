"""Read what an attention mask does, however it is written: which scores it keeps and which it masks.

`take_apart(chain)` returns the static part of a mask as a boolean array, and its dynamic conditions. Between
the scores and the softmax are only ops that are affine in the scores. So two evaluations (all scores 0, all
scores 1) give `factor * score + offset` for each element: factor 1 and offset 0 keep a score, an offset below
`MASKED` masks it. Dynamic booleans are tried with both values; all of them must hold for a score to be kept.
The second half asks whether a mask is causal, and how far back it looks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np
import torch

from anesurgery.errors import NO_MATCH, InterpretError, Refusal
from anesurgery.facts.attention import MASKED, Chain, mask_chain, runtime_inputs, shapes_read
from anesurgery.facts.dependence import slice_back
from anesurgery.interpret.attentions import read_values
from anesurgery.interpret.core import evaluate
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Var,
    constant,
    np_dtype,
    operands,
    producer,
    static_shape,
    walk_ops,
)
from anesurgery.ops import CARRIERS, ORDERINGS, POINTWISE
from anesurgery.semantics.fingerprint import fingerprint
from anesurgery.semantics.reading import is_float, number
from anesurgery.text import type_text

MOST_CONDITIONS = 3
"""The most dynamic conditions of one mask: each more doubles the number of evaluations."""

Literal = tuple[Var, bool]
"""A boolean of the program, and the value that it must have for a score to be kept."""


@dataclass(frozen=True)
class Parts:
    """A mask, taken apart."""

    keep: Array
    """Which scores are kept as far as is known at conversion: bool, with the axes of the scores or more."""
    conditions: tuple[Literal, ...] = ()
    """Dynamic booleans that must all hold for a score to be kept."""
    free: tuple[Var, ...] = ()
    """Other dynamic terms that are added to the scores as they are."""
    biases: tuple[Var, ...] = ()
    """Other static terms, which mask nothing."""


Bound = Mapping[Var, torch.Tensor]
"""Dynamic value -> the tensor that is tried for it."""


def take_apart(chain: Chain, *, shifted: bool = False) -> Parts | Refusal:
    """Return what a mask does, or why that cannot be shown.

    With `shifted`, kept scores may be shifted, as by a distance bias in the same constant.
    """
    kept_terms: dict[Var, torch.Tensor] = {}
    conditions: dict[Var, None] = {}
    for term, added in _terms(chain):
        # static terms stay where ops add them; fused attention (no ops) reads one mask, in which they are
        may_stay_a_term = runtime_inputs([term]) or (chain.ops and is_sum(chain))
        if added and may_stay_a_term and _is_bias(term):
            kept_terms[term] = torch.zeros([1])
            continue
        dynamic = _conditions_of(term)
        if dynamic is None:
            names = ", ".join(f"%{v.name}" for v in runtime_inputs([term]))
            return Refusal(f"the mask depends on {names} in a way that cannot be taken apart")
        conditions.update(dict.fromkeys(dynamic))
    if len(conditions) > MOST_CONDITIONS:
        return Refusal(f"the mask depends on {len(conditions)} conditions; at most {MOST_CONDITIONS}")
    # of a conjunction, exactly one assignment of its conditions keeps anything
    literals: list[Literal] | None = None
    keep: Array = np.zeros((1, 1), bool)
    for held in _assignments(conditions):
        tried = _keep(chain, {**kept_terms, **_as_tensors(held)}, shifted)
        if isinstance(tried, Refusal):
            return tried
        if tried.any() or not held:
            if literals is not None:
                return Refusal("what the mask depends on is not a conjunction")
            literals, keep = list(held.items()), tried
    return _parts(chain, literals or [], keep, list(kept_terms))


def without_leading_biases(chain: Chain) -> Chain:
    """Return the chain without the constant terms that are added first and mask nothing."""
    while len(chain.ops) > 1 and chain.ops[0].op_type in ("add", "sub"):
        mask = chain.masks[0]
        if constant(mask) is None or not _is_bias(mask):
            break
        scores = chain.ops[0].outputs[0]
        chain = replace(chain, scores=scores, masks=chain.masks[1:], ops=chain.ops[1:])
    return chain


def _parts(chain: Chain, literals: list[Literal], keep: Array, kept_terms: list[Var]) -> Parts | Refusal:
    """Move static conjuncts into `keep`; dynamic ones stay conditions."""
    conditions: dict[Literal, None] = {}
    for var, required in (leaf for literal in literals for leaf in conjuncts(*literal)):
        if runtime_inputs([var]):
            conditions[var, required] = None
        elif (value := evaluate_static(var)) is None:
            return Refusal(f"%{var.name} cannot be evaluated")
        else:
            keep = keep & (value.astype(bool) == required)
    keep = keep.reshape([1] * (chain.scores.rank - keep.ndim) + list(keep.shape))
    dynamic = [v for v in kept_terms if runtime_inputs([v])]
    biases = tuple(v for v in kept_terms if v not in dynamic)
    return Parts(without_copies(keep), tuple(conditions), tuple(dynamic), biases)


def _terms(chain: Chain) -> list[tuple[Var, bool]]:
    """Return the operands that make the mask, sums taken apart, each with whether it is added to the scores."""
    terms: list[tuple[Var, bool]] = []
    for mask in dict.fromkeys(chain.masks):
        readers = [op.op_type for op in chain.ops if any(v is mask for _, v in operands(op))]
        added = set(readers) <= {"add"} and is_float(mask)
        stack = [mask]
        while stack:
            var = stack.pop()
            op = producer(var, "add") if added else None
            if op is None:
                terms.append((var, added))
            else:
                stack += [op.y, op.x]
    return terms


def _is_bias(term: Var) -> bool:
    """Is an added term something other than a mask, so that it is kept as a term?"""
    conditions = _conditions_of(term)
    if conditions is None:
        return True
    evaluated = [static_value(term, _as_tensors(held)) for held in _assignments(conditions)]
    values = [value for value in evaluated if value is not None]
    if len(values) < len(evaluated):
        return True
    if conditions:  # a mask is 0 or masked, whatever they are
        return any(not ((value == 0) | (value <= MASKED)).all() for value in values)
    (value,) = values
    return bool((value != 0).any() and not np.isnan(value).any() and not (value <= MASKED).any())


def _conditions_of(mask: Var) -> list[Var] | None:
    """Return the dynamic booleans that a mask is computed from, pointwise; None if anything else is read."""
    conditions: dict[Var, None] = {}
    stack, seen = [mask], {mask}
    while stack:
        var = stack.pop()
        if constant(var) is not None or not runtime_inputs([var]):
            continue
        if _is_boolean(var) and producer(var, "logical_not") is None:
            if static_shape(var) is None:
                return None
            conditions[var] = None
            continue
        if (op := producer(var, *POINTWISE)) is None:
            return None
        fresh = [v for _, v in operands(op) if v not in seen]
        seen.update(fresh)
        stack += fresh
    return list(conditions)


def conjuncts(condition: Var, wanted: bool) -> list[Literal]:
    """Return the literals that must all hold for a condition to have a value, as far as it is a conjunction."""
    literals: list[Literal] = []
    seen, pending = set[Literal](), [(condition, wanted)]
    while pending:
        literal = pending.pop()
        if literal in seen:
            continue
        seen.add(literal)
        (var, value), op = literal, literal[0].op
        if op is not None and op.op_type == "logical_not":
            pending.append((op.x, not value))
        elif op is not None and op.op_type == ("logical_and" if value else "logical_or"):
            pending += [(op.y, value), (op.x, value)]
        else:
            literals.append((var, value))
    return literals


def _assignments(conditions: Iterable[Var]) -> list[dict[Var, bool]]:
    """Return all combinations of values of some booleans."""
    names = list(conditions)
    return [dict(zip(names, values, strict=True)) for values in product((True, False), repeat=len(names))]


def _as_tensors(held: Mapping[Var, bool]) -> dict[Var, torch.Tensor]:
    """Return booleans as tensors of their shapes."""
    return {v: torch.tensor(value).expand(static_shape(v) or ()) for v, value in held.items()}


def _keep(chain: Chain, bound: Bound, shifted: bool) -> Array | Refusal:
    """Return which scores are kept for given dynamic values; a refusal if the chain is not a mask.

    Static masks are cached: all layers of a model usually have the same one.
    """
    if bound:
        return _compute_keep(chain, bound, shifted)
    ends = chain.ops[-1].outputs if chain.ops else chain.masks
    ops_key = fingerprint((), slice_back(ends, {chain.scores}), ())
    operands_key = (
        tuple(map(chain.masks.index, chain.masks)),  # which of the masks are one value
        tuple(map(type_text, (chain.scores, *chain.masks))),
    )
    key = ops_key, operands_key, chain.size, shifted
    if key not in _STATIC_MASKS:
        if len(_STATIC_MASKS) >= MOST_CACHED:
            del _STATIC_MASKS[next(iter(_STATIC_MASKS))]
        _STATIC_MASKS[key] = _compute_keep(chain, bound, shifted)
    return _STATIC_MASKS[key]


_STATIC_MASKS: dict[Hashable, Array | Refusal] = {}
"""Ops and constants of a static mask -> which scores it keeps; the oldest entry goes first."""
MOST_CACHED = 8
"""The most cached masks, more than one model has; each takes as many bytes as it has elements."""


def _compute_keep(chain: Chain, bound: Bound, shifted: bool) -> Array | Refusal:
    """Compute which scores are kept."""
    results = _offsets(chain, bound)
    if results is None:
        return Refusal("the mask cannot be evaluated")
    zero, one = results
    with np.errstate(invalid="ignore"):
        keep = (zero == 0) & (one == 1)
        if shifted:  # far above what is masked, so that this is nothing beside it
            keep |= (np.minimum(zero, one) > MASKED / 2) & (zero != one) & np.isfinite(zero)
        masked = (zero <= MASKED) & (one <= MASKED)
        neither = ~(keep | masked)
        if np.isnan(zero).any():
            return Refusal("the mask holds NaN")
        if not masked.any() and (zero != one).all():
            return np.ones_like(keep)  # scores are scaled or shifted, each in its way
        if neither.any():
            place = tuple(int(i) for i in np.argwhere(neither)[0])
            factor = one[place] - zero[place]
            return Refusal(
                f"at {place} a score becomes {factor:g} * score + {zero[place]:g}: neither kept nor "
                f"masked (the mask holds {np.unique(zero).size} distinct values)"
            )
    return np.asarray(keep)


def _offsets(chain: Chain, bound: Bound) -> tuple[Array, Array] | None:
    """Return what becomes of scores that are all 0, and of scores that are all 1; None if that is unknown."""
    if is_sum(chain):
        total = np.zeros(chain.size, np.float32)
        for term, _ in _terms(chain):
            if term in bound and not _is_boolean(term):
                continue
            if (value := static_value(term, bound)) is None:
                return None
            with np.errstate(over="ignore", invalid="ignore"):
                total = total + (np.where(value, 0, -np.inf) if _is_boolean(term) else value)
        return total, total + 1
    probe = [1] * (chain.scores.rank - 2) + [int(d) for d in chain.scores.shape[-2:]]
    results = []
    for score in (0.0, 1.0):
        scores = {chain.scores: torch.tensor(score).expand(probe)}
        value = static_value(chain.ops[-1].outputs[0], {**bound, **scores})
        if value is None:
            return None
        results.append(np.broadcast_to(value, np.broadcast_shapes(value.shape, chain.size)))
    return results[0], results[1]


def is_sum(chain: Chain) -> bool:
    """Are the masks only added (or the one operand of fused attention)?"""
    return all(op.op_type in ("add", "maximum") for op in chain.ops)


def _is_boolean(var: Var) -> bool:
    """Does a value hold booleans?"""
    return np_dtype(var).kind == "b"


def static_value(var: Var, bound: Bound) -> Array | None:
    """Return a value computed from constants and the bound values; None if it depends on anything else."""
    if var not in bound and (value := constant(var)) is not None:
        return np.asarray(value)
    ops = slice_back([var], {*bound, *shapes_read([var], bound)})
    unbound = {v for op in ops for _, v in operands(op) if v.op is None and v not in bound}
    if not unbound.isdisjoint(v for op in ops for v in read_values(op)):
        return None
    shapes = {*shapes_read([var], bound), *unbound}  # of these only the shape is read
    bound = {**{v: torch.zeros(1).expand(static_shape(v) or ()) for v in shapes}, **bound}
    try:
        return np.asarray(evaluate(ops, bound, [var])[0].numpy())
    except InterpretError:
        return None


def evaluate_static(var: Var) -> Array | None:
    """Return the value of a mask that depends on no input; None for other values."""
    value = None if runtime_inputs([var]) else static_value(var, {})
    return None if value is None else value.astype(np_dtype(var))


def without_copies(keep: Array) -> Array:
    """Shorten leading axes along which a mask repeats to length 1."""
    for axis in range(keep.ndim - 2):
        first = keep.take([0], axis)
        if keep.shape[axis] > 1 and (keep == first).all():
            keep = first
    return keep


def is_decoder(function: Function) -> bool:
    """Does an attention of the function let each position see only itself and earlier ones?

    A mask that is an input is unknown. Where the number of positions is dynamic, the ops of the mask decide.
    """
    return any(_looks_back(op) for op in walk_ops(function))


def _looks_back(op: Operation) -> bool:
    """Is an op causal attention, or the op of a causal mask of dynamic length?"""
    if op.op_type in ("softmax", "scaled_dot_product_attention"):
        return against_causal_attention(op) is None
    dynamic = any(static_shape(v) is None for v in op.outputs)
    if dynamic and op.op_type == "band_part":
        return number(op.inputs.get("upper")) == 0
    return dynamic and op.op_type in ORDERINGS and _is_range(op.x) and _is_range(op.y)


def _is_range(var: Var | None) -> bool:
    """Does a value hold positions: a `range_1d`, or a rising constant, at most 8 ops upstream?"""
    for _ in range(8):
        op = var.op if var is not None else None
        if op is None or op.op_type == "range_1d":
            return op is not None
        if op.op_type == "const":
            numbers = np.asarray(constant(var)).ravel()
            return numbers.size > 1 and numbers.dtype.kind in "if" and bool((np.diff(numbers) > 0).all())
        if op.op_type not in CARRIERS | {"tile", "add", "sub"}:
            return False
        sides = [op.inputs.get(name) for name in ("x", "y")]
        var = next((v for v in sides if isinstance(v, Var) and v.rank > 0), None)
    return False


def against_causal_attention(op: Operation) -> Refusal | None:
    """Return why a softmax or fused attention is not causal; None where it is."""
    window = causal_window(mask_chain(op), op)
    return window if isinstance(window, Refusal) else None


def causal_window(chain: Chain | Refusal, op: Operation) -> int | Refusal:
    """Return how many keys a query sees at most, from the farthest to its own; or why that is not known.

    Args:
        chain: the mask ops that stand before `op`, or why there are none.
        op: a softmax, fused attention, or another op that reads masked scores.
    """
    if chain is NO_MATCH:
        return Refusal("nothing is masked", op)
    parts = chain if isinstance(chain, Refusal) else take_apart(without_leading_biases(chain), shifted=True)
    if isinstance(parts, Refusal):
        return parts
    if (against := against_causal(parts.keep)) is not None:
        return against
    keep = parts.keep.any(tuple(range(parts.keep.ndim - 2)))
    queries, keys = keep.shape
    oldest = keep.argmax(1)  # each row keeps something
    return int((np.arange(queries) - oldest).max()) + max(keys - queries, 0) + 1


def against_causal(keep: Array) -> Refusal | None:
    """Return why a mask is not causal with something kept in each row; None where it is.

    `keep` [..., queries, keys] says which scores are kept; the last query is at the last key.
    """
    return _against_causal(keep.shape, np.packbits(keep).tobytes())


@lru_cache(maxsize=16)
def _against_causal(shape: tuple[int, ...], bits: bytes) -> Refusal | None:
    """Return why a mask with this shape and these packed elements is not causal; layers have equal masks."""
    keep = np.unpackbits(np.frombuffer(bits, np.uint8), count=math.prod(shape)).reshape(shape).astype(bool)
    queries, keys = keep.shape[-2:]
    ahead = np.triu(np.ones((queries, keys), bool), max(keys - queries, 0) + 1)
    if (keep & ahead).any():
        i, j = (int(v) for v in np.argwhere(keep & ahead)[0][-2:])
        return Refusal(f"the mask is not causal: position {i} sees position {j}")
    if not ahead.any():
        return Refusal(f"a {queries}x{keys} mask has no position ahead of its query")
    if not keep.any(-1).all():
        return Refusal(f"row {int(np.argwhere(~keep.any(-1))[0][-1])} of the mask keeps nothing")
    return None
