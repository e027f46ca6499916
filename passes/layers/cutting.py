"""Layers that join, cut or pad along one axis, softmax and constants, in layers of iOS 11 and 12.

The layers of iOS 11 and 12 work along channels, rows and columns, and some along the sequence. Each pass
refuses the axes that they lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Refused
from anesurgery.network_editing.layer_pass import LayerRewrite, Shape, Site
from anesurgery.neuralnetwork.layers.blob_axes import of_each
from anesurgery.neuralnetwork.making import (
    CHANNEL,
    HEIGHT,
    MOST_MIXED,
    NAMES,
    SEQUENCE,
    SLICED,
    WIDTH,
    Margins,
    Step,
    border_amounts,
    channel_picking,
    constant_padding,
    from_end,
    slicing,
)

IMAGE, PERMUTED = 4, 5
"""Axes that `convolution` takes at least, and that `permute` takes, in Core ML's own check."""
LEAST_AXES = {CHANNEL: 3, SEQUENCE: 5, HEIGHT: 2, WIDTH: 2}
"""Axis of a join -> how many axes Core ML's own check wants of the blobs; `softmax` wants those of CHANNEL."""
SWAPS = {HEIGHT: (0, 2, 1, 3), WIDTH: (0, 3, 2, 1), SEQUENCE: (1, 0, 2, 3)}
"""Axis -> the order of a `permute` that exchanges the axis and the channel; the same `permute` undoes it."""
MOST_COPIES = 8
"""The most copies of all channels on one side: each is one more input of a concat. A choice."""
NO_MARGIN = (0, 0)

Spans = dict[int, range]
"""Axis that loses something, from the end -> the places that stay."""


@dataclass(frozen=True)
class LegacySoftmax(LayerRewrite):
    """Compute softmax over channels with the layer of iOS 11 and 12.

    Over the sequence, the rows or the columns of five axes it is a `softmax` between two `permute`, which
    change places of that axis and the channel.

    Refuses when a blob of another number of axes than five is normalized over another axis than the channel,
    since Core ML's own check wants exactly five for `permute`; over the batch of five; and when it has fewer
    than three axes, which `softmax` needs.

    Why it helps: layers of the ND kind were reported off the ANE (hollance/neural-engine, unsupported-layers;
    through Core ML, iOS 11 to 15), `softmax` on it (fredyshox/ANECompat; Macs, macOS 12 or later). `permute` is
    of iOS 11 and 12, which mostly run there. Not measured on later systems.

    Numbers: over the channel bit for bit the same. After a `permute` the terms of a sum may be taken in another
    order: within 1e-5 of the largest number in fp32.

    Grade: bit for bit.
    """

    name = "legacy_softmax"
    kinds = frozenset({"softmaxND"})
    tolerance = an.REASSOCIATED

    def rewrite(self, site: Site) -> None:
        """Choose the layer by the axis."""
        (x,) = site.inputs
        rank = len(site.shape(x))
        axis = from_end(site.params.axis, rank)
        if rank < LEAST_AXES[CHANNEL]:
            wanted = f"{LEAST_AXES[CHANNEL]} or more for softmax"
            raise Refused(f"the blob has {rank} axes; Core ML's own check wants {wanted}")
        if axis == CHANNEL:
            site.emit("softmax", [x], site.outputs)
            return
        if rank != PERMUTED:
            words = f"axis {axis} ({NAMES.get(axis, 'in front of the sequence')}) of {rank}"
            raise Refused(f"it normalizes {words}; Core ML's own check wants {PERMUTED} axes for permute")
        if axis not in SWAPS:
            raise Refused(f"it normalizes the {NAMES[axis]}, which permute leaves where it is")
        swap = ("permute", {"axis": SWAPS[axis]})
        site.chain([swap, ("softmax", {}), swap])


