"""Tell whether two edits are the same computation: same ops, same shapes, same constants, wired alike."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np

from anesurgery.mil import Operation, Var, constant
from anesurgery.text import type_text

INLINE = 1 << 22
"""Constants of up to this many bytes are compared by content, larger ones by identity: a choice, between the
time of reading them and of checking an edit that is like another."""
_NUMBERS: WeakKeyDictionary[Operation, int] = WeakKeyDictionary()
_counted = itertools.count()


def fingerprint(
    replaced: Sequence[tuple[Var, Var]],
    old: Sequence[Operation],
    new: Sequence[Operation],
    weights: Mapping[Var, int] | None = None,
) -> Hashable:
    """Equal for edits whose proofs are the same computation (names do not matter).

    Args:
        replaced: pairs (old value, new value).
        old: the ops of the old side.
        new: those of the new side.
        weights: constants that may hold anything, each with the number of its content.
    """
    numbers: dict[Var, int] = {}

    def known(var: Any) -> Hashable:
        if isinstance(var, (list, tuple)):
            return tuple(known(v) for v in var)
        if not isinstance(var, Var):
            return repr(var)
        if weights is not None and var in weights:
            return ("any", weights[var], type_text(var))
        value = constant(var)
        if value is not None:
            array = np.asarray(value)
            if array.nbytes > INLINE:
                return ("constant", _number_of(cast(Operation, var.op)))
            content = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16)
            return ("constant", array.dtype.str, array.shape, content.digest())
        return (numbers.setdefault(var, len(numbers)), type_text(var))

    def written(op: Operation) -> Hashable:
        inputs = tuple((k, known(v)) for k, v in op.inputs.items() if v is not None)
        nested = tuple((each(block.inputs), side(block.operations), each(block.outputs)) for block in op.blocks)
        return (op.op_type, str(op.opset_version), inputs, nested, each(op.outputs))

    def each(values: Iterable[Var]) -> Hashable:
        return tuple(known(v) for v in values)

    def side(ops: Iterable[Operation]) -> Hashable:
        return tuple(written(op) for op in ops if op.op_type != "const")

    sides = side(old), side(new)
    return (sides, tuple((known(a), known(b)) for a, b in replaced))


def _number_of(op: Operation) -> int:
    """The number of an op, which no other gets, not even one that lies where this one lay."""
    if op not in _NUMBERS:
        _NUMBERS[op] = next(_counted)
    return _NUMBERS[op]
