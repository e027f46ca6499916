"""Report the progress of long work, in bytes or pieces.

The function that does the work opens `with work(total)` and calls `advance(count)` as parts are done. A command
opens `with listening() as listener` around it and shows `listener.amount` from another thread. Without a
listener nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Amount:
    """How much of a piece of work is done."""

    total: int
    """Bytes, or pieces, as `unit` says."""
    unit: str = "B"
    done: int = 0
    start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float | None:
        """The seconds that the rest takes at the same speed; None before anything is done."""
        if not self.done:
            return None
        return (time.monotonic() - self.start) * max(0, self.total - self.done) / self.done


@dataclass
class Listener:
    """The current state of the work; another thread reads it."""

    amount: Amount | None = None
    """The progress of the current work; None outside of `work`."""
    step: str = ""
    """The current step, in words."""


_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening() -> Iterator[Listener]:
    """Record the progress of the work that is done in the body."""
    listener = Listener()
    token = _LISTENER.set(listener)
    try:
        yield listener
    finally:
        _LISTENER.reset(token)


@contextmanager
def work(total: int, unit: str = "B") -> Iterator[None]:
    """Declare how much there is to do in the body, a part of the outer work if that has the same unit."""
    listener = _LISTENER.get()
    outer = None if listener is None else listener.amount
    if listener is None or (outer is not None and outer.unit == unit):
        yield
        return
    listener.amount = Amount(total, unit)
    try:
        yield
    finally:
        listener.amount = outer


def advance(count: int) -> None:
    """Add to the amount that is done."""
    listener = _LISTENER.get()
    if listener is not None and listener.amount is not None:
        listener.amount.done += count


def step(words: str) -> None:
    """Set the name of the current step."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.step = words
