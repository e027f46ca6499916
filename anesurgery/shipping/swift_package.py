"""A Swift package for a folder that was built: a runner that reads `runner.json`, and a test of what it writes.

The Swift is the same for every model. It was parsed here and its calls were checked against a list of Core
ML's, and never compiled: there is no Swift compiler on the machines that test this library.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np

from anesurgery.doors import door
from anesurgery.files.runner_file import read_runner
from anesurgery.files.writing import check_place, write_atomically
from anesurgery.interpret.decoding import Decoder, stream

SOURCES = Path(__file__).parent / "swift"
FIXTURE = Path("Tests") / "RunnerTests" / "fixture.json"
PROMPT, STEPS = 5, 16
"""Tokens of the fixture: of its prompt, and those that are written."""


@door()
def swift(
    folder: str | os.PathLike[str], to: str | os.PathLike[str], *, overwrite: bool = False, seed: int = 0
) -> Path:
    """Write a Swift package with a runner for a folder that `build` made.

    The package loads the chunks of the folder, keeps their states, reads prompts by `prefill`, writes by
    `decode`, and gives tokens as they are chosen. Its test compares with what the interpreter writes here.

    Args:
        folder: with a `runner.json`.
        to: the folder to make.
        overwrite: may what is there be replaced?
        seed: of the sampled prompt of the test.

    Returns:
        The package.

    Raises:
        LoadError: the folder was not built, or `to` exists or cannot be written.
    """
    source, place = (Path(given).expanduser().absolute() for given in (folder, to))
    runner = read_runner(source)
    runner.check(source)
    check_place(place, overwrite, source)
    decoder = Decoder(source)
    words = min(decoder.vocabulary, next(iter(_words(runner.functions["decode"], runner.logits))))
    prompt = np.random.default_rng(seed).integers(0, words, min(PROMPT, runner.context - 1)).tolist()
    steps = min(STEPS, runner.context - len(prompt))
    fixture = {"prompt": prompt, "written": list(stream(decoder, prompt, steps, stop=runner.ends or None))}

    def write(made: Path) -> None:
        shutil.copytree(SOURCES, made)
        (made / FIXTURE).write_text(json.dumps(fixture) + "\n", encoding="utf-8")

    return write_atomically(place, write, overwrite)


def _words(function: dict[str, dict[str, dict[str, list[int]]]], logits: str) -> list[int]:
    """How many tokens the logits of a function tell apart."""
    return [function["outputs"][logits]["shape"][-1]]
