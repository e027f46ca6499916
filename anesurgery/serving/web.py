"""The page and its calls, as an application of Starlette; who may call, and what a browser may do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anesurgery import registry, show
from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.placement.target import GROUPS, PRODUCTS, Target
from anesurgery.serving.jobs import Gone, Job, Jobs, TooMuch
from anesurgery.serving.limits import Limits
from anesurgery.serving.task import DOWNLOAD, REPORT

HERE = Path(__file__).parent
COOKIE = "anesurgery"
QUESTION = 10_000
"""Bytes of a question in JSON at most: names and options have some hundreds."""
PROOFS = ("sites", "both")
TRUSTED_FRAME = "https://huggingface.co"
"""The only site that may show a public page in a frame: that of Spaces."""

_OWN = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; frame-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
_ITS = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "sandbox allow-scripts"
)
"""What the page may load, and what a report may: nothing from elsewhere, and a report nothing at all."""


def site(limits: Limits, hosts: frozenset[str], token: str | None) -> Starlette:
    """The application.

    Args:
        limits: what visitors may ask for.
        hosts: names and ports under which it is reached; whoever asks under another is turned away.
        token: what a visitor must have; None for a page that is open to all.
    """
    jobs = Jobs(limits)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        with jobs.opened():
            watch = asyncio.create_task(jobs.watch())
            try:
                yield
            finally:
                watch.cancel()
                await jobs.close()

    app = Starlette(
        routes=routes(),
        lifespan=lifespan,
        middleware=[Middleware(Door, hosts=hosts, token=token)],
        exception_handlers={SurgeryError: _said, ClientDisconnect: lambda _, __: Response(status_code=400)},
    )
    app.state.jobs, app.state.token = jobs, token
    return app


def routes() -> list[Route]:
    """Address -> what answers."""
    return [
        Route("/", index),
        Route("/front.css", style),
        Route("/front.js", script),
        Route("/models", add, methods=["POST"]),
        Route("/models/{id}", tell, methods=["GET"]),
        Route("/models/{id}", drop, methods=["DELETE"]),
        Route("/models/{id}/files/{path:path}", store, methods=["PUT"]),
        Route("/models/{id}/work", work, methods=["POST"]),
        Route("/models/{id}/report", report),
        Route("/models/{id}/download", download),
    ]


class Door:
    """Turns away who asks under another name, from another site, or without the token."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], token: str | None) -> None:
        self.app, self.hosts, self.token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        frames = "'self'" if self.token else f"'self' {TRUSTED_FRAME}"
        policy = _ITS if scope["path"].endswith("/report") else _OWN
        headers = {
            "content-security-policy": f"{policy}; frame-ancestors {frames}",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-store",
            "cross-origin-resource-policy": "same-origin",
        }

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(k.encode(), v.encode()) for k, v in headers.items()]
            await send(message)

        if (reason := self._reason(request)) is not None:
            await JSONResponse({"error": reason}, 403)(scope, receive, sent)
            return
        await self.app(scope, receive, sent)

    def _reason(self, request: Request) -> str | None:
        """Why a request is turned away; None where it is not."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host.lower() not in self.hosts:
            return "this page is not reached under that name"
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return "another site may not ask for this"
        if self.token is None:
            return None
        shown = request.cookies.get(COOKIE) or request.query_params.get("token", "")
        if not secrets.compare_digest(shown.encode(), self.token.encode()):
            return "open the address that `anesurgery serve` printed; it has the token"
        return None


def _said(_: Request, error: Exception) -> Response:
    status = 413 if isinstance(error, TooMuch) else 404 if isinstance(error, Gone) else 400
    words = str(error).encode("utf-8", "backslashreplace").decode()  # a name may hold half a character
    return JSONResponse({"error": words}, status, headers={"connection": "close"})


@cache
def _templates() -> Environment:
    return Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)


async def index(request: Request) -> Response:
    """The page; with the token in the address, its cookie first."""
    if request.app.state.token is not None and "token" in request.query_params:
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, request.app.state.token, httponly=True, samesite="strict")
        return answer
    limits = request.app.state.jobs.limits
    recipes = [name for name in registry.recipe_names() if name != "auto"]
    phones = [product for product in PRODUCTS if product.startswith("iPhone")]
    targets = [*phones[::-1], *GROUPS, *(product for product in PRODUCTS if product not in phones)]
    told = {"recipes": recipes, "targets": targets, "limits": limits}
    return HTMLResponse(_templates().get_template("front.html").render(told))


async def style(_: Request) -> Response:
    """The style of the reports, and that of the page after it."""
    parts = [Path(show.__file__).parent / "page.css", HERE / "front.css"]
    return Response("\n".join(part.read_text(encoding="utf-8") for part in parts), media_type="text/css")


async def script(_: Request) -> Response:
    """What the page does."""
    return FileResponse(HERE / "front.js", media_type="text/javascript")


async def add(request: Request) -> Response:
    """A place for a model."""
    return _state(request.app.state.jobs, request.app.state.jobs.add())


def _state(jobs: Jobs, job: Job) -> Response:
    return JSONResponse(job.told(jobs.ahead(job)))


def _asked(request: Request) -> tuple[Jobs, Job]:
    jobs: Jobs = request.app.state.jobs
    return jobs, jobs.get(request.path_params["id"])


async def tell(request: Request) -> Response:
    """How far the work is."""
    return _state(*_asked(request))


async def drop(request: Request) -> Response:
    """Delete a model."""
    jobs, job = _asked(request)
    await jobs.drop(job)
    return Response(status_code=204)


async def store(request: Request) -> Response:
    """A file of a model."""
    jobs, job = _asked(request)
    await jobs.store(job, request.path_params["path"], request.stream())
    return _state(jobs, job)


async def work(request: Request) -> Response:
    """Begin to inspect, or to rewrite."""
    jobs, job = _asked(request)
    jobs.start(job, asked(await _json(request)))
    return _state(jobs, job)


async def _json(request: Request) -> Any:
    """The question of a request.

    Raises:
        SurgeryError: it is too long, or is not JSON.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > QUESTION:
            raise TooMuch("the question is too long")
    try:
        return json.loads(body)
    except ValueError as error:
        raise SurgeryError("the question is not JSON") from error
    except RecursionError as error:
        raise SurgeryError("the question is nested too deep; it is names with words") from error


