"""The table of layer types: for each the function that builds it, and how many inputs it takes.

A family of layers is a module; its functions are registered by `@layer(...)` and built by a `Context`::

    @layer("softmax")
    def softmax(ctx, params, inputs):
        return mb.softmax(x=inputs[0], axis=-3)

`params` is the message of the layer type, `inputs` are the values it reads; what comes back is the value of the
one output, or a list of values, one for each output. `ctx.layer` is the whole message of the layer.

Blobs are fp32, whatever they hold: conditions are 1 and 0, indices are whole floats.

A layer that counts axes from the first, or makes or takes away axes, is registered by `@layer_nd(...)`: it is
given its blobs with all their axes. The others count from the end, and so need not know of a sequence of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from anesurgery.mil import Var

Made = Var | Sequence[Var] | None
Build = Callable[[Any, Any, list[Var]], Made]
Axes = Literal["all", "most", "first"]


@dataclass(frozen=True)
class Layer:
    """How a layer type is built."""

    build: Build
    least: int
    """Number of inputs, at least."""
    most: int | None
    """Number of inputs, at most; None without bound."""
    axes: Axes = "most"
    """How axes are counted: "all" as they are; else from the end, and the result has as many as the input with
    the most, or as the "first" input."""

    @property
    def inputs(self) -> str:
        """How many inputs it takes, in words."""
        if self.most is None:
            return f"at least {self.least}"
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"


LAYERS: dict[str, Layer] = {}
"""Layer type, as the field of `NeuralNetworkLayer` is named -> how it is built (after `load_families`)."""


def layer(
    *kinds: str, inputs: int | tuple[int, int | None] = 1, axes: Axes = "most"
) -> Callable[[Build], Build]:
    """Register a function for layer types.

    Args:
        kinds: fields of `NeuralNetworkLayer`.
        inputs: how many inputs; (least, most), where most may be None.
        axes: how the layer counts them, see `Layer`.
    """
    least, most = (inputs, inputs) if isinstance(inputs, int) else inputs

    def register(build: Build) -> Build:
        for kind in kinds:
            LAYERS[kind] = Layer(build, least, most, axes)
        return build

    return register


def layer_nd(*kinds: str, inputs: int | tuple[int, int | None] = 1) -> Callable[[Build], Build]:
    """Register a function for layer types that count all axes of their blobs."""
    return layer(*kinds, inputs=inputs, axes="all")
