"""Replace a gather or slice at a run-time position on a short axis by a product with one-hot rows.

The position is compared with the number of each row; the product of the resulting 0s and 1 with the rows is the
wanted row itself. Negative positions count from the end. Positions are counted in fp16, which is exact up to
2047.

Refuses when a shape is symbolic, for integers, for axes of more than `most_rows` rows, when the product would
take more than `most_work` multiplications (counting the bytes that it reads, and those that the gather reads),
and for tables of two axes, which `embedding_matmul` handles.

Why it helps: the engine refuses a gather at run-time indices, and a slice that is not known when the model is
compiled (measured through Core ML on M4, macOS 27), while a product and a comparison were placed. The cast of
the position from int32 stays on the CPU. For long axes the product costs more than the gather on the CPU; what
it gains for short ones was not measured. It needs finite numbers: 0 times infinity is NaN.

Grade: checked: it rests on the range of the indices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.checking.lengths import drawn_shape
from anesurgery.display import byte_words
from anesurgery.regions import small_builds


@dataclass(frozen=True)
class OneHotLookup(Rewrite):
    """`gather`, `slice_by_size` and `slice_by_index` at dynamic places as products."""

    name = "one_hot_lookup"
    kinds = frozenset({"gather", "slice_by_size", "slice_by_index"})
    tolerates_nonfinite = False
    """The rows that are not taken are multiplied by 0."""
    most_rows: int = an.option(512, least=1, most=an.fp16.LAST_INTEGER - 1)
    """Longest axis that is looked up in."""
    most_work: int = 1 << 24
    """Most multiplications of a product."""

    def check(self, m: Match) -> Match | Refusal:
        """Match a short axis, and a product that is worth it."""
        op = m.root
        places = op.indices if op.op_type == "gather" else op.begin
        if an.constant(places) is not None:
            return an.NO_MATCH
        for v in (op.x, op.outputs[0]):
            if an.static_shape(v) is None:
                return Refusal(f"%{v.name} has the symbolic shape {tuple(v.shape)}", op)
        if an.np_dtype(op.x).kind != "f":
            return Refusal(f"%{op.x.name} holds integers, which stay off the engine", op)
        axes = _gathered(op) if op.op_type == "gather" else _sliced(op)
        if isinstance(axes, Refusal):
            return axes
        for axis, taken in axes.items():
            rows, rest = int(op.x.shape[axis]), math.prod(op.x.shape) // int(op.x.shape[axis])
            if rows > self.most_rows:
                return Refusal(f"axis {axis} has {rows} rows, above {self.most_rows}", op)
            if (work := rows * taken * rest) > self.most_work:
                size = an.np_dtype(op.x).itemsize * rest
                read = f"{byte_words(size * rows)} instead of {byte_words(size * taken)}"
                return Refusal(f"{work} multiplications, which read {read}; the limit is {self.most_work}", op)
        return m.bind(axes=axes)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw places that exist, some of them counted from the end."""
        if var is m.root.inputs.get("indices"):
            (axis,) = m.axes
            length = int(m.root.x.shape[axis])
            return rng.integers(-length, length, drawn_shape(var)).astype(an.np_dtype(var))
        if var is m.root.inputs.get("begin"):
            shape = an.static_shape(m.root.x) or ()
            last = [n - m.axes.get(axis, n) for axis, n in enumerate(shape)]
            return rng.integers(0, np.array(last) + 1).astype(an.np_dtype(var))
        return None

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build one product for each axis."""
        op, value = m.root, m.root.x
        for axis, taken in m.axes.items():
            length = int(op.x.shape[axis])
            if op.op_type == "gather":
                places = mb.reshape(x=mb.cast(x=op.indices, dtype="fp16"), shape=[taken, 1])
            else:
                first = mb.slice_by_size(x=mb.cast(x=op.begin, dtype="fp16"), begin=[axis], size=[1])
                places = mb.expand_dims(x=first, axes=[1])
            is_negative = mb.cast(x=mb.less(x=places, y=np.float16(0)), dtype="fp16")
            places = mb.add(x=places, y=mb.mul(x=is_negative, y=np.float16(length)))
            if op.op_type != "gather" and taken > 1:
                places = mb.add(x=places, y=np.arange(taken, dtype=np.float16)[:, None])
            is_row = mb.equal(x=places, y=np.arange(length, dtype=np.float16)[None])
            hot = mb.cast(x=is_row, dtype=small_builds.dtype_word(an.np_dtype(op.x)))
            value = _product(mb, value, axis, hot)
        return small_builds.reshaped(mb, value, an.static_shape(op.outputs[0]) or ())


def _gathered(op: an.Operation) -> dict[int, int] | Refusal:
    """Return the axis of a gather, with how many rows are taken; or why there is none."""
    axis = int(an.number(op.axis) or 0) % op.x.rank
    if an.number(op.inputs.get("batch_dims")):
        return Refusal("it gathers from each row of a batch its own places")
    if op.x.rank == 2 and axis == 0 and an.constant(op.x) is not None:
        return Refusal("it reads a table, which embedding_matmul does")
    if an.static_shape(op.indices) is None:
        return Refusal(f"%{op.indices.name} has the symbolic shape {tuple(op.indices.shape)}")
    return {axis: math.prod(an.static_shape(op.indices) or ())}


def _sliced(op: an.Operation) -> dict[int, int] | Refusal:
    """Return the axes of which a slice takes a part, each with its length; or why they are not known."""
    shape = an.static_shape(op.x) or ()
    if op.op_type == "slice_by_size":
        sizes = an.constant(op.size)
        if sizes is None:
            return Refusal(f"the size %{op.size.name} is dynamic")
        if -1 in (wanted := [int(s) for s in sizes]):
            return Refusal("a size of -1 depends on where the slice begins")
        return {axis: s for axis, s in enumerate(wanted) if s != shape[axis]}
    lengths = {}
    for axis, along in enumerate(an.reading.sliced(op)):
        if along.single:
            lengths[axis] = 1
        elif along.begin != 0 or not along.to_end or along.stride != 1:
            return Refusal(f"where axis {axis} begins and ends is dynamic, or it has a stride")
    return lengths


def _product(mb: Builder, x: Var, axis: int, hot: Var) -> Var:
    """Multiply by `hot`, of shape (taken, rows), which picks rows of an axis."""
    shape, taken = [int(d) for d in x.shape], int(hot.shape[0])
    if axis == len(shape) - 1 and axis > 0:
        return mb.matmul(x=x, y=hot, transpose_y=True)
    before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    picked = mb.matmul(x=hot, y=mb.reshape(x=x, shape=[before, shape[axis], after]))
    return mb.reshape(x=picked, shape=[*shape[:axis], taken, *shape[axis + 1 :]])


@an.example((1, 4, 2), mb.TensorSpec((1,), dtype=an.types.int32))
def example(x: Var, k: Var) -> Any:
    """The row of a position."""
    return mb.gather(x=x, indices=k, axis=1, name="y")
