"""Wide kernels as narrow ones over frames: strides, dilations, groups, paddings, one and two dimensions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, stays, table

import anesurgery as ane
from anesurgery.errors import ProofError
from anesurgery.mil import Program, ct, mb, types, walk_ops
from anesurgery.passes.long_convolution import LongConvolution, _Fold
from anesurgery.placement import Target
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def floats(*shape: int) -> Any:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def conv(shape: tuple[Any, ...], weight: tuple[int, ...], **more: Any) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape)], opset_version=ct.target.iOS16)(
        lambda x: mb.conv(x=x, weight=floats(*weight), name="y", **more)
    )


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "frames": ((2, 1, 640), (7, 1, 256), {"strides": [128]}),
    "overlapping": ((1, 2, 500), (3, 2, 40), {"strides": [7], "bias": floats(3)}),
    "stride 1": ((2, 3, 100), (4, 3, 31), {"bias": floats(4)}),
    "same": ((1, 3, 101), (4, 3, 20), {"pad_type": "same", "strides": [2]}),
    "same lower": ((1, 3, 100), (4, 3, 20), {"pad_type": "same_lower"}),
    "custom": ((1, 3, 50), (4, 3, 17), {"pad_type": "custom", "pad": [5, 9], "strides": [3]}),
    "dilated": ((1, 3, 90), (4, 3, 14), {"dilations": [3], "strides": [2]}),
    "groups": ((1, 6, 60), (4, 3, 33), {"groups": 2, "strides": [2]}),
    "depthwise": ((1, 5, 60), (5, 1, 19), {"groups": 5, "pad_type": "same"}),
    "a kernel longer than needed": ((1, 1, 64), (2, 1, 64), {}),
    "two dimensions": (
        (1, 2, 9, 60),
        (4, 2, 3, 39),
        {"pad_type": "same", "strides": [2, 1], "dilations": [1, 1], "bias": floats(4)},
    ),
    "two dimensions, custom": (
        (1, 2, 9, 60),
        (4, 2, 3, 20),
        {"pad_type": "custom", "pad": [1, 0, 4, 3], "strides": [1, 3]},
    ),
    "high": ((1, 2, 200, 3), (4, 2, 64, 1), {"strides": [4, 1], "pad_type": "custom", "pad": [30, 31, 0, 0]}),
    "high and dilated": (
        (1, 2, 90, 5),
        (4, 2, 20, 3),
        {"strides": [1, 2], "dilations": [4, 1], "bias": floats(4)},
    ),
    "wide and high": ((1, 1, 40, 20), (2, 1, 33, 16), {"pad_type": "same"}),
    "depthwise, wide and high": ((1, 2, 36, 18), (2, 1, 31, 15), {"pad_type": "same", "groups": 2}),
}


@pytest.mark.one_of(10)
@pytest.mark.parametrize("name", CASES)
def test_pieces_give_the_same_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anesurgery.passes.long_convolution.MOST_NUMBERS", 0)
    shape, weight, how = CASES[name]
    program = conv(shape, weight, **how)
    after, session = apply_pass(LongConvolution(most_width=5, most_height=10), program)
    (small,) = [op for op in walk_ops(after) if op.op_type == "conv"]
    height, width = (1, *small.weight.shape[2:])[-2:]
    assert (height <= 10, width <= 5) == (True, True), session.refusals
    assert all(change.proof is not None for change in session.changes)
    assert small.weight.val.size < 2 * np.prod(weight), "no more than zeros at the ends of pieces"
    assert_same_numbers(program, after, rtol=1e-5)


def test_refusals_name_the_value() -> None:
    from coremltools.converters.mil.mil import get_new_symbol

    wide = conv((1, 3, 50), (4, 3, 40))
    assert_refuses(LongConvolution(most_phases=2), wide, "2 phases leave a kernel 40 wide above 13")
    assert_refuses(LongConvolution(), conv((1, 3, get_new_symbol()), (4, 3, 40)), "has the symbolic shape")
    high = conv((1, 1, 400, 6), (4, 1, 300, 4))
    assert_refuses(LongConvolution(most_phases=2), high, "2 phases leave a kernel 300 high above 29")

    dynamic = mb.program(input_specs=[mb.TensorSpec((1, 1, 60)), mb.TensorSpec((1, 1, 40), dtype=types.fp32)])(
        lambda x, w: mb.conv(x=x, weight=w)
    )

    assert_refuses(LongConvolution(), dynamic, "the kernel is 40 wide, but its weight is made by an input")
    with pytest.raises(ane.SurgeryError, match="most_width=0; it must be a positive integer"):
        LongConvolution(most_width=0)


def test_a_target_says_how_large_a_kernel_may_be() -> None:
    sides = {
        chip: [(step.options()["most_height"], step.options()["most_width"]) for step in steps]
        for chip in ("M1/macOS 14", "M4/macOS 15")
        for steps in [LongConvolution.variants(Target.parse(chip))]
    }
    assert sides == {"M1/macOS 14": [(29, 13)], "M4/macOS 15": [(31, 15)]}


def test_a_phase_in_the_wrong_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: phases are not shifted by the stride."""
    right = _Fold.weight
    monkeypatch.setattr(_Fold, "weight", lambda fold, old: np.roll(right(fold, old), 1, axis=1))
    with pytest.raises(ProofError, match="old and new differ"):
        apply_pass(LongConvolution(), conv((1, 3, 100), (4, 3, 31)))


