"""What `inspect`, recipes and `chips` say of ops that were reported wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery import authoring as an
from anesurgery.commands.app import app
from anesurgery.interpret.arithmetic.engine_faults import FAULTS
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.surgery import Recipe


def written() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((4, 32), dtype=types.fp16)], opset_version=ct.target.iOS17)(
        lambda x: mb.log(x=mb.add(x=mb.exp(x=x), y=np.float16(1)), epsilon=np.float16(0), name="y")
    )


def as_op(most: float = 30.0) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((4, 32), dtype=types.fp16)], opset_version=ct.target.iOS17)(
        lambda x: mb.softplus(x=mb.minimum(x=x, y=np.float16(most)), name="y")
    )


def depthwise(groups: int, left: int = 800) -> Program:
    specs = [mb.TensorSpec((1, n, 9, 1), dtype=types.fp16) for n in (left, 800)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(a: Var, b: Var) -> Var:
        both = mb.concat(values=[a, b], axis=1)
        stored = np.ones((left + 800, (left + 800) // groups, 5, 1), np.float16)
        return mb.conv(x=both, weight=stored, groups=groups, name="y")

    return program


def outputs(*shape: int) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)], opset_version=ct.target.iOS17)(
        lambda x: mb.cast(x=mb.relu(x=x), dtype="fp32", name="y")
    )


def sampled(choose: bool = True, dtype: Any = types.fp16) -> Program:
    """A map that is read around the boxes that the best scores choose, as in RT-DETR, or around all boxes."""
    specs = [mb.TensorSpec(shape, dtype=dtype) for shape in ((1, 50, 2), (1, 50), (4, 8, 20, 20))]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(boxes: Var, scores: Var, values: Var) -> Any:
        if choose:
            _, places = mb.topk(x=scores, k=10, axis=1)
            boxes = mb.gather(x=boxes, indices=mb.squeeze(x=places, axes=[0]), axis=1)
        around = mb.tile(x=mb.expand_dims(x=mb.sigmoid(x=boxes), axes=[2]), reps=[4, 1, 3, 1])
        fixed = {"sampling_mode": "bilinear", "padding_mode": "constant", "padding_value": 0.0}
        fixed |= {"coordinates_mode": "normalized_zero_to_one", "align_corners": False}
        if dtype is types.fp16:
            fixed["padding_value"] = np.float16(0)
        return mb.resample(x=values, coordinates=around, **fixed)

    return program


def chosen(gathers: bool) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 50), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        scores, places = mb.topk(x=x, k=3, axis=1)
        rows = mb.gather(x=np.ones((50, 4), np.float16), indices=places, axis=0) if gathers else places
        return scores, rows

    return program


def fused(width: int, queries: int = 4, batch: int = 1, masked: bool = False) -> Program:
    specs = [mb.TensorSpec((batch, 2, n, width), dtype=types.fp16) for n in (queries, 4)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(q: Var, k: Var) -> Var:
        mask = {"attn_mask": np.ones((batch, 2, queries, 4), np.float16)} if masked else {}
        return mb.scaled_dot_product_attention(query=q, key=k, value=k, **mask, name="y")

    return program


def masked(mask: str, dtype: Any = types.fp16) -> Program:
    """Attention of 64 queries; a mask of "ops" is computed by an op that the engine may run."""
    specs = [mb.TensorSpec((1, 2, 64, 32), dtype=dtype), mb.TensorSpec((1, 1, 64, 64), dtype=dtype)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Var, given: Var) -> Var:
        table = np.triu(np.full((1, 1, 64, 64), -1e4, types.nptype_from_builtin(dtype)), 1)
        made = mb.mul(x=given, y=table.dtype.type(-1e4))
        masks = {"float": table, "bool": table == 0, "input": given, "ops": made}
        more = {} if mask == "none" else {"attn_mask": masks[mask]}
        return mb.scaled_dot_product_attention(query=x, key=x, value=x, **more, name="y")

    return program


def shuffled(channels: int = 512, bias: str = "conv", between: bool = False) -> Program:
    """A pixel_shuffle of a convolution, with a bias inside ("conv") or behind it ("add")."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4, 6, 6), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        own = {"bias": np.ones(channels, np.float16)} if bias == "conv" else {}
        y = mb.conv(x=x, weight=np.ones((channels, 4, 1, 1), np.float16), **own)
        y = mb.add(x=y, y=np.ones((1, channels, 1, 1), np.float16)) if bias == "add" else y
        return mb.pixel_shuffle(x=mb.relu(x=y) if between else y, upscale_factor=2, name="y")

    return program


