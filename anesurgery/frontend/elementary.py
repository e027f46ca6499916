"""Convert small operations that coremltools lacks, or that it converts for some of their arguments only.

It ignores, refuses or gets wrong the others. Arguments that `torch.export` passes by name, such as the tanh
form of a gelu or the factor of a sum, it drops without an error. A function `with_...` wraps the host's own
converter; the others replace it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from anesurgery.frontend.arguments import Convert, argument, dtype_of, inputs_of, keyword, known_value, promoted
from anesurgery.frontend.complex_numbers import is_complex
from anesurgery.mil import Array, Var, is_symbolic, mb, np_dtype, types

LEAST = 2.0**-9
"""The smallest divisor of `rms_norm`: smaller values are not scaled up before they are squared."""
EXACT_THRESHOLD = 20.0
"""Threshold above which softplus(x) is x in fp32."""


def with_named_string(key: str, position: int) -> Any:
    """Wrap a converter: a string given by name goes to its position, as coremltools expects."""

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
    """Convert `gelu(x, approximate="none")`, exact or by tanh."""
    form = known_value(argument(context, node, 1, "approximate", "none"))
    mode = "TANH_APPROXIMATION" if form == "tanh" else "EXACT"
    context.add(mb.gelu(x=inputs_of(context, node)[0], mode=mode, name=node.name))


def with_factor(position: int) -> Any:
    """Wrap the converter of a sum or difference: multiply the operand at a position by `alpha`."""

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
    """Return the converter of `var` or `std`, with any correction of the count; by default 1."""

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


def with_threshold(host: Convert) -> Convert:
    """Wrap the converter of `softplus(x, beta=1, threshold=20)`: above the threshold it is x."""

    def convert(context: Any, node: Any) -> None:
        x = inputs_of(context, node)[0]
        numbers = [argument(context, node, i, name) for i, name in ((1, "beta"), (2, "threshold"))]
        beta, threshold = (
            default if v is None else float(known_value(v))
            for v, default in zip(numbers, (1.0, EXACT_THRESHOLD), strict=True)
        )
        if threshold >= EXACT_THRESHOLD:
            host(context, node)
            return
        dtype = np_dtype(x).type
        steep = mb.mul(x=x, y=dtype(beta))
        bent = mb.mul(x=mb.softplus(x=steep), y=dtype(1 / beta))
        straight = mb.greater(x=steep, y=dtype(threshold))
        context.add(mb.select(cond=straight, a=x, b=bent, name=node.name))

    return convert


def convert_round(context: Any, node: Any) -> None:
    """Convert `round(x, decimals=0)`."""
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
"""Primitive of torch's decompositions -> the operation of the same meaning."""

SHORTENED = tuple(f"fft_{half}fft{axes}" for half in ("", "i", "r", "ir") for axes in ("", "2", "n"))
"""Operations for which coremltools expects every argument; torch.export names or leaves out defaults."""


def with_all_arguments(host: Convert) -> Convert:
    """Wrap a converter, to give every argument by position."""

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
    """Convert `torch.trunc(x)`: round toward zero."""
    x = inputs_of(context, node)[0]
    context.add(mb.mul(x=mb.sign(x=x), y=mb.floor(x=mb.abs(x=x)), name=node.name))


def fmod(context: Any, node: Any) -> None:
    """Convert `torch.fmod(x, y)`: the remainder with the sign of x."""
    x, y = promoted(inputs_of(context, node)[:2])
    rest = mb.mod(x=mb.abs(x=x), y=mb.abs(x=y))
    context.add(mb.mul(x=mb.sign(x=x), y=rest, name=node.name))


def erfc(context: Any, node: Any) -> None:
    """Convert `torch.erfc(x)`."""
    x = inputs_of(context, node)[0]
    context.add(mb.sub(x=np_dtype(x).type(1), y=mb.erf(x=x), name=node.name))


def signbit(context: Any, node: Any) -> None:
    """Convert `torch.signbit(x)`; -0 counts as 0."""
    x = inputs_of(context, node)[0]
    context.add(mb.less(x=x, y=np_dtype(x).type(0), name=node.name))


