"""Read and write packages: `Loaded` holds a model in the form that passes edit.

`anesurgery.load` uses `locate`, `read_spec` and `from_spec`. Loading maps the weight file into memory and reads
no weight. `save` copies unchanged weights from the file that was opened when the model was loaded, and moves
the finished package into place atomically. `decompile` gives back the package of a compiled model. Sections: a
model in memory; what a path holds; writing; compiled models.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from anesurgery.doors import door
from anesurgery.errors import DAMAGED, LoadError, damage, missing
from anesurgery.files import executorch_program, protobuf
from anesurgery.files.compiled import (
    NETWORK,
    PROGRAM_TEXT,
    TEXT_SUFFIX,
    is_compiled,
    is_network,
    is_text,
    read_compiled,
)
from anesurgery.files.compiled import WEIGHTS as COMPILED_WEIGHTS
from anesurgery.files.espresso_network import read_espresso
from anesurgery.files.executorch_program import unpack_part
from anesurgery.files.interface import check_features, describe, new_spec, origin_of, remember, warn_of_names
from anesurgery.files.progress import work
from anesurgery.files.protobuf import blob_values, proto, weight_files
from anesurgery.files.source import ZIP, SourceFile, not_fetched, read_json, unpack
from anesurgery.files.weights import WeightFile, WeightWriter
from anesurgery.files.writing import check_target, scratch_folder, temporary_files, write_atomically
from anesurgery.mil import Array, Program, ct, exclusive, quiet_host, types

MODEL = Path("com.apple.CoreML") / "model.mlmodel"
WEIGHTS = Path("com.apple.CoreML") / "weights"
AUTHOR = "com.apple.CoreML"
PROGRAM = "mlProgram"


# A model in memory.


@dataclass
class Loaded:
    """A model in the form that passes edit, with all that is needed to write it back."""

    program: Program
    spec: Any = None
    """The Model protobuf as it was read, with the old ML Program, whose attributes and documentation are kept
    when the model is written. None for a bare program."""
    source: Path | None = None
    """The path of the package; it is never changed."""
    weights: WeightFile | None = None
    compute_units: Any = None
    notes: tuple[str, ...] = ()
    """What loading changed, for example names of a neural network."""
    other_weights: tuple[WeightFile, ...] = ()
    """Other weight files that constants are views of, as after a merge of models."""
    absent: str | None = None
    """Why the weights are missing; NaN then stands for them, and the model can be inspected but not saved."""

    def __post_init__(self) -> None:
        """Record the description, for callers that only keep the program."""
        if self.spec is not None:
            remember(self.program, self.spec)

    @classmethod
    def of(cls, model: Loaded | Program) -> Loaded:
        """Return a loaded model unchanged; wrap a bare program."""
        return model if isinstance(model, Loaded) else cls(model)

    @property
    def described_inputs(self) -> list[Any]:
        """`FeatureDescription` messages of the inputs; none for a bare program."""
        return [] if self.spec is None else list(self.spec.description.input)

    @property
    def described_features(self) -> list[Any]:
        """`FeatureDescription` messages of the inputs and outputs; none for a bare program."""
        return [] if self.spec is None else [*self.spec.description.input, *self.spec.description.output]

    def check_source(self) -> None:
        """Check that the weight file was not changed; weights are read from it when they are needed.

        Raises:
            LoadError: it was changed.
        """
        if self.weights is not None:
            self.weights.source.check()

    @property
    def description(self) -> Any:
        """The `ModelDescription`, also of a bare program that was read from a model; None if it was built."""
        if self.spec is not None:
            return self.spec.description
        origin = origin_of(self.program)
        return None if origin is None else origin.description

    @property
    def version(self) -> int:
        """The specification version to write."""
        least = protobuf.version_of(self.program)
        return least if self.spec is None else max(int(self.spec.specificationVersion), least)


def from_spec(
    spec: Any, source: Path, folder: Path | None, compute_units: Any, *, graph_only: bool = False
) -> Loaded:
    """Return the model of a specification; its weights are mapped from a file.

    Args:
        spec: the specification.
        source: the path of the package.
        folder: the folder of the weight file.
        compute_units: the compute units of an MLModel made from it.
        graph_only: may the weights be missing? NaN then stands for them.

    Raises:
        LoadError: its program is newer than coremltools, damaged, or its weights are not there.
    """
    file = None if folder is None else folder / protobuf.weight_file_name(spec.mlProgram, source)
    store, absent = _open_weights(file, source)

    def fetch(offset: int, element: Any, shape: tuple[int, ...]) -> Array:
        if store is None:
            if graph_only:
                return placeholder_weight(element, shape)
            raise LoadError(absent)
        if types.is_sub_byte(element):
            return store.unpacked(offset, element, shape)
        return store.array(offset, protobuf.numpy_type(element), shape)

    program = protobuf.from_proto(spec.mlProgram, spec.specificationVersion, fetch, str(source))
    needed = store is None and protobuf.has_weights(spec.mlProgram)
    return Loaded(program, spec, source, store, compute_units, absent=absent if needed else None)


def _open_weights(file: Path | None, source: Path) -> tuple[WeightFile | None, str]:
    """Return (weight file, ""), or (None, why it cannot be opened)."""
    if file is None or not file.is_file():
        name = file.name if file else "weight.bin"
        return None, f"{source} has no weights/{name}, but its program needs it; copy the package again"
    words = not_fetched(file)
    return (None, words) if words else (WeightFile(file), "")


def placeholder_weight(element: Any, shape: tuple[int, ...]) -> Array:
    """Return an array that stands for a missing weight: NaN for floats, 0 and 1 for integers.

    Neighbouring rows differ in their bits, so that no pass finds them equal; one column is stored.
    """
    dtype = np.dtype(types.nptype_from_builtin(element))
    zero_and_one = np.arange(shape[0] if shape else 1) % 2
    column = zero_and_one.astype(dtype)
    if np.issubdtype(dtype, np.floating):  # NaNs of both signs
        column = np.where(zero_and_one, np.array(np.nan, dtype), -np.array(np.nan, dtype))
    if not shape:
        return np.broadcast_to(column[0], ())
    return np.broadcast_to(column.reshape(-1, *[1] * (len(shape) - 1)), shape)


# What a path holds.

_MODULE = "a PyTorch file: load the module, and give it to anesurgery.inspect or apply with inputs="
_PICKLE = "a Python pickle: load what it holds as its author says, and give a PyTorch module to ane.inspect"
_TENSORFLOW = "a TensorFlow model: convert it with coremltools.convert, and give the package"
_COMPANION = "a part of a model: give the whole model"
_KERAS = "a Keras file: convert what tf.keras.models.load_model gives with coremltools.convert"
FOREIGN = {
    ".pt": _MODULE,
    ".pth": _MODULE,
    ".pt2": "a PyTorch file: load it with torch.export.load, and give the result to ane.inspect or ane.apply",
    ".torchscript": _MODULE,
    ".ckpt": _MODULE,
    ".tar": _MODULE,
    ".pkl": _PICKLE,
    ".pickle": _PICKLE,
    ".pb": _TENSORFLOW,
    ".bin": _COMPANION,
    ".data": _COMPANION,
    ".json": _COMPANION,
    ".npz": "a file of arrays: give it as --inputs, and name the model first",
    ".engine": "made by TensorRT for one GPU: convert the model that it was made of",
    ".safetensors": "a file of weights alone: give the folder of its checkpoint to `anesurgery build`",
    ".gguf": "a GGUF file, made for llama.cpp: give the folder of the checkpoint to `anesurgery build`",
    ".tflite": "a LiteRT file, which coremltools does not read: convert the model that it was made of",
    ".h5": _KERAS,
    ".keras": _KERAS,
}
"""Suffix of files that users mistake for Core ML models -> what they are, and what to do."""


PIPELINES: dict[str, Callable[[Any], Any]] = {
    "pipeline": lambda spec: spec.pipeline,
    "pipelineClassifier": lambda spec: spec.pipelineClassifier.pipeline,
    "pipelineRegressor": lambda spec: spec.pipelineRegressor.pipeline,
}
"""Type of a model -> a function that returns the pipeline in its specification."""


def part_names(pipeline: Any) -> list[str]:
    """Return a name for each model of a pipeline: those in the file if all differ, else "model 0", ..."""
    count, names = len(pipeline.models), list(pipeline.names)
    if len(set(names)) == count and all(names):
        return names
    return [f"model {i}" for i in range(count)]


def locate(path: Path) -> tuple[Path, Path | None]:
    """Return the specification file (for a compiled model its MIL text) and the weight folder of a model.

    Raises:
        LoadError: there is no model.
    """
    try:
        if not path.exists():
            raise LoadError(missing(path))
        if is_text(path):
            return path, path.parent / COMPILED_WEIGHTS
        if path.suffix.lower() in UNPACKERS and path.is_file():
            return _locate_in_archive(path)
        if path.is_file():
            return path, None
        if is_network(path):
            return path / NETWORK, None
        if is_compiled(path):
            return path / PROGRAM_TEXT, path / COMPILED_WEIGHTS
        if not (path / "Manifest.json").is_file():
            raise LoadError(f"{path} {_what_folder_is(path)}")
        spec, weights = _paths_in_manifest(path)
        if not spec.is_file():
            raise LoadError(f"{path} lacks its specification {spec.relative_to(path)}; copy the package again")
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}; check the path and its rights") from error
    return spec, weights


CHECKPOINT = "is a checkpoint of transformers; `anesurgery build` turns it into a package"


def _what_folder_is(folder: Path) -> str:
    """Return in words what kind of folder this is, and what to give instead."""
    if is_checkpoint(folder):
        return CHECKPOINT
    if (folder / "saved_model.pb").is_file():
        return f"is {_TENSORFLOW}"
    models = sorted(path.name for path in folder.glob("*.ml*"))
    if models:
        return f"is a folder of models; give one of them: {', '.join(models[:4])}"
    if folder.suffix == ".mlpackage":
        return "lacks its Manifest.json; copy the whole package again"
    return "is a folder without a Manifest.json; give the .mlpackage folder itself"


UNPACKERS: dict[str, Callable[[Path, Path], Path]] = {ZIP: unpack, executorch_program.SUFFIX: unpack_part}
"""Suffix of a file with a model in it -> what writes the model into a folder and returns its path."""


def _locate_in_archive(archive: Path) -> tuple[Path, Path | None]:
    """Return the specification file and the weight folder of the model in an archive."""
    model = _unpack_once(archive)
    if is_compiled(model):
        cure = "unzip it" if archive.suffix.lower() == ZIP else "extract it with `anesurgery executorch`"
        raise LoadError(f"{archive} holds a compiled model; {cure}, and give {model.name}")
    try:
        return locate(model)
    except LoadError as error:
        inside = str(error).replace(f"{model.parent}{os.sep}", "")
        raise LoadError(f"{archive}: {inside.replace('copy the package', 'make the archive')}") from error


def _unpack_once(archive: Path) -> Path:
    """Unpack an archive into a temporary folder of this process, once; return the path of its model.

    Raises:
        LoadError: it cannot be unpacked.
    """
    identity = SourceFile(archive).identity
    if identity not in _UNPACKED or not _UNPACKED[identity].exists():
        with temporary_files():
            write = UNPACKERS[archive.suffix.lower()]
            _UNPACKED[identity] = write(archive, Path(tempfile.mkdtemp(dir=_TEMPORARY.folder())))
    return _UNPACKED[identity]


_UNPACKED: dict[tuple[int, ...], Path] = {}
"""Identity of an archive when it was opened -> path of its model."""


def _paths_in_manifest(package: Path) -> tuple[Path, Path | None]:
    """Return the specification file and the weight folder that a manifest names."""
    file = package / "Manifest.json"
    try:
        manifest = read_json(file)
        items = manifest["itemInfoEntries"]
        spec = items[manifest["rootModelIdentifier"]]["path"]
        folders = [item["path"] for item in items.values() if item.get("name") == "weights"]
        paths = [PurePosixPath(path) for path in (spec, *folders[:1])]
    except (OSError, *DAMAGED) as error:
        raise LoadError(f"{file} cannot be understood: {damage(error)}; copy the package again") from error
    for path in paths:
        if path.is_absolute() or ".." in path.parts or "\0" in str(path):
            raise LoadError(f"{file} names {str(path)!r}, which is outside the package; do not trust it")
    spec, weights = (package / "Data" / paths[0], package / "Data" / paths[1] if folders else None)
    return spec, weights


def is_checkpoint(folder: Path) -> bool:
    """Does a folder hold a checkpoint as transformers saves it?"""
    weights = itertools.chain(folder.glob("*.safetensors"), folder.glob("pytorch_model*.bin"))
    return (folder / "config.json").is_file() and any(weights)


def read_spec(file: Path | SourceFile) -> Any:
    """Read the specification in a file.

    Raises:
        LoadError: the file holds none.
    """
    if isinstance(file, Path) and file.suffix == TEXT_SUFFIX:
        return read_compiled(file.parent, file.name).spec
    opened = SourceFile(file) if isinstance(file, Path) else file
    if opened.path.name == NETWORK:
        return read_espresso(opened.path.parent)
    content, file = opened.read(), opened.path
    if words := not_fetched(file, content):
        raise LoadError(words)
    foreign = FOREIGN.get(file.suffix.lower())
    spec = proto.Model_pb2.Model()
    try:
        spec.ParseFromString(content)
        kind = spec.WhichOneof("Type")
    except Exception as error:
        if foreign is not None:
            raise LoadError(f"{file} is {foreign}") from error
        cure = "give an .mlmodel or .mlpackage, or export it again"
        raise LoadError(f"{file} is not a Core ML model, or is damaged; {cure}") from error
    if kind is None:
        if foreign is not None:
            raise LoadError(f"{file} is {foreign}")
        words = "holds no model, or one damaged or newer than this coremltools; convert it again"
        raise LoadError(f"{file} {words}")
    for model in _models(spec):
        check_features(model, file)
    return spec


def _models(spec: Any) -> Iterator[Any]:
    """Yield a model, and the models in it if it is a pipeline."""
    yield spec
    kind = spec.WhichOneof("Type")
    for part in PIPELINES[kind](spec).models if kind in PIPELINES else ():
        yield from _models(part)


# Writing.


@door()
def save(loaded: Loaded, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write a package atomically.

    Args:
        loaded: the model.
        path: the path of the package, which ends in .mlpackage.
        overwrite: may an existing package be replaced?

    Returns:
        Where the package is.

    Raises:
        LoadError: the path exists, is the input or in it, has another suffix, or cannot be written; or the
            weights of the model were changed on disk after it was loaded.
        SurgeryError: an argument is not what the call takes.
    """
    target = Path(path).expanduser().absolute()
    check_target(loaded.source, target, overwrite)
    warn_of_names(loaded.notes)
    with work(stored_bytes(loaded)):
        return write_atomically(target, lambda package: write_package(loaded, package), overwrite)


