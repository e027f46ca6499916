"""Find out whether the first rows of every output depend on the first rows of the inputs alone.

Then a shorter input may be filled up at its end, and the outputs cropped. The function is followed at a
length that no other axis has, before the arithmetic of shapes is folded. Of each value it is shown that,
cropped, it is what the function computes at the shorter length: slice i depends on slice i of what is filled
up, or on slices up to i. Where an op reads across (a softmax over keys, a product with values, a sum), what
was filled up must count for nothing: hidden by a mask, or multiplied by zeros. Masks are those of an input,
whose filling is followed through the ops that make the mask of it, and those in tables, whose values are
read at the largest size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.facts.attention import MASKED
from anesurgery.facts.masks import static_value
from anesurgery.facts.padded_ends import (
    DEEPEST,
    TABLE,
    UNKNOWN,
    End,
    combined,
    of_stored,
    of_table,
    stays_finite,
    unknown,
)
from anesurgery.facts.padded_windows import begins_first, is_cut, is_edge, stride_along, unpadded, windows_kept
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Var,
    constant,
    consumers,
    is_output,
    is_stored,
    np_dtype,
    operands,
    producer,
    types,
    walk_ops,
)
from anesurgery.ops import names
from anesurgery.semantics.reading import each_axis, ints, sliced
from anesurgery.semantics.rows import CONTRACTED, Axes, places_of, reshaped

COUNTING = names("cast concat expand_dims gather identity mul reshape slice_by_index squeeze")
"""Ops by which shapes are put together; what else is computed from lengths may differ from one to the next."""
RECURRENT = names("gru lstm rnn")
SUMS = names("einsum matmul reduce_sum")
"""Ops to which what is zero adds nothing."""
VANISHING = 104.0
"""exp of less than minus this is 0 in fp32."""


@dataclass(frozen=True)
class Rows:
    """What is known of a value that is as long as the inputs.

    Attributes:
        axes: those of the length. Cropped along them, the value is that of the shorter input.
        ends: by axis, what lies beyond the length; `UNKNOWN` where it is left out.
        finite: is what lies beyond the length finite?
        table: all elements at the largest size, of what depends on the length alone.
        varies: does it depend on what is filled up?
    """

    axes: frozenset[int]
    ends: Mapping[int, End] = field(default_factory=dict)
    finite: bool = True
    table: Array | None = None
    varies: bool = True


@dataclass(frozen=True)
class Kept:
    """What was shown.

    Attributes:
        crops: output -> its axis to crop, of those that are as long as the inputs, or a part of that.
        shares: output -> how many places of the inputs one of its own stands for.
        hiding: input that hides what is filled up -> must its first place count, or is any enough?
        spread: how far apart attention scores of a row may be, for what is hidden to weigh nothing; None: any.
    """

    crops: Mapping[str, int]
    shares: Mapping[str, int]
    hiding: Mapping[str, bool]
    spread: float | None
    claims: frozenset[str] = frozenset()
    """Values that depend on the length alone, of which the first places must be the same at every length."""


def rows_kept(
    function: Function,
    largest: Function,
    axes: Mapping[str, int],
    length: int,
    fill: Mapping[str, float],
    multiple: int = 1,
) -> Kept | Refusal:
    """Whether inputs may be filled up.

    Args:
        function: of static shapes, whose arithmetic of shapes is not folded.
        largest: the same at the largest size.
        axes: input -> its axis that is filled up.
        length: which divides no other length of the function than those of these axes (`filling.free_length`),
            which are `multiple` times that.
        fill: what each input is filled up with.
        multiple: of which all lengths are multiples, so that convolutions that move by more than 1 make parts.
    """
    walk = _Walk(function, largest, length, multiple)
    for name, var in function.inputs.items():
        if name not in axes and walk.long(var):
            return Refusal(f"the input {name} follows the length of the others, and is not among the sizes")
    for name, axis in axes.items():
        end = End(fill[name], fill[name], sources=frozenset({name}))
        walk.held[function.inputs[name]] = Rows(frozenset({axis}), {axis: end})
    for op in function.operations:
        told = is_stored(op.outputs[0]) or walk.waits(op)
        if not told and (refusal := walk.step(op)) is not None:
            return refusal
    return walk.result()


class _Walk:
    """One walk through a function."""

    def __init__(self, function: Function, largest: Function, length: int, multiple: int) -> None:
        self.function, self.length, self.multiple = function, length, multiple
        self.largest = {v.name: v for op in walk_ops(largest) for v in op.outputs}
        self.held: dict[Var, Rows] = {}
        self.counts: set[Var] = set()
        self.of_length: set[Var] = set()
        """A value computed only from the sequence length: neither an array of that length nor a constant."""
        self.claims: set[str] = set()
        self.hiding: dict[str, bool] = {}
        self.highest = -np.inf

    def long(self, var: Var) -> frozenset[int]:
        """The axes whose length is a multiple of the one that is followed."""
        if not types.is_tensor(var.sym_type):
            return frozenset()
        return frozenset(a for a, n in enumerate(var.shape or ()) if n % self.length == 0)

    def share(self, var: Var, axes: Iterable[int]) -> int | None:
        """How many places of the inputs one stands for along some axes; None where that differs, or is none."""
        shares = {self.length * self.multiple / var.shape[a] for a in axes}
        share = shares.pop() if len(shares) == 1 else 0.0
        return int(share) if share >= 1 and share.is_integer() else None

    def result(self) -> Kept | Refusal:
        """What was shown, once every op was followed."""
        crops, shares = dict[str, int](), dict[str, int]()
        for var in self.function.outputs:
            if var in self.counts or var in self.of_length:
                return Refusal(f"the output {var.name} is computed from the length of the input")
            axes = self.held[var].axes if var in self.held else frozenset()
            if len(axes) > 1:
                return Refusal(f"the output {var.name} is as long as the input along several axes")
            if axes:
                crops[var.name] = next(iter(axes))
                shares[var.name] = self.share(var, axes) or 1
        spread = None if np.isinf(self.highest) else -self.highest - VANISHING
        return Kept(crops, shares, self.hiding, spread, frozenset(self.claims))

    def step(self, op: Operation) -> Refusal | None:
        """Follow one op; a reason where it reads across, or computes with the length."""
        vars_ = [var for _, var in operands(op)]
        if op.op_type == "conv":
            vars_.append(unpadded(op))
        if any(v in self.of_length for v in vars_):
            why = Refusal(f"{op.op_type} computes with the length of the input", op)
            return None if self._by_value(op) else why
        if (conv := self._cut(op)) is not None:
            cut = self._first_places(conv)
            return cut if isinstance(cut, Refusal) else self._keep(op, cut)
        counted = any(v in self.counts for v in vars_)
        if op.op_type == "shape" and self.long(op.x):
            self.counts.update(op.outputs)
            return None
        rows = self._made(op) if counted or op.op_type == "fill_like" else None
        if rows is None and counted and self._counts(op):
            self._count(op)
            return None
        if rows is None and not any(v in self.held for v in vars_):
            if counted and self._by_value(op):
                return None
            if counted or any(self.long(v) for v in op.outputs):
                return Refusal(f"{op.op_type} computes with the length of the input", op)
            return None
        followed = rows or self._followed(op)
        if isinstance(followed, Refusal):
            return None if self._by_value(op) else followed
        return self._keep(op, followed)

    def waits(self, op: Operation) -> bool:
        """Do ops behind it tell: convolutions behind an edge, or slices behind a convolution?"""
        return (is_edge(op) and op.x in self.held) or (is_cut(op) and unpadded(op) in self.held)

    def _cut(self, op: Operation) -> Operation | None:
        """The convolution that pads both ends of whose places a slice takes the first."""
        conv = producer(op.x, "conv") if op.op_type == "slice_by_index" else None
        return conv if conv is not None and self.waits(conv) else None

    def _first_places(self, conv: Operation) -> Rows | Refusal:
        if (axis := self._axis_of_windows(conv)) is None:
            return Refusal(f"{conv.op_type} reads across the padded axis", conv)
        return self._windows(conv, axis)

    def _by_value(self, op: Operation) -> bool:
        """Does an op read nothing that varies? Then its value is known at every length, and is looked at."""
        known = [
            v in self.counts or v in self.of_length or (v in self.held and not self.held[v].varies)
            for _, v in operands(op)
            if not self._is_number(v)
        ]
        if not known or not all(known) or any(self._both(v) is None for v in op.outputs):
            return False
        for var in op.outputs:
            axes = self.long(var)
            if axes and self.share(var, axes) is not None:
                self.held[var] = self._with_table(var, Rows(axes, varies=False))
                self.claims.add(var.name)
            else:
                self.of_length.add(var)
        return True

    def _pure(self, op: Operation) -> bool:
        """Does an op read lengths and numbers only?"""
        return all(v in self.counts or self._is_number(v) for _, v in operands(op))

    def _is_number(self, var: Var) -> bool:
        """Does it hold the same numbers at every length?"""
        if is_stored(var) or var in self.counts or var in self.held or var in self.of_length:
            return is_stored(var)
        both = self._both(var)
        return both is not None and np.array_equal(both[0], both[1])

    def _counts(self, op: Operation) -> bool:
        """Is it arithmetic of shapes, whose result is the same at all lengths or rises with them?"""
        if op.op_type == "equal":  # is an axis -1, which stands for "as it is"? Lengths are not.
            negative = constant(op.y) is not None and bool(np.all(op.y.val < 0))
            return negative and op.x in self.counts and self._is_steady_or_positive(op.x)
        if op.op_type == "real_div":  # how often is an axis repeated? Axes of length 1 are, and others once
            return self._pure(op) and self._is_steady_or_over_one(op)
        return self._pure(op) and (
            op.op_type in COUNTING or (op.op_type == "select" and op.cond not in self.counts)
        )

    def _is_steady_or_positive(self, var: Var) -> bool:
        both = self._both(var)
        return both is not None and bool(np.all((both[0] == both[1]) | ((both[0] > 0) & (both[1] > 0))))

    def _is_steady_or_over_one(self, op: Operation) -> bool:
        over, result = self._both(op.y), self._both(op.outputs[0])
        if over is None or result is None:
            return False
        return bool(np.all((result[0] == result[1]) | ((over[0] == 1) & (over[1] == 1))))

    def _both(self, var: Var) -> tuple[Any, Any] | None:
        """What is known of a value at the length that is followed, and at the largest."""
        if is_stored(var):
            return var.val, var.val
        there = self.largest[var.name].val if var.op is not None else None
        return None if var.val is None or there is None else (var.val, there)

    def _count(self, op: Operation) -> None:
        """What is the same at both lengths is a number like any other."""
        for var in op.outputs:
            both = self._both(var)
            same = both is not None and np.array_equal(both[0], both[1])
            if not same:
                self.counts.add(var)

    def _keep(self, op: Operation, rows: Rows) -> Refusal | None:
        read = {self.share(v, self.held[v].axes) for v in self._read(op) if self.held[v].axes}
        step = self._step(op)
        for var in op.outputs[:1] if op.op_type in RECURRENT else op.outputs:
            share = self.share(var, rows.axes) if rows.axes else 1
            one = not rows.axes or not read or read == {share and share / step}
            if self.long(var) != rows.axes or share is None or not one:
                return Refusal(f"{op.op_type} gives the axis another length", op)
            self.held[var] = self._with_table(var, rows)
        return None

    def _read(self, op: Operation) -> list[Var]:
        """What an op reads that is as long as the inputs."""
        vars_ = [*(var for _, var in operands(op)), *([unpadded(op)] if op.op_type == "conv" else [])]
        return [v for v in vars_ if v in self.held]

    def _step(self, op: Operation) -> int:
        """By how much windows or slices move along the length."""
        source = unpadded(op) if op.op_type == "conv" else op.inputs.get("x")
        rows = self.held.get(source) if isinstance(source, Var) else None
        if rows is None or len(rows.axes) != 1 or op.op_type not in ("conv", "slice_by_index"):
            return 1
        (axis,) = rows.axes
        if op.op_type == "conv":
            return stride_along(op, axis) if axis > 1 else 1
        return abs(each_axis(op, "stride", 1)[axis])

    def _with_table(self, var: Var, rows: Rows) -> Rows:
        """The ends of a table are read from its elements at the largest size."""
        if rows.varies:
            return rows
        there = self.largest[var.name]
        value = static_value(there, {}) if there.val is None else there.val
        if value is None:
            return rows
        table = np.asarray(value)
        return replace(rows, table=table, ends={a: of_table(table, rows.axes, a) for a in rows.axes})

    def _made(self, op: Operation) -> Rows | None:
        """A table of the length: of places, of one number, or the first rows of a longer one."""
        out = op.outputs[0]
        lengths = {name for name, var in operands(op) if var in self.counts}
        axes, stored = self.long(out), self._pure(op)
        if op.op_type == "range_1d" and lengths == {"end"} and stored:
            return Rows(axes, varies=False)
        if op.op_type == "fill" and lengths == {"shape"} and stored:
            return Rows(axes, varies=False)
        if op.op_type == "fill_like" and op.ref_tensor in self.held:
            return Rows(self.held[op.ref_tensor].axes, varies=False)
        if op.op_type == "tile" and lengths == {"reps"}:
            return self._tiled(op)
        if op.op_type == "slice_by_index" and lengths == {"end"} and is_stored(op.x):
            begins = constant(op.begin)
            steps = constant(op.inputs.get("stride"))
            first = begins is not None and all(begins[a] == 0 for a in axes) and out.rank == op.x.rank
            return Rows(axes, varies=False) if first and (steps is None or np.all(steps == 1)) else None
        return None

    def _tiled(self, op: Operation) -> Rows | None:
        """Axes of length 1 are repeated as often as the inputs are long, and others stay."""
        rows = self.held.get(op.x, Rows(frozenset(), varies=not (self._pure(op) or op.x in self.held)))
        both = self._both(op.reps)
        if both is None:
            return None
        steady, new = (both[0] == 1) & (both[1] == 1), frozenset(self.long(op.outputs[0]) - rows.axes)
        if not all(steady[a] or (op.x.shape[a] == 1 and a in new) for a in range(op.x.rank)):
            return None
        return replace(rows, axes=rows.axes | new, table=None)

    def _looked_up(self, op: Operation) -> Rows | None:
        """`gather_nd` by a table that names, for each place, none beyond that place."""
        rows, table = self.held.get(op.x), self.held.get(op.indices)
        depth = op.indices.shape[-1]
        if (
            rows is None
            or table is None
            or table.table is None
            or len(rows.axes) != 1
            or ints(op, "batch_dims") not in ([], [0])
        ):
            return None
        (axis,) = rows.axes
        if axis >= depth or depth != op.x.rank or table.varies:
            return None
        named = table.table[..., axis].astype(np.int64)
        for along in sorted(table.axes):
            places = np.arange(named.shape[along]).reshape([-1 if a == along else 1 for a in range(named.ndim)])
            if (named == places).all():
                return replace(rows, axes=table.axes, ends={along: self._of(op.x, axis)}, table=None)
        return None

    def _followed(self, op: Operation) -> Rows | Refusal:
        """An op that reads what is as long as the inputs."""
        if any(v in self.counts for name, v in operands(op) if (op.op_type, name) not in PLACED):
            return Refusal(f"{op.op_type} computes with the length of the input", op)
        read = {v: self.held[v] for _, v in operands(op) if v in self.held}
        varies, finite = any(r.varies for r in read.values()), all(r.finite for r in read.values())
        if op.op_type in RECURRENT:
            return self._recurrent(op, read)
        forward = op.op_type == "cumsum" and not _says(op, "reverse")
        if forward or (op.op_type == "band_part" and is_stored(op.lower) and is_stored(op.upper)):
            return Rows(read[op.x].axes, finite=finite, varies=varies)
        if (axis := self._axis_of_windows(op)) is not None:
            return self._windows(op, axis)
        kinds: dict[str, Callable[[Operation], Rows | None]] = {
            "gather_nd": self._looked_up,
            "tile": self._tiled,
            "slice_by_index": self._every,
        }
        if op.op_type in kinds and (rows := kinds[op.op_type](op)) is not None:
            return rows
        if op.op_type == "softmax" and (refusal := self._hidden(op, op.x, _axis(op), op.x.rank)) is not None:
            return refusal
        if op.op_type == "scaled_dot_product_attention" and self.long(op.key) & {op.key.rank - 2}:
            return self._attention(op, read)
        axes = reshaped(op) if op.op_type == "reshape" else places_of(op)
        if axes is None or not set(read) <= {o.var for o in axes}:
            return Refusal(f"it is not known whether {op.op_type} reads across the padded axis", op)
        kept = self._placed(op, axes)
        if isinstance(kept, Refusal):
            return kept
        ends = {a: self._end(op, axes, a) for a in kept}
        return Rows(kept, ends, finite and stays_finite(op), varies=varies)

    def _placed(self, op: Operation, axes: Axes) -> frozenset[int] | Refusal:
        """The axes of the result to which those go that are as long as the inputs."""
        kept = set[int]()
        for operand in axes:
            for axis in self.held[operand.var].axes if operand.var in self.held else ():
                place = operand.places[axis]
                if op.op_type == "softmax" and axis == _axis(op):
                    place = axis
                if isinstance(place, int):
                    kept.add(place)
                elif not _takes_first(op, axis) and not (place == CONTRACTED and self._adds_nothing(op, axes)):
                    return Refusal(f"{op.op_type} reads across the padded axis", op)
        return frozenset(kept)

    def _adds_nothing(self, op: Operation, axes: Axes) -> bool:
        """Is what lies beyond the length multiplied by zeros, along the axis that is summed over?"""
        if op.op_type not in SUMS:
            return False
        held = [o for o in axes if o.var in self.held]
        zero = [
            self._of(o.var, a).is_zero for o in held for a in self.held[o.var].axes if o.places[a] == CONTRACTED
        ]
        return any(zero) and len(zero) == len(held) and all(self.held[o.var].finite for o in held)

    def _of(self, var: Var, axis: int) -> End:
        return self.held[var].ends.get(axis, unknown(var))

    def _end(self, op: Operation, axes: Axes, axis: int) -> End:
        """What lies beyond the length along an axis of the result."""
        if op.op_type == "softmax":
            return End(0.0, 0.0) if axis == _axis(op) else UNKNOWN
        read = dict[str, End]()
        for operand in axes:
            var, at = operand.var, operand.places.index(axis) if axis in operand.places else None
            if is_stored(var):
                read[operand.name] = of_stored(var)
            elif var in self.held and at in self.held[var].axes:
                read[operand.name] = self._of(var, at)
            else:
                read[operand.name] = unknown(var)
        finite = all(self.held[o.var].finite for o in axes if o.var in self.held)
        return combined(op, read) if finite or op.op_type == "select" else unknown(op.outputs[0])

    def _hidden(self, op: Operation, scores: Var, axis: int, rank: int) -> Refusal | None:
        """Why a softmax gives weight to what lies beyond the length; None where it does not."""
        rows = self.held.get(scores)
        if rows is None or axis not in rows.axes:
            return None
        end = self._of(scores, axis)
        if not end.hides:
            return Refusal(f"{op.op_type} reads across the padded axis: no mask hides what is filled up", op)
        if not rows.finite and end.loose:
            return Refusal(f"what {op.op_type} reads beyond the length may be no number", op)
        others = [self._of(scores, a) for a in rows.axes if a != axis]
        if any(other.hides and other.low < DEEPEST for other in others):
            return Refusal(f"the mask hides whole rows of {op.op_type}, which may be no numbers", op)
        if rows.table is not None and not (rows.table > MASKED).any(axis % rank).all():
            return Refusal(f"the mask hides whole rows of {op.op_type}", op)
        for name in end.sources - {TABLE}:
            self.hiding[name] = self.hiding.get(name, False) or TABLE in end.sources
        self.highest = max(self.highest, end.high)
        return None

    def _attention(self, op: Operation, read: Mapping[Var, Rows]) -> Rows | Refusal:
        """Fused attention, whose mask hides the keys that were filled up."""
        mask, keys = op.inputs.get("attn_mask"), op.key.rank - 2
        if mask is None or mask not in read:
            return Refusal(f"{op.op_type} reads across the padded axis: no mask hides what is filled up", op)
        whole = {op.key: {keys}, op.value: {op.value.rank - 2}, op.query: {op.query.rank - 2}}
        if any(read[v].axes - wanted for v, wanted in whole.items() if v in read):
            return Refusal(f"it is not known whether {op.op_type} reads across the padded axis", op)
        hidden = read[mask]
        if np_dtype(mask).kind == "b":
            ends = {a: _as_bias(self._of(mask, a)) for a in hidden.axes}
            table = None if hidden.table is None else np.where(hidden.table, 0.0, -np.inf)
            self.held[mask] = replace(hidden, ends=ends, table=table)
        refusal = self._hidden(op, mask, mask.rank - 1, mask.rank)
        self.held[mask] = hidden
        if mask.rank - 1 not in hidden.axes or not all(r.finite for r in read.values()):
            return Refusal(f"{op.op_type} reads across the padded axis: no mask hides what is filled up", op)
        rows = frozenset({op.outputs[0].rank - 2}) if self.long(op.query) else frozenset[int]()
        return Rows(rows) if refusal is None else refusal

    def _axis_of_windows(self, op: Operation) -> int | None:
        """The axis along which a convolution reads several places of the length; None where no op does."""
        source = unpadded(op) if op.op_type == "conv" else None
        rows = None if source is None else self.held.get(source)
        if rows is None or not is_stored(op.weight) or len(rows.axes) != 1:
            return None
        (axis,) = rows.axes
        alone = source is op.x and (axis < 2 or op.weight.shape[axis] == 1)
        return None if alone else axis

    def _windows(self, op: Operation, axis: int) -> Rows | Refusal:
        """What the rows of a convolution along the length are, or why padding would change them."""
        source = unpadded(op)
        rows = self.held[source]
        refusal = windows_kept(op, axis, self._of(source, axis))
        return Rows(rows.axes, finite=rows.finite) if refusal is None else refusal

    def _every(self, op: Operation) -> Rows | None:
        """Every second place, or third, from the first on; None where it takes others."""
        rows, step = self.held.get(op.x), self._step(op)
        if rows is None or step == 1 or op.outputs[0].rank != op.x.rank or not _from_first(op, rows.axes):
            return None
        whole = [a in rows.axes or op.outputs[0].shape[a] == n for a, n in enumerate(op.x.shape)]
        return replace(rows, table=None) if all(whole) else None

    def _recurrent(self, op: Operation, read: Mapping[Var, Rows]) -> Rows | Refusal:
        """The steps of a recurrent layer that runs forward; its last states are those of the padding."""
        alone = set(read) == {op.x} and read[op.x].axes == {0}
        if not alone or _says(op, "direction", "forward") != "forward":
            return Refusal(f"{op.op_type} reads across the padded axis", op)
        if not _says(op, "output_sequence") or any(consumers(v) or is_output(v) for v in op.outputs[1:]):
            return Refusal(f"the last state of {op.op_type} is that of the padding", op)
        return Rows(frozenset({0}), finite=read[op.x].finite)


PLACED = {("reshape", "shape"), ("slice_by_index", "end")}
"""Operands that may be counted from the length, where the shape of the result shows what they are."""


def _as_bias(end: End) -> End:
    """What a boolean mask adds."""
    if end.low == end.high == 0:
        return replace(end, low=-np.inf, high=-np.inf)
    return replace(end, low=0.0, high=0.0)


def _axis(op: Operation) -> int:
    return int(_says(op, "axis", -1)) % int(op.x.rank)


def _says(op: Operation, name: str, default: Any = False) -> Any:
    """A parameter that is no tensor; the default where it is absent."""
    return default if op.inputs.get(name) is None else constant(op.inputs[name])


def _from_first(op: Operation, axes: Iterable[int]) -> bool:
    """Does a slice take places from the first to the end of some axes?"""
    steps, ends = each_axis(op, "stride", 1), each_axis(op, "end_mask", False)
    return begins_first(op, axes) and all(steps[a] > 0 and ends[a] for a in axes)


def _takes_first(op: Operation, axis: int) -> bool:
    """Is only the first place of an axis of `x` read? Every input has that one."""
    if op.op_type == "gather":
        picked = constant(op.indices)
        return picked is not None and not np.any(picked) and (ints(op, "axis") or [0])[0] % op.x.rank == axis
    if op.op_type != "slice_by_index":
        return False
    part = sliced(op)[axis]
    return part.begin == 0 and (part.single or part.end == 1)
