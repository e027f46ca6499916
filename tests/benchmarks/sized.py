"""docs/sized-models.md: models of several families at six sizes; `make sized` writes it.

Each is converted with a range of lengths and given to `sizes`. At each size it is compared in fp16 with the
model that is converted at that size, and at every length from 1 to the largest with the model at that length.
A model of one fixed size is made at two others, and compared in the same way. Published models and the time are
measured by the files `sized_corpus.py` and `sized_time.py`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sized_corpus
import sized_time
import torch
import transformers
from recipe import spread
from sized_figures import nearness, nearness_in_words, stored, worst
from torch import Tensor, nn

import anesurgery as ane
from anesurgery import frontend
from anesurgery.files.size_index import read as sized_file
from anesurgery.mil import ct, quiet_host
from anesurgery.shipping.shared_tables import LEAST

LENGTHS = (4, 8, 12, 16, 20, 24)
SHORTER = (8, 20)
"""Lengths that are made of a model of the largest alone."""
Input = tuple[tuple[Any, ...], str]
"""The shape of an input, in which None is the length, and its type."""


@dataclass(frozen=True)
class Sized:
    """A model, how it is converted, and what is added to it."""

    build: Callable[[], nn.Module]
    inputs: Mapping[str, Input]
    mask: str | None = None

    def shapes(self, length: Any) -> dict[str, tuple[Any, ...]]:
        """Of each input at a length, a number or a range."""
        return {
            name: tuple(length if n is None else n for n in shape) for name, (shape, _) in self.inputs.items()
        }

    def convert(self, module: nn.Module, length: int | None = None) -> Any:
        """At one length, or at a range of all."""
        frontend.register()
        traced = self.shapes(length or LENGTHS[1])
        example = [
            torch.ones(traced[name], dtype=getattr(torch, kind)) for name, (_, kind) in self.inputs.items()
        ]
        forms = self.shapes(length or ct.RangeDim(1, LENGTHS[-1], default=LENGTHS[1]))
        with torch.no_grad(), quiet_host():
            graph: Any = torch.jit.trace(module.eval(), example, check_trace=False)  # type: ignore[no-untyped-call]
            return ct.convert(
                graph,
                inputs=[
                    ct.TensorType(name, forms[name], dtype=np.dtype(kind).type)
                    for name, (_, kind) in self.inputs.items()
                ],
                minimum_deployment_target=ct.target.iOS18,
                skip_model_load=True,
            )

    def values(self, length: int) -> dict[str, Any]:
        """Numbers of the inputs; a mask hides some places but the first."""
        rng, found = np.random.default_rng(length), dict[str, Any]()
        for name, (_, kind) in self.inputs.items():
            shape = self.shapes(length)[name]
            value = rng.integers(3, 100, shape) if kind == "int32" else rng.standard_normal(shape)
            if name == "mask":
                value = np.ones(shape)
                value[..., 3:5] = 0
            found[name] = value.astype(kind)
        return found

    def with_mask(self, values: dict[str, Any], length: int) -> dict[str, Any]:
        """The values, and the mask that was added."""
        return values | ({self.mask: np.ones((1, length), np.float32)} if self.mask else {})


def between(model: Sized, ranged: Any, folder: Path) -> str:
    """The worst of every length, against the model of a range, or against it at that one length."""
    every = list[float]()
    multiple = sized_file(folder)[1].multiple
    for length in range(multiple, LENGTHS[-1] + 1, multiple):
        values = model.values(length)
        found = ane.run(folder, model.with_mask(values, length))
        near = nearness(found, ane.run(ranged, values))
        if near < 80:  # what a range computes at run time is rounded in another way than constants are
            fixed = ane.sizes(ranged, {name: [shape] for name, shape in model.shapes(length).items()})
            near = nearness(found, ane.run(next(iter(fixed.models.values())), values))
        every.append(near)
    return worst(every)


def row(name: str, model: Sized, scratch: Path) -> str:
    """A row of the table."""
    module = model.build()
    try:
        ranged = model.convert(module)
    except Exception as error:
        return f"| {name} | not converted with a range | | | {type(error).__name__}: {str(error)[:120]} |"
    every = [model.shapes(length) for length in LENGTHS]
    try:
        sized = ane.sizes(ranged, {key: [one[key] for one in every] for key in model.inputs}, mask=model.mask)
    except ane.SurgeryError as error:
        return f"| {name} | refused | | | {error} |"
    folder = sized.save(scratch / "sized")
    near = list[float]()
    for length in LENGTHS:
        values = model.values(length)
        found = ane.run(folder, model.with_mask(values, length), precision="fp16")
        near.append(nearness(found, ane.run(model.convert(module, length), values, precision="fp16")))
    one = stored(ane.save(sized.models[f"size_{LENGTHS[-1]}"], scratch / "one.mlpackage"))
    filled = "-" if sized.padding.why_not else between(model, ranged, folder)
    more = 100 * (stored(folder) / one - 1)
    return f"| {name} | {nearness_in_words(near)} | {more:+.1f} % | {filled} | {sized.padding} |"


def fixed_row(name: str, model: Sized, scratch: Path) -> str:
    """A row of the table of models of one fixed size."""
    module = model.build()
    every = [model.shapes(length) for length in SHORTER]
    try:
        sized = ane.sizes(
            model.convert(module, LENGTHS[-1]), {key: [one[key] for one in every] for key in model.inputs}
        )
    except ane.SurgeryError as error:
        return f"| {name} | refused | {error} |"
    folder, near = sized.save(scratch / "sized"), list[float]()
    for length in SHORTER:
        values = model.values(length)
        expected = ane.run(model.convert(module, length), values, precision="fp16")
        near.append(nearness(ane.run(folder, values, precision="fp16"), expected))
    return f"| {name} | {nearness_in_words(near)} | {'; '.join(sized.assumed) or '-'} |"


class Of(nn.Module):
    """What a function makes of a module."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *values: Tensor) -> Any:
        return self.call(self.inner, *values)


