"""Apply layer passes to the neural networks of a model, prove the result, and save it as an `.mlmodel`."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from anesurgery.checking.comparison import Comparison, compare
from anesurgery.errors import LoadError, ProofError, SurgeryError
from anesurgery.files.package import Loaded, locate, read_spec
from anesurgery.files.protobuf import proto
from anesurgery.files.source import SourceFile
from anesurgery.files.writing import check_target, write_atomically
from anesurgery.mil import Array, Program, ct, quiet_host
from anesurgery.neuralnetwork.editing.layer_pass import LayerPass
from anesurgery.neuralnetwork.editing.network import Network
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.spec import network_of, networks_of, walk_layers
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.networks import inspect_network
from anesurgery.placement.target import Target
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import Session
from anesurgery.surgery import Surgery

SUFFIX = ".mlmodel"
EXACT, CLOSE = float("inf"), 100.0
"""PSNR in dB of the outputs in fp32: where every pass is exact, and where one rounds otherwise."""
RELEASES = {4: "iOS 13 or macOS 10.15"}
"""Specification version -> the first systems that read it."""


@dataclass
class NetworkSurgery(Surgery):
    """The result of `apply` with layer passes: `loaded.spec` is the changed specification."""

    original: Any = None
    """The specification as it came."""
    file: SourceFile | None = None
    """Its file, which is never written to."""
    inspected: tuple[tuple[Inspection, ...], tuple[Inspection, ...]] = ((), ())
    """What the rules of the format say of each network, before and after."""

    @property
    def spec(self) -> Any:
        """The changed specification."""
        return self.loaded.spec

    @property
    def program(self) -> Program:
        """The changed network as an ML Program; made anew on each use.

        Raises:
            LoadError: it is a pipeline, or a layer cannot be built.
        """
        return import_network(self.spec, keep_names=True).program

    @property
    def model(self) -> Any:
        """The changed model as a coremltools MLModel of the older format."""
        units = self.loaded.compute_units or ct.ComputeUnit.ALL
        with quiet_host():
            return ct.models.MLModel(self.spec, compute_units=units)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the `.mlmodel` atomically; byte for byte the input where nothing changed.

        Raises:
            LoadError: the path exists, is the input, has another suffix, or cannot be written.
        """
        target = Path(path).expanduser().absolute()
        check_target(self.loaded.source, target, overwrite, SUFFIX)
        same = self.file if not self.changes else None
        content = self.spec.SerializeToString() if same is None else same.read()
        return write_atomically(target, lambda file: file.write_bytes(content), overwrite)


def apply_layers(
    model: Any,
    steps: Sequence[Pass],
    *,
    target: str | None,
    prove: str | None,
    inputs: Mapping[str, Array] | None,
    quiet: bool,
    seed: int,
) -> NetworkSurgery:
    """`anesurgery.apply` for layer passes; the arguments are as there.

    Raises:
        LoadError: the model cannot be read.
        SurgeryError: it holds no neural network, or a step is for ML Programs.
        PassError: a pass raised, or its layers do not fit.
        ProofError: the numbers after are outside what was promised.
    """
    layered = _layered(steps)
    started = time.perf_counter()
    loaded, file = _read(model)
    original = proto.Model_pb2.Model()
    original.CopyFrom(loaded.spec)
    networks = networks_of(loaded.spec)
    what = "the model" if file is None else str(file.path)
    for i, spec in enumerate(networks):
        _check(spec, what if spec is loaded.spec else f"{what}: network {i} of the pipeline")
    if not networks:
        words = f"it is a {loaded.spec.WhichOneof('Type')}, which has no layers"
        raise SurgeryError(f"{_named(steps)}: for neural networks (.mlmodel); {words}")
    session = Session(target=target, prove_sites=prove in ("sites", "both"), seed=seed)
    session.timings["load"] = time.perf_counter() - started
    for spec in networks:
        _operate(spec, layered, session, quiet)
    if session.changes:  # a pipeline is as new as the newest of its models
        newest = max(int(spec.specificationVersion) for spec in [loaded.spec, *networks])
        loaded.spec.specificationVersion = newest
    before, after = _inspect(original, target), _inspect(loaded.spec, target)
    surgery = NetworkSurgery(
        loaded,
        tuple(steps),
        session.changes,
        session.refusals,
        [],
        _counts(before),
        _counts(after),
        target,
        timings=session.timings,
        original=original,
        file=file,
        inspected=(before, after),
    )
    surgery.notes += [*_versions(original, loaded.spec), _kept_off(before, after)]
    surgery.notes += _said(session, layered, networks)
    if prove in ("model", "both"):
        surgery.proof = _prove(surgery, inputs, seed)
    return surgery


def _layered(steps: Sequence[Pass]) -> list[LayerPass]:
    """The steps, which must all be layer passes."""
    found = [step for step in steps if isinstance(step, LayerPass)]
    others = [step for step in steps if not isinstance(step, LayerPass)]
    if others:
        raise SurgeryError(
            f"{_named(found)} work on the layers of a neural network, {_named(others)} on the ops of an ML "
            "Program; apply the first, then the others to the result"
        )
    return found


