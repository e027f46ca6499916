"""Chunks of a model, which `ane.split` made, as one subject of passes: a folder of packages, or a `Chain`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anesurgery.errors import SurgeryError
from anesurgery.files.chain import Chain, check_folder, is_chain, is_network
from anesurgery.files.description import parts
from anesurgery.files.interface import Interface, signatures
from anesurgery.files.package import Loaded, mlmodel_of
from anesurgery.files.pipeline_file import MEMBER
from anesurgery.files.writing import check_target
from anesurgery.loading import clone, load_chain
from anesurgery.mil import Program
from anesurgery.rewriting.ml_program import MLProgram, ProgramPipeline
from anesurgery.rewriting.subject import Subject

if TYPE_CHECKING:
    from typing_extensions import Self


class ProgramChain(ProgramPipeline):
    """The ML Programs of a chain, which run one after the other.

    Raises:
        SurgeryError: one of its models is a neural network.
    """

    def __init__(self, chain: Chain, given: Interface | None = None, must_stay: bool = False) -> None:
        for number, chunk in enumerate(chain.chunks, 1):
            if is_network(chunk):
                raise SurgeryError(
                    f"chunk {number} is a neural network; make an ML Program of the model by "
                    "anesurgery.upgrade, and cut that"
                )
        self.chain, self._must_stay = chain, must_stay
        self.given = given or self.interface
        self.layers = None

    @classmethod
    def read(cls, model: Any) -> Self:
        """A chain, or the folder that it is in."""
        if isinstance(model, Chain):
            return cls(model, must_stay=True)
        folder = Path(model).expanduser()
        return cls(replace(load_chain(folder), source=folder.absolute()))

    def clone(self) -> Self:
        """Programs of their own; weights are shared until they are replaced."""
        chunks = tuple(map(clone, self.chain.chunks))
        return type(self)(replace(self.chain, chunks=chunks, weights=()), self.given).only(self.member)

    @property
    def must_stay(self) -> bool:
        """Is it a chain that the caller gave?"""
        return self._must_stay

    @property
    def source(self) -> Path | None:
        """The folder, or the model that was cut."""
        return self.chain.source

    @property
    def parts(self) -> Sequence[Loaded]:
        """The chunks."""
        return self.chain.chunks

    @property
    def takes(self) -> Mapping[str, Iterable[str]]:
        """What callers of the whole give."""
        ends = self.chain.functions
        return {name: each.inputs for name, each in ends.items()} if ends else {"": self.chain.inputs}

    @property
    def runnable(self) -> Chain:
        """The chain."""
        return self.chain

    @property
    def members(self) -> Mapping[str, Program | None]:
        """The chunks by name."""
        return {f"chunk_{number}": part.program for number, part in enumerate(self.parts, 1)}

    @property
    def interface(self) -> Interface:
        """What callers of the whole see, and what each chunk takes and gives."""
        seen = {
            MEMBER.format(member, name): signature
            for member, graph in zip(self.members, self.graphs, strict=True)
            for name, signature in signatures(graph).items()
        }
        return Interface(seen, parts(self.spec.description), self.spec.specificationVersion)

    def notes(self, before: MLProgram) -> list[str]:
        """Nothing: all chunks are operated on, or the one that was asked for."""
        return []

    @property
    def spec(self) -> Any:
        """Of a pipeline with the interface of the whole."""
        return self.chain.spec

    def mlmodel(self) -> Any:
        """An MLModel of a pipeline in a temporary package.

        Raises:
            LoadError: the chunks have several functions, which a pipeline cannot have.
        """
        return mlmodel_of(lambda package: self.chain.save(package), self.chain.chunks[0].compute_units)

    def save(self, path: Path, *, overwrite: bool, edited: bool) -> Path:
        """Write a folder of chunks; or a pipeline, where the name ends in .mlpackage."""
        return self.chain.save(path, overwrite=overwrite)


def is_chunked(model: Any) -> bool:
    """Is a model a chain, or the folder of one?"""
    return isinstance(model, Chain) or (
        isinstance(model, (str, os.PathLike)) and is_chain(Path(model).expanduser())
    )


def check_out(
    model: str | os.PathLike[str], place: Path, overwrite: bool, suffix: str = MLProgram.suffix
) -> None:
    """Refuse a place that the result cannot be written to, before any work is done.

    Raises:
        LoadError: it may not; chunks go into a folder, or as a pipeline into a package.
    """
    source, target = Path(model).expanduser(), place.expanduser().absolute()
    if is_chunked(source) and not target.suffix:
        check_folder(source, target, overwrite)
    else:
        check_target(source, target, overwrite, suffix)


def read_subject(model: Any, kind: type[Subject] = MLProgram) -> Any:
    """A model as passes of a kind edit it, chunks one after the other; one that was read already is itself."""
    if isinstance(model, Subject):
        return model
    return ProgramChain.read(model) if kind is MLProgram and is_chunked(model) else kind.read(model)
