"""The command `serve`: where it listens, who may ask, and what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from browser import wait_until
from typer.testing import CliRunner

from anesurgery.commands import trying
from anesurgery.commands.app import app
from anesurgery.errors import SurgeryError

web = pytest.importorskip("anesurgery.serving.web", reason="pip install 'anesurgery[serve]'")
uvicorn = pytest.importorskip("uvicorn", reason="pip install 'anesurgery[serve]'")
SPACE = Path(__file__).parents[2] / "docs/space"


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the command gives to the application and to its server; neither is made."""
    noted = SimpleNamespace()

    def site(limits: Any, hosts: Any, token: Any) -> None:
        noted.limits, noted.hosts, noted.token = limits, hosts, token

    def run(made: Any, **how: Any) -> None:
        noted.how = how

    monkeypatch.setattr(web, "site", site)
    monkeypatch.setattr(uvicorn, "run", run)
    return noted


def serve(*words: str) -> str:
    shown = CliRunner().invoke(app, ["serve", *words], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    return shown.output


def test_it_listens_on_this_machine_alone_and_asks_for_a_token(called: SimpleNamespace) -> None:
    said = serve("--port", "9000", "--upload", "0.5", "--minutes", "2")
    assert called.how["host"] == "127.0.0.1"
    assert called.how["port"] == 9000
    assert called.hosts == {"127.0.0.1", "127.0.0.1:9000", "localhost", "localhost:9000"}
    assert f"http://127.0.0.1:9000/?token={called.token}\n" in said
    assert len(called.token) >= 32
    assert (called.limits.upload, called.limits.unpacked) == (500_000_000, 10**9)
    assert called.limits.seconds == 120


def test_the_space_is_open_to_all_under_its_own_name(called: SimpleNamespace) -> None:
    recipe = (SPACE / "Dockerfile").read_text(encoding="utf-8")
    command = re.search(r"^CMD exec (.*)$", recipe, re.M)
    assert command
    name, _, *words = shlex.split(command[1].replace("${SPACE_HOST:-localhost}", "Me.example"))
    assert name == "anesurgery"
    assert "token" not in serve(*words)
    assert called.how["host"] == "0.0.0.0"
    assert f"app_port: {called.how['port']}\n" in (SPACE / "README.md").read_text(encoding="utf-8")
    assert called.token is None
    assert "me.example" in called.hosts


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "find_spec", lambda name: None if name == "uvicorn" else name)
    with pytest.raises(SurgeryError, match=r"serve needs uvicorn: pip install 'anesurgery\[serve\]'"):
        serve()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_leaves_no_models(how: signal.Signals, tmp_path: Path) -> None:
    """At its end where it can, else at the start of the next one."""
    with running(tmp_path) as (address, server):
        job = json.loads(called_at(address, "POST", "/models"))["id"]
        called_at(address, "PUT", f"/models/{job}/files/net.mlmodel", b"x")
        assert list(tmp_path.rglob("net.mlmodel"))
        server.send_signal(how)
        server.wait()
    assert (list(tmp_path.iterdir()) == []) == (how == signal.SIGTERM)
    with running(tmp_path):
        assert list(tmp_path.rglob("net.mlmodel")) == []
    assert list(tmp_path.iterdir()) == []


@contextmanager
def running(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address that the command prints, and its process, which keeps what is sent in a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [sys.executable, "-m", "anesurgery", "serve", "--port", port]
    own = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=own)
    try:
        assert server.stdout is not None
        address = re.search(r"http\S+", server.stdout.readline())
        assert address
        with socket.socket() as tried:
            wait_until(lambda: tried.connect_ex(("127.0.0.1", int(port))) == 0, "the server listens")
        yield address[0], server
        server.send_signal(signal.SIGTERM)
        server.wait()
    finally:
        server.kill()
        server.wait()


def called_at(address: str, method: str, path: str, body: bytes = b"") -> bytes:
    """What the page answers."""
    home, _, token = address.partition("/?")
    asked = urllib.request.Request(f"{home}{path}?{token}", body, method=method)
    with urllib.request.urlopen(asked) as answer:
        content: bytes = answer.read()
    return content
