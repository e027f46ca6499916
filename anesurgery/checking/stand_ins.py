"""Let drawn numbers stand for the weights of an edit, so that what is proved of it holds for any weights.

Weights of one content get one list of numbers, on either side and in whatever shape. A proof bit for bit on
them uses nothing that is special about the weights, so that it need not be repeated for the next layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from anesurgery.checking.adversarial import SMALL_CONSTANT
from anesurgery.interpret.arithmetic.precision import forget
from anesurgery.mil import Array, Operation, Var, constant, np_dtype, reads

ELEMENTS = ("add", "sub", "mul")
"""Ops whose constants are weights where they are vectors; tables and masks are reordered, so that they are not
the same list on both sides."""
READERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("weight", "bias"),
    "conv": ("weight", "bias"),
    "matmul": ("x", "y"),
    "layer_norm": ("gamma", "beta"),
    **dict.fromkeys(ELEMENTS, ("x", "y")),
}
"""Op type -> the parameters that may be any numbers: the op computes with them and decides nothing by them."""
MOST = 1 << 27
"""Weights of one edit for which numbers are drawn: 1 GiB as the 64 bits of each that the proof computes with.
"""
AT_ONCE = 1 << 25
"""Weights of one edit for which they are drawn before a second edit is seen that is like it: a choice: the
proof of so many pays where it stands for several checks by numbers."""


class StandIns:
    """The weights of an edit, numbered by what they hold."""

    def __init__(self, old: Sequence[Operation], new: Sequence[Operation], seed: int) -> None:
        self._seed = seed
        self.weights = _weights([*old, *new])
        self.size = sum(int(np.size(constant(v))) for v in self.weights)

    @cached_property
    def numbers(self) -> dict[Var, int]:
        """Weight -> the number of its content, which is read here first."""
        numbers: dict[Var, int] = {}
        seen: dict[Hashable, int] = {}
        digests: dict[Hashable, tuple[Array, Hashable | None]] = {}
        for var in self.weights:
            array = np.asarray(constant(var))
            place = array.__array_interface__["data"][0], array.dtype.str, array.shape, array.strides
            if place not in digests:  # the array is kept with it, so that nothing else can come to lie there
                digests[place] = array, _content(array)
            content = digests[place][1]
            if content is not None:
                numbers[var] = seen.setdefault(content, len(seen))
        return numbers

    @cached_property
    def values(self) -> dict[Var, torch.Tensor]:
        """What stands for each weight."""
        drawn: dict[int, torch.Tensor] = {}
        for var, number in self.numbers.items():
            if number not in drawn:
                generator = torch.Generator().manual_seed(self._seed + 7919 * (number + 1))
                size = int(np.size(constant(var)))
                drawn[number] = torch.rand(size, dtype=torch.float64, generator=generator)
        return {v: drawn[number].reshape(np.shape(constant(v))) for v, number in self.numbers.items()}


def _weights(ops: Sequence[Operation]) -> list[Var]:
    """The larger constants that are floats and are read as weights only."""
    plain_floats: dict[Var, bool] = {}
    for op in ops:
        anything = {op.inputs.get(name) for name in READERS.get(op.op_type, ())}
        if op.op_type in ELEMENTS:
            anything = {v for v in anything if v is not None and _is_vector(v)}
        computes = any(v.op is None or v.op.op_type != "const" for v in reads(op))
        for var in reads(op):
            plain_floats[var] = plain_floats.get(var, True) and computes and var in anything
    return [v for v, plain in plain_floats.items() if plain and _is_large(v)]


def _content(array: Array) -> Hashable | None:
    """The numbers of an array in their order, whatever its shape; None where it holds one again and again."""
    ordered = np.ascontiguousarray(array)
    if _is_one_number(ordered):
        return None
    content = ordered.dtype.str, hashlib.blake2b(ordered.data, digest_size=16).digest()
    forget(ordered)
    return content


def _is_one_number(array: Array) -> bool:
    """Does it hold one number again and again?"""
    flat = array.reshape(-1)
    return bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all())


def _is_vector(var: Var) -> bool:
    value = constant(var)
    return value is not None and np.size(value) == max(np.shape(value), default=0)


def _is_large(var: Var) -> bool:
    if var.op is None or var.op.op_type != "const" or np_dtype(var).kind != "f":
        return False
    return int(np.size(constant(var))) > SMALL_CONSTANT
