"""A model of one fixed size becomes what the same model built at other sizes is, or says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import mil_list
from PIL import Image

import anesurgery as ane
from anesurgery.errors import InterpretError
from anesurgery.files.size_index import Padding, SizeRow, choose_call
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, types

RNG = np.random.default_rng(0)
WIDTH = 16
WEIGHT = (RNG.standard_normal((WIDTH, WIDTH)) / 4).astype(np.float16)
LEARNED = RNG.standard_normal((64, WIDTH)).astype(np.float16)
Build = Callable[[int], Program]


def of(body: Callable[[Var, int], Var], *, rank2: bool = False) -> Build:
    """What builds a program at a length, of (1, length, 16)."""

    def build(n: int) -> Program:
        shape = (n, WIDTH) if rank2 else (1, n, WIDTH)

        return mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)], opset_version=ct.target.iOS18)(
            lambda x: mb.identity(x=body(x, n), name="y")
        )

    return build


def heads(x: Var, n: int) -> Var:
    """Attention of two heads."""
    q, k, v = (
        mb.transpose(x=mb.reshape(x=mb.linear(x=x, weight=WEIGHT), shape=[1, n, 2, 8]), perm=[0, 2, 1, 3])
        for _ in range(3)
    )
    scores = mb.mul(x=mb.matmul(x=q, y=k, transpose_y=True), y=np.float16(0.25))
    y = mb.matmul(x=mb.softmax(x=mb.add(x=scores, y=causal(n)), axis=-1), y=v)
    return mb.reshape(x=mb.transpose(x=y, perm=[0, 2, 1, 3]), shape=[1, n, WIDTH])


def causal(n: int) -> np.ndarray:
    return np.triu(np.full((n, n), -1e4), 1).astype(np.float16)[None, None]


def band(n: int) -> np.ndarray:
    apart = np.arange(n)[None] - np.arange(n)[:, None]
    return np.where(np.abs(apart) < 3, 0, -1e4).astype(np.float16)[None]


def rotary(n: int) -> np.ndarray:
    angles = torch.outer(
        torch.arange(n).float(), 1.0 / (10000.0 ** (torch.arange(0, WIDTH, 2).float() / WIDTH))
    )
    return torch.cat([angles, angles], 1).cos().numpy().astype(np.float16)[None]


def places(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.float16)[:, None]


def mixed(x: Var, n: int) -> Var:
    """Values that are weighed by a mean over places, written as a sum times 1/n."""
    total = mb.mul(x=mb.reduce_sum(x=x, axes=[1], keep_dims=True), y=np.float16(1 / n))
    return mb.sub(x=x, y=total)


def by_channels(x: Var, n: int) -> Var:
    """What is divided by the root of the channels, 16, which is a length too."""
    gram = mb.matmul(x=x, y=mb.transpose(x=x, perm=[0, 2, 1]))
    return mb.mul(x=gram, y=np.float16(0.25))


def crossed(x: Var, n: int) -> Var:
    """Channels and places change sides, so that only where axes come from tells them apart."""
    turned = mb.transpose(x=mb.linear(x=x, weight=WEIGHT), perm=[0, 2, 1])
    split = mb.reshape(x=turned, shape=[1, 4, 4, n])
    back = mb.reshape(x=mb.transpose(x=split, perm=[0, 3, 1, 2]), shape=[1, n, WIDTH])
    return mb.mul(x=mb.slice_by_index(x=back, begin=[0, 0, 0], end=[1, n, WIDTH]), y=LEARNED[0])


def repeated(x: Var, n: int) -> Var:
    """A row that is repeated as often as there are places, before it meets them."""
    row = mb.reduce_max(x=x, axes=[1], keep_dims=True)
    return mb.concat(values=[x, mb.tile(x=row, reps=[1, n, 1])], axis=2)


def ends(x: Var, n: int) -> Var:
    """The first place, the last, and every second one."""
    first = mb.slice_by_index(x=x, begin=[0, 0, 0], end=[1, 1, WIDTH])
    last = mb.slice_by_index(x=x, begin=[0, -1, 0], end=[1, n, WIDTH], end_mask=[True, True, True])
    second = mb.slice_by_index(x=x, begin=[0, 0, 0], end=[1, n, WIDTH], stride=[1, 2, 1])
    return mb.concat(values=[first, last, second], axis=1)


def convolved(x: Var, n: int) -> Var:
    """Half as many places, and as many again."""
    channels = mb.transpose(x=x, perm=[0, 2, 1])
    weight = np.repeat(WEIGHT[..., None], 3, 2)
    half = mb.conv(x=channels, weight=weight, strides=[2], pad_type="custom", pad=[1, 1])
    wide = mb.expand_dims(x=half, axes=[3])
    return mb.upsample_nearest_neighbor(x=wide, scale_factor_height=2, scale_factor_width=1)


def chomped(x: Var, n: int) -> Var:
    """A causal convolution that is padded at both ends, and cut."""
    channels = mb.transpose(x=x, perm=[0, 2, 1])
    weight = np.repeat(WEIGHT[..., None], 3, 2)
    wide = mb.conv(x=channels, weight=weight, pad_type="custom", pad=[2, 2])
    return mb.add(x=channels, y=mb.slice_by_index(x=wide, begin=[0, 0, 0], end=[1, WIDTH, n]))


def curved(x: Var, n: int) -> Var:
    """The same, with a function between the cut and what it meets."""
    channels = mb.transpose(x=x, perm=[0, 2, 1])
    weight = np.repeat(WEIGHT[..., None], 4, 2)
    wide = mb.conv(x=channels, weight=weight, pad_type="custom", pad=[2, 2])
    return mb.add(x=channels, y=mb.relu(x=mb.slice_by_index(x=wide, begin=[0, 0, 0], end=[1, WIDTH, n])))


def deviation(x: Var, n: int) -> Var:
    """The variance of a sample over places: a mean times n / (n - 1)."""
    moved = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[1], keep_dims=True))
    return mb.mul(x=mb.reduce_mean(x=mb.mul(x=moved, y=moved), axes=[1]), y=np.float16(n / (n - 1)))


def widened(x: Var, n: int) -> Var:
    """Twice as many places, by an op that says its shape."""
    return mb.conv_transpose(
        x=mb.transpose(x=x, perm=[0, 2, 1]),
        weight=np.repeat(WEIGHT[..., None], 2, 2),
        strides=[2],
        pad_type="valid",
        output_shape=[1, WIDTH, 2 * n],
    )


def slopes(n: int) -> np.ndarray:
    """The bias of ALiBi for two heads."""
    return np.stack([2.0**-4 * np.arange(n), 2.0**-8 * np.arange(n)])[:, None].astype(np.float16)


def pictured(x: Var, n: int) -> Var:
    """A picture of n by 16 places, whose places are taken together, mixed, and taken apart again."""
    flat = mb.reshape(x=mb.expand_dims(x=x, axes=[0]), shape=[1, n * WIDTH, 1])
    shares = mb.softmax(x=mb.matmul(x=flat, y=flat, transpose_y=True), axis=-1)
    return mb.reshape(x=mb.matmul(x=shares, y=flat), shape=[1, n, WIDTH])


def recurrent(x: Var, n: int) -> Var:
    steps = mb.transpose(x=x, perm=[1, 0, 2])
    zero = np.zeros((1, 4), np.float16)
    weights = {"weight_ih": np.tile(WEIGHT, (1, 1)), "weight_hh": WEIGHT[:, :4]}
    return mb.lstm(x=steps, initial_h=zero, initial_c=zero, output_sequence=True, **weights)[0]


def last_step(x: Var, n: int, place: int | None = None) -> Var:
    """The last state of a layer, counted from the first step, behind a turn and a function of single places."""
    steps = mb.tanh(x=mb.transpose(x=recurrent(x, n), perm=[1, 0, 2]))
    at = n - 1 if place is None else place
    squeezed = mb.slice_by_index(
        x=steps, begin=[0, at, 0], end=[1, at + 1, 4], squeeze_mask=[False, True, False]
    )
    kept = mb.slice_by_index(x=steps, begin=[0, at, 0], end=[1, at + 1, 4])
    return mb.add(x=squeezed, y=mb.squeeze(x=kept, axes=[1]))


def squeezed(x: Var, n: int) -> Var:
    """A gate by the mean of all places, whose shape is written out."""
    gate = mb.reshape(x=mb.reduce_mean(x=x, axes=[1]), shape=[1, 1, WIDTH])
    return mb.mul(x=x, y=mb.sigmoid(x=gate))


def blocks(x: Var, n: int) -> Var:
    """A dilated convolution: every second place goes to a batch of its own, and comes back."""
    picture = mb.expand_dims(x=mb.transpose(x=x, perm=[0, 2, 1]), axes=[3])
    wide = mb.concat(values=[picture] * 4, axis=3)
    batch = mb.space_to_batch(x=wide, block_shape=[2, 2], paddings=[[2, 2], [2, 2]])
    weight = np.tile(WEIGHT[..., None, None], (1, 1, 3, 3)) / np.float16(8)
    return mb.batch_to_space(x=mb.conv(x=batch, weight=weight), block_shape=[2, 2], crops=[[0, 0], [0, 0]])


RIGHT: dict[str, tuple[Build, int, tuple[int, ...]]] = {
    "attention with as many places as channels": (of(heads), 16, (5, 8, 16, 24)),
    "attention with as many places as heads are wide": (of(heads), 8, (3, 8, 12)),
    "attention with as many places as heads": (of(heads), 2, (2, 3, 7)),
    "axes that change sides": (of(crossed), 16, (4, 8, 16, 20)),
    "axes that change sides, at four": (of(crossed), 4, (4, 8, 16)),
    "a mean as a sum times 1/n": (of(mixed), 16, (5, 16, 24)),
    "a factor of the channels": (of(by_channels), 16, (5, 16, 24)),
    "learned positions, cut": (of(lambda x, n: mb.add(x=x, y=LEARNED[:n])), 16, (5, 16)),
    "rotary positions": (of(lambda x, n: mb.mul(x=x, y=rotary(n))), 16, (5, 16, 24)),
    "counted places": (of(lambda x, n: mb.mul(x=x, y=places(n))), 16, (5, 16, 24)),
    "one factor at all places": (of(lambda x, n: mb.mul(x=x, y=np.tile(LEARNED[:1], (n, 1)))), 16, (5, 24)),
    "a band": (of(lambda x, n: mb.softmax(x=mb.add(x=by_channels(x, n), y=band(n)), axis=-1)), 16, (8, 24)),
    "a row that is repeated": (of(repeated), 16, (5, 24)),
    "slices": (of(ends), 16, (6, 16, 24)),
    "strides": (of(convolved), 16, (4, 8, 24)),
    "steps": (of(recurrent), 16, (1, 5, 24)),
    "the last step of a layer": (of(last_step), 16, (2, 5, 16, 24)),
    "windows that are cut, and curved": (of(curved), 16, (5, 24)),
    "a deviation": (of(deviation), 16, (5, 24)),
    "a gate": (of(squeezed), 16, (5, 24)),
    "blocks": (of(blocks), 16, (6, 24)),
    "more places": (of(widened), 16, (5, 24)),
    "slopes": (
        of(lambda x, n: mb.add(x=mb.expand_dims(x=by_channels(x, n), axes=[1]), y=slopes(n))),
        16,
        (5, 24),
    ),
    "a picture with as many rows as columns": (of(pictured), 16, (5, 16, 20)),
    "windows that are cut": (of(chomped), 16, (5, 24)),
    "several rows": (of(lambda x, n: mb.reshape(x=x, shape=[n, 4, 4]), rank2=True), 16, (5, 24)),
}


@pytest.mark.one_of(28)
@pytest.mark.parametrize("case", RIGHT)
def test_each_size_is_the_model_built_at_it(case: str) -> None:
    """Bit for bit in fp16."""
    build, base, lengths = RIGHT[case]
    model = build(base)
    before = ane.to_text(model)
    shape = tuple(next(iter(model.functions.values())).inputs["x"].shape)
    at = [(*shape[:-2], n, WIDTH) for n in lengths]
    sized = ane.sizes(model, {"x": at})
    for size, wanted, n in zip(sized.models.values(), at, lengths, strict=True):
        values = {"x": np.random.default_rng(n).standard_normal(wanted).astype(np.float16)}
        (expected,) = ane.run(build(n), values, precision="fp16").values()
        (got,) = ane.run(size, values, precision="fp16").values()
        np.testing.assert_array_equal(got, expected)
    assert ane.to_text(model) == before


def joined(x: Var, n: int) -> Var:
    """All places in one row of a picture of 4 columns, with a position for each."""
    picture = mb.reshape(x=x, shape=[1, n * 4, 4])
    return mb.add(x=picture, y=RNG.standard_normal((1, n * 4, 4)).astype(np.float16))


def flat_head(x: Var, n: int) -> Var:
    weight = RNG.standard_normal((3, n * WIDTH)).astype(np.float16)
    return mb.linear(x=mb.reshape(x=x, shape=[1, n * WIDTH]), weight=weight)


def pooled(x: Var, n: int) -> Var:
    return mb.avg_pool(x=mb.transpose(x=x, perm=[0, 2, 1]), kernel_sizes=[n], strides=[n], pad_type="valid")


def root(x: Var, n: int) -> Var:
    total = mb.reduce_sum(x=x, axes=[1], keep_dims=True)
    return mb.mul(x=total, y=np.float16(n**-0.5))


def inner(x: Var, n: int) -> Var:
    """A sum over places of what was divided by their number."""
    less = mb.mul(x=x, y=np.float16(1 / n))
    return mb.matmul(x=less, y=x, transpose_x=True)


def grown(x: Var, n: int) -> Var:
    """Filled up to 32 places."""
    return mb.concat(values=[x, np.zeros((1, 32 - n, WIDTH), np.float16)], axis=1)


def scaled(table: Callable[[int], np.ndarray]) -> Build:
    return of(lambda x, n: mb.mul(x=x, y=table(n).astype(np.float16)[:, None]))


def part(x: Var, n: int) -> Var:
    return mb.slice_by_index(x=x, begin=[0, 0, 0], end=[1, n // 2, WIDTH])


def last(x: Var, n: int) -> Var:
    return mb.gather(x=x, indices=np.int32(n - 1), axis=1)


def picked(x: Var, n: int) -> Var:
    return mb.gather_along_axis(x=x, indices=np.full((1, 1, WIDTH), n - 1, np.int32), axis=1)


def hidden(n: int) -> np.ndarray:
    """The last two places are hidden, at any length."""
    return np.where(np.arange(n) < n - 2, 0, -1e4).astype(np.float16)


def mixer(x: Var, n: int) -> Var:
    weight = RNG.standard_normal((n, n)).astype(np.float16)
    return mb.linear(x=mb.transpose(x=x, perm=[0, 2, 1]), weight=weight)


REFUSED: dict[str, tuple[Build, tuple[int, ...], str]] = {
    "a flat head": (of(flat_head), (8,), "y_?|linear"),
    "mixed places": (of(mixer), (8,), "linear has a stored number for each place"),
    "learned positions, longer": (of(lambda x, n: mb.add(x=x, y=LEARNED[:n])), (24,), "follow no formula"),
    "learned factors": (of(lambda x, n: mb.mul(x=x, y=LEARNED[:n])), (8,), "follow no formula"),
    "positions of pictures": (of(joined), (8,), "cell of a grid"),
    "a pool over all": (of(pooled), (8,), "window of 16 may come from the length, 16"),
    "a root of the length": (of(root), (8,), "the factor 0.25 of a sum over 16 places"),
    "a mean before its sum": (of(inner), (8,), "multiplied by a part of that"),
    "what is filled up": (of(grown), (8,), "may fill up to a length"),
    "a window": (scaled(np.hanning), (8,), "the same from both ends"),
    "a periodic window": (scaled(lambda n: np.hanning(n + 1)[:n]), (8,), "the same from both ends"),
    "steps of the length": (scaled(lambda n: np.linspace(0, 1, n)), (8,), "it rises by"),
    "steps to both sides": (scaled(lambda n: np.linspace(-1, 1, n)), (8,), "it rises by"),
    "counting down": (scaled(lambda n: np.arange(n)[::-1]), (8,), "counts down to its end"),
    "one wave over all": (scaled(lambda n: np.sin(2 * np.pi * np.arange(n) / n)), (8,), "no formula"),
    "half of the places": (of(part), (12,), "ends at place 8 of 16"),
    "the last place by its number": (of(last), (8,), "place 15 of 16"),
    "a step before the last": (of(lambda x, n: last_step(x, n, n - 2)), (8,), "place 14 of 16"),
    "the last place of what is no layer": (
        of(lambda x, n: mb.slice_by_index(x=x, begin=[0, n - 1, 0], end=[1, n, WIDTH])),
        (8,),
        "begins at place 15 of 16.*give the PyTorch module",
    ),
    "hidden places": (
        of(lambda x, n: mb.softmax(x=mb.add(x=by_channels(x, n), y=hidden(n)))),
        (8,),
        "hides some",
    ),
    "a hidden first place": (
        of(lambda x, n: mb.select(cond=np.arange(n)[:, None] > 0, a=x, b=np.float16(0))),
        (8,),
        "hides some",
    ),
    "parts of the length": (
        of(lambda x, n: mb.reshape(x=x, shape=[4, n // 4, WIDTH])),
        (8,),
        "takes apart axis 1",
    ),
    "splits": (of(lambda x, n: mb.concat(values=mb.split(x=x, num_splits=2, axis=1), axis=2)), (8,), "splits"),
    "a running mean": (
        of(lambda x, n: mb.mul(x=mb.cumsum(x=x, axis=1), y=np.float16(1 / (n - 1)))),
        (8,),
        "may be made",
    ),
    "places along an axis": (of(picked), (8,), "place 15 of 16"),
    "blocks that do not fit": (of(blocks), (5,), "multiples of 2"),
    "an order of all": (of(lambda x, n: mb.topk(x=x, k=n, axis=1)[0]), (8,), "the first 16 of 16"),
    "the best ones": (of(lambda x, n: mb.topk(x=x, k=9, axis=1)[0]), (8,), "the first 9 of 16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_told_is_refused(case: str) -> None:
    build, lengths, words = REFUSED[case]
    with pytest.raises(ane.SurgeryError, match=words):
        ane.sizes(build(16), {"x": [(1, n, WIDTH) for n in lengths]})


def test_what_is_assumed_is_said() -> None:
    sized = ane.sizes(RIGHT["learned positions, cut"][0](16), {"x": [(1, 5, WIDTH), (1, 16, WIDTH)]})
    assert len(sized.assumed) == 1
    assert "is a learned table; smaller sizes keep its first rows" in str(sized)
    assert "takes the last step of" in str(ane.sizes(of(last_step)(16), {"x": [(1, 5, WIDTH)]}))
    assert not ane.sizes(of(heads)(16), {"x": [(1, 5, WIDTH)]}).assumed


def test_an_axis_of_one_is_refused() -> None:
    with pytest.raises(ane.SurgeryError, match="axis 0 of %x is 1 long"):
        ane.sizes(of(heads)(16), {"x": [(2, 16, WIDTH)]})


def two_inputs(n: int) -> Program:
    specs = [mb.TensorSpec((1, n, WIDTH), dtype=types.fp16), mb.TensorSpec((1, n, 1), dtype=types.fp16)]

    return mb.program(input_specs=specs, opset_version=ct.target.iOS18)(
        lambda x, mask: mb.mul(x=x, y=mask, name="y")
    )


def test_all_inputs_of_the_length_are_wanted() -> None:
    with pytest.raises(ane.SurgeryError, match="the input mask has this length too"):
        ane.sizes(two_inputs(16), {"x": [(1, 8, WIDTH)]})
    with pytest.raises(ane.SurgeryError, match="%x and %mask meet"):
        ane.sizes(two_inputs(16), {"x": [(1, 8, WIDTH)], "mask": [(1, 9, 1)]})
    sized = ane.sizes(two_inputs(16), {"x": [(1, 8, WIDTH)], "mask": [(1, 8, 1)]})
    values = {"x": np.ones((1, 8, WIDTH), np.float16), "mask": np.ones((1, 8, 1), np.float16)}
    assert ane.run(next(iter(sized.models.values())), values)["y"].shape == (1, 8, WIDTH)


def shares(n: int) -> Program:
    """How many places count is given as a share of them."""
    specs = [mb.TensorSpec((1, n, WIDTH), dtype=types.fp16), mb.TensorSpec((1,), dtype=types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Var, share: Var) -> Var:
        counted = mb.less(x=places(n), y=mb.mul(x=share, y=np.float16(n)))
        return mb.mul(x=x, y=mb.cast(x=counted, dtype="fp16"), name="y")

    return program


def test_a_number_that_may_be_the_length_is_refused() -> None:
    """It is multiplied with what has no places."""
    with pytest.raises(ane.SurgeryError, match="the number 16 may be a length"):
        ane.sizes(shares(16), {"x": [(1, 8, WIDTH)]})


class Block(torch.nn.Module):
    """Learned positions, attention that looks back, a convolution and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(50, 32), torch.nn.Embedding(64, 32)
        self.into, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.conv = torch.nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = ids.shape[1]
        x = self.words(ids) + self.places(torch.arange(n))[None]
        q, k, v = (part.reshape(1, n, 2, 16).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / 4
        scores = scores.masked_fill(torch.ones(n, n).tril() == 0, -1e4)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(1, n, 32))
        return torch.relu(self.conv(x.transpose(1, 2))), x.mean(1)


