"""Write a Swift package that runs a model from `build` or `sizes`, or a plain .mlpackage (`anesurgery swift`).

The Swift sources are the same for every model. The package's own test replays a fixture: inputs and the outputs
that this library's interpreter computed for them. The sources were parsed here and their calls checked against
a list of Core ML's, but never compiled: the machines that test this library have no Swift compiler.
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
"""Tokens of the fixture's prompt, and tokens that are generated after it."""
MAX_NUMBERS = 1 << 20
"""The most numbers in a fixture, which is a text file: a million take some 10 MB."""


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
        SurgeryError: a model without a `runner.json` has states, has inputs or outputs that are no arrays or
            not finite, or is too large for a test.
    """
    source, place = (Path(given).expanduser().absolute() for given in (folder, to))
    check_place(place, overwrite, source)
    takes_arrays = source.suffix == ".mlpackage" or is_sized(source)
    fixture: dict[str, Any] = (
        {"calls": _call_fixture(source, seed)} if takes_arrays else _token_fixture(source, seed)
    )

    def write(package: Path) -> None:
        shutil.copytree(SOURCES, package)
        content = {"prompt": [], "written": [], "calls": []} | fixture
        (package / FIXTURE).write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")

    return write_atomically(place, write, overwrite)


def _token_fixture(source: Path, seed: int) -> dict[str, Any]:
    """Return a random prompt, and the tokens that the interpreter generates after it.

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
    logit_count = runner.functions["decode"]["outputs"][runner.logits]["shape"][-1]
    vocabulary = decoder.vocabulary if runner.values else min(decoder.vocabulary, logit_count)
    prompt = np.random.default_rng(seed).integers(0, vocabulary, min(PROMPT, runner.context - 1)).tolist()
    steps = min(STEPS, runner.context - len(prompt))
    return {"prompt": prompt, "written": list(stream(decoder, prompt, steps, stop=runner.ends or None))}


def _call_fixture(source: Path, seed: int) -> list[dict[str, Any]]:
    """Return sampled inputs with their outputs: one call, or as many sizes as a fixture may hold.

    Raises:
        SurgeryError: the model keeps states, takes or gives something else than finite arrays, or is too large.
    """
    calls, numbers_left = list[dict[str, Any]](), MAX_NUMBERS
    for predictor, inputs, results in _fixture_runs(source, seed):
        ports, outputs = predictor.ports
        _check_arrays(source, ports, {**inputs, **results})
        count = sum(a.size for a in (*inputs.values(), *results.values()))
        if count > numbers_left and not calls:
            raise SurgeryError(
                f"{source} takes and gives {count:,} numbers, more than the {MAX_NUMBERS:,} of a fixture"
            )
        if count > numbers_left:
            break
        numbers_left -= count
        calls.append(
            {
                "inputs": {name: _array_json(ports[name], array) for name, array in inputs.items()},
                "outputs": {name: _array_json(outputs[name], array) for name, array in results.items()},
            }
        )
    return calls


def _fixture_runs(source: Path, seed: int) -> Iterator[tuple[Predictor, dict[str, Any], dict[str, Any]]]:
    """Yield (predictor, inputs, outputs) of each size, and of inputs that are padded up to it."""
    if not is_sized(source):
        predictor = Predictor(source)
        inputs = predictor.sample(seed)
        yield predictor, inputs, predictor(inputs)
        return
    rows, padding = read_sizes(source)
    for row in rows:
        predictor = Predictor(source / row.package, function=row.function)
        inputs = _with_open_masks(predictor.sample(seed), padding)
        yield predictor, inputs, predictor(inputs)
        if (shorter := _shortened(inputs, padding)) is not None:
            yield predictor, shorter, run(source, shorter)


def _with_open_masks(inputs: dict[str, Any], padding: Padding) -> dict[str, Any]:
    """Return the inputs with each mask set to hide nothing."""
    masks = {
        name: 1 if padded.fill.get(name, 0) == 0 else 0
        for padded in padding.by_length
        for name in padded.hiding
    }
    return inputs | {name: np.full_like(inputs[name], visible) for name, visible in masks.items()}


def _shortened(inputs: dict[str, Any], padding: Padding) -> dict[str, Any] | None:
    """Return shorter inputs, which the runner must pad; None where it may not pad."""
    shorter = dict(inputs)
    for padded in padding.by_length:
        for name, axis in padded.inputs.items():
            length = shorter[name].shape[axis] - padded.multiple
            if length < 1 or length % padded.multiple:
                return None
            shorter[name] = shorter[name][(slice(None),) * axis + (slice(length),)]
    return shorter if padding.by_length else None


def _check_arrays(source: Path, ports: Mapping[str, Var], values: Mapping[str, Any]) -> None:
    """Check that a model has only arrays of finite numbers as inputs and outputs."""
    if states := [name for name, var in ports.items() if types.is_state(var.sym_type)]:
        raise SurgeryError(
            f"{source} keeps the state {states[0]}; a folder of `anesurgery build` says how it is run"
        )
    for name, value in values.items():
        if not isinstance(value, np.ndarray):
            raise SurgeryError(
                f"{source}: {name} is a {type(value).__name__} and no array; the test compares arrays"
            )
        if not np.isfinite(value).all():
            raise SurgeryError(
                f"{source}: on the sampled inputs {name} holds NaN or infinity, which the test cannot read; "
                "try another seed"
            )


def _array_json(port: Var, array: Array) -> dict[str, Any]:
    """Return an array in the form that the Swift test reads."""
    return {"shape": list(array.shape), "dtype": dtype_name(port), "values": array.ravel().tolist()}
