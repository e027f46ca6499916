"""What a process and its child with Apple's runtime hand each other: a folder with plain data and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUESTION, ANSWER, ARRAYS = "question.json", "answer.json", "arrays.npz"
"""Files of the folder: what is asked, what is said, and the arrays of either."""
NAMES = "names"


def write_arrays(file: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays into a file; their names may be anything."""
    held: dict[str, Any] = {str(i): array for i, array in enumerate(arrays.values())}
    held[NAMES] = np.array(list(arrays), dtype=np.str_)
    np.savez(file, **held)


def read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file by name."""
    with np.load(file, allow_pickle=False) as held:
        return {str(name): held[str(i)] for i, name in enumerate(held[NAMES])}