def gathered(place: int, opset: Any = ct.target.iOS16) -> Program:
    """One row of 288, as torch's x[:, [-1]] is converted for iOS 15 and 16."""
    spec = mb.TensorSpec((1, 288, 8), dtype=types.fp16)
    return mb.program(input_specs=[spec], opset_version=opset)(
        lambda x: mb.gather(x=x, indices=[place], axis=1, name="y")
    )


def attended(tokens: int, width: int) -> Program:
    spec = mb.TensorSpec((1, 1, tokens, width), dtype=types.fp16)

    @mb.program(input_specs=[spec], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        return mb.matmul(x=mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True)), y=x, name="y")

    return program


def windows(batch: int, biased: bool = True) -> Program:
    @mb.program(
        input_specs=[mb.TensorSpec((batch, 4, 49, 32), dtype=types.fp16)], opset_version=ct.target.iOS16
    )
    def program(x: Var) -> Var:
        scores = mb.matmul(x=x, y=x, transpose_y=True)
        bias = np.ones((1, 4, 49, 49), np.float16)
        return mb.matmul(x=mb.softmax(x=mb.add(x=scores, y=bias) if biased else scores), y=x, name="y")

    return program


def stored(dtype: Any, zero: int) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 64), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        data, point = np.ones((8, 64), dtype), np.array(zero, dtype)
        weight = mb.constexpr_affine_dequantize(
            quantized_data=data, zero_point=point, scale=np.float16(0.1), axis=0, name="w"
        )
        return mb.linear(x=x, weight=weight, name="y")

    return program


def upsampled(**cuts: Any) -> Program:
    """A result of 9 that becomes one of 7 or 8, as coremltools writes it from PyTorch."""

    @mb.program(input_specs=[mb.TensorSpec((1, 2, 4), dtype=types.fp16)], opset_version=ct.target.iOS15)
    def program(x: Var) -> Var:
        return mb.conv_transpose(x=x, weight=np.ones((2, 3, 3), np.float16), strides=[2], **cuts, name="y")

    return program


def shifted(by: int) -> Program:
    """The sum of an int32 input and a number."""
    return mb.program(input_specs=[mb.TensorSpec((4,), dtype=types.int32)], opset_version=ct.target.iOS17)(
        lambda x: mb.add(x=x, y=np.int32(by), name="y")
    )


def squeezed(step: int, drops: bool = True) -> Program:
    """A slice that drops the first axis, and steps along the last one."""
    return mb.program(input_specs=[mb.TensorSpec((1, 8, 16), types.fp16)], opset_version=ct.target.iOS17)(
        lambda x: mb.slice_by_index(
            x=x,
            begin=[0] * 3,
            end=[1, 8, 12],
            stride=[1, 1, step],
            squeeze_mask=[drops, False, False],
            name="y",
        )
    )


def remainder(by: float) -> Program:
    """A remainder of an fp16 input."""
    return mb.program(input_specs=[mb.TensorSpec((1, 8), types.fp16)], opset_version=ct.target.iOS17)(
        lambda x: mb.mod(x=x, y=np.float16(by), name="y")
    )


def powers(base: float) -> Program:
    """A number to the power of an fp32 input."""
    return mb.program(input_specs=[mb.TensorSpec((1, 8))], opset_version=ct.target.iOS17)(
        lambda x: mb.pow(x=np.float32(base), y=x, name="y")
    )


