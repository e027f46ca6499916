"""The implementations of ops: a module for each family enters them into `interpret.table.TABLE`.

A function has the MIL inputs of its op as parameters, and gets torch tensors, or plain Python for settings. It
returns the result, or several as a tuple.
"""

from __future__ import annotations

import importlib
import pkgutil


def load_implementations() -> None:
    """Import all modules of ops, so that the table knows their ops."""
    for family in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{family.name}")
