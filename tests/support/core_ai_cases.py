"""Ops on small inputs, by the file of lowerings that writes them; each must mean the same to Apple."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.mil import ct, mb, types
from anesurgery.ops import names

R = np.random.default_rng(0)
BUILD: Any = mb
"""The builder, to type checkers of any type."""


def f(*shape: int) -> Any:
    return R.standard_normal(shape).astype(np.float32)


def i(low: int, high: int, *shape: int) -> Any:
    return R.integers(low, high, shape).astype(np.int32)


@dataclass(frozen=True)
class Case:
    """One op in one form."""

    name: str
    """The op type, and after a blank what is special."""
    inputs: tuple[Any, ...]
    build: Callable[..., Any]
    """Builds it on the inputs; gives a value, or several."""
    opset: Any = ct.target.iOS17

    @property
    def op_type(self) -> str:
        """The op type."""
        return self.name.split()[0]


def _one(op_type: str, *arrays: Any, note: Any = "", **options: Any) -> Case:
    """An op of its first operands, by the names x and y."""
    keys = ("x", "y")[: len(arrays)]

    def build(*values: Any) -> Any:
        return getattr(BUILD, op_type)(**dict(zip(keys, values, strict=True)), **options)

    return Case(f"{op_type} {note}".strip(), arrays, build)


X, Y, POS = f(2, 3, 4), f(2, 3, 4), np.abs(f(2, 3, 4)) + 0.5
N, M = i(-7, 8, 2, 3), i(1, 5, 2, 3)
EDGES = np.array(
    [-2.5, -1.5, -0.5, -0.0, 0.0, 0.5, 1.5, 2.5, 3.5, 20.0, -20.0, math.inf, -math.inf], np.float32
)
UNIT = np.linspace(-0.9, 0.9, 7, dtype=np.float32)
BOTH = np.array([[True, False], [True, True]])
PLAIN = names(
    "abs atan ceil cos cosh erf exp exp2 floor identity relu relu6 round sigmoid sign silu sin sinh softplus "
    "softsign square tan tanh"
)
FORMS: dict[str, dict[str, Any]] = {
    "clip": {"alpha": -1.0, "beta": 1.0},
    "threshold": {"alpha": 0.5},
    "elu": {"alpha": 0.7},
    "leaky_relu": {"alpha": 0.1},
    "clamped_relu": {"alpha": 0.1, "beta": 2.0},
    "linear_activation": {"alpha": 2.0, "beta": 0.5},
    "scaled_tanh": {"alpha": 2.0, "beta": 0.5},
    "sigmoid_hard": {"alpha": 0.3, "beta": 0.4},
    "thresholded_relu": {"alpha": 0.5},
    "prelu": {"alpha": f(3)},
    "softplus_parametric": {"alpha": f(3), "beta": f(3)},
}
ELEMENTWISE = [
    *(_one(name, EDGES if name not in ("tan", "sin", "cos", "cosh", "sinh") else X) for name in sorted(PLAIN)),
    *(_one(name, UNIT) for name in ("acos", "asin", "atanh")),
    *(_one(name, POS) for name in ("log", "sqrt")),
    *(_one(name, POS, epsilon=0.1) for name in ("rsqrt", "inverse")),
    *(_one(name, f(1, 3, 2, 2), **form) for name, form in FORMS.items()),
    *(_one(name, X, f(4)) for name in ("add", "sub", "mul", "maximum", "minimum", "real_div")),
    *(_one(name, N, M, note="of integers") for name in ("add", "sub", "mul", "real_div", "floor_div", "mod")),
    *(_one(name, X * 5, POS) for name in ("floor_div", "mod")),
    _one("pow", POS, Y),
    *(
        Case(
            f"{name} of {kind}",
            (a, b),
            lambda x, y, name=name: mb.cast(x=getattr(BUILD, name)(x=x, y=y), dtype="int32"),
        )
        for name in ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
        for kind, a, b in (("integers", N, M), ("numbers", EDGES, EDGES[::-1].copy()))
    ),
    *(
        Case(
            name,
            (X, Y),
            lambda x, y, name=name: mb.cast(
                x=getattr(BUILD, name)(x=mb.greater(x=x, y=0.0), y=mb.greater(x=y, y=0.0)), dtype="fp32"
            ),
        )
        for name in ("logical_and", "logical_or", "logical_xor")
    ),
    Case("logical_not", (X,), lambda x: mb.cast(x=mb.logical_not(x=mb.greater(x=x, y=0.0)), dtype="fp32")),
    Case("select", (X, Y), lambda x, y: mb.select(cond=mb.greater(x=x, y=y), a=x, b=y)),
    *(_one("gelu", X, mode=mode) for mode in ("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION")),
    *(
        Case(
            f"cast to {to} and back",
            (EDGES[:11],),
            lambda x, to=to: mb.cast(x=mb.cast(x=x, dtype=to), dtype="fp32"),
        )
        for to in ("int32", "int8", "int16", "bool", "fp16")
    ),
    Case("sub before a product", (f(1, 3, 5, 5),), lambda x: _scaled_after_convolution(x)),
]


def _scaled_after_convolution(x: Any) -> Any:
    """(conv(x) - m) * s, in which Apple's rewrites lose the sign of m."""
    y = mb.conv(x=x, weight=np.ones((4, 3, 2, 2), np.float32), pad_type="valid")
    shift = np.arange(1, 5, dtype=np.float32).reshape(1, 4, 1, 1)
    return mb.mul(x=mb.sub(x=y, y=shift), y=shift)


