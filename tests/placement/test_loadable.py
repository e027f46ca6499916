"""A model that the target's OS cannot load: the first finding, and the headline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.rules.loading import of_version, releases
from anesurgery.placement.target import Target
from anesurgery.show import summary


def with_a_state() -> Program:
    """A cache that is read, written and stored."""

    @mb.program(
        input_specs=[mb.TensorSpec((1, 64), dtype=types.fp16), mb.StateTensorSpec((1, 64), types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def program(x: Var, cache: Var) -> Any:
        old = mb.read_state(input=cache)
        new = mb.slice_update(x=old, update=x, begin=[0, 0], end=[1, 64])
        return mb.add(x=mb.coreml_update_state(state=cache, value=new), y=x)

    return program


def test_a_model_with_states_does_not_load_on_macos_14() -> None:
    found = ane.inspect(with_a_state(), "M1/macOS 14")
    first = found.all_findings[0]
    assert (first.rule, first.kind, first.op) == ("opset", "load", "")
    assert "specification 9 needs macOS 15, and macOS 14 takes up to 8" in first.message
    assert found.status == 2
    assert summary.full_sentence(found).startswith("macOS 14 cannot load it: specification")
    assert "macOS 14 cannot load it" in repr(found)
    assert summary.other_findings(found)[0].finding.rule == "opset"
    assert found.to_json()["findings"][0]["kind"] == "load"


@pytest.mark.parametrize("target", ["M1/macOS 15", "M4/macOS 27", "A17/iOS 18", "M1", "any"])
def test_nothing_is_said_where_it_loads_or_the_os_is_open(target: str) -> None:
    found = ane.inspect(with_a_state(), target)
    assert "opset" not in {f.rule for f in found.all_findings}
    assert found.refused == ""


@pytest.mark.parametrize(
    ("version", "platform", "oldest"),
    [
        *[(version, "iOS", 9 + version) for version in (6, 7, 8, 9)],
        *[(version, "macOS", 6 + version) for version in (6, 7, 8, 9)],
    ],
)
def test_each_specification_needs_its_release(version: int, platform: str, oldest: int) -> None:
    assert min(release for release, value in releases(platform).items() if value >= version) == oldest
    assert not of_version(version, Target(platform=platform, os=oldest))
    assert of_version(version, Target(platform=platform, os=oldest - 1))


def test_a_network_has_a_specification_too(tmp_path: Path) -> None:
    array = ct.models.datatypes.Array
    builder = ct.models.neural_network.NeuralNetworkBuilder([("x", array(4))], [("y", array(4))])
    builder.add_activation("a", "RELU", "x", "y")
    builder.spec.specificationVersion = 7
    path = tmp_path / "network.mlmodel"
    path.write_bytes(builder.spec.SerializeToString())
    assert ane.inspect(path, "M1/macOS 12").findings[0].rule == "opset"
    assert ane.inspect(path, "M1/macOS 13").refused == ""
