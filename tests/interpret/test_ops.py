"""Every op of the table against an oracle: coremltools' own constant folding, torch, or numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

from anesurgery.interpret import TABLE, evaluate, run
from anesurgery.interpret.ops import computing
from anesurgery.mil import Array, Var, ct, mb

R = np.random.default_rng(0)


def f(*shape: int) -> Any:
    """Of any type: mypy takes seconds to look each expression of the tables up in numpy's overloads."""
    return R.standard_normal(shape).astype(np.float32)


def i(low: int, high: int, *shape: int) -> Any:
    return R.integers(low, high, shape).astype(np.int32)


X, Y = f(2, 3, 4), f(2, 3, 4)
POS: Any = np.abs(f(2, 3, 4)) + 0.5
N, M = i(-7, 8, 2, 3), i(1, 5, 2, 3)
B = X > 0

FOLDED: dict[str, list[dict[str, Any]]] = {
    **{name: [{"x": X, "y": Y}, {"x": X, "y": f(4)}] for name in ("add", "sub", "mul", "maximum", "minimum")},
    **{
        name: [{"x": X, "y": Y}, {"x": N, "y": M}]
        for name in ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
    },
    "real_div": [{"x": X, "y": POS}],
    "floor_div": [{"x": X, "y": POS}, {"x": N, "y": M}],
    "mod": [{"x": np.abs(X), "y": POS}, {"x": np.abs(N), "y": M}],  # of others Core ML keeps the sign
    "pow": [{"x": POS, "y": Y}],
    **{name: [{"x": B, "y": Y > 0}] for name in ("logical_and", "logical_or", "logical_xor")},
    "logical_not": [{"x": B}],
    **{
        name: [{"x": X}]
        for name in (
            "abs",
            "atan",
            "ceil",
            "cos",
            "cosh",
            "erf",
            "exp",
            "exp2",
            "floor",
            "sign",
            "sin",
            "sinh",
            "square",
            "tan",
            "tanh",
            "relu",
            "relu6",
            "sigmoid",
            "softplus",
            "softsign",
            "round",
        )
    },
    **{name: [{"x": np.clip(X, -0.9, 0.9)}] for name in ("acos", "asin", "atanh")},
    "sqrt": [{"x": POS}],
    "inverse": [{"x": POS, "epsilon": np.float32(1e-3)}],
    "log": [{"x": POS, "epsilon": np.float32(1e-3)}],
    "rsqrt": [{"x": POS, "epsilon": np.float32(1e-3)}],
    "clip": [{"x": X, "alpha": np.float32(-0.5), "beta": np.float32(0.25)}],
    "threshold": [{"x": X, "alpha": np.float32(0.1)}],
    "cast": [{"x": 3 * X, "dtype": "int32"}, {"x": N, "dtype": "fp32"}, {"x": N, "dtype": "bool"}],
    "select": [{"cond": B, "a": X, "b": Y}],
    "identity": [{"x": X}],
    "gelu": [{"x": X, "mode": m} for m in ("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION")],
    "elu": [{"x": X, "alpha": np.float32(0.7)}],
    "leaky_relu": [{"x": X, "alpha": np.float32(0.3)}],
    "clamped_relu": [{"x": X, "alpha": np.float32(0.3), "beta": np.float32(0.5)}],
    "linear_activation": [{"x": X, "alpha": np.float32(0.3), "beta": np.float32(0.5)}],
    "prelu": [{"x": f(1, 3, 4, 4), "alpha": f(3)}],
    "scaled_tanh": [{"x": X, "alpha": np.float32(0.3), "beta": np.float32(0.5)}],
    "sigmoid_hard": [{"x": X, "alpha": np.float32(0.3), "beta": np.float32(0.5)}],
    "softplus_parametric": [{"x": f(1, 3, 4, 4), "alpha": POS[0, :, 0], "beta": POS[1, :, 0]}],
    "thresholded_relu": [{"x": X, "alpha": np.float32(0.3)}],
    **{
        name: [{"x": POS, "axes": [1], "keep_dims": k} for k in (True, False)] + [{"x": POS, "axes": [0, -1]}]
        for name in (
            "reduce_sum",
            "reduce_mean",
            "reduce_max",
            "reduce_min",
            "reduce_prod",
            "reduce_l1_norm",
            "reduce_l2_norm",
            "reduce_sum_square",
            "reduce_log_sum",
            "reduce_log_sum_exp",
        )
    },
    **{
        name: [{"x": X, "axis": a, "keep_dims": k} for a, k in ((1, True), (-1, False))]
        for name in ("reduce_argmax", "reduce_argmin")
    },
    "softmax": [{"x": X, "axis": a} for a in (-1, 1)],
    "cumsum": [{"x": X, "axis": 1, "reverse": r} for r in (True, False)],
    "reshape": [{"x": X, "shape": [4, -1]}],
    "expand_dims": [{"x": X, "axes": [0, -1]}],
    "squeeze": [{"x": f(1, 3, 1), "axes": [0]}, {"x": f(1, 3, 1)}],
    "transpose": [{"x": X, "perm": [2, 0, 1]}],
    "flatten2d": [{"x": X, "axis": 2}],
    "tile": [{"x": X, "reps": [2, 1, 3]}],
    "reverse": [{"x": X, "axes": [0, 2]}],
    "pad": [{"x": f(1, 3, 4, 4), "pad": [0, 0, 0, 0, 1, 2, 2, 1], "mode": m} for m in ("constant", "reflect")],
    "slice_by_size": [{"x": X, "begin": [0, 1, 2], "size": [2, 2, -1]}],
    "band_part": [{"x": f(4, 5), "lower": a, "upper": b} for a, b in ((-1, 0), (1, -1), (1, 2))],
    "range_1d": [{"start": np.int32(1), "end": np.int32(9), "step": np.int32(3)}],
    "fill": [{"shape": [2, 3], "value": np.float32(1.5)}],
    "gather": [
        {"x": X, "indices": i(0, 3, 2), "axis": 1},
        {"x": X, "indices": np.array([-1, 0], np.int32), "axis": 2},
    ],
    "gather_along_axis": [{"x": X, "indices": i(0, 3, 2, 2, 4), "axis": 1}],
    "topk": [{"x": X, "k": 2, "axis": a, "ascending": o} for a, o in ((-1, False), (1, True))],
    "argsort": [{"x": X, "axis": a, "ascending": o} for a, o in ((-1, False), (1, True))],
    "non_zero": [{"x": (N > 2).astype(np.int32)}],
    "matmul": [
        {"x": f(2, 3, 4), "y": f(4, 5)},
        {"x": f(3, 4), "y": f(5, 4), "transpose_y": True},
        {"x": f(4, 3), "y": f(4, 5), "transpose_x": True},
    ],
    "linear": [{"x": X, "weight": f(5, 4), "bias": f(5)}, {"x": X, "weight": f(5, 4)}],
    "layer_norm": [
        {"x": X, "axes": [-1], "gamma": f(4), "beta": f(4)},
        {"x": X, "axes": [1, 2]},
        {"x": f(1, 3, 4, 4), "axes": [1], "gamma": f(3), "beta": f(3)},
    ],
    "scatter_along_axis": [
        {"data": X, "indices": i(0, 3, 2, 2, 4), "updates": f(2, 2, 4), "axis": 1, "mode": "update"}
    ],
}
"""Op -> inputs with which coremltools folds it at build time: an independent oracle."""


