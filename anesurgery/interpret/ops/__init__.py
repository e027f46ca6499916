"""The meanings of ops: a file for each family fills the table."""

from __future__ import annotations

import importlib
import pkgutil


def load_implementations() -> None:
    """Import every family, so that the table knows its ops."""
    for family in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{family.name}")