@pytest.mark.slow
def test_a_converted_module(tmp_path: Path) -> None:
    """It has as many channels as places; each size is what torch converts at it, bit for bit."""
    base = 32
    torch.manual_seed(0)
    module: Any = Block().eval()

    def convert(n: int) -> Any:
        traced: Any = torch.jit.trace(module, torch.zeros(1, n, dtype=torch.int32))  # type: ignore[no-untyped-call]
        inputs = [ct.TensorType("ids", shape=(1, n), dtype=np.int32)]
        return ct.convert(
            traced, inputs=inputs, skip_model_load=True, minimum_deployment_target=ct.target.iOS18
        )

    lengths = (8, base)
    folder = ane.sizes(convert(base), {"ids": [(1, n) for n in lengths]}).save(tmp_path / "sized")
    for n in lengths:
        values = {"ids": np.random.default_rng(n).integers(0, 50, (1, n)).astype(np.int32)}
        expected = ane.run(convert(n), values, precision="fp16")
        for form in (values["ids"], torch.from_numpy(values["ids"]), values["ids"].tolist()):
            got = ane.run(folder, {"ids": form}, precision="fp16")
            for one, other in zip(got.values(), expected.values(), strict=True):
                np.testing.assert_array_equal(one, other)
    with pytest.raises(InterpretError, match="its rows differ in length"):
        ane.run(folder, {"ids": [[1], [2, 3]]})


