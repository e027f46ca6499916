"""What the layers of specification 4 ask of their blobs: all their axes, whole numbers, constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from anesurgery.mil import Array, Var, is_symbolic, mb, producer, types
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.spec import DAMAGED

Numbers = Array | Var
"""Numbers that are known in advance (an array), or at run time (a value)."""


def of_rank(x: Var, rank: int) -> Var:
    """Return a blob with as many axes as its layer's parameters count: leading ones of size 1 are left out.

    A sequence or batch of 1 is nothing to a layer that lists three axes (`make_image_input` of coremltools
    writes such a transpose after an image).
    """
    extra = list(range(x.rank - rank))
    if extra and all(not is_symbolic(x.shape[a]) and x.shape[a] == 1 for a in extra):
        return mb.squeeze(x=x, axes=extra)
    return x


def squeezed(x: Var, axes: Sequence[int]) -> Var:
    """Return a value without axes of size 1; if the layer before added just these, its input."""
    wanted = sorted(a % x.rank for a in axes)
    added = producer(x, "expand_dims")
    if added is not None and sorted(a % x.rank for a in added.axes.val) == wanted:
        return cast(Var, added.x)
    return mb.squeeze(x=x, axes=wanted)


def within(ctx: Context, axis: int, rank: int, what: str = "axis") -> int:
    """Return an axis as it is stated, from the first or from the end.

    Raises:
        LoadError: there is none such among `rank` axes.
    """
    if not -rank <= axis < rank:
        raise ctx.error(f"has {what} {axis}, expected {-rank} to {rank - 1}; {DAMAGED}")
    return int(axis)


def each_within(ctx: Context, axes: Sequence[int], rank: int) -> list[int]:
    """Axes as they are stated, each another one.

    Raises:
        LoadError: there is none such, or one comes twice.
    """
    placed = [within(ctx, a, rank) for a in axes]
    if len({a % rank for a in placed}) < len(placed):
        raise ctx.error(f"has the axes {placed}, expected each once; {DAMAGED}")
    return placed


def whole(ctx: Context, x: Var) -> Var:
    """Return a blob as int32; of numbers that were int32 before they became a blob, those."""
    cast_ = producer(x, "cast")
    if cast_ is not None and cast_.x.dtype == types.int32:
        return cast(Var, cast_.x)
    return ctx.whole(x)


def sizes(ctx: Context, x: Var) -> Numbers:
    """Return a blob that holds a list of whole numbers: an int32 array when it is constant, else [n] int32."""
    if x.val is not None:
        return np.asarray(x.val, np.float64).reshape(-1).astype(np.int32)
    listed = whole(ctx, x)
    return listed if listed.rank == 1 else mb.reshape(x=listed, shape=[-1])


def scalar(ctx: Context, x: Var) -> Var:
    """Return the one number of a blob, without axes.

    Raises:
        LoadError: it has more.
    """
    if any(not is_symbolic(d) and d != 1 for d in x.shape):
        shape = ", ".join(map(str, x.shape))
        raise ctx.error(f"takes one number, but its input is of shape ({shape})")
    return mb.squeeze(x=x) if x.rank else x


def known(ctx: Context, x: Var, what: str) -> Array:
    """Return the numbers of a blob as a flat fp32 array.

    Raises:
        LoadError: it is not a constant.
    """
    if x.val is None:
        raise ctx.limit(
            f"takes {what} from a dynamic blob, which an ML Program cannot express; make it a constant"
        )
    return np.asarray(x.val, np.float32).reshape(-1)


def of_each(values: Sequence[Any], rank: int, absent: int) -> list[int]:
    """Return a number for each axis; a default where none is given.

    coremltools' builder writes flags and strides of five axes for a blob of any rank.
    """
    return [*(int(v) for v in values), *[absent] * rank][:rank]


def shape_value(x: Var) -> Numbers:
    """Return the shape: an int32 array when it is known, else a value."""
    if any(is_symbolic(d) for d in x.shape):
        return mb.shape(x=x)
    return np.array(x.shape, np.int32)


def lengths(x: Var, *axes: int) -> Numbers:
    """Return the sizes of some axes, [n] int32: an array when they are known, else a value."""
    if any(is_symbolic(x.shape[a]) for a in axes):
        at_run = mb.gather(x=mb.shape(x=x), indices=np.array(axes, np.int32), axis=0)
        return at_run
    return np.array([x.shape[a] for a in axes], np.int32)


def joined(*parts: Numbers) -> Numbers:
    """Lists of numbers, concatenated; empty arrays are left out."""
    parts = tuple(p for p in parts if p.shape[0])
    arrays = [p for p in parts if not isinstance(p, Var)]
    if len(arrays) == len(parts):
        return np.concatenate(arrays)
    return parts[0] if len(parts) == 1 else mb.concat(values=parts, axis=0)


def broadcast(ctx: Context, x: Var, target: Numbers) -> Var:
    """`x` repeated along its axes of size 1 until it has the shape that it and `target` have together."""
    known_ = not isinstance(target, Var) and not any(is_symbolic(d) for d in x.shape)
    if not known_:
        ones = mb.fill(shape=target, value=np.float32(1))
        return mb.mul(x=x, y=ones)
    wanted = np.broadcast_shapes(tuple(x.shape), tuple(int(d) for d in cast(Array, target)))
    missing = len(wanted) - x.rank
    if missing:
        x = mb.expand_dims(x=x, axes=list(range(missing)))
    reps = [n // have for n, have in zip(wanted, x.shape, strict=True)]
    return mb.tile(x=x, reps=reps) if any(n > 1 for n in reps) else x


ShapeOf: TypeAlias = Callable[[Context, Any, list[Var]], Numbers]
"""The shape that a layer says: (context, parameters, the inputs that may say it) -> sizes."""


def said_shapes(field: str) -> dict[str, tuple[int, ShapeOf]]:
    """How a layer says a shape, by the end of its type -> the number of inputs that say it, and what reads it.

    Args:
        field: of the parameters, which holds a shape that is stated.
    """
    return {
        "Like": (1, lambda ctx, params, inputs: shape_value(inputs[0])),
        "Static": (0, lambda ctx, params, inputs: np.array(getattr(params, field), np.int32)),
        "Dynamic": (1, lambda ctx, params, inputs: sizes(ctx, inputs[0])),
    }
