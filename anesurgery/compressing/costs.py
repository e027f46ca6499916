"""What a change costs at the outputs of a model, over any number of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from anesurgery.checking.grades import psnr
from anesurgery.mil import Array

Tensor = torch.Tensor

MOST_NUMBERS = 1 << 17
"""Of an output that are looked at together, so that they stay in the cache."""
PROBABILITIES = 1e-2
"""How far rows may be from a sum of 1 to count as probabilities: fp16 rounds the shares of a long row by less.
"""


@dataclass
class _Sums:
    """Of one output."""

    noise: float = 0.0
    count: int = 0
    peak: float = 0.0
    kl: float = 0.0
    agree: int = 0
    rows: int = 0
    broken: bool = False


@dataclass
class Cost:
    """How far outputs are from the reference; `add` takes in one more run."""

    sums: dict[str, _Sums] = field(default_factory=dict)
    chosen: frozenset[str] = frozenset()
    """The outputs that choose among classes or tokens, of which KL and top-1 are; all where none does."""

    def add(self, expected: Mapping[str, Array], found: Mapping[str, Array]) -> None:
        """Compare the outputs of one run."""
        for name, a in expected.items():
            if isinstance(a, np.ndarray) and a.dtype.kind == "f" and a.size:
                rows = (torch.from_numpy(v.reshape(-1, v.shape[-1] if v.ndim else 1)) for v in (a, found[name]))
                _measure(self.sums.setdefault(name, _Sums()), *rows)

    @property
    def psnr(self) -> float:
        """Of the worst output, in dB; minus infinite where one is not finite any more."""
        if any(s.broken for s in self.sums.values()):
            return -math.inf
        found = [psnr(s.peak, math.sqrt(s.noise / s.count)) for s in self.sums.values() if s.count]
        return min(found, default=math.inf)

    @property
    def rows(self) -> int:
        """Rows of finite numbers that KL and top-1 are of; without any they say nothing."""
        return sum(s.rows for s in self._choosing)

    @property
    def _choosing(self) -> list[_Sums]:
        return [s for name, s in self.sums.items() if not self.chosen or name in self.chosen]

    @property
    def kl(self) -> float:
        """Mean KL divergence of a row of the outputs, in nats."""
        if any(s.broken for s in self.sums.values()):
            return math.inf
        return max(0.0, sum(s.kl for s in self._choosing) / self.rows) if self.rows else 0.0

    @property
    def top1(self) -> float:
        """Share of rows whose largest entry is the same; 1 where no output has rows."""
        return sum(s.agree for s in self._choosing) / self.rows if self.rows else 1.0

    def lost(self, chooses: bool) -> float:
        """KL where the outputs choose; else the squared error of the worst one, as a share of its peak's."""
        return self.kl if chooses and self.rows else 10 ** (-self.psnr / 10)

    def words(self, chooses: bool) -> str:
        """What the outputs lose; KL and top-1 where they choose among classes or tokens."""
        if self.psnr == math.inf:
            return "identical"
        rows = f"KL {self.kl:.3g} nats, same top-1 {self.top1:.1%}, " if chooses else ""
        return f"{rows if self.rows else 'no row is all finite, '}PSNR {self.psnr:.1f} dB"


def _measure(sums: _Sums, a: Tensor, b: Tensor) -> None:
    """Take in the rows of one output of one run; what the reference itself makes infinite is left out."""
    known = torch.isfinite(a)
    whole = bool(known.all()) and a.shape[-1] > 1
    sums.broken |= bool((known & ~torch.isfinite(b)).any())
    sums.count += int(known.sum())
    kl = _from_shares if whole and probabilities(a.numpy()) else _from_logits
    few = max(1, MOST_NUMBERS // a.shape[-1])
    for part, other, mask in zip(*(torch.split(v, few) for v in (a, b, known)), strict=True):
        x, y = part.double(), other.double()
        if whole and not sums.broken:
            sums.kl += float(kl(x, y))
            sums.agree += int((x.argmax(-1) == y.argmax(-1)).sum())
            sums.rows += len(x)
        x, y = (x, y) if whole else (x[mask], y[mask])
        sums.peak = max(sums.peak, float(x.abs().max()) if x.numel() else 0.0)
        sums.noise += float((x - y).square_().sum()) if not sums.broken else 0.0


def probabilities(rows: Array) -> bool:
    """Are the rows of the reference probabilities already, and no logits?"""
    return bool(rows.min() >= 0 and (np.abs(rows.sum(-1) - 1) < PROBABILITIES).all())


def _from_logits(a: Tensor, b: Tensor) -> Tensor:
    """The KL divergences of rows, added: the mean difference of the logits, less that of their sums."""
    shares, ends = zip(*map(_shares, (a, b)), strict=True)
    return ((a - b).mul_(shares[0]).sum(-1) / shares[0].sum(-1) - (ends[0] - ends[1])).sum()


def _shares(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in proportion to the probabilities of each row, and the logarithm of the sum of exponentials."""
    largest = rows.amax(-1, keepdim=True)
    held = (rows - largest).exp_()
    return held, held.sum(-1).log() + largest[:, 0]


def _from_shares(a: Tensor, b: Tensor) -> Tensor:
    """The KL divergences of rows of probabilities, added."""
    p, q = (rows.clamp_min(torch.finfo(torch.float32).tiny) for rows in (a, b))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    return (p * (p.log() - q.log())).sum()
