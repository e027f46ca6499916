"""The page of a certificate: what it says, how the rails run, and what a browser makes of it."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import run_child

import anesurgery as ane
from anesurgery.mil import Program, Var, mb, types
from anesurgery.placement.certifying import Certificate
from anesurgery.placement.op_errors import BINS, OpError, histogram
from anesurgery.show.reports import HEIGHT, LANES, band, bars, certificate_page, rails

HALF = np.float16
ODD_NAME = "y</script><script>document.title='owned'</script>" + "long_" * 40


def loud() -> Program:
    """A square that overflows, beside which the input goes on to the end."""

    @mb.program(input_specs=[mb.TensorSpec((4, 32), dtype=types.fp16)])
    def program(x: Var) -> Any:
        h = mb.tanh(x=x, name="start")
        total = mb.reduce_sum(x=mb.square(x=x, name="square"), axes=[-1], keep_dims=True, name="total")
        root = mb.sqrt(x=mb.add(x=total, y=HALF(1e-3)), name="root")
        return mb.add(x=h, y=mb.real_div(x=x, y=root, name="normed"), name=ODD_NAME)

    return program


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    values = (np.random.default_rng(1).standard_normal((4, 32)) * 2000).astype(HALF)
    return ane.certify(loud(), {"x": values})


def row(name: str, *reads: str) -> OpError:
    return OpError(name, "x", {}, {}, 1.0, reads=reads)


def test_a_chain_is_one_rail_and_what_goes_round_it_another() -> None:
    drawn = rails([row("a"), row("b", "a"), row("c", "b"), row("d", "a", "c"), row("e", "d", "unknown")])
    assert [r.lane for r in drawn] == [0, 1, 1, 0, 0]
    assert [r.passing for r in drawn] == [(), (0,), (0,), (), ()]
    assert [r.incoming for r in drawn] == [(), (0,), (1,), (0, 1), (0,)]
    assert [r.after for r in drawn] == [(0,), (0, 1), (0, 1), (0,), ()]


def test_many_rails_share_the_last() -> None:
    many = [row(str(k)) for k in range(20)]
    drawn = rails([*many, row("sum", *(r.name for r in many))])
    assert max(r.lane for r in drawn) == LANES - 1
    assert drawn[-1].incoming == tuple(range(LANES))


def test_histograms_show_where_arithmetics_differ() -> None:
    """The wrong version counts infinities into the last bin, or bins each arithmetic by its own range."""
    values = torch.linspace(-1, 1, 1000)
    other = torch.where(values > 0.5, math.inf, values * 0.5)
    found = histogram({"fp32": values, "fp16": other})
    assert found is not None
    assert found.low == -found.high == pytest.approx(-1 - 2 / BINS)
    assert sum(found.counts["fp32"]) == 1000
    assert found.outside == {"fp32": 0, "fp16": 250}
    assert found.counts["fp16"][1] == 0 < found.counts["fp32"][1]
    assert len(found.counts["fp16"]) == BINS
    assert bars(found, "fp16").exact.startswith(f"M0 {HEIGHT}V")
    assert histogram({"fp32": torch.tensor([math.nan])}) is None
    assert histogram({"fp32": torch.full((3,), 2.0)}) is not None


@pytest.mark.parametrize(("psnr", "number"), [(math.inf, 0), (80, 0), (79, 1), (41, 2), (5, 4), (-math.inf, 4)])
def test_bands(psnr: float, number: int) -> None:
    assert band(psnr) == number


def test_the_page_says_what_the_certificate_says(certificate: Certificate, tmp_path: Path) -> None:
    path = certificate.save_html(tmp_path / "page.html")
    text = html.unescape(path.read_text(encoding="utf-8"))
    assert certificate.why in text
    for found in certificate.rows:
        assert f'title="{found.name}"' in text
    square = text[text.index('title="square"') :]
    assert "not finite" in square[: square.index("</summary>")]
    root = text[text.index('title="root"') :]
    assert "scale_roots" in root[: root.index("</details>")]
    assert root[: root.index("</details>")].count("<figure>") == 2


MEASURE = """
  const kinds = (of) => [...document.querySelectorAll(of)];
  const seen = {width: innerWidth, opened: kinds("details[open]").map((d) => d.id)};
  document.querySelector("input[value=grown]").click();
  seen.grown = kinds("details.op").every((d) => d.classList.contains("b" + d.dataset.grown));
  const summary = kinds("details.op summary");
  summary[2].focus(); seen.focus = document.activeElement === summary[2]; summary[2].click();
  seen.clicked = kinds("details.op")[2].open && kinds("details.op")[2].querySelectorAll("figure svg").length;
  kinds("details").forEach((d) => { d.open = true; });
  seen.over = document.documentElement.scrollWidth > innerWidth;
  seen.narrow = kinds("figure").filter((f) => f.getBoundingClientRect().width < 200).length;
  seen.names = kinds("summary .name").filter((n) => n.getBoundingClientRect().width < 40).length;
  document.title = "seen " + JSON.stringify(seen);
"""


@pytest.mark.one_of(2)
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_unfolds_an_op_and_nothing_is_cut(
    certificate: Certificate, width: int, tmp_path: Path
) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    made = certificate_page(certificate).replace("</body>", f"<script>{MEASURE}</script>{SEND}</body>")
    (tmp_path / "page.html").write_text(made, encoding="utf-8")
    frame = f'<iframe src="page.html#op-1" style="width: {width}px; height: 900px; border: 0"></iframe>'
    outer = tmp_path / "outer.html"
    outer.write_text(f"<!doctype html><body>{RECEIVE}{frame}</body>", encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=3000",
        "--enable-logging=stderr",
    ]
    folder = f"--user-data-dir={tmp_path / 'profile'}"
    done = run_child([chromium, *flags, folder, "--dump-dom", outer.as_uri()], check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    title = re.search(r"<title>seen (.*?)</title>", done.stdout)
    assert title, done.stdout[:500]
    seen = json.loads(html.unescape(title[1]))
    expected = {"width": width, "opened": ["op-1"], "grown": True, "focus": True, "clicked": 2, "over": False}
    assert seen == expected | {"narrow": 0, "names": 0}


SEND = '<script>parent.postMessage(document.title, "*")</script>'
RECEIVE = '<script>addEventListener("message", (e) => { document.title = e.data; })</script>'
