"""Plots of results in files of their own: drawn by matplotlib, an extra, to the same bytes each time."""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def can_plot() -> bool:
    """Is matplotlib installed?"""
    return importlib.util.find_spec("matplotlib") is not None


def picture(draw: Callable[[Any], None], kind: str) -> bytes:
    """A figure as a file.

    Args:
        draw: draws on the axes that it is given.
        kind: "png", "svg" or "pdf".

    Raises:
        SurgeryError: matplotlib is not installed.
    """
    if not can_plot():
        raise SurgeryError(NO_MATPLOTLIB)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "anesurgery", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        draw(figure.subplots())
        held = io.BytesIO()
        figure.savefig(held, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return held.getvalue()