SAYS = [
    (powers(2), "M1/macOS 26, CPU_ONLY", "fault-power-of-two-elsewhere", "guess"),
    (powers(3), "M1/macOS 26", "", ""),
    (remainder(1), "A18/iOS 18", "fault-mod-fraction-elsewhere", "guess"),
    (remainder(2), "A18/iOS 18", "", ""),
    (squeezed(2), "M1/macOS 13", "fault-slice-squeezed-stride-elsewhere", "guess"),
    (squeezed(1), "M1/macOS 13", "", ""),
    (squeezed(2, drops=False), "M1/macOS 13", "", ""),
    (shifted(2**24 + 1), "M1/macOS 15, CPU_ONLY", "fault-large-integers-elsewhere", "guess"),
    (shifted(-(2**31)), "A18/iOS 18", "fault-large-integers-elsewhere", "guess"),
    (shifted(2**24), "M1/macOS 15", "", ""),
    (upsampled(pad_type="custom", pad=[1, 1], output_shape=[1, 3, 7]), "M1/macOS 14", "", ""),
    (
        upsampled(pad_type="custom", pad=[1, 0], output_shape=[1, 3, 8]),
        "M1/macOS 14",
        "fault-conv-transpose-shape",
        "reported",
    ),
    (upsampled(output_shape=[1, 3, 7]), "A15/iOS 16", "fault-conv-transpose-shape-elsewhere", "guess"),
    (fused(512), "M4/macOS 26", "fault-attention-wide-heads-elsewhere", "guess"),
    (fused(256), "M4/macOS 26", "", ""),
    (fused(512, queries=1), "M4/macOS 26", "", ""),
    *((masked(kind), "M4/macOS 26", "fault-attention-mask", "reported") for kind in ("float", "bool", "input")),
    (masked("float"), "M1/macOS 27", "fault-attention-mask", "reported"),
    (masked("float", types.fp32), "M1/macOS 27", "", ""),
    (masked("float"), "M4", "fault-attention-mask", "reported"),
    (masked("float"), "M2/macOS 27", "fault-attention-mask-elsewhere", "guess"),
    (masked("float"), "A18/iOS 26", "fault-attention-mask-elsewhere", "guess"),
    (masked("float"), "A18/iOS 18", "", ""),
    (masked("float"), "M4/macOS 15", "", ""),
    (masked("ops"), "M4/macOS 26", "", ""),
    (masked("none"), "M4/macOS 26", "", ""),
    (masked("float"), "M4/macOS 26, CPU_AND_GPU", "", ""),
    (gathered(-1), "M1 Pro/macOS 26", "fault-gather-negative", "reported"),
    (gathered(-1), "A18/iOS 18", "fault-gather-negative-elsewhere", "guess"),
    (gathered(287), "M1/macOS 26", "", ""),
    (gathered(287, ct.target.iOS17), "M1/macOS 26", "", ""),
    (attended(1024, 256), "M2/macOS 26", "fault-attention-scores", "reported"),
    (attended(1024, 256), "M4/macOS 26", "fault-attention-scores-elsewhere", "guess"),
    (attended(1023, 256), "M2/macOS 26", "", ""),
    (attended(1024, 64), "M2/macOS 26", "", ""),
    (shuffled(), "M1/macOS 26", "fault-shuffle-bias", "reported"),
    (shuffled(between=True), "M1/macOS 26", "fault-shuffle-bias", "reported"),
    (shuffled(bias="add", between=True), "M1/macOS 26", "fault-shuffle-bias", "reported"),
    (shuffled(), "A18/iOS 18", "fault-shuffle-bias-elsewhere", "guess"),
    (shuffled(bias=""), "M1/macOS 26", "", ""),
    (shuffled(channels=256), "M1/macOS 26", "", ""),
    (fused(64, batch=10, masked=True), "M4/macOS 15, ALL", "fault-attention-batch-elsewhere", "guess"),
    (fused(64, batch=10), "M4/macOS 26, ALL", "", ""),
    (fused(64, batch=10, masked=True), "M4/macOS 15, CPU_AND_NE", "", ""),
    (windows(10), "M4/macOS 26, ALL", "fault-attention-batch-elsewhere", "guess"),
    (windows(10), "M4/macOS 26, CPU_AND_NE", "", ""),
    (windows(9), "M4/macOS 26, ALL", "", ""),
    (windows(10, biased=False), "M4/macOS 26, ALL", "", ""),
    (stored(np.int8, 0), "M1/macOS 14", "fault-int8-zero-point-elsewhere", "guess"),
    (stored(np.int8, 1), "M1/macOS 14", "", ""),
    (stored(np.uint8, 0), "M1/macOS 14", "", ""),
    (stored(np.int8, 0), "M1/macOS 14, CPU_ONLY", "", ""),
    (as_op(), "M3 Max/macOS 26", "fault-softplus-cliff", "reported"),
    (as_op(), "M1/macOS 26", "fault-softplus-cliff", "reported"),
    (as_op(), "any", "fault-softplus-cliff", "reported"),
    (as_op(), "M3/macOS 14", "fault-softplus-cliff-elsewhere", "guess"),
    (as_op(), "iPhone 13/iOS 26", "fault-softplus-cliff-elsewhere", "guess"),
    (as_op(10.0), "M3/macOS 26", "", ""),
    (depthwise(1600), "iPhone 13/iOS 16", "fault-depthwise-concat", "reported"),
    (depthwise(1600), "M4/macOS 26", "fault-depthwise-concat-elsewhere", "guess"),
    (depthwise(1), "iPhone 13/iOS 16", "", ""),
    (depthwise(1000, 200), "iPhone 13/iOS 16", "", ""),
    (outputs(1, 1, 8, 8), "iPhone 15 Pro/iOS 18", "fault-fp32-output", "reported"),
    (outputs(1, 32), "iPhone 15 Pro/iOS 18", "", ""),
    (outputs(1, 1, 8, 8), "iPhone 15 Pro/iOS 17", "", ""),
    (outputs(1, 1, 8, 8), "any", "", ""),
    (sampled(), "M5/macOS 26, CPU_AND_NE", "fault-chosen-places", "reported"),
    (sampled(), "M5/macOS 26, ALL", "fault-chosen-places-elsewhere", "guess"),
    (sampled(), "iPhone 17/iOS 26, ALL", "fault-chosen-places-elsewhere", "guess"),
    (sampled(), "M5/macOS 26, CPU_AND_GPU", "", ""),
    (sampled(), "M3/macOS 26", "fault-chosen-places-elsewhere", "guess"),
    (sampled(choose=False), "M5/macOS 26", "", ""),
    (sampled(dtype=types.fp32), "M5/macOS 26", "", ""),
    (chosen(True), "A19 Pro", "fault-topk-gather-elsewhere", "guess"),
    (chosen(True), "M1/macOS 14", "", ""),
    (chosen(True), "M3", "", ""),
    (chosen(True), "any", "", ""),
    (chosen(True), "iPhone 17 Pro/iOS 27", "fault-topk-gather-elsewhere", "guess"),
    (chosen(False), "iPhone 17 Pro/iOS 27", "", ""),
]


