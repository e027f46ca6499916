"""Targets, rules of legality, estimates and the whole inspection of ML Programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol

import anesurgery as ane
from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement import Finding, Grade, Inspection, Target, cost
from anesurgery.placement.evidence import Rule
from anesurgery.placement.legality import FORBIDDEN, LEGAL, NEVER, Legality
from anesurgery.placement.target import CHIPS, GROUPS

HALF, IMAGE = types.fp16, (1, 64, 32, 32)
M4, M1 = "M4/macOS 27", "M1/macOS 14"


def half(*shape: int) -> Any:
    return (np.random.default_rng(0).standard_normal(shape) * 0.05).astype(np.float16)


def program_of(
    build: Callable[[Var], Any], shape: tuple[Any, ...] = IMAGE, dtype: Any = HALF
) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=dtype)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Any:
        return build(x)

    return program


def look(build: Callable[[Var], Any], target: str = M4, **options: Any) -> Inspection:
    shape, dtype = options.pop("shape", IMAGE), options.pop("dtype", HALF)
    return ane.inspect(program_of(build, shape, dtype), target, **options)


@pytest.mark.parametrize(
    ("text", "chips", "system"),
    [
        ("M1/macOS 14", ("M1",), ("macOS", 14)),
        ("m1 pro / macos 14.5", ("M1",), ("macOS", 14)),
        ("M2 Ultra", ("M2",), (None, None)),
        ("M4+", ("M4", "M5", "M6"), (None, None)),
        ("M1-M3", ("M1", "M2", "M3"), (None, None)),
        ("A14-A16/iOS 17", ("A14", "A15", "A16"), ("iOS", 17)),
        ("macOS 15", ("M1", "M2", "M3", "M4"), ("macOS", 15)),
        ("any", tuple(CHIPS), (None, None)),
        (None, tuple(CHIPS), (None, None)),
    ],
)
def test_targets(text: str | None, chips: tuple[str, ...], system: tuple[Any, Any]) -> None:
    target = Target.parse(text)
    assert (target.chips, (target.platform, target.os)) == (chips, system)
    assert Target.parse(target) is target


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("M9", UnknownName, "unknown chip 'M9'; did you mean 'M"),
        ("M1/macOS 11", UnknownName, "unknown OS 'macOS 11'; did you mean 'macOS 1"),
        ("M1/windows 3", UnknownName, "unknown OS 'windows 3'"),
        ("A19/iOS 17", SurgeryError, "iOS 17 does not run on A19"),
        ("M1/macOS 14/fast", SurgeryError, 'write it as "M1/macOS 14"'),
    ],
)
def test_unknown_targets(text: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Target.parse(text)


def test_compute_units_come_as_names_and_as_those_of_coremltools() -> None:
    assert Target.parse("M1", "ALL").compute_units == "ALL"
    assert Target.parse("M1", ct.ComputeUnit.CPU_ONLY).compute_units == "CPU_ONLY"
    with pytest.raises(UnknownName, match="did you mean 'CPU_AND_NE'"):
        Target.parse("M1", "CPU_AND_ANE")


def test_a_limit_of_several_chips_is_the_smallest() -> None:
    assert Target.parse("M4+").least("axis")[0] == 65536
    assert Target.parse("M1-M3").least("axis")[0] == 16384
    assert Target.parse("any").least("kernel_w") == (13, "A12")
    assert all(set(names) <= set(CHIPS) for names in GROUPS.values())


def last(build: Callable[[Var], Any], target: str, **options: Any) -> tuple[bool | None, str]:
    """Legality of the last op and the rule that forbids it."""
    row = look(build, target, **options).ops[-1]
    return row.legal, next((f.rule for f in row.findings if f.kind == "legality"), "")


CONV, KERNEL = {"pad_type": "same"}, "conv-kernel"
VERDICTS: dict[str, tuple[Callable[[Var], Any], str, tuple[bool | None, str], dict[str, Any]]] = {
    "an activation": (lambda x: mb.gelu(x=x), M4, (True, ""), {}),
    "a kernel of 15": (lambda x: mb.conv(x=x, weight=half(8, 64, 1, 15), **CONV), M4, (True, ""), {}),
    "a kernel of 16": (lambda x: mb.conv(x=x, weight=half(8, 64, 1, 16), **CONV), M4, (False, KERNEL), {}),
    "16 by 16": (lambda x: mb.conv(x=x, weight=half(8, 64, 16, 16), **CONV), M4, (True, ""), {}),
    "31 high": (lambda x: mb.conv(x=x, weight=half(8, 64, 31, 1), **CONV), M4, (True, ""), {}),
    "32 high": (lambda x: mb.conv(x=x, weight=half(8, 64, 32, 1), **CONV), M4, (False, KERNEL), {}),
    "14 wide on M1": (lambda x: mb.conv(x=x, weight=half(8, 64, 1, 14), **CONV), M1, (False, KERNEL), {}),
    "a wide pool": (
        lambda x: mb.max_pool(x=x, kernel_sizes=[1, 9], strides=[1, 1], pad_type="same"), M4,
        (False, "max-pool-width"), {},
    ),
    "a high pool": (
        lambda x: mb.max_pool(x=x, kernel_sizes=[9, 1], strides=[1, 1], pad_type="same"), M4, (True, ""), {},
    ),
    "a long axis": (lambda x: mb.relu(x=x), M4, (False, "axis"), {"shape": (1, 1, 1, 65537)}),
    "an axis too long for M1": (lambda x: mb.relu(x=x), M1, (False, "axis"), {"shape": (1, 16385)}),
    "the same on M4": (lambda x: mb.relu(x=x), M4, (True, ""), {"shape": (1, 16385)}),
    "channels on M1": (lambda x: mb.relu(x=x), M1, (True, ""), {"shape": (1, 65536, 1, 1)}),
    "six axes": (lambda x: mb.relu(x=x), M4, (False, "rank"), {"shape": (1, 2, 2, 2, 2, 2)}),
    "fp32": (lambda x: mb.relu(x=x), M4, (False, "fp32"), {"dtype": types.fp32}),
    "int32": (lambda x: mb.add(x=x, y=1), M4, (False, "int32"), {"dtype": types.int32}),
    "a cast from fp32": (lambda x: mb.cast(x=x, dtype="fp16"), M4, (True, ""), {"dtype": types.fp32}),
    "on an older OS": (lambda x: mb.cast(x=x, dtype="fp16"), M1, (False, "fp32-cast"), {"dtype": types.fp32}),
    "on a newer OS": (lambda x: mb.cast(x=x, dtype="fp16"), "M1/macOS 15", (True, ""), {"dtype": types.fp32}),
    "constant indices": (lambda x: mb.gather(x=x, indices=[0, 3], axis=1), M4, (True, ""), {}),
    "indices of the run": (
        lambda x: mb.gather(x=half(2, 3, 4), indices=x, axis=1), M4, (False, "gather-runtime"),
        {"shape": (4,), "dtype": types.int32},
    ),
    "an embedding": (
        lambda x: mb.gather(x=half(100, 4), indices=x, axis=0), M4, (False, "embedding"),
        {"shape": (1, 8), "dtype": types.int32},
    ),
    "a running sum": (lambda x: mb.cumsum(x=x, axis=1), M4, (False, "op-cumsum"), {}),
    "the best index": (lambda x: mb.reduce_argmax(x=x, axis=1), M4, (False, "op-reduce_argmax"), {}),
    "values of topk": (lambda x: mb.topk(x=x, k=2)[0], M4, (True, ""), {}),
    "topk on M1": (lambda x: mb.topk(x=x, k=2)[0], M1, (False, "topk-old"), {}),
    "sine": (lambda x: mb.sin(x=x), M4, (True, ""), {}),
    "sine on M2": (lambda x: mb.sin(x=x), "M2", (False, "sin-cos"), {}),
    "sine on any chip": (lambda x: mb.sin(x=x), "any", (False, "sin-cos"), {}),
    "three dimensions": (
        lambda x: mb.conv(x=x, weight=half(4, 4, 3, 3, 3)), M4, (True, ""), {"shape": (1, 4, 8, 8, 8)},
    ),
    "three dimensions on M1": (
        lambda x: mb.conv(x=x, weight=half(4, 4, 3, 3, 3)), M1, (False, "conv3d"), {"shape": (1, 4, 8, 8, 8)},
    ),
    "a long sum": (
        lambda x: mb.matmul(x=x, y=half(40000, 2)), M4, (False, "matmul-inner"), {"shape": (2, 40000)},
    ),
    "no row knows it": (
        lambda x: mb.logical_xor(x=mb.greater(x=x, y=np.float16(0)), y=mb.less(x=x, y=np.float16(1))), M4,
        (None, ""), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_verdicts(case: str) -> None:
    build, target, expected, options = VERDICTS[case]
    assert last(build, target, **options) == expected


def test_each_rule_cites_its_source_and_none_is_written_twice() -> None:
    assert len({rule.id for rule in FORBIDDEN}) == len(FORBIDDEN)
    for rule in FORBIDDEN:
        assert rule.source
        assert rule.because
        assert rule.legal is False
        assert isinstance(rule.grade, Grade)
    never = {op for ops, *_ in NEVER for op in ops.split()}
    assert not never & LEGAL


def test_the_compiler_never_overrules_core_ml_on_the_chip_where_it_was_measured() -> None:
    compiler = [r for r in FORBIDDEN if r.scope.via != "Core ML"]
    assert compiler
    m4 = Legality(Target.parse("M4"))
    speaking: list[Rule] = [r for rules in m4._own.values() for r in rules] + m4._any
    assert not [r.id for r in speaking if r in compiler]


def test_a_finding_says_what_where_why_and_whence() -> None:
    found = look(
        lambda x: mb.max_pool(
            x=x, kernel_sizes=[1, 9], strides=[1, 1], pad_type="same", name="wide"
        )
    )
    (finding,) = (f for f in found.row("wide").findings if f.kind == "legality")
    assert isinstance(finding, Finding)
    assert finding.message == "window width 9; 1 to 8 and 32 are taken"
    assert (finding.op, finding.grade, finding.scope) == (
        "wide",
        Grade.MEASURED,
        "A17, A18, M4, macOS 27.0.1",
    )
    assert finding.source
    assert finding.advice == "chain smaller pools"


def stack_of_convs(x: Var, count: int = 4) -> Var:
    for i in range(count):
        y = mb.conv(x=x, weight=half(64, 64, 3, 3), pad_type="same", name=f"conv{i}")
        x = mb.relu(x=y, name=f"relu{i}")
    return x


def test_a_lone_op_stays_on_the_cpu_and_a_stack_goes_to_the_ane() -> None:
    alone = look(lambda x: mb.relu(x=x))
    assert [row.preferred for row in alone.ops] == ["cpu"]
    assert (alone.status, alone.ops[0].legal, alone.switches) == (2, True, 0)
    stack = look(stack_of_convs)
    assert {row.preferred for row in stack.ops[:-1]} == {"ane"}
    assert stack.status in (0, 1)
    assert stack.residency["flop"] == 1


def test_one_forbidden_op_cuts_a_heavy_model_in_two() -> None:
    found = look(lambda x: stack_of_convs(mb.cumsum(x=stack_of_convs(x, 8), axis=1, name="cut"), 8))
    units = [s.unit for s in found.segments]
    assert units[:3] == ["ane", "cpu", "ane"]
    assert found.segments[0].readers == (1,)
    assert list(found.segments[1].inputs) == [found.ops[15].name] or "cut" in found.segments[1].ops
    assert sum(len(s.ops) for s in found.segments) == len(found.ops)
    assert found.status == 1


def test_what_hangs_on_an_unknown_op_is_unknown() -> None:
    def build(x: Var) -> Any:
        positive = mb.greater(x=x, y=np.float16(0))
        odd = mb.logical_xor(x=positive, y=mb.less(x=x, y=np.float16(1)), name="odd")
        return stack_of_convs(mb.cast(x=odd, dtype="fp16"), 8)

    found = look(build)
    assert found.row("odd").legal is None
    assert found.row("odd").preferred is None
    assert found.row("conv4").preferred == "ane"
    assert found.counts["unknown"] >= 1


def test_an_op_without_an_estimate_is_unknown_but_not_its_neighbours() -> None:
    def build(x: Var) -> Any:
        y = mb.einsum(
            values=(stack_of_convs(x, 8), half(1, 32, 32, 32)),
            equation="nchw,nwhu->nchu",
            name="odd",
        )
        return mb.relu(x=y)

    found = look(build, shape=(1, 64, 32, 32))
    assert found.row("odd").estimate is None
    assert found.row("odd").preferred is None
    assert found.row("conv3").preferred == "ane"


def test_control_flow_is_listed_with_its_blocks() -> None:
    def build(x: Var) -> Any:
        pred = mb.greater(x=mb.reduce_sum(x=x), y=np.float16(0))
        return mb.cond(
            pred=pred,
            _true_fn=lambda: mb.relu(x=x, name="inner"),
            _false_fn=lambda: mb.exp(x=x),
            name="c",
        )

    found = look(build)
    inner = found.row("inner")
    assert (inner.depth, inner.legal, inner.preferred) == (1, False, "cpu")
    assert [f.rule for f in inner.findings] == ["control-flow"]
    (cond,) = (row for row in found.ops if row.op_type == "cond")
    assert (cond.depth, cond.legal) == (0, False)


@pytest.mark.parametrize("units", ["CPU_ONLY", "CPU_AND_GPU"])
def test_without_the_ane_nothing_prefers_it(units: str) -> None:
    found = look(stack_of_convs, compute_units=units)
    assert "ane" not in found.counts
    assert all(row.legal for row in found.ops)
    assert found.status == 2


def test_with_all_units_the_gpu_is_a_guess_and_says_so() -> None:
    found = look(stack_of_convs, compute_units="ALL")
    assert any("guess" in note for note in found.notes)


def test_dynamic_lengths_are_counted_as_one_and_said() -> None:
    found = look(lambda x: mb.relu(x=x), shape=(1, get_new_symbol(), 8))
    assert any("known at run time only count as 1" in note for note in found.notes)
    assert found.ops[0].shape == "1x1x8"


def test_of_several_functions_one_is_inspected() -> None:
    program = program_of(lambda x: mb.relu(x=x, name="r"))
    other = program_of(lambda x: mb.exp(x=x, name="e"))
    program.add_function("other", other.functions["main"])
    assert [row.op_type for row in ane.inspect(program).ops] == ["relu"]
    assert [row.op_type for row in ane.inspect(program, function="other").ops] == ["exp"]
    with pytest.raises(UnknownName, match="unknown function 'othr'; did you mean 'other'"):
        ane.inspect(program, function="othr")


def test_an_inspection_changes_nothing_and_is_plain_data() -> None:
    program = program_of(stack_of_convs)
    before = ane.to_text(program)
    found = ane.inspect(program, M1, inputs={"x": half(*IMAGE)})
    assert ane.to_text(program) == before
    data = json.loads(json.dumps(found.to_json()))
    assert data["target"] == M1
    assert data["ops"][0]["estimate"]["ane"] == pytest.approx(4.67, rel=0.01)
    assert data["cost_us"] == found.cost


def test_samples_show_what_overflows() -> None:
    program = program_of(lambda x: mb.square(x=x, name="squared"))
    rules = {
        f.rule
        for f in ane.inspect(program, M4, inputs={"x": np.full(IMAGE, 300.0)})
        .row("squared")
        .findings
    }
    assert "sampled-overflow" in rules
    rules = {
        f.rule
        for f in ane.inspect(program, M4, inputs={"x": np.full(IMAGE, 3.0)}).row("squared").findings
    }
    assert "sampled-overflow" not in rules


def test_the_estimates_of_known_ops() -> None:
    """Figures of the analysis files: M4, macOS 27.0.1 (751K), in microseconds."""
    found = look(stack_of_convs).row("conv0").estimate
    assert found is not None
    assert found.ane == pytest.approx(4.674, rel=1e-3)
    assert found.cpu == pytest.approx(100.06, rel=1e-3)
    assert not cost.MEMORY_CLASS & set(cost.FORMULAS) - {"avg_pool", "l2_pool", "max_pool"}
