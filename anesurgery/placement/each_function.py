"""The inspections of all functions of a package, and of all sizes in a folder of sizes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from anesurgery.errors import UnknownName
from anesurgery.files import size_index
from anesurgery.files.package import Loaded
from anesurgery.loading import load_graph
from anesurgery.placement.inspection import Inspection, OpRow
from anesurgery.placement.target import Target

InspectProgram = Callable[..., Inspection]


def of_functions(loaded: Loaded, target: Target, inspect_program: InspectProgram) -> dict[str, Inspection]:
    """Name -> inspection, of a package with several functions; of another nothing."""
    names = list(loaded.program.functions)
    if len(names) < 2:
        return {}
    return {name: inspect_program(loaded, target, function=name) for name in names}


def of_sizes(folder: Path, target: Target, inspect_program: InspectProgram) -> dict[str, Inspection]:
    """Name -> inspection of each size in a folder of sizes, in rising order.

    Raises:
        LoadError: a package cannot be read, or `sizes.json` is damaged.
    """
    rows, _ = size_index.read(folder)
    packages = {name: load_graph(folder / name) for name in dict.fromkeys(row.package for row in rows)}
    return {row.name: inspect_program(packages[row.package], target, function=row.function) for row in rows}


def of_folder(
    folder: Path, target: Target, inspect_program: InspectProgram, size: str | None = None
) -> Inspection:
    """The inspection of a folder of sizes: that of one size, or of the largest, which tells of all.

    Raises:
        LoadError: a package cannot be read, or `sizes.json` is damaged.
        UnknownName: no such size.
    """
    sizes = of_sizes(folder, target, inspect_program)
    if size is None:
        told = with_functions(replace(list(sizes.values())[-1], model=str(folder)), sizes)
        return replace(told, notes=(*_leaving(sizes), *told.notes))
    if size not in sizes:
        raise UnknownName("size", size, list(sizes))
    return sizes[size]


def with_functions(inspection: Inspection, functions: Mapping[str, Inspection]) -> Inspection:
    """An inspection that tells of each function in a note."""
    if not functions:
        return inspection
    told = [f"{name}: {one.summary}" for name, one in functions.items()]
    return replace(inspection, functions=dict(functions), notes=(*told, *inspection.notes))


def _leaving(sizes: Mapping[str, Inspection]) -> tuple[str, ...]:
    """A note of the first size at which the engine cannot run what it can at the size before, if any."""
    for (smaller, before), (name, after) in itertools.pairwise(sizes.items()):
        legal = {place for place, row in _placed(before).items() if row.legal}
        lost = [row for place, row in _placed(after).items() if row.legal is False and place in legal]
        if lost:
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            first = f"{lost[0].op_type} {lost[0].name}{more}"
            return (f"leaves the engine at {name}: {first}, which it can run at {smaller}",)
    return ()


def _placed(inspection: Inspection) -> dict[tuple[str, int], OpRow]:
    """Each op by its type, and how many of that type stand before it: names differ between conversions."""
    counts = Counter[str]()
    placed = dict[tuple[str, int], OpRow]()
    for row in inspection.ops:
        placed[row.op_type, counts[row.op_type]] = row
        counts[row.op_type] += 1
    return placed