def stored_bytes(*models: Loaded) -> int:
    """Return the bytes of the weight files of models, each counted once; about what writing them takes."""
    files = {file for model in models for file in (model.weights, *model.other_weights) if file is not None}
    return sum(file.source.size for file in files)


def write_package(loaded: Loaded, package: Path) -> None:
    """Write the files of a package into a new folder.

    Raises:
        LoadError: the weights of the model are missing.
    """
    if loaded.absent is not None:
        raise LoadError(loaded.absent)
    weights = package / "Data" / WEIGHTS
    weights.mkdir(parents=True)
    if loaded.spec is None:
        loaded = replace(loaded, spec=new_spec(loaded.program, loaded.version))
    spec = proto.Model_pb2.Model()
    fill_spec(spec, loaded, weights / "weight.bin")
    write_spec(spec, package)


def fill_spec(spec: Any, loaded: Loaded, weights: Path) -> None:
    """Fill an empty specification with a model, and write its weights to a file."""
    for field, value in loaded.spec.ListFields():
        if field.name != "mlProgram":
            _set_field(spec, field, value)
    spec.specificationVersion = loaded.version
    with weights.open("w+b") as file:
        writer = WeightWriter(file, loaded.weights, *loaded.other_weights)
        program = protobuf.to_proto(loaded.program, loaded.version, writer.add, loaded.spec.mlProgram)
        writer.finish()
    protobuf.move_weights(program, weights.name)
    spec.mlProgram.CopyFrom(program)
    describe(spec, loaded.program)


