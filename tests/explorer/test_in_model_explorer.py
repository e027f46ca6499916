"""The adapter in Model Explorer's own server: a model is opened through it, and coloured by each overlay."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from browser import browsing

import anesurgery as ane
from anesurgery.explorer.side_by_side import panes
from anesurgery.mil import Program, mb

pytest.importorskip("model_explorer", reason="pip install 'anesurgery[explorer]'")

PATIENCE = 120
"""Seconds in which a server starts; it imports torch."""


def program() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 8))])(
        lambda x: mb.linear(x=mb.relu(x=x, name="a"), weight=np.eye(8, dtype=np.float32), name="y")
    )


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server with the extension."""
    main = ("-c", "from model_explorer.cmdline import main; main()")
    with served(*main, "--no_open_in_browser", "--extensions=anesurgery.explorer") as address:
        yield address


@contextlib.contextmanager
def served(*words: str) -> Iterator[str]:
    """The address of a server that Python starts with these words, and a port; it is ended after the body."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = subprocess.Popen(
        [sys.executable, *words, f"--port={port}"],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = f"http://localhost:{port}"
        for _ in range(PATIENCE * 2):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/check_health", timeout=PATIENCE).close()
                break
            assert started.poll() is None, "the server ended"
            time.sleep(0.5)
        else:
            raise AssertionError(f"no server in {PATIENCE} seconds")
        yield address
    finally:
        started.kill()
        started.wait()


def send(address: str, **command: Any) -> Any:
    """What a command gives; an error of the server is one of the test."""
    request = urllib.request.Request(
        f"{address}/apipost/v1/send_command",
        json.dumps({"deleteAfterConversion": False, **command}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        found = json.load(answer)
    assert not found.get("error"), found
    return found


def test_a_model_is_opened_and_coloured(server: str, tmp_path: Path) -> None:
    package = ane.save(ane.load(program()), tmp_path / "model.mlpackage")
    with urllib.request.urlopen(f"{server}/api/v1/get_extensions", timeout=PATIENCE) as answer:
        extensions = {found["id"]: found for found in json.load(answer)}
    assert {"mlpackage", "mlmodel", "mlmodelc"} <= set(extensions["anesurgery_core_ml"]["fileExts"])
    opened = send(
        server, extensionId="anesurgery_core_ml", cmdId="convert", modelPath=str(package), settings={}
    )
    (graph,) = opened["graphs"]
    assert graph["id"] == "model: main"
    assert [node["label"] for node in graph["nodes"]] == ["input", "relu", "linear"]
    assert graph["nodes"][2]["incomingEdges"][0]["sourceNodeId"] == "a"
    rows = ane.inspect(package).ops
    for overlay in ("units", "time", "numbers", "findings"):
        found = send(
            server,
            extensionId=f"anesurgery_{overlay}",
            cmdId="run",
            modelPath=str(package),
            graphId="model: main (1)",
            configValues={"target": "M4/macOS 15"},
        )
        shown = found["result"]["results"]
        assert set(shown) <= {row.name for row in rows}
        if overlay == "units":
            assert set(shown) == {"a", "y"}


def test_two_models_are_drawn_beside_each_other(tmp_path: Path) -> None:
    shorter = mb.program(input_specs=[mb.TensorSpec((1, 8))])(lambda x: mb.relu(x=x, name="y"))

    before = ane.save(ane.load(program()), tmp_path / "before.mlpackage")
    after = ane.save(ane.load(shorter), tmp_path / "after.mlpackage")
    pane = "pane => /op node count\\s+(\\d+)/.exec(pane.innerText)?.[1]"
    counts = f"[...document.querySelectorAll('split-pane')].map({pane})"
    beside = ("-m", "anesurgery.explorer.side_by_side", str(before), str(after), "--no-open")
    with served(*beside) as address, browsing() as browser:
        browser.size(1280)
        browser.open(f"{address}/?data={quote(json.dumps(panes(before, after)))}")
        browser.until(f'JSON.stringify({counts}) === \'["3","2"]\'')  # the input is a node too
        drawn = browser.run("[...document.querySelectorAll('split-pane canvas')].map(c => c.width * c.height)")
        assert len(drawn) >= 2
        assert all(drawn)


def test_a_model_that_cannot_be_read_is_said(server: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="does not exist"):
        send(server, extensionId="anesurgery_core_ml", cmdId="convert", modelPath="/no.mlpackage", settings={})
