"""Write a plot of a result to a file of its own."""

from __future__ import annotations

import os
from pathlib import Path

from anesurgery.display import Drawn, drawn
from anesurgery.errors import SurgeryError
from anesurgery.files.writing import write_atomically

ENDS = (".png", ".svg", ".pdf")
"""What plots end in."""


def save_picture(result: Drawn, path: str | os.PathLike[str]) -> Path:
    """Draw a result as a plot; an existing file is replaced, atomically.

    Raises:
        SurgeryError: the path ends otherwise than plots do, or there is nothing to draw, or no matplotlib.
    """
    place = Path(path).expanduser()
    if place.suffix not in ENDS:
        raise SurgeryError(f"{place} ends in {place.suffix!r}; plots end in {', '.join(ENDS)}")
    picture = drawn(result, "plot", place.suffix[1:])
    write_atomically(place.absolute(), lambda at: at.write_bytes(picture), overwrite=True)
    return place
