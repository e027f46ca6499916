"""Run calls on worker processes of this machine, or with Dask on several machines, through one interface.

`with workers(jobs, scheduler) as pool: pool.each(function, tasks)` works for both, and without workers. A
function is sent by its name; arguments and results are pickled, and paths must be visible on every machine.
Each call uses as many threads as this process, so on processors of one kind results are the same bytes as
without workers.

A `Shard` is a part of the work for a process or machine that was started by hand: "3/8" is the third of eight.
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
"""Called with the number of finished calls."""
SCHEDULER_TIMEOUT = 30
"""Seconds that a scheduler may take to answer; one that runs answers in less than one. A choice."""
ENDED = (
    "a process that worked on a part of it ended: there was not enough memory (fewer jobs take less), or the "
    'call stands in a script outside of `if __name__ == "__main__":`, which every process reads again'
)


@dataclass(frozen=True)
class Workers:
    """Runs calls on an executor, or at once in this process."""

    executor: Executor | None = None
    """None: calls run at once in this process."""
    count: int = 1
    """The number of calls that run at the same time."""
    local: bool = True
    """Do the workers run on this machine, so that they see files that are written here?"""

    @property
    def here(self) -> bool:
        """Do all calls run in this process?"""
        return self.executor is None

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Submit a call of an importable function; without an executor it runs at once.

        Raises:
            SurgeryError: a process ended already.
        """
        if self.executor is not None:
            try:
                return self.executor.submit(_run_with_threads, _thread_count(), function, arguments)
            except BrokenProcessPool as error:
                raise SurgeryError(ENDED) from error
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done

    def each(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], progress: Progress | None = None
    ) -> list[Any]:
        """Call a function with each task, and return the results in order.

        Args:
            function: an importable function.
            tasks: the arguments of each call.
            progress: called after each finished call with their number.
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
    """Return the result of a call.

    Raises:
        SurgeryError: the process of the call ended.
    """
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise SurgeryError(ENDED) from error


@contextmanager
def workers(jobs: int = 1, scheduler: Any = None) -> Iterator[Workers]:
    """Start workers for the body, and stop them after it.

    Args:
        jobs: number of processes on this machine; 1 runs all calls in this process.
        scheduler: a Dask scheduler's address, such as "tcp://10.0.0.1:8786", or a `dask.distributed.Client`.

    Raises:
        SurgeryError: no such number of jobs, both are asked for, Dask is not installed, no scheduler answers
            or it has no workers, or these have other versions.
    """
    if jobs < 1 or (jobs > 1 and scheduler is not None):
        both = "jobs= is of this machine, scheduler= of Dask; give one of them"
        raise SurgeryError(f"jobs={jobs}; it may be 1 or more" if jobs < 1 else both)
    if scheduler is not None:
        with _client(scheduler) as client:
            yield Workers(client.get_executor(pure=False), _worker_slots(client), local=False)
    elif jobs > 1:
        pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_ends_with_parent)
        try:
            yield Workers(pool, jobs)
        finally:
            pool.shutdown(cancel_futures=True)
    else:
        yield Workers()


def _thread_count() -> int:
    import torch

    return torch.get_num_threads()


def _run_with_threads(threads: int, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Run a call in a worker process with as many threads as the submitting process has."""
    import torch

    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    return function(*arguments)


def _ends_with_parent() -> None:
    """Make this worker process end when its parent is killed."""
    parent = parent_process()
    if parent is not None:
        watch = threading.Thread(target=_wait_for, args=(parent.sentinel,), daemon=True)
        watch.start()


def _wait_for(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


@contextmanager
def _client(scheduler: Any) -> Iterator[Any]:
    """Yield a Dask client; a client that the caller gave is not closed."""
    try:
        import dask
        from dask.distributed import Client
    except ImportError as error:
        raise SurgeryError('scheduler= needs Dask: pip install "anesurgery[distributed]"') from error
    if not isinstance(scheduler, str):
        yield scheduler
        return
    try:
        client = Client(scheduler, timeout=SCHEDULER_TIMEOUT, set_as_default=False)
    except (OSError, ValueError) as error:
        raise SurgeryError(
            f"no scheduler of Dask answers at {scheduler!r}: {error}; start one with `dask scheduler`, and "
            "workers with `dask worker ADDRESS`"
        ) from error
    with client, dask.config.set({"distributed.admin.large-graph-warning-threshold": "1GB"}):
        yield client


def _worker_slots(client: Any) -> int:
    """Return how many calls the workers of a client run at the same time.

    Raises:
        SurgeryError: there are no workers, or they have other versions of the libraries.
    """
    threads: dict[str, int] = client.nthreads()
    if not threads:
        raise SurgeryError("the scheduler of Dask has no workers; start some with `dask worker ADDRESS`")
    try:
        reports: dict[str, tuple[dict[str, str], str]] = client.run(_versions_and_processor)
    except ImportError as error:
        raise SurgeryError(
            f"a worker of Dask has no anesurgery as this one: {error}; install it there"
        ) from error
    own, processor = _versions_and_processor()
    for name, (versions, other) in reports.items():
        if versions != own:
            raise SurgeryError(f"the worker {name} has {versions}, and here is {own}; install the same")
        if other != processor:
            warn(f"the worker {name} computes with {other}, and here is {processor}: last bits may differ")
    return sum(threads.values())


def _versions_and_processor() -> tuple[dict[str, str], str]:
    """Return (versions of the libraries that decide results, kind of processor)."""
    from importlib.metadata import version

    import torch

    versions = {name: version(name) for name in ("anesurgery", "coremltools", "numpy", "torch")}
    return versions, torch.backends.cpu.get_cpu_capability()


T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """Part `number` (from 1) of `count`: every `count`-th piece of work, starting with the `number`-th."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise SurgeryError(f"shard {self.words}: the first number goes from 1 to the second")

    @property
    def words(self) -> str:
        """The shard as it is written: "3/8"."""
        return f"{self.number}/{self.count}"

    def of(self, work: Sequence[T]) -> list[T]:
        """Return the pieces of this shard, in order."""
        return list(work[self.number - 1 :: self.count])

    def share(self, number: int, count: int) -> Shard:
        """Return part `number` of `count` of this shard."""
        return Shard((number - 1) * self.count + self.number, self.count * count)


def share(asked: Shard | str | tuple[int, int] | None) -> Shard:
    """Return the shard given as "3/8" or (3, 8); all of the work for None.

    Raises:
        SurgeryError: it is not a shard.
    """
    if asked is None or isinstance(asked, Shard):
        return asked or Shard()
    if isinstance(asked, str):
        parts = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", asked)
        if parts is None:
            raise SurgeryError(f"shard {asked!r}: write it as 3/8, the third of eight")
        return Shard(int(parts[1]), int(parts[2]))
    return Shard(*asked)
