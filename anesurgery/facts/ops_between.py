"""What values are computed from: the ops upstream of them, in an order in which they can run."""

from __future__ import annotations

from collections.abc import Iterable

from anesurgery.mil import Operation, Var, reads


def slice_back(targets: Iterable[Var], stop: set[Var]) -> list[Operation]:
    """The ops that `targets` depend on, in an order in which they can run, not going beyond `stop`."""
    order: dict[Operation, None] = {}
    stack: list[tuple[Operation, bool]] = [(v.op, False) for v in targets if v.op is not None and v not in stop]
    while stack:
        op, ready = stack.pop()
        if op in order:
            continue
        if ready:
            order[op] = None
            continue
        stack.append((op, True))
        stack += [(v.op, False) for v in reads(op) if v.op is not None and v not in stop and v.op not in order]
    return list(order)
