"""What a conversion loses: pixels scaled wrongly, training mode, a missing softmax, unused inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anesurgery as ane
from anesurgery import frontend
from anesurgery.mil import Program, ct, mb, quiet_host, types
from anesurgery.show.costs import costs

SIDE = 16
BGR = ct.colorlayout.BGR
MEANS = torch.tensor([0.485, 0.456, 0.406]).reshape(1, 3, 1, 1)
PIXELS = (123.675, 116.28, 103.53)


def converted(module: nn.Module, x: Any, given: Any = None, **options: Any) -> Any:
    xs = x if isinstance(x, tuple) else (x,)
    traced = torch.jit.trace(module, xs, check_trace=False)  # type: ignore[no-untyped-call]
    given = given or [ct.TensorType(f"x{k}", v.shape, dtype=v.numpy().dtype) for k, v in enumerate(xs)]
    with quiet_host():
        return ct.convert(traced, inputs=given, skip_model_load=True, **options)


def found(model: Any, *rules: str) -> list[str]:
    return [f.message for f in ane.inspect(model).all_findings if f.rule in rules]


class Prepared(nn.Module):
    """A convolution over pixels that a function prepares."""

    def __init__(self, prepare: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        self.prepare, self.conv = prepare, nn.Conv2d(3, 8, 3)

    def forward(self, x: Any) -> Any:
        return self.conv(self.prepare(x))


def norm(x: Any) -> Any:
    return (x - MEANS) / 0.226


def inception(x: Any) -> Any:
    return x * (1 / 127.5) - 1


def as_it_is(x: Any) -> Any:
    return x


IMAGES: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str, str]] = {
    "a bias in pixels": (as_it_is, {"scale": 0.017, "bias": [-m for m in PIXELS]}, "image-bias", "not scaled"),
    "a bias of -128": (as_it_is, {"scale": 1 / 128, "bias": [-128] * 3}, "image-bias", "-128 to -126"),
    "a bias of -10": (as_it_is, {"scale": 1 / 255, "bias": [-10] * 3}, "image-bias", "-10 to -9"),
    "scaled by both": (inception, {"scale": 1 / 127.5, "bias": [-1] * 3}, "image-twice", "-1.008 to -0.9922"),
    "divided by both": (lambda x: x / 255, {"scale": 1 / 255}, "image-twice", "0 to 0.003922"),
    "never scaled": (norm, {}, "image-unscaled", "numbers from 0 to 1"),
    "means reversed": (as_it_is, {"bias": [-m for m in PIXELS[::-1]]}, "image-order", "is RGB"),
    "means of red first": (
        as_it_is,
        {"bias": [-m for m in PIXELS], "color_layout": BGR},
        "image-order",
        "is BGR",
    ),
    "reversed inside": (lambda x: norm(x.flip(1) * 1), {"color_layout": BGR}, "", ""),
    "scaled outside": (norm, {"scale": 1 / 255}, "", ""),
    "scaled inside": (lambda x: norm(x / 255), {}, "", ""),
    "from -1 to 1": (as_it_is, {"scale": 1 / 127.5, "bias": [-1] * 3}, "", ""),
    "inception inside": (inception, {}, "", ""),
    "of Caffe": (as_it_is, {"bias": [-m for m in PIXELS[::-1]], "color_layout": BGR}, "", ""),
    "of torchvision": (
        as_it_is,
        {"scale": 1 / 255 / 0.226, "bias": [-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225]},
        "",
        "",
    ),
}


IN_NETWORKS = [case for case, (prepare, *_) in IMAGES.items() if prepare is as_it_is]
"""Cases whose constants a network holds as they are; others it negates in a layer of its own."""


@pytest.mark.parametrize(
    ("case", "backend"),
    [*((case, "mlprogram") for case in IMAGES), *((case, "neuralnetwork") for case in IN_NETWORKS)],
)
def test_pixels_that_are_scaled_wrongly(case: str, backend: str) -> None:
    prepare, options, rule, words = IMAGES[case]
    image = ct.ImageType("image", (1, 3, SIDE, SIDE), **options)
    model = converted(Prepared(prepare).eval(), torch.rand(1, 3, SIDE, SIDE), [image], convert_to=backend)
    said = found(model, "image-bias", "image-twice", "image-order", *(["image-unscaled"] if rule else []))
    assert said == found(model, *([rule] if rule else []))
    assert [words in message for message in said] == ([True] if rule else [])


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "rows": (lambda: nn.BatchNorm1d(8), (4, 8), True),
    "sound": (lambda: nn.BatchNorm1d(8), (1, 8, 20), True),
    "images": (lambda: nn.BatchNorm2d(8), (1, 8, 6, 6), True),
    "volumes": (lambda: nn.BatchNorm3d(8), (1, 8, 4, 4, 4), True),
    "no statistics": (lambda: nn.BatchNorm2d(8, track_running_stats=False).eval(), (1, 8, 6, 6), True),
    "evaluated": (lambda: nn.BatchNorm2d(8).eval(), (1, 8, 6, 6), False),
    "an instance norm": (lambda: nn.InstanceNorm2d(8), (1, 8, 6, 6), False),
    "a group norm": (lambda: nn.GroupNorm(2, 8), (1, 8, 6, 6), False),
    "a layer norm": (lambda: nn.LayerNorm(6), (1, 8, 6, 6), False),
}


@pytest.mark.parametrize("case", NORMS)
def test_a_model_in_training_mode(case: str) -> None:
    build, shape, is_reported = NORMS[case]
    module = nn.Sequential(build(), nn.ReLU())
    module.training = False  # coremltools warns of the whole module alone
    model = converted(module, torch.rand(shape))
    said = found(model, "lost-statistics")
    assert len(said) == is_reported
    assert all(message.startswith("a batch norm in training mode") for message in said)


def centred(x: Any) -> Any:
    return x - x.mean((0, 2, 3), keepdim=True)


def test_a_mean_over_the_batch_alone_is_no_norm() -> None:
    model = converted(Prepared(centred).eval(), torch.rand(2, 3, SIDE, SIDE))
    assert found(model, "lost-statistics") == []


HEADS: dict[str, tuple[list[nn.Module], bool]] = {
    "linear": ([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)], True),
    "pooled at the end": ([nn.Conv2d(8, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()], True),
    "a convolution": ([nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 5, 1), nn.Flatten()], True),
    "a softmax": ([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5), nn.Softmax(1)], False),
    "a sigmoid": ([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5), nn.Sigmoid()], False),
}


@pytest.mark.parametrize("backend", ["mlprogram", "neuralnetwork"])
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("case", HEADS)
def test_a_classifier_without_a_softmax(case: str, labels: bool, backend: str) -> None:
    head, is_raw = HEADS[case]
    more = {"classifier_config": ct.ClassifierConfig([f"class {k}" for k in range(5)])} if labels else {}
    module = nn.Sequential(nn.Conv2d(3, 8, 3), *head).eval()
    model = converted(module, torch.rand(1, 3, SIDE, SIDE), convert_to=backend, **more)
    assert len(found(model, "lost-softmax")) == (is_raw and labels)


@pytest.mark.parametrize(
    ("low", "transform", "is_raw"),
    [(-3.7, "NoTransform", True), (0.1, "NoTransform", False), (-3.7, "Classification_SoftMax", False)],
)
def test_boosted_trees_without_a_softmax(low: float, transform: str, is_raw: bool) -> None:
    double = ct.models.datatypes.Double()
    text = ct.models.datatypes.String()
    answers = [("label", text), ("p", ct.models.datatypes.Dictionary(text))]
    trees = ct.models.tree_ensemble.TreeEnsembleClassifier([("f", double)], ["a", "b"], answers)
    trees.set_default_prediction_value([0.5, 0.5])
    trees.add_branch_node(0, 0, 0, 0.5, "BranchOnValueLessThan", 1, 2)
    trees.add_leaf_node(0, 1, {0: 0.9, 1: low})
    trees.add_leaf_node(0, 2, {0: 0.2, 1: 0.8})
    trees.set_post_evaluation_transform(transform)
    said = found(ct.models.MLModel(trees.spec, skip_model_load=True), "lost-softmax")
    assert said == (["the trees sum negative scores, without a softmax"] if is_raw else [])


class Assigning(nn.Module):
    def forward(self, x: Any, place: Any, value: Any) -> Any:
        y = x.clone()
        y[:, place] = value
        return y


def test_an_assignment_that_our_conversion_keeps() -> None:
    frontend.register()
    xs = (torch.rand(2, 4), torch.tensor([1], dtype=torch.int32), torch.tensor([3.0]))
    kept = converted(Assigning(), xs)
    assert found(kept, "lost-input") == []
    (y,) = ane.run(kept, {f"x{k}": v.numpy() for k, v in enumerate(xs)}).values()
    np.testing.assert_allclose(y, Assigning()(*xs).numpy(), rtol=1e-3)


def of_two(body: Callable[[Any, Any], Any], *specs: Any) -> Program:
    two = specs or [mb.TensorSpec((2, 4), dtype=types.fp16) for _ in range(2)]
    made: Program = mb.program(input_specs=list(two), opset_version=ct.target.iOS18)(lambda x, y: body(x, y))
    return made


def chosen(x: Any, y: Any) -> Any:
    is_large = mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1]), y=np.float16(0))
    return mb.cond(pred=is_large, _true_fn=lambda: mb.relu(x=x), _false_fn=lambda: mb.identity(x=y))


STATE = mb.StateTensorSpec((2, 4), dtype=types.fp16)


def written(x: Any, y: Any) -> Any:
    before = mb.read_state(input=y)
    mb.coreml_update_state(state=y, value=x)
    return mb.relu(x=before)


@pytest.mark.parametrize(
    ("program", "unused"),
    [
        (lambda: of_two(lambda x, y: (mb.exp(x=y), mb.relu(x=x))[1]), "%y"),
        (lambda: of_two(lambda x, y: mb.add(x=x, y=y)), ""),
        (lambda: of_two(written, mb.TensorSpec((2, 4), dtype=types.fp16), STATE), ""),
        (lambda: of_two(chosen), ""),
        (lambda: of_two(lambda x, y: mb.exp(x=np.ones(2, np.float16))), ""),
    ],
)
def test_inputs_that_no_output_depends_on(program: Callable[[], Program], unused: str) -> None:
    words = [f"no output depends on input {unused}"] if unused else []
    assert found(program(), "lost-input") == words
    assert [p.why for p in costs(ane.inspect(program()))[:1] if p.rule == "lost-input"] == words


def test_a_model_without_inputs() -> None:
    made = mb.program(input_specs=[], opset_version=ct.target.iOS17)(lambda: mb.random_normal(shape=[2, 2]))
    assert found(made, "refused-no-inputs") == ["reported not to load: the function has no inputs"]


def product(matrix: Any, form: str) -> Program:
    """A stored matrix times a value, in one of the forms of MIL."""
    terms = matrix.shape[1]
    shape = (terms, 3) if form.startswith("left") else (3, terms)

    @mb.program(input_specs=[mb.TensorSpec(shape, types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Any) -> Any:
        match form:
            case "left":
                return mb.matmul(x=matrix, y=x)
            case "left, transposed":
                return mb.matmul(x=np.ascontiguousarray(matrix.T), y=x, transpose_x=True)
            case "right":
                return mb.matmul(x=x, y=np.ascontiguousarray(matrix.T))
            case "right, transposed":
                return mb.matmul(x=x, y=matrix, transpose_y=True)
        return mb.linear(x=x, weight=matrix)

    return program


def spline(points: int) -> Any:
    """The inverse of the matrix of a thin-plate spline, as rectifiers of text have it."""
    axis = np.linspace(-1, 1, points)
    c = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    distance = np.linalg.norm(c[:, None] - c[None], axis=2)
    np.fill_diagonal(distance, 1)
    affine = np.concatenate([np.ones((len(c), 1)), c], 1)
    return np.linalg.inv(np.block([[affine, distance**2 * np.log(distance**2)], [np.zeros((3, 3)), affine.T]]))


@pytest.mark.parametrize("form", ["left", "left, transposed", "right", "right, transposed", "linear"])
def test_rows_that_cancel_are_found_in_each_form(form: str) -> None:
    assert found(product(spline(31).astype(np.float16), form), "lost-cancelling")


MATRICES: dict[str, Any] = {
    "a trained layer": np.random.default_rng(0).standard_normal((512, 512)),
    "differences, exact": np.eye(128) - np.eye(128, k=1),
    "cosines": np.cos(np.pi / 128 * np.arange(128)[:, None] * (np.arange(128) + 0.5)),
    "few terms": spline(5),
    "a windowed spectrum": np.cos(np.pi / 64 * np.outer(np.arange(65), np.arange(128))) * np.hanning(128),
    "columns that cancel": ((np.eye(96) - 1 / 96) @ np.random.default_rng(0).standard_normal((96, 96))),
}


@pytest.mark.parametrize("name", MATRICES)
def test_other_matrices_are_let_pass(name: str) -> None:
    assert not found(product(MATRICES[name].astype(np.float16), "linear"), "lost-cancelling")
