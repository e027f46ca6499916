"""Write a subtraction as the addition of the negated operand.

Before::

    main(%a: 2x3, %b: 1x3) {
      %y: 2x3 = sub(x=%a, y=%b)
      return %y
    }

After::

    main(%a: 2x3, %b: 1x3) {
      %y_negate_subtract_mul: 1x3 = mul(x=%b, y=-1)
      %y: 2x3 = add(x=%a, y=%y_negate_subtract_mul)
      return %y
    }

If `y` is a constant, the constant is negated, so the number of ops stays the same. Integers stay integers.

Refuses when the operands are neither float nor int32, or when a constant holds the most negative integer, whose
negation does not exist.

Why it helps: the legacy NeuralNetwork form has no plain subtraction (Apple documents `subtractBroadcastable` as
its layer, reported off the ANE on iOS 12 to 15). In ML Programs `sub` itself is legal on the ANE (measured: M4,
macOS 27), so for them this is a normal form and no speed-up: not measured elsewhere.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb


@dataclass(frozen=True)
class NegateSubtract(Rewrite):
    """`sub(x, y)` becomes `add(x, -y)`: exact for floats and for integers."""

    name = "negate_subtract"
    kinds = frozenset({"sub"})

    def check(self, m: Match) -> Match | Refusal:
        """Match floats and int32; a constant must have a negation."""
        dtype = an.np_dtype(m.y)
        if dtype.kind != "f" and dtype != np.int32:
            return Refusal(f"the operands are {dtype}, whose negation may not exist", m.root)
        value = an.constant(m.y)
        if value is not None and dtype.kind == "i" and np.min(value) == np.iinfo(dtype).min:
            return Refusal(f"the constant holds {np.iinfo(dtype).min}, which has no negation", m.root)
        return m

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Negate the constant, or multiply by -1; then add."""
        value = an.constant(m.y)
        minus_one = an.np_dtype(m.y).type(-1)
        negated = mb.mul(x=m.y, y=minus_one) if value is None else mb.const(val=np.negative(value))
        return mb.add(x=m.x, y=negated)


@an.example((2, 3), (1, 3))
def example(a: Var, b: Var) -> Var:
    """A row subtracted from a matrix."""
    return mb.sub(x=a, y=b, name="y")
