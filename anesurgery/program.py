"""Load, copy and save models: `.mlpackage`, MLModel or MIL program <-> `Loaded`.

Loading maps the weight file and reads no weight; saving copies untouched weights file to file. A package is
built beside its place and moved there when it is whole.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery import transcribe
from anesurgery.contract import Interface, port, signatures
from anesurgery.errors import LoadError, UnknownName
from anesurgery.mil import Array, Program, Var, ct, quiet_host, types
from anesurgery.transcribe import proto
from anesurgery.weights import WeightFile, WeightWriter
from anesurgery.writing import check_target, write_whole

MODEL = Path("com.apple.CoreML") / "model.mlmodel"
WEIGHTS = Path("com.apple.CoreML") / "weights"
AUTHOR = "com.apple.CoreML"
PROGRAM = "mlProgram"


@dataclass
class Loaded:
    """A model in the form that passes work on, with what is needed to write it back."""

    program: Program
    spec: Any = None
    """Model protobuf as it came, ML Program included (it stays as the source of what is kept); None for a
    bare program."""
    source: Path | None = None
    """The package, which is never written to."""
    weights: WeightFile | None = None
    compute_units: Any = None
    notes: tuple[str, ...] = ()
    """What was changed on the way in, as happens to neural networks."""

    @property
    def version(self) -> int:
        """The specification version to write."""
        least = transcribe.version_of(self.program)
        return least if self.spec is None else max(int(self.spec.specificationVersion), 6)


def load(model: Any, *, compute_units: Any = None) -> Loaded:
    """Read a model.

    Args:
        model: path of an .mlpackage or .mlmodel, MLModel, MIL program, or Loaded. A neural network is made into
            an ML Program; `notes` says what changed.
        compute_units: `ct.ComputeUnit` for the MLModel that comes out; that of a given MLModel by default.

    Raises:
        LoadError: it does not exist, is damaged, or is no ML Program.
    """
    if isinstance(model, Loaded):
        return model
    if isinstance(model, Program):
        return Loaded(model, compute_units=compute_units)
    if isinstance(model, ct.models.MLModel):
        path = model.package_path
        if path is None:
            return _network("this MLModel", model.get_spec(), None, compute_units or model.compute_unit)
        return load(path, compute_units=compute_units or model.compute_unit)
    if not isinstance(model, (str, os.PathLike)):
        raise LoadError(f"cannot load a {type(model).__name__}; give a path, an MLModel or a MIL Program")
    return _load_path(Path(model).expanduser(), compute_units)


def _load_path(path: Path, compute_units: Any) -> Loaded:
    file, weights = locate(path)
    spec = read_spec(file)
    if spec.WhichOneof("Type") != PROGRAM:
        return _network(str(path), spec, path.resolve(), compute_units)
    return from_spec(spec, path.resolve(), weights, compute_units)


def _network(what: str, spec: Any, source: Path | None, units: Any, exact: bool = False) -> Loaded:
    from anesurgery.neuralnetwork.upgrade import import_network  # it needs this module

    return import_network(spec, what, source=source, compute_units=units, keep_names=exact)


def from_spec(spec: Any, source: Path, folder: Path | None, compute_units: Any) -> Loaded:
    """A model of a specification, its weights in a file of the folder."""
    file = None if folder is None else folder / transcribe.weight_file_name(spec.mlProgram)
    store = WeightFile(file) if file is not None and file.is_file() else None

    def fetch(offset: int, element: Any, shape: tuple[int, ...]) -> Array:
        if store is None:
            raise LoadError(
                f"{source} has no weights/weight.bin, but its program needs it; copy the package again"
            )
        if types.is_sub_byte(element):
            return _unpack(store, offset, element, shape)
        return store.array(offset, transcribe.numpy_type(element), shape)

    program = transcribe.from_proto(spec.mlProgram, spec.specificationVersion, fetch)
    return Loaded(program, spec, source, store, compute_units)


def load_parts(path: str | os.PathLike[str]) -> tuple[Any, list[Loaded]]:
    """The specification of a model on disk, and its ML Programs: one, or those of a pipeline in order.

    Neural networks are made into ML Programs whose inputs and outputs keep their names.

    Raises:
        LoadError: it cannot be read, or a part is neither an ML Program nor a neural network.
    """
    source = Path(path).expanduser()
    file, weights = locate(source)
    spec = read_spec(file)
    return spec, _parts(spec, str(path), source.resolve(), weights)


def _parts(spec: Any, where: str, source: Path, weights: Path | None) -> list[Loaded]:
    """The programs of a model, in the order in which they run."""
    kind = spec.WhichOneof("Type")
    if kind == PROGRAM:
        return [from_spec(spec, source, weights, None)]
    if kind not in PIPELINES:
        return [_network(where, spec, source, None, exact=True)]
    models = enumerate(PIPELINES[kind](spec).models)
    return [p for i, m in models for p in _parts(m, f"model {i} of the pipeline", source, weights)]


PIPELINES: dict[str, Callable[[Any], Any]] = {
    "pipeline": lambda spec: spec.pipeline,
    "pipelineClassifier": lambda spec: spec.pipelineClassifier.pipeline,
    "pipelineRegressor": lambda spec: spec.pipelineRegressor.pipeline,
}
"""Kind of model -> the pipeline in its specification."""


def locate(path: Path) -> tuple[Path, Path | None]:
    """The specification file and the folder of weights of a model on disk."""
    if not path.exists():
        raise LoadError(_missing(path))
    if path.is_file():
        return path, None
    if path.suffix == ".mlmodelc" or (path / "coremldata.bin").exists():
        raise LoadError(f"{path} is a compiled model; give the .mlpackage that it was compiled from")
    if not (path / "Manifest.json").is_file():
        raise LoadError(f"{path} is a folder without a Manifest.json; give the .mlpackage folder itself")
    try:
        manifest = json.loads((path / "Manifest.json").read_text(encoding="utf-8"))
        items = manifest["itemInfoEntries"]
        spec = path / "Data" / items[manifest["rootModelIdentifier"]]["path"]
        folders = [path / "Data" / i["path"] for i in items.values() if i.get("name") == "weights"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{path / 'Manifest.json'} cannot be understood: {error!r}") from error
    if not spec.is_file():
        raise LoadError(f"{path} lacks its specification {spec.relative_to(path)}; copy the package again")
    return spec, folders[0] if folders else None


def _missing(path: Path) -> str:
    near = sorted(p.name for p in path.parent.glob("*.ml*")) if path.parent.is_dir() else []
    return f"{path} does not exist" + (f"; in its folder: {', '.join(near[:8])}" if near else "")


def read_spec(file: Path) -> Any:
    """The specification in a file.

    Raises:
        LoadError: it holds none.
    """
    spec = proto.Model_pb2.Model()
    try:
        spec.ParseFromString(file.read_bytes())
        kind = spec.WhichOneof("Type")
    except Exception as error:
        raise LoadError(
            f"{file} is no Core ML specification, or is damaged ({error}); give an .mlmodel or .mlpackage, or "
            "export it again"
        ) from error
    if kind is None:
        raise LoadError(
            f"{file} holds no model, or one damaged or newer than this coremltools; convert it again"
        )
    return spec


def _unpack(store: WeightFile, offset: int, element: Any, shape: tuple[int, ...]) -> Array:
    """A weight of less than a byte per element, unpacked by coremltools."""
    from coremltools.libmilstoragepython import _BlobStorageReader

    store.blob(offset)
    name = types.builtin_to_string(element)
    values = getattr(_BlobStorageReader(str(store.path)), f"read_{name}_data")(offset)
    return np.asarray(values).astype(transcribe.numpy_type(element)).reshape(shape)


def clone(model: Any) -> Loaded:
    """A copy whose program can be edited without touching the original; weights are shared."""
    loaded = load(model)
    return replace(loaded, program=transcribe.copy_program(loaded.program))


def interface(model: Any) -> Interface:
    """The interface of a model."""
    loaded = load(model)
    description = b"" if loaded.spec is None else loaded.spec.description.SerializeToString(deterministic=True)
    return Interface(signatures(loaded.program), description, loaded.version)


def save(loaded: Loaded, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write a package: whole, or not at all.

    Args:
        loaded: the model.
        path: ends in .mlpackage.
        overwrite: may an existing package be replaced?

    Raises:
        LoadError: the path exists, is the input, has another suffix, or cannot be written.
    """
    target = Path(path).expanduser().absolute()
    check_target(loaded.source, target, overwrite)
    return write_whole(target, lambda package: write_package(loaded, package))


