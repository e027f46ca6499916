"""Forms of common models, written anew: from a module, a range, a list of shapes and one size, at six sizes.

What each gives at a size is compared in fp16 with the model that is converted at that size; where shorter
inputs are filled up, every length with the model at that length, in fp32.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sized_figures import nearness, nearness_in_words, stored, worst
from sized_models import TEXT, Input, Sized, family, seeded
from torch import Tensor, nn

import anesurgery as ane
from anesurgery.files.size_index import read as sized_file

SOURCES = ("module", "range", "list", "one size")


def sinusoids(length: int, width: int) -> Tensor:
    """Sines and cosines of positions."""
    steps = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angles = torch.arange(length)[:, None] * steps
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


class TorchEncoder(nn.Module):
    """The encoder of torch, with learned positions and a mask of keys."""

    def __init__(self, fast: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.fast, self.places = fast, nn.Parameter(torch.randn(1, 48, 32))
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        torch.backends.mha.set_fastpath_enabled(self.fast)
        try:
            whole: Tensor = self.layers(x + self.places[:, : x.shape[1]], src_key_padding_mask=mask == 0)
            return whole
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


class FirstRows(nn.Module):
    """The first rows of a table, in place of an embedding of all positions."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.weight, self.num_embeddings, self.length = nn.Parameter(table), 1, 0

    def forward(self, _: Tensor) -> Tensor:
        return self.weight[: self.length]


class Whisper(nn.Module):
    """The encoder of transformers, whole, which is told that its length is the most that there is."""

    def __init__(self) -> None:
        super().__init__()
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        form = {"vocab_size": 120, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2}
        form |= {
            "decoder_layers": 1,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
        }
        self.inner: Any = family("Whisper", {**form, **tokens, "num_mel_bins": 20}).encoder
        self.inner.embed_positions = FirstRows(self.inner.embed_positions.weight[:64].clone())

    def forward(self, mel: Tensor) -> Tensor:
        self.inner.config.max_source_positions = int(mel.shape[-1]) // 2
        self.inner.embed_positions.length = mel.shape[-1] // 2
        states: Tensor = self.inner(mel).last_hidden_state
        return states


class AbsoluteConformer(nn.Module):
    """Half steps of feed forward, attention and a gated convolution, with positions that are added."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", sinusoids(64, 32))
        self.first, self.last = self.feed(), self.feed()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.gate, self.out = nn.Conv1d(32, 64, 1), nn.Conv1d(32, 32, 1)
        self.deep, self.batch = nn.Conv1d(32, 32, 15, padding=7, groups=32), nn.BatchNorm1d(32)

    def feed(self) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 96), nn.SiLU(), nn.Linear(96, 32))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x * math.sqrt(32) + self.places[: x.shape[1]]
        x = x + 0.5 * self.first(x)
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, key_padding_mask=mask == 0, need_weights=False)[0]
        y = nn.functional.glu(self.gate(self.norms[1](x).transpose(1, 2)), 1) * mask[:, None].to(x.dtype)
        x = x + self.out(nn.functional.silu(self.batch(self.deep(y)))).transpose(1, 2)
        return self.norms[2](x + 0.5 * self.last(x))


class MaskedTagger(nn.Module):
    """A recurrent layer that reads nothing of what is hidden, and scores of what is not."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.words, self.steps = (nn.Embedding(120, 24), nn.LSTM(24, 16, batch_first=True, bidirectional=both))
        self.head = nn.Sequential(nn.Linear(32 if both else 16, 16), nn.Tanh(), nn.Linear(16, 7))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        seen = mask[..., None].float()
        return self.head(self.steps(self.words(ids) * seen)[0]).log_softmax(-1) * seen


class Segmenter(nn.Module):
    """Convolutions down and up again, by bilinear upsampling: by a factor, or to the size of the picture."""

    def __init__(self, factor: bool) -> None:
        super().__init__()
        self.factor = factor
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in ((3, 8), (8, 16))
        )
        self.up, self.head = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        near = self.down[0](x)
        far = nn.functional.interpolate(self.up(self.down[1](near)), scale_factor=2, mode="bilinear")
        y = self.head(near + far)
        if self.factor:
            return nn.functional.interpolate(y, scale_factor=2, mode="bilinear")
        return nn.functional.interpolate(y, size=x.shape[-2:], mode="bilinear")


