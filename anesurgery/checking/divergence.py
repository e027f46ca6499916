"""Find the first op at which two programs give different numbers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anesurgery.checking.grades import compare_arrays
from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.files.interface import InterfaceChange, adapt_inputs
from anesurgery.interpret import Executable, Listener
from anesurgery.interpret.features import images
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.loading import load
from anesurgery.mil import Array, Function, Operation, Var, function_of
from anesurgery.semantics.reading import in_decibels
from anesurgery.text import type_text


@dataclass(frozen=True)
class Divergence:
    """A value that differs between two programs."""

    op_type: str
    name: str
    """Of the value in the second program."""
    other: str
    """Of the value in the first program that it was compared with."""
    psnr: float
    """In dB; minus infinite where the shapes differ."""
    max_abs: float
    note: str = ""
    """What else there is: shapes that differ, elements that are NaN or infinite on one side only."""

    def __str__(self) -> str:
        other = "" if self.other == self.name else f" (against {self.other})"
        numbers = f"{in_decibels(self.psnr, 'PSNR ')}, max error {self.max_abs:.3g}"
        return f"{self.op_type} {self.name}{other}: {'; '.join(filter(None, (numbers, self.note)))}"


@door("inputs", "seed", "precision")
def first_divergence(
    a: Any,
    b: Any,
    inputs: Mapping[str, Array] | None = None,
    *,
    by: str = "name",
    precision: str = "fp32",
    gate: float = 60.0,
    contract: Sequence[InterfaceChange] = (),
    function: str | None = None,
    seed: int = 0,
) -> Divergence | None:
    """Find the first op of `b`, in file order, whose value differs from `a` by more than the gate.

    Integers and booleans must be equal. Outputs are always paired, in their order.

    Args:
        a: the reference: path, MLModel or program.
        b: the candidate.
        inputs: of `a`, by name; sampled when absent.
        by: "name" pairs values of the same name (surgery keeps the names of what it replaces); "position" pairs
            ops of the same type and shape in the order in which they come, for programs named differently.
        precision: the arithmetic of both.
        gate: PSNR in dB.
        contract: declared interface changes from `a` to `b`.
        function: which function; `main` or the first by default.
        seed: of the sampled inputs.

    Returns:
        The op, the names of its value in both models, the PSNR in dB and the largest difference; None where no
        value is off.

    Raises:
        SurgeryError: an unknown way of pairing.
    """
    if by not in PAIRINGS:
        raise SurgeryError(f"by={by!r}; it may be {' or '.join(map(repr, PAIRINGS))}")
    loaded, second = load(a), load(b).program
    first = loaded.program
    if inputs is None:
        inputs = sample_inputs(first, function=function, seed=seed, images=images(loaded.described_inputs))
    old, new = function_of(first, function), function_of(second, function)
    pairs = dict(zip(new.outputs, old.outputs, strict=False)) | PAIRINGS[by](old, new)
    shaped = () if contract else frozenset(new.outputs)
    kept = _Keep(set(pairs.values()))
    Executable(first, function=function, precision=precision)(inputs, listener=kept)
    watch = _Watch(pairs, kept.values, gate, shaped)
    try:
        Executable(second, function=function, precision=precision)(
            adapt_inputs(contract, inputs), listener=watch
        )
    except _Found as found:
        return found.divergence
    return None


def _arrays(op: Operation, outputs: Sequence[Any]) -> list[tuple[Var, Array]]:
    """The tensors that an op made; floats as fp32."""
    tensors = ((v, x.detach().cpu()) for v, x in zip(op.outputs, outputs, strict=True) if hasattr(x, "detach"))
    return [(v, (x.float() if x.is_floating_point() else x).numpy()) for v, x in tensors]


class _Keep(Listener):
    """A listener that keeps some values."""

    def __init__(self, wanted: set[Var]) -> None:
        self._wanted = wanted
        self.values: dict[Var, Array] = {}

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Copy what is wanted: a state may be written later."""
        for var, value in _arrays(op, outputs):
            if var in self._wanted:
                self.values[var] = value.copy()


class _Found(Exception):  # noqa: N818 - ends a run, and is not an error
    def __init__(self, divergence: Divergence) -> None:
        self.divergence = divergence


class _Watch(_Keep):
    """A listener that stops the run at the first value that differs."""

    def __init__(
        self, pairs: Mapping[Var, Var], reference: Mapping[Var, Array], gate: float, shaped: Collection[Var]
    ) -> None:
        self._pairs, self._reference, self._gate, self._shaped = pairs, reference, gate, shaped

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Compare what has a partner; a shape may change inside, and not in an output."""
        for var, value in _arrays(op, outputs):
            other = self._pairs.get(var)
            expected = None if other is None else self._reference.get(other)
            if other is None or expected is None:
                continue
            if expected.shape != value.shape:
                if var in self._shaped:
                    note = f"shape {value.shape} against {expected.shape}"
                    raise _Found(Divergence(op.op_type, var.name, other.name, -math.inf, math.inf, note))
                continue
            row = compare_arrays(var.name, expected, value)
            unequal = expected.dtype.kind != "f" and row.max_abs > 0
            if row.psnr < self._gate or row.bad or unequal:
                note = f"{row.bad} elements are undefined on one side only" if row.bad else ""
                raise _Found(Divergence(op.op_type, var.name, other.name, row.psnr, row.max_abs, note))


def _values(function: Function) -> list[Var]:
    return [v for op in function.operations if op.op_type != "const" for v in op.outputs]


def _by_name(a: Function, b: Function) -> dict[Var, Var]:
    named = {v.name: v for v in _values(a)}
    return {v: named[v.name] for v in _values(b) if v.name in named}


def _by_position(a: Function, b: Function) -> dict[Var, Var]:
    def key(var: Var) -> tuple[str, str]:
        assert var.op is not None
        return var.op.op_type, type_text(var)

    old, new = _values(a), _values(b)
    matcher = difflib.SequenceMatcher(None, list(map(key, old)), list(map(key, new)), autojunk=False)
    return {
        new[block.b + i]: old[block.a + i] for block in matcher.get_matching_blocks() for i in range(block.size)
    }


PAIRINGS: dict[str, Callable[[Function, Function], dict[Var, Var]]] = {
    "name": _by_name,
    "position": _by_position,
}
"""How values of two functions are paired: (first, second) -> {value of the second: value of the first}."""
