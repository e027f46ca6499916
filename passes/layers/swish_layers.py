"""Write custom layers of the class Swish as a sigmoid and a product.

Before::

    network(%x: 1x2x4x4) {
      %y: ? = custom(%x, className=Swish)
      return %y
    }

After::

    network(%x: 1x2x4x4) {
      %y_activation: 1x2x4x4 = activation(%x, sigmoid={})
      %y: 1x2x4x4 = multiply(%x, %y_activation)
      return %y
    }

The code of a custom layer is not in the file, so the pass takes the name for x sigmoid(x), and a number `beta`
among its parameters for x sigmoid(beta x): so are they defined by the paper (Ramachandran and others,
arXiv 1710.05941) and by the class of the example from which the name comes (hollance/CoreML-Custom-Layers,
Swish.swift, where `beta` is 1 if it is absent). Nothing can be compared with the old layer: each change
is noted as not checked. Check a few outputs of both models on a Mac.

Refuses when the layer has weights, other parameters, or a `beta` that is not a number, and when it does not
read one blob and make one. `class_names` says which classes are meant.

Why it helps: custom layers have code for the CPU, and perhaps the GPU, never for the ANE; sigmoids and products
mostly run there (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Not measured.

Grade: none: the code of a custom layer is not in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site

BETA = "beta"
NUMBERS = ("doubleValue", "intValue", "longValue")
"""The kinds of a parameter that are numbers."""


@dataclass(frozen=True)
class SwishLayers(LayerRewrite):
    """Custom layers of the class Swish become x sigmoid(x), of built-in layers.

    Attributes:
        class_names: the classes that compute it.
    """

    name = "swish_layers"
    precedes = ("*",)  # after a custom layer no shape is known
    kinds = frozenset({"custom"})
    caveat = "the code of the class is not in the file; its name is taken for x sigmoid(x)"
    class_names: tuple[str, ...] = ("Swish",)

    def rewrite(self, site: Site) -> Refusal | None:
        """A sigmoid, of beta x if there is a beta, then the product with x."""
        params = site.params
        if params.className not in self.class_names:
            return None
        if (len(site.inputs), len(site.outputs)) != (1, 1):
            blobs = f"{len(site.inputs)} blobs and makes {len(site.outputs)}"
            return Refusal(f"it reads {blobs}; Swish reads one and makes one")
        if len(params.weights):
            return Refusal(f"it has {len(params.weights)} weights, and the file does not say what they do")
        beta = _beta(params.parameters)
        if isinstance(beta, Refusal):
            return beta
        x = site.inputs[0]
        scaled = x if beta == 1 else site.linear(x, beta, 0.0)
        gate = site.emit("activation", [scaled], sigmoid={})
        site.emit("multiply", [x, gate], site.outputs)
        return None


def _beta(parameters: Any) -> float | Refusal:
    """The factor of x within the sigmoid."""
    others = sorted(set(parameters) - {BETA})
    if others:
        return Refusal(f"it has the parameters {', '.join(others)}, and the file does not say what they do")
    if BETA not in parameters:
        return 1.0
    kind = parameters[BETA].WhichOneof("value")
    if kind not in NUMBERS:
        return Refusal(f"its parameter {BETA} is {kind or 'empty'}, no number")
    return float(getattr(parameters[BETA], kind))


def example() -> Any:
    """Swish of an image."""
    layers = [an.make_layer("custom", ["x"], ["y"], className="Swish")]
    return an.make_network({"x": (1, 2, 4, 4)}, layers, ["y"])
