"""Convert small operations that coremltools lacks, or some of whose arguments it ignores or refuses.

coremltools drops arguments that `torch.export` passes by name, such as the tanh form of a gelu or the factor of
a sum, without an error. A function `with_...` wraps the host's own converter; the others replace it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from anesurgery.frontend.arguments import (
    Convert,
    Wrap,
    add_results,
    argument,
    dtype_of,
    inputs_of,
    is_one,
    keyword,
    known_value,
    option,
    promoted,
    read_instead,
    wrapper,
)
from anesurgery.frontend.complex_numbers import FOURIER
from anesurgery.mil import Var, is_symbolic, mb, np_dtype, types

LEAST = 2.0**-9
"""The smallest divisor of `rms_norm`: smaller values are not scaled up before they are squared."""
EXACT_THRESHOLD = 20.0
"""Threshold above which softplus(x) is x in fp32."""


def with_named_string(key: str, position: int) -> Any:
    """Wrap a converter: a string given by name goes to its position, as coremltools expects."""

    @wrapper
    def wrap(host: Convert, context: Any, node: Any) -> None:
        named = dict(node.kwinputs or {})
        if isinstance(word := named.pop(key, [None])[0], str):
            name = f"{node.name}_{key}"
            context.add(mb.const(val=word, name=name))
            node.inputs, node.kwinputs = [*node.inputs[:position], name], named or None
        host(context, node)

    return wrap


def gelu(context: Any, node: Any) -> None:
    """Convert `gelu(x, approximate="none")`, exact or by tanh."""
    form = option(context, node, 1, "approximate", "none")
    mode = "TANH_APPROXIMATION" if form == "tanh" else "EXACT"
    context.add(mb.gelu(x=inputs_of(context, node)[0], mode=mode, name=node.name))


def hardtanh(context: Any, node: Any) -> None:
    """Convert `hardtanh(x, min_val=-1, max_val=1)`; coremltools refuses whole limits, and left-out defaults."""
    x = inputs_of(context, node)[0]
    low, high = (argument(context, node, 1, "min_val", -1), argument(context, node, 2, "max_val", 1))
    low, high = (np_dtype(x).type(known_value(limit)) for limit in (low, high))
    context.add(mb.clip(x=x, alpha=low, beta=high, name=node.name))


def with_factor(position: int) -> Any:
    """Wrap the converter of a sum or difference: multiply the operand at a position by `alpha`."""

    @wrapper
    def wrap(host: Convert, context: Any, node: Any) -> None:
        alpha = option(context, node, 2, "alpha", 1)
        if alpha != 1:
            name = f"{node.name}_scaled"
            x, factor = promoted([inputs_of(context, node)[position], alpha])
            context.add(mb.mul(x=x, y=factor, name=name))
            node.inputs = [name if i == position else node.inputs[i] for i in (0, 1)]
        host(context, node)

    return wrap


def _adds_no_axis(shape: tuple[int, ...], x: Var) -> bool:
    """Does an operand of this shape leave the shape of x as it is?"""
    lengths = zip(reversed(shape), reversed(x.shape), strict=False)
    return len(shape) <= x.rank and all(n in (1, length) for n, length in lengths)


@wrapper
def with_base_two(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `base ** x`: Core ML squares x where the base is the constant 2."""
    base, x = inputs_of(context, node)[:2]
    base = known_value(base)
    is_float = isinstance(x, Var) and types.is_float(x.dtype)
    if is_float and base is not None and np.all(np.equal(base, 2)) and _adds_no_axis(np.shape(base), x):
        context.add(mb.exp2(x=x, name=node.name))
    else:
        host(context, node)