def build(op_type: str, inputs: dict[str, Any], opset: Any = ct.target.iOS16) -> Any:
    """A program of one op on constants, and the op."""
    made: list[Any] = []

    @mb.program(input_specs=[mb.TensorSpec((1,))], opset_version=opset)
    def program(unused: Var) -> Var:
        fresh = {k: _copy(v) for k, v in inputs.items()}  # some of coremltools' folding writes in place
        result = getattr(mb, op_type)(**fresh)
        made.extend(result if isinstance(result, (tuple, list)) else [result])
        return mb.identity(x=unused)

    return made


def _copy(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_copy(v) for v in value)
    return value.copy() if isinstance(value, np.ndarray) else value


CASES = [(name, n) for name, cases in FOLDED.items() for n in range(len(cases))]


@pytest.mark.parametrize(("name", "n"), CASES, ids=[f"{name}-{n}" for name, n in CASES])
def test_agrees_with_coremltools_own_folding(name: str, n: int) -> None:
    outputs = build(name, FOLDED[name][n])
    assert outputs[0].val is not None, "coremltools does not fold this: it belongs into REFERENCE"
    found = evaluate([outputs[0].op], {}, outputs)
    for value, var in zip(found, outputs, strict=True):
        assert_close(value.numpy(), var.val)


