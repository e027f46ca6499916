"""Values that leave the range of fp16 are clipped to it: this changes numbers, on request only.

Before::

    main(%x: 1x4xfp16) {
      %more: 1x4xfp16 = mul(x=%x, y=1000)
      %large: 1x4xfp16 = mul(x=%more, y=1000)
      %y: 1x4xfp16 = tanh(x=%large)
      return %y
    }

After::

    main(%x: 1x4xfp16) {
      %more: 1x4xfp16 = mul(x=%x, y=1000)
      %large: 1x4xfp16 = mul(x=%more, y=1000)
      %large_clamped: 1x4xfp16 = clip(x=%large, alpha=-60000, beta=60000)
      %y: 1x4xfp16 = tanh(x=%large_clamped)
      return %y
    }

The model runs on `inputs` in fp32, sampled ones by default. What is larger than `limit` there is clipped to it,
so that an infinity goes no further: a difference of two is NaN. Where no value reaches the limit, nothing
changes; where one does, results differ from those in fp32, and the notes say at which ops and by how much they
were over. Up to the limit values stay as they are, which each edit is checked for. `scale_ranges` keeps the
numbers instead, where it can.

Refuses when no value is beyond the limit. Infinities that masks hold are for `causal_mask_tensor`.

Why it helps: fp16 ends at 65504, and the sums of products of the ANE at 32768, beyond which they are infinite
(measured: M1, M2, M2 Pro, M4, M5, M6); one such number makes NaN of all that is normalised with it.

Grade: checked: values beyond the limit change on purpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Pass, Program, Refusal, Session, Var, mb
from anesurgery.checking.ranges import ranges


@dataclass(frozen=True)
class ClampValues(Pass):
    """Large values are clipped."""

    name = "clamp_values"
    follows = ("scale_ranges", "compute_fp16")
    precedes = ("add_cache",)
    tolerates_nonfinite = False
    """An infinite value becomes the limit."""
    limit: float = an.option(60000.0, above=0.0, most=an.bounds.LARGEST)
    """The largest magnitude that is left."""
    inputs: Any = None
    """Calibration: inputs by name, or several such sets; one sampled set by default."""

    @property
    def promise(self) -> an.Promise:
        """The values are the same up to the limit."""
        return an.Promise(self.tolerance, self.tolerates_nonfinite, self.limit)

    def requires(self, program: Program) -> Refusal | None:
        """One function, whose values can be observed."""
        return an.against_several(program, "clamp before they are made")

    def run(self, program: Program, session: Session) -> None:
        """Observe, clip what is beyond the limit first, and observe again what that leaves of the rest."""
        (function,) = program.functions.values()
        for _ in range(len(function.operations)):
            largest = {row.name: row.largest for row in ranges(program, self.inputs).rows}
            if not self.clamped(session, function, largest):
                break
        if not session.changes:
            session.refuse(self.name, f"no finite value is beyond {self.limit:g} on the calibration data")

    def clamped(self, session: Session, function: an.Function, largest: dict[str, float]) -> bool:
        """Clip the values beyond the limit that depend on no other one; were there any?"""
        changed: set[Var] = set()
        with an.GraphEdits(self, session, function) as edits:
            for op in list(function.operations):
                over = max((largest.get(v.name, 0.0) for v in op.outputs), default=0.0)
                if any(v in changed for _, v in an.operands(op)):
                    changed |= set(op.outputs)
                elif self.limit < over < math.inf and can_be_clipped(op):
                    changed |= {op.outputs[0], self.clamp(edits, op, over)}
        return bool(changed)

    def clamp(self, edits: an.GraphEdits, op: an.Operation, over: float) -> Var:
        """One value."""
        value, name = op.outputs[0], op.name
        ends = {"alpha": -self.limit, "beta": self.limit}
        clipped = edits.after(value).clip(x=value, **ends, name=f"{value.name}_clamped")
        edits.compare(name, (value, clipped))
        edits.replace(value, clipped)
        edits.session.notes.append(f"{self.name}: {name} reached {over:.3g}, and is clipped at {self.limit:g}")
        edits.record(name, f"{over:.3g}")
        return clipped


def can_be_clipped(op: an.Operation) -> bool:
    """Does an op make one float value that is read, and not as clipped already?"""
    value = op.outputs[0]
    if op.op_type in ("clip", "const") or len(op.outputs) > 1 or an.np_dtype(value).kind != "f":
        return False
    return an.is_output(value) or any(r.op_type != "clip" for r in an.consumers(value))


@an.example((1, 4), dtype="fp16", opset="iOS18")
def example(x: Var) -> Var:
    """A product that is too large, before a function whose result is not."""
    more = mb.mul(x=x, y=np.float16(1000), name="more")
    return mb.tanh(x=mb.mul(x=more, y=np.float16(1000), name="large"), name="y")
