"""Small operations that coremltools lacks, or of which it ignores or refuses an argument.

coremltools drops what `torch.export` passes by name: the tanh form of a gelu, the factor of a sum. Numbers were
wrong in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from anesurgery.frontend.arguments import Convert, argument, inputs_of, keyword, known_value, promoted
from anesurgery.mil import Var, mb, np_dtype, types

LEAST = 2.0**-9
"""Magnitude below which values are not scaled up before they are squared."""
EXACT = 20.0
"""Threshold from which a softplus is its linear part to fp32."""


def with_word(key: str, position: int) -> Any:
    """A word given by name goes to its position: coremltools takes "tanh" for an operation of that name."""

    def wrap(host: Convert) -> Convert:
        def convert(context: Any, node: Any) -> None:
            named = dict(node.kwinputs or {})
            if isinstance(word := named.pop(key, [None])[0], str):
                name = f"{node.name}_{key}"
                context.add(mb.const(val=word, name=name))
                node.inputs, node.kwinputs = [*node.inputs[:position], name], named or None
            host(context, node)

        return convert

    return wrap


def gelu(context: Any, node: Any) -> None:
    """`gelu(x, approximate="none")`, exact or by tanh."""
    form = known_value(argument(context, node, 1, "approximate", "none"))
    mode = "TANH_APPROXIMATION" if form == "tanh" else "EXACT"
    context.add(mb.gelu(x=inputs_of(context, node)[0], mode=mode, name=node.name))


def with_factor(position: int) -> Any:
    """Sums and differences of which one operand, at this position, is multiplied by `alpha`."""

    def wrap(host: Convert) -> Convert:
        def convert(context: Any, node: Any) -> None:
            alpha = known_value(argument(context, node, 2, "alpha", 1))
            if alpha != 1:
                name = f"{node.name}_scaled"
                x, factor = promoted([inputs_of(context, node)[position], alpha])
                context.add(mb.mul(x=x, y=factor, name=name))
                node.inputs = [name if i == position else node.inputs[i] for i in (0, 1)]
            host(context, node)

        return convert

    return wrap


def variance(*, root: bool) -> Convert:
    """`var` and `std`: of all or of some axes, with any correction of their count; by default by 1."""

    def convert(context: Any, node: Any) -> None:
        x, *rest = inputs_of(context, node)
        if len(rest) == 1 and isinstance(known_value(rest[0]), (bool, np.bool_)):
            axes, correction = None, rest[0]
        else:
            axes = argument(context, node, 1, "dim")
            correction = argument(context, node, 2, "correction", argument(context, node, 2, "unbiased"))
        kept = bool(known_value(argument(context, node, 3, "keepdim", False)))
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
        spread = mb.mul(x=spread, y=mb.real_div(x=count, y=mb.sub(x=count, y=np.float32(less))))
    return spread


def rms_norm(context: Any, node: Any) -> None:
    """`rms_norm(x, shape, weight=None, eps=None)`: x is divided by its largest magnitude, and eps with it.

    coremltools adds eps to squares of numbers up to 1 and divides rows of zeros by zero.
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
    room = mb.mul(x=mb.square(x=mb.real_div(x=least, y=scale)), y=dtype(small / LEAST**2))
    normal = mb.mul(x=scaled, y=mb.rsqrt(x=mb.add(x=mean, y=room)))
    context.add(
        mb.identity(x=normal, name=node.name) if weight is None else mb.mul(x=normal, y=weight, name=node.name)
    )


def with_threshold(host: Convert) -> Convert:
    """`softplus(x, beta=1, threshold=20)`: above the threshold it is x."""

    def convert(context: Any, node: Any) -> None:
        x = inputs_of(context, node)[0]
        numbers = [argument(context, node, i, name) for i, name in ((1, "beta"), (2, "threshold"))]
        beta, threshold = (
            default if v is None else float(known_value(v))
            for v, default in zip(numbers, (1.0, EXACT), strict=True)
        )
        if threshold >= EXACT:
            host(context, node)
            return
        dtype = np_dtype(x).type
        steep = mb.mul(x=x, y=dtype(beta))
        bent = mb.mul(x=mb.softplus(x=steep), y=dtype(1 / beta))
        straight = mb.greater(x=steep, y=dtype(threshold))
        context.add(mb.select(cond=straight, a=x, b=bent, name=node.name))

    return convert


def rounded(context: Any, node: Any) -> None:
    """`round(x, decimals=0)`."""
    x = inputs_of(context, node)[0]
    decimals = int(known_value(argument(context, node, 1, "decimals", 0)))
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
    )
}
"""What torch's decompositions are made of at last -> the same by another name."""

SHORTENED = tuple(f"fft_{half}fft{axes}" for half in ("", "i", "r", "ir") for axes in ("", "2", "n"))
"""Operations whose every argument coremltools expects; torch.export names or leaves out those by default."""


def completed(host: Convert) -> Convert:
    """The operation with every argument in its place."""

    def convert(context: Any, node: Any) -> None:
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

    return convert


