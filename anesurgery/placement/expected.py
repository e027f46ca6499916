"""How long a model is expected to take: the one score by which a step is kept or undone.

The cost that Core ML itself would count for the path it chooses, and the bytes of the ops of which no formula
is known: what nobody can price is not free. Two prices are known within wide limits only, so that a model has a
time for each of `VIEWS`, and a gain is clear where every view shows it:

* an op that depends on the one before. 2,207 ops that became 1,635 took the same time on three Macs
  (mattmireles/kokoro-coreml), so it may cost nothing; 2,055 ops on the engine took 11 to 14 ms (M4, onnxsim
  pull 1400), their products and weights included, so that it costs about 5 us at most.
* a recurrent layer on the CPU: its products at the rate of small ones there, or of the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anesurgery.placement.cost import CPU_SUMS, MEMORY, SLOWER
from anesurgery.placement.inspection import Inspection, OpRow

RECURRENT = frozenset({"gru", "lstm", "rnn"})


@dataclass(frozen=True)
class View:
    """What is taken for true where it is not known."""

    op: float
    """Microseconds that each op takes besides its estimate, in every round of its loop."""
    fast_recurrent: bool
    """Do recurrent layers compute at the CPU's highest rate?"""


VIEWS = (View(0.0, fast_recurrent=False), View(5.0, fast_recurrent=True))
"""The likeliest first."""


def expected(parts: Sequence[Inspection]) -> tuple[float, ...]:
    """Microseconds of all functions of a program, one after the other, in each of `VIEWS`.

    Args:
        parts: the inspection of each function.
    """
    return tuple(sum(_one(part, view) for part in parts) for view in VIEWS)


def _one(part: Inspection, view: View) -> float:
    if part.cost is None:
        return 0.0
    unpriced = sum(row.bytes for row in part.ops if row.estimate is None)
    ops = sum(view.op * row.rounds for row in part.ops)
    spared = sum(map(_spared, part.ops)) if view.fast_recurrent else 0.0
    return part.cost + unpriced * SLOWER / MEMORY + ops - spared


def _spared(row: OpRow) -> float:
    """What a recurrent layer takes less at the highest rate."""
    if row.op_type not in RECURRENT or row.estimate is None or row.estimate.cpu is None:
        return 0.0
    return max(row.estimate.cpu - row.flop / CPU_SUMS, 0.0)
