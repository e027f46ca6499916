"""Compute in fp32 what fp16 cannot hold between values that it can.

Before::

    main(%a: 2x8xfp16, %b: 2x8xfp16, %c: 2x8xfp16) {
      %ab: 2x8xfp16 = mul(x=%a, y=%b)
      %y: 2x8xfp16 = mul(x=%ab, y=%c)
      return %y
    }

After::

    main(%a: 2x8xfp16, %b: 2x8xfp16, %c: 2x8xfp16) {
      %y_widen_to_fp32_cast: 2x8 = cast(x=%a, dtype="fp32")
      %y_widen_to_fp32_cast_1: 2x8 = cast(x=%b, dtype="fp32")
      %y_widen_to_fp32_mul: 2x8 = mul(x=%y_widen_to_fp32_cast, y=%y_widen_to_fp32_cast_1)
      %y_widen_to_fp32_cast_2: 2x8 = cast(x=%c, dtype="fp32")
      %y_widen_to_fp32_mul_1: 2x8 = mul(x=%y_widen_to_fp32_mul, y=%y_widen_to_fp32_cast_2)
      %y: 2x8xfp16 = cast(x=%y_widen_to_fp32_mul_1, dtype="fp16")
      return %y
    }

The pass finds regions whose inputs and results fit fp16, and in which a value between exceeds 65504, or is
smaller than fp16 holds, as far as intervals, constants and weights tell:

* products of three factors;
* quotients of powers and of exponentials;
* roots of means of powers;
* the sums of linear attention and of hand-written softmaxes;
* logarithms of products of probabilities or of `1 + 10,000 x`, also if coremltools left the product in fp32.

It also finds regions in which fp16 leaves no correct digit:

* small differences: `|x|^2 + |y|^2 - 2 x y`, `exp(x) - 1`, `log(1 - p)`, `1 - p / (p + r)`, differences of
  integers and of positions in a running sum, and `mean(a b) - mean(a) mean(b)` over windows;
* fractions of large numbers;
* points at which large images are sampled;
* angles from their cosine, and sines of large angles with the running counts that they are computed from;
* other counts beyond 2048.

A region begins with casts of its inputs to fp32; an input that was cast to fp16 is taken from before that cast.
It ends where the result has the size of an ordinary number.

With `ops=("scores", "logits")` only the named ops compute in fp32, each as a region of its own. Nothing is
rounded between two that follow each other: the second reads what the first computed before its cast to fp16.
`certify` names the ops whose rounding changes a choice, such as the best k of a detector.

Refuses when a part of the region is in another block, and when a named op has blocks; does not apply if
intervals show that all values fit.

Why it helps: fp16 gives infinities, zeros or no correct digit there (computed). fp32 ops run on the CPU or GPU,
on no Neural Engine (documented by Apple; measured through Core ML on M1, macOS 14.6, and M4, macOS 27), so the
right numbers cost a change of the unit. Other passes of `safe_numbers`, which stay on the engine, run first.
The time was not measured.

Grade: proved: with integers above 2048 or fp32 numbers from before a cast, only the whole model is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any, ClassVar

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Operation, Program, Refusal, Rewrite, Var, mb
from anesurgery.facts import overflow_regions
from anesurgery.mil import op_types, reads
from anesurgery.regions import small_builds
from anesurgery.rewriting.passes import check_named
from anesurgery.semantics.intervals import magnitude


@dataclass(frozen=True)
class WidenToFp32(Rewrite):
    """Ops between values of fp16 compute in fp32 where fp16 does not hold what they make."""

    name: ClassVar[str] = "widen_to_fp32"
    kinds = frozenset(overflow_regions.ENDS)
    tolerance: ClassVar[an.Tolerance] = an.Tolerance(1e-3)
    tolerates_nonfinite: ClassVar[bool] = False
    ops: tuple[str, ...] = ()
    """Names of ops, or of their results, to compute in fp32; by default, where fp16 cannot hold values."""

    def run(self, program: an.Program, session: an.Session) -> None:
        """Check that there are ops of the names, then widen them."""
        if self.ops:
            check_named(self.ops, program)
        super().run(program, session)

    def pattern(self, op: an.Ops) -> an.OpPattern:
        """Find an op of a type that can end a region; of any type if ops are named."""
        types = op_types() if self.ops else self.kinds
        return op.any(*types)()

    def check(self, m: Match) -> Match | Refusal:
        """Match an op whose operand does not fit and whose result does, or a named op of fp16.

        Binds `region`, the `WideRegion` of ops that compute in fp32.
        """
        if self.ops:
            return _named(m, self.ops)
        region = overflow_regions.wide_region(m.root)
        if region is None or overflow_regions.is_inside_later_region(m.root):
            return an.NO_MATCH
        outside = [op for op in region.ops if op.enclosing_block is not m.root.enclosing_block]
        if outside:
            return Refusal(f"{outside[0].name} is in another block", m.root)
        return m.bind(ops=region.ops, region=region)

    def uncompared(self, m: Match) -> Refusal | None:
        """Return why an edit is not compared: the old ops read rounded numbers, and the new ones do not."""
        ops = m.region.ops
        entries = {v for op in ops for v in reads(op)} - {v for op in ops for v in op.outputs}
        if any(map(_is_rounded_integer, entries)):
            return Refusal("integers above 2048, which fp16 rounds, are kept", m.root)
        if any(_before_rounding(v) is not None for v in entries):
            return Refusal("numbers of fp32, which fp16 rounds, are kept", m.root)
        return None

    def rewrite(self, mb: Builder, m: Match) -> dict[Var, Var]:
        """Build the ops of the region again, on operands that are cast to fp32."""
        wide: dict[Var, Var] = {}  # value -> the same in fp32
        for op in _in_order(m.region.ops):
            inputs = {name: _operand(mb, op, name, value, wide) for name, value in an.op_inputs(op).items()}
            if op.op_type == "cast":
                dtype = an.dtype_name(op.outputs[0])
                inputs["dtype"] = "fp32" if dtype == "fp16" else dtype
            built = getattr(mb, op.op_type)(**inputs)
            results = built if isinstance(built, (list, tuple)) else [built]
            wide |= dict(zip(op.outputs, results, strict=True))
        if self.ops:  # a named op may have several results; each keeps its dtype
            return {v: small_builds.as_dtype(mb, wide[v], an.np_dtype(v)) for v in m.root.outputs}
        old = m.root.outputs[0]
        if an.np_dtype(old).kind != "f":  # integers and conditions are not rounded
            return {old: wide[old]}
        return small_builds.for_readers(mb, old, wide[old])


def _named(m: Match, names: tuple[str, ...]) -> Match | Refusal:
    """Make a region of one op, if it is named."""
    op = m.root
    halves = any(an.np_dtype(v) == np.float16 for v in (*reads(op), *op.outputs))
    called = {op.name, *(v.name for v in op.outputs)}
    if op.op_type in ("const", "cast") or not halves or not called & {*names}:
        return an.NO_MATCH
    if op.blocks:
        return Refusal(f"{op.op_type} has blocks; name the ops in them", op)
    return m.bind(ops=(op,), region=overflow_regions.WideRegion((op,), op, "it is named"))


def _before_cast(value: Var, kinds: str) -> Var | None:
    """Return the value that was cast to this one if its dtype is of these kinds ("f", "iu"); else None."""
    cast = an.producer(value, "cast")
    return cast.x if cast is not None and an.np_dtype(cast.x).kind in kinds else None


def _is_rounded_integer(value: Var) -> bool:
    """Is a value an integer that was cast to fp16, which may not hold it?"""
    integer = _before_cast(value, "iu")
    return integer is not None and magnitude(integer) > an.fp16.LAST_INTEGER


def _before_rounding(value: Var) -> Var | None:
    """Return the fp32 value that was cast to this fp16 value; None if it was computed in fp16."""
    before = _before_cast(value, "f")
    return before if before is not None and an.np_dtype(before) == np.float32 else None


def _in_order(ops: tuple[Operation, ...]) -> list[Operation]:
    """Return ops in an order in which each stands behind those whose results it reads."""
    makers = {op: [v.op for v in reads(op) if v.op in ops] for op in reversed(ops)}
    return [*TopologicalSorter(makers).static_order()]


def _operand(mb: Builder, op: Operation, name: str, value: Any, wide: dict[Var, Var]) -> Any:
    """Return an operand in fp32: one of the new values, a constant, or a cast."""
    if isinstance(value, (list, tuple)):
        return [_operand(mb, op, name, v, wide) for v in value]
    if not isinstance(value, Var) or an.np_dtype(value) != np.float16:
        return value
    if value not in wide:
        wide[value] = _widened(mb, value)
    return wide[value]


def _widened(mb: Builder, value: Var) -> Var:
    """Return a value in fp32, as it was before a cast to fp16."""
    if an.producer(value, "const") is not None:
        number = np.asarray(an.constant(value), np.float32)
        return mb.shared(("fp32", value), lambda: number, f"{value.name}_fp32")
    wide, integer = _before_rounding(value), _before_cast(value, "iu")
    return wide if wide is not None else mb.cast(x=value if integer is None else integer, dtype="fp32")


def example() -> Program:
    """A product of three."""
    specs = [mb.TensorSpec((2, 8), dtype=an.types.fp16) for _ in range(3)]

    @mb.program(input_specs=specs)
    def program(a: Var, b: Var, c: Var) -> Var:
        return mb.mul(x=mb.mul(x=a, y=b, name="ab"), y=c, name="y")

    return program
