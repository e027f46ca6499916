"""Inspect a neural-network model (`.mlmodel`), layer by layer, by the rules of its own format.

There is no cost model for these models: a layer that the ANE can run is counted as running there. Shapes are
inferred by building the layers as MIL ops; where that fails, those that the file has are told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

from anesurgery.errors import LoadError, NotExpressible, SurgeryError
from anesurgery.mil import Operation, any_symbolic, is_weight, nested_ops
from anesurgery.neuralnetwork.blob_shapes import Blobs
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.spec import network_of, walk_layers
from anesurgery.placement import cost
from anesurgery.placement.evidence import Finding
from anesurgery.placement.inspection import NO_TIME, Inspection, OpRow, Segment
from anesurgery.placement.rules.faulty_ops import of_layers
from anesurgery.placement.rules.layer_rules import BROADCASTABLE, OLD_FORMAT, RANK_FREE, Described, judge
from anesurgery.placement.target import Target
from anesurgery.placement.timing import Timed, load_of, timed, why_not_of
from anesurgery.placement.verdicts import Judged, with_times
from anesurgery.semantics.reading import kind_of
from anesurgery.semantics.rows import Work, work_of

CONSTANTS = {"loadConstant", "loadConstantND"}
"""Layers that compute nothing; the first kind is left out, the second gets a row for what is said of it."""

UNKNOWN: tuple[int, ...] = (-1,)
"""The shape of a value of which the file does not say it."""

NO_COSTS = "no cost model is known for neural networks: each layer that the ANE can run counts as running there"
OLD_RULES = "what is known about neural networks dates from 2018 to 2022; later systems were not measured"
ON_ALL = (
    "with ALL, Core ML chooses between GPU and CPU for layers that the ANE cannot run; its choice is not known"
)
ON_GPU = "with CPU_AND_GPU, Core ML chooses between GPU and CPU; which is not known"


@dataclass(frozen=True)
class _Layer:
    """A layer of a network or of one nested in it."""

    spec: Any
    depth: int

    @property
    def kind(self) -> str:
        return self.spec.WhichOneof("layer") or "unknown"

    @property
    def name(self) -> str:
        return self.spec.name or next(iter(self.spec.output), self.kind)


def inspect_network(spec: Any, target: Target, label: str) -> Inspection:
    """Where the layers of a neural network run, as far as that is known.

    Args:
        spec: specification of a model, one of `NETWORKS`.
        target: chips, OS and compute units.
        label: the model in words.

    Returns:
        Rows in file order, those of nested networks after the layer that holds them; constants of the first
        kind are left out. `flop` is that of the ops of an ML Program for the layer, nested ones included
        (0 for all where a layer cannot be built); `dtype` is "", `bytes` is 0, `memory` is None: the file
        does not say.
        Where no ML Program can be made of a sound network, a note says why.

    Raises:
        LoadError: the network is damaged.
    """
    network = getattr(spec, spec.WhichOneof("Type"))
    layers = [
        described for described in starmap(_Layer, walk_layers(network)) if described.kind != "loadConstant"
    ]
    blobs = _blobs(spec)
    shapes = _shapes(spec, layers, blobs)
    constants = frozenset(name for one in layers if one.kind == "loadConstantND" for name in one.spec.output)
    rows = [_row(index, layer, target, shapes, constants) for index, layer in enumerate(layers)]
    rows = [replace(r, flop=_flop(blobs, one)) for r, one in zip(rows, layers, strict=True)]
    numbers, segments = _segments(layers, rows, shapes, {f.name for f in spec.description.output})
    rows = [replace(row, segment=number) for row, number in zip(rows, numbers, strict=True)]
    named = [(row, next(iter(one.spec.output), one.spec.name)) for row, one in zip(rows, layers, strict=True)]
    timed = time_of_network(blobs, named, target)
    if timed.each:
        rows = [replace(row, ms=ms) for row, ms in zip(rows, timed.each, strict=True)]
    faults, obstacle = _as_program(spec, label, target)
    return Inspection(
        label,
        target,
        tuple(rows),
        with_times(segments, numbers, timed.each),
        (*_about(rows), *faults),
        None,
        (*_notes(rows, target), *obstacle, *([f"{NO_TIME}{timed.why}"] if timed.why else [])),
        time=timed.time,
    )


def _row(
    index: int, layer: _Layer, target: Target, shapes: dict[str, tuple[int, ...]], constants: frozenset[str]
) -> OpRow:
    inputs = tuple(shapes.get(name, ()) for name in layer.spec.input)
    described = Described(layer.spec, inputs, constants.intersection(layer.spec.input))
    legal, against = judge(described, target)
    findings = tuple(rule.finding_of(described, layer.name, words, target) for rule, words in against)
    shape = shapes.get(next(iter(layer.spec.output), ""), UNKNOWN)
    return OpRow(
        index,
        layer.name,
        layer.kind,
        "" if shape == UNKNOWN else "x".join(map(str, shape)),
        "",
        legal,
        _unit(legal, target),
        0,
        findings,
        depth=layer.depth,
    )


def _unit(legal: bool | None, target: Target) -> str | None:
    if target.compute_units == "CPU_ONLY":
        return "cpu"
    if not target.uses_ane or legal is None:
        return None
    if legal:
        return "ane"
    return "cpu" if target.compute_units == "CPU_AND_NE" else None


def _blobs(spec: Any) -> Blobs | None:
    """What is known of the blobs from the layers; None where an input cannot be read."""
    try:
        return Blobs(network_of(spec), spec.description)
    except SurgeryError:
        return None


def _flop(blobs: Blobs | None, layer: _Layer) -> int:
    """Of the ops that are built for a layer; 0 for one inside another, and where some layer cannot be built."""
    if blobs is None or blobs.missing or layer.depth:
        return 0
    ops = blobs.ops.get(next(iter(layer.spec.output), layer.spec.name), ())
    nested = (inner for op in ops for inner in nested_ops(op))
    return sum(work_of(op).flop for op in (*ops, *nested))


def _shapes(spec: Any, layers: Sequence[_Layer], blobs: Blobs | None) -> dict[str, tuple[int, ...]]:
    """Shapes by name of value: inferred, of the interface, and what converters wrote into the layers."""
    shapes = {} if blobs is None else _inferred(blobs, layers)
    for layer in layers:
        named = [*zip(layer.spec.input, layer.spec.inputTensor, strict=False)]
        named += [*zip(layer.spec.output, layer.spec.outputTensor, strict=False)]
        for name, tensor in named:
            if len(tensor.dimValue) == tensor.rank > 0 and name not in shapes:
                shapes[name] = tuple(int(d) for d in tensor.dimValue)
    for feature in [*spec.description.input, *spec.description.output]:
        if shape := feature_shape(feature):
            shapes[feature.name] = shape
    return shapes


def _inferred(blobs: Blobs, layers: Sequence[_Layer]) -> dict[str, tuple[int, ...]]:
    """The shapes that are known from the layers, (channel, height, width) where arrays have rank 5."""
    inferred: dict[str, tuple[int, ...]] = {}
    for name in {n for layer in layers for n in [*layer.spec.input, *layer.spec.output]}:
        shape = blobs.shape(name)
        if shape is not None and None not in shape:
            sizes = tuple(int(d or 0) for d in shape)
            old = blobs.ctx.legacy and len(sizes) == 5 and sizes[:2] == (1, 1)
            inferred[name] = sizes[2:] if old else sizes
    return inferred


def feature_shape(feature: Any) -> tuple[int, ...]:
    """The shape of an input or output: of an image (C, H, W), of a vector (C, 1, 1); () where it has none."""
    kind = feature.type.WhichOneof("Type")
    if kind == "imageType":
        image = feature.type.imageType
        grey = "GRAYSCALE" in type(image).ColorSpace.Name(image.colorSpace)
        return (1 if grey else 3, int(image.height), int(image.width))
    if kind != "multiArrayType":
        return ()
    shape = tuple(int(d) for d in feature.type.multiArrayType.shape)
    return (*shape, 1, 1) if len(shape) == 1 else shape


def _segments(
    layers: Sequence[_Layer], rows: Sequence[OpRow], shapes: dict[str, tuple[int, ...]], results: set[str]
) -> tuple[list[int], list[Segment]]:
    """Number of the segment of each row, and the segments; constants are made first, wherever they stand."""
    order = sorted(range(len(rows)), key=lambda i: layers[i].kind not in CONSTANTS)
    numbers, units = [0] * len(rows), list[str | None]()
    for place, i in enumerate(order):
        if place == 0 or rows[i].preferred != units[-1]:
            units.append(rows[i].preferred)
        numbers[i] = len(units) - 1
    maker = {name: numbers[i] for i, layer in enumerate(layers) for name in layer.spec.output}
    read: dict[str, set[int]] = {}
    for i, layer in enumerate(layers):
        for name in layer.spec.input:
            read.setdefault(name, set()).add(numbers[i])
    return numbers, [
        _segment(
            n, unit, [rows[i].name for i in range(len(rows)) if numbers[i] == n], maker, read, shapes, results
        )
        for n, unit in enumerate(units)
    ]


def _segment(
    number: int,
    unit: str | None,
    ops: list[str],
    maker: dict[str, int],
    read: dict[str, set[int]],
    shapes: dict[str, tuple[int, ...]],
    results: set[str],
) -> Segment:
    own = {name for name, n in maker.items() if n == number}
    inputs = [
        name
        for name, by in read.items()
        if number in by and name not in own and (name in maker or name in shapes)
    ]
    outputs = [n for n in maker if n in own and (n in results or read.get(n, set()) - {number})]
    readers = {n for name in outputs for n in read.get(name, set())} - {number}
    return Segment(
        number,
        unit,
        tuple(ops),
        {n: shapes.get(n, UNKNOWN) for n in inputs},
        {n: shapes.get(n, UNKNOWN) for n in outputs},
        tuple(sorted(readers)),
    )


def _about(rows: Sequence[OpRow]) -> Iterator[Finding]:
    old = Counter(r.op_type for r in rows if r.op_type in BROADCASTABLE | RANK_FREE)
    if old:
        words = ", ".join(f"{n} {kind}" for kind, n in old.most_common())
        yield OLD_FORMAT.finding(f"layers of the old format: {words}")


def _notes(rows: Sequence[OpRow], target: Target) -> Iterator[str]:
    if target.uses_ane:
        yield NO_COSTS
        yield OLD_RULES
    unknown = Counter(r.op_type for r in rows if r.legal is None)
    if unknown:
        words = ", ".join(f"{kind} ({n})" for kind, n in unknown.most_common())
        yield f"nothing is known about these layers: {words}"
    if target.compute_units in ("ALL", "CPU_AND_GPU"):
        yield ON_ALL if target.uses_ane else ON_GPU


def _as_program(spec: Any, label: str, target: Target) -> tuple[list[Finding], list[str]]:
    """What the ops of a network are reported to get wrong; or why no ML Program can be made of a sound one.

    Raises:
        LoadError: it is damaged; also where a sound layer before the damage cannot be built.
    """
    try:
        return list(of_layers(import_network(spec, label).program, target)), []
    except NotExpressible as error:
        if (damage := _damage(spec)) is not None:
            raise LoadError(f"{label}: {damage}") from damage
        return [], [f"it cannot become an ML Program: {str(error).removeprefix(f'{label}: ')}"]


def _damage(spec: Any) -> LoadError | None:
    """What is wrong with a layer, whatever cannot be built before it."""
    try:
        errors = Blobs(network_of(spec), spec.description).errors
    except NotExpressible:
        return None
    return next((error for error in errors if not isinstance(error, NotExpressible)), None)


# Estimate how long a neural network takes, from the ops that stand for its layers, in fp16.

FULL = "fp32"
"""The dtype in which layers are built; the engine computes in fp16, which moves half of the bytes."""


def time_of_network(blobs: Blobs | None, layers: Sequence[tuple[OpRow, str]], target: Target) -> Timed:
    """The time of a network, and that of each layer.

    Args:
        blobs: what is known of the blobs; None where an input cannot be read.
        layers: the row of each layer, and the name of its first output.
        target: names one chip, or chips of one generation.
    """
    if why := why_not_of(target):
        return Timed(None, why)
    if blobs is None or blobs.missing or any(row.depth for row, _ in layers):
        return Timed(None, "some layers cannot be built as ops, or are nested: nothing prices them")
    if any(any_symbolic(v.shape or ()) for v in blobs.function.inputs.values()):
        return Timed(None, "its shapes vary, and published times of such models disagree several times")
    owned = [(at, op) for at, (_, name) in enumerate(layers) for op in _ops(blobs, name)]
    rows = [layers[at][0] for at, _ in owned]
    judged = [_judged(op, row, target) for row, (_, op) in zip(rows, owned, strict=True)]
    spent = timed(load_of(judged, [row.preferred for row in rows]), target)
    each = [0.0] * len(layers)
    for (at, _), ms in zip(owned, spent.each, strict=bool(spent.each)):
        each[at] += ms
    return replace(spent, each=tuple(each) if spent.each else ())


def _ops(blobs: Blobs, name: str) -> Iterable[Operation]:
    return (op for op in blobs.ops.get(name, ()) if not is_weight(op))


def _judged(op: Operation, row: OpRow, target: Target) -> Judged:
    work = _halved(op)
    return Judged(op, 0, row.legal, (), work, cost.estimate(op, work, target))


def _halved(op: Operation) -> Work:
    """What an op asks for when its numbers are fp16."""
    work = work_of(op)
    if kind_of(op.outputs[0]).dtype != FULL:
        return work
    return Work(work.read // 2, work.constant // 2, work.written // 2, work.flop)
