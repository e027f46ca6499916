"""How near two results are, and what a package stores: figures of the pages about sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def decibels(found: Any, expected: Any) -> float:
    """How near two values are; -inf where they have other shapes or hold no numbers."""
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return -np.inf
    error = np.sqrt(((a - b) ** 2).mean())
    return np.inf if error == 0 else float(20 * np.log10(np.abs(b).max() / error))


def nearness(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Of the worst output; a label counts by its name, and probabilities in the order of labels."""
    return min(_near(a, b) for a, b in zip(found.values(), expected.values(), strict=True))


def _near(found: Any, expected: Any) -> float:
    if isinstance(found, str):
        return np.inf if found == expected else -np.inf
    if isinstance(found, dict):
        return decibels([found[label] for label in expected], list(expected.values()))
    return decibels(found, expected)


def stored(folder: Path) -> int:
    """Bytes of weights; a file of several names counts once."""
    files = {file.stat().st_ino: file.stat().st_size for file in folder.rglob("weight.bin")}
    return sum(files.values())


def nearness_in_words(near: Sequence[float]) -> str:
    """How many are equal bit for bit; else how near the worst is."""
    equal = sum(one == np.inf for one in near)
    return f"{equal} of {len(near)}" + ("" if equal == len(near) else f"; worst {min(near):.0f} dB")


def worst(near: Sequence[float]) -> str:
    """How near the worst is, in words."""
    least = min(near)
    return f"{least:.0f} dB" if np.isfinite(least) else "the same" if least > 0 else "wrong"
