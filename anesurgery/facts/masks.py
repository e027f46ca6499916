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

FARTHEST_RANGE = 8
"""The most ops between a comparison and the positions that it reads: views, sums and a range. A choice."""

Requirement = tuple[Var, bool]
"""A boolean of the program, and the value that it must have for a score to be kept."""


@dataclass(frozen=True)
class Parts:
    """A mask, taken apart."""

    chain: Chain
    """The ops of the mask, without the constant biases that are added first."""
    keep: Array
    """Which scores are kept as far as is known at conversion: bool, with the axes of the scores or more."""
    conditions: tuple[Requirement, ...] = ()
    """Dynamic booleans that must all hold for a score to be kept."""
    dynamic_terms: tuple[Var, ...] = ()
    """Other dynamic terms that are added to the scores as they are."""
    static_terms: tuple[Var, ...] = ()
    """Other static terms, which mask nothing."""


Bound = Mapping[Var, torch.Tensor]
"""Dynamic value -> the tensor that is tried for it."""


def take_apart(chain: Chain, *, shifted: bool = False) -> Parts | Refusal:
    """Return what a mask does, or why that cannot be shown.

    With `shifted`, kept scores may be shifted, as by a distance bias in the same constant.
    """
    chain = _without_leading_biases(chain)
    other_terms: dict[Var, None] = {}
    conditions: dict[Var, None] = {}
    # static terms may stay where ops add them; fused attention reads one mask, in which they are
    static_may_stay = bool(chain.ops) and is_sum(chain)
    for term, is_added in _terms(chain):
        if is_added and (static_may_stay or runtime_inputs([term])) and _may_be_bias(term):
            other_terms[term] = None
            continue
        if (of_term := _conditions_of(term)) is None:
            names = ", ".join(f"%{v.name}" for v in runtime_inputs([term]))
            return Refusal(f"the mask depends on {names} in a way that cannot be taken apart")
        conditions.update(dict.fromkeys(of_term))
    if len(conditions) > MOST_CONDITIONS:
        return Refusal(f"the mask depends on {len(conditions)} conditions; at most {MOST_CONDITIONS}")
    # of a conjunction, exactly one assignment of its conditions keeps anything; without any, there is only one
    required: list[Requirement] | None = None
    keep: Array = np.zeros((1, 1), bool)
    zeros = dict.fromkeys(other_terms, torch.zeros([1]))  # terms that mask nothing count as 0 here
    for assignment in _assignments(conditions):
        kept = _keep(chain, {**zeros, **_as_tensors(assignment)}, shifted)
        if isinstance(kept, Refusal):
            return kept
        if kept.any() or not assignment:
            if required is not None:
                return Refusal("what the mask depends on is not a conjunction")
            required, keep = list(assignment.items()), kept
    return _parts(chain, required or [], keep, list(other_terms))


def _without_leading_biases(chain: Chain) -> Chain:
    """Return the chain without the constant terms that are added first and mask nothing."""
    while len(chain.ops) > 1 and chain.ops[0].op_type in ("add", "sub"):
        mask = chain.masks[0]  # that of the first op, since an `add` has one
        if constant(mask) is None or not _may_be_bias(mask):
            break
        scores = chain.ops[0].outputs[0]
        chain = replace(chain, scores=scores, masks=chain.masks[1:], ops=chain.ops[1:])
    return chain


def _parts(
    chain: Chain, required: Iterable[Requirement], keep: Array, other_terms: Iterable[Var]
) -> Parts | Refusal:
    """Move static conjuncts into `keep`; dynamic ones stay conditions."""
    conditions: dict[Requirement, None] = {}
    for var, wanted in (part for requirement in required for part in conjuncts(*requirement)):
        if runtime_inputs([var]):
            conditions[var, wanted] = None
        elif (value := evaluate_static(var)) is None:
            return Refusal(f"%{var.name} cannot be evaluated")
        else:
            keep = keep & (value.astype(bool) == wanted)
    keep = keep.reshape([1] * (chain.scores.rank - keep.ndim) + list(keep.shape))
    dynamic_terms = tuple(v for v in other_terms if runtime_inputs([v]))
    static_terms = tuple(v for v in other_terms if v not in dynamic_terms)
    return Parts(chain, without_copies(keep), tuple(conditions), dynamic_terms, static_terms)


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


