"""Each example gains on the target that `anesurgery example` names, by its recipe, with the numbers kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.errors import LoadError, UnknownName
from anesurgery.examples.example_models import EXAMPLES

SLOW = {"gpt2", "llama", "bert", "vit", "whisper"}
GAIN = [name for name in EXAMPLES if name not in ("tiny", "network")]
CASES: list[Any] = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in GAIN]


@pytest.mark.parametrize("name", CASES)
def test_the_share_rises_and_the_numbers_stay(name: str, tmp_path: Path) -> None:
    path = ane.example(name, tmp_path / "model.mlpackage")
    target = EXAMPLES[name].target
    surgery = ane.apply(path, EXAMPLES[name].recipe, target=target, prove="model", quiet=True)
    after = surgery.save(tmp_path / "after.mlpackage")
    old, new = (ane.inspect(p, target=target) for p in (path, after))
    assert surgery.proof is not None
    assert surgery.proof.ok
    assert (new.residency["flop"], new.residency["ops"]) > (old.residency["flop"], old.residency["ops"])
    assert old.time is None or (new.time is not None and new.time.ms < old.time.ms)


def test_the_old_network_leaves_the_layers_that_are_barred(tmp_path: Path) -> None:
    surgery = ane.apply(
        ane.example("network", tmp_path / "old.mlmodel"), EXAMPLES["network"].recipe, quiet=True
    )
    assert "layers that the rules of the format keep off the ANE: 3 of 17 -> 0 of 14" in surgery.notes


@pytest.mark.slow
def test_steps_that_pay_as_a_whole_bring_back_none_that_only_makes_the_model_larger(tmp_path: Path) -> None:
    """The wrong version: a head tied to the embedding is stored twice, for ops that may run on the ANE."""
    plan = ane.plan(ane.example("gpt2", tmp_path / "gpt2.mlpackage"), "decoder_ane", target="M1/macOS 14")
    assert "select_last_token" in {one.step.name for one in plan.steps}
    (why,) = [refusal.reason for name, refusal in plan.left_out if name == "split_head"]
    assert why.startswith("undone: weights 76.8 MB -> 128 MB")


@pytest.mark.one_of(3)
@pytest.mark.parametrize("ios", [16, 17, 18])
def test_the_version_is_the_one_asked_for(ios: int, tmp_path: Path) -> None:
    path = ane.example("tiny", tmp_path / "tiny.mlpackage", ios=ios)
    assert ane.load(path).spec.specificationVersion == ios - 9


@pytest.mark.slow
def test_the_same_name_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = (ane.example("unet", tmp_path / f"{k}.mlpackage") for k in range(2))
    files = [sorted(p for p in path.rglob("*") if p.is_file()) for path in (one, two)]
    assert [p.read_bytes() for p in files[0]] == [p.read_bytes() for p in files[1]]


def test_bad_names_and_places(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean 'gpt2'"):
        ane.example("gpt", tmp_path / "a.mlpackage")
    with pytest.raises(LoadError, match="no example is made for iOS 12; say one of 16, 17, 18"):
        ane.example("tiny", tmp_path / "a.mlpackage", ios=12)
    (tmp_path / "there.mlpackage").mkdir()
    with pytest.raises(LoadError, match="exists"):
        ane.example("unet", tmp_path / "there.mlpackage")
    with pytest.raises(LoadError, match="let it end in .mlpackage"):
        ane.example("unet", tmp_path / "there.onnx")
    with pytest.raises(LoadError, match="let it end in .mlmodel"):
        ane.example("network", tmp_path / "there.mlpackage")


@pytest.mark.slow
def test_the_command_says_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(cli.app, ["example", "unet"])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "unet.mlpackage").is_dir()
    assert "next: anesurgery see unet.mlpackage --target iPhone12" in shown.output
