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


@pytest.mark.slow
def test_a_bert_is_stored_once(bert: tuple[nn.Module, Any, Any], tmp_path: Path) -> None:
    """Tables of positions and token types are cut from those of the largest size."""
    _, _, sized = bert
    (packed,) = sized.save(tmp_path / "sized").rglob("weight.bin")
    (one,) = ane.save(list(sized.models.values())[-1], tmp_path / "one.mlpackage").rglob("weight.bin")
    assert packed.stat().st_size <= 1.02 * one.stat().st_size


@pytest.mark.slow
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


class Tagger(nn.Module):
    """An LSTM that runs forward, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        tags: Tensor = self.head(self.steps(x)[0])
        return tags


def convolutional() -> nn.Module:
    parts = [nn.Conv1d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 8, 3, padding=1)]
    return nn.Sequential(*parts)


SMALL: dict[str, tuple[Any, int, str]] = {
    "an LSTM tagger": (Tagger, 1, ""),
    "a fully convolutional network": (convolutional, 2, "conv reads 1 place beyond the end"),
}


def of_floats(module: nn.Module, shape: tuple[Any, ...]) -> Any:
    example = torch.zeros([n if isinstance(n, int) else 8 for n in shape])
    with torch.no_grad(), quiet_host():
        graph: Any = torch.jit.trace(module.eval(), example, check_trace=False)  # type: ignore[no-untyped-call]
        return ct.convert(
            graph,
            inputs=[ct.TensorType("x", shape, dtype=np.float32)],
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )


@pytest.mark.one_of(2)
@pytest.mark.parametrize("case", SMALL)
def test_small_models_at_six_sizes(case: str, tmp_path: Path) -> None:
    """Bit for bit in fp16 what the model converted at the size gives; the weights of one size."""
    torch.manual_seed(0)
    build, axis, why_not = SMALL[case]
    module = build()

    def at(n: Any) -> tuple[Any, ...]:
        return tuple(n if a == axis else (1, 8, 8)[a] for a in range(3))

    lengths = (8, 16, 24, 32, 48, 64)
    sized = ane.sizes(of_floats(module, at(ct.RangeDim(1, 64, default=8))), {"x": [at(n) for n in lengths]})
    assert why_not in sized.padding.why_not
    assert bool(why_not) == bool(sized.padding.why_not)
    folder = sized.save(tmp_path / "sized")
    for length in (16, 64):
        fixed = of_floats(module, at(length))
        values = {"x": np.random.default_rng(length).standard_normal(at(length)).astype(np.float32)}
        found, expected = (output(ane.run(one, values, precision="fp16")) for one in (folder, fixed))
        np.testing.assert_array_equal(found, expected)
    (packed,) = folder.rglob("weight.bin")
    (one,) = ane.save(sized.models["size_64"], tmp_path / "one.mlpackage").rglob("weight.bin")
    assert packed.stat().st_size <= 1.02 * one.stat().st_size


def test_a_published_network_of_pictures(corpus: Path, tmp_path: Path) -> None:
    """Bit for bit in fp16 what the network gives whose specification says that size."""
    source, size = corpus / "waifu2x_anime_noise0.mlmodel", (3, 24, 32)
    sized = ane.sizes(source, {"input": [size, (3, 40, 40)]})
    spec = ct.utils.load_spec(str(source))
    spec.description.input[0].type.multiArrayType.shape[:] = size
    spec.description.output[0].type.multiArrayType.ClearField("shape")
    ct.utils.save_spec(spec, str(tmp_path / "other.mlmodel"))
    values = {"input": np.random.default_rng(0).uniform(0, 1, size).astype(np.float32)}
    models = (sized.models["size_24x32"], tmp_path / "other.mlmodel")
    found, expected = (output(ane.run(model, values, precision="fp16")) for model in models)
    np.testing.assert_array_equal(found, expected)


def test_a_published_network_of_steps(corpus: Path) -> None:
    """The same of a network of recurrent layers, beside one that was upgraded for as many steps."""
    source = corpus / "mlt_es2en_char_decoder16.mlmodel"
    longer, shorter = (ane.upgrade(source, precision="fp32", sequence=n) for n in (12, 5))
    sized = ane.sizes(longer, {"encodedChar": [(n, 1, 87, 1, 1) for n in (5, 12)]})
    assert "the last state of lstm" in sized.padding.why_not
    rng = np.random.default_rng(0)
    shapes = {"encodedChar": (5, 1, 87, 1, 1), "decoder_lstm_h_in": (256,), "decoder_lstm_c_in": (256,)}
    values = {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    found, expected = (ane.run(m, values, precision="fp16") for m in (sized.models["size_5"], shorter))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
