"""Small models to save, and what of a saved one must be whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.files.package import Loaded
from anesurgery.files.writing import SCRATCH
from anesurgery.loading import load
from anesurgery.mil import Var, ct, mb, types


def model(seed: int, rows: int = 512) -> Loaded:
    """A model whose weights tell which one it is."""
    table = np.random.default_rng(seed).standard_normal((rows, 16)).astype(np.float16)

    @mb.program(input_specs=[mb.TensorSpec((2, 16), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        small = np.arange(16, dtype=np.float16) + seed
        return mb.linear(x=mb.add(x=x, y=small), weight=table, name=f"y{seed}")

    return load(program)


def state(package: Path) -> tuple[bytes, bytes] | None:
    """The specification and the weights of a saved package, None where nothing is.

    Raises:
        AssertionError: a part of it is there.
    """
    if not package.exists():
        return None
    manifest = json.loads((package / "Manifest.json").read_text(encoding="utf-8"))
    paths: dict[str, Any] = {
        i["name"]: package / "Data" / i["path"] for i in manifest["itemInfoEntries"].values()
    }
    files = [p for p in package.rglob("*") if p.is_file()]
    assert len(files) == 3, files
    return paths["model.mlmodel"].read_bytes(), (paths["weights"] / "weight.bin").read_bytes()


def scratches(folder: Path) -> list[Path]:
    """What savers left in a folder."""
    return [p for p in folder.iterdir() if p.name.startswith(SCRATCH)]
