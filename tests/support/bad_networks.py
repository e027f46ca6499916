"""A table of networks that are damaged, too new or contradict themselves, and what is said of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from one_layer import floats

from anesurgery.files.protobuf import proto
from anesurgery.mil import quiet_host

with quiet_host():
    from coremltools.models import datatypes
    from coremltools.models.neural_network import NeuralNetworkBuilder

ColorSpace = proto.FeatureTypes_pb2.ImageFeatureType.ColorSpace
SIZE = (4, 5)
"""Height and width of the image."""


def build(mode: str | None = None) -> Any:
    """An image through layers of several kinds; nothing is wrong with it."""
    builder = NeuralNetworkBuilder([("image", datatypes.Array(3, *SIZE))], [("y", None)], mode=mode)
    builder.add_convolution(
        "conv",
        3,
        4,
        3,
        3,
        1,
        1,
        "same",
        1,
        floats(3, 3, 3, 4),
        floats(4),
        True,
        input_name="image",
        output_name="h",
    )
    builder.add_activation("act", "RELU", "h", "r")
    builder.add_unary("abs", "r", "s", "abs")
    builder.add_elementwise("sum", ["r", "s"], "t", "ADD")
    builder.add_pooling("pool", 1, 1, 1, 1, "AVERAGE", "VALID", "t", "g", is_global=True)
    builder.add_inner_product("fc", floats(3, 4), floats(3), 4, 3, True, "g", "scores")
    builder.add_softmax("soft", "scores", "y")
    if mode:
        builder.set_class_labels(["cat", "dog", "cow"], "label", prediction_blob="y")
    image = builder.spec.description.input[0].type.imageType
    image.height, image.width = SIZE
    image.colorSpace = ColorSpace.Value("RGB")
    return builder.spec


def network(spec: Any) -> Any:
    return getattr(spec, spec.WhichOneof("Type"))


def layer(spec: Any, name: str) -> Any:
    return next(found for found in network(spec).layers if found.name == name)


def weights(spec: Any) -> Any:
    return layer(spec, "conv").convolution.weights


def quantize(spec: Any, count: int = 108, bits: int = 8, **linear: list[float]) -> None:
    """Put integers in the place of the weights of the convolution."""
    weights(spec).Clear()
    weights(spec).rawValue = bytes(count)
    weights(spec).quantization.numberOfBits = bits
    for name, values in linear.items():
        getattr(weights(spec).quantization.linearQuantization, name).extend(values)


def look_up(spec: Any) -> None:
    quantize(spec, 54, bits=4)
    weights(spec).quantization.lookupTableQuantization.floatValue.extend([0.0] * 15)


def sign(spec: Any, scales: int, biases: int = 0) -> None:
    """8 bit numbers with a sign, as weights of the product."""
    found = layer(spec, "fc").innerProduct
    found.int8DynamicQuantize = True
    found.weights.Clear()
    found.weights.int8RawValue = bytes(12)
    found.weights.quantization.numberOfBits = 8
    found.weights.quantization.linearQuantization.scale.extend([1.0] * scales)
    found.weights.quantization.linearQuantization.bias.extend([1.0] * biases)


def halves(spec: Any, count: int) -> None:
    weights(spec).Clear()
    weights(spec).float16Value = bytes(count)


def newer_layer(spec: Any) -> None:
    """A layer whose type has a number that no field has: 3000, with the two bytes of an empty message."""
    found = layer(spec, "act")
    found.ClearField("activation")
    found.MergeFromString(b"\xc2\xbb\x01\x00")


def newer_activation(spec: Any) -> None:
    found = layer(spec, "act").activation
    found.Clear()
    found.MergeFromString(b"\xc2\xbb\x01\x00")


def scale(spec: Any, feature: str = "image", **fields: float) -> None:
    step = network(spec).preprocessing.add(featureName=feature)
    step.scaler.SetInParent()
    for name, value in fields.items():
        setattr(step.scaler, name, value)


def grey(spec: Any) -> None:
    """An image of one channel, with the bias of another in its preprocessing."""
    image(spec).colorSpace = ColorSpace.Value("GRAYSCALE")
    scale(spec, redBias=3)
    layer(spec, "conv").convolution.kernelChannels = 1
    weights(spec).floatValue[:] = [1.0] * 36


def image(spec: Any) -> Any:
    return spec.description.input[0].type.imageType


def connect(spec: Any, name: str, *inputs: str) -> None:
    layer(spec, name).input[:] = inputs


def produce(spec: Any, name: str, *outputs: str) -> None:
    layer(spec, name).output[:] = outputs


@dataclass(frozen=True)
class Bad:
    """A way to spoil a good network."""

    spoil: Callable[[Any], object]
    words: tuple[str, ...]
    """What the message must hold: where, what, and what to do next."""
    mode: str | None = None


def classifier(spoil: Callable[[Any], object], *words: str) -> Bad:
    return Bad(spoil, words, "classifier")


AGAIN = "export it again"
CONV, FC = "layer 'conv' (convolution)", "layer 'fc' (innerProduct)"

BAD: dict[str, Bad] = {
    "no weights": Bad(lambda s: weights(s).Clear(), (CONV, "weights has no numbers", AGAIN)),
    "few weights": Bad(
        lambda s: weights(s).floatValue.pop(), (CONV, "has 107 numbers, expected 108 (4x3x3x3)", AGAIN)
    ),
    "many weights": Bad(lambda s: weights(s).floatValue.append(1), (CONV, "weights has 109 numbers", AGAIN)),
    "few biases": Bad(
        lambda s: layer(s, "fc").innerProduct.bias.floatValue.pop(), (FC, "bias has 2 numbers", AGAIN)
    ),
    "no biases": Bad(lambda s: layer(s, "fc").innerProduct.bias.Clear(), (FC, "bias has no numbers", AGAIN)),
    "half of a half": Bad(lambda s: halves(s, 215), (CONV, "215 bytes, no multiple of 2", AGAIN)),
    "few halves": Bad(lambda s: halves(s, 214), (CONV, "weights has 107 numbers", AGAIN)),
    "few bytes": Bad(
        lambda s: quantize(s, 107, scale=[1.0]), (CONV, "107 bytes, expected 108 numbers of 8", AGAIN)
    ),
    "many bits": Bad(
        lambda s: quantize(s, bits=9, scale=[1.0]), (CONV, "numbers of 9 bits, expected 1 to 8", AGAIN)
    ),
    "no bits": Bad(lambda s: quantize(s, bits=0, scale=[1.0]), (CONV, "numbers of 0 bits", AGAIN)),
    "no scale": Bad(lambda s: quantize(s, bias=[1.0]), (CONV, "0 scales, expected 1 or 4", AGAIN)),
    "few scales": Bad(lambda s: quantize(s, scale=[1.0] * 3), (CONV, "3 scales, expected 1 or 4", AGAIN)),
    "few quantization biases": Bad(
        lambda s: quantize(s, scale=[1.0] * 4, bias=[1.0] * 3), (CONV, "3 biases", AGAIN)
    ),
    "no kind of quantization": Bad(quantize, (CONV, "neither by a scale nor by a", AGAIN)),
    "a short table": Bad(look_up, (CONV, "look-up table of 15 numbers, expected 16", AGAIN)),
    "two scales of signed weights": Bad(lambda s: sign(s, 2), (FC, "has 2 scales, not 1", AGAIN)),
    "a bias of signed weights": Bad(lambda s: sign(s, 1, 1), (FC, "has 1 biases, not 0", AGAIN)),
    "updatable": Bad(lambda s: setattr(s, "isUpdatable", True), ("is updatable", "updating", "off")),
    "a newer specification": Bad(
        lambda s: setattr(s, "specificationVersion", 99), ("specification 99", "upgrade coremltools")
    ),
    "a newer layer": Bad(newer_layer, ("layer 'act'", "a type that this coremltools does not know", "upgrade")),
    "a newer activation": Bad(
        newer_activation, ("layer 'act' (activation)", "no activation that is known", "upgrade")
    ),
    "no activation": Bad(
        lambda s: layer(s, "act").activation.Clear(), ("layer 'act' (activation)", "export the model")
    ),
    "a newer function": Bad(
        lambda s: setattr(layer(s, "abs").unary, "type", 77), ("layer 'abs' (unary): has type = 77", "upgrade")
    ),
    "few inputs": Bad(lambda s: connect(s, "conv"), (CONV, "has 0 inputs, takes 1 to 2", AGAIN)),
    "many inputs": Bad(
        lambda s: connect(s, "soft", "scores", "g"), ("'soft' (softmax)", "has 2 inputs, takes 1", AGAIN)
    ),
    "many outputs": Bad(
        lambda s: produce(s, "abs", "s", "s2"), ("'abs' (unary)", "has 2 outputs, makes 1", AGAIN)
    ),
    "no shape that fits": Bad(
        lambda s: connect(s, "fc", "t"), (FC, "does not fit its inputs of shape ('1', '4', '4', '5')", "change")
    ),
    "a blob of two layers": Bad(
        lambda s: produce(s, "abs", "h"), ("'abs' (unary)", "the blob 'h', which exists", "another name")
    ),
    "a blob that is an input": Bad(
        lambda s: produce(s, "abs", "image"), ("'abs'", "blob 'image', which exists", "another name")
    ),
    "a cycle": Bad(
        lambda s: connect(s, "conv", "y"), (CONV, "reads the blob 'y'", "a later layer", "'soft'", "order")
    ),
    "itself": Bad(lambda s: connect(s, "act", "r"), ("'act'", "reads the blob 'r'", "a cycle", "order")),
    "a blob of nobody": Bad(
        lambda s: connect(s, "soft", "score"),
        ("'soft' (softmax)", "reads the blob 'score', which nothing makes", "did you mean 'scores'"),
    ),
    "an output of nobody": Bad(
        lambda s: produce(s, "soft", "z"), ("output 'y' is a blob that no layer makes", "name one")
    ),
    "two outputs of one name": Bad(
        lambda s: s.description.output.add().CopyFrom(s.description.output[0]),
        ("2 outputs are called", "name of its own"),
    ),
    "no name": Bad(lambda s: setattr(s.description.output[0], "name", ""), ("has no name", AGAIN)),
    "no layers": Bad(lambda s: network(s).ClearField("layers"), ("the network has no layers", AGAIN)),
    "no outputs": Bad(lambda s: s.description.ClearField("output"), ("the model has no outputs", AGAIN)),
    "no shape": Bad(
        lambda s: s.description.input[0].type.multiArrayType.SetInParent(),
        ("input 'image' has no shape", "state one"),
    ),
    "a dictionary": Bad(
        lambda s: s.description.input[0].type.dictionaryType.SetInParent(),
        ("input 'image' is of type dictionaryType", "images and multi-arrays"),
    ),
    "no colours": Bad(
        lambda s: image(s).ClearField("colorSpace"), ("image 'image' has no colour space", "RGB")
    ),
    "colours of a grey image": Bad(
        grey, ("preprocessing of 'image' sets", "colour space GRAYSCALE", "set grayBias")
    ),
    "grey of a colour image": Bad(
        lambda s: scale(s, grayBias=3), ("preprocessing of 'image' sets grayBias", "set redBias")
    ),
    "a scaler for nothing": Bad(
        lambda s: scale(s, "imgae"), ("a preprocessing is for no input", "did you mean 'image'")
    ),
    "no kind of preprocessing": Bad(
        lambda s: network(s).preprocessing.add(featureName="image"), ("'image' is neither a", "upgrade")
    ),
    "a small mean image": Bad(
        lambda s: network(s).preprocessing.add(featureName="image").meanImage.meanImage.extend([0.0] * 20),
        ("the mean image of 'image' has 20 numbers, expected 60 (3x4x5)", AGAIN),
    ),
    "no labels": classifier(
        lambda s: network(s).ClearField("ClassLabels"), "has no class labels", "export it again with"
    ),
    "few labels": classifier(
        lambda s: network(s).stringClassLabels.vector.pop(), "has 2 labels, but its blob 'y'", AGAIN
    ),
    "probabilities of nobody": classifier(
        lambda s: setattr(network(s), "labelProbabilityLayerName", "p"), "'p', which no layer makes", "name one"
    ),
    "one output for both": classifier(
        lambda s: setattr(s.description, "predictedProbabilitiesName", "label"),
        "'label' is the label and the probabilities",
        AGAIN,
    ),
    "a label that is no output": classifier(
        lambda s: setattr(s.description, "predictedFeatureName", "labell"),
        "predictedFeatureName names no output",
        "did you mean 'label'",
    ),
    "no name for the label": classifier(
        lambda s: s.description.ClearField("predictedFeatureName"), "which output is the label", "set"
    ),
}
"""What is wrong -> how to spoil a good network, and what is said."""


def spoiled(name: str) -> Any:
    spec = build(BAD[name].mode)
    BAD[name].spoil(spec)
    return spec
