"""How each op of MIL is written in Core AI: each file, a family of ops, fills `TABLE`."""

import importlib
import pkgutil

from anesurgery.coreai.table import TABLE as TABLE

for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
