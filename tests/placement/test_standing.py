"""The objective: what counts as a loss, what as a gain, and the words for them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest

from anesurgery.placement.standing import Standing, _counts, in_time, placed, stand
from anesurgery.placement.target import Target

HERE = frozenset({(0, "a"), (0, "b")})
NOW = Standing(100, 90, 1000, 900, 4, 2000.0, 0, 7, HERE, frozenset())


def test_an_op_that_was_legal_must_stay_so() -> None:
    later = replace(NOW, on_ops=99, on_flop=1000, legal=frozenset({(0, "a")}), illegal=frozenset({(0, "b")}))
    assert later.loss(NOW) == "%b would no longer be legal on the ANE"
    assert not replace(later, illegal=frozenset({(1, "b")})).loss(NOW), "of another function"


def test_the_share_of_flop_comes_before_that_of_ops() -> None:
    assert replace(NOW, on_ops=80, on_flop=800).loss(NOW).startswith("the share of flop on the ANE would fall")
    fallen = replace(NOW, on_ops=80)
    assert fallen.loss(NOW) == "the share of ops on the ANE would fall 90.0% -> 80.0%"
    close = replace(NOW, ops=1_000_000, on_ops=899_900)
    assert close.loss(NOW).endswith("90.00% -> 89.99%")


def test_a_share_does_not_hide_work_off_the_ane() -> None:
    crowded = replace(NOW, flop=10_000, on_flop=9_800)
    assert crowded.share["flop"] > NOW.share["flop"]
    assert crowded.loss(NOW) == "flop off the ANE would rise 100 -> 200"


def test_less_off_the_ane_is_a_gain_and_more_on_it_is_none() -> None:
    assert replace(NOW, ops=95).gain(NOW) == "ops off the ANE 10 -> 5 (share on it 90.0% -> 94.7%)"
    assert replace(NOW, flop=950).gain(NOW).startswith("flop off the ANE 100 -> 50")
    assert not replace(NOW, ops=200, on_ops=190).gain(NOW)


def test_a_better_share_may_not_cost_half_as_much_again() -> None:
    assert not replace(NOW, on_ops=95, estimate=2900.0).loss(NOW)
    assert replace(NOW, on_ops=95, estimate=3100.0).loss(NOW) == "the estimate would rise 2 ms -> 3.1 ms"
    small = replace(NOW, estimate=50.0)
    assert not replace(small, on_ops=95, estimate=150.0).loss(small), "less than a switch"


def test_of_a_model_too_small_for_the_ane_what_is_legal_counts() -> None:
    """An LSTM that becomes legal ops, all of which Core ML would leave on the CPU."""
    small = Standing(2, 0, 100, 0, 0, 50.0, 0, 3, frozenset({(0, "a")}), frozenset({(0, "lstm")}), 90)
    legal = frozenset((0, str(i)) for i in range(8)) | small.legal
    unrolled = replace(small, ops=9, flop=150, legal=legal, illegal=frozenset(), illegal_flop=0)
    assert not unrolled.loss(small)
    assert (
        unrolled.gain(small)
        == "ops that cannot run on the ANE 1 -> 0 (share of the ops that can 50.0% -> 100.0%)"
    )
    assert not replace(unrolled, estimate=76.0).gain(small), "half as dear again"
    assert not replace(unrolled, unknown=1).gain(small)
    folded = replace(small, illegal_flop=10)
    assert folded.gain(small).startswith("flop that cannot run on the ANE 90 -> 10 (share of the ops that can")
    moved = replace(unrolled, illegal=frozenset({(0, "other")}), illegal_flop=95)
    assert not moved.gain(small), "more flop are barred"
    assert moved.loss(small) == "flop off the ANE would rise 100 -> 150"


def test_of_no_flop_there_is_no_share() -> None:
    """A running sum of 0 flop that becomes a product, which Core ML would leave on the CPU."""
    sums = Standing(1, 0, 0, 0, 0, 5.0, 0, 1, frozenset(), frozenset({(0, "sums")}))
    product = replace(sums, flop=64, legal=frozenset({(0, "sums")}), illegal=frozenset())
    assert not product.loss(sums)
    assert product.gain(sums).startswith("ops that cannot run on the ANE 1 -> 0")


def test_switches_come_before_the_estimate() -> None:
    assert replace(NOW, switches=2, estimate=9e9).gain(NOW) == "switches between units 4 -> 2"
    assert not replace(NOW, switches=6, estimate=1.0).gain(NOW)
    assert replace(NOW, estimate=1500.0).gain(NOW) == "estimate 2 ms -> 1.5 ms"
    assert not replace(NOW, estimate=1500.0, unknown=1).gain(NOW), "what has no estimate costs nothing"


def test_less_data_off_the_ane_is_a_gain_where_the_share_rises() -> None:
    """An argmax of whole maps that becomes a cast of its result."""
    old = replace(NOW, off_bytes=3 << 20)
    new = replace(NOW, ops=104, on_ops=94, off_bytes=3 << 10)
    words = "data of ops off the ANE 3 MiB -> 3 KiB (share of the ops on it 90.0% -> 90.4%)"
    assert new.gain(old) == words
    assert not replace(NOW, off_bytes=1).gain(old), "no larger share"
    assert not replace(new, off_bytes=4 << 20).gain(old)


def test_large_numbers_are_said_in_units() -> None:
    old, new = (replace(NOW, flop=10**9, on_flop=10**9 - off) for off in (8_650_752, 50_069_504))
    assert new.loss(old).startswith("the share of flop")
    assert old.gain(new).startswith("flop off the ANE 50.1 M -> 8.65 M (")
    assert _counts(8_650_752, 8_650_753) == "8,650,752 -> 8,650,753"


def test_fewer_findings_are_tidier_unless_they_cost() -> None:
    assert replace(NOW, findings=3).tidier(NOW)
    assert not replace(NOW, findings=3, estimate=2001.0).tidier(NOW)
    assert not NOW.tidier(NOW)


@pytest.mark.parametrize(
    ("time", "words"), [(850.4, "850 µs"), (1026.0, "1.03 ms"), (2.38e6, "2.38 s"), (0.5, "0.5 µs")]
)
def test_durations_have_the_unit_that_a_person_reads(time: float, words: str) -> None:
    assert in_time(time) == words


def test_it_is_said_in_a_line() -> None:
    assert str(NOW) == "90 of 100 ops (90.0%) and 90.0% of the flop on the ANE, 4 switches, estimate 2 ms"


@pytest.mark.parametrize("name", ["causal_mask_tensor", "fix_shapes", "group_by_unit", "unroll_loop"])
@pytest.mark.parametrize("target", ["any", "M1/macOS 14"])
def test_advice_adds_findings_and_changes_nothing_else(name: str, target: str) -> None:
    program, aim = import_module(f"anesurgery.passes.{name}").example(), Target.parse(target)
    whole, plain = stand(program, aim)[0], Standing.of(placed(program, aim))
    assert plain == replace(whole, findings=plain.findings)
    assert plain.findings <= whole.findings


def test_what_is_illegal_may_become_unknown() -> None:
    """The wrong version: fp32 ops stay so, because of one fp16 op that nothing is known of."""
    names = [(0, name) for name in "abcd"]
    before = Standing(4, 0, 8, 0, 0, 10.0, 0, 0, frozenset(), frozenset(names), 8)
    freed = Standing(4, 0, 8, 0, 0, 10.0, 1, 0, frozenset(names[1:]), frozenset())
    doubtful = Standing(4, 0, 8, 0, 0, 10.0, 1, 0, frozenset(), frozenset(names[1:]), 6)
    assert freed.gain(before).startswith("ops that cannot run on the ANE 4 -> 0")
    assert not doubtful.frees(before)
