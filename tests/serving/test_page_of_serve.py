"""The page of `anesurgery serve` in a browser: by keyboard, at two widths, with good and bad models."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browsing, wait_until

import anesurgery as ane
from anesurgery import registry

pytest.importorskip("starlette", reason="pip install 'anesurgery[serve]'")
pytest.importorskip("uvicorn", reason="pip install 'anesurgery[serve]'")
pytestmark = pytest.mark.slow

CONTRAST = """(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const solid = (e) => {
    for (; e; e = e.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(e).backgroundColor);
      if (a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const light = (c) => c.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
  const ratio = (e) => {
    const ink = numbers(getComputedStyle(e).color).slice(0, 3);
    const [a, b] = [light(ink), light(solid(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const said = [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() && !e.disabled &&
    ([...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || e.matches("input, select")));
  return said.map((e) => [Math.round(ratio(e) * 100) / 100, e.tagName, e.textContent.trim().slice(0, 30)]);
})()"""
FITS = "document.documentElement.scrollWidth <= innerWidth"
DONE = "document.getElementById('bar').hidden && !document.getElementById('now').hidden"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address that the command prints, and the folder in which it keeps what is sent."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("served")
    words = [sys.executable, "-m", "anesurgery", "serve", "--port", str(port), "--upload", "0.1"]
    started = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert started.stdout is not None
        address = re.search(r"http\S+", started.stdout.readline())
        assert address
        with socket.socket() as tried:
            wait_until(lambda: tried.connect_ex(("127.0.0.1", port)) == 0, "the server listens")
        yield address[0], folder
        started.send_signal(signal.SIGINT)
        started.wait()
        assert list(folder.iterdir()) == [], "it deletes what was sent"
    finally:
        started.kill()
        started.wait()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ane.example("tiny", tmp_path_factory.mktemp("models") / "tiny.mlpackage")


@pytest.fixture
def browser(server: tuple[str, Path]) -> Iterator[Browser]:
    """A browser at the page, which has nothing to complain of and asks nobody else."""
    with browsing() as made:
        made.size(1280)
        made.open(server[0])
        yield made
        home = server[0].partition("?")[0]
        assert made.complaints == []
        assert [url for url in made.asked if not url.startswith((home, "data:"))] == []


def tab_to(browser: Browser, name: str) -> None:
    """Press Tab until an element has the focus, which can be seen."""
    for _ in range(30):
        browser.press("Tab")
        if browser.run("document.activeElement.id") == name:
            assert browser.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
            return
    raise AssertionError(f"{name} is not reached")


def readable(browser: Browser) -> None:
    """The page fits at both widths, and its words are read at both schemes (AA)."""
    for width in (400, 1280):
        for scheme in ("light", "dark"):
            browser.size(width, scheme=scheme)
            assert browser.run(FITS), width
            assert [row for row in browser.run(CONTRAST) if row[0] < 4.5] == [], scheme
    browser.size(1280)


def stored(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("upload/*") if path.exists()]


def test_a_folder_is_reported_rewritten_by_keys_and_deleted(
    browser: Browser, server: tuple[str, Path], package: Path
) -> None:
    readable(browser)
    browser.give("#folder", [package])
    browser.until(DONE)
    assert browser.run("document.getElementById('sentence').textContent").startswith("On iPhone 17")
    assert browser.run("document.activeElement.id") == "sentence"
    assert len(stored(server[1])) == 1
    browser.run("document.getElementById('file').focus()")
    tab_to(browser, "target")
    browser.call("Input.insertText", text="M1")
    assert browser.run("document.getElementById('target').value") == "M1"
    tab_to(browser, "recipe")
    for _ in registry.recipe_names():
        if browser.run("document.getElementById('recipe').value") != "gpt2_ane":
            browser.press("ArrowDown")
    assert browser.run("document.getElementById('recipe').value") == "gpt2_ane"
    tab_to(browser, "apply")
    browser.press("Enter")
    browser.until("!document.getElementById('bar').hidden")
    browser.until("document.getElementById('words').textContent.includes(' s)')")
    browser.until(DONE)
    readable(browser)
    tab_to(browser, "download")
    link = browser.run("document.activeElement.getAttribute('download')")
    assert link == "tiny_ane.mlpackage.zip"
    head = browser.run(
        "fetch(document.getElementById('download').href).then((a) => a.text()).then((t) => t.slice(0, 2))"
    )
    assert head == "PK"
    browser.run("document.querySelector('#changes').open = true")
    readable(browser)
    report = browser.run("document.getElementById('open').href")
    with browser.tab(report):
        assert browser.run("self.origin") == "null", "a report has no rights here"
        assert "of 29 ops" in browser.run("document.body.innerText")
        for width in (400, 1280):
            browser.size(width)
            assert browser.run(FITS)
    browser.run("document.getElementById('file').focus()")  # the report between has stops of its own
    tab_to(browser, "delete")
    browser.press(" ")
    browser.until("document.getElementById('now').hidden")
    assert stored(server[1]) == []


def test_a_folder_and_an_archive_are_dropped(
    browser: Browser, server: tuple[str, Path], package: Path, tmp_path: Path
) -> None:
    """With more files than a reader of folders gives at once, and with what Finder leaves in it."""
    copy = shutil.copytree(package, tmp_path / "dropped.mlpackage")
    for number in range(120):
        (copy / "Data" / f"note_{number}.txt").write_text("x")
    (copy / ".DS_Store").write_text("x")
    browser.drop("#drop", [copy])
    browser.until(DONE)
    assert browser.run("document.getElementById('sentence').textContent").startswith("On iPhone 17")
    (sent,) = stored(server[1])
    assert len(list(sent.rglob("note_*"))) == 120
    assert not list(sent.rglob(".DS_Store"))
    shutil.make_archive(str(tmp_path / "packed"), "zip", package.parent, package.name)
    browser.drop("#drop", [tmp_path / "packed.zip"])
    browser.until("!document.getElementById('bar').hidden")
    browser.until(DONE)
    assert browser.run("document.getElementById('sentence').textContent").startswith("On iPhone 17")


def test_malicious_models_are_refused_in_words_and_the_page_goes_on(
    browser: Browser, server: tuple[str, Path], package: Path, tmp_path: Path
) -> None:
    name = "<img src=x onerror=alert(1)>.mlmodel"
    (tmp_path / name).write_bytes(b"\xff" * 1000)
    with zipfile.ZipFile(tmp_path / "out.zip", "w") as made:
        made.writestr("net.mlpackage/Manifest.json", b"{}")
        made.writestr("net.mlpackage/../../../../owned", b"x")
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("net.mlpackage/Manifest.json", b"\0" * (1 << 28))
    (tmp_path / "large.zip").write_bytes(b"x" * (110 << 20))
    said = {
        name: "img src=x",
        "out.zip": "leads out of it",
        "bomb.zip": "are unpacked",
        "large.zip": "limit here",
    }
    for bad, words in said.items():
        browser.give("#file", [tmp_path / bad])
        browser.until(f"document.getElementById('problem').textContent.includes({json.dumps(words)})")
        browser.until(DONE)
        assert browser.run("document.querySelectorAll('img').length") == 0
        readable(browser)
    assert [path.name for path in server[1].rglob("owned")] == []
    expected = [c for c in browser.complaints if "413" in c]
    assert len(expected) == 1, "the browser notes that one was too large"
    browser.complaints.remove(expected[0])
    shutil.make_archive(str(tmp_path / "good"), "zip", package.parent, package.name)
    browser.give("#file", [tmp_path / "good.zip"])
    browser.until("!document.getElementById('report').hidden")
    assert len(stored(server[1])) <= 1, "one that was replaced is deleted"
    browser.call("Page.navigate", url="about:blank")
    wait_until(lambda: not any(server[1].rglob("report.html")), "what is left behind is deleted")
