"""Logarithms of mixed powers: by every product, with a guard and a least; refusals, a wrong version."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pass_cases import refuses, table

from anesurgery.interpret import run
from anesurgery.mil import Program, Var, mb, types
from anesurgery.numeric.squares import spectrum
from anesurgery.passes.scale_spectra import ScaleSpectra
from anesurgery.testing import apply_pass

HALF = np.float16
WEIGHTS = np.random.default_rng(1).uniform(0, 0.1, (5, 16)).astype(HALF)
NONE = HALF(0)
Bands = Callable[[Var], Var]


def power(x: Var, batch: bool = False) -> Var:
    halves = mb.split(x=x, num_splits=2, axis=0)
    real, imaginary = (mb.square(x=v if batch else mb.squeeze(x=v, axes=[0])) for v in halves)
    both: Var = mb.add(x=real, y=imaginary)
    return both


def turned(x: Var) -> Var:
    last: Var = mb.transpose(x=x, perm=[0, 2, 1])
    return last


MIXES: dict[str, Bands] = {
    "matmul": lambda x: mb.matmul(x=WEIGHTS, y=power(x)),
    "matmul of turned weights": lambda x: mb.matmul(x=WEIGHTS.T.copy(), y=power(x), transpose_x=True),
    "from the right": lambda x: mb.matmul(x=power(turned(x)), y=WEIGHTS.T.copy()),
    "linear": lambda x: mb.linear(x=power(turned(x)), weight=WEIGHTS),
    "convolution": lambda x: mb.conv(x=power(x, batch=True), weight=WEIGHTS[:, :, None]),
}
GUARDS: dict[str, Bands] = {
    "none": lambda x: x,
    "added": lambda x: mb.add(x=x, y=HALF(1e-3)),
    "least": lambda x: mb.maximum(x=x, y=HALF(1e-3)),
    "clipped": lambda x: mb.clip(x=x, alpha=HALF(1e-3), beta=HALF(np.inf)),
}


def built(mix: Bands, guard: Bands = GUARDS["least"], known: bool = False) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 16, 6), dtype=types.fp16)])(
        lambda x: mb.log(x=guard(mix(mb.tanh(x=x) if known else x)), epsilon=NONE, name="y")
    )


@pytest.mark.one_of(23)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
@pytest.mark.parametrize("size", [0.1, 1.0, 3000.0])
def test_every_form_and_size(mix: Bands, guard: Bands, size: float) -> None:
    program = built(mix, guard)
    after, session = apply_pass(ScaleSpectra(), program)
    assert len(session.changes) == 1
    x = (np.random.default_rng(0).standard_normal((2, 16, 6)) * size).astype(HALF)
    (wanted,) = run(program, {"x": x}, precision="fp32").values()
    (found,) = run(after, {"x": x}, precision="fp16").values()
    assert np.allclose(found, wanted, rtol=3e-3, atol=2e-2)
    assert not apply_pass(ScaleSpectra(), after)[1].changes


def test_many_large_weights_do_not_overflow() -> None:
    heavy = (lambda x: mb.matmul(x=np.full((1, 16), 4000, HALF), y=power(x)), GUARDS["none"])
    after, session = apply_pass(ScaleSpectra(), built(*heavy))
    assert session.changes
    (found,) = run(after, {"x": np.full((2, 16, 6), 3000, HALF)}, precision="fp16").values()
    assert np.allclose(found, np.log(4000.0 * 16 * 2 * 3000.0**2), rtol=2e-3)


def test_silence_is_the_least() -> None:
    after, _ = apply_pass(ScaleSpectra(), built(MIXES["matmul"]))
    (found,) = run(after, {"x": np.zeros((2, 16, 6), HALF)}, precision="fp16").values()
    assert np.allclose(found, np.log(1e-3), rtol=2e-3)


@pytest.mark.parametrize(
    "bands",
    [
        lambda x: mb.matmul(x=-WEIGHTS, y=power(x)),
        lambda x: mb.linear(x=power(turned(x)), weight=WEIGHTS, bias=np.ones(5, HALF)),
        lambda x: mb.clip(x=mb.matmul(x=WEIGHTS, y=power(x)), alpha=HALF(1e-3), beta=HALF(9)),
        lambda x: mb.conv(x=power(x, batch=True), weight=np.ones((5, 16, 3), HALF)),
    ],
    ids=["negative weights", "a bias", "a cap", "taps"],
)
def test_others_stay(bands: Bands) -> None:
    program = built(bands, GUARDS["none"])
    (log,) = (op for op in program.functions["main"].operations if op.op_type == "log")
    assert spectrum(log) is None
    assert not apply_pass(ScaleSpectra(), program)[1].changes


test_cases, test_surroundings = table(
    ScaleSpectra(), refuses("no band overflows", built, MIXES["matmul"], known=True)
)
