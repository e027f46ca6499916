"""Passes over the layers of a neural network, and the driver that applies a rewrite to each of them.

A pass author names the layer types and writes `rewrite`; the driver owns the rest: walking, names, building the
new layers as MIL ops beside the old ones, proof, replacing, layers that nobody reads any more::

    class LegacyClip(LayerRewrite):
        kinds = frozenset({"maxBroadcastable"})

        def rewrite(self, site: Site) -> Refusal | None:
            ...
            site.emit("unary", [x], site.outputs, type="THRESHOLD", alpha=least)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from anesurgery.checking.site import SYMBOL_LENGTH, SiteProof, prove_site
from anesurgery.errors import InterpretError, LoadError, PassError, ProofError, Refusal, SurgeryError
from anesurgery.mil import Array, Operation, Program, Var, any_symbolic, quiet_host
from anesurgery.neuralnetwork.editing.network import Network, Node
from anesurgery.neuralnetwork.making import make_layer
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import Change, Session

Shape = tuple[int | None, ...]


@dataclass
class Site:
    """One layer that a rewrite looks at, and the layers that it puts there."""

    network: Network
    node: Node
    new: list[Node] = field(default_factory=list)
    """The layers to come."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Outputs that go because their readers may read another blob."""

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
        """The shape with its true rank; None for a size known at run time only.

        Raises:
            Unknown: nothing is known about the blob.
        """
        shape = self.network.shape(blob)
        if shape is None:
            raise Unknown(f"the shape of {blob!r} is unknown: {self.network.blobs.missing.get(blob)}")
        return shape

    def sizes(self, blob: str) -> tuple[int, ...]:
        """The shape, which must be known.

        Raises:
            Unknown: a size is known at run time only.
        """
        found = self.shape(blob)
        if None in found:
            words = "x".join("?" if d is None else str(d) for d in found)
            raise Unknown(f"the shape of {blob!r} is {words}, known at run time only")
        return tuple(d for d in found if d is not None)

    def constant(self, blob: str) -> Array | None:
        """The value of a blob that is the same at every run, or None."""
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
        made = [name] if outputs is None else outputs
        self.new.append(Node(make_layer(kind, inputs, made, name, **fields)))
        return str(made[0])

    def linear(self, x: str, alpha: float, beta: float, outputs: Sequence[str] | None = None) -> str:
        """Put alpha x + beta there; the blob that it makes."""
        fields = {"alpha": float(alpha), "beta": float(beta)}
        return self.emit("activation", [x], outputs, linear=fields)

    def chain(self, layers: Sequence[Callable[..., str]]) -> None:
        """Put layers there one behind the other, of which the last makes the layer's one output.

        Args:
            layers: of each, what puts it there: of the blob that it reads, and of `outputs` as in `emit`.
        """
        x = self.inputs[0]
        for layer in layers[:-1]:
            x = layer(x)
        layers[-1](x, outputs=self.outputs)

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
            Unknown: it is overwritten, so that its readers may find another value than the layer.
        """
        if not self.network.plain(blob):
            raise Unknown(f"the blob {blob!r} is made more than once, or in a loop or branch")
        out = self.outputs[0]
        if out in self.network.outputs:
            # The caller asks for this name, so a layer has to make it.
            self.linear(blob, 1.0, 0.0, [out])
        else:
            self.renamed[out] = blob


def _barred(site: Site) -> Refusal | None:
    """Why the new layers may not stand in the network, whatever they compute."""
    network, made = site.network, {blob for node in site.new for blob in node.outputs}
    read = {*site.inputs, *site.renamed.values(), *(b for node in site.new for b in node.inputs)}
    changing = sorted(blob for blob in read - made if not network.plain(blob))
    if changing:
        return Refusal(f"it reads {changing[0]!r}, which is overwritten, or made in a loop or branch")
    newer = [node.kind for node in site.new if node.newer]
    if newer and not network.takes_newer:
        return Refusal(
            f"{newer[0]} came with specification 4, which Core ML's own check refuses where arrays have rank 5"
        )
    return None


class Unknown(Exception):  # noqa: N818 - becomes a refusal, never an error
    """Something that a rewrite must know is not known."""


@dataclass(frozen=True)
class LayerPass(Pass):
    """A pass over the layers of a neural network (`.mlmodel`), not over the ops of an ML Program."""

    caveat: ClassVar[str] = ""
    """What the caller should know where it changed something; a surgery notes it."""

    def requires(self, program: Program) -> Refusal | None:
        """ML Programs have no layers."""
        return Refusal("it rewrites the layers of a neural network (.mlmodel), not an ML Program")

    def run(self, program: Program, session: Session) -> None:
        """Nothing: see `requires`."""

    def run_network(self, network: Network, session: Session) -> None:
        """Edit a network in place; the caller writes it into the specification (`Network.commit`)."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayerRewrite(LayerPass):
    """A pass that puts other layers in the place of one, wherever it may."""

    kinds: ClassVar[frozenset[str]]
    """The layer types that `rewrite` wants to see."""

    def rewrite(self, site: Site) -> Refusal | None:
        """Emit the layers that make the outputs of the old one, or say why not.

        Nothing emitted and None: the layer is not this pass's business.
        """
        raise NotImplementedError

    def sample(self, site: Site, var: Var, rng: np.random.Generator) -> Array | None:
        """Values for an input of the proof whose range matters (ids, for example); None: normal numbers."""
        return None

    def run_network(self, network: Network, session: Session) -> None:
        """Visit the layers in order, and those that come anew."""
        network.refresh()
        for node in list(network.nodes):
            if node.kind not in self.kinds or node not in network.nodes:
                continue
            if (refusal := self._visit(network, node, session)) is not None:
                session.refusals.append((self.name, refusal))

    def _visit(self, network: Network, node: Node, session: Session) -> Refusal | None:
        site = Site(network, node)
        if not all(map(network.plain, node.outputs)):
            return Refusal("it makes a blob that a loop or branch, or another layer, makes too", node)
        try:
            refusal = self.rewrite(site)
        except Unknown as reason:
            return Refusal(str(reason), node)
        except SurgeryError:
            raise
        except Exception as error:
            words = f"pass {self.name} failed at layer {node.name!r}: {type(error).__name__}: {error}"
            raise PassError(f"{words}; the model given to it is unchanged") from error
        if refusal is not None or site.new or site.renamed:
            barred = _barred(site)
            refusal = refusal if barred is None else barred
        if refusal is not None:
            return Refusal(refusal.reason, node)
        if site.new or site.renamed:
            try:
                self._edit(site, session)
            except Unknown as reason:
                return Refusal(str(reason), node)
        return None

    def _edit(self, site: Site, session: Session) -> None:
        proof = self._proven(site, session)
        for old, new in site.renamed.items():
            site.network.forward(old, new)
        gone = site.network.replace(site.node, site.new)
        words = proof if isinstance(proof, str) else ""
        session.changes.append(
            Change(
                self.name,
                site.node.name,
                tuple(map(str, gone)),
                tuple(map(str, site.new)),
                unproven=words,
                proof=proof if isinstance(proof, SiteProof) else None,
            )
        )

    def _proven(self, site: Site, session: Session) -> SiteProof | str | None:
        """Build the new layers beside the old ones and, if wanted, compare what they make.

        Raises:
            PassError: they cannot be built, or have another shape.
            ProofError: they make other numbers than promised.
            Unknown: a shape cannot be shown to stay.
        """
        unknown = next((why for n in site.outputs if (why := site.network.blobs.missing.get(n))), "")
        pairs, ops = self._built(site)
        if not session.prove_sites:
            return None
        if unknown:
            return f"not known before: {unknown}"

        def sample(var: Var, rng: np.random.Generator) -> Array | None:
            return self.sample(site, var, rng)

        known = session.proven.setdefault(str(self), {})
        try:
            proof = prove_site(pairs, ops, sample, session.rng, proven=known)
        except InterpretError:
            if not any(any_symbolic(a.shape) for a, _ in pairs):
                raise
            return f"cannot be computed where sizes known at run time only are {SYMBOL_LENGTH}"
        if isinstance(proof, SiteProof) and not proof.within(self.tolerance):
            raise ProofError(
                f"pass {self.name} at layer {site.node.name!r}: the numbers differ by {proof.max_rel:.2g} of "
                f"the largest, promised: {self.tolerance}"
            )
        return proof

    def _built(self, site: Site) -> tuple[list[tuple[Var, Var]], list[Operation]]:
        """The old and new value of each output that was known, and the ops that came."""
        blobs, where = site.network.blobs, f"pass {self.name} at layer {site.node.name!r}"
        old = {n: var for n in site.outputs if (var := blobs.var(n)) is not None}
        exact = [n in blobs.ctx.exact for n in old]
        try:
            with quiet_host():
                ops, made = blobs.add([node.message for node in site.new])
        except LoadError as error:
            raise PassError(f"{where}: the new layers do not fit: {error}") from error
        new = made | {n: blobs.ctx.env[name] for n, name in site.renamed.items()}
        if lost := [n for n in site.outputs if n not in new and site.network.is_read(n)]:
            raise PassError(f"{where}: nothing makes {lost[0]!r} any more, which is read")
        pairs = [(var, new[n]) for n, var in old.items() if n in new]
        same = all(len(a.shape) == len(b.shape) for a, b in pairs)
        sizes = [s for a, b in pairs for s in zip(a.shape, b.shape, strict=False)]
        same &= all(any_symbolic(s) or s[0] == s[1] for s in sizes)
        if any(any_symbolic(s) and str(s[0]) != str(s[1]) for s in sizes):
            raise Unknown("a size is known at run time only, and cannot be shown to stay as it is")
        if not same or exact != [site.renamed.get(n, n) in blobs.ctx.exact for n in old]:
            raise PassError(f"{where}: the shape of an output changed")
        return pairs, ops
