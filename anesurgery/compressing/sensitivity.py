"""Measure what compressing each weight costs at the outputs of a model, in each mode.

One weight at a time is replaced by what coremltools makes of it; the run goes on from where that weight is
read, so each weight costs only what lies downstream. Weights can be shared out over processes and machines, and
the results merged.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.compressing.assignment import Option, Proposal, Row, State, propose
from anesurgery.compressing.costs import Cost
from anesurgery.compressing.modes import (
    SMALLEST,
    Mode,
    candidates,
    compress,
    fits,
    op_name,
    read_mode,
    stored_bytes,
)
from anesurgery.display import Drawn
from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.files.package import Loaded, save
from anesurgery.files.sharing import Shard, share, workers
from anesurgery.interpret.core import Executable
from anesurgery.interpret.features import images
from anesurgery.interpret.forks import Fork, Forks
from anesurgery.interpret.predictor import bound
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.loading import load
from anesurgery.mil import Var, function_of
from anesurgery.splitting.graph import read_graph

MODES = ("palettize-2", "palettize-3", "palettize-4", "palettize-6", "palettize-8")
"""What is measured where nothing is asked for."""

Progress = Callable[[int, int], None]
"""(weights done, weights in all)."""


@dataclass(frozen=True)
class Sensitivity(Drawn):
    """The loss of each weight in each mode."""

    rows: tuple[Row, ...]
    """In the order in which the weights are read."""
    modes: tuple[str, ...]
    """Names as "palettize-4"."""
    samples: int
    """Sets of inputs on which the outputs were compared."""
    fingerprint: str
    """Of the model, the data and the modes: results of different ones cannot be merged."""
    total: int
    """Weights of the model, of which `rows` may be a share."""
    smallest: int = SMALLEST
    """Elements above which weights were measured."""
    source: Path | None = None
    """The model on disk; None of one in memory."""

    @property
    def complete(self) -> bool:
        """Does the result cover all weights?"""
        return len(self.rows) == self.total

    def merge(self, *others: Sensitivity) -> Sensitivity:
        """Join the results of several shares.

        Raises:
            SurgeryError: they come from different models, data or modes.
        """
        found: dict[int, Row] = {}
        for part in (self, *others):
            if part.fingerprint != self.fingerprint:
                raise SurgeryError("the results are of different models, data or modes; measure them again")
            found |= {row.number: row for row in part.rows}
        return replace(self, rows=tuple(found[n] for n in sorted(found)))

    def propose(
        self,
        *,
        bits: float | None = None,
        max_bytes: int | str | None = None,
        max_kl: float | None = None,
        min_psnr: float | None = None,
    ) -> Proposal:
        """Choose the mode of each weight for one goal: see `compressing.assignment.propose`.

        Raises:
            SurgeryError: weights are missing, no goal or several are given, or the goal cannot be reached.
        """
        if not self.complete:
            raise SurgeryError(f"{len(self.rows)} of {self.total} weights are measured; merge the other shares")
        goals = {"bits": bits, "max_kl": max_kl, "min_psnr": min_psnr}
        return propose(self.rows, max_bytes=max_bytes, smallest=self.smallest, **goals)

    def to_json(self) -> dict[str, Any]:
        """Plain data, which `from_json` reads."""
        return {
            "modes": list(self.modes),
            "samples": self.samples,
            "fingerprint": self.fingerprint,
            "total": self.total,
            "smallest": self.smallest,
            "weights": [row.to_json() for row in self.rows],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Sensitivity:
        """Read a result from JSON data.

        Raises:
            SurgeryError: it is something else.
        """
        try:
            rows = tuple(Row.from_json(row) for row in content["weights"])
            numbers = (
                int(content["samples"]),
                str(content["fingerprint"]),
                int(content["total"]),
                int(content["smallest"]),
            )
            return cls(rows, tuple(map(str, content["modes"])), *numbers)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SurgeryError(f"this is no result of `sensitivity`: {error!r}; measure again") from error


@door("seed", "precision")
def sensitivity(
    model: Any,
    data: Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    modes: Sequence[str] = MODES,
    *,
    precision: str = "fp32",
    function: str | None = None,
    smallest: int = SMALLEST,
    shard: Shard | str | None = None,
    jobs: int = 1,
    scheduler: str | Any = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure what each weight costs at the outputs when coremltools compresses it alone.

    Args:
        model: path, MLModel or MIL program, with the weights to measure uncompressed.
        data: one set of inputs by name, or several. Default: one random set, which says little about a trained
            model.
        modes: names such as "palettize-4", "linear-8", "prune-50" (`compressing.modes`).
        precision: the arithmetic of the runs.
        function: which function; `main` or the first by default.
        smallest: weights with at most this many elements stay as they are.
        shard: a share of the weights, as (3, 8) or "3/8"; `merge` joins the results.
        jobs: number of processes.
        scheduler: address of a Dask scheduler, or a client; its workers replace the processes. They see the
            model under the same path; one in memory is written to a temporary folder.
        seed: of sampled inputs.
        progress: called after each weight with (done, total); with workers after each share.

    Returns:
        The `Sensitivity`: for each weight its bytes, and for each mode the KL divergence in nats and the PSNR
        in dB of the outputs.

    Raises:
        SurgeryError: an unknown mode or share, no data, or a mode that the model's opset cannot hold.
    """
    chosen, part = [read_mode(name) for name in modes], share(shard)
    if jobs != 1 or scheduler is not None:
        options = {"precision": precision, "function": function, "smallest": smallest, "seed": seed}
        held = model if isinstance(model, (str, os.PathLike)) else load(model)
        return _spread(held, data, tuple(modes), part, (jobs, scheduler), options, progress)
    loaded = load(model)
    pictures = images(loaded.described_inputs)
    samples = _samples(
        data, lambda: sample_inputs(loaded.program, function=function, seed=seed, images=pictures)
    )
    if wrong := [mode.name for mode in chosen if not fits(mode, loaded.version)]:
        raise SurgeryError(f"{wrong[0]} needs iOS 18; convert the model for that, or leave the mode out")
    work = _Work(loaded, samples, chosen, precision, function, smallest)
    rows = work.rows(part, progress)
    content = (work.digest(), *modes, str(smallest), precision)
    key = hashlib.blake2b("\n".join(content).encode(), digest_size=12).hexdigest()
    return Sensitivity(rows, tuple(modes), len(samples), key, len(work.weights), smallest, loaded.source)


