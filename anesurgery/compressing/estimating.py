"""Choose how many bits each weight gets, by the damage that its forms do at the outputs of the model.

`measure_forms` (`compress(mixed=True)`) corrects each weight in every form, and runs the model with it.
`estimate_forms` runs the model once for each weight, not for each form. There each weight alone is rounded to
the nearest in the form that all would have. The KL divergence of the outputs grows with the squared error of
the products, so the damage in another form is scaled by the ratio of the errors. These errors come from some
rows of the weight, rounded to the nearest; by how much GPTQ lowers them is measured in the first form and
assumed for the others. In both ways `assignment.propose` then chooses the forms.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery.compressing.assignment import Option, Row, propose
from anesurgery.compressing.correcting import Candidate, find_candidates, plain_moments
from anesurgery.compressing.costs import Cost
from anesurgery.compressing.finished import Finished, portable
from anesurgery.compressing.fitting import FormFitter, round_to_nearest, round_with_feedback
from anesurgery.compressing.grids import Grid
from anesurgery.compressing.input_moments import MomentRecorder, joint_moments
from anesurgery.compressing.running_samples import run_op_by_op
from anesurgery.compressing.second_order import HessianFactor, mean_diagonal
from anesurgery.compressing.weight_forms import MOST_VECTOR
from anesurgery.facts.makeup import logits_of
from anesurgery.files.package import Loaded, save
from anesurgery.files.sharing import Shard, Workers, result
from anesurgery.interpret.arithmetic.constant_memory import CACHE_LIMIT
from anesurgery.interpret.core import Executable, Step
from anesurgery.interpret.forks import Forks
from anesurgery.mil import Array, Operation, Var
from anesurgery.regions.reencoding import stored_bytes
from anesurgery.rewriting.ml_program import MLProgram

MOST_ROWS = 128
"""The rows of a weight on which its errors are measured: enough for a mean, and few for a large weight."""
MOST_RUNS = 8
"""The most samples on which the damage at the outputs is measured: each runs the model for each weight."""
ENOUGH_ROWS = 256
"""No further sample is run once the outputs have so many rows: their mean is near enough."""
GAIN = 0.5
"""Different forms must lower the estimated damage to this share of that of equal forms: the estimate is not
exact."""
WORST = 1e9
"""The damage of a weight that makes outputs infinite or NaN; a finite number, so that it can be compared."""


@dataclass(frozen=True)
class _Trial:
    """A weight in the forms that it may have."""

    grid: Grid
    """The grid of the first form."""
    bytes: Mapping[str, int]
    """Form -> its bytes."""
    errors: Mapping[str, float]
    """Form -> the squared error of the products after correction, over that of `grid` with rounding to the
    nearest."""


def estimate_forms(
    loaded: Loaded,
    name: str,
    samples: Sequence[Mapping[str, Any]],
    forms: Mapping[Candidate, Sequence[str]],
    finished: Finished,
    max_bytes: int | None = None,
) -> dict[Var, str]:
    """Choose the form of each weight, within a number of bytes for all.

    Args:
        loaded: the model.
        name: of the function.
        samples: inputs of the function.
        forms: weight -> the forms that it may have; the first is the one of the size that was asked for.
        finished: its workers try the forms.
        max_bytes: for all weights; by default the bytes if each has its first form.

    Returns:
        Weight -> its form; a weight that is missing stays as it is.

    Raises:
        SurgeryError: the smallest forms take more.
    """
    executable = Executable(loaded.program, function=name, fuse=False)
    trials = _try_forms(executable, samples, forms, finished)
    grids = {candidate.var.name: trial.grid for candidate, trial in trials.items()}
    costs = _measure_costs(loaded, name, samples[:MOST_RUNS], grids, finished.workers)
    rows = [_row(n, each, trials[each], costs[each.var.name]) for n, each in enumerate(forms)]
    first_forms = {candidate.var.name: names[0] for candidate, names in forms.items()}
    first_bytes = sum(trials[candidate].bytes[names[0]] for candidate, names in forms.items())
    proposal = propose(rows, max_bytes=first_bytes if max_bytes is None else max_bytes, smallest=0)
    modes = proposal.modes
    first_kl = sum(row.options[first_forms[row.weight]].kl for row in rows)
    if max_bytes is None and proposal.kl >= GAIN * first_kl:
        modes = first_forms
    return {each.var: modes[each.var.name] for each in forms if each.var.name in modes}


def measure_forms(
    loaded: Loaded,
    name: str,
    samples: Sequence[Mapping[str, Any]],
    forms: Mapping[Candidate, Sequence[str]],
    bits: float,
    version: int,
    finished: Finished,
    max_bytes: int | None = None,
) -> dict[Var, str]:
    """Choose the form of each weight by correcting it in every form alone, in the plain model.

    Args:
        loaded: the model.
        name: of the function.
        samples: inputs of the function.
        forms: weight -> the forms that it may have.
        bits: the most bits of a number, on average.
        version: the specification version.
        finished: corrects weights.
        max_bytes: for all weights, in place of those bits.

    Returns:
        Weight -> its form; a weight that is missing stays as it is.

    Raises:
        SurgeryError: even the smallest forms have more bits.
    """
    hessians = plain_moments(loaded, name, samples, list(forms))
    executable = Executable(loaded.program, function=name, fuse=False)
    by_var, logits = {candidate.var: candidate for candidate in forms}, logits_of(executable.function)
    runs = [Forks(executable, values, list(by_var)) for values in samples]
    expected = [run.whole() for run in runs]
    rows = []
    for number, forks in enumerate(zip(*runs, strict=True)):
        candidate, options = by_var[forks[0].weight], {}
        waits = {
            form: finished.begin(candidate, form, hessians[candidate.var], version) for form in forms[candidate]
        }
        for form, wait_for in waits.items():
            corrected, cost = wait_for(), Cost(chosen=logits)
            for fork, outputs in zip(forks, expected, strict=True):
                cost.add(outputs, fork(corrected.array))
            options[form] = Option(corrected.bytes, cost.psnr, cost.kl, cost.top1)
        rows.append(_row_of(number, candidate, options))
    modes = propose(rows, bits=bits if max_bytes is None else None, max_bytes=max_bytes, smallest=0).modes
    return {var: modes[var.name] for var in by_var if var.name in modes}


def _row_of(number: int, candidate: Candidate, options: Mapping[str, Option]) -> Row:
    """Return the row of a weight with the cost of its forms."""
    var, types = candidate.var, tuple(r.op.op_type for r in candidate.readers)
    return Row(number, var.name, types, int(np.prod(var.shape)), stored_bytes(var), options, {})


def _measure_costs(
    loaded: Loaded, name: str, samples: Sequence[Mapping[str, Any]], grids: Mapping[str, Grid], workers: Workers
) -> dict[str, Cost]:
    """Return for each weight the damage at the outputs if it alone is rounded to its grid.

    Processes of this machine read the model from a temporary folder. Workers on other machines cannot see that,
    so with them it is measured here.
    """
    if workers.here or not workers.local:
        return _measure_here(loaded, name, samples, grids)
    with tempfile.TemporaryDirectory() as folder:
        path = str(save(loaded, Path(folder, "model.mlpackage")))
        parts = [Shard(number, workers.count).of(list(grids)) for number in range(1, workers.count + 1)]
        tasks = [(path, name, samples, {weight: grids[weight] for weight in part}) for part in parts if part]
        results = workers.each(_measure_in_process, tasks)
    return {weight: cost for part in results for weight, cost in part.items()}


def _measure_in_process(
    path: str, name: str, samples: Sequence[Mapping[str, Any]], grids: Mapping[str, Grid]
) -> dict[str, Cost]:
    """Measure some weights in a process of its own, which reads the model from a path."""
    return _measure_here(MLProgram.read(path).loaded, name, samples, grids)


def _measure_here(
    loaded: Loaded, name: str, samples: Sequence[Mapping[str, Any]], grids: Mapping[str, Grid]
) -> dict[str, Cost]:
    """Measure some weights; the run of a sample forks at each weight, so that what is upstream runs once."""
    function = loaded.program.functions[name]
    found, _ = find_candidates(function, 0)
    by_name = {candidate.var.name: candidate for candidate in found if candidate.var.name in grids}
    executable = Executable(loaded.program, function=name, fuse=False)
    executable.plan.cache_limit = min(executable.plan.cache_limit, CACHE_LIMIT)
    weights = [candidate.var for candidate in by_name.values()]
    costs = {weight: Cost(chosen=logits_of(function)) for weight in grids}
    runs = [Forks(executable, values, weights) for values in samples]
    expected, rows = [], 0
    for run in runs:
        expected.append(run.whole())
        rows += _fewest_rows(expected[-1])
        if rows >= ENOUGH_ROWS:
            break
    for forks in zip(*runs[: len(expected)], strict=True):
        weight = forks[0].weight.name
        array = _round_weight(by_name[weight], grids[weight])
        for fork, outputs in zip(forks, expected, strict=True):
            costs[weight].add(outputs, fork(array))
    return costs


def _fewest_rows(outputs: Mapping[str, Array]) -> int:
    """Return the number of rows of the float output that has the fewest."""
    return min((math.prod(each.shape[:-1]) for each in outputs.values() if each.dtype.kind == "f"), default=0)


def _row(number: int, candidate: Candidate, trial: _Trial, cost: Cost) -> Row:
    """Return the expected damage at the outputs of each form of a weight."""
    if np.isfinite(cost.kl):
        noise = 10 ** (-cost.psnr / 10)
        damage = cost.kl if cost.rows else noise
    else:
        noise = damage = WORST
    options = {}
    for form, ratio in trial.errors.items():
        power = max(noise * ratio, float(np.finfo(np.float64).tiny))
        options[form] = Option(trial.bytes[form], float(-10 * np.log10(power)), damage * ratio, cost.top1)
    return _row_of(number, candidate, options)


def _try_forms(
    executable: Executable,
    samples: Sequence[Mapping[str, Any]],
    forms: Mapping[Candidate, Sequence[str]],
    finished: Finished,
) -> dict[Candidate, _Trial]:
    """Try each weight in its forms, once all ops that read it are known; so few Hessians are kept at a time."""
    trials: dict[Candidate, Future[_Trial]] = {}
    workers = finished.workers
    recorder = MomentRecorder({r.op: r for candidate in forms for r in candidate.readers})
    by_op: dict[Operation, list[Candidate]] = {}
    for candidate in forms:
        for reader in candidate.readers:
            by_op.setdefault(reader.op, []).append(candidate)

    def record(step: Step, arguments: Sequence[Mapping[str, Any]]) -> Step:
        recorder.add(step.op, arguments)
        for candidate in by_op[step.op]:
            if all(r.op in recorder.matrices for r in candidate.readers):
                moments = [recorder.moments_of(r.op) for r in candidate.readers]
                weight = np.asarray(candidate.var.val)
                hessians, _ = joint_moments(weight, candidate.readers[0], moments)
                wait(list(trials.values())[: -workers.count])
                sent = candidate if workers.here else portable(candidate)
                trials[candidate] = workers.submit(_trial, sent, forms[candidate], hessians)
        if all(candidate in trials for candidate in by_op[step.op]):
            recorder.matrices.pop(step.op)
        return step

    run_op_by_op(executable, samples, record, set(by_op), needs_outputs=False, folder=finished.folder)
    return {candidate: result(future) for candidate, future in trials.items()}


def _trial(candidate: Candidate, forms: Sequence[str], hessians: Array) -> _Trial:
    """Try a weight in its forms, on some of its rows."""
    reader, weight = candidate.readers[0], np.asarray(candidate.var.val)
    rows = reader.to_rows(weight.astype(np.float32))
    hessians = (hessians / mean_diagonal(hessians)).astype(np.float32)
    fitter = FormFitter(rows, hessians, reader.channels, reader.channel_axis, weight.ndim, weight.dtype)
    grids = {form: fitter.grid(form) for form in forms}
    numbers = _sampled_rows(rows.shape[1])
    sampled = rows[:, numbers]
    sampled_grids = {form: grid.select_rows(numbers) for form, grid in grids.items()}
    errors = {form: round_to_nearest(sampled, grid, hessians).error for form, grid in sampled_grids.items()}
    first_error = max(errors[forms[0]], float(np.finfo(np.float64).tiny))
    factors = [HessianFactor.of(hessian, dtype=torch.float32) for hessian in hessians]
    corrected_error = round_with_feedback(sampled, factors, sampled_grids[forms[0]]).error
    gain = min(1.0, corrected_error / first_error)
    sizes = {form: grid.bytes(weight.size) for form, grid in grids.items()}
    return _Trial(grids[forms[0]], sizes, {form: gain * error / first_error for form, error in errors.items()})


def _sampled_rows(count: int) -> Array:
    """Return about `MOST_ROWS` of so many row numbers, in runs as long as the longest vector of a table."""
    step = max(MOST_VECTOR, count * MOST_VECTOR // MOST_ROWS // MOST_VECTOR * MOST_VECTOR)
    return np.concatenate(
        [np.arange(start, min(start + MOST_VECTOR, count)) for start in range(0, count, step)]
    )


def _round_weight(candidate: Candidate, grid: Grid) -> Array:
    """Return a weight rounded to the nearest numbers of a grid, in its shape and type."""
    reader, weight = candidate.readers[0], np.asarray(candidate.var.val)
    rows = reader.to_rows(weight.astype(np.float32))
    rounded = np.stack([grid.nearest(part, group) for group, part in enumerate(rows)])
    return np.ascontiguousarray(reader.from_rows(rounded).astype(weight.dtype))
