"""Models that run one after the other: what one gives, a later one takes by the same name.

A pipeline is a file of them; a chain, which `anesurgery.split` makes, is a sequence that may also be a folder.
As a folder it holds packages with a `chain.json`, which names them in order and says what goes in and comes
out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anesurgery.display import Drawn
from anesurgery.errors import IsPipeline, LoadError
from anesurgery.files.interface import Interface, parts, signatures
from anesurgery.files.package import (
    PIPELINES,
    PROGRAM,
    WEIGHTS,
    Loaded,
    fill,
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
from anesurgery.files.source import SourceFile, read_text
from anesurgery.files.writing import check_place, check_target, write_atomically

if TYPE_CHECKING:
    from typing_extensions import Self


MEMBER = "{}: {}"
"""A function or a value of a member, by their names."""
SUFFIX = ".mlpackage"


class Ends(NamedTuple):
    """What goes in and comes out."""

    inputs: tuple[str, ...]
    """What the caller gives, states left out."""
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class ModelSequence:
    """Models that run one after the other, some of which are held apart to be run, edited or written."""

    spec: Any
    """The specification of the whole, with every model in order; those that are held apart as they came, or
    empty."""
    loaded: Mapping[str, Loaded]
    """Those that are held apart, by the name of the member, in order."""
    source: Path | None = None
    """Where the models came from, which is never written to."""
    compute_units: Any = None

    @classmethod
    def of_parts(cls, spec: Any, parts: Sequence[Loaded]) -> ModelSequence:
        """Models to be run, in order: those of a pipeline or a chain."""
        return ModelSequence(spec, {f"model_{number}": part for number, part in enumerate(parts, 1)})

    @property
    def parts(self) -> tuple[Loaded, ...]:
        """The models that are held apart, in order."""
        return tuple(self.loaded.values())

    @property
    def ends(self) -> dict[str, Ends]:
        """What each function takes and gives, the default one first; one alone has no name."""
        whole = self.spec.description
        places = {f.name: f for f in whole.functions} or {"": whole}
        return {
            name: Ends(*(tuple(f.name for f in features) for features in (place.input, place.output)))
            for name, place in places.items()
        }

    @property
    def interface(self) -> Interface:
        """What callers of the whole see, and what its ML Programs take and give."""
        seen = {
            MEMBER.format(member, name): signature
            for member, loaded in self.loaded.items()
            for name, signature in signatures(loaded.program).items()
        }
        return Interface(seen, parts(self.spec.description), self.spec.specificationVersion)

    def copy(self, clone: Callable[[Loaded], Loaded]) -> Self:
        """A sequence with programs of its own, which `clone` makes."""
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
        """What the name of a file must end in."""
        networks = all(map(is_network, self.loaded.values()))
        return target.suffix if networks and target.suffix == ".mlmodel" else SUFFIX

    def write(self, place: Path) -> None:
        """Write the files of a package into a new folder, or an .mlmodel of networks.

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
                fill(member, loaded, weights / f"{number}-weight.bin")
        versions = [int(member.specificationVersion) for _, member in members(spec)]
        spec.specificationVersion = max(int(spec.specificationVersion), *versions)
        if package:
            write_spec(spec, place)
        else:
            place.write_bytes(spec.SerializeToString())

    def mlmodel(self) -> Any:
        """An MLModel in a temporary package, which goes away with the process.

        Raises:
            LoadError: the package cannot be written.
        """
        return mlmodel_of(self.write, self.compute_units)


def is_network(model: Loaded) -> bool:
    """Is a model a neural network, and no ML Program?"""
    return model.spec is not None and model.spec.WhichOneof("Type") != PROGRAM