@pytest.mark.parametrize(("program", "target", "rule", "grade"), SAYS)
def test_a_fault_is_a_claim_where_it_was_seen_and_a_warning_elsewhere(
    program: Program, target: str, rule: str, grade: str
) -> None:
    target, _, units = target.partition(", ")
    inspection = ane.inspect(program, target=target, compute_units=units or None)
    found = [f for f in inspection.all_findings if f.rule.startswith("fault-")]
    assert [f.rule for f in found] == [rule] * bool(rule)
    assert [f.grade.value for f in found] == [grade] * bool(rule)


@dataclass(frozen=True)
class Unsafe(Rewrite):
    """Writes the op softplus, whatever it reads."""

    name = "unsafe"
    tolerance = an.Tolerance(1e-3)
    tolerates_nonfinite = False

    def pattern(self, op: Any) -> Any:
        """A softplus that is written out."""
        return op.log(x=op.add(x=op.exp(x=an.var("x")), y=an.var("one")))

    def rewrite(self, mb: Any, m: Any) -> Any:
        """The op."""
        return mb.softplus(x=m.x)


def test_a_recipe_writes_no_op_into_its_range() -> None:
    recipe = Recipe(name="unsafe_recipe", steps=(Unsafe(),), psnr=60.0)
    done = ane.apply(written(), recipe, target="M3 Max/macOS 26", prove=None)
    assert not done.changes
    assert "reported wrong on M3 Max/macOS 26" in str(done.refusals[0][1])
    assert ane.apply(written(), recipe, target="M2/macOS 26", prove=None).changes