def _may_be_bias(term: Var) -> bool:
    """May an added term be a bias, and no mask?

    Yes where its value is unknown, whatever its conditions are; where conditions can make a number of it that
    neither keeps nor masks; and where it is constant, not 0 everywhere, and masks nothing.
    """
    conditions = _conditions_of(term)
    if conditions is None:
        return True
    evaluated = [static_value(term, _as_tensors(values)) for values in _assignments(conditions)]
    values = [value for value in evaluated if value is not None]
    if len(values) < len(evaluated):
        return True
    if conditions:  # a mask is 0 or masked, whatever these are
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
        if np_dtype(var).kind == "b" and producer(var, "logical_not") is None:
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


def conjuncts(condition: Var, wanted: bool) -> list[Requirement]:
    """Return what must all hold for a condition to have a value, as far as it is a conjunction."""
    leaves: list[Requirement] = []
    seen, pending = set[Requirement](), [(condition, wanted)]
    while pending:
        var, value = pending.pop()
        if (var, value) in seen:
            continue
        seen.add((var, value))
        if (op := producer(var, "logical_not")) is not None:
            pending.append((op.x, not value))
        elif (op := producer(var, "logical_and" if value else "logical_or")) is not None:
            pending += [(op.y, value), (op.x, value)]
        else:
            leaves.append((var, value))
    return leaves


def _assignments(conditions: Iterable[Var]) -> list[dict[Var, bool]]:
    """Return all combinations of values of some booleans."""
    names = list(conditions)
    return [dict(zip(names, values, strict=True)) for values in product((True, False), repeat=len(names))]


def _as_tensors(assignment: Mapping[Var, bool]) -> dict[Var, torch.Tensor]:
    """Return booleans as tensors of their shapes."""
    return {v: torch.tensor(value).expand(static_shape(v) or ()) for v, value in assignment.items()}


def _keep(chain: Chain, bound: Bound, shifted: bool) -> Array | Refusal:
    """Return which scores are kept for given dynamic values; a refusal if the chain is not a mask.

    Static masks are cached: all layers of a model usually have the same one.
    """
    if bound:
        return _compute_keep(chain, bound, shifted)
    ends = chain.ops[-1].outputs if chain.ops else chain.masks
    masks = [(mask, mask) for mask in chain.masks]  # one of fused attention is an operand of no op of the slice
    key = fingerprint(masks, slice_back(ends, {chain.scores}), ()), type_text(chain.scores), chain.size, shifted
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
            return np.ones_like(keep)  # no score is masked, but scaled or shifted, each in its way
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
            is_boolean = np_dtype(term).kind == "b"
            if term in bound and not is_boolean:
                continue
            if (value := static_value(term, bound)) is None:
                return None
            with np.errstate(over="ignore", invalid="ignore"):
                total = total + (np.where(value, 0, -np.inf) if is_boolean else value)
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
    """Are the masks only added (or the one operand of fused attention)?

    In a chain, a `maximum` is a floor under masked scores, and has no mask operand.
    """
    return all(op.op_type in ("add", "maximum") for op in chain.ops)


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
    """Does a value hold positions: a `range_1d`, or a rising constant, a few ops upstream?"""
    for _ in range(FARTHEST_RANGE):
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
    parts = chain if isinstance(chain, Refusal) else take_apart(chain, shifted=True)
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


@lru_cache(maxsize=16)  # a test of 2,048 x 2,048 takes some 30 ms, a look-up 1 ms
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
