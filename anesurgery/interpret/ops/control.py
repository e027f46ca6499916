"""Control flow, whose ops run nested blocks, and the ops on lists that loops fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anesurgery.errors import InterpretError
from anesurgery.interpret.arithmetic.field import Image
from anesurgery.interpret.table import Unsupported, enter_all, impl, ints
from anesurgery.mil import Operation, nested_ops

LOOP_LIMIT = 100_000
"""After so many rounds a `while_loop` counts as endless: no sequence has so many steps."""


def _run_block(plan: Any, block: Any, values: list[Any], env: dict[Any, Any], listener: Any) -> list[Any]:
    """Run a nested block, which can read the values outside, and return its outputs."""
    inner = {**env, **dict(zip(block.inputs, values, strict=True))}
    nested = plan.blocks[block]
    nested.run(inner, listener)
    return [nested.value(inner, v) for v in block.outputs]


def while_loop(plan: Any, op: Operation, arguments: dict[str, Any], env: Any, listener: Any) -> Any:
    """Run the second block as long as the first returns true."""
    condition, body = op.blocks
    values = list(arguments["loop_vars"])
    for _ in range(LOOP_LIMIT):
        if not bool(_run_block(plan, condition, values, env, listener)[0]):
            return values
        values = _run_block(plan, body, values, env, listener)
    raise InterpretError(f"op {op.name}: the loop still runs after {LOOP_LIMIT} rounds")


def cond(plan: Any, op: Operation, arguments: dict[str, Any], env: Any, listener: Any) -> Any:
    """Run one of two blocks; in a symbolic arithmetic, with an unknown condition, run both and choose."""
    pred = arguments["pred"]
    if not isinstance(pred, Image):
        return _run_block(plan, op.blocks[0] if bool(pred) else op.blocks[1], [], env, listener)
    if any(o.op_type == "coreml_update_state" for o in nested_ops(op)):
        raise Unsupported("a state that is written under a condition")
    sides = [_run_block(plan, block, [], env, listener) for block in op.blocks]
    if any(isinstance(v, list) for side in sides for v in side):
        raise Unsupported("a list that depends on a condition")
    arithmetic, scalar = plan.arithmetic, pred.map(lambda v: v.reshape(()))
    return [
        arithmetic.choose(scalar, arithmetic.image(x), arithmetic.image(y)) for x, y in zip(*sides, strict=True)
    ]


TABLE: dict[str, Callable[..., Any]] = {"while_loop": while_loop, "cond": cond}
"""Op type -> function of (plan, op, arguments, environment, listener)."""


@impl("make_list")
def make_list(
    init_length: Any = 1, dynamic_length: bool = True, elem_shape: Any = (), dtype: str = "fp32"
) -> list[Any]:
    """Return a list of zeros; elements of unknown shape stay None until they are written."""
    if any(isinstance(d, str) for d in elem_shape):
        return [None] * ints(init_length)[0]
    kind = {"int32": torch.int32, "bool": torch.bool}.get(dtype, torch.float32)
    return [torch.zeros([ints(d)[0] for d in elem_shape], dtype=kind)] * ints(init_length)[0]


@impl("list_write")
def list_write(ls: list[Any], index: Any, value: torch.Tensor) -> list[Any]:
    """Return a list with one element replaced; it grows if the index is beyond its end."""
    at = ints(index)[0]
    return [*(ls + [None] * (at + 1 - len(ls)))[:at], value, *ls[at + 1 :]]


@impl("list_scatter")
def list_scatter(ls: list[Any], indices: Any, value: torch.Tensor) -> list[Any]:
    """Return a list with some elements replaced by the rows of `value`."""
    for at, row in zip(ints(indices), value, strict=True):
        ls = list_write(ls, at, row)
    return ls


def _elements(ls: list[Any], indices: list[int]) -> list[torch.Tensor]:
    """Return elements; those never written are zeros of the shape of a written one."""
    written = next((v for v in ls if v is not None), None)
    if written is None:
        raise InterpretError("the list is read before anything was written to it")
    return [torch.zeros_like(written) if ls[i] is None else ls[i] for i in indices]


LISTS: dict[str, Callable[..., Any]] = {
    "list_read": lambda ls, index: _elements(ls, ints(index))[0],
    "list_gather": lambda ls, indices: torch.stack(_elements(ls, ints(indices))),
    "list_length": lambda ls: torch.tensor(len(ls), dtype=torch.int32),
}
"""Op type -> function of its parameters."""
enter_all(LISTS)
