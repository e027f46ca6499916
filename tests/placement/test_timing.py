"""Times: bands, parts, reasons for none, forms of weights, chains, loops, ratios, and wrong versions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.compressing.weight_forms import PAIRS, form_ratio
from anesurgery.errors import LoadError
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement import timing
from anesurgery.placement.durations import Time, change, total
from anesurgery.placement.score import Expected
from anesurgery.placement.target import Target
from anesurgery.placement.timing import (
    INT8,
    JOINT,
    OF_CPU,
    PALETTE,
    W8A8,
    Load,
    OpLoad,
    load_of,
    longest_chain,
    table,
    time_of,
)
from anesurgery.placement.verdicts import judge_shaped

M1, M4, M5 = map(Target.parse, ("M1", "M4", "M5 Pro"))


def told(*ops: OpLoad, target: Target = M4, **more: Any) -> Time:
    time = time_of(Load(ops, **more), target)
    assert isinstance(time, Time), time
    return time


def program(decoded: bool = False) -> Program:
    weight = np.zeros((512, 512, 1, 1), np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 512, 64, 64), types.fp16)], opset_version=ct.target.iOS16)
    def built(x: Any) -> Any:
        if not decoded:
            return mb.conv(x=x, weight=weight)
        codes = np.zeros(512 * 512 // 8, np.uint8)
        lut = mb.constexpr_lut_to_dense(
            indices=codes, lut=np.array([0, 1], np.float16), shape=np.array([512, 512, 1, 1], np.uint32)
        )
        return mb.conv(x=x, weight=lut)

    return built


def recurrence(steps: int) -> Program:
    """So many sigmoids of a small state, each of the one before, beside a convolution."""
    weight = np.ones((64, 64, 3, 3), np.float16)

    @mb.program(
        input_specs=[mb.TensorSpec((1, 64, 128, 128), types.fp16), mb.TensorSpec((1, 64, 1, 1), types.fp16)],
        opset_version=ct.target.iOS16,
    )
    def built(x: Var, h: Var) -> tuple[Var, Var]:
        for _ in range(3):
            x = mb.conv(x=x, weight=weight, pad_type="same")
        for _ in range(steps):
            h = mb.sigmoid(x=h)
        return x, h

    return built


@pytest.mark.parametrize(
    ("target", "units", "words"),
    [("any", None, "name one chip"), ("M4", "ALL", "CPU_AND_NE only"), ("A13", None, "no published time")],
)
def test_none_with_a_reason(target: str, units: str | None, words: str) -> None:
    inspection = ane.inspect(program(), target, compute_units=units)
    assert inspection.time is None
    assert {row.ms for row in inspection.ops} == {None}
    assert any(note.startswith("no time: ") and words in note for note in inspection.notes)


def test_a_time_has_a_band_parts_ops_and_segments() -> None:
    inspection = ane.inspect(program(), "M4")
    time, plain = inspection.time, inspection.to_json()
    assert time is not None
    assert time.low < time.ms < time.high
    assert sum(time.parts.values()) == pytest.approx(time.ms)
    of_ops = sum(row["ms"] for row in plain["ops"])
    assert of_ops == pytest.approx(time.ms - time.parts["dispatch"])
    assert sum(segment["ms"] for segment in plain["segments"]) == pytest.approx(of_ops)
    assert (plain["time"]["ms"], plain["time"]["parts"]) == (time.ms, time.parts)
    assert time.measurements > 2
    assert time.source


def test_weights_are_read_in_each_round_of_a_loop() -> None:
    once = told(OpLoad("linear", 10.0, weight=64_190_000))
    often = told(OpLoad("linear", 10.0, weight=64_190_000, count=8))
    assert once.parts["weights"] + once.parts["products"] == pytest.approx(1.0, rel=1e-3)
    assert often.ms - once.ms == pytest.approx(7.0, rel=1e-3)


def test_the_rounds_of_a_loop_are_counted_and_unknown_ones_have_no_time() -> None:
    weight = np.ones((256, 256), np.float16)

    def built(rounds: int | None) -> Program:
        @mb.program(input_specs=[mb.TensorSpec((1, 256), types.fp16)], opset_version=ct.target.iOS17)
        def looped(x: Var) -> Var:
            start = mb.add(x=np.float16(0), y=np.float16(0))
            limit = mb.reduce_sum(x=x) if rounds is None else np.float16(rounds)
            wide = mb.conv(
                x=mb.tile(x=mb.reshape(x=x, shape=(1, 256, 1, 1)), reps=(1, 1, 128, 128)),
                weight=weight.reshape(256, 256, 1, 1),
            )

            def body(i: Var, y: Var) -> tuple[Var, Var]:
                return mb.add(x=i, y=np.float16(1)), mb.linear(x=y, weight=weight)

            looped = mb.while_loop(_cond=lambda i, y: mb.less(x=i, y=limit), _body=body, loop_vars=(start, x))
            return mb.add(x=looped[1], y=mb.reduce_mean(x=wide))

        return looped

    few, many = (ane.inspect(built(n), "M4") for n in (4, 64))
    inner = [next(row.ms for row in one.ops if row.op_type == "linear") for one in (few, many)]
    assert inner[0] is not None
    assert inner[1] == pytest.approx(16 * inner[0])
    unknown = ane.inspect(built(None), "M4")
    assert unknown.time is None
    assert any("how often a loop runs" in note for note in unknown.notes)


def test_what_waits_for_one_another_is_not_free() -> None:
    short, long = (ane.inspect(recurrence(n), "M4").time for n in (1, 400))
    assert short is not None
    assert long is not None
    assert long.parts["waiting"] > 0.02
    assert long.parts["waiting"] > 10 * short.parts.get("waiting", 0.0)
    assert change(short, long).high > change(short, long).ratio * 1.05  # what a step takes is hardly known


def test_the_longest_chain_leaves_out_what_stands_beside_it() -> None:
    ops = [op for op in recurrence(5).functions["main"].operations if op.op_type != "const"]
    assert {op.op_type for op in longest_chain(ops)} == {"sigmoid"}
    assert len(longest_chain(ops)) == 5
    assert longest_chain([]) == set()


def test_a_change_of_the_unit_costs() -> None:
    ops = OpLoad("conv", 900.0), OpLoad("add", 50.0, cpu=True)
    assert told(*ops, switches=2).ms - told(*ops).ms == pytest.approx(2 * table()["switch_us"]["16"] / 1e3)


def test_weights_in_the_notch_stall_on_an_m4_only() -> None:
    plain, notched = OpLoad("linear", 10.0, weight=10**8), OpLoad("linear", 10.0, weight=10**8, notch=True)
    assert told(notched).ms > 1.5 * told(plain).ms
    assert told(notched, target=M1).ms == told(plain, target=M1).ms


def test_doubtful_ops_widen_the_band_until_nothing_can_be_said() -> None:
    sure = OpLoad("conv", 2000.0), OpLoad("gelu", 100.0)
    moved = Load((sure[0], OpLoad("gelu", 300.0, cpu=True)), 2)
    time, other, both = told(*sure), told(*moved.ops, switches=2), told(*sure, doubtful=moved)
    assert (both.low, both.high) == (min(time.low, other.low), max(time.high, other.high))
    far = time_of(Load(sure, doubtful=Load((OpLoad("gelu", 20000.0, cpu=True),))), M4)
    assert isinstance(far, str)
    assert "of all ops it is not known if the Neural Engine runs them: 1.46 ms" in far


def test_a_model_that_may_run_on_the_cpu_as_a_whole_spans_both() -> None:
    judged = judge_shaped(ane.load(program()), None, M4, ()).judged
    plain, doubted = (load_of(judged, ["ane"], doubt) for doubt in (False, True))
    assert plain.doubtful is None
    assert doubted.doubtful is not None
    assert doubted.doubtful.on_cpu
    assert isinstance(time_of(plain, M4), Time)
    why = time_of(doubted, M4)
    assert isinstance(why, str)
    assert why.startswith("of all ops it is not known")


def test_a_head_too_wide_for_the_engine_has_a_time() -> None:
    weight = np.zeros((70_000, 64), np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 64), types.fp16)], opset_version=ct.target.iOS16)
    def headed(x: Var) -> Var:
        wide = mb.tile(x=mb.reshape(x=x, shape=(1, 64, 1, 1)), reps=(1, 1, 128, 128))
        for _ in range(3):
            wide = mb.conv(x=wide, weight=np.ones((64, 64, 3, 3), np.float16), pad_type="same")
        return mb.linear(x=mb.reshape(x=mb.reduce_mean(x=wide, axes=[2, 3]), shape=(1, 64)), weight=weight)

    inspection = ane.inspect(headed, "M4")
    assert next(row for row in inspection.ops if row.op_type == "linear").preferred == "cpu"
    assert inspection.time is not None
    assert inspection.time.parts["CPU"] > 0


FORMS = [
    (PALETTE, 1, M1, ""),
    (PALETTE, 1024, M5, ""),
    (PALETTE, 1024, M4, "a palette for more than 16 positions, and times of that were published on H17 only"),
    (INT8, 1, M1, ""),
    (INT8, 1024, M1, ""),
    (INT8, 1024, M4, "int8 for more than 16 positions, and times of that were published on H13, H14, H15 only"),
    (W8A8, 1024, M1, "int8, with int8 activations"),
    (JOINT, 1, M4, "several compressions in one, and no time of that was published"),
]


@pytest.mark.parametrize(("form", "rows", "target", "words"), FORMS)
def test_forms_have_a_time_where_they_were_measured(form: str, rows: int, target: Target, words: str) -> None:
    found = time_of(Load((OpLoad("linear", 500.0, weight=10**7, form=form, rows=rows),)), target)
    assert isinstance(found, str) == bool(words)
    assert words in str(found)


def test_the_form_of_a_weight_is_found() -> None:
    judged = judge_shaped(ane.load(program(decoded=True)), None, M5, ()).judged
    (op,) = load_of(judged, ["ane"]).ops
    assert (op.form, op.rows) == (PALETTE, 64 * 64)
    assert op.weight == 512 * 512 // 8 + 2 * 2 + 4 * 4
    inspection = ane.inspect(program(decoded=True), "M4")
    assert inspection.time is None
    assert any("a palette for more than" in note for note in inspection.notes)


@pytest.mark.parametrize("pair", [p for p in json.loads(PAIRS.read_text(encoding="utf-8")) if "rows" in p])
def test_the_sign_of_a_published_pair_of_forms_is_never_stated_wrongly(pair: dict[str, Any]) -> None:
    """A gate of 2560 to 10240: bound by its products at many positions, by its weights at one."""
    bytes_, us = 52_428_800, 7.0 * pair["rows"]
    plain = OpLoad("linear", us, weight=bytes_)
    stored = int(bytes_ * pair.get("stored", 0.25 if pair["what"] in ("palette", "int4") else 0.5))
    coded = OpLoad("linear", us, weight=stored, form=pair["what"], rows=pair["rows"])
    target = Target.parse(pair["chip"])
    before, after = (time_of(Load((op,)), target) for op in (plain, coded))
    assert isinstance(before, Time)
    if isinstance(after, str):
        return
    found, measured = change(before, after), form_ratio(pair)
    assert not (found.high < 1 <= measured)
    assert not (found.low > 1 >= measured)


def test_a_form_that_is_free_would_be_stated_wrongly() -> None:
    """The wrong version: a palette of many positions that only reads fewer bytes."""
    blind = json.loads(json.dumps(table()))
    blind["forms"]["palette"] |= {"grows": 0.0, "off": 0.0}
    plain = OpLoad("linear", 450.0, weight=52_428_800)
    coded = OpLoad("linear", 450.0, weight=13_107_200, form=PALETTE, rows=64)
    for numbers, faster in ((table(), False), (blind, True)):
        before, after = (time_of(Load((op,)), M5, {**numbers, "unlike": 0.0}) for op in (plain, coded))
        assert isinstance(before, Time)
        assert isinstance(after, Time)
        assert (change(before, after).high < 1) is faster


def test_equal_sides_have_a_ratio_of_one() -> None:
    side = told(OpLoad("conv", 900.0))
    same = change(side, side)
    assert (same.ratio, same.low, same.high) == pytest.approx((1, 1, 1))
    assert same.verdict == "as fast as before"


def test_common_errors_cancel_and_others_do_not() -> None:
    whole, half = told(OpLoad("conv", 9000.0)), told(OpLoad("conv", 3000.0))
    other = told(OpLoad("matmul", 8000.0))
    assert change(whole, half).verdict == "about 2.9 times as fast (likely 1.9 to 4.3)"
    assert change(half, whole).verdict == "about 2.9 times as slow (likely 1.9 to 4.3)"
    assert change(whole, other).verdict.startswith("perhaps 1.1")
    wide, near = change(whole, other), change(whole, told(OpLoad("conv", 8900.0)))
    assert wide.low < wide.ratio < wide.high
    assert near.high / near.low < wide.high / wide.low


def test_times_whose_bands_lie_apart_are_told_apart() -> None:
    """A palette has a key of its own, whose error is not shared with plain weights."""
    plain = told(OpLoad("linear", 7200.0, weight=52_428_800), target=M5)
    coded = told(OpLoad("linear", 7200.0, weight=13_107_200, form=PALETTE, rows=1024), target=M5)
    assert coded.low > plain.high
    slower, faster = change(plain, coded), change(coded, plain)
    assert (slower.better, faster.better) == (False, True)
    assert slower.verdict.startswith("about 6.8 times as slow ")
    assert faster.verdict.startswith("about 6.8 times as fast ")
    assert slower.low == pytest.approx(coded.low / plain.high)
    near = told(OpLoad("linear", 7200.0, weight=13_107_200, form=PALETTE, rows=64), target=M5)
    assert near.low < plain.high
    assert change(plain, near).better is None
    assert change(plain, near).verdict.startswith("perhaps ")


@pytest.mark.parametrize(("order", "paid"), [("a", 0), ("ac", 0), ("ca", 1), ("aca", 2), ("acac", 2), ("c", 0)])
def test_the_way_back_to_the_cpu_is_part_of_a_prediction(order: str, paid: int) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 4, 8, 8), types.fp16)], opset_version=ct.target.iOS16)
    def built(x: Var) -> Var:
        for _ in order:
            x = mb.relu(x=x)
        return x

    judged = judge_shaped(ane.load(built), None, M4, ()).judged
    assert load_of(judged, ["cpu" if unit == "c" else "ane" for unit in order]).switches == paid


@pytest.mark.parametrize("op", [OpLoad("gelu", 300.0, cpu=True), OpLoad("linear", 300.0, weight=100, cpu=True)])
def test_what_runs_on_the_cpu_alone_has_a_time_within_a_wide_band(op: OpLoad) -> None:
    """The wrong version has the band of a model with some ops there: published times are an eighth of it."""
    found = told(op)
    assert (found.ms, found.measurements, found.source) == (0.3, 0, OF_CPU)
    assert found.low < found.ms / 8
    assert found.high > 8 * found.ms
    assert time_of(Load(()), M4) == "no estimate of any op is known"


def test_a_time_of_the_cpu_alone_decides_nothing() -> None:
    """It is Core ML's cost, which decides; the wrong version pays digits for it."""
    there, here = (told(OpLoad("conv", 300.0, cpu=cpu)) for cpu in (False, True))
    engine, cpu = (Expected(300.0, 300.0, time) for time in (there, here))
    assert engine.times(engine) is not None
    assert engine.times(cpu) is None
    assert cpu.times(cpu) is None
    moved = change(here, there)
    assert (moved.low, moved.high) == pytest.approx((there.low / here.high, there.high / here.low))