def t(array: Array) -> torch.Tensor:
    return torch.from_numpy(array)


IMAGE, KERNEL, WIDE = f(2, 4, 9, 8), f(6, 4, 3, 3), f(4, 6, 3, 2)
GROUPED = f(6, 2, 3, 3)
Q, K, V, MASK = f(1, 2, 5, 4), f(1, 2, 6, 4), f(1, 2, 6, 4), f(5, 6)
HIDES_ROW_0 = np.where(np.arange(5)[:, None] == 0, np.inf, 0).astype(np.float32)
ND = np.stack([i(0, 2, 5), i(0, 3, 5)], -1)

Case = tuple[dict[str, Any], Callable[[], Any]]
REFERENCE: dict[str, list[Case]] = {
    "silu": [({"x": X}, lambda: F.silu(t(X)))],
    "conv": [
        (
            {"x": IMAGE, "weight": KERNEL, "bias": f(6) * 0 + 1, "pad_type": "valid"},
            lambda: F.conv2d(t(IMAGE), t(KERNEL), torch.ones(6)),
        ),
        (
            {"x": IMAGE, "weight": KERNEL, "strides": [2, 1], "pad_type": "custom", "pad": [1, 1, 0, 0]},
            lambda: F.conv2d(t(IMAGE), t(KERNEL), stride=(2, 1), padding=(1, 0)),
        ),
        (
            {"x": IMAGE, "weight": KERNEL, "pad_type": "same", "dilations": [2, 1]},
            lambda: F.conv2d(t(IMAGE), t(KERNEL), padding="same", dilation=(2, 1)),
        ),
        (
            {"x": IMAGE, "weight": GROUPED, "groups": 2, "pad_type": "valid"},
            lambda: F.conv2d(t(IMAGE), t(GROUPED), groups=2),
        ),
        (
            {"x": IMAGE[:, :, 0], "weight": KERNEL[:, :, 0], "pad_type": "valid"},
            lambda: F.conv1d(t(IMAGE[:, :, 0].copy()), t(KERNEL[:, :, 0].copy())),
        ),
    ],
    "conv_transpose": [
        (
            {"x": IMAGE, "weight": WIDE, "strides": [2, 2], "pad_type": "custom", "pad": [1, 1, 0, 0]},
            lambda: F.conv_transpose2d(t(IMAGE), t(WIDE), stride=2, padding=(1, 0)),
        )
    ],
    "max_pool": [
        (
            {"x": IMAGE, "kernel_sizes": [3, 2], "strides": [2, 1], "pad_type": "custom", "pad": [1, 1, 1, 1]},
            lambda: F.max_pool2d(t(IMAGE), (3, 2), (2, 1), (1, 1)),
        )
    ],
    "avg_pool": [
        (
            {
                "x": IMAGE,
                "kernel_sizes": [3, 2],
                "strides": [2, 1],
                "pad_type": "custom",
                "pad": [1, 1, 1, 1],
                "exclude_padding_from_average": e,
            },
            lambda e=e: F.avg_pool2d(  # type: ignore[misc]
                t(IMAGE), (3, 2), (2, 1), (1, 1), count_include_pad=not e
            ),
        )
        for e in (True, False)
    ],
    "batch_norm": [
        (
            {"x": IMAGE, "mean": f(4) * 0 + 0.5, "variance": POS[0, 0], "gamma": POS[0, 1], "beta": X[0, 0]},
            lambda: F.batch_norm(t(IMAGE), torch.full((4,), 0.5), t(POS[0, 0]), t(POS[0, 1]), t(X[0, 0])),
        )
    ],
    "instance_norm": [
        (
            {"x": IMAGE, "gamma": POS[0, 1], "beta": X[0, 0]},
            lambda: F.instance_norm(t(IMAGE), weight=t(POS[0, 1]), bias=t(X[0, 0])),
        )
    ],
    "l2_norm": [
        (
            {"x": f(1, 2, 3, 4) * 0 + IMAGE[:1, :2, :3, :4]},
            lambda: IMAGE[:1, :2, :3, :4] / np.sqrt((IMAGE[:1, :2, :3, :4] ** 2).sum((1, 2, 3), keepdims=True)),
        )
    ],
    "concat": [
        ({"values": (X, Y), "axis": 1}, lambda: np.concatenate([X, Y], 1)),
        ({"values": (X, Y), "axis": 1, "interleave": True}, lambda: np.stack([X, Y], 2).reshape(2, 6, 4)),
    ],
    "stack": [({"values": (X, Y), "axis": 1}, lambda: np.stack([X, Y], 1))],
    "split": [
        ({"x": X, "split_sizes": [1, 3], "axis": 2}, lambda: [X[..., :1], X[..., 1:]]),
        ({"x": X, "num_splits": 2, "axis": 0}, lambda: [X[:1], X[1:]]),
    ],
    "slice_by_index": [
        ({"x": X, "begin": [0, 1, 3], "end": [2, 3, 0], "stride": [1, 1, -1]}, lambda: X[:, 1:3, 3:0:-1]),
        (
            {
                "x": X,
                "begin": [1, 0, -2],
                "end": [0, 0, 0],
                "squeeze_mask": [True, False, False],
                "begin_mask": [False, True, False],
                "end_mask": [False, True, True],
            },
            lambda: X[1, :, -2:],
        ),
    ],
    "one_hot": [
        (
            {"indices": np.array([0, 2, 1], np.int32), "one_hot_vector_size": 3},
            lambda: np.eye(3, dtype=np.int32)[[0, 2, 1]],
        )
    ],
    "depth_to_space": [
        (
            {"x": f(1, 8, 2, 3) * 0 + IMAGE.reshape(-1)[:48].reshape(1, 8, 2, 3), "block_size": 2},
            lambda: (
                IMAGE.reshape(-1)[:48].reshape(1, 2, 2, 2, 2, 3).transpose(0, 3, 4, 1, 5, 2).reshape(1, 2, 4, 6)
            ),
        )
    ],
    "space_to_depth": [
        (
            {"x": IMAGE[:1, :2, :4, :6], "block_size": 2},
            lambda: (
                IMAGE[:1, :2, :4, :6].reshape(1, 2, 2, 2, 3, 2).transpose(0, 3, 5, 1, 2, 4).reshape(1, 8, 2, 3)
            ),
        )
    ],
    "pixel_shuffle": [({"x": IMAGE, "upscale_factor": 2}, lambda: F.pixel_shuffle(t(IMAGE), 2))],
    "pixel_unshuffle": [
        (
            {"x": IMAGE[:, :, :8], "downscale_factor": np.uint32(2)},
            lambda: F.pixel_unshuffle(t(IMAGE[:, :, :8].copy()), 2),
        )
    ],
    "gather_nd": [({"x": X, "indices": ND}, lambda: X[ND[:, 0], ND[:, 1]])],
    "scatter": [
        (
            {
                "data": X,
                "indices": np.array([2, 0], np.int32),
                "updates": f(2, 2, 4) * 0 + 1,
                "axis": 1,
                "mode": "update",
            },
            lambda: np.stack([np.ones((2, 4)), X[:, 1], np.ones((2, 4))], 1),
        )
    ],
    "scatter_nd": [
        (
            {"data": X, "indices": np.array([[1, 2], [0, 0]], np.int32), "updates": Y[0, :2], "mode": "add"},
            lambda: (
                X
                + np.stack(
                    [
                        np.stack([Y[0, 1], 0 * Y[0, 0], 0 * Y[0, 0]]),
                        np.stack([0 * Y[0, 0], 0 * Y[0, 0], Y[0, 0]]),
                    ]
                )
            ),
        )
    ],
    "einsum": [
        (
            {
                "values": (f(1, 2, 3, 4) * 0 + X.reshape(1, 2, 3, 4), f(1, 4, 3, 5) * 0 + 1),
                "equation": "nchw,nwhu->nchu",
            },
            lambda: np.einsum("nchw,nwhu->nchu", X.reshape(1, 2, 3, 4), np.ones((1, 4, 3, 5))),
        )
    ],
}
"""Op -> cases with a reference of our own, where coremltools folds nothing."""

