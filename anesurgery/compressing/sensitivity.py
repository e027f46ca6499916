"""Measure what compressing each weight costs at the outputs of a model, in each mode of coremltools.

One weight at a time is replaced by what coremltools makes of it. The run forks where that weight is first read,
so each weight costs only what lies downstream. Weights can be shared out over processes and machines, and the
results merged.
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

from anesurgery.compressing.assignment import Option, Proposal, Row, propose
from anesurgery.compressing.costs import Cost
from anesurgery.compressing.modes import SMALLEST, Mode, compress, fits, op_name, read_mode, weight_readers
from anesurgery.display import Drawn
from anesurgery.doors import door
from anesurgery.errors import DAMAGED, SurgeryError
from anesurgery.files.package import Loaded, save
from anesurgery.files.sharing import Shard, Workers, share, workers
from anesurgery.interpret.core import Executable
from anesurgery.interpret.features import default_shapes, images
from anesurgery.interpret.forks import Fork, Forks
from anesurgery.interpret.predictor import bound
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.loading import load_whole
from anesurgery.mil import Var, function_of
from anesurgery.regions.reencoding import stored_bytes
from anesurgery.splitting.graph import read_graph

MODES = ("palettize-2", "palettize-3", "palettize-4", "palettize-6", "palettize-8")
"""The default modes."""

Progress = Callable[[int, int], None]
"""(weights done, weights in all)."""


@dataclass(frozen=True)
class Sensitivity(Drawn):
    """The loss with each weight in each mode."""

    rows: tuple[Row, ...]
    """The weights, in the order in which they are read."""
    modes: tuple[str, ...]
    """The names of the modes, such as "palettize-4"."""
    samples: int
    """The number of samples on which the outputs were compared."""
    fingerprint: str
    """A digest of the model, the data and the modes: only results with the same one can be merged."""
    total: int
    """The number of weights of the model, of which `rows` may be a share."""
    smallest: int = SMALLEST
    """Weights with more elements were measured."""
    source: Path | None = None
    """The path of the model; None for one in memory."""

    @property
    def complete(self) -> bool:
        """Does the result cover all weights?"""
        return len(self.rows) == self.total

    def merge(self, *others: Sensitivity) -> Sensitivity:
        """Join the results of several shares.

        Raises:
            SurgeryError: they come from different models, data or modes.
        """
        rows: dict[int, Row] = {}
        for part in (self, *others):
            if part.fingerprint != self.fingerprint:
                raise SurgeryError("the results are of different models, data or modes; measure them again")
            rows |= {row.number: row for row in part.rows}
        return replace(self, rows=tuple(rows[number] for number in sorted(rows)))

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
        """Return plain data, which `from_json` reads."""
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
            return cls(
                rows=tuple(Row.from_json(row) for row in content["weights"]),
                modes=tuple(map(str, content["modes"])),
                samples=int(content["samples"]),
                fingerprint=str(content["fingerprint"]),
                total=int(content["total"]),
                smallest=int(content["smallest"]),
            )
        except DAMAGED as error:
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
        model: path, MLModel or MIL program, with the weights to measure uncompressed. The models of a pipeline
            are measured as one.
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
        subject = model if isinstance(model, (str, os.PathLike)) else load_whole(model)
        with workers(jobs, scheduler) as pool:
            return _measure_by_workers(subject, data, tuple(modes), part, pool, options, progress)
    loaded = load_whole(model)
    inputs = loaded.described_inputs
    like = {"shapes": default_shapes(inputs), "images": images(inputs)}
    samples = _samples(data, lambda: sample_inputs(loaded.program, function=function, seed=seed, **like))
    if wrong := [mode.name for mode in chosen if not fits(mode, loaded.version)]:
        raise SurgeryError(f"{wrong[0]} needs iOS 18; convert the model for that, or leave the mode out")
    measurement = _Measurement(loaded, samples, chosen, precision, function, smallest)
    rows = measurement.rows(part, progress)
    content = (measurement.digest(), *modes, str(smallest), precision)
    key = hashlib.blake2b("\n".join(content).encode(), digest_size=12).hexdigest()
    return Sensitivity(
        rows=rows,
        modes=tuple(modes),
        samples=len(samples),
        fingerprint=key,
        total=len(measurement.weights),
        smallest=smallest,
        source=loaded.source,
    )


def _samples(data: Any, sample: Callable[[], Any]) -> list[Mapping[str, Any]]:
    """Return the samples as a list; without data, one from `sample`."""
    if data is None:
        return [sample()]
    samples = [data] if isinstance(data, Mapping) else list(data)
    if not samples:
        raise SurgeryError("there is no data; give at least one set of inputs")
    return samples


class _Measurement:
    """One model, its samples and its weights, ready to measure."""

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
        self.readers = weight_readers(self.graph, smallest)
        self.executable = Executable(loaded.program, function=name, precision=precision, fuse=False)
        constants = {v.name: v for op in chosen.operations if op.op_type == "const" for v in op.outputs}
        self.weights = [constants[n] for n in self.readers if n in constants]
        self.samples = [bound(loaded, values, name) for values in samples]

    def rows(self, part: Shard, progress: Progress | None) -> tuple[Row, ...]:
        """Measure the weights of a share in all modes."""
        rows = {self.weights[n]: self._empty_row(n) for n in part.of(range(len(self.weights)))}
        runs = [Forks(self.executable, values, list(rows)) for values in self.samples]
        expected = [run.whole() for run in runs]
        for done, forks in enumerate(zip(*runs, strict=True), 1):
            weight = forks[0].weight
            rows[weight] = self._measured(rows[weight], forks, expected)
            if progress is not None:
                progress(done, len(rows))
        return tuple(rows.values())

    def _measured(self, row: Row, forks: Sequence[Fork], expected: Sequence[Mapping[str, Any]]) -> Row:
        """Measure one weight in all modes; `forks` are the runs of the samples, stopped at the weight."""
        name, options, skipped = forks[0].weight.name, dict[str, Option](), dict[str, str]()
        for mode in self.modes:
            compressed = compress(self.graph, name, self.readers[name], mode, self.version, self.smallest)
            if isinstance(compressed, str):
                skipped[mode.name] = compressed
                continue
            cost = Cost()
            for fork, outputs in zip(forks, expected, strict=True):
                cost.add(outputs, fork(compressed.array))
            options[mode.name] = Option.of(compressed.bytes, cost)
        return replace(row, options=options, skipped=skipped)

    def _empty_row(self, number: int) -> Row:
        """Return the row of a weight without modes."""
        weight = self.weights[number]
        return Row(
            number=number,
            weight=op_name(weight),
            readers=tuple(dict.fromkeys(self.graph.nodes[i].op.type for i in self.readers[weight.name])),
            elements=math.prod(map(int, weight.shape)),
            bytes=stored_bytes(weight),
            options={},
            skipped={},
        )

    def digest(self) -> str:
        """Return a digest of the weights (names, shapes and a few numbers of each) and of the samples."""
        digest = hashlib.blake2b(digest_size=12)
        for weight in self.weights:
            digest.update(f"{weight.name} {weight.shape}".encode())
            digest.update(_sampled_numbers(weight).tobytes())
        for values in self.samples:
            for name in sorted(values):
                digest.update(name.encode())
                digest.update(np.ascontiguousarray(values[name]).tobytes())
        return digest.hexdigest()


def _sampled_numbers(weight: Var) -> Any:
    """Return some 512 numbers of a weight; to read all of a large one would take too long."""
    flat = np.asarray(weight.val).reshape(-1)
    return np.array(flat[:: max(1, flat.size // 512)])


def _measure_by_workers(
    model: Loaded | str | os.PathLike[str],
    data: Any,
    modes: tuple[str, ...],
    part: Shard,
    pool: Workers,
    options: Mapping[str, Any],
    progress: Progress | None,
) -> Sensitivity:
    """Divide a share of the weights among workers, and merge their results.

    A model in memory is written to a temporary folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = save(model, Path(folder, "m.mlpackage")) if isinstance(model, Loaded) else Path(model)
        samples = None if data is None else _samples(data, dict)
        shares = [part.share(number, pool.count) for number in range(1, pool.count + 1)]
        tasks = [(str(path.absolute()), samples, modes, each.words, dict(options)) for each in shares]
        count = None if progress is None else lambda done: progress(done, pool.count)
        first, *others = map(Sensitivity.from_json, pool.each(_measure_share, tasks, count))
    return replace(first.merge(*others), source=None if isinstance(model, Loaded) else path)


def _measure_share(
    path: str, data: Any, modes: Sequence[str], shard: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Measure one share in a process of its own, and return plain data."""
    return sensitivity(path, data, modes, shard=shard, **options).to_json()
