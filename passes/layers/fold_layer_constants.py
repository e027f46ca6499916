"""Leave out layers that change nothing, and compute those that read constants only.

Before::

    network(%x: 1x2x4x4) {
      %ones: 2x1x1 = loadConstantND(shape=[2, 1, 1], data=[1, 1])
      %same: 1x2x4x4 = multiplyBroadcastable(%x, %ones)
      %a: 2 = loadConstantND(shape=[2], data=[1, 2])
      %b: 2x1 = expandDims(%a, axes=[1])
      %c: 2x1x1 = expandDims(%b, axes=[2])
      %y: 1x2x4x4 = addBroadcastable(%same, %c)
      return %y
    }

After::

    network(%x: 1x2x4x4) {
      %c: 2x1x1 = loadConstantND(shape=[2, 1, 1], data=[1, 2])
      %y: 1x2x4x4 = addBroadcastable(%x, %c)
      return %y
    }

A product with ones, a sum with zeros, a division by ones, the power 1, a linear activation 1 x + 0, `scale` by
ones, `bias` of zeros, padding and cropping by nothing go: their readers read the other side. Where the output
of the network is such a product, a linear activation makes it. A layer whose value is the same at every run
becomes a `loadConstantND`, in the mapping to rank 5 a `loadConstant`, with the fp32 value that the interpreter
computes; constants that are then read by nobody go.

Refuses when the numbers are near to 1 or 0, but not these; when the result has another shape than the other
side, or the other side is overwritten later; when a layer of one input has to make an output of the network;
when a computed constant has more than `limit` numbers and more than the largest one it is made of, or no axes,
more than 5, or, in the mapping to rank 5, a sequence or batch.

Why it helps: less work, and no layers of the kinds that were reported off the ANE (hollance/neural-engine,
unsupported-layers: Broadcastable, ND). The gain was not measured. Exact, where 0 and -0 count as equal.

Grade: bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site
from anesurgery.files.protobuf import proto

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

Numbers = list[tuple[an.Array, int]]
"""What a layer of one input multiplies by or adds, and the number with which that changes nothing."""


def _stored(params: Any, shape: Any) -> an.Array:
    count = int(np.prod(list(shape) or [1]))
    return an.spec.weights(params, [count], "the constant")


def _edges(amounts: Any) -> an.Array:
    sizes = [n for e in amounts.borderAmounts for n in (e.startEdgeSize, e.endEdgeSize)]
    return np.array(sizes or [0], np.float64)


def _activation(p: Any) -> Numbers:
    if p.WhichOneof("NonlinearityType") != "linear":
        return []
    return [(np.array(p.linear.alpha), 1), (np.array(p.linear.beta), 0)]


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
    """Layers that change nothing go; those that read constants only become constants."""

    name = "fold_layer_constants"
    precedes = ("legacy_*",)  # what computes nothing goes before it is rewritten
    kinds = frozenset(f.name for f in _LAYERS) - NESTED

    limit: int = 1024
    """Numbers that a computed constant may have even if those it is made of have fewer."""

    def rewrite(self, site: Site) -> Refusal | None:
        """A constant, if the value is known; else the other side, if that is the value."""
        if len(site.outputs) != 1 or not site.inputs:
            return None
        if (value := site.constant(site.outputs[0])) is not None:
            return self._fold(site, value)
        if len(site.inputs) == 1 and site.node.kind in ALONE:
            return _skip_alone(site)
        if len(site.inputs) == 2 and site.node.kind in NEUTRAL:
            return _skip_constant(site)
        return None

    def _fold(self, site: Site, value: an.Array) -> Refusal | None:
        out = site.outputs[0]
        read = [c.size for blob in site.inputs if (c := site.constant(blob)) is not None]
        if value.size > max(self.limit, *read, 0):
            return Refusal(
                f"its value has {value.size} numbers, more than {self.limit} and than what it is made of"
            )
        if not 1 <= value.ndim <= AXES or value.dtype.kind not in "biuf":
            return Refusal(f"its value has {value.ndim} axes, a stored constant has 1 to {AXES}")
        legacy = an.spec.is_legacy(site.network.message)
        if legacy and (value.ndim != AXES or value.shape[:LEADING] != (1, 1)):
            return Refusal(f"its value has the shape {value.shape}, not (1, 1, C, H, W)")
        shape = value.shape[LEADING:] if legacy else value.shape
        data = an.weights(_computed(site))
        site.emit("loadConstant" if legacy else "loadConstantND", [], [out], shape=shape, data=data)
        return None


def _computed(site: Site) -> an.Array:
    """The value of the one output as the interpreter computes it, whose rounding the proof compares."""
    import torch

    env = site.network.blobs.ctx.env
    var = env[site.outputs[0]]
    # A value that is known may depend on the shape of one that is not.
    unknown = {v for v in env.values() if v.val is None}
    ops = an.dependence.slice_back([var], unknown)
    read = {v for op in ops for _, v in an.operands(op) if v in unknown}
    rng = np.random.default_rng(0)
    drawing = an.adversarial.Drawing(lambda *_: None)
    bindings = {v: torch.from_numpy(drawing.draw(v, "normal", rng)) for v in read}
    return an.interpret.evaluate(ops, bindings, [var])[0].numpy()


def _skip_alone(site: Site) -> Refusal | None:
    if not _is_neutral(numbers := ALONE[site.node.kind](site.params)):
        return _nearly_neutral(numbers)
    if site.outputs[0] in site.network.outputs:
        return Refusal("it changes nothing, but has to make an output of the network")
    return _forward(site, site.inputs[0])


def _skip_constant(site: Site) -> Refusal | None:
    number, commutes = NEUTRAL[site.node.kind]
    x, y = site.inputs
    for one, other in [(x, y), (y, x)][: 1 + commutes]:
        if (value := site.constant(other)) is not None:
            numbers = [(value, number)]
            return _forward(site, one) if _is_neutral(numbers) else _nearly_neutral(numbers)
    return None


def _is_neutral(numbers: Numbers) -> bool:
    """Do they change nothing?"""
    return bool(numbers) and all((value == number).all() for value, number in numbers)


def _nearly_neutral(numbers: Numbers) -> Refusal | None:
    """A refusal where it only looks as if they changed nothing."""
    apart = [(v, n) for v, n in numbers if not (v == n).all()]
    for value, number in apart:
        worst = np.ravel(value)[np.argmax(np.abs(np.ravel(value) - number))]  # NaN is the largest
        if np.isnan(worst) or all(np.allclose(v, n, rtol=0, atol=NEAR) for v, n in apart):
            return Refusal(f"it holds {worst:.9g}, not {number}")
    return None


def _forward(site: Site, blob: str) -> Refusal | None:
    shape, wanted = site.shape(blob), site.shape(site.outputs[0])
    if shape != wanted:
        return Refusal(f"it makes the shape {wanted} of {shape}")
    site.forward(blob)
    return None


def example() -> Any:
    """A product with ones, and a sum with a constant that takes its shape by and by."""
    layers = [
        an.make_constant("ones", np.ones((2, 1, 1))),
        an.make_layer("multiplyBroadcastable", ["x", "ones"], ["same"]),
        an.make_constant("a", [1, 2]),
        an.make_layer("expandDims", ["a"], ["b"], axes=[1]),
        an.make_layer("expandDims", ["b"], ["c"], axes=[2]),
        an.make_layer("addBroadcastable", ["same", "c"], ["y"]),
    ]
    return an.make_network({"x": (1, 2, 4, 4)}, layers, ["y"])
