"""docs/hazards.md from the catalogue of hazards and from published values; `make hazards` writes it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hazard_graphs import HALF, HAZARDS, Build, Hazard, many_keys, model, quantized_product, random

from anesurgery import registry
from anesurgery.checking.metrics import psnr
from anesurgery.interpret import run
from anesurgery.interpret.arithmetic.double import Double
from anesurgery.mil import Array, Program, mb
from anesurgery.testing import apply_pass

_REPAIRED: dict[str, Program] = {}

GOOD = 60.0
"""dB from which numbers are right."""
HEAD = """# What goes wrong in numbers

Each row is a small graph that gives other numbers in fp16, or on the engine, than it means. `inspect` names
it by the rule where intervals, constants and weights do not exclude it, and `ane.apply(model,
"safe_numbers")` runs the repairs; each can be asked for by name. "Shown" is what the interpreter's
arithmetic makes of the graph and of its repair, as PSNR against fp64; where no arithmetic here shows it,
only the rule and the reports do. Times on a Mac were not measured. `make hazards` writes this page, and a
test holds each row: it is named, a harmless twin is not, and the repair brings 60 dB or more.

| hazard | what goes wrong | shown | rule | repair | ops | seen on a device |
|---|---|---|---|---|---|---|
"""
VALUES = """
## Values that were published

What was measured on a chip, and what our model of its arithmetic gives.

