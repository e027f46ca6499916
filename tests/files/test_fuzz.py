"""Files that are damaged at random: an error in words, never a crash, a hang or an error of somebody else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import fuzzing
import pytest
from children import run_child
from compiled_models import compile_package

SUPPORT = Path(fuzzing.__file__).parent
MODELS = [
    "silero_unified.mlpackage",
    "silero_unified_palette_4bit.mlpackage",
    "dtln_aec_128_part1_fp16.mlpackage",
    "anemll_multifunction.mlpackage",
    "blazeface_scaled.mlmodel",
    "custom_swish_mcneural.mlmodel",
    "exermote.mlmodel",
    "mlt_es2en_char_decoder16.mlmodel",
    "silero_unified.mlmodelc",
    "fluid_argmax.mlmodelc",
]
"""Real models, for the long run."""
COMPILED = ["fluid_argmax.mlmodelc", "silero_unified.mlmodelc", "silero_unified_palette_4bit.mlmodelc"]
"""Models that Apple's compiler compiled."""


def fuzz(models: list[Path], folder: Path, first: int, count: int) -> dict[int, str]:
    """What was said of each damaged file that cannot be loaded, by seed."""
    command = [sys.executable, fuzzing.__file__, str(folder), str(first), str(count), *map(str, models)]
    done = run_child(
        command, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    raw = [line for line in lines if "raw" in line]
    assert not raw, "\n".join(f"seed {line['seed']}: {line['raw']}\n{line['trace']}" for line in raw)
    assert done.returncode == 0, f"ended with {done.returncode} after {lines[-1:]}\n{done.stderr[-2000:]}"
    assert {line["seed"] for line in lines} == set(range(first, first + count))
    return {line["seed"]: line["error"] for line in lines if "error" in line}


@pytest.mark.slow
def test_the_models_are_whole_before(tmp_path: Path) -> None:
    for model in fuzzing.models(tmp_path):
        for _, use in fuzzing.uses(model, tmp_path):
            use()


@pytest.mark.slow
def test_forty_damaged_files(tmp_path: Path) -> None:
    said = fuzz(fuzzing.models(tmp_path), tmp_path, 0, 40)
    assert len(said) > 12, "most damage is noticed"
    assert all("\n" not in words and len(words) < 2000 for words in said.values())


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 4000, 500))
def test_thousands_of_damaged_files(tmp_path: Path, first: int) -> None:
    fuzz(fuzzing.models(tmp_path), tmp_path, first, 500)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 11_000, 250))
def test_damaged_files_of_real_models(corpus: Path, tmp_path: Path, first: int) -> None:
    fuzz([corpus / name for name in MODELS], tmp_path, first, 250)


def compiled(corpus: Path, folder: Path) -> list[Path]:
    """Compiled models: those of the corpus, and texts with weights, states, loops and branches."""
    found = [corpus / name for name in COMPILED]
    for package in fuzzing.models(folder)[:3]:
        found.append(compile_package(package, package.with_suffix(".mlmodelc")))
    return found


@pytest.mark.slow
def test_ten_damaged_compiled_models(corpus: Path, tmp_path: Path) -> None:
    said = fuzz(compiled(corpus, tmp_path), tmp_path, 0, 10)
    assert len(said) > 3, "most damage is noticed"
    assert all(len(words) < 2000 for words in said.values())


@pytest.mark.slow
@pytest.mark.parametrize("first", [20_000, 20_150])
def test_damaged_compiled_models(corpus: Path, tmp_path: Path, first: int) -> None:
    fuzz(compiled(corpus, tmp_path), tmp_path, first, 150)


@pytest.mark.slow
def test_the_fuzzer_notices_an_error_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that lets an error through is what this is for."""
    (tmp_path / "sitecustomize.py").write_text(
        "import anesurgery.files.package as p\n"
        "def raw(*given): raise KeyError('no words')\n"
        "p.locate = raw\nimport anesurgery.loading\nanesurgery.loading.locate = raw\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AssertionError, match="seed 0: load: KeyError: 'no words'"):
        fuzz([fuzzing.models(tmp_path)[0]], tmp_path, 0, 1)