REFERENCE_18: dict[str, list[Case]] = {
    "scaled_dot_product_attention": [
        (
            {"query": Q, "key": K, "value": V, "attn_mask": MASK},
            lambda: torch.softmax(t(Q) @ t(K).transpose(-1, -2) / 2 + t(MASK), -1) @ t(V),
        ),
        (  # torch's own attention gives 0 where a mask hides every key
            {"query": Q, "key": K, "value": V, "attn_mask": MASK - HIDES_ROW_0},
            lambda: torch.softmax(t(Q) @ t(K).transpose(-1, -2) / 2 + t(MASK - HIDES_ROW_0), -1) @ t(V),
        ),
        (
            {"query": Q, "key": K, "value": V, "attn_mask": MASK > -1},
            lambda: (
                torch.softmax((t(Q) @ t(K).transpose(-1, -2) / 2).masked_fill(~t(MASK > -1), -torch.inf), -1)
                @ t(V)
            ),
        ),
    ],
    "slice_update": [
        (
            {"x": X, "update": f(2, 1, 4) * 0 + 1, "begin": [0, 1, 0], "end": [2, 2, 4]},
            lambda: np.concatenate([X[:, :1], np.ones((2, 1, 4)), X[:, 2:]], 1),
        )
    ],
}

ELSEWHERE = {
    **dict.fromkeys(("rnn", "gru", "lstm"), "test_recurrent.py"),
    **dict.fromkeys(("conv_quantized", "l2_pool"), "test_conv.py"),
    "local_response_norm": "test_normalization.py",
    **dict.fromkeys(
        ("sliding_windows", "reverse_sequence", "space_to_batch", "batch_to_space"), "test_more.py"
    ),
    **dict.fromkeys(
        (
            "non_maximum_suppression",
            "classify",
            "quantize",
            "dequantize",
            "random_uniform",
            "random_normal",
            "random_bernoulli",
            "random_categorical",
        ),
        "test_decisions.py",
    ),
    "make_list": "test_core.py",
    "list_write": "test_core.py",
    "list_read": "test_core.py",
    "list_gather": "test_core.py",
    "list_length": "test_core.py",
    "list_scatter": "test_core.py",
    "read_state": "test_core.py",
    "coreml_update_state": "test_core.py",
    "shape": "test_core.py",
    "fill_like": "test_core.py",
    "reshape_like": "test_core.py",
    **dict.fromkeys(
        (
            "upsample_nearest_neighbor",
            "upsample_bilinear",
            "resize_nearest_neighbor",
            "resize_bilinear",
            "resize",
            "crop",
            "crop_resize",
            "resample",
            "affine",
            "torch_upsample_nearest_neighbor",
            "torch_upsample_bilinear",
        ),
        "test_image.py",
    ),
}
"""Ops with state, lists or shapes: tested in whole programs."""

