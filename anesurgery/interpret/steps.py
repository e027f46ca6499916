"""The steps of a plan, and steps as one function each, for a program that runs many times.

A decoder has hundreds of small ops for a token: `core.Plan.take` costs as much time as they do. A bound step
calls the same torch functions with its constants bound, so the results are the same bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.arithmetic import precision as dtypes
from anesurgery.interpret.arithmetic.constant_memory import widen
from anesurgery.interpret.ops import tensor
from anesurgery.interpret.ops.computing import linear
from anesurgery.interpret.table import TABLE
from anesurgery.mil import Operation, Var, static_shape, types

Env = dict[Var, Any]
"""Var -> its value during a run: a tensor, a list of tensors, a string, or the `Box` of a state."""


class Result(NamedTuple):
    """One output of a step."""

    var: Var
    dtype: torch.dtype | None
    """Its dtype in the run; None for strings, lists and states."""
    rounding: dtypes.Rounding | None
    """How it is rounded; None if it is not."""


@dataclass
class Step:
    """One op, ready to run."""

    op: Operation
    function: Any
    """Computes the op, from the table of implementations; None for control flow, which runs blocks."""
    fixed: dict[str, Any]
    """Name of an input -> its constant."""
    reads: list[tuple[str, Any]]
    """The other inputs: (name, var, or tuple of vars for a list)."""
    to_widen: list[str]
    """The names of constants that must be widened before each use, unless they are kept so
    (`needs_widening`)."""
    outs: list[Result]
    dead: list[Var]
    """The values that no later step reads."""
    moved: Sequence[str] = ()
    """The names of large constants whose numbers are only moved: their memory is given back after each use."""


BoundStep = Callable[[Env], None]
"""Computes an op in an environment, with its constants bound."""
Call = Callable[[Env], Any]
"""Returns the result of an op from an environment."""
VIEWS = (tensor.reshape, tensor.expand_dims, tensor.squeeze)
"""Ops that give their input another shape, which is known where it is static."""


def bind_step(step: Step, fixed: Mapping[str, Any], constants: Mapping[Var, Any]) -> BoundStep | None:
    """Return a step as one function of the environment.

    Args:
        step: of a plan.
        fixed: its constants, widened.
        constants: of the plan, for lists of values that a step reads.

    Returns:
        The function; None where only `Plan.take` can compute the step.
    """
    if step.function is None or len(step.outs) != 1:
        return None
    call = (
        _bind_view(step, fixed)
        or _bind_torch_function(step, fixed)
        or _bind_linear(step, fixed)
        or _bind_any(step, fixed, constants)
    )
    if call is None:
        return None
    ((var, dtype, rounding),) = step.outs
    dead = tuple(step.dead)

    def take(env: Env) -> None:
        value = call(env)
        if rounding is not None or value.dtype is not dtype:
            value = dtypes.in_run_dtype(value, dtype, rounding)
        env[var] = value
        for other in dead:
            env.pop(other, None)

    return take


def _bind_view(step: Step, fixed: Mapping[str, Any]) -> Call | None:
    """Bind an op that only gives x another shape or order, or slices it, with static shapes."""
    if [name for name, _ in step.reads] != ["x"] or "x" in fixed:
        return None
    ((_, source),) = step.reads
    before, after = (static_shape(v) for v in (source, step.op.outputs[0]))
    if not before or not after or 0 in before or 0 in after or isinstance(source, tuple):
        return None
    function = getattr(step.function, "stands_for", step.function)  # `sliced_by` marks its result
    if function in VIEWS:
        return lambda env: env[source].reshape(after)
    if function is tensor.transpose:
        order = tuple(fixed["perm"])
        return lambda env: env[source].permute(order)
    if function is tensor.slice_by_index:
        take_slice = tensor.sliced_by(before, *(fixed.get(name) for name in tensor.SLICE))
        return lambda env: take_slice(env[source])
    return None


def _bind_torch_function(step: Step, fixed: Mapping[str, Any]) -> Call | None:
    """Bind an op that is a torch function of x, or of x and y, one of which may be a constant."""
    implementation = TABLE[step.op.op_type]
    is_own = step.function is implementation.function  # or else an arithmetic has another
    function = implementation.plain if is_own else None  # the bare torch function
    if function is None or not fixed.keys() <= {"x", "y"}:
        return None
    reads = dict(step.reads)
    values = [reads[name] for name in ("x", "y") if name in reads]
    if len(values) == 1 and fixed:
        (value,), (known,) = values, fixed.values()
        if "x" in fixed:
            return lambda env: function(known, env[value])
        return lambda env: function(env[value], known)
    return _in_order(function, values, dense=False)


def _bind_linear(step: Step, fixed: Mapping[str, Any]) -> Call | None:
    """Bind a linear with a constant fp32 weight."""
    weight, bias = fixed.get("weight"), fixed.get("bias")
    function, dense = dtypes.unwrap_dense(step.function)
    if function is not linear or not dense or [name for name, _ in step.reads] != ["x"]:
        return None
    if weight is None or weight.dtype != torch.float32:
        return None
    ((_, x),) = step.reads
    if not types.is_float(x.dtype):
        return None
    weight = dtypes.dense(weight)
    bias = None if bias is None else torch.as_tensor(bias).to(torch.float32).expand(len(weight)).contiguous()
    return lambda env: F.linear(dtypes.dense(env[x]), weight, bias)


def _bind_any(step: Step, fixed: Mapping[str, Any], constants: Mapping[Var, Any]) -> Call | None:
    """Bind the function of any step: its constants by name, its values in the order of its parameters."""
    function, dense = dtypes.unwrap_dense(step.function)
    reads = dict(step.reads)
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:
        return None
    order = [name for name in names if name in reads]
    if set(order) != reads.keys() or names[: len(order)] != order or set(fixed) - set(names):
        return _by_name(step, fixed)
    if dense:
        fixed = {k: dtypes.dense(v) if isinstance(v, torch.Tensor) else v for k, v in fixed.items()}
    bound = partial(function, **fixed) if fixed else function
    values = [reads[name] for name in order]
    if any(isinstance(v, tuple) for v in values):
        return _of_list(bound, values, constants) if not dense else None
    return _in_order(bound, values, dense)


def _in_order(function: Callable[..., Any], values: Sequence[Var], dense: bool) -> Call:
    """Bind a function of one, two or more values; `dense` makes each contiguous.

    One value and two have lambdas of their own, which save a list at each call.
    """
    if len(values) == 1:
        (x,) = values
        if dense:
            return lambda env: function(dtypes.dense(env[x]))
        return lambda env: function(env[x])
    if dense:
        return lambda env: function(*[dtypes.dense(env[v]) for v in values])
    if len(values) == 2:
        x, y = values
        return lambda env: function(env[x], env[y])
    return lambda env: function(*[env[v] for v in values])


def _by_name(step: Step, fixed: Mapping[str, Any]) -> Call | None:
    """Bind a function whose values are not its first parameters."""
    function, reads = step.function, step.reads
    if any(isinstance(v, tuple) for _, v in reads):
        return None
    return lambda env: function(**fixed, **{name: env[v] for name, v in reads})


def _of_list(function: Callable[..., Any], values: Sequence[Any], constants: Mapping[Var, Any]) -> Call | None:
    """Bind a function of one list of values, some of which may be constants."""
    if len(values) != 1:
        return None
    items = [(v, widen(constants[v]) if v in constants else None) for v in values[0]]
    return lambda env: function([env[v] if known is None else known for v, known in items])
