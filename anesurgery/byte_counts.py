"""Numbers of bytes in words, "950 MB": decimal units, as Finder and Xcode have them."""

from __future__ import annotations

import re

from anesurgery.errors import SurgeryError

KB, MB, GB = 10**3, 10**6, 10**9
"""Bytes."""
UNITS = {"TB": 1000 * GB, "GB": GB, "MB": MB, "kB": KB}
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)B?\s*", re.IGNORECASE)
LARGEST = 999.5
"""From here on three digits are not enough for a number, and the next unit is taken."""


def read_size(size: float | str | None) -> int:
    """A number of bytes, given as a number or in words.

    Raises:
        SurgeryError: it is neither, or not above 0.
    """
    parts = SIZE.fullmatch(str(size))
    if parts is None or float(parts[1]) <= 0:
        raise SurgeryError(f"max_bytes={size!r} is not a size; give bytes, or as '950 MB'")
    return int(float(parts[1]) * {"": 1, "K": KB, "M": MB, "G": GB}[parts[2].upper()])


def byte_words(count: float) -> str:
    """Return bytes in words, with three digits: "1.5 MB"; 999,700 bytes are "1 MB"."""
    for unit, factor in UNITS.items():
        if count >= factor * LARGEST / 1000:
            return f"{count / factor:.3g} {unit}"
    return "1 byte" if count == 1 else f"{count:.0f} bytes"
