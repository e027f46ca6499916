"""The arithmetic that proves equal bits: an element is a hash of how it is computed, rounding included.

If both sides of an edit give equal hashes, they give equal bits, also for infinities and NaN, as long as equal
sums are added in the same order. A sum of products is a hash of its ordered terms, whichever op computes it.
Operands that commute are sorted, and the sign of a product is taken out, as IEEE arithmetic does.

First come the names of constants, then the arithmetic, then a rule for each op. Maxima and minima are compared
as sets (`extremes`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from anesurgery.interpret.arithmetic import field, symbolic
from anesurgery.interpret.arithmetic.algebraic import Axes, axes_of, matrices, windows_of
from anesurgery.interpret.arithmetic.extremes import MOST_MEMBERS, Lattice, WholeExtremes
from anesurgery.interpret.arithmetic.field import PRIMES, Image, hash_of, opaque, packed
from anesurgery.interpret.arithmetic.precision import narrows
from anesurgery.interpret.arithmetic.symbolic import LARGEST, Rule, Symbolic
from anesurgery.interpret.ops.windows import Windows, conv, conv_transpose, counted, pad_axes, padding
from anesurgery.interpret.table import Implementation, Unsupported, ints
from anesurgery.mil import Array, Operation, dtype_name, np_dtype
from anesurgery.ops import REDUCTIONS, names

HALVES = 1 << 16
"""The number of fp16 values."""
SAMPLE = 64
"""How many numbers are checked first: if fp16 does not hold a tensor, the first few mostly tell."""


def of(array: Array) -> Image:
    """Return the names of floats; large tensors that fp16 holds are looked up."""
    if array.size > HALVES:
        numbers = torch.from_numpy(np.ascontiguousarray(array))
        if (at := bits(numbers)) is not None:
            return _halves().map(lambda v: v.index_select(0, at).reshape(numbers.shape))
    wide = torch.from_numpy(np.array(array, np.float64))
    turned = torch.signbit(wide)
    image = opaque(PRIMES, hash_of("float"), wide.abs_().view(torch.int64))
    return field.with_sign(image, turned) if bool(turned.any()) else image


def bits(numbers: torch.Tensor) -> torch.Tensor | None:
    """Return the bits of numbers in fp16, in one row; None where fp16 does not hold them all."""
    some = numbers.reshape(-1)[:SAMPLE]
    if not torch.equal(some.half().to(numbers.dtype), some):
        return None
    half = numbers.half()
    if half is not numbers and not torch.equal(half.to(numbers.dtype), numbers):
        return None
    return half.contiguous().view(torch.int16).int().bitwise_and_(HALVES - 1).reshape(-1)


def sums(flat: torch.Tensor, places: Image) -> Image | None:
    """Return the sum of names times factors of places for each row; None if fp16 does not hold all."""
    terms = flat.shape[1]
    at = bits(flat) if terms <= field.LONGEST else None
    if at is None:
        return None
    return Image(
        [
            torch.mv(names.index_select(0, at).view(-1, terms), factors.double()).long() % prime
            for names, factors, prime in zip(_halves_in_float64(), places.lanes, PRIMES, strict=True)
        ],
        PRIMES,
    )


@functools.cache
def _halves_in_float64() -> list[torch.Tensor]:
    """Return the names of all fp16 numbers as float64, in which sums of `LONGEST` products are exact."""
    return [lane.double() for lane in _halves().lanes]


@functools.cache
def _halves() -> Image:
    """Return the names of all fp16 numbers, by their bits."""
    return of(np.arange(HALVES, dtype=np.uint16).view(np.float16))


EXACT_POWERS = 14
"""The reciprocals of 2^-14 to 2^14 are exact in every float dtype: 2^-14 is the least normal fp16 number."""

SOME = 1 << 17
"""The number of weights that are named at a time: their names stay in the cache."""
POLES = {"real_div": "y", "floor_div": "y", "mod": "y", "inverse": "x", "rsqrt": "x", "pow": "x"}
"""Op type -> the operand whose zeros give infinities of their sign."""


class Bitwise(Symbolic):
    """Elements are hashes of how they are computed.

    Args:
        seed: of the random functions.
        largest: the most elements of a value.
        finite: do only finite numbers count? Then the largest float is no bound of a clip.
        one_zero: do 0 and -0 count as equal? Then ops that tell them apart are not supported.
    """

    name = "bits"

    def __init__(
        self, seed: int = 0, largest: int = 2 * LARGEST, *, finite: bool = False, one_zero: bool = False
    ) -> None:
        super().__init__(seed, largest)
        self.finite, self.one_zero = finite, one_zero
        self.lattice, self.whole = Lattice(seed), WholeExtremes(seed)
        self._rows: dict[Any, tuple[torch.Tensor, Image]] = {}
        self._lifted: dict[Any, Image] = {}

    def fresh(self) -> Bitwise:
        """Return a new arithmetic of the same kind, which knows nothing yet."""
        other = Bitwise(self.seed, self.largest, finite=self.finite, one_zero=self.one_zero)
        other.stand_ins = self.stand_ins
        return other

    def _run(self, op: Operation, meaning: Implementation, arguments: dict[str, Any]) -> Any:
        if self.one_zero and op.op_type in POLES and isinstance(arguments.get(POLES[op.op_type]), Image):
            raise Unsupported(f"{op.op_type} tells 0 from -0")
        return super()._run(op, meaning, arguments)

    def lift(self, value: Any) -> Image:
        """Return constants by value: one hash for each magnitude, so that -c is the negative of c.

        Those of a few numbers are computed once: a loop reads them at each step.
        """
        array = np.asarray(value)
        if array.size > HALVES:
            return self._lift(array)
        content = array.dtype.str, array.shape, array.tobytes()
        if content not in self._lifted:
            self._lifted[content] = self._lift(array)
        return self._lifted[content]

    def _lift(self, array: Array) -> Image:
        if array.dtype.kind in "iub":
            image = opaque(
                self.primes, hash_of("integer"), torch.from_numpy(np.asarray(array.astype(np.int64)))
            )
            self.whole.know(image, array)
        else:
            image = of(array)
            self.lattice.know(image, array)
        return image

    def extremes(self, op: Operation) -> Lattice | WholeExtremes:
        """Return what is known of the extremes that an op takes."""
        return self.whole if np_dtype(op.outputs[0]).kind in "iu" else self.lattice

    def rounds_to(self, op: Operation) -> str:
        """Return the dtype of the op, to which every result is rounded."""
        return dtype_name(op.outputs[0])

    def ordered(self, op: Operation, terms: Image) -> Image:
        """Return the value of a sum, from the fingerprint of its terms."""
        even, turned = field.signed(terms)
        return field.with_sign(self.function(("sum", self.rounds_to(op)), even), turned)

    def places(self, count: int) -> Image:
        """Return a random factor for each place in a sum."""
        return field.place_factors(self.primes, count, hash_of(self.seed, "term"))

    def factors(self, x: Image, axes: Sequence[int]) -> Image:
        """Return one element for all those along some axes, in their order; the axes keep the length 1.

        That of their negatives is its negative.
        """
        return field.weighted(x, self.places(math.prod(x.shape[a] for a in axes)), axes)

    def rows(self, weight: Any) -> Image:
        """Return one element for each output of a weight, whose first axis has the outputs.

        For numbers that stand for a weight, and for a few numbers, it is computed once for both sides.
        """
        terms = math.prod(weight.shape[1:])
        if isinstance(weight, Image):
            return self._rows_of(weight.map(lambda v: v.reshape(-1, terms)))
        flat = weight.reshape(-1, terms)
        few = flat.numel() <= HALVES
        place = flat.numpy().tobytes() if few else flat.data_ptr(), flat.dtype, tuple(flat.shape), flat.stride()
        if place not in self._rows:
            parts = [self._rows_in(part) for part in torch.split(flat, max(1, SOME // terms))]
            factors = field.joined(parts, torch.cat)
            if not (
                few or self.stand_ins or flat.dtype == torch.float16
            ):  # what is stored in fp16 stays where it is
                return factors
            self._rows[place] = flat, factors  # kept with it, so that nothing else can come to lie there
        return self._rows[place][1]

    def _rows_in(self, flat: torch.Tensor) -> Image:
        """Compute `rows` of plain numbers; names of fp16 numbers are looked up while they are multiplied."""
        terms = flat.shape[1]
        found = sums(flat, self.places(terms)) if flat.numel() > HALVES else None
        return self._rows_of(self.image(flat)) if found is None else found

    def _rows_of(self, flat: Image) -> Image:
        return self.factors(flat, [1]).map(lambda v: v.reshape(-1))

    def contracted(self, op: Operation, x: Image, y: Image) -> Image:
        """Return a sum of products from the fingerprints of its two lists of factors, in either order."""
        elements = math.prod(np.broadcast_shapes(x.shape, y.shape))
        if elements > self.largest:
            raise Unsupported(f"{elements} elements")
        (left, s), (right, t) = field.signed(x), field.signed(y)
        return _commuting(self, ("sum", self.rounds_to(op)), left, right, s ^ t)


def _as_long(terms: int, others: int) -> None:
    """Refuse two lists of factors of different lengths, which their fingerprints would hide."""
    if terms != others:
        raise Unsupported(f"a sum of {terms} times {others} factors")


def added(a: Bitwise, op: Operation, x: Image, y: Image) -> Image:
    """Return x + y, the same in either order; adding 0 turns -0.0 into 0.0."""
    total = _commuting(a, ("add", a.rounds_to(op)), x, y)
    for one, other in ((x, y), (y, x)) if a.one_zero else ():
        total = field.where(packed(other) == packed(a.lift(0.0)), one, total)
    return total


def _commuting(a: Bitwise, name: Any, x: Image, y: Image, negative: torch.Tensor | None = None) -> Image:
    """Return a random function of two operands that commute, negated where `negative` is True."""
    image = field.commuting(a.primes, hash_of(a.seed, name), packed(x), packed(y), negative)
    a.evaluations += image.numel()
    return image


def _number(value: Any) -> float | None:
    """Return the number that all elements of a constant are; None for others."""
    if isinstance(value, torch.Tensor) and value.numel() and bool((value == value.reshape(-1)[0]).all()):
        return float(value.reshape(-1)[0])
    return None


def _mul(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    for one, other in ((x, y), (y, x)):
        if isinstance(one, Image) and (number := _number(other)) in (1.0, -1.0):
            spread = one.map(lambda v, other=other: v + torch.zeros_like(other, dtype=v.dtype))  # type: ignore[misc]
            return field.negated(spread) if number == -1 else spread
    (left, s), (right, t) = field.signed(a.image(x)), field.signed(a.image(y))
    return _commuting(a, ("mul", a.rounds_to(op)), left, right, s ^ t)


def _divide(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    if isinstance(y, torch.Tensor) and _powers_of_two(y):
        return _mul(a, op, x, 1 / y)
    if np_dtype(op.outputs[0]).kind != "f":  # the negative of the least integer is itself
        return a.function("real_div", x, y)
    (left, s), (right, t) = field.signed(a.image(x)), field.signed(a.image(y))
    return field.with_sign(a.function(("real_div", a.rounds_to(op)), left, right), s ^ t)


def _powers_of_two(y: torch.Tensor) -> bool:
    """Are all numbers powers of two whose reciprocals are exact?"""
    if not y.is_floating_point():
        return False
    mantissa, exponent = torch.frexp(y.double().abs())
    return bool((mantissa == 0.5).all()) and bool((exponent.abs() <= EXACT_POWERS).all())


def _linear_activation(a: Bitwise, op: Operation, x: Any, alpha: float, beta: float = 0.0) -> Any:
    """Compute alpha * x + beta only if there is one rounding: alpha is 1 or -1, or beta is 0."""
    if abs(alpha) != 1 and beta != 0:
        return a.uninterpreted(op, {"x": x, "alpha": alpha, "beta": beta})
    scaled = _mul(a, op, x, torch.tensor(float(alpha), dtype=torch.float64))
    return added(a, op, scaled, a.lift(float(beta)))


def _batch_norm(a: Bitwise, op: Operation, x: Any, epsilon: float = 1e-5, **channels: Any) -> Image:
    """Compute a random function of an element, and of the numbers of its channel."""
    image = a.image(x)
    named = {k: a.image(v) for k, v in sorted(channels.items()) if v is not None}
    rest = [field.per_channel(v, image.ndim) for v in named.values()]
    return a.function(("batch_norm", list(named), a.rounds_to(op)), image, a.lift(float(epsilon)), *rest)


def _by_channel(a: Bitwise, op: Operation, x: Any, **channels: Any) -> Image:
    """Compute a random function of an element, and of the numbers of its channel (axis 1)."""
    image = a.image(x)
    rest = [field.per_channel(a.image(v), image.ndim) for _, v in sorted(channels.items())]
    return a.function((op.op_type, a.rounds_to(op)), image, *rest)


def _cast(a: Bitwise, op: Operation, x: Any, dtype: str) -> Image:
    old, new = np_dtype(op.inputs["x"]), np_dtype(op.outputs[0])
    if old == new or (old.kind == new.kind == "f" and not narrows(op)):
        return a.image(x)
    return a.function(("cast", old.kind, dtype), x)


def _matmul(a: Bitwise, op: Operation, x: Any, y: Any, **turned: Any) -> Image:
    left, right = matrices(a.image(x), a.image(y), **turned)
    _as_long(left.shape[-1], right.shape[-2])
    return a.contracted(op, a.factors(left, [-1]), a.factors(right, [-2]))


def _linear(a: Bitwise, op: Operation, x: Any, weight: Any, bias: Any = None) -> Image:
    image = a.image(x)
    _as_long(image.shape[-1], weight.shape[-1])
    if a.one_zero and _all_zero(x) and isinstance(weight, torch.Tensor) and bool(weight.isfinite().all()):
        product = a.lift(np.zeros((*image.shape[:-1], weight.shape[0]), np.float32))
    else:
        product = a.contracted(op, a.factors(image, [-1]), a.rows(weight))
    return product if _absent(bias) else added(a, op, product, a.image(bias))


def _absent(bias: Any) -> bool:
    """Is there no bias, or only zeros? A sum that starts at 0 is the sum."""
    return bias is None or _all_zero(bias)


def _all_zero(value: Any) -> bool:
    """Are these known numbers, all of them 0?"""
    return isinstance(value, torch.Tensor) and not bool(value.any())


def _conv(a: Bitwise, op: Operation, x: Any, weight: Any, bias: Any = None, **how: Any) -> Image:
    """Compute the fingerprint of each window, and contract it with that of each output's weights.

    Windows are [n, groups, 1, spatial...], rows of weights [1, groups, outputs of a group, 1...].
    """
    image, sizes = a.image(x), list(weight.shape[2:])
    n, terms = image.ndim - 2, math.prod(weight.shape[1:])
    steps, spread = (ints(how[k]) if how.get(k) is not None else [1] * n for k in ("strides", "dilations"))
    pads = padding(how.get("pad_type", "valid"), how.get("pad"), list(image.shape[2:]), sizes, steps, spread)
    zero, groups = a.lift(0.0), int(how.get("groups") or 1)
    if {*sizes, *steps, *spread} == {1} and not any(map(any, pads)):
        apart = image.map(lambda v: v.reshape(v.shape[0], groups, terms, *v.shape[2:]))
        windows = a.factors(apart, [2])
    else:
        padded = [pad_axes(v, pads, float(z)) for v, z in zip(image.lanes, zero.lanes, strict=True)]
        kernel = a.places(terms).map(lambda v: v.reshape(1, -1, *sizes).expand(groups, -1, *sizes))
        how = {**how, "pad_type": "valid", "pad": None}
        windows = field.bilinear(image.with_lanes(padded), kernel, lambda v, u: conv(v, u, **how), terms)
        windows = windows.map(lambda v: v.unsqueeze(2))
    rows = a.rows(weight).map(lambda v: v.reshape(1, groups, -1, *(1,) * n))
    sums = a.contracted(op, windows, rows)
    return _with_bias(a, op, sums.map(lambda v: v.flatten(1, 2)), bias)


def _with_bias(a: Bitwise, op: Operation, sums: Image, bias: Any) -> Image:
    if _absent(bias):
        return sums
    return added(a, op, sums, field.per_channel(a.image(bias), sums.ndim))


def _conv_transpose(a: Bitwise, op: Operation, x: Any, weight: Any, bias: Any = None, **how: Any) -> Image:
    w = a.image(weight)
    terms = math.prod([w.shape[0], *w.shape[2:]])
    places = a.places(terms).map(lambda v: v.reshape(w.shape[0], 1, *w.shape[2:]))
    sums = field.bilinear(
        a.image(x), field.multiply(w, places), lambda v, u: conv_transpose(v, u, **how), terms
    )
    return _with_bias(a, op, a.ordered(op, sums), bias)


def _einsum(a: Bitwise, op: Operation, values: list[Any], equation: Any) -> Image:
    axes, (x, y) = axes_of(str(equation)), map(a.image, values)
    for letter in set(axes.first) & set(axes.second):
        _as_long(x.shape[axes.first.index(letter)], y.shape[axes.second.index(letter)])
    sides = [_letters(a, v, have, axes) for v, have in zip((x, y), axes[:2], strict=True)]
    return a.contracted(op, *sides)


def _letters(a: Bitwise, x: Image, have: str, axes: Axes) -> Image:
    """Return the fingerprints along inner axes; the others are those of the result, some of length 1."""
    outer = [c for c in axes.result if c in have]
    order = [have.index(c) for c in (*outer, *axes.inner)]
    rows = x.map(
        lambda v: v.permute(order).flatten(len(outer)) if axes.inner else v.permute(order).unsqueeze(-1)
    )
    shape = [rows.shape[outer.index(c)] if c in outer else 1 for c in axes.result]
    return a.factors(rows, [-1]).map(lambda v: v.reshape(shape))


def _reduce_sum(a: Bitwise, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    image = a.image(x)
    chosen = field.axes_or_all(image, axes)
    rows = a.factors(image, chosen)
    ones = a.factors(a.lift(np.ones(math.prod(image.shape[i] for i in chosen))), [0])
    sums = a.contracted(op, rows, ones)
    return field.without_axes(sums, chosen, keep_dims)


def _row(a: Bitwise, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    """Compute a reduction that rounds as a random function of the elements in their order."""
    image = a.image(x)
    chosen = field.axes_or_all(image, axes)
    reduced = a.function((op.op_type, a.rounds_to(op)), a.digest(image, chosen))
    return field.without_axes(reduced, chosen, keep_dims)


BIT_RULES: dict[str, Rule] = {
    "add": lambda a, op, x, y: added(a, op, a.image(x), a.image(y)),
    "sub": lambda a, op, x, y: added(a, op, a.image(x), field.negated(a.image(y))),
    "mul": _mul,
    "square": lambda a, op, x: _mul(a, op, x, x),
    "real_div": _divide,
    "linear_activation": _linear_activation,
    "batch_norm": _batch_norm,
    **dict.fromkeys(("prelu", "softplus_parametric"), _by_channel),
    **dict.fromkeys(
        names("equal not_equal logical_and logical_or logical_xor"),
        lambda a, op, x, y: _commuting(a, op.op_type, a.image(x), a.image(y)),
    ),
    "greater": lambda a, op, x, y: a.function("greater", x, y),
    "less": lambda a, op, x, y: a.function("greater", y, x),
    "greater_equal": lambda a, op, x, y: a.function("greater_equal", x, y),
    "less_equal": lambda a, op, x, y: a.function("greater_equal", y, x),
    "cast": _cast,
    "matmul": _matmul,
    "linear": _linear,
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "einsum": _einsum,
    "reduce_sum": _reduce_sum,
    **dict.fromkeys(REDUCTIONS - {"reduce_sum", "reduce_max", "reduce_min"}, _row),
}


def _side_by_side(a: Bitwise, x: Any, y: Any) -> Image:
    """Return two operands along a new last axis."""
    first, second = a.image(x), a.image(y)
    shape = np.broadcast_shapes(first.shape, second.shape)
    return field.joined([first, second], lambda each: torch.stack([v.expand(shape) for v in each], -1))


def _maximum(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    return a.extremes(op).largest(_side_by_side(a, x, y))


def _minimum(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    return a.extremes(op).smallest(_side_by_side(a, x, y))


def _clip(a: Bitwise, op: Operation, x: Any, alpha: float, beta: float) -> Image:
    return _minimum(a, op, _maximum(a, op, x, _bound(a, op, alpha)), _bound(a, op, beta))


def _bound(a: Bitwise, op: Operation, value: float) -> float:
    """Return a bound of a clip; infinite if every finite number of the dtype keeps it, and only those count."""
    dtype = np_dtype(op.outputs[0])
    none = a.finite and dtype.kind == "f" and abs(value) >= np.finfo(dtype).max
    return float(np.copysign(np.inf, value)) if none else float(value)


def _extreme(a: Bitwise, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    """Return the largest or the smallest of some elements, in any order."""
    image = a.image(x)
    chosen = field.axes_or_all(image, axes)
    width = math.prod(image.shape[i] for i in chosen)
    if width > MOST_MEMBERS:
        return a.function(op.op_type, field.summed(a.hashed(image), chosen, bool(keep_dims)))
    others = [i for i in range(image.ndim) if i not in chosen]
    outer = [image.shape[i] for i in others]
    rows = image.map(lambda v: v.permute(*others, *chosen).reshape(*outer, width))
    sets = a.extremes(op)
    extreme = sets.largest(rows) if op.op_type == "reduce_max" else sets.smallest(rows)
    kept = [1 if i in chosen else n for i, n in enumerate(image.shape)]
    return extreme.map(lambda v: v.reshape(kept)) if keep_dims else extreme


def _max_pool(a: Bitwise, op: Operation, x: Any, ceil_mode: bool = False, **how: Any) -> Image:
    """Compute the largest element of each window, axis by axis; what lies outside is -inf, which never wins."""
    image = a.image(x)
    w = windows_of(image, how, ceil_mode)
    if math.prod(w.kernel) > MOST_MEMBERS:
        return a.uninterpreted(op, {"x": x, "ceil_mode": ceil_mode, **how})
    for axis in range(len(w.kernel)):
        one = _along(w, axis)
        image = a.lattice.largest(_spread(image, one, a.lift(-np.inf)))
    return image


def _along(w: Windows, axis: int) -> Windows:
    """Return the windows of one axis, with windows of one element on the others."""
    kernel, strides = (
        [n if i == axis else 1 for i, n in enumerate(counts)] for counts in (w.kernel, w.strides)
    )
    used = [pad if i == axis else (0, 0) for i, pad in enumerate(w.used)]
    return replace(w, kernel=kernel, strides=strides, used=used)


def _spread(image: Image, w: Windows, outside: Image) -> Image:
    """Return the elements of each window along a new last axis."""
    values = (float(v.reshape(-1)[0]) for v in outside.lanes)
    return image.with_lanes([_unfolded(lane, w, v) for lane, v in zip(image.lanes, values, strict=True)])


def _unfolded(lane: torch.Tensor, w: Windows, outside: float) -> torch.Tensor:
    """Return the numbers of each window of one lane along a new last axis."""
    rank = lane.ndim
    lane = pad_axes(lane, w.used, outside)
    for axis, (width, step) in enumerate(zip(w.kernel, w.strides, strict=True)):
        lane = lane.unfold(2 + axis, width, step)
    return lane.reshape(*lane.shape[:rank], -1)


def _avg_pool(
    a: Bitwise,
    op: Operation,
    x: Any,
    exclude_padding_from_average: bool = False,
    ceil_mode: bool = False,
    **how: Any,
) -> Image:
    """Compute a random function of the elements of each window in their order, and of how many count."""
    image = a.image(x)
    w = windows_of(image, how, ceil_mode)
    counts = counted(w, list(image.shape[2:]), bool(exclude_padding_from_average)).to(torch.int64)
    terms = _spread(image, w, a.lift(0.0))
    return a.function(
        ("avg_pool", a.rounds_to(op)),
        a.digest(terms, [-1]).map(lambda v: v.squeeze(-1)),
        a.lift(counts.numpy()),
    )


RULES: dict[str, Rule] = {
    "maximum": _maximum,
    "minimum": _minimum,
    "relu": lambda a, op, x: _maximum(a, op, x, 0.0),
    "threshold": lambda a, op, x, alpha: _maximum(a, op, x, float(alpha)),
    "relu6": lambda a, op, x: _clip(a, op, x, 0.0, 6.0),
    "clip": _clip,
    **dict.fromkeys(("reduce_max", "reduce_min"), _extreme),
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
}

Bitwise.rules = BIT_RULES | RULES | symbolic.LIST_RULES
