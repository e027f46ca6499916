"""Fold tests of equality between integers whose ranges have nothing in common, compared where they stood."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from anesurgery.checking.lengths import drawn_shape
from anesurgery.facts.unvarying_ops import differ
from anesurgery.facts.whole_numbers import WholeNumbers
from anesurgery.mil import Array, Var, is_output, np_dtype
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops
from anesurgery.rewriting.rewrite import Rewrite

ENDS = 0.6
"""Share of the integers that a fold is compared on that are ends of a range that the caller promises."""


@dataclass(frozen=True)
class NeverEqual(Rewrite):
    """A test of equality between integers whose ranges have nothing in common is a constant.

    It depends on inputs, so it is compared with what it was, at the ends of what may be assumed of these.
    """

    name: ClassVar[str] = "fold_constants"
    assume: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def pattern(self, op: Ops) -> OpPattern:
        """Every test of equality."""
        return op.any("equal", "not_equal")()

    def check(self, m: Match) -> Match | None:
        """Its ranges are apart, and it is not an output."""
        apart = differ(m.root, WholeNumbers(self.assume)) and not is_output(m.root.outputs[0])
        return m if apart else None

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """False, or true, everywhere."""
        mb.note(f"by their ranges %{m.root.x.name} never equals %{m.root.y.name}")
        return mb.const(val=np.full(m.root.outputs[0].shape, m.root.op_type == "not_equal"))

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> Array | None:
        """Integers that the caller promises, the ends of their range among them."""
        if var.op is not None or var.name not in self.assume or np_dtype(var).kind not in "iu":
            return None
        low, high = self.assume[var.name]
        drawn = rng.integers(low, high, drawn_shape(var), endpoint=True)
        ends = rng.choice([low, high], drawn.shape)
        return np.where(rng.random(drawn.shape) < ENDS, ends, drawn).astype(np_dtype(var))
