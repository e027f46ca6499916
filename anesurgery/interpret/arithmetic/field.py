"""Numbers of a prime field, three independent ones for each element, and random functions of them.

The prime lies below 2^20, so that a sum of 8192 products stays below 2^53: products of matrices are those of
float64, and the three residues of an element fit into 60 bits.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
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
    made = h.clone(memory_format=torch.contiguous_format)
    for part in torch.split(made.view(-1), CACHED):
        _mix(part, torch.empty_like(part))
    return made


def _mix(h: Tensor, scratch: Tensor) -> None:
    """Scramble as many as stay in the cache."""
    for shift, factor in ((30, FIRST), (27, SECOND), (31, None)):
        torch.bitwise_right_shift(h, shift, out=scratch)
        h ^= scratch.bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            h *= factor


def blocks(shape: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Where the parts of a tensor lie that stay in the cache: an index for each."""
    axis = next((a for a in range(len(shape)) if math.prod(shape[a + 1 :]) <= CACHED), len(shape))
    step = max(1, CACHED // max(1, math.prod(shape[axis + 1 :])))
    starts = range(0, shape[axis], step) if axis < len(shape) else ()
    for outer in itertools.product(*map(range, shape[:axis])):
        if axis == len(shape):
            yield outer
        for start in starts:
            yield (*outer, slice(start, start + step))


def packed(x: Image) -> Tensor:
    """The three residues of each element as one number."""
    made = torch.empty(x.shape, dtype=torch.int64)
    for at in blocks(x.shape):
        part = torch.bitwise_left_shift(x.lanes[2][at], 20, out=made[at])
        part.bitwise_or_(x.lanes[1][at]).bitwise_left_shift_(20).bitwise_or_(x.lanes[0][at])
    return made


def opaque(name: int, *arguments: Tensor) -> Image:
    """A random function of packed arguments: different ones give unrelated results."""
    shape = np.broadcast_shapes(*(a.shape for a in arguments))
    spread = [a.expand(shape) for a in arguments]
    return _function(name, shape, lambda at: [a[at] for a in spread])


def commuting(name: int, x: Tensor, y: Tensor, turned: Tensor | None = None) -> Image:
    """A random function of two packed arguments that may change places; negative where told."""
    shape = np.broadcast_shapes(x.shape, y.shape)
    a, b = x.expand(shape), y.expand(shape)
    turned = None if turned is None else turned.expand(shape)
    return _function(name, shape, lambda at: [torch.minimum(a[at], b[at]), torch.maximum(a[at], b[at])], turned)


def _function(
    name: int, shape: tuple[int, ...], arguments: Callable[[Any], list[Tensor]], turned: Tensor | None = None
) -> Image:
    """A random function of what `arguments` gives for each block."""
    first = torch.tensor(name, dtype=torch.int64)
    lanes = [torch.empty(shape, dtype=torch.int64) for _ in range(LANES)]
    for at in blocks(shape):
        h = first.expand(lanes[0][at].shape).contiguous()
        scratch = torch.empty_like(h)
        for argument in arguments(at):
            h ^= argument
            h += GOLDEN
            _mix(h, scratch)
        sign = None if turned is None else turned[at].long().neg_()
        for i, lane in enumerate(lanes):
            made = torch.bitwise_right_shift(h, PIECE * i, out=lane[at])
            made.bitwise_and_((1 << PIECE) - 1).mul_(P).bitwise_right_shift_(PIECE)
            if sign is not None:
                _turn(made, sign, scratch)
    return Image(lanes)


def _turn(v: Tensor, sign: Tensor, scratch: Tensor) -> None:
    """Make v its negative where `sign` is -1 and not 0."""
    v.bitwise_xor_(sign).sub_(sign)
    torch.bitwise_right_shift(v, 63, out=scratch)
    v += scratch.bitwise_and_(P)


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
    shape = np.broadcast_shapes(x.shape, turned.shape)
    spread, olds = turned.expand(shape), [v.expand(shape) for v in x.lanes]
    lanes = [torch.empty(shape, dtype=v.dtype) for v in olds]
    for at in blocks(shape):
        sign = spread[at].long().neg_()
        scratch = torch.empty_like(sign)
        for v, made in zip(olds, lanes, strict=True):
            _turn(made[at].copy_(v[at]), sign, scratch)
    return Image(lanes, x.degree, x.fraction)


def weighted(x: Image, weights: Image, axes: Sequence[int]) -> Image:
    """The sum along some axes, whose elements have a weight each, in order; the axes keep the length 1."""
    axes = sorted(a % x.ndim for a in axes)
    count = math.prod(x.shape[a] for a in axes)
    kept = [1 if a in axes else n for a, n in enumerate(x.shape)]
    last = list(range(x.ndim - len(axes), x.ndim))

    def total(v: Tensor, w: Tensor) -> Tensor:
        rows = v.movedim(axes, last).reshape(*(n for a, n in enumerate(v.shape) if a not in axes), count)
        return (torch.matmul(rows, w) % P).reshape(kept)

    return Image([total(v, w) for v, w in zip(x.lanes, weights.lanes, strict=True)], x.degree, x.fraction)


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
