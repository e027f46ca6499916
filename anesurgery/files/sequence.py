"""Models that run one after the other: an output of one is the input of that name of a later one.

A pipeline (`read_pipeline`) is one file. A `Chain`, which `anesurgery.split` makes, can be saved as a pipeline
or as a folder of packages with a `chain.json`, which names the packages in order, the inputs and the outputs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anesurgery.display import Drawn
from anesurgery.errors import DAMAGED, IsPipeline, LoadError, damage
from anesurgery.files.interface import Interface, description_parts, signatures
from anesurgery.files.package import (
    PIPELINES,
    PROGRAM,
    WEIGHTS,
    Loaded,
    fill_spec,
    from_spec,
    locate,
    mlmodel_of,
    part_names,
    read_spec,
    stored_bytes,
    write_package,
    write_spec,
)
from anesurgery.files.progress import work
from anesurgery.files.protobuf import proto
from anesurgery.files.source import SourceFile, read_json
from anesurgery.files.writing import check_place, check_target, write_atomically

if TYPE_CHECKING:
    from typing_extensions import Self


MEMBER = "{}: {}"
"""The name of a function or value of a member, from both names."""
SUFFIX = ".mlpackage"
NETWORK_SUFFIX = ".mlmodel"


class Ends(NamedTuple):
    """The inputs and outputs of a sequence, by name."""

    inputs: tuple[str, ...]
    """The inputs that the caller gives, without states."""
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class ModelSequence:
    """Models that run one after the other. Those in `loaded` can be run, edited and written."""

    spec: Any
    """The specification of the whole, with every model in order; `write` fills in those in `loaded`."""
    loaded: Mapping[str, Loaded]
    """Name of a member -> its model, in order."""
    source: Path | None = None
    """The path that the models were read from; it is never changed."""
    compute_units: Any = None

    @classmethod
    def of_parts(cls, spec: Any, parts: Sequence[Loaded]) -> ModelSequence:
        """Return a sequence of models, in the order in which they run."""
        return ModelSequence(spec, {f"model_{number}": part for number, part in enumerate(parts, 1)})

    @property
    def parts(self) -> tuple[Loaded, ...]:
        """The models in `loaded`, in order."""
        return tuple(self.loaded.values())

    @property
    def ends(self) -> dict[str, Ends]:
        """Function -> its inputs and outputs, the default one first; the key is "" if there is only one."""
        whole = self.spec.description
        descriptions = {f.name: f for f in whole.functions} or {"": whole}
        return {
            name: Ends(*(tuple(f.name for f in features) for features in (described.input, described.output)))
            for name, described in descriptions.items()
        }

    @property
    def interface(self) -> Interface:
        """The description of the whole, and the signature of each function of its ML Programs."""
        functions = {
            MEMBER.format(member, name): signature
            for member, loaded in self.loaded.items()
            for name, signature in signatures(loaded.program).items()
        }
        return Interface(functions, description_parts(self.spec.description), self.spec.specificationVersion)

    def copy(self, clone: Callable[[Loaded], Loaded]) -> Self:
        """Return a sequence with copies of the models, made by `clone`."""
        return replace(self, loaded={name: clone(loaded) for name, loaded in self.loaded.items()})

    def save(self, path: Path, *, overwrite: bool = False) -> Path:
        """Write a package atomically.

        Raises:
            LoadError: the path exists, is the source or in it, has another suffix, or cannot be written.
        """
        target = path.expanduser().absolute()
        check_target(self.source, target, overwrite, self._suffix(target))
        with work(stored_bytes(*self.loaded.values())):
            return write_atomically(target, self.write, overwrite)

    def _suffix(self, target: Path) -> str:
        """Return the suffix that the target must have."""
        networks = all(map(is_network, self.loaded.values()))
        return target.suffix if networks and target.suffix == NETWORK_SUFFIX else SUFFIX

    def write(self, place: Path) -> None:
        """Write the files of a package into a new folder, or networks into an .mlmodel file.

        Each ML Program has its weights in a file of its own.
        """
        weights, package = place / "Data" / WEIGHTS, place.suffix == SUFFIX
        if package:
            weights.mkdir(parents=True)
        spec = proto.Model_pb2.Model()
        spec.CopyFrom(self.spec)
        for number, (name, member) in enumerate(members(spec)):
            if (loaded := self.loaded.get(name)) is None:
                continue
            member.Clear()
            if is_network(loaded):
                member.CopyFrom(loaded.spec)
            else:
                fill_spec(member, loaded, weights / f"{number}-weight.bin")
        versions = [int(member.specificationVersion) for _, member in members(spec)]
        spec.specificationVersion = max(int(spec.specificationVersion), *versions)
        if package:
            write_spec(spec, place)
        else:
            place.write_bytes(spec.SerializeToString())

    def mlmodel(self) -> Any:
        """Return an MLModel of a temporary package, which is deleted with the process.

        Raises:
            LoadError: the package cannot be written.
        """
        return mlmodel_of(self.write, self.compute_units)


def is_network(model: Loaded) -> bool:
    """Is a model a neural network, and not an ML Program?"""
    return model.spec is not None and model.spec.WhichOneof("Type") != PROGRAM


def read_pipeline(path: Path, compute_units: Any = None) -> ModelSequence:
    """Read a pipeline with at least one ML Program; the ML Programs are in `loaded`.

    Raises:
        IsPipeline: it has no ML Program.
        LoadError: it cannot be read.
    """
    file, weights = locate(path)
    opened = SourceFile(file)
    spec, source = read_spec(opened), path.resolve()
    programs = {
        name: from_spec(member, source, weights, compute_units)
        for name, member in members(spec)
        if member.WhichOneof("Type") == PROGRAM
    }
    opened.check_place()  # else the weights may be those of another package
    if not programs:
        kinds = {name: str(member.WhichOneof("Type")) for name, member in members(spec)}
        if not any(kind.startswith("neuralNetwork") for kind in kinds.values()):
            held = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
            raise IsPipeline(f"{path} is a pipeline without tensor ops ({held}): nothing to run or to rewrite")
        raise IsPipeline(
            f"{path} is a pipeline without an ML Program ({', '.join(kinds)}), and these passes edit ops; "
            "anesurgery.upgrade makes ML Programs of its networks, and passes over layers edit them as they are"
        )
    return ModelSequence(spec, programs, source, compute_units)


def members(spec: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, specification) of each model of a pipeline, including those of inner pipelines."""
    pipeline = PIPELINES[spec.WhichOneof("Type")](spec)
    for name, member in zip(part_names(pipeline), pipeline.models, strict=True):
        if member.WhichOneof("Type") in PIPELINES:
            yield from members(member, f"{where}{name}/")
        else:
            yield f"{where}{name}", member


