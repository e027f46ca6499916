"""Layers of two blobs that broadcast, such as sums and products, in layers of iOS 11 and 12.

A constant side becomes a parameter of a layer with one input. Otherwise the two blobs become the inputs of
`add`, `multiply`, `max` or `min`, the larger one first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Refused, Var, shape_in_words
from anesurgery.checking import adversarial
from anesurgery.checking.lengths import drawn_shape
from anesurgery.network_editing.layer_pass import LayerRewrite, Shape, Site
from anesurgery.network_editing.network import Network, Node
from anesurgery.neuralnetwork.making import edge_padding, weights

SPATIAL = 3
"""Axes that a layer broadcasts by itself: channel, height, width. Those in front count as batch."""
BY_CHANNEL = frozenset({"max", "min"})
"""The layers of which the format names no other second shape than (B, C, H, W) and (B, C, 1, 1)."""
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), an.fp16.LEAST
"""Bounds of the epsilon of a division: the smallest normal fp32 number, and the smallest fp16 number."""
MOST_NEGATIVE = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class _ConstantSide:
    """The two sides of a layer, of which one is computed and the other is the same at every run."""

    x: str
    """The computed blob."""
    value: an.Array
    is_first: bool
    """Is the constant the first side?"""
    shape: Shape
    """The shape of the computed blob."""
    result: Shape

    @property
    def number(self) -> float | None:
        """The one number that the constant is, if the result is as large as the computed side."""
        is_one = self.value.size and (self.value == self.value.flat[0]).all()
        return float(self.value.flat[0]) if is_one and tuple(self.result) == tuple(self.shape) else None

    def sizes(self) -> list[int]:
        """Return the sizes that `bias` and `scale` give it: [C], [1, H, W] or [C, H, W]; [] for one number.

        Example: beside (1, 8, 4, 4), a constant of shape (8, 1, 1) has the sizes [8], and one of (4, 4) has
        [1, 4, 4].

        Raises:
            Refused: it has none of these.
        """
        shape, value = self.shape, self.value
        if tuple(self.result) != tuple(shape):
            raise Refused(f"the constant of shape {value.shape} makes the result larger than its input")
        if self.number is not None:
            return []
        if len(shape) < SPATIAL:
            raise Refused(f"scale and bias take 3 axes or more, but the blob has {len(shape)}")
        if any(d != 1 for d in value.shape[:-SPATIAL]):
            raise Refused(f"the constant of shape {value.shape} varies along the batch")
        last = (1,) * (SPATIAL - value.ndim) + tuple(value.shape[-SPATIAL:])
        channel, height, width = shape[-SPATIAL:]
        if last[1:] == (1, 1):
            return [last[0]]
        if last[1:] == (height, width) and last[0] in (1, channel):
            return list(last)
        raise Refused(f"a constant of shape {value.shape} is not one of [1], [C], [1, H, W], [C, H, W]")


def _constant_side(site: Site) -> _ConstantSide | None:
    """Return the sides of a layer with one constant side; None where both are computed or both are constant.

    Raises:
        Refused: there are more or fewer than two, or nothing is known about the shape of a side.
    """
    if len(site.inputs) != 2:
        raise Refused(f"it has {len(site.inputs)} inputs, not 2")
    x, y = site.inputs
    for computed, other in ((x, y), (y, x)):
        if (value := site.constant(other)) is not None and site.constant(computed) is None:
            shapes = site.shape(computed), site.shape(site.outputs[0])
            return _ConstantSide(computed, value, other == x, *shapes)
    return None


def _must_swap(site: Site, kind: str, x: str, y: str) -> bool:
    """Must a plain layer read `y` first, since `y` has the shape of the result?

    Raises:
        Refused: their shapes are not among those of the layer, or dynamic, or unknown.
    """
    a, b = site.shape(x), site.shape(y)
    first, second = shape_in_words(a), shape_in_words(b)
    # `site.shape` hides symbols: two sizes with the same symbol are equal, whatever it is
    x_var, y_var = (site.network.blobs.var(blob) for blob in (x, y))
    alike = x_var is not None and y_var is not None and tuple(x_var.shape) == tuple(y_var.shape)
    if None in a + b and not alike:
        raise Refused(f"{first} and {second} may differ where a size is dynamic")
    if _broadcasts_to(a, b, kind):
        return False
    if not _broadcasts_to(b, a, kind):
        raise Refused(f"{first} and {second} are not among the shapes of the plain layer")
    return True


def _broadcasts_to(first: Shape, second: Shape, kind: str) -> bool:
    """Does a plain layer broadcast the second shape to the first one, as numpy does?

    The comments of the format name (B, C, H, W), (B, C, 1, 1), (B, 1, H, W), (B, 1, 1, 1) as the second shape
    of `add`, `multiply` and `average`, and the first two of them as that of `max` and `min`. Equal shapes of
    any rank pass; the caller knows whether dynamic sizes are the same.
    """
    if tuple(first) == tuple(second):
        return True
    if len(first) != len(second) or None in (*first, *second) or len(first) < SPATIAL:
        return False
    channel, height, width = first[-SPATIAL:]
    others = {(channel, 1, 1)} if kind in BY_CHANNEL else {(channel, 1, 1), (1, 1, 1), (1, height, width)}
    return first[:-SPATIAL] == second[:-SPATIAL] and tuple(second[-SPATIAL:]) in others


@dataclass(frozen=True)
class _TwoSided(LayerRewrite, abstract=True):
    """Write a layer of two sides as the plain layer of two blobs, or as a layer of one blob with numbers.

    The plain layer of `x - y` is `add`, which reads `-y` as its second side: `second_blob` and
    `second_numbers` make what the plain layer reads there.
    """

    plain: ClassVar[Mapping[str, str]]
    """Layer type -> the plain layer of two blobs."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Look at the layer types of `plain`."""
        cls.kinds = frozenset(cls.plain)
        super().__init_subclass__(**options)

    def second_blob(self, site: Site, y: str, outputs: Sequence[str] | None = None) -> str:
        """Return the blob that the plain layer reads in place of a computed second side."""
        return y

    def second_numbers(self, value: an.Array) -> an.Array:
        """Return the numbers that the plain layer reads in place of a constant second side."""
        return value

    def rewrite(self, site: Site) -> None:
        """Write the layer with numbers if one side is constant, else the plain layer of two blobs."""
        if (sides := _constant_side(site)) is not None:
            self.with_numbers(site, sides)
        else:
            self.with_blobs(site, *site.inputs)

    def with_numbers(self, site: Site, sides: _ConstantSide) -> None:
        """Add the layer of one blob and numbers."""
        sizes = sides.sizes()
        value = sides.value if sides.is_first else self.second_numbers(sides.value)
        x = self.second_blob(site, sides.x) if sides.is_first else sides.x
        adds = self.plain[site.node.kind] == "add"
        if not sizes:
            number = float(value.flat[0])
            site.linear(x, *((1.0, number) if adds else (number, 0.0)), site.outputs)
        elif adds:
            site.emit("bias", [x], site.outputs, shape=sizes, bias=weights(value))
        else:
            site.emit("scale", [x], site.outputs, shapeScale=sizes, scale=weights(value))

    def with_blobs(self, site: Site, x: str, y: str) -> None:
        """Add the plain layer of two blobs, which reads the one with the shape of the result first."""
        kind = self.plain[site.node.kind]
        swaps = _must_swap(site, kind, x, y)
        pair = [x, self.second_blob(site, y)]
        site.emit(kind, pair[::-1] if swaps else pair, site.outputs)


