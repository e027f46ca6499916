"""Inspect a neural-network model (`.mlmodel`) layer by layer, by the rules of its own format (`layer_rules`).

`inspect` comes here through `models.inspect_other`. No cost model is known for these models, so a layer that
the ANE can run counts as running there. Shapes are inferred by building the layers as MIL ops; where that
fails, the shapes in the file are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

from anesurgery.errors import LoadError, NotExpressible, SurgeryError
from anesurgery.interpret.features import eight_bit_images
from anesurgery.mil import Operation, any_symbolic, is_weight, nested_ops
from anesurgery.neuralnetwork.blob_shapes import Blobs
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.spec import is_legacy, network_of, walk_layers
from anesurgery.placement import cost
from anesurgery.placement.evidence import Finding
from anesurgery.placement.flexible import flexible_shapes
from anesurgery.placement.inspection import NO_TIME, Inspection, OpRow, Segment
from anesurgery.placement.rules.faulty_ops import findings_of_layers
from anesurgery.placement.rules.layer_rules import (
    BROADCASTABLE,
    LONG_AXIS,
    LONGEST,
    OLD_FORMAT,
    RANK_FREE,
    REFUSED,
    Described,
    judge,
    long_axis,
    of_training,
    refusal,
)
from anesurgery.placement.rules.lost_in_conversion import SCORES, raw_scores
from anesurgery.placement.rules.shapes import of_images, of_lengths
from anesurgery.placement.rules.whole_model import doubts_about_shapes
from anesurgery.placement.target import Target
from anesurgery.placement.timing import Timed, load_of, timed, why_not_of
from anesurgery.placement.verdicts import Judged, with_times
from anesurgery.semantics.reading import kind_of
from anesurgery.semantics.rows import Work, work_of

CONSTANTS = {"loadConstant", "loadConstantND"}
"""Layers that compute nothing. The first kind gets no row; the second does, since rules are about it."""

UNKNOWN: tuple[int, ...] = (-1,)
"""Stands for the shape of a value that is not known."""

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

    @property
    def output(self) -> str:
        """The name of its first output; its own where it has none."""
        return next(iter(self.spec.output), self.spec.name)


def inspect_network(
    spec: Any, target: Target, label: str, blobs: Blobs | None = None, *, advice: bool = True
) -> Inspection:
    """Return where the layers of a neural network run, as far as that is known.

    Args:
        spec: the specification of a model of one of the types in `NETWORKS`.
        target: chips, OS and compute units.
        label: the model in words, for messages.
        blobs: of the network; inferred by default.
        advice: report wrong ops and images, and what keeps it from becoming an ML Program? A score needs none,
            and building the program takes longest.

    Returns:
        An inspection with rows in file order, those of nested networks after the layer that holds them, without
        `loadConstant` layers. `flop` is that of the MIL ops for the layer, nested ones included (0 for all rows
        if a layer cannot be built). `dtype` is "", `bytes` is 0 and `memory` is None: the file does not say.
        If a sound network cannot become an ML Program, a note says why.

    Raises:
        LoadError: the network is damaged.
    """
    network = getattr(spec, spec.WhichOneof("Type"))
    layers = [layer for layer in starmap(_Layer, walk_layers(network)) if layer.kind != "loadConstant"]
    blobs = blobs or _blobs(spec)
    shapes = _shapes_by_name(spec, layers, blobs)
    constants = frozenset(name for la in layers if la.kind == "loadConstantND" for name in la.spec.output)
    rows = [
        replace(_row(index, layer, target, shapes, constants), flop=_flop(blobs, layer))
        for index, layer in enumerate(layers)
    ]
    about_shapes, doubts = _about_lengths(spec, blobs, target)
    rows = [replace(row, preferred=None) if doubts and row.preferred == "ane" else row for row in rows]
    numbers, segments = _segments(layers, rows, shapes, {f.name for f in spec.description.output})
    time_of_layers = _time_of_network(blobs, layers, rows, target)
    milliseconds = time_of_layers.each or [None] * len(rows)
    rows = [replace(row, segment=n, ms=ms) for row, n, ms in zip(rows, numbers, milliseconds, strict=True)]
    faults, obstacle = _faults_and_obstacle(spec, label, target) if advice else ([], [])
    if not advice and blobs is not None and (damage := _damage(blobs)) is not None:  # else the import finds it
        raise LoadError(f"{label}: {damage}") from damage
    return Inspection(
        model=label,
        target=target,
        ops=tuple(rows),
        segments=with_times(segments, numbers, time_of_layers.each),
        findings=(
            *_refused(spec, layers),
            *_too_long(shapes),
            *_format_findings(rows),
            *faults,
            *about_shapes,
            *doubts,
        ),
        notes=(*_notes(rows, target), *obstacle, *([f"{NO_TIME}{why}"] if (why := time_of_layers.why) else [])),
        time=time_of_layers.time,
    )


def _row(
    index: int, layer: _Layer, target: Target, shapes: dict[str, tuple[int, ...]], constants: frozenset[str]
) -> OpRow:
    inputs = tuple(shapes.get(name, ()) for name in layer.spec.input)
    described = Described(layer.spec, inputs, constants.intersection(layer.spec.input))
    legal, against = judge(described, target)
    findings = tuple(rule.finding_about(described, layer.name, words, target) for rule, words in against)
    shape = shapes.get(next(iter(layer.spec.output), ""), UNKNOWN)
    return OpRow(
        index=index,
        name=layer.name,
        op_type=layer.kind,
        shape="" if shape == UNKNOWN else "x".join(map(str, shape)),
        dtype="",
        legal=legal,
        preferred=_unit(legal, target),
        segment=0,
        findings=findings,
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
    """Return the blobs of a network, built from its layers; None if an input cannot be read."""
    try:
        return Blobs(network_of(spec), spec.description)
    except SurgeryError:
        return None


def _about_lengths(
    spec: Any, blobs: Blobs | None, target: Target
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Return the findings about inputs of several sizes, and those after which the ANE may run nothing."""
    if blobs is None:
        return (), ()
    shapes = flexible_shapes(blobs.function, spec.description)
    return of_lengths(blobs.function, shapes, target), doubts_about_shapes(blobs.function, shapes, target)