def write_package(loaded: Loaded, package: Path) -> None:
    """Write the files of a package into a new folder."""
    weights = package / "Data" / WEIGHTS
    weights.mkdir(parents=True)
    if loaded.spec is None:
        loaded = with_description(loaded)
    spec = proto.Model_pb2.Model()
    for field, value in loaded.spec.ListFields():
        if field.name != "mlProgram":
            _assign(spec, field, value)
    with (weights / "weight.bin").open("w+b") as file:
        writer = WeightWriter(file, loaded.weights, package / "scratch.bin")
        program = transcribe.to_proto(loaded.program, loaded.version, writer.add, loaded.spec.mlProgram)
        writer.finish()
    spec.mlProgram.CopyFrom(program)
    describe(spec, loaded.program)
    (package / "Data" / MODEL).write_bytes(spec.SerializeToString())
    (package / "Manifest.json").write_text(json.dumps(_manifest(), indent=4), encoding="utf-8")


def _assign(message: Any, field: Any, value: Any) -> None:
    if field.message_type is not None:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


def _manifest() -> dict[str, Any]:
    model, weights = str(uuid.uuid4()), str(uuid.uuid4())
    items = {
        model: {
            "author": AUTHOR,
            "description": "CoreML Model Specification",
            "name": "model.mlmodel",
            "path": MODEL.as_posix(),
        },
        weights: {
            "author": AUTHOR,
            "description": "CoreML Model Weights",
            "name": "weights",
            "path": WEIGHTS.as_posix(),
        },
    }
    return {"fileFormatVersion": "1.0.0", "itemInfoEntries": items, "rootModelIdentifier": model}


