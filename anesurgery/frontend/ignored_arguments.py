"""Operations of which coremltools ignores or refuses an argument, converted with all of them.

coremltools drops what `torch.export` passes by name: the tanh form of a gelu, the factor of a sum. Numbers were
wrong in silence.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.frontend.arguments import Convert, argument, inputs_of, known_value, promoted
from anesurgery.mil import Var, mb, np_dtype

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