def nan_to_num(context: Any, node: Any) -> None:
    """Convert `torch.nan_to_num(x, nan=0, posinf=None, neginf=None)`, by selection.

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
    """Convert `torch.prod(x, axis=None, keepdim=False)`."""
    arguments = inputs_of(context, node)
    x = mb.cast(x=arguments[0], dtype="int32") if types.is_bool(arguments[0].dtype) else arguments[0]
    by_axis = len(arguments) > 1 and (len(arguments) > 2 or node.kind.endswith("dim_int"))
    axes = [int(known_value(arguments[1]))] if by_axis else None
    keep = bool(known_value(argument(context, node, 2, "keepdim", False))) if by_axis else False
    context.add(mb.reduce_prod(x=x, axes=axes, keep_dims=keep, name=node.name))


def prims_sum(context: Any, node: Any) -> None:
    """Convert `prims::sum(x, axes)`."""
    x, axes = inputs_of(context, node)[:2]
    context.add(mb.reduce_sum(x=x, axes=np.ravel(known_value(axes)).tolist(), name=node.name))


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


def with_front_axis(host: Convert) -> Convert:
    """Wrap the converter of `torch.cumsum(x, axis)`: MIL takes no negative axis but -1."""

    def cumsum(context: Any, node: Any) -> None:
        x = inputs_of(context, node)[0]
        axis = known_value(argument(context, node, 1, "dim"))
        if axis is not None and int(axis) < -1:
            name = f"{node.name}_axis"
            context.add(mb.const(val=np.int32(int(axis) + x.rank), name=name))
            node.inputs = [node.inputs[0], name, *node.inputs[2:]]
        host(context, node)

    return cumsum


def with_integer_floor_divide(host: Convert) -> Convert:
    """Wrap the converter of `a // b`: for integers the result is an integer, as in torch."""

    def floor_divide(context: Any, node: Any) -> None:
        operands = inputs_of(context, node)[:2]
        if all(np_dtype(v).kind in "iu" for v in operands if isinstance(v, Var)):
            a, b = promoted(operands)
            context.add(mb.floor_div(x=a, y=b, name=node.name))
        else:
            host(context, node)

    return floor_divide


def with_integer_rounding(host: Convert) -> Convert:
    """Wrap the converter of `torch.div(a, b, rounding_mode=...)`: integers give an integer."""

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
    """Convert `torch.all` of all elements, as `torch.export` decomposes it."""
    x = inputs_of(context, node)[0]
    if (value := known_value(x)) is not x and value is not None:
        context.add(mb.const(val=bool(np.all(value)), name=node.name))
        return
    least = mb.reduce_min(x=mb.cast(x=x, dtype="int32"), keep_dims=False)
    context.add(mb.cast(x=least, dtype="bool", name=node.name))


SERIES_UP_TO = 0.2
"""Below this magnitude asinh is computed by its series, whose first omitted term is 8e-8 of the result."""


def asinh(context: Any, node: Any) -> None:
    """Convert `torch.asinh(x)`: log |x| + log(1 + sqrt(1 + 1/x^2)) never overflows; small x by a series."""
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


def acosh(context: Any, node: Any) -> None:
    """Convert `torch.acosh(x)`: log x + log(1 + sqrt(x - 1) sqrt(x + 1) / x), which never overflows."""
    x = _as_float(inputs_of(context, node)[0])
    one = np_dtype(x).type(1)
    roots = [mb.sqrt(x=side) for side in (mb.sub(x=x, y=one), mb.add(x=x, y=one))]
    share = mb.real_div(x=mb.mul(x=roots[0], y=roots[1]), y=x)
    context.add(mb.add(x=mb.log(x=x), y=mb.log(x=mb.add(x=share, y=one)), name=node.name))


def _as_float(x: Var) -> Var:
    """Cast integers and booleans to fp32, as torch promotes them for a root or logarithm."""
    number: Var = x if types.is_float(x.dtype) else mb.cast(x=x, dtype="fp32")
    return number


def with_float_operand(host: Convert) -> Convert:
    """Wrap the converter of a function of floats, to take integers and booleans."""

    def convert(context: Any, node: Any) -> None:
        x = inputs_of(context, node)[0]
        if isinstance(x, Var) and not types.is_float(x.dtype) and not types.is_complex(x.dtype):
            name = f"{node.name}_as_float"
            context.add(mb.cast(x=x, dtype="fp32", name=name))
            node.inputs = [name, *node.inputs[1:]]
        host(context, node)

    return convert


def with_scalars(host: Convert) -> Convert:
    """Wrap the converter of `torch.broadcast_tensors(...)`, to take scalars."""

    def broadcast_tensors(context: Any, node: Any) -> None:
        tensors = inputs_of(context, node)[0]
        if all(isinstance(v, Var) and v.rank == 0 for v in tensors):
            context.add(tensors, node.name)
        else:
            host(context, node)

    return broadcast_tensors


CONVERSIONS: dict[str, Convert] = {
    "trunc": truncated,
    "fmod": fmod,
    "erfc": erfc,
    "signbit": signbit,
    **dict.fromkeys(("prod", "prod.dim_int"), product),
    "prims::var": variance(root=False),
    "prims::sum": prims_sum,
    "prims::hypot": hypot,
    "_cdist_forward": cdist,
    "_is_all_true": all_true,
}
FLOATS_ONLY = (
    *("sqrt", "rsqrt", "exp", "exp2", "log", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan", "asin"),
    *("acos", "atan", "sinh", "cosh", "tanh", "atanh", "erf", "sigmoid"),
)
"""Functions that torch also computes for integers, and MIL only for floats."""
WRAPPERS: dict[str, Callable[[Convert], Convert]] = {
    "cumsum": with_front_axis,
    "nan_to_num": lambda _: nan_to_num,
    "floor_divide": with_integer_floor_divide,
    "broadcast_tensors": with_scalars,
    # The host's own write ops that MIL does not have.
    **dict.fromkeys(("asinh", "arcsinh"), lambda _: asinh),
    **dict.fromkeys(("acosh", "arccosh"), lambda _: acosh),
    **dict.fromkeys(FLOATS_ONLY, with_float_operand),
}


def _with_choice_among_all(host: Convert) -> Convert:
    """Wrap the converter of `torch.argmax` or `argmin`: without an axis it chooses among all elements."""

    def convert(context: Any, node: Any) -> None:
        x = inputs_of(context, node)[0]
        if known_value(argument(context, node, 1, "dim", None)) is not None:
            host(context, node)
            return
        if types.is_int(x.dtype):
            x = mb.cast(x=x, dtype="int32")
        keep = bool(known_value(argument(context, node, 2, "keepdim", False)))
        choose = mb.reduce_argmax if node.kind == "argmax" else mb.reduce_argmin
        place = choose(x=mb.reshape(x=x, shape=[-1]), axis=0, keep_dims=keep)
        context.add(mb.reshape(x=place, shape=[1] * x.rank) if keep else place, torch_name=node.name)

    return convert


def _diagonal(context: Any, node: Any) -> None:
    """Convert `torch.diagonal(x, offset=0, dim1=0, dim2=1)`: the diagonal becomes the last axis."""
    x = inputs_of(context, node)[0]
    offset, first, second = (
        int(known_value(argument(context, node, i, name, default)))
        for i, name, default in ((1, "offset", 0), (2, "dim1", 0), (3, "dim2", 1))
    )
    axes = [first % x.rank, second % x.rank]
    others = [axis for axis in range(x.rank) if axis not in axes]
    rows, columns = (x.shape[axis] for axis in axes)
    if is_symbolic(rows) or is_symbolic(columns):
        raise NotImplementedError(f"{node.name}: diagonal of matrices of dynamic size {x.shape}")
    begin = max(-offset, 0), max(offset, 0)
    count = max(min(rows - begin[0], columns - begin[1]), 0)
    places = (begin[0] + np.arange(count)) * columns + begin[1] + np.arange(count)
    turned = mb.transpose(x=x, perm=[*others, *axes]) if [*others, *axes] != list(range(x.rank)) else x
    sizes = [x.shape[axis] for axis in others]
    if sum(map(is_symbolic, sizes)) > 1:
        raise NotImplementedError(f"{node.name}: diagonal of a tensor of dynamic sizes {x.shape}")
    shape = [-1 if is_symbolic(n) else n for n in sizes]
    flat = mb.reshape(x=turned, shape=[*shape, rows * columns])
    context.add(mb.gather(x=flat, indices=places.astype(np.int32), axis=-1, name=node.name))


def with_one_dtype(host: Convert) -> Convert:
    """Wrap the converter of `torch.stack`: several dtypes are cast to the one that holds them all."""

    def convert(context: Any, node: Any) -> None:
        name, values = node.inputs[0], inputs_of(context, node)[0]
        if any(map(is_complex, values)) or len({dtype_of(v) for v in values}) == 1:
            host(context, node)
            return
        cast = promoted(list(values))
        context.push(([name], [cast]) if isinstance(name, str) else (list(name), cast))
        host(context, node)
        made = context[node.name]
        context.pop()
        context.add(made, torch_name=node.name)

    return convert


def with_vectors(host: Convert) -> Convert:
    """Wrap the converter of `torch.matmul`: the product of two with_vectors is a number."""

    def convert(context: Any, node: Any) -> None:
        x, y = inputs_of(context, node)[:2]
        if x.rank != 1 or y.rank != 1:
            host(context, node)
            return
        x, y = promoted([x, y])
        context.add(mb.reduce_sum(x=mb.mul(x=x, y=y), axes=[0], keep_dims=False, name=node.name))

    return convert


def _with_running_statistics(host: Convert) -> Convert:
    """Wrap the converter of `instance_norm`: a given mean and variance are used, not those of the input."""

    def convert(context: Any, node: Any) -> None:
        x, gamma, beta, mean, variance, of_input = inputs_of(context, node)[:6]
        if mean is None or variance is None or bool(known_value(of_input)):
            host(context, node)
            return
        epsilon = float(known_value(argument(context, node, 7, "eps", 1e-5)))
        number = np_dtype(x).type
        given = {"gamma": gamma, "beta": beta, "mean": mean, "variance": variance}
        known = {k: np.asarray(known_value(v), number) for k, v in given.items() if v is not None}
        context.add(mb.batch_norm(x=x, **known, epsilon=number(epsilon), name=node.name))

    return convert


# Transposed convolutions whose output is padded by more at its end than is cut off there.
#
# coremltools pads the input by that amount. But each element of the input becomes `stride` elements of the
# output, so the output gets too long. Here the input gets only the zeros that are needed, and the excess is cut
# off.

TRANSPOSED = ("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")
PLACES = {"stride": 3, "padding": 4, "dilation": 7, "output_padding": 5, "groups": 6}
"""Argument of `conv_transpose` -> its position."""
GENERAL_PLACES = {"stride": 3, "padding": 4, "dilation": 5, "output_padding": 7, "groups": 8}
"""Argument of `convolution` -> its position; position 6 says whether it is transposed."""


def _with_any_output_padding(host: Convert) -> Convert:
    """Wrap the converter of transposed convolutions, to take any padding of the output."""

    def convert(context: Any, node: Any) -> None:
        operands = inputs_of(context, node)
        general = node.kind not in TRANSPOSED
        if general and not (len(operands) > 6 and bool(known_value(operands[6]))):
            host(context, node)
            return
        x, weight = promoted(operands[:2])
        g = _sizes(context, node, GENERAL_PLACES if general else PLACES, weight.rank - 2)
        extra = g["output_padding"] - g["padding"]
        if not (extra > 0).any() and not (weight.rank == 5 and g["output_padding"].any()):
            host(context, node)
            return
        more = np.maximum(-(-extra // g["stride"]), 0)
        ends = [0, 0, 0, 0, *np.stack([np.zeros_like(more), more], 1).ravel().tolist()]
        padded = mb.pad(x=x, pad=ends, mode="constant", constant_val=np_dtype(x).type(0)) if any(ends) else x
        bias = argument(context, node, 2, "bias", None)
        options = {"strides": g["stride"], "dilations": g["dilation"], "groups": int(g["groups"][0])}
        made = mb.conv_transpose(
            x=padded, weight=weight, **({} if bias is None else {"bias": bias}), **options, pad_type="valid"
        )
        context.add(_cut(made, g["padding"], more * g["stride"] - extra, node.name))

    return convert


def _sizes(context: Any, node: Any, places: dict[str, int], rank: int) -> dict[str, Array]:
    """Return each argument for every axis; one that is not given is 0 for a padding, else 1."""
    given = {
        name: known_value(argument(context, node, i, name, int("padding" not in name)))
        for name, i in places.items()
    }
    return {name: np.resize(np.asarray(value, np.int32), rank) for name, value in given.items()}


def _cut(x: Var, begin: Array, end: Array, name: str) -> Var:
    """Cut elements off both ends of the last axes."""
    before, whole = [0, 0, *begin.tolist()], [True, True]
    return mb.slice_by_index(
        x=x,
        begin=before,
        end=[0, 0, *(-end).tolist()],
        begin_mask=[*whole, *(begin == 0).tolist()],
        end_mask=[*whole, *(end == 0).tolist()],
        name=name,
    )


# Grids of sampling points from an affine map, as in spatial transformers.


def _with_map_by_name(host: Convert) -> Convert:
    """Wrap the converter of `affine_grid_generator`: coremltools looks the map up by its name in MIL."""

    def convert(context: Any, node: Any) -> None:
        theta = inputs_of(context, node)[0]
        if theta.val is None and theta.name not in context:
            context.add(theta, torch_name=theta.name)
        host(context, node)

    return convert


BILINEAR, ZEROS = 0, 0
"""Torch's numbers for bilinear sampling and for padding with zeros."""


