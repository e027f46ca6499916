"""Edits that treat each image and channel alike: what holds for one of them holds for all."""

from __future__ import annotations

from collections.abc import Iterable

from anesurgery.checking.both import Site
from anesurgery.mil import Operation, Var, operands, producer, static_shape
from anesurgery.ops import POINTWISE, names
from anesurgery.semantics.reading import ints

POOLS = names("avg_pool l2_pool max_pool")
ELEMENTS = frozenset({"x", "y", "a", "b", "cond"})
"""Parameters that a pointwise op reads element by element."""


def alike(site: Site) -> bool:
    """Does each op of both sides work on each plane of [images, channels, spatial...] by itself, and alike?

    Every value has the same images and channels, and no constant differs between them.
    """
    values = [*site.drawn, *(v for pair in site.replaced for v in pair)]
    planes = {shape[:2] if (shape := static_shape(v)) is not None and len(shape) > 2 else None for v in values}
    computed = [op for op in (*site.old_ops, *site.new_ops) if op.op_type != "const"]
    if len(planes) != 1 or None in planes or site.carried:
        return False
    return all(_plane_by_plane(op, planes) for op in computed)


def _plane_by_plane(op: Operation, planes: set[tuple[int, ...] | None]) -> bool:
    """Does the op treat each plane alike?"""
    if len(op.outputs) != 1 or not _are(op.outputs, planes):
        return False
    if op.op_type in POOLS:
        return _are([op.x], planes)
    if op.op_type == "reduce_mean":
        axes = [a % op.x.rank for a in ints(op, "axes")]
        return _are([op.x], planes) and min(axes, default=0) > 1
    if op.op_type == "pad":
        added = ints(op, "pad")
        return _are([op.x], planes) and not any(added[: max(len(added) - 2 * (op.x.rank - 2), 0)])
    if op.op_type == "slice_by_index":
        whole = all(ints(op, name)[:2] == [1, 1] for name in ("begin_mask", "end_mask"))
        steps = ints(op, "stride")[:2] in ([], [1, 1])
        return _are([op.x], planes) and whole and steps and not any(ints(op, "squeeze_mask"))
    rank = op.outputs[0].rank  # operands of fewer axes have other axes in the place of the first two
    return op.op_type in POINTWISE and all(
        (v.rank == rank and _are([v], planes)) or _same_for_all(v, rank)
        for n, v in operands(op)
        if n in ELEMENTS
    )


def _are(values: Iterable[Var], planes: set[tuple[int, ...] | None]) -> bool:
    """Do values that the model computes have these images and channels?"""
    return all(
        producer(v, "const") is None
        and (shape := static_shape(v)) is not None
        and len(shape) > 2
        and shape[:2] in planes
        for v in values
    )


def _same_for_all(var: Var, rank: int) -> bool:
    """Is it a constant that broadcasts along images and channels?"""
    shape = static_shape(var)
    if producer(var, "const") is None or shape is None:
        return False
    return all(d == 1 for d in ((1,) * (rank - len(shape)) + tuple(shape))[:2])