| what | measured | ours | chip, source |
|---|---|---|---|
"""


def exact(hazard: Hazard) -> Array:
    """What the model means, in fp64."""
    (value,) = run(hazard.graph, {"x": hazard.inputs}, precision=Double()).values()  # type: ignore[arg-type]
    return np.asarray(value, np.float64)


def decibels(program: Program, hazard: Hazard, arithmetic: str) -> float:
    """How near a program comes to what the model means; NaN and infinities are minus infinity."""
    (value,) = run(program, {"x": hazard.inputs}, precision=arithmetic).values()
    wanted, found = exact(hazard), np.asarray(value, np.float64)
    if not np.isfinite(found).all():
        return -math.inf
    return psnr(float(np.abs(wanted).max()), float(np.sqrt(np.mean((wanted - found) ** 2))))


def repaired(hazard: Hazard) -> Program:
    """The graph after its repair, made once."""
    if hazard.name not in _REPAIRED:
        _REPAIRED[hazard.name] = apply_pass(registry.make_pass(hazard.repair), hazard.graph)[0]
    return _REPAIRED[hazard.name]


def in_words(value: float) -> str:
    """Decibels for a table."""
    if math.isinf(value):
        return "identical" if value > 0 else "not finite"
    return f"{value:.0f} dB"


def _ops(program: Program) -> int:
    return sum(op.op_type != "const" for op in program.functions["main"].operations)


def row(hazard: Hazard) -> str:
    """A line of the table."""
    shown, ops = "", str(_ops(hazard.graph))
    after = repaired(hazard) if hazard.repair else None
    if hazard.arithmetic:
        shown = f"`{hazard.arithmetic}`: {in_words(decibels(hazard.graph, hazard, hazard.arithmetic))}"
        shown += f" to {in_words(decibels(after, hazard, hazard.arithmetic))}" if after is not None else ""
    ops += f" to {_ops(after)}" if after is not None else ""
    repair = f"`{hazard.repair}`" if hazard.repair else "none"
    cells = (hazard.name, hazard.because, shown or "by no arithmetic here", f"`{hazard.rule}`", repair, ops)
    return f"| {' | '.join(cells)} | {hazard.measured} |\n"


@dataclass(frozen=True)
class Published:
    """A value that somebody measured, and what ours is."""

    what: str
    measured: str
    ours: Callable[[], str]
    source: str
    reproduced: bool = True


def _value(build: Build, x: Array, arithmetic: str) -> Array:
    (found,) = run(model(x.shape, build), {"x": x}, precision=arithmetic).values()
    return np.asarray(found, np.float64)


def _number(build: Build, x: float, arithmetic: str, width: int = 1) -> str:
    return f"{_value(build, np.full((1, width), x, HALF), arithmetic).flat[0]:g}"


def _sum(x: float) -> str:
    ones = np.ones((1, 2), HALF)
    return _number(lambda v: mb.linear(x=v, weight=ones, name="y"), x / 2, "ane", 2)


def _tie(chip: str) -> str:
    return _number(lambda v: mb.add(x=v, y=HALF(1), name="y"), 2048, chip)


def _ties_of_codes() -> str:
    bits = np.arange(1 << 16, dtype=np.uint16).view(HALF)
    x = bits[np.isfinite(bits)].reshape(1, -1)
    found = _value(
        lambda v: mb.dequantize(
            input=mb.quantize(input=v, scale=HALF(1), output_dtype="int8"), scale=HALF(1), name="y"
        ),
        x,
        "ane:M5",
    )
    wide = x.astype(np.float64)
    away = np.clip(np.sign(wide) * np.floor(np.abs(wide) + 0.5), -128, 127)
    return "ties away from zero" if np.array_equal(found, away) else "ties to even"


def _shares_off() -> str:
    x = random(1, 4096, 16, scale=0.1)
    program = model(x.shape, many_keys)
    wanted, found = (
        np.asarray(next(iter(run(program, {"x": x}, precision=p).values())), np.float64)
        for p in ("fp32", "ane")
    )
    return f"{100 * np.linalg.norm(wanted - found) / np.linalg.norm(wanted):.1g} % off"


def _product_of_codes(scale: float) -> str:
    x = np.ones((1, 4), HALF)
    return f"{_value(quantized_product(False, scale), x, 'ane:M5').flat[0]:g}"


GUIDE, STUDY, KAS = "sbryngelson/ane-guide", "751K", "cadamcat/llms-on-apple-neural-engine"
PUBLISHED: tuple[Published, ...] = (
    Published(
        "256 * 256",
        "infinite",
        lambda: _number(lambda x: mb.mul(x=x, y=x, name="y"), 256, "ane"),
        f"M1 to M6: {STUDY}",
    ),
    Published("a sum of products that is 32752", "32752", lambda: _sum(32752), f"M1 to M6: {GUIDE}; {STUDY}"),
    Published(
        "a sum of products that is 32768", "infinite", lambda: _sum(32768), f"M1 to M6: {GUIDE}; {STUDY}"
    ),
    Published(
        "the logarithm of 0",
        "-45440",
        lambda: _number(lambda x: mb.log(x=x, epsilon=HALF(0), name="y"), 0, "ane:M1"),
        f"M1: {GUIDE}",
    ),
    Published("2048 + 1", "2048", lambda: _tie("ane:M1"), f"M1: {GUIDE}"),
    Published("2048 + 1", "2050", lambda: _tie("ane:M5"), f"M5: {GUIDE}"),
    Published("4094 cut from the end of a row", "4094", lambda: _cut(4094), f"M1: {GUIDE}"),
    Published("4096 cut from the end of a row", "infinite", lambda: _cut(4096), f"M1: {GUIDE}"),
    Published(
        "codes at scale 1, of all fp16 values",
        "ties away from zero",
        _ties_of_codes,
        f"M5 Pro, macOS 27.0: {KAS}",
    ),
    *(
        Published(
            f"a product quantized by 1/{16 // wrong}, of a factor quantized by 1/16, where 1 is right",
            str(wrong),
            lambda wrong=wrong: _product_of_codes(wrong / 16),  # type: ignore[misc]
            f"M5 Pro, macOS 27.0: {KAS}",
        )
        for wrong in (1, 2, 4, 8)
    ),
    Published(
        "shares of 4,096 keys times values", "5.2 to 5.4 % off", _shares_off, f"M5 Pro, Core AI: {KAS}", False
    ),
)
"""`reproduced=False`: the mechanism is not known, or is not modelled."""


def _cut(x: float) -> str:
    return _number(lambda v: mb.slice_by_index(x=v, begin=[0, 1], end=[1, 2], name="y"), x, "ane:M1", 2)


def value_row(value: Published) -> str:
    """A line of the second table."""
    ours = value.ours().replace("inf", "infinite")
    ours += "" if value.reproduced else " (not reproduced)"
    return f"| {value.what} | {value.measured} | {ours} | {value.source} |\n"


def page() -> str:
    """The whole page."""
    return HEAD + "".join(map(row, HAZARDS)) + VALUES + "".join(map(value_row, PUBLISHED))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, required=True)
    parser.parse_args().page.write_text(page(), encoding="utf-8")
