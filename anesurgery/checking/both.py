"""Cut one edit out of its program: the ops of both sides, and what they read from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anesurgery.facts.dependence import slice_back
from anesurgery.interpret.arithmetic.precision import narrows
from anesurgery.mil import Operation, Var, is_compressed, np_dtype, producer, reads
from anesurgery.ops import CARRIERS, MOVING


@dataclass(frozen=True)
class Site:
    """One edit: what is replaced, the ops of both sides, and what they read from outside."""

    replaced: Sequence[tuple[Var, Var]]
    old_ops: Sequence[Operation]
    new_ops: Sequence[Operation]
    drawn: Sequence[Var]
    carried: Sequence[Var]
    """What the new side reads from inside the old side."""


def site_of(
    replaced: Sequence[tuple[Var, Var]], new_ops: Sequence[Operation], matched: Sequence[Operation]
) -> Site:
    """The site of an edit: see `checking.site.check_site`."""
    replaced, new_ops = _before_rounding(replaced, new_ops)
    new_ops = [*_decoding(new_ops), *new_ops]  # compressed weights are constants, and no numbers to be drawn
    inside = {v for op in new_ops for v in op.outputs}
    outside = dict.fromkeys(v for op in new_ops for v in reads(op) if v not in inside)
    outside |= dict.fromkeys(new for _, new in replaced if new not in inside)
    boundary = [v for v in outside if v.op is None or v.op.op_type != "const"]
    matched_values = {v for op in matched for v in op.outputs}
    stop = set(boundary) - matched_values
    if stop != set(boundary):
        edge = {v for op in matched for v in reads(op)} - matched_values
        stop = stop | edge if stop <= edge else stop
    old_ops = slice_back([old for old, _ in replaced] + [v for v in boundary if v in matched_values], stop)
    inner = {v for op in old_ops for v in op.outputs}
    inputs = dict.fromkeys([*boundary, *(v for op in old_ops for v in reads(op) if v not in inner)])
    # What the new side reads from inside the old side is computed, so it must not be drawn.
    drawn = [v for v in inputs if v not in inner and not (v.op is not None and v.op.op_type == "const")]
    return Site(replaced, old_ops, new_ops, drawn, [v for v in boundary if v in inner])


def _before_rounding(
    replaced: Sequence[tuple[Var, Var]], new_ops: Sequence[Operation]
) -> tuple[list[tuple[Var, Var]], list[Operation]]:
    """The pairs and the new ops without last casts to a type in which the old side computes: both round so."""
    read = {v for op in new_ops for v in reads(op)}
    pairs, last = [], set[Operation]()
    for old, new in replaced:
        op = producer(new, "cast")
        if op is not None and op in new_ops and new not in read and narrows(op) and _computed(old, new):
            last.add(op)
            new = op.x
        pairs.append((old, new))
    return pairs, [op for op in new_ops if op not in last]


def _computed(old: Var, new: Var) -> bool:
    """Was the old value computed in the type to which the new one is cast?"""
    return old.op is not None and old.op.op_type not in CARRIERS | MOVING and np_dtype(old) == np_dtype(new)


def _decoding(ops: Sequence[Operation]) -> list[Operation]:
    """The ops not among some that decode the weights which these read."""
    weights = [v for op in ops for v in reads(op) if is_compressed(v)]
    return [op for op in slice_back(weights, set()) if op.op_type != "const" and op not in set(ops)]
