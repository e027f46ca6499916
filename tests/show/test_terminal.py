"""What a terminal shows of an inspection, and the groups behind all reports."""

from __future__ import annotations

import itertools
import re
from functools import partial
from typing import Any

import pytest
import report_models
from report_models import M1

from anesurgery.placement import Estimate, Inspection, Memory, OpRow, Segment, Target
from anesurgery.placement.durations import Time
from anesurgery.show import summary, terminal
from anesurgery.show.console import as_text, bars

finding = partial(report_models.finding, source="a table of ops; more of it")
row = partial(report_models.row, flop=100, estimate=Estimate(1.0, 2.0))


def details(found: Inspection) -> str:
    return as_text(terminal.inspection_report(found))


def text(found: Inspection) -> str:
    return as_text(terminal.short_report(found))


def inspection(rows: list[OpRow], **changes: Any) -> Inspection:
    runs = [(u, [r.name for r in g]) for u, g in itertools.groupby(rows, key=lambda r: r.preferred)]
    segments = tuple(
        Segment(k, unit, tuple(names), {}, {}, (k + 1,) if k + 1 < len(runs) else ())
        for k, (unit, names) in enumerate(runs)
    )
    values: dict[str, Any] = {"model": "model", "target": M1, "ops": tuple(rows), "segments": segments}
    return Inspection(**(values | changes))


def twenty(**changes: Any) -> Inspection:
    rows = [row(0, "cast", "cpu", False, findings=(finding(remedy="embedding_matmul", op="cast_0"),))]
    rows += [row(k, "conv", "ane") for k in range(1, 17)]
    rows += [row(17, "norm", None, None), row(18, "linear", "cpu"), row(19, "linear", "cpu")]
    rows[5] = row(5, "softmax", "ane", findings=(finding("slow-axis", kind="speed", message="axis -1"),))
    return inspection(rows, **changes)


def large(count: int = 2000) -> Inspection:
    cut = finding("cut", message="stride -1", advice="flip it before")
    return inspection(
        [
            row(k, "slice", "cpu", False, findings=(cut,)) if k % 400 == 7 else row(k, "conv", "ane")
            for k in range(count)
        ]
    )


def test_a_report_says_what_matters_in_its_lines() -> None:
    said = details(
        twenty(
            memory=Memory(124_000_000, 5_000_000, 1_000_000, 10**9, 1),
            findings=(finding("io", kind="interface", message="output %y is fp32"),),
            notes=("estimates are no run times",),
        )
    )
    lines = said.splitlines()
    assert " ".join(" ".join(lines[:2]).split()) == (
        "On M1/macOS 14, 16 to 17 of 20 ops (80 to 85% of the work) run on the Neural Engine; cast cast_0 "
        "runs on the CPU: casts to int32; try embedding_matmul"
    )
    assert lines[2] == "model on M1/macOS 14"
    assert lines[4] == "█ Neural Engine 16   ▃ CPU 3   ░ not known 1"
    assert lines[5] == "on the Neural Engine: 80.0% to 85.0% of ops, 80.0% to 85.0% of the work"
    assert lines[6] == "4 segments, 3 switches | weights 124 MB of 1 GB, 1 chunk"
    table = lines[lines.index("ops that need attention") :]
    assert table[1].split("  ")[0] == "op type"
    assert table[2].split() == ["cast", "1", "cast_0", "no", "CPU", "embedding_matmul"]
    assert table[3].strip() == "casts to int32"
    assert table[4].strip() == "measured: a table of ops"
    assert table[5].split() == ["norm", "1", "norm_17", "unknown", "unknown", "none"]
    assert table[7].split() == ["linear", "2", "linear_18", "yes", "CPU", "none"]
    assert "output %y is fp32" in said
    assert "axis -1" in said
    assert said.endswith("notes\n- estimates are no run times")


def test_reports_fit_80_columns() -> None:
    long = "a_name_of_forty_characters_and_some_more_"
    named = inspection(
        [row(i, long, "cpu", False, name=f"{long}{i}", findings=(finding(long),)) for i in (0, 1)]
    )
    for found in (large(), twenty(), named):
        for said in (str(found), as_text(terminal.difference_report(found, large()))):
            assert max(map(len, said.splitlines())) <= 80


def test_the_bar_shows_units_by_height_in_file_order() -> None:
    bar = terminal.device_bar(twenty()).plain.splitlines()[0]
    assert len(bar) == terminal.BAR
    assert [glyph for glyph, _ in itertools.groupby(bar)] == ["▃", "█", "░", "▃"]


