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