TEXT: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
}


def family(name: str, settings: Mapping[str, Any], model: str | None = None) -> Any:
    """A small model of transformers with random weights."""
    config = getattr(transformers, f"{name}Config")(**settings)
    config._attn_implementation = "eager"
    config.use_cache = False
    torch.manual_seed(0)
    return getattr(transformers, model or f"{name}Model")(config)


def text(
    name: str, more: dict[str, Any] | None = None, model: str | None = None, masked: bool = True, what: Any = 0
) -> Sized:
    def build() -> nn.Module:
        return Of(
            family(name, TEXT | (more or {}), model),
            lambda inner, ids, *mask: inner(ids, **({"attention_mask": mask[0]} if mask else {}))[what],
        )

    names = ("ids", "mask") if masked else ("ids",)
    return Sized(build, dict.fromkeys(names, ((1, None), "int32")))


class WhisperEncoder(nn.Module):
    """The encoder of transformers at any length: positions are the first rows of its table."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = family(
            "Whisper",
            {
                "vocab_size": 120,
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 1,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
                "num_mel_bins": 20,
                "max_source_positions": 64,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "decoder_start_token_id": 1,
            },
        ).encoder

    def forward(self, mel: Tensor) -> Tensor:
        one = self.inner
        x = nn.functional.gelu(one.conv2(nn.functional.gelu(one.conv1(mel)))).permute(0, 2, 1)
        x = x + one.embed_positions.weight[: x.shape[1]]
        for layer in one.layers:
            x = layer(x, None)
            x = x[0] if isinstance(x, tuple) else x
        return one.layer_norm(x)


class Conformer(nn.Module):
    """Feed forward, attention and a depthwise convolution, as in speech recognition."""

    def __init__(self) -> None:
        super().__init__()
        width, kernel = 32, 7

        def feed() -> nn.Module:
            return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, width))

        self.first, self.last = feed(), feed()
        self.norm, self.attention = (
            nn.LayerNorm(width),
            nn.ModuleList(nn.Linear(width, width) for _ in range(4)),
        )
        self.before = nn.LayerNorm(width)
        self.into, self.out = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.deep = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.middle = nn.BatchNorm1d(width)
        self.end = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + 0.5 * self.first(x)
        y = self.norm(x)
        q, k, v, o = self.attention
        heads = [one(y).view(1, -1, 2, 16).transpose(1, 2) for one in (q, k, v)]
        scores = heads[0] @ heads[1].transpose(-1, -2) / 4
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e4)
        y = (scores.softmax(-1) @ heads[2]).transpose(1, 2).reshape(1, -1, 32)
        x = x + o(y)
        y = nn.functional.glu(self.into(self.before(x).transpose(1, 2)), dim=1)
        if mask is not None:
            y = y * mask[:, None, :].to(y.dtype)
        y = self.out(nn.functional.silu(self.middle(self.deep(y)))).transpose(1, 2)
        x = x + y
        return self.end(x + 0.5 * self.last(x))


class Causal(nn.Module):
    """Convolutions that read what was, as in a TCN."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(8, 8, 3, dilation=2**i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = x + torch.relu(conv(nn.functional.pad(x, (2 * 2**i, 0))))
        return x


