"""Read what an attention mask does, however it is spelled: which scores it keeps and which it shuts out.

Between the scores and the softmax only ops that are affine in the scores are followed, so two evaluations
(scores all 0, and all 1) say for each element what the mask does to any score: `factor * score + offset`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from anesurgery.errors import InterpretError
from anesurgery.mil import (
    Array,
    Operation,
    Var,
    constant,
    np_dtype,
    operands,
    producer,
    static_shape,
)
from anesurgery.proof import slice_back

SHUT = -5000.0
"""An offset at or below this shuts a score out: exp(-5000) is 0 in fp16 and in fp32."""

AFFINE = frozenset({"add", "sub", "mul", "select", "cast", "identity"})
"""Ops that may stand between the scores and the softmax, with one operand that depends on the scores."""

HEAVY = frozenset(
    {"matmul", "linear", "conv", "scaled_dot_product_attention", "layer_norm", "einsum"}
)
"""Ops that make scores and never masks."""

POINTWISE = frozenset({"cast", "sub", "mul", "add", "select", "logical_not", "identity"})
"""Ops through which a condition is followed to the offset that it makes."""


@dataclass(frozen=True)
class Chain:
    """The ops from the scores to the softmax."""

    scores: Var
    ops: tuple[Operation, ...]
    """In the order in which they run."""
    masks: tuple[Var, ...]
    """Their other operands."""
    fused: Operation | None = None
    """The attention op, where the mask is one of its operands and there are no ops between."""


def chain_to(end: Var) -> Chain | None:
    """The chain of mask ops that ends in `end`, as long as it can be followed back; None without one."""
    ops: list[Operation] = []
    masks: list[Var] = []
    while (op := producer(end, *AFFINE)) is not None:
        split = _split(op)
        if split is None:
            break
        end, others = split
        ops.append(op)
        masks += others
    while ops and ops[-1].op_type in ("cast", "identity"):
        end = ops.pop().outputs[0]  # what stands first only changes the type of the scores
    return Chain(end, tuple(reversed(ops)), tuple(masks)) if masks else None


def _split(op: Operation) -> tuple[Var, list[Var]] | None:
    """The operand that carries the scores, and the mask operands; None where no mask is applied."""
    vars_ = [v for name, v in operands(op) if name in ("x", "y", "a", "b", "cond")]
    if op.op_type in ("cast", "identity"):
        return op.x, []
    carrying = [v for v in vars_ if is_computed(v)]
    if len(carrying) != 1 or (op.op_type == "select" and carrying[0] is op.cond):
        return None
    others = [v for v in vars_ if v is not carrying[0]]
    if op.op_type in ("mul", "add", "sub") and all(_is_scalar(v) for v in others):
        return None  # a scale or a shift of all scores
    if op.op_type == "sub" and carrying[0] is op.y:
        return None
    return carrying[0], others


def _is_scalar(var: Var) -> bool:
    value = constant(var)
    return value is not None and np.size(value) == 1


def is_computed(var: Var, limit: int = 400) -> bool:
    """Does a value come from a matrix product or its like (as scores do, and masks do not)?"""
    seen, stack = {var}, [var]
    while stack and len(seen) < limit:
        op = stack.pop().op
        if op is None or op.op_type == "const":
            continue
        if op.op_type in HEAVY:
            return True
        fresh = [v for _, v in operands(op) if v not in seen]
        seen.update(fresh)
        stack += fresh
    return bool(stack)


def runtime_inputs(vars_: Iterable[Var]) -> list[Var]:
    """The inputs of the program that some values depend on; not those of which only a fixed shape is read."""
    found: list[Var] = []
    seen: set[Var] = set()
    stack = list(vars_)
    while stack:
        var = stack.pop()
        if var in seen:
            continue
        seen.add(var)
        if var.op is None:
            found.append(var)
        elif var.op.op_type != "shape" or static_shape(var.op.x) is None:
            stack += [v for _, v in operands(var.op)]
    return found


def affine(chain: Chain, bindings: dict[Var, torch.Tensor]) -> tuple[Array, Array] | None:
    """(factor, offset) of the chain for every score, or None when it cannot be evaluated.

    Args:
        chain: the ops.
        bindings: values for what the masks depend on (none for static ones).
    """
    shape = static_shape(chain.scores)
    if shape is None or len(shape) < 2:
        return None
    probe = [1] * (len(shape) - 2) + list(shape[-2:])
    stop = {chain.scores, *bindings}
    ops = slice_back([chain.ops[-1].outputs[0]], stop)
    if any(v.op is None and v not in stop for op in ops for _, v in operands(op)):
        return None
    results = []
    for value in (0.0, 1.0):
        scores = {chain.scores: torch.full(probe, value)}
        made = _value(ops, {**bindings, **scores}, chain.ops[-1].outputs[0])
        if made is None:
            return None
        results.append(np.broadcast_to(made, np.broadcast_shapes(made.shape, tuple(probe))))
    with np.errstate(invalid="ignore"):
        factor = np.where(np.isfinite(results[0]), results[1] - results[0], 0.0)
    return factor, results[0]


def _value(ops: list[Operation], bindings: dict[Var, torch.Tensor], wanted: Var) -> Array | None:
    from anesurgery.interpret import evaluate

    try:
        return evaluate(ops, bindings, [wanted])[0].double().numpy()
    except InterpretError:
        return None


def evaluate_static(var: Var) -> Array | None:
    """The value of a mask that depends on no input, or None."""
    if (value := constant(var)) is not None:
        return np.asarray(value)
    if runtime_inputs([var]):
        return None
    ops = slice_back([var], set())
    made = _value(ops, {}, var)
    return None if made is None else made.astype(np_dtype(var))


def kept(factor: Array, offset: Array) -> Array | str:
    """Which scores are kept; or why this is no mask: an element that is neither kept nor shut out."""
    keep = (factor == 1) & (offset == 0)
    shut = (offset <= SHUT) & ((factor == 0) | (factor == 1))
    odd = ~(keep | shut)
    if odd.any():
        place = tuple(int(i) for i in np.argwhere(odd)[0])
        return (
            f"at {place} a score becomes {factor[place]:g} * score + {offset[place]:g}: "
            "neither kept nor shut out"
        )
    return keep


def causal(keep: Array) -> str:
    """What is against calling a mask causal (each row keeping something); empty when nothing is."""
    queries, keys = keep.shape[-2:]
    ahead = np.triu(np.ones((queries, keys), bool), keys - queries + 1)
    if (keep & ahead).any():
        i, j = (int(v) for v in np.argwhere(keep & ahead)[0][-2:])
        return f"the mask is not causal: position {i} sees position {j}"
    if not ahead.any():
        return f"a {queries}x{keys} mask has no position ahead of its query"
    if not keep.any(-1).all():
        return f"row {int(np.argwhere(~keep.any(-1))[0][-1])} of the mask keeps nothing"
    return ""


def squeezed(keep: Array) -> Array:
    """A mask without copies: leading axes along which it repeats have length 1."""
    for axis in range(keep.ndim - 2):
        first = keep.take([0], axis)
        if (keep == first).all():
            keep = first
    return keep


def conjuncts(cond: Var) -> list[Var]:
    """The operands of nested `logical_and`s."""
    op = producer(cond, "logical_and")
    return [cond] if op is None else [*conjuncts(op.x), *conjuncts(op.y)]


def condition_of(mask: Var) -> Var | None:
    """The one boolean that a mask operand is made from, pointwise, by constants; None when there is none."""
    found: set[Var] = set()
    stack = [mask]
    while stack:
        var = stack.pop()
        if constant(var) is not None:
            continue
        op = var.op
        if np_dtype(var).kind == "b" and (op is None or op.op_type != "logical_not"):
            found.add(var)
        elif op is None or op.op_type not in POINTWISE:
            return None
        else:
            stack += [v for _, v in operands(op)]
    return found.pop() if len(found) == 1 else None


@dataclass(frozen=True)
class Parts:
    """A mask taken apart."""

    keep: Array
    """What is known at conversion: which scores are kept; in the rank of the scores."""
    conditions: tuple[Var, ...] = ()
    """Booleans known at run time, all of which must hold for a score to be kept."""
    condition: Var | None = None
    """The conjunction that they were split from."""
    free: tuple[Var, ...] = ()
    """Further terms known at run time that are added as they are."""


def take_apart(chain: Chain) -> Parts | str:
    """What a mask does, or why that cannot be shown."""
    dynamic = [v for v in dict.fromkeys(chain.masks) if runtime_inputs([v])]
    conditions = {v: condition_of(v) for v in dynamic}
    free = tuple(v for v in dynamic if conditions[v] is None and _is_added(chain, v))
    bound = {v: torch.zeros([1]) for v in free}
    found = {c for v, c in conditions.items() if v not in free}
    if len(found) > 1 or None in found:
        names = ", ".join(f"%{v.name}" for v in runtime_inputs(dynamic))
        return f"the mask depends on {names} in a way that cannot be taken apart"
    if not found:
        keep = _keep(chain, bound)
        return keep if isinstance(keep, str) else Parts(keep, free=free)
    condition = found.pop()
    assert condition is not None
    return _split_condition(chain, condition, free, bound)


def _split_condition(
    chain: Chain, condition: Var, free: tuple[Var, ...], bound: dict[Var, torch.Tensor]
) -> Parts | str:
    """Split a run-time conjunction into its static and its dynamic part, having shown what it does."""
    if static_shape(condition) is None:
        return f"%{condition.name} has the symbolic shape {tuple(condition.shape)}"
    terms = conjuncts(condition)
    dynamic = tuple(t for t in dict.fromkeys(terms) if runtime_inputs([t]))
    static = [evaluate_static(t) for t in terms if t not in dynamic]
    holds, fails = (
        _keep(chain, {**bound, condition: torch.full(static_shape(condition) or (), value)})
        for value in (True, False)
    )
    if isinstance(holds, str) or isinstance(fails, str):
        return holds if isinstance(holds, str) else str(fails)
    if fails.any():
        return f"a score is kept although %{condition.name} does not hold"
    for term in static:
        if term is None:
            return f"%{condition.name} cannot be evaluated"
        holds = holds & term
    return Parts(holds, dynamic, condition, free)


def _is_added(chain: Chain, mask: Var) -> bool:
    """Is a mask operand added to the scores (so that it can be added as well afterwards)?"""
    return bool(chain.ops) and all(op.op_type == "add" for op in chain.ops if mask in _operands(op))


def _operands(op: Operation) -> list[Var]:
    return [v for _, v in operands(op)]


def _keep(chain: Chain, bound: dict[Var, torch.Tensor]) -> Array | str:
    """Which scores the chain keeps, for given values of what is known only at run time."""
    result = _fused(chain, bound) if chain.fused is not None else affine(chain, bound)
    if result is None:
        return "the mask cannot be evaluated"
    keep = kept(*result)
    if isinstance(keep, str) or keep.ndim == chain.scores.rank:
        return keep
    return keep.reshape([1] * (chain.scores.rank - keep.ndim) + list(keep.shape))


def _fused(chain: Chain, bound: dict[Var, torch.Tensor]) -> tuple[Array, Array] | None:
    """Factor and offset of the mask operand of fused attention: boolean, or added."""
    mask = chain.masks[0]
    value = bound[mask].numpy() if mask in bound else evaluate_static(mask)
    if value is None:
        return None
    if value.dtype.kind == "b":
        value = np.where(value, 0.0, -np.inf)
    return np.ones(value.shape), value.astype(np.float64)
