"""Replace block-wise scales of a weight by plain numbers, or by one scale for each output channel.

Before::

    main(%x: 1x4xfp16) {
      %w: 8x4xfp16 = constexpr_blockwise_shift_scale(data=const<8x4xint8>, scale=const<8x2xfp16>)
      %y: 1x8xfp16 = linear(x=%x, weight=%w)
      return %y
    }

After::

    main(%x: 1x4xfp16) {
      %y: 1x8xfp16 = linear(x=%x, weight=const<8x4xfp16>)
      return %y
    }

If all blocks of an output channel have the same scale, that scale is kept, and nothing else changes. Otherwise
`form` decides. "plain" (the default) stores the decompressed numbers: every result stays the same bit for bit,
and the weight grows, which the notes state. "int8" rounds the numbers to 8 bits with one scale for each output
channel; "palette" rounds them to the 256 values that fit best. The notes state the error of the rounded
weights; compare the whole models.

Refuses when a weight holds infinities or NaN, when a rounded weight is off by more than `most_error` of the
largest number of its channel, for a palette below iOS 18 (macOS 15), and when plain weights would exceed what a
program of the target may hold.

Why it helps: Core ML refuses convolutions and products whose weights have a scale for each block ("ANE only
support per-cout/per-tensor quantization": reported on M5 Pro with macOS 27.0, and on M2, where 129 ops of a
classifier left the ANE); one scale for each channel and palettes stayed there. What the pass gains in time was
not measured. A product whose weights have an offset in fp16 stayed off the engine too (macOS 15 beta, Mac not
named); its weights become plain.

Grade: bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Program, Refusal, Rewrite, Session, Var, mb
from anesurgery.display import byte_words
from anesurgery.interpret.ops import constexpr
from anesurgery.placement.memory import decompressed_bytes
from anesurgery.placement.rules import legality
from anesurgery.regions import clusters, reencoding
from anesurgery.regions.small_builds import again

VALUES = 256
"""The entries of a palette of 8 bits, the widest that there is."""

Encode = Callable[[Builder], Var]
"""Builds the new weight."""
ROUNDED = "weights are rounded, as the notes say; compare whole models"


@dataclass(frozen=True)
class ChannelScales(Rewrite):
    """Weights scaled by blocks, in a form that the ANE takes."""

    name = "channel_scales"
    kinds = an.ops.PRODUCTS
    form: str = an.option("plain", among=("plain", "int8", "palette"))
    """"plain", "int8" or "palette"."""
    most_error: float = 0.02
    """Largest error of a rounded weight that is accepted, relative to the largest of its channel."""

    @classmethod
    def variants(cls, target: an.Target) -> tuple[an.Pass, ...]:
        """Return the form that changes no result."""
        return (cls(),)

    def run(self, program: Program, session: Session) -> None:
        """Apply it, unless plain weights are more than a program may hold."""
        limit, chip = an.Target.parse(session.target).least("program")
        whole = max(map(decompressed_bytes, program.functions.values()))
        if self.form == "plain" and whole > limit:
            words = f"decompressed, the weights take {byte_words(whole)}; {chip} runs {byte_words(limit)}"
            session.refuse(self.name, f'{words} a program: use form="int8" or "palette"')
            return
        super().run(program, session)

    def check(self, m: Match) -> Match | Refusal:
        """Match a weight scaled by blocks whose numbers another form holds well enough."""
        op, stored = m.root, an.reading.weight(m.root)
        if stored is None or stored.op is None:
            return an.NO_MATCH
        if not (legality.block_scales(op, an.Target()) or legality.float_offset(op, an.Target())):
            return an.NO_MATCH
        numbers, name = an.decoded(stored), f"%{stored.name}"
        axis = legality.output_axis(op, numbers.ndim)
        if not np.isfinite(numbers).all():
            return Refusal(f"{name} holds {numbers[~np.isfinite(numbers)][0]}", op)
        bound = m.bind(stored=stored, axis=axis, exact=True)  # axis: of the new scales; None without any
        if not legality.float_offset(op, an.Target()) and (encode := _regrouped(stored.op, axis)) is not None:
            return bound.bind(encode=encode, words=f"{name}: its scales are kept, one for each channel")
        if self.form == "plain":
            held = byte_words(reencoding.stored_bytes(stored))
            words = f"{name}: {held} become {byte_words(numbers.nbytes)}, exactly"
            return bound.bind(encode=lambda mb: mb.const(val=numbers), words=words, axis=None)
        if self.form == "palette" and stored.op.op_type == legality.AFFINE:
            return Refusal(f"{name} is of the form of iOS 16; palettes of this form need iOS 18 (macOS 15)", op)
        rounded = (_as_int8 if self.form == "int8" else _as_palette)(numbers, axis)
        largest, average = _errors(numbers, rounded.numbers, axis)
        words = f"{name} as {self.form} is off by up to {largest:.2%} of the largest weight of a channel"
        if largest > self.most_error:
            return Refusal(f"{words}; the limit is {self.most_error:.2%}", op)
        words = f"{words}, {average:.2%} on average"
        scaled = axis if self.form == "int8" else None
        return bound.bind(encode=rounded.encode, words=words, axis=scaled, exact=False)

    def uncompared(self, m: Match) -> Refusal | None:
        """Compare no results of rounded weights: only the errors of the weights themselves are limited."""
        return None if m.exact else Refusal(ROUNDED, m.root)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the product with the new weight; ops that shared the old one for the same axis share it."""
        encoded = mb.shared_value((m.stored, self.form, m.axis), [m.stored], m.encode)
        mb.note(m.words)
        name = "y" if m.root.op_type == "matmul" else "weight"
        return again(mb, m.root, **{name: encoded})


