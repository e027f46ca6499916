"""Sums divided by sums: of a mask, of magnitudes, guarded, over other counts; what stays; wrong versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, stays, table

import anesurgery as ane
from anesurgery.interpret import run
from anesurgery.mil import Program, mb, types
from anesurgery.passes.mean_quotient import MeanQuotient
from anesurgery.testing import apply_pass, assert_refuses

HALF = np.float16
LEAST = HALF(2.0**-24)
SHAPES = {"x": (2, 300, 8), "mask": (2, 300, 1)}


def program(body: Callable[[Any, Any], Any], dtype: Any = types.fp16) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=dtype) for shape in SHAPES.values()])(
        lambda x, mask: body(x, mask)
    )


def total(x: Any, axis: int = 1) -> Any:
    return mb.reduce_sum(x=x, axes=[axis], keep_dims=True)


def masked(x: Any, mask: Any, guard: Callable[[Any], Any] = lambda total: total) -> Any:
    return mb.real_div(x=total(mb.mul(x=x, y=mask)), y=guard(total(mask)), name="y")


FORMS = {
    "mean by a mask": (masked, 0),
    "its count clipped": (lambda x, m: masked(x, m, lambda t: mb.clip(x=t, alpha=LEAST, beta=HALF(np.inf))), 0),
    "its count guarded": (lambda x, m: masked(x, m, lambda t: mb.add(x=HALF(1e-3), y=t)), 0),
    "its count at least": (lambda x, m: masked(x, m, lambda t: mb.maximum(x=t, y=HALF(1))), 0),
    "shares": (lambda x, m: mb.real_div(x=x, y=total(mb.abs(x=x))), 1),
    "shares, guarded and tiled": (
        lambda x, m: mb.real_div(x=x, y=mb.tile(x=mb.maximum(x=total(mb.abs(x=x)), y=LEAST), reps=[1, 300, 1])),
        1,
    ),
    "shares, guarded by an addition": (
        lambda x, m: mb.real_div(x=x, y=mb.add(x=total(mb.abs(x=x)), y=LEAST)),
        1,
    ),
    "shares of what is not negative": (
        lambda x, m: mb.real_div(x=(e := mb.relu(x=mb.mul(x=x, y=x))), y=total(e)),
        1,
    ),
    "other counts": (lambda x, m: mb.real_div(x=total(x), y=total(mb.abs(x=x), -1)), 1),
}
"""Name -> the form, and the multiplications that are added."""


def draw(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = 400 + 100 * rng.standard_normal(SHAPES["x"])
    return {"x": x.astype(HALF), "mask": (rng.random(SHAPES["mask"]) > 0.2).astype(HALF)}


def count(model: Program, op_type: str) -> int:
    return sum(op.op_type == op_type for op in model.functions["main"].operations)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", FORMS)
def test_the_quotient_is_right_in_fp16_and_was_not(name: str) -> None:
    body, added = FORMS[name]
    before = program(body)
    after, session = apply_pass(MeanQuotient(), before)
    assert [change.proof is not None for change in session.changes] == [True]
    assert count(after, "reduce_sum") == 0
    assert count(after, "mul") - count(before, "mul") == added
    values = draw()
    if "not negative" in name:
        values["x"] = values["x"] / HALF(8)
    (right,) = run(before, values, precision="fp32").values()
    for precision in ("fp16", "ane"):
        (was,) = run(before, values, precision=precision).values()
        (now,) = run(after, values, precision=precision).values()
        assert not np.allclose(was, right, rtol=0.05), precision
        assert np.allclose(now, right, rtol=3e-3, atol=1e-4 * np.abs(right).max()), precision


@pytest.mark.parametrize("name", FORMS)
def test_each_sum_that_overflows_is_named(name: str) -> None:
    rows = ane.inspect(program(FORMS[name][0]), target="M1/macOS 14").ops
    assert [f.rule for row in rows for f in row.findings if f.rule == "num-quotient"]
    after, _ = apply_pass(MeanQuotient(), program(FORMS[name][0]))
    rows = ane.inspect(after, target="M1/macOS 14").ops
    assert not [f.rule for row in rows for f in row.findings if f.rule == "num-quotient"]


def test_of_many_values_only_on_request() -> None:
    """One token of 4096 is kept: its mean is subnormal, and the sum was right."""

    many = mb.program(input_specs=[mb.TensorSpec(s, dtype=types.fp16) for s in ((1, 4096, 8), (1, 4096, 1))])(
        lambda x, mask: masked(x, mask)
    )

    assert_refuses(MeanQuotient(), many, "4096 values are added")
    after, session = apply_pass(MeanQuotient(most=4096), many)
    assert session.changes
    mask = np.zeros((1, 4096, 1), HALF)
    mask[0, 7] = 1
    values = {"x": np.full((1, 4096, 8), 1e-3, HALF), "mask": mask}
    off = [abs(float(run(p, values, precision="fp16")["y"].ravel()[0]) / 1e-3 - 1) for p in (many, after)]
    assert off[0] < 1e-3 < 0.02 < off[1]


test_cases, test_surroundings = table(
    MeanQuotient(),
    refuses("at most 300", program, lambda x, m: masked(mb.tanh(x=x), mb.sigmoid(x=m))),
    refuses("has the guard -1", program, lambda x, m: masked(x, m, lambda t: mb.add(x=t, y=HALF(-1)))),
    *(
        stays(program, body)
        for body in [
            lambda x, m: mb.real_div(x=x, y=total(x)),
            lambda x, m: mb.real_div(x=m, y=total(mb.abs(x=x))),
            lambda x, m: mb.real_div(x=total(x), y=m),
            lambda x, m: masked(x, m, lambda t: mb.clip(x=t, alpha=HALF(1), beta=HALF(9))),
            lambda x, m: masked(x, m, lambda t: mb.add(x=t, y=m)),
        ]
    ),
    stays(program, lambda x, m: mb.real_div(x=total(x), y=total(m)), types.fp32),
)
