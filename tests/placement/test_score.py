"""The objective: what counts as a loss, what as a gain, and the words for them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from scores import scored

from anesurgery.placement.durations import Time, from_to, rounded
from anesurgery.placement.score import OFF, Score, _count_change, placed
from anesurgery.placement.target import Target

HERE = frozenset({(0, "a"), (0, "b")})
KEY = {("products", "conv"): 2.0}
TIME = Time(2.0, 1.0, 4.0, 5, "one", {"products": 2.0}, KEY, dict.fromkeys(KEY, 0.15))
NOW = Score(100, 90, 1000, 900, 4, 2000.0, 0, 7, HERE, frozenset(), weights=100_000_000)


def test_an_op_that_was_legal_must_stay_so() -> None:
    later = replace(NOW, on_ops=99, on_flop=1000, legal=frozenset({(0, "a")}), illegal=frozenset({(0, "b")}))
    assert later.loss(NOW) == "%b would no longer be legal on the ANE"
    assert not replace(later, illegal=frozenset({(1, "b")})).loss(NOW), "of another function"


def test_time_decides_and_shares_do_not() -> None:
    """The wrong version: a kernel of 2.4 % of the flop stays on the CPU, since small ops would follow."""
    faster = replace(NOW, on_ops=80, on_flop=800, estimate=1900.0)
    assert not faster.loss(NOW)
    assert faster.gain(NOW) == "relative cost 1 -> 0.95"
    slower = replace(NOW, on_ops=100, on_flop=1000, estimate=2010.0)
    assert slower.loss(NOW) == "the relative cost would rise 1 -> 1.005"
    assert not slower.gain(NOW)


def test_a_small_rise_is_a_rise() -> None:
    """The wrong version: each step may make a model half as dear again, against the step before."""
    assert replace(NOW, on_ops=95, estimate=2900.0).loss(NOW)
    small = replace(NOW, estimate=50.0)
    assert replace(small, on_ops=95, estimate=50.1).loss(small), "less than a switch"
    assert not replace(small, on_ops=95, estimate=50.00001).loss(small), "the same number"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": 115_000_000}, "weights 100 MB -> 115 MB"),
        ({"flop": 20_000_000}, "flop 1,000 -> 20 M"),
        ({"moved": 2_000_000}, "bytes moved 0 bytes -> 2 MB"),
        ({"ops": 160}, "ops 100 -> 160"),
        ({"casts": 9}, "casts 0 -> 9"),
        ({"transposes": 9}, "transposes 0 -> 9"),
    ],
    ids=str,
)
def test_growth_takes_a_clear_gain_in_time(changes: dict[str, Any], words: str) -> None:
    """The wrong version: a tied table that is stored twice, 332 MB that become 605, costs nothing."""
    larger: Any = replace(NOW, **changes)
    grown = replace(larger, estimate=1900.0)
    assert grown.loss(NOW) == f"{words} and the relative cost 1 -> 0.95 is no clear gain"
    clear = replace(larger, estimate=1500.0)
    assert not clear.loss(NOW)
    assert clear.gain(NOW) == f"relative cost 1 -> 0.75; {words}"
    assert clear.paid(NOW) == [f"relative cost 1 -> 0.75, for which the model grew: {words}"]
    assert not NOW.paid(NOW)
    what, sizes = words.split(" ", 1) if not words.startswith("bytes") else ("bytes moved", words[12:])
    assert NOW.worth(grown, ["size"]) == f"{what} {' -> '.join(reversed(sizes.split(' -> ')))}"


def test_a_little_growth_is_none() -> None:
    larger = replace(NOW, weights=109_000_000, flop=9_000_000, moved=1000, ops=116, casts=4, transposes=8)
    assert not larger.loss(NOW)


def test_of_a_model_too_small_for_the_ane_what_is_legal_counts() -> None:
    """An LSTM that becomes legal ops, all of which Core ML would leave on the CPU: in equal time only."""
    small = Score(2, 0, 100, 0, 0, 50.0, 0, 3, frozenset({(0, "a")}), frozenset({(0, "lstm")}), 90)
    legal = frozenset((0, str(i)) for i in range(8)) | small.legal
    unrolled = replace(small, ops=9, flop=150, legal=legal, illegal=frozenset(), illegal_flop=0)
    assert not unrolled.loss(small)
    assert (
        unrolled.gain(small)
        == "ops that cannot run on the ANE 1 -> 0 (share of the ops that can 50.0% -> 100.0%)"
    )
    assert not replace(unrolled, estimate=51.0).gain(small)
    assert replace(unrolled, estimate=51.0).loss(small).startswith("the relative cost would rise")
    assert not replace(unrolled, unknown=1).gain(small)
    folded = replace(small, illegal_flop=10)
    assert folded.gain(small).startswith("flop that cannot run on the ANE 90 -> 10 (share of the ops that can")
    moved = replace(unrolled, illegal=frozenset({(0, "other")}), illegal_flop=95)
    assert not moved.gain(small), "more flop are barred"


def test_what_was_measured_was_measured_on_the_ane() -> None:
    """A gain that was measured there says nothing of products that leave it."""
    assert not replace(NOW, estimate=9e9).loss(NOW, OFF)
    assert (
        replace(NOW, on_flop=800).loss(NOW, OFF) == "the share of the work on the ANE would fall 90.0% -> 80.0%"
    )


def test_fewer_switches_are_a_gain_in_equal_time() -> None:
    assert replace(NOW, switches=2).gain(NOW) == "switches between units 4 -> 2"
    assert not replace(NOW, switches=2, estimate=2001.0).gain(NOW)
    assert replace(NOW, switches=6, estimate=1500.0).gain(NOW) == "relative cost 1 -> 0.75"
    assert not replace(NOW, estimate=1500.0, unknown=1).gain(NOW), "what has no estimate costs too little"


def test_the_cpu_gains_by_less_work_alone() -> None:
    """The wrong version: 65 linear ops become convolutions that Core ML counts less for, and leave the ANE."""
    mixed = replace(NOW, on_ops=0, on_flop=0, perhaps_flop=800, perhaps_ops=80, moved=1000)
    left = replace(mixed, perhaps_flop=0, perhaps_ops=0, estimate=600.0)
    assert left.on_cpu
    assert left.worth(mixed) == ""
    less = replace(left, flop=500)
    assert less.worth(mixed) == replace(left, moved=500).worth(mixed) == "relative cost 1 -> 0.3"
    assert replace(left, ops=300).loss(mixed).startswith("ops 100 -> 300 and the relative cost 1 -> 0.3")
    assert not replace(less, ops=300).loss(mixed), "as of a loop that is unrolled"


def test_ops_of_unknown_unit_are_no_gain_if_they_only_leave() -> None:
    """The wrong version: an op that may be on the ANE goes to the CPU, and two switches fewer are a gain."""
    before = replace(NOW, ops=3, on_ops=0, on_flop=0, perhaps_ops=1, switches=2, moved=1000)
    moved = replace(before, perhaps_ops=0, switches=0)
    assert moved.gain(before) == moved.worth(before) == ""
    removed = replace(moved, ops=2, estimate=1900.0)
    assert removed.gain(before) == removed.worth(before) == ""
    less = replace(removed, estimate=1500.0, flop=800)
    assert less.worth(before) == "relative cost 1 -> 0.75", "over the whole band"
    fused = replace(NOW, ops=99, on_ops=89, switches=2, estimate=1900.0)
    assert fused.worth(NOW) == "relative cost 1 -> 0.95", "time of known units"


def test_large_numbers_are_said_in_units() -> None:
    assert _count_change(8_650_752, 50_069_504) == "8.65 M -> 50.1 M"
    assert _count_change(8_650_752, 8_650_753) == "8,650,752 -> 8,650,753"


def test_fewer_findings_are_tidier_unless_they_cost() -> None:
    assert replace(NOW, findings=3).worth(NOW, ["findings"])
    assert not replace(NOW, findings=3, estimate=2001.0).worth(NOW, ["findings"])
    assert not NOW.worth(NOW, ["findings"])


@pytest.mark.parametrize(
    ("number", "words"), [(0.0193, "0.0193"), (2384.1, "2380"), (1.0, "1"), (1.2e-5, "0.000012"), (0.0, "0")]
)
def test_numbers_have_no_exponent(number: float, words: str) -> None:
    """The wrong version: 2.38e+03 ms."""
    assert rounded(number, 3) == words


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (1.03, "2.03 ms -> 1.03 ms"),
        (2.031, "2.03 ms -> 2.031 ms"),
        (2.03001, "2.03 ms -> 2.03001 ms"),
        (2.03, "2.03 ms -> 2.03 ms"),
    ],
)
def test_two_durations_that_differ_read_differently(after: float, words: str) -> None:
    assert from_to(2.03, after) == words


def test_it_is_said_in_a_line() -> None:
    assert str(NOW) == "90 of 100 ops (90%) and 90% of the work on the ANE, 4 switches"
    idle = replace(NOW, flop=0, on_flop=0, perhaps_flop=0)
    assert str(idle) == "90 of 100 ops (90%) on the ANE, 4 switches", "all of no work is no claim"
    open_ = replace(NOW, perhaps_ops=2, perhaps_flop=100, time=TIME)
    words = "90 to 92 of 100 ops (90 to 92%) and 90 to 100% of the work on the ANE, 4 switches"
    assert str(open_) == f"{words}, expected 2 ms (likely 1 to 4)"


def test_notes_say_milliseconds_where_both_times_are_known_and_else_a_relative_cost() -> None:
    """The wrong version: Core ML's cost, of which nobody knows how long it takes, as 2 ms -> 1.5 ms."""
    before, after = replace(NOW, time=TIME), replace(NOW, estimate=1500.0, time=replace(TIME, ms=1.6))
    assert after.gain(before) == "expected time 2 ms -> 1.6 ms"
    assert after.gain(NOW) == "relative cost 1 -> 0.75"
    assert before.loss(after) == "the expected time would rise 1.6 ms -> 2 ms"
    assert before.loss(after, ["whole"]) == "the expected time of the whole would rise 1.6 ms -> 2 ms"
    assert NOW.loss(after, ["whole"]) == "the relative cost of the whole would rise 1 -> 1.33"


