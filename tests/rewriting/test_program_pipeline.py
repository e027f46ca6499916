"""Pipelines: passes edit the ML Programs in them, and a pipeline with all its models is saved again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from sketches import example_of

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.errors import InterfaceError, LoadError, SurgeryError, UnknownName
from anesurgery.files.package import PIPELINES, part_names, read_spec
from anesurgery.files.sequence import members
from anesurgery.loading import load_member
from anesurgery.mil import Program, Var, ct, mb, quiet_host, walk_ops
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.shipping.several_sizes import join_models
from anesurgery.surgery import find_recipe

WEIGHT = np.random.default_rng(0).standard_normal((32, 32, 3, 3)).astype(np.float16)
X = {"x": np.random.default_rng(1).standard_normal((1, 32, 8, 8)).astype(np.float32)}


def model(program: Program) -> Any:
    with quiet_host():
        return ct.convert(
            program,
            minimum_deployment_target=ct.target.iOS16,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
        )


def first() -> Any:
    @mb.program(input_specs=[mb.TensorSpec((1, 32, 8, 8))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        narrow = mb.cast(x=x, dtype="fp16")
        kept = mb.identity(x=mb.conv(x=narrow, weight=WEIGHT, pad_type="same"))
        return mb.cast(x=kept, dtype="fp32", name="y")

    return model(program)


def second() -> Any:
    @mb.program(input_specs=[mb.TensorSpec((1, 32, 8, 8))], opset_version=ct.target.iOS16)
    def program(y: Var) -> Var:
        kept = mb.identity(x=mb.conv(x=mb.cast(x=y, dtype="fp16"), weight=-WEIGHT, pad_type="same"))
        return mb.cast(x=kept, dtype="fp32", name="z")

    return model(program)


def summed(x: Var, result: str) -> Var:
    """Running sums between convolutions, which no engine was seen to make; none overflows fp16."""
    x, weight = mb.cast(x=x, dtype="fp16"), (WEIGHT / 64).astype(np.float16)
    for _ in range(2):
        x = mb.cumsum(x=mb.conv(x=x, weight=weight, pad_type="same"), axis=1)
    return mb.cast(x=mb.conv(x=x, weight=weight, pad_type="same"), dtype="fp32", name=result)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ML Programs from which `auto` gains on an M4."""

    @mb.program(input_specs=[mb.TensorSpec((1, 32, 128, 128))], opset_version=ct.target.iOS16)
    def one(x: Var) -> Var:
        return summed(x, "y")

    @mb.program(input_specs=[mb.TensorSpec((1, 32, 128, 128))], opset_version=ct.target.iOS16)
    def other(y: Var) -> Var:
        return summed(y, "z")

    return joined(tmp_path_factory.mktemp("sums") / "two.mlpackage", model(one), model(other))


def network() -> Any:
    layer = make_layer("activation", ["z"], ["w"], linear={"alpha": 2.0, "beta": 0.0})
    spec = make_network({"z": (1, 32, 8, 8)}, [layer], ["w"])
    spec.description.output[0].type.multiArrayType.shape.extend([1, 32, 8, 8])
    with quiet_host():
        return ct.models.MLModel(spec, skip_model_load=True)


