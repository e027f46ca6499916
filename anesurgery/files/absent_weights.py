"""Weights that are not there: files that Git LFS has not fetched, and what stands in for their values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.mil import Array, types

POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:[a-z0-9.-]+ [^\n]*\n)*?size (\d+)\n", re.DOTALL
)
"""What Git LFS leaves in the place of a file (its specification, docs/spec.md of git-lfs/git-lfs)."""
LARGEST_POINTER = 1024
"""Bytes; the specification says that a pointer has fewer."""


def not_fetched(file: Path, content: bytes | None = None) -> str | None:
    """In words that a file is a pointer of Git LFS, and how to fetch what it stands for; None where it is none.

    Args:
        file: its path.
        content: what is in it, where that was read already.
    """
    if content is None:
        if not file.is_file():
            return None
        with open(file, "rb") as opened:
            content = opened.read(LARGEST_POINTER)
    pointer = POINTER.match(content[:LARGEST_POINTER])
    if pointer is None:
        return None
    size = f"{int(pointer[1]):,} bytes"
    return (
        f"{file} is a pointer of Git LFS to {size} that were not fetched; run `git -C {file.parent} lfs pull`"
    )


def unknown(element: Any, shape: tuple[int, ...]) -> Array:
    """Stands in for a weight: NaN for floats, about which nothing can be shown, 0 and 1 for integers.

    Rows differ in their bits, so that they are not taken for equal; the array takes the memory of one column.
    """
    dtype = np.dtype(types.nptype_from_builtin(element))
    column = np.arange(shape[0] if shape else 1) % 2
    column = column.astype(dtype)
    if np.issubdtype(dtype, np.floating):
        column = np.where(column != 0, np.array(np.nan, dtype), -np.array(np.nan, dtype))
    return np.broadcast_to(column.reshape(-1, *[1] * (len(shape) - 1)) if shape else column[0], shape)
