"""What is said where a model is named that is not there; imports neither torch nor coremltools."""

from __future__ import annotations

from pathlib import Path


def missing(path: Path) -> str:
    """Says that a path does not exist, and which models are beside it."""
    near = sorted(p.name for p in path.parent.glob("*.ml*")) if path.parent.is_dir() else []
    return f"{path} does not exist" + (f"; in its folder: {', '.join(near[:8])}" if near else "")
