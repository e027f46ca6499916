"""A cache of keys and values in 8 bits: what the caller hands from call to call becomes int8.

Before::

    cache_0_out = slice_update(x=cache_0, ...)

After::

    cache_0_read = dequantize(input=cache_0, scale, axis=heads)
    kept = slice_update(x=cache_0_read, ...)
    cache_0_out = quantize(input=kept, scale, axis=heads)

The scales are those of the largest number that each head keeps while the texts are read. Codes that are read
and written again stay what they were, so a token is rounded once; what a call reads of its own tokens is not
rounded.

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
from anesurgery.compressing.smaller import Smaller
from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.interpret.decoder_calls import BACK
from anesurgery.interpret.decoding import Decoder
from anesurgery.mil import (
    Array,
    Function,
    Program,
    Var,
    add_input,
    dtype_name,
    exclusive,
    mb,
    np_dtype,
    static_shape,
    types,
)
from anesurgery.placement.loadable import of_version, refusal
from anesurgery.placement.standing import placed
from anesurgery.placement.target import Target
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.rewriting.newer_opsets import raised

IOS26 = 10
"""The specification version in which inputs and outputs may be int8."""
HEADS = 1
"""The axis of a cache along which its heads lie."""
HELD_OUT = 4
"""Every so manieth text is judged by, and not calibrated with: a quarter, so that both parts have some of few
texts."""
FAILED = "A19"
"""The chip for which a language model with quantized values did not compile (john-rocky/CoreML-LLM)."""


@dataclass(frozen=True)
class CompressedCache(Smaller):
    """A decoder whose cache is int8, and what that costs."""

    subject: MLProgram = field(repr=False)
    """The decoder whose cache is int8."""
    scales: dict[str, tuple[float, ...]]
    """Cache -> the scale of each head."""
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
        return {"scales": {name: list(each) for name, each in self.scales.items()}, "loss": loss, **lists}

    def __str__(self) -> str:
        before, after = self.bytes
        lines = [
            f"cache: {before:,} to {after:,} bytes, a scale for each head",
            f"on {self.texts[1]} texts held out: KL {self.loss.kl:.2g}, same top-1 {self.loss.top1:.1%}, "
            f"PSNR {self.loss.psnr:.1f} dB",
            f"ops expected on the engine: {self.on_engine[0]:.0%} to {self.on_engine[1]:.0%}",
        ]
        return "\n".join([*lines, *self.notes])


@door("target")
@exclusive
def compress_cache(model: Any, texts: Sequence[Sequence[int]], *, target: str | None = None) -> CompressedCache:
    """Let a decoder keep its keys and values in 8 bits, by scales from texts. The model given is not changed.

    Args:
        model: path of a package, MLModel or MIL program, whose cache comes and goes by inputs and outputs
            (`add_cache(cache="io")`, or `cache_as_io`).
        texts: some dozens of lists of tokens, none longer than the context. Every fourth is held out.
        target: chip and OS, such as "M5/macOS 26". Every chip by default.

    Returns:
        The `CompressedCache`: the decoder, its scales, bytes, and the loss on the texts held out. Its `save`
        writes the package.

    Raises:
        SurgeryError: the cache is kept in states, there is none, the OS of the target is older than iOS 26,
            its chip is one that failed with quantized values, or there are fewer than two texts.
        InterpretError: it is no decoder, or a text does not fit.
        LoadError: the model cannot be read.
    """
    aim, plain = Target.parse(target), MLProgram.read(model)
    names = _caches(plain.loaded.program)
    notes = _against(aim)
    if len(texts) < 2:
        raise SurgeryError(f"{len(texts)} texts; give two at least, one to calibrate with and one to judge by")
    held_out = [text for n, text in enumerate(texts) if n % HELD_OUT == min(len(texts), HELD_OUT) - 1]
    seen = [text for text in texts if not any(text is other for other in held_out)]
    scales = _scales(plain, names, seen)
    edited = plain.clone()
    program = raised(edited.loaded.program, IOS26)
    for function in program.functions.values():
        for name in names:
            _code(function, name, scales[name])
    edited.loaded.program.functions.update(program.functions)
    shares = _share(plain, aim), _share(edited, aim)
    if shares[1] < shares[0]:
        notes.append("fewer ops are expected on the engine than before: see `anesurgery inspect`")
    bytes_ = _bytes(plain, names), _bytes(edited, names)
    told = {name: tuple(map(float, each)) for name, each in scales.items()}
    counts = len(seen), len(held_out)
    return CompressedCache(edited, told, bytes_, counts, _loss(plain, edited, held_out), shares, tuple(notes))


def _caches(program: Program) -> list[str]:
    """The inputs that come back as outputs, in every function that has them.

    Raises:
        SurgeryError: there are none, or states in their place.
    """
    functions = list(program.functions.values())
    states = [n for f in functions for n, v in f.inputs.items() if types.is_state(v.sym_type)]
    if states:
        raise SurgeryError(
            f"the cache is kept in states ({', '.join(dict.fromkeys(states))}), and states hold fp16 alone; "
            'ane.apply(model, "cache_as_io") makes inputs and outputs of them, which may be int8 from iOS 26 on'
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


def _against(aim: Target) -> list[str]:
    """What the reader must know of a target.

    Raises:
        SurgeryError: its OS cannot load such a model, or its only chip failed with quantized values.
    """
    if findings := of_version(IOS26, aim):
        raise SurgeryError(f"a cache in 8 bits needs int8 inputs, which begin at iOS 26: {refusal(findings)}")
    words = f"a language model that quantizes as it runs did not compile for the engine of an {FAILED}"
    if set(aim.chips) == {FAILED}:
        raise SurgeryError(f"{words} (reported: john-rocky/CoreML-LLM); keep the cache in fp16 there")
    return [f"{words} (reported); name your chip by target="] if FAILED in aim.chips else []


def _scales(plain: MLProgram, names: Sequence[str], texts: Sequence[Sequence[int]]) -> dict[str, Array]:
    """The scale of each head of each cache, in the type of the cache."""
    decoder, largest = Decoder(plain.loaded), dict[str, Array]()
    for text in texts:
        decoder.reset()
        decoder.feed(text)
        for name in names:
            values = np.abs(np.asarray(decoder.kept[name], np.float64))
            heads = values.max(axis=tuple(a for a in range(values.ndim) if a != HEADS))
            largest[name] = np.maximum(largest.get(name, 0.0), heads)
    if bad := [name for name, heads in largest.items() if not np.isfinite(heads).all()]:
        raise SurgeryError(f"{', '.join(bad)} keeps NaN or infinity when the texts are read")
    return {name: _stored(heads / LEVELS, plain, name) for name, heads in largest.items()}


def _stored(scales: Array, plain: MLProgram, name: str) -> Array:
    """In the type of the cache; none is 0 or subnormal, which the engine would read as 0."""
    function = next(f for f in plain.loaded.program.functions.values() if name in f.inputs)
    dtype = np_dtype(function.inputs[name])
    return np.asarray(np.maximum(scales, float(np.finfo(dtype).tiny)).astype(dtype))


def _code(function: Function, name: str, scales: Array) -> None:
    """Let a function read and give a cache in 8 bits."""
    old = function.inputs.get(name)
    out = next((v for v in function.outputs if v.name == f"{name}{BACK}"), None)
    if old is None or out is None:
        return
    outputs, first = list(function.outputs), next(iter(function.operations))
    with function:
        new = add_input(function, name, static_shape(old) or (), types.int8)
        read = _with_scale(mb.dequantize, new, scales, f"{name}_read", before_op=first)
        function.replace_uses_of_var_after_op(anchor_op=read.op, old_var=old, new_var=read)
        kept = read if out is old else out
        codes = _with_scale(mb.quantize, kept, scales, f"{name}_codes", output_dtype="int8")
    kept.name = f"{name}_kept" if kept is out else kept.name
    codes.name = f"{name}{BACK}"
    function.set_outputs([codes if v is out else v for v in outputs])


def _with_scale(make: Any, value: Var, scales: Array, name: str, **more: Any) -> Var:
    coded: Var = make(input=value, scale=scales, axis=np.int32(HEADS), name=name, **more)
    return coded


def _share(subject: MLProgram, aim: Target) -> float:
    ops = [row for one in placed(subject.loaded, aim) for row in one.ops]
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