def truncated(context: Any, node: Any) -> None:
    """`torch.trunc(x)`: towards zero."""
    x = inputs_of(context, node)[0]
    context.add(mb.mul(x=mb.sign(x=x), y=mb.floor(x=mb.abs(x=x)), name=node.name))


def remainder_of_its_sign(context: Any, node: Any) -> None:
    """`torch.fmod(x, y)`: the remainder with the sign of x."""
    x, y = promoted(inputs_of(context, node)[:2])
    rest = mb.mod(x=mb.abs(x=x), y=mb.abs(x=y))
    context.add(mb.mul(x=mb.sign(x=x), y=rest, name=node.name))


def complementary_error(context: Any, node: Any) -> None:
    """`torch.erfc(x)`."""
    x = inputs_of(context, node)[0]
    context.add(mb.sub(x=np_dtype(x).type(1), y=mb.erf(x=x), name=node.name))


def is_negative(context: Any, node: Any) -> None:
    """`torch.signbit(x)`; -0 counts as 0."""
    x = inputs_of(context, node)[0]
    context.add(mb.less(x=x, y=np_dtype(x).type(0), name=node.name))


def finite_numbers(context: Any, node: Any) -> None:
    """`torch.nan_to_num(x, nan=0, posinf=None, neginf=None)`, by selection.

    coremltools writes it with `non_zero` and `scatter_nd`, of shapes that depend on the values.
    """
    x = _as_float(inputs_of(context, node)[0])
    largest = np.finfo(np_dtype(x)).max
    nan, high, low = (
        default if (given := known_value(argument(context, node, i, name, None))) is None else given
        for i, name, default in ((1, "nan", 0.0), (2, "posinf", largest), (3, "neginf", -largest))
    )
    real = np_dtype(x).type
    y = mb.select(cond=mb.not_equal(x=x, y=x), a=real(nan), b=x)
    for infinity, number in ((np.inf, high), (-np.inf, low)):
        y = mb.select(cond=mb.equal(x=x, y=real(infinity)), a=real(number), b=y)
    context.add(mb.identity(x=y, name=node.name))


def product(context: Any, node: Any) -> None:
    """`torch.prod(x, axis=None, keepdim=False)`."""
    arguments = inputs_of(context, node)
    x = mb.cast(x=arguments[0], dtype="int32") if types.is_bool(arguments[0].dtype) else arguments[0]
    by_axis = len(arguments) > 1 and (len(arguments) > 2 or node.kind.endswith("dim_int"))
    axes = [int(known_value(arguments[1]))] if by_axis else None
    keep = bool(known_value(argument(context, node, 2, "keepdim", False))) if by_axis else False
    context.add(mb.reduce_prod(x=x, axes=axes, keep_dims=keep, name=node.name))


def total(context: Any, node: Any) -> None:
    """Writes `sum(x, axes)` by primitives."""
    x, axes = inputs_of(context, node)[:2]
    context.add(mb.reduce_sum(x=x, axes=np.ravel(known_value(axes)).tolist(), name=node.name))


def hypotenuse(context: Any, node: Any) -> None:
    """Writes `hypot(x, y)` by primitives."""
    x, y = promoted(inputs_of(context, node)[:2])
    context.add(mb.sqrt(x=mb.add(x=mb.square(x=x), y=mb.square(x=y)), name=node.name))


def distances(context: Any, node: Any) -> None:
    """`torch.cdist(x, y, p)` for p = 1 and p = 2, from the differences themselves."""
    x, y, p = inputs_of(context, node)[:3]
    p = float(known_value(p))
    if p not in (1, 2):
        raise NotImplementedError(f"{node.name}: cdist with p={p:g}; p=1 and p=2 are covered")
    x, y = promoted([x, y])
    apart = mb.sub(x=mb.expand_dims(x=x, axes=[-2]), y=mb.expand_dims(x=y, axes=[-3]))
    norm = mb.reduce_l1_norm if p == 1 else mb.reduce_l2_norm
    context.add(norm(x=apart, axes=[-1], name=node.name))


def summing_from_the_front(host: Convert) -> Convert:
    """`torch.cumsum(x, axis)`: MIL counts axes from the front, and takes -1 at most."""

    def cumsum(context: Any, node: Any) -> None:
        x = inputs_of(context, node)[0]
        axis = known_value(argument(context, node, 1, "dim"))
        if axis is not None and int(axis) < -1:
            name = f"{node.name}_axis"
            context.add(mb.const(val=np.int32(int(axis) + x.rank), name=name))
            node.inputs = [node.inputs[0], name, *node.inputs[2:]]
        host(context, node)

    return cumsum


def dividing_whole_numbers(host: Convert) -> Convert:
    """`a // b` of integers is an integer, as torch has it: it counts repeats and heads."""

    def floor_divide(context: Any, node: Any) -> None:
        operands = inputs_of(context, node)[:2]
        if all(np_dtype(v).kind in "iu" for v in operands if isinstance(v, Var)):
            a, b = promoted(operands)
            context.add(mb.floor_div(x=a, y=b, name=node.name))
        else:
            host(context, node)

    return floor_divide


