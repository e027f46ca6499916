"""Build the layers of a network as MIL ops: what is known while doing so, and the table of layer types.

A blob is a value of the network, by name. Most layers count axes from the end: width is -1, height -2, channel
-3, batch -4, sequence -5. In the mapping of specification 1 to 3 every blob has rank 5. Here it is a MIL value
(batch, channel, height, width) if the sequence is 1 long, which is nearly always, and of rank 5 otherwise. So
layers that count axes from the end, or broadcast, need not care, and those that use the sequence call
`ctx.five(x)`. A layer that counts all axes gets all five, and its result may really have four: `ctx.exact` has
the names of such blobs, since other values of rank 4 lack their sequence. In the exact mapping (specification 4
on) every blob has the rank that its layer gives it.

A blob may have no axes: it is [1] as an output only. (The format's text says so of ranges, but of `squeeze`
that a vector stays one; coremltools' test `TestRank0ExpandDimsSwap` expects the former of a Mac.)

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from anesurgery.errors import LoadError, NotExpressible, SurgeryError, UnknownName
from anesurgery.mil import Array, Var, is_symbolic, mb, types
from anesurgery.neuralnetwork import spec

Custom = Mapping[str, Callable[..., Any]]
"""Class name of a custom layer -> function that builds it, called as a layer function is."""

HALTED, BROKEN, GO_ON, ROUND = " halted", " broken", " go on", " round"
"""Blobs that no file can hold: the round has ended, the loop has ended, the condition, the rounds so far."""
JUMPS = {"loopContinue": (HALTED,), "loopBreak": (HALTED, BROKEN)}
"""Layer type -> the flags that it sets."""


class Context:
    """What is known while a network is built.

    Args:
        legacy: are blobs of rank 5, as specification 1 to 3 has them?
        custom: builders of custom layers by class name.
    """

    def __init__(self, legacy: bool, custom: Custom | None = None) -> None:
        self.legacy = legacy
        self.custom = dict(custom or {})
        self.env: dict[str, Var] = {}
        """The value of each blob."""
        self.exact: set[str] = set()
        """In the rank 5 mapping: the blobs that really have four axes."""
        self.notes: list[str] = []
        """What the caller should know of the result."""
        self.one_step = False
        """Is the sequence of an input taken to be 1 long, which the file does not say?"""
        self.layer: Any = None
        """The layer that is being built."""
        self._table = LAYERS

    def build(self, network: Any) -> None:
        """Build the layers of a network (the whole one, or one nested in a layer).

        Raises:
            LoadError: a layer is unknown, reads a blob that nobody made, or does not fit its inputs.
        """
        for layer in network.layers:
            outer, self.layer = self.layer, layer
            try:
                self._build(layer, network)
            finally:
                self.layer = outer

    def error(self, words: str) -> LoadError:
        """Return an error that names the layer."""
        return LoadError(f"{self.where}: {words}")

    def limit(self, words: str) -> LoadError:
        """Return an error that names a layer that may be sound, but that cannot be built as ops."""
        return NotExpressible(f"{self.where}: {words}")

    def note(self, words: str) -> None:
        """Tell the caller something about the layer."""
        self.notes.append(f"{self.where}: {words}")

    @property
    def where(self) -> str:
        """The layer in words."""
        kind = self.layer.WhichOneof("layer")
        return f"layer {self.layer.name!r}" + (f" ({kind})" if kind else "")

    def weights(self, params: Any, shape: Sequence[int], name: str = "weights", axis: int = 0) -> Array:
        """Return the fp32 array of a `WeightParams` message; `axis` is that of the output channels."""
        return spec.weights(params, [int(n) for n in shape], f"{self.where}: {name}", axis)

    def define(self, name: str, var: Var, again: bool = False) -> None:
        """Give a blob its value.

        Args:
            name: of the blob.
            var: its value.
            again: may it have one already?
        """
        if name in self.env and not again:
            raise self.error(f"makes the blob {name!r}, which exists already; give it another name")
        self.env[name] = var
        self.exact.discard(name)

    def is_short(self, name: str) -> bool:
        """Does the value of a blob of rank 5 lack its sequence of 1?"""
        return self.legacy and self.env[name].rank == 4 and name not in self.exact

    def shape(self, x: Var, axes: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the sizes of some axes (all by default), which must be known.

        Raises:
            LoadError: one is dynamic.
        """
        sizes = [x.shape[a] for a in (range(x.rank) if axes is None else axes)]
        if any(is_symbolic(d) for d in sizes):
            raise self.limit("needs a static shape; give the input one fixed shape")
        return tuple(int(d) for d in sizes)

    def needs_rank(self, x: Var, least: int) -> None:
        """Refuse a value of fewer axes."""
        if x.rank < least:
            raise self.error(f"takes at least {least} axes, but its input has {x.rank}")

    def five(self, x: Var) -> Var:
        """Return a value as (sequence, batch, channel, height, width)."""
        missing = 5 - x.rank
        if missing > 0:
            return mb.expand_dims(x=x, axes=list(range(missing)))
        return x

    def images(self, x: Var) -> tuple[Var, Callable[[Var], Var]]:
        """Return a value as (batch, channel, height, width), and what gives a result its leading axes again."""
        if x.rank == 4:
            return x, lambda y: y
        if x.rank < 4:
            extra = list(range(4 - x.rank))
            return mb.expand_dims(x=x, axes=extra), lambda y: mb.squeeze(x=y, axes=extra)
        lead = x.shape[: x.rank - 3]
        if all(not is_symbolic(d) and d == 1 for d in lead[:-1]):
            extra = list(range(x.rank - 4))
            return mb.squeeze(x=x, axes=extra), lambda y: mb.expand_dims(x=y, axes=extra)
        flat = self.reshape(x, [-1, *x.shape[-3:]])
        return flat, lambda y: self.reshape(y, [*lead, *y.shape[-3:]])

    def reshape(self, x: Var, shape: Sequence[Any]) -> Var:
        """`x` in another shape, in which at most one size may be unknown."""
        sizes = [-1 if is_symbolic(d) else int(d) for d in shape]
        if sizes.count(-1) > 1:
            raise self.limit("reshapes two dynamic axes; give the input one fixed shape")
        return mb.reshape(x=x, shape=sizes)

    def whole(self, x: Var) -> Var:
        """Return a blob that holds whole numbers, as int32."""
        return x if x.dtype == types.int32 else mb.cast(x=x, dtype="int32")

    def truth(self, x: Var) -> Var:
        """Return a blob as conditions: true where it is not 0."""
        return x if x.dtype == types.bool else mb.not_equal(x=x, y=np.float32(0))

    def blob(self, x: Var) -> Var:
        """Return a result as blobs are: fp32, and without a sequence of 1 where blobs have rank 5."""
        if x.dtype != types.fp32:
            x = mb.cast(x=x, dtype="fp32")
        if self.legacy and x.rank == 5 and not is_symbolic(x.shape[0]) and x.shape[0] == 1:
            x = mb.squeeze(x=x, axes=[0])
        return x

    def _build(self, layer: Any, network: Any) -> None:
        kind = layer.WhichOneof("layer")
        row = self._known(kind)
        inputs = [self._input(name, network) for name in layer.input]
        if len(inputs) < row.least or (row.most is not None and len(inputs) > row.most):
            raise self.error(f"has {len(inputs)} inputs, takes {row.inputs}; {spec.DAMAGED}")
        if strange := spec.unknown_choice(getattr(layer, kind)):
            raise self.limit(f"has {strange}, which this coremltools does not know; upgrade coremltools")
        short = [self.is_short(name) for name in layer.input]
        if row.axes == "all":
            inputs = [self.five(x) if cut else x for x, cut in zip(inputs, short, strict=True)]
        try:
            built = row.build(self, getattr(layer, kind), inputs)
        except SurgeryError:
            raise
        except Exception as error:  # of coremltools' ops, of a caller's function: any kind
            shapes = ", ".join(str(tuple(map(str, v.shape))) for v in inputs)
            why = str(error) or type(error).__name__
            unsure = self.one_step or any(is_symbolic(d) for v in inputs for d in v.shape)
            raise (self.limit if unsure else self.error)(
                f"does not fit its inputs of shape {shapes}: {why}; change the layer in the source model"
            ) from error
        values = [built] if isinstance(built, Var) else list(built or ())
        if len(values) != len(layer.output):
            raise self.error(f"has {len(layer.output)} outputs, makes {len(values)}; {spec.DAMAGED}")
        counted = short[:1] if row.axes == "first" else short
        has_sequence = row.axes != "all" and (any(counted) or not counted)
        for name, value in zip(layer.output, values, strict=True):
            blob = self.blob(value)
            self.define(name, blob, again=kind == "copy")
            if self.legacy and value.rank == blob.rank == 4 and not has_sequence:
                self.exact.add(name)

    def _known(self, kind: str | None) -> Layer:
        if kind is None:
            raise self.limit(
                "is of a type that this coremltools does not know; upgrade coremltools, or export it again"
            )
        if kind not in self._table:
            raise self.limit(
                f"layers of type {kind} cannot be built as an ML Program; replace the layer in the source model"
            )
        return self._table[kind]

    def _input(self, name: str, network: Any) -> Var:
        if name in self.env:
            return self.env[name]
        makers = [other.name for other in network.layers if name in other.output]
        if makers:
            raise self.error(
                f"reads the blob {name!r}, which only a later layer makes ({makers[0]!r}): a cycle, or a wrong "
                "order; sort the layers in the order in which they run"
            )
        near = UnknownName("blob", name, self.env)
        raise self.error(f"reads the blob {name!r}, which nothing makes; {near}")


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


def written(network: Any) -> Iterator[str]:
    """Yield every blob that a network or part of one may write, and every flag."""
    for each in network.layers:
        yield from each.output
        yield from JUMPS.get(each.WhichOneof("layer"), ())
        for inner in spec.nested_networks(each):
            yield from written(inner)