class Vit(nn.Module):
    """A vision transformer with registers, whose positions are interpolated to the patches of the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.registers = nn.Conv2d(3, 48, 8, 8), nn.Parameter(torch.randn(1, 2, 48))
        self.places = nn.Parameter(torch.randn(1, 48, 5, 5))
        layer = nn.TransformerEncoderLayer(48, 3, 96, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x)
        y = y + nn.functional.interpolate(self.places, size=y.shape[-2:], mode="bicubic", antialias=False)
        whole: Tensor = self.layers(torch.cat([self.registers, y.flatten(2).transpose(1, 2)], 1))
        return whole[:, 0]


class Tcn(nn.Module):
    """Residual blocks of dilated causal convolutions, cut to their length, and a score of each step."""

    def __init__(self) -> None:
        super().__init__()
        weighted: Any = nn.utils.parametrizations.weight_norm
        self.convs = nn.ModuleList(
            weighted(nn.Conv1d(a, 16, 3, padding=2 * d, dilation=d)) for a, d in ((6, 1), (16, 2), (16, 4))
        )
        self.beside, self.head = nn.Conv1d(6, 16, 1), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            y = torch.relu(conv(x)[..., : -(2 ** (i + 1))])
            x = y + (self.beside(x) if i == 0 else x)
        scores: Tensor = self.head(x.transpose(1, 2))
        return scores


class Neck(nn.Module):
    """A pyramid of features: three scales, the coarser added to the finer, and boxes of each."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 12, 16)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in itertools.pairwise(widths))
        self.beside = nn.ModuleList(nn.Conv2d(n, 8, 1) for n in widths[1:])
        self.head = nn.Conv2d(8, 6, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        scales = list[Tensor]()
        for down, beside in zip(self.down, self.beside, strict=True):
            x = nn.functional.silu(down(x))
            scales.append(beside(x))
        for i in (1, 0):
            scales[i] = scales[i] + nn.functional.interpolate(scales[i + 1], scale_factor=2.0, mode="nearest")
        return tuple(self.head(one).flatten(2).transpose(1, 2) for one in scales)


class Gated(nn.Module):
    """A GRU of words, which coremltools converts as a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.steps, self.head = (
            nn.Embedding(120, 16),
            nn.GRU(16, 16, batch_first=True),
            nn.Linear(16, 5),
        )

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.steps(self.words(ids))[0])
        return scores


class Crnn(nn.Module):
    """Convolutions of a line of text, and a GRU over its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d((4, 1)), nn.Conv2d(8, 8, 3, padding=1)
        )
        self.steps, self.head = nn.GRU(32, 12, batch_first=True), nn.Linear(12, 9)

    def forward(self, x: Tensor) -> Tensor:
        columns = self.convs(x).flatten(1, 2).transpose(1, 2)
        scores: Tensor = self.head(self.steps(columns)[0]).log_softmax(-1)
        return scores


class RelativeConformer(nn.Module):
    """The encoder of transformers with relative positions."""

    def __init__(self) -> None:
        super().__init__()
        form = {"position_embeddings_type": "relative", "conv_depthwise_kernel_size": 7}
        form |= {"max_source_positions": 80, "conv_dim": (16, 16), "conv_stride": (5, 2)}
        form |= {"conv_kernel": (10, 3), "num_feat_extract_layers": 2}
        self.inner: Any = family("Wav2Vec2Conformer", TEXT | form).encoder

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.inner(x)[0]
        return states


class Deberta(nn.Module):
    """DeBERTa v2 of transformers, with positions in buckets."""

    def __init__(self) -> None:
        super().__init__()
        form = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["c2p", "p2c"]}
        self.inner: Any = family("DebertaV2", TEXT | form)

    def forward(self, ids: Tensor) -> Tensor:
        states: Tensor = self.inner(ids)[0]
        return states


