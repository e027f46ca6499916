"""Passes by class name: `passes.PadLastAxis(multiple=32)`. A pass is imported when it is first asked for."""

from __future__ import annotations

from typing import Any

from anesurgery import registry


def __getattr__(name: str) -> Any:
    classes = {registry.camel(n): n for n in registry.pass_names()}
    if name in classes:
        return registry.pass_class(classes[name])
    raise AttributeError(f"there is no pass {name!r}; known: {', '.join(classes)}")


def __dir__() -> list[str]:
    return [registry.camel(n) for n in registry.pass_names()]
