"""What a value holds beyond its given length, when an input was filled up: what later ops read there.

`padded_rows` asks whether the outputs within a length are the same when a model of a longer fixed length runs
an input that was filled up. `End` describes the elements of a value beyond the given length along one axis:
masks that hide them, or zeros that add nothing. `end_of_result` takes ends through an op. Windows along that
axis read none of them if they end at their own index; those that reach further must find zeros there, as the
padding of the shorter length would give (`windows_kept`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from anesurgery.display import counted
from anesurgery.errors import Refusal
from anesurgery.facts.attention import MASKED
from anesurgery.facts.windows import window_pads
from anesurgery.mil import Array, Operation, Var, constant, consumers, is_output, is_stored, np_dtype
from anesurgery.ops import names
from anesurgery.semantics.bounds import constant_range
from anesurgery.semantics.intervals import Intervals
from anesurgery.semantics.reading import ints, sliced

TABLE = ""
"""The name of the source for tables as wide as long, such as a causal mask."""
DEEPEST = -3e4
"""Two masks above this add up to a finite fp16 number; below it a row in which all is masked may be NaN."""
MOST_EXPONENT = 11.0
"""exp of more than this is infinite in fp16."""
MOVES = names("expand_dims identity reshape slice_by_index squeeze tile transpose")


@dataclass(frozen=True)
class End:
    """The range of the elements that lie beyond the length along one axis, and within it along the others."""

    low: float
    """The least."""
    high: float
    """The largest."""
    loose: bool = False
    """Whether an unknown finite number is added to that."""
    sources: frozenset[str] = frozenset()
    """The inputs whose filling this depends on, and `TABLE`."""

    @property
    def hides(self) -> bool:
        """Whether a softmax gives these elements no weight."""
        return self.high <= MASKED

    @property
    def is_zero(self) -> bool:
        """Whether they are all exactly 0."""
        return not self.loose and self.low == self.high == 0

    @property
    def is_large(self) -> bool:
        """Whether they may be as large as what hides, so that a number computed from them may outweigh it."""
        return max(-self.low, self.high) >= -MASKED


UNKNOWN = End(0.0, 0.0, loose=True)
WIDE = End(-math.inf, math.inf, loose=True)
"""The end of what is computed from numbers that hide, in a way that is not followed."""
ORDINARY = names("softmax scaled_dot_product_attention sigmoid tanh erf softsign sin cos layer_norm")
"""Ops whose results are ordinary numbers, whatever they read. May lack ops."""
EITHER = End(0.0, 1.0)
"""The end of a boolean of which nothing is known."""


def unknown_end(var: Var) -> End:
    """Return what is known without looking: booleans are 0 or 1, other values are finite."""
    return EITHER if np_dtype(var).kind == "b" else UNKNOWN


def end_of_constant(var: Var) -> End:
    """Return the range of all elements of a constant."""
    low, high = constant_range(var) if constant(var) is not None else (-math.inf, math.inf)
    return End(low, high) if math.isfinite(low) or math.isfinite(high) or low == high else UNKNOWN


def end_of_table(table: Array, axes: frozenset[int], axis: int) -> End:
    """Return the range of elements of a table whose index along `axis` is beyond those along the other `axes`.

    For every length these are the elements in rows within it and columns beyond it.
    """
    indices = {
        a: np.arange(n).reshape([-1 if b == a else 1 for b in range(table.ndim)])
        for a, n in enumerate(table.shape)
    }
    beyond = indices[axis] > 0
    for other in axes - {axis}:
        beyond = beyond & (indices[axis] > indices[other])
    elements = table[np.broadcast_to(beyond, table.shape)]
    if not elements.size or table.dtype.kind not in "biuf" or np.isnan(elements.astype(np.float64)).any():
        return UNKNOWN
    return End(
        float(elements.min()), float(elements.max()), sources=frozenset({TABLE} if len(axes) > 1 else ())
    )


def _sum(x: End, y: End) -> End:
    return End(x.low + y.low, x.high + y.high, x.loose or y.loose)


def _negated(x: End) -> End:
    return replace(x, low=-x.high, high=-x.low)


def _product(x: End, y: End) -> End:
    if x.is_zero or y.is_zero:
        return End(0.0, 0.0)
    if x.loose or y.loose:
        loose, factor = (x, y) if x.loose else (y, x)
        if factor.loose or factor.low != factor.high:
            return UNKNOWN
        low, high = sorted((loose.low * factor.low, loose.high * factor.low))
        product = End(low, high, loose=True)
        # the unknown number grows by the factor too, and may then outweigh what hides
        return WIDE if factor.is_large or (product.is_large and not loose.is_large) else product
    ends = [0.0 if 0 in (a, b) else a * b for a in (x.low, x.high) for b in (y.low, y.high)]
    return End(min(ends), max(ends))


def _quotient(x: End, y: End) -> End:
    if y.loose or y.low != y.high or y.low == 0 or math.isinf(y.low):
        return UNKNOWN
    return _product(x, End(1 / y.low, 1 / y.low))


def _smaller(x: End, y: End) -> End:
    return UNKNOWN if x.loose or y.loose else End(min(x.low, y.low), min(x.high, y.high))


def _truth(known_true: bool, known_false: bool) -> End:
    """Return the end of a boolean that is known to be true or false, else `EITHER`."""
    if known_true:
        return End(1.0, 1.0)
    return End(0.0, 0.0) if known_false else EITHER


def _less(x: End, y: End) -> End:
    tight = not (x.loose or y.loose)
    return _truth(tight and x.high < y.low, tight and x.low >= y.high)


def _equal(x: End, y: End) -> End:
    tight = not (x.loose or y.loose)
    same = tight and x.low == x.high == y.low == y.high
    return _truth(same, tight and (x.high < y.low or y.high < x.low))


def _not(x: End) -> End:
    return End(1 - x.high, 1 - x.low)


PAIRS: Mapping[str, Callable[[End, End], End]] = {
    "add": _sum,
    "sub": lambda x, y: _sum(x, _negated(y)),
    "mul": _product,
    "real_div": _quotient,
    "maximum": lambda x, y: End(max(x.low, y.low), max(x.high, y.high), x.loose or y.loose),
    "minimum": _smaller,
    "less": _less,
    "greater": lambda x, y: _less(y, x),
    "less_equal": lambda x, y: _not(_less(y, x)),
    "greater_equal": lambda x, y: _not(_less(x, y)),
    "equal": _equal,
    "not_equal": lambda x, y: _not(_equal(x, y)),
    "logical_and": lambda x, y: End(min(x.low, y.low), min(x.high, y.high)),
    "logical_or": lambda x, y: End(max(x.low, y.low), max(x.high, y.high)),
}
"""Op of two operands -> the function that gives the end of its result."""


def _select_end(cond: End, a: End, b: End) -> End:
    """Return the end of a select."""
    if cond.low == cond.high:
        return replace(a if cond.low else b, sources=a.sources | b.sources | cond.sources)
    if a.loose or b.loose:
        return UNKNOWN
    return End(min(a.low, b.low), max(a.high, b.high))


def _cast(x: End, var: Var) -> End:
    """Return an end after a cast; unknown finite numbers stay so."""
    kind = np_dtype(var)
    if kind.kind == "b":
        return UNKNOWN if x.loose else _not(_equal(x, End(0.0, 0.0)))
    with np.errstate(all="ignore"):
        low, high = (float(np.asarray(v).astype(kind)) if kind.kind == "f" else v for v in (x.low, x.high))
    return replace(x, low=low, high=high)


def end_of_result(op: Operation, ends: Mapping[str, End]) -> End:
    """Return the end of a result from those of the operands, by parameter."""
    out = op.outputs[0]
    sources = frozenset().union(*(end.sources for end in ends.values()))
    if op.op_type in PAIRS and {"x", "y"} <= set(ends):
        found = PAIRS[op.op_type](ends["x"], ends["y"])
    elif op.op_type == "select" and {"a", "b", "cond"} <= set(ends):
        found = _select_end(ends["cond"], ends["a"], ends["b"])
    elif op.op_type == "logical_not":
        found = _not(ends["x"])
    elif op.op_type == "cast":
        found = _cast(ends["x"], out)
    elif op.op_type in MOVES:
        found = ends["x"]
    else:
        return unknown_end(out)
    if math.isnan(found.low) or math.isnan(found.high) or found in (UNKNOWN, EITHER):
        return unknown_end(out)
    stored = _cast(found, out) if np_dtype(out).kind == "f" else found  # below -65504 fp16 has -inf alone
    return replace(stored, sources=sources)


POSITIVE, WITHIN = names("inverse log rsqrt"), names("exp exp2")
UNBOUNDED = names("acos acosh asin atanh floor_div mod tan")
"""Ops that may give infinities or NaN for ordinary numbers."""


def stays_finite(op: Operation) -> bool:
    """Return whether an op makes finite numbers of finite ones, if none exceeds the largest of its dtype."""
    if op.op_type in UNBOUNDED:
        return False
    if op.op_type == "real_div":
        known = is_stored(op.y) and constant(op.y) is not None
        low, high = constant_range(op.y) if known else Intervals(stored=True).of(op.y)
        return low > 0 or high < 0
    if op.op_type == "pow":
        power = np.asarray(constant(op.y) if constant(op.y) is not None else -1)
        return bool((power > 0).all() and (power == np.round(power)).all())
    if op.op_type not in POSITIVE | WITHIN | {"sqrt"}:
        return True
    low, high = Intervals(stored=True).of(op.x)
    if op.op_type in POSITIVE:
        epsilon = constant(op.inputs.get("epsilon"))
        return low > 0 or (low == 0 and epsilon is not None and float(epsilon) > 0)
    return low >= 0 if op.op_type == "sqrt" else high <= MOST_EXPONENT


# Windows of convolutions that reach beyond the length.


def unpadded(op: Operation) -> Var:
    """Return what a convolution reads, before a `pad` of constants that only convolutions read."""
    before: Operation | None = op.x.op
    return before.x if before is not None and is_pad_of_convs(before) else op.x


def is_pad_of_convs(op: Operation) -> bool:
    """Return whether an op is a `pad` with constants whose result only convolutions read."""
    if op.op_type != "pad" or is_output(op.outputs[0]) or not is_stored(op.pad):
        return False
    if str(constant(op.inputs.get("mode")) or "constant") != "constant":
        return False
    return all(reader.op_type == "conv" and reader.x is op.outputs[0] for reader in consumers(op.outputs[0]))


def is_cut_to_input(op: Operation) -> bool:
    """Return whether all readers of a convolution cut its result to its input's length, from index 0 on."""
    result, readers = op.outputs[0], consumers(op.outputs[0])
    if op.op_type != "conv" or is_output(result) or not readers or any(n > 1 for n in ints(op, "strides")):
        return False
    wanted = (*result.shape[:2], *unpadded(op).shape[2:])
    cuts = [r for r in readers if r.op_type == "slice_by_index" and r.outputs[0].shape == wanted]
    if cuts != readers or wanted == result.shape:
        return False
    return all(part.begin == 0 and part.stride == 1 for cut in cuts for part in sliced(cut))


