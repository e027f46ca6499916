"""Cut a neural network before and after the layers that the Neural Engine cannot run (`cut_network`).

The chunks are networks again. A blob that passes between two becomes an array of its shape in the whole
network; each chunk's shapes are inferred, to check that it is the same there. Constants are in every chunk that
reads them; layers that nobody reads are in none.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from anesurgery.errors import SurgeryError
from anesurgery.files.protobuf import proto
from anesurgery.files.sequence import Border, Chain, Ends
from anesurgery.neuralnetwork.blob_shapes import Blobs
from anesurgery.neuralnetwork.importing import LoadedNetwork
from anesurgery.neuralnetwork.ports import as_array
from anesurgery.neuralnetwork.spec import EXACT, NETWORKS, is_legacy, nested_networks, network_of, walk_layers
from anesurgery.placement.networks import CONSTANTS, inspect_network
from anesurgery.placement.target import Target
from anesurgery.semantics.reading import shape_in_words
from anesurgery.splitting.phases import merged_phases, phases_of

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
        """Blob -> the layer that holds it, if no other layer writes it."""
        outputs = {f.name for f in self.spec.description.output}
        times = Counter(blob for layer in self.network.layers for blob in makes(layer))
        constants = [layer for layer in self.network.layers if layer.WhichOneof("layer") in CONSTANTS]
        names = ((layer.output[0], layer) for layer in constants)
        return {name: layer for name, layer in names if name not in outputs and times[name] == 1}

    @cached_property
    def scores(self) -> str:
        """The blob with the probabilities of a classifier; "" in another network."""
        if "ClassLabels" not in self.network.DESCRIPTOR.oneofs_by_name or not len(self.network.layers):
            return ""
        return str(self.network.labelProbabilityLayerName or self.network.layers[-1].output[0])

    @cached_property
    def results(self) -> list[str]:
        """The blobs that leave the network; a classifier decides on its label by the scores."""
        outputs = [f.name for f in self.spec.description.output]
        if not self.scores:
            return outputs
        decided = {self.spec.description.predictedFeatureName, self.spec.description.predictedProbabilitiesName}
        return [*(name for name in outputs if name not in decided), self.scores]

    @cached_property
    def _judged(self) -> list[JudgedLayer]:
        """All layers that are not nested in others."""
        rows = iter(
            inspect_network(self.spec, self.target, "the model").ops
        )  # one for each layer but constants
        layers: list[JudgedLayer] = []
        for layer, depth in walk_layers(self.network):
            if layer.WhichOneof("layer") == "loadConstant":
                if not depth:
                    layers.append(JudgedLayer(layer, False))
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
        overwritten = [blob for blob, by in makers.items() if len(by) > 1 or blob in entering]
        before = [{m for b in reads(x) for m in makers.get(b, ()) if m < i} for i, x in enumerate(layers)]
        for blob in overwritten:  # its users stay in their order, in one chunk
            for first, second in itertools.pairwise(users[blob]):
                before[second].add(first)
        numbers = merged_phases(phases_of(before, apart), [users[blob] for blob in overwritten])
        if not any(numbers):
            raise SurgeryError(
                f"{overwritten[0]!r} is overwritten, and the layers that use it must stay together; there is "
                "no cut"
            )
        groups: list[list[Any]] = [[] for _ in range(max(numbers) + 1)]
        for layer, number in zip(layers, numbers, strict=True):
            groups[number].append(layer)
        return groups


def reads(layer: Any) -> list[str]:
    """Return the blobs that a layer and those nested in it read."""
    layers = _with_nested(layer)
    conditions = [one.loop.conditionVar for one in layers if one.WhichOneof("layer") == "loop"]
    return list(dict.fromkeys([*(blob for one in layers for blob in one.input), *filter(None, conditions)]))


def makes(layer: Any) -> list[str]:
    """Return the blobs that a layer and those nested in it make."""
    return list(dict.fromkeys(blob for one in _with_nested(layer) for blob in one.output))


def _with_nested(layer: Any) -> list[Any]:
    return [layer, *(inner for network in nested_networks(layer) for inner, _ in walk_layers(network))]


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
        return [[*entering[0], *unread], *entering[1:]]  # so that the chain has all inputs of the network

    @cached_property
    def _blobs_passed(self) -> list[list[str]]:
        """For each chunk, the blobs that it makes and later chunks read."""
        results = [dict.fromkeys(b for layer in group for b in makes(layer)) for group in self._groups]
        return [
            [name for name in names if any(name in later for later in self._blobs_read[number + 1 :])]
            for number, names in enumerate(results)
        ]

    def chain(self) -> Chain:
        """Return the chunks, each built with the shapes of those before it."""
        chunks = [self._chunk(number) for number in range(len(self._groups))]
        borders = [self._border(number) for number in range(1, len(chunks))]
        weights = tuple(sum(layer.ByteSize() for layer in network_of(c.spec).layers) for c in chunks)
        ends = Ends(tuple(self._inputs), tuple(f.name for f in self._description.output))
        return Chain.of(chunks, {"": ends}, borders=tuple(borders), weights=weights, source=self._source)

    def _chunk(self, number: int) -> LoadedNetwork:
        spec = self._empty_spec(number)
        network, group = network_of(spec), self._groups[number]
        read = {name for layer in group for name in reads(layer)}
        constants = [layer for name, layer in self._layers.constants.items() if name in read]
        network.layers.extend([*constants, *group])
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
        own = {blob for layer in self._groups[number] for blob in makes(layer)}
        decides = (self._layers.scores or self._description.predictedFeatureName) in own
        chunk = getattr(spec, whole.WhichOneof("Type") if decides else NETWORKS[0])
        chunk.SetInParent()
        if decides:
            self._copy_decision(chunk, spec.description)
        else:
            chunk.arrayInputShapeMapping = network.arrayInputShapeMapping
            chunk.imageInputShapeMapping = network.imageInputShapeMapping
        read = {"", *self._blobs_read[number]}  # some preprocessing names no input
        chunk.preprocessing.extend(each for each in network.preprocessing if each.featureName in read)
        decided = {self._description.predictedFeatureName, self._description.predictedProbabilitiesName} - {""}
        for feature in self._description.output:
            if feature.name in own or (decides and feature.name in decided):
                spec.description.output.add().CopyFrom(feature)
        return spec

    def _copy_decision(self, chunk: Any, description: Any) -> None:
        """Copy what makes a network a classifier or regressor, such as labels, to the chunk that decides."""
        for field, value in self._layers.network.ListFields():
            if field.name not in NOT_COPIED:
                _assign(chunk, field, value)
        for field in ("predictedFeatureName", "predictedProbabilitiesName"):
            setattr(description, field, getattr(self._description, field))
        if self._layers.scores:
            chunk.labelProbabilityLayerName = self._layers.scores

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
                f"the blob {name!r} of shape {shape_in_words(shape)} cannot pass between two models: in the "
                "rank 5 mapping of this network an array would get other axes; upgrade the model"
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
                f"({shape_in_words(shape)}); give the inputs fixed shapes"
            )
        return tuple(int(d or 0) for d in shape)

    def _stated_shape(self, name: str, blobs: Blobs, group: Sequence[Any]) -> tuple[int | None, ...]:
        """Return the shape that the caller gives, or that the layer states."""
        if name in self._given:
            shape = self._given[name]
            if self._keeps_all_axes or len(shape) == 5:
                return shape
            if len(shape) in (1, 3):  # C and CxHxW become 1x1xCx1x1 and 1x1xCxHxW
                return (1, 1, *shape, *([1, 1] if len(shape) == 1 else []))
            raise SurgeryError(f"shapes: {name!r} is {shape_in_words(shape)}, but takes C, CxHxW or five sizes")
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
        missing = [b for x in custom for b in x.output if b in passed and b not in self._given]
        shapes = ", ".join(f"{blob!r}: (C, H, W)" for blob in missing or [name])
        layers = ", ".join(repr(x.name) for x in custom)
        return f"the code of custom layers ({layers}) is not in the file; give shapes={{{shapes}}}"

    def _checked_blobs(self, spec: Any, number: int) -> Blobs:
        """Return the blobs of a chunk, after a check that its inputs have the shapes of the whole network.

        Raises:
            SurgeryError: an input has another shape.
        """
        blobs = Blobs(network_of(spec), spec.description)
        for name in self._blobs_read[number]:
            if name not in self._inputs and (inferred := blobs.shape(name)) != self._shapes[name]:
                raise SurgeryError(
                    f"the blob {name!r} of shape {shape_in_words(self._shapes[name])} would enter chunk "
                    f"{number + 1} as {shape_in_words(inferred or ())}; upgrade the model"
                )
        return blobs

    def _border(self, number: int) -> Border:
        """Return what the chunks before the one of this number pass to it and those after it."""
        later = {name for names in self._blobs_read[number:] for name in names}
        names = tuple(dict.fromkeys(n for names in self._blobs_passed[:number] for n in names if n in later))
        sizes = tuple(4 * math.prod(self._shapes[n]) for n in names)
        return Border(names, sizes, tuple(f"{shape_in_words(self._array_shape(n))}xfp32" for n in names))


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
