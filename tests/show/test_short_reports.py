"""The report that is printed by default: one screen, with the three things that matter most, and repairs."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_models import finding, inspection, row
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands.app import app
from anesurgery.commands.next_steps import command, pasteable
from anesurgery.commands.other_models import _sizes_command as made
from anesurgery.errors import Refusal
from anesurgery.placement.durations import Time
from anesurgery.placement.evidence import Grade
from anesurgery.show import summary
from anesurgery.show.costs import (
    MOST,
    SCREEN,
    Problem,
    _first,
    _merged,
    costs,
    cut,
    first_clauses,
    fitted,
    on_a_screen,
)
from anesurgery.show.report import Report, Table

WIDTH, LINES = 80, 14
TARGET = "iPhone 13"
MODELS = ("gpt2", "vit", "network", "whisper")


def printed(*words: object) -> list[str]:
    """The lines that a command prints."""
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code < 64, done.output
    return done.stdout.splitlines()


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An example in the current folder."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.chdir(tmp_path)
    return ane.example(request.param).name


@pytest.mark.slow
def test_reports_fit_on_a_screen_and_their_commands_run(model: str) -> None:
    """Each command that a report names is one line, and it runs as it stands."""
    seen = printed("inspect", model, "--target", TARGET)
    fixed = printed("fix", model, "--target", TARGET)
    both = printed("inspect", model, *written(fixed), "--target", TARGET)
    for lines in (seen, fixed, both):
        assert len(lines) <= LINES
        assert max(map(len, lines)) <= WIDTH
        (following,) = [line.removeprefix("next: ") for line in lines if line.startswith("next: ")]
        printed(*shlex.split(following)[1:], *overwriting(following))
    assert seen[-1].endswith("--why OP explains one op.")


@pytest.mark.slow
def test_each_command_for_a_cost_changes_the_model(model: str) -> None:
    """The wrong version: a pass is named for an op that it refuses, and nothing is changed."""
    lines = printed("see", model, "--target", TARGET)
    commands = [shlex.split(line) for line in lines if line.startswith("   anes")]
    for named in commands:
        assert named[:2] == ["anesurgery", "fix"]
        assert not printed(*named[1:], "--overwrite")[0].startswith("Nothing was changed"), named
    assert commands


def written(lines: list[str]) -> list[str]:
    return [line.removeprefix("wrote ") for line in lines if line.startswith("wrote ")]


def overwriting(command: str) -> list[str]:
    return ["--overwrite"] if " fix " in command else []


def test_a_long_command_is_pasted_as_one() -> None:
    line = command("see", "a" * 40, "b" * 40, target="iPhone 13")
    said = pasteable(f"next: {line}")
    assert max(map(len, said.splitlines())) <= WIDTH
    assert shlex.split(said.replace("\\\n", ""))[1:] == shlex.split(line)
    assert pasteable("next: anesurgery fix m") == "next: anesurgery fix m"


def test_sizes_that_were_chosen_are_made_by_one_command() -> None:
    """N stands for the length, and letters of names stay."""
    line = made("N.mlpackage", "N_ids=1xN,mask=1x1xNxN", (16, 64))
    sizes = [word for word in line.split() if "=" in word]
    assert sizes == ["N_ids=1x16,mask=1x1x16x16", "N_ids=1x64,mask=1x1x64x64"]
    assert line.endswith("--out N_sizes")


def test_the_whole_report_is_behind_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ane.example("tiny")
    short, full = (printed("inspect", "tiny.mlpackage", *more) for more in ([], ["--full"]))
    assert "notes" in full
    assert "notes" not in short
    assert len(full) > LINES >= len(short)


def test_sizes_that_vary_are_fixed_before_all_else() -> None:
    """The wrong version: the first command of the report runs a pass that refuses such sizes."""
    ranged = finding("dyn-range", message="input %x has the shape 1x4x?")
    one = inspection([row(0, "add", "cpu", False, findings=(finding(remedy="rerank", op="add_0"),))])
    one = replace(one, findings=(ranged,))
    first, *others = costs(replace(one, fixing="anesurgery fix m fix_shapes fixed.mlpackage"))
    assert "fix_shapes" in first.advice
    assert [(cost.remedies, cost.advice) for cost in others] == [((), "after that: rerank")]
    assert ("rerank",) in [cost.remedies for cost in costs(one)]


def test_of_time_and_numbers_that_one_pass_repairs_the_numbers_are_said() -> None:
    """The wrong version: fused attention is said to be small, and not that it gives NaN."""
    both = (finding("slow", kind="speed", remedy="p"), finding("nan", kind="numeric", remedy="p"))
    one = inspection([row(0, "attention", "ane", findings=tuple(replace(f, op="attention_0") for f in both))])
    assert [cost.rule for cost in costs(one)] == ["nan"]


@pytest.mark.parametrize("kind", ["legality", "load"])
@pytest.mark.parametrize(("remedy", "last"), [("widen_to_fp32", "numbers"), (None, "c")])
def test_a_repair_of_numbers_has_a_place_on_the_screen(remedy: str | None, last: str, kind: str) -> None:
    """The wrong version: costs of time, or loads that fail, leave no room for a phase that fp16 cannot hold."""
    rows = [
        row(i, name, "cpu", ms=9.0 - i, findings=(finding(name, kind=kind, op=f"{name}_{i}", remedy="rerank"),))
        for i, name in enumerate("abc")
    ]
    wrong = finding("numbers", kind="numeric", op="d_3", remedy=remedy)
    timed = inspection([*rows, row(3, "d", "ane", ms=1.0, findings=(wrong,))])
    timed = replace(timed, time=Time(25.0, 20.0, 30.0, 1, "one", {}, {}, {}))
    assert [cost.rule for cost in _first(costs(timed), MOST)] == ["a", "b", last]


def test_numbers_are_ranked_by_how_wrong_they_are() -> None:
    """The wrong version: digits lost in a large op come before NaN in a small one."""
    risks = {
        "num-cancel": (9.0, Grade.MEASURED),
        "num-mask": (1.0, Grade.GUESS),
        "num-root": (0.1, Grade.MEASURED),
    }
    found = [
        finding(rule, kind="numeric", op=f"{rule}_{k}", remedy="p", grade=grade)
        for k, (rule, (_, grade)) in enumerate(risks.items())
    ]
    rows = [row(k, f.rule, "ane", ms=risks[f.rule][0], findings=(f,)) for k, f in enumerate(found)]
    timed = inspection(rows, time=Time(10.1, 8.0, 12.0, 1, "one", {}, {}, {}))
    assert [cost.rule for cost in costs(timed)] == ["num-root", "num-mask", "num-cancel"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("short", "short"),
        (f"{'a' * 50} (A11 to A16); and {'b' * 40}", f"{'a' * 50} (A11 to A16)"),
        (f"{'a' * 20}; {'b' * 70}", f"{'a' * 20}; {'b' * 57}…"),
        (f"{'a' * 45} (CPU, 9% of the time): {'b' * 40}", f"{'a' * 45} (CPU, 9% of the time): {'b' * 10}…"),
        (f"{'a' * 40}: exp of %b, which {'c' * 40}", f"{'a' * 40}: exp of %b, which {'c' * 20}…"),
        (f"{'a' * 50} 7 {'bcd ' * 9}", f"{'a' * 50} 7 {'bcd ' * 6}…"),
    ],
)
def test_a_long_line_ends_at_a_clause_or_after_a_word(line: str, shown: str) -> None:
    assert cut(line).plain == shown


def test_a_line_leaves_out_units_and_shares_before_it_leaves_out_the_cause() -> None:
    """The wrong version: "linear var_19 (CPU, 38% of the time): the last axis of 1x16 is stored as …"."""

    def shown(why: str) -> str:
        line, *_ = Problem("linear var_19 (CPU, 38% of the time)", why, "shape").lines(2, str)
        return line.plain

    why = "the last axis of 1x16 is stored as 32: 2 times the memory (64 bytes)"
    assert shown(why) == "2) linear var_19: the last axis of 1x16 is stored as 32: 2 times the memory"
    assert shown("inside while_loop") == "2) linear var_19 (CPU, 38% of the time): inside while_loop"


def test_a_colon_at_the_end_of_a_line_is_not_in_front_of_its_cause() -> None:
    """The wrong version: the line ends with "in buffers of IOSurface:…"."""
    advice = "   declare fp16 inputs and outputs (iOS 16, macOS 13), in buffers of IOSurface: fewer copies"
    assert cut(advice).plain == "   declare fp16 inputs and outputs (iOS 16, macOS 13)"


def test_ops_that_take_no_time_are_no_cost() -> None:
    """Their place is not what to change first; wrong numbers are, whatever they take."""
    slow = row(0, "slow", "cpu", ms=9.0, findings=(finding("a", op="slow_0", remedy="pad_last_axis"),))
    rows = [
        slow,
        row(1, "quick", "cpu", ms=0.001, findings=(finding("b", op="quick_1", remedy="pad_last_axis"),)),
    ]
    rows += [row(2, "wrong", "ane", ms=0.001, findings=(finding("c", kind="numeric", op="wrong_2"),))]
    timed = inspection(rows, time=Time(9.002, 8.0, 10.0, 1, "one", {}, {}, {}))
    assert [cost.what.split()[0] for cost in costs(timed)] == ["slow", "wrong"]


@pytest.mark.parametrize(
    ("rule", "unit", "legal", "said"),
    [
        ("fault-depthwise-concat-elsewhere", "cpu", True, False),
        ("fault-depthwise-concat-elsewhere", "ane", True, True),
        ("fault-depthwise-concat-elsewhere", None, None, True),
        ("fault-depthwise-concat", "cpu", True, True),
        ("fault-depthwise-concat", "cpu", False, False),
        ("fault-resample-pixels-elsewhere", "cpu", True, True),
        ("num-nan-test", "cpu", True, False),
        ("num-nan-test", "ane", True, True),
    ],
)
def test_a_fault_of_the_engine_is_said_of_ops_that_may_run_there(
    rule: str, unit: str | None, legal: bool | None, said: bool
) -> None:
    """The wrong version: "reported wrong on A15" is the first cause of a convolution that the CPU runs.

    A report about the chip itself stands where only an estimate keeps the op off the engine, and one about any
    unit always.
    """
    wrong = finding(rule, kind="numeric", message="reported wrong", remedy="replace_faulty_ops", op="conv_0")
    found = inspection([row(0, "conv", unit, legal, flop=9, findings=(wrong,))])
    assert any(cost.rule == rule or cost.remedies for cost in costs(found)) == said
    is_claim = rule.startswith("fault-") and not rule.endswith("-elsewhere")
    assert ("numbers may be wrong" in found.summary) == (said and is_claim)
    assert wrong.message in str(found.details), "the whole report has it"


def three() -> list[Any]:
    """Ops that cost little, much, and one that comes out wrong."""
    little = row(0, "cast", "cpu", False, flop=1, findings=(finding(remedy="compute_fp16", op="cast_0"),))
    much = finding("axis", message="%linear_1 is too long", remedy="fold_long_axis", op="linear_1")
    other = finding("other", message="stored with gaps", remedy="pad_last_axis", kind="memory", op="linear_1")
    lost = finding("lost-epsilon", kind="load", message="it does not load", advice="convert again", op="add_2")
    return [
        little,
        row(1, "linear", "cpu", False, flop=900, findings=(much, other)),
        row(2, "add", "ane", flop=1, findings=(lost,)),
        *(row(k, "conv", "ane", flop=10) for k in range(3, 9)),
    ]


def test_what_fails_comes_first_then_what_costs_most() -> None:
    said = costs(inspection(three()))
    assert [cost.what.split(" (")[0] for cost in said][:3] == ["add add_2", "linear linear_1", "cast cast_0"]
    assert said[1].remedies == ("fold_long_axis", "pad_last_axis"), "one set of ops is one thing"
    assert said[1].why == "too long"
    assert "CPU, 94% of the work" in said[1].what


def test_a_report_has_as_many_things_as_fit() -> None:
    """The wrong version: three things under any number of lines."""
    shown = str(inspection(three()))
    assert len(shown.splitlines()) <= SCREEN
    assert len(re.findall(r"^\d\) ", shown, re.MULTILINE)) == MOST
    from anesurgery.show.console import as_text

    crowded = as_text(on_a_screen(Report("a line", ["a line"] * (SCREEN - 4)), inspection(three()), str))
    assert len(crowded.splitlines()) <= SCREEN
    assert "1) " in crowded
    assert "2) " not in crowded


def test_any_report_is_cut_to_a_screen() -> None:
    """The wrong version: a table of all weights, and none of the lines below it."""
    rows = [(f"weight_{k}", "a" * 30) for k in range(40)]
    lines = [f"line {k}: {'word ' * 40}" for k in range(30)]
    long = Report("a sentence", [Table(("weight", "form"), rows, styles=["dim"] * 40), Report("more", lines)])
    from anesurgery.show.console import as_text

    shown = as_text(fitted(long, SCREEN)).splitlines()
    assert [" ".join(line.split()[:2]) for line in shown[:2]] == ["a sentence", "weight form"]
    assert "... and 36 more" in shown
    assert shown[-1].startswith("line 2: word")
    assert len(shown) == SCREEN
    assert max(map(len, shown)) <= WIDTH


@pytest.mark.parametrize("why", ["is not constant", "tried and undone: the expected time would rise"])
@pytest.mark.parametrize("kind", ["legality", "numeric"])
def test_what_was_tried_is_named_again_only_if_it_repairs_numbers_and_was_slow(why: str, kind: str) -> None:
    rows = [
        *three(),
        row(9, "exp", "ane", findings=(finding(kind=kind, message="inf", remedy="scale_shares"),)),
    ]
    tried = {name: Refusal(why) for name in ("fold_long_axis", "compute_fp16", "scale_shares")}
    shown = on_a_screen(Report("a line"), inspection(rows), lambda name: f"fix {name}", tried)
    from anesurgery.show.console import as_text

    text = as_text(shown)
    assert "fix pad_last_axis" in text
    assert "fold_long_axis" not in text
    assert "cast_0" not in text
    assert ("fix scale_shares" in text) == (kind == "numeric" and "rise" in why)


def test_a_reason_is_cut_at_the_end_of_a_clause() -> None:
    words = "weights 76.8 MB -> 128 MB and the expected time rises"
    assert first_clauses(words, 40) == "weights 76.8 MB -> 128 MB"
    assert first_clauses(words, 20) == first_clauses(words, 40, least=30) == ""


def test_what_is_not_known_of_most_ops_comes_first() -> None:
    why = "no run-time weights"
    kept = row(
        0, "matmul", "cpu", legal=False, flop=1000, findings=(finding(message=why, advice="store them"),)
    )
    undecided = [row(i, "mul", None, flop=1000) for i in range(1, 6)]
    known = [row(i, "add", "ane", flop=1000) for i in range(6, 16)]
    assert [problem.why for problem in costs(inspection([kept, *undecided]))] == [summary.UNDECIDED, why]
    assert [problem.why for problem in costs(inspection([kept, *undecided, *known]))] == [
        why,
        summary.UNDECIDED,
    ]


@pytest.mark.parametrize(("unit", "said"), [("cpu", " if it runs on the Neural Engine"), ("ane", "")])
def test_a_fault_of_the_engine_says_so_where_the_cpu_is_expected(unit: str, said: str) -> None:
    fault = finding("fault-depthwise-concat", kind="numeric", message="wrong on A19: a form", op="concat_1")
    one = inspection([row(0, "conv", "ane"), row(1, "concat", unit, findings=(fault,))])
    assert [cost.why for cost in costs(one) if cost.rule == fault.rule] == [f"wrong on A19{said}: a form"]


@pytest.mark.parametrize("kind", ["placement", "speed"])
def test_a_cause_without_a_pass_gives_way_to_one_with_the_pass(kind: str) -> None:
    """The wrong version: "not faster on the engine", above the command of a pass that repairs numbers."""
    slow = Problem("conv y", "not faster on the Neural Engine", kind)
    repaired = Problem("conv y", "reported wrong: kernel 3x2", "numeric", remedies=("replace_faulty_ops",))
    assert _merged(slow, repaired).why == repaired.why
    blocked = replace(slow, kind="legality", why="%x is fp32")
    assert _merged(blocked, repaired).why == blocked.why


@pytest.mark.parametrize("wrong", ["num-mask-rows", "num-count"])
@pytest.mark.parametrize("remedy", ["decompose_ops", None])
def test_numbers_are_not_hidden_by_what_keeps_their_op_off_the_engine(wrong: str, remedy: str | None) -> None:
    """The wrong versions: a mask that gives NaN is merged into the fp32 that keeps its select on the CPU, and a
    running sum that fp16 cannot hold into the engine's lack of the op."""
    found = (
        finding("fp32", kind="legality", op="a_0", remedy=remedy),
        finding(wrong, kind="numeric", op="a_0", remedy="widen_to_fp32"),
    )
    one = inspection([row(0, "a", "cpu", False, ms=1.0, findings=found)])
    assert {cost.rule for cost in costs(one)} == {"fp32", wrong}


