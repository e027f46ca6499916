"""Ctrl-C and SIGTERM while a file takes its place: they wait until what was begun is finished or cleaned up.

Python raises KeyboardInterrupt between any two instructions, also within the code that cleans up; SIGTERM ends
the process without any. Inside `held_back` both wait, but in parts marked `allowed`, where they raise at once.
What waited is raised again at the end, by the signal itself, so that the process ends as it would have.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Ended(BaseException):
    """The process is to end by a signal; it unwinds so far that what was begun is cleaned up."""


class _Waiting:
    """Signals that were held back by one thread."""

    def __init__(self) -> None:
        self.open = False
        self.thread = threading.get_ident()
        self.caught: list[int] = []
        self.before: dict[int, Any] = {}

    def begin(self) -> None:
        """Take the signals, but for those that are ignored or not Python's to handle."""
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler is not None and handler != signal.SIG_IGN:
                self.before[number] = handler
                signal.signal(number, self.arrived)

    def arrived(self, number: int, frame: Any) -> None:
        """A signal is here: remember it, or let it have its way."""
        handler: Callable[[int, Any], object] | Any = self.before[number]
        if self.open and callable(handler):
            handler(number, frame)
            return
        self.caught.append(number)
        if self.open:
            raise _Ended

    def give_back(self) -> None:
        """Handle signals as before."""
        for number, handler in self.before.items():
            signal.signal(number, handler)


_WAITING: list[_Waiting] = []
"""Those at work, the innermost last; of the main thread, the only one that handles signals."""


@contextmanager
def held_back() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until the body is done; other threads than the main one are never asked."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting = _Waiting()
    _WAITING.append(waiting)
    try:
        waiting.begin()
        yield
    finally:
        _WAITING.remove(waiting)
        waiting.give_back()
        for number in dict.fromkeys(waiting.caught):
            signal.raise_signal(number)


@contextmanager
def allowed() -> Iterator[None]:
    """Let them come at once in the body, as where something long is written."""
    waiting = _WAITING[-1] if _WAITING else None
    if waiting is None or waiting.thread != threading.get_ident():
        yield
        return
    try:
        waiting.open = True
        caught, waiting.caught = waiting.caught, []
        for number in caught:
            waiting.arrived(number, None)
        yield
    finally:
        waiting.open = False


def _forked() -> None:
    """In a new process: what another thread held back is nobody's there."""
    for waiting in reversed([w for w in _WAITING if w.thread != threading.get_ident()]):
        _WAITING.remove(waiting)
        waiting.give_back()


os.register_at_fork(after_in_child=_forked)
