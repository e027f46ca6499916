"""Networks of one layer, and how a test runs and compares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import anesurgery as ane
from anesurgery.mil import Array, quiet_host
from anesurgery.neuralnetwork.importing import import_network

with quiet_host():
    from coremltools.models import datatypes
    from coremltools.models.neural_network import NeuralNetworkBuilder

Fill = Callable[[Any], Any]
"""Adds layers that read x, z, w and make y."""


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def network(fill: Fill, *inputs: Array, outputs: tuple[str, ...] = ("y",), legacy: bool = False) -> Any:
    builder = NeuralNetworkBuilder(
        [(n, datatypes.Array(*v.shape)) for n, v in zip("xzw", inputs, strict=False)],
        [(n, None) for n in outputs],
        disable_rank5_shape_mapping=not legacy,
    )
    fill(builder)
    return builder.spec


def run(fill: Fill, *inputs: Array, outputs: tuple[str, ...] = ("y",), legacy: bool = False) -> Any:
    loaded = import_network(network(fill, *inputs, outputs=outputs, legacy=legacy))
    values = {n: np.array(v, np.float32) for n, v in zip("xzw", inputs, strict=False)}
    found = ane.run(loaded, values)
    return found[outputs[0]] if len(outputs) == 1 else [found[n] for n in outputs]


def assert_close(found: Array, expected: Any) -> None:
    wanted = np.asarray(expected)
    assert found.shape == (wanted.shape or (1,))
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-7)


@dataclass(frozen=True)
class Case:
    """One form of a layer."""

    fill: Fill
    expected: Callable[..., Any]
    inputs: tuple[Array, ...] = (floats(2, 3, 4),)
