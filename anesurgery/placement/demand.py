"""Say what the ops of a function ask of the hardware: what times are estimated from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from anesurgery.mil import Operation, Var, is_constexpr, is_stored, operands, producer
from anesurgery.placement.rules.slow import makers, notch_payload
from anesurgery.placement.verdicts import Judged
from anesurgery.semantics.byte_sizes import elements, kind_of, shape_of, size_of
from anesurgery.semantics.work import runtime

LONG = 1024
"""Positions from which attention is slower than estimated: measured at 197 (it is not) and 1,500 (it is)."""
PRODUCTS = frozenset({"conv", "conv_transpose", "linear", "matmul", "einsum", "scaled_dot_product_attention"})
PLAIN, PALETTE, INT8, INT4, SPARSE, W8A8, JOINT = "", "palette", "int8", "int4", "sparse", "w8a8", "joint"
"""Forms of weights; int8 and int4 with one scale, or one for each output channel."""
FORMS = {
    PALETTE: "a palette",
    INT8: "int8",
    INT4: "int4",
    SPARSE: "sparse ones",
    W8A8: "int8, with int8 activations",
    JOINT: "several compressions in one",
}
"""In words."""


class OpLoad(NamedTuple):
    """What an op, or `count` equal ones, asks for in one run.

    Attributes:
        op_type: of MIL.
        us: Core ML's own estimate on its unit, in microseconds.
        weight: bytes of weights that it reads, as stored.
        long: is it part of attention over `LONG` positions or more?
        cpu: does it run on the CPU?
        chain: does it lie on the longest chain of ops that wait for one another?
        form: of its weights.
        rows: positions that share each weight, where the form of the weights matters; else 0.
        notch: does reading its weights stall, as `rules.slow.dma_notch` finds?
        count: how many such ops there are, each round of a loop counted.
    """

    op_type: str
    us: float
    weight: int = 0
    long: bool = False
    cpu: bool = False
    chain: bool = False
    form: str = PLAIN
    rows: int = 0
    notch: bool = False
    count: int = 1  # type: ignore[assignment]  # a field here, and a method of tuples


@dataclass(frozen=True)
class Load:
    """What a function asks for.

    Attributes:
        ops: in file order, or merged.
        switches: how often the unit changes, where that costs something.
        doubtful: where ops run on the CPU instead of which that is not known; None without such ops.
    """

    ops: tuple[OpLoad, ...]
    switches: int = 0
    doubtful: Load | None = None

    @property
    def on_cpu(self) -> bool:
        """Does all of it run on the CPU?"""
        return all(op.cpu for op in self.ops)

    def merged(self) -> Load:
        """Joins equal ops into one entry."""
        counted: Counter[OpLoad] = Counter()
        for op in self.ops:
            counted[op._replace(count=1)] += op.count
        return Load(tuple(op._replace(count=n) for op, n in counted.items()), self.switches)


def load_of(judged: Sequence[Judged], units: Sequence[str | None], doubted: bool = False) -> Load:
    """What judged ops ask for; ops of unknown unit count on the ANE where it may run them.

    Args:
        judged: the ops.
        units: of them.
        doubted: may all of it run on the CPU, for a reason that concerns the whole model?
    """
    chain = longest_chain([j.op for j in judged])
    on_cpu = [unit == "cpu" or j.legal is False for j, unit in zip(judged, units, strict=True)]
    sure = _load(judged, on_cpu, chain)
    most = [doubted or cpu or j.legal is None for cpu, j in zip(on_cpu, judged, strict=True)]
    return sure if most == on_cpu else replace(sure, doubtful=_load(judged, most, chain))


def _load(judged: Sequence[Judged], on_cpu: Sequence[bool], chain: set[Operation]) -> Load:
    ops = tuple(_op(j, cpu, j.op in chain) for j, cpu in zip(judged, on_cpu, strict=True))
    return Load(ops, _switches(on_cpu))


def _switches(on_cpu: Sequence[bool]) -> int:
    """Changes of the unit that cost something.

    The result has to come back to the CPU in any case, and Core ML's segmenter charges as much for a last op
    on the
    ANE as for a change before it: the last change to the CPU is a part of the dispatch.
    """
    changes = [b for a, b in pairwise(on_cpu) if a != b]
    return len(changes) - bool(changes and changes[-1])


def _op(one: Judged, cpu: bool, chained: bool) -> OpLoad:
    """Estimates of judged ops are of all rounds; a load is of one."""
    op, estimate = one.op, one.estimate
    us = 0.0 if estimate is None else ((estimate.cpu if cpu else estimate.ane) or 0.0) / max(one.rounds, 1)
    if op.op_type not in PRODUCTS:
        long = op.op_type == "softmax" and shape_of(op.outputs[0])[-1:] >= (LONG,)
        return OpLoad(op.op_type, us, 0, long, cpu, chained, count=one.rounds)
    form, stored = form_of(op)
    rows = 0 if form == PLAIN else rows_of(op)
    weight = one.work.constant if form == PLAIN else stored
    stalls = form == PLAIN and notch_payload(op) > 0
    return OpLoad(op.op_type, us, weight, _is_long(op), cpu, chained, form, rows, stalls, one.rounds)


def _is_long(op: Operation) -> bool:
    if op.op_type != "matmul" or len(runtime(op)) < 2:
        return False
    return max((*shape_of(op.x)[-2:], *shape_of(op.y)[-2:])) >= LONG


def rows_of(op: Operation) -> int:
    """Positions that share each weight of a product: its results over its output channels."""
    weight = next(
        (v for n in ("weight", "y", "x") if (v := op.inputs.get(n)) is not None and is_stored(v)), None
    )
    if weight is None:
        return 0
    out = shape_of(op.outputs[0])
    channels = out[1] if op.op_type in ("conv", "conv_transpose") else out[-1]
    return elements(op.outputs[0]) // max(channels, 1)


def form_of(op: Operation) -> tuple[str, int]:
    """How the weights of a product are stored, and in how many bytes; (`PLAIN`, 0) if not compressed."""
    decoders = makers(op)
    if not decoders:
        return PLAIN, 0
    return _form(op, decoders), _stored(decoders[0])


def _form(op: Operation, decoders: Sequence[Operation]) -> str:
    kind = decoders[0].op_type
    if kind == "constexpr_cast":
        return PLAIN
    if len(decoders) > 1:
        return JOINT
    if kind in ("constexpr_lut_to_dense", "constexpr_sparse_to_dense"):
        return PALETTE if kind == "constexpr_lut_to_dense" else SPARSE
    quantized = producer(op.x, "dequantize") is not None
    data = decoders[0].inputs.get("quantized_data") or decoders[0].inputs.get("data")
    wide = data is None or kind_of(data).itemsize >= 1
    return (W8A8 if quantized else INT8) if wide else INT4


def _stored(maker: Operation) -> int:
    """Bytes of all that a weight is made of."""
    total = 0
    for value in maker.inputs.values():
        if isinstance(value, Var) and value.op is not None:
            inner = is_constexpr(value.op)
            total += _stored(value.op) if inner else size_of(value)
    return total


def longest_chain(ops: Sequence[Operation]) -> set[Operation]:
    """The ops of a longest chain of which each waits for the one before."""
    best: dict[Var, tuple[int, Operation]] = {}
    before: dict[Operation, Operation | None] = {}
    last: tuple[int, Operation] | None = None
    for op in ops:
        nearest = max((best[v] for _, v in operands(op) if v in best), key=lambda pair: pair[0], default=None)
        before[op] = None if nearest is None else nearest[1]
        own = (1 if nearest is None else nearest[0] + 1, op)
        best.update(dict.fromkeys(op.outputs, own))
        last = own if last is None or own[0] > last[0] else last
    chain, step = set[Operation](), None if last is None else last[1]
    while step is not None:
        chain.add(step)
        step = before[step]
    return chain
