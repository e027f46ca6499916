"""Run Apple's Core AI runtime in a child process (`child.py`): `engine="coreai"`.

On Linux the runtime computes on the CPU, by code of its own: agreement with it shows that a
model means the same to Apple and to this library's interpreter, not what a Mac or a Neural Engine would
compute.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery.coreai import toolkit
from anesurgery.coreai.asset import SUFFIX, Asset
from anesurgery.coreai.child import ask
from anesurgery.coreai.translating import to_coreai
from anesurgery.errors import InterpretError, UnknownName
from anesurgery.files.package import Loaded
from anesurgery.interpret.predictor import bound
from anesurgery.interpret.state import States
from anesurgery.loading import load
from anesurgery.mil import Array, function_of, np_dtype

ONLY_INTERPRETED = {"precision": "fp32", "listener": None, "device": "cpu", "member": None}
"""Argument that only the interpreter takes -> its default."""


def run(
    path: str | os.PathLike[str],
    values: Mapping[str, Any],
    *,
    function: str | None = None,
    states: Mapping[str, Array] | None = None,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Run an `.aimodel` once on the CPU; return the outputs by name, and the states after the call.

    Inputs are converted to the dtypes that the model states. `main` or the first function runs when none is
    named, and states that are not given are zeros.

    Raises:
        LoadError: the folder is no model of Core AI, or is damaged; or Apple's package is not installed.
        InterpretError: the inputs do not fit, or the runtime fails, dies or takes too long.
    """
    asset = Asset.open(Path(path).expanduser())
    arrays = {f"input:{name}": np.asarray(value) for name, value in values.items()}
    arrays |= {f"state:{name}": np.asarray(value) for name, value in (states or {}).items()}
    _, results = ask("run", asset.path, {"function": function}, arrays)
    return toolkit.of_kind("output", results), toolkit.of_kind("state", results)


def cast_inputs(model: Loaded, values: Mapping[str, Any], function: str | None) -> dict[str, Array]:
    """Return inputs in the dtypes of a model: an fp32 input has digits that fp16 lacks."""
    inputs = function_of(model.program, function).inputs
    return {n: np.asarray(v).astype(np_dtype(inputs[n])) for n, v in bound(model, values, function).items()}


def run_model(
    model: Any,
    values: Mapping[str, Any],
    *,
    function: str | None = None,
    outputs: Iterable[str] | None = None,
    state: States | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Run `anesurgery.run` with Apple's runtime; a model that is no `.aimodel` is translated first.

    Raises:
        InterpretError: the runtime does not take an argument, or fails.
        LoadError: the model cannot be read.
        UnknownName: no such output.
    """
    asked = [name for name, value in others.items() if value != ONLY_INTERPRETED[name]]
    if asked:
        raise InterpretError(f"engine='coreai' runs the model as it is stored; leave {asked[0]}= out")
    held = {name: box.value.numpy() for name, box in (state or {}).items()}
    if isinstance(model, (str, os.PathLike)) and Path(model).suffix.lower() == SUFFIX:
        found, after = run(model, values, function=function, states=held or None)
    else:
        loaded = load(model)
        with tempfile.TemporaryDirectory(prefix="anesurgery-coreai-") as folder:
            written = to_coreai(loaded, Path(folder) / f"model{SUFFIX}", mode="check").path
            inputs = cast_inputs(loaded, values, function)
            found, after = run(written, inputs, function=function, states=held or None)
    names = list(found if outputs is None else outputs)
    if unknown := [name for name in names if name not in found]:
        raise UnknownName("output", unknown[0], found)
    for name, box in (state or {}).items():
        box.value = torch.from_numpy(after[name]).to(box.value.dtype)
    return {name: found[name] for name in names}
