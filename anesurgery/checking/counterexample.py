"""Make a found difference small: fewer numbers, simpler ones, as a text that can be pasted into Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from anesurgery.checking.grades import Promise
from anesurgery.checking.numbers import BothSides, Numbers, Pairs, measured
from anesurgery.errors import SurgeryError
from anesurgery.mil import Array, Var

TRIES = 200
"""How often both sides are run to make a counterexample smaller. A choice: an error is told a little later, and
never not."""
SHOWN = 8
"""Numbers of an input that are written out: one line of a terminal."""
SIMPLE = (0.0, 1.0, -1.0, 2.0, -2.0)
"""Numbers that are easy to read."""


def shrunk(sides: BothSides, numbers: Numbers, promise: Promise) -> str:
    """A small counterexample made of a large one; empty when it does not hold any more."""
    if not _broken(sides, numbers, promise):
        return ""
    numbers = made_smaller(numbers, lambda candidate: _broken(sides, candidate, promise))
    return written(numbers, sides.run(numbers))


def made_smaller(numbers: Numbers, broken: Callable[[Numbers], bool]) -> Numbers:
    """Fewer and simpler numbers on which both sides still differ."""
    tries = iter(range(TRIES))

    def still(candidate: Numbers) -> bool:
        return next(tries, None) is not None and broken(candidate)

    for var in numbers:
        numbers = _fewer(numbers, var, still)
        numbers = _simpler(numbers, var, still)
    return numbers


def _broken(sides: BothSides, numbers: Numbers, promise: Promise) -> bool:
    try:
        pairs = sides.run(numbers)
    except SurgeryError:
        return False
    rtol = promise.tolerance.rtol
    finite = all(bool(torch.isfinite(t).all()) for t in numbers.values())
    undefined = [torch.isnan(old) if finite and old.is_floating_point() else None for old, _ in pairs]
    parts = measured(sides, numbers, pairs, undefined, promise)
    return any(part.max_abs > 0 and (rtol == 0 or part.max_rel > rtol) for part in parts)


def _fewer(numbers: Numbers, var: Var, still: Callable[[Numbers], bool]) -> Numbers:
    """Zeros in place of as many numbers as possible: halves first, then smaller parts."""
    for part in _parts(numbers[var].numel()):
        flat = numbers[var].reshape(-1).clone()
        if bool((flat[part] != 0).any()):
            flat[part] = 0
            candidate = {**numbers, var: flat.reshape(numbers[var].shape)}
            numbers = candidate if still(candidate) else numbers
    return numbers


def _parts(count: int) -> Iterator[slice]:
    width = count
    while width >= 1 and count:
        yield from (slice(at, at + width) for at in range(0, count, width))
        if width == 1 or count // width > TRIES:
            return
        width = -(-width // 2)


def _simpler(numbers: Numbers, var: Var, still: Callable[[Numbers], bool]) -> Numbers:
    """Small whole numbers in place of others, or fewer digits."""
    values = numbers[var]
    if values.dtype == torch.bool:
        return numbers
    for at in torch.nonzero(values.reshape(-1)).reshape(-1).tolist()[:SHOWN]:
        value = float(numbers[var].reshape(-1)[at])
        choices = [*SIMPLE, float(round(value)), round(value, 2)] if np.isfinite(value) else []
        for choice in (n for n in choices if n >= 0 or values.dtype != torch.uint8):
            flat = numbers[var].reshape(-1).clone()
            flat[at] = choice
            candidate = {**numbers, var: flat.reshape(values.shape)}
            if choice != value and still(candidate):
                numbers = candidate
                break
    return numbers


def written(numbers: Numbers, pairs: Pairs) -> str:
    """Inputs as Python, with the first difference of the pairs (old value, new value)."""
    lines = [_assignment(var.name, values.numpy()) for var, values in numbers.items()]
    for old, new in pairs:
        if old.shape != new.shape:
            lines.append(f"# the shapes differ: old {tuple(old.shape)}, new {tuple(new.shape)}")
            break
        apart = ~((old == new) | ((old != old) & (new != new)))
        if bool(apart.any()):
            at = tuple(torch.nonzero(apart)[0].tolist())
            lines.append(f"# at {list(at)}: old {old[at].item()!r}, new {new[at].item()!r}")
            break
    return "\n".join(lines)


def _assignment(name: str, values: Array) -> str:
    """Python that makes an array."""
    name = "".join(c if c.isalnum() else "_" for c in name)
    name = name if name.isidentifier() else f"v_{name}"
    if values.ndim == 0:
        return f"{name} = np.array({_number(values[()])}, np.{values.dtype})"
    lines = [f"{name} = np.zeros({values.shape}, np.{values.dtype})"]
    places = np.argwhere(values != 0)
    for at in places[:SHOWN]:
        lines.append(f"{name}[{', '.join(map(str, at))}] = {_number(values[tuple(at)])}")
    if len(places) > SHOWN:
        lines.append(f"# and {len(places) - SHOWN} numbers more, from the seed")
    return "\n".join(lines)


def _number(value: object) -> str:
    text = repr(getattr(value, "item", lambda: value)())
    return {"inf": "np.inf", "-inf": "-np.inf", "nan": "np.nan"}.get(text, text)
