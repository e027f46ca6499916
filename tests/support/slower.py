"""How a recipe makes a model slower by the estimate, or larger for no gain that it states."""

from __future__ import annotations

import re
from typing import Any

import anesurgery as ane
from anesurgery import registry
from anesurgery.errors import SurgeryError
from anesurgery.loading import load
from anesurgery.placement.score import OFF, Score, placed
from anesurgery.placement.target import Target
from anesurgery.surgery import Recipe

MEASURED = re.compile(r"^(kept )?sequence_layout: .*\(measured, (M1|M1 Max|iPhone 13)|documented by Apple")
"""What a public measurement on a named device may overrule."""

SAID = re.compile(
    r"^(\w+) was asked for, and is kept although .*\bthe (?:expected time|relative cost)\b.* rise"
)
"""What is said of a step that costs time and is there for right numbers; the step's name."""


def score_of(model: Any, target: str) -> Score:
    return Score.of(placed(load(model), Target.parse(target)))


def slower(model: Any, recipe: str | Recipe, target: str) -> str:
    """How a recipe makes a model slower, or larger by more than a tenth for no gain that it states; or ""."""
    before = score_of(model, target)
    try:
        done = ane.apply(model, recipe, target=target, prove=None, quiet=True)
    except SurgeryError as error:
        return "" if re.search("is not for this model|changed nothing", str(error)) else str(error)
    after = score_of(done.program, target)
    words = after.loss(before, ["whole"])
    if words and any(MEASURED.search(note) for note in done.notes):
        return after.loss(before, OFF)
    if words and _said(done.notes) & _chosen(recipe):
        return ""
    if after.weights > 1.1 * before.weights + 1024 and not _stated(done.notes):
        words = words or f"weights {before.weights} -> {after.weights}"
    name = recipe if isinstance(recipe, str) else recipe.name
    return words and f"{name} on {target}: {words}"


def _chosen(recipe: str | Recipe) -> frozenset[str]:
    """The steps that a recipe keeps whatever they cost."""
    return (getattr(registry.recipe_module(recipe), recipe) if isinstance(recipe, str) else recipe).chosen


def _said(notes: list[str]) -> set[str]:
    return {said[1] for note in notes if (said := SAID.match(note))}


def _stated(notes: list[str]) -> bool:
    return any(
        re.search(r"(?:expected time|relative cost) .* -> .*[;:] .*weights .* -> ", note) for note in notes
    )