def begins_at_zero(op: Operation, axes: Iterable[int]) -> bool:
    """Return whether a slice begins at index 0 of some axes."""
    parts = sliced(op)
    return all(parts[axis].begin == 0 for axis in axes)


def windows_kept(op: Operation, axis: int, end: End) -> Refusal | None:
    """Return why windows along an axis would read what was filled up; None where they do not, or read zeros.

    Args:
        op: a convolution of static shape. Its result is as long as `unpadded` along the axis, divided by the
            stride; lengths are multiples of the stride.
        axis: the axis of its input.
        end: the elements beyond the length there.
    """
    at = axis - 2
    if at < 0:
        return Refusal(f"{op.op_type} reads across the padded axis", op)
    before, behind = _pad_before_conv(op, axis)
    if behind and constant(op.x.op.inputs.get("constant_val")) not in (None, 0):
        return Refusal(
            f"{op.op_type} reads across the padded axis: its edge is filled with another number than 0", op
        )
    window = (ints(op, "dilations") or [1] * (op.x.rank - 2))[at] * (int(op.weight.shape[axis]) - 1) + 1
    after = window - stride_along(op, axis) - window_pads(op)[2 * at] - before  # of the last window
    if after > 0 and not end.is_zero:
        places = counted(after, "place")
        reason = f"{op.op_type} reads {places} beyond the end of the padded axis, where it needs zeros"
        return Refusal(reason, op)
    return None


def stride_along(op: Operation, axis: int) -> int:
    """Return the stride of a convolution along an axis of its input."""
    return int((ints(op, "strides") or [1] * (op.x.rank - 2))[axis - 2])


def _pad_before_conv(op: Operation, axis: int) -> tuple[int, int]:
    """Return how much a `pad` before a convolution adds at the beginning and the end of an axis."""
    if unpadded(op) is op.x:
        return 0, 0
    pads = ints(op.x.op, "pad")
    first = op.x.rank - len(pads) // 2
    return (pads[2 * (axis - first)], pads[2 * (axis - first) + 1]) if axis >= first else (0, 0)
