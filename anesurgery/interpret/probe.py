"""Keep values of a run by name, whatever else listens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anesurgery.errors import UnknownName
from anesurgery.interpret.arithmetic.precision import run_dtype, to_numpy, widen
from anesurgery.interpret.core import Executable
from anesurgery.interpret.listener import Listener
from anesurgery.mil import Function, Operation, Var, is_stored


class Probe(Listener):
    """A listener that keeps some values of a run by name."""

    def __init__(
        self, executables: Sequence[Executable], names: Sequence[str], arithmetic: str, then: Any
    ) -> None:
        readable = {v.name: (v, e) for e in executables for v in _values(e.function)}
        for name in names:
            if name not in readable:
                raise UnknownName("value", name, readable)
        self._wanted = {readable[name][0] for name in names}
        self._arithmetic, self._then = arithmetic, then
        self.found: dict[str, Any] = {}
        for var, executable in (readable[name] for name in names):
            if is_stored(var):  # no op runs that makes it
                value = widen(executable.plan.value({}, var))
                self.found[var.name] = to_numpy(value, var, arithmetic)

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


def _values(function: Function) -> Iterator[Var]:
    """What can be asked for by name: what ops make, the outputs, and constants that are tensors."""
    for op in function.operations:
        yield from (v for v in op.outputs if not is_stored(v) or run_dtype(v) is not None)
    yield from function.outputs
