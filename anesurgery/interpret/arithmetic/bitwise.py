"""The arithmetic of bits: an element is a hash of how it is computed, rounding included.

Equal hashes mean equal bits, also for infinities and NaN, if equal sums are added in the same order. A sum of
products is a hash of its ordered terms, whichever op spells it; operands that commute are sorted; the sign of a
product is taken out, since IEEE arithmetic does so too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.field import Image, key, opaque, packed
from anesurgery.interpret.arithmetic.lattice import MOST_MEMBERS, Lattice
from anesurgery.interpret.arithmetic.products import contraction
from anesurgery.interpret.arithmetic.symbolic import LARGEST, Symbolic, narrows
from anesurgery.interpret.ops.conv import conv, conv_transpose, pad_axes, padding
from anesurgery.interpret.ops.pooling import Windows, windows
from anesurgery.interpret.table import Unsupported, ints
from anesurgery.mil import Operation, dtype_name, np_dtype


class Bitwise(Symbolic):
    """See the module."""

    name = "bits"

    def __init__(self, seed: int = 0, largest: int = LARGEST) -> None:
        super().__init__(seed, largest)
        self.lattice = Lattice(seed)

    def lift(self, value: Any) -> Image:
        """Constants by their value: one hash for each magnitude, so that -c is the negative of c."""
        array = np.asarray(value)
        if array.dtype.kind in "iub":
            made = opaque(key("integer"), torch.from_numpy(np.asarray(array.astype(np.int64))))
        else:
            wide = array.astype(np.float64)
            bits = torch.from_numpy(np.asarray(np.abs(wide)).view(np.int64).reshape(wide.shape).copy())
            sign = torch.from_numpy(np.asarray(np.signbit(wide)))
            made = field.with_sign(opaque(key("float"), bits), sign)
        self.lattice.know(made, array)
        return made

    def rounds_to(self, op: Operation) -> str:
        """Every result is rounded to the dtype of the op."""
        return dtype_name(op.outputs[0])

    def ordered(self, op: Operation, terms: Image) -> Image:
        """The value of a sum, from the fingerprint of its terms."""
        even, turned = field.signed(terms)
        return field.with_sign(self.function(("sum", self.rounds_to(op)), even), turned)

    def places(self, count: int) -> Image:
        """A factor for each place in a sum."""
        return field.positions(count, key(self.seed, "term"))


def _add(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    return added(a, op, a.image(x), a.image(y))


def added(a: Bitwise, op: Operation, x: Image, y: Image) -> Image:
    """X + y, in whichever order."""
    return _sorted(a, ("add", a.rounds_to(op)), x, y)


def _sorted(a: Bitwise, name: Any, x: Image, y: Image) -> Image:
    """A random function of two operands that commute."""
    first, second = packed(x), packed(y)
    made = opaque(key(a.seed, name), torch.minimum(first, second), torch.maximum(first, second))
    a.evaluations += made.numel()
    return made


def _sub(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    return added(a, op, a.image(x), field.negated(a.image(y)))


def _number(value: Any) -> float | None:
    """The one number that a constant holds."""
    if isinstance(value, torch.Tensor) and value.numel() and bool((value == value.reshape(-1)[0]).all()):
        return float(value.reshape(-1)[0])
    return None


def _mul(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    for one, other in ((x, y), (y, x)):
        if isinstance(one, Image) and (number := _number(other)) in (1.0, -1.0):
            spread = one.map(lambda v, other=other: v + torch.zeros_like(other, dtype=v.dtype))  # type: ignore[misc]
            return field.negated(spread) if number == -1 else spread
    (left, s), (right, t) = field.signed(a.image(x)), field.signed(a.image(y))
    return field.with_sign(_sorted(a, ("mul", a.rounds_to(op)), left, right), s ^ t)


def _square(a: Bitwise, op: Operation, x: Any) -> Image:
    return _mul(a, op, x, x)


def _divide(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    (left, s), (right, t) = field.signed(a.image(x)), field.signed(a.image(y))
    return field.with_sign(a.function(("real_div", a.rounds_to(op)), left, right), s ^ t)


def _commuting(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    return _sorted(a, op.op_type, a.image(x), a.image(y))


def _cast(a: Bitwise, op: Operation, x: Any, dtype: str) -> Image:
    old, new = np_dtype(op.inputs["x"]), np_dtype(op.outputs[0])
    if old == new or (old.kind == new.kind == "f" and not narrows(op)):
        return a.image(x)
    return a.function(("cast", old.kind, dtype), x)


def _side_by_side(a: Bitwise, x: Any, y: Any) -> Image:
    """Two operands along a new last axis."""
    first, second = a.image(x), a.image(y)
    shape = np.broadcast_shapes(first.shape, second.shape)
    pairs = zip(first.lanes, second.lanes, strict=True)
    return Image([torch.stack([v.expand(shape), w.expand(shape)], -1) for v, w in pairs])


def _maximum(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    return a.lattice.largest(_side_by_side(a, x, y))


def _minimum(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    return a.lattice.smallest(_side_by_side(a, x, y))


def _relu(a: Bitwise, op: Operation, x: Any) -> Image:
    return _maximum(a, op, x, 0.0)


def _threshold(a: Bitwise, op: Operation, x: Any, alpha: float) -> Image:
    return _maximum(a, op, x, float(alpha))


def _relu6(a: Bitwise, op: Operation, x: Any) -> Image:
    return _clip(a, op, x, 0.0, 6.0)


def _clip(a: Bitwise, op: Operation, x: Any, alpha: float, beta: float) -> Image:
    return _minimum(a, op, _maximum(a, op, x, float(alpha)), float(beta))


def _greater(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    return a.function("greater", x, y)


def _less(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    return a.function("greater", y, x)


def _greater_equal(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    return a.function("greater_equal", x, y)


def _less_equal(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    return a.function("greater_equal", y, x)


def _matmul(
    a: Bitwise, op: Operation, x: Any, y: Any, transpose_x: Any = False, transpose_y: Any = False
) -> Image:
    left, right = a.image(x), a.image(y)
    if min(left.ndim, right.ndim) < 2:
        raise Unsupported("a matmul of vectors")
    left = left.map(lambda v: v.transpose(-1, -2)) if transpose_x else left
    right = right.map(lambda v: v.transpose(-1, -2)) if transpose_y else right
    return a.ordered(op, field.product(field.multiply(left, a.places(left.shape[-1])), right))


def _linear(a: Bitwise, op: Operation, x: Any, weight: Any, bias: Any = None) -> Image:
    w = a.image(weight)
    w = field.multiply(w, a.places(w.shape[-1])).map(lambda v: v.transpose(-1, -2))
    made = a.ordered(op, field.product(a.image(x), w))
    return made if _absent(bias) else added(a, op, made, a.image(bias))


def _absent(bias: Any) -> bool:
    """No bias, or zeros: a sum that starts at 0 is the sum."""
    return bias is None or (isinstance(bias, torch.Tensor) and not bool(bias.any()))


def _conv(a: Bitwise, op: Operation, x: Any, weight: Any, bias: Any = None, **how: Any) -> Image:
    image, w = a.image(x), a.image(weight)
    n, terms = image.ndim - 2, int(np.prod(w.shape[1:]))
    steps, spread = (ints(how[k]) if how.get(k) is not None else [1] * n for k in ("strides", "dilations"))
    pads = padding(
        how.get("pad_type", "valid"), how.get("pad"), list(image.shape[2:]), list(w.shape[2:]), steps, spread
    )
    zero = a.lift(0.0)
    lanes = [pad_axes(v, pads, float(z)) for v, z in zip(image.lanes, zero.lanes, strict=True)]
    w = field.multiply(w, a.places(terms).map(lambda v: v.reshape(w.shape[1:])))
    how = {**how, "pad_type": "valid", "pad": None}
    made = field.bilinear(Image(lanes), w, lambda v, u: conv(v, u, **how), terms)
    return _with_bias(a, op, a.ordered(op, made), bias)


def _with_bias(a: Bitwise, op: Operation, made: Image, bias: Any) -> Image:
    if _absent(bias):
        return made
    return added(a, op, made, a.image(bias).map(lambda v: v.reshape(-1, *(1,) * (made.ndim - 2))))


def _conv_transpose(a: Bitwise, op: Operation, x: Any, weight: Any, bias: Any = None, **how: Any) -> Image:
    w = a.image(weight)
    terms = int(np.prod([w.shape[0], *w.shape[2:]]))
    places = a.places(terms).map(lambda v: v.reshape(w.shape[0], 1, *w.shape[2:]))
    made = field.bilinear(
        a.image(x), field.multiply(w, places), lambda v, u: conv_transpose(v, u, **how), terms
    )
    return _with_bias(a, op, a.ordered(op, made), bias)


def _einsum(a: Bitwise, op: Operation, values: list[Any], equation: Any) -> Image:
    return a.ordered(op, contraction([a.image(v) for v in values], str(equation), a.places))


def _reduce_sum(a: Bitwise, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    return _summed(a, op, a.image(x), axes, keep_dims)


def _summed(a: Bitwise, op: Operation, x: Image, axes: Any, keep: bool) -> Image:
    chosen = list(range(x.ndim)) if axes is None else [i % x.ndim for i in ints(axes)]
    shape = [n if i in chosen else 1 for i, n in enumerate(x.shape)]
    places = a.places(int(np.prod(shape))).map(lambda v: v.reshape(shape))
    one = a.lift(1.0)
    terms = field.multiply(field.multiply(x, places), one)
    return a.ordered(op, field.summed(terms, chosen, bool(keep)))


def _extreme(a: Bitwise, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    """The largest or the smallest of some elements, in whichever order."""
    image = a.image(x)
    chosen = list(range(image.ndim)) if axes is None else [i % image.ndim for i in ints(axes)]
    width = int(np.prod([image.shape[i] for i in chosen]))
    if width > MOST_MEMBERS:
        return a.function(op.op_type, field.summed(a.hashed(image), chosen, bool(keep_dims)))
    others = [i for i in range(image.ndim) if i not in chosen]
    shape = (
        [1 if i in chosen else n for i, n in enumerate(image.shape)]
        if keep_dims
        else [image.shape[i] for i in others]
    )
    rows = image.map(lambda v: v.permute(*others, *chosen).reshape(-1, width))
    made = a.lattice.largest(rows) if op.op_type == "reduce_max" else a.lattice.smallest(rows)
    return made.map(lambda v: v.reshape(shape))


def _max_pool(a: Bitwise, op: Operation, x: Any, ceil_mode: bool = False, **how: Any) -> Image:
    """The largest element of each window; what lies outside is -inf, which never wins."""
    image = a.image(x)
    w = _windows_of(image, ceil_mode, how)
    if int(np.prod(w.kernel)) > MOST_MEMBERS:
        return a.uninterpreted(op, {"x": x, "ceil_mode": ceil_mode, **how})
    return a.lattice.largest(_spread(image, w, w.used, a.lift(-np.inf)))


def _windows_of(image: Image, ceil_mode: Any, how: dict[str, Any]) -> Windows:
    given = (how.get(k) for k in ("strides", "pad_type", "pad"))
    strides, pad_type, pad = given
    return windows(image.lanes[0], how["kernel_sizes"], strides, pad_type or "valid", pad, bool(ceil_mode))


def _spread(image: Image, w: Windows, pads: list[tuple[int, int]], outside: Image) -> Image:
    """The elements of each window along a new last axis."""
    lanes = []
    for lane, value in zip(image.lanes, outside.lanes, strict=False):
        lane = pad_axes(lane, pads, float(value.reshape(-1)[0]))
        for axis, (width, step) in enumerate(zip(w.kernel, w.strides, strict=True)):
            lane = lane.unfold(2 + axis, width, step)
        lanes.append(lane.reshape(*lane.shape[: image.ndim], -1))
    return Image(lanes)


def _avg_pool(
    a: Bitwise,
    op: Operation,
    x: Any,
    exclude_padding_from_average: bool = False,
    ceil_mode: bool = False,
    **how: Any,
) -> Image:
    """A function of the elements of each window in their order, and of how many count."""
    image = a.image(x)
    w = _windows_of(image, ceil_mode, how)
    beyond = [(0, used - asked) for (_, used), (_, asked) in zip(w.used, w.asked, strict=True)]
    ones = torch.ones(1, 1, *image.shape[2:], dtype=torch.int64)
    counted = pad_axes(pad_axes(ones, w.asked, 0.0 if exclude_padding_from_average else 1.0), beyond)
    terms = _spread(image, w, w.used, a.lift(0.0))
    counts = _spread(Image([counted]), w, [], Image([ones])).lanes[0].sum(-1)
    return a.function(("avg_pool", a.rounds_to(op)), _at_last(a.digest(terms, [-1])), a.lift(counts.numpy()))


def _at_last(x: Image) -> Image:
    return x.map(lambda v: v.squeeze(-1))


def _row(a: Bitwise, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    """A reduction that rounds: a function of the elements in their order."""
    image = a.image(x)
    chosen = list(range(image.ndim)) if axes is None else [i % image.ndim for i in ints(axes)]
    made = a.function((op.op_type, a.rounds_to(op)), a.digest(image, chosen))
    return made if keep_dims else made.map(lambda v: v.squeeze(tuple(chosen)))


Bitwise.rules = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "square": _square,
    "real_div": _divide,
    "maximum": _maximum,
    "minimum": _minimum,
    "relu": _relu,
    "threshold": _threshold,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    **dict.fromkeys(("equal", "not_equal"), _commuting),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), _commuting),
    "greater": _greater,
    "less": _less,
    "greater_equal": _greater_equal,
    "less_equal": _less_equal,
    "cast": _cast,
    "relu6": _relu6,
    "clip": _clip,
    "matmul": _matmul,
    "linear": _linear,
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "einsum": _einsum,
    "reduce_sum": _reduce_sum,
    **dict.fromkeys(("reduce_max", "reduce_min"), _extreme),
    **dict.fromkeys(
        (
            "reduce_mean",
            "reduce_prod",
            "reduce_l1_norm",
            "reduce_l2_norm",
            "reduce_sum_square",
            "reduce_log_sum",
            "reduce_log_sum_exp",
        ),
        _row,
    ),
}
