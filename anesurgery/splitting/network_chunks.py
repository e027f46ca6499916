"""Cut a neural network at the layers that the Neural Engine cannot run, custom layers among them.

The chunks are networks again. What passes between two is an array of the shape that the blob has in the whole;
each chunk is built as ops to see that it has the same shape there. Constants are in every chunk that reads
them, layers that nobody reads in none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from anesurgery.errors import SurgeryError
from anesurgery.files.protobuf import proto
from anesurgery.files.sequence import Border, Chain, Ends
from anesurgery.neuralnetwork.blob_shapes import Blobs
from anesurgery.neuralnetwork.loaded_network import LoadedNetwork
from anesurgery.neuralnetwork.ports import as_array
from anesurgery.neuralnetwork.spec import EXACT, NETWORKS, is_legacy, nested_networks, network_of, walk_layers
from anesurgery.placement.networks import CONSTANTS, inspect_network
from anesurgery.placement.target import Target
from anesurgery.splitting.phases import joined, phases

Shape = tuple[int, ...]
FLOAT32 = proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT32
NOT_COPIED = ("layers", "preprocessing")
"""Fields of a network that a chunk has its own of."""


@dataclass(frozen=True)
class Layers:
    """The layers of a network that compute something its outputs need, in file order."""

    spec: Any
    target: Target

    @cached_property
    def network(self) -> Any:
        """The message of the network."""
        return network_of(self.spec)

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Blob -> layer that holds it."""
        kept = {f.name for f in self.spec.description.output}
        held = [x for x in self.network.layers if x.WhichOneof("layer") in CONSTANTS]
        return {x.output[0]: x for x in held if x.output[0] not in kept}

    @cached_property
    def scores(self) -> str:
        """The blob with the probabilities of a classifier; "" of another network."""
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
    def _judged(self) -> list[tuple[Any, bool]]:
        """Each layer of the network itself, and whether it, or one nested in it, cannot run on the ANE."""
        rows = iter(inspect_network(self.spec, self.target, "the model").ops)
        layers: list[tuple[Any, bool]] = []
        for layer, depth in walk_layers(self.network):
            if layer.WhichOneof("layer") == "loadConstant":
                continue
            refused = next(rows).legal is False
            if depth:
                outer, outside = layers.pop()
                layers.append((outer, outside or refused))
            else:
                layers.append((layer, refused))
        return layers

    @cached_property
    def kept(self) -> list[tuple[Any, bool]]:
        """The layers that the outputs need; constants are apart."""
        needed, needed_layers = set(self.results), []
        for layer, refused in reversed(self._judged):
            if not (layer.output and layer.output[0] in self.constants) and needed & set(makes(layer)):
                needed_layers.append((layer, refused))
                needed |= set(reads(layer))
        return needed_layers[::-1]

    def chunks(self) -> list[list[Any]]:
        """The layers of each chunk.

        Raises:
            SurgeryError: there is nothing to cut.
        """
        layers, apart = [x for x, _ in self.kept], [bad for _, bad in self.kept]
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
        numbers = joined(phases(before, apart), changed)
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
    """The blobs that a layer and those nested in it read."""
    inner = [other for network in nested_networks(layer) for other, _ in walk_layers(network)]
    ends = [x.loop.conditionVar for x in (layer, *inner) if x.WhichOneof("layer") == "loop"]
    return list(
        dict.fromkeys([*layer.input, *(b for other in inner for b in other.input), *filter(None, ends)])
    )


def makes(layer: Any) -> list[str]:
    """The blobs that a layer and those nested in it make."""
    inner = [other for network in nested_networks(layer) for other, _ in walk_layers(network)]
    return list(dict.fromkeys([*layer.output, *(b for other in inner for b in other.output)]))


def cut_network(
    spec: Any, target: Target, shapes: Mapping[str, Shape] | None = None, source: Any = None
) -> Chain:
    """Cut a neural network before and after what the ANE cannot run.

    Args:
        spec: specification of a model, one of `NETWORKS`.
        target: chips and OS, which say what that is.
        shapes: of blobs of which the file does not say it, as those that custom layers make.
        source: the file it came from.

    Raises:
        SurgeryError: there is no such layer or no other; or a blob cannot pass between two models.
        LoadError: the network is damaged.
    """
    if spec.isUpdatable:
        raise SurgeryError("the model is updatable, and its layers learn by name; switch updating off")
    layers = Layers(spec, target)
    return _Cut(layers, layers.chunks(), dict(shapes or {}), source).chain()