W, WEIGHT, BIAS = f(2, 4, 5), f(5, 4), f(5)
PRODUCTS = [
    _one("matmul", X, W),
    _one("matmul", X, f(2, 3, 4), note="transposed", transpose_y=True),
    _one("matmul", f(2, 4, 3), W, note="x transposed", transpose_x=True),
    _one("matmul", f(2, 5, 3, 4), f(4, 6), note="broadcast"),
    _one("linear", X, weight=WEIGHT, bias=BIAS),
    _one("linear", X, note="without bias", weight=WEIGHT),
    *(_one("softmax", X, axis=axis) for axis in (1, -1)),
    Case(
        "einsum",
        (f(1, 2, 3, 4), f(1, 4, 3, 5)),
        lambda x, y: mb.einsum(values=(x, y), equation="nchw,nwhu->nchu"),
    ),
    Case(
        "einsum of 3", (f(2, 3, 4), f(4, 3, 5)), lambda x, y: mb.einsum(values=(x, y), equation="chw,whr->chr")
    ),
    Case(
        "scaled_dot_product_attention",
        (f(1, 2, 5, 4), f(1, 2, 6, 4), f(5, 6)),
        lambda q, k, m: mb.scaled_dot_product_attention(query=q, key=k, value=k, attn_mask=m),
        ct.target.iOS18,
    ),
    Case(
        "scaled_dot_product_attention of booleans",
        (f(1, 2, 5, 4), f(1, 2, 6, 4), np.abs(f(5, 6))),
        lambda q, k, m: mb.scaled_dot_product_attention(
            query=q, key=k, value=k, attn_mask=mb.greater(x=m, y=0.3)
        ),
        ct.target.iOS18,
    ),
]

