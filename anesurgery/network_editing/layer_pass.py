"""Passes over the layers of a neural network: what the pass author writes, and how a layer is replaced.

A pass author names the layer types and writes `rewrite`; the engine owns the rest: walking, names, building the
new layers as MIL ops beside the old ones, comparison, replacing, layers that nobody reads any more::

    class LegacyClip(LayerRewrite):
        kinds = frozenset({"maxBroadcastable"})

        def rewrite(self, site: Site) -> Refusal | None:
            ...
            site.emit("unary", [x], site.outputs, type="THRESHOLD", alpha=least)

Channel, height and width, along which layers of the first releases work, are counted from the end, as the
definition of the format counts axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from anesurgery.errors import NO_MATCH, LoadError, Refusal, Refused
from anesurgery.mil import Array, Var, any_symbolic, quiet_host
from anesurgery.network_editing.network import Network, Node
from anesurgery.network_editing.neural_network import NeuralNetwork
from anesurgery.neuralnetwork.making import make_layer, weights
from anesurgery.rewriting.driver import Built, Place, operate
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import Change, Session

Shape = tuple[int | None, ...]
Step = tuple[str, dict[str, Any]]
"""A layer type and its fields, as `emit` takes them."""


@dataclass
class Site:
    """One layer that a rewrite looks at, and the layers that it puts there."""

    network: Network
    node: Node
    new: list[Node] = field(default_factory=list)
    """The layers to come."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Outputs that go, since their readers may read another blob."""

    @property
    def params(self) -> Any:
        """The message of the layer type."""
        return self.node.params

    @property
    def inputs(self) -> tuple[str, ...]:
        """The blobs that the layer reads."""
        return self.node.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """The blobs that the layer makes."""
        return self.node.outputs

    def shape(self, blob: str) -> Shape:
        """The shape with its true rank; None for a dynamic size.

        Raises:
            Refused: nothing is known about the blob.
        """
        shape = self.network.shape(blob)
        if shape is None:
            raise Refused(f"the shape of {blob!r} is unknown: {self.network.blobs.missing.get(blob)}")
        return shape

    def sizes(self, blob: str) -> tuple[int, ...]:
        """The shape, which must be known.

        Raises:
            Refused: a size is dynamic.
        """
        shape = self.shape(blob)
        if None in shape:
            words = "x".join("?" if d is None else str(d) for d in shape)
            raise Refused(f"the shape of {blob!r} is {words}: a size is dynamic")
        return tuple(d for d in shape if d is not None)

    def constant(self, blob: str) -> Array | None:
        """The value of a blob that is the same at every run; else None."""
        return self.network.constant(blob)

    def emit(
        self, kind: str, inputs: Sequence[str], outputs: Sequence[str] | None = None, **fields: Any
    ) -> str:
        """Put a layer there.

        Args:
            kind: field of `NeuralNetworkLayer`.
            inputs: the blobs that it reads.
            outputs: the blobs that it makes; a new one by default. One that has the outputs of the old layer
                takes its name too.
            fields: of the message of the layer type; dictionaries for messages in it.

        Returns:
            The first output.
        """
        last = set(outputs or ()) & set(self.outputs)
        name = self.node.message.name if last and not self._named() else ""
        name = name or self.network.fresh(f"{self.outputs[0]}_{kind}")
        blobs = [name] if outputs is None else outputs
        self.new.append(Node(make_layer(kind, inputs, blobs, name, **fields)))
        return str(blobs[0])

    def linear(self, x: str, alpha: float, beta: float, outputs: Sequence[str] | None = None) -> str:
        """Put alpha x + beta there; the blob that it makes."""
        fields = {"alpha": float(alpha), "beta": float(beta)}
        return self.emit("activation", [x], outputs, linear=fields)

    def put(self, step: Step, blob: str, outputs: Sequence[str] | None = None) -> str:
        """Put a layer of one input there; the blob that it makes."""
        return self.emit(step[0], [blob], outputs, **step[1])

    def chain(self, steps: Sequence[Step], source: str | None = None) -> None:
        """Put layers there in a row, from `source` (the layer's first input) to the layer's one output.

        Without a layer, the readers of the output read `source`.
        """
        blob = self.inputs[0] if source is None else source
        for step in steps[:-1]:
            blob = self.put(step, blob)
        if steps:
            self.put(steps[-1], blob, self.outputs)
        else:
            self.forward(blob)

    def _named(self) -> bool:
        return any(node.message.name == self.node.message.name for node in self.new)

    def copy(self, node: Node, inputs: Sequence[str], outputs: Sequence[str] | None = None) -> Any:
        """Put a copy of a layer there, with other blobs; its message, to be changed."""
        self.emit(node.kind, inputs, outputs)
        message = self.new[-1].message
        getattr(message, node.kind).CopyFrom(node.params)
        return message

    def forward(self, blob: str) -> None:
        """Let the readers of the layer's one output read `blob`, so that the layer goes without another.

        Raises:
            Refused: it is overwritten, so that its readers may find another value than the layer.
        """
        if not self.network.plain(blob):
            raise Refused(f"the blob {blob!r} is made more than once, or in a loop or branch")
        out = self.outputs[0]
        if out in self.network.outputs:
            # The caller asks for this name, so a layer has to make it.
            self.linear(blob, 1.0, 0.0, [out])
        else:
            self.renamed[out] = blob


