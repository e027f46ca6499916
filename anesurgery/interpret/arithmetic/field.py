"""Tensors over prime fields: three residues for each element, arithmetic on them, and random functions of them.

`symbolic` and `algebraic` compute programs so, to prove that two are equal. Each of the three lanes has a prime
of its own just below 2^20. So a sum of 8192 products stays below 2^53, and products of matrices can be computed
in float64. The three residues of an element fit into one number of 64 bits, its name.

The primes differ so that no constant is 0 in all lanes, and no two constants of a similar size are equal: their
product is above 2^59, and a float is an integer below 2^53 times a power of two. So the difference of two such
integers is below the product, and is not 0 in all lanes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from anesurgery.errors import InterpretError
from anesurgery.interpret.table import Unsupported, ints

Tensor = torch.Tensor

Primes = tuple[int, ...]
"""The prime of each lane."""
PRIMES: Primes = (1_048_573, 1_048_571, 1_048_559)
"""The largest primes below 2^20: hashes are residues of these."""
LEAST = (1 << 20) - (1 << 14)
"""The smallest prime that may be drawn. A choice: 1,180 primes lie between it and 2^20, and error bounds, which
assume the least of them, are 5 % larger than with the largest."""
LANES = 3
"""The number of residues of an element, each computed at an independent random point. With three of 20 bits a
wrong proof is as unlikely as with 60 bits."""
LONGEST = 8192
"""The most products that may be added up in float64 without rounding."""
MOST_TERMS = 1 << 23
"""The most products of residues that may be added up in int64 without wrapping."""
PIECE = 21
"""The bits of a 64-bit hash that give one residue, and of a name that hold one: one more than a residue has."""
LOW = (1 << PIECE) - 1
"""The mask of one piece."""
SCARCE = 1 << 10
"""At most one in so many constants of a tensor may be 0 in a lane, and none of fewer constants. By chance, a
prime divides one fp32 number in 2^20."""
ONES = sum(1 << (PIECE * lane) for lane in range(LANES))
"""The name whose residues are 1."""
CACHED = 1 << 15
"""The number of elements that are hashed at a time: so few that they stay in a core's cache."""
FEW = 1 << 11
"""For fewer numbers torch computes remainders as fast as numpy divides."""
SINGLE = 1 << 5
"""For fewer numbers, inverting each is as fast as inverting all together."""
GOLDEN, FIRST, SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""The odd constants of splitmix64."""
Words = npt.NDArray[np.uint64]


class Zero(InterpretError):  # noqa: N818 - reads as a statement
    """Something that must be inverted is 0 at this random point: draw another one."""


class Image:
    """A tensor over the fields: the residues of its elements, and their degree as polynomials of the inputs.

    It holds either the residues, in `LANES` tensors, or the names of the elements in one tensor, which takes a
    third of the memory. Each can be computed from the other.

    Args:
        lanes: the residues of each lane; none where names are given.
        primes: of the lanes.
        degree: of the elements as polynomials, which bounds the probability of a wrong proof.
        fraction: are they quotients of polynomials? The degree then is that of numerator plus denominator.
        names: in place of lanes.
    """

    __slots__ = ("_lanes", "degree", "fraction", "names", "primes")

    def __init__(
        self,
        lanes: Sequence[Tensor],
        primes: Primes,
        degree: float = 1,
        fraction: bool = False,
        *,
        names: Tensor | None = None,
    ) -> None:
        self._lanes, self.primes = list(lanes), primes
        self.names = names
        """The elements as one number each; None where it holds lanes."""
        self.degree, self.fraction = degree, fraction

    @classmethod
    def of(cls, names: Tensor, primes: Primes, degree: float = 1, fraction: bool = False) -> Image:
        """Return the tensor of elements with these names."""
        return cls((), primes, degree, fraction, names=names)

    @property
    def lanes(self) -> list[Tensor]:
        """The residues, a tensor for each lane."""
        return self._lanes if self.names is None else [_lane(self.names, i) for i in range(LANES)]

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return (self._lanes[0] if self.names is None else self.names).shape

    @property
    def ndim(self) -> int:
        """The rank of the tensor."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def __bool__(self) -> bool:
        raise Unsupported("control flow that depends on an input")

    def map(self, function: Callable[[Tensor], Tensor]) -> Image:
        """Apply a function that only moves elements, such as a transpose, to all lanes."""
        if self.names is not None:
            return Image.of(function(self.names), self.primes, self.degree, self.fraction)
        return self.with_lanes([function(lane) for lane in self._lanes])

    def with_lanes(self, lanes: Sequence[Tensor]) -> Image:
        """Return other residues with the same primes and degree."""
        return Image(lanes, self.primes, self.degree, self.fraction)

    def of_residues(self, function: Callable[[Tensor], Tensor]) -> Image:
        """Apply a function that computes with residues to each lane, and reduce its results."""
        return self.with_lanes([modulo(p, function(x)) for x, p in zip(self.lanes, self.primes, strict=True)])

    def same(self, other: Image) -> bool:
        """Is every element the same in every lane?"""
        if self.shape != other.shape or self.primes != other.primes:
            return False
        if self.names is not None and other.names is not None:
            return torch.equal(self.names, other.names)
        return all(torch.equal(a, b) for a, b in zip(self.lanes, other.lanes, strict=True))


