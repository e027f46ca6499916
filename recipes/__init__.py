"""Recipes by name: `recipes.gpt2_ane(model)`. A recipe is imported when it is first asked for.

No file here bears the name of a recipe: importing it would put the module in the place of the recipe.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

from anesurgery import registry
from anesurgery.surgery import Recipe, find_recipe

MOVED = {"auto": "any_model"}
"""Former module -> the one that has its contents now."""


class _Moved(ModuleType):
    """A module under its former name; what is asked of it comes with a warning."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for these
            raise AttributeError(name)
        old = self.__name__.rpartition(".")[2]
        warnings.warn(
            f"anesurgery.recipes.{old} is no module any more; use anesurgery.recipes.{old}, the recipe, or "
            f"import from anesurgery.recipes.{MOVED[old]}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(f"{__name__}.{MOVED[old]}"), name)


for _old in MOVED:
    # Found here, it is not imported as a file, so that it is never set as an attribute of this package.
    sys.modules.setdefault(f"{__name__}.{_old}", _Moved(f"{__name__}.{_old}", __doc__))


def __getattr__(name: str) -> Recipe:
    if name in registry.recipe_names():
        return find_recipe(name)
    raise AttributeError(f"there is no recipe {name!r}; known: {', '.join(registry.recipe_names())}")


def __dir__() -> list[str]:
    return registry.recipe_names()