@dataclass(frozen=True)
class LegacyAddMultiply(_TwoSided):
    """Write broadcasting additions and products with the layers of iOS 11 and 12.

    Two computed blobs become `add` or `multiply`; a constant becomes a linear activation where it is one
    number, else `bias` or `scale`. So does one that a plain `add` or `multiply` reads from a `loadConstantND`.

    Refuses when the broadcasting is not one that the definition of the format lists for the layer: of
    (B, C, H, W), the other side may be (B, C, H, W), (B, C, 1, 1), (B, 1, H, W) or (B, 1, 1, 1), with as many
    axes; a constant may have the sizes [1], [C], [1, H, W] or [C, H, W], and the result must be as large as the
    other side. Refuses too when a shape that matters is dynamic.

    Why it helps: layers of the Broadcastable kind were reported off the ANE, `add`, `multiply`, `scale` and
    linear activations on it, but for a product of (C, H, W) and (C, 1, 1) (hollance/neural-engine,
    unsupported-layers; through Core ML, iOS 11 to 15). Not measured on later systems. Exact: the same numbers
    are added and multiplied.

    Grade: bit for bit.
    """

    name = "legacy_add_multiply"
    plain: ClassVar[Mapping[str, str]] = {
        "addBroadcastable": "add",
        "add": "add",
        "multiplyBroadcastable": "multiply",
        "multiply": "multiply",
    }

    def rewrite(self, site: Site) -> None:
        """Rewrite broadcasting layers, and a plain one that reads a `loadConstantND`.

        Raises:
            Refused: both sides of a plain layer are constant.
        """
        if site.node.kind in self.plain.values():
            if not any(site.network.maker(blob, "loadConstantND") for blob in site.inputs):
                return
            if _constant_side(site) is None:
                raise Refused("both sides are constant")
        super().rewrite(site)


