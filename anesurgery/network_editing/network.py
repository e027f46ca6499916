"""A neural network as a graph that layer passes edit: its layers, and who makes and reads which blob."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from anesurgery.mil import Array
from anesurgery.neuralnetwork.blob_shapes import Blobs
from anesurgery.neuralnetwork.spec import is_legacy, nested_networks, network_of, walk_layers

FOURTH = 600
"""Field number of `NeuralNetworkLayer` from which on a layer type needs specification 4 (iOS 13, macOS 10.15):
the format's definition lists the layers of its first releases below it."""


@dataclass(eq=False)
class Node:
    """A layer of the network itself, not of one nested in it."""

    message: Any
    """The `NeuralNetworkLayer` message of the layer."""
    nested: bool = field(init=False)
    """Does it hold networks of its own?"""

    def __post_init__(self) -> None:
        self.nested = bool(nested_networks(self.message))

    @property
    def kind(self) -> str:
        """The layer type, as the field of `NeuralNetworkLayer` is called."""
        return str(self.message.WhichOneof("layer"))

    @property
    def newer(self) -> bool:
        """Did its type come with specification 4 or later?"""
        return int(self.message.DESCRIPTOR.fields_by_name[self.kind].number) >= FOURTH

    @property
    def name(self) -> str:
        """The name, or that of the first output where there is none."""
        return self.message.name or next(iter(self.message.output), self.kind)

    @property
    def params(self) -> Any:
        """The message of the layer type."""
        return getattr(self.message, self.kind)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The blobs that it reads."""
        return tuple(self.message.input)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The blobs that it makes."""
        return tuple(self.message.output)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def blobs_inside(message: Any) -> Iterator[str]:
    """Yield all blobs that the networks inside a layer name."""
    for network in nested_networks(message):
        for layer, _ in walk_layers(network):
            yield from [*layer.input, *layer.output]
            if layer.WhichOneof("layer") == "loop":
                yield layer.loop.conditionVar
    if message.WhichOneof("layer") == "loop":
        yield message.loop.conditionVar


