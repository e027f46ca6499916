"""Attention with masks written by hand in MIL, one for each way to say "do not look ahead"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.mil import Array, Program, Var, ct, mb, np_dtype, types, walk_ops
from anesurgery.passes.causal_mask_tensor import CausalMaskTensor
from anesurgery.testing import apply_pass, reasons

Q = 5


KEEP = np.tril(np.ones((1, 1, Q, Q), bool))


Apply = Callable[..., Any]
"""From scores (and further inputs) to masked scores."""


def attention(
    apply: Apply,
    *,
    layers: int = 2,
    dtype: Any = types.fp32,
    lead: tuple[int, ...] = (1, 2),
    size: tuple[int, int] = (Q, Q),
    **more: Any,
) -> Program:
    """Layers of attention, each with a mask of its own; `more` are further inputs as {name: (shape, dtype)}."""
    shapes = [(*lead, size[0], 4), (*lead, size[1], 4)]
    specs = [mb.TensorSpec(s, dtype) for s in shapes] + [mb.TensorSpec(*s) for s in more.values()]

    def body(*inputs: Var) -> Any:
        q, k, *rest = inputs
        for _ in range(layers):
            scores = mb.matmul(x=q, y=k, transpose_y=True)
            weights = mb.softmax(x=apply(scores, *rest), axis=-1)
            q = mb.matmul(x=weights, y=k)
        return mb.identity(x=q, name="y"), mb.identity(x=weights, name="weights")

    names = ["q", "k", *more]
    source = f"lambda {', '.join(names)}: body({', '.join(names)})"
    made: Program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(
        eval(source, {"body": body})  # the builder wants one parameter for each input
    )
    return made


def number(like: Var, value: float) -> Any:
    return np_dtype(like).type(value)


def floats(like: Var, keep: Array, shut: float) -> Array:
    return np.where(keep, 0, shut).astype(np_dtype(like))


def word(like: Var) -> str:
    return "fp16" if np_dtype(like) == np.float16 else "fp32"


def below() -> tuple[Var, Var]:
    rows = mb.expand_dims(x=mb.range_1d(start=0, end=Q, step=1), axes=[1])
    return rows, mb.expand_dims(x=mb.range_1d(start=0, end=Q, step=1), axes=[0])


def by_ranges(s: Var) -> Var:
    rows, columns = below()
    seen = mb.expand_dims(x=mb.less_equal(x=columns, y=rows), axes=[0, 1])
    filled = mb.fill(shape=[1, 2, Q, Q], value=number(s, -65504))
    return mb.select(cond=mb.tile(x=seen, reps=[1, 2, 1, 1]), a=s, b=filled)


def by_band(s: Var) -> Var:
    ones = mb.fill(shape=mb.shape(x=s), value=number(s, 1))
    band = mb.band_part(x=ones, lower=-1, upper=0)
    return mb.add(x=s, y=mb.mul(x=mb.sub(x=number(s, 1), y=band), y=number(s, -3e4)))


def by_products(s: Var) -> Var:
    m = KEEP.astype(np_dtype(s))
    return mb.sub(x=mb.mul(x=s, y=m), y=(1 - m) * number(s, 1e4))


def in_fp32(s: Var) -> Var:
    wide = mb.add(x=mb.cast(x=s, dtype="fp32"), y=np.where(KEEP, 0, -3e38).astype(np.float32))
    return mb.cast(x=wide, dtype=word(s))


SPELLINGS: dict[str, Apply] = {
    "select": lambda s: mb.select(cond=KEEP, a=s, b=number(s, -np.inf)),
    "select the fill": lambda s: mb.select(cond=~KEEP, a=number(s, -1e4), b=s),
    "boolean made of a number": lambda s: mb.select(
        cond=mb.cast(x=KEEP.astype(np.float32), dtype="bool"), a=s, b=number(s, -1e4)
    ),
    "additive": lambda s: mb.add(x=s, y=floats(s, KEEP, -np.inf)),
    "additive, a copy for each head": lambda s: mb.add(
        x=floats(s, np.broadcast_to(KEEP, (1, 2, Q, Q)), -65504), y=s
    ),
    "additive, of lower rank": lambda s: mb.add(x=s, y=floats(s, KEEP[0, 0], -3e4)),
    "subtracted": lambda s: mb.sub(x=s, y=floats(s, KEEP, 3e4)),
    "ranges": by_ranges,
    "band_part": by_band,
    "products": by_products,
    "fp32": in_fp32,
    "a floor": lambda s: mb.maximum(x=mb.add(x=s, y=floats(s, KEEP, -65504)), y=number(s, -6e4)),
    "scaled afterwards": lambda s: mb.real_div(
        x=mb.select(cond=KEEP, a=s, b=number(s, -65504)), y=number(s, 8)
    ),
    "after a constant bias": lambda s: mb.select(
        cond=KEEP, a=mb.add(x=s, y=floats(s, KEEP, -0.5)), b=number(s, -1e4)
    ),
    "before a constant bias": lambda s: mb.add(x=mb.add(x=s, y=floats(s, KEEP, -1e4)), y=floats(s, KEEP, -0.5)),
}


def masks_of(program: Program) -> list[Var]:
    """Constants that shut something out."""
    values = [op.outputs[0] for op in walk_ops(program) if op.op_type == "const"]
    numbers = [v for v in values if isinstance(v.val, np.ndarray) and v.val.dtype.kind == "f"]
    return [v for v in numbers if v.val.size > 1 and v.val.min() <= -5000]


def once(program: Program, step: CausalMaskTensor | None = None, edits: int = 2) -> Program:
    """The program afterwards; every site bit-exact, nothing left to do."""
    step = step or CausalMaskTensor()
    after, session = apply_pass(step, program)
    assert len(session.changes) == edits, reasons(session)
    assert all(c.proof is not None and c.proof.max_abs == 0 for c in session.changes)
    second = apply_pass(step, after)[1]
    assert not second.changes
    assert not second.refusals
    return after


def one(apply: Apply, **more: Any) -> Program:
    return attention(apply, layers=1, **more)


BIASED = np.where(KEEP, -np.arange(Q, dtype=np.float32), -1e4)


PADDED: dict[str, Apply] = {
    "and": lambda s, p: mb.select(
        cond=mb.logical_and(x=KEEP, y=mb.not_equal(x=p, y=0)), a=s, b=number(s, -np.inf)
    ),
    "or": lambda s, p: mb.select(cond=mb.logical_or(x=mb.equal(x=p, y=0), y=~KEEP), a=number(s, -3e4), b=s),
    "not and": lambda s, p: mb.select(
        cond=mb.logical_not(x=mb.logical_and(x=mb.cast(x=p, dtype="bool"), y=KEEP)),
        a=number(s, -1e9 if np_dtype(s) == np.float32 else -6e4),
        b=s,
    ),
    "product": lambda s, p: mb.add(
        x=s,
        y=mb.mul(
            x=number(s, -3e4),
            y=mb.sub(
                x=number(s, 1), y=mb.cast(x=mb.logical_and(x=KEEP, y=mb.cast(x=p, dtype="bool")), dtype=word(s))
            ),
        ),
    ),
    "one after the other": lambda s, p: mb.select(
        cond=mb.cast(x=p, dtype="bool"), a=mb.add(x=s, y=floats(s, KEEP, -1e4)), b=number(s, -1e4)
    ),
    "two additive terms": lambda s, p: mb.add(
        x=mb.select(cond=KEEP, a=s, b=number(s, -1e4)),
        y=mb.mul(x=mb.sub(x=number(s, 1), y=mb.cast(x=p, dtype=word(s))), y=number(s, -1e4)),
    ),
    "a sum": lambda s, p: mb.add(
        x=s,
        y=mb.add(
            x=floats(s, KEEP, -65504),
            y=mb.mul(x=mb.sub(x=number(s, 1), y=mb.cast(x=p, dtype=word(s))), y=number(s, -1e4)),
        ),
    ),
}
