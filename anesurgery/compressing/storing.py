"""Put compressed weights into programs: each constant with those numbers, in every function."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from anesurgery.compressing.correcting import Corrected, new_bias, takes_bias
from anesurgery.mil import Array, Function, Operation, Program, Var, mb, replace_uses, stamp
from anesurgery.regions.compressed_weights import Result, build
from anesurgery.rewriting.ml_program import MLProgram

Key = tuple[tuple[int, ...], str, str]
"""Shape, type and digest of the numbers of a constant."""


def key_of(var: Var) -> Key:
    """What two constants of equal numbers have in common."""
    value = np.ascontiguousarray(var.val)
    return value.shape, str(value.dtype), hashlib.blake2b(value.data.cast("B"), digest_size=16).hexdigest()


def store(programs: Iterable[Program], weights: Iterable[Corrected]) -> int:
    """Let constants be decoded from their compressed forms.

    Args:
        programs: are edited; each function gets its own ops, and equal numbers are written once.
        weights: each in its form.

    Returns:
        How many constants were replaced.
    """
    forms = {key_of(one.candidate.var): one for one in weights}
    shapes = {shape for shape, _, _ in forms}
    count = 0
    for program in programs:
        for function in program.functions.values():
            count += sum(_replace(function, var, forms[key]) for var, key in _held(function, shapes, forms))
    return count


def shift(made: Corrected, readers: Iterable[Operation]) -> None:
    """Let the ops that read a weight have the biases that keep the mean of their results.

    Args:
        made: the weight.
        readers: of every function; those of other functions gain what the first of its own does.
    """
    if not made.shifts:
        return
    first = next(iter(made.shifts.values()))
    for op in readers:
        if not takes_bias(op):
            continue
        hold(op, "bias", new_bias(op, made.shifts.get(op, first)), f"{op.name}_bias_corrected")


def hold(op: Operation, name: str, value: Array, called: str) -> None:
    """Let an op read another constant, or one where it had none; the old one goes where nothing else reads it.

    Args:
        op: the op.
        name: of its input.
        value: what it reads from now on.
        called: the name of the constant.
    """
    old, block = op.inputs.get(name), op.enclosing_block
    assert block is not None
    with block:
        new = mb.const(val=value, name=called, before_op=op)
    stamp(new.op, op if old is None else old.op)
    op.set_inputs(**{name: new}, no_check_var_types=True)
    if old is not None and not old.child_ops and not old.consuming_blocks:
        block.remove_ops([old.op])


@dataclass(frozen=True)
class _Before:
    """Makes ops in front of another one."""

    op: Operation

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        return partial(getattr(mb, op_type), before_op=self.op)


def _decoding(var: Var) -> Iterator[Operation]:
    """The op that makes a weight, and those in front of it."""
    if var.op is not None:
        yield var.op
        for value in var.op.inputs.values():
            if isinstance(value, Var):
                yield from _decoding(value)


def _held(
    function: Function, shapes: set[tuple[int, ...]], forms: dict[Key, Corrected]
) -> list[tuple[Var, Key]]:
    """The constants of a function that have a form."""
    constants = [
        op.outputs[0] for op in function.operations if op.op_type == "const" and op.outputs[0].child_ops
    ]
    alike = [v for v in constants if tuple(v.shape) in shapes]
    return [(var, key) for var in alike if (key := key_of(var)) in forms]


def _replace(function: Function, var: Var, made: Corrected) -> bool:
    """Let the ops that read a constant read what decodes to it."""
    origin = var.op
    assert origin is not None
    maker = cast(Any, _Before(origin))
    with function:
        new = build(maker, Result(made.form), f"{var.name}_{made.kind.replace('-', '_')}")
    for op in _decoding(new):
        stamp(op, origin)
    replace_uses(function, anchor_op=origin, old_var=var, new_var=new)
    if not var.child_ops and not var.consuming_blocks:
        function.remove_ops([origin])
    return True


class Smaller:
    """What a compression leaves."""

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


__all__ = ["Smaller"]
