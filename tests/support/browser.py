"""A Chromium that a test drives over a pipe; whatever a page complains of is kept."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 3000
"""Times that something is looked for, a tenth of a second apart; far beyond what the busiest machine takes."""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
WIRE = """
import os, sys
reads, writes = (os.dup(int(word)) for word in sys.argv[1:3])
for k, descriptor in ((3, reads), (4, writes)):
    os.dup2(descriptor, k)
    os.set_inheritable(k, True)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads descriptor 3 and writes 4."""
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowDown": 40}


def wait_until(true: Callable[[], Any], words: str) -> None:
    """Look until something is true."""
    for _ in range(PATIENCE):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError(f"never true: {words}")


class Browser:
    """One page of a Chromium."""

    def __init__(self, told: int, said: int) -> None:
        self.told, self.said, self.rest, self.number = told, said, b"", 0
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.session: str | None = None
        self.width = 1280
        (page,) = (t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._attach(page["targetId"])

    def _attach(self, target: str) -> None:
        self.session = None
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    @contextmanager
    def tab(self, address: str) -> Iterator[None]:
        """Another page, which is closed after the body."""
        before = self.session
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._attach(target)
        self.size(self.width)
        self.open(address)
        try:
            yield
        finally:
            self.session = before
            self.call("Target.closeTarget", targetId=target)
            self.call("Page.bringToFront")

    def call(self, method: str, **parameters: Any) -> Any:
        """What a command of the DevTools protocol gives; events meanwhile are noted."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None:
            command["sessionId"] = self.session
        os.write(self.told, json.dumps(command).encode() + b"\0")
        while (message := self._next()).get("id") != self.number:
            self._note(message)
        assert "error" not in message, message
        return message["result"]

    def _next(self) -> Any:
        while b"\0" not in self.rest:
            read = os.read(self.said, 1 << 16)
            assert read, "the browser ended"
            self.rest += read
        line, _, self.rest = self.rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: Any) -> None:
        what, told = event.get("method"), event.get("params", {})
        if what == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(details.get("exception", details).get("description", details["text"])[:500])
        elif what == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif what == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.protocol !== 'about:'")

    def show(self, page: str, folder: Path, address: str = "") -> None:
        """Open the text of a page as a new file of a folder; the first complaint is an error."""
        file = folder / f"page_{len(list(folder.iterdir()))}.html"
        file.write_text(page, encoding="utf-8")
        self.open(file.as_uri() + address)
        assert not self.complaints, self.complaints.pop()

    def document(self) -> str:
        return str(self.run("document.documentElement.outerHTML"))

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        given = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in given, given
        return given["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        wait_until(lambda: self.run(script), script)

    def give(self, selector: str, paths: Sequence[Path]) -> None:
        """Choose files in an input."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def drop(self, selector: str, paths: Sequence[Path]) -> None:
        """Drag files or folders over an element, and let them fall."""
        self.run(f"document.querySelector('{selector}').scrollIntoView()")
        box = f"document.querySelector('{selector}').getBoundingClientRect()"
        x, y = self.run(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]")
        data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def press(self, key: str) -> None:
        how = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"Enter": "\r", " ": " "}.get(key)
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **down, **how)
        self.call("Input.dispatchKeyEvent", type="keyUp", **how)

    def size(self, width: int, height: int = 900, scheme: str = "light") -> None:
        self.width = width
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, place: Path) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        place.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser, ended after the body; the test is skipped where none is installed."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    (told_from, told), (said, said_to) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        wired = [sys.executable, "-S", "-c", WIRE, str(told_from), str(said_to), *command]
        started = subprocess.Popen(wired, pass_fds=(told_from, said_to), stderr=subprocess.DEVNULL)
        os.close(told_from)
        os.close(said_to)
        try:
            yield Browser(told, said)
        finally:
            os.close(told)
            started.kill()
            started.wait()
            os.close(said)
