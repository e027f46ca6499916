"""Work shared out over processes of this machine, or by Dask over processes of several: one way for both.

A share is a part of the work for one process or machine: "3/8" is the third of eight.

What is handed in travels, and so does what comes back: a function by its name, its arguments as plain data or
as paths, which every machine must see. A piece of work is the same computation wherever it runs, with as many
threads as here, so results are the same bytes as without workers, where the processors are of one kind.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from typing import Any, TypeVar

from anesurgery.errors import SurgeryError, warn

Progress = Callable[[int], None]
"""How many pieces are done."""
SECONDS = 30
"""That a scheduler may take to answer: one that is there answers in less than one. A choice."""
ENDED = (
    "a process that worked on a part of it ended: there was not enough memory (fewer jobs take less), or the "
    'call stands in a script outside of `if __name__ == "__main__":`, which every process reads again'
)


@dataclass(frozen=True)
class Workers:
    """Where pieces of work are computed."""

    executor: Executor | None = None
    """None: here, at once."""
    count: int = 1
    """Pieces that are computed at the same time."""
    local: bool = True
    """Do they run on this machine, where they see files that are written here?"""

    @property
    def here(self) -> bool:
        """Is all computed in this process?"""
        return self.executor is None

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Hand in a call of a function that can be imported; here it is computed at once."""
        if self.executor is not None:
            return self.executor.submit(_computed, _threads(), function, arguments)
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done

    def each(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], progress: Progress | None = None
    ) -> list[Any]:
        """The results of calls, in their order.

        Args:
            function: that can be imported.
            tasks: the arguments of each call.
            progress: called after each result that came.
        """
        progress = progress or (lambda done: None)
        futures: list[Future[Any]] = []
        for task in tasks:
            futures.append(self.submit(function, *task))
            if self.executor is None:
                progress(len(futures))
        for done, _ in enumerate(as_completed(futures) if self.executor is not None else (), 1):
            progress(done)
        return [result(future) for future in futures]


def result(future: Future[Any]) -> Any:
    """What a call gave.

    Raises:
        SurgeryError: the process in which it ran ended.
    """
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise SurgeryError(ENDED) from error


@contextmanager
def workers(jobs: int = 1, scheduler: Any = None) -> Iterator[Workers]:
    """Workers for the body.

    Args:
        jobs: processes of this machine; with one, all is computed in this one.
        scheduler: of Dask: its address, such as "tcp://10.0.0.1:8786", or a `dask.distributed.Client`.

    Raises:
        SurgeryError: no such number of jobs, both are asked for, Dask is not installed, no scheduler answers
            or it has no workers, or these have other versions.
    """
    if jobs < 1 or (jobs > 1 and scheduler is not None):
        words = (
            f"jobs={jobs}; it may be 1 or more" if jobs < 1 else "jobs= is of this machine, scheduler= of Dask"
        )
        raise SurgeryError(words if jobs < 1 else f"{words}; give one of them")
    if scheduler is not None:
        with _client(scheduler) as client:
            yield Workers(client.get_executor(pure=False), _checked(client), local=False)
    elif jobs > 1:
        pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_ends_with_parent)
        try:
            yield Workers(pool, jobs)
        finally:
            pool.shutdown(cancel_futures=True)
    else:
        yield Workers()


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _computed(threads: int, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """A call in a process of its own, with as many threads as that which handed it in."""
    import torch

    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    return function(*arguments)


def _ends_with_parent() -> None:
    """Let this process end when that which started it is killed, for which nobody else takes care."""
    parent = parent_process()
    if parent is not None:
        watch = threading.Thread(target=_wait_for, args=(parent.sentinel,), daemon=True)
        watch.start()


def _wait_for(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


@contextmanager
def _client(scheduler: Any) -> Iterator[Any]:
    """A client of Dask; one that was given stays open."""
    try:
        import dask
        from dask.distributed import Client
    except ImportError as error:
        raise SurgeryError('scheduler= needs Dask: pip install "anesurgery[distributed]"') from error
    if not isinstance(scheduler, str):
        yield scheduler
        return
    try:
        client = Client(scheduler, timeout=SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise SurgeryError(
            f"no scheduler of Dask answers at {scheduler!r}: {error}; start one with `dask scheduler`, and "
            "workers with `dask worker ADDRESS`"
        ) from error
    with client, dask.config.set({"distributed.admin.large-graph-warning-threshold": "1GB"}):
        yield client


def _checked(client: Any) -> int:
    """How many pieces the workers of a client compute at the same time.

    Raises:
        SurgeryError: there are none, or they have other versions.
    """
    threads: dict[str, int] = client.nthreads()
    if not threads:
        raise SurgeryError("the scheduler of Dask has no workers; start some with `dask worker ADDRESS`")
    try:
        said: dict[str, tuple[dict[str, str], str]] = client.run(_about)
    except ImportError as error:
        raise SurgeryError(
            f"a worker of Dask has no anesurgery as this one: {error}; install it there"
        ) from error
    own, processor = _about()
    for name, (versions, other) in said.items():
        if versions != own:
            raise SurgeryError(f"the worker {name} has {versions}, and here is {own}; install the same")
        if other != processor:
            warn(f"the worker {name} computes with {other}, and here is {processor}: last bits may differ")
    return sum(threads.values())


def _about() -> tuple[dict[str, str], str]:
    """The versions that decide what is computed, and the kind of processor."""
    from importlib.metadata import version

    import torch

    versions = {name: version(name) for name in ("anesurgery", "coremltools", "numpy", "torch")}
    return versions, torch.backends.cpu.get_cpu_capability()


T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """Every `count`-th piece of work, beginning with the `number`-th (from 1)."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise SurgeryError(f"shard {self.words}: the first number goes from 1 to the second")

    @property
    def words(self) -> str:
        """The share as it is written: "3/8"."""
        return f"{self.number}/{self.count}"

    def of(self, work: Sequence[T]) -> list[T]:
        """The pieces of this share, in order: neighbours are in different shares."""
        return list(work[self.number - 1 :: self.count])

    def share(self, number: int, count: int) -> Shard:
        """A share of this share."""
        return Shard((number - 1) * self.count + self.number, self.count * count)


def share(asked: Shard | str | tuple[int, int] | None) -> Shard:
    """A share, given as "3/8" or (3, 8); all of the work when absent.

    Raises:
        SurgeryError: it is something else.
    """
    if asked is None or isinstance(asked, Shard):
        return asked or Shard()
    if isinstance(asked, str):
        parts = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", asked)
        if parts is None:
            raise SurgeryError(f"shard {asked!r}: write it as 3/8, the third of eight")
        return Shard(int(parts[1]), int(parts[2]))
    return Shard(*asked)
