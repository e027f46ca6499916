"""Requests that do not come whole: they end, and shut nobody out. No test waits for a clock, but to fail."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("starlette", reason="pip install 'anesurgery[serve]'")
pytest.importorskip("uvicorn", reason="pip install 'anesurgery[serve]'")

import uvicorn

from anesurgery.serving.task import Limits
from anesurgery.serving.web import bounded, site

LONG = 60.0
"""Seconds in which nothing ends by itself, and after which a test fails."""
AFTER = b"|"
"""Where the answer to a first request is waited for."""
HALVES: dict[str, bytes] = {
    "nothing": b"",
    "half a line": b"GET / HT",
    "half a head": b"GET / HTTP/1.1\r\nhost: here\r\nx-a: ",
    "half a question": b"POST /models HTTP/1.1\r\nhost: here\r\ncontent-length: 9999\r\n\r\n{",
    "half a chunk": b"PUT /models/x/files/y HTTP/1.1\r\nhost: here\r\n"
    b"transfer-encoding: chunked\r\n\r\n5\r\nab",
    "a second request": b"GET /none HTTP/1.1\r\nhost: here\r\n\r\n" + AFTER + b"GET / HT",
}


@contextmanager
def served(waiting: int, silent: float) -> Iterator[int]:
    """The port of the page on this machine, which waits for so many, and for so long."""
    page = site(Limits(), frozenset({"here"}), None)
    how: dict[str, Any] = {"limit_concurrency": 2 * waiting, "http": bounded(waiting, silent)}
    server = uvicorn.Server(uvicorn.Config(page, log_level="critical", timeout_graceful_shutdown=1, **how))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(256)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(LONG)


def connected(port: int, words: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), LONG)
    first, more, rest = words.partition(AFTER)
    made.sendall(first)
    if more:
        with suppress(ConnectionError):  # it may have ended already
            made.recv(1)
            made.sendall(rest)
    return made


def ended(asked: socket.socket) -> bool:
    """Wait until the server ends a connection; it may do so while something is on its way."""
    try:
        while asked.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def answered(port: int) -> bytes:
    """The first line of what is answered to a request that came whole."""
    with connected(port, b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n") as asked:
        return asked.makefile("rb").readline()


@pytest.mark.parametrize("half", HALVES)
def test_many_half_requests_shut_nobody_out(half: str) -> None:
    with served(8, LONG) as port, ExitStack() as stack:
        held = [stack.enter_context(connected(port, HALVES[half])) for _ in range(40)]
        assert answered(port) == b"HTTP/1.1 200 OK\r\n"
        assert ended(held[0])


@pytest.mark.parametrize("half", HALVES)
def test_a_half_request_ends(half: str) -> None:
    with served(8, 0.05) as port, connected(port, HALVES[half]) as asked:
        assert ended(asked)


def test_a_request_that_comes_in_pieces_is_answered() -> None:
    with served(8, LONG) as port, connected(port, b"GET / HT") as asked:
        for piece in (b"TP/1.1\r\nhost: he", b"re\r\nconnection: close\r\n", b"\r\n"):
            asked.sendall(piece)
        assert asked.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"
