"""Prove that both sides of an edit are the same computation: bit for bit, or as functions of real numbers.

A proof is a run of both sides in an arithmetic of its own (`interpret.arithmetic`): no numbers are drawn, each
element that both sides read from outside stands for any value. docs/proofs.md says why that is sound and what
it does not say.

In this order: the site of an edit; stand-ins for large weights; fewer rows and planes, where all are treated
alike; the proofs; and the values of whole models, which `lockstep` compares op by op. An `Image` holds for each
element its residues modulo several primes (lanes). The degree is that of the polynomial which made it, and the
name of an element is its image in the arithmetic of bits.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from anesurgery.checking.adversarial import SMALL_CONSTANT, address_bounds, weights
from anesurgery.checking.grades import Grade
from anesurgery.checking.lengths import drawn_shape, evaluator, length_of, symbols_of, with_rows
from anesurgery.errors import InterpretError
from anesurgery.facts.dependence import slice_back
from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.algebraic import Algebraic
from anesurgery.interpret.arithmetic.bitwise import Bitwise
from anesurgery.interpret.arithmetic.field import LANES, LEAST, Image, Zero
from anesurgery.interpret.arithmetic.precision import forget, narrows
from anesurgery.interpret.arithmetic.symbolic import LARGEST, UNLIKE, Symbolic
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Var,
    constant,
    is_compressed,
    is_constexpr,
    is_stored,
    is_weight,
    np_dtype,
    operands,
    producer,
    reads,
    static_shape,
    types,
)
from anesurgery.ops import CARRIERS, MOVING, POINTWISE, names
from anesurgery.semantics.intervals import stored_interval
from anesurgery.semantics.reading import ints, is_tensor
from anesurgery.semantics.rows import places_of, slices_read


@dataclass(frozen=True)
class Site:
    """One edit: what is replaced, the ops of both sides, and what they read from outside."""

    replaced: Sequence[tuple[Var, Var]]
    old_ops: Sequence[Operation]
    new_ops: Sequence[Operation]
    drawn: Sequence[Var]
    carried: Sequence[Var]
    """What the new side reads from inside the old side."""


def site_of(
    replaced: Sequence[tuple[Var, Var]], new_ops: Sequence[Operation], matched: Sequence[Operation]
) -> Site:
    """The site of an edit: see `checking.site.check_site`."""
    replaced, new_ops = _before_rounding(replaced, new_ops)
    new_ops = [*_decoding(new_ops), *new_ops]  # compressed weights are constants, and no numbers to be drawn
    inside = {v for op in new_ops for v in op.outputs}
    outside = dict.fromkeys(v for op in new_ops for v in reads(op) if v not in inside)
    outside |= dict.fromkeys(new for _, new in replaced if new not in inside)
    boundary = [v for v in outside if v.op is None or v.op.op_type != "const"]
    # Walk back from the old values to what both sides read. What the matched ops make is computed, though the
    # new side may read it too; the walk then ends at what those ops read.
    matched_values = {v for op in matched for v in op.outputs}
    stop = set(boundary) - matched_values
    if stop != set(boundary):
        edge = {v for op in matched for v in reads(op)} - matched_values
        stop = stop | edge if stop <= edge else stop
    old_ops = slice_back([old for old, _ in replaced] + [v for v in boundary if v in matched_values], stop)
    inner = {v for op in old_ops for v in op.outputs}
    inputs = dict.fromkeys([*boundary, *(v for op in old_ops for v in reads(op) if v not in inner)])
    # What the new side reads from inside the old side is computed, so it must not be drawn.
    drawn = [v for v in inputs if v not in inner and not (v.op is not None and v.op.op_type == "const")]
    return Site(replaced, old_ops, new_ops, drawn, [v for v in boundary if v in inner])


def _before_rounding(
    replaced: Sequence[tuple[Var, Var]], new_ops: Sequence[Operation]
) -> tuple[list[tuple[Var, Var]], list[Operation]]:
    """The pairs and the new ops without last casts to a type in which the old side computes: both round so."""
    read = {v for op in new_ops for v in reads(op)}
    pairs, last = [], set[Operation]()
    for old, new in replaced:
        op = producer(new, "cast")
        if op is not None and op in new_ops and new not in read and narrows(op) and _computed(old, new):
            last.add(op)
            new = op.x
        pairs.append((old, new))
    return pairs, [op for op in new_ops if op not in last]


def _computed(old: Var, new: Var) -> bool:
    """Was the old value computed in the type to which the new one is cast?"""
    return old.op is not None and old.op.op_type not in CARRIERS | MOVING and np_dtype(old) == np_dtype(new)


def _decoding(ops: Sequence[Operation]) -> list[Operation]:
    """The ops not among some that decode the weights which these read."""
    weights = [v for op in ops for v in reads(op) if is_compressed(v)]
    return [op for op in slice_back(weights, set()) if op.op_type != "const" and op not in set(ops)]


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
    forget(ordered)
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


ROWS = 2
"""Rows of an excerpt: one would be taken for an axis that broadcasts."""
SHAPED = names("slice_by_index slice_by_size slice_update")
"""Ops that hold the number of rows in a parameter; `lengths.evaluator` adapts reshapes."""

ROOM = 1 << 18
"""A value with more elements is cut: 1 MB in fp32, a choice."""

Axes = dict[Var, int]
"""Value -> the axis of its rows."""


def row_axes(site: Site) -> Axes | None:
    """The axis of the rows in each value that has them, for the longest axis that both sides go along."""
    return next(_row_axes(site), None)


def _row_axes(site: Site) -> Iterator[Axes]:
    """The same for each axis that both sides go along, the longest first."""
    values = [v for pair in site.replaced for v in pair]
    shapes = {static_shape(v) for v in values}
    shape = shapes.pop() if len(shapes) == 1 else None
    for axis in sorted(range(len(shape or ())), key=lambda a: -shape[a]):  # type: ignore[index]
        axes = dict.fromkeys(values, axis)
        if shape[axis] > ROWS and _spread([*site.old_ops, *site.new_ops], axes):  # type: ignore[index]
            yield axes


@contextmanager
def on_fewer_rows(site: Site, whole: Collection[Var]) -> Iterator[bool]:
    """Let the values of a large site have fewer rows, along axes at each place of which both sides do the same.

    Args:
        site: the edit.
        whole: what is drawn whole: no such axis is one of theirs, nor of a constant.

    Yields:
        Is anything cut?
    """
    with ExitStack() as cuts:
        cut = False
        for axes in _row_axes(site) if _largest(site) > ROOM and not symbols_of(site.drawn) else ():
            (value, axis), *_ = axes.items()
            there = drawn_shape(value)[axis]
            rows = max(ROWS, there * ROOM // _largest(site))
            if rows < there and not any(is_stored(v) or v in whole for v in axes):
                cuts.enter_context(with_rows(axes, rows))
                cut = True
        yield cut


def _largest(site: Site) -> int:
    """Elements of the largest value of a site that is no constant."""
    computed = (v for op in (*site.old_ops, *site.new_ops) if op.op_type != "const" for v in op.outputs)
    return max((math.prod(drawn_shape(v)) for v in (*site.drawn, *computed) if is_tensor(v)), default=0)


def _spread(ops: Sequence[Operation], axes: Axes) -> bool:
    """Follow the rows from results to what they are made of; does every op treat each row by itself?"""
    computed = [op for op in ops if op.op_type != "const"]
    for op in reversed(computed):
        rows = _rows(op, axes)
        if rows is None or any(axes.setdefault(v, at) != at for v, at in rows.items()):
            return False
    return all(axes.get(v) == _rows(op, axes).get(v) for op in computed for v in reads(op))  # type: ignore[union-attr]


def _rows(op: Operation, axes: Axes) -> Axes | None:
    """What an op reads row by row, which is nothing where its result has no rows; None: it mixes them."""
    wanted = [axes[v] for v in op.outputs if v in axes]
    if not wanted:
        return {}
    places = places_of(op) if len(op.outputs) == 1 and op.op_type not in SHAPED else None
    rows = None if places is None else slices_read(places, wanted[0])
    whole = rows is not None and (op.op_type in POINTWISE or not any(map(is_stored, rows)))
    return rows if whole else None


def constants_among(axes: Axes) -> Axes:
    """The constants that have rows."""
    return {v: at for v, at in axes.items() if producer(v, "const") is not None}


UNCOUNTED = POINTWISE | names("avg_pool l2_pool max_pool reduce_mean pad slice_by_index")
"""Ops with no parameter that says how many planes there are (a slice has masks in its place)."""


def alike(site: Site) -> bool:
    """Does each op of both sides work on each plane of [images, channels, spatial...] by itself, and alike?

    Every value has the same images and channels, and no constant differs between them.
    """
    values = [*site.drawn, *(v for pair in site.replaced for v in pair)]
    planes = {shape[:2] if (shape := static_shape(v)) is not None and len(shape) > 2 else None for v in values}
    computed = [op for op in (*site.old_ops, *site.new_ops) if op.op_type != "const"]
    if len(planes) != 1 or None in planes or site.carried:
        return False
    return all(_plane_by_plane(op, planes) for op in computed)


def _plane_by_plane(op: Operation, planes: set[tuple[int, ...] | None]) -> bool:
    """Does the op treat each plane alike, whatever their number?"""
    places = places_of(op) if op.op_type in UNCOUNTED and len(op.outputs) == 1 else None
    if not places or not _are(op.outputs, planes):
        return False
    if op.op_type == "slice_by_index" and any(ints(op, k)[:2] != [1, 1] for k in ("begin_mask", "end_mask")):
        return False
    return all(
        not {0, 1} & {*o.places} if is_stored(o.var) else o.places[:2] == (0, 1) and _are([o.var], planes)
        for o in places
    )


def _are(values: Iterable[Var], planes: set[tuple[int, ...] | None]) -> bool:
    """Do values that the model computes have these images and channels?"""
    return all(
        producer(v, "const") is None
        and (shape := static_shape(v)) is not None
        and len(shape) > 2
        and shape[:2] in planes
        for v in values
    )


WANTED = 2.0**-40
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
    if (reason := _no_tensors(site)) is not None:
        return reason
    size = weights([*site.old_ops, *site.new_ops])
    if size > MOST_WEIGHTS:
        return NoProof(f"{size} weights are too many")
    proof = prove_bits(site, list(_ways(site, seed, finite)), seed)
    if proof or size <= LARGEST:
        return proof or _algebraic(site, seed)
    return NoProof(f"not equal bit for bit, and {size} weights are too many for the field")


def prove_for_any_weights(site: Site, seed: int, stand_ins: StandIns, *, finite: bool) -> Proof | NoProof:
    """A proof bit for bit that rests on nothing but the ops, or why there is none."""
    if (reason := _no_tensors(site)) is not None:
        return reason
    ways = [arithmetic for arithmetic, ranged in _ways(site, seed, finite) if not ranged]
    for arithmetic in ways:
        arithmetic.stand_ins = stand_ins.values
    return prove_bits(site, [(arithmetic, False) for arithmetic in ways], seed)


def _no_tensors(site: Site) -> NoProof | None:
    """Why nothing is proved: a value that both sides read is no tensor and no number."""
    for var in site.drawn:
        if not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)):
            return NoProof(f"%{var.name} is not a tensor")
    return None


def prove_bits(site: Site, ways: Sequence[tuple[Bitwise, bool]], seed: int) -> Proof | NoProof:
    """The first proof bit for bit that an arithmetic gives; each comes with whether it knows ranges."""
    proof: Proof | NoProof = NoProof("")
    plain = [arithmetic for arithmetic, ranged in ways if not ranged]
    if _apart(site, plain[-1], seed):  # what the most lenient tells apart, the stricter ones do too
        ways = ways[len(plain) :]
    for arithmetic, ranged in ways:
        proof = proof or _bit_for_bit(site, arithmetic, ranged)
    return proof


def _ways(site: Site, seed: int, finite: bool) -> Iterator[tuple[Bitwise, bool]]:
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
    elements = _agree(site, arithmetic, arithmetic.seed, ranged=ranged)
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
    return at_points(lambda arithmetic: _agree(site, arithmetic, arithmetic.seed), seed, span)


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
        if bound <= WANTED:
            return Proof(Grade.PROVED, bound, agreed)
    return NoProof(f"the bound on the error is only {words(bound)} after {POINTS} points")


def _agree(site: Site, arithmetic: Symbolic, seed: int, *, ranged: bool = False) -> int | NoProof:
    """How many elements agree; else that one does not, or what the arithmetic does not know.

    Raises:
        Zero: the point has to be drawn again.
    """
    if _apart(site, arithmetic, seed, ranged=ranged):
        return APART
    try:
        pairs = _pairs(site, arithmetic, seed, ranged)
    except Zero:
        raise
    except InterpretError as error:
        return NoProof(reason_of(error))
    arithmetic.degree = max([arithmetic.degree, *(x.degree for pair in pairs for x in pair)])
    if not all(a.same(b) for a, b in pairs):
        return APART
    return sum(math.prod(map(length_of, new.shape or ())) for _, new in site.replaced)


def _apart(site: Site, arithmetic: Symbolic, seed: int, *, ranged: bool = False) -> bool:
    """Is the site large, and do a few rows of it show already that both sides differ?"""
    if sum(math.prod(drawn_shape(v)) for v in site.drawn) > LARGE and (axes := row_axes(site)) is not None:
        with suppress(InterpretError):
            few = arithmetic.fresh()
            few.cut = {v: (at, ROWS) for v, at in constants_among(axes).items()}
            with with_rows(axes, ROWS):
                pairs = _pairs(site, few, seed, ranged)
            return not all(a.same(b) for a, b in pairs)
    return False


def _pairs(site: Site, arithmetic: Symbolic, seed: int, ranged: bool = False) -> list[tuple[Image, Image]]:
    """The old and the new values; one plane of them, where all are alike."""
    generator = torch.Generator().manual_seed(seed + 1)
    shapes = {v: drawn_shape(v) for v in site.drawn}
    if alike(site):
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


def words(bound: float) -> str:
    """A bound as reports say it."""
    return f"2^{math.ceil(math.log2(bound))}" if bound > 0 else "0"


# Run a function op by op, and name each element of each value by how it is computed.
#
# Two functions share one table: an op of the second on the same operands as an op of the first is not computed
# again. A value is dropped after its last reader; one that has no counterpart yet keeps what it is made of.


LARGEST_VALUE = 1 << 27
"""Elements of a value or a constant of a whole model, at most: 1.1 GB as the 64 bits of each that numbering
computes with."""

_serials = itertools.count()


class Value:
    """A value of one program: its numbers on the sampled inputs, and the names of its elements."""

    __slots__ = ("__weakref__", "grade", "names", "numbers", "op", "operands", "reason", "serial", "var")

    def __init__(
        self,
        var: Var,
        numbers: Any,
        names: Image | torch.Tensor | None,
        *,
        op: Operation | None = None,
        operands: Sequence[Value] = (),
        reason: str = "",
    ) -> None:
        self.var, self.numbers, self.names, self.reason = var, numbers, names, reason
        self.op, self.operands = op, tuple(operands)
        """What it is made of, as long as no value of the other program is known to be the same."""
        self.serial = next(_serials)
        """The same for values whose names and layout are the same."""
        self.grade: Grade = min((v.grade for v in operands), default=Grade.BITS)
        """The weakest grade by which anything upstream was matched."""

    def forget(self) -> None:
        """Drop what it is made of: from here on, its elements are known by their names."""
        self.op, self.operands = None, ()


class Table:
    """Values of the first program by op, attributes, constants and operands."""

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[Hashable, Value] = weakref.WeakValueDictionary()
        self._contents: dict[Var, Hashable] = {}

    def key(self, op: Operation, values: Mapping[Var, Value]) -> Hashable | None:
        """Equal for ops that compute the same; None for an op with nested blocks, or that is no function."""
        if op.blocks or op.op_type in UNLIKE:
            return None
        operands = tuple((name, self._known(var, values)) for name, var in op.inputs.items() if var is not None)
        return op.op_type, str(op.opset_version), operands, tuple(str(v.sym_type) for v in op.outputs)

    def _known(self, var: Any, values: Mapping[Var, Value]) -> Hashable:
        if isinstance(var, (list, tuple)):
            return tuple(self._known(v, values) for v in var)
        if var in values:
            return values[var].serial
        return self._content(var)

    def _content(self, var: Var) -> Hashable:
        """A constant by what it holds."""
        if var not in self._contents:
            made_by = var.op
            if made_by is not None and made_by.op_type != "const":
                rest = tuple((k, self._content(v)) for k, v in made_by.inputs.items() if isinstance(v, Var))
                self._contents[var] = (made_by.op_type, rest)
            else:
                self._contents[var] = _digest(constant(var))
        return self._contents[var]

    def enter(self, key: Hashable | None, results: Sequence[Value]) -> None:
        """Remember what an op of the first program made."""
        if key is not None:
            self._made.update({(key, i): value for i, value in enumerate(results)})

    def find(self, key: Hashable | None, count: int) -> list[Value] | None:
        """What the same op made in the first program, if that is still alive."""
        results = [self._made.get((key, i)) for i in range(count)] if key is not None else []
        return [v for v in results if v is not None] if results and None not in results else None


def _digest(value: Any) -> Hashable:
    if isinstance(value, (str, bool)) or not hasattr(value, "dtype"):
        return repr(value)
    array = np.ascontiguousarray(value)
    return array.dtype.str, array.shape, hashlib.blake2b(array.data, digest_size=16).digest()


class Side:
    """One function, run as far as it is asked for."""

    def __init__(
        self,
        function: Function,
        inputs: Mapping[Var, Value],
        kept: set[Var],
        names: Bitwise,
        table: Table,
        *,
        first: bool,
    ) -> None:
        self.ops = [op for op in function.operations if not is_weight(op)]
        self.place = {v: i for i, op in enumerate(self.ops) for v in op.outputs}
        self.values: dict[Var, Value] = dict(inputs)
        self.states = {v: value for v, value in inputs.items() if types.is_state(v.sym_type)}
        self._names, self._table, self._first = names, table, first
        self._kept, self._outputs = kept, set(function.outputs)
        self._readers = Counter(v for op in self.ops for v in set(reads(op)))
        self._at = 0

    @property
    def next(self) -> Operation | None:
        """The op that runs next; None at the end."""
        return self.ops[self._at] if self._at < len(self.ops) else None

    def step(self) -> list[Value]:
        """Run the next op."""
        op = self.ops[self._at]
        self._at += 1
        results = self._make(op)
        self.values |= zip(op.outputs, results, strict=True)
        for var in set(reads(op)):
            self._readers[var] -= 1
        for var in {*reads(op), *op.outputs}:
            self._drop(var)
        return results

    def reach(self, var: Var) -> Value | None:
        """Run until a value is there; None if it is there no more."""
        while var not in self.values and self.place.get(var, -1) >= self._at:
            self.step()
        return self.values.get(var)

    def there(self, var: Var) -> Value:
        """An output, which may be a constant."""
        return self.values[var] if var in self.values else self.constant(var)

    def release(self, var: Var) -> None:
        """Nobody asks for this value any more."""
        self._kept.discard(var)
        self._drop(var)

    def constant(self, var: Var) -> Value:
        """A constant as a value."""
        numbers = Evaluator(_constants([var]), [var])({})[0]
        return Value(var, numbers, numbers)

    def _drop(self, var: Var) -> None:
        wanted = var in self._kept or var in self._outputs or var in self.states
        if self._readers[var] <= 0 and not wanted:
            self.values.pop(var, None)

    def _make(self, op: Operation) -> list[Value]:
        if op.op_type in ("read_state", "coreml_update_state"):
            return [self._of_state(op)]
        key = self._table.key(op, self.values)
        remembered = None if self._first else self._table.find(key, len(op.outputs))
        used = [self.values[v] for v in dict.fromkeys(reads(op)) if v in self.values]
        if remembered is not None:
            results = [_same(var, value, used) for var, value in zip(op.outputs, remembered, strict=True)]
            for value in remembered:
                value.forget()
            return results
        numbers = self._evaluate(op, {v.var: v.numbers for v in used}, "fp32")
        results = [Value(v, n, None, op=op, operands=used) for v, n in zip(op.outputs, numbers, strict=True)]
        self._name(op, used, results)
        if self._first:
            self._table.enter(key, results)
        return results

    def _name(self, op: Operation, used: Sequence[Value], results: Sequence[Value]) -> None:
        unnamed = next((v for v in used if v.names is None), None)
        if unnamed is not None:
            for value in results:
                value.reason = unnamed.reason
            return
        try:
            named = self._evaluate(op, {v.var: v.names for v in used}, self._names)
        except InterpretError as error:
            for value in results:
                value.reason = reason_of(error)
            return
        for value, own in zip(results, named, strict=True):
            value.names = own

    def _of_state(self, op: Operation) -> Value:
        """Reading a state gives what was written to it last."""
        state = op.inputs["input" if op.op_type == "read_state" else "state"]
        if op.op_type != "read_state":
            var = op.inputs["value"]
            self.states[state] = self.values[var] if var in self.values else self.constant(var)
        return _same(op.outputs[0], self.states[state], [self.states[state]])

    def _evaluate(self, op: Operation, bound: Mapping[Var, Any], arithmetic: Any) -> list[Any]:
        ops = [*constants_of_ops([op]), op]
        return Evaluator(ops, op.outputs, arithmetic)(bound)


def _same(var: Var, value: Value, used: Sequence[Value]) -> Value:
    """Another var that holds the same elements in the same layout."""
    twin = Value(var, value.numbers, value.names, reason=value.reason)
    twin.serial = value.serial
    twin.grade = min((v.grade for v in used), default=Grade.BITS)
    return twin


def reason_of(error: Exception) -> str:
    """Where a proof ends, by the first line of an error of the interpreter; the model itself did not fail."""
    return str(error).splitlines()[0].replace(" failed: ", ": ", 1)


def constants_of_ops(ops: Sequence[Operation]) -> list[Operation]:
    """The compressed constants that some ops read."""
    return _constants([v for op in ops for v in reads(op)])


def _constants(vars_: Sequence[Var]) -> list[Operation]:
    """The compressed constants among some values, with what they are made of, in an order in which they run."""
    decoders: dict[Operation, None] = {}
    for var in vars_:
        if var.op is not None and is_constexpr(var.op):
            decoders |= dict.fromkeys(_constants([v for _, v in operands(var.op)]))
            decoders[var.op] = None
    return list(decoders)
