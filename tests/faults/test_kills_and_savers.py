"""Savers that are killed, and savers at work at once: the old package or a new one, whole, and nothing left.

Each test starts one process, which forks the savers: importing takes longer than a thousand saves.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from children import run_child
from saved import model, scratches, state

from anesurgery.errors import LoadError
from anesurgery.files import writing
from anesurgery.files.package import save
from anesurgery.loading import load

SUPPORT = Path(__file__).resolve().parents[1] / "support"

START = """
import json, os, random, signal, sys, time
sys.path.insert(0, {support!r})
from pathlib import Path
from saved import model, scratches, state
from anesurgery.errors import LoadError
from anesurgery.files import writing
from anesurgery.files.package import save
from anesurgery.loading import load

folder, count, swap = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "exchange"
if not swap:
    writing._rename = lambda made, target, *, exchange: False

def forked(work):
    child = os.fork()
    if not child:
        code = 1
        try:
            code = work() or 0
        finally:
            os._exit(code)
    return child
"""

KILLS = """
packages = [save(model(i, 1 << 17), folder / f"in{i}.mlpackage") for i in range(2)]
models, whole = [load(p) for p in packages], [state(p) for p in packages]
target = folder / "target.mlpackage"
save(models[0], target)
began = time.perf_counter()
save(models[1], target, overwrite=True)
took = time.perf_counter() - began
random.seed(0)

def savings():
    for n in range(1000):
        save(models[n % 2], target, overwrite=True)

found, left, gone, first = [], 0, 0, 1
for n in range(count):
    child = forked(savings)
    time.sleep(random.uniform(0, 3 * took))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left += bool(scratches(folder))
    if not target.exists():
        gone += 1  # between the two moves of a system that cannot exchange: the next save brings it back
        writing.recover(folder)
    found.append(whole.index(state(target)))
    if n % 5 == 4:
        save(models[0], target, overwrite=True)
        assert state(target) == whole[0]
        assert not scratches(folder), scratches(folder)
print(json.dumps({"found": found, "left": left, "gone": gone}))
"""

SAVERS = """
savers, overwrite = int(sys.argv[4]), sys.argv[5] == "overwrite"
packages = [save(model(i), folder / f"in{i}.mlpackage") for i in range(savers)]
models, whole = [load(p) for p in packages], [state(p) for p in packages]
target, winners = folder / "target.mlpackage", []

for n in range(count):
    go, ready = os.pipe()
    def saver(i):
        os.close(ready)
        os.read(go, 1)
        try:
            save(models[i], target, overwrite=overwrite)
        except LoadError as error:
            return 3 if "exists; choose another name" in str(error) else 4
        return 0
    children = [forked(lambda i=i: saver(i)) for i in range(savers)]
    os.close(go)
    os.close(ready)
    codes = [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children]
    assert set(codes) <= {0, 3}, codes
    won = whole.index(state(target))
    assert codes[won] == 0
    winners.append(codes.count(0))
    assert not scratches(folder), scratches(folder)
    if not overwrite:
        os.rename(target, folder / "gone")
        import shutil
        shutil.rmtree(folder / "gone")
print(json.dumps(winners))
"""


def in_a_process(code: str, *arguments: object) -> Any:
    command = [sys.executable, "-c", START.format(support=str(SUPPORT)) + code, *map(str, arguments)]
    done = run_child(command, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


ROUNDS = 5
"""Times that the kills are repeated until they hit a save at work: when a kill comes is up to the machine."""


def kill(folder: Path, count: int, system: str) -> None:
    seen: set[int] = set()
    left = 0
    for n in range(ROUNDS):
        (folder / str(n)).mkdir()
        found = in_a_process(KILLS, folder / str(n), count, system)
        assert system != "exchange" or not found["gone"], "with an exchange the target is always there"
        seen, left = seen | set(found["found"]), left + found["left"]
        if seen == {0, 1} and left > count / 10:
            return
    raise AssertionError(f"{ROUNDS * count} kills hit {left} saves at work and saw {seen} of old and new")


@pytest.mark.slow
def test_kills(tmp_path: Path) -> None:
    kill(tmp_path, 20, "exchange")


@pytest.mark.slow
@pytest.mark.parametrize("system", ["exchange", "no exchange"])
def test_many_kills(tmp_path: Path, system: str) -> None:
    kill(tmp_path, 200, system)


def race(folder: Path, count: int, system: str, savers: int, overwrite: bool) -> None:
    how = "overwrite" if overwrite else "new"
    winners = in_a_process(SAVERS, folder, count, system, savers, how)
    assert winners == [savers if overwrite else 1] * count


@pytest.mark.slow
def test_savers_at_once(tmp_path: Path) -> None:
    race(tmp_path, 10, "exchange", 4, overwrite=False)


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("savers", [2, 4])
@pytest.mark.parametrize("system", ["exchange", "no exchange"])
def test_many_savers_at_once(tmp_path: Path, system: str, savers: int, overwrite: bool) -> None:
    race(tmp_path, 100, system, savers, overwrite)


def in_threads(work: Any, count: int = 8) -> list[Any]:
    """The results of some threads that begin together; an error is a result."""
    made: list[Any] = [None] * count
    begin = threading.Barrier(count)

    def one(i: int) -> None:
        begin.wait()
        try:
            made[i] = work(i)
        except Exception as error:
            made[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_eight_threads_one_target(tmp_path: Path, rounds: int) -> None:
    models = [load(save(model(i), tmp_path / f"in{i}.mlpackage")) for i in range(8)]
    for n in range(rounds):
        target = tmp_path / f"target{n}.mlpackage"
        made = in_threads(lambda i: save(models[i], target))  # noqa: B023 - the threads end before the loop goes on
        (winner,) = [i for i, m in enumerate(made) if m == target]
        assert all(isinstance(m, LoadError) and "exists" in str(m) for i, m in enumerate(made) if i != winner)
        assert state(target) == state(tmp_path / f"in{winner}.mlpackage")
    assert not scratches(tmp_path)


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_eight_threads_each_their_own(tmp_path: Path, rounds: int) -> None:
    wanted = [state(save(model(i), tmp_path / f"in{i}.mlpackage")) for i in range(8)]
    for n in range(rounds):

        def own(i: int) -> Any:
            return state(save(load(tmp_path / f"in{i}.mlpackage"), tmp_path / f"out{n}_{i}.mlpackage"))  # noqa: B023

        assert in_threads(own) == wanted
    assert not scratches(tmp_path)


WITHOUT_CARE = """
def careless(made, target, scratch, overwrite):
    import shutil
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(made, target)
writing._move_into_place = careless
"""
"""A wrong way to put a package in its place: what the tests must notice."""


@pytest.mark.slow
def test_the_kills_notice_a_wrong_way(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START.format(support=str(SUPPORT)) + WITHOUT_CARE + KILLS]
    done = run_child([*command, str(tmp_path), "40", "exchange"], check=False)
    assert done.returncode or json.loads(done.stdout)["gone"]


def test_the_lock_of_a_saver_lives_and_dies_with_it(tmp_path: Path) -> None:
    with writing.scratch_folder(tmp_path) as scratch:
        child = os.fork()
        if not child:
            writing.recover(tmp_path)
            os._exit(0 if scratch.is_dir() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not scratches(tmp_path)