class Tagger(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self, both: bool, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.words = nn.Embedding(120, 16)
        self.steps, self.head = (
            kind(16, 16, 2, batch_first=True, bidirectional=both),
            nn.Linear(32 if both else 16, 5),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.steps(self.words(ids))[0])


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def one() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return one


def conformer_hf() -> nn.Module:
    return Of(
        family(
            "Wav2Vec2Conformer",
            TEXT
            | {
                "position_embeddings_type": "rotary",
                "conv_depthwise_kernel_size": 7,
                "max_source_positions": 80,
                "conv_dim": (16, 16),
                "conv_stride": (5, 2),
                "conv_kernel": (10, 3),
                "num_feat_extract_layers": 2,
            },
        ).encoder,
        lambda inner, x: inner(x)[0],
    )


def convolutional() -> nn.Module:
    parts = [nn.Conv1d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 8, 5, padding=2)]
    return nn.Sequential(*parts)


class Pictures(nn.Module):
    """A vision transformer whose positions are interpolated to the size of the picture."""

    def __init__(self, **more: int) -> None:
        super().__init__()
        form = {
            "image_size": 64,
            "patch_size": 8,
            "num_channels": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
        }
        self.inner: Any = family("ViT", TEXT | form | more)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, interpolate_pos_encoding=True).last_hidden_state


def module_row(name: str, module: nn.Module, shapes: Sequence[tuple[int, ...]], scratch: Path) -> str:
    """A row of the table of modules that are converted at each size."""
    sized = ane.sizes(module.eval(), {"x": shapes})
    folder, near = sized.save(scratch / "sized"), list[float]()
    for shape in shapes:
        values = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
        with torch.no_grad():
            wanted = {"y": module(torch.from_numpy(values["x"])).numpy()}
        near.append(nearness(ane.run(folder, values), wanted))
    last = list(sized.models)[-1]
    one = stored(ane.save(sized.models[last], scratch / "one.mlpackage"))
    listed = ", ".join("x".join(map(str, shape)) for shape in shapes)
    return f"| {name} | {listed} | {min(near):.0f} dB | {100 * (stored(folder) / one - 1):+.1f} % |"


STEPS: dict[str, Input] = {"x": ((1, None, 32), "float32")}
IDS: dict[str, Input] = {"ids": ((1, None), "int32")}
MELS: dict[str, Input] = {"mel": ((1, 20, None), "float32")}
CHANNELS: dict[str, Input] = {"x": ((1, 8, None), "float32")}
MODELS: dict[str, Sized] = {
    "BERT": text("Bert"),
    "Whisper encoder": Sized(seeded(WhisperEncoder), MELS),
    "Whisper encoder, `mask=` added": Sized(seeded(WhisperEncoder), MELS, "mask"),
    "conformer": Sized(seeded(Conformer), STEPS),
    "conformer, `mask=` added": Sized(seeded(Conformer), STEPS, "mask"),
    "fully convolutional": Sized(seeded(convolutional), CHANNELS),
    "fully convolutional, `mask=` added": Sized(seeded(convolutional), CHANNELS, "mask"),
    "causal convolutions": Sized(seeded(Causal), CHANNELS),
    "LSTM tagger": Sized(seeded(lambda: Tagger(False)), IDS),
    "LSTM tagger in both directions": Sized(seeded(lambda: Tagger(True)), IDS),
    "GPT-2": text("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 80}, masked=False),
    "Llama": text("Llama", masked=False),
    "conformer of transformers": Sized(conformer_hf, STEPS),
    "T5 encoder": text(
        "T5", {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}, "T5EncoderModel"
    ),
}
FIXED = {name: model for name, model in MODELS.items() if model.mask is None}
HEAD = """# Six sizes of many models

This page is written by `make sized`; with `OPTIONS="--sections corpus time"`, these sections alone.
"""
FROM_RANGES = """## From a range

Small models of random weights are converted with a range of lengths, and
given to [`sizes`](sizes.md) at the lengths {lengths}. *At a size*: how many of the six give, in fp16, bit for
bit what the model gives that is converted at that size; where they do not, how near they are. *Weights*: of the
package of six, beside those of its largest size. *Between sizes*: the worst of every length from 1 to
{largest}, filled up and cropped, beside the model at that length; else the reason.

Tables of less than {least} bytes are stored for each size, which counts in models as small as these.

| model | at a size | weights | worst between | between sizes |
|---|---|---|---|---|
{rows}

Where a model is equal at few sizes, a range is another model: its rotary positions are cosines and sines of
angles in fp16, computed at run time, where a conversion at one size has them folded, computed in fp32. Made of
one fixed size instead, as below, the same models are equal.
"""
FROM_FIXED = """## From one fixed size

Each is converted at the length {largest} alone, and made at {shorter} by [`sizes`](sizes.md). *Equal*: at how
many of these it gives, in fp16, bit for bit what the model gives that is converted there. *Assumed*: what its
numbers do not show.

| model | equal | assumed |
|---|---|---|
{rows}
"""
FROM_MODULES = """## From a PyTorch module

A PyTorch module is converted at each size by itself. *Nearness*: of the worst size, to what the module gives;
computed in fp32, of weights in fp16. Positions that are interpolated differ from size to size: each
size stores its own, or computes them where that would make the weights more than 2 % larger.

| module | sizes | nearness | weights |
|---|---|---|---|
{rows}
"""
FROM_CORPUS = """## Published models

Each at the sizes that are listed, by the shape of its first input. *Equal*: how many of these give, in fp16,
bit for bit what the model at that size gives that was made without `sizes`: a package of a range reads it
itself, a neural network is given its size in its specification or upgraded for as many steps, and in a
package of one size the numbers that are lengths were replaced by hand, as its graph was read. *Weights*: of all
sizes, beside those of the largest. *Between*: the worst of a length within each two sizes, in fp32. *Time*:
processor seconds of `sizes` and `save`.

| model | sizes | equal | weights | between | time | between sizes |
|---|---|---|---|---|---|---|
{rows}

The ranges of the two DTLN hold two sizes. `bisenet`, `bge_small`, `fluid_titanet_small`, `whisper_tiny_decoder`
and `kokoro_duration` are real graphs with random weights; the mask of `bge_small` was repaired first
(`padding_mask_tensor`), since every number of it is none without. `kokoro_duration` runs at no length as it was
converted: a repetition is computed as -1 / 128, which is 0 times.
"""
TIME = """## Time

Six sizes of a ranged model of {megabytes:.0f} MB take **{ratio}** times the processor time of coremltools' own
null round trip of the same package (loaded, and saved again): the median of {runs} rounds, and their spread.
"""


def small_vit() -> nn.Module:
    """As large as ViT-S/16."""
    heads = {"num_hidden_layers": 12, "num_attention_heads": 6}
    return Pictures(image_size=224, patch_size=16, hidden_size=384, intermediate_size=1536, **heads)


MODULES: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "ViT, positions interpolated": (Pictures, [(1, 3, n, n) for n in (32, 48, 64, 80, 96, 112)]),
    "the same, as large as ViT-S/16": (small_vit, [(1, 3, n, n) for n in (128, 160, 192, 224, 256, 288)]),
}


