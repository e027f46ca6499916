"""Keep the cache of a decoder, its keys and values, in 8 bits: what goes from call to call becomes int8.

Before::

    cache_0_out = slice_update(x=cache_0, ...)

After::

    cache_0_read = dequantize(input=cache_0, scale, axis=heads)
    kept = slice_update(x=cache_0_read, ...)
    cache_0_out = quantize(input=kept, scale, axis=heads)

or, with a scale for each channel of each head::

    cache_0_read = dequantize(input=cache_0, scale=1) * scales
    kept = slice_update(x=cache_0_read, ...)
    cache_0_out = quantize(input=kept * (1 / scales), scale=1)

A scale comes from the largest number that a head, or a channel, keeps while the calibration texts are read.
quantize and dequantize take scales along one axis only, so scales of channels are products beside them, which
read the cache once more each way. They are used where they lower the loss on other texts by half: if a few
channels of the keys are large, the others get few codes from the scale of their head. Codes that are read and
written again do not change, so a token is rounded once; what a call reads of its own tokens is not rounded.

States hold fp16 only: coremltools 9 refuses another type for iOS 18 and for iOS 26 ("State only support fp16
dtype"), and writes int8 inputs and outputs from iOS 26 on; for iOS 18 it makes int32 of them, which saves
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anesurgery.compressing.activations import LEVELS
from anesurgery.compressing.costs import Cost
from anesurgery.compressing.storing import Smaller, engine_share
from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.interpret.decoder_calls import BACK
from anesurgery.interpret.decoding import Decoder
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Program,
    Var,
    add_input,
    dtype_name,
    exclusive,
    mb,
    np_dtype,
    replace_uses,
    static_shape,
    types,
)
from anesurgery.placement.rules.loading import of_version, refusal
from anesurgery.placement.score import placed
from anesurgery.placement.target import Target
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.rewriting.newer_opsets import raised
from anesurgery.semantics.reading import in_decibels

IOS26 = 10
"""The specification version in which inputs and outputs may be int8."""
HEADS = 1
"""The axis of a cache along which its heads lie."""
HEAD, CHANNEL = "head", "channel"
"""What may have a scale of its own: each head, or each channel of each head."""
LEAST_GAIN = 0.5
"""The share of the KL that scales for each channel must remove, since their products cost time."""
MOST_TRIED = 4
"""The most texts on which the two kinds of scales are compared."""
SILENT = 128
"""A channel's scale is at least this fraction, 1/128, of its head's: if it is silent in these texts, it may not
be in others."""
HELD_OUT = 4
"""Every n-th text is held out to judge the result: a quarter, so that both parts have some of a few texts."""
FAILED = "A19"
"""A chip for which a language model with quantized values did not compile (john-rocky/CoreML-LLM)."""


@dataclass(frozen=True)
class CompressedCache(Smaller):
    """A decoder with an int8 cache, and its loss."""

    subject: MLProgram = field(repr=False)
    """The decoder whose cache is int8."""
    scales: dict[str, tuple[float, ...]]
    """Cache -> the scale of each head, or of the channels of each head, one head after the other."""
    each: str
    """What has a scale of its own: "head", or "channel" of each head."""
    tried: dict[str, float]
    """The KL with scales for each head, and for each channel, on some texts that neither gave these scales nor
    are held out; empty where the two were not compared."""
    bytes: tuple[int, int]
    """The bytes of all caches, before and after."""
    texts: tuple[int, int]
    """The number of texts for the scales, and of those held out."""
    loss: Cost
    """The loss of the logits on the held-out texts. The second half of each is read token by token."""
    on_engine: tuple[float, float]
    """The share of the ops expected on the Neural Engine, before and after."""
    notes: tuple[str, ...]
    """Doubts that the reader must know."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        loss = {"kl": self.loss.kl, "top1": self.loss.top1, "psnr_db": self.loss.psnr}
        lists = {name: list(getattr(self, name)) for name in ("bytes", "texts", "on_engine", "notes")}
        scales = {name: list(values) for name, values in self.scales.items()}
        return {"scales": scales, "each": self.each, "tried": self.tried, "loss": loss, **lists}

    def __str__(self) -> str:
        before, after = self.bytes
        lines = [
            f"cache: {before:,} to {after:,} bytes, a scale for each {self.each}",
            f"on {self.texts[1]} held-out texts: KL {self.loss.kl:.2g}, same top-1 {self.loss.top1:.1%}, "
            f"{in_decibels(self.loss.psnr, 'PSNR ')}",
            f"ops expected on the engine: {self.on_engine[0]:.0%} to {self.on_engine[1]:.0%}",
        ]
        return "\n".join([*lines, *self.notes])


