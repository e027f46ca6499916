"""Replace a sum divided by a sum by a mean divided by a mean.

Before::

    main(%x: 1x512x8xfp16, %mask: 1x512x1xfp16) {
      %kept: 1x512x8xfp16 = mul(x=%x, y=%mask)
      %total: 1x8xfp16 = reduce_sum(x=%kept, axes=[1])
      %count: 1x1xfp16 = reduce_sum(x=%mask, axes=[1])
      %y: 1x8xfp16 = real_div(x=%total, y=%count)
      return %y
    }

After::

    main(%x: 1x512x8xfp16, %mask: 1x512x1xfp16) {
      %kept: 1x512x8xfp16 = mul(x=%x, y=%mask)
      %y_mean_quotient_reduce_mean: 1x1xfp16 = reduce_mean(x=%mask, axes=[1])
      %y_mean_quotient_reduce_mean_1: 1x8xfp16 = reduce_mean(x=%kept, axes=[1])
      %y: 1x8xfp16 = real_div(x=%y_mean_quotient_reduce_mean_1, y=%y_mean_quotient_reduce_mean)
      return %y
    }

`x / sum(|x|)` becomes `x / mean(|x|)`, times one divided by the count; sums over different counts are scaled
accordingly. A guard is divided by the count too, but is at least 6e-8, the smallest fp16 number. That changes
the result only where the mean of the summed values is not much larger than that.

Refuses when no sum may overflow in fp16, when more than `most` values are added (if only a few of them are not
0, their mean may be too small for fp16), and when a negative number is added to the divisor.

Why it helps: in fp16 a sum overflows above 65504, and the quotient is then 0, infinite or NaN, though the
quotient of the means is an ordinary number (computed by the interpreter). What the rewrite costs in time was
not measured; for sums over the same count it adds no op.

Grade: proved.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Operation, Refusal, Rewrite, Var, mb
from anesurgery.numeric import means
from anesurgery.regions.small_builds import again
from anesurgery.semantics import rows


@dataclass(frozen=True)
class MeanQuotient(Rewrite):
    """`sum(a) / sum(b)` becomes `mean(a) / mean(b)`."""

    most: int = 1024
    """Values that are added at most: a mean of more, of which few are not 0, may be too small for fp16."""
    name = "mean_quotient"
    kinds = frozenset({"real_div"})
    static = True
    tolerance = an.Tolerance(1e-3)
    tolerates_nonfinite = False

    def check(self, m: Match) -> Match | Refusal:
        """Match a quotient of sums of which one may overflow."""
        quotient = means.quotient_of_sums(m.root)
        if quotient is None:
            return an.NO_MATCH
        if not quotient.overflows:
            return Refusal(f"the sums are at most {quotient.largest:g}, and do not overflow", m.root, idle=True)
        count = rows.reduced_size(quotient.below)
        added = max(rows.reduced_size(total) for total in quotient.sums)
        if added > self.most:
            words = f"{added:g} values are added: if few of them are not 0, the mean may be too small for fp16"
            return Refusal(f"{words}; most={added:g} allows it", m.root)
        guards = [_guard(op) for op in quotient.between]
        if (least := min(guards, default=0.0)) < 0:
            return Refusal(f"the divisor has the guard {least:g}, which is negative", m.root)
        ops = (m.root, *quotient.between, *quotient.sums)
        is_rounded = any(0 < guard / count < an.fp16.NORMAL for guard in guards)
        # a guard that fp16 rounds would differ in the comparison, so values are drawn beside which it vanishes
        within = {quotient.below.x: (0.5, 1.0)} if is_rounded else {}
        return m.bind(ops=ops, quotient=quotient, count=count, within=within)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the quotient of the means, times the ratio of the counts."""
        quotient = m.quotient
        divisor = _mean(mb, quotient.below)
        for op in quotient.between:
            divisor = _with_guard_or_tile(mb, op, divisor, m.count)
        dividend, factor = m.root.x, 1 / m.count
        if quotient.above is not None:
            dividend, factor = _mean(mb, quotient.above), rows.reduced_size(quotient.above) / m.count
        result = mb.real_div(x=dividend, y=divisor)
        return result if factor == 1 else mb.mul(x=result, y=factor)


def _mean(mb: Builder, total: Operation) -> Var:
    return mb.reduce_mean(x=total.x, axes=an.ints(total, "axes"), keep_dims=an.flag(total, "keep_dims"))


def _guard(op: Operation) -> float:
    """Return the number that an op adds, or the lower limit that it sets; 0 of a tile."""
    sides = {"clip": ["alpha"], "tile": []}.get(op.op_type, ["x", "y"])
    return next((n for side in sides if (n := an.number(op.inputs[side])) is not None), 0.0)


def _with_guard_or_tile(mb: Builder, op: Operation, value: Var, count: float) -> Var:
    """Repeat a tile, or a guard divided by the count, on another value."""
    if op.op_type == "tile":
        return mb.tile(x=value, reps=an.ints(op, "reps"))
    guard = _guard(op) / count
    if op.op_type == "clip" or guard < an.fp16.LEAST:  # an added number this small would vanish
        return mb.maximum(x=value, y=max(guard, an.fp16.LEAST))
    return again(mb, op, x=value, y=guard)


@an.example((1, 512, 8), (1, 512, 1), dtype="fp16")
def example(x: Var, mask: Var) -> Var:
    """The mean of the tokens that a mask keeps."""
    total = mb.reduce_sum(x=mb.mul(x=x, y=mask, name="kept"), axes=[1], keep_dims=False, name="total")
    count = mb.reduce_sum(x=mask, axes=[1], keep_dims=False, name="count")
    return mb.real_div(x=total, y=count, name="y")
