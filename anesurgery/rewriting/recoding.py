"""What became of compressed weights that a pass computed with, and the error that this made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from anesurgery.checking.metrics import psnr
from anesurgery.errors import SurgeryError
from anesurgery.mil import Array, Var
from anesurgery.regions.reencoding import stored_bytes
from anesurgery.semantics.reading import in_words

KEEP, DECODE, REENCODE = "keep", "decode", "reencode"
CHOICES = (KEEP, DECODE, REENCODE)
"""What `compressed=` may be."""
ROUNDED = "a compressed weight is rounded again, as the notes say; whole models are compared"


@dataclass(frozen=True)
class Recoded:
    """A new weight in the place of a compressed one."""

    name: str
    """Of the old one."""
    before: int
    """Bytes that were stored."""
    after: int
    psnr: float
    """Of the stored numbers against those that were computed, in dB; infinite where they are equal."""

    @classmethod
    def of(cls, old: Var, new: Var, computed: Array, stored: Array) -> Recoded:
        """Measure what was lost."""
        wide = computed.astype(np.float64)
        rms = math.sqrt(float(np.mean((wide - stored.astype(np.float64)) ** 2))) if wide.size else 0.0
        noise = psnr(float(np.abs(wide).max(initial=0.0)), rms)
        return cls(old.name, stored_bytes(old), stored_bytes(new), noise)


def check_choice(compressed: str) -> None:
    """See that it is one of the choices.

    Raises:
        SurgeryError: it is not.
    """
    if compressed not in CHOICES:
        raise SurgeryError(f"compressed={compressed!r}; it may be {', '.join(map(repr, CHOICES))}")


def _in_use(recoded: Mapping[Var, Recoded]) -> list[Recoded]:
    """Those of the weights that the model still has."""
    return [r for var, r in recoded.items() if var.op is not None and var.op.enclosing_block is not None]


def is_lossy(recoded: Mapping[Var, Recoded]) -> bool:
    """Has the model weights with other numbers than were computed?"""
    return any(r.psnr < math.inf for r in _in_use(recoded))


def recoding_notes(recoded: Mapping[Var, Recoded], how: str) -> list[str]:
    """What to tell the caller of the weights that were stored anew."""
    rows = sorted(_in_use(recoded), key=lambda r: r.psnr)
    if not rows:
        return []
    many = f"{len(rows)} compressed weight{'s' if len(rows) > 1 else ''}"
    done = "stored as plain numbers" if how == DECODE else "decoded, and encoded again in the form each had"
    size = f"{in_words(sum(r.before for r in rows))} become {in_words(sum(r.after for r in rows))}"
    worst = rows[0]
    error = "without error" if worst.psnr == math.inf else f"at worst {worst.psnr:.1f} dB (%{worst.name})"
    return [f"{many} that passes compute with: {done}, {error}; {size}"]
