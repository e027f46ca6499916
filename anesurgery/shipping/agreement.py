"""Check that a built model computes what its checkpoint does; `build` fails otherwise.

fp16 changes logits in two ways: by rounding the stored weights, and by rounding in the computation. To tell
both from a defect, the build runs in fp32 on this library's interpreter, and transformers runs with weights
rounded to fp16: each row of logits must then agree to `ALIKE`. Rounding cannot hide a wrong op, a lost mask or
misplaced keys. One exception: a mixture may choose another expert where two scores are nearly equal. Such a row
is accepted if transformers gives it too when its own numbers are moved by a rounding.

Rows are compared for a short text token by token, for prompts of several lengths, and at the end of a text that
is as long as the time allows, or as makes a sliding window forget its beginning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.compressing.modes import SMALLEST
from anesurgery.errors import LoadError, SurgeryError
from anesurgery.interpret.decoding import Decoder
from anesurgery.mil import Array
from anesurgery.shipping.recurrent_states import CACHE_NAMES, POSITION_IDS, positions_given, read_beginning

TRIED = 24
"""Tokens that are read one by one, and as prompts of several lengths. A choice: each costs a run of both."""
STRIDE = 7
"""Difference in length between prompts: few prompts, whose lengths are no multiple of a function's."""
AT_THE_END = 8
"""Tokens that are read one by one after a long text. A choice: the first already finds a lost window."""
READ, READ_BEYOND_WINDOWS = 1e11, 1e12
"""Limits of weights times tokens for the long text: usually, and where only a longer text fills a sliding
window. A choice: 200 tokens of 0.5 billion weights, and ten times the work to find a whole kind of mistake."""
SINGLY = 16
"""How many times more work it is to read tokens one by one. An estimate: in a batch they share the weights."""
ALIKE = 0.01
"""Largest accepted difference of a row, as a share of the range of logits. Rounded weights move the logits of
small decoders by 1e-3, and a wrong op moves them by more than 1e-1."""
MOVES, FEW = 64, 8
"""How often transformers runs with moved numbers: at most, to explain a row; and to measure the noise. A
choice: the rarest choice of experts that was seen came in about 1 of 50."""
AGREE = 30.0
"""PSNR in dB of an uncompressed model below which the noise of fp16 is measured: usually it is above 50."""
SLACK = 6.0
"""How many dB worse than moved numbers a build may be: 6 dB is twice as far. A choice: a build rounds more
often."""
WINDOWS = ("sliding_window", "attention_window_size", "attention_chunk_size", "local_attention", "window_size")
"""Names in configs for the number of tokens that attention looks back."""
KEEP = "logits_to_keep"
"""The argument of most modules of transformers that holds the rows for which to compute logits."""


@dataclass(frozen=True)
class ComparedText:
    """The tokens that both models read, and the rows of logits that are compared."""

    ids: Array
    singly: bool = False
    """Whether the build reads tokens one by one; transformers may give other logits then."""

    @property
    def short(self) -> int:
        """How many tokens are read one by one."""
        return min(TRIED, len(self.ids))

    @property
    def places(self) -> Array:
        """The index of the last token before each compared row, in the order of `rows`."""
        ends: list[int] = []
        if len(self.ids) > TRIED:
            ends = list(range(len(self.ids) - AT_THE_END - 1, len(self.ids)))
        return np.array([*range(self.short), *range(0, self.short, STRIDE), *ends])

    def rows(self, model: Path, precision: str) -> Array:
        """Return the logits of a built model: (rows, vocabulary)."""
        decoder = Decoder(model, precision=precision)
        rows = [decoder.feed(self.ids[: self.short])]
        for count in range(1, self.short + 1, STRIDE):  # prompts, which other functions read
            decoder.reset()
            rows.append(decoder.feed(self.ids[:count], whole=False))
        if len(self.ids) > TRIED:
            decoder.reset()
            rows.append(decoder.feed(self.ids[:-AT_THE_END], whole=False))
            rows.append(decoder.feed(self.ids[-AT_THE_END:]))
        return np.concatenate(rows)

    def expected(self, module: Any) -> Array:
        """Return the logits of a module of transformers, which reads the text as the build does.

        Raises:
            LoadError: transformers cannot run it.
        """
        return (logits_by_steps if self.singly else logits_of_text)(module, self.ids, self.places)


