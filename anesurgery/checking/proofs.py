"""Prove that both sides of an edit are the same computation: bit for bit, or as functions of real numbers.

A proof is a run of both sides in an arithmetic of its own (`interpret.arithmetic`). No numbers are drawn: each
element that both sides read from outside stands for any value. docs/proofs.md says why that is sound and what
it does not say. An `Image` holds, for each element, its residues modulo several primes (lanes); its degree is
that of the polynomial which made it. In the arithmetic of bits, the image of an element is its name.

`prove` is for one edit. `prove_for_any_weights` puts stand-ins in the place of large weights, so that one proof
serves all edits that differ in their weights alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from anesurgery.checking.adversarial import SMALL_CONSTANT, address_bounds, weights
from anesurgery.checking.edit_sites import ROWS, Site, constants_among, row_axes, treats_planes_alike
from anesurgery.checking.grades import Grade
from anesurgery.checking.lengths import drawn_shape, evaluator, length_of, with_rows
from anesurgery.errors import InterpretError
from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.algebraic import Algebraic
from anesurgery.interpret.arithmetic.bitwise import Bitwise
from anesurgery.interpret.arithmetic.constant_memory import release_pages
from anesurgery.interpret.arithmetic.field import LANES, LEAST, Image, Zero
from anesurgery.interpret.arithmetic.symbolic import LARGEST, Symbolic
from anesurgery.mil import Array, Operation, Var, constant, np_dtype, reads, types
from anesurgery.ops import names
from anesurgery.semantics.intervals import stored_interval

SMALL_ENOUGH = 2.0**-40
"""Bound on the probability of error up to which points are added: less than one wrong proof in 10^12."""
ADDING = names("add sub linear_activation pad")
"""Ops in which a zero may be added."""
CLIPPING = names("clip relu relu6 threshold maximum minimum")
"""Ops that change nothing where the range of what they read is narrow."""
POINTS = 3
"""Points of `LANES` residues each, at most: each adds its bound; where three leave too much, degrees are too
high for few more to help."""
MOST_WEIGHTS = 1 << 24
"""Elements of a constant that are looked at bit for bit; over the field, products with them take too long: 16
million weights are a layer of 4,096 x 4,096."""
MOST_READ = 1 << 20
"""Numbers of a constant from which the points follow, at most."""
LARGE = 1 << 16
"""Elements read from outside above which a few rows are looked at first: a wrong edit is found on them at a
small part of the cost, and a right one takes the rest."""


@dataclass(frozen=True)
class Proof:
    """Both sides are the same."""

    grade: Grade
    bound: float
    """Bound on the probability of saying so of two sides that are not."""
    elements: int
    finite_only: bool = False
    """Does it rest on the declaration that only finite numbers count?"""
    ranged: bool = False
    """Does it rest on ranges that the interval analysis shows?"""


@dataclass(frozen=True)
class NoProof:
    """Both sides could not be shown to be the same."""

    reason: str

    def __bool__(self) -> bool:
        return False


APART = NoProof("not equal over the field")
"""Both sides were evaluated and differ, or are equal only by an identity that the field does not know."""


def prove(site: Site, seed: int = 0, *, finite: bool = False) -> Proof | NoProof:
    """The strongest proof that there is, or why there is none.

    Args:
        site: the edit.
        seed: of the points.
        finite: does the pass declare that it holds for finite numbers only?
    """
    if (reason := _reads_no_tensor(site)) is not None:
        return reason
    size = weights([*site.old_ops, *site.new_ops])
    if size > MOST_WEIGHTS:
        return NoProof(f"{size} weights are too many")
    proof = prove_bits(site, list(_arithmetics(site, seed, finite)), seed)
    if proof or size <= LARGEST:
        return proof or _algebraic(site, seed)
    return NoProof(f"not equal bit for bit, and {size} weights are too many for the field")


def prove_for_any_weights(site: Site, seed: int, stand_ins: StandIns, *, finite: bool) -> Proof | NoProof:
    """A proof bit for bit that rests on nothing but the ops, or why there is none."""
    if (reason := _reads_no_tensor(site)) is not None:
        return reason
    arithmetics = [arithmetic for arithmetic, ranged in _arithmetics(site, seed, finite) if not ranged]
    for arithmetic in arithmetics:
        arithmetic.stand_ins = stand_ins.values
    return prove_bits(site, [(arithmetic, False) for arithmetic in arithmetics], seed)


def _reads_no_tensor(site: Site) -> NoProof | None:
    """Why nothing is proved: a value that both sides read is no tensor and no number."""
    for var in site.drawn:
        if not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)):
            return NoProof(f"%{var.name} is not a tensor")
    return None


def prove_bits(site: Site, arithmetics: Sequence[tuple[Bitwise, bool]], seed: int) -> Proof | NoProof:
    """The first proof bit for bit that an arithmetic gives; each comes with whether it knows ranges."""
    proof: Proof | NoProof = NoProof("")
    plain = [arithmetic for arithmetic, ranged in arithmetics if not ranged]
    if _differs_on_few_rows(
        site, plain[-1], seed
    ):  # what the most lenient tells apart, the stricter ones do too
        arithmetics = arithmetics[len(plain) :]
    for arithmetic, ranged in arithmetics:
        proof = proof or _bit_for_bit(site, arithmetic, ranged)
    return proof


def _arithmetics(site: Site, seed: int, finite: bool) -> Iterator[tuple[Bitwise, bool]]:
    """The arithmetics of bits, the strictest first, that with ranges last, without those that cannot help."""
    yield Bitwise(seed), False
    if any(op.op_type in ADDING for op in (*site.old_ops, *site.new_ops)):
        yield Bitwise(seed, one_zero=True), False
    if finite:
        yield Bitwise(seed, one_zero=True, finite=True), False
    if any(op.op_type in CLIPPING for op in site.old_ops) and any(map(_range_of, site.drawn)):
        yield Bitwise(seed, one_zero=True), True


def _range_of(var: Var) -> tuple[float, float] | None:
    """Where a float lies, by the interval analysis."""
    low, high = stored_interval(var) if np_dtype(var).kind == "f" else (-math.inf, math.inf)
    return None if math.isinf(low) and math.isinf(high) else (float(low), float(high))


def _bit_for_bit(site: Site, arithmetic: Bitwise, ranged: bool) -> Proof | NoProof:
    """A false agreement needs a collision somewhere on the way from an element to an input."""
    elements = _count_agreeing(site, arithmetic, arithmetic.seed, ranged=ranged)
    if isinstance(elements, NoProof):
        return elements
    steps = 2 * (len(site.old_ops) + len(site.new_ops)) + 1
    return Proof(Grade.BITS, steps / LEAST**LANES, elements, arithmetic.finite, ranged)


def _algebraic(site: Site, seed: int) -> Proof | NoProof:
    bounds = address_bounds(site.drawn, site.old_ops, set(site.new_ops))

    def span(var: Var) -> tuple[float, float]:
        low, high = bounds[var] if var in bounds else stored_interval(var)
        least, most = (np.asarray(end, np.float64) for end in (low, high))  # of each element, perhaps
        return float(least.min(initial=math.inf)), float(most.max(initial=-math.inf))

    seed = seed_of(seed, [*site.old_ops, *site.new_ops])
    return at_points(lambda arithmetic: _count_agreeing(site, arithmetic, arithmetic.seed), seed, span)


def seed_of(seed: int, ops: Iterable[Operation]) -> int:
    """A seed that follows from the constants, so that no constants can be chosen to vanish at its points.

    Of large constants some numbers in equal distances count, which takes a millisecond.
    """
    digest = hashlib.blake2b(digest_size=16)
    for var in dict.fromkeys(v for op in ops for v in reads(op)):
        if (value := constant(var)) is not None and not isinstance(value, str):
            numbers = np.asarray(value).reshape(-1)
            digest.update(np.ascontiguousarray(numbers[:: 1 + numbers.size // MOST_READ]).tobytes())
    return field.key(seed, digest.hexdigest()) % 2**62


def at_points(
    agree: Callable[[Algebraic], int | NoProof],
    seed: int,
    span: Callable[[Var], tuple[float, float]] = stored_interval,
) -> Proof | NoProof:
    """Points are added until the bound holds; each has to agree.

    The bound at a point: any two different arguments of random functions may meet, or two different results
    may; each with a probability of degree / p in every lane, whose prime p is above `LEAST`. Each draw has
    primes of its own: a constant that one of them divides is not 0 in the next draw.

    Args:
        agree: how many elements agree at a point, or why they do not. It may raise `Zero`.
        seed: of the points.
        span: where an integer lies.
    """
    bound = 1.0
    for point in range(POINTS):
        agreed: int | NoProof = NoProof("something that is divided by, or a constant, is 0 at three points")
        for draw in range(3):
            arithmetic = Algebraic(seed + 1000 * point + draw)
            arithmetic.span = span
            try:
                agreed = agree(arithmetic)
                break
            except Zero:
                continue
        if isinstance(agreed, NoProof):
            return agreed
        pairs = 1 + arithmetic.evaluations**2 / 2
        bound *= min(1.0, pairs * (arithmetic.degree / LEAST) ** LANES)
        if bound <= SMALL_ENOUGH:
            return Proof(Grade.PROVED, bound, agreed)
    return NoProof(f"the bound on the error is only {bound_words(bound)} after {POINTS} points")


def _count_agreeing(site: Site, arithmetic: Symbolic, seed: int, *, ranged: bool = False) -> int | NoProof:
    """How many elements agree; else that one does not, or what the arithmetic does not know.

    Raises:
        Zero: the point has to be drawn again.
    """
    if _differs_on_few_rows(site, arithmetic, seed, ranged=ranged):
        return APART
    try:
        pairs = _images_of_both_sides(site, arithmetic, seed, ranged)
    except Zero:
        raise
    except InterpretError as error:
        return NoProof(reason_of(error))
    arithmetic.degree = max([arithmetic.degree, *(x.degree for pair in pairs for x in pair)])
    if not all(a.same(b) for a, b in pairs):
        return APART
    return sum(math.prod(map(length_of, new.shape or ())) for _, new in site.replaced)


def _differs_on_few_rows(site: Site, arithmetic: Symbolic, seed: int, *, ranged: bool = False) -> bool:
    """Is the site large, and do a few rows of it show already that both sides differ?"""
    if sum(math.prod(drawn_shape(v)) for v in site.drawn) > LARGE and (axes := row_axes(site)) is not None:
        with suppress(InterpretError):
            few = arithmetic.fresh()
            few.cut = {v: (at, ROWS) for v, at in constants_among(axes).items()}
            with with_rows(axes, ROWS):
                pairs = _images_of_both_sides(site, few, seed, ranged)
            return not all(a.same(b) for a, b in pairs)
    return False


def _images_of_both_sides(
    site: Site, arithmetic: Symbolic, seed: int, ranged: bool = False
) -> list[tuple[Image, Image]]:
    """The old and the new values; one plane of them, where all are alike."""
    generator = torch.Generator().manual_seed(seed + 1)
    shapes = {v: drawn_shape(v) for v in site.drawn}
    if treats_planes_alike(site):
        shapes = {v: (1, 1, *shape[2:]) for v, shape in shapes.items()}
    images: dict[Var, Image] = {v: field.random(arithmetic.primes, shapes[v], generator) for v in site.drawn}
    if isinstance(arithmetic, Bitwise) and ranged:
        for v, ends in ((v, _range_of(v)) for v in images):
            if ends is not None:
                arithmetic.lattice.within(images[v], *ends)
    olds = [old for old, _ in site.replaced]
    values = _run(site.old_ops, images, [*olds, *site.carried], arithmetic)
    images |= dict(zip(site.carried, values[len(olds) :], strict=True))
    news = _run(site.new_ops, images, [new for _, new in site.replaced], arithmetic)
    return [(arithmetic.image(a), arithmetic.image(b)) for a, b in zip(values, news, strict=False)]


def _run(
    ops: Sequence[Operation], images: dict[Var, Image], wanted: Sequence[Var], arithmetic: Symbolic
) -> list[Image]:
    values: list[Image] = evaluator(ops, wanted, arithmetic)(images)  # type: ignore[arg-type,assignment]
    return values


def bound_words(bound: float) -> str:
    """A bound as reports say it."""
    return f"2^{math.ceil(math.log2(bound))}" if bound > 0 else "0"


def reason_of(error: Exception) -> str:
    """Where a proof ends, by the first line of an error of the interpreter; the model itself did not fail."""
    return str(error).splitlines()[0].replace(" failed: ", ": ", 1)


# Stand-ins for large weights.


ELEMENTS = ("add", "sub", "mul")
"""Ops whose constants are weights where they are vectors; tables and masks are reordered, so that they are not
the same list on both sides."""
READERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("weight", "bias"),
    "conv": ("weight", "bias"),
    "matmul": ("x", "y"),
    "layer_norm": ("gamma", "beta"),
    **dict.fromkeys(ELEMENTS, ("x", "y")),
}
"""Op type -> the parameters that may be any numbers: the op computes with them and decides nothing by them."""
MOST = 1 << 27
"""Weights of one edit for which numbers are drawn: 1.1 GB as the 64 bits of each that the proof computes with.
"""
AT_ONCE = 1 << 25
"""Weights of one edit for which they are drawn before a second edit is seen that is like it: a choice: the
proof of so many pays where it stands for several checks by numbers."""


class StandIns:
    """The weights of an edit, numbered by what they hold."""

    def __init__(self, old: Sequence[Operation], new: Sequence[Operation], seed: int) -> None:
        self._seed = seed
        self.weights = _weights([*old, *new])
        self.size = sum(int(np.size(constant(v))) for v in self.weights)

    @cached_property
    def numbers(self) -> dict[Var, int]:
        """Weight -> the number of its content, which is read here first."""
        numbers: dict[Var, int] = {}
        seen: dict[Hashable, int] = {}
        digests: dict[Hashable, tuple[Array, Hashable | None]] = {}
        for var in self.weights:
            array = np.asarray(constant(var))
            place = array.__array_interface__["data"][0], array.dtype.str, array.shape, array.strides
            if place not in digests:  # the array is kept with it, so that nothing else can come to lie there
                digests[place] = array, _content(array)
            content = digests[place][1]
            if content is not None:
                numbers[var] = seen.setdefault(content, len(seen))
        return numbers

    @cached_property
    def values(self) -> dict[Var, torch.Tensor]:
        """What stands for each weight."""
        drawn: dict[int, torch.Tensor] = {}
        for var, number in self.numbers.items():
            if number not in drawn:
                generator = torch.Generator().manual_seed(self._seed + 7919 * (number + 1))
                size = int(np.size(constant(var)))
                drawn[number] = torch.rand(size, dtype=torch.float64, generator=generator)
        return {v: drawn[number].reshape(np.shape(constant(v))) for v, number in self.numbers.items()}


def _weights(ops: Sequence[Operation]) -> list[Var]:
    """The larger constants that are floats and are read as weights only."""
    plain_floats: dict[Var, bool] = {}
    for op in ops:
        anything = {op.inputs.get(name) for name in READERS.get(op.op_type, ())}
        if op.op_type in ELEMENTS:
            anything = {v for v in anything if v is not None and _is_vector(v)}
        computes = any(v.op is None or v.op.op_type != "const" for v in reads(op))
        for var in reads(op):
            plain_floats[var] = plain_floats.get(var, True) and computes and var in anything
    return [v for v, plain in plain_floats.items() if plain and _is_large(v)]


def _content(array: Array) -> Hashable | None:
    """The numbers of an array in their order, whatever its shape; None where it holds one again and again."""
    ordered = np.ascontiguousarray(array)
    if _is_one_number(ordered):
        return None
    content = ordered.dtype.str, hashlib.blake2b(ordered.data, digest_size=16).digest()
    release_pages(ordered)
    return content


def _is_one_number(array: Array) -> bool:
    """Does it hold one number again and again?"""
    flat = array.reshape(-1)
    return bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all())


def _is_vector(var: Var) -> bool:
    value = constant(var)
    return value is not None and np.size(value) == max(np.shape(value), default=0)


def _is_large(var: Var) -> bool:
    if var.op is None or var.op.op_type != "const" or np_dtype(var).kind != "f":
        return False
    return int(np.size(constant(var))) > SMALL_CONSTANT
