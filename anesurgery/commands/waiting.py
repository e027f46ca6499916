"""What the user sees while a command is at work, and what Ctrl-C does meanwhile.

torch and coremltools take seconds to import, and neither is written to be interrupted: a `KeyboardInterrupt` in
the middle of them was swallowed, or crashed the process. So until they are loaded Ctrl-C ends the process at
once, as it does by default in the system; nothing has been written then. Afterwards it is a KeyboardInterrupt
again, and what was half written is cleaned up.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anesurgery.display import byte_words
from anesurgery.files.progress import Amount, Listener, listening


@contextmanager
def waiting(words: str, quiet: bool = False) -> Iterator[None]:
    """Say on a terminal what takes time, and for how long already; the words are gone when it is done.

    While work says how much there is to do, they say how much is done and how long the rest takes.
    """
    if quiet or not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    with listening() as listener:
        clock = threading.Thread(target=_tick, args=(words, done, listener), daemon=True)
        clock.start()
        try:
            yield
        finally:
            done.set()
            clock.join()
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _tick(words: str, done: threading.Event, listener: Listener) -> None:
    start = time.monotonic()
    print(f"{words} ...", end="", file=sys.stderr, flush=True)
    while not done.wait(1):
        said = far(listener.amount)
        line = f"{words} ... {time.monotonic() - start:.0f} s{said}"
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def far(amount: Amount | None) -> str:
    """How far work has come, and how long the rest takes; "" where nobody knows."""
    if amount is None or not amount.total:
        return ""
    done = min(amount.done, amount.total)
    if amount.unit == "B":
        said = f", {byte_words(done)} of {byte_words(amount.total)}"
    else:
        said = f", {done} of {amount.total} {amount.unit}"
    return said if amount.left is None else f"{said}, {amount.left:.0f} s left"


@contextmanager
def progress(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show on a terminal how much is done and how long the rest takes; called with (done, in all)."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def default_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once; after the body it is a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def load_engine(quiet: bool = False) -> None:
    """Import what inspects, runs and rewrites models; commands that need it call this first, and once."""
    if "anesurgery.show.surgeries" in sys.modules:
        return
    with default_interrupt(), waiting("loading coremltools and torch", quiet):
        import anesurgery.checking.comparison
        import anesurgery.checking.ranges
        import anesurgery.placement.inspector
        import anesurgery.show.surgeries
        import anesurgery.show.terminal
        import anesurgery.surgery  # noqa: F401
