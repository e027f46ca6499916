"""A Swift package for a folder that was built, or for a plain model, with a test of what the interpreter gives.

The Swift is the same for every model. It was parsed here and its calls were checked against a list of Core
ML's, and never compiled: there is no Swift compiler on the machines that test this library.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.files.runner_file import read_runner
from anesurgery.files.writing import check_place, write_atomically
from anesurgery.interpret.decoding import Decoder, stream
from anesurgery.interpret.predictor import Predictor
from anesurgery.mil import Array, Var, dtype_name, types

SOURCES = Path(__file__).parent / "swift"
FIXTURE = Path("Tests") / "RunnerTests" / "fixture.json"
PROMPT, STEPS = 5, 16
"""Tokens of the fixture: of its prompt, and those that are written."""
MOST = 1 << 20
"""Numbers of a fixture: more make a file of text that nobody wants."""


@door()
def swift(
    folder: str | os.PathLike[str], to: str | os.PathLike[str], *, overwrite: bool = False, seed: int = 0
) -> Path:
    """Write a Swift package with a runner for a folder that `build` made, or for the package of a plain model.

    For a folder it loads the chunks, keeps their states, reads prompts by `prefill`, writes by `decode`, and
    gives tokens as they are chosen; a plain model takes and gives arrays by name. Its test compares with what
    the interpreter gives here.

    Args:
        folder: with a `runner.json`; or an .mlpackage of arrays.
        to: the folder to make.
        overwrite: may what is there be replaced?
        seed: of the sampled prompt or inputs of the test.

    Returns:
        The package.

    Raises:
        LoadError: the folder was not built, or `to` exists or cannot be written.
        SurgeryError: a plain model keeps states, takes or gives something else than arrays, or is too large.
    """
    source, place = (Path(given).expanduser().absolute() for given in (folder, to))
    check_place(place, overwrite, source)
    fixture = _arrays(source, seed) if source.suffix == ".mlpackage" else _tokens(source, seed)

    def write(package: Path) -> None:
        shutil.copytree(SOURCES, package)
        whole = {"prompt": [], "written": [], "inputs": {}, "outputs": {}} | fixture
        (package / FIXTURE).write_text(json.dumps(whole) + "\n", encoding="utf-8")

    return write_atomically(place, write, overwrite)


def _tokens(source: Path, seed: int) -> dict[str, Any]:
    """A prompt, and what is written after it."""
    runner = read_runner(source)
    runner.check(source)
    decoder = Decoder(source)
    told = runner.functions["decode"]["outputs"][runner.logits]["shape"][-1]
    words = decoder.vocabulary if runner.values else min(decoder.vocabulary, told)
    prompt = np.random.default_rng(seed).integers(0, words, min(PROMPT, runner.context - 1)).tolist()
    steps = min(STEPS, runner.context - len(prompt))
    return {"prompt": prompt, "written": list(stream(decoder, prompt, steps, stop=runner.ends or None))}


def _arrays(source: Path, seed: int) -> dict[str, Any]:
    """Sampled inputs, and the outputs.

    Raises:
        SurgeryError: the model keeps states, takes or gives something else than arrays, or is too large.
    """
    predictor = Predictor(source)
    ports, outputs = predictor.ports
    if states := [name for name, var in ports.items() if types.is_state(var.sym_type)]:
        raise SurgeryError(
            f"{source} keeps the state {states[0]}; a folder of `anesurgery build` says how it is run"
        )
    inputs = predictor.sample(seed)
    results = predictor(inputs)
    for name, value in (*inputs.items(), *results.items()):
        if not isinstance(value, np.ndarray):
            raise SurgeryError(
                f"{source}: {name} is a {type(value).__name__} and no array; the test compares arrays"
            )
    if (count := sum(a.size for a in (*inputs.values(), *results.values()))) > MOST:
        raise SurgeryError(f"{source} takes and gives {count:,} numbers, more than the {MOST:,} of a fixture")
    return {
        "inputs": {name: _numbers(ports[name], array) for name, array in inputs.items()},
        "outputs": {name: _numbers(outputs[name], array) for name, array in results.items()},
    }


def _numbers(port: Var, array: Array) -> dict[str, Any]:
    """An array as the Swift side reads it."""
    return {"shape": list(array.shape), "dtype": dtype_name(port), "values": array.ravel().tolist()}
