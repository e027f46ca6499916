"""The child process in which Apple's code runs: `python -m anesurgery.coreai.child FOLDER`.

`ask` starts it, because Apple's runtime may end the process that calls it: on an integer division by 0, on a
damaged program, and more. Both sides exchange files in a folder: the parent writes `question.json` and
`arrays.npz`, the child answers with `answer.json` and new arrays. The child loads neither torch nor
coremltools.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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


def ask(
    task: str, path: Path, options: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None
) -> tuple[Any, dict[str, NDArray[Any]]]:
    """Run a row of `TASKS` on a checked folder in a child process; return its answer and the arrays with it.

    Raises:
        LoadError: Apple's package is not installed, or the child cannot read the model.
        InterpretError: the child cannot run the model, takes too long or dies.
    """
    toolkit.require()
    with tempfile.TemporaryDirectory(prefix="anesurgery-coreai-") as folder:
        place = Path(folder)
        (place / QUESTION).write_text(json.dumps({"task": task, "path": str(path.resolve()), **options}))
        write_arrays(place / ARRAYS, arrays or {})
        last_line = _run_child(path, place)
        answer = place / ANSWER
        if not answer.is_file():
            raise InterpretError(f"{path}: Apple's runtime ended without an answer: {last_line}")
        content = json.loads(answer.read_text())
        if words := content.get("error"):
            kind = LoadError if task == "read" else InterpretError
            raise kind(f"{path}: Apple's runtime refuses it: {words}")
        return content["answer"], read_arrays(place / ARRAYS)


def _run_child(path: Path, place: Path) -> str:
    """Run the child, and return the last line that it printed."""
    command = [sys.executable, "-m", "anesurgery.coreai.child", str(place)]
    root = str(Path(__file__).resolve().parents[2])
    python_path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=False,
            env={**os.environ, "PYTHONPATH": python_path},
        )
    except subprocess.TimeoutExpired as error:
        raise InterpretError(
            f"{path}: Apple's runtime was stopped after {PATIENCE:g} s; give smaller inputs, or raise "
            f"{__name__}.PATIENCE"
        ) from error
    if (number := -process.returncode) > 0:
        name = {s.value: s.name for s in signal.Signals}.get(number, f"signal {number}")
        why = DEADLY.get(number, "not known here")
        raise InterpretError(f"{path}: Apple's runtime died ({name}). The likely cause is {why}")
    return (process.stderr.strip().splitlines() or ["nothing was printed"])[-1][:300]


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stderr.flush()
    os._exit(0)  # what the runtime does when Python ends, it may do by SIGABRT, after its answer
