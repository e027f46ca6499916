"""What the old format's rules let run on the ANE can run there after an upgrade, by the same measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import bad_networks
import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.interpret import run
from anesurgery.loading import load
from anesurgery.mil import ct, dtype_name, walk_ops
from anesurgery.network_editing.upgrade import NOTES
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.compute_fp16 import ComputeFp16
from anesurgery.placement.networks import inspect_network
from anesurgery.placement.score import OFF, Score
from anesurgery.placement.target import Target
from anesurgery.rewriting.choosing import is_clearly_faster
from anesurgery.surgery import find_recipe
from anesurgery.testing import apply_pass

TARGETS = ("M1/macOS 14", "M4/macOS 15")
ROWS = 5000


def table() -> np.ndarray[Any, Any]:
    """Rows that tell their number in two digits, which fp16 holds."""
    return np.stack([np.arange(ROWS) // 100, np.arange(ROWS) % 100], 1).astype(np.float32)


def lookup() -> Any:
    """Ids (1, 3) -> expand_dims -> embeddingND -> a product with a matrix."""
    weights = {"floatValue": table().T.reshape(-1)}
    square = {"floatValue": np.eye(2).reshape(-1)}
    layers = [
        make_layer("expandDims", ["ids"], ["wide"], axes=[-1]),
        make_layer("embeddingND", ["wide"], ["rows"], vocabSize=ROWS, embeddingSize=2, weights=weights),
        make_layer(
            "batchedMatmul",
            ["rows"],
            ["y"],
            weightMatrixFirstDimension=2,
            weightMatrixSecondDimension=2,
            weights=square,
        ),
    ]
    return make_network({"ids": (1, 3)}, layers, ["y"])


def saved(spec: Any, folder: Path) -> Path:
    path = folder / "network.mlmodel"
    path.write_bytes(spec.SerializeToString())
    return path


def test_ids_that_come_as_floats_stay_exact(tmp_path: Path) -> None:
    """The wrong version: ids above 2048 that pass through fp16 look up another row."""
    program = load(ane.upgrade(saved(lookup(), tmp_path), precision="fp16")).program
    assert [op.op_type for op in walk_ops(program) if op.op_type != "const"][:2] == ["cast", "gather"]
    ids = np.array([[2049, 4999, 7]], np.float32)
    (y,) = run(program, {"ids": ids}, precision="fp16").values()
    assert (np.asarray(y) == table()[ids.astype(int)]).all()


@pytest.mark.parametrize(("ranges", "moves"), [(None, "fp32"), ({"ids": (0, 1000)}, "fp16")])
def test_moves_of_whole_numbers_stay_fp32_unless_they_are_known_to_be_small(ranges: Any, moves: str) -> None:
    from anesurgery.mil import mb

    @mb.program(input_specs=[mb.TensorSpec((1, 3))])
    def program(ids: Any) -> Any:
        wide = mb.expand_dims(x=ids, axes=[2], name="wide")
        return mb.gather(x=table(), indices=mb.cast(x=wide, dtype="int32"), axis=0, name="rows")

    after, session = apply_pass(ComputeFp16(ranges=ranges), program)
    (wide,) = [op for op in walk_ops(after) if op.op_type == "expand_dims"]
    assert dtype_name(wide.outputs[0]) == moves
    said = [str(refusal.reason) for _, refusal in session.refusals]
    assert any("%ids gives the integers of" in words for words in said) is (moves == "fp32")


def test_the_flop_of_layers_are_those_of_their_ops(tmp_path: Path) -> None:
    found = inspect_network(lookup(), Target.parse("M4/macOS 15"), "m")
    assert [row.flop for row in found.ops] == [0, 0, 2 * 3 * 2 * 2]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["mlt_es2en_char_decoder16", "mlt_gesture_classifier"])
def test_an_upgrade_keeps_what_can_run_on_the_ane(name: str, target: str, corpus: Path) -> None:
    layers = Score.of_layers(ane.inspect(corpus / f"{name}.mlmodel", target=target))
    upgraded = Score.of_upgraded(load(ane.upgrade(corpus / f"{name}.mlmodel")), Target.parse(target))
    assert upgraded.ops > 1
    assert upgraded.loss(layers, ["can run"]) == ""


def test_a_program_in_fp32_can_run_less(tmp_path: Path) -> None:
    """The wrong version: the same layers as fp32 ops."""
    layers = [make_layer("unary", ["x"], ["y"], type="EXP")]
    path = saved(make_network({"x": (1, 2, 4, 4)}, layers, ["y"]), tmp_path)
    before, aim = Score.of_layers(ane.inspect(path, "M4/macOS 15")), Target.parse("M4/macOS 15")
    slow, fast = (Score.of_upgraded(load(ane.upgrade(path, precision=p)), aim) for p in ("fp32", "fp16"))
    assert (
        slow.loss(before, ["can run"]) == "the share of the ops that the ANE can run would fall 100.0% -> 0.0%"
    )
    assert fast.loss(before, ["can run"]) == ""


def held(path: Path, how: str) -> Any:
    """A network as a user may give it."""
    return path if how == "path" else ct.models.MLModel(str(path), skip_model_load=True)


@pytest.mark.parametrize("how", ["path", "MLModel"])
def test_a_network_that_auto_can_only_make_worse_stays_one(tmp_path: Path, how: str) -> None:
    """The wrong versions: an fp32 program without an edit, which stays off the ANE; an error."""
    layers = [make_layer("activation", ["x"], ["y"], linear={"alpha": 1e6})]
    path = saved(make_network({"x": (1, 64, 8, 8)}, layers, ["y"]), tmp_path)
    target = "M4/macOS 15"
    assert Score.of_layers(ane.inspect(path, target=target)).can_run["ops"] == 1
    program = load(path).program
    assert not ane.apply(program, "auto", target=target, quiet=True).changes
    surgery = ane.apply(held(path, how), "auto", target=target, prove="both", quiet=True)
    stays_a_network(surgery, path, tmp_path)


def stays_a_network(surgery: ane.Surgery, path: Path, folder: Path) -> None:
    """It is given back as it was, and the surgery says why."""
    (refusal,) = (refusal for name, refusal in surgery.refusals if name == "auto")
    assert refusal.reason.startswith("the neural network stays as it is: the share of the ")
    assert "neuralnetwork_ane" in refusal.reason
    assert not surgery.changes
    kept = surgery.save(folder / "kept.mlmodel")
    assert ane.compare(path, kept, precision="fp32").psnr == float("inf")


@pytest.mark.one_of(3)
@pytest.mark.parametrize("target", [None, *TARGETS])
@pytest.mark.parametrize("mode", [None, "classifier"])
def test_auto_raises_for_no_healthy_network(tmp_path: Path, target: str | None, mode: str | None) -> None:
    """The wrong version: an error, since the program that was made of it has ops that no layer has."""
    path = tmp_path / "network.mlmodel"
    path.write_bytes(bad_networks.build(mode).SerializeToString())
    stays_a_network(ane.apply(path, "auto", target=target, quiet=True), path, tmp_path)


def convolutions(between: Sequence[Any]) -> Any:
    """Two convolutions of (1, 64, 32, 32), and layers that go from "a" to "b" between them."""
    weights = {"floatValue": np.random.default_rng(0).normal(0, 0.05, 64 * 64 * 9)}
    sizes: dict[str, Any] = {"outputChannels": 64, "kernelChannels": 64, "kernelSize": [3, 3], "same": {}}
    first, second = (
        make_layer("convolution", [x], [y], weights=weights, **sizes) for x, y in (("x", "a"), ("b", "y"))
    )
    return make_network({"x": (1, 64, 32, 32)}, [first, *between, second], ["y"])


def clipped() -> list[Any]:
    """ReLU6 as TensorFlow's converter writes it: in four layers."""
    return [
        make_layer("activation", ["a"], ["p"], ReLU={}),
        make_layer("activation", ["p"], ["q"], linear={"alpha": -1.0}),
        make_layer("unary", ["q"], ["r"], type="THRESHOLD", alpha=-6.0, scale=1.0),
        make_layer("activation", ["r"], ["b"], linear={"alpha": -1.0}),
    ]


