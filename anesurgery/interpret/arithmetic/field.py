"""Numbers of a prime field, three independent ones for each element, and random functions of them.

The prime lies below 2^20, so that a sum of 8192 products stays below 2^53: products of matrices are those of
float64, and the three residues of an element fit into 60 bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from anesurgery.errors import InterpretError
from anesurgery.interpret.table import Unsupported

Tensor = torch.Tensor

P = 1_048_573
"""The largest prime below 2^20."""
LANES = 3
"""Residues of an element, each computed at a point of its own."""
LONGEST = 8192
"""Products that may be added up in float64 without rounding."""
HALF = (P + 1) // 2
PIECE = 21
"""Bits of a hash of 64 that make one residue."""
CACHED = 1 << 15
"""Elements that are scrambled at a time: they stay in the cache of a core."""
GOLDEN, FIRST, SECOND = (
    torch.tensor(c, dtype=torch.int64)
    for c in (-7046029254386353131, -4658895280553007687, -7723592293110705685)
)
"""The odd constants of splitmix64."""


class Zero(InterpretError):  # noqa: N818 - reads as a statement
    """Something that has to be inverted is 0 at this point: draw another one."""


class Image:
    """A tensor over the field: `LANES` tensors of residues, and the degree of what they are as polynomials."""

    __slots__ = ("degree", "fraction", "lanes")

    def __init__(self, lanes: Sequence[Tensor], degree: float = 1, fraction: bool = False) -> None:
        self.lanes = list(lanes)
        self.degree, self.fraction = degree, fraction

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self.lanes[0].shape

    @property
    def ndim(self) -> int:
        """The rank of the tensor."""
        return self.lanes[0].ndim

    def numel(self) -> int:
        """The number of elements."""
        return self.lanes[0].numel()

    def __bool__(self) -> bool:
        raise Unsupported("control flow that depends on an input")

    def map(self, function: Callable[[Tensor], Tensor]) -> Image:
        """Elements moved in all lanes alike."""
        return Image([function(lane) for lane in self.lanes], self.degree, self.fraction)

    def same(self, other: Image) -> bool:
        """Is every element the same in every lane?"""
        return self.shape == other.shape and all(
            torch.equal(a, b) for a, b in zip(self.lanes, other.lanes, strict=True)
        )


def key(*parts: Any) -> int:
    """A number of 64 bits for a name and attributes: the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def mix(h: Tensor) -> Tensor:
    """Scramble 64 bits."""
    return _mixed(h.clone(memory_format=torch.contiguous_format))


def _mixed(h: Tensor) -> Tensor:
    """The same in place."""
    for part in torch.split(h.view(-1), CACHED):
        _mix(part, torch.empty_like(part))
    return h


def _mix(h: Tensor, scratch: Tensor) -> None:
    """Scramble as many as stay in the cache."""
    for shift, factor in ((30, FIRST), (27, SECOND), (31, None)):
        torch.bitwise_right_shift(h, shift, out=scratch)
        h ^= scratch.bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            h *= factor


def packed(x: Image) -> Tensor:
    """The three residues of each element as one number."""
    return x.lanes[0] | (x.lanes[1] << 20) | (x.lanes[2] << 40)


def opaque(name: int, *arguments: Tensor) -> Image:
    """A random function of packed arguments: different ones give unrelated results."""
    h = torch.tensor(name, dtype=torch.int64)
    for argument in arguments:
        h = _mixed((h ^ argument).add_(GOLDEN).contiguous())
    lanes = [torch.empty_like(h) for _ in range(LANES)]
    parts = zip(*(torch.split(tensor.view(-1), CACHED) for tensor in (h, *lanes)), strict=True)
    for part, *made in parts:
        for i, lane in enumerate(made):
            torch.bitwise_right_shift(part, PIECE * i, out=lane)
            lane.bitwise_and_((1 << PIECE) - 1).mul_(P).bitwise_right_shift_(PIECE)
    return Image(lanes)


def positions(count: int, name: int) -> Image:
    """A random factor for each place of a list."""
    return opaque(key("place", name), torch.arange(count))


def random(shape: Sequence[int], generator: torch.Generator) -> Image:
    """A random point for each element."""
    return Image([torch.randint(0, P, tuple(shape), generator=generator) for _ in range(LANES)])


