"""Times of neural networks, and of pipelines of models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.mil import ct, mb, types
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.models import inspect_other
from anesurgery.placement.networks import inspect_network
from anesurgery.placement.target import Target

M4 = Target.parse("M4/macOS 15")
CHANNELS, SIDE, DEEP = 64, 64, 4


def network(custom: bool = False, deep: int = DEEP) -> Any:
    """A specification: so many 3x3 convolutions, each with an activation."""
    array = ct.models.datatypes.Array(1, CHANNELS, SIDE, SIDE)
    builder = ct.models.neural_network.NeuralNetworkBuilder(
        [("x", array)], [("y", array)], disable_rank5_shape_mapping=True
    )
    weight = np.ones((3, 3, CHANNELS, CHANNELS), np.float32) / 600
    name = "x"
    for k in range(deep):
        end = "y" if k == deep - 1 else f"r{k}"
        builder.add_convolution(
            f"c{k}", CHANNELS, CHANNELS, 3, 3, 1, 1, "same", 1, weight, None, False,
            input_name=name, output_name=f"c{k}",
        )  # fmt: skip
        builder.add_activation(f"r{k}", "RELU", f"c{k}", end)
        name = end
    if custom:
        builder.spec.neuralNetwork.layers[0].custom.className = "Mine"
    return builder.spec


def test_a_network_takes_about_what_its_program_takes() -> None:
    found = inspect_network(network(), M4, "m")
    assert found.time is not None
    assert [row.op_type for row in found.ops] == ["convolution", "activation"] * DEEP
    assert all(row.ms for row in found.ops)
    assert sum(row.ms or 0 for row in found.ops) == pytest.approx(found.time.ms - found.time.parts["dispatch"])
    assert sum(s.ms or 0 for s in found.segments) == pytest.approx(sum(row.ms or 0 for row in found.ops))
    half = ane.inspect(fp16_program(), M4).time
    assert half is not None
    # the last relu costs the same on both units, and the program has it on the CPU
    assert found.time.ms == pytest.approx(half.ms, rel=0.03)
    assert "switches" not in half.parts


def fp16_program() -> Any:
    weight = np.ones((CHANNELS, CHANNELS, 3, 3), np.float16) / np.float16(600)

    @mb.program(
        input_specs=[mb.TensorSpec((1, CHANNELS, SIDE, SIDE), types.fp16)], opset_version=ct.target.iOS16
    )
    def built(x: Any) -> Any:
        for _ in range(DEEP):
            x = mb.relu(x=mb.conv(x=x, weight=weight, pad_type="same"))
        return x

    return built


def test_a_network_of_which_a_layer_is_not_known_has_no_time() -> None:
    found = inspect_network(network(custom=True), M4, "m")
    assert found.time is None
    assert any(note.startswith("no time: some layers cannot be built") for note in found.notes)


def test_a_network_on_several_generations_has_no_time() -> None:
    found = inspect_network(network(), Target.parse(None), "m")
    assert found.time is None
    assert any(note.startswith("no time: name one chip") for note in found.notes)


def test_a_surgery_of_a_network_says_both_times() -> None:
    model = ct.models.MLModel(network(), skip_model_load=True)
    surgery = ane.apply(model, ["fuse_clip"], target="M4", quiet=True)
    assert surgery.time is not None
    assert surgery.time.ratio == pytest.approx(1)


def pipeline(*specs: Any) -> Any:
    """One after the other: y of one is x of the next."""
    whole = ct.proto.Model_pb2.Model()
    whole.specificationVersion = max(spec.specificationVersion for spec in specs)
    whole.description.CopyFrom(specs[0].description)
    for spec in specs:
        whole.pipeline.models.add().CopyFrom(spec)
    return whole


def inspected(spec: Any) -> Inspection:
    model = ct.models.MLModel(spec, skip_model_load=True)
    found = inspect_other(model, M4, lambda *_: pytest.fail("no ML Program"))
    assert found is not None
    return found


def test_a_pipeline_takes_the_sum_of_its_models() -> None:
    found = inspected(pipeline(network(), network(deep=2)))
    one, other = (part.time for part in found.parts.values())
    assert found.time is not None
    assert one is not None
    assert other is not None
    assert found.time.ms == pytest.approx(one.ms + other.ms)
    assert found.to_json()["time"]["ms"] == found.time.ms


def test_a_pipeline_with_a_model_without_a_time_has_none() -> None:
    found = inspected(pipeline(network(), network(custom=True)))
    assert found.time is None
    assert any(note.startswith("no time: there is none of") for note in found.notes)
