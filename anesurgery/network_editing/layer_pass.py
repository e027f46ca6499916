"""Passes over the layers of a neural network: what the author of a pass writes, and how a layer is replaced.

The author names the layer types and writes `rewrite`. The rest is done here: walking, naming, building the new
layers as MIL ops beside the old ones, comparing both, replacing, and removing layers that nobody reads::

    class LegacyClip(LayerRewrite):
        kinds = frozenset({"maxBroadcastable"})

        def rewrite(self, site: Site) -> Refusal | None:
            ...
            site.emit("unary", [x], site.outputs, type="THRESHOLD", alpha=least)

A blob is what the format calls a value: an input, or an output of a layer, by its name.
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
from anesurgery.neuralnetwork.making import Step, make_layer
from anesurgery.rewriting.driver import Built, Place, operate
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import Change, Session
from anesurgery.semantics.reading import shape_in_words

Shape = tuple[int | None, ...]
"""The sizes of a blob; None for a dynamic size."""


@dataclass
class Site:
    """One layer that a rewrite looks at, and the layers that are to replace it."""

    network: Network
    node: Node
    new: list[Node] = field(default_factory=list)
    """The layers that replace it, in the order in which they run."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Output of the old layer that no new layer makes -> the blob that its readers read instead."""

    @property
    def params(self) -> Any:
        """The message of the layer type, such as `ConvolutionLayerParams`."""
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
        """Return the shape of a blob, with all its axes; None for a dynamic size.

        Raises:
            Refused: nothing is known about the blob.
        """
        shape = self.network.shape(blob)
        if shape is None:
            raise Refused(f"the shape of {blob!r} is unknown: {self.network.blobs.missing.get(blob)}")
        return shape

    def sizes(self, blob: str) -> tuple[int, ...]:
        """Return the shape of a blob without dynamic sizes.

        Raises:
            Refused: a size is dynamic.
        """
        shape = self.shape(blob)
        if None in shape:
            raise Refused(f"the shape of {blob!r} is {shape_in_words(shape)}: a size is dynamic")
        return tuple(d for d in shape if d is not None)

    def constant(self, blob: str) -> Array | None:
        """Return the value of a blob that is the same at every run; None for any other blob."""
        return self.network.constant(blob)

    def emit(
        self, kind: str, inputs: Sequence[str], outputs: Sequence[str] | None = None, **fields: Any
    ) -> str:
        """Add a new layer.

        Args:
            kind: the layer type, a field of `NeuralNetworkLayer`.
            inputs: the blobs that it reads.
            outputs: the blobs that it makes; a new one by default. The layer that makes the outputs of the old
                layer takes its name too.
            fields: the fields of the message of the layer type; dictionaries for messages in it.

        Returns:
            The first output.
        """
        makes_old_output = set(outputs or ()) & set(self.outputs)
        name = self.node.message.name if makes_old_output and not self._has_old_name() else ""
        name = name or self.network.fresh(f"{self.outputs[0]}_{kind}")
        blobs = [name] if outputs is None else outputs
        self.new.append(Node(make_layer(kind, inputs, blobs, name, **fields)))
        return str(blobs[0])

    def linear(self, x: str, alpha: float, beta: float, outputs: Sequence[str] | None = None) -> str:
        """Add a layer that computes alpha x + beta, and return its output."""
        fields = {"alpha": float(alpha), "beta": float(beta)}
        return self.emit("activation", [x], outputs, linear=fields)

    def put(self, step: Step, blob: str, outputs: Sequence[str] | None = None) -> str:
        """Add a layer of one input, and return its output."""
        return self.emit(step[0], [blob], outputs, **step[1])

    def chain(self, steps: Sequence[Step], source: str | None = None) -> None:
        """Add layers in a row that make the one output of the old layer.

        Args:
            steps: the layers; without any, the readers of the output read `source`.
            source: the blob that the first one reads; by default the first input of the old layer.
        """
        blob = self.inputs[0] if source is None else source
        for step in steps[:-1]:
            blob = self.put(step, blob)
        if steps:
            self.put(steps[-1], blob, self.outputs)
        else:
            self.forward(blob)

    def _has_old_name(self) -> bool:
        """Has a new layer the name of the old one already?"""
        return any(node.message.name == self.node.message.name for node in self.new)

    def copy(self, node: Node, inputs: Sequence[str], outputs: Sequence[str] | None = None) -> Any:
        """Add a copy of a layer with other blobs, and return its message, which may be changed."""
        self.emit(node.kind, inputs, outputs)
        message = self.new[-1].message
        getattr(message, node.kind).CopyFrom(node.params)
        return message

    def forward(self, blob: str) -> None:
        """Let the readers of the layer's one output read `blob` instead, so that no layer replaces the old one.

        Raises:
            Refused: the blob is overwritten, so that its readers may find another value than the layer did.
        """
        if not self.network.plain(blob):
            raise Refused(f"the blob {blob!r} is made more than once, or in a loop or branch")
        out = self.outputs[0]
        if out in self.network.outputs:
            # The caller of the model asks for this name, so a layer has to make it.
            self.linear(blob, 1.0, 0.0, [out])
        else:
            self.renamed[out] = blob


