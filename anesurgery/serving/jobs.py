"""The models of visitors: each in a folder of its own, worked on one at a time, and deleted in time."""

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
from pathlib import Path, PurePosixPath
from typing import Any

from anesurgery.errors import SurgeryError
from anesurgery.files.source import MOST
from anesurgery.files.writing import scratch_folder
from anesurgery.serving.limits import Limits
from anesurgery.serving.task import ANSWER, DOWNLOAD, REPORT

DEEPEST, LONGEST = 16, 200
"""Folders in folders, and bytes of a name, of what is sent: packages have four, and names end at 255 on every
system, with room for what is added."""
UPLOADING, WAITING, WORKING, READY, FAILED = "uploading", "waiting", "working", "ready", "failed"


class TooMuch(SurgeryError):  # noqa: N818 - reads as a statement
    """More is asked for than the limits allow."""


class Gone(SurgeryError):  # noqa: N818 - reads as a statement
    """The files of a visitor are deleted, or never were."""


@dataclass
class Job:
    """A model of a visitor, and what is done with it."""

    folder: Path
    id: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    """Whoever knows it may see and change the model; it cannot be guessed."""
    state: str = UPLOADING
    words: str = ""
    """How far the work is."""
    since: float = 0.0
    answer: dict[str, Any] = field(default_factory=dict)
    stored: int = 0
    """Bytes that were sent."""
    files: int = 0
    seen: float = field(default_factory=time.monotonic)
    born: float = field(default_factory=time.monotonic)
    work: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Is work on it under way, or waiting?"""
        return self.state in (WAITING, WORKING)

    def told(self, ahead: int) -> dict[str, Any]:
        """What its visitor is told.

        Args:
            ahead: how many others are worked on first.
        """
        seconds = round(time.monotonic() - self.since) if self.state == WORKING else 0
        report = not self.busy and (self.folder / REPORT).exists()
        now = {"id": self.id, "state": self.state, "words": self.words, "seconds": seconds, "ahead": ahead}
        return {**self.answer, **now, "report": report}


@dataclass
class Jobs:
    """All models that are held, and the order in which they are worked on."""

    limits: Limits
    folder: Path = field(init=False)
    """Of all models, while it is open."""
    held: dict[str, Job] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    command: tuple[str, ...] = (sys.executable, "-m", "anesurgery.serving.task")
    """What does one piece of work, given a folder and a request."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """With a folder for the models, which goes at the end; those that killed servers left go first."""
        with scratch_folder(Path(tempfile.gettempdir())) as self.folder:
            yield

    def add(self) -> Job:
        """A place for a model.

        Raises:
            TooMuch: others have all places.
        """
        if len(self.held) >= self.limits.models:
            raise TooMuch(f"{len(self.held)} models are here already, which is the most; come back in a while")
        job = Job(self.folder)
        job.folder = self.folder / secrets.token_hex(12)
        (job.folder / "upload").mkdir(parents=True)
        (job.folder / "tmp").mkdir()
        self.held[job.id] = job
        return job

    def get(self, name: str) -> Job:
        """A job by its id; its visitor was seen.

        Raises:
            Gone: there is none.
        """
        if (job := self.held.get(name)) is None:
            raise Gone("this model is not here any more; send it again")
        job.seen = time.monotonic()
        return job

    def ahead(self, job: Job) -> int:
        """How many others are worked on before a job."""
        return self.order.index(job.id) if job.id in self.order else 0

    async def store(self, job: Job, name: str, chunks: AsyncIterator[bytes]) -> None:
        """Write a file of a model that is being sent.

        Args:
            job: whose model.
            name: its path in what was dropped, with slashes.
            chunks: its bytes.

        Raises:
            SurgeryError: its name leads elsewhere, it is there already, or it is not the time for it.
            TooMuch: the model is larger than the limit.
        """
        if job.state != UPLOADING:
            raise SurgeryError("this model was sent already; start anew with another")
        place = job.folder / "upload" / inner(name)
        job.files += 1
        if job.files > MOST:
            raise TooMuch(f"more than {MOST:,} files are no model")
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
            SurgeryError: work on it is under way already.
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
        """What the process of a task gives; a sentence under "error" where it ends otherwise."""
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
            return {"error": ended(child.returncode)}
        return answer

    async def _listen(self, job: Job, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        async for line in child.stdout:
            with contextlib.suppress(ValueError):
                job.words = str(json.loads(line))
        await child.wait()

    async def drop(self, job: Job) -> None:
        """Stop the work on a model, and delete all files of it."""
        self.held.pop(job.id, None)
        if job.work is not None:
            job.work.cancel()
            await asyncio.wait([job.work])
        shutil.rmtree(job.folder, ignore_errors=True)

    async def watch(self) -> None:
        """Delete, for ever, what nobody asked for in a while, and what has been here for too long."""
        while True:
            await asyncio.sleep(min(5.0, self.limits.keep / 4, self.limits.stay / 4))
            for job in [job for job in self.held.values() if self._over(job)]:
                await self.drop(job)

    def _over(self, job: Job) -> bool:
        now = time.monotonic()
        return now - job.seen > self.limits.keep or now - job.born > self.limits.stay

    async def close(self) -> None:
        """Stop all work, and delete all models."""
        for job in list(self.held.values()):
            await self.drop(job)


def inner(name: str) -> PurePosixPath:
    """The path of a file in what was dropped.

    Raises:
        SurgeryError: it leads elsewhere, or is no name of a file.
    """
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") and part.isprintable() and "\\" not in part for part in parts)
    short = all(len(part.encode("utf-8", "replace")) <= LONGEST for part in parts) and len(parts) <= DEEPEST
    if not plain or not short or ":" in parts[0]:
        raise SurgeryError(f"{name[:LONGEST]!r} is no path inside a model; do not trust it")
    return PurePosixPath(*parts)


def ended(code: int | None) -> str:
    """What is said of a process that ended without an answer."""
    how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
    return (
        f"the work ended early ({how}): the model is damaged, or takes more memory or disk than is allowed here"
    )


def _environment(folder: Path) -> dict[str, str]:
    """Variables of a task: modules as here; home, caches and temporary files in the visitor's folder."""
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")}
    own = {"HOME": str(folder / "tmp"), "TMPDIR": str(folder / "tmp"), "PYTHONSAFEPATH": "1"}
    return {
        **kept,
        **own,
        "PYTHONPATH": os.pathsep.join(path for path in map(os.path.abspath, sys.path) if path),
    }
