"""Read an ONNX model: onnx2coreml converts it, and the result is compared with onnxruntime.

`load` calls `read` for a path that ends in .onnx. Neither package is a dependency; both come with the extra
`anesurgery[onnx]`.
"""

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
"""Lowest accepted PSNR in dB beside onnxruntime, both in fp32. An output that is off by 1 % has about 40 dB."""
SEEDS = 2
"""How many sets of random inputs are compared."""
SAME = 0.99
"""Share of integers that must be equal: an argmax may choose another entry where two are nearly equal."""


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
        raise LoadError(f"{path} is damaged, or no ONNX model: {_first_lines(error)}") from error
    fixed = _with_fixed_sizes(model, path)
    loaded, exact = (_convert(onnx2coreml, model, precision, path) for precision in ("fp16", "fp32"))
    comparison = _compare_with_onnxruntime(exact, session, path)
    notes = (
        f"converted from ONNX by onnx2coreml {onnx2coreml.__version__}, fp16, iOS 17; {comparison}",
        *fixed,
    )
    return replace(loaded, source=path.resolve(), notes=(*loaded.notes, *notes))


def _convert(onnx2coreml: Any, proto: Any, precision: str, path: Path) -> Loaded:
    """Convert an ONNX model with onnx2coreml."""
    out, errors = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())
    try:
        with quiet_host(), warnings.catch_warnings(), out, errors:
            warnings.simplefilter("ignore")
            options = {"minimum_deployment_target": "iOS17", "compute_precision": precision}
            model = onnx2coreml.convert(proto, **options)
    except Exception as error:
        raise LoadError(f"{path} was not converted by onnx2coreml: {_first_lines(error)}") from error
    return load(mlmodel_of(lambda package: model.save(str(package))))


def _session(onnxruntime: Any, path: Path) -> Any:
    """Return an onnxruntime session for a file, on the CPU and without log messages."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _with_fixed_sizes(proto: Any, path: Path) -> list[str]:
    """Set dynamic first axes of inputs to 1, in place.

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


def _compare_with_onnxruntime(loaded: Loaded, session: Any, path: Path) -> str:
    """Run both on random inputs; return a sentence that says how near they are.

    Raises:
        LoadError: they are others, by more than rounding; says which.
    """
    predictor, decibels = Predictor(loaded, precision="fp32"), list[float]()
    stored = {one.name for one in session.get_overridable_initializers()}
    onnx_inputs = [
        one for one in session.get_inputs() if one.name not in stored
    ]  # coremltools changes their names
    expected_counts = len(onnx_inputs), len(session.get_outputs())
    for values in map(predictor.sample, range(SEEDS)):
        results = predictor(values)
        if expected_counts != (counts := (len(values), len(results))):
            before, after = expected_counts, counts
            words = f"{before[0]} inputs and {before[1]} outputs became {after[0]} and {after[1]}"
            raise LoadError(f"{path}: the conversion cannot be compared with onnxruntime: {words}")
        feed = {
            one.name: value.astype(KINDS.get(one.type, np.int32 if "int" in one.type else np.float32))
            for one, value in zip(onnx_inputs, values.values(), strict=True)
        }
        pairs = zip(session.get_outputs(), session.run(None, feed), results.values(), strict=True)
        for output, expected, actual in pairs:
            decibels += _output_decibels(path, output.name, np.asarray(expected), np.asarray(actual))
    if not decibels:
        return "not compared with onnxruntime, which computes no finite number on drawn inputs"
    return f"its outputs in fp32 are those of onnxruntime on drawn inputs ({in_decibels(min(decibels))})"


def _output_decibels(path: Path, name: str, expected: Array, actual: Array) -> list[float]:
    """Return the PSNR of one output in dB, as a list; empty where no expected number is finite.

    Raises:
        LoadError: it is another one.
    """
    if expected.shape != actual.shape:
        _refuse(path, name, f"has the shape {actual.shape}, not {expected.shape}")
    if expected.dtype.kind != "f":
        if np.mean(expected == actual) < SAME:
            _refuse(
                path, name, f"has {np.mean(expected != actual):.0%} other numbers than onnxruntime computes"
            )
        return [np.inf]
    if not np.isfinite(expected).any():
        return []
    decibels = nearness({"": expected}, {"": actual})
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
"""Type that onnxruntime asks for -> that of numpy."""


def _first_lines(error: Exception) -> str:
    """Return the first two lines of an error's message, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:2]) or type(error).__name__
