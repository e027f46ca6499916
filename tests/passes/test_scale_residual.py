"""A residual stream beyond fp16: scaled at its sources, and left where something else reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.scale_residual import ScaleResidual
from anesurgery.testing import apply_pass, assert_refuses

HALF = np.float16
RNG = np.random.default_rng(0)
WIDE = 16


def weight(gain: float) -> Any:
    """Numbers that powers of two scale without loss."""
    return (RNG.integers(-64, 65, (WIDE, WIDE)) / 64 * gain).astype(HALF)


def rms(x: Var) -> Var:
    mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1], keep_dims=True)
    return mb.mul(x=mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=HALF(1e-3))), y=weight(4.0)[0])


def layer(x: Var) -> Var:
    return mb.layer_norm(x=x, axes=[-1], epsilon=HALF(1e-3))


def decoder(norm: Any, gain: float, out: Any = None, layers: int = 3, embedded: bool = False) -> Program:
    """Layers that add to a stream, which their norms read."""
    spec = mb.TensorSpec((4,), dtype=types.int32) if embedded else mb.TensorSpec((4, WIDE), dtype=types.fp16)

    @mb.program(input_specs=[spec], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        if embedded:
            x = mb.mul(x=mb.gather(x=weight(1.0), indices=x, axis=0), y=HALF(8))
        else:
            x = mb.linear(x=x, weight=weight(1.0))
        for _ in range(layers):
            x = mb.add(x=x, y=mb.linear(x=mb.silu(x=norm(x)), weight=weight(gain), bias=weight(1.0)[0]))
        y = mb.linear(x=norm(x), weight=weight(0.2), name="y")
        return (y, out(x)) if out else y

    return program


X = {"x": RNG.standard_normal((4, WIDE)).astype(HALF)}
IDS = {"x": np.arange(4, dtype=np.int32)}


@pytest.fixture(autouse=True)
def drawn_anew() -> None:
    """The same numbers for each test, whichever ran before it."""
    RNG.bit_generator.state = np.random.default_rng(1).bit_generator.state


def psnr(program: Program, meant: Any, precision: str, inputs: Any) -> float:
    got = ane.run(program, inputs, precision=precision)["y"].astype(np.float64)
    error = np.sqrt(np.mean((got - meant) ** 2))
    return float(20 * np.log10(np.abs(meant).max() / error)) if np.isfinite(error) else -np.inf


@pytest.mark.parametrize(
    ("norm", "embedded", "more"), [(layer, False, 0), (layer, True, 0), (rms, False, 0), (rms, True, 0)]
)
def test_the_stream_is_scaled_and_no_op_is_added(norm: Any, embedded: bool, more: int) -> None:
    program, inputs = decoder(norm, 60000.0, embedded=embedded), IDS if embedded else X
    meant = ane.run(program, inputs)["y"]
    before = [op.op_type for op in walk_ops(program) if op.op_type != "const"]
    done = ane.apply(program, ScaleResidual(), inputs=inputs, quiet=True)
    after = [op.op_type for op in walk_ops(done.program) if op.op_type != "const"]
    assert len(done.changes) == 1
    assert len(after) == len(before) + more
    np.testing.assert_allclose(ane.run(done.program, inputs)["y"], meant, rtol=1e-4, atol=1e-4)
    largest = {row.name: row.largest for row in ane.ranges(done.program, inputs).rows if row.op_type == "add"}
    assert (
        max(largest.values())
        < 65504
        < max(row.largest for row in ane.ranges(program, inputs).rows if row.op_type == "add")
    )


def test_auto_repairs_the_model_with_it() -> None:
    program = decoder(rms, 60000.0)
    meant = ane.run(program, X)["y"]
    assert psnr(program, meant, "fp16", X) == -np.inf
    done = ane.apply(program, "auto", target="M3/macOS 15", inputs=X, quiet=True)
    assert {change.pass_name for change in done.changes} >= {"scale_residual", "rms_norm"}
    assert "widen_to_fp32" not in {change.pass_name for change in done.changes}
    assert psnr(done.program, meant, "fp16", X) > 50


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (decoder(layer, 1.0), "no value exceeds the limits"),
        (decoder(layer, 60000.0, out=lambda x: mb.identity(x=x, name="z")), "scaled back beyond the limit"),
        (decoder(layer, 60000.0, out=lambda x: mb.tanh(x=mb.mul(x=x, y=HALF(1e-4)), name="z")), ""),
    ],
)
def test_what_something_else_reads_is_left(program: Program, reason: str) -> None:
    if reason:
        assert_refuses(ScaleResidual(inputs=X), program, reason)
        return
    after, session = apply_pass(ScaleResidual(inputs=X), program)  # a factor takes the scale away
    assert session.changes
    for name, value in ane.run(program, X).items():
        np.testing.assert_allclose(ane.run(after, X)[name], value, rtol=1e-4, atol=1e-4)