@dataclass(frozen=True)
class LegacyConstant(LayerRewrite):
    """Load constants of five axes with the layer of iOS 11 and 12.

    The numbers stay as they are stored. Constants that a layer can hold itself are for other passes: apply
    those that rewrite their readers first (`legacy_add_multiply`, for example), and the constants go.

    Refuses when the constant has fewer than five axes, since `loadConstant` always makes (1, 1, C, H, W), which
    Core ML's own check wants too; when its sequence or batch is more than 1; and when it is an output of the
    network.

    Why it helps: layers of the ND kind were reported off the ANE; `loadConstant` is a layer of iOS 11 and 12,
    which mostly run there (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Not
    measured on later systems.

    Grade: bit for bit.
    """

    name = "legacy_constant"
    follows = ("legacy_*",)  # they put constants into the layers that read them
    kinds = frozenset({"loadConstantND"})

    def rewrite(self, site: Site) -> None:
        """Load the constant with `loadConstant`, if that makes its shape."""
        (blob,) = site.outputs
        if blob in site.network.outputs:
            raise Refused("it is an output of the network")
        shape = site.sizes(blob)
        if len(shape) != PERMUTED:
            raise Refused(f"it has {len(shape)} axes; loadConstant makes {PERMUTED}")
        if shape[:2] != (1, 1):
            sequence, batch = shape[:2]
            raise Refused(f"its sequence and batch are {sequence} and {batch}; those of loadConstant are 1")
        site.emit("loadConstant", [], [blob], shape=shape[2:], data=site.params.data)


@dataclass(frozen=True)
class LegacyConcat(LayerRewrite):
    """Concatenate along channels, sequences, rows and columns with the layers of iOS 11 and 12.

    Along channels (axis -3) and sequences (axis -5) it is `concat`. Along rows and columns each input is put
    into zeros of the size of the result, and those are added: exact for all numbers, except that -0 becomes 0.
    That writes the result once for each input and reads it again; switch it off with `spatial=False`. Channels
    that interleave are a `concat` and a convolution that orders them: exact for finite numbers, it costs C x C
    products for each pixel.

    Refuses when the inputs differ in the number of axes or in a size besides the axis, along the batch or axes
    in front of the sequence, when it interleaves along another axis than the channel or more than 512 channels,
    and where Core ML's own check wants more axes: three for `concat`, five along the sequence, two for
    `padding`, four for `convolution`.

    Why it helps: layers of the ND kind were reported off the ANE, `concat` on it (hollance/neural-engine,
    unsupported-layers; through Core ML, iOS 11 to 15). `padding` and `add` are layers of iOS 11 and 12, too,
    which mostly run there. Not measured on later systems.

    Grade: bit for bit.
    """

    name = "legacy_concat"
    tolerates_nonfinite = False
    """A join that is a product with zeros makes NaN of an infinity."""
    kinds = frozenset({"concatND"})
    spatial: bool = True
    """Also along rows and columns?"""

    def rewrite(self, site: Site) -> None:
        """Choose the layer by the axis."""
        rank = len(site.shape(site.outputs[0]))
        axis = from_end(site.params.axis, rank)
        _check_alike(site, axis)
        if axis not in LEAST_AXES:
            kept = "the layers of iOS 11 and 12 join channels, sequences, rows and columns"
            raise Refused(f"it joins along {_axis_in_words(axis, rank)}; {kept}")
        if rank < LEAST_AXES[axis]:
            wanted = f"Core ML's own check wants {LEAST_AXES[axis]}"
            raise Refused(f"it joins along the {NAMES[axis]} of {rank} axes; {wanted}")
        if site.params.interleave:
            _interleave(site, axis, rank)
        elif axis not in (HEIGHT, WIDTH):
            fields = {"sequenceConcat": True} if axis == SEQUENCE else {}
            site.emit("concat", site.inputs, site.outputs, **fields)
        elif not self.spatial:
            raise Refused(f"it joins along the {NAMES[axis]}, which `spatial` is switched off for")
        else:
            _join_padded(site, axis)


def _check_alike(site: Site, axis: int) -> None:
    """Refuse inputs that cannot be joined along an axis."""
    shapes = [list(site.shape(x)) for x in site.inputs]
    if len({len(shape) for shape in shapes}) > 1 or not shapes[0]:
        raise Refused(f"its inputs have {', '.join(str(len(s)) for s in shapes)} axes")
    for shape in shapes:
        shape[axis] = 0
    if any(shape != shapes[0] for shape in shapes):
        raise Refused("its inputs differ in more sizes than that of the axis")


