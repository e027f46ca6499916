"""Pictures of the ops of a program: what is drawn, where, and what is refused."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.mil import Program, Var, mb

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def program() -> Program:
    """x branches into three and joins again, with a constant and a long way around."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4))])
    def made(x: Var) -> Var:
        a = mb.relu(x=x, name="a")
        b = mb.mul(x=a, y=np.float32(2), name="b")
        c = mb.tanh(x=b, name="c")
        joined: Var = mb.concat(values=[a, c, mb.sin(x=b, name="d")], axis=-1, name="joined")
        return mb.add(x=joined, y=np.float32(1), name="y")

    return made


def boxes(picture: ane.Picture) -> dict[str, tuple[float, float, float, float]]:
    """The name in each box -> its rectangle."""
    found = {}
    for group in ET.fromstring(picture.svg).iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        assert rect is not None
        texts = [text.text or "" for text in group.iter(f"{SVG}text")]
        x, y, w, h = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        found[texts[1]] = (x, y, w, h)
    return found


def test_the_whole_program_flows_downwards_and_nothing_overlaps(program: Program) -> None:
    found = boxes(ane.draw(program))
    assert set(found) == {"x", "a", "b", "c", "d", "joined", "y"}
    for above, below in [("x", "a"), ("a", "b"), ("b", "c"), ("b", "d"), ("c", "joined"), ("joined", "y")]:
        assert found[above][1] + found[above][3] < found[below][1]
    for (x, y, w, h), (u, v, s, t) in itertools.combinations(found.values(), 2):
        assert x + w < u or u + s < x or y + h < v or v + t < y


CURVE = re.compile(r"M(\S+) (\S+)C\S+ (\S+) \S+ \S+ (\S+) ([^\sVM]+)(?:V([^M]+))?(M)?")


def arrows(picture: ane.Picture) -> list[tuple[float, ...]]:
    """Start, end and bottom of each piece of an arrow; the bottom is the end where it points at a box."""
    found: list[tuple[float, ...]] = []
    for path in ET.fromstring(picture.svg).iter(f"{SVG}path"):
        parts = CURVE.match(path.attrib["d"])
        assert parts is not None
        x, y, _, u, v, bottom, _ = parts.groups()
        found.append((float(x), float(y), float(u), float(v), float(bottom or v)))
    return found


def hidden(picture: ane.Picture) -> int:
    """How many pieces of arrows run behind a box; a curve with level ends stays between them."""
    count = 0
    for x, y, u, v, bottom in arrows(picture):
        for left, top, width, height in boxes(picture).values():
            beside = left < max(x, u) and min(x, u) < left + width and top < v and y < top + height
            through = left < u < left + width and top < bottom and v < top + height
            count += beside or through
    return count


def test_an_arrow_that_skips_layers_stays_visible(program: Program) -> None:
    """It goes past the boxes of a row, and on where it came out."""
    picture = ane.draw(program)
    pieces = arrows(picture)
    tops = {(round(x + w / 2, 0), y) for x, y, w, _ in boxes(picture).values()}
    passing = [p for p in pieces if p[4] != p[3]]
    assert passing
    for _, _, x, _, bottom in passing:
        assert [p for p in pieces if p[:2] == (x, bottom)], "a stub"
    assert all((round(p[2], 0), p[3]) in tops for p in pieces if p not in passing)
    assert not hidden(picture)


def test_an_arrow_behind_a_box_would_be_found(program: Program) -> None:
    picture = ane.draw(program)
    x, y, w, h = boxes(picture)["joined"]
    path = f'<path d="M{x + 1} {y}C{x} 0 0 0 {x + w} {y + h + 9}"/></svg>'
    assert hidden(ane.Picture(picture.svg.replace("</svg>", path), ())) == 1


