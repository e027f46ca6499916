"""Models of several families at six sizes: what each gives at a size, between sizes, and how much is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import anesurgery as ane
from anesurgery import frontend
from anesurgery.files.joining import default_function
from anesurgery.loading import load
from anesurgery.mil import constant, ct, function_of, quiet_host, walk_ops

LENGTHS = (8, 16, 32, 48, 64, 96)


class Bert(nn.Module):
    """The states of a small encoder of transformers."""

    def __init__(self) -> None:
        super().__init__()
        settings = transformers.BertConfig(
            vocab_size=200,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=LENGTHS[-1],
        )
        settings._attn_implementation = "eager"
        self.inner = transformers.BertModel(settings)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states: Tensor = self.inner(ids, mask).last_hidden_state
        return states


def converted(module: nn.Module, lengths: tuple[int, ...] | None, size: int = 8) -> Any:
    """At one size, or at a range up to the largest one."""
    frontend.register()
    axis = size if lengths is None else ct.RangeDim(1, lengths[-1], default=size)
    examples = (torch.ones(1, size, dtype=torch.int32), torch.ones(1, size, dtype=torch.int32))
    with torch.no_grad(), quiet_host():
        graph: Any = torch.jit.trace(module.eval(), examples, check_trace=False)  # type: ignore[no-untyped-call]
        return ct.convert(
            graph,
            inputs=[ct.TensorType(name, (1, axis), dtype=np.int32) for name in ("ids", "mask")],
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )


def sample(length: int) -> dict[str, Any]:
    mask = np.ones((1, length), np.int32)
    mask[:, 3:5] = 0
    return {"ids": np.arange(1, length + 1, dtype=np.int32)[None], "mask": mask}


@pytest.fixture(scope="module")
def bert() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    module = Bert()
    ranged = converted(module, LENGTHS)
    return module, ranged, ane.sizes(ranged, {name: [(1, n) for n in LENGTHS] for name in ("ids", "mask")})


def output(values: dict[str, Any]) -> Any:
    (value,) = values.values()
    return value


def test_a_bert_is_stored_once(bert: tuple[nn.Module, Any, Any], tmp_path: Path) -> None:
    """Tables of positions and token types are cut from those of the largest size."""
    _, _, sized = bert
    (packed,) = sized.save(tmp_path / "sized").rglob("weight.bin")
    (one,) = ane.save(list(sized.models.values())[-1], tmp_path / "one.mlpackage").rglob("weight.bin")
    assert packed.stat().st_size <= 1.02 * one.stat().st_size


def test_a_bert_at_each_size_and_between(bert: tuple[nn.Module, Any, Any], tmp_path: Path) -> None:
    """At a size bit for bit in fp16 what the model converted at it gives; between sizes within 80 dB."""
    module, ranged, sized = bert
    folder = sized.save(tmp_path / "sized")
    expected = output(ane.run(converted(module, None, 16), sample(16), precision="fp16"))
    np.testing.assert_array_equal(output(ane.run(folder, sample(16), precision="fp16")), expected)
    for length in (1, 7, 20, 95):
        expected = output(ane.run(ranged, sample(length)))
        error = output(ane.run(folder, sample(length))) - expected
        assert 20 * np.log10(np.abs(expected).max() / np.sqrt((error**2).mean() + 1e-30)) > 80
    assert sized.padding.hiding == {"mask": False}


def test_only_what_begins_a_longer_table_is_cut_from_it(bert: tuple[nn.Module, Any, Any]) -> None:
    """Every constant that the sizes share is one array; slices of tables begin at 0."""
    _, _, sized = bert
    for name, loaded in sized.models.items():
        function = function_of(loaded.program, default_function(load(loaded)))
        cuts = [
            op for op in walk_ops(function) if op.op_type == "slice_by_index" and constant(op.x) is not None
        ]
        assert bool(cuts) == (name != f"size_{LENGTHS[-1]}")
        assert all(not np.any(op.begin.val) for op in cuts)
