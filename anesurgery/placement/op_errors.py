"""How far each op is from exact arithmetic, alone and with the errors of the ops before it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.checking.grades import psnr
from anesurgery.interpret.arithmetic.neural_engine import largest_of
from anesurgery.interpret.batched_decoding import Shown
from anesurgery.mil import operands

BINS = 24
"""Bars of a histogram: as many as can be told apart in half of a narrow page."""
LOOKED_AT = 4096
"""Elements of a value that are counted into its histogram, evenly taken: their shares are right to 2 %."""


@dataclass(frozen=True)
class Histogram:
    """How the numbers of a value are spread, in exact arithmetic and in the others, over the same bins.

    Attributes:
        low: where the first bin begins: a little below the least finite number in exact arithmetic.
        high: where the last ends, a little above the largest.
        counts: arithmetic, "fp32" among them -> elements in each bin.
        outside: arithmetic -> elements below or above all bins, or not finite.
    """

    low: float
    high: float
    counts: Mapping[str, tuple[int, ...]]
    outside: Mapping[str, int]


@dataclass(frozen=True)
class OpError:
    """One op.

    Attributes:
        name: of its first output.
        op_type: MIL op type; a loop or a branch is one op.
        own: arithmetic -> PSNR in dB of its worst output where all that it reads is right.
        grown: the same where errors of the ops before it are in what it reads.
        largest: magnitude in exact arithmetic.
        rules: numeric findings of `inspect` about it.
        repairs: passes that they name; of an op below the gate without one, those of the ops beside it.
        reads: first outputs of the ops that it reads, constants among them.
        histogram: of its first output of floats, where errors have grown.
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
        """Its own PSNR in the arithmetic in which it is lowest."""
        return min(self.own.values(), default=math.inf)


def op_error(shown: Shown) -> OpError | None:
    """The errors of one op; None where it gives no floats."""
    floats = [k for k, v in enumerate(shown.exact) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    if not floats:
        return None
    exact = [shown.exact[k] for k in floats]
    sizes = [largest_of(v) for v in exact]

    def errors(results: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, float]:
        return {
            a: min(
                decibels(value, outputs[k], size) for k, value, size in zip(floats, exact, sizes, strict=True)
            )
            for a, outputs in results.items()
        }

    op, first = shown.op, floats[0]
    values = {"fp32": exact[0]} | {a: outputs[first] for a, outputs in shown.grown.items()}
    return OpError(
        op.outputs[0].name,
        op.op_type,
        errors(shown.own),
        errors(shown.grown),
        max(sizes),
        reads=tuple(dict.fromkeys(v.op.outputs[0].name for _, v in operands(op) if v.op is not None)),
        histogram=histogram(values),
    )


def with_repairs_beside(rows: Sequence[OpError], gate: float) -> tuple[OpError, ...]:
    """Ops below the gate that no finding names get the repairs of the ops beside them: of what fills a mask.

    Args:
        rows: in file order.
        gate: PSNR in dB.
    """
    near: dict[str, set[str]] = {row.name: set() for row in rows}
    for row in rows:
        for read in near.keys() & set(row.reads):
            near[row.name].add(read)
            near[read].add(row.name)
    repairs = {row.name: row.repairs for row in rows}

    def beside(row: OpError) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one for name in sorted(near[row.name]) for one in repairs[name]))

    return tuple(
        replace(row, repairs=beside(row)) if row.worst < gate and not row.repairs else row for row in rows
    )


def decibels(wanted: torch.Tensor, rounded: torch.Tensor, largest: float) -> float:
    """PSNR over what is finite in `wanted`; minus infinite where `rounded` is not finite there.

    Args:
        wanted: exact.
        rounded: of any shape; minus infinite where it is another one.
        largest: magnitude in `wanted`.
    """
    if wanted.shape != rounded.shape:
        return -math.inf
    if not wanted.numel() or not wanted.is_floating_point():
        return math.inf
    rounded = rounded.float()
    if not math.isfinite(largest):
        meant = torch.isfinite(wanted)
        wanted, rounded = wanted[meant], rounded[meant]
        largest = largest_of(wanted)
    noise = float(torch.linalg.vector_norm(wanted - rounded))
    if not math.isfinite(noise):
        return -math.inf
    return psnr(largest, noise / math.sqrt(max(wanted.numel(), 1)))


def histogram(values: Mapping[str, torch.Tensor]) -> Histogram | None:
    """The histogram of a value in each arithmetic; None where no number is finite in "fp32"."""
    looked = {a: _evenly(value) for a, value in values.items()}
    finite = looked["fp32"][np.isfinite(looked["fp32"])]
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    margin = (high - low) / BINS or max(abs(low), 1.0) * fp16.EPSILON  # what is rounded outwards is not lost
    low, high = low - margin, high + margin
    counts, outside = {}, {}
    for a, numbers in looked.items():
        inside = np.histogram(numbers[np.isfinite(numbers)], bins=BINS, range=(low, high))[0]
        counts[a], outside[a] = tuple(map(int, inside)), numbers.size - int(inside.sum())
    return Histogram(low, high, counts, outside)


def _evenly(value: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    flat = value.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // LOOKED_AT))].double().numpy()
