"""Estimate how long a neural network takes, from the ops that stand for its layers, in fp16."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from anesurgery.mil import Operation, any_symbolic, is_weight
from anesurgery.neuralnetwork.blob_shapes import Blobs
from anesurgery.placement import cost
from anesurgery.placement.inspection import OpRow
from anesurgery.placement.target import Target
from anesurgery.placement.timing import Timed, load_of, timed, why_not_of
from anesurgery.placement.verdicts import Judged
from anesurgery.semantics.reading import kind_of
from anesurgery.semantics.rows import Work, work_of

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
