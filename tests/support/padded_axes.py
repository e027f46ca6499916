"""Programs with an odd last axis, and what all padded ones must keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.mil import Operation, Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.pad_last_axis import PadLastAxis
from anesurgery.testing import apply_pass, assert_same_numbers, reasons
from anesurgery.text import to_text

STEP = PadLastAxis()


RTOL = STEP.tolerance.rtol


ODD, EVEN = 37, 64


def weight(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray[Any, Any]:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return (values / np.sqrt(shape[-1])).astype(dtype)


def program_of(
    body: Callable[..., Any], *shapes: tuple[Any, ...], dtype: Any = types.fp32, target: Any = None
) -> Program:
    specs = [mb.TensorSpec(shape, dtype=dtype) for shape in shapes or ((2, 8),)]
    made: Program = mb.program(input_specs=specs, opset_version=target or ct.target.iOS16)(body)
    return made


def kinds(program: Program, *op_types: str) -> list[Operation]:
    return [op for op in walk_ops(program) if op.op_type in op_types]


def check(program: Program, edges: int | None = None, step: PadLastAxis = STEP, rtol: float = RTOL) -> Program:
    """Padded, checked, the same numbers, nothing left to do; `edges` values are cut, each once."""
    slices = len(kinds(program, "slice_by_index"))
    after, session = apply_pass(step, program)
    assert session.changes, reasons(session)
    assert all(c.proof is not None for c in session.changes), session.changes
    assert_same_numbers(program, after, rtol=rtol)
    assert not apply_pass(step, after)[1].changes, to_text(after)
    cuts = kinds(after, "slice_by_index")[:]
    assert len({id(op.x) for op in cuts}) == len(cuts), to_text(after)
    if edges is not None:
        assert len(cuts) - slices == edges, to_text(after)
    return after


def lengths(program: Program, *op_types: str) -> list[int]:
    return [op.outputs[0].shape[-1] for op in kinds(program, *op_types)]


def hidden(x: Var, length: int = ODD, seed: int = 0, **names: str) -> Var:
    made: Var = mb.linear(
        x=x, weight=weight(length, x.shape[-1], seed=seed), bias=weight(length, seed=seed), **names
    )
    return made


def taken(x: Var, length: int = EVEN) -> Var:
    made: Var = mb.linear(x=x, weight=weight(length, x.shape[-1], seed=9), bias=weight(length))
    return made


# Convolutions


def conv(x: Var, out: int, **more: Any) -> Var:
    shape = (out, x.shape[1], *[1] * (x.rank - 2))
    made: Var = mb.conv(x=x, weight=weight(*shape), bias=weight(out), **more)
    return made
