"""A report is written in one way, whatever it is about."""

from __future__ import annotations

from collections import Counter

import pytest

from anesurgery.show.console import WIDTH, as_html, as_text, bars
from anesurgery.show.report import Line, Listing, Report, Table, first_rows


def test_a_title_lines_and_tables_below_each_other() -> None:
    """The wrong version shows the head of a table without rows, or obeys the markup of a name."""
    table = Table(("name", "n"), [("[red]a[/]", 1), (Line("b", "bold"), 2)], ruled=False)
    shown = as_text(Report("A title", [Line("in", indent=2), table, Table(("none",), []), "last"]))
    assert shown.split() == ["A", "title", "in", "name", "n", "[red]a[/]", "1", "b", "2", "last"]
    assert "\n  in" in shown
    assert "none" not in shown


def test_a_report_below_another_keeps_its_title() -> None:
    assert as_text(Report("wrong", [Report("A title", ["a line"])])).splitlines() == [
        "wrong",
        "A title",
        "a line",
    ]


def test_a_list_has_sentences_below_its_rows_and_says_how_many_are_left() -> None:
    shown = as_text(Listing(("op", "n"), [(("conv", "3"), ("why it is so",)), *[(("add", "1"), ())] * 40]))
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[:3] == ["op    n", "conv  3", "why it is so"]
    assert lines[-1] == "and 11 more; the page has all"


NAMES = [f"encoder_layers_{k}_attention_self_query_dense_output_cast_fp16" for k in range(2)]


@pytest.mark.parametrize(
    "part",
    [
        Table(("weight", *"abcde"), [(name, *["a number of words"] * 5) for name in NAMES]),
        Listing(("op", "first op"), [((name, name), ("a sentence",)) for name in NAMES]),
    ],
    ids=["table", "list"],
)
def test_a_long_name_goes_on_below_and_is_not_cut(part: Table | Listing) -> None:
    """The wrong version cuts names, so that two of them look the same."""
    shown = as_text(part)
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "…" not in shown
    letters = Counter("".join(NAMES))
    assert not letters - Counter(shown)
    assert all(name in as_html(part) for name in NAMES)


def test_columns_in_which_nothing_is_said_are_left_out() -> None:
    table = Table(("name", "none", "few", "empty"), [("a", "-", "-", ""), ("b", "-", 0, Line(""))])
    assert as_text(table).split()[:3] == ["name", "few", "─" * 12]
    assert "none" not in as_html(table)


def test_a_notebook_has_tables_and_escapes_names() -> None:
    shown = as_html(
        Report("A <title>", [Table(("op",), [("<b>",), (Line("two\nlines", "red"),)]), Table(("x",), [])])
    )
    assert "<th" in shown
    assert "&lt;b&gt;" in shown
    assert "A &lt;title&gt;" in shown
    assert shown.count("<table") == 1


def test_a_title_looks_as_it_is_said_to() -> None:
    assert "bold" in as_html(Report("A title"))
    assert "bold" not in as_html(Report("A title", style=""))


def test_bars_have_a_legend() -> None:
    looks = {"a": ("#", "red"), "b": (".", "blue")}
    assert (
        as_text(bars([("x ", [("a", 2), ("b", 3)])], {"a": "one", "b": "two"}, looks))
        == "x ##...\n# one   . two"
    )


def test_the_first_of_many() -> None:
    assert first_rows([1, 2, 3], 2) == ([1, 2], ["... and 1 more"])
    assert first_rows([1, 2], 2) == ([1, 2], [])
