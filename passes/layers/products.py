"""Products of vectors with a matrix, without the reshapes around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anesurgery import authoring as an
from anesurgery.authoring import Refused
from anesurgery.network_editing.layer_pass import LayerRewrite, Site
from anesurgery.network_editing.movements import IMAGE, SHAPERS
from anesurgery.network_editing.network import Node

PRODUCTS = frozenset({"innerProduct", "batchedMatmul"})
POINTWISE = frozenset({"unary", "clip", "gelu"})
POINTWISE_ACTIVATIONS = an.ops.names(
    "linear ReLU leakyReLU thresholdedReLU tanh scaledTanh sigmoid sigmoidHard ELU softsign softplus"
)
CHANNEL_ACTIVATIONS = frozenset({"PReLU", "parametricSoftplus"})
"""Activations with a parameter for each channel: the last of two axes, and the second of four."""


@dataclass(frozen=True)
class LegacyInnerProduct(LayerRewrite):
    """Multiply vectors by a matrix in four axes, without the reshapes around it.

    Networks with squeeze and excitation do this: an image becomes a vector, goes through products and
    activations, and becomes channels again. `innerProduct` takes (N, C, H, W) as N vectors by itself, and gives
    (N, C', 1, 1). A product with one stored matrix, `batchedMatmul` of one input, becomes an `innerProduct`.

    Refuses when the vectors do not come from four axes with the same N, by layers that only state other shapes;
    when another layer reads one of the blobs between; when a layer between is neither a product nor a function
    of each element or channel, or such a function comes before any product and its image is larger than 1x1;
    and when a size is dynamic.

    Why it helps: products and functions of four axes were seen on the ANE (fredyshox/ANECompat, macOS 12 or
    later), and of the reshapes no report is known. Not measured. Exact: the same products are summed in the
    same order.

    Grade: bit for bit.
    """

    name = "legacy_inner_product"
    precedes = ("legacy_rearrange",)  # it would change the reshapes around a product
    kinds = SHAPERS

    def rewrite(self, site: Site) -> None:
        """Where vectors become (N, C, 1, 1), rewrite all layers back to the last blob of four axes."""
        before, after = site.sizes(site.inputs[0]), site.sizes(site.outputs[0])
        if len(before) >= IMAGE or len(after) != IMAGE or after[2:] != (1, 1):
            return
        blob, row = _vectors_from(site, after[0])
        if not any(node.kind in PRODUCTS for node in row):
            return
        image = site.sizes(blob)
        if image[2:] != (1, 1) and row[0].kind not in PRODUCTS:
            raise Refused(
                f"{row[0]} works on vectors of {image[1]}x{image[2]}x{image[3]} numbers before any product"
            )
        for node in row:
            blob = _put_on_four_axes(site, node, blob, site.outputs if node is row[-1] else None)


def _vectors_from(site: Site, count: int) -> tuple[str, list[Node]]:
    """Return the blob of four axes that `count` vectors come from, and the layers between, in their order.

    Raises:
        Refused: there is none, or a layer between cannot be written on four axes.
    """
    network, blob, reader = site.network, site.inputs[0], site.node
    row: list[Node] = []
    while len(shape := site.sizes(blob)) != IMAGE or shape[0] != count:
        maker = network.maker(blob)
        if maker is None:
            raise Refused(f"its vectors come from {blob!r} of shape {shape}, not ({count}, C, H, W)")
        if not network.only_reader(blob, reader):
            raise Refused(f"the blob {blob!r} is read by others too")
        if maker.kind not in SHAPERS:
            _check_between(site, maker)
            row.insert(0, maker)
        blob, reader = maker.inputs[0], maker
    if not network.plain(blob):
        raise Refused(f"the blob {blob!r} is made more than once")
    return blob, row


def _check_between(site: Site, node: Node) -> None:
    """Check that a layer between the reshapes can be written on four axes.

    Raises:
        Refused: it cannot.
    """
    activation = node.params.WhichOneof("NonlinearityType") if node.kind == "activation" else ""
    pointwise = activation in POINTWISE_ACTIVATIONS | CHANNEL_ACTIVATIONS or node.kind in POINTWISE
    if not pointwise and node.kind not in PRODUCTS:
        raise Refused(f"{node} is not a product, and no function of each number or channel")
    if len(node.inputs) > 1:
        raise Refused(f"{node} has {len(node.inputs)} inputs, not 1")
    shape = site.sizes(node.inputs[0])
    if len(shape) != 2:
        raise Refused(f"{node} works on {len(shape)} axes, not on 2")


def _put_on_four_axes(site: Site, node: Node, x: str, outputs: tuple[str, ...] | None) -> str:
    """Put the layer there with an input of four axes, and return its output."""
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