def _join_padded(site: Site, axis: int) -> None:
    """Pad each input with zeros to the size of the result, and add them."""
    lengths = [site.sizes(x)[axis] for x in site.inputs]
    padded = []
    for i, x in enumerate(site.inputs):
        margins = (sum(lengths[:i]), sum(lengths[i + 1 :]))
        sides = (margins, NO_MARGIN) if axis == HEIGHT else (NO_MARGIN, margins)
        padded.append(site.put(constant_padding(*sides, value=0.0), x))
    site.emit("add", padded, site.outputs)


def _interleave(site: Site, axis: int, rank: int) -> None:
    """Concatenate channels, then order them: a0 a1 b0 b1 becomes a0 b0 a1 b1."""
    if axis != CHANNEL or rank < IMAGE:
        ordered = f"only channels of {IMAGE} axes or more can be ordered anew"
        raise Refused(f"it interleaves along {_axis_in_words(axis, rank)}; {ordered}")
    sizes = [site.sizes(x)[axis] for x in site.inputs]
    if len(set(sizes)) > 1 or sum(sizes) > MOST_MIXED:
        listed = ", ".join(map(str, sizes))
        raise Refused(f"it interleaves {listed} channels, not equally many, {MOST_MIXED} in all at most")
    order = np.arange(sum(sizes)).reshape(len(sizes), sizes[0]).T.ravel().tolist()
    site.chain([channel_picking(order, len(order))], site.emit("concat", site.inputs))


def _axis_in_words(axis: int, rank: int) -> str:
    return f"axis {axis} of {rank}" + (f", the {NAMES[axis]}" if axis in NAMES else "")


@dataclass(frozen=True)
class LegacySplit(LayerRewrite):
    """Split blobs with the layers of iOS 11 and 12.

    Equally many channels are a `split`; other parts of channels, rows or columns are a `slice` for each output
    that is read. A single output is its input.

    Refuses when the axis lies in front of the channels, when a blob is split into more equal parts than divide
    it, or when its length is dynamic. `split` takes three axes or more in Core ML's own check.

    Why it helps: layers of the ND kind were reported off the ANE; `split` and `slice` are of the first
    releases, which mostly run there (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to
    15). Not measured on later systems. Exact: numbers are only copied.

    Grade: bit for bit.
    """

    name = "legacy_split"
    kinds = frozenset({"splitND"})

    def rewrite(self, site: Site) -> None:
        """Choose by the axis and the sizes of the parts."""
        (x,) = site.inputs
        shape = site.shape(x)
        if len(site.outputs) == 1:
            site.forward(x)
            return
        axis = from_end(site.params.axis, len(shape))
        if axis not in SLICED:
            kept = "the layers of iOS 11 and 12 cut channels, rows and columns"
            raise Refused(f"it splits axis {axis} of {len(shape)}; {kept}")
        sizes = _sizes_of_parts(site, shape[axis])
        if axis == CHANNEL and len(set(sizes)) == 1:
            site.emit("split", [x], site.outputs, nOutputs=len(sizes))
            return
        begin = 0
        for blob, size in zip(site.outputs, sizes, strict=False):
            if site.network.is_read(blob):
                site.put(slicing(axis, range(begin, begin + size)), x, [blob])
            begin += size


