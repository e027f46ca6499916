"""Read a Core AI model into an ML Program."""

from pathlib import Path
from anesurgery.coreai.asset import Asset
from anesurgery.coreai.running import ask
from anesurgery.files.package import Loaded


def read(path: Path) -> Loaded:
    """A model."""
    asset = Asset.open(path)
    graphs, arrays = ask("read", asset.path, {})
    raise NotImplementedError
