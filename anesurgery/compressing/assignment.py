"""Choose the mode of each weight for one goal: least damage within a size, or least size within a damage.

`Sensitivity.propose` calls `propose` with measured costs, `compress` with measured or estimated ones. The
costs of the weights are added up, which is an estimate, as each was measured alone. For a damage, each weight
starts in its smallest mode, and the step that removes most damage per byte comes next. For a size, the same
steps may leave a good part of it unused where a few weights are large; so dynamic programming over parts of
the size looks for a better choice.

`measure_forms` and `estimate_forms` give `compress` the costs. `measure_forms` (`compress(mixed=True)`)
corrects each weight in every form, and runs the model with it. `estimate_forms` runs the model once for each
weight, not for each form. There each weight alone is rounded to the nearest in its first form, the one that it
would have without a choice. The KL divergence of the outputs grows with the squared error of the products, so
the damage in another form is scaled by the ratio of the errors. These errors come from some rows of the weight,
rounded to the nearest; by how much GPTQ lowers them is measured in the first form and assumed for the others.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from anesurgery.compressing.correcting import Candidate, find_candidates, plain_moments
from anesurgery.compressing.costs import Cost
from anesurgery.compressing.finished import Finished, portable
from anesurgery.compressing.fitting import FormFitter, round_to_nearest, round_with_feedback
from anesurgery.compressing.grids import Grid
from anesurgery.compressing.input_moments import MomentRecorder, joint_moments
from anesurgery.compressing.modes import SMALLEST, Mode, apply_configs, config_data, config_of, read_mode
from anesurgery.compressing.running_samples import run_op_by_op
from anesurgery.compressing.second_order import HessianFactor, mean_diagonal
from anesurgery.compressing.weight_forms import MOST_VECTOR
from anesurgery.display import Drawn, byte_words, read_size
from anesurgery.errors import SurgeryError
from anesurgery.facts.makeup import logits_of
from anesurgery.files.package import Loaded, save
from anesurgery.files.sharing import Shard, Workers, result
from anesurgery.interpret.arithmetic.constant_memory import CACHE_LIMIT
from anesurgery.interpret.core import Executable
from anesurgery.interpret.forks import Forks
from anesurgery.interpret.steps import Step
from anesurgery.mil import Array, Operation, Var, ct, quiet_host
from anesurgery.regions.reencoding import stored_bytes
from anesurgery.rewriting.ml_program import MLProgram

PARTS = 1 << 14
"""The number of parts that a size is cut into. Each weight takes whole parts: with a hundred weights, about a
percent of the size stays unused."""
PLAIN = ""
"""The mode of a weight that stays as it is."""
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
TINY = float(np.finfo(np.float64).tiny)
"""The least error that others are divided by, or whose logarithm is taken."""


@dataclass(frozen=True)
class Option:
    """The cost of one weight in one mode, with all others as they are."""

    bytes: int
    psnr: float
    """The PSNR of the worst output, in dB."""
    kl: float
    """The mean KL divergence of a row of the outputs, in nats."""
    top1: float
    """The share of rows whose largest entry stayed the same."""

    @classmethod
    def of(cls, size: int, cost: Cost) -> Option:
        """Return the option of so many bytes and a measured cost."""
        return cls(bytes=size, psnr=cost.psnr, kl=cost.kl, top1=cost.top1)

    @property
    def noise(self) -> float:
        """The mean squared difference of the worst output, over its squared peak."""
        return 10 ** (-self.psnr / 10)


@dataclass(frozen=True)
class Row:
    """One weight, with its cost in each mode."""

    number: int
    """Its place in the order in which weights are read."""
    weight: str
    readers: tuple[str, ...]
    """The types of the ops that read it."""
    elements: int
    bytes: int
    """The bytes of the weight as it is."""
    options: Mapping[str, Option]
    """Mode -> its cost."""
    skipped: Mapping[str, str]
    """Mode -> why coremltools does not compress the weight so."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            **vars(self),
            "readers": list(self.readers),
            "options": {k: vars(o) for k, o in self.options.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Row:
        """Read what `to_json` gave."""
        return cls(
            number=int(content["number"]),
            weight=str(content["weight"]),
            readers=tuple(map(str, content["readers"])),
            elements=int(content["elements"]),
            bytes=int(content["bytes"]),
            options={
                str(mode): Option(int(o["bytes"]), *(float(o[k]) for k in ("psnr", "kl", "top1")))
                for mode, o in content["options"].items()
            },
            skipped=dict(content["skipped"]),
        )


@dataclass(frozen=True)
class Proposal(Drawn):
    """A mode for each weight; a weight without one stays as it is."""

    modes: Mapping[str, str]
    """Weight -> name of its mode."""
    bytes: int
    """The bytes of all measured weights together."""
    plain_bytes: int
    """The bytes of the same weights, uncompressed."""
    elements: int
    kl: float
    """The sum of what each weight costs alone, in nats: an estimate for all together."""
    psnr: float
    """The PSNR in dB if the noise of all weights adds up: an estimate too."""
    smallest: int
    """Weights with more elements were measured, and are compressed."""

    @property
    def bits(self) -> float:
        """The average bits of an element."""
        return 8 * self.bytes / self.elements

    @property
    def _chosen(self) -> dict[str, Mode]:
        return {weight: read_mode(mode) for weight, mode in self.modes.items()}

    @property
    def _by_kind(self) -> dict[str, dict[str, Mode]]:
        """Kind of compression -> its weights, each with its mode."""
        by_kind: dict[str, dict[str, Mode]] = {}
        for weight, mode in self._chosen.items():
            by_kind.setdefault(mode.kind, {})[weight] = mode
        return by_kind

    @property
    def configs(self) -> dict[str, Any]:
        """Kind of compression -> coremltools' `OptimizationConfig` for the weights that get it."""
        return {kind: config_of(kind, chosen, self.smallest) for kind, chosen in self._by_kind.items()}

    @property
    def config(self) -> Any:
        """The one `OptimizationConfig`, where all modes are of one kind.

        Raises:
            SurgeryError: they are of several kinds; see `configs`.
        """
        configs = list(self.configs.values())
        if len(configs) != 1:
            raise SurgeryError(f"the modes are of {len(configs)} kinds; take `configs`, or let `apply` do it")
        return configs[0]

    def apply(self, model: Any) -> Any:
        """Return an MLModel with these weights compressed by coremltools itself.

        Args:
            model: the path of the package that was measured, or an MLModel.
        """
        with quiet_host():
            if isinstance(model, (str, Path)):
                model = ct.models.MLModel(str(model), skip_model_load=True)
            return apply_configs(model, self._chosen, self.smallest)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `configs` are for coremltools' `OptimizationConfig.from_dict`."""
        by_kind = sorted(self._by_kind.items())
        return {
            "modes": dict(self.modes),
            "bytes": self.bytes,
            "plain_bytes": self.plain_bytes,
            "bits": self.bits,
            "estimated_kl": self.kl,
            "estimated_psnr_db": self.psnr,
            "configs": {kind: config_data(kind, chosen, self.smallest) for kind, chosen in by_kind},
        }


def propose(
    rows: Sequence[Row],
    *,
    bits: float | None = None,
    max_bytes: int | str | None = None,
    max_kl: float | None = None,
    min_psnr: float | None = None,
    smallest: int = SMALLEST,
) -> Proposal:
    """Choose the mode of each weight for one goal.

    Args:
        rows: the measured weights.
        bits: the most bits of an element, on average. Or:
        max_bytes: the most bytes of all measured weights. Or:
        max_kl: the most KL divergence, in nats: the smallest model below it. Or:
        min_psnr: the least PSNR of the worst output, in dB: likewise.
        smallest: weights with more elements were measured.

    Raises:
        SurgeryError: no goal or several, or no choice of the measured modes reaches it.
    """
    goals = [g for g in (bits, max_bytes, max_kl, min_psnr) if g is not None]
    if len(goals) != 1:
        raise SurgeryError("give one goal: bits=4, max_bytes='20 MB', max_kl=0.01 or min_psnr=40")
    if not rows:
        raise SurgeryError(f"no weight of more than {smallest} elements was measured; nothing can be proposed")
    choice = _Choice(rows, by_noise=min_psnr is not None)
    if bits is not None:
        choice.minimize_damage(int(bits * sum(row.elements for row in rows) / 8))
    elif max_bytes is not None:
        choice.minimize_damage(read_size(max_bytes))
    elif min_psnr is not None:
        choice.minimize_size(10 ** (-min_psnr / 10))
    else:
        choice.minimize_size(float(max_kl or 0))
    return choice.proposal(smallest)


class _Step(NamedTuple):
    """A change of one weight to its next larger mode."""

    number: int
    """The index of the weight's row."""
    mode: str
    slope: float
    """The damage that it removes per byte."""


class _Choice:
    """A mode for each weight, at first the smallest, and the steps to better ones.

    Args:
        rows: the measured weights.
        by_noise: does the noise of the outputs count as damage? Else it is the KL divergence.
    """

    def __init__(self, rows: Sequence[Row], by_noise: bool) -> None:
        self.rows = rows
        self._damages = [_damage_by_mode(row, by_noise) for row in rows]
        self.hulls = [_hull(row, damages) for row, damages in zip(rows, self._damages, strict=True)]
        self.chosen = [hull[0] for hull in self.hulls]

    @property
    def bytes(self) -> int:
        """The bytes of all weights."""
        return sum(_bytes(row, mode) for row, mode in zip(self.rows, self.chosen, strict=True))

    @property
    def damage(self) -> float:
        """The sum of the damage of all weights."""
        return sum(damages[mode] for damages, mode in zip(self._damages, self.chosen, strict=True))

    def minimize_damage(self, budget: int) -> None:
        """Choose the modes of least damage within a number of bytes."""
        if self.bytes > budget:
            raise SurgeryError(
                f"the smallest forms measured take {byte_words(self.bytes)}, more than {byte_words(budget)}; "
                "measure smaller modes, or raise the limit"
            )
        for step in self._steps():
            if self._bytes_with(step) <= budget:
                self.chosen[step.number] = step.mode
        stepwise, stepwise_damage = self.chosen, self.damage
        self.chosen = self._best_by_parts(budget) or stepwise
        if self.damage >= stepwise_damage:
            self.chosen = stepwise

    def _best_by_parts(self, budget: int) -> list[str] | None:
        """Return the modes of least damage, by dynamic programming over sizes in whole parts of the budget.

        `least[n]` is the least damage of the weights so far within n parts, and `picks` has for each weight and
        each n the number of the mode that gives it. From the last weight on, each pick then tells how many
        parts remain for the weights before. None where no choice fits.
        """
        part = max(1, math.ceil(budget / PARTS))
        count = budget // part
        least, picks = np.zeros(count + 1), list[Array]()
        finite_modes = [[m for m, damage in each.items() if math.isfinite(damage)] for each in self._damages]
        for row, damages, modes in zip(self.rows, self._damages, finite_modes, strict=True):
            totals = np.full((len(modes), count + 1), np.inf)  # the least damage with each mode, within n parts
            for number, mode in enumerate(modes):
                parts = math.ceil(_bytes(row, mode) / part)
                if parts <= count:
                    totals[number, parts:] = least[: count + 1 - parts] + damages[mode]
            picks.append(totals.argmin(0).astype(np.uint8))
            least = totals.min(0)
        if not math.isfinite(least[count]):
            return None
        chosen, remaining = list[str](), count
        for row, modes, pick in zip(self.rows[::-1], finite_modes[::-1], picks[::-1], strict=True):
            chosen.append(modes[pick[remaining]])
            remaining -= math.ceil(_bytes(row, chosen[-1]) / part)
        return chosen[::-1]

    def minimize_size(self, most: float) -> None:
        """Choose the smallest modes with at most this damage."""
        for step in self._steps():
            if self.damage <= most:
                return
            self.chosen[step.number] = step.mode
        if self.damage > most:
            raise SurgeryError(f"even with all weights as they are the damage is {self.damage:.3g}")

    def _bytes_with(self, step: _Step) -> int:
        """Return the bytes of all weights after a step."""
        row = self.rows[step.number]
        return self.bytes - _bytes(row, self.chosen[step.number]) + _bytes(row, step.mode)

    def _steps(self) -> list[_Step]:
        """Return all steps, those that remove most damage per byte first; those of one weight stay in order."""
        steps = [
            _Step(number, large, _slope(row, damages, small, large))
            for number, (row, damages, hull) in enumerate(
                zip(self.rows, self._damages, self.hulls, strict=True)
            )
            for small, large in pairwise(hull)
        ]
        return sorted(steps, key=lambda step: (-step.slope, step.number))

    def proposal(self, smallest: int) -> Proposal:
        """Return the chosen modes with their estimated cost."""
        pairs = list(zip(self.rows, self.chosen, strict=True))
        options = [row.options[mode] for row, mode in pairs if mode != PLAIN]
        noise = sum(o.noise for o in options)
        return Proposal(
            modes={row.weight: mode for row, mode in pairs if mode != PLAIN},
            bytes=self.bytes,
            plain_bytes=sum(row.bytes for row in self.rows),
            elements=sum(row.elements for row in self.rows),
            kl=sum(o.kl for o in options),
            psnr=-10 * math.log10(noise) if noise else math.inf,
            smallest=smallest,
        )


def _bytes(row: Row, mode: str) -> int:
    """Return the bytes of a weight in a mode."""
    return row.bytes if mode == PLAIN else row.options[mode].bytes


def _damage_by_mode(row: Row, by_noise: bool) -> dict[str, float]:
    """Return the damage of each mode of a weight: KL, or noise if asked for or if no output has rows."""
    by_noise = by_noise or not any(o.kl for o in row.options.values())
    return {PLAIN: 0.0} | {mode: o.noise if by_noise else o.kl for mode, o in row.options.items()}


def _hull(row: Row, damages: Mapping[str, float]) -> list[str]:
    """Return the lower convex hull of (bytes, damage): each step removes less damage per byte than the last."""
    hull: list[str] = []
    for mode in sorted(damages, key=lambda m: (_bytes(row, m), damages[m])):
        if not math.isfinite(damages[mode]) or (hull and damages[mode] >= damages[hull[-1]]):
            continue
        while len(hull) > 1 and _slope(row, damages, hull[-1], mode) >= _slope(row, damages, *hull[-2:]):
            hull.pop()
        hull.append(mode)
    return hull


def _slope(row: Row, damages: Mapping[str, float], small: str, large: str) -> float:
    """Return the damage that a step removes per byte."""
    return (damages[small] - damages[large]) / max(1, _bytes(row, large) - _bytes(row, small))


# -- measured and estimated costs of the forms that `compress` may choose -----------------------------------


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
    rows = [
        _row(number, candidate, _estimated_options(trials[candidate], costs[candidate.var.name]))
        for number, candidate in enumerate(forms)
    ]
    first_forms = {candidate.var.name: names[0] for candidate, names in forms.items()}
    first_options = [row.options[first_forms[row.weight]] for row in rows]
    first_bytes = sum(option.bytes for option in first_options)
    proposal = propose(rows, max_bytes=first_bytes if max_bytes is None else max_bytes, smallest=0)
    modes = proposal.modes
    if max_bytes is None and proposal.kl >= GAIN * sum(option.kl for option in first_options):
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
    """Choose as `estimate_forms` does, by correcting each weight in every form alone, in the plain model.

    `bits` are the most of a number, on average, in place of which `max_bytes` may be given; `version` is that
    of the specification.
    """
    hessians = plain_moments(loaded, name, samples, list(forms))
    executable = Executable(loaded.program, function=name, fuse=False)
    by_var, logits = {candidate.var: candidate for candidate in forms}, logits_of(executable.function)
    runs = [Forks(executable, values, list(by_var)) for values in samples]
    plain_outputs = [run.whole() for run in runs]
    rows = []
    for number, forks in enumerate(zip(*runs, strict=True)):  # the forks of all samples at one weight
        candidate, options = by_var[forks[0].weight], {}
        corrections = {  # all begin before the first is waited for
            form: finished.begin(candidate, form, hessians[candidate.var], version) for form in forms[candidate]
        }
        for form, result_of_correction in corrections.items():
            corrected, cost = result_of_correction(), Cost(chosen=logits)
            for fork, outputs in zip(forks, plain_outputs, strict=True):
                cost.add(outputs, fork(corrected.array))
            options[form] = Option.of(corrected.bytes, cost)
        rows.append(_row(number, candidate, options))
    modes = propose(rows, bits=bits if max_bytes is None else None, max_bytes=max_bytes, smallest=0).modes
    return {var: modes[var.name] for var in by_var if var.name in modes}


def _row(number: int, candidate: Candidate, options: Mapping[str, Option]) -> Row:
    """Return the row of a weight with the cost of its forms."""
    var = candidate.var
    return Row(
        number=number,
        weight=var.name,
        readers=tuple(r.op.op_type for r in candidate.readers),
        elements=int(np.prod(var.shape)),
        bytes=stored_bytes(var),
        options=options,
        skipped={},
    )


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
    candidates, _ = find_candidates(function, 0)
    by_name = {candidate.var.name: candidate for candidate in candidates if candidate.var.name in grids}
    executable = Executable(loaded.program, function=name, fuse=False)
    executable.plan.cache_limit = min(executable.plan.cache_limit, CACHE_LIMIT)
    weights = [candidate.var for candidate in by_name.values()]
    costs = {weight: Cost(chosen=logits_of(function)) for weight in grids}
    runs = [Forks(executable, values, weights) for values in samples]
    plain_outputs, rows = [], 0
    for run in runs:
        plain_outputs.append(run.whole())
        rows += _fewest_rows(plain_outputs[-1])
        if rows >= ENOUGH_ROWS:
            break
    for forks in zip(*runs[: len(plain_outputs)], strict=True):
        weight = forks[0].weight.name
        array = _round_weight(by_name[weight], grids[weight])
        for fork, outputs in zip(forks, plain_outputs, strict=True):
            costs[weight].add(outputs, fork(array))
    return costs


def _fewest_rows(outputs: Mapping[str, Array]) -> int:
    """Return the number of rows of the float output that has the fewest."""
    return min((math.prod(each.shape[:-1]) for each in outputs.values() if each.dtype.kind == "f"), default=0)


def _estimated_options(trial: _Trial, cost: Cost) -> dict[str, Option]:
    """Return the expected damage of each form of a weight; `cost` was measured in its first form."""
    if np.isfinite(cost.kl):
        noise = 10 ** (-cost.psnr / 10)
        damage = cost.kl if cost.rows else noise
    else:
        noise = damage = WORST
    return {
        form: Option(
            bytes=trial.bytes[form],
            psnr=-10 * math.log10(max(noise * ratio, TINY)),
            kl=damage * ratio,
            top1=cost.top1,
        )
        for form, ratio in trial.errors.items()
    }


def _try_forms(
    executable: Executable,
    samples: Sequence[Mapping[str, Any]],
    forms: Mapping[Candidate, Sequence[str]],
    finished: Finished,
) -> dict[Candidate, _Trial]:
    """Try each weight in its forms as soon as all ops that read it have run; so few Hessians are kept."""
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
                wait(list(trials.values())[: -workers.count])  # so at most one trial waits for each worker
                sent = candidate if workers.here else portable(candidate)
                trials[candidate] = workers.submit(_try_on_some_rows, sent, forms[candidate], hessians)
        if all(candidate in trials for candidate in by_op[step.op]):
            recorder.matrices.pop(step.op)
        return step

    run_op_by_op(executable, samples, record, set(by_op), needs_outputs=False, folder=finished.folder)
    return {candidate: result(future) for candidate, future in trials.items()}


def _try_on_some_rows(candidate: Candidate, forms: Sequence[str], hessians: Array) -> _Trial:
    """Fit the grid of each form to all rows of a weight, and measure its error on some of them."""
    reader, weight = candidate.readers[0], np.asarray(candidate.var.val)
    rows = reader.to_rows(weight.astype(np.float32))  # (groups, rows, columns)
    hessians = (hessians / mean_diagonal(hessians)).astype(np.float32)
    fitter = FormFitter(
        rows, hessians, channels=reader.channels, axis=reader.channel_axis, rank=weight.ndim, dtype=weight.dtype
    )
    grids = {form: fitter.grid(form) for form in forms}
    numbers = _sampled_rows(rows.shape[1])
    sampled = rows[:, numbers]
    sampled_grids = {form: grid.select_rows(numbers) for form, grid in grids.items()}
    errors = {form: round_to_nearest(sampled, grid, hessians).error for form, grid in sampled_grids.items()}
    first_error = max(errors[forms[0]], TINY)
    factors = [HessianFactor.of(hessian, dtype=torch.float32) for hessian in hessians]
    corrected_error = round_with_feedback(sampled, factors, sampled_grids[forms[0]]).error
    remaining_share = min(1.0, corrected_error / first_error)  # what GPTQ leaves of the error of the first form
    return _Trial(
        grid=grids[forms[0]],
        bytes={form: grid.bytes(weight.size) for form, grid in grids.items()},
        errors={form: remaining_share * error / first_error for form, error in errors.items()},
    )


def _sampled_rows(count: int) -> Array:
    """Return about `MOST_ROWS` of so many row numbers, in runs as long as the longest vector of a table.

    Of 1024 rows these are 0 to 7, 64 to 71, 128 to 135, ...
    """
    step = max(MOST_VECTOR, count // MOST_ROWS * MOST_VECTOR)
    return np.concatenate(
        [np.arange(start, min(start + MOST_VECTOR, count)) for start in range(0, count, step)]
    )


def _round_weight(candidate: Candidate, grid: Grid) -> Array:
    """Return a weight rounded to the nearest numbers of a grid, in its shape and type."""
    reader, weight = candidate.readers[0], np.asarray(candidate.var.val)
    rows = reader.to_rows(weight.astype(np.float32))
    rounded = np.stack([grid.nearest(part, group) for group, part in enumerate(rows)])
    return np.ascontiguousarray(reader.from_rows(rounded).astype(weight.dtype))