@pytest.mark.quick_cases("silero_unified.mlpackage-1")
@pytest.mark.parametrize(("name", "wide"), [("silero_unified.mlpackage", 1), ("basic_pitch_nmp.mlpackage", 27)])
def test_real_models_have_no_wide_kernel_left(name: str, wide: int, corpus: Path) -> None:
    surgery = ane.apply(corpus / name, "long_convolution", quiet=True)
    assert len(surgery.changes) == wide
    found = ane.inspect(surgery.program, target="M1/macOS 14")
    rules = {f.rule for row in found.ops for f in row.findings}
    assert not any(rule.startswith("conv-kernel") and rule != "conv-kernel-slow" for rule in rules)
    comparison = ane.compare(corpus / name, surgery.program, precision="fp32")
    assert comparison.psnr > 105, "the logarithm in basic_pitch makes rounding visible"


LONG: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], int]] = [
    ((1, 1, 60), (4, 1, 10), {"strides": [5]}, 12),
    ((2, 3, 61), (4, 3, 8), {"strides": [4], "pad_type": "custom", "pad": [2, 3]}, 20),
    ((1, 1, 40, 6), (2, 1, 3, 3), {"strides": [2, 1], "pad_type": "same"}, 21),
]


def test_a_waveform_is_read_in_frames_on_an_m1() -> None:
    program = conv((1, 1, 48000), (64, 1, 10), strides=[5])
    found = ane.inspect(program, target="M1/macOS 14").all_findings
    assert ("conv-input", "long_convolution") in {(f.rule, f.remedy) for f in found}


def compressed_kernel(table: list[float], shape: tuple[int, ...]) -> Any:
    """A palette of four numbers."""
    indices = np.random.default_rng(0).integers(0, 4, shape).astype(types.np_uint2_dtype)
    lut = np.array(table, np.float32).reshape(*[1] * len(shape), 4, 1)
    return mb.constexpr_lut_to_dense(indices=indices, lut=lut)


def quantized_kernel(shape: tuple[int, ...]) -> Any:
    """Integers of 8 bits with a scale for each output."""
    data = np.random.default_rng(0).integers(-128, 128, shape).astype(np.int8)
    scale = np.linspace(0.01, 0.02, shape[0], dtype=np.float32).reshape(-1, *[1] * (len(shape) - 1))
    return mb.constexpr_blockwise_shift_scale(data=data, scale=scale)


def framed_by(kernel: Callable[[], Any]) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 1, 96))], opset_version=ct.target.iOS18)(
        lambda x: mb.conv(x=x, weight=kernel(), strides=[16], name="y")
    )


KERNELS: dict[str, Callable[[], Any]] = {
    "a palette with zero": lambda: compressed_kernel([-1, 0, 0.5, 2], (4, 1, 30)),
    "a scale for each output": lambda: quantized_kernel((4, 1, 30)),
}


test_cases, test_surroundings = table(
    LongConvolution(),
    stays(conv, (1, 3, 50), (4, 3, 13)),
    refuses(
        'is compressed, and its values would change; compressed="reencode", or "decode", allows it',
        framed_by,
        lambda: compressed_kernel([-1, 0.25, 0.5, 2], (4, 1, 30)),
    ),
    # coremltools' builder pads with an fp32 zero, which its reader refuses beside fp16.
    rewrites(
        mb.program(input_specs=[mb.TensorSpec((1, 1, 60), types.fp16)], opset_version=ct.target.iOS17),
        lambda x: mb.conv(
            x=x, weight=np.random.default_rng(0).standard_normal((2, 1, 32)).astype(np.float16), pad_type="same"
        ),
    ),
    *(
        rewrites(
            conv,
            *CASES[name][:2],
            **CASES[name][2],
            step=LongConvolution(most_width=width, most_height=2 * width),
            rtol=1e-5,
            id=f"{name}, {width} wide",
        )
        for name in CASES
        for width in (13, 5)
        if (name, width) != ("high and dilated", 13)  # it fits
    ),
    *(
        rewrites(
            conv,
            shape,
            weight,
            **how,
            step=LongConvolution(longest=longest),
            rtol=1e-5,
            id=f"inputs up to {longest}",
        )
        for shape, weight, how, longest in LONG
    ),
    *(
        stays(conv, shape, weight, **how, step=LongConvolution(longest=shape[2]))
        for shape, weight, how, _ in LONG
    ),
    *(rewrites(framed_by, KERNELS[name], rtol=1e-5, id=name) for name in KERNELS),
)