def test_auto_edits_layers_where_that_pays_more_than_an_ml_program(tmp_path: Path) -> None:
    """The wrong version: an ML Program in fp16, or nothing, where layers can be joined bit for bit."""
    path = saved(convolutions(clipped()), tmp_path)
    surgery = ane.apply(path, "auto", target="iPhone 13", quiet=True)
    assert [change.pass_name for change in surgery.changes] == ["fuse_clip"]
    assert surgery.save(tmp_path / "edited.mlmodel").exists()
    assert ane.plan(path, "auto", target="iPhone 13").recipe == "neuralnetwork_ane"


@pytest.mark.parametrize(("times", "expected"), [(24, False), (23, False), (12, True)])
def test_an_ml_program_must_save_a_tenth_of_the_time_of_the_layers(
    tmp_path: Path, times: int, expected: bool
) -> None:
    """The wrong version: "1.05 ms -> 1.02 ms, as fast as before", for values that are rounded now."""

    def score(count: int) -> Score:
        names = ["a", *(f"c{i}" for i in range(count - 1)), "b"]
        weights = {"floatValue": np.zeros(64 * 64 * 9)}
        sizes: dict[str, Any] = {"outputChannels": 64, "kernelChannels": 64, "kernelSize": [3, 3], "same": {}}
        chain = [make_layer("convolution", [x], [y], weights=weights, **sizes) for x, y in pairwise(names)]
        return Score.of_layers(ane.inspect(saved(convolutions(chain), tmp_path), target="iPhone 13"))

    assert is_clearly_faster(score(times), score(24)) is expected
    assert is_clearly_faster(None, score(24)) is None