def write_spec(spec: Any, package: Path) -> None:
    """Write the specification and the manifest of a package whose weights are already written."""
    (package / "Data" / MODEL).write_bytes(spec.SerializeToString(deterministic=True))
    (package / "Manifest.json").write_text(json.dumps(_manifest(), indent=4), encoding="utf-8")


def _set_field(message: Any, field: Any, value: Any) -> None:
    if field.message_type is not None:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


def _manifest() -> dict[str, Any]:
    model, weights = (str(uuid.uuid5(uuid.NAMESPACE_URL, path.as_posix())) for path in (MODEL, WEIGHTS))
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


def to_mlmodel(loaded: Loaded) -> Any:
    """Return a model as an MLModel; its package is temporary and deleted with the process.

    Raises:
        LoadError: the package cannot be written.
    """
    return mlmodel_of(lambda package: write_package(loaded, package), loaded.compute_units)


def mlmodel_of(write: Callable[[Path], object], compute_units: Any = None) -> Any:
    """Return an MLModel of a temporary package, deleted with the process, that `write` fills.

    Raises:
        LoadError: the package cannot be written.
    """
    with temporary_files():
        folder = Path(tempfile.mkdtemp(dir=_TEMPORARY.folder()))
        package = folder / "model.mlpackage"
        try:
            write(package)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    from coremltools.models.utils import _is_macos

    units = compute_units or ct.ComputeUnit.ALL
    with quiet_host():
        return ct.models.MLModel(str(package), compute_units=units, skip_model_load=not _is_macos())


