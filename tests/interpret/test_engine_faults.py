"""The table of engine faults: what the engine's arithmetic computes, on which chips, and what each row says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.interpret.arithmetic.engine_faults import FAULTS, SOFTPLUS_CLIFF
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.target import CHIPS, OS_VERSIONS


def program(body: Callable[[Var], Any], shape: tuple[int, ...]) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)], opset_version=ct.target.iOS17)(
        lambda x: body(x)
    )


def ran(model: Program, x: Any, precision: str) -> Any:
    (value,) = ane.run(model, {"x": x}, precision=precision).values()
    return value.astype(np.float32).ravel()


@pytest.mark.parametrize(("chip", "wrong"), [("", True), (":M1", True), (":M3", True), (":M2", False)])
def test_softplus_is_zero_from_the_cliff_on(chip: str, wrong: bool) -> None:
    model = program(lambda x: mb.softplus(x=x), (1, 5))
    x = np.array([[-3, 5, 10.4, 10.42, 300]], np.float16)
    right, engine = ran(model, x, "fp16"), ran(model, x, f"ane{chip}")
    expected = np.where((x.ravel() >= SOFTPLUS_CLIFF) & wrong, 0, right)
    np.testing.assert_allclose(engine, expected, rtol=2e-3)


@pytest.mark.parametrize("terms", [1, 32, 100])
def test_a_log_sum_is_zero_where_its_sum_overflows(terms: int) -> None:
    model = program(lambda x: mb.reduce_log_sum_exp(x=x, axes=[1]), (2, terms))
    edge = np.log(65504.0 / terms)
    x = np.stack([np.full(terms, edge - 0.05), np.full(terms, edge + 0.05)]).astype(np.float16)
    right, engine = ran(model, x, "fp16"), ran(model, x, "ane:M3")
    np.testing.assert_allclose(engine, [right[0], 0.0], rtol=2e-3)
    np.testing.assert_allclose(ran(model, x, "ane:M1"), right, rtol=2e-3)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_row_names_chips_systems_and_a_source(fault: Any) -> None:
    assert set(fault.chips) <= set(CHIPS)
    assert all(version in OS_VERSIONS[platform] for platform, version in fault.systems)
    assert fault.source
    assert fault.seen
    assert not fault.what.endswith(".")
    assert fault.wrong is None or fault.least is not None
    assert fault.remedy is None or fault.remedy in ane.registry.op_pass_names()
