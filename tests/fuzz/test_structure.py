"""Models of a wrong structure: an error in words, within bounds of time and memory, and nothing is changed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import structural
from structure import ANY, MUTATIONS, NETWORK, PIPELINE, PROGRAM, tried

from anesurgery.files.package import read_spec

FEW = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = structural.sources(tmp_path_factory.mktemp("models"))
    structural.warm(made[0])
    return made


def check(models: list[Path], first: int, count: int) -> int:
    """How many of some cases were refused in words."""
    said = {case: structural.run_case(models, 0, case) for case in range(first, first + count)}
    raw = {case: (words["done"], *words["raw"]) for case, words in said.items() if words["raw"]}
    assert not raw, "\n".join(f"case {case}: {' '.join(words)}" for case, words in raw.items())
    return sum(bool(words["refused"]) for words in said.values())


@pytest.mark.slow
def test_a_few_wrong_structures(models: list[Path]) -> None:
    assert check(models, 0, FEW) > FEW / 3, "most are noticed"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FEW, 620, 100))
def test_hundreds_of_wrong_structures(models: list[Path], first: int) -> None:
    assert check(models, first, 100) > 33, "most are noticed"


def test_a_case_is_the_same_again(models: list[Path], tmp_path: Path) -> None:
    def mutant(name: str) -> tuple[str, bytes]:
        (tmp_path / name).mkdir()
        target, _, done = structural.mutated(models[0], tmp_path / name, structural.generator(0, 3))
        return done, structural.place(target).read_bytes()

    assert mutant("one") == mutant("two")


@pytest.mark.parametrize("mutation", [*PROGRAM, *NETWORK, *PIPELINE, *ANY], ids=lambda m: m.__name__)
def test_each_mutation_changes_a_model(models: list[Path], mutation: Any) -> None:
    """One that never fits would test nothing."""
    for number in range(60):
        spec = read_spec(structural.place(models[number % len(models)]))
        before = spec.SerializeToString(deterministic=True)
        if mutation not in MUTATIONS[spec.WhichOneof("Type")]:
            continue
        done = tried(mutation, structural.generator(0, number), spec)
        if done and spec.SerializeToString(deterministic=True) != before:
            return
    raise AssertionError(f"{mutation.__name__} changed no model")


def errs() -> None:
    raise KeyError("no words")


def hangs() -> None:
    while True:
        pass


def fills_memory() -> None:
    bytearray(2 * structural.MEMORY)


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (errs, "draw: KeyError: 'no words'"),
        (hangs, "the process took more than 1 s"),
        (fills_memory, "draw: MemoryError"),
        (dies, "the process ended with -9"),
    ],
)
def test_what_is_planted_is_noticed(
    models: list[Path], monkeypatch: pytest.MonkeyPatch, planted: Any, words: str
) -> None:
    """A fuzzer that sees no error of somebody else, no hang and no memory without bounds is worth nothing."""
    monkeypatch.setattr(structural, "SECONDS", 1)
    monkeypatch.setattr(structural, "uses", lambda *given: [("draw", planted)])
    assert any(words in raw for raw in structural.run_case(models, 0, 0)["raw"])


def test_a_model_that_is_changed_is_noticed(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Path, *given: Any) -> Any:
        yield "draw", lambda: (model / "Manifest.json").write_text("{}")

    monkeypatch.setattr(structural, "uses", change)
    assert "the model was changed" in structural.run_case(models, 0, 0)["raw"]