@wrapper
def with_factors(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `beta * x + alpha * a @ b`, to take factors that are integers."""
    beta, alpha = (known_value(argument(context, node, i, name, 1)) for i, name in ((3, "beta"), (4, "alpha")))
    if beta == alpha == 1:
        host(context, node)
        return
    x, a, b = promoted(inputs_of(context, node)[:3])
    factor = np_dtype(a).type
    result = mb.mul(x=mb.matmul(x=a, y=b), y=factor(alpha))
    if beta:  # else x does not count, though it is NaN
        result = mb.add(x=mb.mul(x=x, y=factor(beta)), y=result)
    context.add(result, torch_name=node.name)


def variance(*, root: bool) -> Convert:
    """Return the converter of `var` or `std`, with any correction of the count; by default 1."""

    def convert(context: Any, node: Any) -> None:
        x, *rest = inputs_of(context, node)
        if len(rest) == 1 and isinstance(known_value(rest[0]), (bool, np.bool_)):
            axes, correction = None, rest[0]
        else:
            axes = argument(context, node, 1, "dim")
            older = argument(context, node, 2, "unbiased")  # what older overloads call the same argument
            correction = argument(context, node, 2, "correction", older)
        kept = bool(option(context, node, 3, "keepdim", False))
        spread = _variance(x, known_value(axes), known_value(correction), kept)
        context.add(mb.sqrt(x=spread, name=node.name) if root else mb.identity(x=spread, name=node.name))

    return convert


def _variance(x: Var, axes: Any, correction: Any, kept: bool) -> Var:
    stated = [] if axes is None else [int(known_value(axis)) % x.rank for axis in np.ravel(axes)]
    over = stated or list(range(x.rank))
    centred = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=over, keep_dims=True))
    spread = mb.reduce_mean(x=mb.square(x=centred), axes=over, keep_dims=kept)
    less = 1.0 if correction is None else float(correction)
    if less:
        sizes = mb.gather(x=mb.shape(x=x), indices=over, axis=0)
        count = mb.cast(x=mb.reduce_prod(x=sizes), dtype="fp32")
        more = mb.real_div(x=count, y=mb.sub(x=count, y=np.float32(less)))
        spread = mb.mul(x=spread, y=mb.cast(x=more, dtype=dtype_of(x)))
    return spread


def rms_norm(context: Any, node: Any) -> None:
    """Convert `rms_norm(x, shape, weight=None, eps=None)`; x is divided by its largest magnitude first.

    coremltools does so too, but adds an eps that is not scaled, and divides rows of zeros by zero.
    """
    x, shape = inputs_of(context, node)[:2]
    weight, eps = (argument(context, node, i, name) for i, name in ((2, "weight"), (3, "eps")))
    axes = list(range(-len(shape if isinstance(shape, (list, tuple)) else shape.val), 0))
    dtype = np_dtype(x).type
    small = np.finfo(np.float32).eps if eps is None else float(known_value(eps))
    least = dtype(LEAST)
    scale = mb.maximum(x=mb.reduce_max(x=mb.abs(x=x), axes=axes, keep_dims=True), y=least)
    scaled = mb.real_div(x=x, y=scale)
    mean = mb.reduce_mean(x=mb.square(x=scaled), axes=axes, keep_dims=True)
    scaled_eps = mb.mul(x=mb.square(x=mb.real_div(x=least, y=scale)), y=dtype(small / LEAST**2))
    normal = mb.mul(x=scaled, y=mb.rsqrt(x=mb.add(x=mean, y=scaled_eps)))
    context.add(
        mb.identity(x=normal, name=node.name) if weight is None else mb.mul(x=normal, y=weight, name=node.name)
    )


@wrapper
def with_threshold(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `softplus(x, beta=1, threshold=20)`: above the threshold it is x."""
    x = inputs_of(context, node)[0]
    numbers = [argument(context, node, i, name) for i, name in ((1, "beta"), (2, "threshold"))]
    beta, threshold = (
        default if v is None else float(known_value(v))
        for v, default in zip(numbers, (1.0, EXACT_THRESHOLD), strict=True)
    )
    if threshold >= EXACT_THRESHOLD:
        return host(context, node)
    dtype = np_dtype(x).type
    steep = mb.mul(x=x, y=dtype(beta))
    bent = mb.mul(x=mb.softplus(x=steep), y=dtype(1 / beta))
    straight = mb.greater(x=steep, y=dtype(threshold))
    context.add(mb.select(cond=straight, a=x, b=bent, name=node.name))


def convert_round(context: Any, node: Any) -> None:
    """Convert `round(x, decimals=0)`."""
    x = inputs_of(context, node)[0]
    decimals = int(option(context, node, 1, "decimals", 0))
    dtype = np_dtype(x).type
    if not decimals:
        context.add(mb.round(x=x, name=node.name))
        return
    whole = mb.round(x=mb.mul(x=x, y=dtype(10.0**decimals)))
    context.add(mb.mul(x=whole, y=dtype(10.0**-decimals), name=node.name))


PRIMITIVES = {
    f"prims::{name}": name
    for name in (
        *("abs", "acos", "asin", "atan", "atan2", "ceil", "cos", "erf", "exp", "exp2", "floor", "log", "log1p"),
        *("neg", "reciprocal", "rsqrt", "sin", "sqrt", "tan", "tanh", "add", "sub", "mul", "div", "maximum"),
        *("minimum", "pow", "eq", "ne", "ge", "gt", "le", "lt", "trunc", "fmod", "erfc", "signbit", "where"),
        *("bitwise_and", "bitwise_or", "bitwise_xor"),
    )
}
"""Primitive of torch's decompositions -> the operation of the same meaning."""

SHORTENED = (*FOURIER, "cosine_similarity")
"""Operations for which coremltools expects every argument; torch.export names or leaves out defaults."""


@wrapper
def with_all_arguments(host: Convert, context: Any, node: Any) -> None:
    """Wrap a converter, to give every argument by position."""
    wanted = getattr(torch.ops.aten, node.kind).default._schema.arguments
    names = list(node.inputs)
    for a in wanted[len(names) :]:
        name = f"{node.name}_{a.name}"
        value = keyword(context, node, a.name)
        value = a.default_value if value is None else known_value(value)
        context.add(None if value is None else mb.const(val=value, name=name), torch_name=name)
        names.append(name)
    node.inputs = names
    host(context, node)


def truncated(context: Any, node: Any) -> None:
    """Convert `torch.trunc(x)`: round toward zero."""
    x = inputs_of(context, node)[0]
    context.add(mb.mul(x=mb.sign(x=x), y=mb.floor(x=mb.abs(x=x)), name=node.name))


def fmod(context: Any, node: Any) -> None:
    """Convert `torch.fmod(x, y)`: the remainder with the sign of x."""
    x, y = promoted(inputs_of(context, node)[:2])
    divisor = mb.abs(x=y) if y.val is None else np.abs(y.val)  # MIL's abs makes a known fp16 number fp32
    rest = mb.mod(x=mb.abs(x=x), y=divisor)
    context.add(mb.mul(x=mb.sign(x=x), y=rest, name=node.name))


def erfc(context: Any, node: Any) -> None:
    """Convert `torch.erfc(x)`."""
    x = inputs_of(context, node)[0]
    context.add(mb.sub(x=np_dtype(x).type(1), y=mb.erf(x=x), name=node.name))


def signbit(context: Any, node: Any) -> None:
    """Convert `torch.signbit(x)`; -0 counts as 0."""
    x = inputs_of(context, node)[0]
    context.add(mb.less(x=x, y=np_dtype(x).type(0), name=node.name))


CENTRAL = [1.5014091, 0.24664114, -4.1760079e-3, -1.2542374e-3, 2.1722671e-4, -4.2276054e-6, -3.1740734e-6]
CENTRAL += [3.282834e-7]
OUTER = [2.8329773, 1.0016802, 9.4257497e-3, -7.699433e-3, 5.8294902e-3, -3.4319111e-3, 1.1184861e-3]
OUTER += [-1.1654551e-4]
"""erfinv(x) / x, fitted as polynomials of w - 2.5, for w < 5, and of sqrt(w) - 3; w is -log(1 - x^2)."""


def erfinv_of(x: Var, **name: str) -> Var:
    """Build erfinv(x), to 1e-6 of the result in fp32 for each x from -1 to 1; beyond it is NaN."""
    real = np_dtype(x).type
    w = mb.mul(x=mb.log(x=mb.mul(x=mb.sub(x=real(1), y=x), y=mb.add(x=x, y=real(1)))), y=real(-1))
    sides = []
    for at, coefficients in ((mb.sub(x=w, y=real(2.5)), CENTRAL), (mb.sub(x=mb.sqrt(x=w), y=real(3)), OUTER)):
        y = mb.add(x=mb.mul(x=at, y=real(coefficients[-1])), y=real(coefficients[-2]))
        for c in coefficients[-3::-1]:
            y = mb.add(x=mb.mul(x=y, y=at), y=real(c))
        sides.append(mb.mul(x=y, y=x))
    y = mb.select(cond=mb.less(x=w, y=real(5)), a=sides[0], b=sides[1])
    end = mb.equal(x=mb.abs(x=x), y=real(1))
    return mb.select(cond=end, a=mb.mul(x=x, y=real(np.inf)), b=y, **name)


def nan_to_num(context: Any, node: Any) -> None:
    """Convert `torch.nan_to_num(x, nan=0, posinf=None, neginf=None)`, by selection.

    coremltools writes it with `non_zero` and `scatter_nd`, of shapes that depend on the values.
    """
    x = _as_float(inputs_of(context, node)[0])
    largest = np.finfo(np_dtype(x)).max
    nan, high, low = (
        default if (given := option(context, node, i, name, None)) is None else given
        for i, name, default in ((1, "nan", 0.0), (2, "posinf", largest), (3, "neginf", -largest))
    )
    real = np_dtype(x).type
    y = mb.select(cond=mb.not_equal(x=x, y=x), a=real(nan), b=x)
    for infinity, number in ((np.inf, high), (-np.inf, low)):
        y = mb.select(cond=mb.equal(x=x, y=real(infinity)), a=real(number), b=y)
    context.add(mb.identity(x=y, name=node.name))


def product(context: Any, node: Any) -> None:
    """Convert `torch.prod(x, axis=None, keepdim=False)`."""
    arguments = inputs_of(context, node)
    x = mb.cast(x=arguments[0], dtype="int32") if types.is_bool(arguments[0].dtype) else arguments[0]
    by_axis = len(arguments) > 1 and (len(arguments) > 2 or node.kind.endswith("dim_int"))
    axes = [int(known_value(arguments[1]))] if by_axis else None
    keep = bool(option(context, node, 2, "keepdim", False)) if by_axis else False
    context.add(mb.reduce_prod(x=x, axes=axes, keep_dims=keep, name=node.name))


def prims_sum(context: Any, node: Any) -> None:
    """Convert `prims::sum(x, axes)`."""
    x, axes = inputs_of(context, node)[:2]
    context.add(mb.reduce_sum(x=x, axes=np.ravel(known_value(axes)).tolist(), name=node.name))


def order_statistic(*, median: bool) -> Convert:
    """Return the converter of `torch.median(x, axis, keepdim=False)`, or `torch.kthvalue(x, k, axis=-1, ...)`.

    Both give a value and its place; a median without an axis gives the value alone. Of two middle values, the
    lower one is the median. Of equal values, any place may be given.
    """

    def convert(context: Any, node: Any) -> None:
        x = inputs_of(context, node)[0]
        axis, keep = (
            option(context, node, i + (not median), name, default)
            for i, name, default in ((1, "dim", None if median else -1), (2, "keepdim", False))
        )
        flat = mb.reshape(x=x, shape=[-1]) if axis is None else x
        along = 0 if axis is None else int(axis) % x.rank
        if is_symbolic(flat.shape[along]):
            raise NotImplementedError(f"{node.name}: {node.kind} along an axis of dynamic length, {x.shape}")
        k = (flat.shape[along] + 1) // 2 if median else int(option(context, node, 1, "k"))
        least = mb.topk(x=flat, k=k, axis=along, ascending=True)
        ends = [
            mb.slice_by_size(
                x=v,
                begin=[0] * along + [k - 1] + [0] * (v.rank - along - 1),
                size=[-1] * along + [1] + [-1] * (v.rank - along - 1),
            )
            for v in least
        ]
        made = ends if keep else [mb.squeeze(x=v, axes=[along]) for v in ends]
        add_results(context, node, made[:1] if axis is None else made)

    return convert


def cumulative(*, largest: bool) -> Convert:
    """Return the converter of `torch.cummax(x, axis)` or `cummin`: values and places; of equal ones the last.

    In each of log2(length) steps, the value of so many elements before is compared.
    """

    def convert(context: Any, node: Any) -> None:
        x = inputs_of(context, node)[0]
        axis = int(option(context, node, 1, "dim")) % x.rank
        if any(map(is_symbolic, x.shape)):
            raise NotImplementedError(f"{node.name}: {node.kind} of a dynamic shape, {x.shape}")
        length, reach = int(x.shape[axis]), 1
        order = np.arange(length, dtype=np.int32).reshape([-1] + [1] * (x.rank - 1 - axis))
        both = [x, mb.const(val=np.broadcast_to(order, x.shape).copy())]
        while reach < length:
            cut = {"split_sizes": [reach, length - reach], "axis": axis}
            first, later = zip(*(mb.split(x=v, **cut) for v in both), strict=True)
            cut["split_sizes"] = [length - reach, reach]
            earlier = [mb.split(x=v, **cut)[0] for v in both]
            stay = (mb.greater_equal if largest else mb.less_equal)(x=later[0], y=earlier[0])
            kept = [mb.select(cond=stay, a=a, b=b) for a, b in zip(later, earlier, strict=True)]
            both = [mb.concat(values=pair, axis=axis) for pair in zip(first, kept, strict=True)]
            reach *= 2
        add_results(context, node, both)

    return convert


def shift(*, left: bool) -> Convert:
    """Return the converter of `x << k` or `x >> k`; a computed k counts as 0 below 0, and as 31 above 31."""

    def convert(context: Any, node: Any) -> None:
        x, k = inputs_of(context, node)[:2]
        x = x if isinstance(x, Var) else mb.const(val=np.int32(x))
        if np_dtype(x).kind not in "iu":
            raise NotImplementedError(f"{node.name}: {node.kind} of {dtype_of(x)}; shift whole numbers")
        if known_value(k) is None:  # by half of k and then by the rest, as 2^31 is no int32
            count = mb.minimum(x=mb.maximum(x=k, y=np.int32(0)), y=np.int32(31))
            half = mb.floor_div(x=count, y=np.int32(2))
            factors = [
                mb.gather(x=np.int32(2 ** np.arange(17)), indices=n, axis=0)
                for n in (half, mb.sub(x=count, y=half))
            ]
            scaled = mb.mul if left else mb.floor_div
            context.add(scaled(x=scaled(x=x, y=factors[0]), y=factors[1], name=node.name))
            return
        by = np.asarray(known_value(k))
        if by.min(initial=0) < 0 or by.max(initial=0) > 31:
            raise NotImplementedError(f"{node.name}: {node.kind} by {by.tolist()}; 0 to 31 is covered")
        if x.val is not None:  # as packed weights are, which may be of 8 bits
            shifted = (np.left_shift if left else np.right_shift)(x.val, by.astype(x.val.dtype))
            context.add(mb.const(val=np.int32(shifted), name=node.name))
            return
        scaled = mb.mul if left else mb.floor_div
        x = scaled(x=x, y=np.int32(2 ** np.minimum(by, 30)))
        if by.max(initial=0) > 30:  # 2^31 is no int32
            x = scaled(x=x, y=np.int32(1 + (by > 30)))
        context.add(mb.identity(x=x, name=node.name))

    return convert


def fake_quantize(*, by_channel: bool) -> Convert:
    """Return the converter of `fake_quantize_per_tensor_affine(x, scale, zero, low, high)`, or of channels.

    It is (clip(round(x / scale) + zero, low, high) - zero) * scale, which quantization-aware training leaves in
    a model. By channel, the axis comes before `low`.
    """

    def convert(context: Any, node: Any) -> None:
        x, scale, zero, *rest = inputs_of(context, node)[: 6 if by_channel else 5]
        number = np_dtype(x).type
        low, high = (number(known_value(v)) for v in rest[-2:])
        scale, zero = (
            mb.cast(x=v, dtype=dtype_of(x)) if isinstance(v, Var) else number(v) for v in (scale, zero)
        )
        if by_channel:
            shape = [-1 if axis == int(known_value(rest[0])) % x.rank else 1 for axis in range(x.rank)]
            scale, zero = (mb.reshape(x=v, shape=shape) for v in (scale, zero))
        steps = mb.add(x=mb.round(x=mb.real_div(x=x, y=scale)), y=zero)
        held = mb.sub(x=mb.clip(x=steps, alpha=low, beta=high), y=zero)
        context.add(mb.mul(x=held, y=scale, name=node.name))

    return convert


@wrapper
def without_stable(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of a sort: MIL has no choice `stable`, the second of four arguments."""
    if len(node.inputs) == 4:
        node.inputs = [node.inputs[0], *node.inputs[2:]]
    host(context, node)


def hypot(context: Any, node: Any) -> None:
    """Convert `hypot(x, y)`."""
    x, y = promoted(inputs_of(context, node)[:2])
    context.add(mb.sqrt(x=mb.add(x=mb.square(x=x), y=mb.square(x=y)), name=node.name))


def cdist(context: Any, node: Any) -> None:
    """Convert `torch.cdist(x, y, p)` for p = 1 and p = 2, from the differences themselves."""
    x, y, p = inputs_of(context, node)[:3]
    p = float(known_value(p))
    if p not in (1, 2):
        raise NotImplementedError(f"{node.name}: cdist with p={p:g}; p=1 and p=2 are covered")
    x, y = promoted([x, y])
    apart = mb.sub(x=mb.expand_dims(x=x, axes=[-2]), y=mb.expand_dims(x=y, axes=[-3]))
    norm = mb.reduce_l1_norm if p == 1 else mb.reduce_l2_norm
    context.add(norm(x=apart, axes=[-1], name=node.name))


@wrapper
def with_front_axis(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.cumsum(x, axis)`: MIL takes no negative axis but -1."""
    x = inputs_of(context, node)[0]
    axis = option(context, node, 1, "dim")
    if axis is not None and int(axis) < -1:
        front = mb.const(val=np.int32(int(axis) + x.rank), name=f"{node.name}_axis")
        read_instead(context, node, 1, front)
    host(context, node)


@wrapper
def with_integer_floor_divide(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `a // b`: integers give an integer, and coremltools drops a division by 1."""
    operands = inputs_of(context, node)[:2]
    if all(np_dtype(v).kind in "iu" for v in operands if isinstance(v, Var)):
        a, b = promoted(operands)
        context.add(mb.floor_div(x=a, y=b, name=node.name))
    elif is_one(operands[1]):
        context.add(mb.floor(x=promoted(operands)[0], name=node.name))
    else:
        host(context, node)


@wrapper
def with_integer_rounding(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.div(a, b, rounding_mode=...)`, as that of `a // b`."""
    operands = inputs_of(context, node)[:2]
    mode = option(context, node, 2, "rounding_mode")
    if mode is None or any(np_dtype(v).kind not in "iu" for v in operands if isinstance(v, Var)):
        if mode == "floor" and is_one(operands[1]):
            context.add(mb.floor(x=promoted(operands)[0], name=node.name))
        else:
            host(context, node)
        return
    a, b = promoted(operands)
    quotient = mb.floor_div(x=a, y=b)
    if mode == "trunc":  # towards 0: one more where it is below and there is a rest
        rest = mb.not_equal(x=mb.mul(x=quotient, y=b), y=a)
        up = mb.logical_and(x=rest, y=mb.less(x=quotient, y=0))
        quotient = mb.add(x=quotient, y=mb.cast(x=up, dtype="int32"))
    context.add(mb.identity(x=quotient, name=node.name))


def all_true(context: Any, node: Any) -> None:
    """Convert `torch.all` of all elements, as `torch.export` decomposes it."""
    x = inputs_of(context, node)[0]
    if (value := known_value(x)) is not x and value is not None:
        context.add(mb.const(val=bool(np.all(value)), name=node.name))
        return
    least = mb.reduce_min(x=mb.cast(x=x, dtype="int32"), keep_dims=False)
    context.add(mb.cast(x=least, dtype="bool", name=node.name))


SERIES_UP_TO = 0.2
"""Below this magnitude asinh is computed by its series, whose first omitted term is 8e-8 of the result."""


def asinh_of(x: Var, **name: str) -> Var:
    """Build asinh(x): log |x| + log(1 + sqrt(1 + 1/x^2)) never overflows; small x by a series."""
    number = np_dtype(x).type
    size = mb.maximum(x=mb.abs(x=x), y=number(SERIES_UP_TO))
    inverse = mb.real_div(x=number(1), y=size)
    root = mb.sqrt(x=mb.add(x=mb.square(x=inverse), y=number(1)))
    large = mb.add(x=mb.log(x=size), y=mb.log(x=mb.add(x=root, y=number(1))))
    square = mb.square(x=x)
    series = mb.add(x=mb.mul(x=square, y=number(-15 / 336)), y=number(3 / 40))
    for factor in (-1 / 6, 1.0):
        series = mb.add(x=mb.mul(x=square, y=series), y=number(factor))
    small = mb.less(x=mb.abs(x=x), y=number(SERIES_UP_TO))
    signed = mb.mul(x=mb.sign(x=x), y=large)
    return mb.select(cond=small, a=mb.mul(x=x, y=series), b=signed, **name)


def acosh_of(x: Var, **name: str) -> Var:
    """Build acosh(x): log x + log(1 + sqrt(x - 1) sqrt(x + 1) / x), which never overflows."""
    one = np_dtype(x).type(1)
    roots = [mb.sqrt(x=side) for side in (mb.sub(x=x, y=one), mb.add(x=x, y=one))]
    share = mb.real_div(x=mb.mul(x=roots[0], y=roots[1]), y=x)
    return mb.add(x=mb.log(x=x), y=mb.log(x=mb.add(x=share, y=one)), **name)


def of_one_float(build: Callable[..., Var]) -> Convert:
    """Return the converter of a function of one float."""

    def convert(context: Any, node: Any) -> None:
        context.add(build(_as_float(inputs_of(context, node)[0]), name=node.name))

    return convert


def _as_float(x: Var) -> Var:
    """Cast integers and booleans to fp32, as torch promotes them for a root or logarithm."""
    return x if types.is_float(x.dtype) else mb.cast(x=x, dtype="fp32")


@wrapper
def with_float_operand(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of a function of floats, to take integers and booleans."""
    x = inputs_of(context, node)[0]
    if isinstance(x, Var) and not types.is_float(x.dtype) and not types.is_complex(x.dtype):
        read_instead(context, node, 0, mb.cast(x=x, dtype="fp32", name=f"{node.name}_as_float"))
    host(context, node)


@wrapper
def with_integers_kept(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of a rounding: integers stay as they are, and MIL rounds only floats."""
    x = inputs_of(context, node)[0]
    if isinstance(x, Var) and types.is_int(x.dtype):
        context.add(mb.identity(x=x, name=node.name))
    else:
        host(context, node)


@wrapper
def with_scalars(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `torch.broadcast_tensors(...)`, to take scalars."""
    tensors = inputs_of(context, node)[0]
    if isinstance(tensors, Var):  # the host joins numbers that are known
        tensors = [mb.const(val=number) for number in tensors.val]
    if all(isinstance(v, Var) and v.rank == 0 for v in tensors):
        context.add(tensors, node.name)
    else:
        host(context, node)


CONVERSIONS: dict[str, Convert] = {
    "trunc": with_integers_kept(truncated),
    "round.decimals": convert_round,
    "fmod": fmod,
    "erfc": erfc,
    "signbit": signbit,
    **dict.fromkeys(("erfinv", "special_erfinv", "prims::erf_inv"), of_one_float(erfinv_of)),
    "prims::var": variance(root=False),
    "prims::sum": prims_sum,
    "prims::hypot": hypot,
    "_cdist_forward": cdist,
    "_is_all_true": all_true,
    **dict.fromkeys(("median", "median.dim"), order_statistic(median=True)),
    "kthvalue": order_statistic(median=False),
    "cummax": cumulative(largest=True),
    "cummin": cumulative(largest=False),
    **{
        name: shift(left=side == "left")
        for side in ("left", "right")
        for name in (
            *(f"{side[0]}shift", f"__{side[0]}shift__"),  # by trace and by export
            *(
                f"bitwise_{side}_shift",
                f"bitwise_{side}_shift.tensor_scalar",
                f"bitwise_{side}_shift.scalar_tensor",
            ),
        )
    },
    "fake_quantize_per_tensor_affine": fake_quantize(by_channel=False),
    "fake_quantize_per_tensor_affine.tensor_qparams": fake_quantize(by_channel=False),
    "fake_quantize_per_channel_affine": fake_quantize(by_channel=True),
}
FLOATS_ONLY = (
    *("sqrt", "rsqrt", "exp", "exp2", "log", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan", "asin"),
    *("acos", "atan", "sinh", "cosh", "tanh", "atanh", "erf", "sigmoid", "isnan"),
)
"""Functions that torch also computes for integers, and MIL only for floats."""
WRAPPERS: dict[str, Wrap] = {
    "cumsum": with_front_axis,
    "nan_to_num": lambda _: nan_to_num,
    "floor_divide": with_integer_floor_divide,
    "broadcast_tensors": with_scalars,
    # The host's own write ops that MIL does not have.
    **dict.fromkeys(("asinh", "arcsinh"), lambda _: of_one_float(asinh_of)),
    **dict.fromkeys(("acosh", "arccosh"), lambda _: of_one_float(acosh_of)),
    **dict.fromkeys(("argsort", "sort"), without_stable),
    **dict.fromkeys(FLOATS_ONLY, with_float_operand),
    **dict.fromkeys(("ceil", "floor"), with_integers_kept),
    "round": lambda _: with_integers_kept(convert_round),
    "gelu": lambda _: with_named_string("approximate", 1)(gelu),
    "hardtanh": lambda _: hardtanh,
    "rms_norm": lambda _: rms_norm,
    "softplus": with_threshold,
    "div": lambda host: with_named_string("rounding_mode", 2)(with_integer_rounding(host)),
    **dict.fromkeys(("add", "sub"), with_factor(1)),
    "rsub": with_factor(0),
    **dict.fromkeys(("var", "var.dim", "var.correction"), lambda _: variance(root=False)),
    **dict.fromkeys(("std", "std.dim", "std.correction"), lambda _: variance(root=True)),
    "pow": with_base_two,
    **dict.fromkeys(("addmm", "baddbmm"), with_factors),
    **dict.fromkeys(SHORTENED, with_all_arguments),
}
