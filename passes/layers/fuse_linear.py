"""Write linear layers in a row as one, and signs and powers of two into the weights beside them.

Before::

    network(%x: 1x2x1x1) {
      %a: 1x2x1x1 = add(%x, alpha=3)
      %b: 1x2x1x1 = multiply(%a, alpha=-2)
      %c: 1x2x1x1 = unary(%b, type=ABS)
      %d: 1x2x1x1 = activation(%c, linear={alpha=-1})
      %y: 1x1x1x1 = innerProduct(%d, inputChannels=2, outputChannels=1, weights=[3, 4])
      return %y
    }

After::

    network(%x: 1x2x1x1) {
      %b: 1x2x1x1 = activation(%x, linear={alpha=-2, beta=-6})
      %c: 1x2x1x1 = unary(%b, type=ABS)
      %y: 1x1x1x1 = innerProduct(%c, inputChannels=2, outputChannels=1, weights=[-3, -4])
      return %y
    }

A linear layer is a linear activation, or `multiply` or `add` with one number. Two of them become one where that
rounds as both do: where one of the factors, or the last, is a power of two (with either sign), and what the
first, or the last, adds is 0. A layer that multiplies by such a power, and adds nothing, goes into the weights
of a convolution or inner product after it, or into the weights and bias of one before it.

Refuses when the result would be rounded otherwise, as with 0.3 x + 1 after 0.7 x; when the weights beside it
are computed, quantized, trainable, or of fp16 and would be rounded. A blob that somebody else reads too ends
the row. Run `fuse_clip` before it, which needs the signs.

Why it helps: fewer layers; the gain was not measured. Exact: multiplying by a power of two does not round,
except numbers below 2**-126.

Grade: proved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site

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


def _activation(p: Any) -> _Line | None:
    linear = p.WhichOneof("NonlinearityType") == "linear"
    return _Line(p.linear.alpha, p.linear.beta) if linear else None


LINES: dict[str, Callable[[Any], _Line | None]] = {
    "activation": _activation,
    "multiply": lambda p: _Line(p.alpha, 0),
    "add": lambda p: _Line(1, p.alpha),
}
"""Layer type of one input -> what it computes."""


def _line(node: an.Node | None) -> _Line | None:
    if node is None or len(node.inputs) != 1 or node.kind not in LINES:
        return None
    return LINES[node.kind](node.params)


@dataclass(frozen=True)
class FuseLinear(LayerRewrite):
    """Linear activations, sums and products with one number become one, or part of weights."""

    name = "fuse_linear"
    tolerates_nonfinite = False
    """Factors that are taken together do not overflow or vanish in between."""
    kinds = frozenset(LINES) | an.affine.KINDS

    def rewrite(self, site: Site) -> Refusal | None:
        """A linear layer with what is before it; weights with a linear layer before them."""
        node, before = site.node, an.chains.sole_maker(site.network, site.node)
        if before is None:
            return None
        own, first = _line(node), _line(before)
        if own is not None and first is not None:
            return _join(site, before.inputs[0], first, own)
        if own is not None and before.kind in an.affine.KINDS:
            return _scale(site, before, before, own)
        if first is not None and node.kind in an.affine.KINDS and len(node.inputs) == 1:
            return _scale(site, node, before, first)
        return None


def _join(site: Site, x: str, first: _Line, last: _Line) -> Refusal | None:
    line = _Line(first.alpha * last.alpha, first.beta * last.alpha + last.beta)
    scales = first.beta == 0 and (_is_power(first.alpha) or _is_power(last.alpha))
    if not (scales or last.only_scales) or not all(map(_is_fp32, line)):
        return Refusal(f"{first}, then {last}: one layer would round otherwise")
    if line == (1, 0):
        site.forward(x)
    else:
        site.linear(x, *line, site.outputs)
    return None


def _scale(site: Site, weighted: an.Node, first: an.Node, line: _Line) -> Refusal | None:
    """Put a factor into weights, and into the bias if they come before it."""
    if not line.only_scales:
        return Refusal(f"{line} beside a {weighted.kind} would round its weights otherwise")
    old = an.affine.read(weighted)
    if isinstance(old, Refusal):
        return old
    new = old.times(np.array(line.alpha))
    if first is not weighted:
        new = an.affine.Affine(new.weights, old.bias, old.dtype)
    message = site.copy(weighted, first.inputs, site.outputs)
    if not new.write(getattr(message, weighted.kind)):
        return Refusal(f"{line.alpha:g} times the weights of the {weighted.kind} would be rounded")
    return None


def _is_power(number: float) -> bool:
    """Is it a power of two of an ordinary size, with either sign?"""
    mantissa, exponent = math.frexp(abs(number))
    return mantissa == 0.5 and abs(exponent - 1) <= MODEST


def _is_fp32(number: float) -> bool:
    with np.errstate(over="ignore"):
        return float(np.float32(number)) == number


def example() -> Any:
    """A sum and a product, and a sign before weights."""
    product: dict[str, Any] = {"inputChannels": 2, "outputChannels": 1}
    layers = [
        an.make_layer("add", ["x"], ["a"], alpha=3.0),
        an.make_layer("multiply", ["a"], ["b"], alpha=-2.0),
        an.make_layer("unary", ["b"], ["c"], type="ABS"),
        an.make_layer("activation", ["c"], ["d"], linear={"alpha": -1.0}),
        an.make_layer("innerProduct", ["d"], ["y"], **product, weights=an.weights(np.array([3, 4]))),
    ]
    return an.make_network({"x": (1, 2, 1, 1)}, layers, ["y"])
