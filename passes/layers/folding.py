"""Layers that go: they change nothing, read constants only or are not read; custom ones as built-in ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery import interpret
from anesurgery.authoring import Array, Refused, Session
from anesurgery.checking import adversarial
from anesurgery.facts import dependence
from anesurgery.files.protobuf import proto
from anesurgery.network_editing.layer_pass import LayerPass, LayerRewrite, Site
from anesurgery.network_editing.network import Network
from anesurgery.neuralnetwork import spec
from anesurgery.neuralnetwork.making import weights
from anesurgery.rewriting.session import Change

NEUTRAL = {
    "multiply": (1, True),
    "multiplyBroadcastable": (1, True),
    "add": (0, True),
    "addBroadcastable": (0, True),
    "subtractBroadcastable": (0, False),
    "divideBroadcastable": (1, False),
    "powBroadcastable": (1, False),
}
"""Layer of two inputs -> the number with which it gives the other side, and may that stand first?"""
NEAR = 1e-3
"""How far from it a constant is reported as nearly that number: what fp16 rounds numbers near 1 by, twice."""
POWER = 3
"""`type` of a `unary` layer."""
NESTED = frozenset({"branch", "loop", "loopBreak", "loopContinue", "copy"})
_LAYERS = proto.NeuralNetwork_pb2.NeuralNetworkLayer.DESCRIPTOR.oneofs_by_name["layer"].fields
AXES, LEADING = 5, 2
"""Most axes of a constant; those in front of channel, height and width."""

Numbers = list[tuple[Array, int]]
"""What a layer of one input multiplies by or adds, and the number with which that changes nothing."""


def _stored(params: Any, shape: Any) -> Array:
    count = int(np.prod(list(shape) or [1]))
    return spec.weights(params, [count], "the constant")


def _edges(amounts: Any) -> Array:
    sizes = [n for e in amounts.borderAmounts for n in (e.startEdgeSize, e.endEdgeSize)]
    return np.array(sizes or [0], np.float64)


def _activation(p: Any) -> Numbers:
    return [(np.array(p.linear.alpha), 1), (np.array(p.linear.beta), 0)] if p.HasField("linear") else []


def _unary(p: Any) -> Numbers:
    if p.type != POWER:
        return []
    return [(np.array(p.alpha), 1), (np.array(p.scale or 1.0), 1), (np.array(p.shift), 0)]


def _scale(p: Any) -> Numbers:
    added = [(_stored(p.bias, p.shapeBias), 0)] if p.hasBias else []
    return [(_stored(p.scale, p.shapeScale), 1), *added]


ALONE: dict[str, Callable[[Any], Numbers]] = {
    "activation": _activation,
    "add": lambda p: [(np.array(p.alpha), 0)],
    "multiply": lambda p: [(np.array(p.alpha), 1)],
    "unary": _unary,
    "scale": _scale,
    "bias": lambda p: [(_stored(p.bias, p.shape), 0)],
    "padding": lambda p: [(_edges(p.paddingAmounts), 0)],
    "crop": lambda p: [(_edges(p.cropAmounts), 0)],
    "constantPad": lambda p: [(np.array(list(p.padAmounts) or [0]), 0)],
}
"""Layer of one input -> its numbers; none where they do not decide."""


@dataclass(frozen=True)
class FoldLayerConstants(LayerRewrite):
    """Leave out layers that change nothing, and compute those that read constants only.

    A product with ones, a sum with zeros, a division by ones, the power 1, a linear activation 1 x + 0, `scale`
    by ones, `bias` of zeros, padding and cropping by nothing go: their readers read the other side. Where the
    output of the network is such a product, a linear activation makes it. A layer whose value is the same at
    every run becomes a `loadConstantND`, in the mapping to rank 5 a `loadConstant`, with the fp32 value that
    the interpreter computes; constants that are then read by nobody go.

    Refuses when the numbers are near to 1 or 0, but not these; when the result has another shape than the other
    side, or the other side is overwritten later; when a layer of one input has to make an output of the
    network; when a computed constant has more than `limit` numbers and more than the largest one it is made of,
    or no axes, more than 5, or, in the mapping to rank 5, a sequence or batch.

    Why it helps: less work, and no layers of the kinds that were reported off the ANE (hollance/neural-engine,
    unsupported-layers: Broadcastable, ND). The gain was not measured. Exact, where 0 and -0 count as equal.

    Grade: bit for bit.
    """

    name = "fold_layer_constants"
    precedes = ("legacy_*",)  # what computes nothing goes before it is rewritten
    kinds = frozenset(f.name for f in _LAYERS) - NESTED

    limit: int = 1024
    """Numbers that a computed constant may have even if those it is made of have fewer."""

    def rewrite(self, site: Site) -> None:
        """A constant, if the value is known; else the other side, if that is the value."""
        if len(site.outputs) != 1 or not site.inputs:
            return
        if (value := site.constant(site.outputs[0])) is not None:
            self._fold(site, value)
        elif len(site.inputs) == 1 and site.node.kind in ALONE:
            _skip_alone(site)
        elif len(site.inputs) == 2 and site.node.kind in NEUTRAL:
            _skip_constant(site)

    def _fold(self, site: Site, value: Array) -> None:
        out = site.outputs[0]
        read = [c.size for blob in site.inputs if (c := site.constant(blob)) is not None]
        if value.size > max(self.limit, *read, 0):
            raise Refused(
                f"its value has {value.size} numbers, more than {self.limit} and than what it is made of"
            )
        if not 1 <= value.ndim <= AXES or value.dtype.kind not in "biuf":
            raise Refused(f"its value has {value.ndim} axes, a stored constant has 1 to {AXES}")
        legacy = spec.is_legacy(site.network.message)
        if legacy and (value.ndim != AXES or value.shape[:LEADING] != (1, 1)):
            raise Refused(f"its value has the shape {value.shape}, not (1, 1, C, H, W)")
        shape = value.shape[LEADING:] if legacy else value.shape
        data = weights(_computed(site))
        site.emit("loadConstant" if legacy else "loadConstantND", [], [out], shape=shape, data=data)


def _computed(site: Site) -> Array:
    """The value of the one output as the interpreter computes it, whose rounding the proof compares."""
    import torch

    env = site.network.blobs.ctx.env
    var = env[site.outputs[0]]
    # A value that is known may depend on the shape of one that is not.
    unknown = {v for v in env.values() if v.val is None}
    ops = dependence.slice_back([var], unknown)
    read = {v for op in ops for _, v in an.operands(op) if v in unknown}
    rng = np.random.default_rng(0)
    drawing = adversarial.Drawing(lambda *_: None)
    bindings = {v: torch.from_numpy(drawing.draw(v, "normal", rng)) for v in read}
    return interpret.evaluate(ops, bindings, [var])[0].numpy()


def _skip_alone(site: Site) -> None:
    numbers = ALONE[site.node.kind](site.params)
    if _is_neutral(numbers) and site.outputs[0] in site.network.outputs:
        raise Refused("it changes nothing, but has to make an output of the network")
    _skip(site, site.inputs[0], numbers)


def _skip_constant(site: Site) -> None:
    number, commutes = NEUTRAL[site.node.kind]
    x, y = site.inputs
    for one, other in [(x, y), (y, x)][: 1 + commutes]:
        if (value := site.constant(other)) is not None:
            _skip(site, one, [(value, number)])
            return


def _skip(site: Site, blob: str, numbers: Numbers) -> None:
    """Let the readers read `blob` if the numbers change nothing; refuse where it only looks so."""
    if _is_neutral(numbers):
        if (shape := site.shape(blob)) != (wanted := site.shape(site.outputs[0])):
            raise Refused(f"it makes the shape {wanted} of {shape}")
        site.forward(blob)
    apart = [(v, n) for v, n in numbers if not (v == n).all()]
    for value, number in apart:
        worst = np.ravel(value)[np.argmax(np.abs(np.ravel(value) - number))]  # NaN is the largest
        if np.isnan(worst) or all(np.allclose(v, n, rtol=0, atol=NEAR) for v, n in apart):
            raise Refused(f"it holds {worst:.9g}, not {number}")


def _is_neutral(numbers: Numbers) -> bool:
    """Do they change nothing?"""
    return bool(numbers) and all((value == number).all() for value, number in numbers)


@dataclass(frozen=True)
class RemoveUnreadLayers(LayerPass):
    """Remove the layers that no output of the network depends on.

    Refuses when a layer holds networks of its own (a branch, a loop): what it does inside is not looked at. A
    layer that makes a blob which such a network speaks of stays for the same reason.

    Why it helps: a smaller file and less work. That Core ML does not remove them by itself was not measured.
    Exact: the outputs do not read them.

    Grade: none: no output depends on what goes.
    """

    name = "remove_unread_layers"
    follows = ("*",)  # they leave layers that nobody reads

    def run(self, network: Network, session: Session) -> None:
        """Remove them from the last to the first."""
        for node in network.remove_unread():
            words = "no output depends on it"
            session.changes.append(Change(self.name, node.name, (str(node),), (), unchecked=words))


BETA = "beta"
NUMBERS = ("doubleValue", "intValue", "longValue")
"""The kinds of a parameter that are numbers."""


@dataclass(frozen=True)
class SwishLayers(LayerRewrite):
    """Write custom layers of the class Swish as a sigmoid and a product.

    The code of a custom layer is not in the file, so the pass takes the name for x sigmoid(x), and a number
    `beta` among its parameters for x sigmoid(beta x): so are they defined by the paper (Ramachandran and
    others, arXiv 1710.05941) and by the class of the example from which the name comes
    (hollance/CoreML-Custom-Layers, Swish.swift, where `beta` is 1 if it is absent). Nothing can be compared
    with the old layer: each change is noted as not checked. Check a few outputs of both models on a Mac.

    Refuses when the layer has weights, other parameters, or a `beta` that is not a number, and when it does not
    read one blob and make one. `class_names` says which classes are meant.

    Why it helps: custom layers have code for the CPU, and perhaps the GPU, never for the ANE; sigmoids and
    products mostly run there (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Not
    measured.

    Grade: none: the code of a custom layer is not in the file.
    """

    name = "swish_layers"
    precedes = ("*",)  # after a custom layer no shape is known
    kinds = frozenset({"custom"})
    caveat = "the code of the class is not in the file; its name is taken for x sigmoid(x)"
    class_names: tuple[str, ...] = ("Swish",)
    """The classes that compute it."""

    def rewrite(self, site: Site) -> None:
        """A sigmoid, of beta x if there is a beta, then the product with x."""
        params = site.params
        if params.className not in self.class_names:
            return
        if (len(site.inputs), len(site.outputs)) != (1, 1):
            blobs = f"{len(site.inputs)} blobs and makes {len(site.outputs)}"
            raise Refused(f"it reads {blobs}; Swish reads one and makes one")
        if len(params.weights):
            raise Refused(f"it has {len(params.weights)} weights, and the file does not say what they do")
        beta = _beta(params.parameters)
        x = site.inputs[0]
        scaled = x if beta == 1 else site.linear(x, beta, 0.0)
        gate = site.emit("activation", [scaled], sigmoid={})
        site.emit("multiply", [x, gate], site.outputs)


def _beta(parameters: Any) -> float:
    """The factor of x within the sigmoid."""
    if others := sorted(set(parameters) - {BETA}):
        named = ", ".join(others)
        raise Refused(f"it has the parameters {named}, and the file does not say what they do")
    if BETA not in parameters:
        return 1.0
    kind = parameters[BETA].WhichOneof("value")
    if kind not in NUMBERS:
        raise Refused(f"its parameter {BETA} is {kind or 'empty'}, no number")
    return float(getattr(parameters[BETA], kind))
