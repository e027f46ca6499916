"""8-bit inputs: the form that coremltools writes, what does not stand it, a product that a chip gets wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.compressing import activations
from anesurgery.compressing.activations import METHODS, clip_products
from anesurgery.errors import SurgeryError
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.score import placed
from anesurgery.placement.target import Target

RNG = np.random.default_rng(11)
WIDTH = 32
FILTERS = (RNG.standard_normal((16, 4, 3, 3)) / 6).astype(np.float16)
HEAD = (RNG.standard_normal((WIDTH, 16 * 36)) / 24).astype(np.float16)
LAYER = (RNG.standard_normal((WIDTH, WIDTH)) / 6).astype(np.float16)


def network(opset: Any = ct.target.iOS18) -> Program:
    """A convolution and a head."""

    @mb.program(input_specs=[mb.TensorSpec((2, 4, 8, 8), dtype=types.fp16)], opset_version=opset)
    def program(x: Var) -> Var:
        h = mb.relu(x=mb.conv(x=x, weight=FILTERS, name="first"))
        return mb.linear(x=mb.reshape(x=h, shape=(2, 16 * 36)), weight=HEAD, name="y")

    return program


def pictures(count: int = 12) -> list[dict[str, Any]]:
    return [{"x": RNG.standard_normal((2, 4, 8, 8)).astype(np.float16)} for _ in range(count)]


def layer(rows: int = 24) -> Program:
    return mb.program(
        input_specs=[mb.TensorSpec((rows, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS18
    )(lambda x: mb.linear(x=x, weight=LAYER, name="y"))


def words(count: int = 12, largest: float = 1.0) -> list[dict[str, Any]]:
    """Positions, the first of which has one channel that is so large."""
    given = [RNG.standard_normal((24, WIDTH)) for _ in range(count)]
    for each in given:
        each[0, 3] = largest
    return [{"x": each.astype(np.float16)} for each in given]


def kinds(model: Any) -> list[str]:
    (function,) = ane.load(model).program.functions.values()
    return [op.op_type for op in function.operations if op.op_type != "const"]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("method", METHODS)
def test_inputs_and_weights_of_8_bits(method: str, tmp_path: Path) -> None:
    given = pictures()
    found = ane.compress(network(), 8, inputs=given, activations=method, target="A17", smallest=100)
    path = found.save(tmp_path / "small.mlpackage")
    ct.models.MLModel(str(path), skip_model_load=True)
    decode = "constexpr_blockwise_shift_scale"
    assert sorted(kinds(path)) == sorted(
        [
            "quantize",
            "dequantize",
            decode,
            "conv",
            "relu",
            "reshape",
            "quantize",
            "dequantize",
            decode,
            "linear",
        ]
    )
    assert [row.inputs for row in found.compressed] == ["int8", "int8"]
    assert all(row.cosine is not None and row.cosine > 0.999 for row in found.compressed)
    assert found.loss is not None
    assert 30 < found.loss.psnr < 70  # lower is broken; higher means that nothing was quantized
    assert "inputs of 8 bits: of 2 weights" in str(found)


def test_the_pair_is_what_coremltools_writes() -> None:
    """Their own pass, told the same range, makes the same two ops of the same numbers."""
    given, theirs = words(), layer()
    found = ane.compress(layer(), 8, inputs=given, activations="max", target="A17", smallest=100)
    largest = max(float(np.abs(one["x"]).max()) for i, one in enumerate(given) if i % 4 != 3)
    config = ct.optimize.coreml.OptimizationConfig(
        global_config=ct.optimize.coreml.OpLinearQuantizerConfig(mode="linear_symmetric")
    )
    graph_pass = ct.converters.mil.mil.passes.pass_registry.PASS_REGISTRY[
        "compression::insert_prefix_quantize_dequantize_pair"
    ]
    graph_pass.config = config
    graph_pass.activation_stats = {"x": {"rmin": -largest, "rmax": largest}}
    graph_pass.apply(theirs)
    ours = found.subject.loaded.program
    pairs = [
        [op for op in p.functions["main"].operations if op.op_type in ("quantize", "dequantize")]
        for p in (theirs, ours)
    ]
    assert [op.op_type for op in pairs[0]] == [op.op_type for op in pairs[1]]
    for a, b in zip(*pairs, strict=True):
        assert a.inputs.keys() == b.inputs.keys()
        assert a.scale.val.dtype == b.scale.val.dtype
        assert a.scale.val == b.scale.val


def test_a_layer_with_outliers_keeps_its_inputs() -> None:
    """The wrong version takes one cosine of all products: the position of the outlier hides all others."""
    given = words(largest=400.0)
    found = ane.compress(layer(), 8, inputs=given, activations="max", target="A17", smallest=100)
    (row,) = found.compressed
    assert (row.form, row.scales) == ("int8", ())
    assert row.cosine is not None
    assert row.cosine < activations.LEAST_COSINE
    assert f"have a cosine of {row.cosine:.4f}, below 0.995" in row.inputs
    assert "quantize" not in kinds(found.model)
    assert "inputs unchanged" in str(found)
    scale = 400 / 127
    plain = np.concatenate([one["x"].astype(np.float64) for one in given]) @ LAYER.T.astype(np.float64)
    coded = np.concatenate([np.rint(one["x"].astype(np.float64) / scale) * scale for one in given])
    coded = coded @ LAYER.T.astype(np.float64)
    hidden = (plain * coded).sum() / np.sqrt((plain**2).sum() * (coded**2).sum())
    assert hidden > activations.LEAST_COSINE


def test_a_percentile_holds_the_rest_where_one_number_is_large() -> None:
    sizes = np.abs(RNG.standard_normal(200_000))
    sizes[0] = 1000.0
    reach = {name: method(sizes) for name, method in METHODS.items()}
    assert reach["max"] == 1000
    assert 3 < reach["percentile"] < 6


def multiplied() -> Program:
    """A product of a dequantized value, which a layer reads."""

    @mb.program(input_specs=[mb.TensorSpec((24, WIDTH), dtype=types.fp16)] * 2, opset_version=ct.target.iOS18)
    def program(x: Var, a: Var) -> Var:
        half = np.float16(1 / 32)
        b = mb.dequantize(input=mb.quantize(input=x, scale=half, output_dtype="int8"), scale=half)
        return mb.linear(x=mb.mul(x=a, y=b, name="product"), weight=LAYER, name="y")

    return program


def test_a_quantized_product_of_a_dequantized_value_is_clipped() -> None:
    given = [{"x": w["x"], "a": v["x"]} for w, v in zip(words(), words(), strict=True)]
    found = ane.compress(multiplied(), 8, inputs=given, activations="percentile", target="A17", smallest=100)
    order = [k for k in kinds(found.model) if not k.startswith("constexpr")]
    assert order == ["quantize", "dequantize", "mul", "clip", "quantize", "dequantize", "linear"]


@pytest.mark.parametrize(("dtype", "zero"), [("int8", None), ("int8", 5), ("uint8", 131)])
def test_the_clip_changes_no_code(dtype: str, zero: int | None) -> None:
    """Far outside the range and at its ends; a clip to 127 of 128 levels would lose the least code."""
    scale = np.float16(0.0173)
    point = {} if zero is None else {"zero_point": np.dtype(dtype).type(zero)}

    @mb.program(input_specs=[mb.TensorSpec((4096,), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        one = np.float16(1 / 64)
        b = mb.dequantize(input=mb.quantize(input=x, scale=one, output_dtype="int8"), scale=one)
        y = mb.quantize(input=mb.mul(x=b, y=x), scale=scale, output_dtype=dtype, **point)
        return mb.dequantize(input=y, scale=scale, **point, name="y")

    x = {"x": np.linspace(-4, 4, 4096).astype(np.float16)}
    before = ane.run(program, x)["y"]
    assert clip_products(program) == 1
    assert clip_products(program) == 0
    np.testing.assert_array_equal(ane.run(program, x)["y"], before)
    assert len(np.unique(before)) > 100


def test_functions_that_share_a_weight_share_its_scale(tmp_path: Path) -> None:
    parts = {
        n: ane.save(ane.load(layer(r)), tmp_path / f"{n}.mlpackage") for n, r in (("long", 24), ("short", 1))
    }
    both = ane.merge(parts, tmp_path / "both.mlpackage")
    found = ane.compress(
        both, 8, inputs=words(), function="long", activations="max", target="A17", smallest=100
    )
    scales = [
        [float(op.scale.val) for op in f.operations if op.op_type == "quantize"]
        for f in found.subject.loaded.program.functions.values()
    ]
    assert scales[0] == scales[1] == list(found.weights[0].scales)
    one = {"x": words(1)[0]["x"][:1]}
    path = found.save(tmp_path / "small.mlpackage")
    assert ane.compare(both, path, one, function="short", gate=25).ok


def test_inputs_that_would_leave_the_engine_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version leaves the pair on the CPU, or gives up the weight too."""

    def judged(loaded: Any, target: Target) -> list[Any]:
        (found,) = placed(loaded, target)
        rows = (replace(r, preferred="cpu" if r.op_type == "dequantize" else "ane") for r in found.ops)
        return [replace(found, ops=tuple(rows))]

    monkeypatch.setattr("anesurgery.compressing.compression.placed", judged)
    found = ane.compress(layer(), 8, inputs=words(), activations="max", target="A17", smallest=100)
    (row,) = found.compressed
    assert row.form == "int8"
    assert "would leave the Neural Engine on a chip of the target" in row.inputs
    assert row.scales == ()


