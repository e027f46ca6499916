"""Pack and unpack elements of less than a byte: numpy holds each in a byte, files pack them, lowest bits first.

Example: the uint4 elements [1, 2, 3] are packed into the bytes [0x21, 0x03].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from anesurgery.mil import Array

PIECE = 1 << 20
"""Elements that are packed at a time, so that memory stays small; a multiple of 8, to end at a whole byte."""


def pack(values: Array, bits: int) -> Array:
    """Return the packed bytes (uint8) of elements of `bits` bits, given in the low bits of one byte each."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    pieces = [flat[i : i + PIECE] for i in range(0, flat.size, PIECE)]
    planes = (np.unpackbits(p[:, None], axis=1, count=bits, bitorder="little") for p in pieces)
    packed = [np.packbits(p.reshape(-1), bitorder="little") for p in planes]
    return np.concatenate(packed) if packed else np.empty(0, np.uint8)


def _elements(piece: Array, bits: int, count: int) -> Array:
    """Return the first `count` elements of packed bytes as unsigned numbers."""
    if 8 % bits == 0:  # shifts of whole bytes, which take a third of the time of single bits
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return ((piece[:, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(-1)[:count]
    planes = np.unpackbits(piece, count=count * bits, bitorder="little").reshape(count, bits)
    return np.packbits(planes, axis=1, bitorder="little")[:, 0]


def unpack(packed: Array, bits: int, signed: bool, shape: tuple[int, ...]) -> Array:
    """Return the elements of packed bytes as int8 or uint8, one per byte, with `shape`."""
    elements = np.empty(int(np.prod(shape, dtype=np.int64)), np.uint8)
    for start in range(0, elements.size, PIECE):
        count = min(PIECE, elements.size - start)
        piece = packed[start * bits // 8 : -(-(start + count) * bits // 8)]
        elements[start : start + count] = _elements(piece, bits, count)
    if not signed:
        return elements.reshape(shape)
    sign = np.uint8(1 << (bits - 1))
    return ((elements ^ sign) - sign).view(np.int8).reshape(shape)
