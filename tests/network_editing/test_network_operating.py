"""Layer passes applied to whole files: networks, classifiers, regressors, pipelines; saving, and bad input."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.checking.grades import Grade
from anesurgery.commands import app as cli
from anesurgery.errors import LoadError, PassError, ProofError, Refusal, SurgeryError
from anesurgery.files.package import read_spec
from anesurgery.files.protobuf import proto
from anesurgery.mil import ct, mb, quiet_host
from anesurgery.network_editing.layer_pass import LayerRewrite, Site
from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.surgery import find_recipe

NAME = "legacy_add_multiply"


def network(output: str = "y", source: str = "x") -> Any:
    """Twice the input, with a broadcasting product."""
    layers = [
        make_layer("loadConstantND", [], ["two"], shape=[1], data=weights(np.array([2]))),
        make_layer("multiplyBroadcastable", [source, "two"], [output]),
    ]
    return make_network({source: (1, 3, 1, 1)}, layers, [output])


def saved(spec: Any, folder: Path, name: str = "old.mlmodel") -> Path:
    path = folder / name
    path.write_bytes(spec.SerializeToString())
    return path


def kinds(spec: Any) -> list[str]:
    whole = getattr(spec, spec.WhichOneof("Type"))
    return [layer.WhichOneof("layer") for layer in whole.layers]


def classifier() -> Any:
    """A classifier of three labels."""
    spec = network("scores")
    old = proto.NeuralNetwork_pb2.NeuralNetwork()
    old.CopyFrom(spec.neuralNetwork)
    spec.neuralNetworkClassifier.layers.extend(old.layers)
    spec.neuralNetworkClassifier.arrayInputShapeMapping = old.arrayInputShapeMapping
    spec.neuralNetworkClassifier.stringClassLabels.vector.extend(["a", "b", "c"])
    spec.neuralNetworkClassifier.labelProbabilityLayerName = "scores"
    del spec.description.output[:]
    spec.description.output.add(name="label").type.stringType.SetInParent()
    probabilities = spec.description.output.add(name="probabilities")
    probabilities.type.dictionaryType.stringKeyType.SetInParent()
    spec.description.predictedFeatureName = "label"
    spec.description.predictedProbabilitiesName = "probabilities"
    return spec


def regressor() -> Any:
    spec = network()
    old = proto.NeuralNetwork_pb2.NeuralNetwork()
    old.CopyFrom(spec.neuralNetwork)
    spec.neuralNetworkRegressor.layers.extend(old.layers)
    spec.neuralNetworkRegressor.arrayInputShapeMapping = old.arrayInputShapeMapping
    spec.description.predictedFeatureName = "y"
    return spec


def pipeline() -> Any:
    """Two networks in a row; the second one alone has something to rewrite."""
    first = make_network({"x": (1, 3, 1, 1)}, [make_layer("add", ["x"], ["m"], alpha=1)], ["m"])
    spec = proto.Model_pb2.Model(specificationVersion=4)
    spec.pipeline.models.extend([first, network("y", "m")])
    spec.description.input.extend(first.description.input)
    spec.description.output.extend(network().description.output)
    return spec


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (network(), "neuralNetwork"),
        (classifier(), "neuralNetworkClassifier"),
        (regressor(), "neuralNetworkRegressor"),
    ],
)
def test_every_kind_of_network(spec: Any, kind: str, tmp_path: Path) -> None:
    path = saved(spec, tmp_path)
    before = path.read_bytes()
    done = ane.apply(path, NAME, prove="both", quiet=True)
    assert done.proof is not None
    assert done.proof.psnr == float("inf")
    written = read_spec(done.save(tmp_path / "new.mlmodel"))
    assert written.WhichOneof("Type") == kind
    assert kinds(written) == ["activation"]
    assert written.description == spec.description
    assert path.read_bytes() == before
    given = {"x": np.arange(3, dtype=np.float32).reshape(1, 3, 1, 1)}
    old, new = ane.run(path, given), ane.run(tmp_path / "new.mlmodel", given)
    assert old.keys() == new.keys()
    for name in old:
        np.testing.assert_equal(new[name], old[name])


def test_networks_inside_a_pipeline(tmp_path: Path) -> None:
    path = saved(pipeline(), tmp_path)
    done = ane.apply(path, NAME, prove="both", quiet=True)
    written = read_spec(done.save(tmp_path / "new.mlmodel"))
    assert [kinds(part) for part in written.pipeline.models] == [["add"], ["activation"]]
    given = {"x": np.ones((1, 3, 1, 1), np.float32)}
    np.testing.assert_equal(ane.run(tmp_path / "new.mlmodel", given)["y"], np.full((1, 3, 1, 1), 4))


def test_an_mlmodel_and_a_specification_are_taken_and_not_changed() -> None:
    spec = network()
    with quiet_host():
        model = ct.models.MLModel(spec, skip_model_load=True)
    for given in (model, spec):
        done = ane.apply(given, NAME, quiet=True)
        assert kinds(done.model.get_spec()) == ["activation"]
    assert kinds(spec) == kinds(model.get_spec()) == ["loadConstantND", "multiplyBroadcastable"]


def test_nothing_to_do_gives_the_same_bytes(tmp_path: Path) -> None:
    spec = make_network({"x": (1, 3, 1, 1)}, [make_layer("add", ["x"], ["y"], alpha=1)], ["y"])
    # Unknown fields and the order of fields would not survive being written anew.
    content = b"\xba\xbb\x01\x03abc" + spec.SerializeToString()
    path = tmp_path / "old.mlmodel"
    path.write_bytes(content)
    done = ane.apply(path, NAME, quiet=True)
    assert not done.changes
    assert done.save(tmp_path / "new.mlmodel").read_bytes() == content


def test_the_report_says_what_the_rules_forbid_before_and_after() -> None:
    done = ane.apply(network(), NAME, quiet=True)
    words = "layers that the rules of the format keep off the ANE: 2 of 2 -> 0 of 1"
    assert words in done.notes
    assert words in done.details
    assert done.to_json()["notes"] == done.notes
    before, after = done.inspected
    assert [row.legal for row in before[0].ops] == [False, False]
    assert before[0].row("y").findings[0].remedy == NAME
    assert [row.legal for row in after[0].ops] == [True]


@dataclass(frozen=True)
class Clipped(LayerRewrite):
    """`unary` becomes `clip`, which needs specification 4."""

    name: ClassVar[str] = "clipped"
    kinds: ClassVar[frozenset[str]] = frozenset({"unary"})
    tolerates_nonfinite: ClassVar[bool] = False  # infinity is clipped too
    low: float = 0.0
    """The lower limit."""

    def rewrite(self, site: Site) -> Refusal | None:
        site.emit("clip", site.inputs, site.outputs, minVal=self.low, maxVal=float(np.finfo(np.float32).max))
        return None


def threshold(rank5: bool = False) -> Any:
    layer = make_layer("unary", ["x"], ["y"], type="THRESHOLD", alpha=0.0)
    return make_network({"x": (3, 2, 2)}, [layer], ["y"], rank5=rank5)


def test_a_newer_layer_raises_the_version_and_says_so() -> None:
    old = threshold()
    old.specificationVersion = 3
    done = ane.apply(old, Clipped(), prove="both", quiet=True)
    assert done.model.get_spec().specificationVersion == 4
    assert "specification version 3 became 4, which needs iOS 13 or macOS 10.15" in done.notes


def test_a_newer_layer_is_refused_where_arrays_have_rank_5() -> None:
    done = ane.apply(threshold(rank5=True), Clipped(), quiet=True)
    assert not done.changes
    assert "clip came with specification 4" in str(done.refusals[0][1])
    spec = threshold(rank5=True)
    spec.neuralNetwork.layers.append(make_layer("ceil", ["y"], ["z"]))
    spec.description.output.add(name="z").type.multiArrayType.dataType = 65568
    assert len(ane.apply(spec, Clipped(), quiet=True).changes) == 1


def test_the_outer_version_of_a_pipeline_is_raised_too() -> None:
    spec = proto.Model_pb2.Model(specificationVersion=3)
    inner = threshold()
    inner.specificationVersion = 3
    spec.pipeline.models.extend([inner, inner])
    spec.description.CopyFrom(inner.description)
    assert ane.apply(spec, Clipped(), quiet=True, prove=None).model.get_spec().specificationVersion == 4


def overwritten(over: list[Any]) -> Any:
    """|x| + 1, and |x| as a second output, with layers between that overwrite a blob."""
    layers = [
        make_layer("loadConstantND", [], ["one"], shape=[1], data=weights(np.array([1]))),
        make_layer("unary", ["x"], ["h"], type="ABS"),
        make_layer("addBroadcastable", ["h", "one"], ["y"]),
        *over,
        make_layer("unary", ["h"], ["z"], type="ABS"),
    ]
    return make_network({"x": (1, 3, 2, 2)}, layers, ["y", "z"])


def test_blobs_that_are_overwritten_are_unchanged() -> None:
    value = np.full((1, 3, 2, 2), 7, np.float32)
    seven = make_layer("loadConstantND", [], ["seven"], shape=value.shape, data=weights(value))
    plain = ane.apply(overwritten([]), NAME, quiet=True)
    assert len(plain.changes) == 1
    for blob, word in (("h", "'h'"), ("one", "'one'")):
        spec = overwritten([seven, make_layer("copy", ["seven"], [blob], name="copy")])
        done = ane.apply(spec, NAME, prove="both", quiet=True)
        assert not done.changes
        assert word in str(done.refusals[0][1])
    spec = network()
    spec.neuralNetwork.layers.extend(
        [
            make_layer("loadConstantND", [], ["four"], shape=[1, 3, 1, 1], data=weights(np.ones(3))),
            make_layer("copy", ["four"], ["x"], name="copy"),
            make_layer("unary", ["x"], ["z"], type="ABS"),
        ]
    )
    spec.description.output.add(name="z").type.multiArrayType.dataType = 65568
    assert not ane.apply(spec, NAME, quiet=True).changes


def test_a_classifier_keeps_its_probabilities_when_the_last_layer_changes() -> None:
    spec = classifier()
    spec.neuralNetworkClassifier.labelProbabilityLayerName = ""
    layers = [make_layer("splitND", ["x"], ["a", "b"], axis=2, numSplits=2)]
    del spec.neuralNetworkClassifier.layers[:]
    spec.neuralNetworkClassifier.layers.extend(layers)
    spec.description.input[0].type.multiArrayType.shape[:] = [1, 3, 2, 1]
    steps = list(find_recipe("neuralnetwork_ane").steps)
    done = ane.apply(spec, steps, prove="both", quiet=True)
    assert done.changes
    assert done.model.get_spec().neuralNetworkClassifier.labelProbabilityLayerName == "a"


def test_what_a_pass_has_to_say_is_noted() -> None:
    layers = [
        make_layer("activation", ["x"], ["r"], ReLU={}),
        make_layer("divideBroadcastable", ["x", "r"], ["y"]),
    ]
    spec = make_network({"x": (1, 3, 2, 2)}, layers, ["y"])
    notes = ane.apply(spec, "neuralnetwork_ane", quiet=True).notes
    assert any(note.startswith("legacy_divide: where a computed divisor is 0") for note in notes)
    branch = make_layer("branch", ["x"], [])
    branch.branch.ifBranch.layers.append(make_layer("copy", ["x"], ["y"]))
    other = [make_layer("addBroadcastable", ["x", "x"], ["t"]), make_layer("copy", ["t"], ["y"])]
    branch.branch.elseBranch.layers.extend(other)
    spec = make_network({"x": (1,)}, [make_layer("unary", ["x"], ["y"], type="ABS"), branch], ["y"])
    done = ane.apply(spec, NAME, quiet=True)
    assert "3 layers inside branches and loops are skipped: no pass looks there" in done.notes


def test_wrong_numbers_are_found_at_the_site_and_in_the_whole() -> None:
    with pytest.raises(ProofError, match="pass clipped at layer 'y'"):
        ane.apply(threshold(), Clipped(low=1.0), quiet=True)
    with pytest.raises(ProofError, match="the outputs are not shown to agree"):
        ane.apply(threshold(), Clipped(low=1.0), prove="model", quiet=True)


@dataclass(frozen=True)
class Broken(LayerRewrite):
    """Makes another shape, or raises."""

    name: ClassVar[str] = "broken"
    kinds: ClassVar[frozenset[str]] = frozenset({"unary"})
    raises: bool = False
    """Raise at once?"""

    def rewrite(self, site: Site) -> Refusal | None:
        if self.raises:
            raise ValueError("no")
        site.emit("flatten", site.inputs, site.outputs)
        return None


def test_a_pass_that_fails_is_named_with_the_layer() -> None:
    with pytest.raises(PassError, match="pass broken at layer 'y': the shape of an output changed"):
        ane.apply(threshold(), Broken(), quiet=True)
    with pytest.raises(PassError, match=r"pass broken at layer 'y' \(unary\) failed: ValueError: no"):
        ane.apply(threshold(), Broken(raises=True), quiet=True)


def program() -> Any:
    return mb.program(input_specs=[mb.TensorSpec((2, 3))])(lambda x: mb.sub(x=x, y=x, name="y"))


def test_bad_input(tmp_path: Path) -> None:
    path = saved(network(), tmp_path)
    with pytest.raises(SurgeryError, match="negate_subtract for the ops of an ML Program"):
        ane.apply(path, [NAME, "negate_subtract"])
    with pytest.raises(LoadError, match="cannot read layers from a Program"):
        ane.apply(program(), NAME)
    package = tmp_path / "p.mlpackage"
    ane.apply(program(), "negate_subtract", quiet=True).save(package)
    with pytest.raises(SurgeryError, match="is of type mlProgram, without layers"):
        ane.apply(package, NAME)
    done = ane.apply(path, NAME, quiet=True)
    with pytest.raises(LoadError, match=r"let it end in \.mlmodel"):
        done.save(tmp_path / "new.mlpackage")
    with pytest.raises(LoadError, match="is the input, which is never changed"):
        done.save(path, overwrite=True)
    done.save(tmp_path / "new.mlmodel")
    with pytest.raises(LoadError, match="exists"):
        done.save(tmp_path / "new.mlmodel")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.mlmodel", "old.mlmodel", "p.mlpackage"]


def test_a_layer_pass_is_no_pass_of_a_conversion() -> None:
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    from anesurgery.rewriting import host

    host.register_with_coremltools()
    assert f"anesurgery::{NAME}" not in PASS_REGISTRY.passes
    assert "anesurgery::negate_subtract" in PASS_REGISTRY.passes


def test_the_command_line(tmp_path: Path) -> None:
    path, out = saved(network(), tmp_path), tmp_path / "new.mlmodel"
    shown = CliRunner().invoke(cli.app, ["apply", str(path), NAME, str(out), "--prove", "both", "--full"])
    assert shown.exit_code == 0, shown.output
    assert "keep off the ANE: 2 of 2 -> 0 of 1" in shown.output
    assert kinds(read_spec(out)) == ["activation"]
    wrong = CliRunner().invoke(cli.app, ["apply", str(path), NAME, str(tmp_path / "n.mlpackage")])
    assert isinstance(wrong.exception, LoadError)


def test_steps_of_a_long_recipe_that_change_nothing_are_a_line() -> None:
    done = ane.apply(network(), list(find_recipe("neuralnetwork_ane").steps), quiet=True)
    (line,) = [line for line in done.details.splitlines() if line.startswith("changed nothing: ")]
    assert "swish_layers" in line
    assert NAME not in line


@dataclass(frozen=True)
class Again(LayerRewrite):
    """Pools again, with another kernel."""

    name: ClassVar[str] = "again"
    kinds: ClassVar[frozenset[str]] = frozenset({"pooling"})
    kernel: int = 5
    """Height and width of the windows."""

    def rewrite(self, site: Site) -> Refusal | None:
        copy = site.copy(site.node, site.inputs, site.outputs)
        copy.pooling.kernelSize[:] = [self.kernel] * 2
        return None


def test_dynamic_sizes() -> None:
    layer = make_layer("pooling", ["x"], ["y"], kernelSize=[5, 5], stride=[1, 1], valid={})
    spec = make_network({"x": (1, 3, 9, 9)}, [layer], ["y"])
    array = spec.description.input[0].type.multiArrayType
    for size in (1, 3, -1, 9):
        array.shapeRange.sizeRanges.add(lowerBound=max(size, 1), upperBound=size)
    (change,) = ane.apply(spec, Again(), quiet=True).changes
    assert change.proof is not None  # at lengths that a window of 5 takes, which the first one is not
    assert change.proof.grade is Grade.BITS
    done = ane.apply(spec, Again(kernel=3), quiet=True)
    assert not done.changes
    ((_, refusal),) = done.refusals
    assert "cannot be shown to stay as it is" in str(refusal)