OWN = [(n, k, ct.target.iOS16) for n, c in REFERENCE.items() for k in range(len(c))]
OWN += [(n, k, ct.target.iOS18) for n, c in REFERENCE_18.items() for k in range(len(c))]


@pytest.mark.parametrize(("name", "n", "opset"), OWN, ids=[f"{name}-{n}" for name, n, _ in OWN])
def test_agrees_with_a_reference(name: str, n: int, opset: Any) -> None:
    inputs, reference = {**REFERENCE, **REFERENCE_18}[name][n]
    outputs = build(name, inputs, opset)
    expected = reference()
    expected = expected if isinstance(expected, list) else [expected]
    for value, wanted in zip(evaluate([outputs[0].op], {}, outputs), expected, strict=True):
        assert_close(value.numpy(), wanted)


def test_every_op_of_the_table_has_an_oracle() -> None:
    assert set(TABLE) == FOLDED.keys() | REFERENCE.keys() | REFERENCE_18.keys() | ELSEWHERE.keys()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_slices_as_numpy_does(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    slices: list[slice] = []
    begin: list[int] = []
    end: list[int] = []
    stride: list[int] = []
    for n in shape:
        a = data.draw(st.integers(0, n - 1))
        b = data.draw(st.integers(a + 1, n))
        s = data.draw(st.integers(1, 3))
        slices.append(slice(a, b, s))
        begin, end, stride = [*begin, a], [*end, b], [*stride, s]
    (out,) = build("slice_by_index", {"x": x, "begin": begin, "end": end, "stride": stride})
    np.testing.assert_array_equal(evaluate([out.op], {}, [out])[0].numpy(), x[tuple(slices)])


def test_runs_a_whole_program_by_name() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 3))])
    def program(x: Var) -> Var:
        return mb.mul(x=x, y=np.float32(2), name="twice")

    assert_close(run(program, {"x": X[0, :2, :3]})["twice"], 2 * X[0, :2, :3])


