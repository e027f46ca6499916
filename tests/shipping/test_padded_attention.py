"""Attention between two sizes: masks hide what is filled up, causal order does not see it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import get_new_symbol
from torch import Tensor, nn

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types

RNG = np.random.default_rng(0)
LARGEST, WIDTH = 12, 16


class Layer(nn.Module):
    """Attention of two heads, and what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        count = x.shape[1]
        q, k, v = (part(x).view(1, count, 2, 8).transpose(1, 2) for part in self.parts)
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(8) + bias, -1)
        return self.norm(x + self.out((weights @ v).transpose(1, 2).reshape(1, count, WIDTH)))


class Encoder(nn.Module):
    """As BERT: a mask, positions from a table, and a result of the first place; a mean of what counts."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, WIDTH), nn.Embedding(LARGEST, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.register_buffer("places", torch.arange(LARGEST)[None])

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.tokens(ids) + self.positions(self.places[:, : ids.shape[1]])
        counts = mask.to(x.dtype)
        for layer in self.layers:
            x = layer(x, (1 - counts[:, None, None, :]) * -1e4)
        return x, torch.tanh(x[:, 0]), (x * counts[:, :, None]).sum(1) / counts.sum(1, keepdim=True)


class Decoder(nn.Module):
    """As GPT: each place sees itself and those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, WIDTH), nn.Embedding(LARGEST, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        count = ids.shape[1]
        x = self.tokens(ids) + self.positions(torch.arange(count))
        for layer in self.layers:
            x = layer(x, torch.full((count, count), -1e4).triu(1))
        return x


def converted(module: nn.Module, names: list[str]) -> Any:
    examples = [torch.ones(1, 8, dtype=torch.int32) for _ in names]
    traced: Any = torch.jit.trace(module.eval(), examples)  # type: ignore[no-untyped-call]
    axis = ct.RangeDim(1, LARGEST, default=8)
    return ct.convert(
        traced,
        inputs=[ct.TensorType(name, (1, axis), dtype=np.int32) for name in names],
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
    )


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.manual_seed(0)
    model = converted(Encoder(), ["ids", "mask"])
    sized = ane.sizes(model, {name: [(1, 6), (1, LARGEST)] for name in ("ids", "mask")})
    assert sized.padding.hiding == {"mask": False}
    assert sized.padding.spread == pytest.approx(1e4 - 104)
    return model, sized.save(tmp_path_factory.mktemp("encoder") / "sized")


def same(model: Any, folder: Path, values: dict[str, Any]) -> None:
    expected, found = ane.run(model, values), ane.run(folder, values)
    for name, value in expected.items():
        assert found[name].shape == value.shape
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5)


def tokens(length: int) -> Any:
    return np.random.default_rng(length).integers(1, 50, (1, length)).astype(np.int32)


def test_an_encoder_with_a_mask_at_every_length(encoder: tuple[Any, Path]) -> None:
    for length in range(1, LARGEST + 1):
        mask = np.ones((1, length), np.int32)
        mask[:, 1::3] = 0
        same(*encoder, {"ids": tokens(length), "mask": mask})


def test_a_mask_that_hides_a_whole_row_is_not_filled_up(encoder: tuple[Any, Path]) -> None:
    values = {"ids": tokens(4), "mask": np.zeros((1, 4), np.int32)}
    with pytest.raises(ane.SurgeryError, match="mask hides a whole row.*make the size ids 1x4, mask 1x4 too"):
        ane.run(encoder[1], values)


@pytest.mark.slow
def test_a_decoder_at_every_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = converted(Decoder(), ["ids"])
    sized = ane.sizes(model, {"ids": [(1, 6), (1, LARGEST)]})
    assert str(sized).endswith("proved as long as the attention scores in a row differ by at most 9896")
    folder = sized.save(tmp_path / "sized")
    for length in range(1, LARGEST + 1):
        same(model, folder, {"ids": tokens(length)})


Built = Callable[[Var, Var], Any]


def program(build: Built, mask: Any = types.fp32) -> Program:
    length = get_new_symbol()
    specs = [mb.TensorSpec((1, length, 4), dtype=types.fp32), mb.TensorSpec((1, length), dtype=mask)]

    return mb.program(input_specs=specs, opset_version=ct.target.iOS18)(lambda x, mask: build(x, mask))


