"""Read a Core AI model into an ML Program."""

from __future__ import annotations

from pathlib import Path

from anesurgery.coreai.asset import Asset
from anesurgery.coreai.running import ask
from anesurgery.errors import LoadError
from anesurgery.files.package import Loaded


def read(path: Path) -> Loaded:
    """A model.

    Raises:
        LoadError: it cannot be read.
    """
    asset = Asset.open(path)
    ask("read", asset.path, {})
    raise LoadError(f"{path} is a sound model of Core AI, whose ops cannot be read yet")
