"""Write a threshold as the maximum of its operand and a constant.

Before::

    main(%x: 2x3) {
      %y: 2x3 = threshold(x=%x, alpha=0.5)
      return %y
    }

After::

    main(%x: 2x3) {
      %y: 2x3 = maximum(x=%x, y=0.5)
      return %y
    }

Refuses when the constant is NaN, for which the two ops give different numbers.

Why it helps: `maximum` was placed on the ANE of an M4, macOS 27, through Core ML; no measurement of `threshold`
was found, so an inspection does not count it as legal. Upgraded networks write ReLU6 with it. Proved by the
definitions of both ops: the same numbers bit by bit.

Grade: bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb


@dataclass(frozen=True)
class ThresholdToMaximum(Rewrite):
    """`threshold(x, alpha)` becomes `maximum(x, alpha)`."""

    name = "threshold_to_maximum"
    kinds = frozenset({"threshold"})

    def check(self, m: Match) -> Match | Refusal:
        """Match an op whose constant is a number."""
        least = an.number(m.alpha)
        if least is None or math.isnan(least):
            return Refusal(f"alpha is {an.constant(m.alpha)}", m.root)
        return m

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the maximum."""
        return mb.maximum(x=m.x, y=m.alpha)


@an.example((2, 3))
def example(x: Var) -> Var:
    """A threshold at one half."""
    return mb.threshold(x=x, alpha=np.float32(0.5), name="y")
