"""Norms that take the mean away: as torch's group norm is converted, numbers that overflow, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from pass_cases import refuses, table

from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types, walk_ops
from anesurgery.passes.group_norm import GroupNorm
from anesurgery.testing import apply_pass, assert_same_numbers

HALF = np.float16


@pytest.fixture(scope="module")
def converted() -> Program:
    """Four groups of a picture, in fp16."""
    module = torch.nn.GroupNorm(4, 8).eval()
    traced = torch.jit.trace(module, torch.zeros(1, 8, 6, 6))  # type: ignore[no-untyped-call]
    with quiet_host():
        made: Program = ct.convert(
            traced,
            inputs=[ct.TensorType("x", (1, 8, 6, 6), dtype=HALF)],
            minimum_deployment_target=ct.target.iOS17,
            convert_to="milinternal",
        )
    return made


@pytest.mark.one_of(3)
@pytest.mark.parametrize("size", [1e-3, 1.0, 60000.0])
@pytest.mark.parametrize("form", ["largest", "layer_norm"])
def test_a_converted_group_norm(converted: Program, size: float, form: str) -> None:
    after, session = apply_pass(GroupNorm(form=form), converted)
    assert len(session.changes) == 1
    assert ("layer_norm" in [op.op_type for op in walk_ops(after)]) == (form == "layer_norm")
    x = np.random.default_rng(0).uniform(-size, size, (1, 8, 6, 6)).astype(HALF)
    (wanted,) = run(converted, {"x": x}).values()
    (exact,) = run(after, {"x": x}).values()
    assert_close(exact, wanted, rtol=1e-5)
    if form == "largest":
        (found,) = run(after, {"x": x}, precision="fp16").values()
        assert_close(found, wanted, rtol=2e-3)


def test_numbers_far_from_0_keep_their_digits(converted: Program) -> None:
    """Of a mean of 60 fp16 keeps steps of 1/32, which the old form has in its result."""
    after, _ = apply_pass(GroupNorm(), converted)
    x = np.random.default_rng(0).normal(60, 1, (1, 8, 6, 6)).astype(HALF)
    (wanted,) = run(converted, {"x": x}).values()
    rounded = [run(model, {"x": x}, precision="fp16").values() for model in (converted, after)]
    old, new = (float(np.abs(value - wanted).max()) for (value,) in rounded)
    assert new < 4e-3 < 1e-2 < old


def norm(x: Var, **over: Any) -> Var:
    over = {"axes": [-1], "keep_dims": True} | over
    rest = mb.sub(x=x, y=mb.reduce_mean(x=x, **over))
    root = mb.sqrt(x=mb.add(x=mb.reduce_mean(x=mb.square(x=rest), **over), y=HALF(1e-5)))
    return mb.real_div(x=rest, y=root)


def built(dtype: Any = types.fp16, bounded: bool = False, twice: bool = False) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 3, 8), dtype=dtype)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        x = mb.sigmoid(x=x) if bounded else x
        return norm(mb.relu(x=norm(x)) if twice else x)

    return program


def test_norms_after_norms() -> None:
    """What a norm gives is bounded, but not so far that its squares could not overflow."""
    after, session = apply_pass(GroupNorm(), program := built(twice=True))
    assert session.changes
    assert_same_numbers(program, after, rtol=1e-4)


test_cases, test_surroundings = table(
    GroupNorm(), refuses("less its mean is at most 2: its squares do not overflow", built, bounded=True)
)
