"""Layers that take axes together, softmax, and random numbers, against numpy and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from one_layer import assert_close, floats, network, run

from anesurgery.errors import LoadError
from anesurgery.mil import Array, quiet_host
from anesurgery.neuralnetwork.importing import import_network

with quiet_host():
    pass


def numbers(*values: float) -> Array:
    return np.array(values, np.float32)


def over(function: Callable[..., Any], wrap: Callable[..., Any] = lambda y: y) -> Callable[..., Any]:
    return lambda x, axes, keep: wrap(function(x.astype(np.float64), axis=axes, keepdims=keep))


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": over(np.sum),
    "prod": over(np.prod),
    "mean": over(np.mean),
    "max": over(np.max),
    "min": over(np.min),
    "l1": lambda x, axes, keep: over(np.sum)(np.abs(x), axes, keep),
    "l2": lambda x, axes, keep: np.sqrt(over(np.sum)(np.square(x.astype(np.float64)), axes, keep)),
    "sumsquare": lambda x, axes, keep: over(np.sum)(np.square(x.astype(np.float64)), axes, keep),
    "logsum": over(np.sum, np.log),
    "logsumexp": lambda x, axes, keep: np.log(over(np.sum)(np.exp(x.astype(np.float64)), axes, keep)),
}
AXES: list[Any] = [(0,), (-1,), (1, -1), (0, 1, 2), None]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, axes: Any, keep: bool) -> None:
    x = np.abs(floats(2, 3, 4)) + np.float32(0.1)
    how = {"reduce_all": True} if axes is None else {"axes": axes}
    method = f"add_reduce_{name}"
    found = run(lambda n: getattr(n, method)("l", "x", "y", keepdims=keep, **how), x)
    assert_close(found, REDUCTIONS[name](x, axes, keep))


def test_a_reduction_without_axes_is_explained() -> None:
    spec = network(lambda n: n.add_reduce_sum("l", "x", "y", axes=[0]), floats(2, 3))
    del spec.neuralNetwork.layers[0].reduceSum.axes[:]
    with pytest.raises(LoadError, match=r"layer 'l' \(reduceSum\): names no axes; list some, or set reduceAll"):
        import_network(spec)


def test_a_reduction_over_an_absent_axis_is_explained() -> None:
    spec = network(lambda n: n.add_reduce_max("l", "x", "y", axes=[3]), floats(2, 3))
    with pytest.raises(LoadError, match=r"layer 'l' \(reduceMax\): has axis 3, expected -2 to 1"):
        import_network(spec)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(axis: int) -> None:
    x = floats(2, 3, 4)
    found = run(lambda n: n.add_softmax_nd("l", "x", "y", axis=axis), x)
    assert_close(found, torch.softmax(torch.from_numpy(x), axis).numpy())


def test_axes_of_the_rank_5_mapping_count_the_sequence() -> None:
    x = floats(2, 3, 4)
    found = run(lambda n: n.add_softmax_nd("l", "x", "y", axis=3), x, legacy=True)
    assert_close(found, torch.softmax(torch.from_numpy(x), 1).numpy())
    found = run(lambda n: n.add_reduce_sum("l", "x", "y", axes=[2], keepdims=True), x, legacy=True)
    assert_close(found, x.sum(0, keepdims=True))


SHAPE = (50, 40, 10)
KINDS: dict[str, tuple[dict[str, float], float, float, Any]] = {
    "normal": ({"mean": 3, "stddev": 2}, 3, 2, lambda x: np.unique(x).size > 10000),
    "uniform": ({"minval": -1, "maxval": 3}, 1, 4 / 12**0.5, lambda x: -1 <= x.min() < x.max() < 3),
    "bernoulli": ({"prob": 0.3}, 0.3, 0.21**0.5, lambda x: set(np.unique(x)) == {0, 1}),
}
"""Kind -> parameters, mean, deviation, and what else holds."""


@pytest.mark.parametrize("how", ["like", "static", "dynamic"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_have_the_stated_distribution(kind: str, how: str) -> None:
    params, mean, deviation, holds = KINDS[kind]
    method = f"add_random_{kind}_{how}"
    x = {"like": floats(*SHAPE), "dynamic": numbers(*SHAPE), "static": floats(1)}[how]

    def fill(n: Any) -> None:
        if how == "static":
            getattr(n, method)("l", "y", SHAPE, seed=1, **params)
        else:
            getattr(n, method)("l", "x", "y", seed=1, **params)

    found = run(fill, x)
    assert found.shape == SHAPE
    assert abs(found.mean() - mean) < 4 * deviation / found.size**0.5
    assert abs(found.std() - deviation) < 0.02 * deviation
    assert holds(found)


@pytest.mark.parametrize(("logits", "temperature"), [(True, 1.0), (True, 2.0), (False, 1.0), (False, 0.5)])
def test_categories_are_drawn_as_often_as_they_are_probable(logits: bool, temperature: float) -> None:
    chances = np.array([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]], np.float32)
    x = np.log(chances) if logits else chances
    count = 40000
    found = run(
        lambda n: n.add_categorical_distribution(
            "l", "x", "y", count, is_logits=logits, temperature=temperature, seed=1
        ),
        x,
    )
    assert found.shape == (2, count)
    wanted = chances ** (1 / temperature)
    wanted /= wanted.sum(-1, keepdims=True)
    often = (found[..., None] == np.arange(3)).mean(1)
    np.testing.assert_allclose(often, wanted, atol=0.015)
