"""How much an op reads, writes and computes: what estimates and memory budgets are made of.

Dynamic lengths count as 1; an inspection of such a program says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from anesurgery.mil import Operation, Var, is_symbolic, operands, types

CONSTANT = "constexpr_"


@dataclass(frozen=True)
class Work:
    """Of one op.

    Attributes:
        read: bytes of the operands that are not stored.
        constant: bytes of the constant operands with more than one element.
        written: bytes of the results that somebody reads.
        flop: floating point operations, multiply and add counted as two; 0 for what only moves data.
    """

    read: int
    constant: int
    written: int
    flop: int

    @property
    def moved(self) -> int:
        """Bytes read and written while the model runs."""
        return self.read + self.written

    def times(self, count: int) -> Work:
        """Of so many runs of the op; its constants are there once."""
        return Work(self.read * count, self.constant, self.written * count, self.flop * count)


def is_stored(var: Var) -> bool:
    """Is it a constant, plain or compressed?"""
    return var.op is not None and (var.op.op_type == "const" or var.op.op_type.startswith(CONSTANT))


def is_weight(op: Operation) -> bool:
    """Is it a constant, and no op that runs?"""
    return op.op_type == "const" or op.op_type.startswith(CONSTANT)


def runtime(op: Operation) -> list[Var]:
    """The operands that are not stored, each once."""
    return list(dict.fromkeys(v for _, v in operands(op) if not is_stored(v)))


def read_results(op: Operation) -> list[Var]:
    """The results that somebody reads; all of them where nobody does."""
    used = [v for v in op.outputs if v.child_ops or v.consuming_blocks]
    return used or list(op.outputs)


@dataclass(frozen=True)
class Kind:
    """What a type says: is it a tensor or scalar of numbers, of which element type, shape and bytes?"""

    is_tensor: bool
    dtype: str
    shape: tuple[int, ...]
    itemsize: float
    """Bytes of an element: half a byte for "uint4", one for "bool"."""


@lru_cache(maxsize=4096)
def _kind(sym_type: Any) -> Kind:
    wrapped = sym_type.wrapped_type() if types.is_state(sym_type) else sym_type
    tensor = types.is_tensor(wrapped)
    element = wrapped.get_primitive() if tensor else wrapped
    if not (tensor or types.is_scalar(wrapped)) or types.is_str(element):
        return Kind(False, "", (), 0)
    lengths = wrapped.get_shape() if tensor else ()
    shape = tuple(1 if is_symbolic(d) else int(d) for d in lengths)
    dtype = str(types.builtin_to_string(element))
    bits = int("".join(filter(str.isdigit, dtype)) or 8)
    return Kind(wrapped is sym_type, dtype, shape, bits / 8)


def kind_of(var: Var) -> Kind:
    """What the type of a value says; of a state, that it is not a tensor, and the shape of the one it holds."""
    return _kind(var.sym_type)


def is_tensor(var: Var) -> bool:
    """Is it a tensor or a scalar of numbers (and no list, state or string)?"""
    return kind_of(var).is_tensor


def shape_of(var: Var) -> tuple[int, ...]:
    """Lengths of a tensor, 1 for dynamic ones; of a state, those of its tensor."""
    return kind_of(var).shape


def size_of(var: Var) -> int:
    """Bytes, rows not padded; 0 for what is not a tensor."""
    kind = kind_of(var)
    return math.ceil(math.prod(kind.shape) * kind.itemsize) if kind.is_tensor else 0


def elements(var: Var) -> int:
    """Number of elements; dynamic lengths count as one."""
    return math.prod(shape_of(var))


def work_of(op: Operation) -> Work:
    """What an op reads, writes and computes."""
    stored = [v for _, v in operands(op) if is_stored(v) and elements(v) > 1]
    count = FLOP.get(op.op_type)
    return Work(
        sum(map(size_of, runtime(op))),
        sum(map(size_of, stored)),
        sum(map(size_of, read_results(op))),
        0 if count is None else count(op),
    )


def _conv(op: Operation) -> int:
    """2 * outputs * channels of a group * kernel; the gaps of a dilated kernel are not counted twice."""
    weight = shape_of(op.weight)
    return 2 * elements(op.outputs[0]) * math.prod(weight[1:])


def _conv_transpose(op: Operation) -> int:
    """As the compiler counts it: 2 * outputs * channels of a group * kernel, whatever the strides."""
    weight, groups = shape_of(op.weight), int(np.asarray(op.groups.val)) if op.groups else 1
    return 2 * elements(op.outputs[0]) * max(weight[0] // groups, 1) * math.prod(weight[2:])


def _linear(op: Operation) -> int:
    return 2 * elements(op.outputs[0]) * shape_of(op.weight)[-1]


def _matmul(op: Operation) -> int:
    shape = shape_of(op.x)
    turned = op.transpose_x is not None and bool(op.transpose_x.val) and len(shape) > 1
    return 2 * elements(op.outputs[0]) * shape[-2 if turned else -1]


def _einsum(op: Operation) -> int:
    """2 * outputs * the lengths that are summed over."""
    operands_, made = str(op.equation.val).replace(" ", "").split("->")
    lengths = {
        name: size
        for names, var in zip(operands_.split(","), op.values, strict=True)
        for name, size in zip(names, shape_of(var), strict=True)
    }
    return 2 * elements(op.outputs[0]) * math.prod(n for name, n in lengths.items() if name not in made)


def _attention(op: Operation) -> int:
    query, key, value = map(shape_of, (op.query, op.key, op.value))
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _recurrent(op: Operation) -> int:
    """2 * steps * rows * the numbers of every matrix, in both directions."""
    steps, rows = shape_of(op.x)[:2]
    matrices = [v for name, v in op.inputs.items() if name.startswith("weight") and v is not None]
    return 2 * steps * rows * sum(map(elements, matrices))


FLOP: dict[str, Callable[[Operation], int]] = {
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "einsum": _einsum,
    "linear": _linear,
    "matmul": _matmul,
    **dict.fromkeys(("gru", "lstm", "rnn"), _recurrent),
    "scaled_dot_product_attention": _attention,
}
"""The ops that compute sums of products."""