STEPS: dict[str, Input] = {"x": ((1, None, 32), "float32"), "mask": ((1, None), "int32")}
WORDS: dict[str, Input] = {"ids": ((1, None), "int32"), "mask": ((1, None), "int32")}
MELS: dict[str, Input] = {"mel": ((1, 20, None), "float32")}
SIGNAL: dict[str, Input] = {"x": ((1, 6, None), "float32")}
PICTURE: dict[str, Input] = {"x": ((1, 3, None, None), "float32")}
SIDES: dict[str, Any] = {"lengths": (16, 24, 32, 40, 48, 64), "least": 16}
FORMS: dict[str, Sized] = {
    "nn.TransformerEncoder, fused": Sized(seeded(lambda: TorchEncoder(True)), STEPS),
    "nn.TransformerEncoder, in parts": Sized(seeded(lambda: TorchEncoder(False)), STEPS),
    "Whisper encoder, whole": Sized(seeded(Whisper), MELS, least=2),
    "conformer, absolute positions": Sized(seeded(AbsoluteConformer), STEPS),
    "masked tagger, LSTM": Sized(seeded(lambda: MaskedTagger(False)), WORDS),
    "masked tagger, BiLSTM": Sized(seeded(lambda: MaskedTagger(True)), WORDS),
    "segmentation, bilinear": Sized(seeded(lambda: Segmenter(False)), PICTURE, **SIDES),
    "segmentation, bilinear by a factor": Sized(seeded(lambda: Segmenter(True)), PICTURE, **SIDES),
    "ViT, positions interpolated": Sized(seeded(Vit), PICTURE, **SIDES),
    "TCN": Sized(seeded(Tcn), SIGNAL),
    "detection neck": Sized(seeded(Neck), PICTURE, **SIDES),
    "GRU tagger": Sized(seeded(Gated), {"ids": WORDS["ids"]}),
    "CRNN": Sized(seeded(Crnn), {"x": ((1, 1, 16, None), "float32")}),
    "conformer, relative positions": Sized(seeded(RelativeConformer), {"x": STEPS["x"]}),
    "DeBERTa v2": Sized(seeded(Deberta), {"ids": WORDS["ids"]}),
}


def made(form: Sized, module: nn.Module, source: str) -> Any:
    """The sizes of a form, from one of the sources."""
    every = [form.shapes(length) for length in form.lengths]
    shapes = {name: [one[name] for one in every] for name in form.inputs}
    if source == "module":
        return ane.sizes(module, shapes, dtypes={name: kind for name, (_, kind) in form.inputs.items()})
    return ane.sizes(form.convert(module, form.lengths[-1] if source == "one size" else source), shapes)


def between(form: Sized, at: Callable[[Any], Any], folder: Path) -> str:
    """The worst of every length that is filled up, beside the model of a range, or that of the length."""
    try:
        ranged = at("range")
    except Exception:  # of coremltools, which does not convert it
        ranged = None
    multiple, every = sized_file(folder)[1].multiple, list[float]()
    for length in range(max(multiple, form.least), form.lengths[-1] + 1, multiple):
        values = form.values(length)
        results = ane.run(folder, values)
        near = -np.inf if ranged is None else nearness(results, ane.run(ranged, values))
        every.append(near if near >= 80 else nearness(results, ane.run(at(length), values)))
    return worst(every)


def rows(name: str, form: Sized, sources: Sequence[str], scratch: Path) -> Iterator[str]:
    """A row for each source of a form."""
    module, values = form.build(), {length: form.values(length) for length in form.lengths}
    at = cache(lambda length: form.convert(module, length))
    expected = {n: ane.run(at(n), values[n], precision="fp16") for n in form.lengths}
    at(form.lengths[-1]).save(str(scratch / "one.mlpackage"))
    for source in sources:
        start = f"| {name} | {source} |"
        try:
            sized = made(form, module, source)
        except ane.SurgeryError as error:
            yield f"{start} refused | | | {_short(error)} |"
            continue
        except Exception as error:  # of coremltools, which does not convert it
            yield f"{start} not converted | | | {type(error).__name__}: {_short(error)} |"
            continue
        folder = sized.save(scratch / source.replace(" ", "_"))
        near = [nearness(ane.run(folder, values[n], precision="fp16"), expected[n]) for n in form.lengths]
        more = 100 * (stored(folder) / stored(scratch / "one.mlpackage") - 1)
        filled = "-" if sized.padding.why_not else between(form, at, folder)
        yield f"{start} {nearness_in_words(near)} | {more:+.1f} % | {filled} | {sized.padding} |"


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def table(names: Sequence[str] = (), sources: Sequence[str] = SOURCES) -> Iterator[str]:
    """The rows of all forms, or of some."""
    for name in names or FORMS:
        with tempfile.TemporaryDirectory() as scratch:
            yield from rows(name, FORMS[name], sources, Path(scratch))


def main() -> None:
    """Print the rows of the forms that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--sources", nargs="*", choices=SOURCES, default=SOURCES)
    chosen = parser.parse_args()
    for row in table(chosen.names, chosen.sources):
        print(row, flush=True)


if __name__ == "__main__":
    main()
