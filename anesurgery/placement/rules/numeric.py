"""Rules about numbers that overflow, vanish or lose digits in fp16 or in the engine's arithmetic.

A test gets (op, target) and returns what it found in words, which becomes the message, or "". It reads the
program alone and bounds values by intervals (`semantics.intervals`). It is silent where these exclude the
hazard, and where only samples could tell, as for products of two dynamic values (`sampled.py`). 751K is the
micro-architecture study of M4 and M6; ane-guide and ANEForge are measurements through the private compiler.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from anesurgery import fp16
from anesurgery.facts import lost_digits, overflow_regions
from anesurgery.facts.quotient_angles import may_divide_by_zero
from anesurgery.facts.written_exponentials import LOGS_OF_SHARES, written_exponential
from anesurgery.mil import (
    Operation,
    Var,
    constant,
    consumers,
    is_output,
    is_stored,
    is_symbolic,
    np_dtype,
    operands,
    producer,
    static_shape,
)
from anesurgery.numeric import means, products, squares
from anesurgery.numeric.forms import centred, form_of
from anesurgery.numeric.hazard import Hazard, MagnitudeBound, magnitude_words
from anesurgery.numeric.means import FOLLOWED, QuotientOfSums, quotient_of_sums
from anesurgery.numeric.squares import norm_of
from anesurgery.ops import CARRIERS, COMPARISONS, NORMS, ORDERINGS, PRODUCTS, SINGULAR, names
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.rules.masks import (
    FILLING_OPS,
    causal_mask,
    empty_rows,
    infinite_product,
    mask_fill,
    other_mask,
    repair_of_fill,
)
from anesurgery.placement.target import Target
from anesurgery.semantics import intervals as bounds
from anesurgery.semantics.analysis_cache import cached
from anesurgery.semantics.bounds import ANY, Interval, constant_range, norm_gain_and_offset, weight_norms
from anesurgery.semantics.intervals import Intervals
from anesurgery.semantics.reading import (
    exponential,
    guard_of,
    ints,
    number,
    readers_after,
    sliced,
    value_before,
)
from anesurgery.semantics.rows import reduced_size

# Values behind norms, for the worst input that is still natural: a click in silence.

_NUMBERS = 4096
"""A norm over at most so many numbers gives at most 64 (their root) whatever it reads; it needs no estimate."""
_SPREAD = 4.0
"""How many times their root mean square the numbers of one place reach. A choice: one normal number in 16,000
does. Weights that match the click itself reach more."""
_SEARCH_STEPS = 200
"""The most ops that are followed upstream: a residual stream has a few in each block."""


@cached
def magnitude_behind_norms(var: Var) -> float:
    """Return the estimated largest magnitude of a value behind norms; infinite for other values."""
    return max(map(abs, _BehindNorms(assume={}).of(var)))


class _BehindNorms(Intervals):
    """Intervals of values in which norms and products have the bounds of a click.

    A norm over n numbers bounds each by sqrt(n): by 700 for half a million, which needs one number to hold all
    the energy. The estimate here assumes the worst input that is still natural, a click in silence: one place
    of a picture or of a time holds all the energy, spread over all channels. With p places each number there is
    sqrt(p). A product behind it adds such numbers like random ones, up to the length of a row of weights.
    """

    def of(self, var: Var) -> Interval:
        """Return the interval of a value; where too many ops are nested, that of a value half-way up first."""
        self.steps, self.stopped_at = _SEARCH_STEPS, None
        interval = self.at(var)
        if (half_way := self.stopped_at) is not None:
            for value in (half_way, var):  # the second search finds the interval of the first in the cache
                self.steps = _SEARCH_STEPS
                interval = self.at(value)
        return interval

    def result(self, op: Operation, var: Var) -> Interval:
        """Return the interval of a result; norms and products have bounds of their own here."""
        if (normalised := _norm(op)) is not None:
            scale, shift = norm_gain_and_offset(op)
            most = max(math.sqrt(_NUMBERS), _largest_behind(normalised)) * scale + shift
        elif op.op_type in PRODUCTS and (rows := weight_norms(op)) is not None:
            bias = op.inputs.get("bias")
            largest_bias = 0.0 if bias is None else max(map(abs, constant_range(bias)))
            low, high = self.at(op.x)
            is_bounded = math.isfinite(high - low)
            most = max(abs(low), abs(high)) * rows.length + largest_bias if is_bounded else math.inf
        elif (difference := centred(var)) is not None:  # the mean of a click is nearly 0
            most = max(map(abs, self.at(difference.x)))
        else:
            return super().result(op, var)
        return -most, most


class _Normalised(NamedTuple):
    """What a norm reads: a value, and the axes over which it is normalised."""

    var: Var
    axes: Sequence[int]


def _norm(op: Operation) -> _Normalised | None:
    """Return what a norm reads, which is one op or written with several; None for other ops."""
    if op.op_type == "instance_norm":
        return _Normalised(op.x, range(2, op.x.rank))
    if op.op_type == "layer_norm":
        return _Normalised(op.x, ints(op, "axes"))
    form = norm_of(op)
    if form is None or not form.axes:
        return None
    most = form.gains[op.outputs[0]]  # behind rows of ones: 1 for a mean of squares, less for their sum
    return _Normalised(next(iter(form.rows)), form.axes) if most <= 1 + fp16.EPSILON else None


def _largest_behind(normalised: _Normalised) -> float:
    """Return the largest number behind a norm, for a root mean square of 1; infinite for unknown lengths."""
    shape = static_shape(normalised.var)
    if shape is None:
        return math.inf
    lengths = {axis % len(shape): shape[axis] for axis in normalised.axes}
    if math.prod(lengths.values()) <= _NUMBERS:
        return 0.0
    return _SPREAD * math.sqrt(_count_places(normalised.var, len(shape), lengths))


def _count_places(var: Var, rank: int, lengths: Mapping[int, int]) -> int:
    """Return how many places a norm spans, of the axes `lengths`; channels are axis 1.

    Groups of an image (1, 64, 8, 8) are made by a reshape to (1, 4, 1024): its places are the 8 * 8 before it.
    """
    centre = producer(var, "sub")
    grouping = producer(var if centre is None else centre.x, "reshape")
    before = None if grouping is None else static_shape(grouping.x)
    if before is not None and len(before) > 2:
        return math.prod(before[2:])
    if grouping is not None or list(lengths) == [rank - 1]:
        return math.prod(lengths.values())
    return math.prod(length for axis, length in lengths.items() if axis > 1)


# The tests of the rules.

SLICE_LIMIT = 4094
"""The largest magnitude that survives a slice of the last axis on the engines of H13 and H14."""
LONG_SUM = 4096
"""Number of terms from which a sum is looked at: 4096 terms overflow fp16 if their mean is above 16."""


def _is_half(op: Operation) -> bool:
    return bounds.is_half(op.outputs[0])


def _magnitude_by_weights(var: Var) -> float:
    """Return a bound on the magnitude of a value, which may use the stored weights of one product."""
    return bounds.magnitude(var, products=1)


def _magnitude_by_weights_or_norms(var: Var) -> float:
    """Return the smaller of two bounds on a magnitude: by weights, and by a norm upstream of the value."""
    return min(_magnitude_by_weights(var), magnitude_behind_norms(var))


LARGEST_LOGARITHM = 16.7
"""The largest magnitude of a logarithm of a positive fp16 number, that of 2^-24. `num-eps` covers log(0)."""


def large_square(op: Operation, target: Target) -> str:
    """Report a power, or a square, of a value that may be too large for it."""
    if not _is_half(op) or _ends_saturated(op) or _ends_under_root(op):
        return ""
    exponent = number(op.y) if op.op_type == "pow" else 2
    if exponent is None or exponent <= 1 or (op.op_type == "mul" and op.x is not op.y):
        return ""
    limit, most = fp16.LARGEST ** (1 / exponent), _magnitude_by_weights_or_norms(op.x)
    if most <= limit or (limit > 2 * LARGEST_LOGARITHM and _is_logarithm(op.x)):  # or a difference of two
        return ""
    power = f"the square of %{op.x.name}" if exponent == 2 else f"%{op.x.name} to the power {exponent:g}"
    return f"{power} overflows above {limit:.0f}; %{op.x.name} {magnitude_words(most)}"


ACTIVATIONS = names("silu gelu relu")
"""Activations without an upper bound that gates of feed-forward layers use."""


def large_gate(op: Operation, target: Target) -> str:
    """Report an activation times another value, read by a product, if the two may be too large for it.

    A value without a known bound counts as `products.UNKNOWN`, as its own overflow is not this one.
    """
    factors = (op.x, op.y)
    if not _is_half(op) or op.x is op.y or any(map(is_stored, factors)) or not any(map(_is_activated, factors)):
        return ""
    if not any(reader.op_type in PRODUCTS for reader in readers_after(op.outputs[0])):
        return ""
    most = [_magnitude_by_weights_or_norms(var) for var in factors]
    if math.prod(min(size, products.UNKNOWN) for size in most) <= fp16.LARGEST:
        return ""
    words = magnitude_words(math.prod(most))
    return f"%{op.x.name} times %{op.y.name} {words}, and fp16 ends at {fp16.LARGEST:.0f}"


def _is_activated(var: Var) -> bool:
    """Is a value an activation without an upper bound, or x * sigmoid(x)?"""
    product = producer(var, "mul")
    if product is None:
        return producer(var, *ACTIVATIONS) is not None
    gates = [producer(gate, "sigmoid") for gate in (product.x, product.y)]
    return any(gate is not None and gate.x in (product.x, product.y) for gate in gates)


def _is_logarithm(var: Var) -> bool:
    """Is a value a logarithm, or a logarithm minus the mean or the maximum of logarithms?"""
    if producer(var, "log") is not None:
        return True
    difference = producer(var, "sub")
    subtracted = None if difference is None else producer(difference.y, "reduce_mean", "reduce_max")
    if difference is None or subtracted is None:
        return False
    return all(producer(v, "log") is not None for v in (difference.x, subtracted.x))


MOST_VALUES = 12
"""How many values downstream of a power are looked at. A gelu by tanh needs four; each costs time per power."""
SATURATING = frozenset({"tanh", "sigmoid", "erf", "atan", "sigmoid_hard", "clip"}) | ORDERINGS
"""Ops that give the same result for infinity as for a large number."""
BETWEEN_POWER_AND_SATURATING = frozenset({"add", "sub", "mul", "cast", "identity"})
BETWEEN_SQUARE_AND_ROOT = names("add mul real_div reduce_sum reduce_mean clip maximum matmul linear conv")


def _values_after(op: Operation, passed_through: frozenset[str], most: int = MOST_VALUES) -> Iterator[Var]:
    """Yield the results of an op, and those that ops of some types make of them: at most so many values."""
    pending = list(op.outputs)
    for _ in range(most):
        if not pending:
            return
        var = pending.pop()
        yield var
        pending += [v for reader in var.child_ops if reader.op_type in passed_through for v in reader.outputs]


def _ends_saturated(op: Operation) -> bool:
    """Do all consumers of a power, through sums and products, saturate, so that its overflow does no harm?"""
    values = list(_values_after(op, BETWEEN_POWER_AND_SATURATING, MOST_VALUES + 1))
    if len(values) > MOST_VALUES or any(map(is_output, values)):  # there are more values than are looked at
        return False
    return all(
        reader.op_type in BETWEEN_POWER_AND_SATURATING | SATURATING or _vanishes(reader, var)
        for var in values
        for reader in var.child_ops
    )


def _vanishes(reader: Operation, var: Var) -> bool:
    """Is the result near 0 for a large operand: the exp of a negative number, or a constant divided by it?"""
    if reader.op_type == "exp":
        return bounds.interval(var)[1] <= fp16.LARGEST_EXPONENT
    return reader.op_type == "inverse" or (reader.op_type == "real_div" and number(reader.x) is not None)


def _ends_under_root(op: Operation) -> bool:
    """Is a square summed under a root or logarithm, which `num-root` and `num-spectrum` report instead?"""
    readers = [reader for var in _values_after(op, BETWEEN_SQUARE_AND_ROOT) for reader in var.child_ops]
    roots = [
        reader
        for reader in readers
        if reader.op_type in ("sqrt", "rsqrt", "log") or (reader.op_type == "pow" and number(reader.y) == 0.5)
    ]
    return bool(roots) and (squares.root(roots[0]) is not None or squares.spectrum(roots[0]) is not None)


def folded_cast(op: Operation, target: Target) -> str:
    """Report squares under a root that casts from fp16 to fp32 protect; the compiler may remove the casts."""
    form = None if _is_half(op) else form_of(op)
    if form is None or form.powers[op.x] != (2.0,):
        return ""
    casts = [producer(x, "cast") for x in form.rows]
    if not casts or not all(cast is not None and bounds.is_half(cast.x) for cast in casts):
        return ""
    if form.largest_value(_magnitude_by_weights) <= fp16.LARGEST and form.epsilon >= fp16.NORMAL:
        return ""
    size = magnitude_words(max(map(_magnitude_by_weights, form.rows)))
    return f"%{next(iter(form.rows)).name} is cast from fp16, and {size}"


SAFE_SCORE_DISTANCE = 9.0
"""Scores within this distance give shares above exp(-9) = 1.2e-4, far above the smallest number of fp16 (6e-8),
so that a softmax over up to 2000 scores has no share of 0."""


def vanished_share(op: Operation, target: Target) -> str:
    """Report the logarithm of a softmax or a sigmoid whose small shares are 0 in fp16."""
    form = written_exponential(op) if _is_half(op) else None
    if form is None or form.op_type not in LOGS_OF_SHARES or form.guard >= fp16.NORMAL:
        return ""
    low, high = bounds.interval(form.exponential.x)
    to_zero = high if form.opposite else -low  # sigmoid(x) vanishes for low x, sigmoid(-x) for high x
    distance = high - low if form.op_type == "log_softmax" else to_zero
    if distance < SAFE_SCORE_DISTANCE:
        return ""
    share = form.exponential
    words = f"the logarithm of the {share.op_type} %{share.outputs[0].name}"
    return f"{words}: a share below {fp16.LEAST:.1g} is 0 in fp16"


def long_count(op: Operation, target: Target) -> str:
    """Report a running sum (cumsum) in fp16 that may exceed 2048, up to which fp16 counts exactly."""
    if not _is_half(op):
        return ""
    length = op.x.shape[int(number(op.inputs.get("axis")) or 0)]
    most = bounds.magnitude(op.outputs[0])
    if most <= fp16.LAST_INTEGER:
        return ""
    count = "values of unknown number" if is_symbolic(length) else f"{length} values"
    return f"{count} are added up one by one; above {fp16.LAST_INTEGER} fp16 skips integers"


def large_angle(op: Operation, target: Target) -> str:
    """Report a sine or cosine of an angle so large that fp16 rounds it coarsely."""
    region = overflow_regions.wide_region(op)
    if region is None or not region.is_angle:
        return ""
    most, limit = magnitude_words(_magnitude_by_weights(op.x)), lost_digits.ANGLE
    return f"above {limit:g} fp16 holds an angle to {limit * fp16.HALF_STEP:.2g}; %{op.x.name} {most}"


def angle_decibels(op: Operation, target: Target) -> float:
    """Return the PSNR in dB that fp16 leaves of a sine of the largest angle, or of one at the limit."""
    most = _magnitude_by_weights(op.x)
    return _decibels(max(most if math.isfinite(most) else 0.0, lost_digits.ANGLE) * fp16.HALF_STEP)


def _decibels(error: float) -> float:
    return -20 * math.log10(error)


def coarse_points(op: Operation, target: Target) -> str:
    """Report points in a large image that fp16 holds only to a share of a pixel."""
    region = overflow_regions.wide_region(op)
    return region.why if region is not None and region.is_points else ""


def point_decibels(op: Operation, target: Target) -> float:
    """Return the PSNR in dB of pixels that differ by 1 from each other, where points lie off."""
    return _decibels(lost_digits.pixels_off(op))


def wide_between(op: Operation, target: Target) -> str:
    """Report a region of ops whose inputs and result fit into fp16 while a value inside may not."""
    region = overflow_regions.wide_region(op)
    if (
        region is None
        or region.cancels
        or region.is_angle
        or region.is_points
        or overflow_regions.is_inside_later_region(op)
        or _is_known_form(op)
    ):
        return ""
    return f"{region.why}, though %{op.outputs[0].name} may be small"


IN_NORMS = names("reduce_mean add maximum sqrt rsqrt pow inverse cast")
"""Ops between the square in a norm and the product or quotient that ends it."""


def repair_of_square(op: Operation, target: Target) -> str | None:
    """Return the pass for the norm that squares a value; None for a square that no norm reads."""
    readers = (reader for var in _values_after(op, IN_NORMS) for reader in consumers(var))
    return next(filter(None, map(squares.repair_of_norm, readers)), None)


def repair_between(op: Operation, target: Target) -> str | None:
    """Return the pass for a region that ends with an op: that for the norm which it is, or fp32."""
    return squares.repair_of_norm(op) or "widen_to_fp32"


def _is_known_form(op: Operation) -> bool:
    """Does an op end a form that another rule reports, with a repair of its own?"""
    forms = (written_exponential, squares.root, squares.spectrum, squares.cosine, quotient_of_sums)
    return any(form(op) is not None for form in forms)


def cancelled(op: Operation, target: Target) -> str:
    """Report a small difference of large numbers, which fp16 has rounded, or an argmin over such numbers.

    The argmin itself has findings of its own, about its integers.
    """
    readers = readers_after(op.outputs[0], lost_digits.BEFORE_CHOICE)
    choices = [reader for reader in readers if reader.op_type in lost_digits.CHOICES]
    regions = map(overflow_regions.wide_region, (*choices, op))
    return next((region.why for region in regions if region is not None and region.cancels), "")


def unbounded_exponential(op: Operation, target: Target) -> str:
    """Report an exponential of a value that may be above 11.09."""
    power = exponential(op) if _is_half(op) else None
    if power is None:
        return ""
    exponent, log_base = power
    if max(end * log_base for end in bounds.interval(exponent)) <= fp16.LARGEST_EXPONENT:
        return ""
    readers = _with_consumers(readers_after(op.outputs[0]))
    if any(r.op_type == "reduce_sum" or written_exponential(r) is not None for r in readers):
        return ""  # other rules report softmaxes, softplus and sigmoids
    function = "exp" if op.op_type == "exp" else f"{number(op.x):g} to the power"
    return _unbounded_words(function, exponent, fp16.LARGEST_EXPONENT / log_base)


def _unbounded_words(function: str, exponent: Var, limit: float) -> str:
    return f"{function} of %{exponent.name}, which has no known bound, overflows above {limit:.2f}"


def _with_consumers(ops: Iterable[Operation]) -> Iterator[Operation]:
    """Yield each op followed by the ops that read its results."""
    for reader in ops:
        yield reader
        for var in reader.outputs:
            yield from readers_after(var)


def quotient_angle(op: Operation, target: Target) -> str:
    """Report the atan of a quotient 0 / 0."""
    division = producer(op.x, "real_div")
    if not _is_half(op) or division is None or not may_divide_by_zero(division):
        return ""
    return f"%{division.y.name} may be 0 where %{division.x.name} is 0 too, and 0 / 0 is NaN"


def runtime_rows(op: Operation, target: Target) -> str:
    """Report a gather_nd in fp16 at dynamic indices."""
    if constant(op.indices) is not None or not _is_half(op):
        return ""
    return f"reported wrong: rows at indices known only at run time, %{op.indices.name}"


def scale_after(op: Operation, target: Target) -> str:
    """Report scores, or covariances, that are scaled after the product: too late for its sums."""
    return next((words for r in consumers(op.outputs[0]) if (words := products.SCORES.finding(r))), "")


def infinite_constant(op: Operation, target: Target) -> str:
    """Report a constant of an fp16 op that is infinite in fp16 and not the fill of a mask."""
    if not _is_half(op):
        return ""
    for _, var in operands(op):
        if not is_stored(var) or np_dtype(var) != np.float16 or producer(var, "const") is None:
            continue
        low, high = constant_range(var)
        has_known_range = (low, high) != ANY or np.size(constant(var)) == 1
        is_mask = mask_fill(op) is not None or (op.op_type == "mul" and infinite_product(op, target) != "")
        if has_known_range and max(abs(low), abs(high)) > fp16.LARGEST and not is_mask:
            return f"%{var.name} holds {high if high > fp16.LARGEST else low:g}"
    return ""


def compared_with_itself(op: Operation, target: Target) -> str:
    """Report a float that is compared with itself, which only NaN is not equal to."""
    is_float = np_dtype(op.x).kind == "f"
    return f"the engine finds no NaN in %{op.x.name}" if op.x is op.y and is_float else ""


KEEPS_NUMBERS = CARRIERS | {"tile"}
"""Ops that move or repeat a guarded number without changing it."""
DIVIDING = frozenset({"inverse", "rsqrt", "real_div"})
LIMITING = frozenset({"maximum", "clip"})
"""Ops that keep a value at or above a lower bound."""
LARGEST_EPSILON = 1e-3
"""A number from here on that is added is no epsilon. A choice: common ones are 1e-12 to 1e-5."""


def _consumer_types(var: Var) -> set[str]:
    """Return the types of the ops that read a value; a real_div counts only if the value is its divisor."""
    readers = readers_after(var, KEEPS_NUMBERS)
    return {r.op_type for r in readers if r.op_type != "real_div" or value_before(r.y, KEEPS_NUMBERS) is var}


def _epsilon(op: Operation) -> float | None:
    """Return the epsilon that keeps a value away from 0; None if there is none, or no need."""
    return _added_epsilon(op) if op.op_type == "add" else _own_epsilon(op)


def _added_epsilon(op: Operation) -> float | None:
    """Return the epsilon that an add adds for a root, logarithm or division; else None."""
    limits = guard_of(op)
    if limits is None or not 0 < limits.least < LARGEST_EPSILON:
        return None
    return limits.least if _consumer_types(op.outputs[0]) & {"sqrt", *SINGULAR, *DIVIDING} else None


def _own_epsilon(op: Operation) -> float | None:
    """Return the parameter epsilon of a norm, log or rsqrt; None where another op keeps its operand from 0."""
    inner = producer(op.x)
    if op.op_type == "log":
        adds_constant = inner is not None and any(is_stored(v) for _, v in operands(inner))
        is_guarded = inner is not None and inner.op_type in {"add", *LIMITING} and adds_constant
        if is_guarded or bounds.interval(op.x)[0] >= fp16.LEAST:
            return None
    if op.op_type == "rsqrt" and inner is not None and not inner.op_type.startswith("reduce_"):
        return None
    return number(op.inputs.get("epsilon"))


def _lower_bound(op: Operation) -> float | None:
    """Return the subnormal lower bound of a maximum or clip that a logarithm or division needs; else None."""
    limits = guard_of(op)
    if limits is None or not fp16.LEAST / 2 < limits.least < fp16.NORMAL:
        return None
    if bounds.interval(limits.value)[0] > limits.least:
        return None
    # converters round smaller bounds to LEAST, and fp16 computes a division by it correctly
    needing = {"log"} if limits.least == fp16.LEAST else {"log", *DIVIDING}
    return limits.least if _consumer_types(op.outputs[0]) & needing else None


def lost_epsilon(op: Operation, target: Target) -> str:
    """Report an epsilon that rounds to 0 in fp16, or a lower bound that is its smallest number."""
    if not _is_half(op):
        return ""
    if op.op_type in LIMITING:
        words = f"{fp16.LEAST:.1g} is the smallest number of fp16; converters round smaller ones to it"
        return words if _lower_bound(op) == fp16.LEAST else ""
    epsilon = _epsilon(op)
    if epsilon is None or epsilon > fp16.LEAST / 2:
        return ""
    value = f" {epsilon:.2g}" if epsilon else ""
    return f"the epsilon{value} is 0 in fp16, whose smallest number is {fp16.LEAST:.1g}"


def subnormal_epsilon(op: Operation, target: Target) -> str:
    """Report an epsilon, or a lower bound above the smallest number of fp16, that is subnormal in fp16."""
    if not _is_half(op):
        return ""
    is_bound = op.op_type in LIMITING
    value = _lower_bound(op) if is_bound else _epsilon(op)
    if value is None or not fp16.LEAST / 2 < value < fp16.NORMAL:
        return ""
    if is_bound and value == fp16.LEAST:
        return ""  # `lost_epsilon` reports it
    if not is_bound and bounds.interval(op.x)[0] >= fp16.NORMAL:
        return ""
    words = "the least number" if is_bound else "epsilon"
    return f"{words} {value:.2g} is subnormal in fp16 (below {fp16.NORMAL:.1g})"


def large_integers(op: Operation, target: Target) -> str:
    """Report a cast to fp16 of integers above 2048, which fp16 does not hold exactly."""
    if not _is_half(op) or np_dtype(op.x).kind not in "iu":
        return ""
    low, high = bounds.interval(op.x)
    positions = producer(op.x, "range_1d")
    if positions is not None and math.isinf(high):
        high = max(high, number(positions.end) or 0)
    if math.isfinite(high):
        most = max(abs(low) if math.isfinite(low) else 0, abs(high))
        return f"integers up to {most:.0f} become fp16" if most > fp16.LAST_INTEGER else ""
    reader = next(filter(_needs_exact_ids, readers_after(op.outputs[0])), None)
    if reader is None:
        return ""
    return f"%{op.x.name}, integers of unknown size, becomes fp16 for %{reader.outputs[0].name}"


def _needs_exact_ids(op: Operation) -> bool:
    """Is it a gather, a comparison with a table or a product with frequencies, which rounded ids falsify?"""
    if op.op_type == "gather":
        return True
    tables = [v for _, v in operands(op) if is_stored(v) and np.prod(static_shape(v) or ()) > 1]
    if op.op_type in COMPARISONS:
        return bool(tables)
    return op.op_type in ("mul", "matmul") and any(
        low > 0 and high <= 1 for low, high in map(constant_range, tables)
    )


def compared_integers(op: Operation, target: Target) -> str:
    """Report a comparison with an fp16 table that holds integers above 2048."""
    for _, var in operands(op):
        if is_stored(var) and np_dtype(var) == np.float16 and np.prod(static_shape(var) or ()) > 1:
            _, high = constant_range(var)
            if fp16.LAST_INTEGER < high < math.inf and not np.any(np.asarray(constant(var)) % 1):
                return f"%{var.name} holds integers up to {high:.0f}, and fp16 skips some of them"
    return ""


def long_sum(op: Operation, target: Target) -> str:
    """Report a sum of many values that may be large."""
    count = reduced_size(op) if _is_half(op) else 0
    if count < LONG_SUM or math.isinf(count) or any(_quotients_with_sum(op)):
        return ""
    most = bounds.magnitude(op.x) * count
    if most <= fp16.LARGEST:
        return ""
    mean = fp16.LARGEST / count
    return f"{count:.0f} values are added, which overflows if their mean is above {mean:.3g}"


def divided_sum(op: Operation, target: Target) -> str:
    """Report a sum that may overflow, and that then divides or is divided by a sum."""
    quotient = next((q for q in _quotients_with_sum(op) if q.overflows), None)
    if quotient is None:
        return ""
    return (
        f"{reduced_size(op):.0f} values are added for the quotient %{quotient.root.outputs[0].name}, "
        f"which may be small where a sum of it overflows above {fp16.LARGEST:.0f}"
    )


def _quotients_with_sum(total: Operation) -> Iterator[QuotientOfSums]:
    """Yield the quotients of two sums in which `total` is the numerator or the divisor."""
    for op in readers_after(total.outputs[0], FOLLOWED):
        quotient = quotient_of_sums(op)
        if quotient is not None and total in quotient.sums:
            yield quotient


def width_slice(op: Operation, target: Target) -> str:
    """Report a slice of the last axis that begins after 0, of a value that may be above `SLICE_LIMIT`."""
    shape = static_shape(op.x)
    if not _is_half(op) or not shape or len(shape) < 2:
        return ""
    if op.op_type == "split":
        axes = ints(op, "axis")
        begins_inside = bool(axes) and axes[0] % len(shape) == len(shape) - 1
        where = "its parts after the first"
    else:
        begin = sliced(op)[-1].begin or 0
        begins_inside, where = begin != 0, f"element {begin % shape[-1]}"
    if not begins_inside or bounds.magnitude(op.x, products=2) <= SLICE_LIMIT:
        return ""
    return f"the last axis of %{op.x.name} is cut, {where} on; magnitudes above {SLICE_LIMIT} become infinite"


def bare_exponential(op: Operation, target: Target) -> str:
    """Report a softmax that is written out without subtracting the largest score: an exp that is summed."""
    if not _is_half(op) or bounds.interval(op.x)[1] <= fp16.LARGEST_EXPONENT:
        return ""
    if not any(r.op_type == "reduce_sum" for r in readers_after(op.outputs[0])):
        return ""
    return _unbounded_words("exp", op.x, fp16.LARGEST_EXPONENT)


GROWING = frozenset({"exp", "sinh", "cosh"})


def overflowing_exponential(op: Operation, target: Target) -> str:
    """Report a softplus or sigmoid that is written out with an exponential that may overflow."""
    form = written_exponential(op) if _is_half(op) else None
    if form is None or form.total is not None or form.op_type in LOGS_OF_SHARES:
        return ""
    most = max(
        bounds.interval(growing.x)[1] if growing.op_type == "exp" else bounds.magnitude(growing.x)
        for growing in form.ops
        if growing.op_type in GROWING
    )
    if most <= fp16.LARGEST_EXPONENT:
        return ""
    inner = form.exponential
    return (
        f"a {form.op_type} is written out: {inner.op_type} of %{inner.x.name}, which {magnitude_words(most)}, "
        f"overflows above {fp16.LARGEST_EXPONENT:.2f}"
    )


# The rules.

_numeric = partial(Rule, kind="numeric")
STUDY = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6: notes/numerics.md"
STUDY_OF_ELEMENTWISE = f"{STUDY}: the elementwise unit is fp16"
SQUARE_OVERFLOWS = "the elementwise unit is fp16: 256 * 256 is infinite"
GUIDE = "sbryngelson/ane-guide: part-1-machine/03; ANEForge: numeric-cliffs"
INTEGERS = "fp16 holds integers exactly up to 2048; above it ids and positions become their neighbours"
MASKS = (
    "Apple's rules say that the softmax of the engine does not handle -inf, and below -32768 a fill becomes it "
    "if the sum is fused with the product. A decoder with a causal mask of -inf gave NaN for every input; one "
    "Mac gave the same bits for -inf and -1e4 (perhaps on its CPU)"
)
MASK_SOURCE = (
    "apple/coreai-models: neural_engine_rules.md; apple/ml-ane-transformers; john-rocky/CoreML-LLM; "
    "soniqo/speech-swift: issue 342, pull request 345"
)


def _hazard_rule(
    name: str,
    hazard: Hazard[Any],
    because: str,
    source: str,
    size: MagnitudeBound = bounds.magnitude,
    **more: Any,
) -> Rule:
    """Return the rule of a row of `numeric.hazard`; `size` bounds the magnitude of a value."""
    return _numeric(
        name, hazard.kinds, because, source, test=lambda op, target: hazard.finding(op, size), **more
    )


RULES: tuple[Rule, ...] = (
    _hazard_rule(
        "num-mac-32768",
        products.SUM,
        "a result or partial sum of products of magnitude 32768 or more becomes infinite, even where later "
        "terms cancel it; seen on M1, M2, M4, M5 and M6 (what the accumulator is, fixed point or float, is "
        "disputed; the ceiling is not)",
        f"{GUIDE}; {STUDY}",
        scope=Scope(os="seen on M1, M2, M4, M5, M6"),
        remedy="scale_products",
        advice="divide the weights by a power of two and multiply the result by it (exact but for underflow)",
    ),
    _numeric(
        "num-square",
        frozenset({"square", "mul", "pow", "reduce_sum_square", "reduce_l2_norm"}),
        f"{SQUARE_OVERFLOWS}, and Core ML has no root mean square norm that would hide the square",
        f"coremltools: frontend/torch/ops.py (rms_norm); {STUDY}",
        test=large_square,
        grade=Grade.DOCUMENTED,
        remedy_for=repair_of_square,
        advice=(
            "divide by the largest magnitude first (rms_norm), or scale by calibration (scale_ranges); "
            "auto does so if inputs overflow; `inputs=` shows the values that samples reach"
        ),
    ),
    _numeric(
        "num-gate",
        frozenset({"mul"}),
        "in a gated layer (SwiGLU) two large numbers are multiplied, and fp16 ends at 65504. A Qwen3-TTS code "
        "predictor of such layers gave NaN in fp16, and was kept in fp32",
        "soniqo/speech-swift: pull request 166; CrispStrobe/CrispASR: issue 38 (its products in fp16)",
        test=large_gate,
        grade=Grade.REPORTED,
        advice=(
            "run scale_ranges with `inputs=` of yours, or divide the weights of one factor by a power of two, "
            "and multiply those that read the product by it"
        ),
    ),
    _numeric(
        "num-scale-after",
        frozenset({"matmul"}),
        "query times key was the op that lost most to fp16 in a probe of one op kind at a time (35 dB), and "
        "its sums have a ceiling of 32768: they need not be larger than what the softmax reads",
        "smpanaro/more-ane-transformers: NOTES.md; 751K: notes/numerics.md",
        test=scale_after,
        decibels_for=lambda op, target: 35.0,
        scope=Scope(os="seen on M1 Max, macOS 13 to 14"),
        remedy="scale_scores",
        advice="multiply the query, or the weights that make it, instead of the scores",
    ),
    _hazard_rule(
        "num-scores",
        products.LARGE_SCORES,
        "a row with two infinite scores has no softmax: infinity less infinity is NaN, and on the engine both "
        "count as large numbers",
        STUDY,
        remedy="shift_scores",
        advice="take the largest score away before the scores are multiplied",
    ),
    _numeric(
        "num-mask-causal",
        FILLING_OPS,
        MASKS,
        MASK_SOURCE,
        test=causal_mask,
        grade=Grade.DOCUMENTED,
        remedy="causal_mask_tensor",
    ),
    _numeric(
        "num-mask",
        FILLING_OPS,
        MASKS,
        MASK_SOURCE,
        test=other_mask,
        grade=Grade.DOCUMENTED,
        remedy="padding_mask_tensor",
        remedy_for=repair_of_fill,
        advice="fill with -1e4, or with no less than -3e4",
    ),
    _numeric(
        "num-mask-rows",
        FILLING_OPS,
        "the softmax of a row that is all -inf is NaN, and the engine turns NaN into large numbers",
        "FluidInference/FluidAudio: issue 679 (M5); 751K: notes/numerics.md",
        test=empty_rows,
        scope=Scope(os="seen on M4, M5, M6"),
        remedy="padding_mask_tensor",
        remedy_for=repair_of_fill,
        advice="fill with -1e4: such a row then keeps finite weights",
    ),
    _numeric(
        "num-mask-product",
        frozenset({"mul"}),
        "0 * -inf is NaN, and this is 0 for each score that is kept: on the CPU each row is NaN. On the engine "
        "an infinity behaves as a large number",
        f"{MASK_SOURCE}; apple/coremltools: issue 2223, pull request 2669; {GUIDE}",
        test=infinite_product,
        grade=Grade.DOCUMENTED,
        remedy="padding_mask_tensor",
        remedy_for=repair_of_fill,
        advice="multiply with -1e4",
    ),
    _numeric(
        "num-nan-test",
        names("equal not_equal"),
        "on the engine NaN becomes a large number or an infinity before it is compared, and no NaN is found",
        "FluidInference/FluidAudio: issue 679; 751K: notes/numerics.md; sbryngelson/ANEForge: issue 120",
        test=compared_with_itself,
        scope=Scope(os="seen on M4, M5, M6"),
        advice="find NaN in the app, or prevent it: 0 / 0, 0 * infinity, roots and logarithms below 0",
    ),
    _numeric(
        "num-constant",
        frozenset({"add", "sub", "mul", "real_div", "select"}),
        "the largest number of fp16 is 65504, and the engine has no infinities: they behave as large numbers",
        f"{STUDY}; {GUIDE}",
        test=infinite_constant,
        scope=Scope(os="seen on M1 to M6"),
        advice="use a finite number below 65504",
    ),
    _numeric(
        "num-eps",
        NORMS | {"add", "log", "rsqrt", "maximum", "clip"},
        "an epsilon that rounds to 0 guards nothing: 1 / sqrt(0) is infinite",
        "apple/ml-ane-transformers (1e-7 in its layer norm)",
        test=lost_epsilon,
        grade=Grade.DOCUMENTED,
        advice=(
            "use 1e-7 or more, or 1e-5 if the model allows it; hold_guards replaces a 0 by the smallest "
            "number of fp16; in a model converted in fp32, compute_fp16 keeps such ops in fp32"
        ),
    ),
    _numeric(
        "num-eps-subnormal",
        frozenset({"add", "log", "maximum", "clip"}),
        "the multiplier of the A14 and M1 engine (H13) flushes subnormal numbers to 0; the elementwise unit "
        "was seen to keep them, and which of the two an op uses is not known",
        "sbryngelson/ANEForge: numeric-cliffs",
        test=subnormal_epsilon,
        grade=Grade.GUESS,
        scope=Scope(frozenset({13}), via="compiler"),
        remedy="hold_guards",
        advice="6.1e-5 or more is safe on both units",
    ),
    _numeric(
        "num-int",
        frozenset({"cast"}),
        INTEGERS,
        GUIDE,
        test=large_integers,
        scope=Scope(os="seen on M1, M5"),
        advice="keep ids and positions integers, or feed tables made of them",
    ),
    _numeric(
        "num-int-table",
        COMPARISONS,
        INTEGERS,
        GUIDE,
        test=compared_integers,
        scope=Scope(os="seen on M1, M5"),
        advice="split the integers into two digits of at most 2048",
    ),
    _numeric(
        "num-reduce",
        frozenset({"reduce_sum"}),
        "a reduce_sum has the range of fp16 and a narrow running sum; a product with ones has a wide sum and a "
        "ceiling of 32768",
        GUIDE,
        test=long_sum,
        scope=Scope(os="seen on M1, M5", via="compiler"),
        advice=(
            "take the mean, or divide by the count first; sum_to_mean does it if the sum is scaled down later"
        ),
    ),
    _numeric(
        "num-quotient",
        frozenset({"reduce_sum"}),
        "a sum in fp16 is infinite above 65504, and what is divided by it is then 0, infinite or NaN",
        GUIDE,
        test=divided_sum,
        remedy="mean_quotient",
    ),
    _numeric(
        "num-slice-q4",
        frozenset({"slice_by_index", "slice_by_size", "split"}),
        "on H13 and H14 a slice of the last axis that begins after 0 passes a fixed-point step that holds "
        "magnitudes to 4094; ANEForge's tables put it on M1 only, ane-guide on M1 and M2, and its list of "
        "cliffs on all before A16",
        GUIDE,
        test=width_slice,
        scope=Scope(frozenset({13, 14}), via="compiler"),
        remedy="cut_rows",
        advice="slice along another axis, or bring the value below 4094; `inputs=` tells what samples reach",
    ),
    _numeric(
        "num-softmax",
        frozenset({"exp"}),
        "softmax itself takes the largest score away (1000 among its inputs does no harm); an exp of one's own "
        "does not",
        GUIDE,
        test=bare_exponential,
        scope=Scope(os="seen on M1"),
        remedy="fuse_exponential",
        advice="use softmax, or subtract reduce_max first",
    ),
    _numeric(
        "num-exp",
        frozenset({"log", "inverse", "real_div", "pow", "mul"}),
        "the exponential passes 65504 though the result is small: log(1 + exp(x)) is then infinite, "
        "exp(x) / (1 + exp(x)) NaN, and in the engine, which has no infinities, 1 / (1 + exp(-x)) is not 0",
        STUDY,
        test=overflowing_exponential,
        remedy="fuse_exponential",
    ),
    _hazard_rule(
        "num-root",
        squares.ROOT,
        f"{SQUARE_OVERFLOWS}, though its root or logarithm would be small",
        STUDY,
        size=_magnitude_by_weights_or_norms,
        remedy="scale_roots",
        advice="divide by the largest magnitude first",
    ),
    _numeric(
        "num-folded-cast",
        frozenset({"sqrt", "rsqrt"}),
        "the casts to fp32 and back around a root mean square norm were folded away: its mean of squares was "
        "subnormal, and its reciprocal root infinite",
        "john-rocky/CoreML-LLM (iPhone 17 Pro)",
        test=folded_cast,
        grade=Grade.REPORTED,
        scope=Scope(frozenset({17}), "seen on iPhone 17 Pro"),
        advice="run compute_fp16, then safe_numbers, which scales the numbers before they are squared",
    ),
    _hazard_rule(
        "num-spectrum",
        squares.SPECTRUM,
        f"{SQUARE_OVERFLOWS}, though the logarithm of a band would be small",
        f"{STUDY}; findit-studio/coremlit (a log-mel front end with a cosine of 0.046 on M1 Max)",
        size=_magnitude_by_weights,
        remedy="scale_spectra",
        advice="divide each frame by its largest magnitude first",
    ),
    _hazard_rule(
        "num-cosine",
        squares.COSINE,
        f"{SQUARE_OVERFLOWS}, though a cosine is at most 1",
        STUDY,
        size=_magnitude_by_weights,
        remedy="scale_cosines",
        advice="divide each row by its length first, and multiply then",
    ),
    _hazard_rule(
        "num-variance",
        means.VARIANCE,
        "two large numbers cancel: at a mean of 100 and a spread of 1 fp16 leaves no digit of the variance",
        STUDY_OF_ELEMENTWISE,
        remedy="centre_variance",
        advice="take the mean away before squaring",
    ),
    _numeric(
        "num-log-softmax",
        frozenset({"log"}),
        "a share below 6e-8 is 0 in fp16, and its logarithm infinite, -45440 on M1",
        f"{GUIDE}; coremltools: frontend/torch/ops.py (log_softmax is a softmax and a log)",
        test=vanished_share,
        remedy="fuse_exponential",
        advice="take the largest score and the logarithm of the sum of exponentials away",
    ),
    _numeric(
        "num-count",
        frozenset({"cumsum"}),
        INTEGERS,
        GUIDE,
        test=long_count,
        scope=Scope(os="seen on M1, M5"),
        remedy="widen_to_fp32",
        advice="count in int32 or fp32, on the CPU, or in two digits of at most 2048",
    ),
    _numeric(
        "num-angle",
        frozenset({"sin", "cos"}),
        "fp16 has eleven binary digits: of a large angle they tell how many turns it has, little of its end",
        STUDY_OF_ELEMENTWISE,
        test=large_angle,
        decibels_for=angle_decibels,
        remedy="widen_to_fp32",
        advice="make a table of the angles in fp32, as rotary_tables does, or take whole turns away first",
    ),
    _numeric(
        "num-points",
        frozenset({"resample"}),
        "fp16 has eleven binary digits: near 1 its steps are 1/2048, so many pixels of a large image apart",
        f"{STUDY_OF_ELEMENTWISE}; apple/coremltools: issue 2068",
        test=coarse_points,
        decibels_for=point_decibels,
        remedy="widen_to_fp32",
        advice="sample a smaller image, or keep the grid and the sampling in fp32, on the CPU or the GPU",
    ),
    _numeric(
        "num-between",
        overflow_regions.ENDS,
        "the elementwise unit is fp16: above 65504 a value is infinite, below 6e-8 it is 0, even if the "
        "result would fit",
        STUDY,
        test=wide_between,
        remedy="widen_to_fp32",
        remedy_for=repair_between,
        advice="scale what is multiplied or added before, or compute these few ops in fp32, on the CPU",
    ),
    _numeric(
        "num-cancel",
        names("add sub linear log mod floor_div sqrt acos asin atanh"),
        "fp16 has 11 binary digits; a difference of two near numbers loses the digits that they share. A "
        "residual quantizer that chose rows by such distances gave 34 % other codes in fp16",
        f"{STUDY_OF_ELEMENTWISE}; FluidInference/mobius: pull request 92",
        test=cancelled,
        remedy="widen_to_fp32",
        advice="subtract before squaring, or compute these few ops in fp32, on the CPU; constants that fp16 "
        "rounded need another conversion",
    ),
    _numeric(
        "num-exp-range",
        frozenset({"exp", "pow"}),
        "exp of more than 11.09 is infinite in fp16, and a large number on the engine",
        STUDY,
        test=unbounded_exponential,
        advice=(
            "clip its operand, or keep it negative; `inputs=` shows the values that samples reach; "
            "halve_exponent helps if the result is scaled down later"
        ),
    ),
    _numeric(
        "num-atan",
        frozenset({"atan"}),
        "0 / 0 is NaN, which the engine takes for a large number; vocoders whose phase was an atan2 had a "
        "correlation of 0.82 even on the CPU",
        "mattmireles/kokoro-coreml (M1, M2, M2 Ultra)",
        test=quotient_angle,
        grade=Grade.REPORTED,
        remedy="stable_angle",
        advice=(
            "divide the smaller number by the larger, or keep sine and cosine in place of the angle; "
            "torch's atan2 is converted to ops that give 0 instead of pi if y is 0 and x is negative"
        ),
    ),
    _numeric(
        "num-gather-nd",
        frozenset({"gather_nd"}),
        "with indices computed at run time it gave zeros on the engine, and was correct on the CPU and the "
        "GPU. Through ONNX Runtime it gave the first slice for some shapes, whatever the index",
        "john-rocky/CoreML-LLM (iPhone 17 Pro); microsoft/onnxruntime: pull request 28598 (device not given)",
        test=runtime_rows,
        grade=Grade.REPORTED,
        remedy="flat_gather",
        advice="gather along one axis, or multiply with one-hot rows",
    ),
    _hazard_rule(
        "num-mean",
        means.LONG_MEAN,
        "a reduction has a narrow running sum, which loses what is small beside it",
        GUIDE,
        scope=Scope(os="seen on M1, M5", via="compiler"),
        remedy="mean_of_means",
        advice="take means of rows, and the mean of those",
    ),
    _hazard_rule(
        "num-qdq",
        products.QUANTIZED,
        "the engine multiplied with the code of an operand dequantized by the scale of the output: 2, 4 and 8 "
        "where 1 is right; the CPU is right",
        "cadamcat/llms-on-apple-neural-engine: coreai-qdq-multiply-scale",
        scope=Scope(os="seen on M5 Pro, macOS 27.0"),
        remedy="clip_product",
        advice="clip the product to the range of the output",
    ),
    _hazard_rule(
        "num-shares",
        products.SHARES,
        "over 4,096 keys the product was 5.2 to 5.4 % off, with equal weights 3.95 %, and with 64 "
        "times the weights 0.06 %; the cause is unknown",
        "cadamcat/llms-on-apple-neural-engine: attention-product-precision (Core AI)",
        scope=Scope(os="seen on M5 Pro, macOS 27.0"),
        remedy="scale_shares",
        advice="multiply the weights by 64, and the result by 1/64",
    ),
)
"""Each rule fires where the program shows the hazard, or cannot exclude one that is seldom harmless."""