@door("target")
@exclusive()
def compress_cache(
    model: Any, texts: Sequence[Sequence[int]], *, scales: str | None = None, target: str | None = None
) -> CompressedCache:
    """Let a decoder keep its keys and values in 8 bits, by scales from texts. The model given is not changed.

    Args:
        model: path of a package, MLModel or MIL program, whose cache comes and goes by inputs and outputs
            (`add_cache(cache="io")`, or `cache_as_io`).
        texts: some dozens of lists of tokens, none longer than the context. Every fourth is held out.
        scales: one scale for each "head", or for each "channel" of a head, which costs two products. Default:
            channels if they halve the KL on other texts.
        target: chip and OS, such as "M5/macOS 26". Every chip by default.

    Returns:
        The `CompressedCache`: the decoder, its scales, bytes, and the loss on the texts held out. Its `save`
        writes the package.

    Raises:
        SurgeryError: there is no cache, or it is a state; the OS of the target is older than iOS 26; its chip
            failed with quantized values; there are fewer than two texts; or there is no axis of channels.
        InterpretError: it is no decoder, or a text does not fit.
        LoadError: the model cannot be read.
    """
    if scales not in (None, HEAD, CHANNEL):
        raise SurgeryError(f"scales={scales!r}; it may be {HEAD!r} or {CHANNEL!r}")
    device, plain = Target.parse(target), MLProgram.read(model)
    names = _find_caches(plain.loaded.program)
    notes = _check_target(device)
    if len(texts) < 2:
        raise SurgeryError(f"{len(texts)} texts; give two at least, one to calibrate with and one to judge by")
    held = range(min(len(texts), HELD_OUT) - 1, len(texts), HELD_OUT)
    held_out, calibration = [texts[n] for n in held], [text for n, text in enumerate(texts) if n not in held]
    ranges, each, tried = _measure_ranges(plain, names, calibration, scales)
    edited = _with_int8_cache(plain, ranges, each)
    before, after = (engine_share(placed(subject.loaded, device)) for subject in (plain, edited))
    if after < before:
        notes.append("fewer ops are expected on the engine than before: see `anesurgery inspect`")
    return CompressedCache(
        subject=edited,
        scales={name: tuple(map(float, ranges.scales(name, each).ravel())) for name in names},
        each=each,
        tried=tried,
        bytes=(_cache_bytes(plain, names), _cache_bytes(edited, names)),
        texts=(len(calibration), len(held_out)),
        loss=_loss(plain, edited, held_out),
        on_engine=(before, after),
        notes=tuple(notes),
    )


def _measure_ranges(
    plain: MLProgram, names: Sequence[str], texts: Sequence[Sequence[int]], scales: str | None
) -> tuple[_Ranges, str, dict[str, float]]:
    """Measure the ranges of the caches over texts, and decide what gets a scale, unless `scales` says it.

    To decide, both kinds of scales come from one half of the texts, and are compared on some of the other.

    Returns:
        The ranges over all texts, "head" or "channel", and the KL with each kind if they were compared.
    """
    ranges, tried = _Ranges(plain, names), dict[str, float]()
    for text in texts[::2]:
        ranges.read(text)
    if scales is None and len(texts) > 1:
        other_texts = texts[1::2][:MOST_TRIED]
        for each in ranges.kinds:
            tried[each] = _loss(plain, _with_int8_cache(plain, ranges, each), other_texts).kl
    for text in texts[1::2]:
        ranges.read(text)
    if scales is not None:
        return ranges, scales, tried
    is_better = tried.get(CHANNEL, math.inf) <= (1 - LEAST_GAIN) * tried.get(HEAD, 0.0)
    return ranges, CHANNEL if is_better else HEAD, tried


def _with_int8_cache(plain: MLProgram, ranges: _Ranges, each: str) -> MLProgram:
    """Return the decoder with a cache of codes, with scales from the texts read so far.

    Raises:
        SurgeryError: a cache has no axis of channels.
    """
    edited = plain.clone()
    program = raised(edited.loaded.program, IOS26)
    for name in ranges.names:
        if each not in ranges.axes[name]:
            raise SurgeryError(f"{name} has no axis of channels beside that of positions; leave scales= out")
        for function in program.functions.values():
            _quantize_cache(function, name, each, ranges.scales(name, each))
    # `raised` gives a copy of the functions, which share its constants
    edited.loaded.program.functions.update(program.functions)
    return edited


