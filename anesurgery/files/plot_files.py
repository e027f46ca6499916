"""Write a plot of a result to a file of its own."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from anesurgery.display import Drawn, drawn
from anesurgery.errors import SurgeryError
from anesurgery.files.writing import write_atomically

ENDS = (".png", ".svg", ".pdf")
"""What plots end in."""


NO_MATPLOTLIB = 'plots are drawn by matplotlib: pip install "anesurgery[plot]"'


def check_plot(path: str | os.PathLike[str]) -> Path:
    """See that a plot can be drawn, before any work is done.

    Raises:
        SurgeryError: the path ends otherwise than plots do, or matplotlib is not installed.
    """
    place = Path(path).expanduser()
    if place.suffix not in ENDS:
        raise SurgeryError(f"{place} ends in {place.suffix!r}; plots end in {', '.join(ENDS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise SurgeryError(NO_MATPLOTLIB)
    return place


def save_picture(result: Drawn, path: str | os.PathLike[str]) -> Path:
    """Draw a result as a plot; an existing file is replaced, atomically.

    Raises:
        SurgeryError: the path ends otherwise than plots do, or there is nothing to draw, or no matplotlib.
    """
    place = check_plot(path)
    picture = drawn(result, "plot", place.suffix[1:])
    write_atomically(place.absolute(), lambda at: at.write_bytes(picture), overwrite=True)
    return place
