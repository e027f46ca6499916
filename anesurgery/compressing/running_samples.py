"""Run all samples of a calibration together, one op after the other, and let a caller look at and replace ops.

The correction of weights runs a compressed and a plain model side by side, since the inputs of each op depend
on the weights compressed before it. Balancing, the ranges of activations and the estimates run one model. A
callback gets a `Step` of the interpreter with the op's arguments for every sample, and returns the step to
take: the same one, or one with another weight or bias.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anesurgery.files.arrays import set_aside
from anesurgery.interpret import sampling
from anesurgery.interpret.arithmetic.constant_memory import release_pages
from anesurgery.interpret.core import Env, Executable, Plan, Step
from anesurgery.mil import Array, Operation, Var

MOST_VALUES = 1 << 30
"""Bytes of the values of all samples that stay in memory, 1.1 GB; more go to files. A choice: a machine with 8
GB has them beside a model."""

Values = Mapping[str, Any]
"""Name of an input -> its value: a sample of a function, or the arguments of an op."""
BeforeOp = Callable[[Step, Sequence[Values]], Step]
"""(a step, its arguments for each sample) -> the step to take."""
BeforeBoth = Callable[[Step, Sequence[Values], Sequence[Values]], Step]
"""(a step, its arguments for each sample, those in the plain model) -> the step to take."""


def run_op_by_op(
    executable: Executable,
    samples: Sequence[Values],
    before: BeforeOp,
    ops: Collection[Operation],
    *,
    also_run: Callable[[Step], None] = lambda _: None,
    look: Callable[[Step, Sequence[Env]], None] = lambda step, envs: None,
    needs_outputs: bool = True,
    folder: Path | None = None,
) -> list[dict[str, Array]]:
    """Run all samples together, one op after the other.

    Args:
        executable: the function; the callback may replace its steps.
        samples: inputs of the function.
        before: called before each of `ops`.
        ops: at the top level of the function.
        also_run: called with each step before it is taken.
        look: called before each of `ops` with its step and the values that exist so far, for each sample.
        needs_outputs: False ends the run before the last of `ops`.
        folder: for values beyond `MOST_VALUES`; the system's folder of temporary files by default.

    Returns:
        The outputs for each sample; nothing without `needs_outputs`.
    """
    plan = executable.plan
    envs: list[Env] = [dict(sampling.bind(executable.function, values, None)) for values in samples]
    last = _last_number(plan, ops)
    rest = plan.steps[last:]
    with torch.inference_mode():
        for number, step in enumerate(plan.steps[: last + 1]):
            if step.op in ops:
                look(step, envs)
                step = before(step, [plan.arguments(step, env) for env in envs])
            if number < last:
                also_run(step)
                _run_step(plan, step, envs, folder)
            else:
                rest[0] = step
    return [_finish(executable, env, rest) for env in envs] if needs_outputs else []


def _last_number(plan: Plan, ops: Collection[Operation]) -> int:
    """Return the number of the last step of some ops; after it, samples run one by one."""
    return max((n for n, step in enumerate(plan.steps) if step.op in ops), default=0)


def _finish(executable: Executable, env: Env, steps: Iterable[Step]) -> dict[str, Array]:
    """Take the last steps for one sample, as logits of all would be large, and return its outputs."""
    bound = list(env.values())
    with torch.inference_mode():
        for step in steps:
            executable.plan.take(step, env)
        outputs = executable.outputs(env, bound)
    env.clear()
    return outputs


def _run_step(plan: Plan, step: Step, envs: Sequence[Env], folder: Path | None) -> None:
    """Take a step for all samples. Its constants are converted once for all, and then dropped."""
    runs, limit = plan.runs, plan.cache_limit
    plan.runs, plan.cache_limit = max(runs, 2), plan.widened_bytes
    for env in envs:
        plan.take(step, env)
        if _value_bytes(env) > MOST_VALUES // len(envs):
            for var in {var for var, _, _ in step.outs if isinstance(env.get(var), torch.Tensor)}:
                in_file = set_aside(env[var].contiguous().numpy(), folder, written=True)
                env[var] = torch.from_numpy(in_file)
    plan.runs, plan.cache_limit = runs, limit
    for name in step.to_widen:
        var = step.op.inputs[name]
        if plan.widened.pop(var, None) is not None:
            release_pages(var.val)


def _value_bytes(env: Env) -> int:
    """Return the bytes of all values of a sample, in memory or in files."""
    return sum(value.nbytes for value in env.values() if isinstance(value, torch.Tensor))


@dataclass(frozen=True)
class Lookahead:
    """Announces ops whose inputs exist before their turn, so that work on several weights runs in parallel.

    The products of queries, keys and values read the same value: when the first is due, all three can begin.
    """

    begin: Callable[[Step, Sequence[Values], Sequence[Values]], None]
    """Called with a step and its arguments in both models."""
    most: int
    """How many steps may be announced before one is taken."""

    def look(
        self, step: Step, plans: Sequence[Plan], envs: Sequence[Sequence[Env]], ops: Collection[Operation]
    ) -> None:
        """Announce the ops after a step whose inputs exist.

        Args:
            step: about to be taken.
            plans: of the compressed and the plain model.
            envs: the values that exist in both, for each sample.
            ops: that may be announced.
        """
        plain_steps = {other.op: other for other in plans[1].steps}
        number = next(n for n, other in enumerate(plans[0].steps) if other.op is step.op)
        ready = (
            later
            for later in plans[0].steps[number + 1 :]
            if later.op in ops and all(var in envs[0][0] for var in _values_read(later))
        )
        for later in itertools.islice(ready, self.most):
            arguments = [plans[0].arguments(later, env) for env in envs[0]]
            plain_arguments = [plans[1].arguments(plain_steps[later.op], env) for env in envs[1]]
            self.begin(later, arguments, plain_arguments)


def _values_read(step: Step) -> Iterator[Var]:
    """Yield the values that a step reads."""
    for _, read in step.reads:
        yield from read if isinstance(read, tuple) else (read,)


def run_side_by_side(
    executables: tuple[Executable, Executable],
    samples: tuple[Sequence[Values], Sequence[Values]],
    before: BeforeBoth,
    ops: Collection[Operation],
    lookahead: Lookahead,
    needs_outputs: bool = True,
    folder: Path | None = None,
) -> tuple[list[dict[str, Array]], list[dict[str, Array]]]:
    """Run all samples together through a model and the plain one, one op after the other.

    Args:
        executables: of one function: the model, whose steps the callback may replace, and the plain one.
        samples: inputs of both.
        before: called before each of `ops`.
        ops: at the top level of the function.
        lookahead: announces ops that may begin early.
        needs_outputs: False ends the run before the last of `ops`.
        folder: for values beyond `MOST_VALUES`; the system's folder of temporary files by default.

    Returns:
        The outputs of both for each sample; nothing without `needs_outputs`.
    """
    compressed, plain = executables
    plain_envs: list[Env] = [dict(sampling.bind(plain.function, values, None)) for values in samples[1]]
    plain_steps = {step.op: step for step in plain.plan.steps}

    def before_op(step: Step, arguments: Sequence[Values]) -> Step:
        plain_arguments = [plain.plan.arguments(plain_steps[step.op], env) for env in plain_envs]
        return before(step, arguments, plain_arguments)

    def look(step: Step, envs: Sequence[Env]) -> None:
        lookahead.look(step, (compressed.plan, plain.plan), (envs, plain_envs), ops)

    def run_plain(step: Step) -> None:
        _run_step(plain.plan, plain_steps[step.op], plain_envs, folder)

    outputs = run_op_by_op(
        compressed,
        samples[0],
        before_op,
        ops,
        also_run=run_plain,
        look=look,
        needs_outputs=needs_outputs,
        folder=folder,
    )
    if not needs_outputs:
        return outputs, []
    rest = plain.plan.steps[_last_number(plain.plan, ops) :]
    return outputs, [_finish(plain, env, rest) for env in plain_envs]


__all__ = ["Lookahead", "Values", "run_op_by_op", "run_side_by_side"]
