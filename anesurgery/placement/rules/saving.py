"""What coremltools' default passes would change when a program is saved through them.

Saving with this library runs none of them. Loading a package and giving it back to `ct.convert` runs them all
again, but for the choice of fp16 and int16; only those are told that may move an op off the engine or undo a
rewrite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from anesurgery.mil import Operation, Program, consumers, is_stored, np_dtype, operands, walk_ops
from anesurgery.ops import UNARY
from anesurgery.placement.evidence import Finding, Grade, Rule
from anesurgery.semantics.byte_sizes import elements

GUARDED_FROM = 8
"""Specification version (iOS 17) from which a gather no longer counts negative indices itself."""
SOURCE = "coremltools 9.0: {}, read and run"
ADVICE = (
    "save with this library, which runs no pass, or take the pass out of the pipeline: "
    'pipeline.remove_passes({{"{}"}})'
)


@dataclass(frozen=True)
class _Change:
    """A pass of the default pipeline and the ops that it would change."""

    name: str
    ops: frozenset[str]
    because: str
    finds: Callable[[Operation], bool]

    def rule(self) -> Rule:
        """The row that findings cite."""
        return Rule(
            f"save-{self.name.rsplit('::')[-1].replace('_', '-')}",
            self.ops,
            self.because,
            SOURCE.format(self.name),
            kind="interface",
            grade=Grade.MEASURED,
            advice=ADVICE.format(self.name),
        )


def _one_hot_product(op: Operation) -> bool:
    return any(r.op_type == "matmul" and r.x is op.outputs[0] for r in consumers(op.outputs[0]))


def _dilation(op: Operation) -> bool:
    inner = [r for r in consumers(op.outputs[0]) if r.op_type == "conv"]
    return any(r.op_type == "batch_to_space" for c in inner for r in consumers(c.outputs[0]))


def _signed(op: Operation) -> bool:
    """Are indices of a run signed, in an opset in which a gather no longer counts from the end by itself?"""
    indices = op.inputs.get("indices")
    if indices is None or is_stored(indices) or int(op.opset_version.value) < GUARDED_FROM:
        return False
    return np_dtype(indices).kind == "i"


def _widened(op: Operation) -> bool:
    before, after = op.x, op.outputs[0]
    wider = np_dtype(after).itemsize > np_dtype(before).itemsize
    return is_stored(before) and wider and elements(before) > 1


def _turned_back(op: Operation) -> bool:
    """Do all ops between two transpositions work on elements, so that both can go?"""
    readers = consumers(op.outputs[0])
    for _ in range(8):
        if len(readers) != 1:
            return False
        if readers[0].op_type == "transpose":
            return True
        if any(is_stored(v) and v.rank > 0 for _, v in operands(readers[0])):
            return False
        if readers[0].op_type not in TRANSPOSABLE:
            return False
        readers = consumers(readers[0].outputs[0])
    return False


TRANSPOSABLE = (UNARY - {"cast", "inverse", "silu"}) | {"pow", "softplus_parametric"}
"""Ops that coremltools moves a transposition past."""

CHANGES = (
    _Change(
        "common::fuse_onehot_matmul_to_gather",
        frozenset({"one_hot"}),
        "a one-hot product becomes a gather again, which leaves the engine when its indices are computed",
        _one_hot_product,
    ),
    _Change(
        "common::fuse_dilated_conv",
        frozenset({"space_to_batch"}),
        "space_to_batch, conv and batch_to_space become a dilated convolution",
        _dilation,
    ),
    _Change(
        "common::guard_negative_gather_indices",
        frozenset({"gather", "gather_nd"}),
        "a guard for negative indices is put before each gather, also where one stands already: a cast, a "
        "comparison, a sum and a select of integers, on the CPU",
        _signed,
    ),
    _Change(
        "common::const_elimination",
        frozenset({"cast"}),
        "a stored fp16 constant that is widened at run time is stored wide",
        _widened,
    ),
    _Change(
        "common::reduce_transposes",
        frozenset({"transpose"}),
        "transpositions that cancel each other are taken out, with the layout between them",
        _turned_back,
    ),
)


def save_changes(program: Program) -> tuple[Finding, ...]:
    """What saving through coremltools' default passes would change, one finding for each of its passes."""
    return tuple(_found(program))


def _found(program: Program) -> Iterator[Finding]:
    hits: dict[int, list[Operation]] = {}
    for op in walk_ops(program):
        for i, change in enumerate(CHANGES):
            if op.op_type in change.ops and change.finds(op):
                hits.setdefault(i, []).append(op)
    for i, ops in sorted(hits.items()):
        change = CHANGES[i]
        message = f"{change.name} changes {len(ops)} {ops[0].op_type}, first %{ops[0].outputs[0].name}"
        yield change.rule().finding(message)