def test_long_names_that_differ_read_differently() -> None:
    names = [f"encoder_layers_0_attention_{word}_projection_weight" for word in ("query", "value", "key")]

    @mb.program(input_specs=[mb.TensorSpec((1,))])
    def made(x: Any) -> Any:
        for name in names:
            x = mb.relu(x=x, name=name)
        return x

    drawn = set(boxes(ane.draw(made))) - {"x"}
    assert len(drawn) == 3
    assert max(map(len, drawn)) < max(map(len, names))


def test_a_chain_beside_branches_is_straight() -> None:
    """Boxes stand below what they read where their row has room."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4))])
    def made(x: Var) -> Var:
        y = x
        for i in range(60):
            side = mb.relu(x=mb.tanh(x=y, name=f"left{i}"), name=f"{i}_with_a_name_that_is_long")
            y = mb.add(x=y, y=side, name=f"y{i}")
        return y

    picture = ane.draw(made)
    assert not hidden(picture)
    sideways = [abs(x - u) for x, _, u, _, _ in arrows(picture)]
    assert np.mean(sideways) < 60
    assert len(picture.ops) == 180


def test_steps_up_and_down_are_counted(program: Program) -> None:
    assert ane.draw(program, around="c", before=1, after=1).ops == ("b", "c", "joined")
    assert ane.draw(program, around="%c", before=0, after=0).ops == ("c",)
    assert ane.draw(program, around="c", before=9, after=0).ops == ("a", "b", "c")


def test_only_what_has_more_around_it_is_dashed(program: Program) -> None:
    svg = ane.draw(program, around="c", before=1, after=1).svg
    kinds = {name: kind for kind, name in re.findall(r'<g class="([^"]*)">.*?class="name"[^>]*>(\w+)<', svg)}
    assert kinds == {"b": "more", "c": "around", "joined": "more"}


def test_units_give_colours(program: Program) -> None:
    plain, coloured = ane.draw(program).svg, ane.draw(program, target="M4/macOS 27").svg
    drawn = set(re.findall(r'<g class="(\w+)', coloured))
    assert drawn & {"ane", "cpu", "unknown"}
    assert not set(re.findall(r'<g class="(\w+)', plain)) & {"ane", "cpu", "unknown"}


def test_a_picture_is_whole_and_is_saved(program: Program, tmp_path: Path) -> None:
    picture = ane.draw(program)
    assert picture._repr_svg_() == picture.save(tmp_path / "ops.svg").read_text(encoding="utf-8")
    assert "mul(x=%a, y=2)" in picture.svg
    assert not re.search(r"<script|href|url\(|@import", picture.svg)


def test_names_of_a_model_stay_text() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1,))])
    def evil(x: Any) -> Any:
        return mb.relu(x=x, name="a")

    op = next(iter(evil.functions["main"].operations))
    op.outputs[0].name = op.name = "<script>alert(1)</script>"
    assert "<script" not in ane.draw(evil).svg


def test_inside_a_loop_the_block_of_the_loop_is_drawn() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1,))])
    def looped(x: Var) -> Any:
        return mb.while_loop(
            _cond=lambda v: mb.squeeze(x=mb.less(x=v, y=np.float32(3)), name="small"),
            _body=lambda v: mb.add(x=v, y=np.float32(1), name="more"),
            loop_vars=(x,),
            name="loop",
        )

    assert ane.draw(looped, around="more").ops == ("more",)
    assert "while_loop" in ane.draw(looped).svg


def test_what_cannot_be_drawn_is_said(program: Program) -> None:
    with pytest.raises(UnknownName, match="did you mean 'joined'"):
        ane.draw(program, around="joinedd")
    with pytest.raises(SurgeryError, match="counted from 0"):
        ane.draw(program, around="c", before=-1)

    @mb.program(input_specs=[mb.TensorSpec((1,))])
    def long(x: Var) -> Var:
        for _ in range(400):
            x = mb.relu(x=x)
        return x

    with pytest.raises(SurgeryError, match="401 boxes are too many"):
        ane.draw(long)
    assert len(ane.draw(long, around="relu_200", before=3, after=3).ops) == 7
