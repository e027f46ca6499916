"""Whole networks as ML Programs: images, classifiers, optional and flexible inputs, pipelines, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import anesurgery as ane
from anesurgery.errors import LoadError, UnknownName
from anesurgery.files.protobuf import proto
from anesurgery.loading import interface, load
from anesurgery.mil import Array, ct, quiet_host
from anesurgery.network_editing.upgrade import NOTES
from anesurgery.neuralnetwork.importing import import_network

with quiet_host():
    from coremltools.models import datatypes
    from coremltools.models.neural_network import NeuralNetworkBuilder, flexible_shape_utils
    from coremltools.models.utils import save_spec

Features = proto.FeatureTypes_pb2


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def relu(shape: tuple[int, ...] = (3, 4, 5), exact: bool = False, **options: Any) -> Any:
    """x -> relu -> y."""
    builder = NeuralNetworkBuilder(
        [("x", datatypes.Array(*shape))], [("y", None)], disable_rank5_shape_mapping=exact, **options
    )
    builder.add_activation("r", "RELU", "x", "y")
    return builder


def pixels(space: str, exact: bool = False, **scaler: float) -> Any:
    """An image of 5 x 4 pixels through its preprocessing and an identity."""
    channels = 1 if space == "GRAYSCALE" else 3
    builder = NeuralNetworkBuilder(
        [("image", datatypes.Array(channels, 4, 5))], [("y", None)], disable_rank5_shape_mapping=exact
    )
    builder.add_activation("i", "LINEAR", "image", "y", params=[1, 0])
    image = builder.spec.description.input[0].type.imageType
    image.width, image.height = 5, 4
    image.colorSpace = Features.ImageFeatureType.ColorSpace.Value(space)
    step = builder.spec.neuralNetwork.preprocessing.add(featureName="image")
    for name, value in {"channelScale": 1.0, **scaler}.items():
        setattr(step.scaler, name, value)
    return builder.spec


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("space", "biases", "order"),
    [("RGB", [1, 2, 3], [0, 1, 2]), ("BGR", [3, 2, 1], [2, 1, 0]), ("GRAYSCALE", [7], [0])],
)
def test_images_are_preprocessed(
    space: str, biases: list[int], order: list[int], exact: bool, tmp_path: Path
) -> None:
    color = {"redBias": 1, "greenBias": 2, "blueBias": 3} if space != "GRAYSCALE" else {"grayBias": 7}
    spec = pixels(space, exact, channelScale=0.5, **color)
    mode = "L" if space == "GRAYSCALE" else "RGB"
    raw = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)
    image = Image.fromarray(raw if mode == "RGB" else raw[..., 0], mode)
    value = raw.transpose(2, 0, 1)[order].astype(np.float32)
    expected = value * 0.5 + np.reshape(biases, (-1, 1, 1))
    path = tmp_path / "image.mlmodel"
    save_spec(spec, str(path))
    for model in (path, ane.upgrade(path, precision="fp32")):
        found = ane.run(model, {"image": image})["y"]
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-6)


def test_a_mean_image_is_subtracted() -> None:
    spec = pixels("RGB")
    mean = floats(3, 4, 5)
    spec.neuralNetwork.preprocessing[0].meanImage.meanImage.extend(mean.reshape(-1))
    x = floats(1, 3, 4, 5, seed=1)
    found = ane.run(import_network(spec), {"image": x})["y"]
    np.testing.assert_allclose(found, x[0] - mean, rtol=1e-6)
    del spec.neuralNetwork.preprocessing[0].meanImage.meanImage[0]
    with pytest.raises(LoadError, match="the mean image of 'image' has 59 numbers, expected 60"):
        import_network(spec)


def test_a_preprocessing_for_other_colours_is_refused() -> None:
    with pytest.raises(LoadError, match=r"'image' sets .*, which an image of colour space GRAYSCALE has not"):
        import_network(pixels("GRAYSCALE", redBias=3))


def test_an_optional_image_stays_an_image_and_must_be_given() -> None:
    spec = pixels("RGB")
    spec.description.input[0].type.isOptional = True
    loaded = import_network(spec)
    image = loaded.spec.description.input[0]
    assert (image.type.WhichOneof("Type"), image.type.isOptional) == ("imageType", False)
    assert "input 'image' must be given: an image has no default in an ML Program" in loaded.notes


@pytest.mark.parametrize(("spec", "named"), [(relu().spec, True), (pixels("RGB"), False)])
def test_a_preprocessing_of_all_images_is_noted_where_there_is_none(spec: Any, named: bool) -> None:
    spec.neuralNetwork.preprocessing.add(featureName="").scaler.channelScale = 2.0
    notes = import_network(spec).notes
    assert ("the preprocessing of all images was left out: no input is an image" in notes) == named


def classifier(labels: list[Any]) -> Any:
    builder = NeuralNetworkBuilder([("x", datatypes.Array(4))], [("probabilities", None)], mode="classifier")
    builder.add_inner_product("ip", floats(3, 4), None, 4, 3, False, "x", "scores")
    builder.add_softmax("s", "scores", "probabilities")
    builder.set_class_labels(labels, "label", prediction_blob="probabilities")
    return builder.spec


@pytest.mark.parametrize("labels", [["cat", "dog", "cow"], [5, 7, 9]])
def test_classifiers_keep_their_labels(labels: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "classifier.mlmodel"
    save_spec(classifier(labels), str(path))
    x = floats(4, seed=2)
    expected = torch.softmax(torch.from_numpy(floats(3, 4) @ x), 0).numpy()
    for model in (path, ane.upgrade(path, precision="fp32")):
        made = ane.run(model, {"x": x})
        assert made["label"] == labels[int(expected.argmax())]
        (found,) = (v for k, v in made.items() if k != "label")
        assert list(found) == labels
        np.testing.assert_allclose(list(found.values()), expected, rtol=1e-5)
    spec = classifier(labels)
    vector = getattr(spec.neuralNetworkClassifier, spec.neuralNetworkClassifier.WhichOneof("ClassLabels"))
    vector.vector.append(labels[0])
    with pytest.raises(LoadError, match="the classifier has 4 labels, but its blob 'probabilities'"):
        import_network(spec)


def test_a_file_stays_what_it_is_but_for_its_format(tmp_path: Path) -> None:
    builder = relu()
    description = builder.spec.description
    kept = {"author": "somebody", "license": "MIT", "versionString": "2.1", "shortDescription": "a net"}
    for field, text in kept.items():
        setattr(description.metadata, field, text)
    description.input[0].shortDescription = "what goes in"
    path, out = tmp_path / "old.mlmodel", tmp_path / "new.mlpackage"
    save_spec(builder.spec, str(path))
    bytes_before = path.read_bytes()
    model = ane.upgrade(path, precision="fp32")
    model.save(str(out))
    assert path.read_bytes() == bytes_before
    new = load(out)
    assert new.spec.WhichOneof("Type") == "mlProgram"
    assert {n: getattr(new.spec.description.metadata, n) for n in kept} == kept
    assert new.spec.description.input[0].shortDescription == "what goes in"
    assert new.spec.description.metadata.userDefined[NOTES].splitlines()[1] == (
        "64 bit floats became 32 bit floats: x, y"
    )
    x = floats(3, 4, 5)
    np.testing.assert_array_equal(ane.run(out, {"x": x})["y"], np.maximum(x, 0))


def test_names_that_mil_does_not_take_are_changed_and_told(tmp_path: Path) -> None:
    builder = relu()
    ct.utils.rename_feature(builder.spec, "x", "in/1")
    ct.utils.rename_feature(builder.spec, "y", "1")
    path = tmp_path / "names.mlmodel"
    save_spec(builder.spec, str(path))
    x = floats(3, 4, 5)
    np.testing.assert_array_equal(ane.run(path, {"in/1": x})["1"], np.maximum(x, 0))
    loaded = load(path)
    assert "'in/1' is called 'in_1': MIL takes identifiers only" in loaded.notes
    np.testing.assert_array_equal(ane.run(loaded, {"in_1": x})["_1"], np.maximum(x, 0))
    with pytest.raises(UnknownName, match="did you mean 'in_1'"):
        ane.run(loaded, {"in/1": x})


@pytest.mark.parametrize("kind", ["INT32", "FLOAT16", "FLOAT32", "DOUBLE"])
def test_types_of_arrays_are_kept(kind: str, tmp_path: Path) -> None:
    spec = relu().spec
    code = Features.ArrayFeatureType.ArrayDataType.Value(kind)
    for feature in (*spec.description.input, *spec.description.output):
        feature.type.multiArrayType.dataType = code
    x = np.array([-2, 3] * 30).reshape(3, 4, 5)
    model = ane.upgrade(ct.models.MLModel(spec, skip_model_load=True))
    found = ane.run(model, {"x": x})["y"]
    signature = interface(load(model)).functions["main"]
    wanted = {"INT32": "int32", "FLOAT16": "fp16"}.get(kind, "fp32")
    assert [p.kind for p in (*signature.inputs, *signature.outputs)] == [wanted, wanted]
    np.testing.assert_array_equal(found, np.maximum(x, 0))
    arrays = [
        f.type.multiArrayType
        for f in (*model.get_spec().description.input, *model.get_spec().description.output)
    ]
    names = {Features.ArrayFeatureType.ArrayDataType.Name(a.dataType) for a in arrays}
    assert names == {"FLOAT32" if kind == "DOUBLE" else kind}


def test_an_optional_input_is_zero_when_absent() -> None:
    builder = NeuralNetworkBuilder([("x", datatypes.Array(3)), ("h", datatypes.Array(3))], [("y", None)])
    builder.add_elementwise("sum", ["x", "h"], "y", "ADD")
    builder.spec.description.input[1].type.isOptional = True
    loaded = import_network(builder.spec)
    assert "input 'h' is optional: when it is absent, it is 0" in loaded.notes
    x = floats(3)
    np.testing.assert_array_equal(ane.run(loaded, {"x": x})["y"], x)
    np.testing.assert_array_equal(ane.run(loaded, {"x": x, "h": x})["y"], x + x)


def test_flexible_sizes_stay_flexible(tmp_path: Path) -> None:
    spec = pixels("RGB", True, channelScale=2.0)
    sizes = flexible_shape_utils.NeuralNetworkImageSizeRange()
    sizes.add_height_range((4, 9))
    sizes.add_width_range((5, -1))
    flexible_shape_utils.update_image_size_range(spec, "image", sizes)
    path = tmp_path / "flexible.mlmodel"
    save_spec(spec, str(path))
    x = floats(1, 3, 7, 30)
    for model in (path, ane.upgrade(path, precision="fp32")):
        np.testing.assert_allclose(ane.run(model, {"image": x})["y"], 2 * x)


def test_a_pipeline_is_upgraded_part_by_part(tmp_path: Path) -> None:
    first, second = relu(), relu()
    ct.utils.rename_feature(first.spec, "y", "h")
    ct.utils.rename_feature(second.spec, "x", "h")
    with quiet_host():
        parts = [ct.models.MLModel(b.spec, skip_model_load=True) for b in (first, second)]
        ct.utils.make_pipeline(*parts).save(str(tmp_path / "old.mlpackage"))
    x = floats(3, 4, 5)
    model = ane.upgrade(tmp_path / "old.mlpackage")
    assert [m.WhichOneof("Type") for m in model.get_spec().pipeline.models] == ["mlProgram"] * 2
    model.save(str(tmp_path / "new.mlpackage"))
    for path in ("old.mlpackage", "new.mlpackage"):
        np.testing.assert_array_equal(ane.run(tmp_path / path, {"x": x})["y"], np.maximum(x, 0))
    assert "model 1 of the pipeline: 64 bit floats became" in model.user_defined_metadata[NOTES]


def pipeline(*models: Any) -> Any:
    """Models one after the other, from the inputs of the first to the outputs of the last."""
    spec = proto.Model_pb2.Model(specificationVersion=4)
    spec.description.input.extend(models[0].description.input)
    spec.description.output.extend(models[-1].description.output)
    spec.pipeline.models.extend(models)
    return spec


def test_a_pipeline_of_one_model_is_upgraded(tmp_path: Path) -> None:
    save_spec(pipeline(relu().spec), str(tmp_path / "old.mlmodel"))
    x = floats(3, 4, 5)
    model = ane.upgrade(tmp_path / "old.mlmodel", precision="fp32")
    assert [m.WhichOneof("Type") for m in model.get_spec().pipeline.models] == ["mlProgram"]
    np.testing.assert_array_equal(ane.run(model, {"x": x})["y"], np.maximum(x, 0))


def test_a_model_that_stays_must_not_read_what_is_renamed(tmp_path: Path) -> None:
    """The wrong version looks at upgraded models only, and nobody makes what the other one reads."""
    first, stays = relu().spec, proto.Model_pb2.Model(specificationVersion=4)
    ct.utils.rename_feature(first, "y", "a/b")
    stays.description.input.extend(first.description.output)
    stays.description.output.extend(relu().spec.description.output)
    stays.identity.SetInParent()
    save_spec(pipeline(first, stays), str(tmp_path / "old.mlmodel"))
    with pytest.raises(LoadError, match="reads 'a/b', which an upgraded model must call 'a_b'"):
        ane.upgrade(tmp_path / "old.mlmodel", precision="fp32")


def test_a_network_can_be_rewritten_and_inspected(tmp_path: Path) -> None:
    path = tmp_path / "net.mlmodel"
    save_spec(relu((1, 3, 8, 8), exact=True).spec, str(path))
    assert ane.apply(path, []).model.get_spec().WhichOneof("Type") == "mlProgram"
    assert [row.op_type for row in ane.inspect(load(path)).ops][-1] == "relu"
    assert [row.op_type for row in ane.inspect(path).ops] == ["activation"]


def test_an_input_that_is_handed_through(tmp_path: Path) -> None:
    spec = relu().spec
    spec.description.output.add().CopyFrom(spec.description.input[0])
    path = tmp_path / "through.mlmodel"
    path.write_bytes(spec.SerializeToString())
    x = floats(3, 4, 5)
    found = ane.run(path, {"x": x})
    np.testing.assert_array_equal(np.squeeze(found["x"]), x)
    with pytest.raises(LoadError, match="'x' is an input and an output"):
        ane.upgrade(path, precision="fp32")