def rounding_whole_numbers(host: Convert) -> Convert:
    """`torch.div(a, b, rounding_mode=...)` of integers is an integer: it counts rows that are gathered."""

    def div(context: Any, node: Any) -> None:
        operands = inputs_of(context, node)[:2]
        mode = known_value(argument(context, node, 2, "rounding_mode"))
        if mode is None or any(np_dtype(v).kind not in "iu" for v in operands if isinstance(v, Var)):
            host(context, node)
            return
        a, b = promoted(operands)
        quotient = mb.floor_div(x=a, y=b)
        if mode == "trunc":  # towards 0: one more where it is below and there is a rest
            rest = mb.not_equal(x=mb.mul(x=quotient, y=b), y=a)
            up = mb.logical_and(x=rest, y=mb.less(x=quotient, y=0))
            quotient = mb.add(x=quotient, y=mb.cast(x=up, dtype="int32"))
        context.add(mb.identity(x=quotient, name=node.name))

    return div


def all_true(context: Any, node: Any) -> None:
    """`torch.all` of all elements, as `torch.export` decomposes it."""
    x = inputs_of(context, node)[0]
    if (value := known_value(x)) is not x and value is not None:
        context.add(mb.const(val=bool(np.all(value)), name=node.name))
        return
    least = mb.reduce_min(x=mb.cast(x=x, dtype="int32"), keep_dims=False)
    context.add(mb.cast(x=least, dtype="bool", name=node.name))


SERIES_UP_TO = 0.2
"""Below it asinh is its series: the first term left out is 8e-8 of the result."""


def inverse_hyperbolic_sine(context: Any, node: Any) -> None:
    """`torch.asinh(x)`: log |x| + log(1 + sqrt(1 + 1/x^2)), where no square overflows; small x by a series."""
    x = _as_float(inputs_of(context, node)[0])
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
    context.add(mb.select(cond=small, a=mb.mul(x=x, y=series), b=signed, name=node.name))


def inverse_hyperbolic_cosine(context: Any, node: Any) -> None:
    """`torch.acosh(x)`: log x + log(1 + sqrt(x - 1) sqrt(x + 1) / x), where no square overflows."""
    x = _as_float(inputs_of(context, node)[0])
    one = np_dtype(x).type(1)
    roots = [mb.sqrt(x=side) for side in (mb.sub(x=x, y=one), mb.add(x=x, y=one))]
    share = mb.real_div(x=mb.mul(x=roots[0], y=roots[1]), y=x)
    context.add(mb.add(x=mb.log(x=x), y=mb.log(x=mb.add(x=share, y=one)), name=node.name))


def _as_float(x: Var) -> Var:
    """Integers and booleans as torch promotes them for a root or a logarithm."""
    number: Var = x if types.is_float(x.dtype) else mb.cast(x=x, dtype="fp32")
    return number


def of_floats(host: Convert) -> Convert:
    """A function of floats, of integers and booleans as well."""

    def convert(context: Any, node: Any) -> None:
        x = inputs_of(context, node)[0]
        if isinstance(x, Var) and not types.is_float(x.dtype) and not types.is_complex(x.dtype):
            name = f"{node.name}_as_float"
            context.add(mb.cast(x=x, dtype="fp32", name=name))
            node.inputs = [name, *node.inputs[1:]]
        host(context, node)

    return convert


def broadcasting(host: Convert) -> Convert:
    """`torch.broadcast_tensors(...)`: scalars have no shape to broadcast to."""

    def broadcast_tensors(context: Any, node: Any) -> None:
        tensors = inputs_of(context, node)[0]
        if all(isinstance(v, Var) and v.rank == 0 for v in tensors):
            context.add(tensors, node.name)
        else:
            host(context, node)

    return broadcast_tensors


CONVERSIONS: dict[str, Convert] = {
    "trunc": truncated,
    "fmod": remainder_of_its_sign,
    "erfc": complementary_error,
    "signbit": is_negative,
    **dict.fromkeys(("prod", "prod.dim_int"), product),
    "prims::var": variance(root=False),
    "prims::sum": total,
    "prims::hypot": hypotenuse,
    "_cdist_forward": distances,
    "_is_all_true": all_true,
}
FLOATS_ONLY = (
    *("sqrt", "rsqrt", "exp", "exp2", "log", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan", "asin"),
    *("acos", "atan", "sinh", "cosh", "tanh", "atanh", "erf", "sigmoid"),
)
"""Functions that torch computes of integers too, and MIL of floats alone."""
WRAPPERS: dict[str, Callable[[Convert], Convert]] = {
    "cumsum": summing_from_the_front,
    "nan_to_num": lambda _: finite_numbers,
    "floor_divide": dividing_whole_numbers,
    "broadcast_tensors": broadcasting,
    # The host's own write ops that MIL does not have.
    **dict.fromkeys(("asinh", "arcsinh"), lambda _: inverse_hyperbolic_sine),
    **dict.fromkeys(("acosh", "arccosh"), lambda _: inverse_hyperbolic_cosine),
    **dict.fromkeys(FLOATS_ONLY, of_floats),
}