def _each(rows: Iterator[str]) -> str:
    """Rows below each other, which are shown as they come."""
    listed = list[str]()
    for one in rows:
        print(one, flush=True)
        listed.append(one)
    return "\n".join(listed)


def _in_scratch(of: Callable[[str, Any, Path], str], models: Mapping[str, Any]) -> str:
    """A row of each model, in a folder of its own."""

    def rows() -> Iterator[str]:
        for name, model in models.items():
            with tempfile.TemporaryDirectory() as scratch:
                yield of(name, model, Path(scratch))

    return _each(rows())


def ranges_section() -> str:
    """Models of a range."""
    lengths = ", ".join(map(str, LENGTHS))
    rows = _in_scratch(row, MODELS)
    return FROM_RANGES.format(lengths=lengths, largest=LENGTHS[-1], least=LEAST, rows=rows)


def fixed_section() -> str:
    """Models of one size."""
    shorter = " and ".join(map(str, SHORTER))
    return FROM_FIXED.format(largest=LENGTHS[-1], shorter=shorter, rows=_in_scratch(fixed_row, FIXED))


def modules_section() -> str:
    """PyTorch modules."""

    def of(name: str, chosen: Any, scratch: Path) -> str:
        build, shapes = chosen
        return module_row(name, seeded(build)(), shapes, scratch)

    return FROM_MODULES.format(rows=_in_scratch(of, MODULES))


def corpus_section() -> str:
    """Published models."""
    with tempfile.TemporaryDirectory() as folder:
        return FROM_CORPUS.format(rows=_each(sized_corpus.rows(Path(folder))))


def time_section() -> str:
    """A model of 100 MB."""
    with tempfile.TemporaryDirectory() as folder:
        figures, size = sized_time.ratios(Path(folder), RUNS)
    return TIME.format(megabytes=size / 1e6, runs=RUNS, ratio=spread(figures))


RUNS = 3
SECTIONS = {
    "ranges": ranges_section,
    "fixed": fixed_section,
    "modules": modules_section,
    "corpus": corpus_section,
    "time": time_section,
}


def main() -> None:
    """Write the page, or some sections of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--sections", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    chosen = parser.parse_args()
    page: Path = chosen.page
    kept = dict(zip(SECTIONS, page.read_text(encoding="utf-8").split("\n## ")[1:], strict=False))
    for name in chosen.sections:
        kept[name] = SECTIONS[name]().removeprefix("## ").rstrip() + "\n"
    parts = ["## " + kept[name].rstrip() for name in SECTIONS]
    page.write_text("\n\n".join([HEAD.rstrip(), *parts]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