@dataclass(frozen=True)
class LegacySubtract(_TwoSided):
    """Write broadcasting differences as sums with the negated second side.

    A computed second side is negated by a linear activation and added; where it is the larger one, it comes
    first. A constant second side is negated in the file and added by `bias`, or by a linear activation where it
    is one number. From a constant first side, the other is negated first.

    Refuses when the broadcasting is none of `add` and `bias` (`legacy_add_multiply` lists them), or a shape
    that matters is dynamic.

    Why it helps: layers of the Broadcastable kind were reported off the ANE, `add` and linear activations on
    it; iOS 11 and 12 have no layer that subtracts, and the same report names this way around it
    (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Not measured on later systems.
    Exact: x - y and x + (-y) are the same number in floating point.

    Grade: bit for bit.
    """

    name = "legacy_subtract"
    plain: ClassVar[Mapping[str, str]] = {"subtractBroadcastable": "add"}

    def second_blob(self, site: Site, y: str, outputs: Sequence[str] | None = None) -> str:
        """Return the negated blob."""
        return site.linear(y, -1.0, 0.0, outputs)

    def second_numbers(self, value: an.Array) -> an.Array:
        """Return the negated numbers."""
        return -value

    def with_numbers(self, site: Site, sides: _ConstantSide) -> None:
        """Negate and add in one layer if a blob is subtracted from one number."""
        if sides.is_first and sides.number is not None:
            site.linear(sides.x, -1.0, sides.number, site.outputs)
        else:
            super().with_numbers(site, sides)


