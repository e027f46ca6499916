"""Numbers that depend on data, as torch.export computes them for its assertions."""

from __future__ import annotations

from typing import Any

from anesurgery.frontend.arguments import inputs_of, promoted
from anesurgery.mil import Var, mb, types


def sym_ite(context: Any, node: Any) -> None:
    """`torch.sym_ite(condition, a, b)` of numbers."""
    condition, *sides = inputs_of(context, node)[:3]
    a, b = promoted([v if isinstance(v, Var) else mb.const(val=v) for v in sides])
    context.add(mb.select(cond=_boolean(condition), a=a, b=b, name=node.name))


def sym_not(context: Any, node: Any) -> None:
    """`torch.sym_not(condition)`."""
    context.add(mb.logical_not(x=_boolean(inputs_of(context, node)[0]), name=node.name))


def _boolean(x: Var) -> Var:
    return x if types.is_bool(x.dtype) else mb.cast(x=x, dtype="bool")
