"""Targets, estimates and the whole inspection of ML Programs."""

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
from anesurgery.placement.target import CHIPS, GROUPS

HALF, IMAGE = types.fp16, (1, 64, 32, 32)
M4, M1 = "M4/macOS 27", "M1/macOS 14"


def half(*shape: int) -> Any:
    return (np.random.default_rng(0).standard_normal(shape) * 0.05).astype(np.float16)


def program_of(build: Callable[[Var], Any], shape: tuple[Any, ...] = IMAGE, dtype: Any = HALF) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=dtype)], opset_version=ct.target.iOS18)(
        lambda x: build(x)
    )


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
    ("text", "beyond"),
    [
        ("M4/macOS 27", ""),
        ("M4/macOS 27.0.1", ""),
        ("M4/macOS 15", "M4/macOS 15"),
        ("M4/iOS 26", "M4/iOS 26"),
        ("M4 Max/macOS 27", "M4 Max/macOS 27"),
        ("M4 Pro", "M4 Pro"),
        ("M4", "M4 on other systems"),
        ("M1/macOS 27", "M1/macOS 27"),
        ("M4+/macOS 27", "M4+/macOS 27"),
        ("any", "any"),
    ],
)
def test_beyond_the_measured_chip_and_system_the_report_says_so(text: str, beyond: str) -> None:
    notes = [n for n in look(lambda x: mb.relu(x=x), text).notes if "extrapolated" in n]
    said = f"measurements on a base M4 with macOS 27.0.1 are extrapolated to {beyond}"
    assert notes == ([said] if beyond else [])


def test_compiler_tables_raise_doubts_on_every_kind_of_m4() -> None:
    for text in ("M4/macOS 27", "M4/macOS 15", "M4 Max/macOS 26"):
        row = look(lambda x: mb.avg_pool(x=x, kernel_sizes=[32, 32], pad_type="valid"), text).ops[-1]
        assert (row.legal, row.findings[0].rule) == (None, "pool-window")


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("M9", UnknownName, "unknown chip or device 'M9'; did you mean 'M"),
        ("M1/macOS 11", SurgeryError, "nothing is known about macOS 11; the oldest release is macOS 12"),
        (
            "iPhone 11/iOS13",
            SurgeryError,
            "nothing is known about iOS13; the oldest release is iOS 15: give that",
        ),
        ("M1/windows 3", UnknownName, "unknown OS 'windows 3'"),
        ("A19/iOS 17", SurgeryError, "iOS 17 does not run on A19"),
        ("M1/macOS 14/fast", SurgeryError, 'write it as "M1/macOS 14"'),
        ("M1/macOS", UnknownName, "unknown OS 'macOS'; did you mean 'macOS "),
        ("iOS", UnknownName, "unknown OS 'iOS'; did you mean 'iOS "),
        ("", SurgeryError, "target ''.*write it as"),
        ("M1/", SurgeryError, "target 'M1/'.*write it as"),
        ("/macOS 14", SurgeryError, "write it as"),
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


