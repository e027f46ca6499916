"""On request, replace a function that the engine lacks by a formula with a stated error.

Before::

    main(%x: 2x3) {
      %y: 2x3 = cosh(x=%x)
      return %y
    }

After::

    main(%x: 2x3) {
      %y_approximate_sub: 2x3 = sub(x=%x, y=0.693147)
      %y_approximate_exp: 2x3 = exp(x=%y_approximate_sub)
      %y_approximate_sub_1: 2x3 = sub(x=-0.693147, y=%x)
      %y_approximate_exp_1: 2x3 = exp(x=%y_approximate_sub_1)
      %y: 2x3 = add(x=%y_approximate_exp, y=%y_approximate_exp_1)
      return %y
    }

Sines and cosines are reduced to half a period, with pi in two parts, and then a polynomial computes them; a
tangent is their quotient. asin and acos are a root times a polynomial. The hyperbolic functions are sums of
exponentials, and atanh is a sum of logarithms. The pass measures the error over the range of the operand, in
the arithmetic of the program, and states it in the notes of the surgery. The range is what the ops before it
imply, or else `limit`.

Refuses when the error is above `most_error`, with the error and the range, and when the range exceeds the
domain of the function. `auto` never tries this pass. It replaces the functions that the target lacks, or those
in `functions`.

Why it helps: asin, acos, tan, sinh, cosh and atanh were not placed on the ANE in any form (measured through
Core ML on M4, macOS 27); the tables of the compiler have no sine before A16 and M3 (reported). What the pass
gains in time was not measured.

Grade: checked: it is an approximation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Program, Refusal, Rewrite, Var, mb
from anesurgery.regions import formulas
from anesurgery.semantics.intervals import interval

LACKING = an.ops.names("asin acos tan sinh cosh atanh")
"""Functions that no chip was seen to have."""
SINES, HAVE_SINES = an.ops.names("sin cos"), 15
"""Functions that chips have from this family on."""


@dataclass(frozen=True)
class Approximate(Rewrite):
    """Trigonometric and hyperbolic functions in formulas, each with its measured error."""

    name = "approximate"
    kinds = frozenset(formulas.FORMULAS)
    asked_for = True
    tolerance = an.Tolerance(5e-3)
    functions: tuple[str, ...] = an.option((), among=tuple(formulas.FORMULAS))
    """Op types to replace; those that the target lacks by default."""
    limit: float = 8.0
    """How far an operand of unknown range is taken to reach, where the function takes that much."""
    most_error: float = an.option(5e-3, above=0.0, most=5e-3)
    """Largest error that is accepted, relative to the largest result."""

    def run(self, program: Program, session: an.Session) -> None:
        """Apply it to what the target lacks."""
        families = an.Target.parse(session.target).families
        lacking = LACKING | (SINES if min(families) < HAVE_SINES else frozenset())
        step = self if self.functions else replace(self, functions=tuple(sorted(lacking)))
        super(Approximate, step).run(program, session)

    def check(self, m: Match) -> Match | Refusal:
        """Match a function whose formula is good enough over the range of its operand."""
        op = m.root
        if op.op_type not in self.functions or an.constant(m.x) is not None:
            return an.NO_MATCH
        low, high = self.range_of(m)
        least, most = _domain(op)
        if low < least or high > most:
            words = f"%{m.x.name} reaches from {low:g} to {high:g}"
            return Refusal(f"{words}; {op.op_type} takes {least:g} to {most:g} here", op)
        dtype = an.np_dtype(m.x).name.replace("float", "fp")
        error = formulas.relative_error(op.op_type, low, high, dtype)
        words = f"{op.op_type} is off by at most {error:.1e} of its largest value on [{low:g}, {high:g}]"
        if not error <= self.most_error:
            return Refusal(f"{words} ({dtype}); the limit is {self.most_error:g}", op)
        return m.bind(within={m.x: (low, high)}, words=f"{words}, measured in {dtype}")

    def range_of(self, m: Match) -> tuple[float, float]:
        """What is known of the operand, or what is taken of it."""
        (low, high), (least, most) = interval(m.x), _domain(m.root)
        return (
            low if math.isfinite(low) else max(-self.limit, least),
            high if math.isfinite(high) else min(self.limit, most),
        )

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the formula, and note its error."""
        mb.note(f"{self.name}: {m.words}")
        return formulas.written(m.root.op_type, mb, m.x)


def _domain(op: an.Operation) -> tuple[float, float]:
    """Return the least and the largest number that a formula takes."""
    return formulas.DOMAINS.get(op.op_type, (-math.inf, math.inf))


@an.example((2, 3))
def example(x: Var) -> Var:
    """Build a hyperbolic cosine."""
    return mb.cosh(x=x, name="y")