@pytest.mark.parametrize("name", sorted(computing.REDUCTIONS))
def test_a_reduction_over_no_axes_has_the_shape_of_its_operand(name: str) -> None:
    @mb.program(input_specs=[mb.TensorSpec(POS.shape)])
    def program(x: Var) -> Var:
        return getattr(mb, name)(x=x, axes=np.array([], np.int32), name="y")

    expected = {"reduce_log_sum": np.log(POS), "reduce_sum_square": POS**2}.get(name, POS)
    np.testing.assert_allclose(run(program, {"x": POS})["y"], expected, rtol=1e-6)


@pytest.mark.parametrize("reverse", [True, False])
def test_exclusive_running_sums(reverse: bool) -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 3, 4))])
    def program(x: Var) -> Var:  # at run time: coremltools' own folding of this form raises
        return mb.cumsum(x=x, axis=1, exclusive=True, reverse=reverse, name="y")

    flipped = X[:, ::-1] if reverse else X
    expected = np.cumsum(flipped, 1)[:, ::-1] if reverse else np.cumsum(flipped, 1)
    assert_close(run(program, {"x": X})["y"], expected - X)


def test_a_gelu_by_tanh_has_the_same_bits_anywhere() -> None:
    """The wrong version: 1 + tanh cancels for numbers below -7, so that even fp64 differs by the position."""
    x = torch.linspace(-8, 4, 1003)
    one_by_one = torch.cat([computing.gelu(part, "TANH_APPROXIMATION") for part in torch.split(x, 1)])
    assert torch.equal(computing.gelu(x, "TANH_APPROXIMATION"), one_by_one)
