"""A folder of models: each is inspected, or run for its ranges, by itself, and shared out over workers."""

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
        path: of the folder.
        models: name in the folder -> the result, or the reason why the model was refused.
    """

    path: Path
    models: Mapping[str, Inspection | Ranges | str]

    @property
    def refused(self) -> dict[str, str]:
        """The reason for each refused model, by its name."""
        return {name: one for name, one in self.models.items() if isinstance(one, str)}

    def to_json(self) -> dict[str, Any]:
        """Plain data: the report of each model by name, or its error."""
        return {n: {"error": one} if isinstance(one, str) else one.to_json() for n, one in self.models.items()}


def is_folder_of_models(path: Path) -> bool:
    """Is a path a folder that may hold models, and no model itself?"""
    own = path.suffix in SUFFIXES or is_chain(path) or is_sized(path)
    return path.is_dir() and not own


def models_in(folder: Path) -> list[Path]:
    """The models in a folder, by name; those of folders in it are not looked for.

    Raises:
        LoadError: there are none.
    """
    held = sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES or is_chain(p) or is_sized(p))
    if not held:
        if is_checkpoint(folder):
            raise LoadError(f"{folder} {CHECKPOINT}")
        package = next((p for p in folder.resolve().parents if p.suffix in SUFFIXES), None)
        if package is not None:
            raise LoadError(f"{folder} is a part of {package}; give that")
        raise LoadError(f"{folder} holds no model; models end in {', '.join(SUFFIXES)}")
    return held


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
        folder: of packages, .mlmodel and .mlmodelc files, chunks and sizes.
        target: chips and OS, as "M1/macOS 14"; every chip by default.
        compute_units: a name; CPU_AND_NE by default.
        jobs: processes of this machine.
        scheduler: of Dask, in place of these: its address, or a client. Its workers see the folder too.
        progress: called after each model.

    Returns:
        By the name in the folder, the inspection of each model, or the reason in words why there is none.

    Raises:
        LoadError: the folder holds no model.
        UnknownName: an unknown chip or OS.
        SurgeryError: no such workers.
    """
    Target.parse(target, compute_units)
    return _each(folder, _inspected, (target, compute_units), jobs, scheduler, progress)


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
    """The ranges of every model in a folder on sampled inputs: see `ranges`.

    Args:
        folder: of packages, .mlmodel and .mlmodelc files.
        chip: the chip whose arithmetic counts ("M1"). Default: limits that hold on every measured chip.
        seed: of the sampled inputs.
        jobs: processes of this machine.
        scheduler: of Dask, in place of these: its address, or a client. Its workers see the folder too.
        progress: called after each model.

    Returns:
        By the name in the folder, the ranges of each model, or the reason in words why there is none.

    Raises:
        LoadError: the folder holds no model.
        SurgeryError: no such workers.
    """
    return _each(folder, _ranged, (chip, seed), jobs, scheduler, progress)


def _each(
    folder: str | os.PathLike[str],
    look: Callable[..., Any],
    options: tuple[Any, ...],
    jobs: int,
    scheduler: Any,
    progress: Progress | None,
) -> Folder:
    path = Path(folder).expanduser().absolute()
    models = models_in(path)
    with workers(jobs, scheduler) as those:
        count = None if progress is None else lambda done: progress(done, len(models))
        reports = those.each(look, [(str(model), *options) for model in models], count)
    return Folder(path, {model.name: one for model, one in zip(models, reports, strict=True)})


def _inspected(model: str, target: str | None, units: str | None) -> Inspection | str:
    try:
        return inspect(model, target, compute_units=units)
    except SurgeryError as error:
        return str(error)


def _ranged(model: str, chip: str | None, seed: int) -> Ranges | str:
    try:
        return ranges(model, chip=chip, seed=seed)
    except SurgeryError as error:
        return str(error)
