"""A pipeline or a chain at several sizes is one model: padding goes through all of its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from torch import Tensor, nn

import anesurgery as ane
from anesurgery.files.package import read_spec
from anesurgery.mil import ct, quiet_host

RNG = np.random.default_rng(0)
SIZES: dict[str, list[tuple[int, ...]]] = {"x": [(1, 3, 4), (1, 6, 4)], "mask": [(1, 3), (1, 6)]}


class Attention(nn.Module):
    """With a mask that hides keys."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = (1.0 - mask[:, None]) * -1e4
        return (x @ x.transpose(1, 2) + hidden).softmax(-1) @ x


class Scores(nn.Module):
    """Of each place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8)

    def forward(self, states: Tensor) -> Tensor:
        return self.head(states).softmax(-1)


class Mean(nn.Module):
    """Of all places, which counts what was filled up."""

    def forward(self, states: Tensor) -> Tensor:
        return states.mean(1, keepdim=True)


def converted(module: nn.Module, forms: dict[str, Any], output: str, opset: Any) -> Any:
    examples = tuple(torch.zeros([n if isinstance(n, int) else 3 for n in form]) for form in forms.values())
    with torch.no_grad(), quiet_host():
        return ct.convert(
            torch.jit.trace(module.eval(), examples),  # type: ignore[no-untyped-call]
            inputs=[ct.TensorType(name, form, dtype=np.float32) for name, form in forms.items()],
            outputs=[ct.TensorType(output, dtype=np.float32)],
            minimum_deployment_target=opset,
            skip_model_load=True,
        )


def pipeline(folder: Path, last: nn.Module, opset: Any = ct.target.iOS18, length: Any = None) -> Path:
    """Attention, and what reads it."""
    n = length or ct.RangeDim(1, 6, default=3)
    first = converted(Attention(), {"x": (1, n, 4), "mask": (1, n)}, "states", ct.target.iOS18)
    second = converted(last, {"states": (1, n, 4)}, "y", opset)
    with quiet_host():
        ct.utils.make_pipeline(first, second).save(str(folder / "whole.mlpackage"))
    return folder / "whole.mlpackage"


def values(length: int) -> dict[str, Any]:
    return {
        "x": RNG.standard_normal((1, length, 4)).astype(np.float32),
        "mask": np.ones((1, length), np.float32),
    }


@pytest.mark.parametrize("opset", [ct.target.iOS17, ct.target.iOS18])
def test_a_pipeline_at_every_length(opset: Any, tmp_path: Path) -> None:
    """Its models may be of several opsets; what the first hides is hidden from the second."""
    whole = pipeline(tmp_path, Scores(), opset)
    sized = ane.sizes(whole, SIZES)
    assert (sized.padding.inputs, sized.padding.outputs) == ({"x": 1, "mask": 1}, {"y": 1})
    assert sized.padding.hiding == {"mask": False}
    folder = sized.save(tmp_path / "sized")
    for length in range(1, 7):
        given = values(length)
        assert_close(ane.run(folder, given)["y"], ane.run(whole, given)["y"])
    given = values(6)
    at_size = ane.run(folder, given, precision="fp16")["y"]
    np.testing.assert_array_equal(at_size, ane.run(whole, given, precision="fp16")["y"])


def test_a_later_model_that_reads_across_is_named(tmp_path: Path) -> None:
    sized = ane.sizes(pipeline(tmp_path, Mean()), SIZES)
    assert "reduce_mean reads across the padded axis" in sized.padding.why_not


def test_a_chain_of_one_size_is_made_another(tmp_path: Path) -> None:
    module = Scores()
    whole = pipeline(tmp_path, module, length=5)
    folder = ane.sizes(whole, SIZES).save(tmp_path / "sized")
    (tmp_path / "other").mkdir()
    at_three = pipeline(tmp_path / "other", module, length=3)
    given = values(3)
    expected = ane.run(at_three, given, precision="fp16")["y"]
    np.testing.assert_array_equal(ane.run(folder, given, precision="fp16")["y"], expected)


def test_a_picture_that_passes_between_is_refused(tmp_path: Path) -> None:
    """It is rounded there to whole numbers, which one program would not do."""
    whole = pipeline(tmp_path, Mean())
    file = whole / "Data" / "com.apple.CoreML" / "model.mlmodel"
    spec = read_spec(file)
    feature = spec.pipeline.models[0].description.output[0]
    feature.type.imageType.width, feature.type.imageType.height = 4, 3
    feature.type.imageType.colorSpace = 10  # grey
    file.write_bytes(spec.SerializeToString())
    with pytest.raises(
        ane.SurgeryError, match=r"the picture states passes between .*; give each model by itself"
    ):
        ane.sizes(whole, SIZES)
