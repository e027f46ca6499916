"""What saving a program through coremltools would change: ops that passes of its default pipeline rewrite.

`ct.convert` of a MIL program runs these passes; this library's own writer does not. `inspect` calls
`of_program`; each finding names the pass, how many ops it changes, and how to leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from anesurgery.mil import Operation, Program, consumers, is_stored, np_dtype, operands, walk_ops
from anesurgery.ops import UNARY
from anesurgery.placement.evidence import Finding, Grade, Rule
from anesurgery.semantics.reading import elements

GUARDED_FROM = 8
"""The specification version (8 is iOS 17) from which a gather no longer handles negative indices itself."""
SOURCE = "coremltools 9.0: {}, read and run"
ADVICE = (
    "save with this library, which runs no pass, or take the pass out of the pipeline: "
    'pipeline.remove_passes({{"{}"}})'
)


@dataclass(frozen=True)
class _DefaultPass:
    """A pass of coremltools' default pipeline and the ops that it would change."""

    name: str
    ops: frozenset[str]
    because: str
    changes: Callable[[Operation], bool]

    def rule(self) -> Rule:
        """Return the rule that the findings cite."""
        return Rule(
            f"save-{self.name.rsplit('::')[-1].replace('_', '-')}",
            self.ops,
            self.because,
            SOURCE.format(self.name),
            kind="interface",
            grade=Grade.MEASURED,
            advice=ADVICE.format(self.name),
        )


def _is_one_hot_product(op: Operation) -> bool:
    """Is a one_hot the first operand of a matmul?"""
    return any(r.op_type == "matmul" and r.x is op.outputs[0] for r in consumers(op.outputs[0]))


def _is_written_dilation(op: Operation) -> bool:
    """Is a space_to_batch followed by conv and batch_to_space?"""
    convolutions = [r for r in consumers(op.outputs[0]) if r.op_type == "conv"]
    return any(r.op_type == "batch_to_space" for c in convolutions for r in consumers(c.outputs[0]))


def _has_signed_indices(op: Operation) -> bool:
    """Are the dynamic indices of a gather signed, in an opset in which it does not handle negative ones?"""
    indices = op.inputs.get("indices")
    if indices is None or is_stored(indices) or int(op.opset_version.value) < GUARDED_FROM:
        return False
    return np_dtype(indices).kind == "i"


def _widens_constant(op: Operation) -> bool:
    """Does a cast widen a stored tensor?"""
    before, after = op.x, op.outputs[0]
    wider = np_dtype(after).itemsize > np_dtype(before).itemsize
    return is_stored(before) and wider and elements(before) > 1


def _is_transposed_back(op: Operation) -> bool:
    """Does a chain of at most 8 elementwise ops lead from a transpose to another, so that both can go?"""
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
"""Ops that coremltools moves a transpose past."""

DEFAULT_PASSES = (
    _DefaultPass(
        "common::fuse_onehot_matmul_to_gather",
        frozenset({"one_hot"}),
        "a one-hot product becomes a gather again, which leaves the engine when its indices are computed",
        _is_one_hot_product,
    ),
    _DefaultPass(
        "common::fuse_dilated_conv",
        frozenset({"space_to_batch"}),
        "space_to_batch, conv and batch_to_space become a dilated convolution",
        _is_written_dilation,
    ),
    _DefaultPass(
        "common::guard_negative_gather_indices",
        frozenset({"gather", "gather_nd"}),
        "a guard for negative indices is put before each gather, also where one stands already: a cast, a "
        "comparison, a sum and a select of integers, on the CPU",
        _has_signed_indices,
    ),
    _DefaultPass(
        "common::const_elimination",
        frozenset({"cast"}),
        "a stored fp16 constant that is widened at run time is stored wide",
        _widens_constant,
    ),
    _DefaultPass(
        "common::reduce_transposes",
        frozenset({"transpose"}),
        "transpositions that cancel each other are taken out, with the layout between them",
        _is_transposed_back,
    ),
)


def of_program(program: Program) -> Iterator[Finding]:
    """Yield a finding for each default pass of coremltools that would change the program."""
    hits: dict[int, list[Operation]] = {}
    for op in walk_ops(program):
        for i, change in enumerate(DEFAULT_PASSES):
            if op.op_type in change.ops and change.changes(op):
                hits.setdefault(i, []).append(op)
    for i, ops in sorted(hits.items()):
        change = DEFAULT_PASSES[i]
        message = f"{change.name} changes {len(ops)} {ops[0].op_type}, first %{ops[0].outputs[0].name}"
        yield change.rule().finding(message)
