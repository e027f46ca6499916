"""Write plots of results to files. They are drawn by matplotlib, an optional dependency, reproducibly."""

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
"""The suffixes of plots."""
NO_MATPLOTLIB = 'plots are drawn by matplotlib: pip install "anesurgery[plot]"'


def check_plot(path: str | os.PathLike[str]) -> Path:
    """Check that a plot can be drawn, before any work is done; return its path.

    Raises:
        SurgeryError: the path has another suffix, or matplotlib is not installed.
    """
    file = Path(path).expanduser()
    if file.suffix not in ENDS:
        raise SurgeryError(f"{file} ends in {file.suffix!r}; plots end in {', '.join(ENDS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise SurgeryError(NO_MATPLOTLIB)
    return file


def save_picture(result: Drawn, path: str | os.PathLike[str]) -> Path:
    """Draw a result as a plot, and replace an existing file atomically; return its path.

    Raises:
        SurgeryError: the path has another suffix, there is nothing to draw, or matplotlib is not installed.
    """
    file = check_plot(path)
    picture = drawn(result, "plot", file.suffix[1:])
    write_atomically(file.absolute(), lambda at: at.write_bytes(picture), overwrite=True)
    return file


def can_plot() -> bool:
    """Is matplotlib installed?"""
    return importlib.util.find_spec("matplotlib") is not None


def picture(draw: Callable[[Any], None], kind: str) -> bytes:
    """Return a figure as the bytes of a file.

    Args:
        draw: draws on the matplotlib axes that it gets.
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
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()