def attention(x: Var, bias: Var | None, values: Var | None = None) -> Var:
    scores = mb.matmul(x=x, y=x, transpose_y=True)
    masked = scores if bias is None else mb.add(x=scores, y=bias)
    return mb.matmul(x=mb.softmax(x=masked, axis=-1), y=values or x)


def added(mask: Var, deep: float = -1e4) -> Var:
    return mb.mul(x=mb.sub(x=np.float32(1), y=mb.expand_dims(x=mask, axes=[1])), y=np.float32(deep))


def chosen(x: Var, mask: Var) -> Var:
    """A boolean mask, of which the other way round hides: 1 is what does not count."""
    hidden = mb.expand_dims(x=mb.cast(x=mask, dtype="bool"), axes=[1])
    scores = mb.matmul(x=x, y=x, transpose_y=True)
    weights = mb.softmax(x=mb.select(cond=hidden, a=np.float32(-np.inf), b=scores), axis=-1)
    return mb.matmul(x=weights, y=x, name="y")


def fused(x: Var, mask: Var, rows: bool = False) -> Var:
    """Fused attention, whose mask hides keys, or rows of queries."""
    seen = mb.expand_dims(x=mb.cast(x=mask, dtype="bool"), axes=[2 if rows else 1])
    one, length = np.int32(1), counted(x)
    shape = mb.concat(values=(one, one, length) if rows else (one, length, one), axis=0)
    wide = mb.logical_and(x=seen, y=mb.cast(x=mb.fill(shape=shape, value=np.float32(1)), dtype="bool"))
    return mb.scaled_dot_product_attention(query=x, key=x, value=x, attn_mask=wide, name="y")


def counted(x: Var) -> Var:
    return mb.gather(x=mb.shape(x=x), indices=np.int32(1), axis=0)


def causal(x: Var, upper: int = 0) -> Var:
    """Places are compared: those after one's own (or `upper` more) are hidden."""
    places = mb.range_1d(start=np.int32(0), end=counted(x), step=np.int32(1))
    own = mb.add(x=mb.expand_dims(x=places, axes=[1]), y=np.int32(upper))
    later = mb.greater(x=mb.expand_dims(x=places, axes=[0]), y=own)
    return mb.mul(x=mb.cast(x=later, dtype="fp32"), y=np.float32(-1e4))


RIGHT: dict[str, Built] = {
    "added": lambda x, mask: mb.identity(x=attention(x, added(mask)), name="y"),
    "least float": lambda x, mask: mb.identity(x=attention(x, added(mask, -3.4e38)), name="y"),
    "given as it is added": lambda x, mask: mb.identity(
        x=attention(x, mb.expand_dims(x=mask, axes=[1])), name="y"
    ),
    "chosen": chosen,
    "fused": fused,
    "causal and masked": lambda x, mask: mb.identity(
        x=attention(x, mb.add(x=added(mask), y=causal(x))), name="y"
    ),
    "two layers": lambda x, mask: mb.identity(x=attention(attention(x, added(mask)), added(mask)), name="y"),
}
FLIPPED = {"chosen": 1.0, "given as it is added": -1e4}


@pytest.mark.one_of(9)
@pytest.mark.parametrize("case", RIGHT)
def test_masks_in_every_spelling(case: str, tmp_path: Path) -> None:
    model = program(RIGHT[case])
    sized = ane.sizes(model, {"x": [(1, 3, 4), (1, 7, 4)], "mask": [(1, 3), (1, 7)]})
    assert not sized.padding.why_not
    assert sized.padding.fill["mask"] == FLIPPED.get(case, 0)
    folder = sized.save(tmp_path / "sized")
    for length in range(1, 8):
        hides = np.arange(length) % 3 == 1
        mask = np.where(hides, sized.padding.fill["mask"], 0.0 if case in FLIPPED else 1.0)
        x = RNG.standard_normal((1, length, 4)).astype(np.float32)
        same(model, folder, {"x": x, "mask": mask[None].astype(np.float32)})


def one_layer_open(x: Var, mask: Var) -> Var:
    return mb.identity(x=attention(attention(x, added(mask)), None), name="y")


