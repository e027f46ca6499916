"""Layers in a row as fewer layers: bounds, factors, and normalizations after products.

In a row each layer reads the one before it, and nothing else reads that one's output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from anesurgery.authoring import REASSOCIATED, Array, Refused, Var
from anesurgery.checking.lengths import drawn_shape
from anesurgery.network_editing.layer_pass import LayerRewrite, Site
from anesurgery.network_editing.network import Network, Node
from anesurgery.neuralnetwork import spec
from anesurgery.neuralnetwork.making import Step, weights

WEIGHTED = frozenset({"convolution", "innerProduct"})
STORED = {"floatValue": "<f4", "float16Value": "<f2"}
"""Field of `WeightParams` that holds floats as they are -> their type."""
MOST_NEGATIVE = float(np.finfo(np.float32).min)


def _sole_maker(network: Network, node: Node) -> Node | None:
    """Return the layer before another in its row: it makes the first input, which nothing else reads.

    None too if a blob that the layer before reads is overwritten later, so that `node` cannot read it instead.
    """
    blob = node.inputs[0]
    maker = network.maker(blob) if network.only_reader(blob, node) else None
    return maker if maker is not None and all(map(network.plain, maker.inputs)) else None


@dataclass(frozen=True)
class _Affine:
    """The weights and bias of a convolution or inner product, in fp64."""

    weights: Array
    """In the order in which they are stored: (1, 1, out, in * height * width) for a convolution, and for a
    deconvolution, which stores input channels first, (groups, in / groups, out / groups, height * width). The
    first and the third axis together count the output channels."""
    bias: Array | None
    """One number for each output channel; None if the layer adds nothing."""
    dtype: str
    """The type in which both are stored: "<f4" or "<f2"."""

    @property
    def channels(self) -> int:
        """The number of output channels."""
        return int(self.weights.shape[0] * self.weights.shape[2])

    @property
    def largest(self) -> float:
        """The largest magnitude among weights and bias; infinite if one of them is NaN."""
        magnitudes = [np.abs(v).max(initial=0.0) for v in (self.weights, self.bias) if v is not None]
        return float(np.nan_to_num(np.max(magnitudes), nan=np.inf, posinf=np.inf))

    def times(self, factor: Array) -> _Affine:
        """Return those whose results are multiplied by a factor for each output channel, or one for all."""
        each = np.broadcast_to(factor, self.channels)
        groups, _, part, _ = self.weights.shape
        bias = None if self.bias is None else self.bias * each
        return _Affine(self.weights * each.reshape(groups, 1, part, 1), bias, self.dtype)

    def plus(self, offset: Array) -> _Affine:
        """Return those whose results are increased by an offset for each output channel."""
        bias = np.zeros(self.channels) if self.bias is None else self.bias
        return _Affine(self.weights, bias + offset, self.dtype)

    def write(self, params: Any) -> bool:
        """Store both in the message of a layer type; does the stored type hold all numbers exactly?"""
        exact = _store(params.weights, self.weights, self.dtype)
        if self.bias is not None:
            params.hasBias = True
            exact &= _store(params.bias, self.bias, self.dtype)
        return exact


def _read(node: Node) -> _Affine:
    """Return the weights and bias of a layer that is one of `WEIGHTED`.

    Raises:
        Refused: they are computed, quantized, trainable, or of two types.
    """
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
    groups, before = 1, 1
    if _transposed(node):
        groups = int(params.nGroups) or 1
        before = int(params.kernelChannels) // groups
    shape = [groups, before, int(params.outputChannels) // groups, -1]
    return _Affine(kernel.reshape(shape), bias[0] if bias else None, STORED[fields.pop()])


def _transposed(node: Node) -> bool:
    """Are the input channels the first axis of the stored weights? Otherwise the output channels are."""
    return node.kind == "convolution" and bool(node.params.isDeconvolution)


def _count(params: Any) -> int:
    return len(params.floatValue) or len(params.float16Value) // 2


def _store(params: Any, values: Array, dtype: str) -> bool:
    """Store numbers in a `WeightParams` message; does the type hold all of them exactly?"""
    with np.errstate(over="ignore"):
        rounded = np.ravel(values).astype(dtype)
    params.CopyFrom(type(params)(**weights(rounded, half=dtype == STORED["float16Value"])))
    return bool((rounded == np.ravel(values)).all())


THRESHOLD = 7
"""`type` of a `unary` layer that gives max(alpha, x)."""


@dataclass(frozen=True)
class _Bounds:
    """What a layer computes of x: min(max(sign x, low), high)."""

    sign: float = 1
    low: float = -math.inf
    high: float = math.inf

    def then(self, last: _Bounds) -> _Bounds:
        """Return what this layer and then `last` compute: max(x, 0), then max(-x, -6), is -x within [-6, 0]."""
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


BOUNDS: dict[str, Callable[[Any], _Bounds | None]] = {
    "activation": _bounds_of_activation,
    "unary": _bounds_of_unary,
    "clip": lambda p: _Bounds(1, p.minVal, p.maxVal),
}
"""Layer type -> a function of its message: what it computes, None if that is no bound."""


class _Link(NamedTuple):
    """One layer of a row of layers that bound a value."""

    node: Node
    bounds: _Bounds


def _row_ending_at(network: Network, node: Node) -> list[_Link]:
    """Return the longest row of layers that bound a value and that ends with `node`; empty if there is none."""
    row: list[_Link] = []
    layer: Node | None = node
    while layer is not None and (bounds := _bounds(layer)) is not None:
        row.insert(0, _Link(layer, bounds))
        layer = _sole_maker(network, layer)
    return row


def _bounds(node: Node) -> _Bounds | None:
    """Return how a layer bounds its input; None where it does anything else."""
    alone = node.kind in BOUNDS and len(node.inputs) == len(node.outputs) == 1
    bounds = BOUNDS[node.kind](node.params) if alone else None
    return bounds if bounds is not None and bounds.low <= bounds.high else None  # NaN is no bound either


@dataclass(frozen=True)
class FuseClip(LayerRewrite):
    """Write layers in a row that bound a value from below and above as one layer, or two.

    ReLU, `unary` of type THRESHOLD, `clip`, and the linear activations x and -x compute together the bounds of
    x or -x. A lower bound alone is one layer: ReLU, or a threshold, which takes the sign as its scale. Where
    nothing is bounded no layer stays, or that of the sign. An upper bound takes two: max(-6, -x), then max(0,
    -that); without a lower bound the second one is the sign.

    In a network with exact shapes, or with newer layers, the example becomes one layer, `clip(%x, maxVal=6)`,
    if it bounds x, not -x. `clip` came with specification 4 (iOS 13, macOS 10.15), and Core ML's own check
    refuses it among arrays of rank 5, as networks of iOS 11 and 12 have them; so these keep to their
    layers and their version. Without a lower bound `clip` gets the least fp32 number: only minus infinity
    differs, which becomes it.

    A blob that somebody else reads too, or that is overwritten later, ends the row. A row stays that has no
    more layers than what would come.

    Why it helps: one layer or two in place of four, where an old converter wrote ReLU6; the
    gain was not measured. Activations and `unary` were reported on the ANE (hollance/neural-engine,
    unsupported-layers; through Core ML, iOS 11 to 15). `clip` was not measured in neural networks; the op of
    the same name in ML Programs ran there (M4, macOS 27.0.1; 751K). Exact: bounds and signs do not round.

    Grade: bit for bit.
    """

    name = "fuse_clip"
    follows = ("legacy_clip",)  # it joins its layers
    precedes = ("fuse_linear",)  # it takes signs that this needs
    kinds = frozenset(BOUNDS)

    def rewrite(self, site: Site) -> None:
        """Write the row that ends at this layer, if fewer layers compute the same."""
        if _is_inside_row(site):
            return
        row = _row_ending_at(site.network, site.node)
        joint = _Bounds()
        for link in row:
            joint = joint.then(link.bounds)
        new = _fewest_layers(joint, takes_clip=site.network.takes_newer)
        if len(row) > max(len(new), 1):
            site.chain(new, row[0].node.inputs[0])

    def sample(self, site: Site, var: Var, rng: np.random.Generator) -> Array | None:
        """Draw the bounds of the old layers, with either sign, and numbers around them."""
        row = _row_ending_at(site.network, site.node)
        bounds = {abs(v) for link in row for v in (link.bounds.low, link.bounds.high)}
        centers = np.array(sorted({v for v in bounds if v < -MOST_NEGATIVE} | {0.0}))
        shape = drawn_shape(var)
        near = rng.choice(centers, shape) * rng.choice([-1, 1], shape)
        return (near + rng.standard_normal(shape) * rng.integers(0, 2, shape)).astype(np.float32)


def _is_inside_row(site: Site) -> bool:
    """Does the row go on, so that `rewrite` sees all of it at a later layer?"""
    network = site.network
    readers = network.readers(site.outputs[0]) if len(site.outputs) == 1 else []
    if len(readers) != 1 or not all(map(network.plain, readers[0].outputs)):
        return False
    return _bounds(readers[0]) is not None and _sole_maker(network, readers[0]) is site.node


def _fewest_layers(bounds: _Bounds, takes_clip: bool) -> list[Step]:
    """Return the fewest layers that compute the bounds, in the order in which they run."""
    if bounds == _Bounds():
        return []
    if bounds.high == math.inf:
        return [_lower_bound(bounds.sign, bounds.low)]
    low = max(bounds.low, MOST_NEGATIVE)
    if takes_clip and bounds.sign > 0 and low < bounds.high:  # the op `clip` refuses equal bounds
        return [("clip", {"minVal": low + 0.0, "maxVal": bounds.high + 0.0})]  # -0.0 + 0.0 is 0.0
    return [_lower_bound(-bounds.sign, -bounds.high), _lower_bound(-1, bounds.low)]


def _lower_bound(sign: float, low: float) -> Step:
    """Return the layer of max(low, sign x)."""
    if low == -math.inf:
        return "activation", {"linear": {"alpha": sign}}
    if sign > 0 and low == 0:
        return "activation", {"ReLU": {}}
    scale = {} if sign > 0 else {"scale": sign}
    return "unary", {"type": "THRESHOLD", "alpha": low + 0.0, **scale}


MOST_EXPONENT = 64
"""Factors from 2^-64 to 2^64 keep ordinary numbers in the range of fp32."""


class _Line(NamedTuple):
    """What a layer computes of x: alpha x + beta."""

    alpha: float
    beta: float

    @property
    def only_scales(self) -> bool:
        """Does the layer only multiply, and without rounding?"""
        return self.beta == 0 and _is_power_of_two(self.alpha)

    def __str__(self) -> str:
        return f"{self.alpha:g} x + {self.beta:g}"


LINES: dict[str, Callable[[Any], _Line | None]] = {
    "activation": lambda p: _Line(p.linear.alpha, p.linear.beta) if p.HasField("linear") else None,
    "multiply": lambda p: _Line(p.alpha, 0),
    "add": lambda p: _Line(1, p.alpha),
}
"""Layer type of one input -> a function of its message: what it computes."""


def _line(node: Node) -> _Line | None:
    return LINES[node.kind](node.params) if len(node.inputs) == 1 and node.kind in LINES else None


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
        """Join a linear layer with the layer before it, or put one into the weights before or after it."""
        node, before = site.node, _sole_maker(site.network, site.node)
        if before is None:
            return
        own, first = _line(node), _line(before)
        if own is not None and first is not None:
            _join(site, before.inputs[0], first, own)
        elif own is not None and before.kind in WEIGHTED:
            _scale_weights(site, before, before.inputs, own, with_bias=True)
        elif first is not None and node.kind in WEIGHTED and len(node.inputs) == 1:
            _scale_weights(site, node, before.inputs, first, with_bias=False)


def _join(site: Site, x: str, first: _Line, last: _Line) -> None:
    """Add one linear layer for two.

    Raises:
        Refused: one layer would round otherwise.
    """
    line = _Line(first.alpha * last.alpha, first.beta * last.alpha + last.beta)
    scales = first.beta == 0 and (_is_power_of_two(first.alpha) or _is_power_of_two(last.alpha))
    if not (scales or last.only_scales) or not all(map(_is_fp32, line)):
        raise Refused(f"{first}, then {last}: one layer would round otherwise")
    if line == (1, 0):
        site.forward(x)
    else:
        site.linear(x, *line, site.outputs)


def _scale_weights(
    site: Site, weighted: Node, inputs: tuple[str, ...], line: _Line, *, with_bias: bool
) -> None:
    """Add a copy of a layer that reads `inputs` and whose weights hold the factor of a linear layer.

    Raises:
        Refused: the line adds something, or new weights would be rounded.
    """
    if not line.only_scales:
        raise Refused(f"{line} beside a {weighted.kind} would round its weights otherwise")
    old = _read(weighted)
    new = old.times(np.array(line.alpha))
    if not with_bias:
        new = replace(new, bias=old.bias)
    message = site.copy(weighted, inputs, site.outputs)
    if not new.write(getattr(message, weighted.kind)):
        raise Refused(f"{line.alpha:g} times the weights of the {weighted.kind} would be rounded")


def _is_power_of_two(number: float) -> bool:
    """Is a number a power of two up to `MOST_EXPONENT`, with either sign?"""
    mantissa, exponent = math.frexp(abs(number))
    return mantissa == 0.5 and abs(exponent - 1) <= MOST_EXPONENT


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
    follows = ("split_upsampling", "undilate_convolution")  # it may fold into their convolutions
    tolerates_nonfinite = False
    """A factor of 0 meets an infinity in another place."""
    kinds = frozenset({"batchnorm"})
    tolerance = REASSOCIATED

    def rewrite(self, site: Site) -> None:
        """Write new weights and a new bias into a copy of the layer before."""
        if site.params.computeMeanVar:
            raise Refused("its mean and variance are computed")
        before = _weighted_layer_before(site)
        old = _read(before)
        if old.dtype != STORED["floatValue"]:
            raise Refused(f"the weights of the {before.kind} are of fp16; new ones would be rounded")
        scale, offset = _scale_and_offset(site)
        new = old.times(scale).plus(offset)
        if new.largest > -MOST_NEGATIVE:
            raise Refused(f"the new weights would be as large as {new.largest:.3g}, beyond fp32")
        message = site.copy(before, before.inputs, site.outputs)
        new.write(getattr(message, before.kind))


def _weighted_layer_before(site: Site) -> Node:
    """Return the layer before a normalization.

    Raises:
        Refused: it is no convolution or inner product over the channels that the normalization scales.
    """
    before = site.network.maker(site.inputs[0])
    if before is None or before.kind not in WEIGHTED:
        source = "an input" if before is None else f"a layer {before.kind}"
        raise Refused(f"it comes after {source}, no convolution or inner product")
    if _sole_maker(site.network, site.node) is None:
        raise Refused(f"what the {before.kind} makes is read elsewhere too, or its input is overwritten later")
    if before.kind == "innerProduct" and len(site.shape(site.inputs[0])) <= CHANNELS:
        raise Refused("the channels of the inner product are the last axis, its own are axis -3")
    return before


def _scale_and_offset(site: Site) -> tuple[Array, Array]:
    """Return what a normalization multiplies each channel by, and what it then adds, in fp64."""
    params = site.params
    gamma, beta, mean, variance = (
        spec.weights(getattr(params, n), [int(params.channels)], n).astype(np.float64)
        for n in ("gamma", "beta", "mean", "variance")
    )
    guarded = variance + float(params.epsilon or np.float32(EPSILON))
    if not (guarded > 0).all():
        raise Refused(f"its variance plus epsilon is {guarded.min():g} somewhere, not positive")
    scale = gamma / np.sqrt(guarded)
    return scale, beta - mean * scale
