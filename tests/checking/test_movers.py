"""Both provers understand every op that only moves data, lists and states; a wrong move is caught."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from both_sides import checked, side_by_side
from movers import MOVES, X

from anesurgery import ops
from anesurgery.checking.grades import Grade, SiteCheck
from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.algebraic import Algebraic
from anesurgery.mil import Var, ct, mb, types

CASES = {**MOVES, "cast": {"x": X, "dtype": "fp32"}}
"""A cast to an integer is no move."""


def moved(op_type: str, x: Var) -> Any:
    """The op on a value in the place of its floats."""
    given: dict[str, Any] = {}
    for name, value in CASES[op_type].items():
        if isinstance(value, list) and isinstance(value[0], np.ndarray):
            given[name] = [x, mb.reverse(x=x, axes=[1])]
        elif isinstance(value, tuple):
            given[name] = (x,)
        else:
            given[name] = x if name == "x" else value
    return getattr(mb, op_type)(**given)


def each(function: Any, made: Any) -> Any:
    return [function(v) for v in made] if isinstance(made, (list, tuple)) else function(made)


def of_each(x: Var) -> Var:
    """A function of each element."""
    made: Var = mb.erf(x=x)
    return made


def shape_of(op_type: str) -> Any:
    given = CASES[op_type]
    return (types.fp32, np.shape(given["x"] if "x" in given else given["values"][0]))


def opset_of(op_type: str) -> Any:
    return ct.target.iOS15 if op_type == "crop" else ct.target.iOS18


MOVERS = sorted(ops.MOVING | ops.CARRIERS | ops.PADDING | ops.JOINING)
FILLED = {"pad", "space_to_batch"}
"""Ops that fill up with a number that the function does not keep."""


@pytest.mark.parametrize("op_type", [name for name in MOVERS if name not in FILLED])
def test_a_move_before_and_after_a_function_is_the_same_bit_for_bit(op_type: str) -> None:
    check = checked(
        lambda x: moved(op_type, of_each(x)),
        lambda x: each(of_each, moved(op_type, x)),
        shape_of(op_type),
        opset=opset_of(op_type),
    )
    assert isinstance(check, SiteCheck), check
    assert check.grade is Grade.BITS, check


@pytest.mark.parametrize("op_type", MOVERS)
def test_the_field_moves_alike(op_type: str) -> None:
    """What the field gives is the move of random points, as the interpreter moves their numbers."""
    program, olds, _, _ = side_by_side(
        lambda x: moved(op_type, x), lambda x: x, shape_of(op_type), opset=opset_of(op_type)
    )
    (x,) = program.functions["main"].inputs.values()
    made_by = [op for op in program.functions["main"].operations if op.op_type != "const"]
    primes = Algebraic(0).primes
    point = field.random_image(primes, x.shape, torch.Generator().manual_seed(0))
    images = Evaluator(made_by, olds, Algebraic(0))({x: point})  # type: ignore[dict-item]
    small = Evaluator(made_by, olds)({x: torch.arange(point.numel()).reshape(tuple(x.shape)).float()})
    places = [torch.arange(point.numel()).reshape(tuple(x.shape))] * field.LANES
    exact = Evaluator(made_by, olds, Algebraic(0))({x: field.Image(places, primes)})  # type: ignore[dict-item]
    apart = Evaluator(made_by, olds, Algebraic(0))({x: field.Image(point.lanes, primes)})  # type: ignore[dict-item]
    for image, other in zip(images, apart, strict=True):
        assert isinstance(image, field.Image)
        assert isinstance(other, field.Image)
        assert image.same(other), "names are moved as residues are"
    for image, numbers, again in zip(images, small, exact, strict=True):
        assert isinstance(image, field.Image)
        assert image.shape == numbers.shape
        assert isinstance(again, field.Image)
        assert torch.equal(again.lanes[0], numbers.long() % primes[0])


@pytest.mark.one_of(5)
@pytest.mark.parametrize("op_type", MOVERS)
def test_another_move_is_caught(op_type: str) -> None:
    check = checked(
        lambda x: moved(op_type, x),
        lambda x: moved(op_type, mb.reverse(x=x, axes=[2])),
        shape_of(op_type),
        opset=opset_of(op_type),
    )
    assert isinstance(check, SiteCheck), check
    assert check.max_abs > 0
    assert check.counterexample
