"""Edits that treat each image and channel alike: what holds for one of them holds for all."""

from __future__ import annotations

from collections.abc import Iterable

from anesurgery.checking.both import Site
from anesurgery.mil import Operation, Var, is_stored, producer, static_shape
from anesurgery.ops import POINTWISE, names
from anesurgery.semantics.reading import ints
from anesurgery.semantics.rows import places_of

UNCOUNTED = POINTWISE | names("avg_pool l2_pool max_pool reduce_mean pad slice_by_index")
"""Ops with no parameter that says how many planes there are (a slice has masks in its place)."""


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
    """Does the op treat each plane alike, whatever their number?"""
    places = places_of(op) if op.op_type in UNCOUNTED and len(op.outputs) == 1 else None
    if not places or not _are(op.outputs, planes):
        return False
    if op.op_type == "slice_by_index" and any(ints(op, k)[:2] != [1, 1] for k in ("begin_mask", "end_mask")):
        return False
    return all(
        not {0, 1} & {*o.places} if is_stored(o.var) else o.places[:2] == (0, 1) and _are([o.var], planes)
        for o in places
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
