"""Compress a model with the data-free modes of coremltools, to compare their size and loss with ours.

`compress(against=["palettize-4"])` measures them on the same held-out samples, for its report and plot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anesurgery.compressing.correcting import find_candidates
from anesurgery.compressing.costs import Cost
from anesurgery.compressing.modes import apply_configs, fits, op_name, read_mode
from anesurgery.mil import function_of
from anesurgery.rewriting.ml_program import MLProgram

USUAL = ("linear-8", "linear-4", "palettize-6", "palettize-4")
"""The modes that the command draws where none is named."""
ONE_FUNCTION = "coremltools.optimize takes one package with one function, so there are no points of its modes"


@dataclass(frozen=True)
class Point:
    """A model in one mode of coremltools: a point of the plot."""

    mode: str
    bytes: int
    """The bytes of all weights."""
    loss: Cost
    """The loss on the held-out samples."""


def measure_modes(
    model: MLProgram, modes: Sequence[str], smallest: int, measure: Callable[[MLProgram], tuple[int, Cost]]
) -> tuple[list[Point], list[str]]:
    """Compress a model in each mode, and measure it.

    Args:
        model: the model before; a pipeline and chunks have no points.
        modes: names such as "palettize-4" (`compressing.modes`).
        smallest: weights with more elements are compressed.
        measure: returns the bytes of the weights of a model, and its loss.

    Returns:
        The points, and a note for each mode that has none.

    Raises:
        SurgeryError: there is no such mode.
    """
    read = {name: read_mode(name) for name in modes}
    if not read:
        return [], []
    if type(model) is not MLProgram or len(model.loaded.program.functions) > 1:
        return [], [ONE_FUNCTION]
    found, _ = find_candidates(function_of(model.program, None), smallest)
    weights = [op_name(candidate.var) for candidate in found]
    points, notes = [], []
    for name, mode in read.items():
        compressed: MLProgram | str = "it needs iOS 18"
        if fits(mode, model.loaded.version):
            compressed = _compress(model, dict.fromkeys(weights, mode), smallest)
        if isinstance(compressed, str):
            notes.append(f"no point of coremltools' {name}: {compressed}")
        else:
            points.append(Point(name, *measure(compressed)))
    return points, notes


def _compress(model: MLProgram, chosen: Mapping[str, Any], smallest: int) -> MLProgram | str:
    """Return the model as coremltools compresses it, or why it does not."""
    try:
        return MLProgram.read(apply_configs(model.clone().mlmodel(), chosen, smallest))
    except (ValueError, ModuleNotFoundError) as error:
        return str(error).splitlines()[0]
