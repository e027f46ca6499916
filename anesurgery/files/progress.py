"""How far long work has come, in bytes: the work says how much there is, and each part of it what it has done.

Nobody needs to listen. A command does, and shows the bytes and the time that is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Amount:
    """A piece of work."""

    total: int
    """Bytes, or pieces."""
    unit: str = "B"
    done: int = 0
    start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float | None:
        """Seconds that the rest takes if it goes on like this; None before anything is done."""
        if not self.done:
            return None
        return (time.monotonic() - self.start) * max(0, self.total - self.done) / self.done


@dataclass
class Listener:
    """Somebody who wants to know; read from another thread."""

    amount: Amount | None = None
    """The work that is being done."""
    step: str = ""
    """What is being done, in words."""


_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening() -> Iterator[Listener]:
    """Listen to the work that is done in the body."""
    listener = Listener()
    token = _LISTENER.set(listener)
    try:
        yield listener
    finally:
        _LISTENER.reset(token)


@contextmanager
def work(total: int, unit: str = "B") -> Iterator[None]:
    """Say how much there is to do in the body; work within work counts for the outer one."""
    listener = _LISTENER.get()
    if listener is None or listener.amount is not None:
        yield
        return
    listener.amount = Amount(total, unit)
    try:
        yield
    finally:
        listener.amount = None


def advance(count: int) -> None:
    """Say that so much was done."""
    listener = _LISTENER.get()
    if listener is not None and listener.amount is not None:
        listener.amount.done += count


def step(words: str) -> None:
    """Say what is being done now."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.step = words
