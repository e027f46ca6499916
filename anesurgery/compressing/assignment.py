"""Choose the mode of each weight for one goal: least damage within a size, or least size within a damage.

`Sensitivity.propose` calls it with measured costs, `compress` with measured or estimated ones. The costs of the
weights are added up, which is an estimate, as each was measured alone. For a damage, each weight starts in its
smallest mode, and the step that removes most damage per byte comes next. For a size, the same steps may leave a
good part of it unused where a few weights are large; so dynamic programming over parts of the size looks for a
better choice.
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
from anesurgery.compressing.modes import SMALLEST, Mode, apply_configs, config_data, config_of, read_mode
from anesurgery.display import Drawn
from anesurgery.errors import SurgeryError
from anesurgery.mil import Array, ct, quiet_host

PARTS = 1 << 14
"""The number of parts that a size is cut into. Each weight takes whole parts: with a hundred weights, about a
percent of the size stays unused."""
PLAIN = ""
"""The mode of a weight that stays as it is."""


@dataclass(frozen=True)
class Option:
    """The cost of one weight in one mode, with all others as they are."""

    bytes: int
    psnr: float
    """The PSNR of the worst output, in dB."""
    kl: float
    """The mean KL divergence of a row of the outputs, in nats."""
    top1: float
    """The share of rows whose largest entry stayed the same."""

    @property
    def noise(self) -> float:
        """The mean squared difference of the worst output, over its squared peak."""
        return 10 ** (-self.psnr / 10)


@dataclass(frozen=True)
class Row:
    """One weight, with its cost in each mode."""

    number: int
    """Its place in the order in which weights are read."""
    weight: str
    readers: tuple[str, ...]
    """The types of the ops that read it."""
    elements: int
    bytes: int
    """The bytes of the weight as it is."""
    options: Mapping[str, Option]
    """Mode -> its cost."""
    skipped: Mapping[str, str]
    """Mode -> why coremltools does not compress the weight so."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            **vars(self),
            "readers": list(self.readers),
            "options": {k: vars(o) for k, o in self.options.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Row:
        """Read what `to_json` gave."""
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
class RowBuilder:
    """A row to which modes are added as they are measured."""

    base: Row
    options: dict[str, Option] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def row(self) -> Row:
        """Return the row with all modes so far."""
        return Row(**{**vars(self.base), "options": dict(self.options), "skipped": dict(self.skipped)})


@dataclass(frozen=True)
class Proposal(Drawn):
    """A mode for each weight; a weight without one stays as it is."""

    modes: Mapping[str, str]
    """Weight -> name of its mode."""
    bytes: int
    """The bytes of all measured weights together."""
    plain_bytes: int
    """The bytes of the same weights, uncompressed."""
    elements: int
    kl: float
    """The sum of what each weight costs alone, in nats: an estimate for all together."""
    psnr: float
    """The PSNR in dB if the noise of all weights adds up: an estimate too."""
    smallest: int
    """Weights with more elements were measured, and are compressed."""

    @property
    def bits(self) -> float:
        """The average bits of an element."""
        return 8 * self.bytes / self.elements

    @property
    def _chosen(self) -> dict[str, Mode]:
        return {weight: read_mode(mode) for weight, mode in self.modes.items()}

    @property
    def _by_kind(self) -> dict[str, dict[str, Mode]]:
        """Kind of compression -> its weights, each with its mode."""
        by_kind: dict[str, dict[str, Mode]] = {}
        for weight, mode in self._chosen.items():
            by_kind.setdefault(mode.kind, {})[weight] = mode
        return by_kind

    @property
    def configs(self) -> dict[str, Any]:
        """Kind of compression -> coremltools' `OptimizationConfig` for the weights that get it."""
        return {kind: config_of(kind, chosen, self.smallest) for kind, chosen in self._by_kind.items()}

    @property
    def config(self) -> Any:
        """The one `OptimizationConfig`, where all modes are of one kind.

        Raises:
            SurgeryError: they are of several kinds; see `configs`.
        """
        configs = list(self.configs.values())
        if len(configs) != 1:
            raise SurgeryError(f"the modes are of {len(configs)} kinds; take `configs`, or let `apply` do it")
        return configs[0]

    def apply(self, model: Any) -> Any:
        """Return an MLModel with these weights compressed by coremltools itself.

        Args:
            model: the path of the package that was measured, or an MLModel.
        """
        with quiet_host():
            if isinstance(model, (str, Path)):
                model = ct.models.MLModel(str(model), skip_model_load=True)
            return apply_configs(model, self._chosen, self.smallest)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `configs` are for coremltools' `OptimizationConfig.from_dict`."""
        by_kind = sorted(self._by_kind.items())
        return {
            "modes": dict(self.modes),
            "bytes": self.bytes,
            "plain_bytes": self.plain_bytes,
            "bits": self.bits,
            "estimated_kl": self.kl,
            "estimated_psnr_db": self.psnr,
            "configs": {kind: config_data(kind, chosen, self.smallest) for kind, chosen in by_kind},
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
    """Choose the mode of each weight for one goal.

    Args:
        rows: the measured weights.
        bits: the most bits of an element, on average. Or:
        max_bytes: the most bytes of all measured weights. Or:
        max_kl: the most KL divergence, in nats: the smallest model below it. Or:
        min_psnr: the least PSNR of the worst output, in dB: likewise.
        smallest: weights with more elements were measured.

    Raises:
        SurgeryError: no goal or several, or no choice of the measured modes reaches it.
    """
    goals = [g for g in (bits, max_bytes, max_kl, min_psnr) if g is not None]
    if len(goals) != 1:
        raise SurgeryError("give one goal: bits=4, max_bytes='20 MB', max_kl=0.01 or min_psnr=40")
    if not rows:
        raise SurgeryError(f"no weight of more than {smallest} elements was measured; nothing can be proposed")
    choice = _Choice(rows, by_noise=min_psnr is not None)
    if bits is not None:
        choice.minimize_damage(int(bits * sum(row.elements for row in rows) / 8))
    elif max_bytes is not None:
        choice.minimize_damage(read_size(max_bytes))
    elif min_psnr is not None:
        choice.minimize_size(10 ** (-min_psnr / 10))
    else:
        choice.minimize_size(float(max_kl or 0))
    return choice.proposal(smallest)


class _Choice:
    """A mode for each weight, at first the smallest, and the steps to better ones.

    Args:
        rows: the measured weights.
        by_noise: does the noise of the outputs count as damage? Else it is the KL divergence.
    """

    def __init__(self, rows: Sequence[Row], by_noise: bool) -> None:
        self.rows = rows
        self._damages = [_damage_by_mode(row, by_noise) for row in rows]
        self.hulls = [_hull(row, damages) for row, damages in zip(rows, self._damages, strict=True)]
        self.chosen = [hull[0] for hull in self.hulls]

    @property
    def bytes(self) -> int:
        """The bytes of all weights."""
        return sum(_bytes(row, mode) for row, mode in zip(self.rows, self.chosen, strict=True))

    @property
    def damage(self) -> float:
        """The sum of the damage of all weights."""
        return sum(damages[mode] for damages, mode in zip(self._damages, self.chosen, strict=True))

    def minimize_damage(self, budget: int) -> None:
        """Choose the modes of least damage within a number of bytes."""
        if self.bytes > budget:
            raise SurgeryError(
                f"the smallest forms measured take {byte_words(self.bytes)}, more than {byte_words(budget)}; "
                "measure smaller modes, or raise the limit"
            )
        for number, mode in self._steps():
            if self._bytes_with(number, mode) <= budget:
                self.chosen[number] = mode
        stepwise, stepwise_damage = self.chosen, self.damage
        self.chosen = self._best_by_parts(budget) or stepwise
        if self.damage >= stepwise_damage:
            self.chosen = stepwise

    def _best_by_parts(self, budget: int) -> list[str] | None:
        """Return the modes of least damage, by dynamic programming over sizes in whole parts of the budget.

        `least[n]` is the least damage of the rows so far within n parts. None where no choice fits.
        """
        part = max(1, -(-budget // PARTS))
        count = budget // part
        least, picks = np.zeros(count + 1), list[tuple[list[str], Array]]()
        for row, damages in zip(self.rows, self._damages, strict=True):
            modes = [mode for mode, damage in damages.items() if math.isfinite(damage)]
            totals = np.full((len(modes), count + 1), np.inf)
            for number, mode in enumerate(modes):
                if (parts := -(-_bytes(row, mode) // part)) <= count:
                    totals[number, parts:] = least[: count + 1 - parts] + damages[mode]
            picks.append((modes, totals.argmin(0).astype(np.uint8)))
            least = totals.min(0)
        if not math.isfinite(least[count]):
            return None
        chosen, remaining = list[str](), count
        for row, (modes, pick) in zip(reversed(self.rows), reversed(picks), strict=True):
            chosen.append(modes[pick[remaining]])
            remaining -= -(-_bytes(row, chosen[-1]) // part)
        return chosen[::-1]

    def minimize_size(self, most: float) -> None:
        """Choose the smallest modes with at most this damage."""
        for number, mode in self._steps():
            if self.damage <= most:
                return
            self.chosen[number] = mode
        if self.damage > most:
            raise SurgeryError(f"even with all weights as they are the damage is {self.damage:.3g}")

    def _bytes_with(self, number: int, mode: str) -> int:
        """Return the bytes of all weights if one had another mode."""
        row = self.rows[number]
        return self.bytes - _bytes(row, self.chosen[number]) + _bytes(row, mode)

    def _steps(self) -> list[tuple[int, str]]:
        """Return (row number, next larger mode) of all steps, those that remove most damage per byte first."""
        steps = []
        for number, hull in enumerate(self.hulls):
            row, damages = self.rows[number], self._damages[number]
            for place, (small, large) in enumerate(pairwise(hull)):
                gain = (damages[small] - damages[large]) / (_bytes(row, large) - _bytes(row, small))
                steps.append((-gain, number, place, large))
        return [(number, mode) for _, number, _, mode in sorted(steps)]

    def proposal(self, smallest: int) -> Proposal:
        """Return the chosen modes with their estimated cost."""
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
    """Return the bytes of a weight in a mode."""
    return row.bytes if mode == PLAIN else row.options[mode].bytes


def _damage_by_mode(row: Row, by_noise: bool) -> dict[str, float]:
    """Return the damage of each mode of a weight: KL, or noise if asked for or if no output has rows."""
    by_noise = by_noise or not any(o.kl for o in row.options.values())
    return {PLAIN: 0.0} | {mode: o.noise if by_noise else o.kl for mode, o in row.options.items()}


def _hull(row: Row, damages: Mapping[str, float]) -> list[str]:
    """Return the lower convex hull of (bytes, damage): each step removes less damage per byte than the last."""
    hull: list[str] = []
    for mode in sorted(damages, key=lambda m: (_bytes(row, m), damages[m])):
        if not math.isfinite(damages[mode]) or (hull and damages[mode] >= damages[hull[-1]]):
            continue
        while len(hull) > 1 and _slope(row, damages, hull[-1], mode) >= _slope(row, damages, *hull[-2:]):
            hull.pop()
        hull.append(mode)
    return hull


def _slope(row: Row, damages: Mapping[str, float], small: str, large: str) -> float:
    """Return the damage that a step removes per byte."""
    return (damages[small] - damages[large]) / max(1, _bytes(row, large) - _bytes(row, small))
