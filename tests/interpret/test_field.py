"""Names and residues of elements: one is found from the other, and negatives, sums and functions agree."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.field import PRIMES, Image
from anesurgery.interpret.table import Unsupported

SHAPES = [(), (4,), (2, 3, 5, 7), (40_000,), (3, 2, 20_000)]
"""Some are longer than a block that stays in the cache."""


def residues(shape: tuple[int, ...]) -> Image:
    """Random ones, among them the smallest and the largest in every lane."""
    lanes = [v.clone() for v in field.random_image(PRIMES, shape, torch.Generator().manual_seed(1)).lanes]
    for i, (lane, prime) in enumerate(zip(lanes, PRIMES, strict=True)):
        lane.view(-1)[i : i + 2] = torch.tensor([0, prime - 1])[: lane.view(-1)[i : i + 2].numel()]
    return Image(lanes, PRIMES)


def named(x: Image) -> Image:
    return Image.of(field.packed(x), PRIMES)


@pytest.mark.parametrize("shape", SHAPES)
def test_residues_are_found_from_names(shape: tuple[int, ...]) -> None:
    x = residues(shape)
    assert all(torch.equal(a, b) for a, b in zip(named(x).lanes, x.lanes, strict=True))
    assert bool((field.packed(x) < 1 << 62).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_negative_of_a_name_has_the_negatives_of_its_residues(shape: tuple[int, ...]) -> None:
    x = residues(shape)
    wanted = [-v % p for v, p in zip(x.lanes, PRIMES, strict=True)]
    for made in (field.negated(named(x)), field.negated(x)):
        assert all(torch.equal(a, b) for a, b in zip(made.lanes, wanted, strict=True))
    assert field.negated(field.negated(named(x))).same(x)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sign_is_taken_from_names_as_from_residues(shape: tuple[int, ...]) -> None:
    x = residues(shape)
    (a, s), (b, t) = field.signed(x), field.signed(named(x))
    assert a.same(b)
    assert torch.equal(s, t)
    signs = x.lanes[0] != 0  # the first residue tells the sign
    both = field.packed(field.signed(field.negated(named(x)))[0]), field.packed(a)
    assert torch.equal(both[0][signs], both[1][signs])


@pytest.mark.parametrize("axes", [[0], [-1], [0, 2], [1, 2, 3]])
def test_weighted_sums(axes: list[int]) -> None:
    x = residues((2, 3, 5, 7))
    chosen = sorted(a % 4 for a in axes)
    shape = [n if a in chosen else 1 for a, n in enumerate(x.shape)]
    count = torch.Size(shape).numel()
    weights = field.place_factors(PRIMES, count, 3)
    wanted = [
        (v * w.reshape(shape) % p).sum(axes, keepdim=True) % p
        for v, w, p in zip(x.lanes, weights.lanes, PRIMES, strict=True)
    ]
    for made in (field.weighted(x, weights, axes), field.weighted(named(x), weights, axes)):
        assert all(torch.equal(a, b) for a, b in zip(made.lanes, wanted, strict=True))


def test_weighted_sums_do_not_wrap() -> None:
    """The wrong version: sums in int64 of more products than it holds, which are no sums modulo the primes."""
    count = 1 << 23
    longer = Image([torch.full((1,), p - 1).expand(count + 1) for p in PRIMES], PRIMES)
    x = longer.map(lambda v: v[:count])
    assert [int(v) for v in field.weighted(x, x, [0]).lanes] == [count % p for p in PRIMES]
    with pytest.raises(Unsupported, match=f"a sum of {count + 1} products"):
        field.weighted(longer, longer, [0])


def test_arguments_that_broadcast_are_mixed_once_and_give_the_same() -> None:
    row, x = torch.arange(3).reshape(3, 1), torch.arange(15).reshape(3, 5)
    for arguments in ((row, x), (row, row, x), (x, row), (torch.tensor(4), row, x)):
        spread = [a.expand(3, 5) for a in arguments]
        assert field.opaque(PRIMES, 8, *arguments).same(field.opaque(PRIMES, 8, *spread))
    assert not field.opaque(PRIMES, 8, row, x).same(field.opaque(PRIMES, 8, row + 1, x))
    assert not field.opaque(PRIMES, 8, row, x).same(field.opaque(PRIMES, 9, row, x))


@pytest.mark.parametrize("first", [False, True])
def test_tensors_are_moved_together_where_some_are_names(first: bool) -> None:
    x, y = residues((2, 3)), field.negated(residues((2, 3)))
    mixed = [named(x), y] if first else [x, named(y)]
    assert field.joined(mixed, torch.cat).same(field.joined([x, y], torch.cat))


def test_what_is_computed_of_residues_is_the_same_for_names() -> None:
    x = residues((3, 50))
    made = named(x).of_residues(lambda v: v.cumsum(1))
    assert made.same(x.of_residues(lambda v: v.cumsum(1)))
    assert not made.same(named(x).map(lambda v: v.cumsum(1))), "names do not add up"


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32])
def test_constants_have_exact_residues(dtype: Any) -> None:
    ends: Any = np.iinfo(dtype) if dtype is np.int32 else np.finfo(dtype)
    edges = () if dtype is np.int32 else (ends.tiny, 3 * ends.smallest_subnormal, 0.1, 1 / 3, -0.0)
    numbers = np.array([0, 1, -1, 7, ends.max, ends.min, *edges], dtype)
    for prime, lane in zip(PRIMES, field.exact(PRIMES, numbers), strict=True):
        for number, residue in zip(numbers.tolist(), lane.tolist(), strict=True):
            over, under = number.as_integer_ratio()
            assert over * pow(under, -1, prime) % prime == residue


def test_primes_differ_by_lane_and_seed() -> None:
    several = [field.draw_primes(seed) for seed in range(20)]
    assert several == [field.draw_primes(seed) for seed in range(20)]
    assert all(len(set(primes)) == field.LANES for primes in several)
    assert len(set(several)) == 20
    assert all(field.LEAST < p < 1 << 20 and pow(3, p - 1, p) == 1 for primes in several for p in primes)


@pytest.mark.parametrize(("count", "zeros", "drawn_again"), [(1, 1, True), (1000, 1, True), (9000, 2, False)])
def test_few_zeros_among_many_constants_are_chance(count: int, zeros: int, drawn_again: bool) -> None:
    numbers = np.ones(count, np.float32)
    numbers[:zeros] = PRIMES[1]
    with pytest.raises(field.Zero) if drawn_again else nullcontext():
        assert int((field.exact(PRIMES, numbers)[1] == 0).sum()) == zeros
