"""`neuralnetwork_ane` on real files: checked, stable, and nothing where nothing is to be done."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import anesurgery as ane
from anesurgery import recipes, registry
from anesurgery.checking.grades import EXACT
from anesurgery.errors import SurgeryError
from anesurgery.surgery import Recipe

pytestmark = pytest.mark.first

FILES = {
    "blazeface_scaled": (34, 14),
    "mlc_edsr_f32b5": (4, 0),
    "mlt_es2en_char_decoder16": (1, 1),
    "mlt_gesture_classifier": (2, 2),
    "pose_cpm": (3, 0),
    "sinet_portrait_seg": (9, 0),
}
"""Name -> layers that the rules keep off the ANE, before and after."""
LONG = {"mlc_edsr_f32b5", "pose_cpm"}
"""Those whose edits take half a minute to prove."""


def exact_steps() -> Recipe:
    """The recipe without the steps that round otherwise."""
    recipe: Recipe = recipes.neuralnetwork_ane
    inexact = [step.name for step in recipe.steps if step.tolerance != EXACT]
    return recipe.with_options(**dict.fromkeys(inexact, False))


def operate(path: Path, recipe: Recipe | str, prove: str | None = "both") -> ane.Surgery:
    done = ane.apply(path, recipe, prove=prove, quiet=True)
    return done


def kept_off(done: ane.Surgery) -> tuple[int, int]:
    """Layers that the rules forbid, before and after."""
    before, after = (sum(row.legal is False for row in part.ops) for (part,) in done.inspected)
    return before, after


@pytest.mark.quick_cases("mlt_es2en_char_decoder16", "mlt_gesture_classifier")
@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in FILES])
def test_real_networks(corpus: Path, tmp_path: Path, name: str) -> None:
    path = corpus / f"{name}.mlmodel"
    content = path.read_bytes()
    done = operate(path, "neuralnetwork_ane")
    assert kept_off(done) == FILES[name]
    assert done.proof is not None
    assert done.proof.psnr > 100
    assert all(change.proof is not None for change in done.changes)
    assert done.original is not None
    assert done.subject.spec.description == done.original.spec.description
    again = operate(done.save(tmp_path / "new.mlmodel"), "neuralnetwork_ane", prove=None)
    assert [(c.pass_name, c.where) for c in again.changes] == []
    assert path.read_bytes() == content


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_without_the_steps_that_round_all_is_bit_exact(corpus: Path, name: str) -> None:
    done = operate(corpus / f"{name}.mlmodel", exact_steps(), prove="model")
    assert done.proof is not None
    assert [o.max_abs for o in done.proof.outputs] == [0.0] * len(done.proof.outputs)


@pytest.mark.slow
def test_nothing_to_do_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    path = corpus / "waifu2x_anime_noise0.mlmodel"
    done = operate(path, "neuralnetwork_ane")
    assert not done.changes
    assert done.save(tmp_path / "new.mlmodel").read_bytes() == path.read_bytes()


def test_a_custom_swish_becomes_layers_and_runs(corpus: Path, tmp_path: Path) -> None:
    done = operate(corpus / "custom_swish_mcneural.mlmodel", "neuralnetwork_ane")
    assert kept_off(done) == (1, 0)
    assert any("custom" in change.unchecked for change in done.changes)
    assert any("not compared as a whole" in note for note in done.notes)
    predictor = ane.Predictor(done.save(tmp_path / "new.mlmodel"))
    assert all(np.isfinite(value).all() for value in predictor(predictor.sample(0)).values())


def test_the_one_liner(corpus: Path, tmp_path: Path) -> None:
    model = recipes.neuralnetwork_ane(corpus / "mlc_edsr_f32b5.mlmodel", prove=None, quiet=True)
    model.save(str(tmp_path / "new.mlmodel"))
    kinds = [layer.WhichOneof("layer") for layer in model.get_spec().neuralNetwork.layers]
    assert "clip" in kinds
    assert not [kind for kind in kinds if "Broadcastable" in kind]


def test_every_layer_pass_is_a_step() -> None:
    recipe: Recipe = recipes.neuralnetwork_ane
    assert {step.name for step in recipe.steps} == set(registry.layer_pass_names())


def test_an_ml_program_is_refused(corpus: Path) -> None:
    with pytest.raises(SurgeryError, match="is of type mlProgram, without layers"):
        recipes.neuralnetwork_ane(corpus / "silero_unified.mlpackage")
