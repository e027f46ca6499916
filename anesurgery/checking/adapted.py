"""Which elements of the reference's outputs a model with a changed interface should give.

A declared change turns old outputs into new ones by a function of arrays. Where it only selects or moves
elements, two probes of distinct numbers show which ones; else what it gives is compared by numbers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from anesurgery.checking.matching import Move, still
from anesurgery.checking.value_numbering import Value
from anesurgery.files.interface import InterfaceChange, adapt_outputs
from anesurgery.mil import Array


class Adapted:
    """The outputs that are expected of the second program."""

    def __init__(
        self, contract: Sequence[InterfaceChange], outputs: Mapping[str, Value], inputs: Mapping[str, Array]
    ) -> None:
        self.contract, self.outputs, self.inputs = contract, outputs, inputs
        self._found = self._moved() if contract else {}
        if contract:
            arrays = {name: v.numbers.numpy() for name, v in outputs.items()}
            self._arrays = adapt_outputs(contract, arrays, inputs)

    def expected(self, name: str) -> tuple[Value | None, Move]:
        """The value of the first program that an output should be, and which of its elements where."""
        if not self.contract:
            return self.outputs.get(name), still
        if (place := self._found.get(name)) is not None:
            source, at = place
            return self.outputs[source], lambda t: t.reshape(-1)[at.reshape(-1)].reshape(at.shape)
        array = self._arrays.get(name)
        if array is None:
            return None, still
        reason = "a declared change computes with this output"
        first = next(iter(self.outputs.values()))
        return Value(first.var, torch.from_numpy(np.asarray(array)), None, reason=reason), still

    def _moved(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Output -> (output of the first program, place of each element in it), where both probes agree."""
        first, second = (self._probe(seed) for seed in (0, 1))
        return {
            name: (source, at)
            for name, (source, at) in first.items()
            if name in second and second[name][0] == source and torch.equal(second[name][1], at)
        }

    def _probe(self, seed: int) -> dict[str, tuple[str, torch.Tensor]]:
        """What a change makes of distinct numbers of both signs."""
        rng = np.random.default_rng(seed)
        drawn, places, begin = {}, {}, 1
        for name, value in self.outputs.items():
            shape = tuple(value.numbers.shape)
            count = value.numbers.numel()
            order = rng.permutation(count)
            numbers = (order + begin) * np.where(rng.random(count) < 0.5, -1.0, 1.0)
            inverse = np.empty(count, np.int64)
            inverse[order] = np.arange(count)
            drawn[name], places[name] = numbers.reshape(shape), (begin, inverse, numbers)
            begin += count
        adapted = adapt_outputs(self.contract, drawn, self.inputs)
        sources = {}
        for name, array in adapted.items():
            for source, (start, inverse, numbers) in places.items():
                rank = np.abs(np.asarray(array, np.float64)) - start
                inside = (rank >= 0) & (rank < len(inverse))  # NaN and infinities are not
                if not inside.all() or (rank % 1 != 0).any():
                    continue
                at = inverse[rank.astype(np.int64)]
                if np.array_equal(numbers[at], np.asarray(array, np.float64)):
                    sources[name] = (source, torch.from_numpy(at))
        return sources


def last_of(a: Value, b: Value) -> Move:
    """The last position of the reference, where the other has one position on an axis."""
    apart = [i for i, (m, n) in enumerate(zip(a.numbers.shape, b.numbers.shape, strict=False)) if m != n]
    if a.numbers.ndim != b.numbers.ndim or len(apart) != 1 or b.numbers.shape[apart[0]] != 1:
        return still
    axis = apart[0]
    return lambda t: t.narrow(axis, t.shape[axis] - 1, 1)
