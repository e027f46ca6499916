"""Shapes and constants of the blobs of a network, found by building its layers as MIL ops.

What an edit adds is built on top, so that old and new values exist side by side and can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from anesurgery.errors import LoadError, NotExpressible
from anesurgery.mil import Array, Function, Operation, Var, as_scratch, ct, exclusive, is_symbolic
from anesurgery.neuralnetwork import ports
from anesurgery.neuralnetwork.context import Context, Custom, written
from anesurgery.neuralnetwork.layers import load_families
from anesurgery.neuralnetwork.spec import is_legacy, walk_layers

load_families()

OPSET = ct.target.iOS17


class Blobs:
    """The values of a network.

    Args:
        network: its message.
        description: that of the model.
        custom: builders of custom layers by class name.
        layers: in place of those of the network.

    Raises:
        LoadError: an input cannot be read. A layer that cannot be built leaves its blobs unknown, and those
            that depend on them.
    """

    @exclusive()
    def __init__(
        self, network: Any, description: Any, custom: Custom | None = None, layers: Sequence[Any] | None = None
    ) -> None:
        self.ctx = Context(is_legacy(network), custom)
        self.missing: dict[str, str] = {}
        """Why a blob is unknown."""
        self.errors: list[LoadError] = []
        """Of the layers that cannot be built, custom ones excepted: their code is not in the file."""
        self.spans: list[tuple[str, int, int]] = []
        """The first output of each layer that was built, its first op, and the op after its last."""
        inputs = {f.name: ports.placeholder(f) for f in description.input}
        self.function = Function(inputs, opset_version=OPSET)
        as_scratch(self.function)
        with self.function:
            for feature in description.input:
                var = self.function.inputs[feature.name]
                self.ctx.env[feature.name] = ports.read(self.ctx, network, feature, var)
            for layer in network.layers if layers is None else layers:
                start = len(self.function.operations)
                if self._try(layer):
                    self.spans.append(
                        (next(iter(layer.output), layer.name), start, len(self.function.operations))
                    )

    @cached_property
    def ops(self) -> dict[str, list[Operation]]:
        """The ops of each layer, by the name of its first output."""
        every, by_output = list(self.function.operations), dict[str, list[Operation]]()
        for name, start, end in self.spans:
            by_output.setdefault(name, []).extend(every[start:end])
        return by_output

    def _try(self, layer: Any) -> bool:
        """Build a layer, or state why its blobs are unknown; was it built?"""
        unknown = next((b for b in layer.input if b in self.missing), None)
        try:
            if unknown is None:
                self.ctx.build(SimpleNamespace(layers=[layer]))
                return True
            words = self.missing[unknown]
        except LoadError as error:
            words = str(error)
            held = walk_layers(SimpleNamespace(layers=[layer]))
            is_custom = any(inner.WhichOneof("layer") == "custom" for inner, _ in held)
            if not (is_custom and isinstance(error, NotExpressible)):
                self.errors.append(error)
        for blob in written(SimpleNamespace(layers=[layer])):
            self.missing[blob] = words
            self.ctx.env.pop(blob, None)
        return False

    def var(self, blob: str) -> Var | None:
        """Return the MIL value of a blob."""
        return self.ctx.env.get(blob)

    def shape(self, blob: str) -> tuple[int | None, ...] | None:
        """Return the shape with its true rank; None for a dynamic size; None if nothing is known."""
        var = self.var(blob)
        if var is None:
            return None
        sizes = tuple(None if is_symbolic(d) else int(d) for d in var.shape)
        return (1, *sizes) if self.ctx.is_short(blob) else sizes

    def constant(self, blob: str) -> Array | None:
        """Return the fp32 value of a blob that is the same at every run, in the shape of `shape`."""
        var = self.var(blob)
        value = None if var is None else var.val
        shape = self.shape(blob)
        return None if value is None or shape is None else np.asarray(value).reshape([d or 1 for d in shape])

    @exclusive()
    def add(self, layers: Sequence[Any]) -> tuple[list[Operation], dict[str, Var]]:
        """Build more layers beside the old ones.

        A blob that is known keeps its value, so that the next layers that are built read the same one as the
        old layers do.

        Returns:
            The ops that came, and the values that they make, by blob.

        Raises:
            LoadError: they cannot be built.
        """
        results = [name for layer in layers for name in layer.output]
        old = {name: self.ctx.env.pop(name) for name in results if name in self.ctx.env}
        count = len(self.function.operations)
        try:
            with self.function:
                self.ctx.build(SimpleNamespace(layers=layers))
            new = {name: self.ctx.env[name] for name in results}
        finally:
            self.ctx.env |= old
        for name in results:
            self.missing.pop(name, None)
        return list(self.function.operations)[count:], new
