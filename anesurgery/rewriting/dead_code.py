"""Remove ops that nobody reads."""

from __future__ import annotations

from collections.abc import Sequence

from anesurgery.mil import Operation, operands
from anesurgery.ops import IMPURE


def remove_dead(ops: Sequence[Operation]) -> list[Operation]:
    """Remove those of `ops` that nobody reads, then what only they read; the removed ops, in that order."""
    queue, removed = list(ops), []
    while queue:
        op = queue.pop()
        block = op.enclosing_block
        if block is None or op.op_type in IMPURE or op.blocks:
            continue
        if any(v.child_ops or v.consuming_blocks for v in op.outputs):
            continue
        sources = [v.op for _, v in operands(op) if v.op is not None]
        block.remove_ops([op])
        removed.append(op)
        queue += sources
    return removed