@pytest.mark.parametrize(("switches", "first"), [(5.0, "rank"), (0.5, "axis")])
def test_an_op_that_costs_switches_comes_first(switches: float, first: str) -> None:
    """The wrong version: a small 3-D convolution amid a network comes after a move that takes more time."""
    rows = [
        row(0, "move", "ane", ms=1.0, findings=(finding("axis", op="move_0", remedy="fold_long_axis"),)),
        row(1, "conv", None, None, ms=0.01, findings=(finding("rank", op="conv_1", remedy="split_conv3d"),)),
        row(2, "conv", "ane", ms=5.0),
    ]
    timed = inspection(rows, time=Time(10.0, 8.0, 12.0, 1, "one", {"switches": switches}, {}, {}))
    assert costs(timed)[0].rule == first


def test_of_known_errors_the_largest_comes_first() -> None:
    """The wrong version: the documented loss of one digit comes before an angle off by a thirtieth."""
    found = [
        replace(finding(rule, kind=kind, op=f"{rule}_{k}", remedy="p", grade=grade), decibels=decibels)
        for k, (rule, kind, grade, decibels) in enumerate(
            [
                ("lost-digits", "conversion", Grade.DOCUMENTED, 60.0),
                ("num-cancel", "numeric", Grade.MEASURED, None),
                ("num-angle", "numeric", Grade.MEASURED, 30.0),
            ]
        )
    ]
    rows = [row(k, f.rule, "ane", ms=1.0, findings=(f,)) for k, f in enumerate(found)]
    assert [cost.rule for cost in costs(inspection(rows))] == ["num-angle", "num-cancel", "lost-digits"]


def test_a_load_that_failed_elsewhere_comes_before_hints_about_the_interface() -> None:
    """The wrong version: fp32 inputs are the first thing to say of a model that another chip refused."""
    hint = finding("dtype-fp32-io", kind="interface")
    warning = replace(finding("refused-deconv-stride-elsewhere", kind="memory"), message="reported to fail")
    one = replace(inspection([row(0, "a", "ane", ms=1.0)]), findings=(hint, warning))
    assert [cost.rule for cost in costs(one)] == [warning.rule, hint.rule]