IMAGE, KERNEL = f(1, 4, 9, 8), f(6, 4, 3, 3)
PADS = {"valid": {}, "same": {}, "same_lower": {}, "custom": {"pad": [1, 2, 0, 1]}}
CONVOLUTIONS = [
    *(
        _one("conv", IMAGE, weight=KERNEL, bias=f(6), pad_type=pads, strides=strides, **more)
        for pads, more in PADS.items()
        for strides in ([1, 1], [2, 3])
    ),
    _one("conv", IMAGE, note="in groups", weight=f(6, 2, 2, 2), groups=2, dilations=[2, 1], pad_type="same"),
    _one("conv", f(1, 4, 9), note="along one axis", weight=f(6, 4, 3), pad_type="same", strides=[2]),
    _one("conv", f(1, 2, 5, 4, 3), note="along three", weight=f(3, 2, 2, 2, 2), pad_type="valid"),
    *(
        _one("conv_transpose", IMAGE, weight=f(4, 3, 3, 3), bias=f(3), pad_type=pads, strides=[2, 2], **more)
        for pads, more in {**PADS, "custom": {"pad": [1, 0, 1, 1]}}.items()
        if pads != "same_lower"
    ),
    _one(
        "conv_transpose",
        IMAGE,
        note="to a shape",
        weight=f(4, 3, 3, 3),
        strides=[2, 2],
        pad_type="custom",
        pad=[1, 1, 1, 1],
        output_shape=[1, 3, 18, 16],
    ),
    _one("conv_transpose", IMAGE, note="in groups", weight=f(4, 2, 3, 3), groups=2, dilations=[2, 2]),
    _one("conv_transpose", f(1, 4, 9), note="along one axis", weight=f(4, 3, 3), strides=[2]),
    *(
        _one(name, IMAGE, note=pads, kernel_sizes=[3, 2], strides=[2, 1], pad_type=pads, **more)
        for name in ("max_pool", "avg_pool", "l2_pool")
        for pads, more in {**PADS, "custom": {"pad": [1, 1, 0, 1]}}.items()
    ),
    *(
        _one(name, IMAGE, note="ceil", kernel_sizes=[2, 2], strides=[2, 2], pad_type="valid", ceil_mode=True)
        for name in ("max_pool", "avg_pool")
    ),
    _one(
        "avg_pool",
        IMAGE,
        note="of data alone",
        kernel_sizes=[3, 3],
        strides=[2, 2],
        pad_type="same",
        exclude_padding_from_average=True,
    ),
    _one("max_pool", f(1, 2, 9), note="along one axis", kernel_sizes=[2], strides=[2], pad_type="valid"),
]

TIES = np.array([[1, 3, 3, 2], [-1, -5, -5, 0], [7, 7, 7, 7]], np.float32)
HUGE = np.array([[1000.0, 1000.0], [-1000.0, -1000.0], [-math.inf, -math.inf]], np.float32)
REDUCTIONS = [
    *(
        _one(f"reduce_{name}", POS, axes=[0, -1], keep_dims=keep)
        for name in ("sum", "mean", "max", "min", "prod", "l1_norm", "l2_norm", "sum_square", "log_sum")
        for keep in (True, False)
    ),
    *(
        _one(f"reduce_{name}", N, note="of integers", axes=[1])
        for name in ("sum", "mean", "max", "min", "prod")
    ),
    _one("reduce_log_sum_exp", HUGE, axes=[1]),
    *(_one(f"reduce_arg{name}", TIES, axis=1, keep_dims=False) for name in ("max", "min")),
    _one("reduce_argmin", np.array([[-5, -(2**31), 3]], np.int32), note="of integers", axis=1),
    *(
        _one("cumsum", X, note=f"{exclusive} {reverse}", axis=1, exclusive=exclusive, reverse=reverse)
        for exclusive in (False, True)
        for reverse in (False, True)
    ),
    *(_one(name, TIES, note=f"{up}", axis=1, ascending=up) for name in ("argsort",) for up in (True, False)),
    *(_one("topk", TIES, note=f"{up}", axis=1, ascending=up, k=2) for up in (True, False)),
    _one("layer_norm", X, axes=[-1], gamma=f(4), beta=f(4)),
    _one("layer_norm", X, note="over two axes", axes=[1, 2]),
    _one("instance_norm", IMAGE, gamma=f(4), beta=f(4)),
    _one("batch_norm", IMAGE, mean=f(4), variance=np.abs(f(4)) + 0.1, gamma=f(4), beta=f(4)),
    _one("l2_norm", IMAGE),
    *(_one("local_response_norm", f(1, 6, 3, 3), note=str(size), size=size, alpha=0.1) for size in (3, 4)),
]

