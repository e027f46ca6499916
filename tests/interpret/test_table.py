"""The table of implementations is filled once, also where several threads ask at once."""

from __future__ import annotations

import importlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from anesurgery.interpret import table
from anesurgery.interpret.table import Implementation


def test_no_thread_sees_a_table_that_is_half_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: it counts as full from when the first thread begins."""
    mine, begun, calls = table._Implementations(), threading.Event(), list[str]()

    def load() -> None:
        calls.append("load")
        begun.set()
        time.sleep(0.2)
        mine["mul"] = Implementation(max, moves=False)

    def family(name: str) -> Any:
        return SimpleNamespace(load_implementations=load)

    monkeypatch.setattr(importlib, "import_module", family)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(len, mine)
        begun.wait()
        assert threads.submit(lambda: "mul" in mine).result()
        assert first.result() == 1
