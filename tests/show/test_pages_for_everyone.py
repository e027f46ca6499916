"""All pages fit a phone and a desk, have words that stand out from their ground, and need no mouse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, browsing
from report_models import finding, inspection, row, twenty

import anesurgery as ane
from anesurgery.display import drawn
from anesurgery.mil import Program, mb
from anesurgery.placement import Inspection
from anesurgery.show.page import cell, page

WIDTHS = (400, 1280)
MEASURE = """(() => {
const all = (of, from = document) => [...from.querySelectorAll(of)];
all("details").forEach((d) => { d.open = true; });
all("#ops .more").slice(0, 3).forEach((b) => b.click());
const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const parsed = (colour) => {
  pixel.clearRect(0, 0, 1, 1); pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1);
  const d = pixel.getImageData(0, 0, 1, 1).data;
  return [d[0], d[1], d[2], d[3] / 255];
};
const over = (front, back) => [...[0, 1, 2].map((k) => front[k] * front[3] + back[k] * (1 - front[3])), 1];
const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, part, k) => {
  const v = c[k] / 255;
  return sum + part * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
}, 0);
const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
const ancestors = (e) => (e ? [...ancestors(e.parentElement), e] : []);
const look = (node) => {
  const e = node.parentElement, style = getComputedStyle(e);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  let back = dark ? [18, 18, 18, 1] : [255, 255, 255, 1], opacity = 1;
  for (const a of ancestors(e)) {
    const box = a.classList.contains("box") && a.querySelector("rect.body");
    back = over(parsed(getComputedStyle(a).backgroundColor), back);
    if (box) back = over(parsed(getComputedStyle(box).fill), back);
    opacity *= +getComputedStyle(a).opacity;
  }
  const own = parsed(e.ownerSVGElement ? style.fill : style.color), size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && +style.fontWeight >= 700);
  return [contrast(over([...own.slice(0, 3), own[3] * opacity], back), back), large ? 3 : 4.5];
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), texts = [];
while (walker.nextNode()) {
  const e = walker.currentNode.parentElement;
  if (walker.currentNode.data.trim() && !e.closest("script, style, title") && e.getClientRects().length)
    texts.push(walker.currentNode);
}
const faint = texts.filter((t) => { const [found, least] = look(t); return found < least; });
const mouse = all("*").filter((e) => getComputedStyle(e).cursor === "pointer")
  .filter((e) => !e.closest("a[href], button, summary, label, input, select, .strip"));
const unseen = all("a[href], button, summary, input, select").filter((e) => {
  if (!e.getClientRects().length) return false;
  e.focus();
  const style = getComputedStyle(e);
  const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
  return document.activeElement !== e || !(ring || e.closest(".box"));
});
return {
  texts: texts.length,
  over: document.documentElement.scrollWidth > innerWidth,
  cut: innerWidth < 1000 ? 0 : all(".card.table").filter((e) => e.scrollWidth > e.clientWidth).length,
  faint: [...new Set(faint.map((t) => `${t.parentElement.getAttribute("class")}: ${t.data.trim()}`))],
  mouse: mouse.map((e) => e.outerHTML.slice(0, 80)),
  unseen: unseen.map((e) => e.outerHTML.slice(0, 80)),
};
})()"""


def certificate() -> str:
    made = mb.program(input_specs=[mb.TensorSpec((1, 8))])(
        lambda x: mb.linear(x=mb.exp(x=mb.square(x=x)), weight=np.eye(8, dtype=np.float32), name="y")
    )

    program: Program = made
    return str(drawn(ane.certify(program, [{"x": np.full((1, 8), 3.0, np.float32)}]), "page"))


def notebook(shown: str) -> str:
    """A cell of a notebook by itself, which is dark where the reader's system is."""
    dark = "<style>:root { color-scheme: light dark }</style>"
    return f"<!doctype html><html><head>{dark}</head><body><main>{shown}</main></body></html>"


def wordy() -> Inspection:
    """Ops whose names, rules and remedies have no place to break."""
    found = finding("dtype", source="someone/measurements_of_an_engine", remedy="reflect_pad_slices_everywhere")
    kinds = ("upsample_nearest_neighbor", "upsample_bilinear_resized")
    return inspection([row(k, kind, "cpu", False, findings=(found,)) for k, kind in enumerate(kinds)])


def pages() -> dict[str, str]:
    """Every page that the library writes."""
    two = twenty(), wordy()
    small = ane.load(_small())
    return {
        "inspection": page(two[0]),
        "before and after": page(*two),
        "certificate": certificate(),
        "cell": notebook(cell(two[0])),
        "table in a cell": notebook(ane.compare(small, small)._repr_html_()),
    }


def _small() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 8))])(lambda x: mb.relu(x=x, name="y"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as started:
        yield started


def measured(browser: Browser, folder: Path, made: str, width: int, scheme: str) -> Any:
    """What a page is like at a width."""
    browser.size(width, scheme=scheme)
    browser.show(made, folder)
    return browser.run(MEASURE)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_pages_fit_are_read_and_need_no_mouse(scheme: str, browser: Browser, tmp_path: Path) -> None:
    for name, made in pages().items():
        for width in WIDTHS:
            seen = measured(browser, tmp_path, made, width, scheme)
            assert seen.pop("texts") > 5, name
            fine = {"over": False, "cut": 0, "faint": [], "mouse": [], "unseen": []}
            assert seen == fine, (name, width, scheme)


def test_what_does_not_fit_or_is_faint_would_be_found(browser: Browser, tmp_path: Path) -> None:
    wrong = (
        '<p class="pale" style="color: #999; background: #fff">pale</p><div style="width: 1300px">wide</div>'
        '<b style="cursor: pointer">click</b><button style="outline: none">no ring</button>'
    )
    for width in WIDTHS:
        seen = measured(browser, tmp_path, notebook(wrong), width, "light")
        assert seen["over"]
        assert seen["faint"] == ["pale: pale"]
        assert [len(seen[key]) for key in ("mouse", "unseen")] == [1, 1]
