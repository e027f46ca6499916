"""The table of engine faults: what the engine's arithmetic computes, on which chips, and what each row says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.interpret.arithmetic import engine_faults
from anesurgery.interpret.arithmetic.engine_faults import FAULTS, SOFTPLUS_CLIFF, Fault
from anesurgery.mil import Operation, Program, Var, ct, mb, types, walk_ops
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
    assert fault.simulate is None or fault.least_input is not None
    assert fault.remedy is None or fault.remedy in ane.registry.op_pass_names()


def _op(
    op_type: str, shape: tuple[int, ...], build: Callable[[Var], Var], dtype: Any = types.fp32
) -> Operation:
    program = mb.program(input_specs=[mb.TensorSpec(shape, dtype)], opset_version=ct.target.iOS17)(
        lambda x: build(x)
    )
    return next(op for op in walk_ops(program) if op.op_type == op_type)


@pytest.mark.parametrize(
    ("padding", "found"),
    [
        ({"pad_type": "custom", "pad": [1, 1, 0, 0]}, True),
        ({"pad_type": "same"}, True),
        ({"pad_type": "custom", "pad": [0, 0, 0, 0]}, False),
        ({"pad_type": "valid", "pad": [1, 1, 0, 0]}, False),
    ],
)
def test_a_convolution_is_padded_by_what_its_type_reads(padding: dict[str, Any], found: bool) -> None:
    weight = np.ones((4, 4, 3, 2), np.float32)
    conv = _op("conv", (1, 4, 8, 8), lambda x: mb.conv(x=x, weight=weight, strides=[2, 2], **padding))
    assert bool(fault_named("conv-uneven-kernel").found(conv)) is found


def test_an_integer_constant_without_elements_is_not_large() -> None:
    empty = np.zeros((0,), np.int32)
    add = _op("add", (1,), lambda x: mb.add(x=x, y=empty), types.int32)
    assert fault_named("large-integers").found(add) == ""


def test_a_fault_of_a_form_is_simulated_in_that_form_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version simulates it for every op of the type."""
    fault = replace(
        fault_named("softplus-cliff"), form=lambda op: "wide" if op.x.shape == (2,) else "", name="wide-only"
    )
    monkeypatch.setattr(engine_faults, "FAULTS", (fault,))
    for length, is_simulated in ((2, True), (3, False)):
        op = _op("softplus", (length,), lambda x: mb.softplus(x=x))
        assert (engine_faults.with_faults(op, abs, None) is not abs) is is_simulated


def fault_named(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)
