"""Measure how far the outputs of a changed model are from those of the model before, over any number of runs.

Where outputs are logits or probabilities, the KL divergence and the share of equal top-1 choices count; PSNR is
measured for all. `compress`, `sensitivity` and the cache in 8 bits report it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.checking.output_comparison import psnr as psnr_of
from anesurgery.mil import Array

Tensor = torch.Tensor

MOST_NUMBERS = 1 << 17
"""The numbers of an output that are compared together, so few that they stay in the processor's cache."""
PROBABILITIES = 1e-2
"""How far the sum of a row may be from 1 if it holds probabilities: fp16 rounds the sum of a long row by
less."""


@dataclass
class _Sums:
    """The sums over all runs for one output."""

    noise: float = 0.0
    """The sum of squared differences."""
    peak: float = 0.0
    """The largest magnitude in the reference."""
    finite_numbers: int = 0
    """The numbers that are finite in the reference: those that `noise` and `peak` are of."""
    infinite: bool = False
    """Is a number of the reference not finite?"""
    broken: bool = False
    """Is a number not finite that is finite in the reference?"""
    kl: float = 0.0
    """The sum of the KL divergences of the rows, in nats."""
    agree: int = 0
    """The rows whose largest entry is the same."""
    rows: int = 0
    """The rows that `kl` and `agree` are sums over."""


@dataclass
class Cost:
    """How far outputs are from the reference; `add` adds one more run."""

    sums: dict[str, _Sums] = field(default_factory=dict)
    """Name of an output -> its sums."""
    chosen: frozenset[str] = frozenset()
    """The outputs that KL and top-1 are measured on, if only some choose among classes or tokens; else all."""

    def add(self, expected: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Compare the arrays of floats among the outputs of one run with the reference, and add the result."""
        for name, reference in expected.items():
            if isinstance(reference, np.ndarray) and reference.dtype.kind == "f" and reference.size:
                columns = reference.shape[-1] if reference.ndim else 1
                a, b = (torch.from_numpy(v.reshape(-1, columns)) for v in (reference, outputs[name]))
                _add_rows(self.sums.setdefault(name, _Sums()), a, b)

    @property
    def psnr(self) -> float:
        """The PSNR of the worst output in dB; minus infinity if a number is not finite any more."""
        sums = self.sums.values()
        if any(s.broken for s in sums):
            return -math.inf
        found = [psnr_of(s.peak, math.sqrt(s.noise / s.finite_numbers)) for s in sums if s.finite_numbers]
        return min(found, default=math.inf)

    @property
    def rows(self) -> int:
        """The number of rows that KL and top-1 are measured on; without any these mean nothing."""
        return sum(s.rows for s in self._choosing)

    @property
    def _choosing(self) -> list[_Sums]:
        """The sums of the outputs in `chosen`; of all if that is empty."""
        return [s for name, s in self.sums.items() if not self.chosen or name in self.chosen]

    @property
    def kl(self) -> float:
        """The mean KL divergence of a row of the outputs, in nats."""
        if any(s.broken for s in self.sums.values()):
            return math.inf
        return max(0.0, sum(s.kl for s in self._choosing) / self.rows) if self.rows else 0.0

    @property
    def top1(self) -> float:
        """The share of rows whose largest entry is the same; 1 where no output has rows, 0 if one is broken."""
        if any(s.broken for s in self.sums.values()):
            return 0.0
        return sum(s.agree for s in self._choosing) / self.rows if self.rows else 1.0

    def words(self, chooses: bool) -> str:
        """Describe the loss; with KL and top-1 where the outputs choose among classes or tokens."""
        if not self.sums:
            return "no output of floats to compare"
        if self.psnr == -math.inf:
            return "an output is not finite any more"
        infinite = any(s.infinite for s in self.sums.values())
        if self.psnr == math.inf:
            return "identical" + (" but for infinite numbers, which are left out" if infinite else "")
        rows = ""
        if chooses and self.rows:
            rows = f"KL {self.kl:.3g} nats, same top-1 {self.top1:.1%}, "
        elif infinite:
            rows = "infinite numbers are left out, "
        return f"{rows}PSNR {self.psnr:.1f} dB"


def _add_rows(sums: _Sums, reference: Tensor, changed: Tensor) -> None:
    """Add the rows [rows, columns] of one output; numbers that are infinite in the reference do not count.

    KL and top-1 are measured only if all numbers are finite in the reference, and until one breaks.
    """
    finite = torch.isfinite(reference)
    all_finite = bool(finite.all())
    has_rows = all_finite and reference.shape[-1] > 1
    sums.infinite |= not all_finite
    sums.broken |= bool((finite & ~torch.isfinite(changed)).any())
    sums.finite_numbers += int(finite.sum())
    kl = _kl_of_probabilities if has_rows and are_probabilities(reference.numpy()) else _kl_of_logits
    together = max(1, MOST_NUMBERS // reference.shape[-1])
    parts = (torch.split(v, together) for v in (reference, changed, finite))
    for a, b, mask in zip(*parts, strict=True):
        x, y = a.double(), b.double()
        if has_rows and not sums.broken:
            sums.kl += float(kl(x, y))
            sums.agree += int((x.argmax(-1) == y.argmax(-1)).sum())
            sums.rows += len(x)
        if not has_rows:  # else all are finite
            x, y = x[mask], y[mask]
        sums.peak = max(sums.peak, float(x.abs().max()) if x.numel() else 0.0)
        sums.noise += float((x - y).square_().sum()) if not sums.broken else 0.0


def are_probabilities(rows: Array) -> bool:
    """Are the rows of the reference probabilities, rather than logits?"""
    return bool(rows.min() >= 0 and (np.abs(rows.sum(-1) - 1) < PROBABILITIES).all())


def _kl_of_logits(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of KL(softmax(a) || softmax(b)) over rows."""
    return F.kl_div(b.log_softmax(-1), a.log_softmax(-1), reduction="sum", log_target=True)


def _kl_of_probabilities(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of the KL divergences of rows of probabilities, which are made to sum to 1."""
    p, q = (rows.clamp_min(torch.finfo(torch.float32).tiny) for rows in (a, b))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    return (p * (p.log() - q.log())).sum()
