"""The error for a model that does not exist; imports neither torch nor coremltools."""

from __future__ import annotations

import re
from pathlib import Path

MOST = 8
"""Names of neighbours at most."""


def missing(path: Path) -> str:
    """Return the error for a path that does not exist: it names the models beside it, or a similar path."""
    if path.is_symlink():
        return f"{path} is a link that leads nowhere; copy the model itself"
    if re.match(r"[a-z]+:/", str(path)):
        return f"{path} is an address; download the model, and give the file"
    near = sorted(p.name for p in path.parent.glob("*.ml*") if p.exists()) if path.parent.is_dir() else []
    if near:
        return f"{path} does not exist; in its folder: {', '.join(near[:MOST])}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.suffix.startswith(".ml"):
        return f"{path} does not exist; download that checkpoint, and give its folder to `anesurgery build`"
    return f"{path} does not exist; `anesurgery example gpt2` makes a model to try"
