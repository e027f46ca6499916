"""Connections whose request has not come whole: only so many are held, and each only while something comes.

Whoever sends half a request, or a byte at a time, may not shut others out: where there are too many, the one of
which nothing was heard for the longest goes first.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

WAITING = 100
"""Connections of which more is to come: half of those that are served, so that others find a place."""
SILENT = 20.0
"""Seconds without a byte after which a connection ends; browsers send what they have sooner."""


def bounded(waiting: int = WAITING, silent: float = SILENT) -> type[H11Protocol]:
    """The protocol of a server that waits for so many requests to come whole.

    Args:
        waiting: connections at most.
        silent: seconds without a byte, at most.
    """
    clocks: dict[Any, asyncio.TimerHandle] = {}

    class Bounded(H11Protocol):
        """A connection that ends if its request does not come, or if too many others wait too."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.heard()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.heard()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.heard()

        def connection_lost(self, exc: Exception | None) -> None:
            self.forget()
            super().connection_lost(exc)

        def heard(self) -> None:
            """Wait for the rest from now on; the one that was heard last goes last."""
            self.forget()
            if self.transport.is_closing() or not (
                self.cycle is None or self.cycle.response_complete or self.cycle.more_body
            ):
                return
            clocks[self] = self.loop.call_later(silent, self.transport.close)
            if len(clocks) > waiting:
                silent_one = next(iter(clocks))
                silent_one.forget()  # at once: it is lost some time after it was closed
                silent_one.transport.close()

        def forget(self) -> None:
            """Wait no more."""
            if (clock := clocks.pop(self, None)) is not None:
                clock.cancel()

    return Bounded