def exact(value: Any) -> Tensor:
    """The residues of finite numbers: a float is m * 2^e, an integer itself.

    Raises:
        Unsupported: one is not finite.
    """
    array = np.asarray(value)
    if array.dtype.kind in "iub":
        return torch.from_numpy(np.asarray(array.astype(np.int64) % P))
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise Unsupported("arithmetic with a constant that is not finite")
    m, e = np.frexp(array)
    whole = (m * 2.0**53).astype(np.int64) % P
    low = int(e.min(initial=0))
    powers = np.array([pow(2, k, P) for k in range(low - 53, int(e.max(initial=0)) - 52)], np.int64)
    return torch.from_numpy(np.asarray(whole * powers[e - low] % P))


def inverse(x: Tensor) -> Tensor:
    """1 / x.

    Raises:
        Zero: an element is 0; draw another point.
    """
    if bool((x == 0).any()):
        raise Zero("an element is 0")
    result, power, k = torch.ones_like(x), x, P - 2
    while k:
        if k & 1:
            result = result * power % P
        power, k = power * power % P, k >> 1
    return result


def negated(x: Image) -> Image:
    """-x."""
    return Image([(P - lane) % P for lane in x.lanes], x.degree, x.fraction)


def signed(x: Image) -> tuple[Image, Tensor]:
    """One of x and -x, the same for both, and where it is -x."""
    turned = x.lanes[0] >= HALF
    return with_sign(x, turned), turned


def with_sign(x: Image, turned: Tensor) -> Image:
    """-x where told."""
    return Image([torch.where(turned & (v != 0), P - v, v) for v in x.lanes], x.degree, x.fraction)


def pairwise(x: Image, y: Image, function: Callable[[Tensor, Tensor], Tensor], degree: float) -> Image:
    """A function of two residues in each lane, which broadcast."""
    lanes = [function(a, b) % P for a, b in zip(x.lanes, y.lanes, strict=True)]
    return Image(lanes, degree, x.fraction or y.fraction)


def add(x: Image, y: Image) -> Image:
    """X + y."""
    fraction = x.fraction or y.fraction
    return pairwise(x, y, torch.add, x.degree + y.degree if fraction else max(x.degree, y.degree))


def multiply(x: Image, y: Image) -> Image:
    """X y."""
    return pairwise(x, y, torch.mul, x.degree + y.degree)


def divide(x: Image, y: Image) -> Image:
    """X / y."""
    lanes = [a * inverse(b) % P for a, b in zip(x.lanes, y.lanes, strict=True)]
    return Image(lanes, x.degree + y.degree, True)


def summed(x: Image, axes: Sequence[int], keep: bool) -> Image:
    """The sum over some axes."""
    axes = list(axes)
    count = math.prod(x.shape[a] for a in axes)
    degree = x.degree * (count if x.fraction else 1)
    return Image([v.sum(axes, keepdim=keep) % P if axes else v for v in x.lanes], degree, x.fraction)


def bilinear(x: Image, y: Image, function: Callable[[Tensor, Tensor], Tensor], terms: int) -> Image:
    """A sum of products in float64; `terms` is how many are added up for one element, at most `LONGEST`."""
    if terms > LONGEST:
        raise Unsupported(f"a sum of {terms} products")
    fraction = x.fraction or y.fraction
    degree = (x.degree + y.degree) * (terms if fraction else 1)
    lanes = [
        function(a.double(), b.double()).to(torch.int64) % P for a, b in zip(x.lanes, y.lanes, strict=True)
    ]
    return Image(lanes, degree, fraction)


def product(x: Image, y: Image) -> Image:
    """The matrix product over the last axis of x and the last but one of y, of any length."""
    length = x.shape[-1]
    if length <= LONGEST:
        return bilinear(x, y, torch.matmul, length)
    total: Image | None = None
    for at in range(0, length, LONGEST):
        ends = slice(at, at + LONGEST)
        left = x.map(lambda v, ends=ends: v[..., ends])  # type: ignore[misc]
        right = y.map(lambda v, ends=ends: v[..., ends, :])  # type: ignore[misc]
        part = bilinear(left, right, torch.matmul, left.shape[-1])
        total = part if total is None else add(total, part)
    assert total is not None
    return total