def test_one_verdict_is_said_everywhere() -> None:
    """The wrong version: perhaps 3.2 times as fast, above a time without a difference that can be told."""
    whole, other = told(OpLoad("conv", 9000.0)), told(OpLoad("matmul", 8000.0))
    found = change(whole, other)
    assert found.better is None
    assert str(found).endswith(found.verdict)
    assert found.to_json()["verdict"] == found.verdict
    assert found.verdict.startswith("perhaps ")


def test_a_product_of_a_row_takes_the_reading_of_its_weights_on_either_unit() -> None:
    head = OpLoad("linear", 4425.0, weight=1_050_929_664)
    chip = Target.parse("M4 Pro")
    there, here = told(head, target=chip), told(head._replace(cpu=True), target=chip)
    assert here.ms == pytest.approx(8.315, rel=1e-3)  # as published
    assert there.ms == pytest.approx(here.ms + there.parts["dispatch"])


def test_a_pipeline_takes_the_sum() -> None:
    one, other = told(OpLoad("conv", 900.0)), told(OpLoad("linear", 300.0))
    both = total([one, other])
    assert both.ms == pytest.approx(one.ms + other.ms)
    assert (both.low, both.high) == pytest.approx((one.low + other.low, one.high + other.high))


def test_where_nothing_was_changed_there_is_one_time() -> None:
    surgery = ane.apply(program(), "auto", target="M4")
    assert surgery.time is not None
    assert f"time {surgery.time.after}" in " ".join(surgery.details.split())
    assert " -> " not in surgery.details.split("time ")[1].splitlines()[0]


