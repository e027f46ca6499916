"""Layers that a network can do without: no-ops, constant values, unread layers, and custom ones by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anesurgery import authoring as an
from anesurgery import interpret
from anesurgery.authoring import Array, Refused, Session
from anesurgery.checking import adversarial
from anesurgery.facts import dependence
from anesurgery.files.protobuf import proto
from anesurgery.mil import MOST_AXES
from anesurgery.network_editing.layer_pass import LayerPass, LayerRewrite, Site
from anesurgery.network_editing.network import Network
from anesurgery.neuralnetwork import spec
from anesurgery.neuralnetwork.making import weights
from anesurgery.rewriting.session import Change


class _Neutral(NamedTuple):
    """The number with which a layer of two inputs gives its other side."""

    number: int
    either_side: bool = False
    """May the number be the first side too?"""


NEUTRAL = {
    "multiply": _Neutral(1, either_side=True),
    "multiplyBroadcastable": _Neutral(1, either_side=True),
    "add": _Neutral(0, either_side=True),
    "addBroadcastable": _Neutral(0, either_side=True),
    "subtractBroadcastable": _Neutral(0),
    "divideBroadcastable": _Neutral(1),
    "powBroadcastable": _Neutral(1),
}
NEAR = 1e-3
"""A constant is reported if it is this near to a neutral number: fp16 rounds numbers near 1 by half as much."""
POWER = 3
"""`type` of a `unary` layer."""
NESTED = frozenset({"branch", "loop", "loopBreak", "loopContinue", "copy"})
_LAYERS = proto.NeuralNetwork_pb2.NeuralNetworkLayer.DESCRIPTOR.oneofs_by_name["layer"].fields


class _Operand(NamedTuple):
    """What a layer of one input multiplies by or adds."""

    value: Array
    neutral: int
    """The number with which that changes nothing."""

    @property
    def is_neutral(self) -> bool:
        """Does it change nothing?"""
        return bool((self.value == self.neutral).all())


def _factor(number: float) -> _Operand:
    return _Operand(np.array(number), 1)


def _summand(number: float) -> _Operand:
    return _Operand(np.array(number), 0)


def _stored(params: Any, shape: Any) -> Array:
    """Return the numbers of a `WeightParams` message, in one axis."""
    count = int(np.prod(list(shape) or [1]))
    return spec.weights(params, [count], "the constant")


def _edges(amounts: Any) -> list[_Operand]:
    """Return the sizes of a `BorderAmounts` message, which change nothing if they are 0."""
    sizes = [n for e in amounts.borderAmounts for n in (e.startEdgeSize, e.endEdgeSize)]
    return [_Operand(np.array(sizes or [0], np.float64), 0)]


def _unary(p: Any) -> list[_Operand]:
    return [_factor(p.alpha), _factor(p.scale or 1.0), _summand(p.shift)] if p.type == POWER else []


def _scale(p: Any) -> list[_Operand]:
    added = [_Operand(_stored(p.bias, p.shapeBias), 0)] if p.hasBias else []
    return [_Operand(_stored(p.scale, p.shapeScale), 1), *added]


OPERANDS: dict[str, Callable[[Any], list[_Operand]]] = {
    "activation": lambda p: [_factor(p.linear.alpha), _summand(p.linear.beta)] if p.HasField("linear") else [],
    "add": lambda p: [_summand(p.alpha)],
    "multiply": lambda p: [_factor(p.alpha)],
    "unary": _unary,
    "scale": _scale,
    "bias": lambda p: [_Operand(_stored(p.bias, p.shape), 0)],
    "padding": lambda p: _edges(p.paddingAmounts),
    "crop": lambda p: _edges(p.cropAmounts),
    "constantPad": lambda p: [_Operand(np.array(list(p.padAmounts) or [0]), 0)],
}
"""Layer of one input -> its operands; empty if the layer computes something else."""


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
        """Store the value if it is known; else leave the layer out if it changes nothing."""
        if len(site.outputs) != 1 or not site.inputs:
            return
        if (value := site.constant(site.outputs[0])) is not None:
            self._fold(site, value)
        elif len(site.inputs) == 1 and site.node.kind in OPERANDS:
            _skip_layer_of_one_input(site)
        elif len(site.inputs) == 2 and site.node.kind in NEUTRAL:
            _skip_layer_of_two_inputs(site)

    def _fold(self, site: Site, value: Array) -> None:
        """Store the value of the layer in a constant."""
        read = [c.size for blob in site.inputs if (c := site.constant(blob)) is not None]
        if value.size > max(self.limit, *read, 0):
            raise Refused(
                f"its value has {value.size} numbers, more than {self.limit} and than what it is made of"
            )
        if not 1 <= value.ndim <= MOST_AXES or value.dtype.kind not in "biuf":
            raise Refused(f"its value has {value.ndim} axes, a stored constant has 1 to {MOST_AXES}")
        rank5 = spec.is_legacy(site.network.message)
        if rank5 and (value.ndim != MOST_AXES or value.shape[:2] != (1, 1)):
            raise Refused(f"its value has the shape {value.shape}, not (1, 1, C, H, W)")
        kind, shape = ("loadConstant", value.shape[2:]) if rank5 else ("loadConstantND", value.shape)
        site.emit(kind, [], site.outputs, shape=shape, data=weights(_computed(site)))


def _computed(site: Site) -> Array:
    """Return the value of the one output as the interpreter computes it: the check compares its rounding."""
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


def _skip_layer_of_one_input(site: Site) -> None:
    operands = OPERANDS[site.node.kind](site.params)
    if operands and all(o.is_neutral for o in operands) and site.outputs[0] in site.network.outputs:
        raise Refused("it changes nothing, but has to make an output of the network")
    _skip(site, site.inputs[0], operands)


def _skip_layer_of_two_inputs(site: Site) -> None:
    neutral = NEUTRAL[site.node.kind]
    x, y = site.inputs
    if (value := site.constant(y)) is not None:
        _skip(site, x, [_Operand(value, neutral.number)])
    elif neutral.either_side and (value := site.constant(x)) is not None:
        _skip(site, y, [_Operand(value, neutral.number)])


def _skip(site: Site, blob: str, operands: Sequence[_Operand]) -> None:
    """Let the readers of the layer read `blob` if all operands are neutral; refuse if they nearly are."""
    others = [o for o in operands if not o.is_neutral]
    if operands and not others:
        if (shape := site.shape(blob)) != (wanted := site.shape(site.outputs[0])):
            raise Refused(f"it makes the shape {wanted} of {shape}")
        site.forward(blob)
    nearly = all(np.allclose(o.value, o.neutral, rtol=0, atol=NEAR) for o in others)
    for operand in others:
        numbers = np.ravel(operand.value)
        worst = numbers[np.argmax(np.abs(numbers - operand.neutral))]  # argmax takes NaN as the largest
        if nearly or np.isnan(worst):
            raise Refused(f"it holds {worst:.9g}, not {operand.neutral}")


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
        """Remove these layers from the last to the first."""
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
        """Add a sigmoid, of beta x if there is a beta, then the product with x."""
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
    """Return the factor of x within the sigmoid."""
    if others := sorted(set(parameters) - {BETA}):
        named = ", ".join(others)
        raise Refused(f"it has the parameters {named}, and the file does not say what they do")
    if BETA not in parameters:
        return 1.0
    kind = parameters[BETA].WhichOneof("value")
    if kind not in NUMBERS:
        raise Refused(f"its parameter {BETA} is {kind or 'empty'}, no number")
    return float(getattr(parameters[BETA], kind))
