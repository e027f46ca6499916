"""Remainders, products, running sums and one-hot rows in other ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table

import anesurgery as ane
from anesurgery.errors import PassError, SurgeryWarning
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.decompose_ops import DecomposeOps
from anesurgery.placement.evidence import Grade
from anesurgery.testing import apply_pass, assert_same_numbers

TARGET = "M4/macOS 26"


def program_of(body: Callable[[Var], Any], *shape: int, dtype: Any = types.fp32) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=dtype)], opset_version=ct.target.iOS17)(
        lambda x: body(x)
    )


def floats(*shape: int) -> Any:
    return (np.random.default_rng(0).standard_normal(shape) * 5).astype(np.float32)


def parametric(x: Var, alpha: list[float], beta: list[float]) -> Var:
    return mb.softplus_parametric(x=x, alpha=np.array(alpha, np.float32), beta=np.array(beta, np.float32))


SUMS = {
    f"cumsum {axis} {exclusive} {reverse}": (
        lambda x, a=axis, e=exclusive, r=reverse: mb.cumsum(x=x, axis=a, exclusive=e, reverse=r),
        (2, 3, 4, 5),
    )
    for axis in (0, 1, -1, 2)
    for exclusive in (False, True)
    for reverse in (False, True)
}
CASES: dict[str, tuple[Callable[[Var], Any], tuple[int, ...]]] = {
    **SUMS,
    "cumsum of one axis": (lambda x: mb.cumsum(x=x, axis=0), (7,)),
    "mod by a power of two": (lambda x: mb.mod(x=x, y=np.float32(0.5)), (50,)),
    "mod of whole numbers": (lambda x: mb.mod(x=mb.round(x=mb.clip(x=x, alpha=-9.0, beta=9.0)), y=3.0), (50,)),
    "product of all": (lambda x: mb.reduce_prod(x=x, keep_dims=False), (2, 3)),
    "product of two axes": (lambda x: mb.reduce_prod(x=x, axes=[0, 2]), (2, 1, 4)),
    "product of an axis": (lambda x: mb.reduce_prod(x=x, axes=[-1], keep_dims=True), (2, 3)),
    "softplus of one factor": (lambda x: parametric(x, [0.5, 0.5, 0.5], [2, 2, 2]), (2, 3, 4, 5)),
    "softplus of factors by channel": (lambda x: parametric(x, [0.5, 1, 4], [2, 1, 0.25]), (2, 3, 4)),
    "product of one": (lambda x: mb.reduce_prod(x=x, axes=[0], keep_dims=True), (1, 3)),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize(("on", "off"), [(1.0, 0.0), (2.5, -1.0)])
def test_one_hot_rows(axis: int, on: float, off: float) -> None:
    values = {"on_value": np.float32(on), "off_value": np.float32(off)}
    program = program_of(
        lambda x: mb.one_hot(indices=x, one_hot_vector_size=6, axis=axis, **values), 2, 5, dtype=types.int32
    )
    after, session = apply_pass(DecomposeOps(), program)
    assert [op.op_type for op in walk_ops(after)].count("equal") == 1, session.refusals
    for given in ([[0, 1, 2, 3, 4], [5, 6, -1, 2047, 70000]], np.zeros((2, 5))):
        assert_same_numbers(program, after, {"x": np.array(given, np.int32)})


@pytest.mark.parametrize("by", [0.5, 2**-15, 2.0, 2**14])
def test_a_remainder_of_large_numbers_does_not_overflow(by: float) -> None:
    """The wrong version computes floor(40000 / 0.5), which is infinite in fp16."""
    program = program_of(lambda x: mb.mod(x=x, y=np.float16(by)), 6, dtype=types.fp16)
    after, _ = apply_pass(DecomposeOps(), program)
    x = np.array([40000, -65504, 1023.5, -0.3, 2**-14, 3], np.float16)
    assert "mod" not in [op.op_type for op in walk_ops(after)]
    (result,) = ane.run(after, {"x": x}, precision="fp16").values()
    np.testing.assert_array_equal(result, np.fmod(x, np.float16(by)))


def test_options_must_be_positive() -> None:
    with pytest.raises(PassError, match="most_length=0"):
        DecomposeOps(most_length=0)


test_cases, test_surroundings = table(
    DecomposeOps(),
    *(
        rewrites(
            program_of,
            CASES[name][0],
            *CASES[name][1],
            rtol=1e-05,
            inputs={"x": floats(*CASES[name][1])},
            id=str(name),
        )
        for name in CASES
    ),
    *(
        refuses(reason, program_of, body, 99)
        for body, reason in [
            (lambda x: mb.mod(x=x, y=np.float32(3)), "the divisor is 3, no power of two"),
            (lambda x: mb.mod(x=x, y=np.float32(2**-16)), "1 / 1.52588e-05 is not among the normal numbers"),
            (lambda x: mb.mod(x=x, y=np.float32(2**15)), "1 / 32768 is not among the normal numbers"),
            (lambda x: mb.mod(x=mb.round(x=x), y=np.float32(3)), "reaches inf, above 2048"),
            (lambda x: mb.mod(x=x, y=mb.exp(x=x)), "is no positive constant"),
            (lambda x: mb.reduce_prod(x=x), "it multiplies 99 numbers, above 32"),
            (lambda x: mb.cumsum(x=mb.tile(x=x, reps=[11]), axis=0), "it runs over 1,089 numbers, above 1,024"),
            (
                lambda x: mb.cumsum(x=mb.cast(x=x, dtype="int32"), axis=0),
                "integers_as_floats makes them floats",
            ),
            (
                lambda x: mb.one_hot(indices=mb.cast(x=x, dtype="int32"), one_hot_vector_size=9),
                "is of integers",
            ),
            (
                lambda x: mb.one_hot(
                    indices=mb.cast(x=x, dtype="int32"), one_hot_vector_size=3000, on_value=1.0, off_value=0.0
                ),
                "it has 3000 classes; fp16 counts up to 2048",
            ),
        ]
    ),
)


def converted(beta: float) -> Program:
    """`F.softplus(x, beta=beta)` behind a convolution, as it is converted."""
    factors = {"alpha": np.full(64, 1 / beta, np.float16), "beta": np.full(64, beta, np.float16)}
    weight = np.full((64, 64, 3, 3), 0.1, np.float16)
    return program_of(
        lambda x: mb.softplus_parametric(x=mb.conv(x=x, weight=weight), **factors, name="y"),
        *(1, 64, 64, 64),
        dtype=types.fp16,
    )


def test_a_softplus_with_factors_has_a_rule_and_a_repair() -> None:
    """The wrong version: its unit is unknown, "no rule covers it", and nothing is named."""
    (finding,) = ane.inspect(converted(2), target=TARGET).row("y").findings
    assert (finding.rule, finding.remedy) == ("softplus-parametric", "decompose_ops")
    assert finding.grade is Grade.GUESS, "no report says that it is wrong"


def test_its_softplus_is_repaired_where_engines_get_it_wrong() -> None:
    with pytest.warns(SurgeryWarning, match=r"softplus gives 0 for inputs of 10\.408 or more"):
        done = ane.apply(converted(2), ["decompose_ops", "replace_faulty_ops"], target=TARGET, quiet=True)
    inspection = ane.inspect(done.program, target=TARGET)
    assert inspection.status == 0
    assert not [f for f in inspection.all_findings if f.rule.startswith("fault-softplus")]
    x = {"x": np.full((1, 64, 64, 64), 0.5, np.float16)}  # sums of 28.8, so softplus(57.6) / 2
    np.testing.assert_allclose(ane.run(done.program, x, precision="ane:M4")["y"], 28.8, rtol=1e-2)
