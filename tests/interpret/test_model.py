"""Models called by their description: images, labels, flexible shapes, functions, states, pipelines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close

import anesurgery as ane
from anesurgery.errors import InterpretError, LoadError, UnknownName
from anesurgery.files.protobuf import proto
from anesurgery.interpret import Predictor, run
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.loading import load
from anesurgery.mil import Array, ct, quiet_host

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
RNG = np.random.default_rng(0)
HALF = np.float16


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


class Call(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: torch.Tensor) -> Any:
        return self.function(*values)


def convert(
    module: Any,
    inputs: list[Any],
    *example: torch.Tensor,
    half: bool = False,
    target: str = "iOS16",
    **options: Any,
) -> Any:
    """What coremltools makes of a module; the numbers are fp32 unless asked."""
    if options.get("convert_to") != "neuralnetwork":
        precision = ct.precision.FLOAT16 if half else ct.precision.FLOAT32
        deployment = getattr(ct.target, target)
        options |= {"minimum_deployment_target": deployment, "compute_precision": precision}
    with quiet_host(), torch.no_grad():
        traced = torch.jit.trace(module.eval(), example)  # type: ignore[no-untyped-call]
        return ct.convert(traced, inputs=inputs, skip_model_load=True, **options)


@pytest.fixture
def package(tmp_path: Path) -> Callable[..., Path]:
    """Convert and save."""

    def save(*args: Any, name: str = "model", **options: Any) -> Path:
        path = tmp_path / f"{name}.mlpackage"
        with quiet_host():
            convert(*args, **options).save(str(path))
        return path

    return save


def the(outputs: dict[str, Any]) -> Any:
    (value,) = outputs.values()
    return value


def torch_says(module: Any, *values: Array) -> Array:
    with torch.no_grad():
        made: torch.Tensor = module(*map(torch.from_numpy, values))
    return made.numpy()


def close(found: Any, expected: Any) -> None:
    assert_close(found, expected, rtol=1e-5)


def picture(mode: str, width: int = 7, height: int = 5) -> Any:
    if mode == "F":
        return Image.fromarray(RNG.random((height, width), np.float32) * 100)
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(RNG.integers(0, 256, shape).astype(np.uint8))


def planes(image: Any, layout: str) -> Array:
    """[1, channels, height, width] in the order that the layout names."""
    pixels = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)[None]
    return (pixels[:, ::-1] if layout == "BGR" else pixels).astype(np.float32)


MODES = {"RGB": "RGB", "BGR": "RGB", "GRAYSCALE": "L", "GRAYSCALE_FLOAT16": "F"}


@pytest.mark.parametrize("layout", MODES)
def test_an_image_is_scaled_shifted_and_computed_with(package: Callable[..., Path], layout: str) -> None:
    image = picture(MODES[layout])
    pixels = planes(image, layout)
    channels, bias = (3, [-1.0, -0.5, 0.25]) if pixels.shape[1] == 3 else (1, -0.75)
    conv = torch.nn.Conv2d(channels, 4, 3, padding=1)
    kind = ct.ImageType(
        "image", shape=pixels.shape, scale=1 / 128, bias=bias, color_layout=getattr(ct.colorlayout, layout)
    )
    predict = Predictor(package(conv, [kind], torch.zeros(pixels.shape)))
    stored = pixels.astype(HALF).astype(np.float32) if layout == "GRAYSCALE_FLOAT16" else pixels
    prepared = stored / 128 + np.asarray(bias, np.float32).reshape(1, -1, 1, 1)
    expected = torch_says(conv, prepared)
    for given in (image, pixels, torch.from_numpy(pixels.copy())):
        np.testing.assert_allclose(the(predict({"image": given})), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "missing input 'image': the model takes an image"),
        ("L", "an image of mode 'L', expected 'RGB' for BGR"),
        (np.zeros((5, 7, 3)), "give a PIL image of mode 'RGB', or an array of shape (1, channels"),
        (np.zeros((1, 3, 7, 5)), "is 5 wide and 7 high, expected (width, height) (7, 5)"),
        (np.zeros((1, 1, 5, 7)), "has shape (1, 1, 5, 7), expected (1, 3, 5, 7)"),
    ],
)
def test_what_is_no_image_is_refused(package: Callable[..., Path], value: Any, words: str) -> None:
    kind = ct.ImageType("image", shape=(1, 3, 5, 7), color_layout="BGR")
    path = package(Call(lambda x: x * 2), [kind], torch.zeros(1, 3, 5, 7))
    values = {} if value is None else {"image": picture("L") if isinstance(value, str) else value}
    with pytest.raises(InterpretError) as raised:
        run(path, values)
    assert words in str(raised.value)


def test_an_image_without_a_colour_space_is_refused(package: Callable[..., Path]) -> None:
    """A damaged description: the wrong version ended in a KeyError."""
    path = package(Call(lambda x: x * 2), [ct.ImageType("image", shape=(1, 3, 5, 7))], torch.zeros(1, 3, 5, 7))
    loaded = ane.load(path)
    loaded.spec.description.input[0].type.imageType.ClearField("colorSpace")
    with pytest.raises(InterpretError, match="image 'image' has no known colour space"):
        Predictor(loaded).sample(0)


LISTED = ct.EnumeratedShapes([(1, 3, 5, 7), (1, 3, 6, 8)])
RANGED = (1, 3, ct.RangeDim(4, 6), ct.RangeDim(7, 9))


@pytest.mark.parametrize(
    ("shape", "words"), [(LISTED, "(width, height) (7, 5) or (8, 6)"), (RANGED, "(width, height) (7..9, 4..6)")]
)
def test_images_of_several_sizes(package: Callable[..., Path], shape: Any, words: str) -> None:
    conv = torch.nn.Conv2d(3, 2, 3)
    path = package(conv, [ct.ImageType("image", shape=shape)], torch.zeros(1, 3, 5, 7))
    predict = Predictor(path)
    for width, height in ((7, 5), (8, 6), (7, 5)):
        image = picture("RGB", width, height)
        expected = torch_says(conv, planes(image, "RGB"))
        np.testing.assert_allclose(the(predict({"image": image})), expected, rtol=1e-5, atol=1e-4)
    with pytest.raises(InterpretError) as raised:
        predict({"image": picture("RGB", 10, 5)})
    assert "10 wide and 5 high" in str(raised.value)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("taken", "given"),
    [
        ("RGB", "BGR"),
        ("BGR", "RGB"),
        ("BGR", "BGR"),
        ("GRAYSCALE", "GRAYSCALE"),
        ("GRAYSCALE_FLOAT16", "GRAYSCALE_FLOAT16"),
    ],
)
def test_an_image_comes_out_clamped_and_in_its_order(
    package: Callable[..., Path], taken: str, given: str
) -> None:
    image = picture(MODES[taken])
    pixels = planes(image, taken)
    shift = np.array([0, -40, 90], np.float32)[: pixels.shape[1]].reshape(1, -1, 1, 1)
    module = Call(lambda x: x * 2 - 60 + torch.from_numpy(shift))
    kind = ct.ImageType("image", shape=pixels.shape, color_layout=getattr(ct.colorlayout, taken))
    out = ct.ImageType("made", color_layout=getattr(ct.colorlayout, given))
    path = package(module, [kind], torch.zeros(pixels.shape), outputs=[out])
    made = run(path, {"image": image})["made"]
    assert made.mode == MODES[given]
    assert made.size == image.size
    expected = torch_says(module, pixels)
    if given == "GRAYSCALE_FLOAT16":
        np.testing.assert_allclose(planes(made, given), expected, rtol=0, atol=0.2)
        return
    assert expected.min() < 0
    assert expected.max() > 255
    np.testing.assert_array_equal(planes(made, given), np.clip(expected, 0, 255))
    by_name = run(path, {"image": image}, outputs=["made"])["made"]
    np.testing.assert_array_equal(np.asarray(by_name), np.asarray(made))


@pytest.mark.parametrize("labels", [["cat", "dog", "owl"], [10, 20, 30]])
def test_a_classifier_gives_its_label_and_the_probabilities(
    package: Callable[..., Path], labels: list[Any]
) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), Call(lambda x: 0.5 - x), torch.nn.Softmax(-1))
    config = ct.ClassifierConfig(labels, predicted_feature_name="animal")
    path = package(module, [ct.TensorType("x", shape=(1, 4))], torch.zeros(1, 4), classifier_config=config)
    result = ane.apply(path, ["negate_subtract"])
    assert result.changes
    seen = set()
    for _ in range(8):
        x = 4 * floats(1, 4)
        expected = torch_says(module, x)[0]
        for model in (path, result.save(path.parent / "after.mlpackage", overwrite=True)):
            made = run(model, {"x": x})
            probabilities = made.pop("animal_probs")
            assert made == {"animal": labels[expected.argmax()]}
            assert list(probabilities) == labels
            assert all(type(k) is type(labels[0]) for k in probabilities)
            close(list(probabilities.values()), expected)
        seen.add(made["animal"])
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("shape", "lengths", "bad", "words"),
    [
        ((1, ct.RangeDim(2, 5), 4), (2, 5, 3, 2), 6, "expected (1, 2..5, 4)"),
        (ct.EnumeratedShapes([(1, 2, 4), (1, 5, 4)]), (5, 2), 3, "(1, 2, 4) or (1, 5, 4)"),
    ],
)
def test_several_lengths_in_turn(
    package: Callable[..., Path], shape: Any, lengths: tuple[int, ...], bad: int, words: str
) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(1))
    path = package(
        module,
        [ct.TensorType("x", shape=ct.Shape(shape) if isinstance(shape, tuple) else shape)],
        torch.zeros(1, 2, 4),
    )
    predict = Predictor(path)
    for n in lengths:
        x = floats(1, n, 4)
        close(the(predict({"x": x})), torch_says(module, x))
    with pytest.raises(InterpretError) as raised:
        predict({"x": floats(1, bad, 4)})
    assert f"input 'x' has shape (1, {bad}, 4), expected" in str(raised.value)
    assert words in str(raised.value)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_an_optional_input_has_a_default(package: Callable[..., Path], dtype: Any) -> None:
    three = np.full((1, 4), 3, dtype)
    kinds = [
        ct.TensorType("x", shape=(1, 4), dtype=dtype),
        ct.TensorType("y", shape=(1, 4), dtype=dtype, default_value=three),
    ]
    zero = torch.zeros(1, 4, dtype=torch.from_numpy(three).dtype)
    predict = Predictor(package(Call(lambda x, y: x + y * 2), kinds, zero, zero))
    x = RNG.integers(-9, 9, (1, 4)).astype(dtype)
    np.testing.assert_array_equal(the(predict({"x": x})), x + 6)
    np.testing.assert_array_equal(the(predict({"x": x, "y": x})), 3 * x)
    with pytest.raises(InterpretError, match="missing input 'x': it is not optional"):
        predict({"y": x})


@pytest.mark.parametrize("default", ["short", "longer"])
def test_functions_are_called_by_name(package: Callable[..., Path], tmp_path: Path, default: str) -> None:
    parts = {"short": ("x", torch.nn.Linear(4, 3)), "longer": ("z", torch.nn.Linear(4, 5))}
    described = ct.utils.MultiFunctionDescriptor()
    for name, (kind, linear) in parts.items():
        one = package(
            linear,
            [ct.TensorType(kind, shape=(1, 4))],
            torch.zeros(1, 4),
            name=name,
            target="iOS18",
            outputs=[ct.TensorType(f"{name}_y")],
        )
        described.add_function(str(one), "main", name)
    described.default_function_name = default
    path, x = tmp_path / "both.mlpackage", floats(1, 4)
    with quiet_host():
        ct.utils.save_multifunction(described, str(path))
    for name, (kind, linear) in parts.items():
        close(the(run(path, {kind: x}, function=name)), torch_says(linear, x))
        made = run(path, {kind: x}, function=name, outputs=[f"{name}_y"])
        close(made[f"{name}_y"], torch_says(linear, x))
    kind, linear = parts[default]
    close(the(run(path, {kind: x})), torch_says(linear, x))
    with pytest.raises(UnknownName, match="unknown value 'short_y'; did you mean 'longer_y'"):
        run(path, {"z": x}, function="longer", outputs=["short_y"])
    with pytest.raises(UnknownName, match="unknown function 'shor'; did you mean 'short'"):
        Predictor(path, function="shor")
    with pytest.raises(UnknownName, match="unknown input 'x'; known: z"):
        run(path, {"x": x}, function="longer")


def test_without_a_default_the_first_function_runs_as_described(corpus: Path) -> None:
    loaded = load(corpus / "anemll_multifunction.mlpackage")
    x = sample_inputs(loaded.program)
    expected = the(run(loaded, x, function="add_one"))
    loaded.spec.description.defaultFunctionName = ""
    np.testing.assert_array_equal(the(run(loaded, x)), expected)
    np.testing.assert_array_equal(expected, x["x"] + 1)


class Fading(torch.nn.Module):
    """A buffer that forgets half at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.acc: torch.Tensor
        self.register_buffer("acc", torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.acc.mul_(0.5).add_(x)
        return self.acc * 2


@pytest.mark.parametrize(("precision", "atol"), [("fp32", 1e-6), ("fp16", 4e-3)])
def test_a_state_is_the_buffer_of_the_module(package: Callable[..., Path], precision: str, atol: float) -> None:
    kept = ct.StateType(ct.TensorType(shape=(2, 3), dtype=HALF), name="acc")
    kind = ct.TensorType("x", shape=(2, 3), dtype=HALF)
    path = package(Fading(), [kind], torch.zeros(2, 3), states=[kept], target="iOS18", half=True)
    predict, module = Predictor(path, precision=precision), Fading()
    state, stored = predict.make_state(), np.zeros((2, 3), HALF)
    assert not state["acc"].value.any()
    for _ in range(4):
        x = floats(2, 3).astype(HALF)
        made = the(predict({"x": x}, state=state))
        np.testing.assert_allclose(made, torch_says(module, x.astype(np.float32)), rtol=0, atol=atol)
        np.testing.assert_allclose(state["acc"].value, module.acc, rtol=0, atol=atol)
        stored = stored * HALF(0.5) + x
        if precision == "fp16":
            np.testing.assert_array_equal(state["acc"].value, stored.astype(np.float32))
    close(the(predict({"x": x})), 2 * x.astype(np.float32))
    assert not predict.make_state()["acc"].value.any()


ENCODE = torch.nn.Linear(4, 5)
DECODE = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Softmax(-1))


