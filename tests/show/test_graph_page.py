"""The page of a graph: which blocks are folded, and what a browser makes of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, browsing

import anesurgery as ane
from anesurgery.mil import Program, Var, mb
from anesurgery.show.pictures import LEAST, Repeats, repeated_blocks

BLOCKS = 6


@pytest.fixture(scope="module")
def program() -> Program:
    """Six alike blocks of four ops, and names that would end a script or a tag."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4))])
    def made(x: Var) -> Var:
        x = mb.cos(x=x, name="</script><b>owned</b>")
        for k in range(BLOCKS):
            y = mb.mul(x=mb.relu(x=x, name=f"relu_{k}"), y=np.float32(2), name=f"double_{k}")
            x = mb.add(x=x, y=mb.tanh(x=y, name=f"tanh_{k}"), name=f"sum_{k}")
        return mb.sin(x=x, name="last")

    return made


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("", []),
        ("abcdefg", []),
        ("abababab", [Repeats(0, 4, 2)]),
        ("xabcdabcdabcdy", [Repeats(1, 4, 3)]),
        ("abcdabcdab", [Repeats(0, 4, 2)]),
        ("abcdeabcdeZvwxyvwxy", [Repeats(0, 5, 2), Repeats(11, 4, 2)]),
        ("abcabc", []),  # too short to be worth a fold
    ],
)
def test_blocks_that_follow_each_other_are_found(row: str, expected: list[Repeats]) -> None:
    assert repeated_blocks(row) == expected


def test_what_is_found_does_repeat_and_does_not_overlap() -> None:
    rng = random.Random(0)
    for _ in range(200):
        row = "".join(rng.choices("ab", k=rng.randrange(40)))
        found = repeated_blocks(row)
        for one in found:
            assert one.length >= LEAST
            assert row[one.start : one.end] == row[one.start : one.start + one.length] * one.times
        assert all(a.end <= b.start for a, b in itertools.pairwise(found))


BEHIND = """
graph.edges().filter((edge) => {
  const way = [edge.source().position(), ...(edge.segmentPoints() || []), edge.target().position()];
  const others = graph.nodes(":childless").difference(edge.connectedNodes()).map((box) => box.boundingBox());
  const steps = Array.from({ length: 99 }, (_, i) => (i + 1) / 100);
  return way.slice(1).some((to, i) => steps.some((at) => others.some((box) => {
    const [x, y] = ["x", "y"].map((axis) => way[i][axis] + at * (to[axis] - way[i][axis]));
    return box.x1 < x && x < box.x2 && box.y1 < y && y < box.y2;
  })));
}).length
"""
"""The number of lines that run behind a box."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as started:
        yield started


@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_folds_finds_and_asks_for_nothing(
    width: int, program: Program, browser: Browser, tmp_path: Path
) -> None:
    page = ane.draw(program, target="iPhone 13").save(tmp_path / "graph.html").read_text(encoding="utf-8")
    browser.size(width)
    browser.show(page, tmp_path)
    assert all(address.startswith("file:") for address in browser.asked)
    assert browser.run("graph.nodes().length") == 3 + BLOCKS  # the input, both ends and a box for each block
    assert browser.run("document.body.scrollWidth <= innerWidth")
    assert not browser.run("document.querySelector('b') === null")  # the legend
    assert "owned" not in browser.run("[...document.querySelectorAll('b')].map((b) => b.textContent).join()")
    search = (
        "(find) => { find.value = 'TANH_3'; find.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'})); }"
    )
    browser.run(f"({search})(document.getElementById('find'))")
    assert browser.run("graph.nodes('.found').map((box) => box.data('label'))[0]").startswith("tanh\ntanh_3")
    about = browser.run("document.getElementById('about').textContent")
    assert about.startswith("1 of 1")
    assert "tanh(" in about
    assert "expected on:" in about
    assert browser.run("graph.nodes().length") == 3 + BLOCKS + 4  # one block is open, in a frame
    browser.run("document.getElementById('fold').click()")
    assert browser.run("graph.nodes().length") == 3 + BLOCKS
    browser.run("document.getElementById('fold').click()")
    assert browser.run("graph.nodes().length") == 3 + 5 * BLOCKS
    assert browser.run(BEHIND) == 0
    assert not browser.complaints
