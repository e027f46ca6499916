"""A Swift package for what `build` or `sizes` made or a plain model, tested by what the interpreter gives.

The Swift is the same for every model. It was parsed here and its calls were checked against a list of Core
ML's, and never compiled: there is no Swift compiler on the machines that test this library.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.doors import door
from anesurgery.errors import LoadError, SurgeryError
from anesurgery.files.runner_file import is_built, read_runner
from anesurgery.files.size_index import Padding, is_sized
from anesurgery.files.size_index import read as read_sizes
from anesurgery.files.writing import check_place, write_atomically
from anesurgery.interpret.decoding import Decoder, stream
from anesurgery.interpret.predictor import Predictor, run
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
    """Write a Swift package with a runner for a folder that `build` or `sizes` made, or for a plain model.

    For a built folder it loads the chunks, keeps their states, and yields tokens. For a folder of sizes it
    picks the size, pads the inputs and crops the outputs. A plain model takes and returns arrays. The test of
    the package compares with the interpreter.

    Args:
        folder: with a `runner.json` or a `sizes.json`; or an .mlpackage of arrays.
        to: the folder to make.
        overwrite: may what is there be replaced?
        seed: of the sampled prompt or inputs of the test.

    Returns:
        The package.

    Raises:
        LoadError: the folder was not built, or `to` exists or cannot be written.
        SurgeryError: a model without a `runner.json` has states, has inputs or outputs that are not arrays, or
            is too large for a test.
    """
    source, place = (Path(given).expanduser().absolute() for given in (folder, to))
    check_place(place, overwrite, source)
    of_arrays = source.suffix == ".mlpackage" or is_sized(source)
    fixture: dict[str, Any] = {"calls": _calls(source, seed)} if of_arrays else _tokens(source, seed)

    def write(package: Path) -> None:
        shutil.copytree(SOURCES, package)
        whole = {"prompt": [], "written": [], "calls": []} | fixture
        (package / FIXTURE).write_text(json.dumps(whole) + "\n", encoding="utf-8")

    return write_atomically(place, write, overwrite)


def _tokens(source: Path, seed: int) -> dict[str, Any]:
    """A prompt, and what is written after it.

    Raises:
        LoadError: neither `build` nor `sizes` made the folder.
    """
    if not is_built(source):
        raise LoadError(
            f"{source} holds no runner.json and no sizes.json; `anesurgery build` and `anesurgery sizes` make "
            "such folders, and an .mlpackage of arrays is taken too"
        )
    runner = read_runner(source)
    runner.check(source)
    decoder = Decoder(source / runner.in_format("coreml"))
    told = runner.functions["decode"]["outputs"][runner.logits]["shape"][-1]
    words = decoder.vocabulary if runner.values else min(decoder.vocabulary, told)
    prompt = np.random.default_rng(seed).integers(0, words, min(PROMPT, runner.context - 1)).tolist()
    steps = min(STEPS, runner.context - len(prompt))
    return {"prompt": prompt, "written": list(stream(decoder, prompt, steps, stop=runner.ends or None))}


def _calls(source: Path, seed: int) -> list[dict[str, Any]]:
    """Sampled inputs, and the outputs; of a folder of sizes as many calls as a fixture may hold.

    Raises:
        SurgeryError: the model keeps states, takes or gives something else than arrays, or is too large.
    """
    calls, room = list[dict[str, Any]](), MOST
    for predictor, inputs, results in _runs(source, seed):
        ports, outputs = predictor.ports
        _check_arrays(source, ports, {**inputs, **results})
        count = sum(a.size for a in (*inputs.values(), *results.values()))
        if count > room and not calls:
            raise SurgeryError(
                f"{source} takes and gives {count:,} numbers, more than the {MOST:,} of a fixture"
            )
        if count > room:
            break
        room -= count
        calls.append(
            {
                "inputs": {name: _numbers(ports[name], array) for name, array in inputs.items()},
                "outputs": {name: _numbers(outputs[name], array) for name, array in results.items()},
            }
        )
    return calls


def _runs(source: Path, seed: int) -> Iterator[tuple[Predictor, dict[str, Any], dict[str, Any]]]:
    """What is run, what is given to it and what it gives: each size, and what is filled up to it."""
    if not is_sized(source):
        predictor = Predictor(source)
        inputs = predictor.sample(seed)
        yield predictor, inputs, predictor(inputs)
        return
    rows, padding = read_sizes(source)
    for row in rows:
        predictor = Predictor(source / row.package, function=row.function)
        inputs = _seen(predictor.sample(seed), padding)
        yield predictor, inputs, predictor(inputs)
        if (shorter := _shorter(inputs, padding)) is not None:
            yield predictor, shorter, run(source, shorter)


def _seen(inputs: dict[str, Any], padding: Padding) -> dict[str, Any]:
    """The inputs; masks hide nothing."""
    masks = {name: 1 if one.fill.get(name, 0) == 0 else 0 for one in padding.by_length for name in one.hiding}
    return inputs | {name: np.full_like(inputs[name], seen) for name, seen in masks.items()}


def _shorter(inputs: dict[str, Any], padding: Padding) -> dict[str, Any] | None:
    """The inputs without their last places, which are filled up again; None where that may not be."""
    shorter = dict(inputs)
    for one in padding.by_length:
        for name, axis in one.inputs.items():
            length = shorter[name].shape[axis] - one.multiple
            if length < 1 or length % one.multiple:
                return None
            shorter[name] = shorter[name][(slice(None),) * axis + (slice(length),)]
    return shorter if padding.by_length else None


def _check_arrays(source: Path, ports: Mapping[str, Var], values: Mapping[str, Any]) -> None:
    """See that a model takes and gives arrays alone.

    Raises:
        SurgeryError: it keeps states, takes or gives something else.
    """
    if states := [name for name, var in ports.items() if types.is_state(var.sym_type)]:
        raise SurgeryError(
            f"{source} keeps the state {states[0]}; a folder of `anesurgery build` says how it is run"
        )
    for name, value in values.items():
        if not isinstance(value, np.ndarray):
            raise SurgeryError(
                f"{source}: {name} is a {type(value).__name__} and no array; the test compares arrays"
            )


def _numbers(port: Var, array: Array) -> dict[str, Any]:
    """An array as the Swift side reads it."""
    return {"shape": list(array.shape), "dtype": dtype_name(port), "values": array.ravel().tolist()}