@dataclass(frozen=True)
class LegacyDivide(_TwoSided):
    """Write broadcasting quotients as products with the inverse of the divisor.

    A constant divisor becomes its reciprocal in the file: a linear activation where it is one number, else
    `scale`. Of a computed divisor y, the layer `unary` gives 1 / (y + epsilon), which `multiply` takes, or
    `scale` where the first side is constant. The format reads an epsilon of 0 as 1e-6, so the default is the
    smallest normal fp32 number: every |y| above 1e-30 absorbs it, and fp16 does not hold it. Larger ones, up to
    2^-24 (6e-8, the smallest that fp16 holds, absorbed by every |y| from 2 on), are an option.

    Refuses when a constant divisor holds a number whose reciprocal is no normal fp32 number (0, 2e38, NaN), or
    when the broadcasting is none of `multiply` and `scale` (`legacy_add_multiply` lists them). With
    `exact=True`, also where a divisor is computed, or no power of two.

    Why it helps: layers of the Broadcastable kind were reported off the ANE, `multiply`, `scale` and `unary`
    mostly on it, but a product of (C, H, W) and (C, 1, 1) off it as well (hollance/neural-engine,
    unsupported-layers; through Core ML, iOS 11 to 15). Not measured on later systems.

    Bit-exact by powers of two. Else the quotient was rounded, and now the reciprocal and the product are: three
    times 2^-24 of the number at most, so the promise is 2^-22. Beyond it, a divisor of 0 gives x / epsilon, not
    an infinity, and 0 / 0 gives 0, not NaN. In fp16 the inverse of a divisor below 1.5e-5 is infinite, and
    above 16384 it has fewer digits, even where the quotient is an ordinary number.

    Grade: checked: reciprocals are rounded.
    """

    name = "legacy_divide"
    plain: ClassVar[Mapping[str, str]] = {"divideBroadcastable": "multiply"}
    tolerance = an.Tolerance(2.0**-22)
    caveat = "where a computed divisor is 0 the quotient is x / epsilon, not infinite"

    exact: bool = False
    """Leave the layers whose numbers would change."""
    epsilon: float = an.option(SMALLEST, least=SMALLEST, most=LARGEST)
    """What a computed divisor is increased by."""

    def sample(self, site: Site, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw divisors of a magnitude from 2 to 8, to which no epsilon of the option makes a difference."""
        if var is not site.network.blobs.var(site.inputs[1]):
            return None
        return adversarial.with_random_signs(rng, rng.uniform(2, 8, drawn_shape(var))).astype(np.float32)

    def second_blob(self, site: Site, y: str, outputs: Sequence[str] | None = None) -> str:
        """Return the inverse of the divisor, unless every number has to stay."""
        if self.exact:
            raise Refused("the divisor is computed, so the product with its inverse is not exact")
        return site.emit("unary", [y], outputs, type="INVERSE", epsilon=self.epsilon)

    def second_numbers(self, value: an.Array) -> an.Array:
        """Return the reciprocals, if they are normal numbers and, with `exact=True`, not rounded."""
        value = value.astype(np.float32)
        with np.errstate(all="ignore"):
            factor: an.Array = 1 / value
        broken = ~np.isfinite(factor) | (np.abs(factor) < SMALLEST)
        if broken.any():
            raise Refused(f"the divisor holds {value[broken][0]:g}, whose reciprocal is no normal fp32 number")
        rounded = np.abs(np.frexp(value)[0]) != 0.5
        if self.exact and rounded.any():
            raise Refused(f"the divisor holds {value[rounded][0]:g}, which is no power of two")
        return factor

    def with_numbers(self, site: Site, sides: _ConstantSide) -> None:
        """Write 1 over a blob as its inverse, without a product."""
        if sides.is_first and sides.number == 1:
            self.second_blob(site, sides.x, site.outputs)
        else:
            super().with_numbers(site, sides)


@dataclass(frozen=True)
class LegacyClip(_TwoSided):
    """Write broadcasting minima and maxima as clips, thresholds, or plain minima and maxima.

    A minimum of a maximum, or a maximum of a minimum, of one blob and two numbers, the lower one below the
    upper, becomes one `clip` where nobody else reads what is between. A maximum with a number alone becomes a
    ReLU (with 0) or a threshold, a minimum a clip that starts at the most negative finite fp32 number. Any
    other two sides become `max` or `min`. A constant of several numbers stays a blob; one with fewer axes than
    the other side, or with a batch of 1 beside a larger one, is loaded anew with the batch of the other side.

    Refuses when a number is infinite or the most negative one, or when the broadcasting is not one that the
    definition of the format lists for `max` and `min`: of (B, C, H, W), the other side may be (B, C, H, W) or
    (B, C, 1, 1), with as many axes if it is computed.

    Why it helps: layers of the Broadcastable kind were reported off the ANE, the first layers, `max`, `min` and
    `unary` among them, mostly on it (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to
    15). `clip` is newer: its op in ML Programs ran there (M4, macOS 27.0.1), the layer was not measured. Exact
    for finite numbers; -inf under a minimum alone becomes -3.4e38, which is -inf again in fp16.

    Grade: bit for bit.
    """

    name = "legacy_clip"
    tolerates_nonfinite = False
    """A side without a bound is clipped at the largest finite number."""
    plain: ClassVar[Mapping[str, str]] = {"maxBroadcastable": "max", "minBroadcastable": "min"}

    def with_numbers(self, site: Site, sides: _ConstantSide) -> None:
        """Clip at one number; a constant of several becomes a blob with the axes that `max` and `min` need."""
        if sides.number is not None:
            _add_clip(site, sides.x, sides.number)
        elif (value := _with_batch(site, sides)) is None:
            self.with_blobs(site, *site.inputs)
        else:
            constant = site.emit("loadConstantND", [], shape=value.shape, data=weights(value))
            site.emit(self.plain[site.node.kind], [sides.x, constant], site.outputs)


def _with_batch(site: Site, sides: _ConstantSide) -> an.Array | None:
    """Return the constant with the axes and the batch of the other side; None if that does not help.

    Example: beside (4, 8, 5, 5), a constant of shape (8, 1, 1) becomes one of (4, 8, 1, 1).
    """
    shape, value = site.shape(sides.x), sides.value
    if None in shape or site.shape(site.outputs[0]) != shape:
        return None
    value = value.reshape((1,) * (len(shape) - value.ndim) + value.shape)
    value = np.broadcast_to(value, (*site.sizes(sides.x)[:-SPATIAL], *value.shape[-SPATIAL:]))
    return None if value.shape == sides.value.shape or not _broadcasts_to(shape, value.shape, "max") else value


def _add_clip(site: Site, x: str, number: float) -> None:
    """Add the layer that bounds a blob by a number, together with a layer before it that also bounds."""
    network, node = site.network, site.node
    if not MOST_NEGATIVE < number < math.inf:
        raise Refused(f"the number {number:g} bounds no finite numbers")
    inner = network.maker(x, *LegacyClip.plain)
    if inner is not None and (both := _both_bounds(network, inner, node)) is not None:
        site.emit("clip", [both.x], site.outputs, minVal=both.low, maxVal=both.high)
    elif any(_both_bounds(network, node, reader) for reader in network.readers(site.outputs[0])):
        pass  # no layer is added here: the reader becomes the clip of both
    elif node.kind == "minBroadcastable":
        site.emit("clip", [x], site.outputs, minVal=MOST_NEGATIVE, maxVal=number)
    elif number == 0:
        site.emit("activation", [x], site.outputs, ReLU={})
    else:
        site.emit("unary", [x], site.outputs, type="THRESHOLD", alpha=number)


class _Bounds(NamedTuple):
    """A blob, and the numbers that a minimum and a maximum in a row keep it between."""

    x: str
    low: float
    high: float


def _both_bounds(network: Network, inner: Node, outer: Node) -> _Bounds | None:
    """Return what a maximum and a minimum bound, of which one alone reads the other; None for other layers."""
    if {inner.kind, outer.kind} != LegacyClip.kinds or not network.only_reader(inner.outputs[0], outer):
        return None
    sides = {node.kind: _constant_side(Site(network, node)) for node in (inner, outer)}
    low, high = (
        side.number if (side := sides[kind]) is not None else None
        for kind in ("maxBroadcastable", "minBroadcastable")
    )
    if low is None or high is None or not MOST_NEGATIVE < low < high < math.inf:
        return None
    source = sides[inner.kind]
    return None if source is None else _Bounds(source.x, low, high)


@dataclass(frozen=True)
class LegacyPower(_TwoSided):
    """Write broadcasting powers with a constant exponent as products, square roots or unary powers.

    An exponent of 1 goes, so that the base is read in its place; 2, 3 and 4 become products, 0.5 the square
    root (the `unary` layer without a type), and any other number a unary POWER. -1 and -0.5 are POWER too:
    INVERSE and RSQRT would add an epsilon, which the format reads as 1e-6 where it is 0.

    Refuses when the exponent is computed, varies, is not finite, or makes the result larger than the base, and
    when the base is constant.

    Why it helps: layers of the Broadcastable kind were reported off the ANE, `multiply` and `unary` mostly on
    it (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Not measured on later
    systems.

    POWER is exact. A product of up to four factors is rounded by three times 2^-24 of itself at most, the power
    before by up to 2^-23 (a unit in the last place): together 3e-7, and the root stays below. A root of -inf is
    NaN, where the power was inf; of other negative numbers both are NaN, but the engine gives 0 (measured on M1
    and M5).

    Grade: proved.
    """

    name = "legacy_power"
    plain: ClassVar[Mapping[str, str]] = {"powBroadcastable": "multiply"}
    tolerance = an.Tolerance(3e-7)

    def with_blobs(self, site: Site, x: str, y: str) -> None:
        """Refuse: no plain layer has a computed exponent."""
        raise Refused("the exponent is computed")

    def with_numbers(self, site: Site, sides: _ConstantSide) -> None:
        """Choose the layer by the exponent."""
        if sides.is_first:
            raise Refused("the base is constant, the exponent computed")
        exponent = sides.number
        if exponent is None:
            words = f"the exponent of shape {sides.value.shape} is not one number"
            raise Refused(f"{words}, or makes the result larger than the base")
        if not math.isfinite(exponent):
            raise Refused(f"the exponent is {exponent}")
        _add_power(site, sides.x, exponent)

    def sample(self, site: Site, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw positive bases if the exponent is fractional: a negative base has no such power."""
        sides = _constant_side(site)
        exponent = None if sides is None else sides.number
        if exponent is None or exponent % 1 == 0:
            return None
        return np.abs(rng.standard_normal(drawn_shape(var))).astype(np.float32)


def _add_power(site: Site, x: str, exponent: float) -> None:
    """Add the layers of a power with a constant exponent: of products, two at most."""
    if exponent == 1:
        site.forward(x)
    elif exponent == 2:
        site.emit("multiply", [x, x], site.outputs)
    elif exponent in (3, 4):
        square = site.emit("multiply", [x, x])
        site.emit("multiply", [square, x if exponent == 3 else square], site.outputs)
    elif exponent == 0.5:
        site.emit("unary", [x], site.outputs, type="SQRT")
    else:
        site.emit("unary", [x], site.outputs, type="POWER", alpha=exponent)


@dataclass(frozen=True)
class SpreadChannels(LayerRewrite):
    """Repeat one number for each channel over the image before two blobs are multiplied.

    `padding` that replicates the border makes an image of one pixel as large as the other side; so gates of
    squeeze-and-excitation networks are written. It writes a blob as large as the result.

    Refuses when a size of the two blobs is dynamic, or when the blob of one pixel is not (B, C, 1, 1) beside
    (B, C, H, W). A constant side is for `legacy_add_multiply`, which makes it a `scale`.

    Why it helps: the product of (C, H, W) and (C, 1, 1) was reported off the ANE, layers of iOS 11 and 12
    mostly on it (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Whether the
    padding costs less than the switch was not measured. Exact: the same numbers are multiplied.

    Grade: bit for bit.
    """

    name = "spread_channels"
    kinds = frozenset({"multiply"})

    def rewrite(self, site: Site) -> None:
        """Repeat the gate, a blob with a single pixel, and multiply the image by it.

        Raises:
            Refused: the gate has another batch or channel count than the image, or a size is dynamic.
        """
        if len(site.inputs) != 2 or any(site.constant(b) is not None for b in site.inputs):
            return
        image, gate = site.inputs
        if site.shape(image)[-2:] == (1, 1):
            image, gate = gate, image
        if site.shape(gate)[-2:] != (1, 1) or site.shape(image)[-2:] == (1, 1):
            return  # neither has a single pixel, or both have
        sizes, gate_sizes = site.sizes(image), site.sizes(gate)
        if gate_sizes != (*sizes[:-2], 1, 1) or len(sizes) < SPATIAL:
            words = "is not one number for each channel of"
            raise Refused(f"{shape_in_words(gate_sizes)} {words} {shape_in_words(sizes)}")
        repeated = site.put(edge_padding((0, sizes[-2] - 1), (0, sizes[-1] - 1)), gate)
        site.emit("multiply", [image, repeated], site.outputs)
