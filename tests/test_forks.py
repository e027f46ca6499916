"""A process that is forked while another thread is in the library can use it: no lock or patch is left."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery import mil
from anesurgery.files import package
from anesurgery.files.package import save, to_mlmodel
from anesurgery.loading import load
from anesurgery.mil import HOST, Program, ct, mb

GENEROUS = 120
"""Seconds after which a child is taken for one that waits for ever; it needs one or two."""


def program() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)(
        lambda x: mb.sub(x=np.float32(1), y=mb.relu(x=x), name="y")
    )


def forked(use: Callable[[], object], seconds: float = GENEROUS) -> int | None:
    """The exit code of a child that does something, 1 after an error; None where it did not come back."""
    child = os.fork()
    if not child:
        code = 1
        try:
            use()
            code = 0
        finally:
            os._exit(code)
    for _ in range(int(seconds * 50)):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@contextlib.contextmanager
def elsewhere(
    held: Callable[[], contextlib.AbstractContextManager[object]], seconds: float | None = None
) -> Iterator[None]:
    """Another thread is inside of something in the meantime, or for some seconds."""
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with held():
            inside.set()
            leave.wait(seconds)

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait()
    try:
        yield
    finally:
        leave.set()
        thread.join()


@contextlib.contextmanager
def _building() -> Iterator[None]:
    """In the middle of a program that is read: blocks are open, the host is patched and silent."""
    from anesurgery.files.protobuf import reading

    with HOST, mil.quiet_host(), reading(lambda *given: np.zeros(1)), program().functions["main"]:
        yield


PLACES: dict[str, Callable[[], Any]] = {
    "the host's lock": lambda: HOST,
    "a build": _building,
    "silence": lambda: mil._SILENCE._lock,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(load(program()), tmp_path / "in.mlpackage")


@pytest.mark.one_of(2)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("place", PLACES)
def test_a_child_uses_the_library(place: str, saved: Path, tmp_path: Path) -> None:
    def use() -> None:
        done = ane.apply(saved, "negate_subtract", prove="both", quiet=True)
        done.save(tmp_path / "out.mlpackage")
        ane.inspect(saved)
        ane.run(to_mlmodel(load(saved)), {"x": np.ones((2, 3), np.float32)})

    use()  # imports are done
    with elsewhere(PLACES[place], seconds=0.5):  # the fork waits for it
        (tmp_path / "out.mlpackage").rename(tmp_path / "before.mlpackage")
        assert forked(use) == 0
    assert (tmp_path / "out.mlpackage").is_dir()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_watchdog_sees_a_lock_that_stays() -> None:
    """An ordinary lock: the child waits for a thread that it does not have."""
    lock = threading.RLock()
    with elsewhere(lambda: lock):
        assert forked(lock.acquire, seconds=1) is None


def test_who_forks_inside_stays_inside() -> None:
    def use() -> None:
        HOST.release()
        HOST.release()
        with pytest.raises(RuntimeError, match="un-acquired"):
            HOST.release()

    with HOST, HOST:
        assert forked(use) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_silence_of_another_thread_ends() -> None:
    logger, before = logging.getLogger("coremltools"), list(warnings.filters)

    def use() -> None:
        assert not logger.disabled
        assert list(warnings.filters) == before
        with mil.quiet_host():
            assert logger.disabled
        assert not logger.disabled

    with elsewhere(mil.quiet_host):
        assert logger.disabled
        assert forked(use) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_property_that_another_thread_computes() -> None:
    """Up to Python 3.11 each has a lock of its own."""
    from anesurgery.surgery import Surgery

    member = next(v for v in vars(Surgery).values() if isinstance(v, cached_property))
    if not hasattr(member, "lock"):
        pytest.skip("properties have no locks from Python 3.12 on")
    with elsewhere(lambda: member.lock):
        assert forked(lambda: member.lock.acquire()) == 0


def test_a_child_has_a_temporary_folder_of_its_own(saved: Path) -> None:
    ours = Path(to_mlmodel(load(saved)).package_path).parents[1]

    def use() -> None:
        theirs = Path(to_mlmodel(load(saved)).package_path).parents[1]
        assert theirs != ours
        package._TEMPORARY.close()
        assert not theirs.exists()
        assert ours.is_dir()

    assert forked(use) == 0
    assert ours.is_dir()


class Patched:
    """Something that is patched."""

    value = "before"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_has_no_patch_of_another_thread() -> None:
    def use() -> None:
        assert Patched.value == "before"

    with elsewhere(lambda: mil.patched(Patched, "value", "after"), seconds=0.5):
        assert Patched.value == "after"
        assert forked(use) == 0


ORDER = """
import os, threading, time
from anesurgery import mil
inside = threading.Event()
def build():
    with mil.HOST:
        inside.set()
        time.sleep(0.5)
        with mil.quiet_host():
            pass
thread = threading.Thread(target=build)
thread.start()
inside.wait()
if not os.fork():
    os._exit(0)
os.wait()
thread.join()
print("both")
"""


def test_a_fork_takes_the_locks_in_the_order_of_a_build() -> None:
    """In the other order the fork has the inner one, and both wait for ever."""
    done = subprocess.run(
        [sys.executable, "-c", ORDER], capture_output=True, text=True, check=False, timeout=GENEROUS
    )
    assert done.stdout == "both\n", done.stderr


LEAVES = """
import os, sys, anesurgery as ane
from pathlib import Path
from anesurgery.files.package import to_mlmodel
made = Path(to_mlmodel(ane.load(sys.argv[1])).package_path)
if not os.fork():
    sys.exit()  # with all that Python does at an end
os.wait()
print(made.is_dir())
"""


@pytest.mark.slow
def test_a_child_that_ends_takes_nothing_along(saved: Path) -> None:
    """What it inherited is not its to clean up."""
    done = subprocess.run([sys.executable, "-c", LEAVES, saved], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