def compared_text(config: Any, context: int, weights: int, *, singly: bool) -> ComparedText:
    """Return random tokens to compare on, the same ones each time.

    The padding token is left out: its embedding may be all zeros, for which a router chooses any expert.

    Args:
        config: the text config of transformers.
        context: the most tokens.
        weights: how many weights the model has.
        singly: whether the build reads tokens one by one.
    """
    work_per_token = max(weights, 1) * (SINGLY if singly else 1)
    usual, most = max(TRIED, int(READ / work_per_token)), int(READ_BEYOND_WINDOWS / work_per_token)
    window_filled = window(config, context) + TRIED
    count = min(context, usual if window_filled > most else max(usual, window_filled))
    vocabulary = int(config.vocab_size)
    ids = np.random.default_rng(0).integers(0, vocabulary, count)
    padding = getattr(config, "pad_token_id", None)
    ids = np.where(ids == (-1 if padding is None else padding), (ids + 1) % vocabulary, ids)
    return ComparedText(ids.astype(np.int32), singly)


def window(config: Any, context: int) -> int:
    """Return the longest sliding window that is shorter than the context; 0 for none."""
    sizes = (getattr(config, name, None) for name in WINDOWS)
    return max((size for size in sizes if isinstance(size, int) and size < context), default=0)


def logits_of_text(module: Any, ids: Array, places: Array) -> Array:
    """Return the checkpoint's logits after the tokens at `places`: (places, vocabulary).

    Raises:
        LoadError: transformers cannot run it.
    """
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    rows = torch.from_numpy(places.astype(np.int64))
    has_keep = KEEP in inspect.signature(module.forward).parameters
    try:
        with torch.no_grad():
            result = module(input_ids=tokens, use_cache=False, **({KEEP: rows} if has_keep else {})).logits[0]
    except Exception as error:  # torch raises what it likes
        words = f"transformers cannot run {type(module).__name__} on {len(ids)} tokens: {error}"
        raise LoadError(f"{words}; look at the sizes in config.json") from error
    return (result if has_keep else result[rows]).numpy()


def logits_by_steps(module: Any, ids: Array, places: Array) -> Array:
    """Return the same as `logits_of_text`, where the checkpoint reads one token after the other."""
    parameters = inspect.signature(module.forward).parameters
    argument = next(name for name in CACHE_NAMES if name in parameters)
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        # two tokens at first: some modules take a single one for a token that follows others
        output, cache = read_beginning(module, argument, tokens[:, :2])
        rows = list(output.logits[0].numpy())
        for at in range(2, len(ids)):
            positions = positions_given(module, torch.tensor([at]))
            output = module(tokens[:, at : at + 1], use_cache=True, **{argument: cache}, **positions)
            later = getattr(output, argument, None)
            cache = cache if later is None else later
            rows.append(output.logits[0, -1].numpy())
    return np.stack(rows)[places]


def counts_positions_otherwise(module: Any, text: ComparedText) -> bool:
    """Return whether a module by default counts positions other than from 0, as its `generate` does.

    RoBERTa, for one, counts from its padding token on. Then its logits differ from those of `generate`.
    """
    if POSITION_IDS not in inspect.signature(module.forward).parameters:
        return False
    tokens = torch.from_numpy(text.ids[: text.short].astype(np.int64))[None]
    try:
        with torch.no_grad():
            own, counted = (
                module(tokens, use_cache=False, **given).logits[0].numpy()
                for given in ({}, {POSITION_IDS: torch.arange(text.short)[None]})
            )
    except Exception:  # torch raises what it likes: it does not take positions so
        return False
    return bool(np.any(row_differences(counted, own) >= ALIKE))


