"""A damaged network has no placement: `inspect` says what is wrong, for each way to spoil one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from bad_networks import BAD, build, spoiled

from anesurgery.commands import app as cli
from anesurgery.commands.options import BAD_INPUT
from anesurgery.errors import LoadError
from anesurgery.files.protobuf import proto
from anesurgery.network_editing.network import Network
from anesurgery.network_editing.neural_network import NeuralNetwork
from anesurgery.placement.inspector import inspect
from anesurgery.placement.networks import inspect_network
from anesurgery.placement.target import Target

SOUND = {"updatable", "a newer layer", "a newer function"}
"""No ML Program can be made of these, but nothing says that they are damaged."""


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_network_is_an_error(name: str) -> None:
    spec = spoiled(name)
    if name in SOUND:
        found = inspect_network(spec, Target(), "m")
        assert any(note.startswith("it cannot become an ML Program") for note in found.notes)
        return
    with pytest.raises(LoadError) as raised:
        inspect_network(spec, Target(), "m")
    assert [w for w in BAD[name].words if w not in str(raised.value)] == []
    assert str(raised.value).startswith("m: ")


def test_damage_after_a_custom_layer_is_found() -> None:
    spec = build()
    layer = spec.neuralNetwork.layers[1]
    layer.ClearField("layer")
    layer.custom.className = "Swish"
    assert any("whose code is not in the file" in n for n in inspect_network(spec, Target(), "m").notes)
    spec.neuralNetwork.layers[0].convolution.weights.floatValue.pop()
    with pytest.raises(LoadError, match="has 107 numbers, expected 108"):
        inspect_network(spec, Target(), "m")


def test_a_custom_layer_in_a_branch_is_no_damage(tmp_path: Path) -> None:
    """No layer of such a network could be edited."""
    spec = build()
    layers = spec.neuralNetwork.layers
    layers.add(name="sum", input=["image"], output=["sum"]).reduce.SetInParent()
    branch = layers.add(name="branch", input=["sum"]).branch
    branch.ifBranch.layers.add(name="inner", input=["image"], output=["side"]).custom.className = "Swish"
    branch.elseBranch.layers.add(name="other", input=["image"], output=["side"]).copy.SetInParent()
    assert Network(spec).blobs.errors == []
    path = tmp_path / "m.mlmodel"
    path.write_bytes(spec.SerializeToString())
    NeuralNetwork.read(path)
    branch.ifBranch.layers.insert(0, layers[0])
    branch.ifBranch.layers[0].convolution.weights.floatValue.pop()
    path.write_bytes(spec.SerializeToString())
    with pytest.raises(LoadError, match="has 107 numbers, expected 108"):
        NeuralNetwork.read(path)


def test_a_damaged_model_of_a_pipeline_is_an_error(tmp_path: Path) -> None:
    spec = proto.Model_pb2.Model(specificationVersion=4)
    spec.pipeline.models.add().CopyFrom(build())
    spec.pipeline.models.add().CopyFrom(spoiled("a cycle"))
    (tmp_path / "two.mlmodel").write_bytes(spec.SerializeToString())
    with pytest.raises(LoadError, match="model 1 of .*two.mlmodel: layer 'conv'.* reads the blob 'y'"):
        inspect(tmp_path / "two.mlmodel")


def test_status_of_a_damaged_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = tmp_path / "bad.mlmodel"
    path.write_bytes(spoiled("a blob of nobody").SerializeToString())
    monkeypatch.setattr(sys, "argv", ["anesurgery", "inspect", str(path), "--status"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"anesurgery: {path}: layer 'soft' (softmax): reads the blob 'score'")
