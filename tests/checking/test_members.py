"""Pipelines: run, compare and range-check them as a whole, or one of their models by name or number."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.errors import InterpretError, LoadError, UnknownName
from anesurgery.files.protobuf import proto
from anesurgery.loading import load
from anesurgery.mil import Var, ct, mb, quiet_host, types
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.show import summary

X = {"x": np.array([[-2.0, 3.0]], np.float32)}


def network(slope: float = 2.0, given: str = "x", made: str = "y") -> Any:
    """Doubles, by default."""
    layer = make_layer("activation", [given], [made], linear={"alpha": slope, "beta": 0.0})
    spec = make_network({given: (1, 2)}, [layer], [made])
    spec.description.output[0].type.multiArrayType.shape.extend([1, 2])
    return spec


def pipeline(path: Path, *models: Any, names: tuple[str, ...] = ()) -> Path:
    spec = proto.Model_pb2.Model(specificationVersion=4)
    for model in models:
        spec.pipeline.models.add().CopyFrom(model)
    spec.pipeline.names.extend(names)
    spec.description.input.add().CopyFrom(models[0].description.input[0])
    spec.description.output.add().CopyFrom(models[-1].description.output[0])
    path.write_bytes(spec.SerializeToString())
    return path


def imputer() -> Any:
    """A model without tensor ops."""
    spec = proto.Model_pb2.Model(specificationVersion=1)
    spec.identity.SetInParent()
    spec.description.input.add().CopyFrom(network(given="y").description.input[0])
    spec.description.output.add(name="z").type.multiArrayType.shape.extend([1, 2])
    return spec


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return pipeline(tmp_path / "two.mlmodel", network(), network(-1, "y", "z"), names=("double", "negate"))


def test_run_and_ranges_of_a_member(two: Path) -> None:
    np.testing.assert_array_equal(ane.run(two, X)["z"], [[4, -6]])
    np.testing.assert_array_equal(ane.run(two, X, member="double")["y"], [[-4, 6]])
    np.testing.assert_array_equal(ane.run(two, {"y": X["x"]}, member=1)["z"], [[2, -3]])
    assert len(ane.ranges(two, X).rows) > len(ane.ranges(two, X, member="double").rows) >= 1


def test_members_are_compared(two: Path, tmp_path: Path) -> None:
    other = pipeline(
        tmp_path / "other.mlmodel", network(2), network(-1.5, "y", "z"), names=("double", "negate")
    )
    assert ane.compare(two, two).ok
    whole = ane.compare(two, other)
    assert (whole.ok, [o.name for o in whole.outputs]) == (False, ["z"])
    assert ane.compare(two, other, member="double").ok
    apart = ane.compare(two, other, member="negate")
    assert not apart.ok
    assert apart.first_divergence


def test_members_that_are_none(two: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="unknown member 'dubble'; did you mean 'double'"):
        ane.run(two, X, member="dubble")
    with pytest.raises(UnknownName, match="unknown member '2'"):
        ane.run(two, X, member=2)
    alone = tmp_path / "one.mlmodel"
    alone.write_bytes(network().SerializeToString())
    with pytest.raises(LoadError, match=r"one.mlmodel is not a pipeline; leave member='double' out"):
        ane.run(alone, X, member="double")


def test_what_has_no_ops_is_named_and_others_can_be_run(tmp_path: Path) -> None:
    path = pipeline(tmp_path / "mixed.mlmodel", network(), imputer(), names=("double", "clean"))
    with pytest.raises(LoadError, match="is of type identity, which has no tensor ops: nothing to run"):
        ane.run(path, X)
    np.testing.assert_array_equal(ane.run(path, X, member="double")["y"], [[-4, 6]])
    said = summary.full_sentence(ane.inspect(path))
    assert said.startswith("In 1 of 2 models: ")
    assert "(not rated, without ops: clean)" in said


def test_advice_for_a_pipeline_is_to_name_a_member(two: Path) -> None:
    with pytest.raises(
        LoadError, match=r"is a pipeline of several models \(double, negate\); give one of them"
    ):
        load(two)
    with pytest.raises(LoadError, match=r"a pipeline without an ML Program \(double, negate\).*upgrade makes"):
        ane.apply(two, "negate_subtract")


def test_members_on_the_command_line(two: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for words in (["run", two], ["ranges", two], ["compare", two, two]):
        monkeypatch.setattr(sys, "argv", ["anesurgery", *map(str, words), "--member", "0", "--json"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        assert json.loads(capsys.readouterr().out)


def test_compare_keeps_to_the_shapes_that_are_described(tmp_path: Path) -> None:
    with quiet_host():
        traced = torch.jit.trace(torch.nn.ReLU().eval(), torch.zeros(1, 4))  # type: ignore[no-untyped-call]
        flexible = ct.convert(traced, inputs=[ct.TensorType(name="x", shape=(1, ct.RangeDim(2, 8, 4)))])
    assert ane.compare(flexible, flexible, {"x": np.ones((1, 8), np.float32)}).ok
    for size in (1, 9):
        with pytest.raises(InterpretError, match=r"expected \(1, 2..8\)"):
            ane.compare(flexible, flexible, {"x": np.ones((1, size), np.float32)})


def test_the_models_of_a_pipeline_are_certified_and_searched_as_one(two: Path) -> None:
    assert ane.certify(two).rows
    assert ane.first_divergence(two, two) is None
    assert ane.sensitivity(two, X).samples == 1
    assert ane.draw(two).ops


def test_the_next_command_runs(tmp_path: Path, two: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    mixed = pipeline(tmp_path / "mixed.mlmodel", network(), imputer(), names=("double", "clean"))
    custom = tmp_path / "custom.mlmodel"
    layer = make_layer("custom", ["x"], ["y"], className="OnlyInTheApp")
    custom.write_bytes(make_network({"x": (1, 2)}, [layer], ["y"]).SerializeToString())
    for path, then in ((mixed, f"ranges {mixed} --member double"), (two, f"certify {two}"), (custom, "")):
        monkeypatch.setattr(sys, "argv", ["anesurgery", "inspect", str(path)])
        with pytest.raises(SystemExit):
            cli.main()
        said = " ".join(capsys.readouterr().out.replace("\\\n", "").split())
        assert f"next: anesurgery {then}" in said if then else "next:" not in said


def test_a_value_that_the_next_model_reads_in_fp16_is_cast(tmp_path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 4))], opset_version=ct.target.iOS16)
    def first(x: Var) -> Var:
        return mb.relu(x=x, name="y")

    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def second(y: Var) -> Var:
        return mb.exp(x=y, name="z")

    units = {"skip_model_load": True, "compute_precision": ct.precision.FLOAT32}
    parts = [ct.convert(p, minimum_deployment_target=ct.target.iOS16, **units) for p in (first, second)]
    path = tmp_path / "two.mlpackage"
    ct.utils.make_pipeline(*parts).save(str(path))
    proof = ane.compare(path, path, prove=True).proof
    assert proof is not None
    assert proof.proved


def test_an_updatable_network_is_certified_and_not_rewritten(tmp_path: Path) -> None:
    spec = network()
    spec.isUpdatable = True
    path = tmp_path / "updatable.mlmodel"
    path.write_bytes(spec.SerializeToString())
    assert ane.certify(path).ok
    assert ane.compare(path, path).ok
    with pytest.raises(LoadError, match="the model is updatable"):
        load(path)


def test_a_network_is_certified_by_the_names_that_it_has(tmp_path: Path) -> None:
    path = tmp_path / "odd.mlmodel"
    path.write_bytes(network(made="logits.1-ü").SerializeToString())
    assert [one.name for one in ane.certify(path).outputs["fp16"]] == ["logits.1-ü"]


def test_a_classifier_is_compared_with_a_model_that_holds_no_label(tmp_path: Path) -> None:
    spec = network(made="p")
    content = spec.neuralNetwork.SerializeToString()
    spec.neuralNetworkClassifier.ParseFromString(content)  # the fields of both have the same numbers
    spec.neuralNetworkClassifier.stringClassLabels.vector.extend(["b", "a"])
    del spec.description.output[:]
    spec.description.output.add(name="p").type.dictionaryType.stringKeyType.SetInParent()
    spec.description.output.add(name="label").type.stringType.SetInParent()
    spec.description.predictedFeatureName = "label"
    spec.description.predictedProbabilitiesName = "p"
    paths = tmp_path / "with.mlmodel", tmp_path / "without.mlmodel"
    for path, model in zip(paths, (spec, network(made="p")), strict=True):
        path.write_bytes(model.SerializeToString())
    comparison = ane.compare(*paths)
    assert [(one.name, one.psnr) for one in comparison.outputs] == [("p", np.inf)]
    assert not comparison.ok
    assert "output label is only in the first model" in comparison.verdict
