"""Layers that work element by element, with broadcasting, against numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from one_layer import assert_close, floats, network, run

from anesurgery.errors import LoadError
from anesurgery.mil import Array, quiet_host
from anesurgery.neuralnetwork.importing import import_network

with quiet_host():
    pass

PAIRS = [((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (3, 1)), ((1,), (2, 3)), ((2, 1, 4), (3, 1))]
BINARY: dict[str, tuple[str, Callable[[Array, Array], Array]]] = {
    "add": ("add_add_broadcastable", np.add),
    "multiply": ("add_multiply_broadcastable", np.multiply),
    "subtract": ("add_subtract_broadcastable", np.subtract),
    "divide": ("add_divide_broadcastable", np.divide),
    "max": ("add_max_broadcastable", np.maximum),
    "min": ("add_min_broadcastable", np.minimum),
    "floor_div": ("add_floor_div_broadcastable", np.floor_divide),
    "mod": ("add_mod_broadcastable", np.fmod),
    "pow": ("add_pow_broadcastable", lambda x, y: np.power(np.abs(x), y)),
}


@pytest.mark.parametrize("shapes", PAIRS)
@pytest.mark.parametrize("name", BINARY)
def test_arithmetic_broadcasts(name: str, shapes: Any) -> None:
    method, reference = BINARY[name]
    a, b = (floats(*s, seed=i) for i, s in enumerate(shapes))
    if name == "pow":
        a = np.abs(a)
    assert_close(run(lambda n: getattr(n, method)("l", ["x", "z"], "y"), a, b), reference(a, b))


@pytest.mark.parametrize("name", BINARY)
def test_arithmetic_of_three_is_refused(name: str) -> None:
    method, _ = BINARY[name]
    spec = network(lambda n: getattr(n, method)("l", ["x", "z", "w"], "y"), *[floats(3)] * 3)
    with pytest.raises(LoadError, match=r"layer 'l' \(\w+\): has 3 inputs, takes 2"):
        import_network(spec)


COMPARISONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "greater": (lambda n, i, a: n.add_greater_than("l", i, "y", alpha=a), np.greater),
    "greater_equal": (
        lambda n, i, a: n.add_greater_than("l", i, "y", use_greater_than_equal=True, alpha=a),
        np.greater_equal,
    ),
    "less": (lambda n, i, a: n.add_less_than("l", i, "y", alpha=a), np.less),
    "less_equal": (
        lambda n, i, a: n.add_less_than("l", i, "y", use_less_than_equal=True, alpha=a),
        np.less_equal,
    ),
    "equal": (lambda n, i, a: n.add_equal("l", i, "y", alpha=a), np.equal),
    "not_equal": (lambda n, i, a: n.add_not_equal("l", i, "y", alpha=a), np.not_equal),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_give_ones_and_zeros(name: str) -> None:
    fill, reference = COMPARISONS[name]
    a, b = np.round(floats(2, 3, 4)), np.round(floats(3, 4, seed=1))
    assert_close(run(lambda n: fill(n, ["x", "z"], 0), a, b), reference(a, b).astype(np.float32))
    assert_close(run(lambda n: fill(n, ["x"], 1), a), reference(a, 1).astype(np.float32))


@pytest.mark.parametrize("mode", ["AND", "OR", "XOR"])
def test_logic_takes_all_but_zero_for_true(mode: str) -> None:
    a, b = np.round(floats(2, 3, 4)), np.round(floats(3, 1, seed=1))
    reference = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}[mode]
    found = run(lambda n: n.add_logical("l", ["x", "z"], "y", mode), a, b)
    assert_close(found, reference(a, b).astype(np.float32))


def test_not() -> None:
    a = np.round(floats(2, 3))
    found = run(lambda n: n.add_logical("l", ["x"], "y", "NOT"), a)
    assert_close(found, np.logical_not(a).astype(np.float32))


WIDE, UNIT, ABOVE = np.linspace(-5, 5, 41), np.linspace(-0.99, 0.99, 41), np.geomspace(1, 1e6, 41)
SMALL = np.concatenate([-np.geomspace(1e-6, 1e6, 41), np.geomspace(1e-6, 1e6, 41)])
UNARY: dict[str, tuple[Callable[..., Any], Array]] = {
    "ceil": (np.ceil, WIDE),
    "floor": (np.floor, WIDE),
    "round": (np.round, WIDE),
    "sign": (np.sign, WIDE),
    "exp2": (np.exp2, WIDE),
    "sin": (np.sin, WIDE),
    "cos": (np.cos, WIDE),
    "tan": (np.tan, UNIT),
    "asin": (np.arcsin, UNIT),
    "acos": (np.arccos, UNIT),
    "atan": (np.arctan, WIDE),
    "sinh": (np.sinh, WIDE),
    "cosh": (np.cosh, WIDE),
    "tanh": (np.tanh, WIDE),
    "asinh": (np.arcsinh, SMALL),
    "acosh": (np.arccosh, ABOVE),
    "atanh": (np.arctanh, UNIT),
    "erf": (np.vectorize(math.erf), WIDE),
}


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_number(name: str) -> None:
    reference, x = UNARY[name]
    values = x.astype(np.float32)
    found = run(lambda n: getattr(n, f"add_{name}")("l", "x", "y"), values)
    assert_close(found, reference(values.astype(np.float64)))


@pytest.mark.parametrize(
    "shapes",
    [((2, 3), (2, 3), (2, 3)), ((2, 1), (3,), (1, 1)), ((4, 2, 3), (3,), (2, 1)), ((3,), (2, 1), (1,))],
)
def test_where_broadcasts(shapes: Any) -> None:
    c, a, b = (floats(*s, seed=i) for i, s in enumerate(shapes))
    c = np.round(c)
    found = run(lambda n: n.add_where_broadcastable("l", ["x", "z", "w"], "y"), c, a, b)
    assert_close(found, np.where(c != 0, a, b))


def test_where_nonzero() -> None:
    x = np.round(floats(3, 4))
    found = run(lambda n: n.add_where_nonzero("l", "x", "y"), x)
    assert_close(found, np.argwhere(x != 0).astype(np.float32))


def test_legacy_blobs_broadcast_from_the_end() -> None:
    def fill(n: Any) -> None:
        n.add_load_constant_nd("c", "c", np.arange(5.0), (5,))
        n.add_multiply_broadcastable("l", ["x", "c"], "y")

    x = floats(2, 3, 5)
    assert_close(run(fill, x, legacy=True), x * np.arange(5.0, dtype=np.float32))


def test_shapes_that_do_not_broadcast_are_explained() -> None:
    spec = network(lambda n: n.add_add_broadcastable("sum", ["x", "z"], "y"), floats(2, 3), floats(4))
    with pytest.raises(LoadError, match=r"layer 'sum' \(addBroadcastable\): does not fit its inputs of shape"):
        import_network(spec)


def test_too_few_inputs_are_explained() -> None:
    spec = network(lambda n: n.add_subtract_broadcastable("l", ["x", "z"], "y"), floats(2), floats(2))
    del spec.neuralNetwork.layers[0].input[1]
    with pytest.raises(LoadError, match=r"layer 'l' \(subtractBroadcastable\): has 1 inputs, takes 2"):
        import_network(spec)