def _flop(blobs: Blobs | None, layer: _Layer) -> int:
    """Return the flop of the ops of a layer; 0 for a nested layer, and if some layer cannot be built."""
    if blobs is None or blobs.missing or layer.depth:
        return 0
    return sum(work_of(op).flop for outer in _ops(blobs, layer) for op in (outer, *nested_ops(outer)))


def _ops(blobs: Blobs, layer: _Layer) -> Iterable[Operation]:
    """Return the ops that were built for a layer, without constants."""
    return (op for op in blobs.ops.get(layer.output, ()) if not is_weight(op))


def _shapes_by_name(spec: Any, layers: Sequence[_Layer], blobs: Blobs | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of values: of inputs and outputs, else inferred, else as converters wrote them.

    In the exact mapping, the description of a vector says less than what is inferred.
    """
    shapes = {} if blobs is None else _inferred(blobs, layers)
    for layer in layers:
        named = [*zip(layer.spec.input, layer.spec.inputTensor, strict=False)]
        named += [*zip(layer.spec.output, layer.spec.outputTensor, strict=False)]
        for name, tensor in named:
            if len(tensor.dimValue) == tensor.rank > 0 and name not in shapes:
                shapes[name] = tuple(int(d) for d in tensor.dimValue)
    for feature in [*spec.description.input, *spec.description.output]:
        shape = _feature_shape(feature)
        if shape and (feature.name not in shapes or is_legacy(network_of(spec))):
            shapes[feature.name] = shape
    return shapes


def _inferred(blobs: Blobs, layers: Sequence[_Layer]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that follow from the layers; (C, H, W) in networks with arrays of rank 5."""
    inferred: dict[str, tuple[int, ...]] = {}
    for name in dict.fromkeys(n for layer in layers for n in [*layer.spec.input, *layer.spec.output]):
        shape = blobs.shape(name)
        if shape is not None and None not in shape:
            sizes = tuple(int(d or 0) for d in shape)
            has_old_rank = blobs.ctx.legacy and len(sizes) == 5 and sizes[:2] == (1, 1)
            inferred[name] = sizes[2:] if has_old_rank else sizes
    return inferred


def _feature_shape(feature: Any) -> tuple[int, ...]:
    """Return the shape of an input or output: (C, H, W) of an image, (C, 1, 1) of a vector; () without one."""
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
    """Return the segment number of each row, and the segments; constants come first, wherever they stand.

    A segment has the values that cross its border, with the shapes that are known.
    """
    order = sorted(range(len(rows)), key=lambda i: layers[i].kind != "loadConstantND")
    numbers, units = [0] * len(rows), list[str | None]()
    for i in order:
        if not units or rows[i].preferred != units[-1]:
            units.append(rows[i].preferred)
        numbers[i] = len(units) - 1
    segment_of = {name: numbers[i] for i, layer in enumerate(layers) for name in layer.spec.output}
    readers: dict[str, set[int]] = {}
    for i, layer in enumerate(layers):
        for name in layer.spec.input:
            readers.setdefault(name, set()).add(numbers[i])
    inputs: list[dict[str, tuple[int, ...]]] = [{} for _ in units]
    outputs: list[dict[str, tuple[int, ...]]] = [{} for _ in units]
    following: list[set[int]] = [set() for _ in units]
    for name in [n for n in readers if n in segment_of or n in shapes]:
        for n in readers[name] - {segment_of.get(name)}:
            inputs[n][name] = shapes.get(name, UNKNOWN)
    for name, n in segment_of.items():
        others = readers.get(name, set()) - {n}
        if others or name in results:
            outputs[n][name] = shapes.get(name, UNKNOWN)
            following[n] |= others
    ops: list[list[str]] = [[] for _ in units]
    for row, n in zip(rows, numbers, strict=True):
        ops[n].append(row.name)
    return numbers, [
        Segment(n, unit, tuple(ops[n]), inputs[n], outputs[n], tuple(sorted(following[n])))
        for n, unit in enumerate(units)
    ]


def _refused(spec: Any, layers: Iterable[_Layer]) -> Iterator[Finding]:
    """Yield a finding for each layer that Core ML refuses, or cannot train."""
    for layer in layers:
        if why := refusal(layer.spec):
            yield REFUSED.finding(f"Core ML does not load it: {layer.name} {why}", layer.name)
    if spec.isUpdatable:
        yield from of_training(network_of(spec))


def _too_long(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
    """Yield the finding about values with a longer height or width than networks loaded with."""
    if names := [name for name, shape in shapes.items() if long_axis([shape])]:
        words = f"%{names[0]} is {long_axis([shapes[names[0]]])}: an axis above {LONGEST}"
        yield LONG_AXIS.finding(f"reported to fail: {words}")


def _format_findings(rows: Sequence[OpRow]) -> Iterator[Finding]:
    """Yield the finding about layers that need not be off the engine in an ML Program."""
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


def _faults_and_obstacle(spec: Any, label: str, target: Target) -> tuple[list[Finding], list[str]]:
    """Return (findings about ops and images, []), or ([], [why a sound network cannot become an ML Program]).

    Raises:
        LoadError: the network is damaged, also if a sound layer before the damage cannot be built.
    """
    try:
        program, described = import_network(spec, label).program, spec.description
        pixels = eight_bit_images([*described.input, *described.output])
        main = program.functions["main"]
        scores = (raw_scores(op) for op in main.operations if op.op_type == "classify")
        about_scores = (SCORES.finding(words) for words in scores if words)
        return [*findings_of_layers(program, target), *of_images(main, pixels), *about_scores], []
    except NotExpressible as error:
        with suppress(NotExpressible):
            if (damage := _damage(Blobs(network_of(spec), spec.description))) is not None:
                raise LoadError(f"{label}: {damage}") from damage
        return [], [f"it cannot become an ML Program: {str(error).removeprefix(f'{label}: ')}"]


def _damage(blobs: Blobs) -> LoadError | None:
    """Return what is wrong with a damaged layer; None if all are sound."""
    return next((error for error in blobs.errors if not isinstance(error, NotExpressible)), None)


BUILT_DTYPE = "fp32"
"""The dtype in which layers are built. The engine computes in fp16, which moves half of the bytes."""


def _time_of_network(
    blobs: Blobs | None, layers: Sequence[_Layer], rows: Sequence[OpRow], target: Target
) -> Timed:
    """Return the time of a network and of each layer from its ops in fp16, or why there is none.

    `blobs` is None if an input could not be read. Only one chip, or chips of one generation, have a time.
    """
    if why := why_not_of(target):
        return Timed(None, why)
    if blobs is None or blobs.missing or any(layer.depth for layer in layers):
        return Timed(None, "some layers cannot be built as ops, or are nested: nothing prices them")
    if any(any_symbolic(v.shape or ()) for v in blobs.function.inputs.values()):
        return Timed(None, "its shapes vary, and published times of such models disagree several times")
    ops = [(index, op) for index, layer in enumerate(layers) for op in _ops(blobs, layer)]
    judged = [_judged(op, rows[index], target) for index, op in ops]
    time_of_ops = timed(load_of(judged, [rows[index].preferred for index, _ in ops]), target)
    if not time_of_ops.each:
        return time_of_ops
    each = [0.0] * len(layers)
    for (index, _), ms in zip(ops, time_of_ops.each, strict=True):
        each[index] += ms
    return replace(time_of_ops, each=tuple(each))


def _judged(op: Operation, row: OpRow, target: Target) -> Judged:
    work = _work_in_fp16(op)
    return Judged(
        op, depth=0, legal=row.legal, findings=(), work=work, estimate=cost.estimate(op, work, target)
    )


def _work_in_fp16(op: Operation) -> Work:
    """Return the work of an op whose numbers are fp16."""
    work = work_of(op)
    if kind_of(op.outputs[0]).dtype != BUILT_DTYPE:
        return work
    return Work(read=work.read // 2, constant=work.constant // 2, written=work.written // 2, flop=work.flop)
