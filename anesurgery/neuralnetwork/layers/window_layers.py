"""Layers that slide a window: convolutions, deconvolutions and pooling over two and three spatial axes.

A deconvolution is MIL's `conv_transpose`. Its whole result has (size - 1) * stride + extent elements along an
axis, where extent is the length of the dilated kernel. Padding and output shape say how many of them to cut off
at both ends (`Cut`): size 5, stride 2 and kernel 3 give 11, and the cut (1, 0) leaves 10.

The format's text says that a deconvolution over two axes ignores its dilation. coremltools' converter writes
one with the output shape of a dilated kernel, and its tests (`TestConvTranspose`) expect that kernel's numbers.
So we apply the dilation, and a note says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from anesurgery.mil import Array, Var, is_symbolic, mb, np_dtype
from anesurgery.neuralnetwork.context import Context, layer, layer_nd
from anesurgery.neuralnetwork.spec import DAMAGED

SAME = ("same", "same_lower")
"""MIL's padding by `asymmetryMode`: the odd row goes to the bottom and right, or to the top and left."""
SIDES = ("Front", "Back", "Top", "Bottom", "Left", "Right")
PADDINGS = ("custom", "valid", "same")
"""MIL's padding by `paddingType` of layers over three spatial axes."""


def pairs(values: Any, default: int, length: int = 2) -> list[int]:
    """Return a repeated field of one number for each spatial axis, which may be left out."""
    return [int(v) for v in values] or [default] * length


def positive(ctx: Context, params: Any, field: str, default: int) -> list[int]:
    """Like `pairs`, for a field of numbers of at least 1.

    Raises:
        LoadError: one is less, or there is not one for each spatial axis.
    """
    sizes = pairs(getattr(params, field), default)
    if len(sizes) != 2 or min(sizes) < 1:
        raise ctx.error(f"has the {field} {sizes}, expected 2 numbers from 1 up; {DAMAGED}")
    return sizes


def borders(ctx: Context, amounts: Any) -> list[int]:
    """Return a `BorderAmounts` message as [top, bottom, left, right]; 0 where it is absent.

    Raises:
        LoadError: it has not two axes.
    """
    edges = list(amounts.borderAmounts)
    if len(edges) not in (0, 2):
        raise ctx.error(f"has borders of {len(edges)} axes, expected 2 (height, width); export it again")
    sizes = [int(n) for e in edges for n in (e.startEdgeSize, e.endEdgeSize)]
    return sizes or [0, 0, 0, 0]


def by_side(params: Any) -> list[int]:
    """Return the custom padding of a layer over three spatial axes, begin and end of each."""
    return [int(getattr(params, f"customPadding{side}")) for side in SIDES]


def arguments(pads: Sequence[int]) -> dict[str, Any]:
    """Return the padding arguments of an op for [begin, end, ...]."""
    return {"pad_type": "custom", "pad": list(pads)} if any(pads) else {"pad_type": "valid"}


def needs_type(ctx: Context, params: Any) -> None:
    """Refuse a convolution or pooling that does not say how it pads; Core ML does too.

    Raises:
        LoadError: it does not.
    """
    (kinds,) = params.DESCRIPTOR.oneofs
    if params.WhichOneof(kinds.name) is None:
        choices = ", ".join(field.name for field in kinds.fields)
        raise ctx.error(f"has no padding type, expected one of {choices}; {DAMAGED}")


def spatial(ctx: Context, params: Any) -> dict[str, Any]:
    """Return the padding arguments of an op for "valid" or "same" padding over height and width."""
    needs_type(ctx, params)
    if params.HasField("same"):
        return {"pad_type": SAME[params.same.asymmetryMode]}
    return arguments(borders(ctx, params.valid.paddingAmounts))


def volume(params: Any) -> dict[str, Any]:
    """Return the padding arguments of an op for a layer over depth, height and width."""
    kind = PADDINGS[params.paddingType]
    return arguments(by_side(params)) if kind == "custom" else {"pad_type": kind}


