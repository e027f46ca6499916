"""The child process in which Apple's code runs: `python -m anesurgery.coreai.child FOLDER`.

`running.ask` starts it, because Apple's runtime may end the process that calls it. Both sides exchange files in
a folder: the parent writes `question.json` and `arrays.npz`, the child answers with `answer.json` and new
arrays. The child loads neither torch nor coremltools.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anesurgery.coreai import toolkit

QUESTION, ANSWER, ARRAYS = "question.json", "answer.json", "arrays.npz"
"""Files of the folder: the task, the answer, and the arrays of either side."""
NAMES = "names"
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
