"""Prove that both sides of an edit are the same computation: bit for bit, or as functions of real numbers.

`site` calls `prove` for each edit. A proof runs both sides in an arithmetic of its own
(`interpret.arithmetic`). No numbers are drawn: each element that both sides read from outside is a variable
that stands for any value. docs/proofs.md says why that is sound and what it does not say. An `Image` holds, for
each element, its residues modulo several primes (lanes); its degree is that of the polynomial that it stands
for. In the arithmetic of bits, the image of an element is its name, a hash of how it is computed.

`prove_for_any_weights` puts variables in the place of large weights as well, so that one proof serves all edits
that differ in their weights alone (`StandIns`).
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

from anesurgery.checking.addresses import address_bounds
from anesurgery.checking.adversarial import SMALL_CONSTANT, largest_constant
from anesurgery.checking.edit_sites import ROWS, Site, constants_among, row_axes, treats_planes_alike
from anesurgery.checking.grades import Grade
from anesurgery.checking.lengths import drawn_shape, evaluator, length_of, with_rows
from anesurgery.errors import InterpretError
from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.algebraic import Algebraic
from anesurgery.interpret.arithmetic.bitwise import Bitwise
from anesurgery.interpret.arithmetic.constant_memory import release_pages
from anesurgery.interpret.arithmetic.field import LANES, LEAST, Image, Zero, collision_bound
from anesurgery.interpret.arithmetic.symbolic import LARGEST, Symbolic
from anesurgery.mil import Array, Operation, Var, array_digest, constant, np_dtype, reads, types
from anesurgery.ops import names
from anesurgery.semantics.intervals import stored_interval

SMALL_ENOUGH = 2.0**-40
"""Bound on the probability of a wrong proof at which no further points are tried: less than one in 10^12."""
ADDING = names("add sub linear_activation pad")
"""Ops that may add a zero."""
CLIPPING = names("clip relu relu6 threshold maximum minimum")
"""Ops that change nothing if the range of their operand is narrow."""
POINTS = 3
"""The most points, of `LANES` residues each. Each multiplies the bound by its own; where three are not enough,
the degrees are too high for a few more to help."""
MOST_WEIGHTS = 1 << 24
"""The most elements of a constant for a proof bit for bit: 16 million are a layer of 4,096 x 4,096. Over the
field the limit is lower, since products take longer."""
MOST_READ = 1 << 20
"""The most elements of a constant that are hashed for the seed of the points."""
LARGE = 1 << 16
"""Above this many input elements, a few rows are tried first: a wrong edit then fails at a small part of the
cost."""


@dataclass(frozen=True)
class Proof:
    """Both sides are the same."""

    grade: Grade
    bound: float
    """Bound on the probability that the proof is wrong."""
    elements: int
    finite_only: bool = False
    """Whether it relies on the declaration that only finite numbers count."""
    ranged: bool = False
    """Whether it relies on ranges that the interval analysis shows."""


@dataclass(frozen=True)
class NoProof:
    """Why both sides could not be shown to be the same; false as a condition."""

    reason: str

    def __bool__(self) -> bool:
        return False


APART = NoProof("not equal over the field")
"""Both sides were evaluated and differ; they may still be equal by an identity that the field does not know."""


def prove(site: Site, seed: int = 0, *, finite: bool = False) -> Proof | NoProof:
    """Return the strongest proof that there is, or why there is none.

    Args:
        site: the edit.
        seed: the seed of the points.
        finite: whether the pass declares that it holds for finite numbers only.
    """
    if (reason := _input_without_proof(site)) is not None:
        return reason
    size = largest_constant(site.ops)
    if size > MOST_WEIGHTS:
        return NoProof(f"{size} weights are too many")
    proof = prove_bits(site, list(_arithmetics(site, seed, finite)), seed)
    if proof or size <= LARGEST:
        return proof or _prove_over_field(site, seed)
    return NoProof(f"not equal bit for bit, and {size} weights are too many for the field")


def prove_for_any_weights(site: Site, seed: int, stand_ins: StandIns, *, finite: bool) -> Proof | NoProof:
    """Return a proof bit for bit that does not depend on the weights, or why there is none."""
    if (reason := _input_without_proof(site)) is not None:
        return reason
    arithmetics = [arithmetic for arithmetic, ranged in _arithmetics(site, seed, finite) if not ranged]
    for arithmetic in arithmetics:
        arithmetic.stand_ins = stand_ins.values
    return prove_bits(site, [(arithmetic, False) for arithmetic in arithmetics], seed)


def _input_without_proof(site: Site) -> NoProof | None:
    """Return why nothing can be proved: an input is neither a tensor nor a number. None otherwise."""
    for var in site.drawn:
        if not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)):
            return NoProof(f"%{var.name} is not a tensor")
    return None


def prove_bits(site: Site, arithmetics: Sequence[tuple[Bitwise, bool]], seed: int) -> Proof | NoProof:
    """Return the first proof bit for bit; each arithmetic comes with whether it uses ranges."""
    proof: Proof | NoProof = NoProof("")
    plain = [arithmetic for arithmetic, ranged in arithmetics if not ranged]
    if _differs_on_few_rows(site, plain[-1], seed):  # the most lenient one: the stricter ones differ too
        arithmetics = arithmetics[len(plain) :]
    for arithmetic, ranged in arithmetics:
        proof = proof or _bit_for_bit(site, arithmetic, ranged)
    return proof


def _arithmetics(site: Site, seed: int, finite: bool) -> Iterator[tuple[Bitwise, bool]]:
    """Yield (arithmetic of bits, whether it uses ranges), the strictest first, if it may help."""
    yield Bitwise(seed), False
    if any(op.op_type in ADDING for op in site.ops):
        yield Bitwise(seed, one_zero=True), False
    if finite:
        yield Bitwise(seed, one_zero=True, finite=True), False
    if any(op.op_type in CLIPPING for op in site.old_ops) and any(map(_range_of, site.drawn)):
        yield Bitwise(seed, one_zero=True), True


def _range_of(var: Var) -> tuple[float, float] | None:
    """Return the range of a float by the interval analysis; None where it has none."""
    low, high = stored_interval(var) if np_dtype(var).kind == "f" else (-math.inf, math.inf)
    return None if math.isinf(low) and math.isinf(high) else (float(low), float(high))


def _bit_for_bit(site: Site, arithmetic: Bitwise, ranged: bool) -> Proof | NoProof:
    """Prove bit for bit in one arithmetic.

    The bound counts the hashes on the way from an element to an input: a false match needs a collision in one.
    """
    elements = _count_agreeing(site, arithmetic, arithmetic.seed, ranged=ranged)
    if isinstance(elements, NoProof):
        return elements
    return Proof(Grade.BITS, collision_bound(len(site.ops)), elements, arithmetic.finite, ranged)


def _prove_over_field(site: Site, seed: int) -> Proof | NoProof:
    """Prove that both sides are the same function of real numbers."""
    bounds = address_bounds(site.drawn, site.old_ops, set(site.new_ops))

    def span(var: Var) -> tuple[float, float]:
        low, high = bounds[var] if var in bounds else stored_interval(var)
        least, most = (np.asarray(end, np.float64) for end in (low, high))  # of each element, perhaps
        return float(least.min(initial=math.inf)), float(most.max(initial=-math.inf))

    seed = seed_of(seed, site.ops)
    return at_points(lambda arithmetic: _count_agreeing(site, arithmetic, arithmetic.seed), seed, span)


def seed_of(seed: int, ops: Iterable[Operation]) -> int:
    """Return a seed that depends on the constants, so that none can be chosen to vanish at its points.

    Large constants are sampled at equal distances, which takes a millisecond.
    """
    digest = hashlib.blake2b(digest_size=16)
    for var in dict.fromkeys(v for op in ops for v in reads(op)):
        if (value := constant(var)) is not None and not isinstance(value, str):
            numbers = np.asarray(value).reshape(-1)
            digest.update(np.ascontiguousarray(numbers[:: 1 + numbers.size // MOST_READ]).tobytes())
    return field.hash_of(seed, digest.hexdigest()) % 2**62


def at_points(
    agree: Callable[[Algebraic], int | NoProof],
    seed: int,
    span: Callable[[Var], tuple[float, float]] = stored_interval,
) -> Proof | NoProof:
    """Evaluate at one point after another until the bound is small enough; every point must agree.

    At a point, two different arguments of a random function, or two different results, may be equal by chance,
    with probability degree / p in each lane, whose prime p is above `LEAST`. Each draw has its own primes, so
    that a constant that one of them divides is not 0 in the next draw.

    Args:
        agree: returns how many elements agree at a point, or why they do not. It may raise `Zero`.
        seed: the seed of the points.
        span: returns the range of an integer.
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
    """Return how many elements agree; or that one does not, or what the arithmetic cannot do.

    Raises:
        Zero: the point must be drawn again.
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
    """Return whether the site is large and a few of its rows show already that both sides differ."""
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
    """Return (old image, new image) for each pair; of one plane where all planes are treated alike."""
    generator = torch.Generator().manual_seed(seed + 1)
    shapes = {v: drawn_shape(v) for v in site.drawn}
    if treats_planes_alike(site):
        shapes = {v: (1, 1, *shape[2:]) for v, shape in shapes.items()}
    images: dict[Var, Image] = {
        v: field.random_image(arithmetic.primes, shapes[v], generator) for v in site.drawn
    }
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
    """Return a bound in the words of reports."""
    return f"2^{math.ceil(math.log2(bound))}" if bound > 0 else "0"


def reason_of(error: Exception) -> str:
    """Return where a proof ends: the first line of an interpreter error, without "failed"."""
    return str(error).splitlines()[0].replace(" failed: ", ": ", 1)


# -- stand-ins for large weights --------------------------------------------------------------------------

ELEMENTS = ("add", "sub", "mul")
"""Ops whose constants are weights if they are vectors. Tables and masks may be reordered on one side, so that
they are no stand-ins."""
READERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("weight", "bias"),
    "conv": ("weight", "bias"),
    "matmul": ("x", "y"),
    "layer_norm": ("gamma", "beta"),
    **dict.fromkeys(ELEMENTS, ("x", "y")),
}
"""Op type -> parameters that may be any numbers: the op computes with them, and decides nothing by them."""
MOST = 1 << 27
"""The most weights of one edit with stand-ins: 1.1 GB at the 64 bits of each that a proof computes with."""
AT_ONCE = 1 << 25
"""Above this many weights, a proof for any weights is tried only for the second edit of the same kind. A
choice: it pays where it replaces several checks by numbers."""


class StandIns:
    """The weights of an edit, numbered by their content: equal weights get the same variables."""

    def __init__(self, old: Sequence[Operation], new: Sequence[Operation], seed: int) -> None:
        self._seed = seed
        self.weights = _large_weights([*old, *new])
        self.size = sum(int(np.size(constant(v))) for v in self.weights)

    @cached_property
    def numbers(self) -> dict[Var, int]:
        """Weight -> the number of its content."""
        numbers: dict[Var, int] = {}
        seen: dict[Hashable, int] = {}
        digests: dict[Hashable, tuple[Array, Hashable | None]] = {}
        for var in self.weights:
            array = np.asarray(constant(var))
            place = array.__array_interface__["data"][0], array.dtype.str, array.shape, array.strides
            if place not in digests:  # the array is kept with it, so that nothing else can come to lie there
                digests[place] = array, _content_digest(array)
            content = digests[place][1]
            if content is not None:
                numbers[var] = seen.setdefault(content, len(seen))
        return numbers

    @cached_property
    def values(self) -> dict[Var, torch.Tensor]:
        """Weight -> random numbers that stand for it."""
        drawn: dict[int, torch.Tensor] = {}
        for var, number in self.numbers.items():
            if number not in drawn:
                generator = torch.Generator().manual_seed(self._seed + 7919 * (number + 1))
                size = int(np.size(constant(var)))
                drawn[number] = torch.rand(size, dtype=torch.float64, generator=generator)
        return {v: drawn[number].reshape(np.shape(constant(v))) for v, number in self.numbers.items()}


def _large_weights(ops: Sequence[Operation]) -> list[Var]:
    """Return the large float constants that are read as weights only."""
    plain_floats: dict[Var, bool] = {}
    for op in ops:
        free_operands = {op.inputs.get(name) for name in READERS.get(op.op_type, ())}
        if op.op_type in ELEMENTS:
            free_operands = {v for v in free_operands if v is not None and _is_vector(v)}
        computes = any(v.op is None or v.op.op_type != "const" for v in reads(op))
        for var in reads(op):
            plain_floats[var] = plain_floats.get(var, True) and computes and var in free_operands
    return [v for v, plain in plain_floats.items() if plain and _is_large(v)]


def _content_digest(array: Array) -> Hashable | None:
    """Return a digest of elements in order, whatever the shape; None if all are equal or one is not finite."""
    ordered = np.ascontiguousarray(array)
    if _is_constant(ordered) or not np.isfinite(ordered).all():
        return None
    content = ordered.dtype.str, array_digest(ordered)
    release_pages(ordered)
    return content


def _is_constant(array: Array) -> bool:
    """Return whether all elements are equal."""
    flat = array.reshape(-1)
    return bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all())


def _is_vector(var: Var) -> bool:
    value = constant(var)
    return value is not None and np.size(value) == max(np.shape(value), default=0)


def _is_large(var: Var) -> bool:
    if var.op is None or var.op.op_type != "const" or np_dtype(var).kind != "f":
        return False
    return int(np.size(constant(var))) > SMALL_CONSTANT
