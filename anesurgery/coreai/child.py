"""The child process in which Apple's runtime works: `python -m anesurgery.coreai.child FOLDER`.

Whoever asks and the child hand each other a folder with plain data and arrays.
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
"""Files of the folder: what is asked, what is said, and the arrays of either."""
NAMES = "names"
TASKS: dict[str, Callable[..., Any]] = {"run": toolkit.run_asset, "read": toolkit.walk_asset}
"""Task -> what does it: takes the path, the arrays and the options; gives plain data and arrays."""


def write_arrays(file: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays into a file; their names may be anything."""
    held: dict[str, Any] = {str(i): array for i, array in enumerate(arrays.values())}
    held[NAMES] = np.array(list(arrays), dtype=np.str_)
    np.savez(file, **held)


def read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file by name."""
    with np.load(file, allow_pickle=False) as held:
        return {str(name): held[str(i)] for i, name in enumerate(held[NAMES])}


def main(folder: Path) -> None:
    """Answer the question in a folder."""
    question = json.loads((folder / QUESTION).read_text())
    task, path = TASKS[question.pop("task")], Path(question.pop("path"))
    try:
        answer, arrays = task(path, read_arrays(folder / ARRAYS), **question)
        write_arrays(folder / ARRAYS, arrays)
        said = {"answer": answer}
    except Exception as error:  # whatever Apple's code raises is said in words by who asked
        words = " ".join(str(error).split()) or type(error).__name__
        said = {"error": words[:2000]}
    (folder / ANSWER).write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stderr.flush()
    os._exit(0)  # what the runtime does when Python ends, it may do by SIGABRT, after its answer
