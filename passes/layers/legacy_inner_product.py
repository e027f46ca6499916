"""Multiply vectors by a matrix in four axes, without the reshapes around it.

Before::

    network(%x: 2x3x1x1) {
      %rows: 2x3 = reshapeStatic(%x, targetShape=[2, 3])
      %product: 2x4 = innerProduct(%rows, inputChannels=3, outputChannels=4, weights=const<12>)
      %gate: 2x4 = activation(%product, sigmoid={})
      %y: 2x4x1x1 = reshapeStatic(%gate, targetShape=[2, 4, 1, 1])
      return %y
    }

After::

    network(%x: 2x3x1x1) {
      %product_1: 2x4x1x1 = innerProduct(%x, inputChannels=3, outputChannels=4, weights=const<12>)
      %y: 2x4x1x1 = activation(%product_1, sigmoid={})
      return %y
    }

So networks squeeze and excite: vectors are taken out of images, multiplied, bent, and put back as channels.
`innerProduct` takes (N, C, H, W) as N vectors by itself, and gives (N, C', 1, 1). A product with one stored
matrix, `batchedMatmul` of one input, becomes an `innerProduct`.

Refuses when the vectors do not come from four axes with the same N, by layers that only state other shapes;
when another layer reads one of the blobs between; when a layer between is not a product and no function of each
number or channel, or bends whole images; and when a size is dynamic.

Why it helps: products and functions of four axes were seen on the ANE (fredyshox/ANECompat, macOS 12 or later),
and of the reshapes no report is known. Not measured. Exact: the same products are summed in the same order.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site

PRODUCTS = frozenset({"innerProduct", "batchedMatmul"})
POINTWISE = frozenset({"unary", "clip", "gelu"})
BENDING = an.ops.names(
    """
    linear ReLU leakyReLU thresholdedReLU tanh scaledTanh sigmoid sigmoidHard ELU softsign softplus
    """
)
"""Activations of each number by itself."""
BY_CHANNEL = frozenset({"PReLU", "parametricSoftplus"})
"""Activations of each channel, which is the last of two axes and the second of four."""
IMAGE = 4
"""Axes of a batch of images."""


@dataclass(frozen=True)
class LegacyInnerProduct(LayerRewrite):
    """Products of vectors between two reshapes are taken in four axes."""

    name = "legacy_inner_product"
    precedes = ("legacy_rearrange",)  # it would change the reshapes around a product
    kinds = an.movement.SHAPERS

    def rewrite(self, site: Site) -> Refusal | None:
        """Where vectors become (N, C, 1, 1): all layers back to four axes."""
        before, after = site.sizes(site.inputs[0]), site.sizes(site.outputs[0])
        if len(before) >= IMAGE or len(after) != IMAGE or after[2:] != (1, 1):
            return None
        tower: list[an.Node] = []
        source = _back(site, after[0], tower)
        if isinstance(source, Refusal):
            return source
        if not any(node.kind in PRODUCTS for node in tower):
            return None
        image = site.sizes(source)
        if image[2:] != (1, 1) and tower[0].kind not in PRODUCTS:
            return Refusal(f"{tower[0]} bends vectors of {image[1]}x{image[2]}x{image[3]} numbers")
        for node in tower:
            source = _put(site, node, source, site.outputs if node is tower[-1] else None)
        return None


def _back(site: Site, count: int, tower: list[an.Node]) -> str | Refusal:
    """The blob of four axes that the vectors come from; the layers between, in their order, into `tower`."""
    network, blob, reader = site.network, site.inputs[0], site.node
    while True:
        shape = site.sizes(blob)
        if len(shape) == IMAGE and shape[0] == count:
            same = network.plain(blob)
            return blob if same else Refusal(f"the blob {blob!r} is made more than once")
        maker = network.maker(blob)
        if maker is None:
            return Refusal(f"its vectors come from {blob!r} of shape {shape}, not ({count}, C, H, W)")
        if not network.only_reader(blob, reader):
            return Refusal(f"the blob {blob!r} is read by others too")
        if maker.kind not in an.movement.SHAPERS:
            if (strange := _strange(site, maker)) is not None:
                return strange
            tower.insert(0, maker)
        blob, reader = maker.inputs[0], maker


def _strange(site: Site, node: an.Node) -> Refusal | None:
    """Why a layer is none of those that may stand between."""
    bend = node.params.WhichOneof("NonlinearityType") if node.kind == "activation" else ""
    if bend not in BENDING | BY_CHANNEL and node.kind not in PRODUCTS | POINTWISE:
        return Refusal(f"{node} is not a product, and no function of each number or channel")
    if len(node.inputs) > 1:
        return Refusal(f"{node} has {len(node.inputs)} inputs, not 1")
    shape = site.sizes(node.inputs[0])
    if len(shape) != 2:
        return Refusal(f"{node} works on {len(shape)} axes, not on 2")
    return None


def _put(site: Site, node: an.Node, x: str, outputs: tuple[str, ...] | None) -> str:
    """A layer on four axes; what it makes."""
    p = node.params
    outputs = outputs or (site.network.fresh(node.outputs[0]),)
    if node.kind != "batchedMatmul":
        site.copy(node, [x], outputs)
        return outputs[0]
    # Both layers store the matrix as [out, in].
    fields: dict[str, Any] = {
        "inputChannels": p.weightMatrixFirstDimension,
        "outputChannels": p.weightMatrixSecondDimension,
        "weights": p.weights,
        "int8DynamicQuantize": p.int8DynamicQuantize,
    }
    fields |= {"hasBias": True, "bias": p.bias} if p.hasBias else {}
    return site.emit("innerProduct", [x], outputs, **fields)


def example() -> Any:
    """A gate for each channel."""
    matrix = an.weights(np.arange(12))
    layers = [
        an.make_layer("reshapeStatic", ["x"], ["rows"], targetShape=[2, 3]),
        an.make_layer("innerProduct", ["rows"], ["product"], inputChannels=3, outputChannels=4, weights=matrix),
        an.make_layer("activation", ["product"], ["gate"], sigmoid={}),
        an.make_layer("reshapeStatic", ["gate"], ["y"], targetShape=[2, 4, 1, 1]),
    ]
    return an.make_network({"x": (2, 3, 1, 1)}, layers, ["y"])
