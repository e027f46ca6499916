"""No recipe, and no `auto`, makes a model slower by the estimate; what grows says what for.

Two models on each run; others, the corpus, models of each family and the gallery where tests may be slow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from slower import slower
from small_rewrites import small_rewrite

from anesurgery import registry
from anesurgery.errors import SurgeryWarning
from anesurgery.mil import Var, ct, mb, types
from anesurgery.placement.score import GAINS, WORTH
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.search import Search
from anesurgery.rewriting.step_trials import Trial
from anesurgery.surgery import Recipe

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import gallery
import residency

TARGETS = ("M1/macOS 14", "A15/iOS 17", "M4/macOS 15")
FEW = ("gpt2", "llama", "bert", "whisper", "vit")
PROGRAMS = [name for name in registry.recipe_names() if name != "neuralnetwork_ane"]


@pytest.mark.one_of(12)
@pytest.mark.parametrize(("name", "recipe"), [("gpt2", "auto"), ("gpt2", "gpt2_ane"), ("bert", "encoder_ane")])
@pytest.mark.parametrize("target", TARGETS)
def test_two_models(converted: Callable[..., Any], name: str, recipe: str, target: str) -> None:
    assert not slower(converted(name).model._mil_program, recipe, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FEW)
def test_auto_and_each_recipe_that_fits(converted: Callable[..., Any], name: str, target: str) -> None:
    program = converted(name).model._mil_program
    assert not list(filter(None, (slower(program, recipe, target) for recipe in PROGRAMS)))


Crowd = small_rewrite("crowd", lambda op: op.tanh(), lambda mb, m: mb.exp(x=mb.exp(x=mb.exp(x=m.root.x))))
"""Three ops in the place of one."""


def test_what_is_slower_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: a gate that lets every step pass."""

    @mb.program(input_specs=[mb.TensorSpec((8, 512, 64, 64), types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.tanh(x=x)

    recipe = Recipe("crowd_ane", (Crowd(),))
    assert not slower(program, recipe, "M4/macOS 15")
    monkeypatch.setattr(Search, "best", Search.run_all)
    monkeypatch.setitem(GAINS, WORTH[0], lambda before, after: "something")
    assert slower(program, recipe, "M4/macOS 15").startswith(
        "crowd_ane on M4/macOS 15: the relative cost of the whole"
    )


def test_a_step_for_right_numbers_says_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: a gate that keeps it and says nothing, or speaks of another step."""

    @mb.program(input_specs=[mb.TensorSpec((8, 512, 64, 64), types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.tanh(x=x)

    chosen = Recipe("crowd_ane", (Crowd(),), chosen=frozenset({"crowd"}))
    with pytest.warns(SurgeryWarning, match="crowd was asked for, and is kept although the expected time"):
        assert not slower(program, chosen, "M4/macOS 15")
    monkeypatch.setattr(Search, "best", Search.run_all)
    assert "the relative cost of the whole" in slower(program, chosen, "M4/macOS 15")

    def with_other_words(search: Search, steps: Sequence[Pass]) -> Trial:
        search.results.warnings.append("crew was asked for, and is kept although the expected time would rise")
        return search.run_all(steps)

    monkeypatch.setattr(Search, "best", with_other_words)
    assert "the relative cost of the whole" in slower(program, chosen, "M4/macOS 15")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name for name, piece in gallery.PIECES.items() if name != "network"])
def test_the_gallery(folder: Path, name: str, target: str) -> None:
    piece = gallery.PIECES[name]
    assert not slower(piece.make(folder), piece.recipe, target)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, _ in residency.models(Path(), everything=False)])
def test_the_corpus_and_models_of_each_family(folder: Path, name: str) -> None:
    model = dict(residency.models(folder, everything=False))[name]()
    said = [slower(model, recipe, target) for target in TARGETS for recipe in PROGRAMS]
    assert not list(filter(None, said))