class Network:
    """The network of a model; edits reach the specification with `commit`.

    Args:
        spec: specification of a model that holds a network; it is changed by `commit` only.
        blobs: shapes and constants; inferred by default.
    """

    def __init__(self, spec: Any, blobs: Blobs | None = None) -> None:
        self.spec = spec
        self.message = network_of(spec)
        self.nodes = [Node(layer) for layer in self.message.layers]
        self.edited = self._outdated = False
        self._blobs = blobs
        self.inputs = tuple(f.name for f in spec.description.input)
        self._scores = _scores(self.message)
        self.outputs = frozenset([*(f.name for f in spec.description.output), *self._scores])
        self._index()

    @property
    def blobs(self) -> Blobs:
        """Shapes and constants of the blobs; they are inferred when they are needed.

        Raises:
            LoadError: an input cannot be read.
        """
        if self._blobs is None:
            layers = [node.message for node in self.nodes]
            self._blobs = Blobs(self.message, self.spec.description, layers=layers)
        return self._blobs

    def _index(self) -> None:
        self._makers: dict[str, list[Node]] = {}
        self._readers: dict[str, list[Node]] = {}
        self._names = {node.message.name for node in self.nodes} | set(self.inputs)
        for node in self.nodes:
            self._enter(node)

    def _enter(self, node: Node) -> None:
        for blob in node.outputs:
            self._makers.setdefault(blob, []).append(node)
        for blob in node.inputs:
            self._readers.setdefault(blob, []).append(node)
        for blob in blobs_inside(node.message):
            # A nested network may read or overwrite a blob of the outer one.
            self._makers.setdefault(blob, []).append(node)
            self._readers.setdefault(blob, []).append(node)
        self._names |= {node.message.name, *node.outputs, *blobs_inside(node.message)}

    def _leave(self, node: Node) -> None:
        for blob in node.outputs:
            self._makers[blob].remove(node)
        for blob in node.inputs:
            self._readers[blob].remove(node)

    def maker(self, blob: str, *kinds: str) -> Node | None:
        """Return the one layer that makes a blob, if it is of one of the kinds (any, if none is named)."""
        makers = self._makers.get(blob, [])
        if len(makers) != 1 or blob in self.inputs or makers[0].nested:
            return None
        return makers[0] if not kinds or makers[0].kind in kinds else None

    def readers(self, blob: str) -> list[Node]:
        """Return the layers that read a blob, one that reads it twice counted twice."""
        return list(self._readers.get(blob, []))

    def is_read(self, blob: str) -> bool:
        """Does a layer read a blob, or the caller of the model?"""
        return blob in self.outputs or bool(self._readers.get(blob))

    def only_reader(self, blob: str, node: Node) -> bool:
        """Does nobody but a layer read a blob, the caller of the model included?"""
        return blob not in self.outputs and set(self.readers(blob)) == {node}

    def plain(self, blob: str) -> bool:
        """Has a blob one value throughout: made once, not inside a branch or loop, an input never?"""
        if blob in self.inputs:
            return not self._makers.get(blob)
        return self.maker(blob) is not None

    @property
    def takes_newer(self) -> bool:
        """May layers that came with specification 4 be put in?

        Where arrays are mapped to rank 5, Core ML's own check refuses them beside an array as input, and beside
        an image it begins to count the axes of all blobs otherwise. So only a network that has some gets more.
        """
        return not is_legacy(self.message) or any(node.newer for node in self.nodes)

    def shape(self, blob: str) -> tuple[int | None, ...] | None:
        """Return the shape with its true rank; None for a dynamic size; None if nothing is known."""
        return self.blobs.shape(blob)

    def constant(self, blob: str) -> Array | None:
        """Return the value of a blob that is the same at every run."""
        return self.blobs.constant(blob)

    def fresh(self, wish: str) -> str:
        """Return a name that no layer and no blob bears yet."""
        name, n = wish, 0
        while name in self._names:
            n += 1
            name = f"{wish}_{n}"
        self._names.add(name)
        return name

    def replace(self, node: Node, new: Sequence[Node]) -> list[Node]:
        """Put layers in the place of one, and remove what then makes nothing that is read.

        Returns:
            The layers that went, `node` first.
        """
        self.edited = self._outdated = True
        at = self.nodes.index(node)
        self.nodes[at : at + 1] = new
        self._leave(node)
        for one in new:
            self._enter(one)
        least = 4 if any(node.newer for node in new) else 1
        self.spec.specificationVersion = max(self.spec.specificationVersion, least)
        return [node, *self._bury(node.inputs)]

    def remove_unread(self) -> list[Node]:
        """Remove all layers that make nothing that is read."""
        return self._bury([blob for node in reversed(self.nodes) for blob in node.outputs])

    def _bury(self, blobs: Sequence[str]) -> list[Node]:
        gone: list[Node] = []
        pending = list(blobs)
        while pending:
            node = self.maker(pending.pop(0))
            if node is None or not node.outputs:
                continue
            if any(map(self.is_read, node.outputs)):
                continue
            self.edited = self._outdated = True
            self.nodes.remove(node)
            self._leave(node)
            gone.append(node)
            pending += node.inputs
        return gone

    def forward(self, old: str, new: str) -> None:
        """Let all who read `old` read `new`."""
        self.edited = self._outdated = True
        for node in self.readers(old):
            self._readers[old].remove(node)
            self._readers.setdefault(new, []).append(node)
            for i, blob in enumerate(node.message.input):
                if blob == old:
                    node.message.input[i] = new

    def refresh(self) -> None:
        """Forget shapes and constants if layers came or went since they were inferred.

        What was unknown downstream of a layer that went may be known now, and the value of a blob is that of
        the layer that makes it now.
        """
        if self._outdated:
            self._blobs, self._outdated = None, False

    def commit(self) -> None:
        """Write the layers into the specification; it copies weights, so once, after all passes."""
        if not self.edited:
            return
        self.edited = False
        kept = [node.message for node in self.nodes]
        copies = type(self.message)()
        copies.layers.extend(kept)
        del self.message.layers[:]
        self.message.layers.extend(copies.layers)
        for name in self._scores:  # by default it is what the last layer makes, which may be another one now
            self.message.labelProbabilityLayerName = name
        self.nodes = [Node(layer) for layer in self.message.layers]
        self._index()


def _scores(network: Any) -> list[str]:
    """Return the blob with the probabilities of a classifier; none of another network."""
    if "ClassLabels" not in network.DESCRIPTOR.oneofs_by_name:
        return []
    last = network.layers[-1].output[0] if len(network.layers) else ""
    return [network.labelProbabilityLayerName or last]
