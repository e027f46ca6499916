"""Public reports that contradicted an inspection: it agrees with each, or says that it does not know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from statement import convolutions

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


def product(op_type: str) -> Program:
    """A constant product of a long sequence, and a softmax."""

    def body(x: Var) -> Var:
        made = (
            mb.linear(x=x, weight=half(384, 384)) if op_type == "linear" else mb.matmul(x=x, y=half(384, 384))
        )
        return mb.softmax(x=made)

    return program(body, (1, 1500, 384))


def decoding() -> Program:
    """A layer of linear ops at one position: 21.5 million weights, norms and gates between them."""

    def body(x: Var) -> Var:
        for outputs in (2048, 2048, 1024, 3584, 3584, 1024):
            inputs = int(x.shape[-1])
            x = mb.linear(x=mb.layer_norm(x=x, axes=[-1]), weight=half(outputs, inputs))
            x = mb.mul(x=x, y=mb.sigmoid(x=x))
        return mb.add(x=x, y=np.float16(1))

    return program(body, (1, 1, 1024))


def fused(batch: int) -> Program:
    def body(q: Var, k: Var, v: Var) -> Var:
        return mb.scaled_dot_product_attention(query=q, key=k, value=v)

    return program(body, *[(batch, 12, 128, 64)] * 3)


def lookup(rows: int, dtype: Any) -> Program:
    table = np.zeros((rows, 32), np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 64), dtype=dtype)], opset_version=ct.target.iOS18)
    def made(ids: Var) -> Any:
        x = mb.gather(x=table, indices=ids, axis=0, validate_indices=False)
        for _ in range(8):
            x = mb.relu(x=mb.linear(x=x, weight=half(4096 if x.shape[-1] < 4096 else 2048, int(x.shape[-1]))))
        return x

    return cast(Program, made)


def package(size: int) -> Program:
    """A program with so many bytes of weights, which nobody reads from memory."""
    rows = size // (2 * 8192)
    return program(lambda x: mb.linear(x=x, weight=np.zeros((rows, 8192), np.float16)), (1, 8192))


def enumerated_rows() -> Program:
    import torch

    layer = torch.nn.Sequential(torch.nn.Linear(384, 384), torch.nn.Softmax(-1)).eval()
    shape = ct.EnumeratedShapes([(1, n, 384) for n in (448, 512, 1024, 1500)], default=(1, 1500, 384))
    model = ct.convert(
        torch.jit.trace(layer, torch.zeros(1, 448, 384)),  # type: ignore[no-untyped-call]
        inputs=[ct.TensorType("x", shape=shape)],
        skip_model_load=True,
        minimum_deployment_target=ct.target.iOS18,
    )
    return cast(Program, model._mil_program)


SIDES = ct.RangeDim(64, 512, default=256)
RANGE = (1, 3, SIDES, SIDES)
LIST = ct.EnumeratedShapes([(1, 3, n, n) for n in (128, 256)], default=(1, 3, 256, 256))


def last(found: Inspection) -> OpRow:
    return found.ops[-1]


def units(op_type: str) -> Callable[[Inspection], Any]:
    """The units of all ops of a type that are known; one of them where they agree."""

    def read(found: Inspection) -> Any:
        known = {r.preferred for r in found.ops if r.op_type == op_type} - {None}
        return known.pop() if len(known) == 1 else known or None

    return read


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
    "N036": (
        lambda: program(lambda x: mb.linear(x=x, weight=half(49152, 576)), (256, 576)),
        ("M1", "ALL"),
        units("linear"),
        "ane",
    ),
    "N045": (lambda: product("matmul"), ("M4 Max/macOS 26", "CPU_AND_NE"), units("matmul"), "cpu"),
    "N045 softmax": (lambda: product("matmul"), ("M4 Max/macOS 26", "CPU_AND_NE"), units("softmax"), "cpu"),
    "N045 ALL": (lambda: product("matmul"), ("M4 Max/macOS 26", "ALL"), units("matmul"), "cpu"),
    "N046": (enumerated_rows, ("M4 Max/macOS 26", "CPU_AND_NE"), units("linear"), "ane"),
    "N060": (lambda: fused(1), ("M1 Max/macOS 27", "CPU_AND_NE"), lambda f: last(f).legal, False),
    "N093": (lambda: lookup(512, types.uint16), ("any/macOS 15", "CPU_AND_NE"), lambda f: f.ops[0].legal, True),
    "N104": (
        lambda: package(1_400_000_000),
        ("A19/iOS 26", "CPU_AND_NE"),
        lambda f: "size-program" in {finding.rule for finding in f.findings},
        False,
    ),
    "N104 fails": (
        lambda: package(1_800_000_000),
        ("A19/iOS 26", "CPU_AND_NE"),
        lambda f: "size-program" in {finding.rule for finding in f.findings},
        True,
    ),
    "N114": (decoding, ("M4/macOS 26", "CPU_AND_NE"), units("linear"), "ane"),
    "N118": (lambda: convolutions(RANGE)(), ("iPhone/iOS 17", "CPU_AND_NE"), units("conv"), "ane"),
    "N118 list": (lambda: convolutions(LIST)(), ("iPhone/iOS 17", "CPU_AND_NE"), units("conv"), "ane"),
    "N119": (lambda: convolutions(RANGE)(), ("Mac/macOS 15", "CPU_AND_NE"), units("conv"), "ane"),
    "N119 list": (lambda: convolutions(LIST)(), ("Mac/macOS 15", "CPU_AND_NE"), units("conv"), "ane"),
    "N125": (lambda: lookup(151669, types.int32), ("Mac/macOS 26", "CPU_AND_NE"), units("linear"), "cpu"),
}
"""Report -> program, target and compute units, what is read from the inspection, and what the report says."""


def reports() -> dict[str, Any]:
    if not REPORTS.is_file():
        pytest.skip("the reports are not beside this checkout")
    return {report["id"]: report for report in json.loads(REPORTS.read_text(encoding="utf-8"))}


def says(name: str) -> tuple[Any, Any]:
    """What an inspection says, and what the report says."""
    build, (target, compute_units), read, expected = CASES[name]
    return read(ane.inspect(build(), target, compute_units=compute_units)), expected


@pytest.mark.one_of(20)
@pytest.mark.parametrize("name", sorted(CASES))
def test_an_inspection_agrees_with_the_report_or_does_not_know(name: str) -> None:
    assert name.split()[0] in reports()
    said, expected = says(name)
    assert said is None or said == expected


def test_each_report_has_a_case() -> None:
    assert reports().keys() == {name.split()[0] for name in CASES}


AGREE = {"N048", "N051", "N053", "N091", "N094", "N100", "N104", "N104 fails", "N114", "N118"}
"""Reports of which the inspection is sure: to call everything unknown is no answer."""


@pytest.mark.one_of(9)
@pytest.mark.parametrize("name", sorted(AGREE))
def test_what_can_be_known_is_said(name: str) -> None:
    assert says(name)[0] is not None


def test_the_same_product_as_linear_goes_to_the_ane() -> None:
    """The other half of the report that a matmul stayed on the CPU."""
    found = ane.inspect(product("linear"), "M4 Max/macOS 26")
    assert units("linear")(found) == "ane"


def test_without_its_table_the_model_of_a_large_vocabulary_is_on_the_ane() -> None:
    found = ane.inspect(lookup(30522, types.int32), "Mac/macOS 26")
    assert units("linear")(found) == "ane"