def test_auto_edits_the_layers_around_a_custom_one(tmp_path: Path) -> None:
    """The wrong version: an error, since no ML Program can be made of a custom layer."""
    custom = make_layer("custom", ["y"], ["z"], className="Swish2")
    spec = convolutions([make_layer("softmaxND", ["a"], ["b"], axis=1)])
    spec.neuralNetwork.layers.append(custom)
    spec.description.output[0].name = "z"
    surgery = ane.apply(saved(spec, tmp_path), "auto", target="iPhone 13", quiet=True)
    assert [change.pass_name for change in surgery.changes] == ["legacy_softmax"]


@pytest.mark.parametrize(
    ("out", "written"), [(None, "network_ane.mlmodel"), ("a.mlmodel", "a.mlmodel"), ("a.mlpackage", None)]
)
def test_the_name_of_the_result_decides_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str | None, written: str | None
) -> None:
    """The wrong version: `fix network.mlmodel auto --out a.mlmodel` is refused before any work is done."""
    monkeypatch.chdir(tmp_path)
    saved(convolutions(clipped()), tmp_path)
    words = ["fix", "network.mlmodel", "auto", "--target", "iPhone13", *(["--out", out] if out else [])]
    CliRunner().invoke(cli.app, words)
    results = [path.name for path in tmp_path.iterdir() if path.name != "network.mlmodel"]
    assert results == ([written] if written else [])


def test_a_network_of_which_nothing_can_run_is_not_refused(tmp_path: Path) -> None:
    """The wrong version: whatever was a network and is not edited is refused."""
    path = saved(make_network({"x": (1, 64, 8, 8)}, [make_layer("ceil", ["x"], ["y"])], ["y"]), tmp_path)
    target = "M4/macOS 15"
    assert Score.of_layers(ane.inspect(path, target=target)).can_run["ops"] == 0
    assert ane.apply(path, "auto", target=target, quiet=True).after == {"ceil": 1}
    assert ane.apply(path, "negate_subtract", target=target, quiet=True).changes == []


@pytest.mark.slow
@pytest.mark.parametrize("target", ["M2/macOS 14", "M4/macOS 15"])
def test_pixels_are_checked_as_pixels(corpus: Path, target: str) -> None:
    """The wrong version: an image of normal numbers keeps 44 dB in fp16, and auto gives the fp32 form."""
    surgery = ane.apply(corpus / "blazeface_scaled.mlmodel", "auto", target=target, prove=None, quiet=True)
    assert "compute_fp16" in {change.pass_name for change in surgery.changes}
    assert not [words for words in surgery.notes if "in fp32, which the ANE does not run" in words]


@pytest.mark.slow
def test_what_nobody_knows_is_no_reason_to_leave_the_layers(corpus: Path) -> None:
    """On an M1 the fp32 pixels are cast on the CPU, and it is open where the ops behind them run."""
    surgery = ane.apply(
        corpus / "blazeface_scaled.mlmodel", "auto", target="M1/macOS 14", prove=None, quiet=True
    )
    assert surgery.changes == []
    assert "the neural network stays as it is" in surgery.details


@pytest.mark.slow
def test_a_network_whose_numbers_leave_fp16_stays_one(corpus: Path) -> None:
    surgery = ane.apply(corpus / "sinet_portrait_seg.mlmodel", "auto", target="M4/macOS 15", quiet=True)
    assert "share of the flop that the ANE can run would fall 100.0% -> 0.0%" in surgery.refusals[0][1].reason
    assert not surgery.changes


