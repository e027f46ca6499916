"""Passes are sorted by what they declare: recipes, pipelines, what `auto` tries, lists that users give."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pytest

from anesurgery import registry
from anesurgery.errors import PassError
from anesurgery.recipes.safety import FREE
from anesurgery.rewriting.passes import Pass, in_order
from anesurgery.surgery import Recipe, find_recipe


@dataclass(frozen=True)
class Step:
    """What the sort needs to know of a pass."""

    name: str
    precedes: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()


def kept(steps: Sequence[Pass]) -> bool:
    """Does each step stand where it and the others declare it to? (Pair by pair, without a graph.)"""
    return not any(
        fnmatchcase(a.name, pattern) and a.name != b.name
        for i, a in enumerate(steps)
        for b in steps[i + 1 :]
        for pattern in b.precedes
    ) and not any(
        fnmatchcase(b.name, pattern) and a.name != b.name
        for i, a in enumerate(steps)
        for b in steps[i + 1 :]
        for pattern in a.follows
    )


@pytest.mark.parametrize("name", ["gpt2_ane", "neuralnetwork_ane"])
def test_a_recipe_in_any_order_becomes_one_that_keeps_what_is_declared(name: str) -> None:
    recipe = find_recipe(name)
    assert kept(recipe.steps)
    assert not kept(recipe.steps[::-1])
    for seed in range(5):
        steps = list(recipe.steps)
        random.Random(seed).shuffle(steps)
        found = Recipe("shuffled", tuple(steps)).steps
        assert sorted(map(str, found)) == sorted(map(str, steps))
        assert kept(found), [step.name for step in found]


def test_the_declared_order_of_gpt2_leaves_one_choice() -> None:
    steps = find_recipe("gpt2_ane").steps
    names, wanted = [step.name for step in in_order(steps[::-1])], [step.name for step in steps]
    mask = "causal_mask_tensor"  # what pads and embeds does not touch masks
    anywhere = {mask, "split_head", *(step.name for step in FREE)}  # nor what these look for
    assert [n for n in names if n not in anywhere] == [n for n in wanted if n not in anywhere]
    assert names.index("select_last_token") < names.index(mask) < names.index("negate_subtract")


def test_all_passes_of_one_format_can_run_together() -> None:
    for known in (registry.op_pass_names(), registry.layer_pass_names()):
        assert kept(in_order([registry.make_pass(name) for name in known]))


def test_patterns_of_names() -> None:
    last = Step("last", follows=("*",))
    first = Step("first", precedes=("b*", "last"))
    b = Step("b1"), Step("b2")
    assert [s.name for s in in_order([last, *b, first])] == ["first", "b1", "b2", "last"]


def test_a_contradiction_names_both() -> None:
    a, b = Step("a", precedes=("b",)), Step("b", precedes=("a",))
    with pytest.raises(PassError, match="contradicts itself: a before b, b before a|b before a, a before b"):
        in_order([a, b])
    assert in_order([a]) == [a]
