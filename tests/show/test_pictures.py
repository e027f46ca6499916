"""Pictures of the ops of a program: what is drawn, where, and what is refused."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import LoadError, SurgeryError, UnknownName
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.show.pictures import GAP_Y, HEIGHT, LETTER, types_in_words

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
    count, rectangles = 0, boxes(picture).values()
    for x, y, u, v, bottom in arrows(picture):
        for left, top, width, height in rectangles:
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
    vars(picture)["svg"] = picture.svg.replace("</svg>", path)
    assert hidden(picture) == 1


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


def test_long_names_are_told_apart_by_the_words_that_differ() -> None:
    """Each name is cut to the words at which names differ, in place of more of what they have in common."""
    middle = "_multikernel_convolution_spatial_pyramid_pooling_multikernel_convolution_"
    names = [
        f"pooling{middle}{k}_{kind}_batch_normalization_cast" for k in range(3) for kind in ("wide", "deep")
    ]

    @mb.program(input_specs=[mb.TensorSpec((1,))])
    def made(x: Any) -> Any:
        for name in names:
            x = mb.relu(x=x, name=name)
        return x

    drawn = set(boxes(ane.draw(made))) - {"x"}
    assert drawn == {f"pooling…{k}_{kind}…" for k in range(3) for kind in ("wide", "deep")}


def test_alike_outputs_are_counted_and_no_type_is_cut() -> None:
    made = mb.program(input_specs=[mb.TensorSpec((1, 64, 8, 32))])(
        lambda x: mb.concat(values=[*mb.split(x=x, num_splits=4, axis=1)], axis=0)
    )

    assert "4 of 1x16x8x32<" in ane.draw(made).svg
    assert types_in_words(["1x64x64x32", "1x64x64x16", "1x64x64x8"]) == "1x64x64x32, 1x64x64x16 and 1 more"
    assert types_in_words(["list", "list", "1x2"]) == "2 of list, 1x2"


@pytest.fixture(scope="module")
def layers() -> ane.Picture:
    """Twenty-eight layers, each with a gate that reads the first value, and a mask that all of them read."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4)), mb.TensorSpec((1, 4))])
    def made(x: Var, seen: Var) -> Var:
        mask = mb.sigmoid(x=seen, name="mask")
        y = x
        for i in range(28):
            gate = mb.tanh(x=mb.sin(x=x, name=f"sin{i}"), name=f"gate{i}")
            change = mb.mul(x=mb.relu(x=mb.exp(x=y, name=f"exp{i}"), name=f"relu{i}"), y=mask, name=f"mul{i}")
            y = mb.add(x=mb.mul(x=change, y=gate, name=f"gated{i}"), y=y, name=f"y{i}")
        return y

    return ane.draw(made)


def test_two_hundred_ops_stay_readable(layers: ane.Picture) -> None:
    """No box covers another, no arrow runs behind one, and the picture is about as wide as a page."""
    found = boxes(layers)
    assert len(layers.ops) == 197
    for (x, y, w, h), (u, v, s, t) in itertools.combinations(found.values(), 2):
        assert x + w < u or u + s < x or y + h < v or v + t < y
    assert not hidden(layers)
    assert max(x + w for x, _, w, _ in found.values()) < 600


def test_a_value_that_many_ops_read_is_one_line(layers: ane.Picture) -> None:
    """Beside the boxes of a row there pass the mask, the first value and the sum at most; no line twice."""
    passing = {(p[2], p[3]) for p in arrows(layers) if p[4] != p[3]}
    rows = Counter(y for _, y in passing)
    assert max(rows.values()) == 3


def test_what_is_read_late_stands_near_its_reader(layers: ane.Picture) -> None:
    found = boxes(layers)
    for i in range(28):
        below = found[f"gated{i}"][1] - found[f"gate{i}"][1]
        assert below == found[f"gate{i}"][1] - found[f"sin{i}"][1] == HEIGHT + GAP_Y


