"""Open pages in Chromium, several at once in frames, and get what it makes of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from children import run_child


def started(file: Path, *flags: str) -> str:
    """The document that Chromium makes of a file, after its scripts; whatever it complains of is an error."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    done = run_child(
        [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={file.parent / 'profile'}",
            "--virtual-time-budget=3000",
            "--enable-logging=stderr",
            "--dump-dom",
            *flags,
            file.as_uri(),
        ],
        check=True,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


SEND = """<script>addEventListener("load", () => setTimeout(() =>
  parent.postMessage([window.name, document.documentElement.outerHTML], "*")));</script></body>"""
COLLECT = """<!doctype html><html><head><title>none</title></head><body>
<script>const made = {};
addEventListener("message", (e) => {
  made[e.data[0]] = e.data[1];
  document.getElementById("made").textContent = JSON.stringify(made).replaceAll("<", "\\\\u003c");
});</script><script type="application/json" id="made"></script>"""


def in_frames(folder: Path, frames: list[tuple[str, str]], *flags: str) -> list[str]:
    """What one browser makes of several frames: their attributes, and the page in each, which sends itself."""
    lines = [f'<iframe name="{k}" {how}></iframe>' for k, (how, _) in enumerate(frames)]
    for k, (_, made) in enumerate(frames):
        (folder / f"{k}.html").write_text(made, encoding="utf-8")
    file = folder / "frames.html"
    file.write_text(f"{COLLECT}{''.join(lines)}</body></html>", encoding="utf-8")
    sent = re.search(r'id="made">(.*?)</script>', started(file, *flags), re.S)
    assert sent
    documents = json.loads(sent[1])
    return [documents[str(k)] for k in range(len(frames))]
