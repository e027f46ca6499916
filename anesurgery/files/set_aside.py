"""Arrays set aside in files that nobody else sees, so that memory need not hold them.

What is mapped from a file is read when it is needed, and the system takes its memory back when it wants some.
The file is gone when nobody reads the array any more, or when the process ends, however that comes about.
"""

from __future__ import annotations

import os
import tempfile

import numpy as np

from anesurgery.mil import Array

LEAST = 1 << 20
"""Bytes from which on an array is worth a file of its own: a choice, so that a model is not thousands of files.
"""


def set_aside(array: Array, folder: str | os.PathLike[str] | None = None, *, written: bool = False) -> Array:
    """The same numbers in a file; a small array as it is.

    Args:
        array: also of numbers of less than a byte, whose type is kept.
        folder: on the disk that has room; that of the system for temporary files by default.
        written: may the array be written to? What is written stays in memory.
    """
    if array.nbytes < LEAST:
        return array
    with tempfile.TemporaryFile(dir=folder) as file:
        np.ascontiguousarray(array).tofile(file)
        held = np.memmap(file, dtype=array.dtype.str, mode="c" if written else "r", shape=array.shape)
    return np.asarray(held).view(array.dtype)


__all__ = ["LEAST", "set_aside"]
