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
GATE = 80.0
"""PSNR in dB that outputs must reach of what onnxruntime computes, both in fp32. One off by 1 % has less."""
SEEDS = 2
"""Sets of inputs that are drawn."""
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
    loaded, exact = (_converted(onnx2coreml, model, precision, path) for precision in ("fp16", "fp32"))
    judged = _judged(exact, session, path)
    notes = (f"converted from ONNX by onnx2coreml {onnx2coreml.__version__}, fp16, iOS 17; {judged}", *fixed)
    return replace(loaded, source=path.resolve(), notes=(*loaded.notes, *notes))


def _converted(onnx2coreml: Any, proto: Any, precision: str, path: Path) -> Loaded:
    """What onnx2coreml makes of a model.

    Raises:
        LoadError: an op is not converted.
    """
    out, errors = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())
    try:
        with quiet_host(), warnings.catch_warnings(), out, errors:
            warnings.simplefilter("ignore")
            how = {"minimum_deployment_target": "iOS17", "compute_precision": precision}
            made = onnx2coreml.convert(proto, **how)
    except Exception as error:
        raise LoadError(f"{path} was not converted by onnx2coreml: {_first(error)}") from error
    return load(mlmodel_of(lambda package: made.save(str(package))))


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
    """How near the outputs are to those of onnxruntime, in words; or that nothing could be compared.

    Raises:
        LoadError: they are others, by more than rounding; says which.
    """
    predictor, near = Predictor(loaded, precision="fp32"), list[float]()
    stored = {one.name for one in session.get_overridable_initializers()}
    asked = [one for one in session.get_inputs() if one.name not in stored]  # coremltools changes their names
    ends = len(asked), len(session.get_outputs())
    for values in map(predictor.sample, range(SEEDS)):
        results = predictor(values)
        if ends != (held := (len(values), len(results))):
            words = f"{ends[0]} inputs and {ends[1]} outputs became {held[0]} and {held[1]}"
            raise LoadError(f"{path}: the conversion cannot be compared with onnxruntime: {words}")
        given = {one.name: _as_asked(v, one.type) for one, v in zip(asked, values.values(), strict=True)}
        pairs = zip(session.get_outputs(), session.run(None, given), results.values(), strict=True)
        for told, wanted, found in pairs:
            near += _near(path, told.name, np.asarray(wanted), np.asarray(found))
    if not near:
        return "not compared with onnxruntime, which computes no finite number on drawn inputs"
    return f"its outputs in fp32 are those of onnxruntime on drawn inputs ({in_decibels(min(near))})"


def _near(path: Path, name: str, wanted: Array, found: Array) -> list[float]:
    """The dB of one output; none where nothing of it is finite.

    Raises:
        LoadError: it is another one.
    """
    if wanted.shape != found.shape:
        _refuse(path, name, f"has the shape {found.shape}, not {wanted.shape}")
    if wanted.dtype.kind != "f":
        if np.mean(wanted == found) < SAME:
            _refuse(path, name, f"has {np.mean(wanted != found):.0%} other numbers than onnxruntime computes")
        return [np.inf]
    if not np.isfinite(wanted).any():
        return []
    decibels = nearness({"": wanted}, {"": found})
    if decibels < GATE:
        _refuse(path, name, f"comes to {in_decibels(decibels)} of what onnxruntime computes")
    return [decibels]


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
