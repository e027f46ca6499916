"""Convolutions and deconvolutions over two and three spatial axes.

The format's text says that a deconvolution over two axes ignores its dilation. coremltools' converter writes
one with the output shape of a dilated kernel, and its tests (`TestConvTranspose`) expect that kernel's numbers:
they are made here, and a note tells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anesurgery.mil import Array, Var, is_symbolic, mb
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers import window_padding as padding
from anesurgery.neuralnetwork.layers.layer_table import layer, layer_nd
from anesurgery.neuralnetwork.spec import DAMAGED

Cuts = list[tuple[int, int]]
VOLUME = ("Depth", "Height", "Width")


@layer("convolution", inputs=(1, 2), axes="first")
def convolution(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Convolution or deconvolution of (..., channel, height, width); the second input is the weight."""
    ctx.needs_rank(inputs[0], 3)
    x, back = ctx.images(inputs[0])
    padding.needs_type(ctx, params)
    _check_channels(ctx, params, x)
    strides = padding.positive(ctx, params, "stride", 1)
    dilations = padding.positive(ctx, params, "dilationFactor", 1)
    groups = int(params.nGroups) or 1
    bias = _bias(ctx, params)
    if params.isDeconvolution:
        if len(inputs) > 1:
            raise ctx.limit("is a deconvolution with two inputs, takes 1; its weight must be in the file")
        return back(_deconvolution(ctx, params, x, strides, groups, bias))
    kernel = padding.positive(ctx, params, "kernelSize", 3)
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
            **padding.spatial(ctx, params),
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
    kernel = padding.positive(ctx, params, "kernelSize", 3)
    shape = [int(params.kernelChannels), int(params.outputChannels) // groups, *kernel]
    weight = ctx.weights(params.weights, shape, axis=1)
    dilations = padding.positive(ctx, params, "dilationFactor", 1)
    if max(dilations) > 1:
        ctx.note("is a dilated deconvolution; the format's text says that its dilation is ignored")
    extents = _extents(kernel, dilations)
    same, heavy = params.HasField("same"), bool(params.same.asymmetryMode)
    amounts = [0] * 4 if same else padding.borders(ctx, params.valid.paddingAmounts)
    cuts = list(zip(amounts[::2], amounts[1::2], strict=True))
    if same:
        cuts = [_halves(k - s, heavy) for k, s in zip(extents, strides, strict=True)]
    if params.outputShape:
        cuts = _to_shape(ctx, x, extents, strides, cuts, params.outputShape, heavy)
    form = {"strides": strides, "dilations": dilations, "groups": groups}
    _check_size(ctx, x, extents, strides, cuts)
    return _transposed(x, weight, form, bias, cuts)


def _extents(kernel: Sequence[int], dilations: Sequence[int]) -> list[int]:
    """How far a dilated kernel reaches."""
    return [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]


def _halves(total: int, begin_heavy: bool = False) -> tuple[int, int]:
    """A cut shared out to both ends, what is over to one of them; a negative one adds to the end."""
    if total < 0:
        return 0, total
    small = total // 2
    return (total - small, small) if begin_heavy else (small, total - small)


def _to_shape(
    ctx: Context,
    x: Var,
    extents: Sequence[int],
    strides: Sequence[int],
    cuts: Cuts,
    wanted: Any,
    begin_heavy: bool = False,
) -> Cuts:
    """The cuts that lead to a stated size: the given ones where they do, else as with "same" padding."""
    sizes = ctx.shape(x, range(2, x.rank))
    amounts = []
    for size, k, s, cut, out in zip(sizes, extents, strides, cuts, wanted, strict=True):
        total = (size - 1) * s + k - int(out)
        amounts.append(cut if sum(cut) == total else _halves(total, begin_heavy))
    return amounts


def _check_size(ctx: Context, x: Var, extents: Sequence[int], strides: Sequence[int], cuts: Cuts) -> None:
    """Refuse a deconvolution that leaves nothing of an axis."""
    for size, k, s, cut in zip(x.shape[2:], extents, strides, cuts, strict=True):
        if not is_symbolic(size) and (out := (size - 1) * s + k - sum(cut)) < 1:
            raise ctx.error(
                f"makes {out} numbers along an axis of {size} (kernel {k}, stride {s}, cut off {sum(cut)}), "
                f"expected at least 1; {DAMAGED}"
            )


def _transposed(x: Var, weight: Array, form: dict[str, Any], bias: dict[str, Array], cuts: Cuts) -> Var:
    """A transposed convolution without its ends; a negative cut adds what no input reaches: the bias."""
    flat = [n for begin, end in cuts for n in (begin, max(end, 0))]
    grown = any(end < 0 for _, end in cuts)
    y = mb.conv_transpose(x=x, weight=weight, **form, **({} if grown else bias), **padding.arguments(flat))
    if not grown:
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
    form = {"strides": strides, "dilations": dilations, "groups": groups}
    if not params.isDeconvolution:
        shape = [params.outputChannels, params.inputChannels // groups, *kernel]
        weight = ctx.weights(params.weights, shape)
        return mb.conv(x=x, weight=weight, **form, **bias, **padding.volume(params))
    # Stored as coremltools' builder does, with the channels in first.
    shape = [params.inputChannels, params.outputChannels // groups, *kernel]
    weight = ctx.weights(params.weights, shape, axis=1)
    extents = _extents(kernel, dilations)
    cuts = _volume_cuts(params, extents, strides)
    if params.outputShape:
        cuts = _to_shape(ctx, x, extents, strides, cuts, params.outputShape)
    _check_size(ctx, x, extents, strides, cuts)
    return _transposed(x, weight, form, bias, cuts)


def _volume_cuts(params: Any, extents: Sequence[int], strides: Sequence[int]) -> Cuts:
    kind = padding.KINDS[params.paddingType]
    if kind == "same":
        return [_halves(k - s) for k, s in zip(extents, strides, strict=True)]
    amounts = padding.by_side(params) if kind == "custom" else [0] * 6
    return list(zip(amounts[::2], amounts[1::2], strict=True))