def _objection(site: Site) -> Refusal | None:
    """Return why the new layers may not stand in the network, whatever they compute; None if they may."""
    network, new = site.network, {blob for node in site.new for blob in node.outputs}
    read = {*site.inputs, *site.renamed.values(), *(b for node in site.new for b in node.inputs)}
    overwritten = sorted(blob for blob in read - new if not network.plain(blob))
    if overwritten:
        return Refusal(f"it reads {overwritten[0]!r}, which is overwritten, or made in a loop or branch")
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
    """A pass that replaces single layers by others."""

    kinds: ClassVar[frozenset[str]]
    """The layer types for which `rewrite` is called."""

    def rewrite(self, site: Site) -> Refusal | None:
        """Add layers that make the outputs of the old one, or return why not.

        If it adds none and returns None, the pass does not apply to this layer.
        """
        raise NotImplementedError

    def sample(self, site: Site, var: Var, rng: np.random.Generator) -> Array | None:
        """Return values for an input whose range matters in the comparison, such as ids; else None."""
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
        """Call the pass, and build its new layers as ops beside the old ones.

        Returns:
            Both sides, to be compared; a refusal of the pass or the network; `NO_MATCH` if the pass does not
            apply.
        """
        site = self.site
        if not all(map(site.network.plain, site.outputs)):
            return self.refusal("it makes a blob that a loop or branch, or another layer, makes too")
        try:
            refusal = self.step.rewrite(site)
        except Refused as reason:  # if a blob is overwritten, that is the better reason
            refusal = Refusal(str(reason))
        if refusal is not None or site.new or site.renamed:
            objection = _objection(site)
            refusal = refusal if objection is None else objection
        if refusal is not None:
            return self.refusal(refusal.reason)
        return self.built() if site.new or site.renamed else NO_MATCH

    def refusal(self, reason: str) -> Refusal:
        """Return a refusal that names the layer."""
        return Refusal(reason, self.site.node)

    def built(self) -> Built | Refusal:
        """Return the old and the new value of each known output, and the new ops.

        An output is not known behind a custom layer, say; a new layer that reads such a blob is refused.

        Raises:
            PassError: the new layers cannot be built, or make other shapes.
            Refused: a size is dynamic, so that it is not known whether a shape stays.
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
        """Return the values that the pass gives for an input."""
        return self.step.sample(self.site, var, rng)

    def undo(self) -> None:
        """Do nothing: the network has not been edited, and nobody reads the new ops."""

    def replace(self, built: Built) -> Change:
        """Put the new layers into the network, and remove those that nobody reads then."""
        network, node = self.site.network, self.site.node
        for old, new in self.site.renamed.items():
            network.forward(old, new)
        gone = network.replace(node, self.site.new)
        return Change(self.step.name, node.name, tuple(map(str, gone)), tuple(map(str, self.site.new)))


def _same_shapes(pairs: Sequence[tuple[Var, Var]]) -> bool:
    """Have the two values of each pair the same shape?

    Raises:
        Refused: a size is dynamic, so that it is not known whether it stays.
    """
    same = all(len(a.shape) == len(b.shape) for a, b in pairs)
    sizes = [s for a, b in pairs for s in zip(a.shape, b.shape, strict=False)]
    if any(any_symbolic(s) and str(s[0]) != str(s[1]) for s in sizes):
        raise Refused("a size is dynamic, and cannot be shown to stay as it is")
    return same and all(any_symbolic(s) or s[0] == s[1] for s in sizes)