def test_a_share_that_falls_since_less_is_left_on_the_ane_is_no_loss(corpus: Path) -> None:
    """Two layers become one: 7 of 9 are 6 of 8, and as many are off the ANE."""
    steps = list(find_recipe("neuralnetwork_ane").steps)
    surgery = ane.apply(corpus / "mlt_gesture_classifier.mlmodel", steps, prove=None, quiet=True)
    before, after = (Score.of_layers(found[0]) for found in surgery.inspected)
    assert after.share["ops"] < before.share["ops"]
    assert after.ops - after.on_ops == before.ops - before.on_ops
    assert after.loss(before, OFF) == ""
    before, fewer = replace(before, flop=100, on_flop=80), replace(after, flop=50, on_flop=30)
    assert fewer.loss(before, OFF) == ""
    moved = replace(fewer, on_flop=25)
    assert moved.loss(before, OFF) == "the share of the work on the ANE would fall 80.0% -> 50.0%"


def norm(x: str, y: str, variance: float) -> Any:
    """A batch norm that multiplies by about 1."""
    values = {"gamma": variance**0.5, "beta": 0.1, "mean": 0.5, "variance": variance}
    numbers: dict[str, Any] = {name: {"floatValue": [value] * 8} for name, value in values.items()}
    return make_layer("batchnorm", [x], [y], channels=8, epsilon=1e-9, **numbers)


def convolution(x: str, y: str, seed: int) -> Any:
    weights = np.random.default_rng(seed).standard_normal(8 * 8 * 9).astype(np.float32) / 8
    sizes: dict[str, Any] = {"outputChannels": 8, "kernelChannels": 8, "kernelSize": [3, 3], "nGroups": 1}
    return make_layer("convolution", [x], [y], **sizes, weights={"floatValue": weights}, same={})


def shift(x: str, y: str, beta: float) -> Any:
    return make_layer("activation", [x], [y], linear={"alpha": 1.0, "beta": beta})


CONVOLUTIONS = [convolution("x", "a", 0), convolution("a", "b", 1), convolution("b", "c", 2)]
IN_HALF = {
    "a variance that the fold takes away": [*CONVOLUTIONS, norm("c", "y", 1e5)],
    "one before a convolution": [norm("x", "c", 1e5), convolution("c", "y", 0)],
    "one that fp16 makes 0": [norm("x", "c", 1e-8), convolution("c", "y", 0)],
    "nothing": [*CONVOLUTIONS, shift("c", "y", 0.5)],
}


@pytest.mark.filterwarnings("error::anesurgery.errors.SurgeryWarning")
@pytest.mark.parametrize("layers", IN_HALF.values(), ids=IN_HALF)
def test_an_upgrade_computes_in_fp16_as_core_ml_did(layers: list[Any], tmp_path: Path) -> None:
    """The wrong version: a variance above 65504 leaves all ops behind it in fp32."""
    path = saved(make_network({"x": (1, 8, 16, 16)}, layers, ["y"]), tmp_path)
    upgraded = ane.upgrade(path)
    assert Score.of_upgraded(load(upgraded), Target.parse("M4/macOS 15")).can_run["ops"] == 1
    assert ane.compare(ane.upgrade(path, precision="fp32"), upgraded, precision="fp16").psnr >= 60
    assert "it computes in fp16; its outputs are" in upgraded.user_defined_metadata[NOTES]


def test_only_the_ops_that_fp16_breaks_stay_fp32(tmp_path: Path) -> None:
    """The wrong version: a network of which fp16 keeps less than 60 dB is fp32 from end to end."""
    lossy = [shift("c", "up", 3000), shift("up", "down", -3000)]
    layers = [*CONVOLUTIONS, *lossy, convolution("down", "d", 3), convolution("d", "y", 4)]
    path = saved(make_network({"x": (1, 8, 16, 16)}, layers, ["y"]), tmp_path)
    with pytest.warns(ane.SurgeryWarning, match=r"fp32 ops, .* but for 2 ops from up to down"):
        upgraded = ane.upgrade(path)
    program = load(upgraded).program
    wide = [
        op.op_type for op in walk_ops(program) if op.op_type != "cast" and dtype_name(op.outputs[0]) == "fp32"
    ]
    assert [kind for kind in wide if kind not in ("const", "cast")] == ["linear_activation"] * 2
    assert ane.compare(ane.upgrade(path, precision="fp32"), upgraded, precision="fp16").psnr >= 60
