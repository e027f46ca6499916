"""Names and residues of elements: one is found from the other, and negatives, sums and functions agree."""

from __future__ import annotations

import pytest
import torch

from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.field import Image

SHAPES = [(), (4,), (2, 3, 5, 7), (40_000,), (3, 2, 20_000)]
"""Some are longer than a block that stays in the cache."""


def residues(shape: tuple[int, ...]) -> Image:
    """Random ones, among them the smallest and the largest in every lane."""
    lanes = [v.clone() for v in field.random(shape, torch.Generator().manual_seed(1)).lanes]
    for i, lane in enumerate(lanes):
        lane.view(-1)[i : i + 2] = torch.tensor([0, field.P - 1])[: lane.view(-1)[i : i + 2].numel()]
    return Image(lanes)


def named(x: Image) -> Image:
    return Image.of(field.packed(x))


@pytest.mark.parametrize("shape", SHAPES)
def test_residues_are_found_from_names(shape: tuple[int, ...]) -> None:
    x = residues(shape)
    assert all(torch.equal(a, b) for a, b in zip(named(x).lanes, x.lanes, strict=True))
    assert bool((field.packed(x) < 1 << 62).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_negative_of_a_name_has_the_negatives_of_its_residues(shape: tuple[int, ...]) -> None:
    x = residues(shape)
    wanted = [(field.P - v) % field.P for v in x.lanes]
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
    weights = field.positions(count, 3)
    wanted = [
        (v * w.reshape(shape) % field.P).sum(axes, keepdim=True) % field.P
        for v, w in zip(x.lanes, weights.lanes, strict=True)
    ]
    for made in (field.weighted(x, weights, axes), field.weighted(named(x), weights, axes)):
        assert all(torch.equal(a, b) for a, b in zip(made.lanes, wanted, strict=True))


def test_arguments_that_broadcast_are_mixed_once_and_give_the_same() -> None:
    row, x = torch.arange(3).reshape(3, 1), torch.arange(15).reshape(3, 5)
    for arguments in ((row, x), (row, row, x), (x, row), (torch.tensor(4), row, x)):
        spread = [a.expand(3, 5) for a in arguments]
        assert field.opaque(8, *arguments).same(field.opaque(8, *spread))
    assert not field.opaque(8, row, x).same(field.opaque(8, row + 1, x))
    assert not field.opaque(8, row, x).same(field.opaque(9, row, x))


@pytest.mark.parametrize("first", [False, True])
def test_tensors_are_moved_together_where_some_are_names(first: bool) -> None:
    x, y = residues((2, 3)), field.negated(residues((2, 3)))
    mixed = [named(x), y] if first else [x, named(y)]
    assert field.together(mixed, torch.cat).same(field.together([x, y], torch.cat))


def test_what_is_computed_of_residues_is_the_same_for_names() -> None:
    x = residues((3, 50))
    made = named(x).of_residues(lambda v: v.cumsum(1))
    assert made.same(x.of_residues(lambda v: v.cumsum(1)))
    assert not made.same(named(x).map(lambda v: v.cumsum(1))), "names do not add up"
