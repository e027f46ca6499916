"""The names of floats in the arithmetic of bits: one for each magnitude, negative for negative numbers.

Numbers that fp16 holds, as most weights are, are looked up in a table by their bits.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.field import PRIMES, Image, key, opaque
from anesurgery.mil import Array

HALVES = 1 << 16
"""Numbers that fp16 has."""
SAMPLE = 64
"""Numbers that are looked at first: those that fp16 does not hold are told by the first few."""


def of(array: Array) -> Image:
    """The names of floats; many that fp16 holds are looked up."""
    if array.size > HALVES:
        numbers = torch.from_numpy(np.ascontiguousarray(array))
        if (at := bits(numbers)) is not None:
            return _halves().map(lambda v: v.index_select(0, at).reshape(numbers.shape))
    wide = torch.from_numpy(np.array(array, np.float64))
    turned = torch.signbit(wide)
    image = opaque(PRIMES, key("float"), wide.abs_().view(torch.int64))
    return field.with_sign(image, turned) if bool(turned.any()) else image


def bits(numbers: torch.Tensor) -> torch.Tensor | None:
    """The bits of numbers as fp16 holds them, in a row; None where it does not hold them all."""
    some = numbers.reshape(-1)[:SAMPLE]
    if not torch.equal(some.half().to(numbers.dtype), some):
        return None
    half = numbers.half()
    if half is not numbers and not torch.equal(half.to(numbers.dtype), numbers):
        return None
    return half.contiguous().view(torch.int16).int().bitwise_and_(HALVES - 1).reshape(-1)


def sums(flat: torch.Tensor, places: Image) -> Image | None:
    """For each row the sum of the names, each times its place; None where fp16 does not hold all numbers."""
    terms = flat.shape[1]
    at = bits(flat) if terms <= field.LONGEST else None
    if at is None:
        return None
    return Image(
        [
            torch.mv(names.index_select(0, at).view(-1, terms), factors.double()).long() % prime
            for names, factors, prime in zip(_halves_in_float64(), places.lanes, PRIMES, strict=True)
        ],
        PRIMES,
    )


@functools.cache
def _halves_in_float64() -> list[torch.Tensor]:
    """The names as float64, in which sums of `LONGEST` products are exact."""
    return [lane.double() for lane in _halves().lanes]


@functools.cache
def _halves() -> Image:
    """The names of all numbers of fp16, by their bits."""
    return of(np.arange(HALVES, dtype=np.uint16).view(np.float16))
