"""Read and save a pipeline whose ML Programs are edited; its other models are saved as they came."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anesurgery.errors import IsPipeline
from anesurgery.files import protobuf
from anesurgery.files.description import describe, parts
from anesurgery.files.interface import Interface, signatures
from anesurgery.files.package import (
    PIPELINES,
    PROGRAM,
    WEIGHTS,
    Loaded,
    from_spec,
    locate,
    part_names,
    read_spec,
    stored_bytes,
    write_spec,
)
from anesurgery.files.progress import work
from anesurgery.files.protobuf import proto
from anesurgery.files.source import SourceFile
from anesurgery.files.weights import WeightWriter
from anesurgery.files.writing import check_target, write_atomically

MEMBER = "{}: {}"
"""A function or a value of a member, by their names."""


@dataclass(frozen=True)
class LoadedPipeline:
    """A pipeline, and those of its models that are ML Programs, in order."""

    spec: Any
    """The specification of the whole."""
    programs: dict[str, Loaded]
    """By the name of the member; its specification is a part of the whole one."""
    source: Path
    compute_units: Any = None

    @property
    def interface(self) -> Interface:
        """What callers of the pipeline see, and what its ML Programs take and give."""
        seen = {
            MEMBER.format(member, name): signature
            for member, loaded in self.programs.items()
            for name, signature in signatures(loaded.program).items()
        }
        return Interface(seen, parts(self.spec.description), self.spec.specificationVersion)

    def copy(self, clone: Any) -> LoadedPipeline:
        """A pipeline with programs of its own, which `clone` makes."""
        return replace(self, programs={name: clone(loaded) for name, loaded in self.programs.items()})


def read_pipeline(path: Path, compute_units: Any = None) -> LoadedPipeline:
    """Read a pipeline that has ML Programs among its models.

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
    return LoadedPipeline(spec, programs, source, compute_units)


def members(spec: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Name and specification of each model, those of inner pipelines included."""
    pipeline = PIPELINES[spec.WhichOneof("Type")](spec)
    for name, member in zip(part_names(pipeline), pipeline.models, strict=True):
        if member.WhichOneof("Type") in PIPELINES:
            yield from members(member, f"{where}{name}/")
        else:
            yield f"{where}{name}", member


def save_pipeline(pipeline: LoadedPipeline, path: Path, *, overwrite: bool) -> Path:
    """Write a package atomically.

    Raises:
        LoadError: the path exists, is the input or in it, has another suffix, or cannot be written.
    """
    target = path.expanduser().absolute()
    check_target(pipeline.source, target, overwrite)
    with work(sum(map(stored_bytes, pipeline.programs.values()))):
        return write_atomically(target, lambda package: write_pipeline(pipeline, package), overwrite)


def write_pipeline(pipeline: LoadedPipeline, package: Path) -> None:
    """Write the files of a package into a new folder; each ML Program has its weights in a file of its own."""
    folder = package / "Data" / WEIGHTS
    folder.mkdir(parents=True)
    spec = proto.Model_pb2.Model()
    spec.CopyFrom(pipeline.spec)
    for i, (name, member) in enumerate(members(spec)):
        if (loaded := pipeline.programs.get(name)) is not None:
            write_member(member, loaded, loaded.spec.mlProgram, folder / f"{i}-weight.bin")
    versions = [int(member.specificationVersion) for _, member in members(spec)]
    spec.specificationVersion = max(int(spec.specificationVersion), *versions)
    write_spec(spec, package)


def write_member(member: Any, loaded: Loaded, before: Any, weights: Path) -> None:
    """Put a program into the specification of a member, and its weights into a file.

    Args:
        member: a part of the specification of a pipeline, with its description.
        loaded: the program.
        before: the protobuf that the program was read from; None for one of another origin.
        weights: the file, in the folder of weights of the package.
    """
    with weights.open("w+b") as file:
        writer = WeightWriter(file, loaded.weights)
        program = protobuf.to_proto(loaded.program, loaded.version, writer.add, before)
        writer.finish()
    protobuf.move_weights(program, weights.name)
    member.specificationVersion = loaded.version
    member.mlProgram.CopyFrom(program)
    describe(member, loaded.program)