G, SQUARE = f(4, 6), f(1, 8, 4, 6)
SLICES: dict[str, dict[str, Any]] = {
    "backwards": {"begin": [3, 5], "end": [0, 0], "stride": [-1, -2], "end_mask": [True, False]},
    "from the end": {"begin": [-3, -2], "end": [-1, 6]},
    "one row": {"begin": [-1, 0], "end": [0, 0], "end_mask": [False, True], "squeeze_mask": [True, False]},
    "beyond": {"begin": [0, 2], "end": [9, 100], "stride": [1, 3]},
}
TENSORS = [
    _one("reshape", X, shape=[4, -1]),
    _one("expand_dims", X, axes=[0, -1]),
    _one("squeeze", f(1, 3, 1, 2), axes=[0, -2]),
    _one("transpose", X, perm=[2, 0, -2]),
    Case("flatten2d", (X,), lambda x: mb.flatten2d(x=x, axis=2), ct.target.iOS16),
    Case(
        "reshape_like",
        (X, f(6, 4)),
        lambda x, y: mb.reshape_like(x=x, ref_tensors=(y,), begins=[0], ends=[2], end_masks=[False]),
    ),
    *(
        Case(
            f"concat {mixed}",
            (G, f(4, 6)),
            lambda x, y, mixed=mixed: mb.concat(values=(x, y), axis=0, interleave=mixed),
        )
        for mixed in (False, True)
    ),
    Case("stack", (G, f(4, 6)), lambda x, y: mb.stack(values=(x, y), axis=1)),
    _one("split", G, split_sizes=[1, 2, 3], axis=1),
    _one("split", G, note="in equal parts", num_splits=2, axis=0),
    _one("tile", G, reps=[2, 1]),
    *(
        _one("pad", IMAGE, note=mode, pad=[1, 2, 3, 1], mode=mode, constant_val=2.0 * (mode == "constant"))
        for mode in ("constant", "reflect", "replicate")
    ),
    *(_one("slice_by_index", G, note=note, **form) for note, form in SLICES.items()),
    Case(
        "slice_by_index at computed places",
        (G, np.array([1, -4], np.int32)),
        lambda x, b: mb.slice_by_index(x=x, begin=b, end=mb.add(x=b, y=[2, 3])),
    ),
    _one("slice_by_size", G, begin=[1, 2], size=[2, -1]),
    Case(
        "slice_by_size at computed places",
        (G, np.array([1, 2], np.int32)),
        lambda x, b: mb.slice_by_size(x=x, begin=b, size=[2, 3]),
    ),
    Case(
        "slice_update",
        (G, f(2, 3)),
        lambda x, u: mb.slice_update(x=x, update=u, begin=[1, 0], end=[3, 6], stride=[1, 2]),
        ct.target.iOS18,
    ),
    Case(
        "slice_update at a computed row",
        (G, f(1, 6), np.array([2, 0], np.int32)),
        lambda x, u, b: mb.slice_update(
            x=x, update=u, begin=b, end=mb.add(x=b, y=[1, 0]), end_mask=[False, True]
        ),
        ct.target.iOS18,
    ),
    _one("band_part", G, lower=1, upper=2),
    Case("range_1d", (np.array([7], np.int32),), lambda n: mb.range_1d(start=1, end=mb.squeeze(x=n), step=2)),
    Case(
        "one_hot",
        (np.array([0, 3, 1], np.int32),),
        lambda x: mb.one_hot(indices=x, one_hot_vector_size=4, on_value=2.0, off_value=-1.0),
    ),
    Case("fill", (np.array([2, 3], np.int32),), lambda x: mb.fill(shape=x, value=2.5)),
    Case("fill_like", (G,), lambda x: mb.fill_like(ref_tensor=x, value=2.5)),
    _one("sliding_windows", G, axis=1, size=3, stride=2),
    Case("crop", (IMAGE,), lambda x: mb.crop(x=x, crop_height=[1, 2], crop_width=[0, 3]), ct.target.iOS16),
    _one("reverse", G, axes=[1]),
    Case("shape", (G,), lambda x: mb.add(x=mb.shape(x=mb.non_zero(x=x)), y=1)),
    Case("non_zero", (np.array([0, 1, 0, 2], np.float32),), lambda x: mb.non_zero(x=x)),
    _one("depth_to_space", SQUARE, block_size=2),
    _one("space_to_depth", SQUARE, block_size=2),
    _one("pixel_shuffle", SQUARE, upscale_factor=2),
    _one("pixel_unshuffle", SQUARE, downscale_factor=np.uint32(2)),
    _one("space_to_batch", f(1, 2, 5, 6), block_shape=[2, 3], paddings=[[1, 0], [0, 0]]),
    _one("batch_to_space", f(6, 2, 3, 4), block_shape=[2, 3], crops=[[1, 0], [0, 2]]),
]