def asked(form: Any) -> dict[str, str]:
    """What is asked of a task, seen through.

    Args:
        form: `task`, `target`, `recipe` and `prove` by name, of which the last three may be absent.

    Raises:
        SurgeryError: something is not one of what may be asked for.
    """
    words = {"task": "inspect", "target": "any", "recipe": "auto", "prove": "sites"}
    if not isinstance(form, dict) or not all(isinstance(value, str) for value in form.values()):
        raise SurgeryError("the question is not names with words")
    request = words | {name: value.strip() or words[name] for name, value in form.items() if name in words}
    may_be = {"task": ("inspect", "apply"), "recipe": registry.recipe_names(), "prove": PROOFS}
    for name, allowed in may_be.items():
        if request[name] not in allowed:
            raise UnknownName(name, request[name], allowed)
    Target.parse(request["target"])
    return request


async def report(request: Request) -> Response:
    """The page about a model."""
    _, job = _asked(request)
    return _file(job, REPORT, media_type="text/html")


async def download(request: Request) -> Response:
    """The new model."""
    _, job = _asked(request)
    return _file(job, DOWNLOAD, filename=job.answer.get("download") or None)


def _file(job: Job, name: str, **how: Any) -> Response:
    """A file of a task that is done.

    Raises:
        Gone: there is none.
    """
    if job.busy or not (job.folder / name).is_file():
        raise Gone("there is no such file yet")
    return FileResponse(job.folder / name, **how)