def one_head_open(x: Var, mask: Var) -> Var:
    """Of two heads, the mask of the second is multiplied by 0."""
    heads = mb.mul(
        x=mb.expand_dims(x=added(mask), axes=[1]), y=np.array([1, 0], np.float32).reshape(1, 2, 1, 1)
    )
    scores = mb.expand_dims(x=mb.matmul(x=x, y=x, transpose_y=True), axes=[1])
    weights = mb.softmax(x=mb.add(x=scores, y=heads), axis=-1)
    return mb.matmul(x=weights, y=mb.expand_dims(x=x, axes=[1]), name="y")


def faint(x: Var, mask: Var) -> Var:
    """exp(-9) is not 0."""
    counts = mb.cast(x=mb.cast(x=mask, dtype="bool"), dtype="fp32")
    return mb.identity(x=attention(x, added(counts, -9.0)), name="y")


def of_queries(x: Var, mask: Var) -> Var:
    """The mask is laid along the queries."""
    return mb.identity(x=attention(x, mb.transpose(x=added(mask), perm=(0, 2, 1))), name="y")


def no_number(x: Var, mask: Var) -> Var:
    """What is filled up is divided by itself: 0 weights of NaN are NaN."""
    return mb.identity(x=attention(x, added(mask), mb.real_div(x=x, y=x)), name="y")


def whole_rows(x: Var, mask: Var) -> Var:
    """Rows that were filled up see nothing at all, not even what counts: they are NaN."""
    hidden = mb.sub(x=np.float32(1), y=mb.expand_dims(x=mask, axes=[1]))
    rows = mb.transpose(x=hidden, perm=(0, 2, 1))
    seen = mb.logical_or(x=mb.cast(x=hidden, dtype="bool"), y=mb.cast(x=rows, dtype="bool"))
    scores = mb.select(cond=seen, a=np.float32(-np.inf), b=mb.matmul(x=x, y=x, transpose_y=True))
    return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=x, name="y")


def unmasked_mean(x: Var, mask: Var) -> Var:
    return mb.reduce_mean(x=attention(x, added(mask)), axes=[1], name="y")


def border(x: Var, mask: Var) -> Var:
    kernel = np.ones((4, 4, 3), np.float32)
    turned = mb.transpose(x=attention(x, added(mask)), perm=(0, 2, 1))
    return mb.conv(x=turned, weight=kernel, pad_type="same", name="y")


