"""The error of each op in fp16 and on the engine, for `certify`: alone, and with the errors of earlier ops.

Errors are PSNR in dB against exact arithmetic, by arithmetic ("fp16", "ane"). A histogram shows the values of
an op in each arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.checking.grades import psnr
from anesurgery.interpret.arithmetic.neural_engine import largest_of
from anesurgery.interpret.several_arithmetics import OpResults
from anesurgery.mil import operands

BINS = 24
"""Bins of a histogram: as many as can be seen in half of a narrow page."""
MOST_SAMPLES = 4096
"""Elements of a value that its histogram counts, evenly spaced; the shares of the bins are right to 2 %."""


@dataclass(frozen=True)
class Histogram:
    """The histogram of a value in exact arithmetic and in the others, over the same bins.

    Attributes:
        low: the start of the first bin, a little below the least finite number in exact arithmetic.
        high: the end of the last bin, a little above the largest finite number.
        counts: arithmetic ("fp32" is exact) -> elements in each bin.
        outside: arithmetic -> elements below or above all bins, or not finite.
    """

    low: float
    high: float
    counts: Mapping[str, tuple[int, ...]]
    outside: Mapping[str, int]


@dataclass(frozen=True)
class OpError:
    """The error of one op.

    Attributes:
        name: the name of its first output.
        op_type: MIL op type; a loop or a branch is one op.
        own: arithmetic -> PSNR in dB of its worst output, computed from exact operands.
        grown: arithmetic -> the same, computed from operands with the errors of the ops before it.
        largest: the largest magnitude of its outputs in exact arithmetic.
        rules: ids of numeric findings of `inspect` about it.
        repairs: passes that these findings name; for an op below the gate without one, those of its neighbours.
        reads: names of the first outputs of the ops that it reads, constants among them.
        histogram: histogram of its first output of floats, with the errors of the ops before it.
    """

    name: str
    op_type: str
    own: Mapping[str, float]
    grown: Mapping[str, float]
    largest: float
    rules: tuple[str, ...] = ()
    repairs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    histogram: Histogram | None = field(default=None, repr=False)

    @property
    def worst(self) -> float:
        """The lowest of its own PSNRs over all arithmetics."""
        return min(self.own.values(), default=math.inf)


def op_error(results: OpResults) -> OpError | None:
    """Return the errors of one op; None if it has no outputs of floats."""
    floats = [k for k, v in enumerate(results.exact) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    if not floats:
        return None
    exact = [results.exact[k] for k in floats]
    sizes = [largest_of(v) for v in exact]

    def worst_psnr(outputs: Sequence[torch.Tensor]) -> float:
        return min(decibels(v, outputs[k], size) for k, v, size in zip(floats, exact, sizes, strict=True))

    op, first = results.op, floats[0]
    values = {"fp32": exact[0]} | {a: outputs[first] for a, outputs in results.grown.items()}
    return OpError(
        op.outputs[0].name,
        op.op_type,
        {arithmetic: worst_psnr(outputs) for arithmetic, outputs in results.own.items()},
        {arithmetic: worst_psnr(outputs) for arithmetic, outputs in results.grown.items()},
        max(sizes),
        reads=tuple(dict.fromkeys(v.op.outputs[0].name for _, v in operands(op) if v.op is not None)),
        histogram=histogram(values),
    )


def with_repairs_of_neighbours(rows: Sequence[OpError], gate: float) -> tuple[OpError, ...]:
    """Give each op below the gate that has no repair those of the ops that it reads or that read it.

    Example: the finding is about the op that fills a mask, while the error appears in the softmax behind it.

    Args:
        rows: ops in file order.
        gate: PSNR in dB.
    """
    neighbours: dict[str, set[str]] = {row.name: set() for row in rows}
    for row in rows:
        for read in neighbours.keys() & set(row.reads):
            neighbours[row.name].add(read)
            neighbours[read].add(row.name)
    repairs = {row.name: row.repairs for row in rows}

    def with_repairs(row: OpError) -> OpError:
        if row.worst >= gate or row.repairs:
            return row
        nearby = (repair for name in sorted(neighbours[row.name]) for repair in repairs[name])
        return replace(row, repairs=tuple(dict.fromkeys(nearby)))

    return tuple(map(with_repairs, rows))


def decibels(exact: torch.Tensor, rounded: torch.Tensor, largest: float) -> float:
    """Return the PSNR in dB over the elements that are finite in `exact`.

    It is minus infinity if the shapes differ, or if `rounded` is not finite at one of these elements.

    Args:
        exact: the value in exact arithmetic.
        rounded: the value in another arithmetic.
        largest: the largest magnitude in `exact`.
    """
    if exact.shape != rounded.shape:
        return -math.inf
    if not exact.numel() or not exact.is_floating_point():
        return math.inf
    rounded = rounded.float()
    if not math.isfinite(largest):
        finite = torch.isfinite(exact)
        exact, rounded = exact[finite], rounded[finite]
        largest = largest_of(exact)
    noise = float(torch.linalg.vector_norm(exact - rounded))
    if not math.isfinite(noise):
        return -math.inf
    return psnr(largest, noise / math.sqrt(max(exact.numel(), 1)))


def histogram(values: Mapping[str, torch.Tensor]) -> Histogram | None:
    """Return the histogram of a value in each arithmetic; None if no number is finite in "fp32"."""
    samples = {arithmetic: _evenly_spaced(value) for arithmetic, value in values.items()}
    finite = samples["fp32"][np.isfinite(samples["fp32"])]
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    margin = (high - low) / BINS or max(abs(low), 1.0) * fp16.EPSILON  # room for rounding
    low, high = low - margin, high + margin
    counts, outside = {}, {}
    for arithmetic, numbers in samples.items():
        inside = np.histogram(numbers[np.isfinite(numbers)], bins=BINS, range=(low, high))[0]
        counts[arithmetic], outside[arithmetic] = tuple(map(int, inside)), numbers.size - int(inside.sum())
    return Histogram(low, high, counts, outside)


def _evenly_spaced(value: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return at most `MOST_SAMPLES` elements of a value."""
    flat = value.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // MOST_SAMPLES))].double().numpy()