CUBE = f(2, 3, 4)
MODES = ("add", "sub", "mul", "div", "max", "min", "update")
INDEXING = [
    *(
        Case(
            f"gather {axis}",
            (CUBE, i(0, 3, 2, 2)),
            lambda x, at, axis=axis: mb.gather(x=x, indices=at, axis=axis),
        )
        for axis in (1, 2)
    ),
    Case(
        "gather from the end",
        (G, np.array([-1, 0, 2], np.int32)),
        lambda x, at: mb.gather(x=x, indices=at, axis=0),
        ct.target.iOS16,
    ),
    *(
        Case(
            f"gather in batches {axis}",
            (CUBE, i(0, 3, 2, 2)),
            lambda x, at, axis=axis: mb.gather(x=x, indices=at, axis=axis, batch_dims=1),
        )
        for axis in (1, 2)
    ),
    *(
        Case(
            f"reverse_sequence {axes}",
            (CUBE, np.array([n, 1, n - 1, 0][: CUBE.shape[axes[1]]], np.int32)),
            lambda x, n, axes=axes: mb.reverse_sequence(x=x, lengths=n, seq_axis=axes[0], batch_axis=axes[1]),
        )
        for axes, n in (((2, 1), 4), ((-3, 2), 2))
    ),
    Case("gather_nd", (G, np.array([[0, 1], [3, 5]], np.int32)), lambda x, at: mb.gather_nd(x=x, indices=at)),
    Case(
        "gather_nd in batches",
        (CUBE, np.array([[[0], [2]], [[1], [1]]], np.int32)),
        lambda x, at: mb.gather_nd(x=x, indices=at, batch_dims=1),
    ),
    Case("gather_along_axis", (G, i(0, 6, 4, 3)), lambda x, at: mb.gather_along_axis(x=x, indices=at, axis=1)),
    *(
        Case(
            f"scatter_along_axis {mode}",
            (POS[0] + 1, f(2, 4)),
            lambda x, u, mode=mode: mb.scatter_along_axis(
                data=x, indices=np.array([[0, 2, 1, 2], [1, 1, 1, 0]], np.int32), updates=u, axis=0, mode=mode
            ),
        )
        for mode in MODES
    ),
    *(
        Case(
            f"scatter {mode} {at}",
            (G + 9, np.array(at, np.int32), np.abs(f(4, len(at))) + 1),
            lambda x, at, u, mode=mode: mb.scatter(data=x, indices=at, updates=u, axis=1, mode=mode),
            ct.target.iOS16,  # from iOS 17 on, negative indices are undefined
        )
        for mode in MODES
        for at in ([2, 0], [1], [-1, 0], [-1], [-2])
    ),
    Case(
        "scatter twice at one place",
        (G, f(4, 2)),
        lambda x, u: mb.scatter(data=x, indices=np.array([2, 2], np.int32), updates=u, axis=1, mode="add"),
    ),
    *(
        Case(
            f"scatter_nd {mode} {at}",
            (G, np.array(at, np.int32), f(2)),
            lambda x, at, u, mode=mode: mb.scatter_nd(data=x, indices=at, updates=u, mode=mode),
            ct.target.iOS16,
        )
        for mode in ("add", "update")
        for at in ([[0, 1], [3, 5]], [[0, -2], [-1, 5]])
    ),
]

