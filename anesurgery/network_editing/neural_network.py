"""A neural network as passes operate on it: an `.mlmodel` goes in and comes out.

A pipeline counts as its networks, edited one after the other; its other models stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from anesurgery.checking.comparison import Comparison, compare
from anesurgery.errors import LoadError, Refusal, SurgeryError
from anesurgery.files.interface import Interface, description_parts
from anesurgery.files.package import PIPELINES, PROGRAM, locate, read_spec
from anesurgery.files.protobuf import proto
from anesurgery.files.sequence import members as members_of
from anesurgery.files.source import SourceFile
from anesurgery.files.writing import check_target, temporary_files, write_atomically
from anesurgery.mil import Array, Program, ct, quiet_host
from anesurgery.network_editing.network import Network
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.spec import network_of, networks_of, walk_layers
from anesurgery.placement.durations import Time, total_of
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.networks import inspect_network
from anesurgery.placement.score import Score
from anesurgery.placement.target import Target
from anesurgery.rewriting.ml_program import Comparing, Subject, count_kinds

if TYPE_CHECKING:
    from typing_extensions import Self

EXACT = float("inf")
"""Least PSNR in dB of the outputs in fp32 if every pass is exact: they are equal."""
CLOSE = 100.0
"""The same if a pass rounds."""
NEEDED = "iOS 13 or macOS 10.15"
"""The first systems that read version 4 of the specification, the only one that edits raise a network to."""


class NeuralNetwork(Subject):
    """A model whose layers passes edit; what its members mean is said in `Subject`.

    Args:
        spec: specification of the model, which is edited.
        file: that it came from, which is never written to.
        source: the file or package that the user named.
        units: compute units of the MLModel that comes out.
    """

    words: ClassVar[str] = "the layers of a neural network"
    suffix: ClassVar[str] = ".mlmodel"
    shares_weights: ClassVar[bool] = False

    def __init__(
        self, spec: Any, file: SourceFile | None = None, source: Path | None = None, units: Any = None
    ) -> None:
        self._spec, self.file, self._source, self.units = spec, file, source, units

    @property
    def file_bytes(self) -> int:
        """The bytes of the `.mlmodel`: a network's score does not know its weights."""
        return int(self.spec.ByteSize())

    @classmethod
    def read(cls, model: Any) -> Self:
        """Return an `.mlmodel`, an MLModel of one, or its specification.

        Raises:
            LoadError: it cannot be read, is damaged, or is updatable.
            SurgeryError: it holds no neural network.
        """
        opened = cls._given(model)
        kind, where = opened.spec.WhichOneof("Type"), str(opened.source or "the model")
        parts = members_of(opened.spec) if kind in PIPELINES else ()
        if any(part.WhichOneof("Type") == PROGRAM for _, part in parts):
            raise SurgeryError(
                f"{where} is a pipeline with ML Programs, whose weights an {cls.suffix} cannot hold; passes "
                "over ops edit them (`auto`), and its networks stay as they are"
            )
        if not (networks := networks_of(opened.spec)):
            raise SurgeryError(
                f"the passes are for neural networks (.mlmodel), but {where} is of type {kind}, without layers"
            )
        for i, spec in enumerate(networks):
            _check(spec, where if spec is opened.spec else f"{where}: network {i} of the pipeline")
        return opened

    @classmethod
    def _given(cls, model: Any) -> Self:
        if isinstance(model, ct.models.MLModel):
            source = None if model.package_path is None else Path(model.package_path)
            return cls(model.get_spec(), None, source, model.compute_unit)
        if isinstance(model, proto.Model_pb2.Model):
            return cls(model)
        if not isinstance(model, (str, os.PathLike)):
            raise LoadError(
                f"cannot read layers from a {type(model).__name__}; give the path of an {cls.suffix}, an "
                "MLModel of one, or its specification"
            )
        source = Path(model).expanduser()
        file = SourceFile(locate(source)[0])
        return cls(read_spec(file), file, source.resolve())

    def clone(self) -> Self:
        """Return a specification of its own."""
        spec = proto.Model_pb2.Model()
        spec.CopyFrom(self.spec)
        return type(self)(spec, self.file, self.source, self.units).only(self.member)

    @property
    def spec(self) -> Any:
        """The specification, edits included after `finish`."""
        return self._spec

    @property
    def source(self) -> Path | None:
        """The file or package that the user named."""
        return self._source

    def check_source(self) -> None:
        """Nothing: the whole specification was read."""

    @cached_property
    def graphs(self) -> Sequence[Network]:
        """The networks."""
        return [Network(spec) for spec in networks_of(self.spec)]

    @property
    def members(self) -> Mapping[str, Network | None]:
        """The models of a pipeline by name; those that are no networks stay."""
        if self.spec.WhichOneof("Type") not in PIPELINES:
            return {}
        graphs = iter(self.graphs)
        return {name: next(graphs) if networks_of(spec) else None for name, spec in members_of(self.spec)}

    @staticmethod
    def validate(graph: Network) -> None:
        """Nothing: each new layer was built as ops, which fails where it is not valid."""

    def finish(self) -> None:
        """Write the layers into the specification; a pipeline is as new as the newest of its models."""
        if any(network.edited for network in self.graphs):
            for network in self.graphs:
                network.commit()
            newest = max(int(spec.specificationVersion) for spec in [self.spec, *networks_of(self.spec)])
            self.spec.specificationVersion = newest

    @property
    def interface(self) -> Interface:
        """The description; the version may rise, which a note says."""
        return Interface({}, description_parts(self.spec.description))

    @property
    def op_counts(self) -> dict[str, int]:
        """Number of layers by type, without `loadConstant`, which holds a constant."""
        kinds = (layer.WhichOneof("layer") or "unknown" for layer, _ in self._layers())
        return count_kinds(kind for kind in kinds if kind != "loadConstant")

    def _layers(self) -> Iterator[tuple[Any, int]]:
        for spec in networks_of(self.spec):
            yield from walk_layers(network_of(spec))

    def inspect(self, target: str | None) -> tuple[Inspection, ...]:
        """Return what the rules of the format say of each network."""
        device = Target.parse(target, None)
        return tuple(inspect_network(part, device, "") for part in networks_of(self.spec))

    def score(self, target: Target) -> Score:
        """Score by the rules of the format: there is no time, only what can run on the ANE counts.

        First, edits are written into the specification.
        """
        self.finish()
        for graph in self.graphs:
            graph.refresh()
        parts = [inspect_network(one.spec, target, "", one.blobs, advice=False) for one in self.graphs]
        return Score.of_layers(*parts)

    def time(self, target: str | None) -> Time | None:
        """Return the time of one prediction with each network; None for a target of several generations."""
        one = len(Target.parse(target, None).families) == 1
        return total_of([inspection.time for inspection in self.inspect(target)]) if one else None

    def notes(self, before: Self) -> list[str]:
        """Return what a raised version asks of the system, and which layers no pass looks at."""
        old, new = ([int(s.specificationVersion) for s in networks_of(m.spec)] for m in (before, self))
        raised = sorted({(a, b) for a, b in zip(old, new, strict=True) if a != b})
        said = [f"specification version {a} became {b}, which needs {NEEDED}" for a, b in raised]
        if inside := sum(depth > 0 for _, depth in self._layers()):
            said.append(f"{inside} layers inside branches and loops are skipped: no pass looks there")
        return said

    def compare(
        self, before: Self, inputs: Mapping[str, Array] | None, how: Comparing
    ) -> list[Comparison | Refusal]:
        """Compare each network with itself before, in fp32."""
        pairs = zip(networks_of(before.spec), networks_of(self.spec), strict=True)
        options = how.options(gate=EXACT if how.exact else CLOSE)
        return [self._compared(old, new, inputs, **options) for old, new in pairs]

    def _compared(
        self, old: Any, new: Any, inputs: Mapping[str, Array] | None, **how: Any
    ) -> Comparison | Refusal:
        try:
            a = import_network(old, keep_names=True)
        except LoadError as error:  # a custom layer: its code is not in the file
            return Refusal(str(error))
        b = import_network(new, keep_names=True)  # passes add no custom layer
        is_member = new is not self.spec
        if is_member and set(inputs or ()) != {f.name for f in old.description.input}:
            inputs = None  # those given are of another network of the pipeline: random ones
        return compare(a, b, inputs, precision="fp32", **how)

    @property
    def program(self) -> Program:
        """The network as an ML Program; made anew on each use.

        Raises:
            LoadError: it is a pipeline, or a layer cannot be built.
        """
        return import_network(self.spec, keep_names=True).program

    def mlmodel(self) -> Any:
        """Return an MLModel of the older format."""
        with temporary_files(), quiet_host():
            return ct.models.MLModel(self.spec, compute_units=self.units or ct.ComputeUnit.ALL)

    def save(self, path: Path, *, overwrite: bool, edited: bool) -> Path:
        """Write the `.mlmodel`; byte for byte the input where nothing was edited."""
        target = path.expanduser().absolute()
        check_target(self.source, target, overwrite, self.suffix)
        same = None if edited else self.file
        content = self.spec.SerializeToString() if same is None else same.read()
        return write_atomically(target, lambda file: file.write_bytes(content), overwrite)


def _check(spec: Any, what: str) -> None:
    """Refuse a network that is damaged, or that edits would break.

    Raises:
        LoadError: it names the layer.
    """
    if spec.isUpdatable:
        raise LoadError(f"{what}: the model is updatable, and its layers learn by name; switch updating off")
    try:
        import_network(spec, what, keep_names=True)
    except LoadError:
        if not any(layer.WhichOneof("layer") == "custom" for layer, _ in walk_layers(network_of(spec))):
            raise
        # The code of a custom layer is not in the file; all others must be right all the same, but for those
        # behind it in a branch: no pass looks there.
        if errors := Network(spec).blobs.errors:
            raise LoadError(f"{what}: {errors[0]}") from errors[0]
