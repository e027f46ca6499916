"""Models that run one after the other: what one gives, a later one takes by the same name.

On disk a chain is a folder of packages with a `chain.json`, which names them in order and says what goes in and
comes out; or one package that holds them all, as a pipeline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anesurgery.display import Drawn
from anesurgery.errors import LoadError
from anesurgery.files.package import PIPELINES, Loaded, stored_bytes, write_package
from anesurgery.files.progress import work
from anesurgery.files.protobuf import proto
from anesurgery.files.sequence import SUFFIX, Ends, ModelSequence, is_network
from anesurgery.files.source import read_text
from anesurgery.files.writing import check_place, write_atomically

if TYPE_CHECKING:
    from typing_extensions import Self

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
