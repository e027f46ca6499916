"""Run a function in variants: with other numbers in one of its weights, or in several arithmetics at once.

What comes before a replaced weight is computed once for all weights: the run stops at each of them, and goes on
from there again for each replacement.

In several arithmetics each op is computed exactly; then, in every other arithmetic, once from exact inputs and
once from those that it computed itself, so that it can be judged alone and in the flow. What is no longer read
is dropped, so memory is that of a few runs, however long the function is. A weight is widened once for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anesurgery.interpret import sampling, state
from anesurgery.interpret.arithmetic import precision as dtypes
from anesurgery.interpret.core import Env, Executable, Plan, Step
from anesurgery.interpret.state import Box
from anesurgery.interpret.table import Listener
from anesurgery.mil import Array, Operation, Program, Var, np_dtype


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


@dataclass(frozen=True)
class Shown:
    """What one op gave; of a loop or a branch, what it gave as a whole.

    Attributes:
        op: the op.
        exact: its outputs in exact arithmetic.
        own: arithmetic -> its outputs where all that it reads is right, as far as its type can hold it.
        grown: arithmetic -> its outputs where the ops before it were computed so too.
    """

    op: Operation
    exact: Sequence[Any]
    own: Mapping[str, Sequence[Any]]
    grown: Mapping[str, Sequence[Any]]


class Abreast:
    """A function, planned once in exact arithmetic and in others.

    Args:
        program: the program.
        function: which function; `main` or the first by default.
        arithmetics: those beside the exact one.
    """

    def __init__(self, program: Program, function: str | None, arithmetics: Sequence[str]) -> None:
        self.exact = Executable(program, function=function, fuse=False)
        self.others = {a: Executable(program, function=function, precision=a, fuse=False) for a in arithmetics}
        self._outputs: dict[str, dict[str, Array]] = {}

    def __call__(self, values: Mapping[str, Any]) -> Iterator[Shown]:
        """Each op in file order, then the outputs of all arithmetics are in `outputs`.

        Raises:
            InterpretError: inputs that do not fit, or an op that fails.
        """
        bound = sampling.bind(self.exact.function, values, None)
        exact, right, *grown = (
            {var: copied(v) for var, v in bound.items()} for _ in range(2 + len(self.others))
        )
        with torch.inference_mode():
            for k, step in enumerate(self.exact.plan.steps):
                with self._widened(step):
                    results = _take(self.exact, k, exact)
                    own = {a: _take(e, k, _apart(right)) for a, e in self.others.items()}
                    after = {
                        a: _take(e, k, env) for (a, e), env in zip(self.others.items(), grown, strict=True)
                    }
                _follow(step, results, exact, right)
                yield Shown(step.op, results, own, after)
            self._outputs = {"fp32": self.exact.outputs(exact, bound.values())}
            for (a, executable), env in zip(self.others.items(), grown, strict=True):
                self._outputs[a] = executable.outputs(env, bound.values())

    @property
    def outputs(self) -> dict[str, dict[str, Array]]:
        """Arithmetic, "fp32" among them -> the outputs by name, of the last walk that came to its end."""
        return self._outputs

    @contextmanager
    def _widened(self, step: Step) -> Iterator[None]:
        """Let all plans read one widened copy of the weights of a step."""
        weights = {step.op.inputs[name]: step.fixed[name].float() for name in step.stored}
        plans = [e.plan for e in (self.exact, *self.others.values())]
        for plan in plans:
            plan.kept |= weights
        try:
            yield
        finally:
            for var in weights:
                for plan in plans:
                    plan.kept.pop(var, None)
                dtypes.forget(var.val)


class _Catch(Listener):
    """Keeps what one op gave, before what nobody reads is dropped."""

    def __init__(self, op: Operation) -> None:
        self._op = op
        self.outputs: list[Any] = []

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Keep it."""
        if op is self._op:
            self.outputs = list(outputs)


def _take(executable: Executable, k: int, env: Env) -> list[Any]:
    """The outputs of the k-th step; `env` then holds those that are read."""
    step = executable.plan.steps[k]
    caught = _Catch(step.op)
    executable.plan.take(step, env, caught)
    return caught.outputs


def _apart(env: Env) -> Env:
    """Copies the states among some values, so that they can be written."""
    return {var: copied(value) for var, value in env.items()}


def _follow(step: Step, results: Sequence[Any], exact: Env, right: Env) -> None:
    """Bring the right operands to where the exact run is."""
    for var, value in zip(step.op.outputs, results, strict=True):
        if var in exact:
            right[var] = stored(var, value)
    for var in [v for v in right if v not in exact]:
        del right[var]
    if step.op.op_type == "coreml_update_state" or step.op.blocks:
        right |= {v: copied(b) for v, b in exact.items() if isinstance(b, Box)}


def stored(var: Var, value: Any) -> Any:
    """An exact value as its type holds it; what fp16 cannot hold stays as it is, since its op is to blame."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or np_dtype(var) != np.float16:
        return value
    half = value.half().float()
    return half if bool(torch.isfinite(half.sum())) else torch.where(torch.isfinite(half), half, value)
