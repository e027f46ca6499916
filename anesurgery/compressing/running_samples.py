"""Run all samples of a calibration together, one op after the other, and let a caller look at and replace ops.

The samples that a compression is given are checked first, and some are held out to measure its loss
(`read_samples`).

The correction of weights runs a compressed and a plain model side by side, since the inputs of each op depend
on the weights compressed before it. Balancing, the ranges of activations and the estimates run one model. A
callback gets a `Step` of the interpreter with the op's arguments for every sample, and returns the step to
take: the same one, or one with another weight or bias.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery.display import counted
from anesurgery.errors import SurgeryError
from anesurgery.files.arrays import set_aside
from anesurgery.interpret import sampling
from anesurgery.interpret.arithmetic.constant_memory import release_pages
from anesurgery.interpret.core import Executable, Plan
from anesurgery.interpret.steps import Env, Step
from anesurgery.mil import Array, Operation, Var, array_digest

HELD_OUT = 4
"""Every n-th sample is held out: of eight samples, two remain to measure the loss."""
FEW = 8
"""With fewer samples there is a warning. A choice: among fewer, one unusual sample decides ranges."""

Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Samples:
    """The samples that correct the weights, and those that measure the loss."""

    calibration: Sequence[Sample]
    held_out: Sequence[Sample]
    doubts: tuple[str, ...]
    """What the samples lack, in words."""


def read_samples(inputs: Any) -> Samples:
    """Check samples, and hold out every fourth, at least one of several.

    Args:
        inputs: one sample (a mapping of input names to arrays) or several.

    Raises:
        SurgeryError: there are none, or one is no sample, or holds NaN or infinity.
    """
    if inputs is None:
        raise SurgeryError(
            "compress corrects weights with samples: give inputs=[{name: array}, ...], some dozens of "
            "real samples; random ones say little about a trained model"
        )
    if isinstance(inputs, (str, bytes, os.PathLike, np.ndarray)) or not isinstance(inputs, Iterable):
        raise SurgeryError(
            f"inputs is a {type(inputs).__name__}; give a list of samples, each a dictionary of arrays by name"
        )
    several = [inputs] if isinstance(inputs, Mapping) else inputs
    samples = [_checked_sample(number, values) for number, values in enumerate(several)]
    if not samples:
        raise SurgeryError("inputs has no sample; give some dozens of real ones")
    if len(samples) == 1:
        doubt = "only one sample: none is held out, so the loss is not measured; give some dozens"
        return Samples(samples, (), (doubt,))
    period = min(HELD_OUT, len(samples))
    calibration = [each for number, each in enumerate(samples) if number % period != period - 1]
    held_out = samples[period - 1 :: period]
    return Samples(calibration, held_out, (*_doubts(samples), *_repeated(calibration, held_out)))


def _checked_sample(number: int, values: Any) -> Sample:
    """Return a sample whose torch tensors are detached.

    Raises:
        SurgeryError: it is no dictionary of arrays, or one holds NaN, infinity or masked numbers.
    """
    if not isinstance(values, Mapping):
        raise SurgeryError(
            f"sample {number} is a {type(values).__name__}; give a dictionary of arrays by input name"
        )
    sample = {name: value.detach() if hasattr(value, "detach") else value for name, value in values.items()}
    for name, value in sample.items():
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:
            raise SurgeryError(f"sample {number}: {name!r} is no array: {error}") from error
        if np.ma.is_masked(value):
            raise SurgeryError(f"sample {number}: {name!r} holds masked numbers; fill them in, or leave it out")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise SurgeryError(
                f"sample {number}: {name!r} holds NaN or infinity; leave it out or mend what made it"
            )
    return sample


def _repeated(calibration: Sequence[Sample], held_out: Sequence[Sample]) -> Iterable[str]:
    """Yield a doubt if samples held out are in the calibration too: the loss on them says nothing."""
    seen = set(map(_digest, calibration))
    count = sum(_digest(sample) in seen for sample in held_out)
    if count:
        yield (
            f"{count} of the {len(held_out)} samples held out are in the calibration too, so the loss on them "
            "is less than on others; give each sample once"
        )


def _digest(sample: Sample) -> frozenset[tuple[str, tuple[int, ...], bytes]]:
    """Return a key that is equal for equal samples."""
    arrays = {name: np.asarray(value) for name, value in sample.items()}
    return frozenset((name, array.shape, array_digest(array)) for name, array in arrays.items())


def _doubts(samples: Sequence[Sample]) -> Iterable[str]:
    """Yield what the samples lack: there are few, or an input never changes."""
    if len(samples) < FEW:
        yield f"only {counted(len(samples), 'sample')}: give some dozens, which differ as real inputs do"
    for name in samples[0]:
        arrays = [np.asarray(sample[name]) for sample in samples if name in sample]
        if all(np.array_equal(arrays[0], other) for other in arrays[1:]):
            yield f"the input {name!r} is the same in all samples; give it as it varies in use"


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
        if sum(v.nbytes for v in env.values() if isinstance(v, torch.Tensor)) > MOST_VALUES // len(envs):
            for var in {var for var, _, _ in step.outs if isinstance(env.get(var), torch.Tensor)}:
                in_file = set_aside(env[var].contiguous().numpy(), folder, written=True)
                env[var] = torch.from_numpy(in_file)
    plan.runs, plan.cache_limit = runs, limit
    for name in step.to_widen:
        var = step.op.inputs[name]
        if plan.widened.pop(var, None) is not None:
            release_pages(var.val)


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
    """Run as `run_op_by_op` does, through a model, whose steps the callback may replace, and the plain one.

    `lookahead` announces ops that may begin early. Returns the outputs of both.
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