def _samples(data: Any, sample: Callable[[], Any]) -> list[Mapping[str, Any]]:
    if data is None:
        return [sample()]
    found = [data] if isinstance(data, Mapping) else list(data)
    if not found:
        raise SurgeryError("there is no data; give at least one set of inputs")
    return found


class _Work:
    """One model, its data and its weights, ready to measure."""

    def __init__(
        self,
        loaded: Any,
        samples: Sequence[Mapping[str, Any]],
        modes: Sequence[Mode],
        precision: str,
        function: str | None,
        smallest: int,
    ) -> None:
        chosen = function_of(loaded.program, function)
        name = next(n for n, f in loaded.program.functions.items() if f is chosen)
        self.modes, self.smallest, self.version = modes, smallest, loaded.version
        self.graph = read_graph(loaded.program, loaded.version, name)
        self.readers = candidates(self.graph, smallest)
        self.executable = Executable(loaded.program, function=name, precision=precision, fuse=False)
        constants = {v.name: v for op in chosen.operations if op.op_type == "const" for v in op.outputs}
        self.weights = [constants[n] for n in self.readers if n in constants]
        self.samples = [bound(loaded, values, name) for values in samples]

    def rows(self, part: Shard, progress: Progress | None) -> tuple[Row, ...]:
        """The weights of a share, each with its modes."""
        mine = part.of(range(len(self.weights)))
        made = {self.weights[n]: State(self._row(n)) for n in mine}
        runs = [Forks(self.executable, values, list(made)) for values in self.samples]
        expected = [run.whole() for run in runs]
        for done, forks in enumerate(zip(*runs, strict=True), 1):
            self._measure(made[forks[0].weight], forks, expected)
            if progress is not None:
                progress(done, len(made))
        return tuple(state.row() for state in made.values())

    def _measure(self, state: State, forks: Sequence[Fork], expected: Sequence[Mapping[str, Any]]) -> None:
        """One weight in all modes, on all samples."""
        name = forks[0].weight.name
        for mode in self.modes:
            made = compress(self.graph, name, self.readers[name], mode, self.version, self.smallest)
            if isinstance(made, str):
                state.skipped[mode.name] = made
                continue
            cost = Cost()
            for fork, outputs in zip(forks, expected, strict=True):
                cost.add(outputs, fork(made.array))
            state.options[mode.name] = Option(made.bytes, cost.psnr, cost.kl, cost.top1)

    def _row(self, number: int) -> Row:
        weight = self.weights[number]
        kinds = tuple(dict.fromkeys(self.graph.nodes[i].op.type for i in self.readers[weight.name]))
        return Row(
            number, op_name(weight), kinds, math.prod(map(int, weight.shape)), stored_bytes(weight), {}, {}
        )

    def digest(self) -> str:
        """What the weights and the data are: names, shapes and a few numbers of each."""
        found = hashlib.blake2b(digest_size=12)
        for weight in self.weights:
            found.update(f"{weight.name} {weight.shape}".encode())
            found.update(_some(weight).tobytes())
        for values in self.samples:
            for name in sorted(values):
                found.update(name.encode())
                found.update(np.ascontiguousarray(values[name]).tobytes())
        return found.hexdigest()


def _some(weight: Var) -> Any:
    """A few numbers of a weight; reading all of a large one would take longer than it is worth."""
    flat = np.asarray(weight.val).reshape(-1)
    return np.array(flat[:: max(1, flat.size // 512)])


def _spread(
    model: Loaded | str | os.PathLike[str],
    data: Any,
    modes: tuple[str, ...],
    part: Shard,
    where: tuple[int, Any],
    options: Mapping[str, Any],
    progress: Progress | None,
) -> Sensitivity:
    """The shares of one share, each by a worker."""
    with tempfile.TemporaryDirectory() as folder, workers(*where) as those:
        path = save(model, Path(folder, "m.mlpackage")) if isinstance(model, Loaded) else Path(model)
        values = None if data is None else _samples(data, dict)
        shares = [part.share(number, those.count) for number in range(1, those.count + 1)]
        tasks = [(str(path.absolute()), values, modes, one.words, dict(options)) for one in shares]
        count = None if progress is None else lambda done: progress(done, those.count)
        first, *others = map(Sensitivity.from_json, those.each(_one, tasks, count))
    return replace(first.merge(*others), source=None if isinstance(model, Loaded) else path)


def _one(path: str, data: Any, modes: Sequence[str], shard: str, options: dict[str, Any]) -> dict[str, Any]:
    """One share, in a process of its own: results travel as plain data."""
    return sensitivity(path, data, modes, shard=shard, **options).to_json()