def joined(path: Path, *models: Any) -> Path:
    with quiet_host():
        ct.utils.make_pipeline(*models).save(str(path))
    return path


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ML Programs with weights, and a network."""
    return joined(tmp_path_factory.mktemp("pipeline") / "three.mlpackage", first(), second(), network())


def spec_of(package: Path) -> Any:
    return read_spec(package / "Data" / "com.apple.CoreML" / "model.mlmodel")


def test_every_program_is_edited_and_the_rest_stays(three: Path, tmp_path: Path) -> None:
    surgery = ane.apply(three, "remove_identity", prove="both", quiet=True)
    assert [change.pass_name for change in surgery.changes] == ["remove_identity"] * 2
    assert surgery.proof is not None
    assert surgery.proof.ok
    assert surgery.before["identity"] == 2
    assert "identity" not in surgery.after
    assert (
        "of the pipeline, the ML Programs are operated on: model 0, model 1; model 2 stays" in surgery.notes[0]
    )
    saved = surgery.save(tmp_path / "new.mlpackage")
    old, new = spec_of(three), spec_of(saved)
    assert new.description == old.description
    assert part_names(new.pipeline) == part_names(old.pipeline)
    assert new.pipeline.models[2] == old.pipeline.models[2]
    np.testing.assert_array_equal(ane.run(three, X)["w"], ane.run(saved, X)["w"])
    assert ane.compare(three, saved).ok
    again = ane.apply(saved, "remove_identity", quiet=True)
    assert not again.changes


@pytest.mark.parametrize("member", ["model 1", 1, "1"])
def test_one_program_alone_is_edited(three: Path, tmp_path: Path, member: str | int) -> None:
    surgery = ane.apply(three, "remove_identity", member=member, quiet=True)
    assert len(surgery.changes) == 1
    assert surgery.after["identity"] == 1
    assert "operated on: model 1; model 0, model 2 stay unchanged" in surgery.notes[0]
    saved = surgery.save(tmp_path / "new.mlpackage")
    kept = [load_member(saved, i).program for i in range(2)]
    assert ["identity" in {op.op_type for op in walk_ops(p)} for p in kept] == [True, False]
    assert ane.compare(three, saved).ok


def test_auto_repairs_one_program_and_leaves_the_others(sums: Path) -> None:
    surgery = ane.apply(sums, "auto", target="M4/macOS 15", member="model 0", prove=None, quiet=True)
    assert surgery.changes
    assert (surgery.before["cumsum"], surgery.after["cumsum"]) == (4, 2)
    spec = surgery.model.get_spec()
    assert len(PIPELINES[spec.WhichOneof("Type")](spec).models) == 2


def test_a_member_that_cannot_be_edited_is_refused(three: Path, tmp_path: Path) -> None:
    for member in ("model 2", 2, "model 7"):
        with pytest.raises(UnknownName, match="model 0"):
            ane.apply(three, "remove_identity", member=member, quiet=True)
    alone = tmp_path / "alone.mlpackage"
    with quiet_host():
        first().save(str(alone))
    with pytest.raises(SurgeryError, match=r"is not a pipeline; leave member='0' out"):
        ane.apply(alone, "remove_identity", member=0, quiet=True)


def test_one_network_of_a_pipeline_is_edited(tmp_path: Path) -> None:
    net = example_of("swish_layers")
    path = pipeline_of(tmp_path / "networks.mlmodel", net, net)
    both = ane.apply(path, "swish_layers", quiet=True)
    one = ane.apply(path, "swish_layers", member=1, quiet=True)
    assert (len(both.changes), len(one.changes)) == (2, 1)


def test_each_program_has_its_own_weights(three: Path, tmp_path: Path) -> None:
    """The wrong version: one file for all, in which the second program would read the first one's weights."""
    saved = ane.apply(three, "remove_identity", quiet=True).save(tmp_path / "new.mlpackage")
    found = {i: ane.run(saved, {"xy"[i]: X["x"]}, member=i) for i in range(2)}
    assert_close(found[0]["y"], -np.asarray(found[1]["z"]), rtol=1e-6)
    files = sorted(p.name for p in (saved / "Data" / "com.apple.CoreML" / "weights").iterdir())
    assert files == ["0-weight.bin", "1-weight.bin"]


@pytest.mark.slow
def test_auto_and_the_model_as_coremltools_sees_it(sums: Path) -> None:
    surgery = ane.apply(sums, "auto", target="M4/macOS 15", prove=None, quiet=True)
    assert surgery.changes
    made = surgery.model
    kind = made.get_spec().WhichOneof("Type")
    assert len(PIPELINES[kind](made.get_spec()).models) == 2
    x = {"x": np.random.default_rng(1).standard_normal((1, 32, 128, 128)).astype(np.float32)}
    assert_close(ane.run(made, x)["z"], ane.run(sums, x)["z"], rtol=1e-3)
    assert (
        find_recipe("auto")(sums, target="M4/macOS 15", prove=None, quiet=True).get_spec().WhichOneof("Type")
        == kind
    )