def _find_caches(program: Program) -> list[str]:
    """Return the names of the inputs that come back as outputs, in every function that has them.

    Raises:
        SurgeryError: there are none, or states in their place.
    """
    functions = list(program.functions.values())
    states = [n for f in functions for n, v in f.inputs.items() if types.is_state(v.sym_type)]
    if states:
        raise SurgeryError(
            f"the cache is kept in states ({', '.join(dict.fromkeys(states))}), and states hold fp16 only; "
            'ane.apply(model, "cache_as_io") turns them into inputs and outputs: int8 from iOS 26 on'
        )
    caches: dict[str, None] = {}
    for function in functions:
        outputs = {v.name: v for v in function.outputs}
        for name, var in function.inputs.items():
            if _is_cache(var, outputs.get(f"{name}{BACK}")):
                caches[name] = None
    if not caches:
        raise SurgeryError(
            'no input of floats comes back as an output "..._out" of its shape; inputs: '
            + ", ".join(functions[0].inputs)
        )
    return list(caches)


def _is_cache(var: Var, output: Var | None) -> bool:
    """Are an input and its output floats of the same type and static shape, with an axis of heads?"""
    if output is None:
        return False
    shape, dtype = static_shape(var), dtype_name(var)
    if shape is None or shape != static_shape(output) or len(shape) <= HEADS:
        return False
    return dtype == dtype_name(output) and dtype in ("fp16", "fp32")


def _check_target(target: Target) -> list[str]:
    """Return the doubts about a target.

    Raises:
        SurgeryError: its OS cannot load such a model, or its only chip failed with quantized values.
    """
    if findings := of_version(IOS26, target):
        raise SurgeryError(f"a cache in 8 bits needs int8 inputs, which begin at iOS 26: {refusal(findings)}")
    words = f"a language model that quantizes as it runs did not compile for the engine of an {FAILED}"
    if set(target.chips) == {FAILED}:
        raise SurgeryError(f"{words} (reported: john-rocky/CoreML-LLM); keep the cache in fp16 there")
    return [f"{words} (reported); name your chip by target="] if FAILED in target.chips else []


class _Ranges:
    """The largest number of each head, and of each channel, that the caches kept over the texts read so far.

    Args:
        plain: the decoder.
        names: of its caches.
    """

    def __init__(self, plain: MLProgram, names: Sequence[str]) -> None:
        self.plain, self.names, self.decoder = plain, names, Decoder(plain.loaded)
        self.axes: dict[str, dict[str, tuple[int, ...]]] = {}
        """Cache -> "head" or "channel" -> the axes along which such scales lie."""
        self.largest: dict[tuple[str, str], Array] = {}
        """(cache, "head" or "channel") -> the largest magnitudes, with an axis of size 1 for each other
        axis."""

    @property
    def kinds(self) -> list[str]:
        """Those of "head" and "channel" that all caches have axes for."""
        return [each for each in (HEAD, CHANNEL) if all(each in axes for axes in self.axes.values())]

    def read(self, text: Sequence[int]) -> None:
        """Read a text, and take in what the caches keep of it.

        Raises:
            SurgeryError: NaN or infinity.
        """
        self.decoder.reset()
        if not self.axes:
            self.decoder.feed(text[:1])
            self.axes = {name: _scale_axes(np.asarray(self.decoder.kept[name])) for name in self.names}
            self.decoder.reset()
        self.decoder.feed(text)
        caches = {name: np.asarray(self.decoder.kept[name], np.float64) for name in self.names}
        if bad := [name for name, values in caches.items() if not np.isfinite(values).all()]:
            raise SurgeryError(f"{', '.join(bad)} keeps NaN or infinity when the texts are read")
        for name, values in caches.items():
            for each, axes in self.axes[name].items():
                others = tuple(a for a in range(values.ndim) if a not in axes)
                largest = np.abs(values).max(axis=others, keepdims=True)
                self.largest[name, each] = np.maximum(self.largest.get((name, each), 0.0), largest)

    def scales(self, name: str, each: str) -> Array:
        """Return the scales of a cache; none is 0 or subnormal, which the engine would read as 0."""
        function = next(f for f in self.plain.loaded.program.functions.values() if name in f.inputs)
        dtype = np_dtype(function.inputs[name])
        least = np.maximum(self.largest[name, HEAD] / SILENT, LEVELS * float(np.finfo(dtype).tiny))
        return np.asarray((np.maximum(self.largest[name, each], least) / LEVELS).astype(dtype))


