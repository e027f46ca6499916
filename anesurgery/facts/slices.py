"""What values are computed from: the ops upstream of them, in an order in which they can run."""

from __future__ import annotations

from collections.abc import Iterable

from anesurgery.mil import Operation, Var, operands


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


def reads(op: Operation) -> list[Var]:
    """Everything an op needs, also what its nested blocks read from outside."""
    found = [var for _, var in operands(op)]
    for block in op.blocks:
        inner = [v for nested in block.operations for v in reads(nested)] + list(block.outputs)
        own = {v for nested in block.operations for v in nested.outputs} | set(block.inputs)
        found += [v for v in inner if v not in own]
    return found