def test_words_keep_their_size_in_a_narrow_window(layers: ane.Picture) -> None:
    """A picture that shrinks with its window has letters that nobody reads, below an empty screen."""
    style = ET.fromstring(layers.svg).find(f"{SVG}style")
    assert style is not None
    assert style.text
    assert not re.search(r"(?<!-)\bwidth|max-width|height", style.text)


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
    evil = mb.program(input_specs=[mb.TensorSpec((1,))])(lambda x: mb.relu(x=x, name="a"))

    op = next(iter(evil.functions["main"].operations))
    op.outputs[0].name = op.name = "<script>alert(1)</script>"
    assert "<script" not in ane.draw(evil).svg


def test_inside_a_loop_the_block_of_the_loop_is_drawn() -> None:
    looped = mb.program(input_specs=[mb.TensorSpec((1,))])(
        lambda x: mb.while_loop(
            _cond=lambda v: mb.squeeze(x=mb.less(x=v, y=np.float32(3)), name="small"),
            _body=lambda v: mb.add(x=v, y=np.float32(1), name="more"),
            loop_vars=(x,),
            name="loop",
        )
    )

    assert ane.draw(looped, around="more").ops == ("more",)
    assert "while_loop" in ane.draw(looped).svg


def test_what_cannot_be_drawn_is_said(program: Program, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean 'joined'"):
        ane.draw(program, around="joinedd")
    with pytest.raises(SurgeryError, match="counted from 0"):
        ane.draw(program, around="c", before=-1)

    @mb.program(input_specs=[mb.TensorSpec((1,))])
    def long(x: Var) -> Var:
        for _ in range(400):
            x = mb.relu(x=x)
        return x

    with pytest.raises(SurgeryError, match="401 boxes are too many for an SVG picture; save it as .html"):
        ane.draw(long).save(tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()
    assert ane.draw(long)._repr_svg_() is None
    assert len(ane.draw(long, around="relu_200", before=3, after=3).ops) == 7


def test_a_picture_is_written_as_its_name_says(program: Program, tmp_path: Path) -> None:
    """The wrong version: a.png is an SVG."""
    picture = ane.draw(program)
    page = picture.save(tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert picture.save(tmp_path / "a.svg").read_text(encoding="utf-8") == picture.svg
    with pytest.raises(LoadError, match=r"ends in '\.png'; name it \.svg or \.html"):
        picture.save(tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_colours_are_named_below_the_boxes(program: Program) -> None:
    picture = ane.draw(program, target="iPhone 13")
    root = ET.fromstring(picture.svg)
    *_, last = root.iter(f"{SVG}g")
    assert next(text.text for text in last.iter(f"{SVG}text")) in ("ANE", "CPU", "GPU", "unknown")
    lowest = max(y + h for _, y, _, h in boxes(ane.draw(program)).values())
    rect = last.find(f"{SVG}rect")
    assert rect is not None
    assert lowest < float(rect.attrib["y"]) < float(root.attrib["height"])


def test_a_legend_is_as_wide_as_its_words() -> None:
    """The wrong version cuts the legend where the boxes are narrower than it."""

    @mb.program(input_specs=[mb.TensorSpec((1, 512, 32, 32), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        inner = mb.conv(x=x, weight=np.zeros((512, 512, 3, 3), np.float16), pad_type="same", name="c")
        return mb.cumsum(x=inner, axis=1, name="s")

    made = ane.draw(program, around="s", before=1, target="M1").svg
    width = float(re.findall(r'width="(\d+)"', made)[0])
    words = re.findall(r'<text class="type" x="([\d.]+)" y="[\d.]+">([^<]+)</text></g>', made)
    assert len(words) > 1
    assert all(float(x) + len(word) * LETTER <= width for x, word in words)
    assert all(0 <= float(x) < width for x in re.findall(r'<rect x="([\d.-]+)"', made))
