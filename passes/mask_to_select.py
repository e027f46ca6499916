"""Write at the places of a mask by a selection: `y[mask] = f(x[mask])` becomes `where(mask, f(x), y)`.

Before::

    main(%x: 2x3) {
      %mask: 2x3xbool = greater(x=%x, y=0)
      %places: ?x2xint32 = non_zero(x=%mask)
      %positive: ? = gather_nd(x=%x, indices=%places)
      %twice: ? = mul(x=%positive, y=2)
      %y: 2x3 = scatter_nd(data=%x, indices=%places, updates=%twice, mode="update")
      return %y
    }

After::

    main(%x: 2x3) {
      %mask: 2x3xbool = greater(x=%x, y=0)
      %twice_all: 2x3 = mul(x=%x, y=2)
      %y: 2x3 = select(cond=%mask, a=%twice_all, b=%x)
      return %y
    }

PyTorch's boolean indices are converted to a list of the places where the mask is true, whose length is known at
run time only. Values are gathered at these places, computed, and scattered back. The pass computes `f` for all
places instead, and selects where the mask is true. A mask of the first axes, as for rows of a batch, takes
whole rows. If no place is true nothing is written; the original then divides 0 by 0 for the number of copies.

Refuses when `f` mixes places (a sum over them, a sort), when it reads values of the mask's length that come
from elsewhere, when a shape is symbolic, and when the number of copies of a value cannot be read.

Why it helps: shapes that depend on values keep all that follows off the ANE, and a list of places along one
axis crashed (reported: Core ML through ExecuTorch, device not given: pytorch/executorch issue
17537). A selection is legal anywhere. What the pass gains in time was not measured.

Grade: checked: a list of indices is opaque in the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Operation, Refusal, Rewrite, Var, mb
from anesurgery.facts.row_tails import rows_read
from anesurgery.regions.small_builds import reshaped

DEEPEST = 24
"""The most steps from the number of copies of a value back to the shapes that it is made of."""


@dataclass(frozen=True)
class MaskToSelect(Rewrite):
    """`scatter_nd(y, places(mask), f(gather_nd(x, places(mask))))` becomes `select(mask, f(x), y)`."""

    name = "mask_to_select"
    kinds = frozenset({"scatter_nd"})
    shares_inner = True

    def check(self, m: Match) -> Match | Refusal:
        """A write at the places of a mask, of values that are computed for each place alone."""
        op = m.root
        mask = listed_mask(op.indices)
        if mask is None or an.constant(op.mode) != "update":
            return an.NO_MATCH
        shape, all_places = an.static_shape(op.data), an.static_shape(mask)
        if shape is None or all_places is None:
            return Refusal(f"the shape of %{(mask if shape is None else op.data).name} is symbolic", op)
        if shape[: len(all_places)] != all_places:
            return Refusal(f"%{op.data.name} has the shape {shape}, and the mask {all_places}", op)
        if max(all_places) > np.iinfo(np.int16).max:
            return Refusal(f"places up to {max(all_places):,} may be cut to 16 bits", op)
        rows = RowOps(mask)
        if (refusal := rows.collect(op.updates)) is not None:
            return Refusal(refusal.reason, op)
        return m.bind(mask=mask, rows=rows)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw masks with a place that is true: without one the original divides 0 by 0."""
        if var is not m.mask:
            return None
        drawn = rng.random(tuple(var.shape)) < 0.5
        drawn.flat[rng.integers(0, drawn.size)] = True
        return drawn.astype(an.np_dtype(var))

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Compute all places, and select."""
        op, mask, shape = m.root, m.mask, list(m.root.data.shape)
        new = m.rows.build(mb, op.updates)
        if m.rows.one_row:  # of shape (1, 8) for rows at places of a mask of two axes: (1, 1, 8)
            new = reshaped(mb, new, [1] * (len(shape) - new.rank + 1) + list(new.shape[1:]))
        else:
            new = reshaped(mb, new, shape)
        condition = mask if an.types.is_bool(mask.dtype) else mb.not_equal(x=mask, y=an.np_dtype(mask).type(0))
        condition = reshaped(mb, condition, [*mask.shape, *[1] * (len(shape) - mask.rank)])
        return mb.select(cond=condition, a=new, b=op.data)


def listed_mask(indices: Var) -> Var | None:
    """Return the mask whose true places some indices list; None for other indices."""
    places = _without_guards(indices)
    listing = an.producer(places, "non_zero")
    if listing is None:
        return None
    mask: Var = listing.x
    cast = an.producer(mask, "cast")
    return cast.x if cast is not None and an.types.is_bool(cast.x.dtype) else mask


def _without_guards(indices: Var) -> Var:
    """Return indices before casts, and before `select(i >= 0, i, i + length)`, which is `i` for places."""
    while True:
        if (cast := an.producer(indices, "cast")) is not None:
            indices = cast.x
            continue
        guard = an.producer(indices, "select")
        test = None if guard is None else an.producer(guard.cond, "greater_equal")
        if guard is None or test is None or test.x is not guard.a or an.number(test.y) != 0:
            return indices
        indices = guard.a


Length = int | str
"""A length of a shape; `COUNT` for the number of true places."""
COUNT = "count"


@dataclass
class RowOps:
    """The ops that compute what is written, for each place of a mask alone."""

    mask: Var
    row_ops: list[Operation] = field(default_factory=list)
    """In the order in which they run; their results have a row for each true place."""
    read: dict[Var, Var] = field(default_factory=dict)
    """Result of a gather at the places -> the value from which it is gathered."""
    same: dict[Var, Var] = field(default_factory=dict)
    """Result of a `tile` that makes one copy, or one for each place -> what it copies."""
    one_row: bool = False
    """Is one stored row written at each place?"""

    def collect(self, updates: Var) -> Refusal | None:
        """Find the ops between the gathers and what is written; return why that fails."""
        todo, seen = [updates], set[Var]()
        while todo:
            var = todo.pop()
            if var in seen:
                continue
            seen.add(var)
            found = self._read_by(var, first=var is updates)
            if isinstance(found, Refusal):
                return found
            todo += found
        block = updates.op.enclosing_block if updates.op is not None else None
        order = {op: i for i, op in enumerate(block.operations if block is not None else ())}
        if (outside := next((op for op in self.row_ops if op not in order), None)) is not None:
            return Refusal(f"{outside.name} is in another block")
        self.row_ops.sort(key=lambda op: order[op])
        return None

    def _read_by(self, var: Var, *, first: bool) -> Sequence[Var] | Refusal:
        """Return the values with a row for each place that the producer of one reads; () for a gather."""
        op = var.op
        if op is None or op.op_type == "const":
            return Refusal(f"%{var.name} is not made of values at these places")
        if op.op_type == "gather_nd":
            return self._gathered(op)
        if op.op_type == "tile":
            return self._copied(op, first=first)
        rows = _pointwise_rows(op) if op.op_type in an.ops.POINTWISE else rows_read(op, 0)
        if rows is None or set(rows.values()) != {0}:
            return Refusal(f"{op.name} ({op.op_type}) mixes places")
        others = [v for _, v in an.operands(op) if v not in rows]
        if (dynamic := next((v for v in others if an.static_shape(v) is None), None)) is not None:
            return Refusal(f"{op.name} reads %{dynamic.name} of symbolic shape")
        self.row_ops.append(op)
        return list(rows)

    def _gathered(self, op: Operation) -> Sequence[Var] | Refusal:
        """Note a gather at the places of the mask."""
        shape, places = an.static_shape(op.x), an.static_shape(self.mask) or ()
        if listed_mask(op.indices) is not self.mask or an.number(op.inputs.get("batch_dims")):
            return Refusal(f"{op.name} gathers at other places")
        if shape is None or shape[: len(places)] != places:
            return Refusal(f"%{op.x.name} has the shape {tuple(op.x.shape)}, and the mask {places}")
        self.read[op.outputs[0]] = op.x
        return ()

    def _copied(self, op: Operation, *, first: bool) -> Sequence[Var] | Refusal:
        """Note a tile that makes one copy of rows; or, of one row, a copy for each place."""
        copies = _lengths(op.reps)
        if copies is None:
            return Refusal(f"the number of copies that {op.name} makes cannot be read")
        self.same[op.outputs[0]] = op.x
        if set(copies) == {1} and an.static_shape(op.x) is None:
            return [op.x]
        one_row = first and an.static_shape(op.x) is not None and op.x.shape[0] == 1
        if one_row and copies[0] == COUNT and set(copies[1:]) <= {1}:
            self.one_row = True
            return ()
        return Refusal(f"{op.name} makes {'x'.join(map(str, copies))} copies of %{op.x.name}")

    @property
    def keeps_shape(self) -> bool:
        """Can the ops run on values as they are, without first joining the axes of the mask into one?"""
        return all(op.op_type in an.ops.POINTWISE for op in self.row_ops)

    def build(self, mb: Builder, updates: Var) -> Var:
        """Build the ops for all places; return what is written, for all of them."""
        new: dict[Var, Var] = {}
        count = math.prod(self.mask.shape)
        for gathered, x in self.read.items():
            joined = [count, *x.shape[self.mask.rank :]]
            new[gathered] = x if self.keeps_shape else reshaped(mb, x, joined)

        def now(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [now(one) for one in value]
            while value in self.same:
                value = self.same[value]
            return new.get(value, value)

        for op in self.row_ops:
            inputs = {name: now(value) for name, value in an.op_inputs(op).items()}
            if op.op_type == "reshape":
                inputs["shape"] = [count, *op.outputs[0].shape[1:]]
            new[op.outputs[0]] = getattr(mb, op.op_type)(**inputs, name=f"{op.name}_all")
        built: Var = now(updates)
        return built


def _pointwise_rows(op: Operation) -> dict[Var, int] | None:
    """Return the operands of dynamic length; each list of places has a symbol of its own for its length."""
    along = [v for _, v in an.operands(op) if v.rank == op.outputs[0].rank and v.shape[0] != 1]
    return dict.fromkeys(along, 0) if all(an.is_symbolic(v.shape[0]) for v in along) else None


Lengths = list[Any]
"""A vector that is computed from shapes: a `Length`, or a truth value, for each element."""


def _lengths(var: Var, steps: int = DEEPEST, known: dict[Var, Lengths | None] | None = None) -> Lengths | None:
    """Return the numbers of a vector that is computed from shapes; None where they cannot be read.

    An expansion to a computed shape makes `real_div(select(shape == -1, own shape, shape), own shape)` copies.

    Args:
        var: the vector, or a number.
        steps: from how many ops back at most.
        known: what was found of other values, each of which is read once.
    """
    known = {} if known is None else known
    if var not in known:
        known[var] = _computed_lengths(var, steps, known)
    return known[var]


def _computed_lengths(var: Var, steps: int, known: dict[Var, Lengths | None]) -> Lengths | None:
    op = var.op
    if (value := an.constant(var)) is not None:
        return list(np.ravel(value).tolist())
    if op is None or not steps:
        return None
    if op.op_type == "shape":
        return _shape_of_rows(op.x)
    names, computed = COMPUTED.get(op.op_type, ((), None))
    read = op.inputs["values"] if op.op_type == "concat" else [op.inputs[name] for name in names]
    parts = [_lengths(one, steps - 1, known) for one in read]
    if computed is None or any(part is None for part in parts):
        return None
    return computed(op, *parts)


def _shape_of_rows(x: Var) -> Lengths | None:
    """Return a static shape, or that of values with a row for each place: only its first length is dynamic."""
    first, *rest = x.shape
    if any(an.is_symbolic(length) for length in rest):
        return None
    return [COUNT if an.is_symbolic(first) else int(first), *map(int, rest)]


def _sliced(op: Operation, x: Lengths) -> Lengths | None:
    """Return a slice with constant ends."""
    begin, end = an.ints(op, "begin"), an.ints(op, "end")
    if len(begin) != 1 or len(end) != 1 or an.ints(op, "stride") not in ([], [1]):
        return None
    if any(an.ints(op, "squeeze_mask")):
        return [x[begin[0]]]
    first = None if any(an.ints(op, "begin_mask")) else begin[0]
    return x[first : None if any(an.ints(op, "end_mask")) else end[0]]


def _quotients(op: Operation, x: Lengths, y: Lengths) -> Lengths | None:
    """Return the quotients of lengths if they are whole."""
    pairs = [(one, other) for one, other in zip(x, y * (len(x) // len(y)), strict=True)]
    if all(
        one == other or other == 1 or (one != COUNT != other and other and one % other == 0)
        for one, other in pairs
    ):
        return [1 if one == other else one if other == 1 else one // other for one, other in pairs]
    return None


def _same(op: Operation, x: Lengths) -> Lengths:
    return x


COMPUTED: dict[str, tuple[tuple[str, ...], Callable[..., Lengths | None]]] = {
    **dict.fromkeys(("cast", "squeeze", "expand_dims", "identity"), (("x",), _same)),
    "concat": ((), lambda op, *parts: [one for part in parts for one in part]),
    "equal": (
        ("x", "y"),
        lambda op, x, y: [one == other for one, other in zip(x, y * (len(x) // len(y)), strict=True)],
    ),
    "real_div": (("x", "y"), _quotients),
    "floor_div": (("x", "y"), _quotients),
    "select": (
        ("cond", "a", "b"),
        lambda op, cond, a, b: [x if c else y for c, x, y in zip(cond, a, b, strict=True)],
    ),
    "slice_by_index": (("x",), _sliced),
}
"""Op type -> its operands, and what it makes of their lengths."""


@an.example((2, 3))
def example(x: Var) -> Var:
    """Twice the positive numbers; the others stay."""
    mask = mb.greater(x=x, y=np.float32(0), name="mask")
    places = mb.non_zero(x=mask, name="places")
    twice = mb.mul(x=mb.gather_nd(x=x, indices=places, name="positive"), y=np.float32(2), name="twice")
    return mb.scatter_nd(data=x, indices=places, updates=twice, mode="update", name="y")