def test_a_time_that_was_not_measured_may_not_rise_for_a_lower_cost() -> None:
    """The wrong version: an edit that the report calls slower is kept, since Core ML counts less for it."""
    before = replace(NOW, time=replace(TIME, measurements=0))
    slower = replace(NOW, estimate=1500.0, time=replace(TIME, ms=2.2))
    assert slower.gain(before) == ""
    assert slower.loss(before) == "the expected time would rise 2 ms -> 2.2 ms"
    faster = replace(slower, time=replace(TIME, ms=1.5))
    assert faster.gain(before) == "expected time 2 ms -> 1.5 ms"
    dearer = replace(faster, estimate=2500.0)
    assert dearer.loss(before) == "the relative cost would rise 1 -> 1.25"


@pytest.mark.parametrize("name", ["causal_mask_tensor", "fix_shapes", "group_by_unit", "unroll_loop"])
@pytest.mark.parametrize("target", ["any", "M1/macOS 14"])
def test_advice_adds_findings_and_changes_nothing_else(name: str, target: str) -> None:
    program, aim = import_module(f"anesurgery.passes.{name}").example(), Target.parse(target)
    whole, plain = scored(program, aim)[0], Score.of(placed(program, aim))
    assert plain == replace(whole, findings=plain.findings)
    assert plain.findings <= whole.findings


def test_what_is_illegal_may_become_unknown() -> None:
    """The wrong version: fp32 ops stay so, because of one fp16 op that nothing is known of."""
    names = [(0, name) for name in "abcd"]
    before = Score(4, 0, 8, 0, 0, 10.0, 0, 0, frozenset(), frozenset(names), 8)
    freed = Score(4, 0, 8, 0, 0, 10.0, 1, 0, frozenset(names[1:]), frozenset())
    doubtful = Score(4, 0, 8, 0, 0, 10.0, 1, 0, frozenset(), frozenset(names[1:]), 6)
    assert freed.gain(before).startswith("ops that cannot run on the ANE 4 -> 0")
    assert not doubtful.worth(before, ["legal"])
