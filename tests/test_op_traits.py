"""The table of op types: every name exists, and every trait is true on the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil.passes.defs.optimize_repeat_ops import _TransposeOptimization
from movers import MOVES, X

from anesurgery import ops
from anesurgery.interpret import TABLE
from anesurgery.mil import Array, ct, op_parameters, op_types
from anesurgery.placement.rules.lost_in_conversion import TRANSPOSABLE

TRAITS = {name: value for name, value in vars(ops).items() if isinstance(value, frozenset)}

HALF = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64))
NUMBERS = torch.sort(HALF[torch.isfinite(HALF)]).values
"""All finite numbers of fp16, in order."""
LARGEST = float(NUMBERS[-1])

NEEDED: dict[str, tuple[dict[str, Any], ...]] = {
    "cast": ({"dtype": "fp32"}, {"dtype": "int32"}, {"dtype": "bool"}),
    "clip": ({"alpha": -1.0, "beta": 2.0}, {"alpha": 0.5, "beta": 0.75}),
    "clamped_relu": ({"alpha": -0.5, "beta": 1.0}, {"alpha": 0.5, "beta": -1.0}),
    "elu": ({}, {"alpha": -2.0}),
    "gelu": ({}, {"mode": "TANH_APPROXIMATION"}, {"mode": "SIGMOID_APPROXIMATION"}),
    "leaky_relu": ({}, {"alpha": -2.0}),
    "linear_activation": ({"alpha": 1.0}, {"alpha": -0.5, "beta": 3.0}),
    "scaled_tanh": ({}, {"alpha": -2.0, "beta": 3.0}),
    "sigmoid_hard": ({}, {"alpha": -1.0, "beta": 3.0}),
    "threshold": ({"alpha": -1.0}, {"alpha": 1.0}),
    "thresholded_relu": ({}, {"alpha": -1.0}),
    **{name: ({"epsilon": 0.0}, {"epsilon": 1e-3}) for name in ("inverse", "log", "rsqrt")},
}
"""Parameters under which a trait of a unary op must hold, where there is more than `x`."""


def unary(op_type: str, x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    made: torch.Tensor = TABLE[op_type].function(x=x > 0 if op_type == "logical_not" else x, **given)
    return made.double()


def variants(op_type: str) -> tuple[dict[str, Any], ...]:
    return NEEDED.get(op_type, ({},))


def rises(op_type: str) -> bool:
    """Does a unary op never fall on any two neighbours of fp16 at which it is a number?"""
    for given in variants(op_type):
        found = unary(op_type, NUMBERS, given)
        kept = found[~torch.isnan(found)]
        if bool((kept[1:] < kept[:-1]).any()):
            return False
    return True


def keeps_zero(op_type: str) -> bool:
    return all(bool((unary(op_type, torch.zeros(1), given) == 0).all()) for given in variants(op_type))


def overflows(op_type: str) -> bool:
    """Does a unary op leave fp16 for a number of fp16, under its first parameters?"""
    return not bool((unary(op_type, NUMBERS, variants(op_type)[0]).abs() <= LARGEST).all())


def has_a_pole(op_type: str) -> bool:
    return any(bool(torch.isinf(unary(op_type, torch.zeros(1), given)).any()) for given in variants(op_type))


@pytest.mark.parametrize("name", sorted(TRAITS))
def test_every_op_type_exists(name: str) -> None:
    assert TRAITS[name]
    assert not TRAITS[name] - op_types()


def test_an_op_type_that_does_not_exist_would_be_found() -> None:
    assert ops.names("write_state acosh") - op_types() == {"write_state", "acosh"}


@pytest.mark.parametrize("op_type", sorted(ops.UNARY))
def test_unary_ops_work_on_each_element_by_itself(op_type: str) -> None:
    x = torch.linspace(0.1, 0.9, 12).reshape(3, 4)
    for given in variants(op_type):
        whole = unary(op_type, x, given)
        single = torch.stack([unary(op_type, v, given) for v in x.reshape(-1)]).reshape(3, 4)
        torch.testing.assert_close(whole, single)


@pytest.mark.parametrize("op_type", sorted(ops.BROADCASTING))
def test_operands_broadcast_element_by_element(op_type: str) -> None:
    names = ("cond", "a", "b") if op_type == "select" else ("x", "y")
    assert set(names) <= op_parameters(op_type)
    shapes = ((3, 1), (4,), (3, 4))
    values = [torch.rand(s, generator=torch.Generator().manual_seed(i)) + 0.5 for i, s in enumerate(shapes)]
    values = [
        v > 1 if op_type in ops.LOGICAL or n == "cond" else v for n, v in zip(names, values, strict=False)
    ]
    found = TABLE[op_type].function(**dict(zip(names, values, strict=True)))
    assert found.shape == (3, 4)
    assert (found.dtype == torch.bool) == (op_type in ops.COMPARISONS | ops.LOGICAL)
    at = [v.expand(3, 4)[2, 1] for v in values]
    assert torch.equal(found[2, 1], TABLE[op_type].function(**dict(zip(names, at, strict=True))))


def test_the_ops_that_rise() -> None:
    free = {name for name in ops.UNARY if name != "logical_not" and rises(name)}
    assert free >= ops.MONOTONE
    assert not free - ops.MONOTONE - {"cast", "threshold"}  # an integer may wrap; no one asks about the other
    assert not rises("gelu")
    assert not rises("sigmoid_hard")  # with a negative slope


def test_the_ops_that_keep_zero() -> None:
    assert {name for name in ops.UNARY if keeps_zero(name)} == ops.ZERO_PRESERVING
    assert not keeps_zero("clamped_relu")  # with a negative ceiling


def test_the_ops_that_overflow_and_those_with_a_pole() -> None:
    plain = ops.UNARY - {"logical_not"}
    assert {name for name in plain if overflows(name)} == ops.OVERFLOWING
    assert {name for name in plain if has_a_pole(name)} == ops.SINGULAR


@pytest.mark.parametrize("op_type", sorted(ops.MOVING | ops.CARRIERS | ops.PADDING | ops.JOINING))
def test_ops_that_move_data(op_type: str, one_op: Callable[..., list[Array]]) -> None:
    given = MOVES[op_type]
    opset = ct.target.iOS15 if op_type == "crop" else ct.target.iOS18
    made = np.concatenate([v.reshape(-1) for v in one_op(op_type, opset, **given)])
    held = np.concatenate([np.reshape(v, -1) for v in given.get("values", [given.get("x")])])
    if op_type in ops.REARRANGING | ops.CARRIERS | ops.JOINING:
        assert sorted(made) == sorted(held)
    elif op_type in ops.MOVING:
        assert set(made) <= set(held)
    else:
        assert set(held) <= set(made)
        assert len(set(made) - set(held)) == 1  # what it is filled up with
    if op_type in ops.VIEWS:
        assert list(made) == list(held)


def test_no_op_that_computes_passes_for_one_that_moves(one_op: Callable[..., list[Array]]) -> None:
    (made,) = one_op("square", x=X)
    assert not set(made.reshape(-1)) <= set(X.reshape(-1))


def test_the_interpreter_knows_the_same_ops_that_move() -> None:
    assert {name for name, meaning in TABLE.items() if meaning.moves} == ops.MOVING | ops.PADDING


@pytest.mark.parametrize("op_type", sorted(ops.REDUCTIONS))
def test_reductions_leave_one_number_for_each_group(op_type: str, one_op: Callable[..., list[Array]]) -> None:
    (made,) = one_op(op_type, x=X, axes=[1, 3], keep_dims=True)
    assert made.shape == (1, 1, 4, 1)


@pytest.mark.parametrize("op_type", ["argsort", "non_zero", "reduce_argmax", "reduce_argmin", "shape"])
def test_positions_are_never_negative(op_type: str, one_op: Callable[..., list[Array]]) -> None:
    more = {} if op_type in ("shape", "non_zero") else {"axis": 1}
    made = one_op(op_type, x=-X, **more)[0]
    assert made.dtype.kind in "iu"
    assert (made >= 0).all()


def test_every_op_on_lists_is_listed() -> None:
    assert {name for name in op_types() if "list" in name.split("_")} == ops.LISTS


def test_every_random_op_is_listed() -> None:
    assert {name for name in op_types() if name.startswith("random_")} == ops.RANDOM


@pytest.mark.parametrize("op_type", sorted(ops.CONTROL))
def test_ops_of_control_have_blocks(op_type: str) -> None:
    assert any(name.startswith("_") for name in op_parameters(op_type))  # the functions that make the blocks
    assert op_type not in TABLE


@pytest.mark.parametrize("op_type", sorted(ops.STATEFUL))
def test_stateful_ops_take_a_state(op_type: str) -> None:
    assert op_parameters(op_type) & {"state", "input"}


@pytest.mark.parametrize("op_type", sorted(ops.LOOKUPS))
def test_lookups_take_indices(op_type: str) -> None:
    assert {"x", "indices"} <= op_parameters(op_type)


def test_norms_are_guarded_against_zero() -> None:
    assert all(op_parameters(name) & {"epsilon", "k"} for name in ops.NORMS)


def test_transpositions_move_past_the_ops_that_coremltools_says() -> None:
    assert set(_TransposeOptimization._UNARY_LIKE_OP_TYPES) == TRANSPOSABLE
