"""Find the first op at which two programs give different numbers: `ane.first_divergence`.

The reference runs once and keeps the values that have a partner in the candidate; the candidate's run stops at
the first value that differs.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.files.interface import InterfaceChange, adapt_inputs
from anesurgery.interpret import Executable, Listener
from anesurgery.interpret.features import default_shapes, images
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.loading import load_whole
from anesurgery.mil import Array, Function, Operation, Var, function_of
from anesurgery.semantics.reading import in_decibels
from anesurgery.text import type_text


@dataclass(frozen=True)
class Divergence:
    """A value that differs between two programs."""

    op_type: str
    name: str
    """The name of the value in the second program."""
    other: str
    """The name of the value in the first program that it was compared with."""
    psnr: float
    """In dB; minus infinite where the shapes differ."""
    max_abs: float
    note: str = ""
    """Shapes that differ, or elements that are NaN or infinite on one side only, in words."""

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
    loaded, second = load_whole(a), load_whole(b).program
    first = loaded.program
    if inputs is None:
        like = {"shapes": default_shapes(loaded.described_inputs), "images": images(loaded.described_inputs)}
        inputs = sample_inputs(first, function=function, seed=seed, **like)
    old, new = function_of(first, function), function_of(second, function)
    pairs = dict(zip(new.outputs, old.outputs, strict=False)) | PAIRINGS[by](old, new)
    shaped = () if contract else frozenset(new.outputs)
    kept = _ValueKeeper(set(pairs.values()))
    Executable(first, function=function, precision=precision)(inputs, listener=kept)
    watch = _DivergenceWatch(pairs, kept.values, gate, shaped)
    try:
        Executable(second, function=function, precision=precision)(
            adapt_inputs(contract, inputs), listener=watch
        )
    except _DivergenceFound as found:
        return found.divergence
    return None


def _tensor_results(op: Operation, outputs: Sequence[Any]) -> list[tuple[Var, Array]]:
    """Return the tensors among an op's results; floats as fp32."""
    tensors = ((v, x.detach().cpu()) for v, x in zip(op.outputs, outputs, strict=True) if hasattr(x, "detach"))
    return [(v, (x.float() if x.is_floating_point() else x).numpy()) for v, x in tensors]


class _ValueKeeper(Listener):
    """A listener that keeps copies of some values."""

    def __init__(self, kept_vars: set[Var]) -> None:
        self._wanted = kept_vars
        self.values: dict[Var, Array] = {}

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Copy the values that are kept: a state may be overwritten later."""
        for var, value in _tensor_results(op, outputs):
            if var in self._wanted:
                self.values[var] = value.copy()


class _DivergenceFound(Exception):  # noqa: N818 - ends a run, and is not an error
    def __init__(self, divergence: Divergence) -> None:
        self.divergence = divergence


class _DivergenceWatch(_ValueKeeper):
    """A listener that stops the run at the first value that differs."""

    def __init__(
        self, pairs: Mapping[Var, Var], reference: Mapping[Var, Array], gate: float, shaped: Collection[Var]
    ) -> None:
        self._pairs, self._reference, self._gate, self._shaped = pairs, reference, gate, shaped

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Compare values that have a partner; shapes may differ inside, but not in outputs."""
        for var, value in _tensor_results(op, outputs):
            other = self._pairs.get(var)
            expected = None if other is None else self._reference.get(other)
            if other is None or expected is None:
                continue
            if expected.shape != value.shape:
                if var in self._shaped:
                    note = f"shape {value.shape} against {expected.shape}"
                    raise _DivergenceFound(
                        Divergence(op.op_type, var.name, other.name, -math.inf, math.inf, note)
                    )
                continue
            row = compare_arrays(var.name, expected, value)
            unequal = expected.dtype.kind != "f" and row.max_abs > 0
            if row.psnr < self._gate or row.bad or unequal:
                note = f"{row.bad} elements are undefined on one side only" if row.bad else ""
                raise _DivergenceFound(
                    Divergence(op.op_type, var.name, other.name, row.psnr, row.max_abs, note)
                )


def _computed_values(function: Function) -> list[Var]:
    return [v for op in function.operations if op.op_type != "const" for v in op.outputs]


def _by_name(a: Function, b: Function) -> dict[Var, Var]:
    named = {v.name: v for v in _computed_values(a)}
    return {v: named[v.name] for v in _computed_values(b) if v.name in named}


def _by_position(a: Function, b: Function) -> dict[Var, Var]:
    def key(var: Var) -> tuple[str, str]:
        assert var.op is not None
        return var.op.op_type, type_text(var)

    old, new = _computed_values(a), _computed_values(b)
    matcher = difflib.SequenceMatcher(None, list(map(key, old)), list(map(key, new)), autojunk=False)
    return {
        new[block.b + i]: old[block.a + i] for block in matcher.get_matching_blocks() for i in range(block.size)
    }


PAIRINGS: dict[str, Callable[[Function, Function], dict[Var, Var]]] = {
    "name": _by_name,
    "position": _by_position,
}
"""Name of a pairing -> the function (first, second) -> {value of the second: value of the first}."""
