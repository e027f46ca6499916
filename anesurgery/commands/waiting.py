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
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting(words: str, quiet: bool = False) -> Iterator[None]:
    """Say on a terminal what takes time; the words are gone when it is done."""
    shown = sys.stderr.isatty() and not quiet
    if shown:
        print(f"{words} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


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
    """Import what inspects, runs and rewrites models; commands that need it call this first."""
    with default_interrupt(), waiting("loading coremltools and torch", quiet):
        import anesurgery.checking.comparison
        import anesurgery.checking.ranges
        import anesurgery.placement.inspector
        import anesurgery.show.surgeries
        import anesurgery.show.terminal
        import anesurgery.surgery  # noqa: F401
