"""What symbolic dimensions stand for while an edit or a model is checked: several lengths in turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import numpy as np

from anesurgery.mil import Operation, Var, constant, is_symbolic, np_dtype, reads

SYMBOL_LENGTH = 3
"""Length that stands for a symbolic dimension while an edit is checked, at first."""
APART_LENGTHS = (4, 2, 7, 5)
"""Lengths of the symbolic dimensions after that, each with one of its own, in turn."""
LONG = 17
"""Length of all of them in the end: what holds up to a limit only is seen there."""
FARTHEST_LIMIT = 512
"""A limit that a site names by a constant is crossed if it is no larger: windows, kernels and relative places
are; lengths of whole contexts would make each check a long one."""
MOST_BEYOND = 1 << 18
"""Numbers read up to which that is tried, 1 MiB of fp32: beyond, the check would take many times what it took
at the other lengths."""
SMALL = 64
"""Constants of up to this many elements may hold a limit: parameters of ops do, weights and tables do not."""

Lengths = Mapping[Any, int]
"""Symbolic dimension -> what it stands for; `SYMBOL_LENGTH` for any other."""
_lengths: ContextVar[Lengths] = ContextVar("lengths", default=MappingProxyType({}))


@contextmanager
def with_lengths(lengths: Lengths) -> Iterator[None]:
    """Let symbolic dimensions stand for other lengths, for a while."""
    token = _lengths.set(lengths)
    try:
        yield
    finally:
        _lengths.reset(token)


def other_lengths(inputs: Iterable[Var], ops: Iterable[Operation] = ()) -> list[Lengths]:
    """The lengths to try after the first ones: each dimension with a length of its own, long ones, and 1.

    Args:
        inputs: what has the dimensions.
        ops: what may hold up to a length only; those beyond the integers that these read are tried too.
    """
    inputs = list(inputs)
    sizes = [d for var in inputs for d in var.shape or () if is_symbolic(d)]
    symbols = list(dict.fromkeys(s for d in sizes for s in sorted(d.free_symbols, key=str)))
    if not symbols:
        return []
    apart = dict(zip(symbols, itertools.cycle(APART_LENGTHS), strict=False))
    lengths: list[Lengths] = [apart, *(dict.fromkeys(symbols, n) for n in (LONG, 1))]
    if (limit := _limit(ops)) >= LONG:
        beyond = dict.fromkeys(symbols, limit + 1)
        with with_lengths(beyond):
            affordable = sum(math.prod(drawn_shape(v)) for v in inputs) <= MOST_BEYOND
        lengths += [beyond] if affordable else []
    return lengths


def _limit(ops: Iterable[Operation]) -> int:
    """The largest integer up to `FARTHEST_LIMIT` among the small constants that some ops read."""
    whole = (v for op in ops for v in reads(op) if np_dtype(v).kind in "iu")
    held = (np.asarray(value) for v in whole if (value := constant(v)) is not None)
    numbers = (int(n) for array in held if array.size <= SMALL for n in array.ravel().tolist())
    return max((n for n in numbers if n <= FARTHEST_LIMIT), default=0)


def length_of(dimension: Any) -> int:
    """A dimension, or what a symbolic one stands for: 2 s + 1 follows from s."""
    if not is_symbolic(dimension):
        return int(dimension)
    lengths = _lengths.get()
    size = dimension.subs({s: lengths.get(s, SYMBOL_LENGTH) for s in dimension.free_symbols})
    return max(1, int(size))


def drawn_shape(var: Var) -> tuple[int, ...]:
    """The shape of the values that stand for a var."""
    return tuple(map(length_of, var.shape or ()))
