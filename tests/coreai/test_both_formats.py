"""One model in both formats, and the statement that they agree."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import save_checkpoint
from core_ai_models import needs_core_ai

import anesurgery as ane
from anesurgery.coreai.lowerings import TABLE
from anesurgery.errors import LoadError, ProofError, SurgeryError, UnknownName

pytestmark = needs_core_ai


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return Path(ane.example("tiny", tmp_path / "tiny.mlpackage"))


def test_a_recipe_gives_a_core_ai_model_that_saves_itself(package: Path, tmp_path: Path) -> None:
    model = ane.recipes.gpt2_ane(package, format="coreai", quiet=True)
    saved, temporary = model.save(tmp_path / "saved.aimodel"), model.path
    assert ane.compare(package, saved, last=True).outputs_agree
    with pytest.raises(LoadError, match="exists"):
        model.save(saved)
    del model
    gc.collect()
    assert not temporary.exists()
    assert saved.is_dir()
    with pytest.raises(UnknownName, match="known: coreai, coreml"):
        ane.recipes.gpt2_ane(package, format="both", quiet=True)


def test_both_are_written_and_compared(package: Path, tmp_path: Path) -> None:
    both = ane.apply(package, "gpt2_ane", quiet=True).save_both(tmp_path / "out.mlpackage")
    assert both.coreml.is_dir()
    assert both.coreai.is_dir()
    assert both.psnr > 100
    assert str(both).startswith("out.mlpackage and out.aimodel agree: the worst output reaches 1")
    assert json.loads(json.dumps(both.to_json()))["compared"]["main"]["engine"] == "coreai"


def test_what_does_not_agree_is_not_written(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE, "add", lambda x, y: x - y)
    surgery = ane.apply(package, "gpt2_ane", quiet=True)
    with pytest.raises(ProofError, match="do not agree; it was not written. main: worst PSNR"):
        surgery.save_both(tmp_path / "out.mlpackage")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.mlpackage", "tiny.mlpackage"]


@pytest.mark.parametrize("place", ["out.aimodel", "out", "tiny.mlpackage", "nowhere/out.mlpackage"])
def test_a_place_is_refused_before_the_work(package: Path, tmp_path: Path, place: str) -> None:
    surgery = ane.apply(package, "gpt2_ane", quiet=True)
    with pytest.raises(LoadError):
        surgery.save_both(tmp_path / place)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.mlpackage"]


@pytest.mark.slow
def test_a_build_writes_either_or_both_and_chat_reads_either(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    how: dict[str, Any] = {"context": 24, "prefill": 4, "quiet": True}
    built = ane.build(checkpoint, tmp_path / "both", format="both", **how)
    assert any("model.mlpackage and model.aimodel agree" in note for note in built.notes)
    asked: dict[str, Any] = {"steps": 5, "sampler": ane.Sampler(temperature=0)}
    answers = {
        f: "".join(ane.chat(tmp_path / "both", "hello", format=f, **asked)) for f in ("coreml", "coreai")
    }
    assert answers["coreml"] == answers["coreai"] != ""
    ane.build(checkpoint, tmp_path / "one", format="coreai", bits=8, **how)
    assert not (tmp_path / "one" / "model.mlpackage").exists()
    assert "".join(ane.chat(tmp_path / "one", "hello", **asked))
    with pytest.raises(LoadError, match="holds coreai, and no coreml; build it with --format both"):
        next(ane.chat(tmp_path / "one", "hello", format="coreml"))
    with pytest.raises(SurgeryError, match="a Core AI model is one file; leave limit out"):
        ane.build(checkpoint, tmp_path / "two", format="both", limit="1 MB", **how)


def test_equal_numbers_of_two_shapes_are_two_constants(tmp_path: Path) -> None:
    """Apple's package stores equal bytes once, under one key."""
    from anesurgery.mil import ct, mb

    row = np.linspace(0.1, 1, 100).astype(np.float32)

    @mb.program(input_specs=[mb.TensorSpec((100,))], opset_version=ct.target.iOS18)
    def program(x):  # type: ignore[no-untyped-def]
        return mb.mul(x=x, y=row), mb.add(x=x, y=row.reshape(100, 1).copy())

    ane.to_coreai(program, tmp_path / "a.aimodel")
    assert ane.compare(program, tmp_path / "a.aimodel").ok
