"""Plots are drawn by matplotlib, an extra, to the same bytes each time."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from typing import Any

from anesurgery.errors import SurgeryError
from anesurgery.files.plot_files import NO_MATPLOTLIB


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
