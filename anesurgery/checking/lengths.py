"""What symbolic dimensions stand for while an edit or a model is checked, and the lengths that are declared."""

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
"""Length that stands for a symbolic dimension while an edit is checked, at first."""
LONGEST_DRAWN = 1 << 24
"""Where the search for the length of a symbol ends: an axis of 16 million elements is longer than any."""

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


def length_of(dimension: Any) -> int:
    """A dimension, or what a symbolic one stands for: 2 s + 1 follows from s."""
    if not is_symbolic(dimension):
        return int(dimension)
    lengths = _lengths.get()
    if dimension.is_Symbol:
        return max(1, lengths.get(dimension, SYMBOL_LENGTH))
    size = dimension.subs({s: lengths.get(s, SYMBOL_LENGTH) for s in dimension.free_symbols})
    return max(1, int(size))


_shapes: ContextVar[Mapping[Var, tuple[int, ...]]] = ContextVar("shapes", default=MappingProxyType({}))


@contextmanager
def with_rows(axes: Mapping[Var, int], rows: int) -> Iterator[None]:
    """Let values have fewer rows, each along an axis, for a while."""
    fewer = {
        v: tuple(rows if at == axis else n for at, n in enumerate(drawn_shape(v))) for v, axis in axes.items()
    }
    token = _shapes.set({**_shapes.get(), **fewer})
    try:
        yield
    finally:
        _shapes.reset(token)


def drawn_shape(var: Var) -> tuple[int, ...]:
    """The shape of the values that stand for a var."""
    fewer = _shapes.get().get(var)
    return tuple(map(length_of, var.shape or ())) if fewer is None else fewer


def evaluator(ops: Sequence[Operation], wanted: Sequence[Var], precision: Any = "fp32") -> interpret.Evaluator:
    """Ops ready to run on values of the shapes that are drawn."""
    return interpret.Evaluator(ops, wanted, precision).reshaping(_shapes.get())


def sizes_of(var: Var) -> Sequence[Any]:
    """The sizes of the axes of a value; a list has none."""
    return () if types.is_list(var.sym_type) else var.shape or ()


def symbols_of(values: Iterable[Var]) -> list[Any]:
    """The symbols in the shapes of some values, in the order in which they occur."""
    sizes = [d for var in values for d in sizes_of(var) if is_symbolic(d)]
    return list(dict.fromkeys(s for d in sizes for s in sorted(d.free_symbols, key=str)))


Range = tuple[int, "int | None"]
"""The least and the largest length; None for no bound."""


@dataclass(frozen=True)
class Declared:
    """The lengths that a model declares for the symbols in the shapes of its inputs."""

    ranges: Mapping[Any, Range] = field(default_factory=dict)
    listed: tuple[Lengths, ...] = ()
    """The lengths that may occur together, where a model lists its shapes."""

    def range_of(self, symbol: Any) -> Range:
        """The range of a symbol; one of which nothing is known begins at 1."""
        return self.ranges.get(symbol, (1, None))

    def together(self, symbols: Sequence[Any]) -> list[Lengths]:
        """The listed lengths of some symbols; none where they are not listed."""
        listed = [{s: one[s] for s in symbols} for one in self.listed if set(symbols) <= one.keys()]
        return list({tuple(one.values()): one for one in listed}.values())


NOTHING = Declared()
"""What a bare program declares."""


def declared_lengths(program: Program, spec: Any) -> Declared:
    """The lengths that a specification declares for the inputs of a program, in all its functions."""
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
                low, high = _united([one[symbol] for one in several])
                ranges[symbol] = _intersected(ranges.get(symbol, (1, None)), low, high)
        if all(dynamic) and any(len(several) > 1 for several in dynamic):
            listed += [
                {s: low for several in dynamic for s, (low, _) in several[min(i, len(several) - 1)].items()}
                for i in range(max(map(len, dynamic)))
            ]
    return Declared(ranges, tuple(listed))


def _lengths_in(var: Var, shape: Sequence[tuple[int, int]]) -> dict[Any, Range]:
    """The range of each symbol in one of the shapes that an input may have."""
    pairs = [(size, ends) for size, ends in zip(var.shape or (), shape, strict=False) if is_symbolic(size)]
    return {size: (max(low, 1), high if high >= 0 else None) for size, (low, high) in pairs}


def _united(ranges: Sequence[Range]) -> Range:
    """The least range that holds some."""
    ends = [high for _, high in ranges if high is not None]
    return min(low for low, _ in ranges), max(ends) if len(ends) == len(ranges) else None


def _intersected(before: Range, low: int, high: int | None) -> Range:
    """What is left of a range, since another holds too."""
    ends = [end for end in (before[1], high) if end is not None]
    return max(before[0], low), min(ends, default=None)


def least_length(size: Any, symbol: Any, wanted: int) -> int:
    """The least length of a symbol at which a size that grows with it is as large as wanted."""
    if size.is_Symbol:
        return max(1, wanted)
    low, high = 1, LONGEST_DRAWN
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if int(size.subs({symbol: middle})) >= wanted else (middle + 1, high)
    return low
