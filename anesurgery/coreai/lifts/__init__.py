"""What each op of Core AI is in MIL: one table, in files by family, the mirror of the lowering table."""

from __future__ import annotations

import importlib

FAMILIES = ("elementwise", "tensors", "indexing", "products", "weights", "control", "composites", "images")
"""The files of the table."""


def load_families() -> None:
    """Import the files, each of which adds its rows."""
    for family in FAMILIES:
        importlib.import_module(f"anesurgery.coreai.lifts.{family}")