@contextmanager
def altered(module: Any, weight: Callable[[Any], Any], output: Callable[[Any], Any]) -> Iterator[None]:
    """Within the context, each module computes with altered weights, made for one module at a time.

    Args:
        module: of torch.
        weight: returns the altered weight.
        output: returns the altered output of a module without children.
    """
    originals: dict[Any, list[Any]] = {}

    def before(inner: Any, *_: Any) -> None:
        parameters = [p for p in inner.parameters(recurse=False) if p.is_floating_point()]
        originals.setdefault(inner, []).append([(p, p.data) for p in parameters])
        for parameter in parameters:
            parameter.data = weight(parameter.data)

    def after(inner: Any, _: Any, result: Any) -> Any:
        for parameter, data in originals[inner].pop():
            parameter.data = data
        leaf = next(inner.children(), None) is None
        return output(result) if leaf and hasattr(result, "is_floating_point") else result

    hooks = [m.register_forward_pre_hook(before) for m in module.modules()]
    hooks += [m.register_forward_hook(after, always_call=True) for m in module.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def with_rounded_weights(module: Any) -> Any:
    """Return a context in which a module computes with weights rounded to fp16."""
    return altered(module, lambda x: x.half().to(x.dtype), lambda x: x)


def with_quantized_weights(module: Any, bits: int, axis: int) -> Any:
    """Return a context in which a module computes with weights rounded to integers of a few bits.

    Args:
        module: of torch.
        bits: bits of each weight.
        axis: the axis along which weights share a scale, -1 or -2.
    """
    most = 2 ** (bits - 1) - 1

    def rounding(x: Any) -> Any:
        if x.ndim < 2 or x.numel() <= SMALLEST:
            return x
        scale = (x.abs().amax(axis, keepdim=True) / most).clamp_min(fp16.NORMAL)
        return (x / scale).round() * scale

    return altered(module, rounding, lambda x: x)


def psnr_of_quantized(text: ComparedText, expected: Array, module: Any, bits: int) -> float:
    """Return the PSNR in dB of transformers with weights of a few bits, beside its own logits.

    How a weight is stored decides which axis has the scales, so the worse of both axes counts. Builds of a
    small Llama with 8 and 4 bits were 0.4 and 0.6 dB better; one that packs 4 bits as 8 is 24 dB worse.
    """
    worst = np.inf
    for axis in (-1, -2):
        with with_quantized_weights(module, bits, axis):
            worst = min(worst, compare_arrays("logits", expected, text.expected(module)).psnr)
    return float(worst)


def logits_with_noise(module: Any, text: ComparedText, times: int) -> Iterator[Array]:
    """Yield transformers' logits with random noise of one fp16 rounding on each weight and layer output."""
    for seed in range(times):
        draws = torch.Generator().manual_seed(seed)

        def move(x: Any, draws: Any = draws) -> Any:
            if not x.is_floating_point():
                return x
            return x * (1 + fp16.EPSILON * (2 * torch.rand(x.shape, generator=draws) - 1))

        with altered(module, move, move):
            yield text.expected(module)


def row_differences(rows: Array, expected: Array) -> Array:
    """Return each row's largest difference, as a share of the range of `expected`; NaN becomes infinite."""
    known = ~np.isneginf(rows)  # an argmax head gives -inf for all tokens that it does not name
    difference = np.where(known, np.abs(rows - np.where(known, expected, 0)), 0).max(-1)
    return np.nan_to_num(difference / np.ptp(expected), nan=np.inf)


def unexplained_rows(
    rows: Array, text: ComparedText, expected: Array, module: Callable[[], Any]
) -> Mapping[int, float]:
    """Return the rows that rounding does not explain: index of the last token -> its difference.

    Args:
        rows: the logits of a build, computed in fp32.
        text: the text that was read.
        expected: the logits of the checkpoint with rounded weights.
        module: loads the checkpoint, which is run with noise where rows differ.
    """
    least = row_differences(rows, expected)
    if np.any(least >= ALIKE):
        for other in logits_with_noise(module(), text, MOVES):
            least = np.minimum(least, row_differences(rows, other))
            if np.all(least < ALIKE):
                break
    return {int(text.places[row]): float(least[row]) for row in np.flatnonzero(~(least < ALIKE))}


def psnr_of_noise(text: ComparedText, expected: Array, module: Any) -> float:
    """Return the median PSNR in dB of transformers with noise of a rounding, beside its own logits."""
    found = [compare_arrays("logits", expected, other).psnr for other in logits_with_noise(module, text, FEW)]
    return float(np.median(found))


@dataclass(frozen=True)
class Judge:
    """Decides whether a built model may be handed over, beside the checkpoint's logits for a text.

    Each check raises a `SurgeryError` where it may not; `psnr` is that of the model's logits, in dB.
    """

    text: ComparedText
    wanted: Array
    """The checkpoint's logits."""
    rounded: Array
    """Its logits with weights rounded to fp16."""
    module: Callable[[], Any]
    """Loads the checkpoint as a module of transformers; called only where rows differ."""

    def check_agreement(self, rows: Array) -> None:
        """Check that logits in fp32 are those of the checkpoint, up to the rounding of weights."""
        apart = unexplained_rows(rows, self.text, self.rounded, self.module)
        if apart:
            place, most = max(apart.items(), key=lambda row: row[1])
            count = len(self.text.ids)
            raise SurgeryError(
                f"the model gives other logits than the checkpoint after {len(apart)} of {count} tokens, "
                f"and not by rounding: computed in fp32, beside weights that are rounded to fp16, they are "
                f"{most:.1%} of their range apart after token {place + 1}; this is a defect of the conversion"
            )

    def check_decoded(self, rows: Array, decoded: Array, bits: int) -> None:
        """Check that logits of compressed weights, in fp32, are those of the numbers to which they decode."""
        apart = row_differences(rows, decoded)
        if not np.all(apart < ALIKE):
            raise SurgeryError(
                f"weights of {bits} bits give other logits than the numbers to which they decode: computed in "
                f"fp32, they are {apart.max():.1%} of their range apart after token "
                f"{int(self.text.places[np.argmax(apart)]) + 1}; this is a defect of the build"
            )

    def check_fp16(self, psnr: float, model: Path) -> str | None:
        """Check that a model computed in fp16 is no further from the checkpoint than rounding explains.

        Returns:
            A note where rounding alone leads below `AGREE`; else None.
        """
        if psnr >= AGREE:
            return None
        noise = psnr_of_noise(self.text, self.wanted, self.module())
        if not psnr >= noise - SLACK:
            raise SurgeryError(
                f"the model gives other logits than the checkpoint in fp16 arithmetic: {psnr:.1f} dB for "
                f"{len(self.text.ids)} tokens, where numbers of the checkpoint that are moved by a rounding "
                f"give {noise:.1f} dB; look for values beyond fp16 with `anesurgery.ranges` on {model}"
            )
        return (
            f"fp16 is coarse for this checkpoint: its own logits are {noise:.1f} dB from themselves where its "
            "numbers move by a rounding, as where other experts are chosen next to a threshold"
        )

    def check_compressed(self, psnr: float, bits: int) -> str:
        """Check that weights of a few bits lose no more than plain rounding; return a note with both figures.

        They may lose twice as much.
        """
        usual = psnr_of_quantized(self.text, self.wanted, self.module(), bits)
        if not psnr >= usual - SLACK:
            raise SurgeryError(
                f"weights of {bits} bits lose more than they must: the logits are {psnr:.1f} dB from those of "
                f"the checkpoint, where its own weights, rounded to the nearest, lead to {usual:.1f} dB; give "
                "more bits, or none"
            )
        return (
            f"weights of {bits} bits change the logits: {psnr:.1f} dB beside those of the checkpoint, where "
            f"its own weights, rounded to the nearest, lead to {usual:.1f} dB"
        )
