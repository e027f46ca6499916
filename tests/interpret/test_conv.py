"""Convolutions and pooling: against loops over their definition, and against coremltools' own expectations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from closeness import assert_close

from anesurgery.mil import Array, ct

RNG = np.random.default_rng(0)
OneOp = Callable[..., list[Array]]
Pads = list[tuple[int, int]]
ALL: Any = slice(None)

AXES = [1, 2, 3]
SIZES, KERNEL, STRIDES, DILATIONS = [7, 8, 5], [3, 2, 3], [2, 3, 1], [2, 1, 2]
CUSTOM = [(1, 1), (2, 0), (0, 3)]


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def flat(pads: Pads) -> list[int]:
    return [amount for pair in pads for amount in pair]


def same(sizes: list[int], spans: list[int], strides: list[int], lower: bool) -> Pads:
    """Padding such that there are ceil(size / stride) windows."""
    found = []
    for size, span, step in zip(sizes, spans, strides, strict=True):
        total = max(0, (-(-size // step) - 1) * step + span - size)
        pair = (total // 2, total - total // 2)
        found.append(pair[::-1] if lower else pair)
    return found


def places(shape: Any) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, shape))


def convolve(x: Array, w: Array, strides: Any, pads: Pads, dilations: Any, groups: int) -> Array:
    """Each output is the sum of products of a window with the kernel."""
    x = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *pads])
    spans = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True)]
    out = [(n - k) // s + 1 for n, k, s in zip(x.shape[2:], spans, strides, strict=True)]
    y = np.zeros((x.shape[0], w.shape[0], *out))
    wide, tall = x.shape[1] // groups, w.shape[0] // groups
    for place in places(out):
        spots = zip(place, strides, spans, dilations, strict=True)
        window = x[(ALL, ALL, *(slice(p * s, p * s + k, d) for p, s, k, d in spots))]
        for o in range(w.shape[0]):
            group = o // tall
            part = window[:, group * wide : (group + 1) * wide]
            y[(ALL, o, *place)] = (part * w[o]).sum(tuple(range(1, x.ndim)))
    return y


def spread(x: Array, w: Array, strides: Any, dilations: Any, groups: int) -> Array:
    """The full transposed convolution: each input adds the kernel, times itself, to the output."""
    spans = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True)]
    out = [(n - 1) * s + k for n, s, k in zip(x.shape[2:], strides, spans, strict=True)]
    wide, tall = x.shape[1] // groups, w.shape[1]
    y = np.zeros((x.shape[0], tall * groups, *out))
    for place, tap in itertools.product(places(x.shape[2:]), places(w.shape[2:])):
        at = [p * s + t * d for p, s, t, d in zip(place, strides, tap, dilations, strict=True)]
        for group in range(groups):
            part = slice(group * wide, (group + 1) * wide)
            made = x[(ALL, part, *place)].astype(np.float64) @ w[(part, ALL, *tap)]
            y[(ALL, slice(group * tall, (group + 1) * tall), *at)] += made
    return y


@pytest.mark.one_of(4)
@pytest.mark.parametrize("n", AXES)
@pytest.mark.parametrize("pad_type", ["valid", "same", "same_lower", "custom"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("form", ["plain", "strides", "dilations", "both"])
def test_conv(one_op: OneOp, n: int, pad_type: str, groups: int, form: str) -> None:
    s = STRIDES[:n] if form in ("strides", "both") else [1] * n
    d = DILATIONS[:n] if form in ("dilations", "both") else [1] * n
    x, w, bias = floats(2, 4, *SIZES[:n]), floats(6, 4 // groups, *KERNEL[:n]), floats(6)
    spans = [(k - 1) * e + 1 for k, e in zip(KERNEL[:n], d, strict=True)]
    pads = {
        "valid": [(0, 0)] * n,
        "custom": CUSTOM[:n],
        "same": same(SIZES[:n], spans, s, False),
        "same_lower": same(SIZES[:n], spans, s, True),
    }[pad_type]
    extra = {"pad": flat(pads)} if pad_type == "custom" else {}
    (found,) = one_op(
        "conv", x=x, weight=w, bias=bias, strides=s, dilations=d, groups=groups, pad_type=pad_type, **extra
    )
    expected = convolve(x, w, s, pads, d, groups) + bias.reshape(-1, *(1,) * n)
    assert_close(found, expected)


def test_conv_without_anything_that_is_optional(one_op: OneOp) -> None:
    x, w = floats(1, 2, 5, 6), floats(3, 2, 2, 2)
    (found,) = one_op("conv", ct.target.iOS15, x=x, weight=w)
    assert_close(found, convolve(x, w, [1, 1], [(0, 0)] * 2, [1, 1], 1))


@pytest.mark.parametrize("per_channel", [True, False])
def test_conv_quantized(one_op: OneOp, per_channel: bool) -> None:
    x = floats(1, 2, 5, 6)
    w = RNG.integers(0, 256, (3, 2, 2, 2)).astype(np.uint8)
    scale, shift = (floats(3), floats(3)) if per_channel else (floats(1), floats(1))
    (found,) = one_op(
        "conv_quantized",
        ct.target.iOS15,
        x=x,
        weight=w,
        quantization_type="linear",
        quant_scale=scale,
        quant_bias=shift,
        strides=[2, 1],
        pad_type="custom",
        pad=[1, 0, 0, 2],
    )
    real = w * scale.reshape(-1, 1, 1, 1) + shift.reshape(-1, 1, 1, 1)
    assert_close(found, convolve(x, real, [2, 1], [(1, 0), (0, 2)], [1, 1], 1))


def cut(full: Array, begins: list[int], lengths: list[int], bias: Array) -> Array:
    """From `begins` on; where the output is longer than the full result it holds the bias alone."""
    n = len(lengths)
    y = np.zeros((*full.shape[:2], *lengths))
    part = full[(ALL, ALL, *(slice(b, b + size) for b, size in zip(begins, lengths, strict=True)))]
    y[(ALL, ALL, *(slice(0, size) for size in part.shape[2:]))] = part
    return y + bias.reshape(-1, *(1,) * n)


@pytest.mark.one_of(21)
@pytest.mark.parametrize("n", AXES)
@pytest.mark.parametrize("pad_type", ["valid", "same", "custom"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("form", ["plain", "strides", "dilations", "both"])
@pytest.mark.parametrize("extra", [None, -1, 0, 1, 4])
def test_conv_transpose(
    one_op: OneOp, n: int, pad_type: str, groups: int, form: str, extra: int | None
) -> None:
    """`extra` is how much longer the asked `output_shape` is than the shape without one."""
    s = STRIDES[:n] if form in ("strides", "both") else [1] * n
    d = DILATIONS[:n] if form in ("dilations", "both") else [1] * n
    sizes = [4, 3, 3][:n]
    x, w = floats(2, 4, *sizes), floats(4, 6 // groups, *KERNEL[:n])
    bias = floats(6)
    full = spread(x, w, s, d, groups)
    lengths, begins = list(full.shape[2:]), [0] * n
    inputs: dict[str, Any] = {"pad_type": pad_type}
    if pad_type == "custom":
        inputs["pad"] = flat(CUSTOM[:n])
        begins = [begin for begin, _ in CUSTOM[:n]]
        lengths = [size - begin - end for size, (begin, end) in zip(lengths, CUSTOM[:n], strict=True)]
    if pad_type == "same":
        lengths = [size * step for size, step in zip(sizes, s, strict=True)]
    if extra is not None:
        lengths = [size + extra for size in lengths]
        inputs["output_shape"] = [2, 6, *lengths]
    if pad_type == "same":  # what a convolution with this padding would have added
        begins = [max(whole - size, 0) // 2 for whole, size in zip(full.shape[2:], lengths, strict=True)]
    if min(lengths) < 1:
        return
    (found,) = one_op(
        "conv_transpose", x=x, weight=w, bias=bias, strides=s, dilations=d, groups=groups, **inputs
    )
    assert_close(found, cut(full, begins, lengths, bias))


@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (4, 2), (2, 3), (5, 1)])
def test_conv_transpose_with_same_padding_is_the_gradient_of_such_a_conv(
    one_op: OneOp, kernel: int, stride: int
) -> None:
    w, y, length = floats(3, 2, kernel), floats(1, 3, 6), 6 * stride - (stride > 1)
    (found,) = one_op(
        "conv_transpose", x=y, weight=w, strides=[stride], pad_type="same", output_shape=[1, 2, length]
    )
    for place in range(length):
        for channel in range(2):
            unit = np.zeros((1, 2, length), np.float32)
            unit[0, channel, place] = 1
            made = convolve(unit, w, [stride], same([length], [kernel], [stride], False), [1], 1)
            assert abs((made * y).sum() - found[0, channel, place]) < 1e-5


def pool(
    x: Array,
    kernel: list[int],
    strides: list[int],
    pads: Pads,
    counts: list[int],
    reduce: Callable[[Array, int], Any],
) -> Array:
    """Each window reduced: `reduce` gets its elements inside x, and how many lie in x or its padding."""
    y = np.zeros((*x.shape[:2], *counts))
    for place in places(counts):
        spans, padded = [], 1
        for p, k, s, (begin, end), size in zip(place, kernel, strides, pads, x.shape[2:], strict=True):
            first = p * s - begin
            spans.append(slice(max(first, 0), max(min(first + k, size), 0)))
            padded *= min(first + k, size + end) - first
        window = x[(ALL, ALL, *spans)].reshape(*x.shape[:2], -1)
        for b, c in places(x.shape[:2]):
            y[(b, c, *place)] = reduce(window[b, c], padded)
    return y


REDUCE: dict[str, tuple[str, dict[str, Any], Callable[[Array, int], Any]]] = {
    "max": ("max_pool", {}, lambda v, _: v.max()),
    "mean": ("avg_pool", {}, lambda v, n: v.sum() / n),
    "mean of data": ("avg_pool", {"exclude_padding_from_average": True}, lambda v, _: v.mean()),
    "l2": ("l2_pool", {}, lambda v, _: np.sqrt((v**2).sum())),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("n", AXES)
@pytest.mark.parametrize("pad_type", ["valid", "same", "same_lower", "custom"])
@pytest.mark.parametrize("kind", REDUCE)
@pytest.mark.parametrize("kernel", [[3, 2, 2], [4, 3, 4]])
def test_pooling(one_op: OneOp, n: int, pad_type: str, kind: str, kernel: list[int]) -> None:
    op_type, inputs, reduce = REDUCE[kind]
    if op_type == "l2_pool" and n == 3:
        return
    x, k, s = floats(2, 3, *SIZES[:n]), kernel[:n], STRIDES[:n]
    pads = {
        "valid": [(0, 0)] * n,
        "custom": [(1, 1), (1, 0), (0, 1)][:n],
        "same": same(SIZES[:n], k, s, False),
        "same_lower": same(SIZES[:n], k, s, True),
    }[pad_type]
    extra = {"pad": flat(pads)} if pad_type == "custom" else {}
    (found,) = one_op(op_type, x=x, kernel_sizes=k, strides=s, pad_type=pad_type, **inputs, **extra)
    counts = [
        (size + sum(pair) - width) // step + 1
        for size, pair, width, step in zip(SIZES, pads, k, s, strict=False)
    ]
    assert_close(found, pool(x, k, s, pads, counts, reduce))


def ceiling(size: int, width: int, step: int, pad: int) -> int:
    """The documented number of windows."""
    count = math.ceil((size + 2 * pad - width) / step) + 1
    return count - 1 if pad and (count - 1) * step >= size + pad else count


@pytest.mark.one_of(6)
@pytest.mark.parametrize("kind", [kind for kind in REDUCE if kind != "mean"])  # averages: see below
@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("pad", [0, 1, 2])
def test_pooling_that_rounds_up(one_op: OneOp, kind: str, width: int, step: int, pad: int) -> None:
    op_type, inputs, reduce = REDUCE[kind]
    if pad >= width or step > width:  # windows of padding alone
        return
    for sizes in ([6, 7], [9], [8]):
        n = len(sizes)
        x, k, s = floats(1, 2, *sizes), [width] * n, [step] * n
        pads = [(pad, pad)] * n
        (found,) = one_op(
            op_type, x=x, kernel_sizes=k, strides=s, pad_type="custom", pad=flat(pads), ceil_mode=True, **inputs
        )
        counts = [ceiling(size, width, step, pad) for size in sizes]
        assert_close(found, pool(x, k, s, pads, counts, reduce))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("include", [True, False])
def test_averages_that_round_up_count_what_lies_beyond_as_padding(
    one_op: OneOp, width: int, include: bool
) -> None:
    """Without padding in the count they are those of torch, which never counts what lies beyond."""
    for size, step, pad in itertools.product((6, 7, 8), (1, 2, 3), (0, 1)):
        x = floats(1, 2, size, size + 1)
        if step > width:
            continue
        (found,) = one_op(
            "avg_pool",
            x=x,
            kernel_sizes=[width, width],
            strides=[step, step],
            pad_type="custom",
            pad=[pad] * 4,
            ceil_mode=True,
            exclude_padding_from_average=not include,
        )
        expected = F.avg_pool2d(torch.from_numpy(x), width, step, pad, True, False).numpy()
        if include:
            ones = F.avg_pool2d(torch.ones(1, 1, size, size + 1), width, step, pad, True, True, width**2)
            inside = F.avg_pool2d(torch.ones(1, 1, size, size + 1), width, step, pad, True, False, width**2)
            assert torch.equal(ones, inside)  # of the data alone
            expected = expected * ones.numpy()
        assert_close(found, expected)


def test_expectations_of_coremltools_about_pooling(one_op: OneOp) -> None:
    x = np.array([[[[-10, -6], [-7, 9]], [[-3, 0], [11, 7]]]], np.float32)
    form: dict[str, Any] = {"kernel_sizes": [2, 3], "strides": [1, 3], "pad_type": "same"}
    (found,) = one_op("l2_pool", x=x, **form)
    assert_close(found, np.array([[[[16.309507], [11.401754]], [[13.379088], [13.038404]]]]))
    (found,) = one_op(
        "avg_pool",
        x=np.arange(1, 5, dtype=np.float32).reshape(1, 1, 2, 2),
        kernel_sizes=[2, 2],
        pad_type="same_lower",
    )
    assert_close(found, np.array([[[[0.25, 0.75], [1, 2.5]]]]))