def modulo(p: int, numbers: Tensor) -> Tensor:
    """Return numbers modulo p. numpy divides with vector instructions, but has none for remainders."""
    if numbers.numel() < FEW:
        return numbers % p
    array = numbers.numpy()
    multiples = np.asarray(array // p)
    multiples *= p
    return torch.from_numpy(np.subtract(array, multiples, out=multiples))


def _lane(names: Tensor, lane: int) -> Tensor:
    """Return one residue of each name."""
    return torch.bitwise_right_shift(names, PIECE * lane).bitwise_and_(LOW)


def joined(images: Sequence[Image], function: Callable[[list[Tensor]], Tensor]) -> Image:
    """Apply a function that only moves elements, such as a concat, to all lanes of several tensors."""
    degree, fraction = max(x.degree for x in images), any(x.fraction for x in images)
    primes = common_primes(*images)
    if any(x.names is not None for x in images):
        return Image.of(function([packed(x) for x in images]), primes, degree, fraction)
    lanes = [function(list(lanes)) for lanes in zip(*(x.lanes for x in images), strict=True)]
    return Image(lanes, primes, degree, fraction)


def where(condition: Tensor, x: Image, y: Image) -> Image:
    """Return the elements of x where a condition holds, else those of y."""
    return joined([x, y], lambda each: torch.where(condition, each[0], each[1]))


def axes_or_all(x: Image, axes: Any) -> list[int]:
    """Return the axes that an op names, not negative; all where it names none."""
    return list(range(x.ndim)) if axes is None else [i % x.ndim for i in ints(axes)]


def without_axes(x: Image, axes: Sequence[int], keep: bool) -> Image:
    """Return a reduction without the axes of length 1 that it was over, unless they are kept."""
    return x if keep else x.map(lambda v: v.squeeze(tuple(axes)))


def per_channel(x: Image, rank: int) -> Image:
    """Return one number for each channel so that it broadcasts along axis 1: (C,) as (C, 1, 1) for rank 4."""
    return x.map(lambda v: v.reshape(-1, *(1,) * (rank - 2)))


def common_primes(*images: Image) -> Primes:
    """Return the primes of several tensors, which must be the same."""
    first = images[0].primes
    assert all(x.primes == first for x in images), "residues below different primes"
    return first


@functools.cache
def _candidates() -> npt.NDArray[np.int64]:
    """Return the primes from `LEAST` to 2^20."""
    odd = np.arange(LEAST + 1, 1 << 20, 2)
    return odd[np.all([odd % k != 0 for k in range(3, 1 << 10, 2)], axis=0)]


def collision_bound(ops: int) -> float:
    """Return a bound of the probability that hashes collide on the way from an element to an input.

    It counts two hashes for each of so many ops (a row of operands, see `Symbolic.digest`, and an element), and
    one for the input.
    """
    return float((2 * ops + 1) / LEAST**LANES)


def draw_primes(seed: int) -> Primes:
    """Draw a prime for each lane, all different."""
    rng = np.random.default_rng(hash_of(seed, "primes") % 2**62)
    return tuple(rng.choice(_candidates(), LANES, replace=False).tolist())


def hash_of(*parts: Any) -> int:
    """Return a 64-bit number for a name and attributes, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def mix(h: Tensor) -> Tensor:
    """Scramble numbers of 64 bits (splitmix64)."""
    mixed = h.clone(memory_format=torch.contiguous_format)
    for part in torch.split(mixed.view(-1), CACHED):
        words = _words(part)
        _mix(words, np.empty_like(words))
    return mixed


def _words(numbers: Tensor) -> Words:
    """Return the same memory as unsigned numbers, whose shifts numpy vectorizes without a mask."""
    return numbers.numpy().view(np.uint64)


def _mix(h: Words, scratch: Words) -> None:
    """Scramble as many numbers as stay in the cache, in place."""
    for shift, factor in ((30, FIRST), (27, SECOND), (31, None)):
        np.bitwise_xor(h, np.right_shift(h, np.uint64(shift), out=scratch), out=h)
        if factor is not None:
            np.multiply(h, factor, out=h)


def blocks(shape: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Yield the index of each part of a tensor that stays in the cache."""
    if not shape:
        yield ()
        return
    axis = next(a for a in range(len(shape)) if math.prod(shape[a + 1 :]) <= CACHED)
    step = max(1, CACHED // max(1, math.prod(shape[axis + 1 :])))
    for *outer, start in itertools.product(*map(range, shape[:axis]), range(0, shape[axis], step)):
        yield (*outer, slice(start, start + step))


def packed(x: Image) -> Tensor:
    """Return the names of the elements: the three residues of each as one number."""
    if x.names is not None:
        return x.names
    names = torch.empty(x.shape, dtype=torch.int64)
    for at in blocks(x.shape):
        part = torch.bitwise_left_shift(x.lanes[2][at], PIECE, out=names[at])
        part.bitwise_or_(x.lanes[1][at]).bitwise_left_shift_(PIECE).bitwise_or_(x.lanes[0][at])
    return names


def opaque(primes: Primes, name: int, *arguments: Tensor) -> Image:
    """Compute a random function of names of elements: different ones give unrelated results.

    The function has a name from `hash_of`. Its arguments broadcast; the first ones are mixed once for all
    elements that they broadcast to.
    """
    shape = np.broadcast_shapes(*(a.shape for a in arguments))
    before, rest = torch.tensor(name, dtype=torch.int64), list(arguments)
    while len(rest) > 1 and np.broadcast_shapes(before.shape, rest[0].shape) != shape:
        first = rest.pop(0)
        before = mix((before ^ first).add_(int(GOLDEN.view(np.int64))))
    spread = [a.expand(shape) for a in rest]
    return _function(primes, before, shape, lambda at: [_words(a[at]) for a in spread])


def commuting(primes: Primes, name: int, x: Tensor, y: Tensor, negative: Tensor | None = None) -> Image:
    """Compute a random function of two names that commutes, negated where `negative` is True: see `opaque`."""
    shape = np.broadcast_shapes(x.shape, y.shape)
    a, b = x.expand(shape), y.expand(shape)
    negative = None if negative is None else negative.expand(shape)

    def ordered(at: Any) -> list[Words]:
        v, w = _words(a[at]), _words(b[at])
        return [np.minimum(v, w), np.maximum(v, w)]

    return _function(primes, torch.tensor(name, dtype=torch.int64), shape, ordered, negative)


def _function(
    primes: Primes,
    before: Tensor,
    shape: tuple[int, ...],
    arguments: Callable[[Any], list[Words]],
    negative: Tensor | None = None,
) -> Image:
    """Compute a random function block by block, of what was mixed `before` and of the arguments there."""
    before, names = before.expand(shape), torch.empty(shape, dtype=torch.int64)
    for at in blocks(shape):
        image = _words(names[at])
        h, scratch = _words(before[at]).copy(), np.empty_like(image)
        for argument in arguments(at):
            np.add(np.bitwise_xor(h, argument, out=h), GOLDEN, out=h)
            _mix(h, scratch)
        _write_names(primes, h, scratch, image)
        if negative is not None:
            _negate_where(primes, image, negative[at].numpy(), scratch)
    return Image.of(names, primes)


def _write_names(primes: Primes, h: Words, scratch: Words, name: Words) -> None:
    """Write names from hashes: each piece of `PIECE` bits is scaled to a residue."""
    for lane, prime in enumerate(primes):
        np.right_shift(h, np.uint64(PIECE * lane), out=scratch)
        np.multiply(np.bitwise_and(scratch, np.uint64(LOW), out=scratch), np.uint64(prime), out=scratch)
        np.right_shift(scratch, np.uint64(PIECE), out=scratch if lane else name)
        if lane:  # the first is in its place
            np.bitwise_or(name, np.left_shift(scratch, np.uint64(PIECE * lane), out=scratch), out=name)


def _negate_where(primes: Primes, names: Words, negative: npt.NDArray[np.bool_], scratch: Words) -> None:
    """Replace names by those of the negatives where `negative` is True, in place.

    The negative of a residue r is p - r, and 0 for 0. With 2^20 - p added, p - r has bit 20 set only for r = 0.
    """
    whole, lacks = _as_name(primes), _as_name([(1 << (PIECE - 1)) - p for p in primes])
    negatives = np.subtract(whole, names)
    np.add(negatives, lacks, out=scratch)
    np.bitwise_and(np.right_shift(scratch, np.uint64(PIECE - 1), out=scratch), np.uint64(ONES), out=scratch)
    np.multiply(scratch, np.uint64(LOW), out=scratch)  # all bits of a lane in place of its first
    negatives -= np.bitwise_and(scratch, whole, out=scratch)
    np.copyto(names, negatives, where=negative)


def _as_name(residues: Sequence[int]) -> np.uint64:
    """Return the name with these residues."""
    return np.uint64(sum(r << (PIECE * lane) for lane, r in enumerate(residues)))


def place_factors(primes: Primes, count: int, name: int) -> Image:
    """Return a random factor for each place of a list."""
    return opaque(primes, hash_of("place", name), torch.arange(count))


def random_image(primes: Primes, shape: Sequence[int], generator: torch.Generator) -> Image:
    """Return a random point for each element."""
    names = torch.randint(0, primes[0], tuple(shape), generator=generator)
    for lane in range(1, LANES):
        names |= torch.randint(0, primes[lane], tuple(shape), generator=generator).bitwise_left_shift_(
            PIECE * lane
        )
    return Image.of(names, primes)


def exact(primes: Primes, value: Any) -> list[Tensor]:
    """Return the residues of finite numbers: an integer modulo each prime, a float as m * 2^e.

    Raises:
        Unsupported: one is not finite.
        Zero: more of them are 0 in a lane, without being 0, than chance explains; draw other primes.
    """
    array = np.asarray(value)
    if array.dtype.kind in "iub":
        whole, powers = array.astype(np.int64), range(1)
        place: Any = 0
    elif not np.isfinite(array).all():
        raise Unsupported("arithmetic with a constant that is not finite")
    else:
        digits, (m, e) = np.finfo(array.dtype).nmant + 1, np.frexp(array)
        whole, low = np.ldexp(m, digits).astype(np.int64), int(e.min(initial=0))
        powers, place = range(low - digits, int(e.max(initial=0)) - digits + 1), e - low
    zeros_allowed = array.size - np.count_nonzero(array) + array.size // SCARCE
    lanes = []
    for p in primes:
        table = np.array([pow(2, k, p) for k in powers], np.int64)
        small = whole if array.dtype.itemsize <= 4 else whole % p
        lane = modulo(p, torch.from_numpy(np.asarray(small * table.take(place))))
        if array.size - np.count_nonzero(lane.numpy()) > zeros_allowed:
            raise Zero("a constant is 0 in a lane")
        lanes.append(lane)
    return lanes


def inverse(x: Tensor, p: int) -> Tensor:
    """Return 1 / x modulo a prime.

    Raises:
        Zero: an element is 0; draw another point.
    """
    if bool((x == 0).any()):
        raise Zero("an element is 0")
    if x.numel() < SINGLE:
        return torch.tensor([pow(v, -1, p) for v in x.reshape(-1).tolist()], dtype=torch.int64).reshape(x.shape)
    result, power, k = torch.ones_like(x), x, p - 2
    while k:
        if k & 1:
            result = modulo(p, result * power)
        power, k = modulo(p, power * power), k >> 1
    return result


def negated(x: Image) -> Image:
    """Return -x."""
    if x.names is not None:
        return with_sign(x, torch.ones((), dtype=torch.bool))
    return x.of_residues(torch.neg)


def signed(x: Image) -> tuple[Image, Tensor]:
    """Return one of x and -x, the same for both, and True where it is -x."""
    negative = (x.lanes[0] if x.names is None else _lane(x.names, 0)) > x.primes[0] // 2
    return with_sign(x, negative), negative


def with_sign(x: Image, negative: Tensor) -> Image:
    """Return -x where `negative` is True, else x."""
    shape = np.broadcast_shapes(x.shape, negative.shape)
    mask, olds, names = negative.expand(shape), packed(x).expand(shape), torch.empty(shape, dtype=torch.int64)
    for at in blocks(shape):
        words = _words(names[at].copy_(olds[at]))
        _negate_where(x.primes, words, mask[at].numpy(), np.empty_like(words))
    return Image.of(names, x.primes, x.degree, x.fraction)


def weighted(x: Image, weights: Image, axes: Sequence[int]) -> Image:
    """Return the sum along some axes, times a weight for each place along them; the axes keep the length 1.

    Raises:
        Unsupported: there are more than `MOST_TERMS` places.
    """
    axes = sorted(a % x.ndim for a in axes)
    count = math.prod(x.shape[a] for a in axes)
    if count > MOST_TERMS:
        raise Unsupported(f"a sum of {count} products")
    kept = [1 if a in axes else n for a, n in enumerate(x.shape)]
    last = list(range(x.ndim - len(axes), x.ndim))
    rows = x.map(lambda v: v.movedim(axes, last).reshape(-1, count))
    sums, factors = torch.empty(len(weights.lanes), rows.shape[0], dtype=torch.int64), weights.lanes
    step = max(1, CACHED // max(1, count))
    for at in range(0, rows.shape[0], step):
        part = rows.map(lambda v, at=at: v[at : at + step])  # type: ignore[misc]
        for v, w, total in zip(part.lanes, factors, sums, strict=True):
            torch.mv(v, w, out=total[at : at + step])
    lanes = [v.remainder_(p).reshape(kept) for v, p in zip(sums, common_primes(x, weights), strict=True)]
    return x.with_lanes(lanes)


def pairwise(x: Image, y: Image, function: Callable[[Tensor, Tensor], Tensor], degree: float) -> Image:
    """Apply a function of two residues in each lane; x and y broadcast."""
    primes = common_primes(x, y)
    lanes = [modulo(p, function(a, b)) for a, b, p in zip(x.lanes, y.lanes, primes, strict=True)]
    return Image(lanes, primes, degree, x.fraction or y.fraction)


def add(x: Image, y: Image) -> Image:
    """Return x + y."""
    fraction = x.fraction or y.fraction
    return pairwise(x, y, torch.add, x.degree + y.degree if fraction else max(x.degree, y.degree))


def multiply(x: Image, y: Image) -> Image:
    """Return x * y."""
    return pairwise(x, y, torch.mul, x.degree + y.degree)


def divide(x: Image, y: Image) -> Image:
    """Return x / y."""
    inverses = [inverse(lane, p) for lane, p in zip(y.lanes, y.primes, strict=True)]
    quotient = multiply(x, y.with_lanes(inverses))
    quotient.fraction = True
    return quotient


def summed(x: Image, axes: Sequence[int], keep: bool) -> Image:
    """Return the sum over some axes."""
    axes = list(axes)
    count = math.prod(x.shape[a] for a in axes)
    sums = x.of_residues(lambda v: v.sum(axes, keepdim=keep)) if axes else x.with_lanes(x.lanes)
    sums.degree *= count if x.fraction else 1
    return sums


def bilinear(x: Image, y: Image, function: Callable[[Tensor, Tensor], Tensor], terms: int) -> Image:
    """Return sums of `terms` products, at most `LONGEST` each, by a function of two float64 tensors."""
    if terms > LONGEST:
        raise Unsupported(f"a sum of {terms} products")
    times = terms if x.fraction or y.fraction else 1

    def sums(a: Tensor, b: Tensor) -> Tensor:
        return function(a.double(), b.double()).to(torch.int64)

    return pairwise(x, y, sums, (x.degree + y.degree) * times)


def product(x: Image, y: Image) -> Image:
    """Return the matrix product over the last axis of x and the last but one of y, of any length."""
    length = x.shape[-1]
    if length <= LONGEST:
        return bilinear(x, y, torch.matmul, length)

    def part(start: int) -> Image:
        piece = slice(start, start + LONGEST)
        left, right = x.map(lambda v: v[..., piece]), y.map(lambda v: v[..., piece, :])
        return bilinear(left, right, torch.matmul, left.shape[-1])

    return functools.reduce(add, map(part, range(0, length, LONGEST)))
