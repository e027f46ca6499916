"""Whether a model may be handed over, by its logits (`agreement`): refuse it, or say what it loses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.errors import SurgeryError
from anesurgery.mil import Array
from anesurgery.shipping import agreement
from anesurgery.shipping.agreement import ALIKE, SLACK, Text

AGREE = 30.0
"""PSNR in dB below which logits of a model that was not compressed are no rounding: fp16 leaves 50 and more."""


@dataclass(frozen=True)
class Judge:
    """What a checkpoint gives for a text, and the checkpoint itself."""

    of: Text
    wanted: Array
    """Its logits."""
    rounded: Array
    """The same with its weights rounded to fp16."""
    module: Callable[[], Any]
    """Gives the checkpoint as a module of transformers, where that is needed."""

    def agrees(self, rows: Array) -> None:
        """See that a model computes what the checkpoint does, but for the rounding of its weights.

        Args:
            rows: of the model, computed in fp32.

        Raises:
            SurgeryError: it does not.
        """
        far = agreement.unexplained(rows, self.of, self.rounded, self.module)
        if far:
            place, most = max(far.items(), key=lambda one: one[1])
            count = len(self.of.ids)
            raise SurgeryError(
                f"the model gives other logits than the checkpoint after {len(far)} of {count} tokens, "
                f"and not by rounding: computed in fp32, beside weights that are rounded to fp16, they are "
                f"{most:.1%} of their range apart after token {place + 1}; this is a defect of the conversion"
            )

    def keeps(self, rows: Array, decoded: Array, bits: int) -> None:
        """See that compressed weights give what the numbers give to which they decode.

        Args:
            rows: of the model with compressed weights, computed in fp32.
            decoded: of the model that was made in the same way from these numbers.
            bits: of a weight.

        Raises:
            SurgeryError: they do not.
        """
        far = agreement.off(rows, decoded)
        if not np.all(far < ALIKE):
            raise SurgeryError(
                f"weights of {bits} bits give other logits than the numbers to which they decode: computed in "
                f"fp32, they are {far.max():.1%} of their range apart after token "
                f"{int(self.of.places[np.argmax(far)]) + 1}; this is a defect of the build"
            )

    def rounds(self, psnr: float, model: Path) -> str | None:
        """See that a model computed in fp16 is no further from the checkpoint than rounding leads.

        Args:
            psnr: of its logits, in dB.
            model: where it lies.

        Returns:
            A note where rounding leads far.

        Raises:
            SurgeryError: it is further.
        """
        if psnr >= AGREE:
            return None
        noise = agreement.noise(self.of, self.wanted, self.module())
        if not psnr >= noise - SLACK:
            raise SurgeryError(
                f"the model gives other logits than the checkpoint in fp16 arithmetic: {psnr:.1f} dB for "
                f"{len(self.of.ids)} tokens, where numbers of the checkpoint that are moved by a rounding give "
                f"{noise:.1f} dB; look for values beyond fp16 with `anesurgery.ranges` on {model}"
            )
        return (
            f"fp16 is coarse for this checkpoint: its own logits are {noise:.1f} dB from themselves where its "
            "numbers move by a rounding, as where other experts are chosen next to a threshold"
        )

    def loses(self, psnr: float, bits: int) -> str:
        """See that compressed weights lead no further from the checkpoint than its own, rounded to the nearest.

        Args:
            psnr: of the model's logits, in dB.
            bits: of a weight.

        Returns:
            A note with both.

        Raises:
            SurgeryError: they lead further, by more than twice.
        """
        usual = agreement.nearest(self.of, self.wanted, self.module(), bits)
        if not psnr >= usual - SLACK:
            raise SurgeryError(
                f"weights of {bits} bits lose more than they must: the logits are {psnr:.1f} dB from those of "
                f"the checkpoint, where its own weights, rounded to the nearest, lead to {usual:.1f} dB; give "
                "more bits, or none"
            )
        return (
            f"weights of {bits} bits change the logits: {psnr:.1f} dB beside those of the checkpoint, where "
            f"its own weights, rounded to the nearest, lead to {usual:.1f} dB"
        )
