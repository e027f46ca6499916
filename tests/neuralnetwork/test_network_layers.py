"""Each form of each layer of the first specification, against numpy and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from layer_case import LayerCase as Case
from layer_case import assert_near, check, shaped, t
from one_layer import floats

import anesurgery as ane
from anesurgery.mil import Array, quiet_host
from anesurgery.neuralnetwork.importing import import_network

with quiet_host():
    from coremltools.models import datatypes
    from coremltools.models.neural_network import NeuralNetworkBuilder

with quiet_host():
    pass

Tensor = torch.Tensor


ALPHA, BETA = floats(4, seed=5), floats(4, seed=6) + 2


def activation(name: str, params: Any, expected: Callable[[Tensor], Tensor]) -> Case:
    def fill(b: Any) -> None:
        b.add_activation("layer", name, "x", "out", params=params)

    return Case(name.lower(), fill, lambda x: expected(t(x)).numpy())


def gelu(mode: str, expected: Callable[[Array], Any]) -> Case:
    return Case(f"gelu_{mode}", lambda b: b.add_gelu("l", "x", "out", mode), expected, exact=True)


ACTIVATIONS = [
    activation("LINEAR", [2.0, -1.0], lambda x: 2 * x - 1),
    activation("RELU", None, F.relu),
    activation("LEAKYRELU", [0.3], lambda x: F.leaky_relu(x, 0.3)),
    activation("THRESHOLDEDRELU", 0.4, lambda x: torch.where(x >= 0.4, x, 0)),
    activation("PRELU", np.array([0.3]), lambda x: F.leaky_relu(x, 0.3)),
    activation("PRELU", ALPHA, lambda x: F.prelu(x[None], t(ALPHA))[0]),
    activation("TANH", None, torch.tanh),
    activation("SCALED_TANH", [1.5, 0.7], lambda x: 1.5 * torch.tanh(0.7 * x)),
    activation("SIGMOID", None, torch.sigmoid),
    activation("SIGMOID_HARD", [0.3, 0.4], lambda x: (0.3 * x + 0.4).clamp(0, 1)),
    activation("ELU", 0.8, lambda x: F.elu(x, 0.8)),
    activation("SOFTSIGN", None, F.softsign),
    activation("SOFTPLUS", None, F.softplus),
    activation(
        "PARAMETRICSOFTPLUS",
        [ALPHA, BETA],
        lambda x: t(ALPHA)[:, None, None] * torch.log1p(torch.exp(t(BETA)[:, None, None] * x)),
    ),
    Case("clip", lambda b: b.add_clip("l", "x", "out", -0.2, 0.5), lambda x: x.clip(-0.2, 0.5), exact=True),
    Case(
        "clamped_relu",
        lambda b: b.add_clamped_relu("l", "x", "out", 0.3, 0.5),
        lambda x: np.minimum(0.5, np.where(x >= 0, x, 0.3 * x)),
        exact=True,
    ),
    gelu("EXACT", lambda x: F.gelu(t(x))),
    gelu("TANH_APPROXIMATION", lambda x: F.gelu(t(x), approximate="tanh")),
    gelu("SIGMOID_APPROXIMATION", lambda x: x / (1 + np.exp(-1.702 * x))),
]


def elementwise(mode: str, expected: Any, shapes: Any, alpha: float | None = None) -> Case:
    def fill(b: Any) -> None:
        b.add_elementwise("layer", list("xyz"[: len(shapes)]), "out", mode, alpha)

    return Case(f"{mode.lower()}_{len(shapes)}", fill, expected, shapes)


ONE, TWO = ((4, 6, 7),), ((4, 6, 7), (4, 6, 7))
THREE = ((4, 6, 7), (4, 1, 1), (1, 6, 7))


def unary(mode: str, expected: Callable[[Array], Array], **options: Any) -> Case:
    def fill(b: Any) -> None:
        b.add_unary("layer", "x", "out", mode, **options)

    values = {"x": np.abs(floats(4, 6, 7)) + 0.1} if mode in ("sqrt", "rsqrt", "log", "power") else {}
    return Case(f"unary_{mode}", fill, expected, values=values)


AXES: dict[str, Any] = {"C": -3, "H": -2, "W": -1, "HW": (-2, -1), "CHW": (-3, -2, -1)}
REDUCTIONS: dict[str, Any] = {
    "sum": np.sum,
    "avg": np.mean,
    "prod": np.prod,
    "max": np.max,
    "min": np.min,
    "sumsquare": lambda x, **k: np.sum(x * x, **k),
    "L1": lambda x, **k: np.abs(x).sum(**k),
    "L2": lambda x, **k: np.sqrt((x * x).sum(**k)),
    "logsum": lambda x, **k: np.log(x + np.float32(1e-6)).sum(**k),
}


def reduction(mode: str, axis: str) -> Case:
    def fill(b: Any) -> None:
        b.add_reduce("layer", "x", "out", axis, mode)

    values = {"x": np.abs(floats(4, 6, 7)) + 0.5}
    axes = AXES[axis]
    if mode == "argmax":
        return Case(
            f"argmax_{axis}", fill, lambda x: shaped(np.expand_dims(x.argmax(axes), axes)), values=values
        )
    return Case(
        f"{mode}_{axis}", fill, lambda x: shaped(REDUCTIONS[mode](x, axis=axes, keepdims=True)), values=values
    )


CUBE, PLANE, LINE = floats(4, 6, 7, seed=7), floats(1, 6, 7, seed=8), floats(4, seed=9)


def scale(w: Array, bias: Array | None) -> Case:
    def fill(b: Any) -> None:
        shape = None if bias is None else list(bias.shape)
        b.add_scale("l", w, bias, bias is not None, "x", "out", list(w.shape), shape)

    def wide(a: Array) -> Array:
        return a if a.ndim == 3 else a.reshape(-1, 1, 1)

    return Case(
        f"scale_{w.shape}_{None if bias is None else bias.shape}",
        fill,
        lambda x: x * wide(w) + (0 if bias is None else wide(bias)),
    )


def bias(w: Array) -> Case:
    return Case(
        f"bias_{w.shape}",
        lambda b: b.add_bias("l", w, "x", "out", list(w.shape)),
        lambda x: x + (w if w.ndim == 3 else w.reshape(-1, 1, 1)),
    )


ARITHMETIC = [
    elementwise("ADD", lambda x: x + 1.5, ONE, 1.5),
    elementwise("ADD", lambda x, y, z: x + y + z, THREE),
    elementwise("MULTIPLY", lambda x: x * 1.5, ONE, 1.5),
    elementwise("MULTIPLY", lambda x, y, z: x * y * z, THREE),
    elementwise("AVE", lambda x, y: (x + y) / 2, TWO),
    elementwise("MAX", np.maximum, TWO),
    elementwise("MIN", np.minimum, TWO),
    elementwise("DOT", lambda x, y: (x * y).sum(keepdims=True), ((5,), (5,))),
    elementwise("COS", lambda x, y: (x @ y / np.linalg.norm(x) / np.linalg.norm(y)).reshape(1), ((5,), (5,))),
    unary("sqrt", np.sqrt),
    unary("log", np.log),
    unary("exp", np.exp),
    unary("abs", np.abs),
    unary("rsqrt", lambda x: 1 / np.sqrt(x + 0.01), epsilon=0.01),
    unary("rsqrt", lambda x: 1 / np.sqrt(x + 1e-6), epsilon=0),
    unary("inverse", lambda x: 1 / (x + 0.5), epsilon=0.5),
    unary("power", lambda x: x**1.7, alpha=1.7),
    unary("threshold", lambda x: np.maximum(x, 0.3), alpha=0.3),
    unary("exp", lambda x: np.exp(0.5 * x + 0.25), shift=0.25, scale=0.5),
    unary("exp", lambda x: np.exp(x + 0.25), shift=0.25, scale=0),
    *(reduction(m, a) for m in REDUCTIONS for a in AXES),
    *(reduction("argmax", a) for a in "CHW"),
    scale(np.array([2.0], np.float32), None),
    scale(LINE, LINE),
    scale(PLANE, LINE),
    scale(CUBE, CUBE),
    bias(LINE),
    bias(PLANE),
    bias(CUBE),
    Case("softmax", lambda b: b.add_softmax("l", "x", "out"), lambda x: F.softmax(t(x), 0)),
]


@pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda c: c.name)
def test_activations(case: Case) -> None:
    check(case)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("case", ARITHMETIC, ids=lambda c: c.name)
def test_arithmetic(case: Case) -> None:
    check(case)


def test_the_logarithm_has_its_epsilon() -> None:
    builder = NeuralNetworkBuilder([("x", datatypes.Array(3))], [("y", None)], disable_rank5_shape_mapping=True)
    builder.add_unary("log", "x", "y", "log", epsilon=1.0)
    x = np.array([0, 1, 9], np.float32)
    found = ane.run(import_network(builder.spec), {"x": x})["y"]
    assert_near(found, np.log1p(x))
