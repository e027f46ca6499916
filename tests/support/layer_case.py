"""A form of a layer beside what numpy or torch makes of the same arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from one_layer import floats

import anesurgery as ane
from anesurgery.mil import Array, quiet_host
from anesurgery.neuralnetwork.importing import import_network

with quiet_host():
    from coremltools.models import datatypes
    from coremltools.models.neural_network import NeuralNetworkBuilder

CLOSE = 1e-5
"""Relative to each number; what cancels is held to a tenth of it, relative to the largest."""


def t(array: Any) -> torch.Tensor:
    """An array as a tensor in fp32."""
    return torch.from_numpy(np.ascontiguousarray(array, np.float32))


@dataclass
class LayerCase:
    """One form of a layer."""

    name: str
    fill: Callable[[Any], Any]
    """Adds the layer that reads x (y, z) and makes `outputs`."""
    expected: Callable[..., Any]
    """What it makes of arrays of shape `shapes`."""
    shapes: tuple[tuple[int, ...], ...] = ((4, 6, 7),)
    exact: bool = False
    values: dict[str, Array] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("out",)
    spec: Callable[[Any], Any] | None = None
    """Changes the layer's message afterwards."""


def build(case: LayerCase) -> Any:
    """The specification of the one layer."""
    names = "xyz"[: len(case.shapes)]
    builder = NeuralNetworkBuilder(
        [(n, datatypes.Array(*s)) for n, s in zip(names, case.shapes, strict=True)],
        [(n, None) for n in case.outputs],
        disable_rank5_shape_mapping=case.exact,
    )
    case.fill(builder)
    if case.spec is not None:
        case.spec(builder.spec.neuralNetwork.layers[-1])
    return builder.spec


def run(case: LayerCase) -> tuple[list[Array], list[Array]]:
    """(found, expected) for each output."""
    names = "xyz"[: len(case.shapes)]
    values = {
        n: case.values.get(n, floats(*s, seed=i))
        for i, (n, s) in enumerate(zip(names, case.shapes, strict=True))
    }
    made = ane.run(import_network(build(case)), values)
    wanted = case.expected(*(values[n] for n in names))
    wanted = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]
    return [made[n] for n in case.outputs], [np.asarray(w) for w in wanted]


def check(case: LayerCase) -> None:
    """The layer makes what is expected, in shape and numbers."""
    found, expected = run(case)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert_near(a, b)


def assert_near(found: Array, expected: Any) -> None:
    """The numbers agree relatively; some are not 0."""
    largest = np.abs(np.asarray(expected)).max()
    assert largest > 0
    np.testing.assert_allclose(found, expected, rtol=CLOSE, atol=CLOSE / 10 * largest)


def shaped(value: Array) -> Array:
    """How an output of (C, H, W) is given back."""
    return value.reshape(value.shape[:1]) if value.shape[1:] == (1, 1) else value
