"""Rows of layers, each read by the next alone, as fewer: bounds, signs and factors, normalizations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anesurgery.authoring import REASSOCIATED, Array, Refused, Var
from anesurgery.checking.lengths import drawn_shape
from anesurgery.network_editing.layer_pass import LayerRewrite, Site
from anesurgery.network_editing.network import Network, Node
from anesurgery.network_editing.steps import Step
from anesurgery.neuralnetwork import spec
from anesurgery.neuralnetwork.making import weights

WEIGHTED = frozenset({"convolution", "innerProduct"})
STORED = {"floatValue": "<f4", "float16Value": "<f2"}
"""Field of `WeightParams` that holds floats as they are -> their type."""


@dataclass(frozen=True)
class _Affine:
    """What a layer multiplies by and adds, in fp64.

    Attributes:
        weights: (groups, before, channels / groups, after), in the order in which they are stored; the output
            channels are the first axis together with the third.
        bias: of the output channels; None if the layer adds nothing.
        dtype: of both, as they are stored: "<f4" or "<f2".
    """

    weights: Array
    bias: Array | None
    dtype: str

    @property
    def channels(self) -> int:
        """The number of output channels."""
        return int(self.weights.shape[0] * self.weights.shape[2])

    @property
    def largest(self) -> float:
        """The largest magnitude among weights and bias; infinite if a number is undefined."""
        magnitudes = [np.abs(v).max(initial=0.0) for v in (self.weights, self.bias) if v is not None]
        return float(np.nan_to_num(np.max(magnitudes), nan=np.inf, posinf=np.inf))

    def times(self, factor: Array) -> _Affine:
        """Multiply the results of the layer by a factor for each output channel, or one for all."""
        each = np.broadcast_to(factor, self.channels)
        groups, _, part, _ = self.weights.shape
        bias = None if self.bias is None else self.bias * each
        return _Affine(self.weights * each.reshape(groups, 1, part, 1), bias, self.dtype)

    def plus(self, offset: Array) -> _Affine:
        """Add an offset for each output channel, or one for all, to the results of the layer."""
        bias = np.zeros(self.channels) if self.bias is None else self.bias
        return _Affine(self.weights, bias + offset, self.dtype)

    def write(self, params: Any) -> bool:
        """Store them in the message of a layer type; do they stay as they are, or are they rounded?"""
        exact = _store(params.weights, self.weights, self.dtype)
        if self.bias is not None:
            params.hasBias = True
            exact &= _store(params.bias, self.bias, self.dtype)
        return exact


def _read(node: Node) -> _Affine:
    """The weights and bias of a layer that is one of `WEIGHTED`, if they are stored as floats."""
    params = node.params
    if len(node.inputs) > 1:
        raise Refused(f"the weights of the {node.kind} are computed")
    stored = [params.weights, *([params.bias] if params.hasBias else [])]
    fields = {next((f for f in STORED if getattr(p, f)), "") for p in stored}
    if "" in fields:
        raise Refused(f"the weights of the {node.kind} are quantized; new ones would be rounded")
    if len(fields) > 1:
        raise Refused(f"the {node.kind} has weights of fp32 and of fp16")
    if node.message.isUpdatable or any(p.isUpdatable for p in stored):
        raise Refused(f"the weights of the {node.kind} are trainable")
    kernel, *bias = (np.array(spec.weights(p, [_count(p)], f"layer {node.name!r}"), np.float64) for p in stored)
    groups = int(params.nGroups) or 1 if _transposed(node) else 1
    before = int(params.kernelChannels) // groups if _transposed(node) else 1
    shape = [groups, before, int(params.outputChannels) // groups, -1]
    return _Affine(kernel.reshape(shape), bias[0] if bias else None, STORED[fields.pop()])


def _transposed(node: Node) -> bool:
    """Do the weights have the channels in first? Else those out."""
    return node.kind == "convolution" and bool(node.params.isDeconvolution)


def _count(params: Any) -> int:
    return len(params.floatValue) or len(params.float16Value) // 2


def _store(params: Any, values: Array, dtype: str) -> bool:
    with np.errstate(over="ignore"):
        rounded = np.ravel(values).astype(dtype)
    params.CopyFrom(type(params)(**weights(rounded, half=dtype == STORED["float16Value"])))
    return bool((rounded == np.ravel(values)).all())


THRESHOLD = 7
"""`type` of a `unary` layer that gives max(alpha, x)."""
MOST_NEGATIVE = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class _Bounds:
    """min(max(sign x, low), high)."""

    sign: float = 1
    low: float = -math.inf
    high: float = math.inf

    def then(self, last: _Bounds) -> _Bounds:
        """Return the bounds of one clip after the other."""
        ends = [min(max(last.sign * v, last.low), last.high) for v in (self.low, self.high)]
        return _Bounds(self.sign * last.sign, min(ends), max(ends))


def _bounds_of_activation(p: Any) -> _Bounds | None:
    kind = p.WhichOneof("NonlinearityType")
    if kind == "ReLU":
        return _Bounds(low=0)
    plain = kind == "linear" and p.linear.beta == 0 and abs(p.linear.alpha) == 1
    return _Bounds(p.linear.alpha) if plain else None


def _bounds_of_unary(p: Any) -> _Bounds | None:
    sign = p.scale or 1
    plain = p.type == THRESHOLD and p.shift == 0 and abs(sign) == 1
    return _Bounds(sign, p.alpha) if plain else None


LINKS: dict[str, Callable[[Any], _Bounds | None]] = {
    "activation": _bounds_of_activation,
    "unary": _bounds_of_unary,
    "clip": lambda p: _Bounds(1, p.minVal, p.maxVal),
}
"""Layer type -> its bounds, None where it does something else."""


def _bounds(node: Node) -> _Bounds | None:
    bounds = LINKS[node.kind](node.params) if node.kind in LINKS else None
    return bounds if bounds is not None and bounds.low <= bounds.high else None  # false of NaN


@dataclass(frozen=True)
class FuseClip(LayerRewrite):
    """Write layers in a row that bound a value from below and above as one layer, or two.

    ReLU, `unary` of type THRESHOLD, `clip`, and the linear activations x and -x compute together the bounds of
    x or -x. A lower bound alone is one layer: ReLU, or a threshold, which takes the sign as its scale. Where
    nothing is bounded no layer stays, or that of the sign. An upper bound takes two: max(-6, -x), then max(0,
    -that); without a lower bound the second one is the sign.

    In a network with exact shapes, or with newer layers, the example becomes one layer, `clip(%x, maxVal=6)`,
    if it bounds x, not -x. `clip` came with specification 4 (iOS 13, macOS 10.15), and Core ML's own check
    refuses it among arrays of rank 5, as networks of the first releases have them; so these keep to their
    layers and their version. Without a lower bound `clip` gets the least fp32 number: only minus infinity
    differs, which becomes it.

    Refuses when a blob that it would read is overwritten later. A blob that somebody else reads too ends the
    row, and a row stays that has no more layers than what would come.

    Why it helps: one layer or two in place of four, where a converter of the first releases wrote ReLU6; the
    gain was not measured. Activations and `unary` were reported on the ANE (hollance/neural-engine,
    unsupported-layers; through Core ML, iOS 11 to 15). `clip` was not measured in neural networks; the op of
    the same name in ML Programs ran there (M4, macOS 27.0.1; 751K). Exact: bounds and signs do not round.

    Grade: bit for bit.
    """

    name = "fuse_clip"
    follows = ("legacy_clip",)  # it joins its layers
    precedes = ("fuse_linear",)  # it takes signs that this needs
    kinds = frozenset(LINKS)

    def rewrite(self, site: Site) -> None:
        """The whole row, looked at from its last layer; it must be longer than what comes."""
        if _goes_on(site):
            return
        links = _chain_to(site.network, site.node)
        joint = _Bounds()
        for _, bounds in links:
            joint = joint.then(bounds)
        new = _form(joint, site.network.takes_newer)
        if len(links) > max(len(new), 1):
            site.chain(new, links[0][0].inputs[0])

    def sample(self, site: Site, var: Var, rng: np.random.Generator) -> Array | None:
        """Numbers around each bound of the old layers, and the bounds themselves."""
        links = _chain_to(site.network, site.node)
        ends = {abs(v) for _, b in links for v in (b.low, b.high) if abs(v) < -MOST_NEGATIVE}
        centers = np.array(sorted(ends | {0.0}))
        shape = drawn_shape(var)
        near = rng.choice(centers, shape) * rng.choice([-1, 1], shape)
        return (near + rng.standard_normal(shape) * rng.integers(0, 2, shape)).astype(np.float32)


def _goes_on(site: Site) -> bool:
    """Will a later layer be looked at as the end of the row?"""
    network = site.network
    readers = network.readers(site.outputs[0]) if len(site.outputs) == 1 else []
    if len(readers) != 1 or not all(map(network.plain, readers[0].outputs)):
        return False
    links = _chain_to(network, readers[0])
    return any(node is site.node for node, _ in links)


def _form(bounds: _Bounds, newer: bool) -> list[Step]:
    """The fewest layers, first one first, that compute the bounds.

    Args:
        bounds: the bounds.
        newer: may `clip` be among them?
    """
    if bounds == _Bounds():
        return []
    if bounds.high == math.inf:
        return [_from_below(bounds.sign, bounds.low)]
    low = max(bounds.low, MOST_NEGATIVE)
    if newer and bounds.sign > 0 and low < bounds.high:  # equal ones the op `clip` refuses
        # What is added makes 0 of -0.
        return [("clip", {"minVal": low + 0.0, "maxVal": bounds.high + 0.0})]
    return [_from_below(-bounds.sign, -bounds.high), _from_below(-1, bounds.low)]


def _from_below(sign: float, low: float) -> Step:
    """The layer of max(low, sign x)."""
    if low == -math.inf:
        return "activation", {"linear": {"alpha": sign}}
    if sign > 0 and low == 0:
        return "activation", {"ReLU": {}}
    scale = {} if sign > 0 else {"scale": sign}
    return "unary", {"type": "THRESHOLD", "alpha": low + 0.0, **scale}


MODEST = 64
"""Powers of two up to this one, or down to one over it, keep ordinary numbers in the range of fp32."""


class _Line(NamedTuple):
    """Alpha x + beta."""

    alpha: float
    beta: float

    @property
    def only_scales(self) -> bool:
        """Does it but multiply, without rounding?"""
        return self.beta == 0 and _is_power(self.alpha)

    def __str__(self) -> str:
        return f"{self.alpha:g} x + {self.beta:g}"


LINES: dict[str, Callable[[Any], _Line | None]] = {
    "activation": lambda p: _Line(p.linear.alpha, p.linear.beta) if p.HasField("linear") else None,
    "multiply": lambda p: _Line(p.alpha, 0),
    "add": lambda p: _Line(1, p.alpha),
}
"""Layer type of one input -> what it computes."""


def _line(node: Node | None) -> _Line | None:
    if node is None or len(node.inputs) != 1 or node.kind not in LINES:
        return None
    return LINES[node.kind](node.params)


@dataclass(frozen=True)
class FuseLinear(LayerRewrite):
    """Write linear layers in a row as one, and signs and powers of two into the weights beside them.

    A linear layer is a linear activation, or `multiply` or `add` with one number. Two of them become one where
    that rounds as both do: where one of the factors, or the last, is a power of two (with either sign), and
    what the first, or the last, adds is 0. A layer that multiplies by such a power, and adds nothing, goes into
    the weights of a convolution or inner product after it, or into the weights and bias of one before it.

    Refuses when the result would be rounded otherwise, as with 0.3 x + 1 after 0.7 x; when the weights beside
    it are computed, quantized, trainable, or of fp16 and would be rounded. A blob that somebody else reads too
    ends the row. Run `fuse_clip` before it, which needs the signs.

    Why it helps: fewer layers; the gain was not measured. Exact: multiplying by a power of two does not round,
    except numbers below 2**-126.

    Grade: proved.
    """

    name = "fuse_linear"
    tolerates_nonfinite = False
    """Factors that are taken together do not overflow or vanish in between."""
    kinds = frozenset(LINES) | WEIGHTED

    def rewrite(self, site: Site) -> None:
        """A linear layer with what is before it; weights with a linear layer before them."""
        node, before = site.node, _sole_maker(site.network, site.node)
        if before is None:
            return
        own, first = _line(node), _line(before)
        if own is not None and first is not None:
            _join(site, before.inputs[0], first, own)
        elif own is not None and before.kind in WEIGHTED:
            _scale(site, before, before, own)
        elif first is not None and node.kind in WEIGHTED and len(node.inputs) == 1:
            _scale(site, node, before, first)


def _join(site: Site, x: str, first: _Line, last: _Line) -> None:
    line = _Line(first.alpha * last.alpha, first.beta * last.alpha + last.beta)
    scales = first.beta == 0 and (_is_power(first.alpha) or _is_power(last.alpha))
    if not (scales or last.only_scales) or not all(map(_is_fp32, line)):
        raise Refused(f"{first}, then {last}: one layer would round otherwise")
    if line == (1, 0):
        site.forward(x)
    else:
        site.linear(x, *line, site.outputs)


def _scale(site: Site, weighted: Node, first: Node, line: _Line) -> None:
    """Put a factor into weights, and into the bias if they come before it."""
    if not line.only_scales:
        raise Refused(f"{line} beside a {weighted.kind} would round its weights otherwise")
    old = _read(weighted)
    new = old.times(np.array(line.alpha))
    if first is not weighted:
        new = _Affine(new.weights, old.bias, old.dtype)
    message = site.copy(weighted, first.inputs, site.outputs)
    if not new.write(getattr(message, weighted.kind)):
        raise Refused(f"{line.alpha:g} times the weights of the {weighted.kind} would be rounded")


def _is_power(number: float) -> bool:
    """Is it a power of two of an ordinary size, with either sign?"""
    mantissa, exponent = math.frexp(abs(number))
    return mantissa == 0.5 and abs(exponent - 1) <= MODEST


def _is_fp32(number: float) -> bool:
    with np.errstate(over="ignore"):
        return float(np.float32(number)) == number


EPSILON = 1e-5
"""What stands for an epsilon of 0, by the definition of the format."""
CHANNELS = 3
"""Axis of the channels, from the end."""


@dataclass(frozen=True)
class FoldBatchnorm(LayerRewrite):
    """Put a batch normalization into the weights and bias of the convolution or inner product before it.

    Each channel of the weights is multiplied by gamma / sqrt(variance + epsilon), and so is the bias less the
    mean, in fp64; the results are stored as fp32. Convolutions, grouped ones, deconvolutions and inner
    products; one without a bias gets one.

    Refuses when the layer before is another one, or somebody else reads what it makes; when its weights are
    computed, quantized, trainable or of fp16, which new values would be rounded to; when the mean and variance
    are computed; when a variance plus epsilon is not positive; when the inner product has its channels on the
    last axis; when the new weights are too large for fp32. A normalization that stays is legal on the engine.

    Why it helps: one layer in place of two; the gain was not measured. The sums are rounded otherwise, so that
    the numbers are equal within 1e-5 of the largest one (fp32), not bit for bit.

    Grade: checked: folded weights are rounded.
    """

    name = "fold_batchnorm"
    # it may fold into their convolutions
    follows = ("split_upsampling", "undilate_convolution")
    tolerates_nonfinite = False
    """A factor of 0 meets an infinity in another place."""
    kinds = frozenset({"batchnorm"})
    tolerance = REASSOCIATED

    def rewrite(self, site: Site) -> None:
        """New weights and bias in a copy of the layer before."""
        if site.params.computeMeanVar:
            raise Refused("its mean and variance are computed")
        before, old = _weights_before(site)
        scale, offset = _by_channel(site)
        new = old.times(scale).plus(offset)
        if new.largest > float(np.finfo(np.float32).max):
            raise Refused(f"the new weights would be as large as {new.largest:.3g}, beyond fp32")
        message = site.copy(before, before.inputs, site.outputs)
        new.write(getattr(message, before.kind))


def _weights_before(site: Site) -> tuple[Node, _Affine]:
    """The layer before and its weights, if they may change."""
    before = site.network.maker(site.inputs[0])
    if before is None or before.kind not in WEIGHTED:
        source = "an input" if before is None else f"a layer {before.kind}"
        raise Refused(f"it comes after {source}, no convolution or inner product")
    if _sole_maker(site.network, site.node) is None:
        raise Refused(f"what the {before.kind} makes is read elsewhere too")
    if before.kind == "innerProduct" and len(site.shape(site.inputs[0])) <= CHANNELS:
        raise Refused("the channels of the inner product are the last axis, its own are axis -3")
    old = _read(before)
    if old.dtype != STORED["floatValue"]:
        raise Refused(f"the weights of the {before.kind} are of fp16; new ones would be rounded")
    return before, old


def _by_channel(site: Site) -> tuple[Array, Array]:
    """What the channels are multiplied by, and what is added, in fp64."""
    params = site.params
    gamma, beta, mean, variance = (
        spec.weights(getattr(params, n), [int(params.channels)], n).astype(np.float64)
        for n in ("gamma", "beta", "mean", "variance")
    )
    below = variance + float(params.epsilon or np.float32(EPSILON))
    if not (below > 0).all():
        raise Refused(f"its variance plus epsilon is {below.min():g} somewhere, not positive")
    scale = gamma / np.sqrt(below)
    return scale, beta - mean * scale


def _chain_to(network: Network, node: Node) -> list[tuple[Node, _Bounds]]:
    """The longest row of layers that bound, each read by the next alone, that ends with a layer."""
    links: list[tuple[Node, _Bounds]] = []
    at: Node | None = node
    while at is not None and len(at.inputs) == len(at.outputs) == 1 and (bounds := _bounds(at)) is not None:
        links.append((at, bounds))
        at = _sole_maker(network, at)
    return links[::-1]


def _sole_maker(network: Network, node: Node) -> Node | None:
    """The layer that makes the first input of another, which alone reads it.

    None too if a blob that the former reads is overwritten later, so that it cannot be read in its place.
    """
    blob = node.inputs[0]
    maker = network.maker(blob) if network.only_reader(blob, node) else None
    return maker if maker is not None and all(map(network.plain, maker.inputs)) else None
