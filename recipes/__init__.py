"""Recipes by name: `recipes.gpt2_ane(model)`. A recipe is imported when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anesurgery import registry

if TYPE_CHECKING:
    from anesurgery.recipes.auto import auto
    from anesurgery.recipes.gpt2 import gpt2_ane
    from anesurgery.recipes.neuralnetwork import neuralnetwork_ane

    __all__ = ["auto", "gpt2_ane", "neuralnetwork_ane"]


def __getattr__(name: str) -> Any:
    if name in registry.recipe_names():
        return registry.recipe(name)
    raise AttributeError(f"there is no recipe {name!r}; known: {', '.join(registry.recipe_names())}")


def __dir__() -> list[str]:
    return registry.recipe_names()