def _named(steps: Sequence[Pass]) -> str:
    """Some steps in words."""
    names = [step.name for step in steps]
    return ", ".join(names if len(names) <= 3 else [names[0], f"{len(names) - 1} more"])


def _read(model: Any) -> tuple[Loaded, SourceFile | None]:
    """A specification of its own, and its file."""
    if isinstance(model, ct.models.MLModel):
        spec = proto.Model_pb2.Model()
        spec.CopyFrom(model.get_spec())
        place = None if model.package_path is None else Path(model.package_path)
        return Loaded(Program(), spec, place, None, model.compute_unit), None
    if isinstance(model, proto.Model_pb2.Model):
        spec = proto.Model_pb2.Model()
        spec.CopyFrom(model)
        return Loaded(Program(), spec), None
    if not isinstance(model, (str, os.PathLike)):
        raise LoadError(
            f"cannot read layers from a {type(model).__name__}; give the path of an {SUFFIX}, an MLModel of "
            "one, or its specification"
        )
    source = Path(model).expanduser()
    file = SourceFile(locate(source)[0])
    return Loaded(Program(), read_spec(file), source.resolve()), file


def _operate(spec: Any, steps: Sequence[LayerPass], session: Session, quiet: bool) -> None:
    network = Network(spec)
    for step in tqdm(steps, unit=" passes", disable=True if quiet else None, leave=False):
        started = time.perf_counter()
        step.run_network(network, session)
        spent = time.perf_counter() - started
        session.timings[step.name] = session.timings.get(step.name, 0.0) + spent
    network.commit()


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
        if not any(layer.WhichOneof("layer") == "custom" for layer in network_of(spec).layers):
            raise
        # The code of a custom layer is not in the file; all others must be right all the same.
        if errors := Network(spec).blobs.errors:
            raise LoadError(f"{what}: {errors[0]}") from errors[0]


def _inspect(spec: Any, target: str | None) -> tuple[Inspection, ...]:
    aim = Target.parse(target, None)
    return tuple(inspect_network(part, aim, "") for part in networks_of(spec))


def _counts(found: Sequence[Inspection]) -> dict[str, int]:
    """Number of layers by type, the most frequent first."""
    kinds = Counter(row.op_type for part in found for row in part.ops)
    return dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0])))


def _versions(before: Any, after: Any) -> list[str]:
    """What a version that had to be raised asks of the system."""
    old, new = ([int(s.specificationVersion) for s in networks_of(spec)] for spec in (before, after))
    raised = sorted({(a, b) for a, b in zip(old, new, strict=True) if a != b})
    return [f"specification version {a} became {b}, which needs {RELEASES[b]}" for a, b in raised]


def _said(session: Session, steps: Sequence[LayerPass], networks: Sequence[Any]) -> Iterator[str]:
    """What holds of passes that changed something, and which layers no pass looks at."""
    used = {change.pass_name for change in session.changes}
    yield from (f"{step.name}: {step.caveat}" for step in steps if step.caveat and step.name in used)
    inside = sum(depth > 0 for spec in networks for _, depth in walk_layers(network_of(spec)))
    if inside:
        yield f"{inside} layers inside branches and loops are left alone: no pass looks there"


def _kept_off(before: Sequence[Inspection], after: Sequence[Inspection]) -> str:
    """How many layers the rules of the format forbid."""
    words = []
    for found in (before, after):
        rows = [row for part in found for row in part.ops]
        words.append(f"{sum(row.legal is False for row in rows)} of {len(rows)}")
    return f"layers that the rules of the format keep off the ANE: {' -> '.join(words)}"


def _prove(surgery: NetworkSurgery, inputs: Mapping[str, Array] | None, seed: int) -> Comparison | None:
    """Compare each network with what it was, in fp32; the worst comparison, None if there is none.

    Raises:
        ProofError: the outputs differ by more than the passes promised.
    """
    started = time.perf_counter()
    used = {change.pass_name for change in surgery.changes}
    exact = all(s.tolerance.rtol == 0 for s in surgery.steps if s.name in used)
    found: list[Comparison] = []
    for old, new in zip(networks_of(surgery.original), networks_of(surgery.spec), strict=True):
        try:
            before = import_network(old, keep_names=True)
        except LoadError as error:
            surgery.notes.append(f"not compared as a whole: {error}")
            continue
        after = import_network(new, keep_names=True)
        own = old is surgery.original or set(inputs or ()) == {f.name for f in old.description.input}
        gate = EXACT if exact else CLOSE
        result = compare(before, after, inputs if own else None, precision="fp32", gate=gate, seed=seed)
        if not result.ok:
            raise ProofError(f"the outputs are not shown to agree: {result.verdict}")
        found.append(result)
    surgery.timings["prove model"] = time.perf_counter() - started
    return min(found, key=lambda result: result.psnr, default=None)
