"""Compare two runs although ops such as `topk` choose different places among nearly equal values.

Rounding decides which of two nearly equal scores a `topk` gives first, and what is gathered there then stands
in another row. The PSNR of such outputs says nothing about their rows. So the second run is repeated with the
places of the first (`SamePlaces`), and judged by these outputs and by how near the values are that it would
have chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anesurgery.checking.grades import psnr
from anesurgery.interpret import Listener
from anesurgery.mil import Operation, Program, walk_ops

PLACES = {"topk": 1, "argsort": 0, "reduce_argmax": 0, "reduce_argmin": 0}
"""Op that chooses places along one axis -> the index of the output that holds them."""


def chooses(program: Program) -> bool:
    """Does an op of the program choose places?"""
    return any(op.op_type in PLACES for op in walk_ops(program))


class Places(Listener):
    """Records the places that ops choose in a run: name of the value that holds them -> places."""

    def __init__(self) -> None:
        self.chosen: dict[str, torch.Tensor] = {}

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Keep the places."""
        if op.op_type in PLACES and len(outputs) > PLACES[op.op_type]:
            at = PLACES[op.op_type]
            self.chosen[op.outputs[at].name] = outputs[at].clone()


@dataclass
class SamePlaces(Listener):
    """Makes the ops of a run give the places of another run.

    Args:
        chosen: name of the value -> places; an op without them, or of another shape, chooses itself.
    """

    chosen: Mapping[str, torch.Tensor]
    moved: list[str] = field(default_factory=list)
    """What each op would have chosen otherwise, in words."""
    near: float = float("inf")
    """The least PSNR of all ops, in dB, between the values at both sets of places."""

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        """Keep the values among which an op is about to choose."""
        self._read = inputs

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Replace the places by those of the other run, with the values that are there."""
        at = PLACES.get(op.op_type, -1)
        if not 0 <= at < len(outputs) or (given := self.chosen.get(op.outputs[at].name)) is None:
            return
        if given.shape != (own := outputs[at]).shape or torch.equal(given, own):
            return
        x, axis = self._read["x"], int(self._read.get("axis", -1))
        ranks = own.dim() == x.dim()
        mine, others = (
            torch.gather(x.float(), axis, (v if ranks else v.unsqueeze(axis)).long()) for v in (own, given)
        )
        apart = float((mine - others).abs().max())
        near = psnr(float(x.float().abs().max()), float((mine - others).square().mean().sqrt()))
        self.near = min(self.near, near)
        count = int((given != own).sum())
        self.moved.append(
            f"{op.op_type} {op.name} gives {count:,} of {own.numel():,} places otherwise, "
            f"of {f'values at most {apart:.2g} apart' if apart else 'equal values'}"
        )
        own.copy_(given)
        if op.op_type == "topk":
            outputs[0].copy_(others)