class _Cut:
    """The chunks of a network in the making."""

    def __init__(
        self, layers: Layers, groups: Sequence[list[Any]], shapes: dict[str, Shape], source: Any
    ) -> None:
        self._layers, self._groups, self._given, self._source = layers, groups, shapes, source
        self._description = layers.spec.description
        self._inputs = {f.name: f for f in self._description.input}
        self._shapes: dict[str, Shape] = {}
        """Of the blobs that pass, as they are in the whole."""

    @cached_property
    def _read(self) -> list[list[str]]:
        """What each chunk reads from elsewhere, constants left out."""
        entering = []
        for group in self._groups:
            own = {blob for layer in group for blob in makes(layer)}
            names = dict.fromkeys(blob for layer in group for blob in reads(layer))
            elsewhere = {b for other in self._groups if other is not group for x in other for b in makes(x)}
            entering.append([n for n in names if n not in own and (n in self._inputs or n in elsewhere)])
        unread = [n for n in self._inputs if not any(n in names for names in entering)]
        return [[*entering[0], *unread], *entering[1:]]

    @cached_property
    def _given_on(self) -> list[list[str]]:
        """What each chunk makes that later ones read."""
        results = [dict.fromkeys(b for layer in group for b in makes(layer)) for group in self._groups]
        return [
            [name for name in names if any(name in later for later in self._read[at + 1 :])]
            for at, names in enumerate(results)
        ]

    def chain(self) -> Chain:
        """The chunks, each with the shapes of those before it."""
        chunks = [self._chunk(number) for number in range(len(self._groups))]
        borders = [self._border(at) for at in range(1, len(chunks))]
        weights = tuple(sum(layer.ByteSize() for layer in network_of(c.spec).layers) for c in chunks)
        ends = Ends(tuple(self._inputs), tuple(f.name for f in self._description.output))
        return Chain.of(chunks, {"": ends}, borders=tuple(borders), weights=weights, source=self._source)

    def _chunk(self, number: int) -> LoadedNetwork:
        spec = self._empty(number)
        network, group = network_of(spec), self._groups[number]
        wanted = {name for layer in group for name in reads(layer)}
        held = [x for name, x in self._layers.constants.items() if name in wanted]
        network.layers.extend([*held, *group])
        for name in self._read[number]:
            self._enter(spec, name)
        blobs = self._checked(spec, number)
        for name in self._given_on[number]:
            self._shapes[name] = self._shape(name, blobs, group)
            if name not in {f.name for f in self._description.output}:
                _describe(spec.description.output.add(name=name), self._stated(name))
        return LoadedNetwork(spec, f"chunk {number + 1}", self._source)

    def _empty(self, number: int) -> Any:
        """The specification of a chunk without layers and arrays; it decides if the scores are made in it."""
        whole, network = self._layers.spec, self._layers.network
        spec = proto.Model_pb2.Model(specificationVersion=whole.specificationVersion)
        spec.description.metadata.CopyFrom(self._description.metadata)
        mine = {blob for layer in self._groups[number] for blob in makes(layer)}
        decides = (
            self._layers.scores in mine
            if self._layers.scores
            else self._description.predictedFeatureName in mine
        )
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
        read = set(self._read[number])
        into.preprocessing.extend(step for step in network.preprocessing if step.featureName in {"", *read})
        decided = {self._description.predictedFeatureName, self._description.predictedProbabilitiesName} - {""}
        for feature in self._description.output:
            if feature.name in mine or (decides and feature.name in decided):
                spec.description.output.add().CopyFrom(feature)
        return spec

    def _enter(self, spec: Any, name: str) -> None:
        """Describe an input of a chunk: one of the whole, or what an earlier chunk makes."""
        feature = spec.description.input.add(name=name)
        if name in self._inputs:
            feature.CopyFrom(self._inputs[name])
            return
        _describe(feature, self._stated(name))
        if self._exact:
            network_of(spec).arrayInputShapeMapping = EXACT

    @cached_property
    def _exact(self) -> bool:
        """Do arrays between chunks have all axes of their blobs, and not those of the rank 5 mapping?

        Blobs made of images have four axes where the network says so, which that mapping would change.
        """
        network = self._layers.network
        images = all(f.type.WhichOneof("Type") == "imageType" for f in self._inputs.values())
        return not is_legacy(network) or (images and int(network.imageInputShapeMapping) == EXACT)

    def _stated(self, name: str) -> Shape:
        """The shape of an array between two chunks, as a description states it.

        Raises:
            SurgeryError: no array has that shape in the mapping of the network.
        """
        shape = self._shapes[name]
        if self._exact:
            return shape
        if len(shape) != 5:
            raise SurgeryError(
                f"the blob {name!r} of shape {_words(shape)} cannot pass between two models: in the rank 5 "
                "mapping of this network an array would get other axes; upgrade the model"
            )
        return as_array(shape)

    def _shape(self, name: str, blobs: Blobs, group: Sequence[Any]) -> Shape:
        """The shape of a blob, with all its axes: inferred, or as the file or the caller says.

        Raises:
            SurgeryError: nobody says it, or it is dynamic.
        """
        shape = blobs.shape(name)
        if shape is None:
            shape = self._said(name, blobs, group)
        if None in shape:
            raise SurgeryError(
                f"the blob {name!r} would pass between two models, and its shape is dynamic "
                f"({_words(shape)}); give the inputs fixed shapes"
            )
        return tuple(int(d or 0) for d in shape)

    def _said(self, name: str, blobs: Blobs, group: Sequence[Any]) -> tuple[int | None, ...]:
        """The shape that the caller gives, or that the layer states."""
        if name in self._given:
            shape = self._given[name]
            if self._exact or len(shape) == 5:
                return shape
            if len(shape) in (1, 3):
                return (1, 1, *shape, *([1, 1] if len(shape) == 1 else []))
            raise SurgeryError(f"shapes: {name!r} is {_words(shape)}, but takes C, CxHxW or five sizes")
        for layer in group:
            for blob, tensor in zip(layer.output, layer.outputTensor, strict=False):
                if blob == name and 0 < tensor.rank == len(tensor.dimValue):
                    return tuple(int(d) for d in tensor.dimValue)
        raise SurgeryError(self._unknown(name, blobs))

    def _unknown(self, name: str, blobs: Blobs) -> str:
        """Why the shape of a blob is unknown, and what to give; of all custom layers at once."""
        if blobs.errors:
            return f"the shape of the blob {name!r} is unknown: {blobs.errors[0]}"
        custom = [x for group in self._groups for x in group if x.WhichOneof("layer") == "custom"]
        passed = {blob for names in self._given_on for blob in names}
        wanted = [b for x in custom for b in x.output if b in passed and b not in self._given]
        asked = ", ".join(f"{blob!r}: (C, H, W)" for blob in wanted or [name])
        words = ", ".join(repr(x.name) for x in custom)
        return f"the code of custom layers ({words}) is not in the file; give shapes={{{asked}}}"

    def _checked(self, spec: Any, number: int) -> Blobs:
        """The blobs of a chunk, after a look whether what enters has the shape that it has in the whole.

        Raises:
            SurgeryError: it has not.
        """
        blobs = Blobs(network_of(spec), spec.description)
        for name in self._read[number]:
            if name not in self._inputs and (inferred := blobs.shape(name)) != self._shapes[name]:
                raise SurgeryError(
                    f"the blob {name!r} of shape {_words(self._shapes[name])} would enter chunk "
                    f"{number + 1} as {_words(inferred or ())}; upgrade the model"
                )
        return blobs

    def _border(self, at: int) -> Border:
        """What the chunks before a place give to those after it."""
        later = {name for names in self._read[at:] for name in names}
        names = tuple(dict.fromkeys(n for names in self._given_on[:at] for n in names if n in later))
        sizes = tuple(4 * math.prod(self._shapes[n]) for n in names)
        return Border(names, sizes, tuple(f"{_words(self._stated(n))}xfp32" for n in names))


def _describe(feature: Any, shape: Shape) -> None:
    """Make a feature an array."""
    array = feature.type.multiArrayType
    array.dataType = FLOAT32
    array.shape.extend(shape)


def _assign(message: Any, field: Any, value: Any) -> None:
    if field.message_type is not None and not hasattr(value, "append"):
        getattr(message, field.name).CopyFrom(value)
    elif hasattr(value, "append"):
        getattr(message, field.name).extend(value)
    else:
        setattr(message, field.name, value)


def _words(shape: Sequence[int | None]) -> str:
    return "x".join("?" if d is None else str(d) for d in shape) or "no axes"