SAMPLING = ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "DEFAULT", "OFFSET_CORNERS", "UNALIGN_CORNERS")
IMAGES = [
    *(
        _one(
            "upsample_bilinear",
            IMAGE,
            note=f"{align} {by}",
            scale_factor_height=by,
            scale_factor_width=by,
            align_corners=align,
        )
        for align in (True, False)
        for by in (2, 2.5, 0.5)
    ),
    *(
        _one("upsample_nearest_neighbor", IMAGE, note=str(by), scale_factor_height=by, scale_factor_width=by)
        for by in (2, 1.5)
    ),
    *(
        _one(
            "resize_bilinear",
            IMAGE,
            note=f"{mode} {h}",
            target_size_height=h,
            target_size_width=w,
            sampling_mode=mode,
        )
        for mode in SAMPLING
        for h, w in ((12, 11), (3, 4), (1, 1))
    ),
    *(
        _one("resize_nearest_neighbor", IMAGE, note=str(h), target_size_height=h, target_size_width=w)
        for h, w in ((18, 16), (13, 7), (12, 49))  # fp64 puts a place of 8 pixels on 49 a little before a pixel
    ),
    *(
        _one("resize", IMAGE, note=kind, shape=[5, 12], resized_dims=np.uint32(2), interpolation_mode=kind)
        for kind in ("LINEAR", "NEAREST_NEIGHBOR")
    ),
]

UNITS = (
    ("normalized_minus_one_to_one", True, 1),
    ("normalized_zero_to_one", False, 1),
    ("unnormalized", False, 4),
)
IMAGES += [
    Case(
        f"resample {sampling} {padding} {unit}",
        (f(2, 3, 5, 6), R.uniform(-1.5, 1.5, (2, 4, 3, 2)).astype(np.float32) * scale),
        lambda x, at, how=(sampling, padding, unit, align): mb.resample(
            x=x,
            coordinates=at,
            sampling_mode=how[0],
            padding_mode=how[1],
            padding_value=0.5,
            coordinates_mode=how[2],
            align_corners=how[3],
        ),
    )
    for sampling in ("bilinear", "nearest")
    for padding in ("constant", "border", "reflection", "symmetric")
    for unit, align, scale in UNITS
]


def _recurrent(op_type: str, gates: int, steps: int, ways: int = 1, **form: Any) -> Case:
    weights = {"weight_ih": f(gates * 4, 3), "weight_hh": f(gates * 4, 4), "bias": f(gates * 4)}
    if ways == 2:
        weights |= {f"{key}_back": f(*value.shape) for key, value in weights.items()}
    states = {"initial_h": f(2, 4 * ways)} | ({"initial_c": f(2, 4 * ways)} if op_type == "lstm" else {})

    def build(x: Any) -> Any:
        return getattr(BUILD, op_type)(x=x, **states, **weights, **form)

    note = " ".join(str(v) for v in (steps, *form.values()))
    return Case(f"{op_type} {note}", (f(steps, 2, 3),), build)


RECURRENT = [
    *(
        _recurrent("lstm", 4, n, output_sequence=True, direction=d)
        for n in (1, 5, 40)
        for d in ("forward", "reverse")
    ),
    *(_recurrent("lstm", 4, n, 2, output_sequence=True, direction="bidirectional") for n in (5, 40)),
    _recurrent("lstm", 4, 3, peephole=f(12), clip=0.5),
    *(
        _recurrent("gru", 3, n, output_sequence=True, direction=d)
        for n in (5, 40)
        for d in ("forward", "reverse")
    ),
    _recurrent("rnn", 1, 5, activation="relu"),
]

HALF = np.float16


def _stored(op_type: str, note: str, opset: Any = ct.target.iOS18, **parts: Any) -> Case:
    """A stored weight [4, 6] that is multiplied with x [2, 4]."""

    def build(x: Any) -> Any:
        weight = getattr(BUILD, op_type)(**parts)
        return mb.matmul(x=mb.cast(x=x, dtype="fp16"), y=weight)

    return Case(f"{op_type} {note}", (f(2, 4),), build, opset)