def test_what_flows_between_models_must_stay(three: Path) -> None:
    with pytest.raises(InterfaceError, match="the models of a pipeline depend on each other"):
        ane.apply(three, "interface_fp16", quiet=True)
    assert not [
        change
        for change in ane.apply(three, "auto", target="M1/macOS 14", quiet=True).changes
        if change.pass_name == "interface_fp16"
    ]


def test_a_pipeline_in_a_pipeline(three: Path, tmp_path: Path) -> None:
    spec = spec_of(three)
    outer = type(spec)(specificationVersion=spec.specificationVersion)
    outer.description.CopyFrom(spec.description)
    outer.pipeline.models.add().CopyFrom(spec)
    assert [name for name, _ in members(outer)] == [f"model 0/{name}" for name in part_names(spec.pipeline)]


def pipeline_of(path: Path, *networks: Any) -> Path:
    from anesurgery.files.protobuf import proto

    spec = proto.Model_pb2.Model(specificationVersion=4)
    spec.pipeline.models.extend(networks)
    spec.description.CopyFrom(networks[0].description)
    path.write_bytes(spec.SerializeToString())
    return path


def test_networks_alone_are_for_passes_over_layers(tmp_path: Path) -> None:
    net = network().get_spec()
    path = pipeline_of(tmp_path / "networks.mlmodel", net, net)
    with pytest.raises(LoadError, match=r"a pipeline without an ML Program \(model 0, model 1\)"):
        ane.apply(path, "fold_constants", quiet=True)
    assert ane.apply(path, "auto", quiet=True).plan.recipe == "neuralnetwork_ane"


def test_a_pipeline_without_tensor_ops_names_its_models(tmp_path: Path) -> None:
    """The wrong version: advice about networks that it does not hold."""
    scaler = network().get_spec()
    scaler.scaler.SetInParent()
    path = pipeline_of(tmp_path / "scalers.mlmodel", scaler, scaler)
    with pytest.raises(LoadError, match=r"without tensor ops \(model 0: scaler, model 1: scaler\)") as raised:
        ane.apply(path, "auto", quiet=True)
    assert "upgrade" not in str(raised.value)


def test_layers_beside_programs_are_refused(three: Path) -> None:
    """An .mlmodel has no place for the weights of the programs: they would be lost."""
    with pytest.raises(SurgeryError, match="is a pipeline with ML Programs, whose weights"):
        ane.apply(three, "neuralnetwork_ane", quiet=True)


def test_the_command_line_repairs_a_pipeline(three: Path, tmp_path: Path) -> None:
    fixed, applied = tmp_path / "fixed.mlpackage", tmp_path / "applied.mlpackage"
    cli.app(["inspect", str(three), "--fix", str(fixed), "--quiet"], standalone_mode=False)
    cli.app(["apply", str(three), "remove_identity", str(applied), "--quiet"], standalone_mode=False)
    for path in (fixed, applied):
        assert ane.compare(three, path).ok


def test_a_joined_pipeline_keeps_its_inputs_and_outputs(tmp_path: Path) -> None:
    """The first model computes values with the names of an input and an output of the second."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4))], opset_version=ct.target.iOS16)
    def one(x: Var) -> Var:
        return mb.relu(x=mb.exp(x=mb.sigmoid(x=x, name="mask"), name="z"), name="y")

    @mb.program(input_specs=[mb.TensorSpec((1, 4)), mb.TensorSpec((1, 4))], opset_version=ct.target.iOS16)
    def other(y: Var, mask: Var) -> Var:
        return mb.mul(x=mb.tanh(x=y), y=mask, name="z")

    package = joined(tmp_path / "two.mlpackage", model(one), model(other))
    whole = join_models(package).program.functions["main"]
    assert list(whole.inputs) == ["x", "mask"]
    assert [v.name for v in whole.outputs] == ["z"]
    x, mask = np.random.default_rng(0).standard_normal((2, 1, 4)).astype(np.float32)
    (value,) = ane.run(join_models(package).program, {"x": x, "mask": mask}, precision="fp32").values()
    assert_close(value, np.tanh(np.exp(1 / (1 + np.exp(-x)))) * mask, rtol=1e-3)
    found = ane.compare(package, package, prove=True)
    assert found.ok
    assert found.proof is not None
    assert found.proof.proved