def timed(cpu: float, ane: float, *, total: float) -> Inspection:
    segments = (Segment(0, "cpu", (), {}, {}, (), cpu), Segment(1, "ane", (), {}, {}, (), ane))
    time = Time(total, total / 2, 2 * total, 4, "somebody", {}, {})
    return Inspection("model", M1, (), segments=segments, time=time)


def test_two_bars_of_time_have_one_scale() -> None:
    before, after = timed(14.0, 0.6, total=15.0), timed(1.2, 0.6, total=2.0)
    first, second, legend = terminal.unit_bars(before, after).plain.splitlines()
    assert first.startswith("before 15 ms █")
    assert second.startswith("after 2 ms")
    lengths = [sum(map(line.count, "█▃·")) for line in (first, second)]
    assert abs(lengths[1] / lengths[0] - 2 / 15) < 0.03
    assert legend == "█ Neural Engine 0.6 ms   ▃ CPU 14 -> 1.2 ms   · dispatch 0.4 -> 0.2 ms"


def test_bars_of_time_show_cpu_and_engine_always_and_the_rest_from_a_cell_on() -> None:
    said = terminal.unit_bars(timed(10.0, 0.01, total=10.02), timed(5.0, 0.02, total=7.0)).plain.splitlines()
    assert said[-1] == "█ Neural Engine 0.01 -> 0.02 ms   ▃ CPU 10 -> 5 ms   · dispatch 0.01 -> 2 ms"
    assert said[0].count("█") == said[1].count("█") == 1
    (_, legend) = terminal.unit_bars(timed(10.0, 0.01, total=10.02)).plain.splitlines()
    assert legend == "█ Neural Engine 0.01 ms   ▃ CPU 10 ms"


def test_a_legend_breaks_between_its_entries() -> None:
    looks = dict.fromkeys(("first", "second", "third"), ("█", "cyan"))
    shown = bars([], {name: f"{name} with words of some length" for name in looks}, looks).plain
    assert shown.splitlines() == [
        "█ first with words of some length   █ second with words of some length",
        "█ third with words of some length",
    ]


def test_two_bars_show_ops_where_a_time_is_not_known() -> None:
    said = terminal.unit_bars(twenty(), timed(1.0, 1.0, total=2.0)).plain
    assert said.startswith("before ▃")
    assert "Neural Engine 16 -> " in said


@pytest.mark.parametrize("width", [11, 24, 60, 96, 590])
def test_one_op_among_thousands_keeps_a_cell(width: int) -> None:
    cells = summary.cells(large(), width)
    assert len(cells) == width
    assert [u for u, _ in itertools.groupby(cells)].count("cpu") == 5


def test_more_runs_than_cells_show_the_most_frequent_unit() -> None:
    rows = [row(k, "conv", "cpu" if k % 3 == 0 else "ane") for k in range(300)]
    assert summary.cells(inspection(rows), 20) == ["ane"] * 20


def test_two_thousand_ops_are_told_in_few_lines() -> None:
    said = details(large())
    assert len(said.splitlines()) < 15
    assert "slice    5    slice_7   no       CPU      none" in said
    assert "do: flip it before" in said
    assert "99.8% of ops" in said


def test_one_reason_is_said_once_for_all_op_types() -> None:
    rows = [row(k, f"type{k}", "cpu") for k in range(5)]
    said = details(inspection(rows))
    assert said.count("not faster on the Neural Engine, by estimate") == 1
    assert all(f"type{k}" in said for k in range(5))


def test_what_cannot_run_comes_before_what_is_unknown_and_what_could() -> None:
    rows = [row(0, "add", "cpu"), row(1, "norm", None, None), row(2, "cast", "cpu", False)]
    assert [g.op_type for g in summary.attention(inspection(rows))] == ["cast", "norm", "add"]


def test_an_op_that_two_rules_block_is_in_both_groups() -> None:
    both = row(0, "conv", "cpu", False, findings=(finding("a"), finding("b"), finding("c", kind="speed")))
    groups = summary.attention(inspection([both]))
    assert [g.finding.rule for g in groups if g.finding] == ["a", "b"]
    assert [g.finding.rule for g in summary.other_findings(inspection([both]))] == ["c"]


def test_a_doubt_of_each_part_is_listed_once() -> None:
    """The wrong version takes the second for one that the table lacks."""
    parts = {
        name: inspection([row(0, "gather", None)], findings=(finding("embedding-rows", message=name),))
        for name in ("%e1", "%e2")
    }
    whole = Inspection("pipeline", M1, (), parts=parts)
    (group,) = summary.attention(whole)
    assert group.messages == ("%e1", "%e2")
    assert not summary.other_findings(whole)