def with_description(loaded: Loaded) -> Loaded:
    """A bare program with the specification that coremltools makes for it; the program stays as it is."""
    from coremltools.converters.mil.converter import mil_convert

    copy = transcribe.copy_program(loaded.program)
    for name, function in loaded.program.functions.items():
        copy.functions[name].input_types = function.input_types
        copy.functions[name].output_types = function.output_types
    with quiet_host(), contextlib.redirect_stderr(io.StringIO()):  # its progress bars
        model = mil_convert(
            copy,
            convert_to="mlprogram",
            convert_from="milinternal",
            skip_model_load=True,
            compute_units=ct.ComputeUnit.ALL,
            specification_version=loaded.version,
            pass_pipeline=ct.PassPipeline.EMPTY,
        )
    spec = model.get_spec()
    return replace(loaded, spec=spec)


FEATURE_TYPES = {"fp16": "FLOAT16", "fp32": "FLOAT32", "int32": "INT32", "int8": "INT8"}


def describe(spec: Any, program: Program) -> None:
    """Bring the description of a package up to date with a program whose interface was changed on purpose."""
    description = spec.description
    described = {f.name: f for f in description.functions}
    for name, function in program.functions.items():
        place = described.get(name, description)
        inputs = [v for v in function.inputs.items() if not types.is_state(v[1].sym_type)]
        _features(place.input, inputs)
        _features(place.output, [(v.name, v) for v in function.outputs])


def _features(features: Any, wanted: list[tuple[str, Var]]) -> None:
    """Drop, change and add the entries of a list of features; those that fit stay as they are."""
    names = {name for name, _ in wanted}
    for feature in [f for f in features if f.name not in names]:
        features.remove(feature)
    known = {f.name: f for f in features}
    for name, var in wanted:
        if name in known and known[name].type.WhichOneof("Type") != "multiArrayType":
            continue
        if name not in known:
            known[name] = features.add(name=name)
            known[name].type.multiArrayType.dataType = _feature_type(var)
            known[name].type.multiArrayType.shape.extend(d or 1 for d in port(name, var).shape)
        array = known[name].type.multiArrayType
        shape = port(name, var).shape
        fixed = array.shape and array.WhichOneof("ShapeFlexibility") is None and None not in shape
        if fixed and list(array.shape) != list(shape):
            array.shape[:] = [int(d or 1) for d in shape]


def _feature_type(var: Var) -> int:
    name = types.builtin_to_string(var.dtype)
    if name not in FEATURE_TYPES:
        raise UnknownName("type of an input or output", name, FEATURE_TYPES)
    return int(proto.FeatureTypes_pb2.ArrayFeatureType.ArrayDataType.Value(FEATURE_TYPES[name]))


def to_mlmodel(loaded: Loaded) -> Any:
    """The model as an MLModel in a temporary package that goes away with it."""
    package = Path(tempfile.mkdtemp(prefix="anesurgery-", suffix=".mlpackage"))
    try:
        write_package(loaded, package)
    except BaseException:
        shutil.rmtree(package, ignore_errors=True)
        raise
    from coremltools.models.utils import _is_macos

    units = loaded.compute_units or ct.ComputeUnit.ALL
    with quiet_host():
        return ct.models.MLModel(
            str(package), is_temp_package=True, compute_units=units, skip_model_load=not _is_macos()
        )
