"""Recipes by name: `recipes.gpt2_ane(model)`. A recipe is imported when it is first asked for."""

from __future__ import annotations

from anesurgery import registry
from anesurgery.surgery import Recipe, find_recipe


def __getattr__(name: str) -> Recipe:
    if name in registry.recipe_names():
        return find_recipe(name)
    raise AttributeError(f"there is no recipe {name!r}; known: {', '.join(registry.recipe_names())}")


def __dir__() -> list[str]:
    return registry.recipe_names()