def _sizes_of_parts(site: Site, length: int | None) -> list[int]:
    """Return the sizes of the parts of an axis of `length` elements."""
    if length is None:
        raise Refused("the length that is split is dynamic")
    if stated := [int(n) for n in site.params.splitSizes]:
        return stated
    count = len(site.outputs)
    if length % count:
        raise Refused(f"{length} do not divide into {count} equal parts, for which the format states no sizes")
    return [length // count] * count


@dataclass(frozen=True)
class LegacySlice(LayerRewrite):
    """Slice channels, rows and columns with the layers of iOS 11 and 12.

    Each axis that loses something is a `slice`; rows and columns without a stride are one `crop` together.
    Where nothing is lost, the input is passed on. `sliceBySize` from a constant beginning is treated alike.

    Refuses when an axis is taken away (squeezeMasks), walked backwards, or lies in front of the channels, when
    the layer states another number of axes than its input has, when nothing would be left, and when the length
    of a sliced axis or the beginning is dynamic.

    Why it helps: `slice` and `crop` are layers of iOS 11 and 12, which mostly run on the ANE
    (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15); of the slices of specification
    4 nothing was reported. Not measured on later systems. Exact: numbers are only copied.

    Grade: bit for bit.
    """

    name = "legacy_slice"
    kinds = frozenset({"sliceStatic", "sliceBySize"})

    def rewrite(self, site: Site) -> None:
        """Add a layer for each axis that loses something, channels first."""
        shape = site.shape(site.inputs[0])
        spans = (_static if site.node.kind == "sliceStatic" else _by_size)(site, shape)
        for axis, span in spans.items():
            if axis not in SLICED:
                kept = "the layers of iOS 11 and 12 slice channels, rows and columns"
                raise Refused(f"it slices axis {axis} of {len(shape)}; {kept}")
            if not span:
                raise Refused(f"nothing is left of axis {axis}")
        site.chain(_slices(shape, spans))


def _slices(shape: Shape, spans: Spans) -> list[Step]:
    """Return a `slice` for each axis; one `crop` cuts rows and columns if both are cut without a stride."""
    cropped = [axis for axis in (HEIGHT, WIDTH) if axis in spans and spans[axis].step == 1]
    if len(cropped) < 2 or len(shape) < LEAST_AXES[CHANNEL]:
        return [slicing(axis, spans[axis]) for axis in sorted(spans)]
    edges = [(spans[axis].start, _fixed_length(shape[axis]) - spans[axis].stop) for axis in cropped]
    channels = [slicing(axis, span) for axis, span in spans.items() if axis == CHANNEL]
    return [*channels, ("crop", {"cropAmounts": border_amounts(*edges)})]


def _static(site: Site, shape: Shape) -> Spans:
    """Return the spans of a `sliceStatic`; indices beyond the axis are its ends, as in numpy."""
    p, rank = site.params, len(shape)
    if len(p.beginIds) != rank:
        raise Refused(f"it states {len(p.beginIds)} axes for a blob of {rank}")
    if any(of_each(p.squeezeMasks, rank, False)):
        raise Refused("it removes an axis, but keeps one position of it")
    masks = zip(of_each(p.beginMasks, rank, 0), of_each(p.endMasks, rank, 0), strict=True)
    strides = of_each(p.strides, rank, 1)
    spans = {}
    for i, (no_begin, no_end) in enumerate(masks):
        begin = None if no_begin else int(p.beginIds[i])
        end = None if no_end else int(p.endIds[i])
        if strides[i] < 1:
            raise Refused(f"its stride along axis {i - rank} is {strides[i]}, not positive")
        if not begin and end is None and strides[i] == 1:
            continue
        length = _fixed_length(shape[i])
        span = range(length)[begin : end : strides[i]]
        if len(span) != length:
            spans[i - rank] = span
    return spans


def _by_size(site: Site, shape: Shape) -> Spans:
    """Return the span of a `sliceBySize`."""
    axis, size = from_end(site.params.axis, len(shape)), int(site.params.size)
    value = site.constant(site.inputs[1])
    if value is None:
        raise Refused("its beginning is dynamic")
    begin, length = int(value.flat[0]), _fixed_length(shape[axis])
    if size < 1 or begin < 0 or begin + size > length:
        raise Refused(f"it takes {size} from {begin} on, of {length}")
    return {axis: range(begin, begin + size)} if size < length else {}


def _fixed_length(length: int | None) -> int:
    if length is None:
        raise Refused("the length of a sliced axis is dynamic")
    return length


@dataclass(frozen=True)
class LegacyGather(LayerRewrite):
    """Write a gather of fixed channels, rows or columns as slices, or as a convolution that picks channels.

    Indices at even distances are one `slice`. Channels in a few such runs (option `runs`: the most) are slices
    and a `concat`, else a 1x1 `convolution` with one 1 in each kernel, which costs a product for each channel
    that is read and made, for each pixel (option `channels`: the most of either). All indices in their order:
    nothing.

    Refuses when the indices are dynamic (for `convolution`: or a size of the blob), are not in one row (a
    scalar, a table), or lie outside; rows and columns at uneven distances, as the layers join channels only; an
    axis before the channels; and where Core ML's own check wants more axes: 4 for `convolution`.

    Why it helps: gather was reported off the ANE, `slice`, `concat` and `convolution` mostly on it
    (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Not measured on later systems.
    Exact for finite numbers: each is moved, or taken 1 time beside zeros; an infinite one in a pixel makes the
    others of a convolution NaN.

    Grade: bit for bit.
    """

    name = "legacy_gather"
    tolerates_nonfinite = False
    """A selection that is a product with zeros makes NaN of an infinity."""
    kinds = frozenset({"gather"})

    runs: int = 4
    """The most slices that are joined; beyond, channels are picked by a convolution."""
    channels: int = MOST_MIXED
    """The most channels that such a convolution may read or make."""

    def rewrite(self, site: Site) -> None:
        """Add one slice if possible, else slices, else a convolution."""
        x, indices = site.inputs
        rank = len(site.shape(x))
        axis = from_end(site.params.axis, rank)
        if axis not in SLICED:
            raise Refused(f"it gathers along axis {axis} of {rank}, before the channels")
        size = site.shape(x)[axis]
        if size is None:
            raise Refused("the length of the axis is dynamic")
        picks = _picks(site, indices, size)
        runs = _runs(picks)
        if picks == list(range(size)):
            site.forward(x)
        elif len(runs) == 1:
            site.chain([slicing(axis, runs[0])])
        elif axis != CHANNEL:
            found = f"its {len(picks)} indices along the {NAMES[axis]} are {len(runs)} slices"
            raise Refused(f"{found}, and the layers of iOS 11 and 12 join channels only")
        elif len(runs) <= self.runs:
            site.emit("concat", [site.put(slicing(CHANNEL, run), x) for run in runs], site.outputs)
        else:
            self._pick(site, picks, f"it takes {len(runs)} slices, more than {self.runs}", size)

    def _pick(self, site: Site, picks: Sequence[int], why: str, size: int) -> None:
        """Add a convolution that picks channels; `why` says that slices are too many."""
        x, most = site.inputs[0], max(len(picks), size)
        if (rank := len(site.shape(x))) < IMAGE:
            wanted = f"Core ML's own check wants {IMAGE} axes for convolution, and there are {rank}"
            raise Refused(f"{why}; {wanted}")
        if most > self.channels:
            wanted = f"{most} channels are more than {self.channels}; raise `runs` or `channels`"
            raise Refused(f"{why}, and {wanted}")
        site.sizes(x)  # refuses a dynamic size: the result of a convolution would have another one
        site.chain([channel_picking(picks, size)])


def _picks(site: Site, blob: str, size: int) -> list[int]:
    """Return the indices, counted from the beginning of an axis of `size` elements."""
    value = site.constant(blob)
    if value is None:
        raise Refused(f"its indices {blob!r} are dynamic")
    if value.ndim != 1:
        raise Refused(f"its indices have the shape {value.shape}, not [n], so that the result has other axes")
    if not value.size or (value != np.floor(value)).any():
        raise Refused("its indices are none, or no whole numbers")
    if value.min() < -size or value.max() >= size:
        outside = value.min() if value.min() < -size else value.max()
        raise Refused(f"index {outside:g} lies outside of {size}")
    return [int(i) % size for i in value]


def _runs(picks: Sequence[int]) -> list[range]:
    """Return indices as evenly spaced runs upwards: 0, 2, 4, 1, 2 are range(0, 5, 2) and range(1, 3)."""
    runs: list[range] = []
    for pick in picks:
        last = runs[-1] if runs else range(0)
        if len(last) == 1 and pick > last[0]:
            runs[-1] = range(last[0], pick + 1, pick - last[0])
        elif len(last) > 1 and pick == last[-1] + last.step:
            runs[-1] = range(last.start, pick + 1, last.step)
        else:
            runs.append(range(pick, pick + 1))
    return runs


@dataclass(frozen=True)
class LegacyPad(LayerRewrite):
    """Pad rows, columns and channels with the layers of iOS 11 and 12.

    Rows and columns are a `padding`. More channels are some channels of the blob, times 0 plus the number,
    after or before it: no weights, at the cost of writing the blob again. The channels that are there stay bit
    for bit; the new ones are exact as long as those that they are made of are finite (NaN else). Switch that
    off with `channels=False`. Where nothing is padded, the input is passed on. Amounts from a second input must
    be constant; sizes of the result (padToGivenOutputSizeMode) become amounts.

    Refuses when the batch or the sequence is padded, when the channels become more than eight times as many at
    either end, when amounts or sizes that count are dynamic, and where Core ML's own check wants more axes: two
    for `padding`, three for `concat`.

    Why it helps: `padding`, `slice` and linear activations are layers of iOS 11 and 12, which mostly run on the
    ANE, `concat` was seen there (hollance/neural-engine, unsupported-layers; fredyshox/ANECompat; through Core
    ML, iOS 11 to 15); of `constantPad` nothing was reported. Not measured on later systems.

    Grade: proved.
    """

    name = "legacy_pad"
    tolerates_nonfinite = False
    """A padding that is a product with zeros makes NaN of an infinity."""
    kinds = frozenset({"constantPad"})
    channels: bool = True
    """Pad the channels too?"""

    def rewrite(self, site: Site) -> None:
        """Pad channels first, so that the larger blob is written last."""
        margins, x = _margins(site), site.inputs[0]
        self._check(site, margins, len(site.shape(x)))
        height, width = (margins.get(axis, NO_MARGIN) for axis in (HEIGHT, WIDTH))
        pads_image = HEIGHT in margins or WIDTH in margins
        if CHANNEL in margins:
            x = _pad_channels(site, x, margins[CHANNEL], None if pads_image else site.outputs)
        if pads_image:
            site.chain([constant_padding(height, width, site.params.value)], x)
        elif not margins:
            site.forward(x)

    def _check(self, site: Site, margins: dict[int, Margins], rank: int) -> None:
        """Refuse what the layers of iOS 11 and 12 cannot pad."""
        if front := [axis for axis in margins if axis < CHANNEL]:
            kept = "the layers of iOS 11 and 12 pad rows, columns and channels"
            raise Refused(f"it pads axis {front[0]} of {rank}; {kept}")
        if margins and rank < LEAST_AXES[WIDTH]:
            raise Refused(f"the blob has {rank} axis; Core ML's own check wants {LEAST_AXES[WIDTH]} or more")
        if CHANNEL not in margins:
            return
        if not self.channels:
            raise Refused("it pads the channels, which `channels` is switched off for")
        count, most = site.sizes(site.inputs[0])[CHANNEL], max(margins[CHANNEL])
        if most > MOST_COPIES * count:
            raise Refused(f"it adds {most} channels to {count}, more than {MOST_COPIES} times as many")


def _margins(site: Site) -> dict[int, Margins]:
    """Return each axis that is padded, from the end, and its margins."""
    amounts = [int(n) for n in site.params.padAmounts]
    if len(site.inputs) > 1:
        value = site.constant(site.inputs[1])
        if value is None:
            raise Refused("its amounts are dynamic")
        amounts = [int(n) for n in value.flat]
    rank = len(site.shape(site.inputs[0]))
    if len(amounts) != 2 * rank:
        raise Refused(f"it states {len(amounts)} amounts for a blob of {rank} axes")
    pairs = list(zip(amounts[::2], amounts[1::2], strict=True))
    if site.params.padToGivenOutputSizeMode and any(amounts):  # a size of 0 asks for nothing
        sizes = site.sizes(site.inputs[0])
        pairs = [(max(a - n, 0), max(b - n, 0)) for (a, b), n in zip(pairs, sizes, strict=True)]
    return {i - rank: pair for i, pair in enumerate(pairs) if any(pair)}


def _pad_channels(site: Site, x: str, margins: Margins, outputs: tuple[str, ...] | None) -> str:
    """Concatenate `x` with channels that hold the number: channels of its own, times 0 plus the number.

    Example: 5 channels after 2 are two copies of both channels and one of the first.
    """
    count = site.sizes(x)[CHANNEL]

    def filled(width: int) -> str:
        part = site.put(slicing(CHANNEL, range(width)), x) if width < count else x
        return site.linear(part, 0.0, site.params.value)

    before, after = ([filled(min(count, n - at)) for at in range(0, n, count)] for n in margins)
    return site.emit("concat", [*before, x, *after], outputs)
