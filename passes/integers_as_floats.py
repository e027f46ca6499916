"""Masks and lengths that are compared or counted as integers are computed in fp16, where that is exact.

Before::

    main(%m: 1x4xint32) {
      %seen: 1x1x4xint32 = expand_dims(x=%m, axes=[1])
      %y: 1x1x4xbool = equal(x=%seen, y=0)
      %z: 1x1x4xfp16 = cast(x=%seen, dtype="fp16")
      return %y, %z
    }

After::

    main(%m: 1x4xint32) {
      %y_integers_as_floats_cast: 1x4xfp16 = cast(x=%m, dtype="fp16")
      %y_integers_as_floats_expand_dims: 1x1x4xfp16 = expand_dims(x=%y_integers_as_floats_cast, axes=[1])
      %y: 1x1x4xbool = equal(x=%y_integers_as_floats_expand_dims, y=0)
      %z: 1x1x4xfp16 = expand_dims(x=%y_integers_as_floats_cast, axes=[1])
      return %y, %z
    }

An integer leaves the integers at a comparison or at a cast to floats. What only moves it, or adds, subtracts
and multiplies it, is done after one cast of where it comes from. An integer up to 2047 is compared rightly with
any other, since rounding keeps the order; sums need both sides and the result within 2048.

Refuses when a shape is symbolic, when neither side of a comparison is known to be within 2047, or when a sum
may leave 2048, each with the range found; `assume={"mask": (0, 1)}` promises the range of an input.

Why it helps: every op that reads or makes int32 stays on the CPU, and so do casts between int32 and fp16
(measured through Core ML on M4, macOS 27): one cast at the entry takes the place of a chain. Proved: fp16 holds
every integer up to 2048, and rounding is monotone.

Grade: proved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.facts.intervals import interval
from anesurgery.mil import Array, Operation, Program, Var, constant, mb, np_dtype, static_shape, types
from anesurgery.ops import COMPARISONS, names
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.rewriting.session import Session

Range = tuple[float, float]

MOVES = names("reshape expand_dims squeeze transpose slice_by_index slice_by_size tile reverse identity")
"""Ops that hand numbers on, whatever their type."""
SUMS = names("add sub mul")
EXACT = 2048
"""Every integer up to here is a number of fp16."""


@dataclass(frozen=True)
class IntegersAsFloats(Rewrite):
    """Comparisons and casts of int32 values read floats instead."""

    name: ClassVar[str] = "integers_as_floats"
    shares_inner: ClassVar[bool] = True
    assume: Mapping[str, Range] | None = None
    """Input -> the least and the largest value that the caller will give; those of the surgery by default."""

    def run(self, program: Program, session: Session) -> None:
        """Apply it with what the surgery assumes."""
        known = replace(self, assume={**session.assume, **(self.assume or {})})
        super(IntegersAsFloats, known).run(program, session)

    def pattern(self, op: Ops) -> OpPattern:
        """Where integers end: comparisons, and casts to floats."""
        return op.any("cast", *sorted(COMPARISONS))()

    def check(self, m: Match) -> Match | Refusal | None:
        """Integers whose floats tell the same."""
        op = m.root
        if op.op_type == "cast":
            made = np_dtype(op.outputs[0])
            if np_dtype(op.x) != np.int32 or made.kind != "f" or not _computed(op.x):
                return None
            most = EXACT if made == np.float16 else 1 << 24
            reason = _symbolic(op.x) or ("" if _moved(op.x) else self.leaves(op.x, most))
            return Refusal(reason, op) if reason else m.bind(dtype=made)
        if np_dtype(op.x) != np.int32 or (_stored(op.x) and _stored(op.y)):
            return None
        sides = {v: max(map(abs, self.known(v))) for v in (op.x, op.y)}
        if min(sides.values()) >= EXACT:
            words = " and ".join(f"%{v.name} {_reach(most)}" for v, most in sides.items())
            return Refusal(f"{words}; one of them must stay within {EXACT - 1}", op)
        reasons = [_symbolic(v) for v in sides] + [self.leaves(v, EXACT) for v in sides if not _moved(v)]
        reason = next((r for r in reasons if r), "")
        return Refusal(reason, op) if reason else m.bind(dtype=np.dtype(np.float16))

    def known(self, var: Var) -> Range:
        """The range of an integer: as assumed, or by what makes it."""
        source = _source(var)
        if source.op is None:
            return (self.assume or {}).get(source.name, (-np.inf, np.inf))
        if source.op.op_type in SUMS:
            (a, b), (c, d) = self.known(source.op.x), self.known(source.op.y)
            ends = {"add": [a + c, b + d], "sub": [a - d, b - c]}.get(source.op.op_type)
            with np.errstate(invalid="ignore"):
                products = [np.nan_to_num(i * j, nan=np.inf) for i in (a, b) for j in (c, d)]
            return (min(ends or products), max(ends or products))
        return interval(source)

    def leaves(self, var: Var, most: int) -> str:
        """Why the floats of an integer may be others; "" when they are the same."""
        source = _source(var)
        reach = max(map(abs, self.known(source)))
        if not reach <= most:
            return f"%{source.name} {_reach(reach)}, above {most}"
        if source.op is None or source.op.op_type not in SUMS:
            return ""
        return self.leaves(source.op.x, most) or self.leaves(source.op.y, most)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> Array | None:
        """Integers of the range that is assumed; others around the limit too."""
        if np_dtype(var) != np.int32:
            return None
        low, high = (self.assume or {}).get(var.name, (-3 * EXACT, 3 * EXACT))
        return rng.integers(int(low), int(high) + 1, static_shape(var) or ()).astype(np.int32)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The same op on floats."""
        op, dtype = m.root, m.dtype
        if op.op_type == "cast":
            return _as_float(mb, op.x, dtype)
        made: Var = getattr(mb, op.op_type)(x=_as_float(mb, op.x, dtype), y=_as_float(mb, op.y, dtype))
        return made


