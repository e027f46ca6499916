"""Inspect every model of a folder, or compute its ranges, on several worker processes or a Dask cluster.

A model that cannot be read does not stop the others: the result then holds the reason as a string.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anesurgery.checking.ranges import Ranges, ranges
from anesurgery.display import Drawn
from anesurgery.doors import door
from anesurgery.errors import LoadError, SurgeryError
from anesurgery.files.package import CHECKPOINT, is_checkpoint
from anesurgery.files.sequence import is_chain
from anesurgery.files.sharing import workers
from anesurgery.files.size_index import is_sized
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.inspector import inspect
from anesurgery.placement.target import Target
from anesurgery.registry import RULES

SUFFIXES = (".mlpackage", ".mlmodel", ".mlmodelc", *RULES)
Progress = Callable[[int, int], None]
"""(models done, models in all)."""


@dataclass(frozen=True)
class Folder(Drawn):
    """The result for each model in a folder.

    Attributes:
        path: the folder.
        models: name in the folder -> the result, or the reason why the model was refused.
    """

    path: Path
    models: Mapping[str, Inspection | Ranges | str]

    @property
    def refused(self) -> dict[str, str]:
        """The reason for each refused model, by its name."""
        return {name: result for name, result in self.models.items() if isinstance(result, str)}

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the report of each model by name, or {"error": reason}."""
        return {n: {"error": r} if isinstance(r, str) else r.to_json() for n, r in self.models.items()}


def is_folder_of_models(path: Path) -> bool:
    """Is a path a folder that may hold models, and not a model itself?"""
    return path.is_dir() and not _is_model(path)


def _is_model(path: Path) -> bool:
    """Is a path a model, a chain of chunks, or one model in several sizes?"""
    return path.suffix in SUFFIXES or is_chain(path) or is_sized(path)


def models_in(folder: Path) -> list[Path]:
    """Return the models in a folder, by name; subfolders are not searched.

    Raises:
        LoadError: there are none.
    """
    models = sorted(filter(_is_model, folder.iterdir()))
    if not models:
        if is_checkpoint(folder):
            raise LoadError(f"{folder} {CHECKPOINT}")
        package = next((p for p in folder.resolve().parents if p.suffix in SUFFIXES), None)
        if package is not None:
            raise LoadError(f"{folder} is a part of {package}; give that")
        raise LoadError(f"{folder} holds no model; models end in {', '.join(SUFFIXES)}")
    return models


@door("target")
def inspect_folder(
    folder: str | os.PathLike[str],
    target: str | None = None,
    *,
    compute_units: str | None = None,
    jobs: int = 1,
    scheduler: str | Any = None,
    progress: Progress | None = None,
) -> Folder:
    """Inspect every model in a folder: see `inspect`.

    Args:
        folder: a folder of packages, .mlmodel and .mlmodelc files, chains of chunks and sized models.
        target: chips and OS, as "M1/macOS 14"; every chip by default.
        compute_units: a name; CPU_AND_NE by default.
        jobs: number of worker processes on this machine.
        scheduler: address of a Dask scheduler, or a client, instead of `jobs`; its workers must see the folder.
        progress: called after each model.

    Returns:
        The inspection of each model by its name in the folder, or the reason in words why there is none.

    Raises:
        LoadError: the folder holds no model.
        UnknownName: an unknown chip or OS.
        SurgeryError: no such workers.
    """
    Target.parse(target, compute_units)
    return _run_each(folder, _inspect_model, (target, compute_units), jobs, scheduler, progress)


@door("seed")
def ranges_folder(
    folder: str | os.PathLike[str],
    *,
    chip: str | None = None,
    seed: int = 0,
    jobs: int = 1,
    scheduler: str | Any = None,
    progress: Progress | None = None,
) -> Folder:
    """Compute the ranges of every model in a folder on sampled inputs: see `ranges`.

    Args:
        folder: a folder of packages, .mlmodel and .mlmodelc files.
        chip: the chip whose arithmetic counts ("M1"). Default: limits that hold on every measured chip.
        seed: seed of the sampled inputs.
        jobs: number of worker processes on this machine.
        scheduler: address of a Dask scheduler, or a client, instead of `jobs`; its workers must see the folder.
        progress: called after each model.

    Returns:
        The ranges of each model by its name in the folder, or the reason in words why there are none.

    Raises:
        LoadError: the folder holds no model.
        SurgeryError: no such workers.
    """
    return _run_each(folder, _model_ranges, (chip, seed), jobs, scheduler, progress)


def _run_each(
    folder: str | os.PathLike[str],
    task: Callable[..., Any],
    options: tuple[Any, ...],
    jobs: int,
    scheduler: Any,
    progress: Progress | None,
) -> Folder:
    """Call `task(path of a model, *options)` for each model of a folder on the workers."""
    path = Path(folder).expanduser().absolute()
    models = models_in(path)
    with workers(jobs, scheduler) as pool:
        report = None if progress is None else lambda done: progress(done, len(models))
        results = pool.each(task, [(str(model), *options) for model in models], report)
    return Folder(path, {model.name: result for model, result in zip(models, results, strict=True)})


def _inspect_model(model: str, target: str | None, units: str | None) -> Inspection | str:
    try:
        return inspect(model, target, compute_units=units)
    except SurgeryError as error:
        return str(error)


def _model_ranges(model: str, chip: str | None, seed: int) -> Ranges | str:
    try:
        return ranges(model, chip=chip, seed=seed)
    except SurgeryError as error:
        return str(error)
