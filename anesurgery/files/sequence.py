"""Models that run one after the other: what one gives, a later one takes by the same name.

A pipeline is a file of them; a chain, which `anesurgery.split` makes, is a sequence that may also be a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anesurgery.errors import IsPipeline
from anesurgery.files.description import parts
from anesurgery.files.interface import Interface, signatures
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
    write_spec,
)
from anesurgery.files.progress import work
from anesurgery.files.protobuf import proto
from anesurgery.files.source import SourceFile
from anesurgery.files.writing import check_target, write_atomically

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
