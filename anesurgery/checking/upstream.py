"""Try the ranges on which an edit rests: run the ops upstream, as stored, on numbers made to leave them.

The interval analysis says where a value lies. The ops that it looked at are run in fp16 and fp32 as the
program says, on numbers whose squares vanish or overflow, on rows with one number that is not 0, and on rows
that do not vary. A number outside of the range is an error of the analysis, and nothing may rest on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import torch

from anesurgery.checking.adversarial import Drawing
from anesurgery.checking.lengths import drawn_shape
from anesurgery.checking.numbers import Numbers, as_tensor
from anesurgery.errors import InterpretError
from anesurgery.facts.dependence import slice_back
from anesurgery.interpret import Evaluator
from anesurgery.mil import Array, Operation, Var, np_dtype, reads, types
from anesurgery.ops import CONTRACTIONS, CONTROL, LISTS, RANDOM, STATEFUL
from anesurgery.semantics.bounds import ANY
from anesurgery.semantics.intervals import STEPS, stored_interval
from anesurgery.semantics.reading import is_tensor

UNFOLLOWED = CONTROL | LISTS | RANDOM | STATEFUL
"""Ops that are not run again: what they make stands for itself."""
FORMS = ("any", "one of each row", "one of all", "alike")
"""Which numbers are not 0, and how they differ."""
MOST = 1 << 20
"""Elements of all values upstream up to which every magnitude and form is tried: 24 runs of such ops take less
than a second. Of more, numbers whose squares vanish are tried alone."""


def leaves_range(var: Var, seed: int) -> str:
    """A number that a value takes outside of its range, in words; empty where none was found."""
    low, high = stored_interval(var)
    ops, boundary = _upstream(var)
    if not ops or (low, high) == ANY:
        return ""
    run = Evaluator(ops, [var], "fp16")
    for numbers in _tried(boundary, ops, seed):
        try:
            (values,) = run(numbers)
        except InterpretError:
            continue  # places or lengths that do not go together
        held = values.double()[~torch.isnan(values)]
        beyond = held[(held < low) | (held > high)]
        if beyond.numel():
            return f"%{var.name} is {float(beyond[0]):.9g}, outside of {low:.9g} to {high:.9g}"
    return ""


def _upstream(var: Var) -> tuple[list[Operation], list[Var]]:
    """The nearest ops that compute a value, in order, and the values that they read."""
    near, level = dict[Operation, None](), [var]
    while level and len(near) < STEPS:
        makers = dict.fromkeys(v.op for v in level if v.op is not None and _is_followed(v.op))
        level = [v for op in makers if op not in near for v in reads(op)]
        near |= makers
    inside = {v for op in near for v in op.outputs}
    read = dict.fromkeys(v for op in near for v in reads(op) if v not in inside)
    ops = slice_back([var], set(read))
    return ops, [v for v in read if v.op is None or v.op.op_type != "const"]


def _is_followed(op: Operation) -> bool:
    if op.op_type == "const" or op.op_type in UNFOLLOWED or op.blocks:
        return False
    return op.op_type not in CONTRACTIONS or any(stored_interval(v) != ANY for v in op.outputs)


def _tried(boundary: Sequence[Var], ops: Sequence[Operation], seed: int) -> Iterator[Numbers]:
    """Numbers for all that is read from outside, round by round."""
    if not all(is_tensor(v) for v in boundary):
        return
    drawing, rng = Drawing(lambda var, rng: None), np.random.default_rng(seed)
    values = (v for op in ops for v in op.outputs if types.is_tensor(v.sym_type))
    few = sum(math.prod(drawn_shape(v)) for v in values) <= MOST
    for share, form in product(range(len(_magnitudes(np.dtype(np.float16)))) if few else (0,), FORMS):
        numbers: Numbers = {}
        for var in boundary:
            dtype = np_dtype(var)
            if dtype.kind != "f":
                numbers[var] = as_tensor(drawing.draw(var, "normal", rng))
                continue
            drawn = _of_form(form, drawn_shape(var), rng) * _magnitudes(dtype)[share]
            with np.errstate(over="ignore"):
                numbers[var] = as_tensor(drawing.bounded(var, drawn, dtype))
        yield numbers


def _magnitudes(dtype: np.dtype[np.floating]) -> tuple[float, ...]:
    """About which numbers: those whose squares vanish first, then to the largest."""
    info = np.finfo(dtype)
    least, normal, most = (float(v) for v in (info.smallest_subnormal, info.tiny, info.max))
    return math.sqrt(least), math.sqrt(normal), 1.0, 64.0, math.sqrt(most), most


def _of_form(form: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Numbers of about 1, none of them above 2."""
    numbers = np.asarray(rng.uniform(0.25, 2.0, shape) * rng.choice([-1.0, 1.0], shape))
    if not numbers.size or form == "any":
        return numbers
    rows = numbers.reshape(-1, shape[-1] if shape else 1)
    if form == "alike":
        return np.broadcast_to(rows[:, :1], rows.shape).reshape(shape)
    alone = np.zeros_like(rows)
    kept = len(rows) if form == "one of each row" else 1
    at = np.arange(kept), rng.integers(rows.shape[1], size=kept)
    alone[at] = rows[at]
    return alone.reshape(shape)
