"""Fingerprints that say whether two edits are the same computation: same ops, shapes, constants and wiring.

Checks of edits use them to test each distinct edit once: a decoder repeats the same one in every layer.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from anesurgery.mil import Array, Operation, Var, constant
from anesurgery.semantics.bounds import facts_of_array
from anesurgery.text import type_text

INLINE = 1 << 22
"""Constants of up to this many bytes are compared by content, larger ones by identity. A choice between the
time of reading a constant and of checking the same edit twice.
"""
SHORT = 64
"""Constants of up to this many bytes are put into the fingerprint as they are, larger ones as a hash."""
_serial_numbers = itertools.count()
"""Numbers for large constants. Not `id`: another array may later lie at the same address."""


def fingerprint(
    replaced: Sequence[tuple[Var, Var]],
    old: Sequence[Operation],
    new: Sequence[Operation],
    weights: Mapping[Var, int] | None = None,
) -> Hashable:
    """Return a hashable that is equal for edits that are the same computation (names do not matter).

    Args:
        replaced: pairs (old value, new value).
        old: the ops of the old side.
        new: the ops of the new side.
        weights: constants whose content does not matter -> a number that is equal for equal content.
    """
    numbers: dict[Var, int] = {}

    def value_key(var: Any) -> Hashable:
        if isinstance(var, (list, tuple)):
            return tuple(value_key(v) for v in var)
        if not isinstance(var, Var):
            return repr(var)
        if weights is not None and var in weights:
            return ("any", weights[var], type_text(var))
        value = constant(var)
        if value is not None:
            return ("constant", _content_key(np.asarray(value)))
        return (numbers.setdefault(var, len(numbers)), type_text(var))

    def op_key(op: Operation) -> Hashable:
        inputs = tuple((k, value_key(v)) for k, v in op.inputs.items() if v is not None)
        nested = tuple(
            (value_keys(block.inputs), ops_key(block.operations), value_keys(block.outputs))
            for block in op.blocks
        )
        return (op.op_type, str(op.opset_version), inputs, nested, value_keys(op.outputs))

    def value_keys(values: Iterable[Var]) -> Hashable:
        return tuple(value_key(v) for v in values)

    def ops_key(ops: Iterable[Operation]) -> Hashable:
        return tuple(op_key(op) for op in ops if op.op_type != "const")

    sides = ops_key(old), ops_key(new)
    return (sides, tuple((value_key(a), value_key(b)) for a, b in replaced))


def _content_key(array: Array) -> Hashable:
    """Return the content of a constant as a key: its bytes, their hash, or a serial number for large ones."""
    if array.nbytes <= SHORT:
        return array.dtype.str, array.shape, array.tobytes()
    facts = facts_of_array(array)
    if "content" not in facts:
        is_read = array.nbytes <= INLINE
        facts["content"] = hashlib.blake2b(array.tobytes()).digest() if is_read else next(_serial_numbers)
    return array.dtype.str, array.shape, facts["content"]
