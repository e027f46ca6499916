"""A cache of keys and values in 8 bits: what the caller hands from call to call becomes int8.

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

The scales are those of the largest number that each head, or each of its channels, keeps while the texts are
read. The ops themselves hold scales along one axis, so those of channels are products beside them, which read
the cache once more each way. They are there where the logits of other texts lose much less by them: keys with a
few large channels leave the others few codes of the scale of their head. Codes that are read and written again
stay what they were, so a token is rounded once; what a call reads of its own tokens is not rounded.

States hold fp16 alone: coremltools 9 refuses another type for iOS 18 and for iOS 26 ("State only support fp16
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
from anesurgery.compressing.storing import Smaller
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
EACH = ("head", "channel")
"""What may have a scale of its own: each head, or each channel of each head."""
LEAST_GAIN = 0.5
"""The share of the KL that scales for each channel must take away, since their products cost time."""
MOST_TRIED = 4
"""Texts by which that is judged."""
SILENT = 128
"""A channel has at least the scale of its head by this: one that is silent in all texts may speak in others."""
HELD_OUT = 4
"""Every n-th text is held out to judge the result: a quarter, so that both parts have some of a few texts."""
FAILED = "A19"
"""The chip for which a language model with quantized values did not compile (john-rocky/CoreML-LLM)."""


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
    """The KL with scales for each head, and for each channel, of some texts that were not read for these scales
    and are not held out; empty where that was not tried."""
    bytes: tuple[int, int]
    """Of all caches, before and after."""
    texts: tuple[int, int]
    """For the scales, and held out."""
    loss: Cost
    """Of the logits of the texts that were held out, whose second half is read one token after the other."""
    on_engine: tuple[float, float]
    """Share of the ops expected on the Neural Engine, before and after."""
    notes: tuple[str, ...]
    """What the reader must know."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        loss = {"kl": self.loss.kl, "top1": self.loss.top1, "psnr_db": self.loss.psnr}
        lists = {name: list(getattr(self, name)) for name in ("bytes", "texts", "on_engine", "notes")}
        scales = {name: list(each) for name, each in self.scales.items()}
        return {"scales": scales, "each": self.each, "tried": self.tried, "loss": loss, **lists}

    def __str__(self) -> str:
        before, after = self.bytes
        lines = [
            f"cache: {before:,} to {after:,} bytes, a scale for each {self.each}",
            f"on {self.texts[1]} texts held out: KL {self.loss.kl:.2g}, same top-1 {self.loss.top1:.1%}, "
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
    if scales is not None and scales not in EACH:
        raise SurgeryError(f"scales={scales!r}; it may be {' or '.join(map(repr, EACH))}")
    device, plain = Target.parse(target), MLProgram.read(model)
    names = _caches(plain.loaded.program)
    notes = _against(device)
    if len(texts) < 2:
        raise SurgeryError(f"{len(texts)} texts; give two at least, one to calibrate with and one to judge by")
    held_out = [text for n, text in enumerate(texts) if n % HELD_OUT == min(len(texts), HELD_OUT) - 1]
    seen = [text for text in texts if not any(text is other for other in held_out)]
    reading, tried = _Reading(plain, names), dict[str, float]()
    for text in seen[::2]:
        reading.read(text)
    if scales is None and len(seen) > 1:
        judges = seen[1::2][:MOST_TRIED]
        tried = {each: _loss(plain, _edited(plain, reading, each), judges).kl for each in reading.kinds}
    for text in seen[1::2]:
        reading.read(text)
    better = tried.get(EACH[1], math.inf) <= (1 - LEAST_GAIN) * tried.get(EACH[0], 0.0)
    each = scales or EACH[better]
    edited = _edited(plain, reading, each)
    shares = _share(plain, device), _share(edited, device)
    if shares[1] < shares[0]:
        notes.append("fewer ops are expected on the engine than before: see `anesurgery inspect`")
    return CompressedCache(
        edited,
        {name: tuple(map(float, reading.scales(name, each).ravel())) for name in names},
        each,
        tried,
        (_bytes(plain, names), _bytes(edited, names)),
        (len(seen), len(held_out)),
        _loss(plain, edited, held_out),
        shares,
        tuple(notes),
    )


def _edited(plain: MLProgram, reading: _Reading, each: str) -> MLProgram:
    """The decoder with a cache of codes, by the scales of what was read so far.

    Raises:
        SurgeryError: a cache has no axis of channels.
    """
    edited = plain.clone()
    program = raised(edited.loaded.program, IOS26)
    for name in reading.names:
        if each not in reading.axes[name]:
            raise SurgeryError(f"{name} has no axis of channels beside that of positions; leave scales= out")
        scales = _Scales(each, reading.scales(name, each))
        for function in program.functions.values():
            _code(function, name, scales)
    edited.loaded.program.functions.update(program.functions)
    return edited


def _caches(program: Program) -> list[str]:
    """The inputs that come back as outputs, in every function that has them.

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
            back = outputs.get(f"{name}{BACK}")
            if back is not None and static_shape(var) is not None and static_shape(var) == static_shape(back):
                kinds = {dtype_name(var), dtype_name(back)}
                if len(kinds) == 1 and kinds <= {"fp16", "fp32"} and len(static_shape(var) or ()) > HEADS:
                    caches[name] = None
    if not caches:
        raise SurgeryError(
            'no input of floats comes back as an output "..._out" of its shape; inputs: '
            + ", ".join(functions[0].inputs)
        )
    return list(caches)


def _against(target: Target) -> list[str]:
    """What the reader must know of a target.

    Raises:
        SurgeryError: its OS cannot load such a model, or its only chip failed with quantized values.
    """
    if findings := of_version(IOS26, target):
        raise SurgeryError(f"a cache in 8 bits needs int8 inputs, which begin at iOS 26: {refusal(findings)}")
    words = f"a language model that quantizes as it runs did not compile for the engine of an {FAILED}"
    if set(target.chips) == {FAILED}:
        raise SurgeryError(f"{words} (reported: john-rocky/CoreML-LLM); keep the cache in fp16 there")
    return [f"{words} (reported); name your chip by target="] if FAILED in target.chips else []


@dataclass(frozen=True)
class _Scales:
    """The scales of one cache."""

    each: str
    """What has a scale of its own."""
    values: Array
    """In the type of the cache, with an axis for each of its own."""


class _Reading:
    """Reads texts, and finds the largest number of each head, and of each channel, that the caches keep.

    Args:
        plain: the decoder.
        names: of its caches.
    """

    def __init__(self, plain: MLProgram, names: Sequence[str]) -> None:
        self.plain, self.names, self.decoder = plain, names, Decoder(plain.loaded)
        self.axes: dict[str, dict[str, tuple[int, ...]]] = {}
        """Cache -> what may have a scale of its own -> the axes along which scales lie."""
        self.largest: dict[tuple[str, str], Array] = {}

    @property
    def kinds(self) -> list[str]:
        """What may have a scale of its own in all caches."""
        return [each for each in EACH if all(each in axes for axes in self.axes.values())]

    def read(self, text: Sequence[int]) -> None:
        """Take in what the caches keep of a text.

        Raises:
            SurgeryError: NaN or infinity.
        """
        self.decoder.reset()
        if not self.axes:
            self.decoder.feed(text[:1])
            self.axes = {name: _axes(np.asarray(self.decoder.kept[name])) for name in self.names}
            self.decoder.reset()
        self.decoder.feed(text)
        kept = {name: np.asarray(self.decoder.kept[name], np.float64) for name in self.names}
        if bad := [name for name, values in kept.items() if not np.isfinite(values).all()]:
            raise SurgeryError(f"{', '.join(bad)} keeps NaN or infinity when the texts are read")
        for name, values in kept.items():
            for each, axes in self.axes[name].items():
                others = tuple(a for a in range(values.ndim) if a not in axes)
                largest = np.abs(values).max(axis=others, keepdims=True)
                self.largest[name, each] = np.maximum(self.largest.get((name, each), 0.0), largest)

    def scales(self, name: str, each: str) -> Array:
        """Of what was read so far; none is 0 or subnormal, which the engine would read as 0."""
        function = next(f for f in self.plain.loaded.program.functions.values() if name in f.inputs)
        dtype = np_dtype(function.inputs[name])
        least = np.maximum(self.largest[name, EACH[0]] / SILENT, LEVELS * float(np.finfo(dtype).tiny))
        return np.asarray((np.maximum(self.largest[name, each], least) / LEVELS).astype(dtype))


def _axes(values: Array) -> dict[str, tuple[int, ...]]:
    """The axes along which scales may lie; positions, of which one token fills one, may not have them.

    Args:
        values: what a cache keeps of one token.
    """
    behind = range(HEADS + 1, values.ndim)
    filled = [values.any(axis=tuple(a for a in range(values.ndim) if a != axis)).sum() for axis in behind]
    channels = [axis for axis, count in zip(behind, filled, strict=True) if count > 1]
    all_of_them = {EACH[1]: (*range(HEADS + 1), channels[0])} if len(channels) == 1 else {}
    return {EACH[0]: (HEADS,), **all_of_them}


def _code(function: Function, name: str, scales: _Scales) -> None:
    """Let a function read and give a cache in 8 bits."""
    old = function.inputs.get(name)
    out = next((v for v in function.outputs if v.name == f"{name}{BACK}"), None)
    if old is None or out is None:
        return
    outputs, first = list(function.outputs), next(iter(function.operations))
    with function:
        new = add_input(function, name, static_shape(old) or (), types.int8)
        read = _decoded(new, scales, f"{name}_read", first)
        replace_uses(function, anchor_op=read.op, old_var=old, new_var=read)
        kept = read if out is old else out
        codes = _coded(kept, scales, f"{name}_codes")
    kept.name = f"{name}_kept" if kept is out else kept.name
    codes.name = f"{name}{BACK}"
    function.set_outputs([codes if v is out else v for v in outputs])


def _decoded(codes: Var, scales: _Scales, name: str, before: Operation) -> Var:
    """The numbers of codes."""
    if scales.each == EACH[0]:
        return _var(mb.dequantize(input=codes, **_along_heads(scales), name=name, before_op=before))
    plain = mb.dequantize(
        input=codes, scale=scales.values.dtype.type(1), name=f"{name}_codes", before_op=before
    )
    return _var(mb.mul(x=plain, y=scales.values, name=name, before_op=before))


def _coded(kept: Var, scales: _Scales, name: str) -> Var:
    """The codes of numbers."""
    if scales.each == EACH[0]:
        return _var(mb.quantize(input=kept, **_along_heads(scales), output_dtype="int8", name=name))
    unit = scales.values.dtype.type(1)
    steps = mb.mul(
        x=kept, y=(1 / scales.values.astype(np.float64)).astype(scales.values.dtype), name=f"{name}_steps"
    )
    return _var(mb.quantize(input=steps, scale=unit, output_dtype="int8", name=name))


def _along_heads(scales: _Scales) -> dict[str, Any]:
    return {"scale": scales.values.ravel(), "axis": np.int32(HEADS)}


def _var(value: Any) -> Var:
    var: Var = value
    return var


def _share(subject: MLProgram, target: Target) -> float:
    ops = [row for one in placed(subject.loaded, target) for row in one.ops]
    return sum(row.preferred == "ane" for row in ops) / max(1, len(ops))


def _bytes(subject: MLProgram, names: Sequence[str]) -> int:
    """Count the bytes of the caches, each once."""
    inputs = {n: v for f in subject.loaded.program.functions.values() for n, v in f.inputs.items()}
    sizes = {
        n: (math.prod(static_shape(inputs[n]) or ()), np.dtype(np_dtype(inputs[n])).itemsize) for n in names
    }
    return sum(count * width for count, width in sizes.values())


def _loss(plain: MLProgram, edited: MLProgram, texts: Sequence[Sequence[int]]) -> Cost:
    """Compare what both say after each token."""
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


__all__ = ["CompressedCache", "compress_cache"]
