"""Split a model into chunks that run one after the other (`anesurgery.split`).

An ML Program is cut where the fewest bytes cross (`cuts`, `graph`), or at the ops that the Neural Engine cannot
run (`engine_phases`). A neural network is cut at its layers (`cut_network`, first half of this file). The
result is a `Chain`, compared with the whole model where that is cheap.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from anesurgery.byte_counts import byte_words, read_size
from anesurgery.checking.comparison import compare
from anesurgery.doors import door
from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.files.interface import describe, new_spec, warn_of_names
from anesurgery.files.joining import default_function
from anesurgery.files.mil_types import type_text
from anesurgery.files.package import Loaded
from anesurgery.files.protobuf import proto
from anesurgery.files.sequence import Border, Chain, ChunkPlacement, Ends, is_network
from anesurgery.interpret.decoder_calls import INPUTS
from anesurgery.loading import load, load_as_is
from anesurgery.mil import exclusive, function_of, types, walk_ops
from anesurgery.neuralnetwork.blob_shapes import Blobs
from anesurgery.neuralnetwork.importing import LoadedNetwork
from anesurgery.neuralnetwork.ports import as_array
from anesurgery.neuralnetwork.spec import EXACT, NETWORKS, is_legacy, nested_networks, network_of, walk_layers
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.models import inspect_other
from anesurgery.placement.networks import CONSTANTS, inspect_network
from anesurgery.placement.target import Target
from anesurgery.semantics.rows import work_of
from anesurgery.splitting.cuts import Cuts
from anesurgery.splitting.graph import WRITING, Graph, Stretch, carve_functions, read_graphs, stretches


def phases_of(before: Sequence[Collection[int]], apart: Sequence[bool]) -> list[int]:
    """Return the phase of each op, from 0: ops that stand apart are in odd phases, the others in even ones.

    Args:
        before: for each op, the earlier ops that must run first.
        apart: for each op, whether it stands apart, as ops that the engine cannot run.
    """
    phase_of: list[int] = []
    for needed, is_apart in zip(before, apart, strict=True):
        least = max((phase_of[n] for n in needed), default=0)
        phase_of.append(least + (least % 2 != is_apart))  # the first phase from `least` on that is odd or even
    return phase_of


def merged_phases(numbers: Sequence[int], together: Iterable[Collection[int]]) -> list[int]:
    """Renumber phases without gaps, where some ops must stay in one phase: phases between them are merged.

    Ops in the phases 0, 1, 2, 1, 2, of which the second and third must stay together, get 0, 1, 1, 1, 1.

    Args:
        numbers: the phase of each op.
        together: sets of ops, each to stay in one phase.
    """
    spans = [(min(numbers[i] for i in ops), max(numbers[i] for i in ops)) for ops in together if ops]
    new: dict[int, int] = {}
    number = -1
    for phase in sorted(set(numbers)):
        number += not any(first < phase <= last for first, last in spans)
        new[phase] = number
    return [new[phase] for phase in numbers]


# -- neural networks, cut at the layers that the Neural Engine cannot run --------------------------------
#
# The chunks are networks again. A blob that passes between two becomes an array of its shape in the whole
# network; each chunk's shapes are inferred, to check that it is the same there. Constants are in every chunk
# that reads them; layers that nobody reads are in none.

Shape = tuple[int, ...]
FLOAT32 = proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT32
NOT_COPIED = ("layers", "preprocessing")
"""Fields of a network that are not copied to a chunk."""


class JudgedLayer(NamedTuple):
    """A layer of a network, with a verdict."""

    message: Any
    refused: bool
    """Whether it, or a layer nested in it, cannot run on the ANE."""


@dataclass(frozen=True)
class Layers:
    """The layers of a network on which its outputs depend, in file order."""

    spec: Any
    target: Target

    @cached_property
    def network(self) -> Any:
        """The network's message in the specification."""
        return network_of(self.spec)

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Blob -> the layer that holds it."""
        kept = {f.name for f in self.spec.description.output}
        held = [x for x in self.network.layers if x.WhichOneof("layer") in CONSTANTS]
        return {x.output[0]: x for x in held if x.output[0] not in kept}

    @cached_property
    def scores(self) -> str:
        """The blob with the probabilities of a classifier; "" in another network."""
        if "ClassLabels" not in self.network.DESCRIPTOR.oneofs_by_name or not len(self.network.layers):
            return ""
        return str(self.network.labelProbabilityLayerName or self.network.layers[-1].output[0])

    @cached_property
    def results(self) -> list[str]:
        """The blobs that leave the network."""
        decided = {self.spec.description.predictedFeatureName, self.spec.description.predictedProbabilitiesName}
        plain = [f.name for f in self.spec.description.output]
        return [n for n in plain if n not in decided] + [self.scores] if self.scores else plain

    @cached_property
    def _judged(self) -> list[JudgedLayer]:
        """All layers that are not nested in others."""
        rows = iter(inspect_network(self.spec, self.target, "the model").ops)
        layers: list[JudgedLayer] = []
        for layer, depth in walk_layers(self.network):
            if layer.WhichOneof("layer") == "loadConstant":
                continue
            refused = next(rows).legal is False
            if depth:  # nested in the last one
                layers[-1] = JudgedLayer(layers[-1].message, layers[-1].refused or refused)
            else:
                layers.append(JudgedLayer(layer, refused))
        return layers

    @cached_property
    def kept(self) -> list[JudgedLayer]:
        """The layers on which the outputs depend, without constants."""
        needed, kept = set(self.results), list[JudgedLayer]()
        for judged in reversed(self._judged):
            layer = judged.message
            if not (layer.output and layer.output[0] in self.constants) and needed & set(makes(layer)):
                kept.append(judged)
                needed |= set(reads(layer))
        return kept[::-1]

    def chunks(self) -> list[list[Any]]:
        """Return the layers of each chunk.

        Raises:
            SurgeryError: there is nothing to cut.
        """
        layers, apart = [x.message for x in self.kept], [x.refused for x in self.kept]
        if not any(apart) or all(apart):
            word = "no layer" if any(apart) else "every layer"
            raise SurgeryError(f"{word} of the model can run on the ANE ({self.target}), so there is no cut")
        makers: dict[str, list[int]] = {}
        users: dict[str, list[int]] = {}
        for number, layer in enumerate(layers):
            for blob in makes(layer):
                makers.setdefault(blob, []).append(number)
            for blob in {*makes(layer), *reads(layer)}:
                users.setdefault(blob, []).append(number)
        entering = {f.name for f in self.spec.description.input}
        changed = [users[blob] for blob, by in makers.items() if len(by) > 1 or blob in entering]
        before = [{m for b in reads(x) for m in makers.get(b, ()) if m < i} for i, x in enumerate(layers)]
        for ops in changed:  # a blob that is overwritten: its users stay in their order, in one chunk
            for first, second in itertools.pairwise(ops):
                before[second].add(first)
        numbers = merged_phases(phases_of(before, apart), changed)
        if not any(numbers):
            raise SurgeryError(
                f"{next(b for b in makers if users[b] in changed)!r} is overwritten, and the layers that "
                "use it must stay together; there is no cut"
            )
        groups: list[list[Any]] = [[] for _ in range(max(numbers) + 1)]
        for layer, number in zip(layers, numbers, strict=True):
            groups[number].append(layer)
        return groups


def reads(layer: Any) -> list[str]:
    """Return the blobs that a layer and those nested in it read."""
    inner = [other for network in nested_networks(layer) for other, _ in walk_layers(network)]
    ends = [x.loop.conditionVar for x in (layer, *inner) if x.WhichOneof("layer") == "loop"]
    return list(
        dict.fromkeys([*layer.input, *(b for other in inner for b in other.input), *filter(None, ends)])
    )


def makes(layer: Any) -> list[str]:
    """Return the blobs that a layer and those nested in it make."""
    inner = [other for network in nested_networks(layer) for other, _ in walk_layers(network)]
    return list(dict.fromkeys([*layer.output, *(b for other in inner for b in other.output)]))


def cut_network(
    spec: Any, target: Target, shapes: Mapping[str, Shape] | None = None, source: Any = None
) -> Chain:
    """Cut a neural network before and after the layers that the ANE cannot run.

    Args:
        spec: specification of a model, one of `NETWORKS`.
        target: chips and OS, which decide what the ANE can run.
        shapes: shapes of blobs that the file does not state, such as those that custom layers make.
        source: the file it came from.

    Raises:
        SurgeryError: the ANE can run all layers or none, or a blob cannot pass between two models.
        LoadError: the network is damaged.
    """
    if spec.isUpdatable:
        raise SurgeryError("the model is updatable, and its layers learn by name; switch updating off")
    layers = Layers(spec, target)
    return _NetworkCut(layers, layers.chunks(), dict(shapes or {}), source).chain()


class _NetworkCut:
    """Builds the chunks of a network."""

    def __init__(
        self, layers: Layers, groups: Sequence[list[Any]], shapes: dict[str, Shape], source: Any
    ) -> None:
        self._layers, self._groups, self._given, self._source = layers, groups, shapes, source
        self._description = layers.spec.description
        self._inputs = {f.name: f for f in self._description.input}
        self._shapes: dict[str, Shape] = {}
        """Blob that passes between chunks -> its shape in the whole network."""

    @cached_property
    def _blobs_read(self) -> list[list[str]]:
        """For each chunk, the blobs that it reads from elsewhere, without constants."""
        entering = []
        for group in self._groups:
            own = {blob for layer in group for blob in makes(layer)}
            names = dict.fromkeys(blob for layer in group for blob in reads(layer))
            elsewhere = {b for other in self._groups if other is not group for x in other for b in makes(x)}
            entering.append([n for n in names if n not in own and (n in self._inputs or n in elsewhere)])
        unread = [n for n in self._inputs if not any(n in names for names in entering)]
        return [[*entering[0], *unread], *entering[1:]]

    @cached_property
    def _blobs_passed(self) -> list[list[str]]:
        """For each chunk, the blobs that it makes and later chunks read."""
        results = [dict.fromkeys(b for layer in group for b in makes(layer)) for group in self._groups]
        return [
            [name for name in names if any(name in later for later in self._blobs_read[at + 1 :])]
            for at, names in enumerate(results)
        ]

    def chain(self) -> Chain:
        """Return the chunks, each built with the shapes of those before it."""
        chunks = [self._chunk(number) for number in range(len(self._groups))]
        borders = [self._border(at) for at in range(1, len(chunks))]
        weights = tuple(sum(layer.ByteSize() for layer in network_of(c.spec).layers) for c in chunks)
        ends = Ends(tuple(self._inputs), tuple(f.name for f in self._description.output))
        return Chain.of(chunks, {"": ends}, borders=tuple(borders), weights=weights, source=self._source)

    def _chunk(self, number: int) -> LoadedNetwork:
        spec = self._empty_spec(number)
        network, group = network_of(spec), self._groups[number]
        wanted = {name for layer in group for name in reads(layer)}
        held = [x for name, x in self._layers.constants.items() if name in wanted]
        network.layers.extend([*held, *group])
        for name in self._blobs_read[number]:
            self._add_input(spec, name)
        blobs = self._checked_blobs(spec, number)
        for name in self._blobs_passed[number]:
            self._shapes[name] = self._blob_shape(name, blobs, group)
            if name not in {f.name for f in self._description.output}:
                _describe(spec.description.output.add(name=name), self._array_shape(name))
        return LoadedNetwork(spec, f"chunk {number + 1}", self._source)

    def _empty_spec(self, number: int) -> Any:
        """Return the specification of a chunk without layers and arrays."""
        whole, network = self._layers.spec, self._layers.network
        spec = proto.Model_pb2.Model(specificationVersion=whole.specificationVersion)
        spec.description.metadata.CopyFrom(self._description.metadata)
        mine = {blob for layer in self._groups[number] for blob in makes(layer)}
        decides = (self._layers.scores or self._description.predictedFeatureName) in mine
        kind = whole.WhichOneof("Type") if decides else NETWORKS[0]
        into = getattr(spec, kind)
        into.SetInParent()
        if decides:
            for field, value in network.ListFields():
                if field.name not in NOT_COPIED:
                    _assign(into, field, value)
            for field in ("predictedFeatureName", "predictedProbabilitiesName"):
                setattr(spec.description, field, getattr(self._description, field))
            if self._layers.scores:
                into.labelProbabilityLayerName = self._layers.scores
        else:
            into.arrayInputShapeMapping = network.arrayInputShapeMapping
            into.imageInputShapeMapping = network.imageInputShapeMapping
        read = set(self._blobs_read[number])
        into.preprocessing.extend(step for step in network.preprocessing if step.featureName in {"", *read})
        decided = {self._description.predictedFeatureName, self._description.predictedProbabilitiesName} - {""}
        for feature in self._description.output:
            if feature.name in mine or (decides and feature.name in decided):
                spec.description.output.add().CopyFrom(feature)
        return spec

    def _add_input(self, spec: Any, name: str) -> None:
        """Describe an input of a chunk: an input of the network, or a blob of an earlier chunk."""
        feature = spec.description.input.add(name=name)
        if name in self._inputs:
            feature.CopyFrom(self._inputs[name])
            return
        _describe(feature, self._array_shape(name))
        if self._keeps_all_axes:
            network_of(spec).arrayInputShapeMapping = EXACT

    @cached_property
    def _keeps_all_axes(self) -> bool:
        """Whether arrays between chunks have all axes of their blobs, unlike in the rank 5 mapping.

        Blobs made from images may have four axes, which that mapping would change.
        """
        network = self._layers.network
        images = all(f.type.WhichOneof("Type") == "imageType" for f in self._inputs.values())
        return not is_legacy(network) or (images and int(network.imageInputShapeMapping) == EXACT)

    def _array_shape(self, name: str) -> Shape:
        """Return the shape of an array between two chunks, as a description states it.

        Raises:
            SurgeryError: the mapping of the network has no array of that shape.
        """
        shape = self._shapes[name]
        if self._keeps_all_axes:
            return shape
        if len(shape) != 5:
            raise SurgeryError(
                f"the blob {name!r} of shape {_words(shape)} cannot pass between two models: in the rank 5 "
                "mapping of this network an array would get other axes; upgrade the model"
            )
        return as_array(shape)

    def _blob_shape(self, name: str, blobs: Blobs, group: Sequence[Any]) -> Shape:
        """Return the shape of a blob with all its axes: inferred, or as the file or the caller states it.

        Raises:
            SurgeryError: the shape is unknown or dynamic.
        """
        shape = blobs.shape(name)
        if shape is None:
            shape = self._stated_shape(name, blobs, group)
        if None in shape:
            raise SurgeryError(
                f"the blob {name!r} would pass between two models, and its shape is dynamic "
                f"({_words(shape)}); give the inputs fixed shapes"
            )
        return tuple(int(d or 0) for d in shape)

    def _stated_shape(self, name: str, blobs: Blobs, group: Sequence[Any]) -> tuple[int | None, ...]:
        """Return the shape that the caller gives, or that the layer states."""
        if name in self._given:
            shape = self._given[name]
            if self._keeps_all_axes or len(shape) == 5:
                return shape
            if len(shape) in (1, 3):
                return (1, 1, *shape, *([1, 1] if len(shape) == 1 else []))
            raise SurgeryError(f"shapes: {name!r} is {_words(shape)}, but takes C, CxHxW or five sizes")
        for layer in group:
            for blob, tensor in zip(layer.output, layer.outputTensor, strict=False):
                if blob == name and 0 < tensor.rank == len(tensor.dimValue):
                    return tuple(int(d) for d in tensor.dimValue)
        raise SurgeryError(self._unknown_words(name, blobs))

    def _unknown_words(self, name: str, blobs: Blobs) -> str:
        """Return why the shape of a blob is unknown, and what to give, for all custom layers at once."""
        if blobs.errors:
            return f"the shape of the blob {name!r} is unknown: {blobs.errors[0]}"
        custom = [x for group in self._groups for x in group if x.WhichOneof("layer") == "custom"]
        passed = {blob for names in self._blobs_passed for blob in names}
        wanted = [b for x in custom for b in x.output if b in passed and b not in self._given]
        asked = ", ".join(f"{blob!r}: (C, H, W)" for blob in wanted or [name])
        words = ", ".join(repr(x.name) for x in custom)
        return f"the code of custom layers ({words}) is not in the file; give shapes={{{asked}}}"

    def _checked_blobs(self, spec: Any, number: int) -> Blobs:
        """Return the blobs of a chunk, after a check that its inputs have the shapes of the whole network.

        Raises:
            SurgeryError: an input has another shape.
        """
        blobs = Blobs(network_of(spec), spec.description)
        for name in self._blobs_read[number]:
            if name not in self._inputs and (inferred := blobs.shape(name)) != self._shapes[name]:
                raise SurgeryError(
                    f"the blob {name!r} of shape {_words(self._shapes[name])} would enter chunk "
                    f"{number + 1} as {_words(inferred or ())}; upgrade the model"
                )
        return blobs

    def _border(self, at: int) -> Border:
        """Return what the chunks before a place pass to those after it."""
        later = {name for names in self._blobs_read[at:] for name in names}
        names = tuple(dict.fromkeys(n for names in self._blobs_passed[:at] for n in names if n in later))
        sizes = tuple(4 * math.prod(self._shapes[n]) for n in names)
        return Border(names, sizes, tuple(f"{_words(self._array_shape(n))}xfp32" for n in names))


def _describe(feature: Any, shape: Shape) -> None:
    """Describe a feature as an array."""
    array = feature.type.multiArrayType
    array.dataType = FLOAT32
    array.shape.extend(shape)


def _assign(message: Any, field: Any, value: Any) -> None:
    """Set a field of a message: several values, a message, or a number or text."""
    if hasattr(value, "append"):
        getattr(message, field.name).extend(value)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


def _words(shape: Sequence[int | None]) -> str:
    return "x".join("?" if d is None else str(d) for d in shape) or "no axes"


# -- any model -------------------------------------------------------------------------------------------

BALANCES = ("bytes", "estimate")
"""What chunks may have in equal parts."""
UNSUPPORTED = "unsupported"
Pieces = Mapping[str, list[Stretch]]
"""Function -> its stretch in each chunk."""
NOTHING = Stretch((), (), ())
"""The empty stretch, of a function in chunks before the one that has it."""
NANOSECONDS = 1000
"""Nanoseconds in a microsecond: estimates become integers, which are exact enough in nanoseconds."""


@door()
@exclusive()
def split(
    model: Any,
    parts: int | None = None,
    *,
    max_bytes: int | str | None = None,
    at: str | None = None,
    balance: str = "bytes",
    target: Target | str | None = None,
    function: str | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    compare: bool = True,
) -> Chain:
    """Cut a model into chunks that together compute the same, where the fewest bytes cross.

    Masks, positions and tables of cosines are computed again in each chunk; every other op is in one chunk. A
    constant that two chunks read is in both. A state stays in one chunk. Several functions, as `prefill` and
    `decode`, are cut at the same places. A function that makes the inputs of another (`position_function`)
    stays whole, in the chunk that shares most weights with it.

    Args:
        model: path, MLModel or MIL program.
        parts: how many chunks, of similar size. Or:
        max_bytes: the most bytes of weights in a chunk, such as "950 MB"; makes as few chunks as possible. Or:
        at: "unsupported" cuts before and after ops that the ANE cannot run. A neural network is cut into
            networks.
        balance: make `parts` even by "bytes", or by "estimate" (Core ML's own, for the target).
        target: chips and OS, as "M1/macOS 14"; the report then shows the share of each chunk on the ANE and
            its estimate. For `at` and "estimate", every chip when absent.
        function: the one function to cut. Default: all. `at` and "estimate" need one.
        shapes: with `at`: the shapes of blobs that custom layers make.
        compare: run the model and the chain once on random inputs, if that is quick. The chain's `compared` has
            the result.

    Returns:
        The chain: its chunks, and what passes between them. Its `save` writes a folder or one package.

    Raises:
        LoadError: the model cannot be read.
        SurgeryError: none or several of `parts`, `max_bytes` and `at`; or the model cannot be cut so.
        UnknownName: no such function, target or balance.
    """
    options = _Options(parts, max_bytes, at, balance, function, shapes)
    options.check()
    whole = load(model) if at is None else load_as_is(model)
    device = None if (target, at, balance) == (None, None, "bytes") else Target.parse(target)
    chain = _cut_model(whole, options, device)
    return replace(chain, compared=comparison_words(whole, chain, function)) if compare else chain


@dataclass(frozen=True)
class _Options:
    """Options of `split`."""

    parts: int | None
    max_bytes: int | str | None
    at: str | None
    balance: str
    function: str | None
    shapes: Mapping[str, tuple[int, ...]] | None

    def check(self) -> None:
        """Check that the options go together.

        Raises:
            SurgeryError: the options contradict each other.
            UnknownName: an unknown choice.
        """
        if [self.parts, self.max_bytes, self.at].count(None) != 2:
            raise SurgeryError(
                "give either parts=N or max_bytes=... or at='unsupported', as split(model, max_bytes='950 MB')"
            )
        if self.at not in (None, UNSUPPORTED):
            raise UnknownName("place to cut", str(self.at), [UNSUPPORTED])
        if self.balance not in BALANCES:
            raise UnknownName("balance", self.balance, BALANCES)
        if self.parts is not None and self.parts < 2:
            raise SurgeryError(f"parts={self.parts}; a model is cut into 2 or more")
        if self.balance != "bytes" and self.parts is None:
            raise SurgeryError("balance= is for parts=N")
        if self.shapes and self.at is None:
            raise SurgeryError("shapes= is for at='unsupported'")


def _cut_model(loaded: Loaded, options: _Options, device: Target | None) -> Chain:
    """Return the chain of a model; without a device, nothing asks for the placement of its ops."""
    if isinstance(loaded, LoadedNetwork) and device is not None:
        return _with_placement(cut_network(loaded.spec, device, options.shapes, loaded.source), device)
    warn_of_names(loaded.notes)
    alone = options.at is not None or options.balance != "bytes"
    names = _function_names(loaded, options.function, alone=alone)
    graphs, name = read_graphs(loaded.program, loaded.version, names), names[0]
    graph, others = graphs[name], tuple(Cuts(graphs[other]) for other in names[1:])
    cuts = Cuts(graph, others=others)
    if options.at is not None and device is not None:
        rows = inspect_program(loaded, device, function=name, advice=False).ops
        refused = {row.name for row in rows if row.legal is False}
        graphs[name], places = engine_phases(graph, refused, str(device))
    elif options.parts is not None:
        by_bytes = options.balance == "bytes" or device is None
        costs = None if by_bytes or device is None else _estimated_costs(loaded, graph, device, name)
        places = replace(cuts, costs=costs).into(options.parts)
    else:
        places = cuts.within(read_size(options.max_bytes))
    places_of: dict[str, Sequence[int]] = {name: places}
    for other, matching in zip(names[1:], cuts.matches, strict=True):
        places_of[other] = [p for place in places if (p := matching[place]) is not None]
    pieces = {name: stretches(graph, places_of[name]) for name, graph in graphs.items()}
    makers = [maker for name in names if (maker := f"{name}{INPUTS}") in loaded.program.functions]
    graphs |= read_graphs(loaded.program, loaded.version, makers)
    pieces |= {name: _whole_in_one_chunk(graphs, pieces, name) for name in makers}
    _check_states(graphs, pieces)
    return _with_placement(_carved_chain(loaded, graphs, pieces), device)


def _estimated_costs(loaded: Loaded, graph: Graph, target: Target, name: str) -> tuple[int, ...]:
    """Return the estimate of each node on its preferred unit, in nanoseconds.

    Raises:
        SurgeryError: there is no estimate for this target.
    """
    costs: dict[str, int] = {}
    for row in inspect_program(loaded, target, function=name, advice=False).ops:
        if row.estimate is not None:
            time = row.estimate.ane if row.preferred == "ane" else row.estimate.cpu
            costs[row.name] = round(NANOSECONDS * (time or 0))
    if not any(costs.values()):
        raise SurgeryError(f"there is no estimate for {target}; balance by bytes")
    return tuple(costs.get(node.makes[0], 0) for node in graph.nodes)


def _with_placement(chain: Chain, target: Target | None) -> Chain:
    """Return the chain with the placement of its chunks, if there is a target."""
    if target is None:
        return chain
    inspection = inspect_other(chain, target, partial(inspect_program, advice=False))
    assert inspection is not None
    return replace(chain, placed=tuple(map(_placement_of, inspection.parts.values())), target=str(target))


def _placement_of(part: Inspection) -> ChunkPlacement:
    """Return where a chunk runs."""
    share = part.residency
    away = Counter(row.op_type for row in part.ops if row.preferred != "ane")
    words = tuple(f"{count} {kind}" for kind, count in away.most_common())
    return ChunkPlacement(
        share["ops"], share["flop"] if any(r.flop for r in part.ops) else None, words, part.cost
    )


def _function_names(loaded: Loaded, function: str | None, alone: bool) -> list[str]:
    """Return the functions to cut, the default one first.

    Raises:
        SurgeryError: only one function can be cut, and none is named.
    """
    functions = loaded.program.functions
    if function is None and alone and len(functions) > 1:
        raise SurgeryError(f"the model has the functions {', '.join(functions)}; name one of them (function=)")
    if function is not None:
        chosen = function_of(loaded.program, function)
        return [next(name for name, f in functions.items() if f is chosen)]
    first = default_function(loaded)
    makers = {f"{name}{INPUTS}" for name in functions}
    return [first, *(name for name in functions if name != first and name not in makers)]


def _check_states(graphs: Mapping[str, Graph], cut: Pieces) -> None:
    """Check that the functions use each state in the same chunk.

    Raises:
        SurgeryError: two functions use a state in different chunks.
    """
    first_uses: dict[str, tuple[int, str]] = {}  # state -> (chunk, function)
    for function, number, stretch in ((f, i, s) for f, pieces in cut.items() for i, s in enumerate(pieces, 1)):
        for name in stretch.inputs:
            if name not in graphs[function].state_users:
                continue
            first, other = first_uses.setdefault(name, (number, function))
            if first != number:
                raise SurgeryError(
                    f"{other} uses the state {name} in chunk {first}, {function} in chunk {number}; "
                    "cut the functions one by one (function=)"
                )


def _carved_chain(loaded: Loaded, graphs: Mapping[str, Graph], cut: Pieces) -> Chain:
    """Return the chain of the chunks, each with the stretches of all functions in it."""
    spec = loaded.spec if loaded.spec is not None else new_spec(loaded.program, loaded.version)
    chunks = []
    several = len(graphs) > 1
    for number in range(len(next(iter(cut.values())))):
        pieces = {name: s[number] for name, s in cut.items() if number < len(s) and s[number] is not NOTHING}
        carved = {name if several else "main": (graphs[name], piece) for name, piece in pieces.items()}
        program = carve_functions(carved, loaded.version, f"chunk {number + 1}")
        described = _chunk_spec(spec, pieces, loaded.version, several)
        describe(described, program)
        chunks.append(replace(loaded, program=program, spec=described))
    ends = {name: _function_ends(loaded, name, graph) for name, graph in graphs.items()}
    (name, graph), *_ = graphs.items()
    return Chain.of(
        chunks,
        ends if several else {"": ends[name]},
        borders=tuple(_border(graph, cut[name], at) for at in range(1, len(chunks))),
        weights=tuple(_chunk_bytes(graphs, cut, number) for number in range(len(chunks))),
        source=loaded.source,
    )


def _function_ends(loaded: Loaded, name: str, graph: Graph) -> Ends:
    """Return what a caller gives to a function, without states, and what it returns."""
    inputs = loaded.program.functions[name].inputs.items()
    return Ends(tuple(n for n, v in inputs if not types.is_state(v.sym_type)), graph.outputs)


def _chunk_spec(whole: Any, pieces: Mapping[str, Stretch], version: int, several: bool) -> Any:
    """Return the specification of a chunk: features and metadata of the whole."""
    chunk = type(whole)(specificationVersion=version)
    chunk.description.metadata.CopyFrom(whole.description.metadata)
    for name, stretch in pieces.items():
        described = next((f for f in whole.description.functions if f.name == name), whole.description)
        place = chunk.description.functions.add(name=name) if several else chunk.description
        wanted = {"input": stretch.inputs, "output": stretch.outputs, "state": stretch.inputs}
        for kind, names in wanted.items():
            getattr(place, kind).extend(f for f in getattr(described, kind) if f.name in names)
    if several:
        chunk.description.defaultFunctionName = next(iter(pieces))
    chunk.mlProgram.SetInParent()
    return chunk


def _whole_in_one_chunk(graphs: Mapping[str, Graph], pieces: Pieces, name: str) -> list[Stretch]:
    """Return a function as one piece, in the chunk with which it shares most weights."""
    (whole,) = stretches(graphs[name], [0, len(graphs[name].nodes)])
    own = _chunk_weights(graphs, {name: [whole]}, 0).keys()
    counted = range(max(map(len, pieces.values())))
    shared = [sum(n for w, n in _chunk_weights(graphs, pieces, at).items() if w in own) for at in counted]
    return [*[NOTHING] * shared.index(max(shared)), whole]


def _chunk_bytes(graphs: Mapping[str, Graph], pieces: Pieces, number: int) -> int:
    """Return the bytes of a chunk's weights; those that its functions share count once."""
    return sum(_chunk_weights(graphs, pieces, number).values())


def _chunk_weights(graphs: Mapping[str, Graph], pieces: Pieces, number: int) -> dict[int, int]:
    """Return address -> bytes of a chunk's weights."""
    held: dict[int, int] = {}
    for name, piece in pieces.items():
        for node in piece[number].nodes if number < len(piece) else ():
            held |= graphs[name].weights[node]
    return held


def _border(graph: Graph, stretches_of: Sequence[Stretch], at: int) -> Border:
    """Return what the chunks before a place pass to those after it."""
    before = {name: None for s in stretches_of[:at] for name in s.outputs}
    names = tuple(n for n in before if any(n in s.inputs for s in stretches_of[at:]))
    kinds = tuple(type_text(graph.types[name], False) for name in names)
    return Border(names, tuple(map(graph.size, names)), kinds)


# -- the chain compared with the whole model, where that is cheap ------------------------------------------

MOST_BYTES = 256 << 20
"""The most bytes of weights of models that are compared: in fp32 they take twice as much memory."""
MOST_FLOP = 20 * 10**9
"""The most floating point operations of one run for a comparison: seconds on one core."""
PRECISION = "fp16"
"""The arithmetic as stored, in which a cut must change nothing."""


def comparison_words(whole: Loaded, chain: Chain, function: str | None) -> str:
    """Run both on one sampled input, and return in words how they compare, or why they were not run."""
    if cost := _cost_words(chain):
        return f"not compared with the whole: {cost}; anesurgery.compare does it"
    try:
        if chain.functions or function is not None:
            return "not compared with the whole: name the function to anesurgery.compare, or prove=True"
        compared = compare(whole, chain, precision=PRECISION, gate=math.inf)
    except SurgeryError as error:
        return f"not compared with the whole: {error}"
    if compared.ok:
        return "bit-identical to the whole model, as stored, on one random input"
    return f"NOT equal to the whole model, as stored, on one random input: {compared.verdict}"


def _cost_words(chain: Chain) -> str:
    """Return in words what makes a run too expensive; "" where it is not."""
    size = sum(chain.weights)
    if size > MOST_BYTES:
        return f"{byte_words(size)} of weights"
    programs = [c.program for c in chain.chunks if not is_network(c)]
    flop = sum(work_of(op).flop for p in programs for op in walk_ops(function_of(p, None)))
    return f"{flop / 1e9:.0f} billion operations" if flop > MOST_FLOP else ""


# -- a program, cut before and after the ops that the Neural Engine cannot run ------------------------------
#
# Ops are reordered, as far as their dependences allow, so that there are few chunks. A value that cannot be an
# input, such as a boolean mask, is computed again, or keeps its makers and readers in one chunk. So do states.


def engine_phases(graph: Graph, refused: Collection[str], words: str) -> tuple[Graph, tuple[int, ...]]:
    """Return a graph with its ops in phases, and the places between the phases.

    Args:
        graph: the graph of the whole function.
        refused: names of the ops that cannot run on the ANE.
        words: the target in words, for errors.

    Returns:
        A graph whose nodes are in the order of the chunks, without nodes that nobody reads; and the places.

    Raises:
        SurgeryError: the ANE can run all ops or none, or they cannot be separated.
    """
    graph = replace(graph, nodes=tuple(graph.nodes[i] for i in _needed_nodes(graph)))
    apart = [node.makes[0] in refused for node in graph.nodes]
    if not any(apart) or all(apart):
        word = "no op" if any(apart) else "every op"
        raise SurgeryError(f"{word} of the model can run on the ANE ({words}), so there is no cut")
    needed = [{graph.maker[name] for name in node.reads if name in graph.maker} for node in graph.nodes]
    together = list(graph.state_users.values())
    for users in together:
        for first, second in itertools.pairwise(users):
            needed[second].add(first)
    readers: dict[str, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        for name in node.reads:
            readers.setdefault(name, []).append(number)
    repeated = {name: nodes for name, nodes in graph.repeated.items() if not graph.can_pass(name)}
    for name, maker in graph.maker.items():
        if name not in repeated and name in readers and not graph.can_pass(name):
            together.append([maker, *readers[name]])
    numbers = merged_phases(phases_of(needed, apart), together)
    if not any(numbers):
        raise SurgeryError(
            "the ops that cannot run on the ANE share a state with the others, or values that no input can be; "
            "there is no cut"
        )
    order = sorted(range(len(numbers)), key=lambda i: (numbers[i], i))
    place = {old: new for new, old in enumerate(order)}
    ordered = replace(graph, nodes=tuple(graph.nodes[i] for i in order))
    # values that can pass are passed here, so that each op runs in its own phase
    ordered.repeated = {name: frozenset(place[i] for i in nodes) for name, nodes in repeated.items()}
    ends = [new for new in range(1, len(order)) if numbers[order[new]] != numbers[order[new - 1]]]
    return ordered, (0, *ends, len(order))


def _needed_nodes(graph: Graph) -> list[int]:
    """Return the nodes that an output needs, or that change a state."""
    pending = [graph.maker[name] for name in graph.outputs if name in graph.maker]
    pending += [i for i, node in enumerate(graph.nodes) if node.op.type in WRITING]
    needed: set[int] = set()
    while pending:
        number = pending.pop()
        if number not in needed:
            needed.add(number)
            pending += [graph.maker[name] for name in graph.nodes[number].reads if name in graph.maker]
    return sorted(needed)
