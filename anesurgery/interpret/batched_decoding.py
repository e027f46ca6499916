"""Run a function in several arithmetics at once, op by op, so that each op can be judged alone and in the flow.

Each op is computed exactly; then, in every other arithmetic, once from exact inputs and once from those that
it computed itself. What is no longer read is dropped, so memory is that of a few runs, however long the
function is. A weight is widened once for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anesurgery.interpret import sampling
from anesurgery.interpret.arithmetic import precision as dtypes
from anesurgery.interpret.core import Env, Executable, Step
from anesurgery.interpret.forks import copied
from anesurgery.interpret.state import Box
from anesurgery.interpret.table import Listener
from anesurgery.mil import Array, Operation, Program, Var, np_dtype


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
