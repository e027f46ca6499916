"""Run a function in several arithmetics at once, op by op: how much error does each op add by itself?

`certify` uses it. Each op is computed in fp32, then twice in every other arithmetic (fp16, the engine's): once
from the exact operands, once from those that the same arithmetic gave. The first shows the error of the op
alone, the second the error that has grown up to here. A value is dropped after its last use, so memory is that
of a few runs; a weight is widened to fp32 once for all arithmetics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anesurgery.interpret import sampling
from anesurgery.interpret.arithmetic import constant_memory
from anesurgery.interpret.core import Executable
from anesurgery.interpret.forks import copied
from anesurgery.interpret.state import Box
from anesurgery.interpret.steps import Env, Step
from anesurgery.interpret.table import Listener
from anesurgery.mil import Array, Operation, Program, Var, np_dtype


@dataclass(frozen=True)
class OpResults:
    """The outputs of one op in each arithmetic; a loop or a branch counts as one op."""

    op: Operation
    """The op."""
    exact: Sequence[Any]
    """Its outputs in exact arithmetic."""
    own: Mapping[str, Sequence[Any]]
    """Arithmetic -> its outputs from exact operands, rounded to the types of these."""
    grown: Mapping[str, Sequence[Any]]
    """Arithmetic -> its outputs from operands that the same arithmetic computed."""


class SeveralArithmetics:
    """A function, planned in exact arithmetic and in others.

    Args:
        program: the program that has the function.
        function: its name; `main` or the first by default.
        arithmetics: the arithmetics beside the exact one, as `precision=` names them.
    """

    def __init__(self, program: Program, function: str | None, arithmetics: Sequence[str]) -> None:
        self.exact = Executable(program, function=function, fuse=False)
        self.others = {a: Executable(program, function=function, precision=a, fuse=False) for a in arithmetics}
        self._outputs: dict[str, dict[str, Array]] = {}

    def __call__(self, values: Mapping[str, Any]) -> Iterator[OpResults]:
        """Yield the results of each op in file order; after the last, `outputs` has those of the function.

        Raises:
            InterpretError: inputs that do not fit, or an op that fails.
        """
        bound = sampling.bind(self.exact.function, values, None)
        exact, operands, *grown = (
            {var: copied(v) for var, v in bound.items()} for _ in range(2 + len(self.others))
        )
        with torch.inference_mode():
            for k, step in enumerate(self.exact.plan.steps):
                with self._widened(step):
                    results = _take(self.exact, k, exact)
                    own = {
                        a: _take(e, k, {var: copied(value) for var, value in operands.items()})
                        for a, e in self.others.items()
                    }
                    after = {
                        a: _take(e, k, env) for (a, e), env in zip(self.others.items(), grown, strict=True)
                    }
                _update_operands(step, results, exact, operands)
                yield OpResults(step.op, results, own, after)
            self._outputs = {"fp32": self.exact.outputs(exact, bound.values())}
            for (a, executable), env in zip(self.others.items(), grown, strict=True):
                self._outputs[a] = executable.outputs(env, bound.values())

    @property
    def outputs(self) -> dict[str, dict[str, Array]]:
        """Arithmetic, "fp32" among them -> outputs by name, of the last run that came to its end."""
        return self._outputs

    @contextmanager
    def _widened(self, step: Step) -> Iterator[None]:
        """Let all plans read one widened copy of the weights of a step."""
        weights = {step.op.inputs[name]: step.fixed[name].float() for name in step.to_widen}
        plans = [e.plan for e in (self.exact, *self.others.values())]
        for plan in plans:
            plan.widened |= weights
        try:
            yield
        finally:
            for var in weights:
                for plan in plans:
                    plan.widened.pop(var, None)
                constant_memory.release_pages(var.val)


class _OutputsOf(Listener):
    """Keeps the outputs of one op before those that nobody reads are dropped."""

    def __init__(self, op: Operation) -> None:
        self._op = op
        self.outputs: list[Any] = []

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Keep the outputs if they are of this op."""
        if op is self._op:
            self.outputs = list(outputs)


def _take(executable: Executable, k: int, env: Env) -> list[Any]:
    """Run the k-th step and return all its outputs; `env` keeps those that are read later."""
    step = executable.plan.steps[k]
    caught = _OutputsOf(step.op)
    executable.plan.take(step, env, caught)
    return caught.outputs


def _update_operands(step: Step, results: Sequence[Any], exact: Env, operands: Env) -> None:
    """Add the exact results of a step to the operands of later ops, and drop those that are read no more."""
    for var, value in zip(step.op.outputs, results, strict=True):
        if var in exact:
            operands[var] = stored(var, value)
    for var in [v for v in operands if v not in exact]:
        del operands[var]
    if step.op.op_type == "coreml_update_state" or step.op.blocks:
        operands |= {v: copied(b) for v, b in exact.items() if isinstance(b, Box)}


def stored(var: Var, value: Any) -> Any:
    """Return an exact value rounded to its type; a number beyond fp16 stays: the op before is to blame."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or np_dtype(var) != np.float16:
        return value
    half = value.half().float()
    return half if bool(torch.isfinite(half.sum())) else torch.where(torch.isfinite(half), half, value)