def _few(bits: int, *shape: int) -> Any:
    kinds = {
        1: "np_uint1_dtype",
        2: "np_uint2_dtype",
        3: "np_uint3_dtype",
        4: "np_uint4_dtype",
        6: "np_uint6_dtype",
    }
    numbers = R.integers(0, 1 << bits, shape).astype(np.uint8)
    return numbers.astype(getattr(types, kinds[bits])) if bits in kinds else numbers


def _sparse(x: Any) -> Any:
    data, mask = f(int(MASK.sum())).astype(HALF), MASK.astype(types.np_uint1_dtype)
    return mb.matmul(x=mb.cast(x=x, dtype="fp16"), y=mb.constexpr_sparse_to_dense(nonzero_data=data, mask=mask))


def _sparse_codes(x: Any) -> Any:
    codes = R.integers(-9, 9, int(MASK.sum())).astype(np.int8)
    mask, data = mb.constexpr_sparse_blockwise_shift_scale(
        data_mask=MASK.astype(types.np_uint1_dtype), nonzero_data=codes, scale=f(4, 1).astype(HALF)
    )
    return mb.matmul(x=mb.cast(x=x, dtype="fp16"), y=mb.constexpr_sparse_to_dense(nonzero_data=data, mask=mask))


def _sparse_table(x: Any) -> Any:
    mask, data = mb.constexpr_lut_to_sparse(
        indices_mask=MASK.astype(types.np_uint1_dtype),
        indices_nonzero_data=_few(4, int(MASK.sum())),
        lut=f(1, 1, 16, 1).astype(HALF),
    )
    return mb.matmul(x=mb.cast(x=x, dtype="fp16"), y=mb.constexpr_sparse_to_dense(nonzero_data=data, mask=mask))


MASK = R.random((4, 6)) < 0.4
SHAPE = np.array([4, 6], np.uint32)
COMPRESSED = [
    *(
        _stored(
            "constexpr_blockwise_shift_scale",
            f"{kind} {blocks}",
            data=data,
            scale=f(*blocks).astype(HALF),
            **more,
        )
        for blocks in ((1, 1), (4, 1), (2, 3))
        for kind, data, more in (
            ("int8", R.integers(-99, 99, (4, 6)).astype(np.int8), {}),
            ("uint8", _few(8, 4, 6), {"offset": _few(8, *blocks)}),
            ("uint4", _few(4, 4, 6), {"offset": _few(4, *blocks)}),
            ("int4", R.integers(-8, 8, (4, 6)).astype(types.np_int4_dtype), {}),
        )
    ),
    *(
        _stored(
            "constexpr_lut_to_dense",
            f"{bits} {groups}",
            indices=_few(bits, 4, 6),
            lut=f(*groups, 1 << bits, 1).astype(HALF),
        )
        for bits in (1, 2, 3, 4, 6, 8)
        for groups in ((1, 1), (4, 1), (2, 3))
    ),
    _stored(
        "constexpr_lut_to_dense",
        "of pairs",
        indices=_few(4, 4, 3),
        lut=f(1, 1, 16, 2).astype(HALF),
        vector_axis=1,
    ),
    *(
        _stored(
            "constexpr_lut_to_dense",
            f"iOS 16 {bits}",
            ct.target.iOS16,
            indices=R.integers(0, 256, 3 * bits).astype(np.uint8),
            lut=f(1 << bits).astype(HALF),
            shape=SHAPE,
        )
        for bits in (1, 2, 4, 6, 8)
    ),
    *(
        _stored(
            "constexpr_affine_dequantize",
            f"{axis}",
            ct.target.iOS16,
            quantized_data=R.integers(-99, 99, (4, 6)).astype(np.int8),
            zero_point=R.integers(-9, 9, size).astype(np.int8),
            scale=f(*size).astype(HALF),
            axis=axis,
        )
        for axis, size in ((0, (4,)), (1, (6,)), (0, ()))
    ),
    _stored(
        "constexpr_sparse_to_dense",
        "iOS 16",
        ct.target.iOS16,
        nonzero_data=f(int(MASK.sum())).astype(HALF),
        mask=np.packbits(MASK, bitorder="little"),
        shape=SHAPE,
    ),
    Case("constexpr_sparse_to_dense", (f(2, 4),), _sparse, ct.target.iOS18),
    Case("constexpr_sparse_blockwise_shift_scale", (f(2, 4),), _sparse_codes, ct.target.iOS18),
    Case("constexpr_lut_to_sparse", (f(2, 4),), _sparse_table, ct.target.iOS18),
    Case(
        "constexpr_cast",
        (f(2, 4),),
        lambda x: mb.matmul(x=x, y=mb.constexpr_cast(source_val=f(4, 6).astype(HALF), output_dtype="fp32")),
        ct.target.iOS16,
    ),
    *(
        Case(
            f"{name} {axis}",
            (f(2, 3),),
            lambda x, size=size, axis=axis: mb.dequantize(
                input=mb.quantize(input=x, scale=_column(size), output_dtype="int8", axis=axis),
                scale=_column(size),
                axis=axis,
            ),
        )
        for name in ("quantize", "dequantize")
        for axis, size in ((None, 0), (1, 3))
    ),
]


