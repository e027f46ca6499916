"""Choose how many bits each weight gets: the least damage for a size, or the least size for a damage.

The costs of the weights are added, which is an estimate: each was measured alone. For a damage, the choice
begins with the smallest form of every weight and goes on to the one that takes away most damage for a byte. For
a size that may leave a good part of it unused, where a few weights are large; so the best choice of all is
looked for too, by dynamic programming over parts of the size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.byte_counts import byte_words, read_size
from anesurgery.compressing.modes import SMALLEST, Mode, apply_configs, config_of, read_mode, written
from anesurgery.display import Drawn
from anesurgery.errors import SurgeryError
from anesurgery.mil import Array, ct, quiet_host

PARTS = 1 << 14
"""Into which a size is cut: each weight takes whole ones, of which hundred weights leave a percent unused."""
PLAIN = ""
"""Stands for the weight as it is."""


@dataclass(frozen=True)
class Option:
    """One weight in one mode, alone."""

    bytes: int
    psnr: float
    """Of the worst output, in dB."""
    kl: float
    """Mean KL divergence of a row of the outputs, in nats."""
    top1: float
    """Share of rows whose largest entry stayed the same."""

    @property
    def noise(self) -> float:
        """The power of the difference over that of the largest number."""
        return 10 ** (-self.psnr / 10)


@dataclass(frozen=True)
class Row:
    """One weight."""

    number: int
    """In the order in which weights are read."""
    weight: str
    readers: tuple[str, ...]
    """Types of the ops that read it."""
    elements: int
    bytes: int
    """As it is."""
    options: Mapping[str, Option]
    """By mode."""
    skipped: Mapping[str, str]
    """Mode -> why coremltools does not compress it so."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **vars(self),
            "readers": list(self.readers),
            "options": {k: vars(o) for k, o in self.options.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Row:
        """What `to_json` gave, or JSON made of it."""
        options = {
            str(mode): Option(int(o["bytes"]), *(float(o[k]) for k in ("psnr", "kl", "top1")))
            for mode, o in content["options"].items()
        }
        numbers = int(content["elements"]), int(content["bytes"])
        readers = tuple(map(str, content["readers"]))
        return cls(
            int(content["number"]), str(content["weight"]), readers, *numbers, options, dict(content["skipped"])
        )


@dataclass
class State:
    """A row in the making."""

    base: Row
    options: dict[str, Option] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def row(self) -> Row:
        """What was found."""
        return Row(**{**vars(self.base), "options": dict(self.options), "skipped": dict(self.skipped)})


@dataclass(frozen=True)
class Proposal(Drawn):
    """A mode for each weight; a weight without one stays as it is."""

    modes: Mapping[str, str]
    """Weight -> name of its mode."""
    bytes: int
    """Of all measured weights together."""
    plain_bytes: int
    """The same, uncompressed."""
    elements: int
    kl: float
    """The sum of what each weight costs alone: an estimate for all together."""
    psnr: float
    """Likewise."""
    smallest: int
    """Elements above which weights were measured, and are compressed."""

    @property
    def bits(self) -> float:
        """Average bits of an element."""
        return 8 * self.bytes / self.elements

    @property
    def _chosen(self) -> dict[str, Mode]:
        return {weight: read_mode(mode) for weight, mode in self.modes.items()}

    @property
    def configs(self) -> dict[str, Any]:
        """Kind of compression -> coremltools' `OptimizationConfig` for the weights that get it."""
        kinds = dict.fromkeys(mode.kind for mode in self._chosen.values())
        return {
            k: config_of(k, {w: m for w, m in self._chosen.items() if m.kind == k}, self.smallest)
            for k in kinds
        }

    @property
    def config(self) -> Any:
        """The one `OptimizationConfig`, where all modes are of one kind.

        Raises:
            SurgeryError: they are of several; see `configs`.
        """
        found = list(self.configs.values())
        if len(found) != 1:
            raise SurgeryError(f"the modes are of {len(found)} kinds; take `configs`, or let `apply` do it")
        return found[0]

    def apply(self, model: Any) -> Any:
        """An MLModel with these weights compressed, by coremltools itself.

        Args:
            model: the path of the package that was measured, or an MLModel.
        """
        with quiet_host():
            if isinstance(model, (str, Path)):
                model = ct.models.MLModel(str(model), skip_model_load=True)
            return apply_configs(model, self._chosen, self.smallest)

    def to_json(self) -> dict[str, Any]:
        """Plain data; `configs` are for coremltools' `OptimizationConfig.from_dict`."""
        kinds = {mode.kind for mode in self._chosen.values()}
        by_kind = {k: {w: m for w, m in self._chosen.items() if m.kind == k} for k in sorted(kinds)}
        return {
            "modes": dict(self.modes),
            "bytes": self.bytes,
            "plain_bytes": self.plain_bytes,
            "bits": self.bits,
            "estimated_kl": self.kl,
            "estimated_psnr_db": self.psnr,
            "configs": {kind: written(kind, chosen, self.smallest) for kind, chosen in by_kind.items()},
        }


def propose(
    rows: Sequence[Row],
    *,
    bits: float | None = None,
    max_bytes: int | str | None = None,
    max_kl: float | None = None,
    min_psnr: float | None = None,
    smallest: int = SMALLEST,
) -> Proposal:
    """The mode of each weight for one goal.

    Args:
        rows: what was measured.
        bits: most bits of an element, on average. Or:
        max_bytes: most bytes of all measured weights. Or:
        max_kl: most KL divergence, in nats: the smallest model below it. Or:
        min_psnr: least PSNR of the worst output, in dB: likewise.
        smallest: elements above which the weights were measured.

    Raises:
        SurgeryError: none or several of these, or no choice of the measured modes reaches it.
    """
    goals = [g for g in (bits, max_bytes, max_kl, min_psnr) if g is not None]
    if len(goals) != 1:
        raise SurgeryError("give one goal: bits=4, max_bytes='20 MB', max_kl=0.01 or min_psnr=40")
    if not rows:
        raise SurgeryError(f"no weight of more than {smallest} elements was measured; nothing can be proposed")
    elements = sum(row.elements for row in rows)
    budget = None if max_bytes is None else read_size(max_bytes)
    budget = int(bits * elements / 8) if bits is not None else budget
    noisy = min_psnr is not None
    choice = _Choice(rows, noisy)
    if budget is not None:
        choice.spend(budget)
    else:
        choice.calm(10 ** (-min_psnr / 10) if min_psnr is not None else float(max_kl or 0))
    return choice.proposal(smallest)


class _Choice:
    """One option for each weight, made better step by step."""

    def __init__(self, rows: Sequence[Row], by_noise: bool) -> None:
        self.rows = rows
        self._damage = [_damage(row, by_noise) for row in rows]
        self.hulls = [_hull(row, damage) for row, damage in zip(rows, self._damage, strict=True)]
        self.chosen = [hull[0] for hull in self.hulls]

    @property
    def bytes(self) -> int:
        """The bytes of all weights."""
        return sum(_bytes(row, mode) for row, mode in zip(self.rows, self.chosen, strict=True))

    @property
    def damage(self) -> float:
        """The sum over all weights."""
        return sum(damage[mode] for damage, mode in zip(self._damage, self.chosen, strict=True))

    def spend(self, budget: int) -> None:
        """The least damage within a size."""
        if self.bytes > budget:
            raise SurgeryError(
                f"the smallest forms measured take {byte_words(self.bytes)}, more than {byte_words(budget)}; "
                "measure smaller modes, or raise the limit"
            )
        for number, mode in self._steps():
            if self._grown(number, mode) <= budget:
                self.chosen[number] = mode
        stepwise, damage = self.chosen, self.damage
        self.chosen = self._best(budget) or stepwise
        if self.damage >= damage:
            self.chosen = stepwise

    def _best(self, budget: int) -> list[str] | None:
        """The modes of least damage within a size, of which each takes whole parts; None where none fits so."""
        part = max(1, -(-budget // PARTS))
        room = budget // part
        least, picks = np.zeros(room + 1), list[tuple[list[str], Array]]()
        for row, damage in zip(self.rows, self._damage, strict=True):
            modes = [mode for mode, cost in damage.items() if math.isfinite(cost)]
            totals = np.full((len(modes), room + 1), np.inf)
            for number, mode in enumerate(modes):
                if (parts := -(-_bytes(row, mode) // part)) <= room:
                    totals[number, parts:] = least[: room + 1 - parts] + damage[mode]
            picks.append((modes, totals.argmin(0).astype(np.uint8)))
            least = totals.min(0)
        if not math.isfinite(least[room]):
            return None
        chosen = list[str]()
        for row, (modes, pick) in zip(reversed(self.rows), reversed(picks), strict=True):
            chosen.append(modes[pick[room]])
            room -= -(-_bytes(row, chosen[-1]) // part)
        return chosen[::-1]

    def calm(self, most: float) -> None:
        """The least size within a damage."""
        for number, mode in self._steps():
            if self.damage <= most:
                return
            self.chosen[number] = mode
        if self.damage > most:
            raise SurgeryError(f"even with all weights as they are the damage is {self.damage:.3g}")

    def _grown(self, number: int, mode: str) -> int:
        row = self.rows[number]
        return self.bytes - _bytes(row, self.chosen[number]) + _bytes(row, mode)

    def _steps(self) -> list[tuple[int, str]]:
        """Steps to the next larger form, those that take away most damage for a byte first."""
        found = []
        for number, hull in enumerate(self.hulls):
            row, damage = self.rows[number], self._damage[number]
            for place, (small, large) in enumerate(pairwise(hull)):
                gain = (damage[small] - damage[large]) / (_bytes(row, large) - _bytes(row, small))
                found.append((-gain, number, place, large))
        return [(number, mode) for _, number, _, mode in sorted(found)]

    def proposal(self, smallest: int) -> Proposal:
        """What was chosen."""
        pairs = list(zip(self.rows, self.chosen, strict=True))
        options = [row.options[mode] for row, mode in pairs if mode != PLAIN]
        noise = sum(o.noise for o in options)
        return Proposal(
            {row.weight: mode for row, mode in pairs if mode != PLAIN},
            self.bytes,
            sum(row.bytes for row in self.rows),
            sum(row.elements for row in self.rows),
            sum(o.kl for o in options),
            -10 * math.log10(noise) if noise else math.inf,
            smallest,
        )


def _bytes(row: Row, mode: str) -> int:
    return row.bytes if mode == PLAIN else row.options[mode].bytes


def _damage(row: Row, by_noise: bool) -> dict[str, float]:
    """What each mode of a weight costs; KL, and where the outputs have no rows the noise."""
    by_noise = by_noise or not any(o.kl for o in row.options.values())
    return {PLAIN: 0.0} | {m: o.noise if by_noise else o.kl for m, o in row.options.items()}


def _hull(row: Row, damage: Mapping[str, float]) -> list[str]:
    """The modes worth having, from the smallest: each takes away more damage for a byte than the next."""
    hull: list[str] = []
    for mode in sorted(damage, key=lambda m: (_bytes(row, m), damage[m])):
        if not math.isfinite(damage[mode]) or (hull and damage[mode] >= damage[hull[-1]]):
            continue
        while len(hull) > 1 and _slope(row, damage, hull[-1], mode) >= _slope(row, damage, hull[-2], hull[-1]):
            hull.pop()
        hull.append(mode)
    return hull


def _slope(row: Row, damage: Mapping[str, float], small: str, large: str) -> float:
    """Damage taken away for each byte."""
    return (damage[small] - damage[large]) / max(1, _bytes(row, large) - _bytes(row, small))