MANIFEST = "chain.json"
PIPELINE_OF_LAST = {
    "neuralNetworkClassifier": "pipelineClassifier",
    "neuralNetworkRegressor": "pipelineRegressor",
}
"""Type of the last model -> type of the pipeline, so that a pipeline that ends in a classifier is one."""
FORMAT = "anesurgery chain"


@dataclass(frozen=True)
class Border:
    """The values that pass from the chunks before a cut to those after it."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """The bytes of each value."""
    kinds: tuple[str, ...]
    """The shape and dtype of each value, in words."""

    @property
    def bytes(self) -> int:
        """The bytes of all values."""
        return sum(self.sizes)


@dataclass(frozen=True)
class ChunkPlacement:
    """Where the ops of a chunk run on a target, by `inspect`."""

    ops: float
    """The share of the ops on the ANE."""
    flop: float | None
    """The share of the floating point operations on the ANE; None if unknown."""
    elsewhere: tuple[str, ...]
    """The ops that are not on the ANE, in words: "2 gather"."""
    estimate: float | None
    """Core ML's own estimate in microseconds, which is not a run time; None if there is none."""


@dataclass(frozen=True)
class Chain(ModelSequence, Drawn):
    """Chunks of a model, in the order in which they run."""

    borders: tuple[Border, ...] = ()
    """The border after each chunk but the last, for the default function; empty if read from a folder."""
    weights: tuple[int, ...] = ()
    """The bytes of weights of each chunk; empty if read from a folder."""
    placed: tuple[ChunkPlacement, ...] = ()
    """The placement of each chunk; empty if no target was named."""
    target: str = ""
    """The target, in words."""
    compared: str = ""
    """The result of a comparison with the uncut model, in words; "" without one."""

    @classmethod
    def of(cls, chunks: Sequence[Loaded], ends: Mapping[str, Ends], **cut: Any) -> Self:
        """Return the chain of some chunks.

        Args:
            chunks: the chunks, in the order in which they run.
            ends: function -> inputs and outputs, the default one first; the key is "" for a single function.
            cut: other fields: where the chunks came from and how they were cut.
        """
        named = {f"chunk_{number}": chunk for number, chunk in enumerate(chunks, 1)}
        return cls(_pipeline_spec(chunks, ends), named, compute_units=chunks[0].compute_units, **cut)

    @property
    def chunks(self) -> tuple[Loaded, ...]:
        """The chunks, in order."""
        return tuple(self.loaded.values())

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs of the default function, without states."""
        return next(iter(self.ends.values())).inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs of the default function."""
        return next(iter(self.ends.values())).outputs

    @property
    def functions(self) -> Mapping[str, Ends]:
        """Function -> its inputs and outputs, the default one first; empty if there is only one function."""
        return self.ends if self.spec.description.functions else {}

    def copy(self, clone: Callable[[Loaded], Loaded]) -> Self:
        """Return a chain with copies of the chunks, made by `clone`, without `weights`: these may change."""
        return replace(super().copy(clone), weights=())

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the chain atomically.

        Args:
            path: a folder; or a name that ends in .mlpackage (.mlmodel for networks), to write one pipeline.
            overwrite: may what is there be replaced?

        Raises:
            LoadError: it exists, is the source or in it, or cannot be written.
        """
        target = Path(path).expanduser().absolute()
        if target.suffix in (SUFFIX, NETWORK_SUFFIX):
            return super().save(target, overwrite=overwrite)
        check_folder(self.source, target, overwrite)
        with work(stored_bytes(*self.chunks)):
            return write_atomically(target, self._write_folder, overwrite)

    def write(self, place: Path) -> None:
        """Write all chunks as one pipeline.

        Raises:
            LoadError: the chunks have several functions.
        """
        if self.functions:
            raise LoadError("a pipeline has one function; give a folder for chunks of several")
        super().write(place)

    def _write_folder(self, folder: Path) -> None:
        folder.mkdir()
        names = [f"{n}{NETWORK_SUFFIX if is_network(c) else SUFFIX}" for n, c in self.loaded.items()]
        for name, chunk in zip(names, self.chunks, strict=True):
            if is_network(chunk):
                (folder / name).write_bytes(chunk.spec.SerializeToString())
            else:
                write_package(chunk, folder / name)
        content: dict[str, Any] = {
            "format": FORMAT,
            "models": names,
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
        }
        if self.functions:
            content["functions"] = {name: ends._asdict() for name, ends in self.functions.items()}
        (folder / MANIFEST).write_text(json.dumps(content, indent=2), encoding="utf-8")


def _pipeline_spec(chunks: Sequence[Loaded], ends: Mapping[str, Ends]) -> Any:
    """Return the specification of a pipeline of chunks, with empty models."""
    whole = proto.Model_pb2.Model(specificationVersion=max(c.version for c in chunks))
    last = chunks[-1].spec
    kind = PIPELINE_OF_LAST.get(last.WhichOneof("Type"), "pipeline")
    getattr(whole, kind).SetInParent()
    whole.description.metadata.CopyFrom(last.description.metadata)
    if kind != "pipeline":
        for field in ("predictedFeatureName", "predictedProbabilitiesName"):
            setattr(whole.description, field, getattr(last.description, field))
    for function, names in ends.items():
        described = whole.description.functions.add(name=function) if function else whole.description
        for field, field_names in (("input", names.inputs), ("output", names.outputs)):
            features = _features(chunks, function, field)
            getattr(described, field).extend(features[name] for name in field_names)
    whole.description.defaultFunctionName = next(iter(ends))
    for number in range(1, len(chunks) + 1):
        PIPELINES[kind](whole).names.append(f"chunk_{number}")
        PIPELINES[kind](whole).models.add()
    return whole


def _features(chunks: Sequence[Loaded], function: str, kind: str) -> dict[str, Any]:
    """Return {name: feature} of the kind "input" or "output"; the first chunk that has a feature counts."""
    descriptions = [c.spec.description for c in chunks]
    if function:
        descriptions = [f for d in descriptions for f in d.functions if f.name == function]
    return {f.name: f for d in reversed(descriptions) for f in getattr(d, kind)}


def check_folder(source: Path | None, target: Path, overwrite: bool) -> None:
    """Check that a folder of chunks may be written.

    Raises:
        LoadError: the target is the source or in it, cannot be written, or is not a folder of chunks.
    """
    check_place(target, overwrite, source)
    if target.exists() and not is_chain(target):
        raise LoadError(f"{target} exists and is not a folder of chunks; give another folder")


def is_chain(path: Path) -> bool:
    """Is a path a folder of chunks?"""
    return os.path.isfile(path / MANIFEST)


def is_chunked(model: Any) -> bool:
    """Is a model a chain, or the path of the folder of one?"""
    return isinstance(model, Chain) or (
        isinstance(model, (str, os.PathLike)) and is_chain(Path(model).expanduser())
    )


def read_chain(folder: Path, load: Callable[[Path], Loaded]) -> Chain:
    """Read the chain in a folder.

    Args:
        folder: a folder with a `chain.json`.
        load: loads a package.

    Raises:
        LoadError: it is damaged.
    """
    file = folder / MANIFEST
    try:
        content = read_json(file)
        names, whole = tuple(_strings(content["models"])), _ends(content)
        functions = {name: _ends(ends) for name, ends in content.get("functions", {}).items()}
        is_complete = content["format"] == FORMAT and bool(names)
    except (OSError, *DAMAGED) as error:
        raise LoadError(f"{file} cannot be understood: {damage(error)}; cut the model again") from error
    if not is_complete or any(name != Path(name).name or name in ("", ".", "..") for name in names):
        raise LoadError(
            f"{file} is not the manifest of a chain, or names models elsewhere; cut the model again"
        )
    chunks = [load(folder / name) for name in names]
    ends = functions or {"": whole}
    for function, (wanted_inputs, wanted_outputs) in ends.items():
        inputs_read, outputs_made = (_features(chunks, function, kind) for kind in ("input", "output"))
        if missing_names := sorted({*wanted_inputs} - {*inputs_read} | {*wanted_outputs} - {*outputs_made}):
            raise LoadError(
                f"{file} names {missing_names[0]!r}, which none of its models has; cut the model again"
            )
    return Chain.of(chunks, ends, source=folder.absolute())


def _ends(content: Any) -> Ends:
    return Ends(*(tuple(_strings(content[kind])) for kind in ("inputs", "outputs")))


def _strings(values: Any) -> Iterator[str]:
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{value!r} is not a name")
        yield value
