"""The web application of `anesurgery serve`: connections, visitors' models, and the page with its calls.

Three parts: a protocol that drops silent connections (`bounded`); `Jobs`, which stores the models of visitors
and runs `task` for one of them at a time; and the Starlette application (`site`), with who may call and what a
browser may do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from anesurgery import registry
from anesurgery.display import byte_words
from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.files.source import MOST_FILES
from anesurgery.files.writing import scratch_folder
from anesurgery.placement.target import GROUPS, PRODUCTS, Target
from anesurgery.serving.task import ANSWER, DOWNLOAD, REPORT, Limits

# -- connections ----------------------------------------------------------------------------------------
#
# A connection whose request is not complete is kept only while bytes come, and only so many are kept: a visitor
# who sends half a request, or a byte at a time, must not shut others out. If there are too many, the one that
# has been silent longest is closed.

MOST_WAITING = 100
"""The most connections with an incomplete request: half of all, so that others find a place."""
SILENT = 20.0
"""Seconds without a byte after which a connection is closed; browsers send sooner."""


def bounded(waiting: int = MOST_WAITING, silent: float = SILENT) -> type[H11Protocol]:
    """Return the protocol of a server that waits for so many requests to be complete.

    Args:
        waiting: the most waiting connections.
        silent: the most seconds without a byte.
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


# -- the models of visitors: each in a folder of its own, worked on one at a time, and deleted -----------

DEEPEST, LONGEST = 16, 200
"""The most nested folders, and the most bytes of a name, of an upload: packages have four levels, and every
system allows names of 255 bytes."""
UPLOADING, WAITING, WORKING, READY, FAILED = "uploading", "waiting", "working", "ready", "failed"


class TooMuch(SurgeryError):  # noqa: N818 - reads as a statement
    """Raised where more is asked for than the limits allow."""


class Gone(SurgeryError):  # noqa: N818 - reads as a statement
    """Raised where the files of a visitor were deleted, or never existed."""


