"""The layers of neural networks: a file for each family says how its layers are built as MIL ops."""

from __future__ import annotations

import importlib
import pkgutil


def load_families() -> None:
    """Import every family, so that `context.LAYERS` knows its layers."""
    for family in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{family.name}")