def _regrouped(maker: an.Operation, axis: int) -> Encode | None:
    """Return the data with a scale for each output channel, if the blocks of a channel agree."""
    if maker.op_type != "constexpr_blockwise_shift_scale" or an.producer(maker.data, "const") is None:
        return None
    parts = {n: v for n in ("scale", "offset") if (v := maker.inputs.get(n)) is not None}
    new = {}
    for name, var in parts.items():
        if (value := an.constant(var)) is None:
            return None
        first = np.asarray(value)[tuple(slice(None) if a == axis else slice(1) for a in range(np.ndim(value)))]
        if not np.array_equal(np.broadcast_to(first, np.shape(value)), value):
            return None
        new[name] = np.repeat(first, maker.data.shape[axis] // first.shape[axis], axis)
    return lambda mb: mb.constexpr_blockwise_shift_scale(data=maker.data, **new)


class _Rounded(NamedTuple):
    """A weight in a form that rounds it."""

    numbers: an.Array
    encode: Encode


def _as_int8(numbers: an.Array, axis: int) -> _Rounded:
    """Round numbers to 8 bits with a scale for each output channel."""
    others = tuple(a for a in range(numbers.ndim) if a != axis)
    most = np.abs(numbers.astype(np.float64)).max(axis=others)
    scale = np.where(most > 0, most / 127, 1).astype(numbers.dtype)
    scale[scale == 0] = np.finfo(numbers.dtype).smallest_subnormal
    across = scale.reshape([-1 if a == axis else 1 for a in range(numbers.ndim)])
    data = np.clip(np.rint(numbers / across.astype(np.float64)), -127, 127).astype(np.int8)
    zero = np.zeros(scale.shape, np.int8)
    parts = {"quantized_data": data, "zero_point": zero, "scale": scale, "axis": axis}
    rounded = constexpr.affine(data, zero, scale, axis)
    return _Rounded(rounded, lambda mb: mb.constexpr_affine_dequantize(**parts))


def _as_palette(numbers: an.Array, axis: int) -> _Rounded:
    """Round numbers to the 256 values that fit best."""
    rows = [numbers.reshape(-1, 1).astype(np.float64)]
    table = np.sort(clusters.tables_of(rows, VALUES).ravel()).astype(numbers.dtype)
    rounded = table.astype(np.float64).reshape(1, VALUES, 1)
    indices = clusters.nearest(rows[0], rounded[0]).astype(np.uint8).reshape(numbers.shape)
    parts = {"indices": indices, "lut": table.reshape([1] * numbers.ndim + [VALUES, 1])}
    return _Rounded(constexpr.lut_to_dense(**parts), lambda mb: mb.constexpr_lut_to_dense(**parts))


def _errors(old: an.Array, new: an.Array, axis: int) -> tuple[float, float]:
    """Return the largest and the mean square error, relative to the largest number of each channel."""
    others = tuple(a for a in range(old.ndim) if a != axis)
    most = np.abs(old.astype(np.float64)).max(axis=others, keepdims=True)
    off = np.abs(new.astype(np.float64) - old) / np.where(most > 0, most, 1)
    return float(off.max()), float(np.sqrt(np.mean(off**2)))


@an.example((1, 4), dtype="fp16", opset="iOS18")
def example(x: Var) -> Var:
    """A linear of eight outputs whose weights have a scale for each two inputs."""
    data = np.arange(-16, 16, dtype=np.int8).reshape(8, 4)
    scale = np.arange(1, 17, dtype=np.float16).reshape(8, 2) / 8
    weight = mb.constexpr_blockwise_shift_scale(data=data, scale=scale, name="w")
    return mb.linear(x=x, weight=weight, name="y")
