"""How the symbolic arithmetics compute lists and states.

A list that is only read and written at constant places stays a list of its elements. One that is written at a
dynamic place becomes one hash of its history, and so does whatever is read from it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from anesurgery.interpret.arithmetic.field import Image, key, mix, opaque, packed, together
from anesurgery.interpret.arithmetic.symbolic import Rule, Symbolic
from anesurgery.interpret.table import TABLE, Unsupported, ints
from anesurgery.mil import Operation, static_shape

Tensor = torch.Tensor


def _hash_value(a: Symbolic, value: Any) -> Tensor:
    """Return one number for a tensor, or for the elements of a list in their order."""
    if value is None:
        return torch.tensor(key("nothing"))
    if isinstance(value, list):
        total = torch.tensor(key("list", len(value)))
        for element in value:
            total = mix(total ^ _hash_value(a, element))
        return total
    x = a.image(value)
    flat = x.map(lambda v: v.reshape(-1))
    elements = packed(a.digest(flat, [0])).reshape(()) if x.numel() else torch.tensor(key("empty"))
    return mix(elements ^ key(tuple(x.shape)))


def _hash_op(a: Symbolic, op: Operation, *operands: Any) -> Tensor:
    """Return one number for an op on these operands."""
    total = torch.tensor(key(a.seed, op.op_type))
    for value in operands:
        total = mix(total ^ _hash_value(a, value))
    return total


def _unknown_list(a: Symbolic, op: Operation, *operands: Any) -> Image:
    """Return a list that depends on a dynamic place, as one hash."""
    return opaque(a.primes, key("list"), _hash_op(a, op, *operands))


def _unknown(a: Symbolic, op: Operation, *operands: Any) -> Image:
    """Return a tensor that is read at a dynamic place, or from a list that was written at one."""
    shape = static_shape(op.outputs[0])
    if shape is None:
        raise Unsupported(f"{op.op_type} with a dynamic shape")
    places = torch.arange(math.prod(shape)).reshape(shape)
    image = opaque(a.primes, key("element"), _hash_op(a, op, *operands), places)
    a.evaluations += image.numel()
    return image


def _elements(a: Symbolic, ls: list[Any]) -> list[Image]:
    """Return the elements; those that were never written are zeros."""
    written = next((v for v in ls if v is not None), None)
    if written is None:
        raise Unsupported("a list that is read before anything was written to it")
    zero = a.lift(torch.zeros(written.shape).numpy())
    return [zero if v is None else a.image(v) for v in ls]


def _write(a: Symbolic, op: Operation, ls: Any, index: Any, value: Any) -> Any:
    if isinstance(ls, Image) or isinstance(index, Image):
        return _unknown_list(a, op, ls, index, value)
    return TABLE["list_write"].function(ls=ls, index=index, value=value)


def _scatter(a: Symbolic, op: Operation, ls: Any, indices: Any, value: Any) -> Any:
    if isinstance(ls, Image) or isinstance(indices, Image):
        return _unknown_list(a, op, ls, indices, value)
    rows = a.image(value)
    for i, at in enumerate(ints(indices)):
        ls = TABLE["list_write"].function(ls=ls, index=at, value=rows.map(lambda v, i=i: v[i]))  # type: ignore[misc]
    return ls


def _read(a: Symbolic, op: Operation, ls: Any, index: Any) -> Image:
    if isinstance(ls, Image) or isinstance(index, Image):
        return _unknown(a, op, ls, index)
    return _elements(a, ls)[ints(index)[0]]


def _gather(a: Symbolic, op: Operation, ls: Any, indices: Any) -> Image:
    if isinstance(ls, Image) or isinstance(indices, Image):
        return _unknown(a, op, ls, indices)
    every = _elements(a, ls)
    return together([every[i] for i in ints(indices)], torch.stack)


def _length(a: Symbolic, op: Operation, ls: Any) -> Any:
    return _unknown(a, op, ls) if isinstance(ls, Image) else torch.tensor(len(ls), dtype=torch.int32)


def _update_state(a: Symbolic, op: Operation, state: Any, value: Any) -> Any:
    """Write a state, and return the value written."""
    state.value = value
    return value


RULES: dict[str, Rule] = {
    "list_write": _write,
    "list_scatter": _scatter,
    "list_read": _read,
    "list_gather": _gather,
    "list_length": _length,
    "coreml_update_state": _update_state,
}
"""Op type -> computes the op in a symbolic arithmetic."""
