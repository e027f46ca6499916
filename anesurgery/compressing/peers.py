"""The data-free modes of coremltools beside a compression: their size, and their loss on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anesurgery.compressing.correcting import candidates
from anesurgery.compressing.costs import Cost
from anesurgery.compressing.modes import apply_configs, fits, op_name, read_mode
from anesurgery.mil import function_of
from anesurgery.rewriting.ml_program import MLProgram

USUAL = ("linear-8", "linear-4", "palettize-6", "palettize-4")
"""The modes that are drawn where none is named."""
ONE_FUNCTION = "coremltools.optimize takes one package with one function, so there are no points of its modes"


@dataclass(frozen=True)
class Point:
    """A model in one mode of coremltools."""

    mode: str
    bytes: int
    """Of all weights."""
    loss: Cost
    """On the held-out samples."""


def points(
    model: MLProgram, modes: Sequence[str], smallest: int, measure: Callable[[MLProgram], tuple[int, Cost]]
) -> tuple[list[Point], list[str]]:
    """The points of some modes, and why others have none.

    Args:
        model: the model before; a pipeline and chunks have no points.
        modes: names such as "palettize-4" (`compressing.modes`).
        smallest: elements above which a weight is compressed.
        measure: bytes of the weights of a model, and its loss.

    Raises:
        SurgeryError: there is no such mode.
    """
    wanted = {name: read_mode(name) for name in modes}
    if not wanted:
        return [], []
    if type(model) is not MLProgram or len(model.loaded.program.functions) > 1:
        return [], [ONE_FUNCTION]
    names = [op_name(one.var) for one in candidates(function_of(model.program, None), smallest)[0]]
    measured, notes = [], []
    for name, mode in wanted.items():
        smaller = (
            _made(model, dict.fromkeys(names, mode), smallest) if fits(mode, model.loaded.version) else None
        )
        if smaller is None or isinstance(smaller, str):
            notes.append(f"no point of coremltools' {name}: {smaller or 'it needs iOS 18'}")
        else:
            measured.append(Point(name, *measure(smaller)))
    return measured, notes


def _made(model: MLProgram, chosen: Mapping[str, Any], smallest: int) -> MLProgram | str:
    """The model as coremltools compresses it, or why it does not."""
    try:
        return MLProgram.read(apply_configs(model.clone().mlmodel(), chosen, smallest))
    except (ValueError, ModuleNotFoundError) as error:
        return str(error).splitlines()[0]