WRONG: dict[str, tuple[Built, str]] = {
    "no mask": (
        lambda x, mask: mb.add(x=attention(x, None), y=mb.expand_dims(x=mask, axes=[2])),
        "no mask hides",
    ),
    "one layer without": (one_layer_open, "no mask hides"),
    "one head without": (one_head_open, "no mask hides"),
    "a mask too faint": (faint, "no mask hides"),
    "a mask of queries": (of_queries, "no mask hides"),
    "fused, a mask of queries": (lambda x, mask: fused(x, mask, rows=True), "no mask hides"),
    "one place ahead": (
        lambda x, mask: mb.add(x=attention(x, causal(x, 1)), y=mb.expand_dims(x=mask, axes=[2])),
        "no mask hides",
    ),
    "0 divided by 0": (no_number, "matmul reads across"),
    "whole rows": (whole_rows, "hides whole rows"),
    "a mean of all": (unmasked_mean, "reduce_mean reads across"),
    "a window": (border, "conv reads 1 place beyond the end"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_hidden_is_refused(case: str) -> None:
    build, words = WRONG[case]
    sized = ane.sizes(program(build), {"x": [(1, 3, 4), (1, 7, 4)], "mask": [(1, 3), (1, 7)]})
    assert words in sized.padding.why_not


def bare(build: Callable[[Var], Any], shape: tuple[Any, ...] = (1, None, 4)) -> Program:
    length = get_new_symbol()

    return mb.program(
        input_specs=[mb.TensorSpec([length if n is None else n for n in shape], dtype=types.fp32)],
        opset_version=ct.target.iOS18,
    )(lambda x: build(x))


def heads(x: Var) -> Var:
    """Attention of two layers, of which the second has heads of its own."""
    first = mb.expand_dims(x=attention(x, None), axes=[1])
    return mb.identity(x=attention(mb.concat(values=(first, first), axis=1), None), name="y")


STEPS = {"x": [(1, 3, 4), (1, 7, 4)]}


def test_a_mask_is_added_on_request(tmp_path: Path) -> None:
    model = bare(heads)
    assert "no mask hides" in ane.sizes(model, STEPS).padding.why_not
    sized = ane.sizes(model, STEPS, mask="mask")
    assert sized.padding.hiding == {"mask": False}
    assert list(model.functions["main"].inputs) == ["x"]
    folder = sized.save(tmp_path / "sized")
    for length in range(1, 8):
        x = RNG.standard_normal((1, length, 4)).astype(np.float32)
        found = ane.run(folder, {"x": x, "mask": np.ones((1, length), np.float32)})["y"]
        np.testing.assert_allclose(found, ane.run(model, {"x": x})["y"], rtol=1e-5, atol=1e-5)


def windows_of(*, left: bool = False) -> Callable[[Var], Var]:
    """Two convolutions with a bias; the second behind an edge of its own."""
    kernel = RNG.standard_normal((4, 4, 3)).astype(np.float32)

    def build(x: Var) -> Var:
        turned = mb.transpose(x=x, perm=(0, 2, 1))
        first = mb.conv(
            x=turned,
            weight=kernel,
            bias=np.ones(4, np.float32),
            pad_type="custom",
            pad=[2, 0] if left else [1, 1],
        )
        edge = mb.pad(
            x=first, pad=[0, 0, 0, 0, *((4, 0) if left else (2, 2))], mode="constant", constant_val=0.0
        )
        return mb.conv(x=edge, weight=kernel, dilations=[2], pad_type="valid", name="y")

    return build


def test_windows_that_end_at_their_place_need_no_mask(tmp_path: Path) -> None:
    model = bare(windows_of(left=True))
    sized = ane.sizes(model, STEPS)
    assert not sized.padding.why_not
    folder = sized.save(tmp_path / "sized")
    for length in range(1, 8):
        same(model, folder, {"x": RNG.standard_normal((1, length, 4)).astype(np.float32)})


def test_windows_read_zeros_behind_a_mask_that_is_added(tmp_path: Path) -> None:
    model = bare(windows_of())
    assert "conv reads 2 places beyond the end" in ane.sizes(model, STEPS).padding.why_not
    sized = ane.sizes(model, STEPS, mask="mask")
    assert not sized.padding.why_not
    folder = sized.save(tmp_path / "sized")
    for length in range(1, 8):
        x = RNG.standard_normal((1, length, 4)).astype(np.float32)
        found = ane.run(folder, {"x": x, "mask": np.ones((1, length), np.float32)})["y"]
        np.testing.assert_allclose(found, ane.run(model, {"x": x})["y"], rtol=1e-5, atol=1e-5)


def edged(x: Var) -> Var:
    """What is read beyond the end is 1, and what is filled up is 0."""
    edge = mb.pad(x=x, pad=[0, 0, 0, 0, 0, 2], mode="constant", constant_val=1.0)
    return mb.conv(x=edge, weight=np.ones((4, 4, 3), np.float32), pad_type="valid", name="y")


def test_an_edge_of_other_numbers_is_refused() -> None:
    sized = ane.sizes(bare(edged, (1, 4, None)), {"x": [(1, 4, 3), (1, 4, 7)]})
    assert "another number than 0" in sized.padding.why_not


UNMASKABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "no attention, no window": (
        lambda: ane.sizes(bare(lambda x: mb.relu(x=x)), STEPS, mask="m"),
        "no softmax goes over",
    ),
    "the name is taken": (lambda: ane.sizes(bare(heads), STEPS, mask="x"), "has an input 'x' already"),
    "over another axis": (
        lambda: ane.sizes(bare(lambda x: mb.softmax(x=x, axis=1)), STEPS, mask="m"),
        "over axis 1, not the last",
    ),
    "fused": (
        lambda: ane.sizes(
            bare(lambda x: mb.scaled_dot_product_attention(query=x, key=x, value=x)), STEPS, mask="m"
        ),
        "is fused attention",
    ),
    "a function": (lambda: ane.sizes(lambda _: bare(heads), STEPS, mask="m"), "have the function give a mask"),
}


@pytest.mark.parametrize("case", UNMASKABLE)
def test_where_no_mask_can_be_added(case: str) -> None:
    call, words = UNMASKABLE[case]
    with pytest.raises(ane.SurgeryError, match=words):
        call()
