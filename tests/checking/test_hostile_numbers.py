"""Wrong rewrites that ordinary numbers do not show are caught; their right twins keep their grade."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from both_sides import checked
from hostile_numbers import NUMBERS, Twins
from wrong_rewrites import Wrong

from anesurgery.checking.comparison import compare
from anesurgery.checking.grades import Grade, SiteCheck
from anesurgery.mil import Program, Var, mb

SITES_ONLY = {
    "a sum at 40": "whether a rounded sum is 40 changes with errors of the gate",
    "variance of squares": "errors of the gate in the means move the old side as much",
    "difference of squares": "below the gate",
    "one and a little": "below the gate",
    "digits lost in fp16": "models are run in fp32",
    "squares that are 0 in fp16": "models are run in fp32",
    "a relu of NaN": "said, but no failure",
    "infinities that are equal": "said, but no failure",
}
"""What inputs of a whole model do not show, with the reason; `prove="both"` looks at the sites as well."""


def named(twins: Twins) -> str:
    return twins.wrong.name


def model(wrong: Wrong, body: Callable[..., Any]) -> Program:
    """A program of one of both sides."""
    specs = [mb.TensorSpec(shape, dtype=dtype) for dtype, shape in wrong.inputs]

    def one(x: Var) -> Var:
        return mb.identity(x=body(x), name="y")

    def two(x: Var, z: Var) -> Var:
        return mb.identity(x=body(x, z), name="y")

    program: Program = mb.program(input_specs=specs, opset_version=wrong.opset)(one if len(specs) == 1 else two)
    return program


@pytest.mark.one_of(5)
@pytest.mark.parametrize("twins", NUMBERS, ids=named)
def test_the_wrong_one_is_caught_at_its_site(twins: Twins) -> None:
    wrong = twins.wrong
    found = checked(wrong.old, wrong.new, *wrong.inputs, promise=wrong.promise)
    assert isinstance(found, SiteCheck), found
    assert not found.within(wrong.promise.tolerance)
    assert found.grade is Grade.NUMBERS
    assert "old" in found.counterexample
    assert "new" in found.counterexample


@pytest.mark.one_of(5)
@pytest.mark.parametrize("twins", NUMBERS, ids=named)
def test_the_right_one_keeps_its_grade(twins: Twins) -> None:
    wrong = twins.wrong
    found = checked(wrong.old, twins.right, *wrong.inputs, promise=wrong.promise)
    assert isinstance(found, SiteCheck), found
    assert found.within(wrong.promise.tolerance), found
    assert found.grade is twins.grade


@pytest.mark.one_of(5)
@pytest.mark.parametrize("twins", NUMBERS, ids=named)
def test_whole_models_are_told_apart(twins: Twins) -> None:
    wrong = twins.wrong
    old = model(wrong, wrong.old)
    found, same = (compare(old, model(wrong, body), prove=True) for body in (wrong.new, twins.right))
    assert same.ok
    assert found.ok is (wrong.name in SITES_ONLY)
    assert found.proof is not None
    if found.ok:
        assert found.proof.grade is not Grade.BITS
        assert found.proof.trial is not None
        if SITES_ONLY[wrong.name] == "said, but no failure":
            assert found.proof.trial.finite_only
            assert not same.proof or not same.proof.trial or not same.proof.trial.finite_only
    else:
        assert "adversarial inputs give another y" in found.proof.words


def test_there_are_enough_of_them() -> None:
    names = {twins.wrong.name for twins in NUMBERS}
    assert len(names) == len(NUMBERS) >= 30
    assert names >= SITES_ONLY.keys()
