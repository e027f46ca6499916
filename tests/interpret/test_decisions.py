"""Detection, classification, quantization and random numbers, each against its documentation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anesurgery.interpret import run
from anesurgery.interpret.ops import tensor
from anesurgery.mil import Array, Var, ct, mb, quiet_host

RNG = np.random.default_rng(0)
OneOp = Callable[..., list[Array]]


def overlap(a: Array, b: Array) -> float:
    """Intersection over union of two boxes (center x, center y, width, height)."""
    sides = [
        max(0.0, min(a[i] + a[i + 2] / 2, b[i] + b[i + 2] / 2) - max(a[i] - a[i + 2] / 2, b[i] - b[i + 2] / 2))
        for i in (0, 1)
    ]
    shared = sides[0] * sides[1]
    return shared / (a[2] * a[3] + b[2] * b[3] - shared)


def survivors(boxes: Array, scores: Array, iou: float, least: float, most: int, by_class: bool) -> list[int]:
    """Greedy suppression of one sample, written from the documentation."""
    best, label = scores.max(1), scores.argmax(1)
    order = [int(i) for i in np.argsort(-best, kind="stable") if best[i] >= least]
    order = order or [int(best.argmax())]
    kept: list[int] = []
    for i in order:
        rivals = [j for j in kept if not by_class or label[i] == label[j]]
        if len(kept) < most and all(overlap(boxes[i], boxes[j]) <= iou for j in rivals):
            kept.append(i)
    return kept


def scene(classes: int) -> tuple[Array, Array]:
    center, size = RNG.uniform(0, 10, (2, 30, 2)), RNG.uniform(1, 5, (2, 30, 2))
    boxes = np.concatenate([center, size], -1).astype(np.float32)
    return boxes, RNG.uniform(0, 1, (2, 30, classes)).astype(np.float32)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS17])
@pytest.mark.parametrize("by_class", [True, False])
@pytest.mark.parametrize("classes", [1, 4])
@pytest.mark.parametrize(
    ("iou", "least", "most"), [(0.2, 0.5, 6), (0.5, 0.3, 40), (0.0, 0.0, 3), (0.3, 2.0, 5)]
)
@pytest.mark.parametrize("block", [3, tensor.BLOCK])
def test_non_maximum_suppression(
    one_op: OneOp,
    opset: Any,
    by_class: bool,
    classes: int,
    iou: float,
    least: float,
    most: int,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor, "BLOCK", block)
    boxes, scores = scene(classes)
    old = opset == ct.target.iOS15
    swap: Callable[[Array], Array] = (lambda v: v) if old else (lambda v: v.swapaxes(1, 2).copy())
    found = one_op(
        "non_maximum_suppression",
        opset,
        boxes=swap(boxes),
        scores=swap(scores),
        iou_threshold=np.float32(iou),
        max_boxes=most,
        per_class_suppression=by_class,
        **({"score_threshold": np.float32(least)} if old else {}),
    )
    assert len(found) == (4 if old else 3)
    for n in range(2):
        threshold = least if old else -1.0
        kept = survivors(boxes[n], scores[n], iou, threshold, most, by_class)
        places = np.full(most, -1)
        places[: len(kept)] = kept
        np.testing.assert_array_equal(found[2][n], places)
        for made, source in ((found[0], boxes), (found[1], scores)):
            expected = np.zeros((most, source.shape[-1]), np.float32)
            expected[: len(kept)] = source[n][kept]
            np.testing.assert_array_equal(swap(made)[n], expected)
        if old:
            assert found[3][n] == len(kept)


@pytest.mark.parametrize("classes", [["cat", "dog", "bird"], [7, 8, 9]])
def test_classify(classes: list[Any], tmp_path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 3))], opset_version=ct.target.iOS15)
    def program(x: Var) -> Any:
        return mb.mul(x=x, y=np.float32(0.5), name="p")

    config = ct.ClassifierConfig(list(classes))
    with quiet_host():
        model = ct.convert(
            program,
            source="milinternal",
            convert_to="mlprogram",
            classifier_config=config,
            compute_precision=ct.precision.FLOAT32,
            skip_model_load=True,
        )
        model.save(str(tmp_path / "classifier.mlpackage"))
    x = {"x": np.array([[0.5, 1, 0.25]], np.float32)}
    expected = [classes[1], dict(zip(classes, [0.25, 0.5, 0.125], strict=True))]
    assert list(run(model._mil_program, x).values()) == expected
    found = run(tmp_path / "classifier.mlpackage", x)
    assert [v for v in found.values() if not isinstance(v, np.ndarray)] == expected


# Quantization -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("with_zero", [True, False])
def test_quantize_and_back(one_op: OneOp, dtype: Any, axis: int | None, with_zero: bool) -> None:
    x = RNG.uniform(-30, 30, (3, 4, 5)).astype(np.float32)
    shape = () if axis is None else (x.shape[axis],)
    scale = RNG.uniform(0.05, 0.2, shape).astype(np.float32)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    zero = RNG.integers(low, high, shape).astype(dtype)
    form: dict[str, Any] = {"scale": np.float32(scale) if axis is None else scale}
    form |= {"zero_point": dtype(zero) if axis is None else zero} if with_zero else {}
    form |= {} if axis is None else {"axis": axis}
    wide = [-1 if axis is not None and a == axis % 3 else 1 for a in range(3)]
    by, shift = scale.reshape(wide), zero.astype(np.int32).reshape(wide) * with_zero
    levels = np.clip(np.round(x / by) + shift, low, high)
    opset = ct.target.iOS17
    (found,) = one_op("quantize", opset, input=x, output_dtype=np.dtype(dtype).name, **form)
    np.testing.assert_array_equal(found, levels)
    assert found.min() >= low
    assert found.max() <= high
    (back,) = one_op("dequantize", opset, input=levels.astype(dtype), **form)
    np.testing.assert_allclose(back, (levels - shift) * by, rtol=1e-6)


def test_quantize_rounds_halves_to_even(one_op: OneOp) -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 300, -300], np.float32)
    (found,) = one_op("quantize", input=x, scale=np.float32(1), output_dtype="int8")
    assert found.tolist() == [0, 2, 2, 0, -2, 127, -128]


# Random numbers -----------------------------------------------------------------------------------

N = 100_000
DRAWN: dict[str, tuple[dict[str, Any], float, float, float, float]] = {
    # op type: inputs, mean, deviation, least, greatest
    "random_uniform": ({"low": np.float32(-1), "high": np.float32(3)}, 1, 4 / 12**0.5, -1, 3),
    "random_normal": ({"mean": np.float32(2), "stddev": np.float32(3)}, 2, 3, -99, 99),
    "random_bernoulli": ({"prob": np.float32(0.3)}, 0.3, 0.21**0.5, 0, 1),
}


@pytest.mark.parametrize("op_type", DRAWN)
def test_random_numbers(one_op: OneOp, op_type: str) -> None:
    inputs, mean, deviation, least, greatest = DRAWN[op_type]

    def draw(seed: int) -> Array:
        (made,) = one_op(op_type, shape=np.array([N, 2], np.int32), seed=seed, **inputs)
        return made

    x = draw(5)
    assert abs(x.mean() - mean) < 5 * deviation / (2 * N) ** 0.5
    assert abs(x.std() - deviation) < 0.02 * deviation
    assert x.min() >= least
    assert x.max() <= greatest
    assert abs(np.corrcoef(x.T)[0, 1]) < 0.02
    np.testing.assert_array_equal(x, draw(5))
    assert not np.array_equal(x, draw(6))
    assert not np.array_equal(draw(-1), draw(-1))


def test_without_a_seed_torch_decides(one_op: OneOp) -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(one_op("random_normal", shape=np.array([4], np.int32))[0])
    np.testing.assert_array_equal(made[0], made[1])


@pytest.mark.parametrize("mode", ["logits", "probs"])
def test_random_categories(one_op: OneOp, mode: str) -> None:
    shares = np.array([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]], np.float32)
    x = np.log(shares + 1e-30) if mode == "logits" else 3 * shares
    (made,) = one_op("random_categorical", x=x.astype(np.float32), mode=mode, size=N, seed=3)
    assert made.shape == (2, N)
    for row, share in zip(made, shares, strict=True):
        found = np.bincount(row.astype(int), minlength=3) / N
        np.testing.assert_allclose(found, share, atol=0.01)
    (again,) = one_op("random_categorical", x=x.astype(np.float32), mode=mode, size=N, seed=3)
    np.testing.assert_array_equal(made, again)
