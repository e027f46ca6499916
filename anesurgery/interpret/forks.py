"""Run a function with another array in place of one of its weights, from the step that reads it first.

`sensitivity` and `assignment` measure so what each compressed weight costs. What is upstream is computed once
for all weights: the run stops at each of them, and forks there for each replacement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from anesurgery.interpret import sampling, state
from anesurgery.interpret.core import Executable, Plan
from anesurgery.interpret.steps import Env
from anesurgery.mil import Array, Var


class Forks:
    """A run of a function on its inputs that can be continued with other arrays in place of some weights."""

    def __init__(self, executable: Executable, values: Mapping[str, Any], weights: Sequence[Var]) -> None:
        self._executable, self._plan = executable, executable.plan
        self._bound = sampling.bind(executable.function, values, None)
        self._readers: dict[int, list[Var]] = {}
        for weight in weights:
            self._readers.setdefault(_first(self._plan, weight), []).append(weight)
        self._plan.runs = max(self._plan.runs, 2)  # widened weights are kept from the second run on

    def __iter__(self) -> Iterator[Fork]:
        """Yield a fork at each weight, in the order in which they are read, each valid until the next one."""
        env: Env = {var: copied(value) for var, value in self._bound.items()}
        for number, step in enumerate(self._plan.steps):
            for weight in self._readers.get(number, ()):
                yield Fork(self._executable, weight, number, env)
            with torch.inference_mode():
                self._plan.take(step, env)

    def whole(self) -> dict[str, Array]:
        """Return the outputs with the weights as they are."""
        return Fork(self._executable, None, 0, dict(self._bound))()


class Fork:
    """A run that stands before the first op that reads a weight."""

    def __init__(self, executable: Executable, weight: Var | None, number: int, env: Env) -> None:
        self._executable, self._weight, self._number, self._env = executable, weight, number, env

    @property
    def weight(self) -> Var:
        """The weight that is read next."""
        assert self._weight is not None
        return self._weight

    def __call__(self, array: Array | None = None) -> dict[str, Array]:
        """Return the outputs, with another array in place of the weight."""
        plan = self._executable.plan
        env = {var: copied(value) for var, value in self._env.items()}
        with torch.inference_mode(), _replaced(plan, self._weight, array):
            for step in plan.steps[self._number :]:
                plan.take(step, env)
            return self._executable.outputs(env, env.values())


def copied(value: Any) -> Any:
    """Return a copy of a state; tensors are shared, since nothing writes to them."""
    return state.Box(value.value) if isinstance(value, state.Box) else value


def _first(plan: Plan, weight: Var) -> int:
    """Return the number of the first step that reads a weight, itself or in a nested block."""
    for number, step in enumerate(plan.steps):
        inner = [plan.blocks[block] for block in step.op.blocks]
        if _reads(step.op.inputs, weight) or any(_first(p, weight) < len(p.steps) for p in inner):
            return number
    return len(plan.steps)


def _reads(arguments: Mapping[str, Any], weight: Var) -> bool:
    """Is a weight among the inputs of an op, or in a list that is one?"""
    return any(weight is v or (isinstance(v, (list, tuple)) and weight in v) for v in arguments.values())


@contextmanager
def _replaced(plan: Plan, weight: Var | None, array: Array | None) -> Iterator[None]:
    """Let every step, also of nested blocks, read another array in place of a weight for a while."""
    if weight is None or array is None:
        yield
        return
    old = [(mapping, key, mapping[key]) for mapping, key in _entries(plan, weight)]
    try:
        replace_weight(plan, weight, array)
        yield
    finally:
        _forget(plan, weight)
        for mapping, key, value in old:
            mapping[key] = value


def replace_weight(plan: Plan, weight: Var, array: Array) -> None:
    """Let every step, also of nested blocks, read another array in place of a weight from now on."""
    tensor = plan._tensor(np.ascontiguousarray(array))
    for mapping, key in list(_entries(plan, weight)):
        mapping[key] = tensor
    _forget(plan, weight)


def _entries(plan: Plan, weight: Var) -> Iterator[tuple[dict[Any, Any], Any]]:
    """Yield (mapping, key) for each entry of a plan that holds a weight."""
    if weight in plan.constants:
        yield plan.constants, weight
    for step in plan.steps:
        yield from (
            (step.fixed, name) for name, var in step.op.inputs.items() if var is weight and name in step.fixed
        )
    for nested in plan.blocks.values():
        yield from _entries(nested, weight)


def _forget(plan: Plan, weight: Var) -> None:
    """Drop the widened copy of a weight."""
    plan.widened.pop(weight, None)
    for nested in plan.blocks.values():
        _forget(nested, weight)