def test_weights_are_corrected_for_what_quantized_inputs_make() -> None:
    """The wrong version corrects for the plain inputs: numbers that never come."""
    given = words(largest=15.0)
    found = ane.compress(layer(), 8, inputs=given, activations="max", target="A17", smallest=100)
    (row,) = found.compressed
    scale = row.scales[0]
    x = np.concatenate([one["x"] for i, one in enumerate(given) if i % 4 != 3]).astype(np.float64)
    (function,) = found.subject.loaded.program.functions.values()
    (decode,) = (op for op in function.operations if op.op_type.startswith("constexpr"))
    weight = (decode.data.val.astype(np.float32) * decode.scale.val).astype(np.float16).astype(np.float64)
    errors = []
    for read in ((np.rint(x / scale) * scale).astype(np.float16).astype(np.float64), x):
        whole, off = read @ LAYER.T.astype(np.float64), read @ (weight - LAYER.astype(np.float64)).T
        errors.append((off - off.mean(0)).var() * off.size / (whole**2).sum())  # a bias takes up the mean
    assert abs(row.error - errors[0]) < 0.5 * abs(row.error - errors[1])


BAD: dict[str, tuple[dict[str, Any], Any, str]] = {
    "method": ({"activations": "most"}, ct.target.iOS18, "activations='most'; it may be 'percentile', 'max'"),
    "bits": ({"activations": "max", "bits": 4}, ct.target.iOS18, "say bits=8"),
    "mixed": ({"activations": "max", "mixed": True}, ct.target.iOS18, "without mixed"),
    "opset": ({"activations": "max"}, ct.target.iOS16, "begin at iOS 17"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_an_error(name: str) -> None:
    options, opset, message = BAD[name]
    with pytest.raises(SurgeryError, match=message):
        ane.compress(network(opset), **{"bits": 8, "inputs": pictures(), **options})


def test_the_command_takes_activations(tmp_path: Path) -> None:
    package, call = ane.save(ane.load(layer()), tmp_path / "layer.mlpackage"), []
    for number, values in enumerate(words(8)):
        np.savez(tmp_path / f"{number}.npz", **values)
        call += ["--inputs", str(tmp_path / f"{number}.npz")]
    out = str(tmp_path / "out.mlpackage")
    options = ["--bits", "8", "--activations", "max", "--smallest", "100", "--target", "A17", "--full"]
    done = CliRunner().invoke(cli.app, ["compress", str(package), out, *call, *options])
    assert done.exit_code == 0, done.output
    assert "inputs of 8 bits: of 1 weights" in done.stdout
    assert "quantize" in kinds(out)
