"""Public reports that contradicted an inspection: it agrees with each, or says that it does not know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement import Inspection, OpRow

REPORTS = Path(__file__).resolve().parents[3] / "shared" / "placement" / "reports_open.json"


def program(build: Callable[..., Any], *shapes: tuple[int, ...], states: int = 0) -> Program:
    inputs = [mb.TensorSpec(shape, dtype=types.fp16) for shape in shapes]
    inputs += [mb.StateTensorSpec((1, 64), types.fp16) for _ in range(states)]
    made: Program = mb.program(input_specs=inputs, opset_version=ct.target.iOS18)(build)
    return made


def half(*shape: int) -> Any:
    return np.ones(shape, np.float16)


def blocks(shape: tuple[int, ...], *scales: int) -> Var:
    data = np.zeros(shape, types.np_int4_dtype)
    return mb.constexpr_blockwise_shift_scale(data=data, scale=half(*scales))


def palette(*shape: int) -> Var:
    indices = np.zeros(shape, types.np_uint6_dtype)
    return mb.constexpr_lut_to_dense(indices=indices, lut=half(1, 1, 64, 1))


def linear(outputs: int) -> Program:
    return program(lambda x: mb.linear(x=x, weight=half(outputs, 576)), (128, 576))


def two_states() -> Program:
    def body(x: Var, a: Var, b: Var) -> Any:
        return mb.add(x=mb.add(x=x, y=mb.read_state(input=a)), y=mb.read_state(input=b))

    return program(body, (1, 64), states=2)


def last(found: Inspection) -> OpRow:
    return found.ops[-1]


Case = tuple[Callable[[], Program], tuple[str, str], Callable[[Inspection], Any], Any]
CASES: dict[str, Case] = {
    "N031": (lambda: linear(576), ("M1", "ALL"), lambda f: last(f).preferred, "ane"),
    "N034": (lambda: linear(49152), ("M1", "ALL"), lambda f: last(f).preferred, "cpu"),
    "N048": (
        lambda: program(lambda x: mb.matmul(x=x, y=blocks((64, 32), 2, 32)), (1, 64)),
        ("any", "CPU_AND_NE"),
        lambda f: last(f).legal,
        False,
    ),
    "N051": (
        lambda: program(
            lambda x: mb.conv(x=x, weight=blocks((15360, 64, 1, 1), 15360, 2, 1, 1)), (1, 64, 1, 64)
        ),
        ("M5 Pro/macOS 27", "CPU_AND_NE"),
        lambda f: last(f).legal,
        False,
    ),
    "N053": (
        lambda: program(lambda x: mb.conv(x=x, weight=blocks((32, 64, 1, 1), 32, 4, 1, 1)), (1, 64, 8, 8)),
        ("M2/macOS 15", "ALL"),
        lambda f: last(f).legal,
        False,
    ),
    "N091": (
        lambda: program(lambda x, u: mb.slice_update(x=x, update=u, begin=[0, 0], end=[2, 8]), (8, 8), (2, 8)),
        ("M4/macOS 27", "CPU_AND_NE"),
        lambda f: last(f).legal,
        False,
    ),
    "N094": (
        lambda: program(lambda x: mb.topk(x=x, k=2)[0], (1, 8)),
        ("M2/macOS 15", "CPU_AND_NE"),
        lambda f: last(f).legal,
        False,
    ),
    "N097": (
        lambda: program(lambda x: mb.linear(x=x, weight=palette(151936, 16)), (1, 15, 16)),
        ("M4 Pro", "CPU_AND_NE"),
        lambda f: last(f).preferred,
        "ane",
    ),
    "N100": (
        two_states,
        ("M4/macOS 26", "CPU_AND_NE"),
        lambda f: "state-two" in {finding.rule for finding in f.all_findings},
        True,
    ),
}
"""Report -> program, target and compute units, what is read from the inspection, and what the report says."""

STILL_WRONG = {"N031": "the estimate of a linear with a batch of 128 favours the CPU"}
NOT_WRITTEN = {
    "N036": "it speaks of two batches and of the GPU; the estimates of linear are not refitted",
    "N045": "the same product as linear goes to the ANE; the estimates do not tell them apart",
    "N046": "inspections count dynamic lengths as 1",
    "N060": "the report saw no device, and the library has no word for that",
    "N093": "indices of 16 bits without a sign are refused as those with one",
    "N104": "the limit of a program is one number for all iPhones",
    "N114": "the shapes of the layer are not in the report",
    "N118": "inspections count dynamic lengths as 1",
    "N119": "inspections count dynamic lengths as 1",
    "N125": "one op that takes all others to the CPU is not modelled",
}
"""Reports that no case expresses, each with the reason."""


def reports() -> dict[str, Any]:
    if not REPORTS.is_file():
        pytest.skip("the reports are not beside this checkout")
    return {report["id"]: report for report in json.loads(REPORTS.read_text(encoding="utf-8"))}


def judge(name: str) -> None:
    """Agree, or do not know; a confident contradiction fails."""
    build, (target, units), read, expected = CASES[name]
    said = read(ane.inspect(build(), target, compute_units=units))
    assert said is None or said == expected


@pytest.mark.parametrize("name", sorted({*CASES, *NOT_WRITTEN}))
def test_an_inspection_agrees_with_the_report_or_does_not_know(name: str) -> None:
    assert name in reports()
    if name in NOT_WRITTEN:
        pytest.skip(NOT_WRITTEN[name])
    if name in STILL_WRONG:
        with pytest.raises(AssertionError):  # once it agrees, its row here goes
            judge(name)
        pytest.xfail(STILL_WRONG[name])
    judge(name)


def test_each_report_has_a_case_or_a_reason() -> None:
    assert reports().keys() == {*CASES, *NOT_WRITTEN}
    assert not CASES.keys() & NOT_WRITTEN.keys()