def test_another_table_is_used_by_name_and_a_wrong_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = tmp_path / "mine.json", ane.inspect(program(), "M4").time
    slower = {**table(), "factor": {name: 3 * value for name, value in table()["factor"].items()}}
    path.write_text(json.dumps(slower), encoding="utf-8")
    monkeypatch.setenv(timing.VARIABLE, str(path))
    mine = ane.inspect(program(), "M4").time
    assert plain is not None
    assert mine is not None
    assert mine.parts["products"] == pytest.approx(3 * plain.parts["products"])
    bad = tmp_path / "bad.json"
    for text in (
        "",
        "[]",
        "[" * 100_000,
        '{"format": "other"}',
        '{"format": "anesurgery.times/1", "factor": {"16": 1}}',
    ):
        bad.write_text(text, encoding="utf-8")
        monkeypatch.setenv(timing.VARIABLE, str(bad))
        timing.read_table.cache_clear()
        with pytest.raises(LoadError, match="is no table of times"):
            ane.inspect(program(), "M4")
    assert math.isfinite(mine.ms)


@pytest.mark.parametrize(
    ("width", "stride", "share"), [(16, 4, 1 / 4), (5, 2, 3 / 5), (3, 4, 1 / 3), (4, 1, 1)]
)
def test_zeros_that_a_transposed_convolution_inserts_take_no_time_on_the_cpu(
    width: int, stride: int, share: float
) -> None:
    """The wrong version: an inverse spectrum on the CPU takes as long as 256 of them."""

    @mb.program(input_specs=[mb.TensorSpec((1, 8, 64), types.fp16)], opset_version=ct.target.iOS16)
    def built(x: Var) -> Var:
        return mb.conv_transpose(x=x, weight=np.ones((8, 1, width), np.float16), strides=[stride])

    (judged,) = judge_shaped(ane.load(built), None, M4, ()).judged
    on_cpu, on_ane = (load_of([judged], [unit]).ops[0].us for unit in ("cpu", "ane"))
    assert judged.estimate is not None
    assert judged.estimate.cpu is not None
    assert on_cpu == pytest.approx(judged.estimate.cpu * share)
    assert on_ane == judged.estimate.ane