def _barred(site: Site) -> Refusal | None:
    """Why the new layers may not stand in the network, whatever they compute."""
    network, new = site.network, {blob for node in site.new for blob in node.outputs}
    read = {*site.inputs, *site.renamed.values(), *(b for node in site.new for b in node.inputs)}
    changing = sorted(blob for blob in read - new if not network.plain(blob))
    if changing:
        return Refusal(f"it reads {changing[0]!r}, which is overwritten, or made in a loop or branch")
    newer = [node.kind for node in site.new if node.newer]
    if newer and not network.takes_newer:
        return Refusal(
            f"{newer[0]} came with specification 4, which Core ML's own check refuses where arrays have rank 5"
        )
    return None


@dataclass(frozen=True)
class LayerPass(Pass, abstract=True):
    """A pass over the layers of a neural network (`.mlmodel`), not over the ops of an ML Program."""

    subject = NeuralNetwork

    def run(self, network: Network, session: Session) -> None:
        """Edit a network in place."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayerRewrite(LayerPass, abstract=True):
    """A pass that puts other layers in the place of one, wherever it may."""

    kinds: ClassVar[frozenset[str]]
    """The layer types that `rewrite` wants to see."""

    def rewrite(self, site: Site) -> Refusal | None:
        """Emit the layers that make the outputs of the old one, or say why not.

        Nothing emitted and None: does not apply.
        """
        raise NotImplementedError

    def sample(self, site: Site, var: Var, rng: np.random.Generator) -> Array | None:
        """Values for an input of the comparison whose range matters (ids, for example); None: the default."""
        return None

    def run(self, network: Network, session: Session) -> None:
        """Visit the layers that are there at the start, in order."""
        network.refresh()
        for node in list(network.nodes):
            if node.kind in self.kinds and node in network.nodes:
                operate(_LayerPlace(self, session, Site(network, node)))


@dataclass
class _LayerPlace(Place):
    """A layer at which a rewrite may act."""

    step: LayerRewrite
    session: Session
    site: Site

    def __str__(self) -> str:
        return f"layer {self.site.node.name!r}"

    @property
    def kind(self) -> str:
        """The layer type."""
        return self.site.node.kind

    def build(self) -> Built | Refusal:
        """The new layers as ops beside the old ones.

        Returns:
            Both sides, if every guard and the pass agree; else a refusal; `NO_MATCH` where it does not apply.
        """
        site = self.site
        if not all(map(site.network.plain, site.outputs)):
            return self.refusal("it makes a blob that a loop or branch, or another layer, makes too")
        try:
            refusal = self.step.rewrite(site)
        except Refused as reason:  # a blob that is overwritten is the better reason
            refusal = Refusal(str(reason))
        if refusal is not None or site.new or site.renamed:
            barred = _barred(site)
            refusal = refusal if barred is None else barred
        if refusal is not None:
            return self.refusal(refusal.reason)
        return self.built() if site.new or site.renamed else NO_MATCH

    def refusal(self, reason: str) -> Refusal:
        """A refusal at the layer."""
        return Refusal(reason, self.site.node)

    def built(self) -> Built | Refusal:
        """The old and new value of each output that was known, and the ops that came.

        A refusal where an input is not known, as behind a custom layer.

        Raises:
            PassError: they cannot be built, or have another shape.
            Refused: a shape cannot be shown to stay.
        """
        site, blobs = self.site, self.site.network.blobs
        unknown = next((why for n in site.outputs if (why := blobs.missing.get(n))), "")
        old = {n: var for n in site.outputs if (var := blobs.var(n)) is not None}
        exact = [n in blobs.ctx.exact for n in old]
        try:
            with quiet_host():
                ops, results = blobs.add([node.message for node in site.new])
        except LoadError as error:
            if read := [n for node in site.new for n in node.message.input if n in blobs.missing]:
                return self.refusal(f"{read[0]!r}, which it reads, is not known: {blobs.missing[read[0]]}")
            raise self.error(f"the new layers do not fit: {error}") from error
        new = results | {n: blobs.ctx.env[name] for n, name in site.renamed.items()}
        if lost := [n for n in site.outputs if n not in new and site.network.is_read(n)]:
            raise self.error(f"nothing makes {lost[0]!r} any more, which is read")
        pairs = [(var, new[n]) for n, var in old.items() if n in new]
        same = _same_shapes(pairs)
        if not same or exact != [site.renamed.get(n, n) in blobs.ctx.exact for n in old]:
            raise self.error("the shape of an output changed")
        return Built(pairs, ops, uncompared=self.refusal(f"not known before: {unknown}") if unknown else None)

    def sample(self, var: Var, rng: np.random.Generator) -> Array | None:
        """The values that the pass gives."""
        return self.step.sample(self.site, var, rng)

    def undo(self) -> None:
        """Nothing: the network has not been edited, and nobody reads the new ops."""

    def replace(self, built: Built) -> Change:
        """Put the new layers in the network, and remove those that nobody reads then."""
        network, node = self.site.network, self.site.node
        for old, new in self.site.renamed.items():
            network.forward(old, new)
        gone = network.replace(node, self.site.new)
        return Change(self.step.name, node.name, tuple(map(str, gone)), tuple(map(str, self.site.new)))


def _same_shapes(pairs: Sequence[tuple[Var, Var]]) -> bool:
    """Have the two values of each pair the same shape?

    Raises:
        Refused: a size is dynamic, and cannot be shown to stay.
    """
    same = all(len(a.shape) == len(b.shape) for a, b in pairs)
    sizes = [s for a, b in pairs for s in zip(a.shape, b.shape, strict=False)]
    if any(any_symbolic(s) and str(s[0]) != str(s[1]) for s in sizes):
        raise Refused("a size is dynamic, and cannot be shown to stay as it is")
    return same and all(any_symbolic(s) or s[0] == s[1] for s in sizes)


SEQUENCE, BATCH, CHANNEL, HEIGHT, WIDTH = -5, -4, -3, -2, -1
NAMES = {SEQUENCE: "sequence", BATCH: "batch", CHANNEL: "channel", HEIGHT: "height", WIDTH: "width"}
CUT = {CHANNEL: "CHANNEL_AXIS", HEIGHT: "HEIGHT_AXIS", WIDTH: "WIDTH_AXIS"}
"""Axis -> its name in a `slice`, which needs no more axes than come after it."""
MOST_MIXED = 512
"""Channels above which a pass does not write a matrix: C x C weights, and C x C products for each pixel, of
which 512 have 262,144."""

Margins = tuple[int, int]
"""Elements before and after."""


def from_end(axis: int, rank: int) -> int:
    """An axis that counts from either end, from the end."""
    return axis - rank if axis >= 0 else axis


def cut(axis: int, span: range) -> Step:
    """The `slice` that leaves the places of `span`, upwards, of an axis of `CUT`."""
    fields = {"startIndex": span.start, "endIndex": span.stop, "stride": span.step}
    return "slice", {"axis": CUT[axis], **fields}


def border(height: Margins, width: Margins, value: float) -> Step:
    """A `padding` with one number, for a blob of two axes or more."""
    return "padding", {"constant": {"value": value}, "paddingAmounts": borders(height, width)}


def repeated_border(height: Margins, width: Margins) -> Step:
    """A `padding` that repeats the pixels of the border."""
    return "padding", {"replication": {}, "paddingAmounts": borders(height, width)}


def borders(height: Margins, width: Margins) -> dict[str, list[dict[str, int]]]:
    """The fields of a `BorderAmounts` message."""
    return {"borderAmounts": [{"startEdgeSize": a, "endEdgeSize": b} for a, b in (height, width)]}


def height_and_width(site: Site, blob: str) -> list[int]:
    """The last two sizes of a blob.

    Raises:
        Refused: one is dynamic.
    """
    extent = [d for d in site.shape(blob)[-2:] if d is not None]
    if len(extent) != 2:
        raise Refused(f"height or width of {blob!r} is dynamic")
    return extent


def picking(picks: Sequence[int], channels: int) -> Step:
    """The 1x1 `convolution` whose channel i is channel picks[i] of the `channels` of its input.

    Each number is 1 times one number plus zeros, hence exact for finite ones; an infinite number makes the
    others of its pixel NaN.
    """
    matrix = np.zeros((len(picks), channels), np.float32)
    matrix[np.arange(len(picks)), list(picks)] = 1
    sizes = {"outputChannels": len(picks), "kernelChannels": channels, "kernelSize": [1, 1]}
    return "convolution", {**sizes, "valid": {}, "weights": weights(matrix)}
