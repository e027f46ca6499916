"""Normalizations against their formulas, at every rank that they allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from closeness import assert_close

from anesurgery.mil import Array, ct

RNG = np.random.default_rng(0)
OneOp = Callable[..., list[Array]]


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS17])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_local_response_norm(one_op: OneOp, size: int, opset: Any) -> None:
    for shape in ((2, 6, 3, 4), (1, 3, 5, 2)):
        x, (alpha, beta, k) = 5 * floats(*shape), (0.3, 0.6, 1.5)
        sums = np.zeros_like(x)
        for channel in range(shape[1]):
            near = x[:, max(channel - size // 2, 0) : channel + (size - 1) // 2 + 1]
            sums[:, channel] = (near**2).sum(1)
        expected = x / (k + alpha / size * sums) ** beta
        given = {"alpha": np.float32(alpha), "beta": np.float32(beta), "k": np.float32(k)}
        assert_close(one_op("local_response_norm", opset, x=x, size=size, **given)[0], expected, 1e-5)


def test_local_response_norm_of_three_axes_as_coremltools_expects_it(one_op: OneOp) -> None:
    x = np.array([[[1, -7], [5, -6], [-3, -5]]], np.float32)
    expected = [[[0.99996257, -6.98716545], [4.99531746, -5.99191284], [-2.99898791, -4.99531746]]]
    assert_close(one_op("local_response_norm", x=x, size=2)[0], np.array(expected), 1e-6)


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_batch_norm_of_every_rank(one_op: OneOp, rank: int) -> None:
    x, shape = floats(2, 3, *[4, 5, 2][: rank - 2]), (3, *(1,) * (rank - 2))
    mean, gamma, beta, variance = floats(3), floats(3), floats(3), np.abs(floats(3)) + 0.1
    eps = np.float32(0.01)
    plain = (x - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + eps)
    form = {"x": x, "mean": mean, "variance": variance, "epsilon": eps}
    assert_close(one_op("batch_norm", **form)[0], plain, 1e-5)
    (found,) = one_op("batch_norm", gamma=gamma, beta=beta, **form)
    assert_close(found, plain * gamma.reshape(shape) + beta.reshape(shape), 1e-5)


@pytest.mark.parametrize("spatial", [(4,), (4, 5), (1,), (1, 1)])
def test_instance_norm(one_op: OneOp, spatial: tuple[int, ...]) -> None:
    x, gamma, beta = floats(2, 3, *spatial), floats(3), floats(3)
    axes, shape = tuple(range(2, x.ndim)), (3, *(1,) * len(spatial))
    centred = x - x.mean(axes, keepdims=True)
    plain = centred / np.sqrt((centred**2).mean(axes, keepdims=True) + 1e-5)
    assert_close(one_op("instance_norm", x=x)[0], plain, 1e-5)
    (found,) = one_op("instance_norm", x=x, gamma=gamma, beta=beta)
    assert_close(found, plain * gamma.reshape(shape) + beta.reshape(shape), 1e-5)


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_l2_norm_of_every_rank(one_op: OneOp, rank: int) -> None:
    x = floats(*[2, 3, 4, 2, 3][-rank:])
    for epsilon in (1e-6, 0.5):
        expected = x / np.sqrt((x**2).sum((-3, -2, -1), keepdims=True) + epsilon)
        assert_close(one_op("l2_norm", x=x, epsilon=np.float32(epsilon))[0], expected)