@dataclass
class Job:
    """A model of a visitor, and the work on it."""

    folder: Path
    id: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    """A secret: whoever knows it may see and change the model."""
    state: str = UPLOADING
    words: str = ""
    """How far the work is."""
    since: float = 0.0
    """When the work began, by `time.monotonic`, as the times below."""
    answer: dict[str, Any] = field(default_factory=dict)
    stored: int = 0
    """Bytes that were sent."""
    files: int = 0
    seen: float = field(default_factory=time.monotonic)
    """When the visitor last asked."""
    born: float = field(default_factory=time.monotonic)
    """When it was made."""
    work: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether work on it is running or waiting."""
        return self.state in (WAITING, WORKING)

    def status(self, ahead: int) -> dict[str, Any]:
        """Return what the visitor's browser is told.

        Args:
            ahead: how many other jobs come first.
        """
        seconds = round(time.monotonic() - self.since) if self.state == WORKING else 0
        report = not self.busy and (self.folder / REPORT).exists()
        now = {"id": self.id, "state": self.state, "words": self.words, "seconds": seconds, "ahead": ahead}
        return {**self.answer, **now, "report": report}


@dataclass
class Jobs:
    """All models that are stored, and the order in which they are worked on."""

    limits: Limits
    folder: Path = field(init=False)
    """The folder of all models, while the server is open."""
    held: dict[str, Job] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    command: tuple[str, ...] = (sys.executable, "-m", "anesurgery.serving.task")
    """What does one piece of work, given a folder and a request."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Open a folder for the models until the end; folders that killed servers left are removed first."""
        with scratch_folder(Path(tempfile.gettempdir())) as self.folder:
            yield

    def add(self) -> Job:
        """A place for a model.

        Raises:
            TooMuch: others have all places.
        """
        if len(self.held) >= self.limits.models:
            raise TooMuch(f"{len(self.held)} models are here already, which is the most; come back in a while")
        job = Job(self.folder / secrets.token_hex(12))
        (job.folder / "upload").mkdir(parents=True)
        (job.folder / "tmp").mkdir()
        self.held[job.id] = job
        return job

    def get(self, name: str) -> Job:
        """Return a job by its id, and note that its visitor was seen.

        Raises:
            Gone: there is no such job.
        """
        if (job := self.held.get(name)) is None:
            raise Gone("this model is not here any more; send it again")
        job.seen = time.monotonic()
        return job

    def ahead(self, job: Job) -> int:
        """Return how many other jobs come before a job."""
        return self.order.index(job.id) if job.id in self.order else 0

    async def store(self, job: Job, name: str, chunks: AsyncIterator[bytes]) -> None:
        """Write a file of a model that is being uploaded.

        Args:
            job: the job of the model.
            name: the path of the file in the upload, with slashes.
            chunks: its bytes.

        Raises:
            SurgeryError: the name leads elsewhere, the file exists, or the upload is over.
            TooMuch: the model is larger than the limit.
        """
        if job.state != UPLOADING:
            raise SurgeryError("this model was sent already; start anew with another")
        place = job.folder / "upload" / path_in_upload(name)
        job.files += 1
        if job.files > MOST_FILES:
            raise TooMuch(f"more than {MOST_FILES:,} files are no model")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(place, "xb") as file:
                async for chunk in chunks:
                    self._count(job, len(chunk))
                    file.write(chunk)
        except OSError as error:
            raise SurgeryError(f"{name} cannot be stored: {error.strerror}") from error

    def _count(self, job: Job, size: int) -> None:
        job.stored += size
        job.seen = time.monotonic()
        if job.id not in self.held:
            raise Gone("this model is not here any more; send it again")
        if job.stored > self.limits.upload:
            raise TooMuch(f"the model has more than {self.limits.upload:,} bytes, which is the limit here")

    def start(self, job: Job, request: dict[str, Any]) -> None:
        """Begin work on a model, or put it in line.

        Raises:
            SurgeryError: work on it is running already.
        """
        if job.busy:
            raise SurgeryError("this model is being worked on; wait until that is done")
        job.state, job.words, job.answer = WAITING, "", {}
        (job.folder / REPORT).unlink(missing_ok=True)
        (job.folder / DOWNLOAD).unlink(missing_ok=True)
        self.order.append(job.id)
        job.work = asyncio.create_task(self._work(job, request))

    async def _work(self, job: Job, request: dict[str, Any]) -> None:
        try:
            async with self.turn:
                job.state, job.since = WORKING, time.monotonic()
                job.answer = await self._answer(job, request)
        except OSError as error:
            job.answer = {"error": f"the work cannot be started: {error.strerror}"}
        finally:
            self.order.remove(job.id)
            job.seen = time.monotonic()
            job.state = FAILED if "error" in job.answer else READY

    async def _answer(self, job: Job, request: dict[str, Any]) -> dict[str, Any]:
        """Run the process of a task; return its answer, or a sentence under "error" where it ends early."""
        (job.folder / ANSWER).unlink(missing_ok=True)
        bounds = {"memory": self.limits.memory, "unpacked": self.limits.unpacked}
        child = await asyncio.create_subprocess_exec(
            *(*self.command, str(job.folder), json.dumps(request | bounds)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=job.folder,
            env=_environment(job.folder),
        )
        try:
            await asyncio.wait_for(self._listen(job, child), self.limits.seconds)
        except asyncio.TimeoutError:  # another class than TimeoutError on Python 3.10
            return {"error": f"it took longer than {self.limits.seconds:g} seconds, which is the limit here"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        try:
            answer: dict[str, Any] = json.loads((job.folder / ANSWER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            code = child.returncode
            how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
            why = "the model is damaged, or takes more memory or disk than is allowed here"
            return {"error": f"the work ended early ({how}): {why}"}
        return answer

    async def _listen(self, job: Job, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        async for line in child.stdout:
            with contextlib.suppress(ValueError):
                job.words = str(json.loads(line))
        await child.wait()

    async def drop(self, job: Job) -> None:
        """Stop the work on a model, and delete all its files."""
        self.held.pop(job.id, None)
        if job.work is not None:
            job.work.cancel()
            await asyncio.wait([job.work])
        shutil.rmtree(job.folder, ignore_errors=True)

    async def watch(self) -> None:
        """Delete, for ever, models that nobody asked for in a while, and those that were here for too long."""
        while True:
            await asyncio.sleep(min(5.0, self.limits.keep / 4, self.limits.stay / 4))
            for job in [job for job in self.held.values() if self._is_expired(job)]:
                await self.drop(job)

    def _is_expired(self, job: Job) -> bool:
        now = time.monotonic()
        return now - job.seen > self.limits.keep or now - job.born > self.limits.stay

    async def close(self) -> None:
        """Stop all work, and delete all models."""
        for job in list(self.held.values()):
            await self.drop(job)


def path_in_upload(name: str) -> PurePosixPath:
    """Return the path of a file in an upload.

    Raises:
        SurgeryError: the path leads elsewhere, or is no file name.
    """
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") and part.isprintable() and "\\" not in part for part in parts)
    short = all(len(part.encode("utf-8", "replace")) <= LONGEST for part in parts) and len(parts) <= DEEPEST
    if not plain or not short or ":" in parts[0]:
        raise SurgeryError(f"{name[:LONGEST]!r} is no path inside a model; do not trust it")
    return PurePosixPath(*parts)


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment of a task: modules as here; home, caches and temporary files in its folder."""
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")}
    own = {"HOME": str(folder / "tmp"), "TMPDIR": str(folder / "tmp"), "PYTHONSAFEPATH": "1"}
    return {
        **kept,
        **own,
        "PYTHONPATH": os.pathsep.join(path for path in map(os.path.abspath, sys.path) if path),
    }


# -- the page --------------------------------------------------------------------------------------------

HERE = Path(__file__).parent
COOKIE = "anesurgery"
QUESTION = 10_000
"""The most bytes of a question in JSON: names and options take some hundreds."""
PROOFS = ("sites", "both")
TRUSTED_FRAME = "https://huggingface.co"
"""The only site that may show a public page in a frame: Hugging Face Spaces."""

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; frame-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "sandbox allow-scripts"
)
"""Content security policies of the page, which loads nothing from elsewhere, and of a report, which loads
nothing."""


def site(limits: Limits, hosts: frozenset[str], token: str | None) -> Starlette:
    """Return the application.

    Args:
        limits: what visitors may use.
        hosts: names and ports under which the page is reached; requests under others are refused.
        token: the token that a visitor must have; None for a page that is open to all.
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
        routes=[
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
        ],
        lifespan=lifespan,
        middleware=[Middleware(Door, hosts=hosts, token=token)],
        exception_handlers={
            SurgeryError: _error_response,
            ClientDisconnect: lambda _, __: Response(status_code=400),
        },
    )
    app.state.jobs, app.state.token = jobs, token
    return app


class Door:
    """Middleware that refuses requests under another name, from another site, or without the token."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], token: str | None) -> None:
        self.app, self.hosts, self.token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        frames = "'self'" if self.token else f"'self' {TRUSTED_FRAME}"
        policy = REPORT_POLICY if scope["path"].endswith("/report") else PAGE_POLICY
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

        if (reason := self._refusal(request)) is not None:
            await JSONResponse({"error": reason}, 403)(scope, receive, sent)
            return
        await self.app(scope, receive, sent)

    def _refusal(self, request: Request) -> str | None:
        """Return why a request is refused; None where it is not."""
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


def _error_response(_: Request, error: Exception) -> Response:
    status = 413 if isinstance(error, TooMuch) else 404 if isinstance(error, Gone) else 400
    words = str(error).encode("utf-8", "backslashreplace").decode()  # a name may hold half a character
    return JSONResponse({"error": words}, status, headers={"connection": "close"})


@cache
def _templates() -> Environment:
    return Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)


async def index(request: Request) -> Response:
    """Answer with the page; if the address has the token, set its cookie first."""
    if request.app.state.token is not None and "token" in request.query_params:
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, request.app.state.token, httponly=True, samesite="strict")
        return answer
    limits = request.app.state.jobs.limits
    recipes = [name for name in registry.recipe_names() if name != "auto"]
    phones = [product for product in PRODUCTS if product.startswith("iPhone")]
    targets = [*phones[::-1], *GROUPS, *(product for product in PRODUCTS if product not in phones)]
    told = {"recipes": recipes, "targets": targets, "limits": limits, "most": byte_words(limits.upload)}
    return HTMLResponse(_templates().get_template("front.html").render(told))


async def style(_: Request) -> Response:
    """Answer with the style of the reports, and that of the page."""
    parts = [HERE.parent / "show" / "page.css", HERE / "front.css"]
    return Response("\n".join(part.read_text(encoding="utf-8") for part in parts), media_type="text/css")


async def script(_: Request) -> Response:
    """Answer with the script of the page."""
    return FileResponse(HERE / "front.js", media_type="text/javascript")


async def add(request: Request) -> Response:
    """Make a place for a model."""
    return _job_response(request.app.state.jobs, request.app.state.jobs.add())


def _job_response(jobs: Jobs, job: Job) -> Response:
    return JSONResponse(job.status(jobs.ahead(job)))


def _jobs_and_job(request: Request) -> tuple[Jobs, Job]:
    jobs: Jobs = request.app.state.jobs
    return jobs, jobs.get(request.path_params["id"])


async def tell(request: Request) -> Response:
    """Answer how far the work is."""
    return _job_response(*_jobs_and_job(request))


async def drop(request: Request) -> Response:
    """Delete a model."""
    jobs, job = _jobs_and_job(request)
    await jobs.drop(job)
    return Response(status_code=204)


async def store(request: Request) -> Response:
    """Store a file of a model."""
    jobs, job = _jobs_and_job(request)
    await jobs.store(job, request.path_params["path"], request.stream())
    return _job_response(jobs, job)


async def work(request: Request) -> Response:
    """Begin to inspect or to rewrite."""
    jobs, job = _jobs_and_job(request)
    jobs.start(job, checked_request(await _json_body(request)))
    return _job_response(jobs, job)


async def _json_body(request: Request) -> Any:
    """Return the question of a request.

    Raises:
        SurgeryError: the question is too long, or no JSON.
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


def checked_request(form: Any) -> dict[str, str]:
    """Return the checked request of a task.

    Args:
        form: `task`, `target`, `recipe` and `prove` by name; the last three may be absent.

    Raises:
        SurgeryError: a value is not among those allowed.
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
    """Answer with the report about a model."""
    _, job = _jobs_and_job(request)
    return _file_response(job, REPORT, media_type="text/html")


async def download(request: Request) -> Response:
    """Answer with the new model."""
    _, job = _jobs_and_job(request)
    return _file_response(job, DOWNLOAD, filename=job.answer.get("download") or None)


def _file_response(job: Job, name: str, **how: Any) -> Response:
    """Return a file of a task that is done.

    Raises:
        Gone: there is no such file.
    """
    if job.busy or not (job.folder / name).is_file():
        raise Gone("there is no such file yet")
    return FileResponse(job.folder / name, **how)
