"""Prove that padding inputs at their end does not change the first rows of any output.

`filling` calls `prove_padding` for one length. The function is followed at a prime length that no other axis
has, before its arithmetic on shapes is folded, so that an axis of that length is recognised by its size. For
each value it is shown that, cropped to the length, it is what the function computes from the shorter input:
slice i depends on slice i of what is padded, or on slices up to i. Where an op reads across the axis (a softmax
over keys, a product with values, a sum), the padding must not count: a mask hides it, or it is multiplied by
zeros. A mask may be an input, whose fill value is followed through the ops that compute the mask from it, or a
table, whose elements are read at the largest size. Whatever cannot be shown is a `Refusal`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.facts.attention import MASKED
from anesurgery.facts.masks import static_value
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
from anesurgery.semantics.rows import CONTRACTED, PlacedOperands, places_of, reshape_axes
from anesurgery.shipping.padded_ends import (
    DEEPEST,
    ORDINARY,
    TABLE,
    UNKNOWN,
    WIDE,
    End,
    begins_at_zero,
    end_of_constant,
    end_of_result,
    end_of_table,
    is_cut_to_input,
    is_pad_of_convs,
    stays_finite,
    stride_along,
    unknown_end,
    unpadded,
    windows_kept,
)

SHAPE_OPS = names("cast concat expand_dims gather identity mul reshape slice_by_index squeeze")
"""Ops by which shapes are put together. Anything else that is computed from a length may differ between
lengths."""
RECURRENT = names("gru lstm rnn")
SUMS = names("einsum matmul reduce_sum")
"""Ops to whose result zeros add nothing."""
VANISHING = 104.0
"""exp(-104) is 0 in fp32."""


@dataclass(frozen=True)
class PaddedValue:
    """What is known of a value that has an axis of the length."""

    axes: frozenset[int]
    """The axes of the length. Cropped along them, the value is that of the shorter input."""
    ends: Mapping[int, End] = field(default_factory=dict)
    """Axis -> what lies beyond the length there; `UNKNOWN` where an axis is missing."""
    finite: bool = True
    """Whether everything beyond the length is finite."""
    table: Array | None = None
    """All elements at the largest size, for values that depend on the length alone."""
    varies: bool = True
    """Whether the value depends on the inputs that are padded."""


@dataclass(frozen=True)
class ProvedPadding:
    """What was proved, and under which conditions."""

    crops: Mapping[str, int]
    """Output -> its axis to crop; outputs without the length are left out."""
    shares: Mapping[str, int]
    """Output -> how many input positions one of its positions stands for."""
    hiding: Mapping[str, bool]
    """Mask input -> True if its first position must be visible; False if any visible one is enough."""
    spread: float | None
    """The largest range of a row of attention scores at which what is hidden weighs 0; None: any."""
    claims: frozenset[str] = frozenset()
    """Values that depend on the length alone, whose beginning must be the same at every length."""


def prove_padding(
    function: Function,
    largest: Function,
    axes: Mapping[str, int],
    length: int,
    fill: Mapping[str, float],
    multiple: int = 1,
) -> ProvedPadding | Refusal:
    """Prove that inputs may be padded, or return why it is not proved.

    Args:
        function: a function of static shapes, before its arithmetic on shapes is folded.
        largest: the same function at the largest size.
        axes: input -> its axis that is padded, which is `multiple * length` long.
        length: a prime that divides no other axis of the function (`filling.free_length`).
        fill: input -> the value with which it is padded.
        multiple: all lengths are multiples of this, so that strided convolutions give whole positions.
    """
    walk = _Walk(function, largest, length, multiple)
    for name, var in function.inputs.items():
        if name not in axes and walk.axes_of_length(var):
            return Refusal(f"the input {name} follows the length of the others, and is not among the sizes")
    for name, axis in axes.items():
        end = End(fill[name], fill[name], sources=frozenset({name}))
        walk.values[function.inputs[name]] = PaddedValue(frozenset({axis}), {axis: end})
    for op in function.operations:
        is_skipped = is_stored(op.outputs[0]) or walk.is_handled_downstream(op)
        if not is_skipped and (refusal := walk.step(op)) is not None:
            return refusal
    return walk.result()


class _Walk:
    """One walk through a function, in the order of its ops."""

    def __init__(self, function: Function, largest: Function, length: int, multiple: int) -> None:
        self.function, self.length, self.multiple = function, length, multiple
        self.largest = {v.name: v for op in walk_ops(largest) for v in op.outputs}
        self.values: dict[Var, PaddedValue] = {}
        self.counts: set[Var] = set()
        """Shapes and parts of shapes: integers that rise with the length."""
        self.of_length: set[Var] = set()
        """Values computed only from the length, of another shape at each length."""
        self.claims: set[str] = set()
        self.hiding: dict[str, bool] = {}
        self.highest_hidden_score = -np.inf

    def axes_of_length(self, var: Var) -> frozenset[int]:
        """Return the axes whose size is a multiple of the prime length."""
        if not types.is_tensor(var.sym_type):
            return frozenset()
        return frozenset(a for a, n in enumerate(var.shape or ()) if n % self.length == 0)

    def share(self, var: Var, axes: Iterable[int]) -> int | None:
        """Return how many input positions one position along some axes stands for; None where they differ."""
        shares = {self.length * self.multiple / var.shape[a] for a in axes}
        share = shares.pop() if len(shares) == 1 else 0.0
        return int(share) if share >= 1 and share.is_integer() else None

    def result(self) -> ProvedPadding | Refusal:
        """Return what was proved, once every op was followed."""
        crops, shares = dict[str, int](), dict[str, int]()
        for var in self.function.outputs:
            if var in self.counts or var in self.of_length:
                return Refusal(f"the output {var.name} is computed from the length of the input")
            axes = self.values[var].axes if var in self.values else frozenset()
            if len(axes) > 1:
                return Refusal(f"the output {var.name} is as long as the input along several axes")
            if axes:
                crops[var.name] = next(iter(axes))
                shares[var.name] = self.share(var, axes) or 1
        spread = None if np.isinf(self.highest_hidden_score) else -self.highest_hidden_score - VANISHING
        return ProvedPadding(crops, shares, self.hiding, spread, frozenset(self.claims))

    def step(self, op: Operation) -> Refusal | None:
        """Follow one op; return a refusal where it reads across the length, or computes with it."""
        read = [var for _, var in operands(op)]
        if op.op_type == "conv":
            read.append(unpadded(op))
        if any(v in self.of_length for v in read):
            why = Refusal(f"{op.op_type} computes with the length of the input", op)
            return None if self._is_known_by_value(op) else why
        if (conv := self._sliced_conv(op)) is not None:
            cut = self._padded_conv(conv)
            return cut if isinstance(cut, Refusal) else self._note(op, cut)
        counted = any(v in self.counts for v in read)
        if op.op_type == "shape" and self.axes_of_length(op.x):
            self.counts.update(op.outputs)
            return None
        rows = self._table_of_length(op) if counted or op.op_type == "fill_like" else None
        if rows is None and counted and self._is_shape_arithmetic(op):
            self._note_count(op)
            return None
        if rows is None and not any(v in self.values for v in read):
            if counted and self._is_known_by_value(op):
                return None
            if counted or any(self.axes_of_length(v) for v in op.outputs):
                return Refusal(f"{op.op_type} computes with the length of the input", op)
            return None
        followed = rows or self._follow(op)
        if isinstance(followed, Refusal):
            return None if self._is_known_by_value(op) else followed
        return self._note(op, followed)

    def is_handled_downstream(self, op: Operation) -> bool:
        """Return whether a reader of the op handles it: a conv handles its pad, a slice its conv."""
        return (is_pad_of_convs(op) and op.x in self.values) or (
            is_cut_to_input(op) and unpadded(op) in self.values
        )

    def _sliced_conv(self, op: Operation) -> Operation | None:
        """Return the convolution, padded at both ends, of which this slice takes the first positions."""
        conv = producer(op.x, "conv") if op.op_type == "slice_by_index" else None
        return conv if conv is not None and self.is_handled_downstream(conv) else None

    def _padded_conv(self, conv: Operation) -> PaddedValue | Refusal:
        """Follow a convolution together with its pad and its slice."""
        if (axis := self._axis_of_windows(conv)) is None:
            return Refusal(f"{conv.op_type} reads across the padded axis", conv)
        return self._windows(conv, axis)

    def _is_known_by_value(self, op: Operation) -> bool:
        """Note results of an op that reads nothing that varies: their values are known at each length.

        Returns whether it is such an op.
        """
        known = [
            v in self.counts or v in self.of_length or (v in self.values and not self.values[v].varies)
            for _, v in operands(op)
            if not self._is_same_at_both(v)
        ]
        if not known or not all(known) or any(self._values_at_both(v) is None for v in op.outputs):
            return False
        for var in op.outputs:
            axes = self.axes_of_length(var)
            if axes and self.share(var, axes) is not None:
                self.values[var] = self._with_table(var, PaddedValue(axes, varies=False))
                self.claims.add(var.name)
            else:
                self.of_length.add(var)
        return True

    def _reads_only_lengths(self, op: Operation) -> bool:
        """Return whether an op reads only lengths and constants."""
        return all(v in self.counts or self._is_same_at_both(v) for _, v in operands(op))

    def _is_same_at_both(self, var: Var) -> bool:
        """Return whether a value is the same at the followed length and the largest size."""
        if is_stored(var) or var in self.counts or var in self.values or var in self.of_length:
            return is_stored(var)
        both = self._values_at_both(var)
        return both is not None and np.array_equal(both[0], both[1])

    def _is_shape_arithmetic(self, op: Operation) -> bool:
        """Return whether the op is arithmetic on shapes: its result is constant or rises with the length."""
        if op.op_type == "equal":  # a comparison of a size with -1, which means "as it is"; lengths never are
            negative = constant(op.y) is not None and bool(np.all(op.y.val < 0))
            return negative and op.x in self.counts and self._is_steady_or_positive(op.x)
        if op.op_type == "real_div":  # how often an axis is repeated: one of length 1 is, and others are not
            return self._reads_only_lengths(op) and self._is_steady_or_over_one(op)
        return self._reads_only_lengths(op) and (
            op.op_type in SHAPE_OPS or (op.op_type == "select" and op.cond not in self.counts)
        )

    def _is_steady_or_positive(self, var: Var) -> bool:
        both = self._values_at_both(var)
        return both is not None and bool(np.all((both[0] == both[1]) | ((both[0] > 0) & (both[1] > 0))))

    def _is_steady_or_over_one(self, op: Operation) -> bool:
        over, result = self._values_at_both(op.y), self._values_at_both(op.outputs[0])
        if over is None or result is None:
            return False
        return bool(np.all((result[0] == result[1]) | ((over[0] == 1) & (over[1] == 1))))

    def _values_at_both(self, var: Var) -> tuple[Any, Any] | None:
        """Return a value's constant at the followed length, and at the largest size; None if not constant."""
        if is_stored(var):
            return var.val, var.val
        there = self.largest[var.name].val if var.op is not None else None
        return None if var.val is None or there is None else (var.val, there)

    def _note_count(self, op: Operation) -> None:
        """Note results that differ between both lengths; equal ones are constants like any other."""
        for var in op.outputs:
            both = self._values_at_both(var)
            same = both is not None and np.array_equal(both[0], both[1])
            if not same:
                self.counts.add(var)

    def _note(self, op: Operation, rows: PaddedValue) -> Refusal | None:
        """Note what is known of an op's results; refuse where their axis is not as long as the stride gives.

        One position of a result stands for as many input positions as one of the operand, times the stride.
        """
        read = {self.share(v, self.values[v].axes) for v in self._operands_of_length(op) if self.values[v].axes}
        stride, rows = self._stride(op), self._with_wide_ends(op, rows)
        for var in op.outputs[:1] if op.op_type in RECURRENT else op.outputs:
            share = self.share(var, rows.axes) if rows.axes else 1
            fits = share is not None and (not rows.axes or not read or read == {share / stride})
            if not fits or self.axes_of_length(var) != rows.axes:
                return Refusal(f"{op.op_type} changes the length of the axis", op)
            self.values[var] = self._with_table(var, rows)
        return None

    def _with_wide_ends(self, op: Operation, rows: PaddedValue) -> PaddedValue:
        """Widen the unknown ends of a result that is computed from numbers as large as those that hide."""
        read = (end for v in self._operands_of_length(op) for end in self.values[v].ends.values())
        if op.op_type in ORDINARY or not any(end.is_large for end in read):
            return rows
        ends = {a: rows.ends.get(a, UNKNOWN) for a in rows.axes}
        return replace(rows, ends={a: WIDE if end == UNKNOWN else end for a, end in ends.items()})

    def _operands_of_length(self, op: Operation) -> list[Var]:
        """Return the operands that have an axis of the length."""
        read = [*(var for _, var in operands(op)), *([unpadded(op)] if op.op_type == "conv" else [])]
        return [v for v in read if v in self.values]

    def _stride(self, op: Operation) -> int:
        """Return the stride of an op's window or slice along the length."""
        source = unpadded(op) if op.op_type == "conv" else op.inputs.get("x")
        rows = self.values.get(source) if isinstance(source, Var) else None
        if rows is None or len(rows.axes) != 1 or op.op_type not in ("conv", "slice_by_index"):
            return 1
        (axis,) = rows.axes
        if op.op_type == "conv":
            return stride_along(op, axis) if axis > 1 else 1
        return abs(each_axis(op, "stride", 1)[axis])

    def _with_table(self, var: Var, rows: PaddedValue) -> PaddedValue:
        """Add the elements at the largest size, and the ends that are read from them."""
        if rows.varies:
            return rows
        there = self.largest[var.name]
        value = static_value(there, {}) if there.val is None else there.val
        if value is None:
            return rows
        table = np.asarray(value)
        return replace(rows, table=table, ends={a: end_of_table(table, rows.axes, a) for a in rows.axes})

    def _table_of_length(self, op: Operation) -> PaddedValue | None:
        """Return a table of the length: positions, a constant, or the first rows of a longer table."""
        out = op.outputs[0]
        lengths = {name for name, var in operands(op) if var in self.counts}
        axes, stored = self.axes_of_length(out), self._reads_only_lengths(op)
        if op.op_type == "range_1d" and lengths == {"end"} and stored:
            return PaddedValue(axes, varies=False)
        if op.op_type == "fill" and lengths == {"shape"} and stored:
            return PaddedValue(axes, varies=False)
        if op.op_type == "fill_like" and op.ref_tensor in self.values:
            return PaddedValue(self.values[op.ref_tensor].axes, varies=False)
        if op.op_type == "tile" and lengths == {"reps"}:
            return self._tiled(op)
        if op.op_type == "slice_by_index" and lengths == {"end"} and is_stored(op.x):
            begins = constant(op.begin)
            steps = constant(op.inputs.get("stride"))
            first = begins is not None and all(begins[a] == 0 for a in axes) and out.rank == op.x.rank
            return PaddedValue(axes, varies=False) if first and (steps is None or np.all(steps == 1)) else None
        return None

    def _tiled(self, op: Operation) -> PaddedValue | None:
        """Follow a `tile` that repeats axes of length 1 as often as the inputs are long."""
        rows = self.values.get(
            op.x, PaddedValue(frozenset(), varies=not (self._reads_only_lengths(op) or op.x in self.values))
        )
        both = self._values_at_both(op.reps)
        if both is None:
            return None
        steady, new = (both[0] == 1) & (both[1] == 1), frozenset(self.axes_of_length(op.outputs[0]) - rows.axes)
        if not all(steady[a] or (op.x.shape[a] == 1 and a in new) for a in range(op.x.rank)):
            return None
        return replace(rows, axes=rows.axes | new, table=None)

    def _gathered(self, op: Operation) -> PaddedValue | None:
        """Follow a `gather_nd` whose indices name, for each position, none beyond it."""
        rows, table = self.values.get(op.x), self.values.get(op.indices)
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
                return replace(rows, axes=table.axes, ends={along: self._end_of(op.x, axis)}, table=None)
        return None

    def _follow(self, op: Operation) -> PaddedValue | Refusal:
        """Follow an op that reads a value with an axis of the length."""
        if any(v in self.counts for name, v in operands(op) if (op.op_type, name) not in PLACED):
            return Refusal(f"{op.op_type} computes with the length of the input", op)
        read = self._rows_read(op)
        varies, finite = any(r.varies for r in read.values()), all(r.finite for r in read.values())
        forward = op.op_type == "cumsum" and not _parameter(op, "reverse")
        if forward or (op.op_type == "band_part" and is_stored(op.lower) and is_stored(op.upper)):
            return PaddedValue(read[op.x].axes, finite=finite, varies=varies)
        if (axis := self._axis_of_windows(op)) is not None:
            return self._windows(op, axis)
        kinds: dict[str, Callable[[Operation], PaddedValue | Refusal | None]] = {
            **dict.fromkeys(RECURRENT, self._recurrent),
            "gather_nd": self._gathered,
            "tile": self._tiled,
            "slice_by_index": self._strided,
            "softmax": lambda op: self._check_hidden(op, op.x, read[op.x], _softmax_axis(op)),
            "scaled_dot_product_attention": self._attention,
        }
        if op.op_type in kinds and (rows := kinds[op.op_type](op)) is not None:
            return rows
        axes = reshape_axes(op) if op.op_type == "reshape" else places_of(op)
        if axes is None or not set(read) <= {o.var for o in axes}:
            return Refusal(f"it is not known whether {op.op_type} reads across the padded axis", op)
        kept = self._kept_axes(op, axes)
        if isinstance(kept, Refusal):
            return kept
        ends = {a: self._end_of_result(op, axes, a) for a in kept}
        return PaddedValue(kept, ends, finite and stays_finite(op), varies=varies)

    def _rows_read(self, op: Operation) -> dict[Var, PaddedValue]:
        """Return what is known of the op's operands that have an axis of the length."""
        return {v: self.values[v] for _, v in operands(op) if v in self.values}

    def _kept_axes(self, op: Operation, axes: PlacedOperands) -> frozenset[int] | Refusal:
        """Return the axes of the result that hold an operand's axes of the length."""
        kept = set[int]()
        for operand in axes:
            for axis in self.values[operand.var].axes if operand.var in self.values else ():
                place = operand.places[axis]
                if op.op_type == "softmax" and axis == _softmax_axis(op):
                    place = axis
                if isinstance(place, int):
                    kept.add(place)
                elif not _takes_only_first(op, axis) and not (
                    place == CONTRACTED and self._adds_nothing(op, axes)
                ):
                    return Refusal(f"{op.op_type} reads across the padded axis", op)
        return frozenset(kept)

    def _adds_nothing(self, op: Operation, axes: PlacedOperands) -> bool:
        """Return whether what lies beyond the length is multiplied by zeros, along a contracted axis."""
        if op.op_type not in SUMS:
            return False
        values = [o for o in axes if o.var in self.values]
        zero = [
            self._end_of(o.var, a).is_zero
            for o in values
            for a in self.values[o.var].axes
            if o.places[a] == CONTRACTED
        ]
        return any(zero) and len(zero) == len(values) and all(self.values[o.var].finite for o in values)

    def _end_of(self, var: Var, axis: int) -> End:
        return self.values[var].ends.get(axis, unknown_end(var))

    def _end_of_result(self, op: Operation, axes: PlacedOperands, axis: int) -> End:
        """Return what lies beyond the length along an axis of the result."""
        if op.op_type == "softmax":
            return End(0.0, 0.0) if axis == _softmax_axis(op) else UNKNOWN
        read = dict[str, End]()
        for operand in axes:
            var, at = operand.var, operand.places.index(axis) if axis in operand.places else None
            if is_stored(var):
                read[operand.name] = end_of_constant(var)
            elif var in self.values and at in self.values[var].axes:
                read[operand.name] = self._end_of(var, at)
            else:
                read[operand.name] = unknown_end(var)
        finite = all(self.values[o.var].finite for o in axes if o.var in self.values)
        return end_of_result(op, read) if finite or op.op_type == "select" else unknown_end(op.outputs[0])

    def _check_hidden(self, op: Operation, scores: Var, rows: PaddedValue, axis: int) -> Refusal | None:
        """Return why a softmax gives weight to what lies beyond the length; None where it does not.

        Args:
            op: the softmax, or fused attention.
            scores: what it is taken of; of fused attention the mask.
            rows: what is known of the scores.
            axis: the axis of the softmax.
        """
        if axis not in rows.axes:
            return None
        ends = {a: rows.ends.get(a, unknown_end(scores)) for a in rows.axes}
        end = ends.pop(axis)
        if not end.hides:
            return Refusal(f"{op.op_type} reads across the padded axis, and no mask hides the padding", op)
        if not rows.finite and end.loose:
            return Refusal(f"what {op.op_type} reads beyond the length may be no number", op)
        if any(other.hides and other.low < DEEPEST for other in ends.values()):
            return Refusal(f"the mask hides whole rows of {op.op_type}, which may be no numbers", op)
        if rows.table is not None and not (rows.table > MASKED).any(axis).all():
            return Refusal(f"the mask hides whole rows of {op.op_type}", op)
        for name in end.sources - {TABLE}:
            self.hiding[name] = self.hiding.get(name, False) or TABLE in end.sources
        self.highest_hidden_score = max(self.highest_hidden_score, end.high)
        return None

    def _attention(self, op: Operation) -> PaddedValue | Refusal | None:
        """Follow fused attention, whose mask must hide the padded keys; None where the keys are not padded."""
        if op.key.rank - 2 not in self.axes_of_length(op.key):
            return None
        read = self._rows_read(op)
        mask, keys = op.inputs.get("attn_mask"), op.key.rank - 2
        if mask is None or mask not in read:
            return Refusal(f"{op.op_type} reads across the padded axis, and no mask hides the padding", op)
        whole = {op.key: {keys}, op.value: {op.value.rank - 2}, op.query: {op.query.rank - 2}}
        if any(read[v].axes - wanted for v, wanted in whole.items() if v in read):
            return Refusal(f"it is not known whether {op.op_type} reads across the padded axis", op)
        bias = read[mask]
        if np_dtype(mask).kind == "b":
            ends = {a: _as_bias(self._end_of(mask, a)) for a in bias.axes}
            bias = replace(
                bias, ends=ends, table=None if bias.table is None else np.where(bias.table, 0.0, -np.inf)
            )
        refusal = self._check_hidden(op, mask, bias, mask.rank - 1)
        if mask.rank - 1 not in bias.axes or not all(r.finite for r in read.values()):
            return Refusal(f"{op.op_type} reads across the padded axis, and no mask hides the padding", op)
        rows = frozenset({op.outputs[0].rank - 2}) if self.axes_of_length(op.query) else frozenset[int]()
        return PaddedValue(rows) if refusal is None else refusal

    def _axis_of_windows(self, op: Operation) -> int | None:
        """Return the axis of the length along which a convolution reads several positions; None for others."""
        source = unpadded(op) if op.op_type == "conv" else None
        rows = None if source is None else self.values.get(source)
        if rows is None or not is_stored(op.weight) or len(rows.axes) != 1:
            return None
        (axis,) = rows.axes
        alone = source is op.x and (axis < 2 or op.weight.shape[axis] == 1)
        return None if alone else axis

    def _windows(self, op: Operation, axis: int) -> PaddedValue | Refusal:
        """Follow a convolution along the length, or return why padding would change it."""
        source = unpadded(op)
        rows = self.values[source]
        refusal = windows_kept(op, axis, self._end_of(source, axis))
        return PaddedValue(rows.axes, finite=rows.finite) if refusal is None else refusal

    def _strided(self, op: Operation) -> PaddedValue | None:
        """Follow a slice of every n-th position from the first one on; None for other slices."""
        rows, step = self.values.get(op.x), self._stride(op)
        if rows is None or step == 1 or op.outputs[0].rank != op.x.rank or not _takes_from_first(op, rows.axes):
            return None
        is_whole = [a in rows.axes or op.outputs[0].shape[a] == n for a, n in enumerate(op.x.shape)]
        return replace(rows, table=None) if all(is_whole) else None

    def _recurrent(self, op: Operation) -> PaddedValue | Refusal:
        """Follow a forward recurrent layer; its last states are those of the padding, and must not be read."""
        read = self._rows_read(op)
        alone = set(read) == {op.x} and read[op.x].axes == {0}
        if not alone or _parameter(op, "direction", "forward") != "forward":
            return Refusal(f"{op.op_type} reads across the padded axis", op)
        if not _parameter(op, "output_sequence") or any(consumers(v) or is_output(v) for v in op.outputs[1:]):
            return Refusal(f"the last state of {op.op_type} is that of the padding", op)
        return PaddedValue(frozenset({0}), finite=read[op.x].finite)


