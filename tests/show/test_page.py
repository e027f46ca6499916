"""The HTML report: what is in the file, and what a browser makes of it."""

from __future__ import annotations

import html
import itertools
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_models import EVIL, M1, ODD, large, twenty

from anesurgery.errors import SurgeryError
from anesurgery.placement import Inspection, Segment
from anesurgery.show.page import cell, draw, page

VOID = {"meta", "input", "br", "img", "link", "hr"}


class Balance(HTMLParser):
    """Counts tags that are not closed, and collects addresses and handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "action", "xlink:href")]
        self.handlers += [k for k, _ in attrs if k.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handlers += [k for k, _ in attrs if k.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.one_of(9)
@pytest.mark.parametrize("name", ODD)
def test_every_page_is_whole_and_needs_no_other_file(name: str) -> None:
    for made in (page(ODD[name]), page(ODD[name], ODD["twenty"]), cell(ODD[name])):
        found = Balance()
        found.feed(made)
        assert not found.open
        assert not found.handlers
        assert all(a.startswith("#") for a in found.addresses)
        assert not re.search(r"https?:|url\((?!#)|@import", made)


def test_what_a_model_brings_stays_text() -> None:
    for made in (page(ODD["evil"]), cell(ODD["evil"])):
        assert "<img" not in made
        assert "<script>document" not in made
        assert html.escape(EVIL, quote=False)[:20] in made


def test_a_cell_has_neither_script_nor_style_sheet() -> None:
    made = ODD["twenty"]._repr_html_()
    assert "<script" not in made
    assert "<style" not in made
    assert "embedding_matmul" in made
    assert "of 20 ops" in made


def test_a_page_of_two_thousand_ops_is_light() -> None:
    assert len(page(large()).encode()) < 1_000_000
    assert len(page(large(), large(every=90)).encode()) < 2_000_000
    assert len(cell(large())) < 60_000


def test_the_data_of_the_table_are_all_rows() -> None:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page(large()), re.S)
    assert found
    view = json.loads(found[1])["views"][0]
    assert len(view["rows"]) == 2000
    assert [r[0] for r in view["rows"]] == list(range(2000))


@pytest.mark.parametrize("name", ["twenty", "unknown", "ragged", "large"])
def test_boxes_lie_inside_and_apart(name: str) -> None:
    for width in (580, 1180):
        drawn = draw(ODD[name], width)
        assert len(drawn.boxes) == min(len(ODD[name].segments), 400)
        for a in drawn.boxes:
            assert 0 < a.x < a.x + a.width <= width
            assert 0 < a.y < a.y + a.height <= drawn.height
        for a, b in itertools.combinations(drawn.boxes[:80], 2):
            apart_x = a.x + a.width < b.x or b.x + b.width < a.x
            assert apart_x or a.y + a.height < b.y or b.y + b.height < a.y


def test_boxes_follow_the_flow_of_data() -> None:
    parted = Inspection(
        "y",
        M1,
        (),
        (
            Segment(0, "cpu", ("a",), {}, {}, (1, 2)),
            Segment(1, "ane", ("b",), {}, {}, (3,)),
            Segment(2, "gpu", ("c",), {}, {}, (3,)),
            Segment(3, None, ("d",), {}, {}, (0,)),
        ),
    )
    a, b, c, d = sorted(draw(parted).boxes, key=lambda box: box.segment.index)
    assert a.x < b.x == c.x < d.x
    assert b.y != c.y
    assert len(draw(parted).arrows) == 4  # the one back to an earlier segment is none of data flow


def test_what_is_not_drawn_is_said() -> None:
    assert "800 more segments are not drawn" in draw(ODD["ragged"]).note
    assert "800 more segments are not drawn" in page(ODD["ragged"])


def test_saving_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert twenty().save_html(path) == path
    assert path.read_text(encoding="utf-8") == page(twenty())
    twenty().save_html(str(path), after=large(100))
    assert "What changed" in path.read_text(encoding="utf-8")
    assert os.listdir(tmp_path) == ["report.html"]
    with pytest.raises(SurgeryError, match="does not exist; make it first"):
        twenty().save_html(tmp_path / "absent" / "report.html")
