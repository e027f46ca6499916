"""Write layers in a row that bound a value from below and above as one layer.

Before::

    network(%x: 1x2x4x4) {
      %above: 1x2x4x4 = activation(%x, ReLU={})
      %minus: 1x2x4x4 = activation(%above, linear={alpha=-1})
      %bound: 1x2x4x4 = unary(%minus, type=THRESHOLD, alpha=-6)
      %y: 1x2x4x4 = activation(%bound, linear={alpha=-1})
      return %y
    }

After::

    network(%x: 1x2x4x4) {
      %y: 1x2x4x4 = clip(%x, maxVal=6)
      return %y
    }

ReLU, `unary` of type THRESHOLD, `clip`, and the linear activations x and -x compute together the bounds of x or
-x. Where it is x, one layer does it: ReLU from 0, a threshold from another number, `clip` where there is an
upper bound too; no layer where nothing is bounded. Without a lower bound `clip` gets the least fp32 number, so
that only minus infinity differs, which becomes that number.

Refuses when the bounds are those of -x, or are one number, and when `clip` would raise the version of the
specification to 4 and `newest` is less. A blob that somebody else reads too ends the row.

Why it helps: one layer in place of four, where a converter of the first releases wrote ReLU6. `clip` was not
measured in neural networks; the op of the same name in ML Programs ran on the ANE (M4, macOS 27.0.1; 751K). It
needs specification 4 (iOS 13, macOS 10.15). Exact: bounds and signs do not round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from anesurgery.mil import Array, Var, is_symbolic
from anesurgery.neuralnetwork.editing.chains import chain_to
from anesurgery.neuralnetwork.editing.layer_pass import LayerRewrite, Site
from anesurgery.neuralnetwork.editing.making import EXACT, make_layer, make_network
from anesurgery.neuralnetwork.editing.network import Node
from anesurgery.pattern import Refusal
from anesurgery.proof import SYMBOL_LENGTH

THRESHOLD = 7
"""`type` of a `unary` layer that gives max(alpha, x)."""
INF = float("inf")
LEAST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class _Bounds:
    """min(max(sign x, low), high)."""

    sign: float = 1
    low: float = -INF
    high: float = INF

    def then(self, last: _Bounds) -> _Bounds:
        """Its bounds, and those of another on what it gives."""
        ends = [min(max(last.sign * v, last.low), last.high) for v in (self.low, self.high)]
        return _Bounds(self.sign * last.sign, min(ends), max(ends))


def _activation(p: Any) -> _Bounds | None:
    kind = p.WhichOneof("NonlinearityType")
    if kind == "ReLU":
        return _Bounds(low=0)
    plain = kind == "linear" and p.linear.beta == 0 and abs(p.linear.alpha) == 1
    return _Bounds(p.linear.alpha) if plain else None


def _unary(p: Any) -> _Bounds | None:
    sign = p.scale or 1
    plain = p.type == THRESHOLD and p.shift == 0 and abs(sign) == 1
    return _Bounds(sign, p.alpha) if plain else None


LINKS: dict[str, Callable[[Any], _Bounds | None]] = {
    "activation": _activation,
    "unary": _unary,
    "clip": lambda p: _Bounds(1, p.minVal, p.maxVal),
}
"""Layer type -> its bounds, None where it does something else."""


def _bounds(node: Node) -> _Bounds | None:
    found = LINKS[node.kind](node.params) if node.kind in LINKS else None
    return found if found is not None and found.low <= found.high else None  # false of NaN


@dataclass(frozen=True)
class FuseClip(LayerRewrite):
    """ReLU, thresholds and signs in a row become one `clip`, ReLU or threshold."""

    name: ClassVar[str] = "fuse_clip"
    kinds: ClassVar[frozenset[str]] = frozenset(LINKS)

    newest: int = 4
    """The version that the specification may get: with 3 no layer becomes a `clip` in a model before it."""

    def rewrite(self, site: Site) -> Refusal | None:
        """The longest chain up to the layer that gives the bounds of x; it must be longer than what comes."""
        links = chain_to(site.network, site.node, _bounds)
        for start in range(len(links) - 1):
            made = _together([bounds for _, bounds in links[start:]])
            if made.sign < 0:
                continue
            if made.low == made.high:
                return Refusal(f"both bounds are {made.low:g}; clip takes a lower and a higher one")
            if self._is_too_new(site, made):
                version = site.network.spec.specificationVersion
                return Refusal(f"clip needs specification {EXACT}; the model has {version}")
            _emit(site, links[start][0].inputs[0], made)
            return None
        if len(links) > 2 and not _goes_on(site):
            return Refusal("the layers in a row bound -x, not x")
        return None

    def _is_too_new(self, site: Site, made: _Bounds) -> bool:
        version = int(site.network.spec.specificationVersion)
        return made.high < INF and version < EXACT and self.newest < EXACT

    def sample(self, site: Site, var: Var, rng: np.random.Generator) -> Array | None:
        """Numbers around each bound of the old layers, and the bounds themselves."""
        links = chain_to(site.network, site.node, _bounds)
        ends = {abs(v) for _, b in links for v in (b.low, b.high) if abs(v) < -LEAST}
        centers = np.array(sorted(ends | {0.0}))
        shape = [SYMBOL_LENGTH if is_symbolic(d) else int(d) for d in var.shape]
        near = rng.choice(centers, shape) * rng.choice([-1, 1], shape)
        return (near + rng.standard_normal(shape) * rng.integers(0, 2, shape)).astype(np.float32)


def _goes_on(site: Site) -> bool:
    """Does the row have a layer behind this one?"""
    readers = site.network.readers(site.outputs[0])
    last = site.outputs[0] in site.network.outputs or len(readers) != 1
    return not last and _bounds(readers[0]) is not None


def _together(links: Sequence[_Bounds]) -> _Bounds:
    made = _Bounds()
    for link in links:
        made = made.then(link)
    return made


def _emit(site: Site, x: str, made: _Bounds) -> None:
    if made.high < INF:
        # What is added makes 0 of -0.
        site.emit("clip", [x], site.outputs, minVal=max(made.low, LEAST), maxVal=made.high + 0.0)
    elif made.low == 0:
        site.emit("activation", [x], site.outputs, ReLU={})
    elif made.low > -INF:
        site.emit("unary", [x], site.outputs, type="THRESHOLD", alpha=made.low)
    else:
        site.forward(x)


def example() -> Any:
    """ReLU6 as a converter of specification 1 wrote it."""
    layers = [
        make_layer("activation", ["x"], ["above"], ReLU={}),
        make_layer("activation", ["above"], ["minus"], linear={"alpha": -1.0}),
        make_layer("unary", ["minus"], ["bound"], type="THRESHOLD", alpha=-6.0),
        make_layer("activation", ["bound"], ["y"], linear={"alpha": -1.0}),
    ]
    return make_network({"x": (1, 2, 4, 4)}, layers, ["y"])
