"""What was found of an array, kept as long as it lives: copies of a program share their large arrays."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from anesurgery.mil import Array

FINITE = "finite"
"""The key of whether all elements are."""
LEAST = 64
"""Elements of an array of which something is kept: into smaller ones coremltools writes."""
_FOUND: dict[int, tuple[weakref.ref[Array], dict[Any, Any]]] = {}
"""By identity, of arrays that are alive."""


def found_of(array: Any) -> dict[Any, Any]:
    """What is kept of an array, by keys of those who ask, to be read and written; of a small one, nothing."""
    if not isinstance(array, np.ndarray) or array.size < LEAST:
        return {}
    at = id(array)
    if at not in _FOUND:
        _FOUND[at] = weakref.ref(array, lambda _: _FOUND.pop(at, None)), {}
    return _FOUND[at][1]
