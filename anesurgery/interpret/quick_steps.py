"""Steps of a program that runs again and again, each as one function with all that is constant bound to it.

A program that writes a token has hundreds of small ops: what is looked up for each costs as much as they do.
The numbers are the same bits, as the same functions of torch compute them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.arithmetic import precision as dtypes
from anesurgery.interpret.ops import tensor
from anesurgery.interpret.ops.reduction import linear
from anesurgery.mil import Operation, Var, static_shape, types

Env = dict[Var, Any]
Quick = Callable[[Env], None]
Call = Callable[[Env], Any]
VIEWS = (tensor.reshape, tensor.expand_dims, tensor.squeeze)
"""What gives its input another shape, which is known where it is static."""


def quick(step: Any, fixed: Mapping[str, Any], constants: Mapping[Var, Any]) -> Quick | None:
    """A step as a function of the values.

    Args:
        step: of a plan.
        fixed: its constants, as it computes with them.
        constants: of the plan; some are among several values that a step reads.

    Returns:
        The function, or None where the step must be taken with all that there is to look at.
    """
    if step.function is None or len(step.outs) != 1:
        return None
    call = _moved(step, fixed) or _plain(step, fixed) or _product(step, fixed)
    call = call or _called(step, fixed, constants)
    if call is None:
        return None
    ((var, dtype, rounding),) = step.outs
    dead = tuple(step.dead)

    def take(env: Env) -> None:
        value = call(env)
        if rounding is not None or value.dtype is not dtype:
            value = dtypes.finish(value, dtype, rounding)
        env[var] = value
        for other in dead:
            env.pop(other, None)

    return take


def _moved(step: Any, fixed: Mapping[str, Any]) -> Call | None:
    """Ops that only move numbers, at places that are known."""
    op: Operation = step.op
    if [name for name, _ in step.reads] != ["x"] or "x" in fixed:
        return None
    ((_, source),) = step.reads
    before, after = (static_shape(v) for v in (source, op.outputs[0]))
    if not before or not after or 0 in before or 0 in after or isinstance(source, tuple):
        return None
    function = getattr(step.function, "stands_for", step.function)
    if function in VIEWS:
        return lambda env: env[source].reshape(after)
    if function is tensor.transpose:
        order = tuple(fixed["perm"])
        return lambda env: env[source].permute(order)
    if function is tensor.slice_by_index:
        taken = tensor.sliced_by(before, *(fixed.get(name) for name in tensor.SLICE))
        return lambda env: taken(env[source])
    return None


def _plain(step: Any, fixed: Mapping[str, Any]) -> Call | None:
    """A function of torch of one value or two, one of which may be a constant."""
    function = getattr(step.function, "plain", None)
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


def _product(step: Any, fixed: Mapping[str, Any]) -> Call | None:
    """A product with a constant weight of floats."""
    weight, bias = fixed.get("weight"), fixed.get("bias")
    function, dense = dtypes.undressed(step.function)
    if function is not linear or not dense or [name for name, _ in step.reads] != ["x"]:
        return None
    if weight is None or weight.dtype != torch.float32:
        return None
    ((_, x),) = step.reads
    if not types.is_float(x.dtype):
        return None
    weight = weight.contiguous()
    bias = None if bias is None else torch.as_tensor(bias).to(torch.float32).expand(len(weight)).contiguous()
    return lambda env: F.linear(env[x].contiguous(), weight, bias)


def _called(step: Any, fixed: Mapping[str, Any], constants: Mapping[Var, Any]) -> Call | None:
    """The function of a step with its constants bound, its values in the order of its parameters."""
    function, dense = dtypes.undressed(step.function)
    reads = dict(step.reads)
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:
        return None
    order = [name for name in names if name in reads]
    if set(order) != reads.keys() or names[: len(order)] != order or set(fixed) - set(names):
        return _by_name(step, fixed) if not dense else None
    if dense:
        fixed = {k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in fixed.items()}
    bound = partial(function, **fixed) if fixed else function
    values = [reads[name] for name in order]
    if any(isinstance(v, tuple) for v in values):
        return _of_several(bound, values, constants) if not dense else None
    return _in_order(bound, values, dense)


def _in_order(function: Callable[..., Any], values: Sequence[Var], dense: bool) -> Call:
    """A function of one, two or more values."""
    if len(values) == 1:
        (x,) = values
        if dense:
            return lambda env: function(env[x].contiguous())
        return lambda env: function(env[x])
    if dense:
        return lambda env: function(*[env[v].contiguous() for v in values])
    if len(values) == 2:
        x, y = values
        return lambda env: function(env[x], env[y])
    return lambda env: function(*[env[v] for v in values])


def _by_name(step: Any, fixed: Mapping[str, Any]) -> Call | None:
    """A function whose values do not come first."""
    function, reads = step.function, step.reads
    if any(isinstance(v, tuple) for _, v in reads):
        return None
    return lambda env: function(**fixed, **{name: env[v] for name, v in reads})


def _of_several(
    function: Callable[..., Any], values: Sequence[Any], constants: Mapping[Var, Any]
) -> Call | None:
    """A function of a list of values, some of which may be constants."""
    if len(values) != 1:
        return None
    several = [(v, dtypes.widen(constants[v]) if v in constants else None) for v in values[0]]
    return lambda env: function([env[v] if known is None else known for v, known in several])