def _scale_axes(values: Array) -> dict[str, tuple[int, ...]]:
    """Return "head" and, if there is one axis of channels, "channel" -> the axes along which such scales lie.

    Args:
        values: what a cache keeps of a single token. That token fills one place along the axis of positions,
            which can have no scales, and more along an axis of channels.
    """
    behind = range(HEADS + 1, values.ndim)
    filled = [values.any(axis=tuple(a for a in range(values.ndim) if a != axis)).sum() for axis in behind]
    channels = [axis for axis, count in zip(behind, filled, strict=True) if count > 1]
    axes: dict[str, tuple[int, ...]] = {HEAD: (HEADS,)}
    if len(channels) == 1:
        axes[CHANNEL] = (*range(HEADS + 1), channels[0])
    return axes


def _quantize_cache(function: Function, name: str, each: str, scales: Array) -> None:
    """Let a function read and return a cache in 8 bits, if it has that cache.

    `scales` are in the dtype of the cache, and broadcast to it.
    """
    old = function.inputs.get(name)
    out = next((v for v in function.outputs if v.name == f"{name}{BACK}"), None)
    if old is None or out is None:
        return
    outputs, first = list(function.outputs), next(iter(function.operations))
    with function:
        new = add_input(function, name, static_shape(old) or (), types.int8)
        read = _build_dequantize(new, each, scales, f"{name}_read", first)
        replace_uses(function, anchor_op=read.op, old_var=old, new_var=read)
        kept = read if out is old else out
        codes = _build_quantize(kept, each, scales, f"{name}_codes")
    if kept is out:
        kept.name = f"{name}_kept"
    codes.name = f"{name}{BACK}"
    function.set_outputs([codes if v is out else v for v in outputs])


def _build_dequantize(codes: Var, each: str, scales: Array, name: str, before: Operation) -> Any:
    """Build the numbers of codes."""
    if each == HEAD:
        return mb.dequantize(input=codes, **_along_heads(scales), name=name, before_op=before)
    one = scales.dtype.type(1)
    numbers = mb.dequantize(input=codes, scale=one, name=f"{name}_codes", before_op=before)
    return mb.mul(x=numbers, y=scales, name=name, before_op=before)


def _build_quantize(kept: Var, each: str, scales: Array, name: str) -> Any:
    """Build the codes of numbers."""
    if each == HEAD:
        return mb.quantize(input=kept, **_along_heads(scales), output_dtype="int8", name=name)
    inverses = (1 / scales.astype(np.float64)).astype(scales.dtype)
    steps = mb.mul(x=kept, y=inverses, name=f"{name}_steps")
    return mb.quantize(input=steps, scale=scales.dtype.type(1), output_dtype="int8", name=name)


def _along_heads(scales: Array) -> dict[str, Any]:
    """Return the arguments of quantize and dequantize for scales of heads."""
    return {"scale": scales.ravel(), "axis": np.int32(HEADS)}


def _cache_bytes(subject: MLProgram, names: Sequence[str]) -> int:
    """Return the bytes of the caches, each counted once."""
    inputs = {n: v for f in subject.loaded.program.functions.values() for n, v in f.inputs.items()}
    caches = [inputs[name] for name in names]
    return sum(math.prod(static_shape(v) or ()) * np.dtype(np_dtype(v)).itemsize for v in caches)


def _loss(plain: MLProgram, edited: MLProgram, texts: Sequence[Sequence[int]]) -> Cost:
    """Compare the logits after each token of some texts, whose second half is fed token by token."""
    both, cost = [Decoder(subject.loaded) for subject in (plain, edited)], Cost()
    for text in texts:
        rows = []
        for decoder in both:
            decoder.reset()
            half = max(1, len(text) // 2)
            parts = [decoder.feed(text[:half]), *(decoder.feed([token]) for token in text[half:])]
            rows.append({"logits": np.concatenate(parts)})
        cost.add(*rows)
    return cost
