"""Put compressed weights into programs, in place of every constant with the same numbers, in every function.

`program_compression` calls `shift_biases` and then `store` after the weights of a program are corrected. The
results of a compression share `Smaller`, the model that is handed out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from anesurgery.compressing.correcting import CorrectedWeight, shifted_bias, takes_bias
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Program,
    Var,
    array_digest,
    mb,
    replace_uses,
    stamp,
    static_shape,
)
from anesurgery.placement.inspection import Inspection
from anesurgery.regions.compressed_weights import Result, build
from anesurgery.rewriting.ml_program import MLProgram

Key = tuple[tuple[int, ...], str, bytes]
"""The shape, dtype and digest of the numbers of a constant."""


def key_of(var: Var) -> Key:
    """Return a key that is equal for constants with equal numbers."""
    value = np.asarray(var.val)
    return value.shape, str(value.dtype), array_digest(value)


def store(programs: Iterable[Program], weights: Iterable[CorrectedWeight]) -> int:
    """Replace constants by the ops that decode their compressed forms.

    Args:
        programs: edited in place; each function gets its own ops, and equal numbers are written once.
        weights: the compressed weights.

    Returns:
        The number of constants that were replaced.
    """
    forms = {key_of(weight.candidate.var): weight for weight in weights}
    count = 0
    for program in programs:
        for function in program.functions.values():
            for var, weight in _matching_constants(function, forms):
                _replace(function, var, weight)
                count += 1
    return count


def shift_biases(weight: CorrectedWeight, readers: Iterable[Operation]) -> None:
    """Give the ops that read a weight the biases that keep the mean of their results.

    Args:
        weight: the compressed weight.
        readers: its ops in every function. Those of functions that were not run get the shift of the first op.
    """
    if not weight.bias_shifts:
        return
    first = next(iter(weight.bias_shifts.values()))
    for op in readers:
        if takes_bias(op):
            bias = shifted_bias(op, weight.bias_shifts.get(op, first))
            replace_constant(op, "bias", bias, f"{op.name}_bias_corrected")


def replace_constant(op: Operation, input_name: str, value: Array, name: str) -> None:
    """Let an op read another constant as an input, which it may not have had.

    The old constant is removed where nothing else reads it.

    Args:
        op: the op.
        input_name: of its input.
        value: the new numbers.
        name: of the new constant.
    """
    old, block = op.inputs.get(input_name), op.enclosing_block
    assert block is not None
    with block:
        new = mb.const(val=value, name=name, before_op=op)
    stamp(new.op, op if old is None else old.op)
    op.set_inputs(**{input_name: new}, no_check_var_types=True)
    if old is not None and not old.child_ops and not old.consuming_blocks:
        block.remove_ops([old.op])


@dataclass(frozen=True)
class _BuilderBefore:
    """A builder like `mb` whose ops are inserted before another op."""

    op: Operation

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        return partial(getattr(mb, op_type), before_op=self.op)


def _ops_upstream(var: Var) -> Iterator[Operation]:
    """Yield the op that computes a value, and all ops upstream of it."""
    if var.op is not None:
        yield var.op
        for value in var.op.inputs.values():
            if isinstance(value, Var):
                yield from _ops_upstream(value)


def _matching_constants(
    function: Function, forms: Mapping[Key, CorrectedWeight]
) -> list[tuple[Var, CorrectedWeight]]:
    """Return the constants of a function whose numbers have a compressed form, each with it."""
    shapes = {shape for shape, _, _ in forms}
    matches = []
    for op in function.operations:
        if op.op_type == "const" and op.outputs[0].child_ops and static_shape(op.outputs[0]) in shapes:
            weight = forms.get(key_of(op.outputs[0]))
            if weight is not None:
                matches.append((op.outputs[0], weight))
    return matches


def _replace(function: Function, var: Var, weight: CorrectedWeight) -> None:
    """Let all readers of a constant read the op that decodes its form."""
    constant = var.op
    assert constant is not None
    builder = cast(Any, _BuilderBefore(constant))
    with function:
        new = build(builder, Result(weight.form), f"{var.name}_{weight.kind.replace('-', '_')}")
    for op in _ops_upstream(new):
        stamp(op, constant)
    replace_uses(function, anchor_op=constant, old_var=var, new_var=new)
    if not var.child_ops and not var.consuming_blocks:
        function.remove_ops([constant])


def engine_share(inspections: Sequence[Inspection]) -> float:
    """Return the share of the ops of all functions that are expected on the Neural Engine."""
    ops = [row for inspection in inspections for row in inspection.ops]
    return sum(row.preferred == "ane" for row in ops) / max(1, len(ops))


class Smaller:
    """The base of `Compression` and `CompressedCache`: the smaller model, and how it is saved."""

    subject: MLProgram

    @property
    def model(self) -> Any:
        """An MLModel in a temporary package."""
        return self.subject.mlmodel()

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the package, or the folder of chunks, atomically.

        Raises:
            LoadError: the path exists, is the input, has another suffix, or cannot be written.
        """
        return self.subject.save(Path(path).expanduser().absolute(), overwrite=overwrite, edited=True)
