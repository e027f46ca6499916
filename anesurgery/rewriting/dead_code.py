"""Remove ops that nobody reads."""

from __future__ import annotations

from collections.abc import Sequence

from anesurgery.mil import Operation, nested_ops, reads
from anesurgery.ops import CONTROL, IMPURE


def remove_dead(ops: Sequence[Operation]) -> list[Operation]:
    """Remove those of `ops` that nobody reads, then what only they read; the removed ops, in that order."""
    queue, removed = list(ops), []
    while queue:
        op = queue.pop()
        block = op.enclosing_block
        if block is None or _does_more(op):
            continue
        if any(v.child_ops or v.consuming_blocks for v in op.outputs):
            continue
        sources = [v.op for v in reads(op) if v.op is not None]
        block.remove_ops([op])
        removed.append(op)
        queue += sources
    return removed


def _does_more(op: Operation) -> bool:
    """Does an op, or one nested in it, do more than compute its results?"""
    return op.op_type in IMPURE - CONTROL or any(o.op_type in IMPURE - CONTROL for o in nested_ops(op))