def _reach(most: float) -> str:
    return "has an unknown range" if most == np.inf else f"reaches {most:g}"


def _symbolic(var: Var) -> str:
    """A symbolic shape among what is done to an integer, which another op would name otherwise."""
    if static_shape(var) is None:
        return f"%{var.name} has the symbolic shape {tuple(var.shape)}"
    if var.op is None or var.op.op_type not in MOVES | SUMS:
        return ""
    return next(
        (why for n in ("x", "y") if (v := var.op.inputs.get(n)) is not None and (why := _symbolic(v))), ""
    )


def _stored(var: Var) -> bool:
    return var.op is not None and var.op.op_type == "const"


def _computed(var: Var) -> bool:
    """Is there integer work before a cast?"""
    return var.op is not None and var.op.op_type in MOVES | SUMS


def _source(var: Var) -> Var:
    """Where an integer comes from, before it was moved."""
    while var.op is not None and var.op.op_type in MOVES:
        var = var.op.x
    return var


def _moved(var: Var) -> bool:
    """Was it only moved since it became an integer at run time?"""
    op = _source(var).op
    return op is None or op.op_type not in SUMS


def _as_float(mb: Builder, var: Var, dtype: np.dtype[Any]) -> Var:
    """An integer as a float: its computation after a cast of its sources, each cast once."""
    op: Operation | None = var.op
    if op is not None and op.op_type == "const":
        return mb.const(val=np.asarray(constant(var)).astype(dtype))
    if op is not None and op.op_type in MOVES:
        inputs = {k: v for k, v in op.inputs.items() if v is not None}
        return getattr(mb, op.op_type)(**{**inputs, "x": _as_float(mb, op.x, dtype)})
    if op is not None and op.op_type in SUMS:
        x, y = (_as_float(mb, v, dtype) for v in (op.x, op.y))
        return getattr(mb, op.op_type)(x=x, y=y)
    name = {np.dtype(np.float16): "fp16", np.dtype(np.float32): "fp32"}[dtype]
    return mb.shared_value((var, "as", name), [var], lambda maker: maker.cast(x=var, dtype=name))


def example() -> Program:
    """A mask that is turned round and seen by every head."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.int32)])
    def program(m: Var) -> tuple[Var, Var]:
        seen = mb.expand_dims(x=m, axes=[1], name="seen")
        return mb.equal(x=seen, y=np.int32(0), name="y"), mb.cast(x=seen, dtype="fp16", name="z")

    return program
