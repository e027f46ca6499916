"""Sizes in words, as "950 MB"."""

from __future__ import annotations

import re

from anesurgery.errors import SurgeryError

UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?B?)\s*", re.IGNORECASE)


def read_size(size: float | str | None) -> int:
    """A number of bytes, given as a number or in words.

    Raises:
        SurgeryError: it is neither, or not above 0.
    """
    parts = SIZE.fullmatch(str(size))
    unit = parts[2].upper() if parts else None
    unit = unit + "B" if unit in ("K", "M", "G") else "" if unit == "B" else unit
    if parts is None or unit not in UNITS or float(parts[1]) <= 0:
        raise SurgeryError(f"max_bytes={size!r} is not a size; give bytes, or as '950 MB'")
    return int(float(parts[1]) * UNITS[unit])
