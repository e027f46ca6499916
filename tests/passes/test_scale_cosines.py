"""Cosines of rows: as a root of a product, as a product of lengths, with a least; refusals, a wrong version."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pass_cases import refuses, table

from anesurgery.interpret import run
from anesurgery.mil import Program, Var, mb, types
from anesurgery.numeric.squares import cosine
from anesurgery.passes.scale_cosines import ScaleCosines
from anesurgery.testing import apply_pass

HALF = np.float16
Form = Callable[[Var, Var], Var]


def summed(x: Var, y: Var, keep: bool = False) -> Var:
    total: Var = mb.reduce_sum(x=mb.mul(x=x, y=y), axes=[-1], keep_dims=keep)
    return total


def of_squares(a: Var, b: Var) -> Var:
    both = mb.mul(x=summed(a, a), y=summed(b, b))
    return mb.real_div(x=summed(a, b), y=mb.sqrt(x=mb.maximum(x=both, y=HALF(6e-8))), name="y")


def of_lengths(a: Var, b: Var, of: Var | None = None) -> Var:
    lengths = mb.mul(
        x=mb.reduce_l2_norm(x=a if of is None else of, axes=[-1], keep_dims=True),
        y=mb.sqrt(x=mb.reduce_sum(x=mb.square(x=b), axes=[-1], keep_dims=True)),
    )
    return mb.real_div(x=summed(b, a, keep=True), y=lengths, name="y")


def at_least(a: Var, b: Var) -> Var:
    lengths = mb.mul(x=mb.sqrt(x=summed(a, a)), y=mb.sqrt(x=summed(b, b)))
    return mb.real_div(x=summed(a, b), y=mb.clip(x=lengths, alpha=HALF(0.01), beta=HALF(np.inf)), name="y")


FORMS: dict[str, Form] = {"root": of_squares, "lengths": of_lengths, "least": at_least}


def built(form: Form, known: bool = False) -> Program:
    specs = [mb.TensorSpec(shape, dtype=types.fp16) for shape in ((1, 64), (4, 64))]

    return mb.program(input_specs=specs)(
        lambda a, b: (
            form(mb.mul(x=mb.tanh(x=a), y=HALF(0.1)), mb.mul(x=mb.tanh(x=b), y=HALF(0.1)))
            if known
            else form(a, b)
        )
    )


@pytest.mark.one_of(3)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("size", [0.05, 1.0, 3000.0])
def test_every_form_and_size(form: Form, size: float) -> None:
    program = built(form)
    after, session = apply_pass(ScaleCosines(), program)
    assert len(session.changes) == 1
    rng = np.random.default_rng(0)
    inputs = {"a": rng.standard_normal((1, 64)) * size, "b": rng.standard_normal((4, 64)) * size}
    halves = {name: x.astype(HALF) for name, x in inputs.items()}
    (wanted,) = run(program, halves, precision="fp32").values()
    (found,) = run(after, halves, precision="fp16").values()
    assert np.allclose(found, wanted, rtol=3e-3, atol=1e-3)
    assert not apply_pass(ScaleCosines(), after)[1].changes


def test_the_least_counts_for_short_rows() -> None:
    after, _ = apply_pass(ScaleCosines(), built(at_least))
    ones = {"a": np.full((1, 64), 2.0**-9, HALF), "b": np.full((4, 64), 2.0**-9, HALF)}
    (found,) = run(after, ones, precision="fp16").values()
    assert np.allclose(found, 64 * 2.0**-18 / 0.01, rtol=3e-3)


@pytest.mark.parametrize(
    "form",
    [
        lambda a, b: mb.real_div(x=summed(a, b), y=mb.sqrt(x=summed(b, b))),
        lambda a, b: of_lengths(a, b, of=mb.relu(x=a)),
        lambda a, b: mb.real_div(x=summed(a, b), y=mb.clip(x=summed(b, b), alpha=HALF(1), beta=HALF(9))),
    ],
    ids=["one length", "the length of another row", "no length"],
)
def test_other_quotients_stay(form: Form) -> None:
    program = built(form)
    assert all(cosine(op) is None for op in program.functions["main"].operations if op.op_type == "real_div")
    assert not apply_pass(ScaleCosines(), program)[1].changes


test_cases, test_surroundings = table(
    ScaleCosines(), refuses("does not overflow", built, of_squares, known=True)
)
