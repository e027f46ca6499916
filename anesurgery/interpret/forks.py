"""Run a function with other numbers in one of its weights, from where it is first read.

What comes before is computed once for all weights: the run stops at each of them, and goes on from there again
for each replacement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from anesurgery.interpret import sampling, state
from anesurgery.interpret.core import Env, Executable, Plan
from anesurgery.mil import Array, Var


class Forks:
    """A run of a function that can be continued with other weights.

    Args:
        executable: the function.
        values: its inputs, as the function takes them.
        weights: the constants that will be replaced.
    """

    def __init__(self, executable: Executable, values: Mapping[str, Any], weights: Sequence[Var]) -> None:
        self._executable, self._plan = executable, executable.plan
        self._bound = sampling.bind(executable.function, values, None)
        self._readers: dict[int, list[Var]] = {}
        for weight in weights:
            self._readers.setdefault(_first(self._plan, weight), []).append(weight)
        self._plan.runs = max(self._plan.runs, 2)  # widened weights are kept from the second run on

    def __iter__(self) -> Iterator[Fork]:
        """A fork at each weight, in the order in which they are read; valid until the next one."""
        env: Env = {var: copied(value) for var, value in self._bound.items()}
        for number, step in enumerate(self._plan.steps):
            for weight in self._readers.get(number, ()):
                yield Fork(self._executable, weight, number, env)
            with torch.inference_mode():
                self._plan.take(step, env)

    def whole(self) -> dict[str, Array]:
        """The outputs with the weights as they are."""
        return Fork(self._executable, None, 0, dict(self._bound))()


class Fork:
    """A run that stands before the first reader of a weight."""

    def __init__(self, executable: Executable, weight: Var | None, number: int, env: Env) -> None:
        self._executable, self._weight, self._number, self._env = executable, weight, number, env

    @property
    def weight(self) -> Var:
        """The weight that is read next."""
        assert self._weight is not None
        return self._weight

    def __call__(self, array: Array | None = None) -> dict[str, Array]:
        """The outputs, with another array in the place of the weight."""
        plan = self._executable.plan
        env = {var: copied(value) for var, value in self._env.items()}
        with torch.inference_mode(), _replaced(plan, self._weight, array):
            for step in plan.steps[self._number :]:
                plan.take(step, env)
            return self._executable.outputs(env, env.values())


def copied(value: Any) -> Any:
    """A state of its own; tensors are shared, since nothing writes to them."""
    return state.Box(value.value) if isinstance(value, state.Box) else value


def _first(plan: Plan, weight: Var) -> int:
    """The first step that reads a weight, in a nested block or itself."""
    for number, step in enumerate(plan.steps):
        inner = [plan.blocks[block] for block in step.op.blocks]
        if _reads(step.op.inputs, weight) or any(_first(p, weight) < len(p.steps) for p in inner):
            return number
    return len(plan.steps)


def _reads(arguments: Mapping[str, Any], weight: Var) -> bool:
    return any(weight is v or (isinstance(v, (list, tuple)) and weight in v) for v in arguments.values())


@contextmanager
def _replaced(plan: Plan, weight: Var | None, array: Array | None) -> Iterator[None]:
    """Let every step, those of nested blocks included, read another array in the place of a weight."""
    if weight is None or array is None:
        yield
        return
    old = [(held, key, held[key]) for held, key in _places(plan, weight)]
    try:
        replace_weight(plan, weight, array)
        yield
    finally:
        _forget(plan, weight)
        for held, key, value in old:
            held[key] = value


def replace_weight(plan: Plan, weight: Var, array: Array) -> None:
    """Let every step, also of nested blocks, read another array in the place of a weight from now on."""
    tensor = plan._tensor(np.ascontiguousarray(array))
    for held, key in list(_places(plan, weight)):
        held[key] = tensor
    _forget(plan, weight)


def _places(plan: Plan, weight: Var) -> Iterator[tuple[dict[Any, Any], Any]]:
    """Where a plan holds a weight: in a table, by a key."""
    if weight in plan.constants:
        yield plan.constants, weight
    for step in plan.steps:
        yield from (
            (step.fixed, name) for name, var in step.op.inputs.items() if var is weight and name in step.fixed
        )
    for nested in plan.blocks.values():
        yield from _places(nested, weight)


def _forget(plan: Plan, weight: Var) -> None:
    """Drop what was kept of a weight as its readers compute with it."""
    plan.kept.pop(weight, None)
    for nested in plan.blocks.values():
        _forget(nested, weight)
