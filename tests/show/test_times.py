"""Where the time goes, in a terminal, on a page, in a cell and as data."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_models import inspection, row, twenty

from anesurgery.placement import Inspection
from anesurgery.placement.durations import Time
from anesurgery.show import summary, terminal, time_shares
from anesurgery.show.console import as_text
from anesurgery.show.page import cell, page


def details(found: Inspection) -> str:
    return as_text(terminal.inspection_report(found))


def text(found: Inspection) -> str:
    return as_text(terminal.short_report(found))


def timed(scale: float = 1.0) -> Inspection:
    plain = twenty()
    by_op = {
        ("products", "conv"): 6.0 * scale, ("memory", "norm"): 2.0, ("weights", ""): 1.0,
        ("CPU", "linear"): 0.5, ("switches", ""): 0.45, ("dispatch", ""): 0.05,
    }  # fmt: skip
    time = Time.of(
        by_op, dict.fromkeys(by_op, 0.1), 0.0, measurements=7, source="who measured", reach=1.3, unlike=1.0
    )
    ops = tuple(replace(row, ms=0.1 * (k + 1)) for k, row in enumerate(plain.ops))
    segments = tuple(
        replace(s, ms=sum(row.ms or 0.0 for row in ops if row.segment == s.index)) for s in plain.segments
    )
    return replace(plain, time=time, ops=ops, segments=segments)


def test_a_terminal_shows_a_bar_with_each_source_of_cost() -> None:
    said = details(timed())
    assert "where the time goes  10 ms" in said
    assert "from 7 published times" in said
    lines = said.splitlines()
    bar = lines[next(k for k, line in enumerate(lines) if "where the time goes" in line) + 1]
    assert len(bar) == time_shares.BAR
    shown = ("products", "memory", "weights", "CPU", "switches", "dispatch")
    assert {time_shares.LOOKS[name][0] for name in shown} == set(bar)
    assert bar.count(time_shares.LOOKS["products"][0]) == pytest.approx(0.6 * time_shares.BAR, abs=3)
    assert bar.count(time_shares.LOOKS["dispatch"][0]) == 1
    assert "products on the engine 6 ms (60.0%)" in said
    assert "starting a prediction 0.05 ms (0.5%)" in said


def test_the_dearest_ops_and_segments_come_first() -> None:
    found = timed()
    assert [one.ms for one in time_shares.dearest(found)] == pytest.approx([0.1 * k for k in range(20, 10, -1)])
    assert time_shares.dearest(found)[0].name == found.ops[-1].name
    slowest = time_shares.segments(found)
    assert [one.ms for one in slowest] == sorted((one.ms for one in slowest), reverse=True)


def test_a_page_and_a_cell_show_the_same() -> None:
    for shown in (page(timed()), cell(timed())):
        assert "where the time goes" in shown
        assert time_shares.COLOURS["weights"] in shown
        assert "reading weights on any unit" in shown
    assert timed().ops[-1].name in page(timed()).split("Where the time goes")[1]


def test_without_a_time_nothing_is_said() -> None:
    assert time_shares.time_parts(twenty()) == []
    for shown in (text(twenty()), page(twenty()), cell(twenty())):
        assert "here the time goes" not in shown


@pytest.mark.parametrize(("scale", "better"), [(0.2, True), (4.0, False), (1.0, None)])
def test_before_and_after_say_better_only_where_the_band_leaves_out_1(
    scale: float, better: bool | None
) -> None:
    told, ratio = summary.changes(timed(), timed(scale))[-2:]
    assert (told.label, told.better, ratio.better) == ("time (estimated)", better, better)
    assert summary.time_changes(twenty(), timed()) == []


@pytest.mark.parametrize(
    ("on_engine", "unknown", "better"),
    [(16, 2, None), (18, 2, True), (10, 2, False), (18, 0, True), (17, 0, False), (17, 1, None)],
)
def test_shares_that_overlap_are_not_judged(on_engine: int, unknown: int, better: bool | None) -> None:
    """Before, 17 or 18 of 20 ops run on the engine."""
    units = ["ane"] * on_engine + [None] * unknown + ["cpu"] * (20 - on_engine - unknown)
    after = inspection([row(k, "conv", unit, None if unit is None else True) for k, unit in enumerate(units)])
    changed = next(c for c in summary.changes(twenty(), after) if c.label == "ops on the Neural Engine")
    assert changed.better is better
