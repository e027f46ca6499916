"""Calls of an application of ASGI without a server: each by its own task, in one loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote


@dataclass(frozen=True)
class Answer:
    """What an application answers."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: Any,
    method: str,
    address: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    pieces: int = 1,
) -> Answer:
    """One call; the body comes in pieces."""
    path, _, query = address.partition("?")
    named = {"host": "here:1", **(headers or {})}
    size = -(-len(body) // pieces)
    chunks = [body[k * size : (k + 1) * size] for k in range(pieces)]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not chunks:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": quote(path).encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(k.encode(), v.encode()) for k, v in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("here", 1),
        "state": {},
    }
    await app(scope, receive, send)
    start = next(m for m in sent if m["type"] == "http.response.start")
    body = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
    return Answer(start["status"], {k.decode(): v.decode() for k, v in start["headers"]}, body)