def encoder() -> Any:
    kind = [ct.TensorType("x", shape=(1, 4))]
    return convert(ENCODE, kind, torch.zeros(1, 4), outputs=[ct.TensorType("h")])


def decoder(**options: Any) -> Any:
    kind = [ct.TensorType("h", shape=(1, 5))]
    return convert(DECODE, kind, torch.zeros(1, 5), outputs=[ct.TensorType("y")], **options)


def test_a_pipeline_runs_its_models_in_order(tmp_path: Path) -> None:
    path, x = tmp_path / "pipeline.mlpackage", floats(1, 4)
    with quiet_host():
        ct.utils.make_pipeline(encoder(), decoder()).save(str(path))
    assert sum(f.stat().st_size for f in path.rglob("*.bin")) > 4 * (ENCODE.weight.numel() + 30)
    made = ane.run(path, {"x": x}, outputs=["y", "h"])
    hidden = torch_says(ENCODE, x)
    close(made["h"], hidden)
    close(made["y"], torch_says(DECODE, hidden))
    np.testing.assert_array_equal(the(ane.run(path, {"x": x})), made["y"])
    with pytest.raises(UnknownName, match="unknown input 'h'; known: x"):
        ane.run(path, {"x": x, "h": hidden})
    with pytest.raises(InterpretError, match="missing input 'x'"):
        ane.run(path, {})
    with pytest.raises(InterpretError, match="input 'x' is not an array"):
        ane.run(path, {"x": [[1, 2], [3]]})
    assert Predictor(path).make_state() == {}


def test_a_part_without_a_program_is_named(tmp_path: Path) -> None:
    spec = proto.Model_pb2.Model(specificationVersion=7)
    spec.pipeline.models.add(specificationVersion=7).identity.SetInParent()
    path = tmp_path / "pipeline.mlmodel"
    path.write_bytes(spec.SerializeToString())
    with pytest.raises(LoadError, match="model 0 of the pipeline is of type identity, which has no tensor ops"):
        ane.run(path, {"x": floats(1, 4)})


@pytest.mark.slow
def test_real_packages_run_as_their_programs_do(corpus: Path) -> None:
    for path in sorted(corpus.glob("*.mlpackage")):
        program = load(path).program
        for name in program.functions:
            sampled = sample_inputs(program, function=name, length=2)
            values = {k: abs(v) for k, v in sampled.items()}  # some are magnitudes
            made = run(path, values, function=name)
            for output, value in run(program, values, function=name).items():
                np.testing.assert_array_equal(made[output], value)
                assert np.isfinite(value).all()
