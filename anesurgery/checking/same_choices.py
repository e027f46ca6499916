"""Compare two runs in which ops such as `topk` choose different indices among nearly equal values.

Rounding decides which of two nearly equal scores a `topk` gives first. What is gathered by its indices then
stands in another row, and the PSNR of such outputs says nothing about the rows themselves. So the second run is
repeated with the indices of the first (`SameIndices`). It is judged by its outputs, and by how near the values
are that it would have chosen. Grades of whole models use this (`grades`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anesurgery.checking.grades import psnr
from anesurgery.interpret import Listener
from anesurgery.mil import Operation, Program, walk_ops

INDEX_OUTPUT = {"topk": 1, "argsort": 0, "reduce_argmax": 0, "reduce_argmin": 0}
"""Op that chooses indices along one axis -> which of its outputs holds them."""


def has_index_choices(program: Program) -> bool:
    """Return whether an op of the program chooses indices."""
    return any(op.op_type in INDEX_OUTPUT for op in walk_ops(program))


class ChosenIndices(Listener):
    """A listener that records chosen indices: name of the value that holds them -> indices."""

    def __init__(self) -> None:
        self.chosen: dict[str, torch.Tensor] = {}

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Keep the indices."""
        if op.op_type in INDEX_OUTPUT and len(outputs) > INDEX_OUTPUT[op.op_type]:
            at = INDEX_OUTPUT[op.op_type]
            self.chosen[op.outputs[at].name] = outputs[at].clone()


@dataclass
class SameIndices(Listener):
    """A listener that makes the ops of a run give the indices of another run.

    Args:
        chosen: name of a value -> its indices. An op without them, or of another shape, keeps its own choice.
    """

    chosen: Mapping[str, torch.Tensor]
    moved: list[str] = field(default_factory=list)
    """A sentence for each op that would have chosen other indices."""
    near: float = float("inf")
    """The least PSNR of all ops, in dB, between the values at both sets of indices."""

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        """Keep the values among which an op is about to choose."""
        self._read = inputs

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Replace the indices by those of the other run, with the values at them."""
        output_index = INDEX_OUTPUT.get(op.op_type, -1)
        if (
            not 0 <= output_index < len(outputs)
            or (given := self.chosen.get(op.outputs[output_index].name)) is None
        ):
            return
        if given.shape != (own := outputs[output_index]).shape or torch.equal(given, own):
            return
        x, axis = self._read["x"], int(self._read.get("axis", -1))
        keeps_axis = own.dim() == x.dim()
        own_values, other_values = (
            torch.gather(x.float(), axis, (v if keeps_axis else v.unsqueeze(axis)).long()) for v in (own, given)
        )
        apart = float((own_values - other_values).abs().max())
        near = psnr(float(x.float().abs().max()), float((own_values - other_values).square().mean().sqrt()))
        self.near = min(self.near, near)
        count = int((given != own).sum())
        self.moved.append(
            f"{op.op_type} {op.name} gives {count:,} of {own.numel():,} places otherwise, "
            f"of {f'values output_index most {apart:.2g} apart' if apart else 'equal values'}"
        )
        own.copy_(given)
        if op.op_type == "topk":
            outputs[0].copy_(other_values)
