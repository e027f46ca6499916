"""Models that are no ML Program: pipelines by their parts, trees and others in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anesurgery.errors import LoadError
from anesurgery.files.package import Loaded, part_names, save
from anesurgery.files.protobuf import proto
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, quiet_host
from anesurgery.placement import Inspection, OpRow, Target
from anesurgery.placement.models import inspect_other, kind_of, spec_of
from anesurgery.show import summary

ANY = Target.parse(None)


def program() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 4, 8, 8))], opset_version=ct.target.iOS16)
    def made(y: Var) -> Var:
        weight = np.full((4, 4, 1, 1), 0.5, np.float32)
        return mb.conv(x=y, weight=weight, name="z")

    return made


def network() -> Any:
    """A specification: y = relu(x) on (1, 4, 8, 8)."""
    array = ct.models.datatypes.Array
    builder = ct.models.neural_network.NeuralNetworkBuilder(
        [("x", array(1, 4, 8, 8))], [("y", array(1, 4, 8, 8))], disable_rank5_shape_mapping=True
    )
    builder.add_activation("relu", "RELU", "x", "y")
    return builder.spec


def tree() -> Any:
    builder = ct.models.tree_ensemble.TreeEnsembleRegressor([("x", ct.models.datatypes.Array(2))], "y")
    builder.set_default_prediction_value(0.0)
    builder.add_leaf_node(0, 0, 1.0)
    return builder.spec


def model(spec: Any) -> Any:
    with quiet_host():
        return ct.models.MLModel(spec, skip_model_load=True)


def written(spec: Any, path: Path) -> Path:
    path.write_bytes(spec.SerializeToString())
    return path


def by_hand(loaded: Loaded, target: Target) -> Inspection:
    """In the place of the inspection of ML Programs: a row for each op that is not a constant."""
    (function,) = loaded.program.functions.values()
    ops = [op for op in function.operations if op.op_type != "const"]
    rows = tuple(OpRow(i, op.name, op.op_type, "", "", True, "cpu", 0) for i, op in enumerate(ops))
    weights = [v.val for op in ops for v in op.inputs.values() if v is not None and v.rank == 4]
    assert float(np.asarray(weights[-1]).flat[0]) == 0.5  # the weights are found
    return Inspection("a program", target, rows)


def never(loaded: Loaded, target: Target) -> Inspection:
    raise AssertionError("there is no ML Program here")


def test_kinds(tmp_path: Path) -> None:
    package = save(load(program()), tmp_path / "p.mlpackage")
    assert [kind_of(m) for m in (package, str(package), program(), load(package))] == ["mlProgram"] * 4
    assert kind_of(written(network(), tmp_path / "n.mlmodel")) == "neuralNetwork"
    assert kind_of(model(tree())) == "treeEnsembleRegressor"
    assert spec_of(package).specificationVersion >= 7


def test_an_ml_program_is_left_to_its_own_inspection(tmp_path: Path) -> None:
    package = save(load(program()), tmp_path / "p.mlpackage")
    assert inspect_other(package, ANY, never) is None
    assert inspect_other(program(), ANY, never) is None


def test_a_network_from_a_file_and_in_memory(tmp_path: Path) -> None:
    path = written(network(), tmp_path / "n.mlmodel")
    for given, label in ((path, str(path)), (str(path), str(path)), (model(network()), "the model")):
        found = inspect_other(given, ANY, never)
        assert found is not None
        assert (found.model, found.counts) == (label, {"ane": 1})


def test_a_tree_has_a_line() -> None:
    found = inspect_other(model(tree()), ANY, never)
    assert found is not None
    assert found.notes == ("a tree ensemble has no tensor ops; Core ML runs it on the CPU",)
    assert (found.ops, found.status) == ((), 2)
    assert summary.full_sentence(found).endswith(
        "to place: a tree ensemble has no tensor ops; Core ML runs it on the CPU."
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("glmRegressor", "a generalized linear model has no tensor ops"),
        ("oneHotEncoder", "a one-hot encoder has no tensor ops"),
        ("visionFeaturePrint", "cannot be told from the file"),
        ("customModel", "its code is in the app"),
    ],
)
def test_other_kinds_have_a_line(kind: str, words: str, tmp_path: Path) -> None:
    spec = proto.Model_pb2.Model()
    getattr(spec, kind).SetInParent()
    found = inspect_other(written(spec, tmp_path / "m.mlmodel"), ANY, never)
    assert found is not None
    assert words in found.notes[0]


def test_every_kind_of_the_format_is_named() -> None:
    from anesurgery.files.package import PIPELINES
    from anesurgery.neuralnetwork.spec import NETWORKS
    from anesurgery.placement.models import CLOSED, PROGRAM, WITHOUT_OPS

    kinds = {f.name for f in proto.Model_pb2.Model.DESCRIPTOR.oneofs_by_name["Type"].fields}
    assert kinds == {*WITHOUT_OPS, *CLOSED, *NETWORKS, *PIPELINES, PROGRAM}


def test_a_pipeline_is_inspected_by_its_parts(tmp_path: Path) -> None:
    with quiet_host():
        package = save(load(program()), tmp_path / "p.mlpackage")
        second = ct.models.MLModel(str(package), skip_model_load=True)
        joined = ct.utils.make_pipeline(model(network()), second)
        joined.save(str(tmp_path / "both.mlpackage"))
    for given in (tmp_path / "both.mlpackage", joined):
        found = inspect_other(given, ANY, by_hand)
        assert found is not None
        assert [p.counts for p in found.parts.values()] == [{"ane": 1}, {"cpu": 1}]
        assert (found.status, found.residency["ops"]) == (1, 0.5)
        assert list(found.parts) == ["model 0", "model 1"]
        assert found.parts["model 1"].model.startswith("model 1 of ")
        assert found.row("z").op_type == "conv"


def test_a_pipeline_names_the_parts_without_ops() -> None:
    spec = proto.Model_pb2.Model()
    spec.pipeline.models.extend([network(), tree()])
    spec.pipeline.names.extend(["net", "tree"])
    found = inspect_other(model(spec), ANY, never)
    assert found is not None
    assert list(found.parts) == ["net", "tree"]
    assert found.notes[1] == "without ops, and not counted in the status: tree"


def test_a_pipeline_without_ops_names_its_models() -> None:
    spec = proto.Model_pb2.Model()
    spec.pipeline.models.extend([tree(), proto.Model_pb2.Model(scaler={})])
    found = inspect_other(model(spec), ANY, never)
    assert found is not None
    assert "a tree ensemble has no tensor ops" in summary.full_sentence(found)
    assert "a scaler has no tensor ops" in summary.full_sentence(found)


@pytest.mark.parametrize(
    ("target", "listed", "units"),
    [
        ("iPhone 13", False, {"unknown": 1}),
        ("iPhone 13/iOS 17", False, {"ane": 1}),
        ("iPhone 13", True, {"ane": 1}),
        ("M1", True, {"unknown": 1}),
    ],
)
def test_a_network_of_several_sizes_is_judged_as_an_ml_program_is(
    target: str, listed: bool, units: dict[str, int]
) -> None:
    """The wrong version: every layer of a network whose input has a range runs on the ANE."""
    spec = network()
    array = spec.description.input[0].type.multiArrayType
    for length in (8, 16):
        if listed:
            array.enumeratedShapes.shapes.add(shape=[*array.shape[:-1], length])
    for length in array.shape:
        if not listed:
            array.shapeRange.sizeRanges.add(lowerBound=length, upperBound=2 * length)
    found = inspect_other(model(spec), Target.parse(target), never)
    assert found is not None
    assert {unit or "unknown": n for unit, n in found.counts.items()} == units
    rules = {finding.rule for finding in found.findings}
    assert ("dyn-enumerated" if listed else "dyn-range") in rules


def test_a_pipeline_in_a_pipeline() -> None:
    spec = proto.Model_pb2.Model()
    inner = spec.pipeline.models.add()
    inner.pipeline.models.add().CopyFrom(network())
    found = inspect_other(model(spec), ANY, never)
    assert found is not None
    assert found.parts["model 0"].parts["model 0"].ops[0].name == "relu"
    assert found.counts == {"ane": 1}


@pytest.mark.parametrize("names", [[], ["a"], ["a", "a"], ["", "a"]])
def test_names_of_parts_are_never_ambiguous(names: list[str]) -> None:
    spec = proto.Model_pb2.Model()
    spec.pipeline.models.extend([network(), tree()])
    spec.pipeline.names.extend(names)
    assert part_names(spec.pipeline) == ["model 0", "model 1"]


@pytest.mark.parametrize(
    ("given", "message"),
    [(3, "cannot inspect a int; give a path"), ("nowhere.mlmodel", "nowhere.mlmodel does not exist")],
)
def test_what_is_no_model(given: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        inspect_other(given, ANY, never)


def test_an_empty_file_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "empty.mlmodel"
    path.write_bytes(b"")
    with pytest.raises(LoadError, match="holds no model"):
        kind_of(path)


def suppression(*classes: int) -> Any:
    """A non-maximum suppression of 600 boxes, whose scores have one number for each class."""
    spec = proto.Model_pb2.Model()
    for name, shape in (("scores", [600, *classes]), ("boxes", [600, 4])):
        spec.description.input.add(name=name).type.multiArrayType.shape.extend(shape)
    spec.nonMaximumSuppression.confidenceInputFeatureName = "scores"
    return spec


@pytest.mark.parametrize(
    ("first", "last", "classes"),
    [
        (program, suppression(2), "2 classes"),
        (program, suppression(81), "81 classes"),
        (program, suppression(1, 7), "7 classes"),
        (program, suppression(80), ""),
        (program, suppression(160), ""),
        (network, suppression(2), ""),
        (program, tree(), ""),
    ],
)
def test_classes_that_were_suppressed_wrongly(first: Any, last: Any, classes: str, tmp_path: Path) -> None:
    spec = proto.Model_pb2.Model()
    made = first()
    if isinstance(made, Program):
        made = spec_of(save(load(made), tmp_path / "first.mlpackage"))
    spec.pipeline.models.extend([made, last])
    found = inspect_other(
        written(spec, tmp_path / "both.mlmodel"), ANY, lambda *_: Inspection("a program", ANY, ())
    )
    assert found is not None
    said = [f.message for f in found.findings if f.rule == "suppressed-classes"]
    assert len(said) == bool(classes)
    assert not classes or classes in said[0]
