"""A batch norm after a convolution goes into the weights of the convolution.

Before::

    main(%x: 1x3x8x8) {
      %c: 1x16x6x6 = conv(x=%x, weight=const<16x3x3x3>)
      %y: 1x16x6x6 = batch_norm(x=%c, mean=const<16>, variance=const<16>, gamma=const<16>, epsilon=1e-05)
      return %y
    }

After::

    main(%x: 1x3x8x8) {
      %y: 1x16x6x6 = conv(x=%x, weight=const<16x3x3x3>, bias=const<16>)
      return %y
    }

Each output channel of the weight is multiplied by gamma / sqrt(variance + epsilon), computed in fp64; the bias
takes up the rest.

With `compressed="reencode"` in `apply`, a compressed weight is decoded and encoded again.

Refuses when a parameter is compressed or dynamic, when a weight is dynamic, or compressed without that option,
when a scale is infinite or NaN, and when the weights are fp16, which would be rounded once more
(`allow_rounding=True` accepts that; compare the whole models).

Why it helps: there is one op less, which reads and writes the tensor; batch_norm itself is legal on the ANE
(measured through Core ML, M4, macOS 27), and what this gains was not measured.

Grade: checked: folded weights are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, OpPattern, Ops, Refusal, Rewrite, Var, mb, var
from anesurgery.mil import is_compressed

EPSILON = 1e-5
"""The epsilon of a batch norm that names none."""


@dataclass(frozen=True)
class FoldBatchNorm(Rewrite):
    """`batch_norm(conv(x))` becomes a conv with other weights."""

    name = "fold_batch_norm"
    tolerance = an.REASSOCIATED
    tolerates_nonfinite = False
    """NaN and infinities may spread otherwise in a convolution with other weights."""
    allow_rounding: bool = False
    """May fp16 weights be rounded once more?"""

    def pattern(self, op: Ops) -> OpPattern:
        """Look for a batch norm that alone reads a convolution."""
        return op.batch_norm(x=op.conv(x=var("x"), weight=var("weight"), as_="conv"))

    def check(self, m: Match) -> Match | Refusal:
        """Match stored parameters whose products the type of the weight holds."""
        op = m.root
        parameters = {n: op.inputs.get(n) for n in ("mean", "variance", "gamma", "beta")}
        read = {"weight": m.weight, "bias": m.conv.inputs.get("bias"), **parameters}
        for name, value in read.items():
            if value is not None and not (
                an.is_stored(value) if name == "weight" else an.producer(value, "const")
            ):
                made_by = "an input" if value.op is None else value.op.op_type
                return Refusal(f"{name} is made by {made_by}", op)
        if an.np_dtype(m.weight) == np.float16 and not self.allow_rounding and not is_compressed(m.weight):
            return Refusal(f"%{m.weight.name} is fp16; its products would be rounded again", op)
        spread = _wide(op.variance) + (an.number(op.inputs.get("epsilon")) or EPSILON)
        gamma = np.ones_like(spread) if op.inputs.get("gamma") is None else _wide(op.gamma)
        with np.errstate(all="ignore"):
            scale = gamma / np.sqrt(spread)
        if not np.isfinite(scale).all():
            return Refusal(f"the scale of a channel is {scale[~np.isfinite(scale)][0]}", op)
        return m.bind(scale=scale)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the convolution with scaled weights and another bias."""
        op, dtype = m.root, an.np_dtype(m.weight)
        old = m.conv.inputs.get("bias")
        beta = 0.0 if op.inputs.get("beta") is None else _wide(op.beta)
        bias = ((0.0 if old is None else _wide(old)) - _wide(op.mean)) * m.scale + beta
        across = m.scale.reshape(-1, *[1] * (m.weight.rank - 1))
        key, name = ("scaled", m.weight, m.scale.tobytes()), f"{m.weight.name}_scaled"
        weight = mb.stored_like(m.weight, lambda: an.decoded(m.weight).astype(np.float64) * across, key, name)
        inputs = an.op_inputs(m.conv, "weight", "bias")
        return mb.conv(**inputs, weight=weight, bias=bias.astype(dtype))


def _wide(var: Var) -> an.Array:
    return np.asarray(an.constant(var), np.float64)


@an.example((1, 3, 8, 8))
def example(x: Var) -> Var:
    """A convolution of 16 channels and its batch norm."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((16, 3, 3, 3)).astype(np.float32)
    mean, variance, gamma = (np.arange(1, 17, dtype=np.float32) / n for n in (2, 3, 4))
    c = mb.conv(x=x, weight=weight, name="c")
    return mb.batch_norm(x=c, mean=mean, variance=variance, gamma=gamma, name="y")
