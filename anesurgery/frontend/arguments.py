"""Read the arguments of a torch operation, as coremltools' torch front end holds them.

A converter is a function `(context, node) -> None` that adds the MIL ops of one node. `argument` finds an
argument by position or by name, since `torch.jit.trace` gives all by position and `torch.export` gives some by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from anesurgery.mil import Var, mb, types

Convert = Callable[[Any, Any], None]
"""A converter: (context, node) -> None. `context` holds the values converted so far, by torch's names."""
Wrap = Callable[[Convert], Convert]
"""A function that takes coremltools' own converter, and returns a better one."""


def wrapper(convert: Callable[[Convert, Any, Any], None]) -> Callable[[Convert], Convert]:
    """Return a function that takes coremltools' own converter, `host`, and returns a converter by `convert`.

    The result tells the module of `convert` as its own, by which `register` knows that it is wrapped already.
    """

    @wraps(convert)
    def wrap(host: Convert) -> Convert:
        @wraps(convert)
        def converter(context: Any, node: Any) -> None:
            convert(host, context, node)

        return converter

    return wrap


def inputs_of(context: Any, node: Any) -> list[Any]:
    """Return the positional arguments: variables, or plain values."""
    from coremltools.converters.mil.frontend.torch.ops import _get_inputs

    return _get_inputs(context, node)


def keyword(context: Any, node: Any, name: str) -> Any:
    """Return an argument given by name, or None."""
    from coremltools.converters.mil.frontend.torch.ops import _get_kwinputs

    return (_get_kwinputs(context, node, name) or [None])[0]


def known_value(value: Any) -> Any:
    """Return the plain value of an argument that is known at conversion, or the argument itself."""
    return value.val if isinstance(value, Var) else value


def argument(context: Any, node: Any, position: int, name: str, default: Any = None) -> Any:
    """Return an argument given by position or by name."""
    positional = inputs_of(context, node)
    if position < len(positional) and positional[position] is not None:
        return positional[position]
    named = keyword(context, node, name)
    return default if named is None else named


def option(context: Any, node: Any, position: int, name: str, default: Any = None) -> Any:
    """Return the plain value of an argument given by position or by name."""
    return known_value(argument(context, node, position, name, default))


def converted(convert: Convert, context: Any, node: Any, values: dict[str, Any]) -> list[Any]:
    """Return what a converter makes of a node that reads these values by their names; nothing is added."""
    context.push((list(values), list(values.values())))
    convert(context, node)
    results = [context[name] for name in node.outputs]
    context.pop()
    return results


def read_instead(context: Any, node: Any, position: int, value: Var) -> None:
    """Let a node read a new value, by its name, in place of an input."""
    context.add(value)
    node.inputs = [*node.inputs[:position], value.name, *node.inputs[position + 1 :]]


def is_one(value: Any) -> bool:
    """Return whether an argument is the number 1."""
    known = known_value(value)
    return known is not None and np.size(known) == 1 and float(np.ravel(known)[0]) == 1


def promoted(values: list[Any]) -> list[Var]:
    """Return values cast to the dtype that holds them all."""
    from coremltools.converters.mil.frontend.torch.ops import promote_input_dtypes

    return promote_input_dtypes(values)


def add_results(context: Any, node: Any, results: Sequence[Var]) -> None:
    """Add the results of an operation that has several; torch.export selects them by nodes of their own."""
    if len(results) == len(node.outputs):
        for name, value in zip(node.outputs, results, strict=True):
            context.add(mb.identity(x=value, name=name))
    else:
        context.add(tuple(results), torch_name=node.name)


def dtype_of(x: Var) -> str:
    """Return the dtype of a variable as MIL writes it."""
    return str(types.builtin_to_string(x.dtype))
