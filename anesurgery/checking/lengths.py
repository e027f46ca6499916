"""Lengths of symbolic dimensions: those used while an edit or model is checked, and those a model declares.

`with_lengths({s: 7})` sets them for a block; inside it `length_of` and `drawn_shape` give numbers. `with_rows`
lets large values have fewer rows. `declared_lengths` reads the ranges and lists of shapes in a specification.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from anesurgery import interpret
from anesurgery.interpret.features import allowed_shapes
from anesurgery.mil import Operation, Program, Var, is_symbolic, types

SYMBOL_LENGTH = 3
"""The length of a symbolic dimension while an edit is checked, unless `with_lengths` sets another."""
LONGEST_DRAWN = 1 << 24
"""The largest length that is searched for a symbol: no axis has 16 million elements."""

Lengths = Mapping[Any, int]
"""Symbol -> its length; `SYMBOL_LENGTH` for any other."""
_lengths: ContextVar[Lengths] = ContextVar("lengths", default=MappingProxyType({}))


@contextmanager
def with_lengths(lengths: Lengths) -> Iterator[None]:
    """Set the lengths of symbols inside the block."""
    token = _lengths.set(lengths)
    try:
        yield
    finally:
        _lengths.reset(token)


def length_of(dimension: Any) -> int:
    """Return a dimension, or the length of a symbolic one; that of 2 s + 1 follows from s."""
    if not is_symbolic(dimension):
        return int(dimension)
    lengths = _lengths.get()
    if dimension.is_Symbol:  # `subs` would give the same, slowly
        return max(1, lengths.get(dimension, SYMBOL_LENGTH))
    size = dimension.subs({s: lengths.get(s, SYMBOL_LENGTH) for s in dimension.free_symbols})
    return max(1, int(size))


_shapes: ContextVar[Mapping[Var, tuple[int, ...]]] = ContextVar("shapes", default=MappingProxyType({}))


@contextmanager
def with_rows(axes: Mapping[Var, int], rows: int) -> Iterator[None]:
    """Let values have only `rows` rows, each along its axis, inside the block."""
    fewer = {
        v: tuple(rows if at == axis else n for at, n in enumerate(drawn_shape(v))) for v, axis in axes.items()
    }
    token = _shapes.set({**_shapes.get(), **fewer})
    try:
        yield
    finally:
        _shapes.reset(token)


def drawn_shape(var: Var) -> tuple[int, ...]:
    """Return the shape of the numbers that are drawn for a value."""
    fewer = _shapes.get().get(var)
    return tuple(map(length_of, var.shape or ())) if fewer is None else fewer


def evaluator(ops: Sequence[Operation], wanted: Sequence[Var], precision: Any = "fp32") -> interpret.Evaluator:
    """Return ops ready to run on values of the drawn shapes."""
    return interpret.Evaluator(ops, wanted, precision).reshaping(_shapes.get())


def sizes_of(var: Var) -> Sequence[Any]:
    """Return the dimensions of a value; a list has none."""
    return () if types.is_list(var.sym_type) else var.shape or ()


def symbols_of(values: Iterable[Var]) -> list[Any]:
    """Return the symbols in the shapes of some values, in the order in which they occur."""
    sizes = [d for var in values for d in sizes_of(var) if is_symbolic(d)]
    return list(dict.fromkeys(s for d in sizes for s in sorted(d.free_symbols, key=str)))


Range = tuple[int, int | None]
"""(least, largest) length; None for no upper bound."""


@dataclass(frozen=True)
class Declared:
    """The lengths that a model declares for the symbols in its inputs' shapes."""

    ranges: Mapping[Any, Range] = field(default_factory=dict)
    listed: tuple[Lengths, ...] = ()
    """Combinations of lengths, where a model lists its shapes."""

    def range_of(self, symbol: Any) -> Range:
        """Return the range of a symbol; one of which nothing is declared begins at 1."""
        return self.ranges.get(symbol, (1, None))

    def nearest(self, lengths: Lengths) -> Lengths:
        """Return the nearest lengths that are declared."""
        ranges = {s: self.range_of(s) for s in lengths}
        return {s: max(ranges[s][0], min(n, ranges[s][1] or n)) for s, n in lengths.items()}

    def together(self, symbols: Sequence[Any]) -> list[Lengths]:
        """Return the listed combinations of lengths of some symbols; empty where they are not listed."""
        listed = [{s: one[s] for s in symbols} for one in self.listed if set(symbols) <= one.keys()]
        return list({tuple(one.values()): one for one in listed}.values())


NOTHING = Declared()
"""The declaration of a program without a specification."""


def declared_lengths(program: Program, spec: Any) -> Declared:
    """Return the lengths that a specification declares for a program's inputs, over all functions."""
    if spec is None:
        return NOTHING
    described = {f.name: list(f.input) for f in spec.description.functions}
    ranges: dict[Any, Range] = {}
    listed: list[Lengths] = []
    for name, function in program.functions.items():
        allowed = allowed_shapes(described.get(name) or spec.description.input)
        shapes = {n: [_lengths_in(v, one) for one in allowed.get(n, ())] for n, v in function.inputs.items()}
        dynamic = [several for n, several in shapes.items() if symbols_of([function.inputs[n]])]
        for several in filter(None, dynamic):
            for symbol in several[0]:
                allowed_here = united([one[symbol] for one in several])
                ranges[symbol] = _intersected(ranges.get(symbol, (1, None)), allowed_here)
        if all(dynamic) and any(len(several) > 1 for several in dynamic):
            listed += [  # shape i of each input; the last of a shorter list, and the low end of a range
                {s: low for several in dynamic for s, (low, _) in several[min(i, len(several) - 1)].items()}
                for i in range(max(map(len, dynamic)))
            ]
    return Declared(ranges, tuple(listed))


def _lengths_in(var: Var, shape: Sequence[tuple[int, int]]) -> dict[Any, Range]:
    """Return the range of each dynamic size in one of the shapes that an input may have."""
    pairs = [(size, ends) for size, ends in zip(var.shape or (), shape, strict=False) if is_symbolic(size)]
    return {size: (max(low, 1), high if high >= 0 else None) for size, (low, high) in pairs}


def united(ranges: Sequence[Range]) -> Range:
    """Return the least range that contains all."""
    ends = [high for _, high in ranges if high is not None]
    return min(low for low, _ in ranges), max(ends) if len(ends) == len(ranges) else None


def _intersected(a: Range, b: Range) -> Range:
    """Return what two ranges have in common."""
    ends = [end for _, end in (a, b) if end is not None]
    return max(a[0], b[0]), min(ends, default=None)


def least_length(size: Any, symbol: Any, wanted: int) -> int:
    """Return the least length of a symbol at which a size that grows with it is at least `wanted`.

    It is `LONGEST_DRAWN` where no length up to that is enough.
    """
    if size.is_Symbol:
        return max(1, wanted)
    low, high = 1, LONGEST_DRAWN
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if int(size.subs({symbol: middle})) >= wanted else (middle + 1, high)
    return low
