"""Tell whether two computations are the same: same ops, same shapes, same constants, wired alike."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from anesurgery.mil import Array, Operation, Var, constant
from anesurgery.semantics.bounds import found_of
from anesurgery.text import type_text

INLINE = 1 << 22
"""Constants of up to this many bytes are compared by content, larger ones by identity: a choice, between the
time of reading them and of checking an edit that is like another."""
SHORT = 64
"""Bytes of constants that are compared as they are."""
_counted = itertools.count()
"""Numbers for large constants, of which no two get one, not even one that lies where another lay."""


def fingerprint(
    replaced: Sequence[tuple[Var, Var]],
    old: Sequence[Operation],
    new: Sequence[Operation],
    weights: Mapping[Var, int] | None = None,
) -> Hashable:
    """Equal for edits that are the same computation (names do not matter).

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
            return ("constant", _content(np.asarray(value)))
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


def _content(array: Array) -> Hashable:
    """What a constant holds, or which it is."""
    if array.nbytes <= SHORT:
        return array.dtype.str, array.shape, array.tobytes()
    found = found_of(array)
    if "content" not in found:
        known = array.nbytes <= INLINE
        found["content"] = hashlib.blake2b(array.tobytes()).digest() if known else next(_counted)
    return array.dtype.str, array.shape, found["content"]
