"""Run Apple's Core AI runtime in a child process: `engine="coreai"`. Reading an `.aimodel` uses the same child.

The runtime ends its process on an integer division by 0, on a damaged program, and more; in a child that
becomes an error in words. On Linux it computes on the CPU, by code of its own: agreement with it shows that a
model means the same to Apple and to this library's interpreter, not what a Mac or a Neural Engine would
compute.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery.coreai import toolkit
from anesurgery.coreai.asset import SUFFIX, Asset
from anesurgery.coreai.child import ANSWER, ARRAYS, QUESTION, read_arrays, write_arrays
from anesurgery.coreai.translating import to_coreai
from anesurgery.errors import InterpretError, LoadError, UnknownName
from anesurgery.files.package import Loaded
from anesurgery.interpret.predictor import bound
from anesurgery.interpret.state import States
from anesurgery.loading import load
from anesurgery.mil import Array, function_of, np_dtype

PATIENCE = 600.0
"""Seconds that the child may take: 20 times what the slowest of 39 published packages took."""
DEADLY = {
    signal.SIGILL: "an operation that it does not define, such as an integer divided by 0",
    signal.SIGSEGV: "a program that it reads wrongly",
    signal.SIGABRT: "a program that contradicts itself",
    signal.SIGKILL: "too little memory, or somebody who ended it",
}
"""Signal that ends the child -> the cause that was seen."""
ONLY_INTERPRETED = {"precision": "fp32", "listener": None, "device": "cpu", "member": None}
"""Argument that only the interpreter takes -> its default."""


def ask(
    task: str, path: Path, options: Mapping[str, Any], arrays: Mapping[str, Array] | None = None
) -> tuple[Any, dict[str, Array]]:
    """Run one task in a child process, and return its answer.

    Args:
        task: "run" or "read".
        path: an `.aimodel` folder that was checked.
        options: options of the task, as JSON takes them.
        arrays: arrays for the task, by name.

    Returns:
        The answer as plain data, and the arrays that came with it.

    Raises:
        LoadError: Apple's package is not installed, or the child cannot read the model.
        InterpretError: the child cannot run the model, takes too long or dies.
    """
    toolkit.require()
    with tempfile.TemporaryDirectory(prefix="anesurgery-coreai-") as folder:
        place = Path(folder)
        (place / QUESTION).write_text(json.dumps({"task": task, "path": str(path.resolve()), **options}))
        write_arrays(place / ARRAYS, arrays or {})
        last_line = _run_child(path, place)
        answer = place / ANSWER
        if not answer.is_file():
            raise InterpretError(f"{path}: Apple's runtime ended without an answer: {last_line}")
        content = json.loads(answer.read_text())
        if words := content.get("error"):
            kind = LoadError if task == "read" else InterpretError
            raise kind(f"{path}: Apple's runtime refuses it: {words}")
        return content["answer"], read_arrays(place / ARRAYS)


def _run_child(path: Path, place: Path) -> str:
    """Run the child, and return the last line that it printed."""
    command = [sys.executable, "-m", "anesurgery.coreai.child", str(place)]
    root = str(Path(__file__).resolve().parents[2])
    python_path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            check=False,
            env={**os.environ, "PYTHONPATH": python_path},
        )
    except subprocess.TimeoutExpired as error:
        raise InterpretError(
            f"{path}: Apple's runtime was stopped after {PATIENCE:g} s; give smaller inputs, or raise "
            f"{__name__}.PATIENCE"
        ) from error
    if process.returncode < 0:
        number = -process.returncode
        name = {s.value: s.name for s in signal.Signals}.get(number, f"signal {number}")
        why = {s.value: words for s, words in DEADLY.items()}.get(number, "not known here")
        raise InterpretError(f"{path}: Apple's runtime died ({name}). The likely cause is {why}")
    return (process.stderr.strip().splitlines() or ["nothing was printed"])[-1][:300]


def run(
    path: str | os.PathLike[str],
    values: Mapping[str, Any],
    *,
    function: str | None = None,
    states: Mapping[str, Array] | None = None,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Run a model once with Apple's runtime, on the CPU.

    Args:
        path: an `.aimodel` folder.
        values: inputs by name; converted to the dtypes that the model states.
        function: the function to run; `main` or the first when absent.
        states: contents of the states before the call, by name; zeros when absent.

    Returns:
        The outputs by name, and the states after the call.

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
    """Return inputs in the dtypes of a model: in fp32, a program would read digits that fp16 has not."""
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
    """Run `anesurgery.run` with Apple's runtime.

    Args:
        model: path of an `.aimodel`, or any other model, which is translated first.
        values: inputs by name.
        function: the function to run; `main` or the first when absent.
        outputs: names of outputs; all when absent.
        state: the states, which are updated.
        others: arguments that only the interpreter takes.

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
            found, after = run(
                written, cast_inputs(loaded, values, function), function=function, states=held or None
            )
    for name, box in (state or {}).items():
        box.value = torch.from_numpy(after[name]).to(box.value.dtype)
    names = list(found if outputs is None else outputs)
    if unknown := [name for name in names if name not in found]:
        raise UnknownName("output", unknown[0], found)
    return {name: found[name] for name in names}