def test_a_picture_is_not_filled_up() -> None:
    """Pixels of 0 are not what a model whose pictures are scaled reads beyond the edge."""
    rows = [SizeRow(f"size_{n}", None, f"{n}.mlpackage", {"x": (1, 3, 8, n)}) for n in (8, 16)]
    padding = Padding({"x": 3}, {"y": 3})
    assert choose_call(rows, padding, {"x": np.zeros((1, 3, 8, 12))}).row.name == "size_16"
    assert choose_call(rows, padding, {"x": Image.new("RGB", (16, 8))}).row.name == "size_16"
    with pytest.raises(ane.SurgeryError, match="no size takes"):
        choose_call(rows, padding, {"x": Image.new("RGB", (12, 8))})


def test_a_classifier_is_made_at_other_sizes() -> None:
    """Its labels are a list, which has no shape."""

    @mb.program(input_specs=[mb.TensorSpec((1, 8, 4), dtype=types.fp32)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        shares = mb.softmax(x=mb.reduce_max(x=x, axes=[0, 1]), axis=0)
        return mb.classify(probabilities=shares, classes=mb.const(val=mil_list(list("abcd"))), name="class")

    sized = ane.sizes(program, {"x": [(1, 8, 4), (1, 12, 4)]})
    high = np.zeros((1, 12, 4), np.float32)
    high[0, 2, 1], high[0, 10, 3] = 1, 2
    labels = [
        next(v for v in ane.run(model, {"x": high[:, :n]}).values() if isinstance(v, str))
        for n, model in ((8, sized.models["size_8"]), (12, sized.models["size_12"]))
    ]
    assert labels == ["b", "d"]


def test_of_several_functions_the_default_is_made() -> None:
    program, other = (of(lambda x, n: mb.relu(x=x))(8) for _ in range(2))
    program.functions["other"] = other.functions["main"]
    sized = ane.sizes(program, {"x": [(1, 8, WIDTH), (1, 12, WIDTH)]})
    assert [list(load(model).program.functions) for model in sized.models.values()] == [["main"]] * 2


def test_pictures_have_the_size_of_each(tmp_path: Path) -> None:
    """An image of one size, and one of a range: the packages say the size that they take."""
    torch.manual_seed(0)
    module: Any = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU()).eval()
    traced: Any = torch.jit.trace(module, torch.zeros(1, 3, 8, 8))  # type: ignore[no-untyped-call]
    for side in (8, ct.RangeDim(4, 32, default=8)):
        image = ct.ImageType("x", shape=(1, 3, side, side), scale=1 / 255)
        model: Any = ct.convert(
            traced, inputs=[image], skip_model_load=True, minimum_deployment_target=ct.target.iOS17
        )
        folder = ane.sizes(model, {"x": [(1, 3, 8, 8), (1, 3, 12, 16)]}).save(tmp_path / f"sized_{side}")
        for size, (height, width) in (("size_8x8", (8, 8)), ("size_12x16", (12, 16))):
            package = folder / f"{size}.mlpackage"
            described = load(package).described_inputs[0].type.imageType
            assert (described.height, described.width) == (height, width)
            assert described.WhichOneof("SizeFlexibility") is None
            pixels = Image.fromarray(RNG.integers(0, 255, (height, width, 3)).astype(np.uint8))
            (got,) = ane.run(package, {"x": pixels}).values()
            (of_folder,) = ane.run(folder, {"x": pixels}).values()
            np.testing.assert_array_equal(of_folder, got)
            exact = torch.from_numpy(np.asarray(pixels).transpose(2, 0, 1)[None] / 255).float()
            with torch.no_grad():
                expected = module(exact).numpy()
            np.testing.assert_allclose(got, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