def _with_affine_sampling(host: Convert) -> Convert:
    """Wrap the converter of `grid_sampler`: on affine maps the host takes bilinear sampling with zeros only."""

    def convert(context: Any, node: Any) -> None:
        grid = node.inputs[1]
        held = f"{grid}_align_corners"
        if grid not in context and held in context:
            along = bool(known_value(context[held]))
            names = [name for name in node.inputs[2:5] if name in context]  # torch.export has numbers there
            if [known_value(context[name]) for name in names] != [BILINEAR, ZEROS, along]:
                context.add(_grid(context, grid, along), torch_name=grid)
        host(context, node)

    return convert


def _grid(context: Any, grid: str, corners: bool) -> Var:
    """Build the points of an affine map, (batch, height, width, 2): the map times the points of the output."""
    theta, size = known_value(context[f"{grid}_theta"]), np.ravel(known_value(context[f"{grid}_size"]))
    if len(size) != 4:
        raise NotImplementedError(f"affine_grid of {len(size) - 2} axes: only images have one here")
    theta = context[theta] if isinstance(theta, str) else mb.const(val=np.asarray(theta, np.float32))
    height, width = map(int, size[2:])
    sides = []
    for n in (width, height):
        places = (2 * np.arange(n) + 1) / n - 1
        sides.append(np.linspace(-1, 1, n) if corners and n > 1 else places)
    points = np.stack(np.broadcast_arrays(sides[0][None], sides[1][:, None], 1.0), -1).reshape(1, -1, 3)
    made = mb.matmul(x=points.astype(np_dtype(theta)), y=theta, transpose_y=True)
    return mb.reshape(x=made, shape=[-1, height, width, 2])


INCOMPLETE: dict[str, Callable[[Convert], Convert]] = {
    **dict.fromkeys(("argmax", "argmin"), _with_choice_among_all),
    **dict.fromkeys(("diagonal", "diagonal_copy"), lambda _: _diagonal),
    "instance_norm": _with_running_statistics,
    **dict.fromkeys(("_convolution", "convolution", *TRANSPOSED), _with_any_output_padding),
    "affine_grid_generator": _with_map_by_name,
    "grid_sampler": _with_affine_sampling,
}