class Cut(NamedTuple):
    """How many elements of a deconvolution's whole result are cut off at both ends of an axis."""

    begin: int
    end: int
    """If negative, elements are added: no input reaches them, so they hold the bias."""


VOLUME = ("Depth", "Height", "Width")


@layer("convolution", inputs=(1, 2), axes="first")
def convolution(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Convolution or deconvolution of (..., channel, height, width); the second input is the weight."""
    ctx.needs_rank(inputs[0], 3)
    x, back = ctx.images(inputs[0])
    needs_type(ctx, params)
    _check_channels(ctx, params, x)
    strides = positive(ctx, params, "stride", 1)
    dilations = positive(ctx, params, "dilationFactor", 1)
    groups = int(params.nGroups) or 1
    bias = _bias(ctx, params)
    if params.isDeconvolution:
        if len(inputs) > 1:
            raise ctx.limit("is a deconvolution with two inputs, takes 1; its weight must be in the file")
        return back(_deconvolution(ctx, params, x, strides, groups, bias))
    kernel = positive(ctx, params, "kernelSize", 3)
    shape = [int(params.outputChannels), int(params.kernelChannels), *kernel]
    weight = inputs[1] if len(inputs) > 1 else ctx.weights(params.weights, shape)
    return back(
        mb.conv(
            x=x,
            weight=weight,
            strides=strides,
            groups=groups,
            dilations=dilations,
            **bias,
            **spatial(ctx, params),
        )
    )


def _check_channels(ctx: Context, params: Any, x: Var) -> None:
    """Refuse groups that do not share out the channels, and kernels of other channels than the input's."""
    groups, out = int(params.nGroups) or 1, int(params.outputChannels)
    if out < 1 or out % groups:
        raise ctx.error(f"has {out} output channels, expected a multiple of its {groups} groups; {DAMAGED}")
    if is_symbolic(x.shape[1]):
        return
    takes = int(params.kernelChannels) * (1 if params.isDeconvolution else groups)
    if x.shape[1] != takes:
        raise ctx.error(f"takes {takes} channels, but its input has {x.shape[1]}; {DAMAGED}")


def _bias(ctx: Context, params: Any) -> dict[str, Array]:
    if not params.hasBias:
        return {}
    return {"bias": ctx.weights(params.bias, [params.outputChannels], "bias")}


def _deconvolution(
    ctx: Context, params: Any, x: Var, strides: list[int], groups: int, bias: dict[str, Array]
) -> Var:
    kernel = positive(ctx, params, "kernelSize", 3)
    shape = [int(params.kernelChannels), int(params.outputChannels) // groups, *kernel]
    weight = ctx.weights(params.weights, shape, axis=1)
    dilations = positive(ctx, params, "dilationFactor", 1)
    if max(dilations) > 1:
        ctx.note("is a dilated deconvolution; the format's text says that its dilation is ignored")
    extents = _extents(kernel, dilations)
    odd_at_begin = bool(params.same.asymmetryMode)
    if params.HasField("same"):
        cuts = [_halves(k - s, odd_at_begin) for k, s in zip(extents, strides, strict=True)]
    else:
        cuts = _cuts(borders(ctx, params.valid.paddingAmounts))
    if params.outputShape:
        cuts = _cuts_to_shape(ctx, x, extents, strides, cuts, params.outputShape, odd_at_begin)
    options = {"strides": strides, "dilations": dilations, "groups": groups}
    _check_size(ctx, x, extents, strides, cuts)
    return _build_deconvolution(x, weight, options, bias, cuts)


def _extents(kernel: Sequence[int], dilations: Sequence[int]) -> list[int]:
    """Return the lengths of a dilated kernel: 5 for 3 elements with dilation 2."""
    return [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]


def _cuts(amounts: Sequence[int]) -> list[Cut]:
    """Return the cuts of [begin, end, begin, end, ...]."""
    return [Cut(*both) for both in zip(amounts[::2], amounts[1::2], strict=True)]


def _halves(total: int, odd_at_begin: bool = False) -> Cut:
    """Divide a cut between both ends; the odd element goes to one of them. A negative one adds to the end."""
    if total < 0:
        return Cut(0, total)
    small = total // 2
    return Cut(total - small, small) if odd_at_begin else Cut(small, total - small)


def _cuts_to_shape(
    ctx: Context,
    x: Var,
    extents: Sequence[int],
    strides: Sequence[int],
    cuts: list[Cut],
    shape: Any,
    odd_at_begin: bool = False,
) -> list[Cut]:
    """Return the cuts that give a stated shape: the given one of an axis if it does, else one in halves."""
    sizes = ctx.shape(x, range(2, x.rank))
    fitting = []
    for size, k, s, cut, out in zip(sizes, extents, strides, cuts, shape, strict=True):
        total = (size - 1) * s + k - int(out)
        fitting.append(cut if sum(cut) == total else _halves(total, odd_at_begin))
    return fitting


def _check_size(ctx: Context, x: Var, extents: Sequence[int], strides: Sequence[int], cuts: list[Cut]) -> None:
    """Refuse a deconvolution that leaves nothing of an axis."""
    for size, k, s, cut in zip(x.shape[2:], extents, strides, cuts, strict=True):
        if not is_symbolic(size) and (out := (size - 1) * s + k - sum(cut)) < 1:
            raise ctx.error(
                f"makes {out} numbers along an axis of {size} (kernel {k}, stride {s}, cut off {sum(cut)}), "
                f"expected at least 1; {DAMAGED}"
            )


def _build_deconvolution(
    x: Var, weight: Array, options: dict[str, Any], bias: dict[str, Array], cuts: list[Cut]
) -> Var:
    """Build a deconvolution with its ends cut off, or with zeros added; these get the bias too."""
    pads = [n for begin, end in cuts for n in (begin, max(end, 0))]
    adds = any(end < 0 for _, end in cuts)
    y = mb.conv_transpose(x=x, weight=weight, **options, **({} if adds else bias), **arguments(pads))
    if not adds:
        return y
    y = mb.pad(x=y, pad=[n for _, end in cuts for n in (0, max(-end, 0))], mode="constant")
    return mb.add(x=y, y=bias["bias"].reshape(-1, *[1] * len(cuts))) if bias else y


@layer_nd("convolution3d")
def convolution3d(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Convolution or deconvolution of (batch, channel, depth, height, width)."""
    x = inputs[0]
    if x.rank != 5:
        raise ctx.error(f"takes 5 axes, but its input has {x.rank}")
    kernel, strides, dilations = (
        [int(getattr(params, f"{word}{axis}")) or 1 for axis in VOLUME]
        for word in ("kernel", "stride", "dilation")
    )
    groups, bias = int(params.nGroups) or 1, _bias(ctx, params)
    options = {"strides": strides, "dilations": dilations, "groups": groups}
    if not params.isDeconvolution:
        shape = [params.outputChannels, params.inputChannels // groups, *kernel]
        weight = ctx.weights(params.weights, shape)
        return mb.conv(x=x, weight=weight, **options, **bias, **volume(params))
    # coremltools' builder stores a deconvolution with its input channels first
    shape = [params.inputChannels, params.outputChannels // groups, *kernel]
    weight = ctx.weights(params.weights, shape, axis=1)
    extents = _extents(kernel, dilations)
    cuts = _volume_cuts(params, extents, strides)
    if params.outputShape:
        cuts = _cuts_to_shape(ctx, x, extents, strides, cuts, params.outputShape)
    _check_size(ctx, x, extents, strides, cuts)
    return _build_deconvolution(x, weight, options, bias, cuts)


def _volume_cuts(params: Any, extents: Sequence[int], strides: Sequence[int]) -> list[Cut]:
    """Return the cuts of a deconvolution over depth, height and width, by its padding."""
    kind = PADDINGS[params.paddingType]
    if kind == "same":
        return [_halves(k - s) for k, s in zip(extents, strides, strict=True)]
    return _cuts(by_side(params) if kind == "custom" else [0] * 6)


POOLINGS = ("max", "average", "l2")
"""MIL's pooling by `type`."""
GLOBAL: dict[str, Callable[[Var, list[int]], Var]] = {
    "max": lambda x, axes: mb.reduce_max(x=x, axes=axes, keep_dims=True),
    "average": lambda x, axes: mb.reduce_mean(x=x, axes=axes, keep_dims=True),
    "l2": lambda x, axes: mb.reduce_l2_norm(x=x, axes=axes, keep_dims=True),
}


@layer("pooling")
def pooling(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build pooling of (..., channel, height, width)."""
    kind = POOLINGS[params.type]
    needs_type(ctx, params)
    if params.globalPooling:
        return GLOBAL[kind](inputs[0], [-2, -1])
    ctx.needs_rank(inputs[0], 3)
    x, back = ctx.images(inputs[0])
    pads = spatial(ctx, params)
    if params.HasField("includeLastPixel"):
        high, wide = pairs(params.includeLastPixel.paddingAmounts, 0)
        pads = {**arguments([high, high, wide, wide]), "ceil_mode": True}
    kernel = positive(ctx, params, "kernelSize", 3)
    strides = positive(ctx, params, "stride", 1)
    # without padding, what lies beyond the image is all that is excluded
    excludes = params.avgPoolExcludePadding or ("ceil_mode" in pads and "pad" not in pads)
    y = _build_pooling(kind, x, kernel, strides, pads, excludes)
    if kind == "average" and "ceil_mode" in pads and not excludes:
        y = _corrected_last_means(ctx, x, y, kernel, strides, pads["pad"])
    return back(y)


def _build_pooling(
    kind: str, x: Var, kernel: list[int], strides: list[int], pads: dict[str, Any], excludes_padding: bool
) -> Var:
    """Build MIL's pooling; `pads` are its padding arguments."""
    if kind == "average":
        pads = {**pads, "exclude_padding_from_average": bool(excludes_padding)}
    op = {"max": mb.max_pool, "average": mb.avg_pool, "l2": mb.l2_pool}[kind]
    return op(x=x, kernel_sizes=kernel, strides=strides, **pads)


def _corrected_last_means(
    ctx: Context, x: Var, y: Var, kernel: list[int], strides: list[int], pad: list[int]
) -> Var:
    """Correct the means of windows that reach beyond the padding: Caffe does not count what lies there.

    Of 6 elements without padding, kernel 3 and stride 2, the last of the windows 0-2, 2-4, 4-6 has only two:
    MIL divides their sum by 3, so it is multiplied by 3/2.

    Raises:
        LoadError: height or width is dynamic.
    """
    sizes = ctx.shape(x, [2, 3])
    factor = np.ones((), np.float64)
    for axis, (size, step) in enumerate(zip(kernel, strides, strict=True)):
        before, after = pad[2 * axis : 2 * axis + 2]
        begins = np.arange(y.shape[2 + axis]) * step - before
        ends = np.minimum(begins + size, sizes[axis] + after)
        factor = factor[..., None] * (size / (ends - begins))
    return y if np.all(factor == 1) else mb.mul(x=y, y=factor.astype(np_dtype(y)))


@layer_nd("pooling3d")
def pooling3d(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build pooling of (batch, channel, depth, height, width)."""
    kernel, strides = (
        [int(getattr(params, f"{word}{axis}")) for axis in VOLUME] for word in ("kernel", "stride")
    )
    x = ctx.five(inputs[0])
    return _build_pooling(POOLINGS[params.type], x, kernel, strides, volume(params), params.countExcludePadding)


layer_nd("globalPooling3d")(
    lambda ctx, params, inputs: GLOBAL[POOLINGS[params.type]](ctx.five(inputs[0]), [-3, -2, -1])
)
