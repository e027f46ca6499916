"""Sizes chosen from a sample of lengths are the best there are."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands.app import app

ANY: Any = ane


def brute(lengths: list[int], count: int, times: dict[int, float]) -> float:
    """The least expected time of all choices among the lengths."""
    known = sorted(set(lengths))
    chosen = [(*sizes, known[-1]) for k in range(count) for sizes in itertools.combinations(known[:-1], k)]
    return min(sum(times[min(s for s in sizes if s >= n)] for n in lengths) / len(lengths) for sizes in chosen)


@pytest.mark.parametrize("rising", [True, False])
def test_equals_brute_force(rising: bool) -> None:
    """100 random samples with times that rise with the size, 100 with any times."""
    rng = random.Random(int(rising))
    for _ in range(100):
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 12))]
        times = [rng.uniform(0, 9) for _ in range(40)]
        by_size = dict(enumerate(sorted(times) if rising else times, 1))
        count = rng.randint(1, 5)
        found = ane.choose_sizes(lengths, count, time=by_size)
        assert found.best.expected == pytest.approx(brute(lengths, count, by_size), rel=1e-12)
        assert len(found.sizes) <= count
        assert found.sizes[-1] == max(lengths)


def test_an_even_spread_is_worse() -> None:
    """Most lengths are short: sizes at even steps cost more, which the brute force would show."""
    lengths = [10] * 90 + [11] * 5 + [100] * 5
    assert ane.choose_sizes(lengths, 2).sizes == (11, 100)
    assert ane.choose_sizes(lengths, 2).best.expected < (50 * 95 + 100 * 5) / 100


def test_padding_histogram_file_and_multiple(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("3\n\n5 2\n9, 1\n")
    listed = ane.choose_sizes([3, 5, 5, 9], 2)
    assert listed == ane.choose_sizes({3: 1, 5: 2, 9: 1}, 2) == ane.choose_sizes(file, 2)
    assert listed == ane.choose_sizes(np.array([3, 5, 5, 9]), 2)
    assert [c.sizes for c in listed.choices] == [(9,), (5, 9)]
    assert listed.best.padding == pytest.approx(1 - 22 / 24)
    assert ane.choose_sizes([3, 5, 5, 9], 2, multiple=4).sizes == (8, 12)
    assert ane.choose_sizes([7, 7], 3).sizes == (7,)


def test_ten_thousand_lengths() -> None:
    """The sizes of evenly spread lengths lie at even steps."""
    found = ane.choose_sizes(list(range(1, 10_001)), 8)
    assert found.sizes == tuple(range(1250, 10_001, 1250))


def test_prints_as_a_table_and_a_plot() -> None:
    text = str(ane.choose_sizes([3, 5, 5, 9], 3))
    assert "expected positions" in text
    assert "#" * 24 in text
    assert "best sizes: 3, 5, 9" in text
    assert "expected time" in ane.choose_sizes([3], 1, time=float)._repr_html_()


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no lengths": (lambda: ane.choose_sizes([], 2), "there are no lengths"),
    "a length of 0": (lambda: ane.choose_sizes([4, 0], 2), "the length 0"),
    "half a length": (lambda: ANY.choose_sizes({4.5: 1}, 2), "the length 4.5"),
    "a negative count": (lambda: ane.choose_sizes({4: -1}, 2), "-1 times"),
    "no sizes": (lambda: ane.choose_sizes([4], 0), "count=0"),
    "no file": (lambda: ane.choose_sizes("/nowhere/lengths.txt", 2), "/nowhere/lengths.txt"),
    "a time that is missing": (lambda: ane.choose_sizes([4, 5], 2, time={4: 1.0}), "nothing of the size 5"),
    "a time that is no number": (lambda: ane.choose_sizes([4], 2, time=lambda _: float("nan")), "is nan"),
    "a time in words": (lambda: ANY.choose_sizes([4], 2, time=lambda _: "long"), "is not a number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(ane.SurgeryError, match=words):
        call()


def test_a_line_that_is_no_length_is_named(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("3\nfour\n")
    with pytest.raises(ane.SurgeryError, match="line 2 of .* is 'four'"):
        ane.choose_sizes(tmp_path / "lengths.txt", 2)


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("3\n5 2\n9\n")
    out = CliRunner().invoke(app, ["choose-sizes", str(tmp_path / "lengths.txt"), "-k", "2", "--json"])
    assert json.loads(out.stdout)["sizes"] == [5, 9]


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    choice = ane.choose_sizes([3, 5, 5, 9], 2)
    assert "expected positions" in choice.save_plot(tmp_path / "sizes.svg").read_text()
    with pytest.raises(ane.SurgeryError, match=r"plots end in .png, .svg, .pdf"):
        choice.save_plot(tmp_path / "sizes.txt")
    (tmp_path / "lengths.txt").write_text("3\n5 2\n9\n")
    words = ["choose-sizes", str(tmp_path / "lengths.txt"), "--plot", str(tmp_path / "again.svg"), "--quiet"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert (tmp_path / "again.svg").is_file()
