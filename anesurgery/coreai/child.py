"""The child process in which Apple's code runs: `python -m anesurgery.coreai.child PIPE`.

`ask` starts it, because Apple's runtime may end the process that calls it: on an integer division by 0, on a
damaged program, and more. Both sides exchange files in a folder, which the pipe names: the parent writes
`question.json` and `arrays.npz`, the child answers with `answer.json` and new arrays. The child loads neither
torch nor coremltools.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from anesurgery.coreai import toolkit
from anesurgery.errors import InterpretError, LoadError

QUESTION, ANSWER, ARRAYS = "question.json", "answer.json", "arrays.npz"
"""Files of the folder: the task, the answer, and the arrays of either side."""
NAMES = "names"
"""Entry of the arrays that holds the names of the others, which are numbered."""
TASKS: dict[str, Callable[..., Any]] = {"run": toolkit.run_asset, "read": toolkit.walk_asset}
"""Task -> its function: (path, arrays, **options) -> (plain data, arrays)."""


def write_arrays(file: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays to an .npz file; their names may be any text."""
    entries: dict[str, Any] = {str(i): array for i, array in enumerate(arrays.values())}
    entries[NAMES] = np.array(list(arrays), dtype=np.str_)
    np.savez(file, **entries)


def read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays of a file by name."""
    with np.load(file, allow_pickle=False) as held:
        return {str(name): held[str(i)] for i, name in enumerate(held[NAMES])}


PATIENCE = 600.0
"""Seconds that the child may take: 20 times what the slowest of 39 published packages took."""
DEADLY: dict[int, str] = {
    signal.SIGILL: "an operation that it does not define, such as an integer divided by 0",
    signal.SIGSEGV: "a program that it reads wrongly",
    signal.SIGABRT: "a program that contradicts itself",
    signal.SIGKILL: "too little memory, or somebody who ended it",
}
"""Signal that ends the child -> the cause that was seen."""


MOST_MAPPED = 1 << 26
"""Bytes of models after which a new child does the next task: coreai-core 1.0.0b3 maps the file of each run
into memory, and never unmaps it. A choice: as much as one child takes by itself."""
PAGE = 4096
DONE = b"done"
"""What the child sends after a task."""


@dataclass
class _Child:
    """A process that does one task after another, the parent's end of the pipe to it, and what it prints."""

    process: subprocess.Popen[bytes]
    pipe: connection.Connection
    printed: IO[bytes]
    mapped: int = 0

    def is_alive(self) -> bool:
        """Does it answer an empty question? What it printed before is forgotten."""
        self.printed.seek(0)  # its offset is the child's too
        self.printed.truncate()
        with contextlib.suppress(EOFError, OSError):
            self.pipe.send_bytes(b"")
            return self.pipe.poll(PATIENCE) and self.pipe.recv_bytes() == DONE
        return False

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        self.printed.close()


IDLE: list[_Child] = []
"""The child that waits for its next task, if any: to start one takes 0.3 s."""
os.register_at_fork(after_in_child=IDLE.clear)


@atexit.register
def end_idle() -> None:
    """End the child that waits for a task."""
    with contextlib.suppress(IndexError):  # none left
        while True:
            IDLE.pop().end()


def ask(
    task: str, path: Path, options: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None
) -> tuple[Any, dict[str, NDArray[Any]]]:
    """Run a row of `TASKS` on a checked folder in a child process; return its answer and the arrays with it.

    The child does later tasks too, unless it failed: then what Apple's code left behind is unknown.

    Raises:
        LoadError: Apple's package is not installed, or the child cannot read the model.
        InterpretError: the child cannot run the model, takes too long or dies.
    """
    toolkit.require()
    with tempfile.TemporaryDirectory(prefix="anesurgery-coreai-") as folder:
        place = Path(folder)
        (place / QUESTION).write_text(json.dumps({"task": task, "path": str(path.resolve()), **options}))
        write_arrays(place / ARRAYS, arrays or {})
        child = _idle_or_new()
        try:
            child.mapped += sum(max(PAGE, file.stat().st_size) for file in path.iterdir())
            _wait_for_answer(child, path, place)
            content = json.loads((place / ANSWER).read_text())
            if words := content.get("error"):
                kind = LoadError if task == "read" else InterpretError
                raise kind(f"{path}: Apple's runtime refuses it: {words}")
            results = read_arrays(place / ARRAYS)
        except BaseException:
            child.end()
            raise
        end_idle()  # where two threads asked at once, one child stays
        IDLE.append(child)
        if child.mapped > MOST_MAPPED:
            end_idle()
        return content["answer"], results


def _idle_or_new() -> _Child:
    """Return a child that waits for a task."""
    with contextlib.suppress(IndexError):  # none, or another thread took it
        child = IDLE.pop()
        if child.is_alive():
            return child
        child.end()
    root = str(Path(__file__).resolve().parents[2])
    python_path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    ours, theirs = multiprocessing.Pipe()
    printed = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the child
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "anesurgery.coreai.child", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the parent, which ends it
            env={**os.environ, "PYTHONPATH": python_path},
        )
    return _Child(process, ours, printed)


def _wait_for_answer(child: _Child, path: Path, place: Path) -> None:
    """Let a child do the task of a folder."""
    try:
        child.pipe.send_bytes(os.fsencode(place))
        if not child.pipe.poll(PATIENCE):
            raise InterpretError(
                f"{path}: Apple's runtime was stopped after {PATIENCE:g} s; give smaller inputs, or raise "
                f"{__name__}.PATIENCE"
            )
        child.pipe.recv_bytes()
    except (EOFError, OSError) as error:
        if (number := -child.process.wait()) > 0:
            name = {s.value: s.name for s in signal.Signals}.get(number, f"signal {number}")
            why = DEADLY.get(number, "not known here")
            raise InterpretError(f"{path}: Apple's runtime died ({name}). The likely cause is {why}") from error
        child.printed.seek(0)
        lines = child.printed.read().decode(errors="replace").strip().splitlines() or ["nothing was printed"]
        raise InterpretError(f"{path}: Apple's runtime ended without an answer: {lines[-1][:300]}") from error


def main(folder: Path) -> None:
    """Read the question in a folder, and write the answer."""
    question = json.loads((folder / QUESTION).read_text())
    task, path = TASKS[question.pop("task")], Path(question.pop("path"))
    try:
        answer, arrays = task(path, read_arrays(folder / ARRAYS), **question)
        write_arrays(folder / ARRAYS, arrays)
        content = {"answer": answer}
    except Exception as error:  # whatever Apple's code raises is said in words by who asked
        words = " ".join(str(error).split()) or type(error).__name__
        content = {"error": words[:2000]}
    (folder / ANSWER).write_text(json.dumps(content))


def serve(parent: connection.Connection) -> None:
    """Do the task of each folder that the parent names, until it closes the pipe."""
    with contextlib.suppress(EOFError):
        while True:
            if place := parent.recv_bytes():
                main(Path(os.fsdecode(place)))
            parent.send_bytes(DONE)


if __name__ == "__main__":
    serve(connection.Connection(int(sys.argv[1])))
    sys.stderr.flush()
    os._exit(0)  # what the runtime does when Python ends, it may do by SIGABRT, after its answer
