"""How each op of Core AI is built in MIL: each file, a family of ops, fills `TABLE`."""

import importlib
import pkgutil

from anesurgery.coreai.lifts.table import TABLE as TABLE

for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
