"""Models that run one after the other: what one gives, a later one takes by the same name.

On disk a chain is a folder of packages with a `chain.json`, which names them in order and says what goes in and
comes out; or one package that holds them all, as a pipeline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from anesurgery.display import Drawn
from anesurgery.errors import LoadError
from anesurgery.files.package import (
    PIPELINES,
    PROGRAM,
    WEIGHTS,
    Loaded,
    stored_bytes,
    write_package,
    write_spec,
)
from anesurgery.files.pipeline_file import write_member
from anesurgery.files.progress import work
from anesurgery.files.protobuf import proto
from anesurgery.files.source import read_text
from anesurgery.files.writing import check_place, check_target, write_atomically

MANIFEST = "chain.json"
NETWORK_SUFFIX = ".mlmodel"
DECIDING = {"neuralNetworkClassifier": "pipelineClassifier", "neuralNetworkRegressor": "pipelineRegressor"}
"""Kind of the last model -> kind of the pipeline that decides as it does."""
FORMAT = "anesurgery chain"
SUFFIX = ".mlpackage"


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


class Ends(NamedTuple):
    """What goes in and comes out."""

    inputs: tuple[str, ...]
    """What the caller gives, states left out."""
    outputs: tuple[str, ...]


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
class Chain(Drawn):
    """Chunks of a model, in the order in which they run."""

    chunks: tuple[Loaded, ...]
    inputs: tuple[str, ...]
    """What the caller gives, states left out."""
    outputs: tuple[str, ...]
    borders: tuple[Border, ...] = ()
    """Between two chunks each, of the default function; none for a chain that was read from a folder."""
    weights: tuple[int, ...] = ()
    """Bytes of weights of each chunk, likewise."""
    source: Path | None = None
    """The model that was cut, which is never written to."""
    placed: tuple[Placed, ...] = ()
    """Of each chunk, where a target was named."""
    target: str = ""
    """That target, in words."""
    functions: Mapping[str, Ends] = field(default_factory=dict)
    """What each function takes and gives, the default one first; empty where there is one only."""
    compared: str = ""
    """What a run beside the model that was cut showed, in words; empty where nobody compared."""

    @property
    def spec(self) -> Any:
        """The specification of a pipeline with the interface of the whole, and without its models."""
        whole = proto.Model_pb2.Model(specificationVersion=max(c.version for c in self.chunks))
        last = self.chunks[-1].spec
        getattr(whole, DECIDING.get(last.WhichOneof("Type"), "pipeline")).SetInParent()
        whole.description.metadata.CopyFrom(last.description.metadata)
        if last.WhichOneof("Type") in DECIDING:
            for field in ("predictedFeatureName", "predictedProbabilitiesName"):
                setattr(whole.description, field, getattr(last.description, field))
        for function, ends in (self.functions or {"": Ends(self.inputs, self.outputs)}).items():
            place = whole.description.functions.add(name=function) if function else whole.description
            for kind, names in (("input", ends.inputs), ("output", ends.outputs)):
                features = self._features(function, kind)
                getattr(place, kind).extend(features[name] for name in names)
        whole.description.defaultFunctionName = next(iter(self.functions), "")
        return whole

    def _features(self, function: str, kind: str) -> dict[str, Any]:
        """The features of a function by name, as the first chunk that has each describes it."""
        places = [c.spec.description for c in self.chunks]
        if function:
            places = [f for place in places for f in place.functions if f.name == function]
        return {f.name: f for place in reversed(places) for f in getattr(place, kind)}

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the chain atomically.

        Args:
            path: a folder; or a name that ends in .mlpackage (of networks also .mlmodel), for one file that
                holds all as a pipeline.
            overwrite: may what is there be replaced?

        Raises:
            LoadError: it exists, is the source or in it, or cannot be written.
        """
        with work(sum(self.weights) or max(map(stored_bytes, self.chunks))):
            return self._save(Path(path).expanduser().absolute(), overwrite)

    def _save(self, target: Path, overwrite: bool) -> Path:
        networks = all(map(is_network, self.chunks))
        if target.suffix == SUFFIX and self.functions:
            raise LoadError(f"{target}: a pipeline has one function; give a folder for chunks of several")
        if target.suffix == SUFFIX or (networks and target.suffix == NETWORK_SUFFIX):
            check_target(self.source, target, overwrite, target.suffix)
            return write_atomically(target, self._write_pipeline, overwrite)
        check_folder(self.source, target, overwrite)
        return write_atomically(target, self._write_folder, overwrite)

    def _write_folder(self, folder: Path) -> None:
        folder.mkdir()
        names = [
            f"chunk_{number}{NETWORK_SUFFIX if is_network(chunk) else SUFFIX}"
            for number, chunk in enumerate(self.chunks, 1)
        ]
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

    def _write_pipeline(self, place: Path) -> None:
        spec = self.spec
        pipeline = PIPELINES[spec.WhichOneof("Type")](spec)
        weights = place / "Data" / WEIGHTS
        if place.suffix == SUFFIX:
            weights.mkdir(parents=True)
        for number, chunk in enumerate(self.chunks):
            pipeline.names.append(f"chunk_{number + 1}")
            part = pipeline.models.add()
            if is_network(chunk):
                part.CopyFrom(chunk.spec)
            else:
                part.description.CopyFrom(chunk.spec.description)
                write_member(part, chunk, None, weights / f"{number}-weight.bin")
        if place.suffix == SUFFIX:
            write_spec(spec, place)
        else:
            place.write_bytes(spec.SerializeToString())


def is_network(chunk: Loaded) -> bool:
    """Is a chunk a neural network, and no ML Program?"""
    return chunk.spec is not None and chunk.spec.WhichOneof("Type") != PROGRAM


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
    chain = Chain(tuple(load(folder / name) for name in names), inputs, outputs, functions=functions)
    for function, ends in (functions or {"": Ends(inputs, outputs)}).items():
        inputs_read, outputs_made = (chain._features(function, kind) for kind in ("input", "output"))
        if lost := sorted({*ends.inputs} - {*inputs_read} | {*ends.outputs} - {*outputs_made}):
            raise LoadError(f"{file} names {lost[0]!r}, which none of its models has; cut the model again")
    return chain


def _ends(content: Any) -> Ends:
    return Ends(*(tuple(_strings(content[kind])) for kind in ("inputs", "outputs")))


def _strings(values: Any) -> Iterator[str]:
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{value!r} is not a name")
        yield value
