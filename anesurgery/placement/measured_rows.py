"""Read what `anesurgery measure` wrote as rows to fit times to."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anesurgery.errors import LoadError
from anesurgery.files.package import Loaded
from anesurgery.placement.rates_from_plans import UNREADABLE, read_measurement
from anesurgery.placement.target import CHIPS, Target, family_of
from anesurgery.placement.timing import Load, OpLoad, load_of
from anesurgery.placement.verdicts import choose, judge_shaped

UNITS = "CPU_AND_NE"
MOSTLY = 0.9
"""Share of the ops that are expected on the Neural Engine which Core ML's plan has to give to it as well:
otherwise the time is that of another division of the model."""
CHIP = re.compile(r"\b([AM]\d+)( Pro| Max| Ultra)?\b")


@dataclass(frozen=True)
class Row:
    """A measured time.

    Attributes:
        model: its name; with the generation of the chip, the key of its features.
        chip: as it is sold.
        ms: of one prediction with CPU_AND_NE.
        source: who measured it.
        units: that the source names, or "not stated".
        load: what the model asks for.
    """

    model: str
    chip: str
    ms: float
    source: str
    units: str
    load: Load = field(repr=False)

    @property
    def family(self) -> int:
        """Generation of the engine."""
        return family_of(self.chip)


def load_from(plain: Mapping[str, Any]) -> Load:
    """A load as `load_to` writes it."""
    return Load(tuple(OpLoad(*op) for op in plain["ops"]), plain["switches"])


def load_to(load: Load) -> dict[str, Any]:
    """A load as plain data, equal ops merged."""
    merged = load.merged()
    ops = [[round(v, 4) if isinstance(v, float) else v for v in op] for op in merged.ops]
    return {"switches": merged.switches, "ops": ops}


def features_of(loaded: Loaded, function: str | None, host: str) -> dict[str, Any] | None:
    """What a model asks for on the chip of a host; None where the host names no chip that is known."""
    chip = chip_of(host)
    if chip is None:
        return None
    target = Target.parse(chip)
    judged = judge_shaped(loaded, function, target, ()).judged
    return load_to(load_of(judged, choose(judged, target)[0]))


def chip_of(host: str) -> str | None:
    """The chip as it is sold, of a host in words: "Apple M4 Pro, macOS 15.3"."""
    chip = CHIP.search(host)
    return None if chip is None or chip[1] not in CHIPS else chip[1] + (chip[2] or "")


def read_row(path: str | os.PathLike[str]) -> Row:
    """The time with `UNITS` in a file that `measure` wrote.

    Raises:
        LoadError: the file cannot be read, or has no time of the Neural Engine to fit to.
    """
    plain = read_measurement(path)
    try:
        return _row(plain, Path(path).name)
    except UNREADABLE as error:
        raise LoadError(f"{path} gives no time to fit: {error}") from error


def _row(plain: Mapping[str, Any], name: str) -> Row:
    chip = chip_of(plain["host"])
    if chip is None:
        raise ValueError(f"its host {plain['host']!r} names no chip that is known ({', '.join(CHIPS)})")
    setting = next((row for row in plain["settings"] if row["compute_units"] == UNITS), None)
    if setting is None or setting["timing"] is None:
        why = "it was not measured" if setting is None else setting["error"]
        raise ValueError(f"it has no time for {UNITS}: {why}")
    if plain.get("asks") is None:
        raise ValueError("it does not say what the model asks for; measure an ML Program with this version")
    ms = float(setting["timing"]["predictions"]["median"])
    if not math.isfinite(ms):
        raise ValueError(f"its median is {ms}")
    _check_plan(setting["ops"] or [])
    label = plain["model"] if plain["function"] is None else f"{plain['model']} {plain['function']}"
    return Row(label, chip, ms, f"docs/measurements: {name}", UNITS, _load(plain["asks"]))


def _load(plain: Mapping[str, Any]) -> Load:
    load = load_from(plain)
    if not load.ops or not all(math.isfinite(op.us) and op.us >= 0 and op.weight >= 0 for op in load.ops):
        raise ValueError("what the model asks for has no ops, or a number that is negative or none")
    return load


def _check_plan(ops: Iterable[Mapping[str, Any]]) -> None:
    expected = [op for op in ops if op["expected"] == "ane" and op["unit"]]
    there = sum(op["unit"] == "ane" for op in expected)
    if expected and there < MOSTLY * len(expected):
        raise ValueError(
            f"Core ML's plan gives {there} of {len(expected)} ops to the Neural Engine that were expected "
            "there: its time is that of another division"
        )


def read_folder(folder: Path) -> tuple[list[Row], list[str]]:
    """The rows of the JSON files of a folder, in order of their names; and why others are none."""
    rows, skipped = list[Row](), list[str]()
    for path in sorted(folder.glob("*.json")):
        try:
            rows.append(read_row(path))
        except LoadError as error:
            skipped.append(str(error))
    return rows, skipped