def test_compute_units_without_the_ane_are_the_reason() -> None:
    target = Target.parse("M1", "CPU_ONLY")
    assert "the compute units exclude the Neural Engine" in details(
        inspection([row(0, "conv", "cpu")], target=target)
    )


def test_markup_and_control_characters_in_names_are_shown_as_they_are() -> None:
    evil = row(0, "[red]cast", "cpu", False, name="x[/]\x1b[31m")
    said = text(inspection([evil]))
    assert "[red]cast" in said
    assert "x[/]�[31m" in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "There are no ops to place."),
        ([row(0, "x", None, None)], "On M1/macOS 14, it is not known where the ops run"),
        ([row(0, "x", "ane")], "On M1/macOS 14, every op runs on the Neural Engine"),
        ([row(0, "x", "cpu", False)], "On M1/macOS 14, no op runs on the Neural Engine"),
        (
            [row(0, "x", "cpu"), row(1, "x", "cpu", False)],
            "On M1/macOS 14, no op runs on the Neural Engine: 1 of 2 could, but would not be faster there, by "
            "estimate",
        ),
        (
            [row(0, "x", "cpu"), row(1, "x", None)],
            "On M1/macOS 14, 0 to 1 of 2 ops (0 to 50% of the work) run on the Neural Engine",
        ),
        (
            [row(0, "x", "ane"), row(1, "x", "cpu")],
            "On M1/macOS 14, 1 of 2 ops (50% of the work) runs on the Neural Engine",
        ),
    ],
)
def test_verdicts(rows: list[OpRow], words: str) -> None:
    assert summary.full_sentence(inspection(rows)) == words
    assert words in " ".join(text(inspection(rows)).split())


@pytest.mark.parametrize(
    ("share", "words"), [(1.0, "100.0%"), (0.9999, "99.9%"), (0.0, "0.0%"), (1e-5, "<0.1%")]
)
def test_a_rounded_share_is_never_called_all_or_nothing(share: float, words: str) -> None:
    assert summary.percent(share) == words


def test_a_pipeline_has_a_section_for_each_part() -> None:
    parts = {"embed": inspection([row(0, "gather", "cpu", False)]), "head": twenty()}
    whole = Inspection("pipeline", M1, (), findings=(finding("io", kind="interface"),), parts=parts)
    said = as_text(terminal.inspection_report(whole))
    assert said.index("embed ──") < said.index("gather_0") < said.index("head ──")
    assert "█ Neural Engine 16   ▃ CPU 4   ░ not known 1" in said
    assert "16 to 17 of 21 ops" in said
    nested = Inspection("outer", M1, (), parts={"a": whole})
    assert [name for name, _ in summary.sections(nested)] == ["a / embed", "a / head"]


def test_measured_units_stand_beside_the_predicted_ones_disagreements_first() -> None:
    rows = [row(k, "conv", "ane", measured="ane") for k in range(8)]
    rows += [row(8, "mul", "ane", measured="cpu"), row(9, "add", "cpu", measured="cpu")]
    assert "Core ML's plan: 9 of 10 ops as predicted" in str(inspection(rows, measured=True))
    said = details(inspection(rows, measured=True))
    assert "predicted beside measured: 9 of 10 ops as predicted (90.0%)" in said
    assert said.index("differs") < said.index("as predicted  conv")
    assert "predicted beside measured" not in text(inspection(rows))


def test_a_difference_tells_numbers_and_findings() -> None:
    before = twenty()
    after = inspection(
        [row(k, "conv", "ane", findings=(finding("new-rule", kind="speed"),) * (k == 3)) for k in range(18)]
    )
    said = as_text(terminal.difference_report(before, after))
    numbers = {line.split("  ")[0].strip(): line.split()[-3:] for line in said.splitlines() if "  " in line}
    assert numbers["segments"] == ["4", "1", "better"]
    assert re.search(r"ops on the Neural Engine +80.0% to 85.0% +100.0% +better", said)
    assert "- 1 gone: dtype-int32: casts to int32" in said
    assert "+ 1 new: new-rule: casts to int32" in said
    same = as_text(terminal.difference_report(before, before))
    assert "the findings are the same" in same
    assert "better" not in same
    assert "worse" not in same


def test_printing_and_repr() -> None:
    assert str(twenty()) == text(twenty())
    assert repr(twenty()) == (
        "<Inspection of 'model' on M1/macOS 14: 80 to 85% of 20 ops on the ANE, 3 switches>"
    )
