"""An ONNX model as an ML Program: the package onnx2coreml converts it, and onnxruntime judges what came out."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.checking.exactness import nearness
from anesurgery.errors import LoadError
from anesurgery.files.package import Loaded, mlmodel_of
from anesurgery.interpret.predictor import Predictor
from anesurgery.loading import load
from anesurgery.mil import Array, exclusive, quiet_host
from anesurgery.semantics.reading import in_decibels

INSTALL = "reading ONNX takes onnx2coreml and onnxruntime: pip install 'anesurgery[onnx]', from Python 3.11 on"
GATE = 40.0
"""PSNR in dB that outputs in fp32 must reach of what onnxruntime computes: weights are rounded to fp16."""
SAME = 0.99
"""The share of integers that must be equal: a number that is rounded may choose another one."""


@exclusive()
def read(path: Path) -> Loaded:
    """Convert an ONNX file to fp16 for iOS 17, and compare it with onnxruntime on drawn inputs.

    Args:
        path: of the file; weights may lie beside it. Dynamic sizes of a first axis count as 1.

    Raises:
        LoadError: the extra is not installed; the file is damaged, or has other dynamic sizes; an op is not
            converted; or the outputs are others than those of onnxruntime, by more than rounding.
    """
    try:
        import onnx
        import onnx2coreml
        import onnxruntime
    except ImportError as error:
        raise LoadError(f"{path}: {INSTALL}") from error
    if not path.is_file():
        raise LoadError(f"{path} does not exist; check the path")
    try:
        model = onnx.load(str(path))
        session = _session(onnxruntime, path)
    except Exception as error:  # both raise what they like
        raise LoadError(f"{path} is damaged, or no ONNX model: {_first(error)}") from error
    fixed = _with_fixed_sizes(model, path)
    try:
        with (
            quiet_host(),
            warnings.catch_warnings(),
            redirect_stderr(io.StringIO()),
            redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            made = onnx2coreml.convert(model, minimum_deployment_target="iOS17")
    except Exception as error:
        raise LoadError(f"{path} was not converted by onnx2coreml: {_first(error)}") from error
    loaded = load(mlmodel_of(lambda package: made.save(str(package))))
    judged = _judged(loaded, session, path)
    notes = (f"converted from ONNX by onnx2coreml {onnx2coreml.__version__}, fp16, iOS 17; {judged}", *fixed)
    return replace(loaded, source=path.resolve(), notes=(*loaded.notes, *notes))


def _session(onnxruntime: Any, path: Path) -> Any:
    """What runs the file, on the CPU and without a word."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _with_fixed_sizes(proto: Any, path: Path) -> list[str]:
    """Make dynamic first axes of inputs 1, in place.

    Returns:
        A note for each of them.

    Raises:
        LoadError: another axis of an input is dynamic.
    """
    stored, notes = {one.name for one in proto.graph.initializer}, list[str]()
    for value in proto.graph.input:
        sizes = value.type.tensor_type.shape.dim if value.name not in stored else ()
        for axis, size in enumerate(sizes):
            if size.dim_value > 0:
                continue
            if axis:
                words = f"axis {axis} of the input {value.name} is dynamic ({size.dim_param or 'not known'})"
                cure = "fix it with onnxruntime.tools.make_dynamic_shape_fixed"
                raise LoadError(f"{path}: {words}, and onnx2coreml takes fixed sizes only; {cure}")
            size.dim_value = 1
            notes.append(f"the dynamic first axis of {value.name} counts as 1")
    return notes


def _judged(loaded: Loaded, session: Any, path: Path) -> str:
    """How near the outputs are, in words.

    Raises:
        LoadError: they are others, by more than rounding; says which.
    """
    predictor = Predictor(loaded, precision="fp32")
    values = predictor.sample(0)
    stored = {one.name for one in session.get_overridable_initializers()}
    asked = [one for one in session.get_inputs() if one.name not in stored]  # coremltools changes their names
    given = {one.name: _as_asked(v, one.type) for one, v in zip(asked, values.values(), strict=True)}
    wanted, found = session.run(None, given), list(predictor(values).values())
    near = np.inf
    for told, old, new in zip(session.get_outputs(), wanted, found, strict=True):
        old, new = np.asarray(old), np.asarray(new)
        if old.shape != new.shape:
            _refuse(path, told.name, f"has the shape {new.shape}, not {old.shape}")
        if old.dtype.kind == "f":
            decibels = nearness({"": old}, {"": new})
            if decibels < GATE:
                _refuse(path, told.name, f"comes to {in_decibels(decibels)} of what onnxruntime computes")
            near = min(near, decibels)
        elif np.mean(old == new) < SAME:
            _refuse(path, told.name, f"has {np.mean(old != new):.0%} other numbers than onnxruntime computes")
    return f"outputs {in_decibels(float(near))} of those of onnxruntime, on drawn inputs"


def _refuse(path: Path, name: str, words: str) -> None:
    cure = "convert the PyTorch or TensorFlow model that it was made of"
    raise LoadError(f"{path}: onnx2coreml converts it wrongly: the output {name} {words}; {cure}")


KINDS = {
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}


def _as_asked(value: Array, kind: str) -> Array:
    """Numbers of an input of Core ML in the type that onnxruntime takes."""
    return value.astype(KINDS.get(kind, np.int32 if "int" in kind else np.float32))


def _first(error: Exception) -> str:
    """What an error says, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:2]) or type(error).__name__
