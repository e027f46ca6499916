"""The range certificate: ranges, partial sums, and the first op that breaks, on programs made to break."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery import registry
from anesurgery.checking.ranges import Ranges
from anesurgery.errors import InterpretError, SurgeryError
from anesurgery.mil import Program, Var, ct, mb, new_symbol, types
from anesurgery.placement.rules.sampled import ranges_on_samples
from anesurgery.placement.target import Target


def program_of(build: Callable[[Var], Var], *shape: int) -> Program:
    specs = [mb.TensorSpec(shape, dtype=types.fp16)]

    return mb.program(input_specs=specs, opset_version=ct.target.iOS17)(lambda x: build(x))


def scores(x: Var) -> Var:
    """A product whose terms cancel, then a square that overflows."""
    weight = np.array([[200.0, 200.0], [1.0, 1.0]], np.float16)
    product = mb.linear(x=x, weight=weight, name="product")
    return mb.mul(x=product, y=product, name="squared")


def test_ranges_are_those_of_the_exact_run_over_all_samples() -> None:
    program = program_of(lambda x: mb.mul(x=x, y=np.float16(3), name="y"), 3)
    found = ane.ranges(program, [{"x": np.array([1.0, -2.0, 0.5])}, {"x": np.array([4.0, 0.0, 0.0])}])
    (row,) = found.rows
    assert (row.name, row.minimum, row.maximum, row.partial_sum) == ("y", -6.0, 12.0, None)
    assert found.ok
    assert found.samples == 2


def test_a_sum_that_may_pass_the_ceiling_and_one_that_does() -> None:
    may = ane.ranges(program_of(scores, 1, 2), {"x": np.array([[-150.0, 151.0]])})
    product = may.rows[0]
    assert product.partial_sum == 200 * 301
    assert [h.kind for h in product.hazards] == ["may saturate"]
    assert not may.first.get("ane")  # it may, in another order of the terms; in ours it does not
    does = ane.ranges(program_of(scores, 1, 2), {"x": np.array([[150.0, 60.0]])})
    assert [h.kind for h in does.rows[0].hazards] == ["saturates"]
    assert does.rows[0].hazards[0].value == 42000
    assert does.first["ane"].name == "product"
    assert does.first["fp16"].name == "squared"


def test_overflow_and_nan_in_fp16() -> None:
    def build(x: Var) -> Var:
        big = mb.mul(x=x, y=x, name="big")
        return mb.sub(x=big, y=big, name="zero")

    found = ane.ranges(program_of(build, 1), {"x": np.array([300.0])})
    assert found.first["fp16"].name == "big"
    hazards = {(r.name, h.arithmetic, h.kind) for r in found.rows for h in r.hazards}
    assert hazards == {("big", "fp16", "overflow"), ("big", "ane", "overflow")}
    assert found.rows[0].hazards[0].value == 90000


def test_a_mask_of_infinities_names_the_pass() -> None:
    def build(x: Var) -> Var:
        hidden = mb.less(x=x, y=np.float16(0))
        return mb.select(cond=hidden, a=np.float16(-np.inf), b=x, name="masked")

    found = ane.ranges(program_of(build, 2), {"x": np.array([-1.0, 1.0])})
    (hazard,) = {h for row in found.rows for h in row.hazards}
    assert (hazard.kind, hazard.arithmetic, hazard.remedy) == ("infinite", "fp32", "causal_mask_tensor")
    assert hazard.remedy in registry.pass_names()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_inputs_that_are_not_finite_show_nothing(value: float) -> None:
    found = ane.ranges(program_of(scores, 1, 2), {"x": np.array([[value, 1.0]])})
    assert not found.ok
    assert found.unsound == ("x",)
    assert found.verdict == "not checked: x holds NaN or infinities; give finite inputs"
    assert "not checked: x holds" in str(found)
    assert "no op leaves" not in str(found)


def test_a_nan_in_exact_arithmetic_is_said_as_one() -> None:
    found = ane.ranges(program_of(lambda x: mb.sqrt(x=x, name="root"), 1), {"x": np.array([-1.0])})
    assert {(h.arithmetic, h.kind) for row in found.rows for h in row.hazards} == {("fp32", "nan")}


def test_it_can_be_read_and_written() -> None:
    found = ane.ranges(program_of(scores, 1, 2), {"x": np.array([[150.0, 60.0]])}, chip="M1")
    text = " ".join(str(found).split())
    assert "first in ane:M1: linear product" in text
    assert "ane:M1 is an estimate" in text
    assert "scale_ranges" in text
    data = json.loads(json.dumps(found.to_json()))
    assert data["first"] == {"ane:M1": "product", "fp16": "squared"}
    assert "<table" in found._repr_html_()


def test_bad_calibration_sets() -> None:
    program = program_of(scores, 1, 2)
    with pytest.raises(SurgeryError, match="the calibration set is empty"):
        ane.ranges(program, [])
    with pytest.raises(InterpretError, match="nothing is known of the arithmetic of chip 'M7'"):
        ane.ranges(program, chip="M7")
    assert ane.ranges(program).samples == 1


def test_an_op_that_only_fp16_reaches_has_a_row() -> None:
    def build(x: Var) -> Var:
        scaled = mb.mul(x=mb.mul(x=x, y=x, name="square"), y=np.float16(0.25))
        is_large = mb.squeeze(x=mb.greater(x=scaled, y=np.float16(60000)))
        return mb.cond(
            pred=is_large,
            _true_fn=lambda: mb.exp(x=x, name="exp"),
            _false_fn=lambda: mb.add(x=x, y=np.float16(1), name="add"),
            name="y",
        )

    program = program_of(build, 1)
    found = ane.ranges(program, {"x": np.array([400.0])})
    row = {row.name: row for row in found.rows}["exp"]
    assert not row.reached
    assert [str(h) for h in row.hazards] == ["overflow in fp16: only reached there, see pass scale_ranges"]
    assert "only reached there" in " ".join(str(found).split())
    read = Ranges.from_json(json.loads(json.dumps(found.to_json())))
    assert str(read) == str(found)
    assert str(read.merge(found).rows) == str(found.rows)
    (finding,) = ranges_on_samples(program, {"x": np.array([400.0])}, Target.parse("M1")).findings["exp"]
    assert finding.message == "overflow in fp16: fp32 takes another branch"


def test_shares_of_a_calibration_set_merge_to_the_whole() -> None:
    program = program_of(scores, 1, 2)
    samples = [{"x": np.array([[low, high]])} for low, high in ((1, 2), (-150, 151), (200, 200), (-300, 4))]
    whole = ane.ranges(program, samples)
    parts = [ane.ranges(program, samples, shard=(n, 3)) for n in (1, 2, 3)]
    assert [part.samples for part in parts] == [2, 1, 1]
    words = [json.dumps(part.to_json()) for part in parts]
    merged = Ranges.from_json(json.loads(words[0])).merge(*(Ranges.from_json(json.loads(w)) for w in words[1:]))
    assert not whole.ok
    assert merged.samples == whole.samples
    for a, b in zip(merged.rows, whole.rows, strict=True):
        assert {str(h) for h in a.hazards} == {str(h) for h in b.hazards}
        assert (a.name, a.minimum, a.maximum, a.partial_sum) == (b.name, b.minimum, b.maximum, b.partial_sum)
    for other in (lambda x: mb.relu(x=x), lambda x: mb.exp(x=scores(x))):  # the second has all ops of the first
        with pytest.raises(SurgeryError, match="different models"):
            merged.merge(ane.ranges(program_of(other, 1, 2)))
    with pytest.raises(SurgeryError, match="one set of inputs to each share"):
        ane.ranges(program, samples, shard="5/5")
    with pytest.raises(SurgeryError, match="this is no result of `ranges`"):
        Ranges.from_json({"ops": []})
    infinite = {"ops": [], "unsound_inputs": [], "samples": math.inf, "arithmetic": "fp16"}
    with pytest.raises(SurgeryError, match="this is no result of `ranges`: OverflowError"):
        Ranges.from_json(infinite)


def test_shares_that_took_other_branches_merge_to_the_whole() -> None:
    def build(x: Var) -> Var:
        is_large = mb.squeeze(x=mb.greater(x=x, y=np.float16(4)), axes=[0], name="is_large")
        yes, no = (lambda: mb.exp(x=x, name="exp")), (lambda: mb.add(x=x, y=np.float16(1), name="add"))
        return mb.relu(x=mb.cond(pred=is_large, _true_fn=yes, _false_fn=no), name="y")

    program, sets = program_of(build, 1), [{"x": np.array([value])} for value in (2.0, 40.0, 3.0)]
    whole, parts = ane.ranges(program, sets), [ane.ranges(program, sets, shard=(n, 3)) for n in (1, 2, 3)]
    merged = parts[0].merge(*parts[1:])
    assert {row.name: str(row) for row in merged.rows} == {row.name: str(row) for row in whole.rows}
    assert merged.samples == 3


def quotient(x: Var) -> Var:
    over, under = mb.split(x=x, num_splits=2, axis=0)
    return mb.real_div(x=over, y=under, name="z")


@pytest.mark.parametrize(
    ("build", "samples", "kinds"),
    [
        (lambda x: mb.exp(x=x), [(20.0, 0.0), (200.0, 0.0)], {"infinite"}),  # one is too large for fp16 only
        (quotient, [(1.0, 1e-6), (1e-9, 1e-9)], {"nan"}),  # one is too large for fp16, one a NaN in it
    ],
)
def test_shares_that_break_in_other_ways_merge_to_the_whole(
    build: Callable[[Var], Var], samples: list[tuple[float, float]], kinds: set[str]
) -> None:
    specs = [mb.TensorSpec((2,), dtype=types.fp32)]
    program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(lambda x: build(x))
    sets = [{"x": np.array(pair, np.float32)} for pair in samples]
    whole = ane.ranges(program, sets)
    assert {h.kind for row in whole.rows for h in row.hazards} == kinds
    first, second = (ane.ranges(program, sets, shard=(n, 2)) for n in (1, 2))
    for merged in (first.merge(second), second.merge(first)):
        assert str(merged.rows) == str(whole.rows)


@pytest.mark.parametrize("jobs", [1, 2])
def test_inputs_that_are_no_sets_are_refused_in_words(tmp_path: Path, jobs: int) -> None:
    ane.save(ane.load(program_of(scores, 1, 2)), tmp_path / "m.mlpackage")
    with pytest.raises(InterpretError, match="inputs are a dictionary of arrays by name, not a int"):
        ane.ranges(tmp_path / "m.mlpackage", 5, jobs=jobs)  # type: ignore[arg-type]


def test_sizes_that_do_not_fit_are_said_by_the_op() -> None:
    """The wrong version: an error of torch from the bound of the sum, which no caller expects."""
    size = new_symbol()

    @mb.program(input_specs=[mb.TensorSpec((2, size))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        return mb.matmul(x=x, y=np.ones((4, 3), np.float32), name="y")

    with pytest.raises(InterpretError, match="op y failed"):
        ane.ranges(program, [{"x": np.ones((2, 5), np.float32)}])