def _column(size: int) -> Any:
    return np.float32(0.1) if not size else np.linspace(0.05, 0.2, size, dtype=np.float32)


IMAGES += [
    Case(
        f"affine {sampling} {padding} {align}",
        (f(2, 3, 5, 6), R.uniform(-1, 1, (maps, 6)).astype(np.float32)),
        lambda x, m, how=(sampling, padding, align): mb.affine(
            x=x,
            transform_matrix=m,
            output_height=4,
            output_width=7,
            sampling_mode=how[0],
            padding_mode=how[1],
            padding_value=0.0,
            coordinates_mode="normalized_minus_one_to_one",
            align_corners=how[2],
        ),
    )
    for sampling, padding, align, maps in (
        ("bilinear", "constant", True, 2),
        ("bilinear", "constant", False, 1),
    )
]
BOX = np.array([[0.1, 0.2, 0.7, 0.9], [0.8, 0.6, 0.3, 0.1], [-0.2, 0.5, 0.5, 1.3]], np.float32)
IMAGES += [
    *(
        Case(
            f"crop_resize {mode} {form} {normalized}",
            (f(2, 3, 6, 7), BOX if normalized else BOX * 5),
            lambda x, b, how=(mode, form, normalized): mb.crop_resize(
                x=x,
                boxes=b,
                box_indices=np.array([1, 0, 1], np.int32),
                target_height=4,
                target_width=3,
                normalized_coordinates=how[2],
                spatial_scale=0.9,
                box_coordinate_mode=how[1],
                sampling_mode=how[0],
                pad_value=0.25,
            ),
        )
        for mode, form, normalized in (
            ("DEFAULT", "CORNERS_HEIGHT_FIRST", True),
            ("ALIGN_CORNERS", "CORNERS_WIDTH_FIRST", False),
            ("STRICT_ALIGN_CORNERS", "CENTER_SIZE_HEIGHT_FIRST", True),
            ("OFFSET_CORNERS", "CENTER_SIZE_WIDTH_FIRST", False),
            ("UNALIGN_CORNERS", "CORNERS_HEIGHT_FIRST", True),
        )
    ),
    Case(
        "crop_resize with the index of an image",
        (f(1, 3, 6, 7), np.pad(BOX, ((0, 0), (1, 0))).reshape(3, 1, 5, 1, 1)),
        lambda x, r: mb.crop_resize(x=x, roi=r, target_height=2, target_width=2, normalized_coordinates=True),
        ct.target.iOS16,
    ),
]

CASES: dict[str, Sequence[Case]] = {
    "elementwise": ELEMENTWISE,
    "products": PRODUCTS,
    "convolutions": CONVOLUTIONS,
    "reductions": REDUCTIONS,
    "tensors": TENSORS,
    "indexing": INDEXING,
    "images": IMAGES,
    "recurrent": RECURRENT,
    "compressed": COMPRESSED,
}
"""File of lowerings -> its cases; control flow and states are whole programs."""