class _TemporaryFolder:
    """The scratch folder of this process for temporary packages; folders of dead processes are removed."""

    def __init__(self) -> None:
        self._cleanup, self._maker, self._folder = ExitStack(), 0, Path()

    @exclusive()
    def folder(self) -> Path:
        """Return the folder; a new one in a forked process, or if the old one was removed from outside."""
        if self._maker != os.getpid() or not self._folder.is_dir():
            self._cleanup, self._maker = ExitStack(), os.getpid()
            self._folder = self._cleanup.enter_context(scratch_folder(Path(tempfile.gettempdir())))
            atexit.register(self._cleanup.close)
        return self._folder

    def close(self) -> None:
        """Remove the folder."""
        self._cleanup.close()


_TEMPORARY = _TemporaryFolder()


# Compiled models.

IN_MODEL = "@model_path/weights/"
"""The start of the path of a weight file in the program."""


@dataclass(frozen=True)
class _Decompiled:
    """What `decompile` wrote."""

    path: Path
    notes: tuple[str, ...]
    """What could not be recovered, or came from another file than usual."""

    def __str__(self) -> str:
        return "\n".join([f"wrote {self.path}", *(f"note: {note}" for note in self.notes)])


@door()
def decompile(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, overwrite: bool = False
) -> _Decompiled:
    """Write the package of a compiled ML Program.

    Every op and attribute is kept, even if coremltools does not know it. Weight files are copied.

    Args:
        source: the .mlmodelc folder; it is never changed.
        target: the path of the package, which ends in .mlpackage.
        overwrite: may an existing package be replaced?

    Returns:
        Where the package is, and notes on what a compiled model does not hold.

    Raises:
        LoadError: the source is not a compiled ML Program or is damaged; or the target cannot be written.
        SurgeryError: an argument is not what the call takes.
    """
    folder, place = Path(source).expanduser(), Path(target).expanduser().absolute()
    if not is_compiled(folder):
        raise LoadError(f"{folder} is not a compiled model; give an .mlmodelc folder")
    check_target(folder, place, overwrite)
    compiled = read_compiled(folder)
    weights = _weight_files(compiled.spec.mlProgram, folder)

    def write(package: Path) -> None:
        (package / "Data" / WEIGHTS).mkdir(parents=True)
        for name, file in weights.items():
            copy = package / "Data" / WEIGHTS / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            with copy.open("wb") as weight_file:
                file.copy_to(weight_file)
        compiled.source.check_place()  # else the weights may be those of another model
        write_spec(compiled.spec, package)

    return _Decompiled(write_atomically(place, write, overwrite), compiled.notes)


def _weight_files(program: Any, folder: Path) -> dict[str, WeightFile]:
    """Return {name in the package: weight file} of a program.

    Raises:
        LoadError: one is missing, lacks a weight that the program reads, or is outside of the folder.
    """
    by_path = {}
    for path in weight_files(program):
        name = path.removeprefix(IN_MODEL)
        if name == path or ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
            raise LoadError(
                f"{folder} has weights at {path!r}, outside of its folder weights/; do not trust it"
            )
        file = folder / "weights" / name
        if not file.is_file():
            raise LoadError(f"{folder} lacks its weight file weights/{name}; copy the compiled model again")
        by_path[path] = name, WeightFile(file)
    for blob in blob_values(program):
        by_path[blob.fileName][1].blob(blob.offset)
    return dict(by_path.values())
