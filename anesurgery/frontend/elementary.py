"""Small operations that coremltools lacks or converts in part: rounding, products, sums, distances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from anesurgery.frontend.arguments import Convert, argument, inputs_of, keyword, known_value, promoted
from anesurgery.frontend.ignored_arguments import variance
from anesurgery.mil import Var, mb, np_dtype, types

PRIMITIVES = {
    f"prims::{name}": name
    for name in (
        *("abs", "acos", "asin", "atan", "atan2", "ceil", "cos", "erf", "exp", "exp2", "floor", "log", "log1p"),
        *("neg", "reciprocal", "rsqrt", "sin", "sqrt", "tan", "tanh", "add", "sub", "mul", "div", "maximum"),
        *("minimum", "pow", "eq", "ne", "ge", "gt", "le", "lt", "trunc", "fmod", "erfc", "signbit", "where"),
    )
}
"""What torch's decompositions are made of at last -> the same by another name."""

SHORTENED = ("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_rfftn", "fft_irfftn")
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
WRAPPERS: dict[str, Callable[[Convert], Convert]] = {
    "cumsum": summing_from_the_front,
    "floor_divide": dividing_whole_numbers,
}