def read_pipeline(path: Path, compute_units: Any = None) -> ModelSequence:
    """Read a pipeline that has ML Programs among its models; those are held apart.

    Raises:
        IsPipeline: it has none.
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
        names = ", ".join(name for name, _ in members(spec))
        raise IsPipeline(
            f"{path} is a pipeline without an ML Program ({names}), and these passes edit ops; "
            "anesurgery.upgrade makes ML Programs of its networks, and passes over layers edit them as they are"
        )
    return ModelSequence(spec, programs, source, compute_units)


def members(spec: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Name and specification of each model, those of inner pipelines included."""
    pipeline = PIPELINES[spec.WhichOneof("Type")](spec)
    for name, member in zip(part_names(pipeline), pipeline.models, strict=True):
        if member.WhichOneof("Type") in PIPELINES:
            yield from members(member, f"{where}{name}/")
        else:
            yield f"{where}{name}", member


MANIFEST = "chain.json"
NETWORK_SUFFIX = ".mlmodel"
DECIDING = {"neuralNetworkClassifier": "pipelineClassifier", "neuralNetworkRegressor": "pipelineRegressor"}
"""Kind of the last model -> kind of the pipeline that decides as it does."""
FORMAT = "anesurgery chain"


@dataclass(frozen=True)
class Border:
    """What passes from the chunks before a place to those after it."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes of each value."""
    kinds: tuple[str, ...]
    """Shape and element type of each value, in words."""

    @property
    def bytes(self) -> int:
        """The bytes of all values."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Placed:
    """Where a chunk runs on a target, as far as `inspect` can tell."""

    ops: float
    """Share of the ops on the ANE."""
    flop: float | None
    """Share of the floating point operations on the ANE; None where they are unknown."""
    elsewhere: tuple[str, ...]
    """What is not on the ANE, in words: "2 gather"."""
    estimate: float | None
    """Core ML's own, in microseconds and no run time; None where there is none."""


@dataclass(frozen=True)
class Chain(ModelSequence, Drawn):
    """Chunks of a model, in the order in which they run."""

    borders: tuple[Border, ...] = ()
    """Between two chunks each, of the default function; none for a chain that was read from a folder."""
    weights: tuple[int, ...] = ()
    """Bytes of weights of each chunk, likewise."""
    placed: tuple[Placed, ...] = ()
    """Of each chunk, where a target was named."""
    target: str = ""
    """That target, in words."""
    compared: str = ""
    """What a run beside the model that was cut showed, in words; empty where nobody compared."""

    @classmethod
    def of(cls, chunks: Sequence[Loaded], ends: Mapping[str, Ends], **cut: Any) -> Self:
        """Chunks of a model.

        Args:
            chunks: in the order in which they run.
            ends: what each function takes and gives, the default one first; "" where there is one only.
            cut: where they came from and how they were cut, as the fields are called.
        """
        named = {f"chunk_{number}": chunk for number, chunk in enumerate(chunks, 1)}
        return cls(_described(chunks, ends), named, compute_units=chunks[0].compute_units, **cut)

    @property
    def chunks(self) -> tuple[Loaded, ...]:
        """The models, in order."""
        return tuple(self.loaded.values())

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the caller gives to the default function, states left out."""
        return next(iter(self.ends.values())).inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the default function gives."""
        return next(iter(self.ends.values())).outputs

    @property
    def functions(self) -> Mapping[str, Ends]:
        """What each function takes and gives, the default one first; empty where there is one only."""
        return self.ends if self.spec.description.functions else {}

    def copy(self, clone: Callable[[Loaded], Loaded]) -> Self:
        """A chain with programs of its own, which `clone` makes, and whose weights may become others."""
        return replace(super().copy(clone), weights=())

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the chain atomically.

        Args:
            path: a folder; or a name that ends in .mlpackage (of networks also .mlmodel), for one file that
                holds all as a pipeline.
            overwrite: may what is there be replaced?

        Raises:
            LoadError: it exists, is the source or in it, or cannot be written.
        """
        target = Path(path).expanduser().absolute()
        if target.suffix in (SUFFIX, self._suffix(target)):
            return super().save(target, overwrite=overwrite)
        check_folder(self.source, target, overwrite)
        with work(stored_bytes(*self.chunks)):
            return write_atomically(target, self._write_folder, overwrite)

    def write(self, place: Path) -> None:
        """Write one file of all chunks.

        Raises:
            LoadError: they have several functions.
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


