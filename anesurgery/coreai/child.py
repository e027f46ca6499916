"""The child process in which Apple's runtime works: `python -m anesurgery.coreai.child FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anesurgery.coreai import toolkit
from anesurgery.coreai.exchange import ANSWER, ARRAYS, QUESTION, read_arrays, write_arrays

TASKS: dict[str, Callable[..., Any]] = {"run": toolkit.run_asset, "read": toolkit.walk_asset}
"""Task -> what does it: takes the path, the arrays and the options; gives plain data and arrays."""


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
