"""Watch a run: a listener is told about each op; a probe keeps values by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anesurgery.errors import UnknownName
from anesurgery.interpret.precision import to_numpy
from anesurgery.mil import Function, Operation


class Listener:
    """Told about each op as it runs; override what you need."""

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        """An op is about to run on these values (torch tensors by parameter name)."""

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """An op has made these values, in the order of its outputs."""


class Probe(Listener):
    """A listener that keeps some values of a run by name."""

    def __init__(
        self, functions: Sequence[Function], names: Sequence[str], arithmetic: str, then: Any
    ) -> None:
        known = {v.name: v for f in functions for op in f.operations for v in op.outputs}
        known |= {v.name: v for f in functions for v in f.outputs}
        for name in names:
            if name not in known:
                raise UnknownName("value", name, known)
        self._wanted = {known[name] for name in names}
        self._arithmetic, self._then = arithmetic, then
        self.found: dict[str, Any] = {}

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        """Pass the event on."""
        if self._then is not None:
            self._then.before(op, inputs)

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Keep what was asked for."""
        for var, value in zip(op.outputs, outputs, strict=True):
            if var in self._wanted:
                self.found[var.name] = to_numpy(value, var, self._arithmetic)
        if self._then is not None:
            self._then.after(op, outputs)
