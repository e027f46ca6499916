"""Ops that were reported wrong: each form, its numbers, what must not be touched, and wrong versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, stays, table

import anesurgery as ane
from anesurgery.errors import ProofError
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes import replace_faulty_ops
from anesurgery.passes.replace_faulty_ops import FORMS, ReplaceFaultyOps, _Form
from anesurgery.testing import apply_pass, assert_same_numbers

RNG = np.random.default_rng(0)


def built(
    body: Callable[[Var], Any], shape: tuple[int, ...], half: bool = True, opset: Any = ct.target.iOS17
) -> Program:
    dtype = types.fp16 if half else types.fp32

    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=dtype)], opset_version=opset)(lambda x: body(x))


def weight(*shape: int, half: bool = False) -> Any:
    return RNG.standard_normal(shape).astype(np.float16 if half else np.float32)


def quantized(x: Var, zero: Any) -> Var:
    data = RNG.integers(-128, 128, (8, 64)).astype(np.int8)
    scale = np.full(np.shape(zero), 0.01, np.float16)
    stored = mb.constexpr_affine_dequantize(quantized_data=data, zero_point=zero, scale=scale, axis=0, name="w")
    made: Var = mb.linear(x=x, weight=stored, name="y")
    return made


def conv(x: Var, kernel: tuple[int, int], pad: Any = (1, 1, 1, 1), **more: Any) -> Var:
    stored = weight(4, 2, *kernel, half=x.dtype == types.fp16)
    return mb.conv(x=x, weight=stored, strides=[2, 2], pad_type="custom", pad=list(pad), name="y", **more)


def mish(x: Var) -> Var:
    return mb.mul(x=x, y=mb.tanh(x=mb.softplus(x=x)), name="y")


def hard_swish(x: Var, product: Callable[[Var], Var]) -> Var:
    y = product(x)
    low = mb.thresholded_relu(x=y, alpha=np.float16(-3))
    return mb.mul(x=low, y=mb.sigmoid_hard(x=low, alpha=np.float16(1 / 6), beta=np.float16(0.5)), name="y")


def relu6_swish(x: Var, product: Callable[[Var], Var]) -> Var:
    y = product(x)
    gate = mb.sigmoid_hard(x=y, alpha=np.float16(1 / 6), beta=np.float16(0.5))
    return mb.mul(x=y, y=gate, name="y")


def transposed(x: Var, shape: tuple[int, ...], **more: Any) -> Var:
    kernel = np.ones((3, 3, 3, 3), np.float32)
    return mb.conv_transpose(x=x, weight=kernel, output_shape=list(shape), name="y", **more)


def resampled(x: Var, mode: str = "bilinear", **more: Any) -> Var:
    points = RNG.uniform(-1, 7, (1, 4, 5, 2)).astype(np.float32)
    return mb.resample(
        x=x,
        coordinates=points,
        sampling_mode=mode,
        padding_mode="constant",
        padding_value=np.float32(0),
        coordinates_mode="unnormalized",
        align_corners=True,
        name="y",
        **more,
    )


def normed(x: Var, **more: Any) -> Var:
    mean, variance = weight(3), np.abs(weight(3)) + 0.5
    return mb.batch_norm(x=x, mean=mean, variance=variance, name="y", **more)


def joined(groups: int = 1600, axis: int = 1, **more: Any) -> Program:
    """A depthwise convolution of two values that a concat joins."""
    parts = [(1, 600, 5, 1), (1, 1000, 5, 1)] if axis == 1 else [(1, 1600, 2, 1), (1, 1600, 3, 1)]
    specs = [mb.TensorSpec(shape, dtype=types.fp16) for shape in parts]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(x: Var, z: Var) -> Var:
        both = mb.concat(values=[x, z], axis=axis)
        stored = weight(groups, 1600 // groups, 3, 1, half=True)
        return mb.conv(x=both, weight=stored, groups=groups, name="y", **more)

    return program


CASES: dict[str, tuple[Program, str]] = {
    "softplus": (built(lambda x: mb.softplus(x=x, name="y"), (2, 40)), "softplus-cliff"),
    "mish": (built(mish, (2, 40)), "softplus-cliff"),
    "softplus of a product": (
        built(lambda x: mb.softplus(x=mb.mul(x=x, y=np.float16(3)), name="y"), (2, 40)),
        "softplus-cliff",
    ),
    "log sum of channels": (
        built(lambda x: mb.reduce_log_sum_exp(x=x, axes=[1], name="y"), (2, 32, 4)),
        "log-sum-cliff",
    ),
    "log sum, axes kept": (
        built(lambda x: mb.reduce_log_sum_exp(x=x, axes=[-1, 1], keep_dims=True, name="y"), (2, 3, 4)),
        "log-sum-cliff",
    ),
    "log sum of all": (built(lambda x: mb.reduce_log_sum_exp(x=x, name="y"), (2, 8)), "log-sum-cliff"),
    "a power of two": (built(lambda x: mb.pow(x=np.float16(2), y=x, name="y"), (2, 19)), "power-of-two"),
    "powers of several twos": (
        built(lambda x: mb.pow(x=np.full((1, 19), 2, np.float16), y=x, name="y"), (2, 19)),
        "power-of-two",
    ),
    "argmax": (built(lambda x: mb.reduce_argmax(x=x, axis=1, name="y"), (2, 19, 5)), "argmax-narrow"),
    "argmax, axis kept": (
        built(lambda x: mb.reduce_argmax(x=x, axis=-1, keep_dims=True, name="y"), (2, 9)),
        "argmax-narrow",
    ),
    "3x2": (built(lambda x: conv(x, (3, 2)), (1, 2, 5, 5), half=False), "conv-uneven-kernel"),
    "2x5, uneven padding": (
        built(lambda x: conv(x, (2, 5), (0, 1, 2, 1)), (1, 2, 9, 8), half=False),
        "conv-uneven-kernel",
    ),
    "4x3, dilated": (
        built(lambda x: conv(x, (4, 3), dilations=[2, 1]), (1, 2, 12, 9), half=False),
        "conv-uneven-kernel",
    ),
    "output shape": (
        built(lambda x: transposed(x, (1, 3, 4, 4)), (1, 3, 4, 4), half=False),
        "conv-transpose-shape",
    ),
    "output shape, strided": (
        built(lambda x: transposed(x, (1, 3, 8, 9), strides=[2, 2]), (1, 3, 4, 4), half=False),
        "conv-transpose-shape",
    ),
    "pixels": (built(resampled, (1, 2, 6, 7), half=False), "resample-pixels"),
    "volume": (built(normed, (1, 3, 2, 4, 4), half=False), "batch-norm-volume"),
    "volume, scaled": (
        built(lambda x: normed(x, gamma=weight(3), beta=weight(3)), (2, 3, 2, 4, 4), half=False),
        "batch-norm-volume",
    ),
    "volume, each by itself": (
        built(
            lambda x: mb.instance_norm(
                x=x, gamma=weight(3), beta=weight(3), epsilon=np.float32(1e-3), name="y"
            ),
            (2, 3, 2, 4, 5),
            half=False,
        ),
        "instance-norm-volume",
    ),
    "groups": (
        built(
            lambda x: mb.conv(
                x=x, weight=weight(4, 3, 2), bias=weight(4), groups=2, dilations=[3], strides=[2], name="y"
            ),
            (2, 6, 11),
            half=False,
        ),
        "conv-dilated-groups",
    ),
    "places from the end": (
        built(
            lambda x: mb.gather(x=x, indices=[-1, 2, -5], axis=1, name="y"), (2, 9, 3), opset=ct.target.iOS16
        ),
        "gather-negative",
    ),
    "pixels of a convolution": (
        built(
            lambda x: mb.pixel_shuffle(
                x=mb.relu(x=mb.conv(x=x, weight=weight(513, 3, 1, 1), bias=weight(513))),
                upscale_factor=3,
                name="y",
            ),
            (2, 3, 2, 4),
            half=False,
        ),
        "shuffle-bias",
    ),
    "linear": (
        built(lambda x: hard_swish(x, lambda x: mb.linear(x=x, weight=weight(6, 8, half=True))), (3, 8)),
        "hard-swish-rank-2",
    ),
    "linear with bias": (
        built(
            lambda x: relu6_swish(
                x, lambda x: mb.linear(x=x, weight=weight(6, 8, half=True), bias=weight(6, half=True))
            ),
            (3, 8),
        ),
        "hard-swish-rank-2",
    ),
    "int8": (built(lambda x: quantized(x, np.array(0, np.int8)), (2, 64)), "int8-zero-point"),
    "int8 by channel": (built(lambda x: quantized(x, np.zeros(8, np.int8)), (2, 64)), "int8-zero-point"),
    "depthwise": (joined(), "depthwise-concat"),
    "depthwise with bias": (joined(bias=weight(1600, half=True), pad_type="same"), "depthwise-concat"),
    "matmul": (
        built(lambda x: hard_swish(x, lambda x: mb.matmul(x=x, y=weight(8, 6, half=True))), (3, 8)),
        "hard-swish-rank-2",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_form_gives_the_same_numbers(case: str) -> None:
    program, fault = CASES[case]
    after, session = apply_pass(ReplaceFaultyOps(only=(fault,)), program)
    assert len(session.changes) == 1
    assert session.changes[0].proof is not None
    assert_same_numbers(program, after, rtol=1e-5)
    again, second = apply_pass(ReplaceFaultyOps(), after)
    assert not second.changes
    assert not any(f.rule.startswith(f"fault-{fault}") for f in ane.inspect(again).all_findings), (
        "the form is reported wrong itself"
    )


@pytest.mark.parametrize(
    ("body", "size"),
    [
        (lambda x: mb.softplus(x=mb.sigmoid(x=x), name="y"), 12.0),
        (lambda x: mb.softplus(x=mb.clip(x=x, alpha=np.float16(-20), beta=np.float16(10)), name="y"), 30.0),
        (lambda x: mb.reduce_log_sum_exp(x=mb.tanh(x=x), axes=[1], name="y"), 12.0),
    ],
)
def test_values_that_stay_below_the_range_are_left(body: Callable[[Var], Var], size: float) -> None:
    program = built(body, (2, 40))
    _, session = apply_pass(ReplaceFaultyOps(), program)
    assert not session.changes
    x = np.linspace(-size, size, 80, dtype=np.float16).reshape(2, 40)
    exact, engine = (ane.run(program, {"x": x}, precision=p) for p in ("fp16", "ane"))
    np.testing.assert_allclose(engine["y"], exact["y"], rtol=5e-2)


def test_a_weight_that_two_products_read_stays_one() -> None:
    def body(x: Var) -> Any:
        y = quantized(x, np.array(0, np.int8))
        return y, mb.linear(x=mb.relu(x=x), weight=y.op.weight, name="z")  # type: ignore[union-attr]

    program = built(body, (2, 64))
    after, session = apply_pass(ReplaceFaultyOps(only=("int8-zero-point",)), program)
    assert len(session.changes) == 2
    stored = [op for op in walk_ops(after) if op.op_type == "constexpr_affine_dequantize"]
    assert [op.quantized_data.val.dtype for op in stored] == [np.uint8]
    assert_same_numbers(program, after)


def flipped(mb: Any, op: Any) -> Var:
    """The zeros stand on the wrong side of the kernel."""
    stored = op.weight.val[..., ::-1].copy()
    padded: Var = mb.conv(x=op.x, weight=stored, strides=[2, 2], pad_type="custom", pad=[1, 1, 1, 1])
    return padded


WRONG: dict[str, Callable[[Any, Any], Var]] = {
    "softplus": lambda mb, op: mb.softplus(x=mb.minimum(x=op.x, y=10.0)),
    "log sum of channels": lambda mb, op: mb.reduce_max(x=op.x, axes=[1]),
    "3x2": flipped,
    "volume": lambda mb, op: mb.identity(x=op.x),
    "places from the end": lambda mb, op: mb.gather(x=op.x, indices=[7, 2, 3], axis=1),
    "pixels of a convolution": lambda mb, op: mb.depth_to_space(x=op.x, block_size=3),
    "depthwise": lambda mb, op: mb.mul(x=mb.conv(x=op.x, weight=op.weight, groups=1600), y=2.0),
    "argmax": lambda mb, op: mb.reduce_argmin(x=op.x, axis=1),
    "a power of two": lambda mb, op: mb.square(x=op.y),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_form_is_caught(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, fault = CASES[case]
    monkeypatch.setitem(replace_faulty_ops.FORMS, fault, _Form(WRONG[case]))
    with pytest.raises(ProofError):
        apply_pass(ReplaceFaultyOps(only=(fault,)), program)


def test_mish_of_large_numbers_is_repaired_on_the_chips_of_the_report() -> None:
    program = built(mish, (2, 40))
    x = np.linspace(-12, 12, 80, dtype=np.float16).reshape(2, 40)
    meant = ane.run(program, {"x": x})["y"]
    broken = ane.run(program, {"x": x}, precision="ane:M3")["y"]
    assert broken[1, -1] == 0 < meant[1, -1]
    with pytest.warns(ane.SurgeryWarning, match="expected time would rise"):
        done = ane.apply(program, "auto", target="M3 Max/macOS 26", inputs={"x": x})
    assert any(op.op_type == "minimum" for op in walk_ops(done.program.functions["main"]))
    np.testing.assert_allclose(
        ane.run(done.program, {"x": x}, precision="ane:M3")["y"], meant, rtol=2e-3, atol=1e-3
    )
    left = ane.apply(program, "auto", target="M2/macOS 26", inputs={"x": x})
    assert not left.changes, "no report is of an M2"


def test_each_form_is_of_a_row() -> None:
    assert set(FORMS) == {fault.name for fault in replace_faulty_ops.REPAIRED}


test_cases, test_surroundings = table(
    ReplaceFaultyOps(),
    refuses("rounding may choose", built, lambda x: resampled(x, "nearest"), (1, 2, 6, 7), half=False),
    refuses(
        "larger than the full result", built, lambda x: transposed(x, (1, 3, 9, 9)), (1, 3, 4, 4), half=False
    ),
    refuses("a side of one pixel", built, resampled, (1, 2, 1, 7), half=False),
    refuses("joins no whole channels", joined, axis=2),
    *(
        stays(built, body, (1, 2, 6, 6), half=False)
        for body in [
            lambda x: conv(x, (3, 3)),
            lambda x: mb.conv(x=x, weight=weight(4, 2, 3, 2), name="y"),
            lambda x: mb.conv_transpose(x=x, weight=weight(2, 4, 3, 3), name="y"),
            lambda x: mb.reduce_argmax(x=x, axis=1, name="y"),
            lambda x: mb.batch_norm(x=x, mean=weight(2), variance=np.ones(2, np.float32), name="y"),
        ]
    ),
    stays(joined, groups=800),
)