PLACED = {("reshape", "shape"), ("slice_by_index", "end")}
"""Operands that may be computed from the length, because the shape of the result shows what they are."""


def _as_bias(end: End) -> End:
    """Return what a boolean mask adds to scores."""
    if end.low == end.high == 0:
        return replace(end, low=-np.inf, high=-np.inf)
    return replace(end, low=0.0, high=0.0)


def _softmax_axis(op: Operation) -> int:
    return int(_parameter(op, "axis", -1)) % int(op.x.rank)


def _parameter(op: Operation, name: str, default: Any = False) -> Any:
    """Return a scalar parameter; the default where it is absent."""
    return default if op.inputs.get(name) is None else constant(op.inputs[name])


def _takes_from_first(op: Operation, axes: Iterable[int]) -> bool:
    """Return whether a slice takes positions from the first to the end of some axes."""
    steps, ends = each_axis(op, "stride", 1), each_axis(op, "end_mask", False)
    return begins_at_zero(op, axes) and all(steps[a] > 0 and ends[a] for a in axes)


def _takes_only_first(op: Operation, axis: int) -> bool:
    """Return whether only the first position of an axis of `x` is read, which every input has."""
    if op.op_type == "gather":
        picked = constant(op.indices)
        return picked is not None and not np.any(picked) and (ints(op, "axis") or [0])[0] % op.x.rank == axis
    if op.op_type != "slice_by_index":
        return False
    part = sliced(op)[axis]
    return part.begin == 0 and (part.single or part.end == 1)
