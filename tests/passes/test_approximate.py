"""Formulas for functions: their error over a range, what is refused, and that nobody gets them unasked."""

from __future__ import annotations

import numpy as np
import pytest
from pass_cases import refuses, table

import anesurgery as ane
from anesurgery.errors import ProofError
from anesurgery.mil import Program, mb, types, walk_ops
from anesurgery.passes.approximate import LACKING, Approximate
from anesurgery.regions import formulas
from anesurgery.regions.formulas import DOMAINS, FORMULAS, relative_error
from anesurgery.testing import apply_pass, assert_same_numbers


def bounded(kind: str, low: float, high: float, half: bool = False) -> Program:
    """A function of numbers of a known range."""
    dtype = np.float16 if half else np.float32

    return mb.program(input_specs=[mb.TensorSpec((257,), dtype=types.fp16 if half else types.fp32)])(
        lambda x: getattr(mb, kind)(x=mb.clip(x=x, alpha=dtype(low), beta=dtype(high)))
    )


@pytest.mark.one_of(5)
@pytest.mark.parametrize("kind", sorted(FORMULAS))
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
def test_each_formula_stays_within_what_it_states(kind: str, half: bool) -> None:
    low, high = DOMAINS.get(kind, (-6.0, 6.0))
    high = min(high, 6.0)
    program = bounded(kind, low, high, half)
    after, session = apply_pass(Approximate(functions=(kind,)), program)
    assert kind not in {op.op_type for op in walk_ops(after)}, session.refusals
    numbers = {"x": np.linspace(low, high, 257).astype(np.float16 if half else np.float32)}
    stated = relative_error(kind, low, high, "fp16" if half else "fp32")
    (note,) = session.notes
    assert f"{kind} is off by at most {stated:.1e}" in note
    assert_same_numbers(
        program, after, numbers, rtol=1.05 * stated + half / 1024, precision="fp16" if half else "fp32"
    )
    assert stated < (5e-3 if half else 2e-4)


@pytest.mark.parametrize(("kind", "stated"), [("asin", 5e-5), ("acos", 5e-5), ("atan", 1.5e-5), ("erf", 2e-6)])
def test_tabled_formulas_are_as_near_as_their_table_says(kind: str, stated: float) -> None:
    """In fp32, relative to the largest result, pi / 4 of the arctangent.

    The first coefficient of the arctangent with a 9 too many gives 1.7e-4.
    """
    assert relative_error(kind, -1.0, 1.0, "fp32") < stated


def test_a_long_range_of_sines_is_reduced() -> None:
    assert relative_error("sin", -60.0, 60.0, "fp32") < 1e-4
    assert relative_error("cos", -12.0, 12.0, "fp16") < 5e-3


def test_only_what_the_target_lacks_is_replaced() -> None:
    program = bounded("sin", -3, 3)
    for target, left in (("M1/macOS 14", False), ("M4/macOS 15", True)):
        surgery = ane.apply(program, "approximate", target=target, quiet=True)
        assert ("sin" in {op.op_type for op in walk_ops(surgery.program)}) == left
    assert {"sin", "cos"}.isdisjoint(LACKING)


def test_nobody_gets_it_unasked() -> None:
    program = bounded("cosh", -3, 3, half=True)
    named = [f.remedy for f in ane.inspect(program, target="M4/macOS 15").all_findings if f.rule == "op-cosh"]
    assert named == ["approximate"]
    surgery = ane.apply(program, "auto", target="M4/macOS 15", quiet=True)
    assert "cosh" in {op.op_type for op in walk_ops(surgery.program)}


def test_a_wrong_coefficient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong formula; the stated error is believed here, so that the check of the site must find it."""
    monkeypatch.setattr(formulas, "ARC", (1.5707288, -0.2121144, 0.0742610, 0.0187293))
    monkeypatch.setattr("anesurgery.regions.formulas.relative_error", lambda *_: 0.0)
    with pytest.raises(ProofError, match="old and new differ"):
        apply_pass(Approximate(functions=("asin",)), bounded("asin", -1, 1))


test_cases, test_surroundings = table(
    Approximate(),
    refuses("on [-20, 20] (fp16); the limit is 0.005", bounded, "cosh", -20, 20, half=True),
    refuses("tan takes -1.375 to 1.375 here", bounded, "tan", -2, 2),
)