def test_a_pass_by_name_warns() -> None:
    with pytest.warns(ane.SurgeryWarning, match="reported wrong on M3 Max"):
        done = ane.apply(written(), Unsafe(), target="M3 Max/macOS 26", prove=None)
    assert done.changes
    assert any("reported wrong" in note for note in done.notes)


def test_a_pass_that_only_moves_a_faulty_op_is_free() -> None:
    @dataclass(frozen=True)
    class Again(Rewrite):
        name = "again"
        kinds = frozenset({"softplus"})

        def check(self, m: Any) -> Any:
            """Once."""
            return an.NO_MATCH if an.producer(m.root.x, "mul") else m

        def rewrite(self, mb: Any, m: Any) -> Any:
            """The same op, of the same value twice negated."""
            return mb.softplus(x=mb.mul(x=mb.mul(x=m.root.x, y=-1.0), y=-1.0), name="y2")

    recipe = Recipe(name="again_recipe", steps=(Again(),), psnr=60.0)
    refused = ane.apply(as_op(), recipe, target="M3/macOS 26", prove=None).refusals
    assert not any("reported wrong" in str(reason) for _, reason in refused)


def test_the_written_form_stays_right_on_the_chip() -> None:
    x = np.linspace(-20, 40, 128, dtype=np.float16).reshape(4, 32)
    with pytest.warns(ane.SurgeryWarning, match="expected time would rise"):
        done = ane.apply(written(), "auto", target="M3 Max/macOS 26", inputs={"x": x})
    meant = ane.run(written(), {"x": x})["y"]
    got = ane.run(done.program, {"x": x}, precision="ane:M3")["y"]
    np.testing.assert_allclose(got, meant, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize(("target", "said"), [("M3 Max/macOS 26", True), ("M1/macOS 14", False)])
def test_the_first_line_says_why_a_repair_costs_time(target: str, said: bool) -> None:
    surgery = ane.apply(as_op(), "auto", target=target, quiet=True)
    first = " ".join(str(surgery).split("\n\n")[0].split())
    assert ("repaired, as reported of this target: fault-softplus-cliff" in first) is said
    assert bool(surgery.changes) is said


def test_chips_lists_each_fault_of_a_chip() -> None:
    shown = json.loads(CliRunner().invoke(app, ["chips", "--target", "M3", "--json"]).stdout)
    names = {row["name"] for row in shown["faults"]}
    assert {"softplus-cliff", "log-sum-cliff"} <= names
    assert "depthwise-concat" not in names
    everywhere = json.loads(CliRunner().invoke(app, ["chips", "--json"]).stdout)
    assert [row["name"] for row in everywhere["faults"]] == [fault.name for fault in FAULTS]


def test_the_page_has_every_row() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engine-faults.md").read_text()
    for fault in FAULTS:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{fault.name}` "))
        for cell in (fault.what, fault.seen, fault.source, fault.remedy or fault.advice):
            assert cell in row