def _described(chunks: Sequence[Loaded], ends: Mapping[str, Ends]) -> Any:
    """The specification of a pipeline with the interface of the whole, and the names of its models."""
    whole = proto.Model_pb2.Model(specificationVersion=max(c.version for c in chunks))
    last = chunks[-1].spec
    kind = DECIDING.get(last.WhichOneof("Type"), "pipeline")
    getattr(whole, kind).SetInParent()
    whole.description.metadata.CopyFrom(last.description.metadata)
    if kind != "pipeline":
        for field in ("predictedFeatureName", "predictedProbabilitiesName"):
            setattr(whole.description, field, getattr(last.description, field))
    for function, names in ends.items():
        place = whole.description.functions.add(name=function) if function else whole.description
        for field, wanted in (("input", names.inputs), ("output", names.outputs)):
            features = _features(chunks, function, field)
            getattr(place, field).extend(features[name] for name in wanted)
    whole.description.defaultFunctionName = next(iter(ends))
    for number in range(1, len(chunks) + 1):
        PIPELINES[kind](whole).names.append(f"chunk_{number}")
        PIPELINES[kind](whole).models.add()
    return whole


def _features(chunks: Sequence[Loaded], function: str, kind: str) -> dict[str, Any]:
    """The features of a function by name, as the first chunk that has each describes it."""
    places = [c.spec.description for c in chunks]
    if function:
        places = [f for place in places for f in place.functions if f.name == function]
    return {f.name: f for place in reversed(places) for f in getattr(place, kind)}


def check_folder(source: Path | None, target: Path, overwrite: bool) -> None:
    """See that a folder of chunks may be written.

    Raises:
        LoadError: it may not.
    """
    check_place(target, overwrite, source)
    if target.exists() and not is_chain(target):
        raise LoadError(f"{target} exists and is not a folder of chunks; give another folder")


def is_chain(path: Path) -> bool:
    """Is a path a folder of chunks?"""
    return os.path.isfile(path / MANIFEST)


def is_chunked(model: Any) -> bool:
    """Is a model a chain, or the folder of one?"""
    return isinstance(model, Chain) or (
        isinstance(model, (str, os.PathLike)) and is_chain(Path(model).expanduser())
    )


def read_chain(folder: Path, load: Callable[[Path], Loaded]) -> Chain:
    """The chain in a folder.

    Args:
        folder: with a `chain.json`.
        load: reads a package.

    Raises:
        LoadError: it is damaged.
    """
    file = folder / MANIFEST
    try:
        content = json.loads(read_text(file))
        names, inputs, outputs = (tuple(_strings(content[key])) for key in ("models", "inputs", "outputs"))
        functions = {name: _ends(ends) for name, ends in content.get("functions", {}).items()}
        understood = content["format"] == FORMAT and bool(names)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{file} cannot be understood: {error!r}; cut the model again") from error
    if not understood or any(name != Path(name).name or name in ("", ".", "..") for name in names):
        raise LoadError(
            f"{file} is not the manifest of a chain, or names models elsewhere; cut the model again"
        )
    chunks = [load(folder / name) for name in names]
    ends = functions or {"": Ends(inputs, outputs)}
    for function, (takes, gives) in ends.items():
        inputs_read, outputs_made = (_features(chunks, function, kind) for kind in ("input", "output"))
        if lost := sorted({*takes} - {*inputs_read} | {*gives} - {*outputs_made}):
            raise LoadError(f"{file} names {lost[0]!r}, which none of its models has; cut the model again")
    return Chain.of(chunks, ends, source=folder.absolute())


def _ends(content: Any) -> Ends:
    return Ends(*(tuple(_strings(content[kind])) for kind in ("inputs", "outputs")))


def _strings(values: Any) -> Iterator[str]:
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{value!r} is not a name")
        yield value
