"""How many bits each weight gets, by an estimate: one run at the outputs for a weight, not one for each form.

Each weight is rounded alone in the form that all would have, and what that costs at the outputs is measured.
The divergence of the outputs grows with the squared error of the products, so another form costs so much more
or less as its error is larger or smaller. Errors are those of some rows, rounded to the nearest; how much less
the correction leaves is found in the form that all would have, and held for the others.
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
from anesurgery.compressing.correcting import Candidate, Seen, candidates, joined, op_by_op
from anesurgery.compressing.costs import Cost
from anesurgery.compressing.finished import Finished, portable
from anesurgery.compressing.fitting import Fitting, handed_on, nearest
from anesurgery.compressing.grids import Grid
from anesurgery.compressing.second_order import Shares, unit_of
from anesurgery.compressing.weight_forms import MOST_VECTOR
from anesurgery.facts.makeup import logits_of
from anesurgery.files.package import Loaded, save
from anesurgery.files.sharing import Shard, Workers, result
from anesurgery.interpret.arithmetic.precision import KEPT
from anesurgery.interpret.core import Executable, Step
from anesurgery.interpret.forks import Forks
from anesurgery.mil import Array, Operation, Var
from anesurgery.regions.reencoding import stored_bytes
from anesurgery.rewriting.ml_program import MLProgram

MOST_ROWS = 128
"""Rows of a weight that its errors are found on: enough for a mean, and few for a large weight."""
MOST_RUNS = 8
"""Samples that the cost at the outputs is measured on, at most: each runs the model for each weight."""
ENOUGH_ROWS = 256
"""Rows of the outputs after which no further sample is: their mean is near enough."""
GAIN = 0.5
"""Share of the cost of equal forms that is left at most where others are taken: the estimate is no nearer."""
WORST = 1e9
"""Stands for the cost of a weight by which the outputs are no numbers any more."""


@dataclass(frozen=True)
class _Trial:
    """A weight in the forms that it may have."""

    grid: Grid
    """Of the form that all weights would have."""
    bytes: Mapping[str, int]
    errors: Mapping[str, float]
    """By form: that of the products after correction, over that of `grid` without."""


def estimated(
    loaded: Loaded,
    name: str,
    samples: Sequence[Mapping[str, Any]],
    kinds: Mapping[Candidate, Sequence[str]],
    finished: Finished,
    room: int | None = None,
) -> dict[Var, str]:
    """The form of each weight, so that all take no more bytes than if each had the first of its forms.

    Args:
        loaded: the model.
        name: of the function.
        samples: as it takes them.
        kinds: the forms that each weight may have; the first is that of the size asked for.
        finished: whose workers try the forms.
        room: the bytes that all may take, in place of those.

    Raises:
        SurgeryError: the smallest forms take more.
    """
    executable = Executable(loaded.program, function=name, fuse=False)
    trials = _trials(executable, samples, kinds, finished)
    grids = {one.var.name: trial.grid for one, trial in trials.items()}
    costs = _shared_out(loaded, name, samples[:MOST_RUNS], grids, finished.workers)
    by_var = {one.var: one for one in kinds}
    rows = [_row(n, one, trials[one], costs[one.var.name]) for n, one in enumerate(kinds)]
    even = {one.var.name: forms[0] for one, forms in kinds.items()}
    budget = sum(trials[one].bytes[forms[0]] for one, forms in kinds.items()) if room is None else room
    proposal = propose(rows, max_bytes=budget, smallest=0)
    gains = proposal.kl < GAIN * sum(row.options[even[row.weight]].kl for row in rows)
    modes = even if room is None and not gains else proposal.modes
    return {var: modes[var.name] for var in by_var if var.name in modes}


def _shared_out(
    loaded: Loaded, name: str, samples: Sequence[Mapping[str, Any]], grids: Mapping[str, Grid], workers: Workers
) -> dict[str, Cost]:
    """What each weight costs at the outputs where it alone is rounded to a grid.

    Processes of this machine read the model from a temporary folder; workers of others do not see that.
    """
    if workers.here or not workers.local:
        return _costs(loaded, name, samples, grids)
    with tempfile.TemporaryDirectory() as folder:
        path = str(save(loaded, Path(folder, "model.mlpackage")))
        parts = [Shard(number, workers.count).of(list(grids)) for number in range(1, workers.count + 1)]
        tasks = [(path, name, samples, {one: grids[one] for one in part}) for part in parts if part]
        return {weight: cost for part in workers.each(_costs_of, tasks) for weight, cost in part.items()}


def _costs_of(
    path: str, name: str, samples: Sequence[Mapping[str, Any]], grids: Mapping[str, Grid]
) -> dict[str, Cost]:
    return _costs(MLProgram.read(path).loaded, name, samples, grids)


def _costs(
    loaded: Loaded, name: str, samples: Sequence[Mapping[str, Any]], grids: Mapping[str, Grid]
) -> dict[str, Cost]:
    """What each weight costs; the run of a sample stops at each, and goes on from there again."""
    function = loaded.program.functions[name]
    by_name = {one.var.name: one for one in candidates(function, 0)[0] if one.var.name in grids}
    executable = Executable(loaded.program, function=name, fuse=False)
    executable.plan.room = min(executable.plan.room, KEPT)
    weights = [one.var for one in by_name.values()]
    costs = {name: Cost(chosen=logits_of(function)) for name in grids}
    runs = [Forks(executable, values, weights) for values in samples]
    expected, rows = [], 0
    for run in runs:
        expected.append(run.whole())
        rows += _rows(expected[-1])
        if rows >= ENOUGH_ROWS:
            break
    for forks in zip(*runs[: len(expected)], strict=True):
        weight = forks[0].weight.name
        array = _rounded(by_name[weight], grids[weight])
        for fork, outputs in zip(forks, expected, strict=True):
            costs[weight].add(outputs, fork(array))
    return costs


def _rows(outputs: Mapping[str, Array]) -> int:
    """Of the output that has fewest."""
    return min((math.prod(one.shape[:-1]) for one in outputs.values() if one.dtype.kind == "f"), default=0)


def _row(number: int, one: Candidate, trial: _Trial, cost: Cost) -> Row:
    """What each form of a weight is expected to cost at the outputs."""
    broken = not np.isfinite(cost.kl)
    noise = WORST if broken else 10 ** (-cost.psnr / 10)
    damage = WORST if broken else cost.kl if cost.rows else noise
    options = {}
    for kind, share in trial.errors.items():
        power = max(noise * share, float(np.finfo(np.float64).tiny))
        options[kind] = Option(trial.bytes[kind], float(-10 * np.log10(power)), damage * share, cost.top1)
    types = tuple(r.op.op_type for r in one.readers)
    size = int(np.prod(one.var.shape))
    return Row(number, one.var.name, types, size, stored_bytes(one.var), options, {})


def _trials(
    executable: Executable,
    samples: Sequence[Mapping[str, Any]],
    kinds: Mapping[Candidate, Sequence[str]],
    finished: Finished,
) -> dict[Candidate, _Trial]:
    """Each weight in its forms, when the last of its readers has been met: one is in memory at a time."""
    due: dict[Candidate, Future[_Trial]] = {}
    workers = finished.workers
    seen = Seen({r.op: r for one in kinds for r in one.readers})
    by_op: dict[Operation, list[Candidate]] = {}
    for one in kinds:
        for reader in one.readers:
            by_op.setdefault(reader.op, []).append(one)

    def meet(step: Step, given: Sequence[Mapping[str, Any]]) -> Step:
        seen.see(step.op, given)
        for one in by_op[step.op]:
            if all(r.op in seen.moments for r in one.readers):
                met, _ = joined(one, [seen.moments_of(r.op) for r in one.readers])
                wait(list(due.values())[: -workers.count])
                due[one] = workers.submit(_trial, one if workers.here else portable(one), kinds[one], met)
        if all(one in due for one in by_op[step.op]):
            seen.moments.pop(step.op)
        return step

    op_by_op(executable, samples, meet, set(by_op), outputs=False, folder=finished.folder)
    return {one: result(future) for one, future in due.items()}


def _trial(one: Candidate, forms: Sequence[str], hessians: Array) -> _Trial:
    reader, weight = one.readers[0], np.asarray(one.var.val)
    rows = reader.of(weight.astype(np.float32))
    hessians = (hessians / unit_of(hessians)).astype(np.float32)
    fitting = Fitting(rows, hessians, reader.channels, reader.channel, weight.ndim, weight.dtype)
    grids = {form: fitting.grid(form) for form in forms}
    number = _some(rows.shape[1])
    some = rows[:, number]
    few = {form: grid.of_rows(number) for form, grid in grids.items()}
    errors = {form: nearest(some, grid, hessians).error for form, grid in few.items()}
    first = max(errors[forms[0]], float(np.finfo(np.float64).tiny))
    shares = [Shares.of(hessian, dtype=torch.float32) for hessian in hessians]
    gain = min(1.0, handed_on(some, shares, few[forms[0]]).error / first)
    sizes = {form: grid.bytes(weight.size) for form, grid in grids.items()}
    return _Trial(grids[forms[0]], sizes, {form: gain * error / first for form, error in errors.items()})


def _some(count: int) -> Array:
    """The numbers of rows that are looked at, in runs as long as the vectors of a table may be."""
    step = max(MOST_VECTOR, count * MOST_VECTOR // MOST_ROWS // MOST_VECTOR * MOST_VECTOR)
    return np.concatenate(
        [np.arange(start, min(start + MOST_VECTOR, count)) for start in range(0, count, step)]
    )


def _rounded(one: Candidate, grid: Grid) -> Array:
    """The weight in the form that all would have, without correction."""
    reader, weight = one.readers[0], np.asarray(one.var.val)
    rows = reader.of(weight.astype(np.float32))
    numbers = np.stack([grid.nearest(part, group) for group, part in enumerate(rows)])
    return np.ascontiguousarray(reader.back(numbers).astype(weight.dtype))
