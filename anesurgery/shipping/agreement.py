"""Compare a build with its checkpoint row by row, so that no wrong one passes.

What fp16 changes has two parts: the weights that are stored, and what is computed. So a build is computed in
fp32, and transformers with weights that are rounded to fp16: every row must then be the same to `ALIKE`.
No rounding hides a wrong op, a lost mask, or keys in a wrong place. A mixture may still take another expert
next to a threshold; such a row must be one that transformers gives too, with numbers moved by a rounding.

Rows follow a short text token by token, prompts of several lengths, and the end of a text that is as long as is
little work, or as makes a sliding window forget.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery import fp16
from anesurgery.checking.grades import compare_arrays
from anesurgery.compressing.modes import SMALLEST
from anesurgery.errors import LoadError
from anesurgery.interpret.decoding import Decoder
from anesurgery.mil import Array
from anesurgery.shipping.recurrent_states import CACHE_NAMES, begun

TRIED = 24
"""Tokens that are read one by one, and as prompts of several lengths. A choice: each is a run of both."""
STRIDE = 7
"""From one prompt to the next that is tried: few, and of lengths that no function reads as a whole."""
AT_THE_END = 8
"""Tokens that are read one by one after a long text. A choice: the first finds a lost window."""
READ, READ_BEYOND_WINDOWS = 1e11, 1e12
"""Weights times tokens: how long a text is read, and how long where only that makes a sliding window forget. A
choice: 200 tokens of 0.5 billion weights, and ten times the work for a whole kind of mistake."""
SINGLY = 16
"""How many times the work it is to read tokens one by one. An estimate: together they share what is read."""
ALIKE = 0.01
"""Of the range of logits: more is no rounding of what is stored. Weights that are rounded move the logits of
small decoders by 1e-3, and a wrong op by more than 1e-1."""
MOVES, FEW = 64, 8
"""How often transformers is asked for a row with moved numbers, at most; and for how far moves lead. A choice:
the rarest choice of experts that was seen came in about 1 of 50."""
SLACK = 6.0
"""In dB, what a build may be further from its checkpoint than moved numbers: twice as far. A choice: it rounds
more often."""
WINDOWS = ("sliding_window", "attention_window_size", "attention_chunk_size", "local_attention", "window_size")
"""Names in configs of how far a token looks back."""
KEEP, POSITIONS = "logits_to_keep", "position_ids"
"""Arguments of most modules: after which tokens logits are wanted, and where the tokens stand."""


@dataclass(frozen=True)
class Text:
    """The tokens that are read, and the rows that are compared."""

    ids: Array
    singly: bool = False
    """Does the build read tokens one by one? Transformers may give other logits so than for a whole text."""

    @property
    def short(self) -> int:
        """Tokens that are read one by one."""
        return min(TRIED, len(self.ids))

    @property
    def places(self) -> Array:
        """After which tokens rows are compared, in the order in which `rows` gives them."""
        ends: list[int] = []
        if len(self.ids) > TRIED:
            ends = list(range(len(self.ids) - AT_THE_END - 1, len(self.ids)))
        return np.array([*range(self.short), *range(0, self.short, STRIDE), *ends])

    def rows(self, model: Path, precision: str) -> Array:
        """The logits of a model that was built."""
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
        """The logits of a module of transformers, which reads the text as the build does.

        Raises:
            LoadError: transformers cannot run it.
        """
        return (logits_by_steps if self.singly else logits_of)(module, self.ids, self.places)


def text(config: Any, context: int, weights: int, *, singly: bool) -> Text:
    """Tokens to compare on, the same each time.

    The token of padding is none of them: its embedding may be zeros, of which a router thinks nothing.

    Args:
        config: of the text, of transformers.
        context: the most tokens.
        weights: how many the model has.
        singly: does the build read tokens one by one?
    """
    each = max(weights, 1) * (SINGLY if singly else 1)
    usual, most = max(TRIED, int(READ / each)), int(READ_BEYOND_WINDOWS / each)
    beyond = window(config, context) + TRIED
    count = min(context, usual if beyond > most else max(usual, beyond))
    words = int(config.vocab_size)
    ids = np.random.default_rng(0).integers(0, words, count)
    padding = getattr(config, "pad_token_id", None)
    ids = np.where(ids == (-1 if padding is None else padding), (ids + 1) % words, ids)
    return Text(ids.astype(np.int32), singly)


def window(config: Any, context: int) -> int:
    """The longest sliding window that is shorter than the context; 0 for none."""
    sizes = (getattr(config, name, None) for name in WINDOWS)
    return max((size for size in sizes if isinstance(size, int) and size < context), default=0)


def logits_of(module: Any, ids: Array, places: Array) -> Array:
    """What the checkpoint gives after some of the tokens.

    Raises:
        LoadError: transformers cannot run it.
    """
    import torch

    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    rows = torch.from_numpy(places.astype(np.int64))
    keeps = KEEP in inspect.signature(module.forward).parameters
    try:
        with torch.no_grad():
            found = module(input_ids=tokens, use_cache=False, **({KEEP: rows} if keeps else {})).logits[0]
    except Exception as error:  # torch raises what it likes
        words = f"transformers cannot run {type(module).__name__} on {len(ids)} tokens: {error}"
        raise LoadError(f"{words}; look at the sizes in config.json") from error
    logits: Array = (found if keeps else found[rows]).numpy()
    return logits


def logits_by_steps(module: Any, ids: Array, places: Array) -> Array:
    """What the checkpoint gives after some tokens, where it reads one after the other with its own cache."""
    import torch

    parameters = inspect.signature(module.forward).parameters
    argument = next(name for name in CACHE_NAMES if name in parameters)
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        output, cache = begun(module, argument, tokens[:, :2])  # of one some take it that others came before
        rows = list(output.logits[0].numpy())
        for at in range(2, len(ids)):
            output = module(tokens[:, at : at + 1], use_cache=True, **{argument: cache})
            later = getattr(output, argument, None)
            cache = cache if later is None else later
            rows.append(output.logits[0, -1].numpy())
    logits: Array = np.stack(rows)[places]
    return logits


def counts_otherwise(module: Any, of: Text) -> bool:
    """Does a module give other logits where positions are counted from 0, as `generate` of transformers does?

    Some count them from their token of padding on, where nothing is said.
    """
    import torch

    if POSITIONS not in inspect.signature(module.forward).parameters:
        return False
    tokens = torch.from_numpy(of.ids[: of.short].astype(np.int64))[None]
    try:
        with torch.no_grad():
            own, counted = (
                module(tokens, use_cache=False, **given).logits[0].numpy()
                for given in ({}, {POSITIONS: torch.arange(of.short)[None]})
            )
    except Exception:  # torch raises what it likes: it does not take positions so
        return False
    return bool(np.any(off(counted, own) >= ALIKE))


@contextmanager
def altered(module: Any, weight: Callable[[Any], Any], output: Callable[[Any], Any]) -> Iterator[None]:
    """In the body, each module computes with other weights, of which those of one are held at a time.

    Args:
        module: of torch.
        weight: gives other numbers for a weight.
        output: gives other numbers for what a module without others in it gives.
    """
    kept: dict[Any, list[Any]] = {}

    def before(inner: Any, *_: Any) -> None:
        own = [p for p in inner.parameters(recurse=False) if p.is_floating_point()]
        kept.setdefault(inner, []).append([(p, p.data) for p in own])
        for parameter in own:
            parameter.data = weight(parameter.data)

    def after(inner: Any, _: Any, result: Any) -> Any:
        for parameter, data in kept[inner].pop():
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


def rounded(module: Any) -> Any:
    """A context in which a module computes with its weights rounded to fp16."""
    return altered(module, lambda x: x.half().to(x.dtype), lambda x: x)


def coarser(module: Any, bits: int, axis: int) -> Any:
    """A context in which a module computes with weights rounded to the nearest of a few bits.

    Args:
        module: of torch.
        bits: of each weight.
        axis: along which weights share a scale, -1 or -2.
    """
    most = 2 ** (bits - 1) - 1

    def rounding(x: Any) -> Any:
        if x.ndim < 2 or x.numel() <= SMALLEST:
            return x
        scale = (x.abs().amax(axis, keepdim=True) / most).clamp_min(fp16.NORMAL)
        return (x / scale).round() * scale

    return altered(module, rounding, lambda x: x)


def nearest(of: Text, expected: Array, module: Any, bits: int) -> float:
    """How near, in dB, transformers comes to its own logits with weights rounded to the nearest of a few bits.

    Which axis has the scales hangs on how a weight is stored; the worse of two counts. Builds of a small Llama
    with 8 and 4 bits were 0.4 and 0.6 dB nearer, and one that packs 4 bits for 8 is 24 dB further.
    """
    worst = np.inf
    for axis in (-1, -2):
        with coarser(module, bits, axis):
            worst = min(worst, compare_arrays("logits", expected, of.expected(module)).psnr)
    return float(worst)


def moved(module: Any, of: Text, times: int) -> Iterator[Array]:
    """What transformers gives where each weight, and what each layer gives, moves by a rounding of fp16."""
    import torch

    for seed in range(times):
        draws = torch.Generator().manual_seed(seed)

        def move(x: Any, draws: Any = draws) -> Any:
            if not x.is_floating_point():
                return x
            return x * (1 + fp16.EPSILON * (2 * torch.rand(x.shape, generator=draws) - 1))

        with altered(module, move, move):
            yield of.expected(module)


def off(rows: Array, expected: Array) -> Array:
    """How far each row is from what is expected, by the range of all; of what it tells. NaN counts as far."""
    told = ~np.isneginf(rows)
    difference = np.where(told, np.abs(rows - np.where(told, expected, 0)), 0).max(-1)
    return np.nan_to_num(difference / np.ptp(expected), nan=np.inf)


def unexplained(rows: Array, of: Text, expected: Array, module: Callable[[], Any]) -> Mapping[int, float]:
    """The rows that no rounding explains: after which token, and how far they are from those of transformers.

    Args:
        rows: of a build, computed in fp32.
        of: what was read.
        expected: the rows of the checkpoint with its weights rounded.
        module: gives the checkpoint, which is asked where rows differ.
    """
    least = off(rows, expected)
    if np.any(least >= ALIKE):
        for other in moved(module(), of, MOVES):
            least = np.minimum(least, off(rows, other))
            if np.all(least < ALIKE):
                break
    far = np.flatnonzero(~(least < ALIKE))
    return {int(of.places[row]): float(least[row]) for row in far}


def noise(of: Text, expected: Array, module: Any) -> float:
    """How near, in dB, transformers comes to its own logits where its numbers move by a rounding of fp16."""
    found = [compare_arrays("logits", expected, other).psnr for other in moved(module, of, FEW)]
    return float(np.median(found))