def test_a_finding_says_what_where_why_and_whence() -> None:
    found = look(lambda x: mb.max_pool(x=x, kernel_sizes=[1, 9], strides=[1, 1], pad_type="same", name="wide"))
    (finding,) = (f for f in found.row("wide").findings if f.kind == "legality")
    assert isinstance(finding, Finding)
    assert finding.message == "the pooling window is 9 wide; the engine supports 1 to 8, and 32"
    assert (finding.op, finding.grade, finding.scope) == (
        "wide",
        Grade.MEASURED,
        "all chips, seen on M4, macOS 27.0.1",
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
            values=(stack_of_convs(x, 8), half(1, 32, 32, 32)), equation="nchw,nwhu->nchu", name="odd"
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
            pred=pred, _true_fn=lambda: mb.relu(x=x, name="inner"), _false_fn=lambda: mb.exp(x=x), name="c"
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


@pytest.mark.parametrize("target", ["M4/macOS 27", "M4 Pro/macOS 26"])
def test_with_all_units_the_gpu_is_a_guess_and_says_so(target: str) -> None:
    found = look(stack_of_convs, target, compute_units="ALL")
    assert any("guess" in note for note in found.notes)
    assert found.counts["ane"] >= len(found.ops) - 1  # the last relu is a tie


def scaled_by_row(rows: int, columns: int) -> Any:
    data = np.ones((rows, columns), types.np_int4_dtype)
    return mb.constexpr_blockwise_shift_scale(data=data, scale=half(rows, 1))


@pytest.mark.parametrize(
    ("rows", "weight", "unit"),
    [
        (512, lambda: half(512, 512), None),
        (4096, lambda: half(1024, 1024), "ane"),
        (4096, lambda: scaled_by_row(1024, 1024), None),
    ],
)
def test_with_all_units_the_gpu_may_take_small_decoders_and_int4(
    rows: int, weight: Callable[[], Any], unit: str | None
) -> None:
    """On an M4 (macOS 26.6.2) it took a decoder of 2.4 GFLOP, and not one of 30; and most of one in int4."""

    def layers(x: Var) -> Var:
        for _ in range(2):
            x = mb.linear(x=x, weight=weight())
        return x

    shape = (1, rows, 512 if rows == 512 else 1024)
    found = look(layers, "M4/macOS 26", shape=shape, compute_units="ALL")
    assert {row.preferred for row in found.ops if row.op_type == "linear"} == {unit}
    assert any("take all of it" in note for note in found.notes) == (unit is None)
    assert look(layers, "M4/macOS 26", shape=shape).counts.keys() == {"ane"}


@pytest.mark.parametrize(
    ("target", "units"),
    [("M5 Max/macOS 26", "ALL"), ("M4 Max", "ALL"), ("M1", "ALL"), ("A17", "ALL"), ("M4", "CPU_AND_GPU")],
)
def test_where_the_gpu_was_not_fitted_its_share_is_unknown_with_the_reason(target: str, units: str) -> None:
    found = look(stack_of_convs, target, compute_units=units)
    assert found.counts == {"unknown": len(found.ops)}
    assert any("is not known here" in note and units in note for note in found.notes)
    small = look(lambda x: mb.relu(x=x), target, shape=(1, 8), compute_units=units)
    assert small.counts == {"cpu": 1}  # no GPU pays for eight numbers


def test_without_a_default_shape_dynamic_lengths_count_as_one_and_it_says_so() -> None:
    found = look(lambda x: mb.relu(x=x), shape=(1, get_new_symbol(), 8))
    assert any("dynamic lengths count as 1" in note for note in found.notes)
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
        f.rule for f in ane.inspect(program, M4, inputs={"x": np.full(IMAGE, 300.0)}).row("squared").findings
    }
    assert "sampled-overflow" in rules
    messages = {
        f.rule: f.message
        for f in ane.inspect(program, M4, inputs={"x": np.full(IMAGE, 3.0)}).row("squared").findings
    }
    assert "sampled-overflow" not in messages
    assert messages["num-square"].endswith("; on 1 sample it reads magnitudes up to 3, and gives up to 9")


def test_the_estimates_of_known_ops() -> None:
    """Figures of the analysis files: M4, macOS 27.0.1 (751K), in microseconds."""
    found = look(stack_of_convs).row("conv0").estimate
    assert found is not None
    assert found.ane == pytest.approx(4.674, rel=1e-3)
    assert found.cpu == pytest.approx(100.06, rel=1e-3)
    assert not cost.MEMORY_CLASS & set(cost.FORMULAS) - {"avg_pool", "l2_pool", "max_pool"}


def list_of(x: Var) -> Any:
    held = mb.list_write(ls=mb.make_list(init_length=2, elem_shape=(4,), dtype="fp16"), index=0, value=x)
    return mb.list_read(ls=held, index=1), mb.list_length(ls=held)


def loop_of(x: Var) -> Any:
    def below(y: Var) -> Any:
        return mb.less(x=mb.reduce_sum(x=y), y=np.float16(9))

    def again(y: Var) -> Any:
        return (mb.cond(pred=below(x), _true_fn=lambda: mb.relu(x=y), _false_fn=lambda: mb.exp(x=y)),)

    return mb.while_loop(_cond=below, _body=again, loop_vars=(x,))


ODD: dict[str, tuple[Callable[[Var], Any], tuple[Any, ...]]] = {
    "lists": (list_of, (4,)),
    "loops in loops": (loop_of, (4,)),
    "no elements": (lambda x: mb.relu(x=x), (1, 0, 4)),
    "no axes": (lambda x: mb.exp(x=mb.squeeze(x=x)), (1,)),
    "no ops": (lambda x: x, (1, 4)),
    "an input that is an output": (lambda x: (x, mb.relu(x=x)), (1, 4)),
    "an output twice": (lambda x: [mb.relu(x=x)] * 2, (1, 4)),
    "a name of markup": (lambda x: mb.relu(x=x, name="<b>[red]&"), (1, 4)),
    "lengths of the run": (
        lambda x: mb.transpose(x=mb.matmul(x=x, y=x, transpose_y=True), perm=[1, 0, 2]),
        (get_new_symbol(), get_new_symbol(), 8),
    ),
    "shapes of the run": (lambda x: mb.fill(shape=mb.shape(x=x), value=np.float16(1)), (1, get_new_symbol())),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("target", [M4, "any"])
def test_odd_programs_have_reports(case: str, target: str) -> None:
    build, shape = ODD[case]
    found = look(build, target, shape=shape)
    json.dumps(found.to_json(), allow_nan=False)
    assert found.model in found.details
    assert "<b>[red]" not in found._repr_html_()


def test_a_program_without_functions_is_refused() -> None:
    with pytest.raises(SurgeryError, match="has no function"):
        ane.inspect(Program())
