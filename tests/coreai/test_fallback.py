"""The package that devices without Core AI run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_ai_models import linear_asset, needs_core_ai, save_asset
from torch.export import Dim
from torch_modules import Formula, made

import anesurgery as ane
from anesurgery.errors import LoadError, SurgeryError, UnknownName
from anesurgery.files.copying import copy_program
from anesurgery.mil import Var, ct, mb, types

pytestmark = needs_core_ai


def test_the_oldest_release_that_has_all_ops_is_taken(tmp_path: Path) -> None:
    path = save_asset(tmp_path / "m.aimodel", *made("encoder"))
    written = ane.to_coreml(path, tmp_path / "m.mlpackage")
    assert written.ios == 15
    assert "runs on iOS 15, macOS 12 and later" in str(written)
    x = {"x": made("encoder")[1][0].numpy()}
    before, after = ane.run(path, x)["y"], ane.run(written.path, x)["y"]
    assert np.allclose(before, after, atol=1e-5)  # attention is one op in the one, and several in the other


def test_half_inputs_need_a_newer_one(tmp_path: Path) -> None:
    path = save_asset(tmp_path / "m.aimodel", *made("mlp", half=True))
    assert ane.to_coreml(path, tmp_path / "m.mlpackage").ios == 16
    with pytest.raises(LoadError, match="x is fp16, which iOS 15 does not take; give ios=16"):
        ane.to_coreml(path, tmp_path / "n.mlpackage", ios=15)


def test_open_axes_get_an_end(tmp_path: Path) -> None:
    module, _ = made("layer_norm")
    shapes = {"input": {1: Dim("rows", min=2, max=64)}}
    path = save_asset(tmp_path / "m.aimodel", module, [torch.randn(2, 5, 16)], dynamic_shapes=shapes)
    for rows in (3, 9):
        x = torch.randn(2, rows, 16)
        expected = module(x).detach().numpy()
        assert np.allclose(ane.run(path, {"x": x.numpy()})["y"], expected, atol=1e-5)
        assert np.allclose(ane.run(path, {"x": x.numpy()}, engine="coreai")["y"], expected, atol=1e-5)
    written = ane.to_coreml(path, tmp_path / "m.mlpackage", longest=8)
    assert "open axes of x take 1 to 8" in written.notes
    assert ane.run(written.path, {"x": np.ones((2, 8, 16))})["y"].shape == (2, 8, 16)
    with pytest.raises(SurgeryError, match=r"expected \(2, 1..8, 16\)"):
        ane.run(written.path, {"x": np.ones((2, 9, 16))})


def test_truth_values_and_odd_names_are_noted(tmp_path: Path) -> None:
    module = Formula(lambda s, x: x.logical_not())
    path = save_asset(tmp_path / "m.aimodel", module, [torch.ones(3).bool()], ["the y"])
    notes = ane.to_coreml(path, tmp_path / "m.mlpackage").notes
    assert "input x holds i1 in the file, and int32 here" in notes
    assert any(note.startswith("the y is called the_y") for note in notes)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [({"ios": 14}, UnknownName, "unknown release of iOS '14'"), ({"longest": 0}, SurgeryError, "longest=0")],
)
def test_what_cannot_be_is_said(
    how: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    path = linear_asset(tmp_path / "m.aimodel")
    with pytest.raises(error, match=words):
        ane.to_coreml(path, tmp_path / "m.mlpackage", **how)
    with pytest.raises(LoadError, match="give a model of Core AI"):
        ane.to_coreml(tmp_path / "m.mlpackage", tmp_path / "n.mlpackage")
    assert not list(tmp_path.glob("*.mlpackage"))


WINDOWS: dict[str, Formula] = {
    "windows": Formula(lambda s, x: x.view(2, 3, 4, 3, 4, 5).transpose(2, 3).reshape(-1, 16, 5)),
    "an exchange of all axes": Formula(
        lambda s, x: (x.view(2, 3, 4, 3, 4, 5).permute(5, 3, 1, 4, 2, 0) * 2).sum(1).reshape(5, -1)
    ),
    "unfold": Formula(lambda s, x: torch.nn.functional.unfold(x, 3, padding=1)),
}


@pytest.mark.parametrize("name", sorted(WINDOWS))
def test_six_axes_are_written_with_fewer(name: str, tmp_path: Path) -> None:
    x = torch.randn(2, 12, 12, 5)
    path = save_asset(tmp_path / "m.aimodel", WINDOWS[name], [x])
    written = ane.to_coreml(path, tmp_path / "m.mlpackage")
    assert np.array_equal(ane.run(written.path, {"x": x.numpy()})["y"], WINDOWS[name](x).numpy())


def test_an_output_of_six_axes_is_refused(tmp_path: Path) -> None:
    path = save_asset(tmp_path / "m.aimodel", Formula(lambda s, x: x.relu()), [torch.randn(2, 1, 2, 3, 2, 5)])
    with pytest.raises(LoadError, match="%y has 6 axes, and Core ML stores at most 5; reshape it in the model"):
        ane.to_coreml(path, tmp_path / "m.mlpackage")
    assert not (tmp_path / "m.mlpackage").exists()


def test_a_palette_of_six_axes_is_kept(tmp_path: Path) -> None:
    lut, indices = np.arange(16, dtype=np.float16), np.arange(64, dtype=np.uint8).reshape(8, 2, 2, 2) % 16

    @mb.program(input_specs=[mb.TensorSpec((1, 2, 5, 5), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def palettized(x: Var) -> Var:
        stored = indices.astype(types.nptype_from_builtin(types.uint4))
        weight = mb.constexpr_lut_to_dense(indices=stored, lut=lut.reshape(1, 1, 1, 1, 16, 1))
        return mb.conv(x=x, weight=weight, name="y")

    path = ane.to_coreai(palettized, tmp_path / "m.aimodel").path
    written = ane.to_coreml(path, tmp_path / "m.mlpackage")
    assert written.ios == 18
    assert ane.compare(palettized, written.path).ok


def test_several_functions_need_ios_18(tmp_path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 4))], opset_version=ct.target.iOS15)
    def both(x: Var) -> Var:
        return mb.relu(x=x, name="y")

    both.add_function("other", copy_program(both).functions["main"])
    path = ane.to_coreai(both, tmp_path / "m.aimodel").path
    assert ane.to_coreml(path, tmp_path / "m.mlpackage").ios == 18
    with pytest.raises(LoadError, match="it has several functions, which iOS 17 does not take; give ios=18"):
        ane.to_coreml(path, tmp_path / "n.mlpackage", ios=17)


def test_the_models_of_a_pipeline_become_one(tmp_path: Path) -> None:
    def model(name: str, given: str) -> Any:
        @mb.program(input_specs=[mb.TensorSpec((1, 4))], opset_version=ct.target.iOS15)
        def program(x: Var) -> Var:
            return mb.relu(x=mb.sub(x=x, y=np.float32(0.5)), name=name)

        function = program.functions["main"]
        function.inputs[given] = function.inputs.pop("x")
        function.inputs[given].name = given
        how = {"skip_model_load": True, "compute_precision": ct.precision.FLOAT32}
        return ct.convert(program, minimum_deployment_target=ct.target.iOS15, **how)

    source = tmp_path / "two.mlpackage"
    ct.utils.make_pipeline(model("y", "x"), model("z", "y")).save(str(source))
    path = ane.to_coreai(source, tmp_path / "m.aimodel").path
    x = {"x": np.array([[0.2, 0.7, 1.2, 3.0]], np.float32)}
    assert np.allclose(ane.run(path, x)["z"], [[0, 0, 0.2, 2]])
