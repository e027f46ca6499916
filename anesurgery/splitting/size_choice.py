"""Choose the sizes to make of a model, from a sample of the lengths of its calls (`choose_sizes`).

Each length runs at the smallest size that holds it. The sizes with the least expected time, or the least
padding, are found exactly, by dynamic programming: the best k sizes whose largest is s are the best k - 1 sizes
that end below s, plus s for all lengths between.
"""

from __future__ import annotations

import math
import numbers
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from anesurgery.display import Drawn
from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.files.plot_files import save_picture
from anesurgery.files.source import read_text

Lengths = Sequence[int] | np.ndarray | Mapping[int, float] | str | os.PathLike[str]


@runtime_checkable
class SizedPackage(Protocol):
    """An estimate of times that also knows the size of a package (`SizeTimes`)."""

    def package(self, count: int) -> int:
        """Return the bytes of a package with so many sizes."""


@dataclass(frozen=True)
class Choice:
    """The best choice of one number of sizes.

    Attributes:
        sizes: in rising order.
        expected: average time of a call, in the unit of `time`; without times, positions computed.
        padding: share of the positions computed that are padding, from 0 to 1.
        bytes: of the package with a function for each, where the model was made at sizes; else None.
    """

    sizes: tuple[int, ...]
    expected: float
    padding: float
    bytes: int | None = None


@dataclass(frozen=True)
class SizeChoice(Drawn):
    """The best choice for each number of sizes, up to the number asked for.

    Attributes:
        choices: the choice of one size, of two, and so on, as far as the sample has different lengths.
        timed: whether the expected values are times; otherwise they are positions computed.
    """

    choices: tuple[Choice, ...]
    timed: bool

    @property
    def best(self) -> Choice:
        """The choice of least expected value; of equal ones, the one with fewest sizes."""
        return min(self.choices, key=lambda choice: choice.expected)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the best choice, in rising order."""
        return self.best.sizes

    def save_plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the expected value against the number of sizes, by matplotlib; an existing file is replaced.

        Args:
            path: ends in .png, .svg or .pdf.

        Raises:
            SurgeryError: it ends otherwise, or matplotlib is not installed.
        """
        return save_picture(self, path)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [
            {"sizes": list(c.sizes), "expected": c.expected, "padding": c.padding, "bytes": c.bytes}
            for c in self.choices
        ]
        return {"sizes": list(self.sizes), "timed": self.timed, "choices": rows}


@door()
def choose_sizes(
    lengths: Lengths,
    count: int,
    *,
    time: Callable[[int], float] | Mapping[int, float] | None = None,
    multiple: int = 1,
) -> SizeChoice:
    """Choose at most `count` sizes for a sample of lengths, with the least expected time, or padding.

    The sizes tried are the lengths of the sample, each rounded up to a multiple. Among these the result is
    exact.

    Args:
        lengths: a list or array of lengths; a histogram, length -> how often; or the path of a text file with a
            length on each line, or a length and how often.
        count: the most sizes to choose.
        time: size -> time of a call, in any unit, as measured or estimated (`size_times`, which knows the size
            of the package too); without it, positions computed count.
        multiple: each size is a multiple of this.

    Returns:
        The `SizeChoice`: `sizes`, whole numbers in rising order, and for each number of sizes the expected time
        (in the unit of `time`) or positions, and the share of padding.

    Raises:
        SurgeryError: no lengths, or some that are not positive whole numbers; a count or multiple below 1;
            a size whose time is missing, negative or not finite.
    """
    if count < 1 or multiple < 1:
        raise SurgeryError(f"choose_sizes: count={count} and multiple={multiple} are to be 1 or more")
    weights = read_lengths(lengths)
    rounded = defaultdict[int, float](float)
    for length, weight in weights.items():
        rounded[-(-length // multiple) * multiple] += weight
    sizes = sorted(rounded)
    times = [_time(time, size) for size in sizes]
    total, positions = math.fsum(weights.values()), math.fsum(n * w for n, w in weights.items())
    choices = []
    for ends in _best_partitions(np.array([rounded[s] for s in sizes], np.float64), np.array(times), count):
        starts = [0, *(end + 1 for end in ends)]
        served = [math.fsum(rounded[s] for s in sizes[a : b + 1]) for a, b in zip(starts, ends, strict=False)]
        expected = math.fsum(n * times[end] for n, end in zip(served, ends, strict=True)) / total
        computed = math.fsum(n * sizes[end] for n, end in zip(served, ends, strict=True))
        stored = time.package(len(ends)) if isinstance(time, SizedPackage) else None
        choices.append(Choice(tuple(sizes[e] for e in ends), expected, 1 - positions / computed, stored))
    return SizeChoice(tuple(choices), time is not None)


def _best_partitions(weights: np.ndarray, times: np.ndarray, count: int) -> Iterable[tuple[int, ...]]:
    """Yield the ends of the best partition into one part, two, and so on; weights and times: (sizes,)."""
    below = np.concatenate([[0.0], np.cumsum(weights)])  # of the sizes before each
    cost = below[1:] * times  # of what ends at each size, in one part
    origins: list[np.ndarray] = []
    yield (len(times) - 1,)
    most = min(count, len(times))
    for parts in range(2, most + 1):
        costs, origin = np.full(len(times), np.inf), np.zeros(len(times), np.intp)
        for end in range(parts - 1 if parts < most else len(times) - 1, len(times)):
            candidates = cost[:end] - below[1 : end + 1] * times[end]
            origin[end] = candidates.argmin()
            costs[end] = candidates[origin[end]] + below[end + 1] * times[end]
        cost = costs
        origins.append(origin)
        ends = [len(times) - 1]
        for origin in reversed(origins):
            ends.append(int(origin[ends[-1]]))
        yield tuple(reversed(ends))


def _time(time: Callable[[int], float] | Mapping[int, float] | None, size: int) -> float:
    """Return the time of a call at a size; the size itself without times.

    Raises:
        SurgeryError: the time is missing, negative or not finite.
    """
    if time is None:
        return float(size)
    try:
        value = float(time[size] if isinstance(time, Mapping) else time(size))
    except KeyError as error:
        raise SurgeryError(f"choose_sizes: time tells nothing of the size {size}; add it") from error
    except (TypeError, ValueError) as error:
        raise SurgeryError(f"choose_sizes: the time of the size {size} is not a number: {error}") from error
    if not math.isfinite(value) or value < 0:
        raise SurgeryError(
            f"choose_sizes: the time of the size {size} is {value}; give a finite one, 0 or more"
        )
    return value


def read_lengths(lengths: Lengths) -> dict[int, float]:
    """Return length -> how often it occurs.

    Raises:
        SurgeryError: there are none, or some are not positive whole numbers.
    """
    if isinstance(lengths, (str, os.PathLike)):
        rows: Iterable[tuple[Any, Any]] = _rows_of_file(Path(lengths).expanduser())
    else:
        rows = lengths.items() if isinstance(lengths, Mapping) else ((n, 1) for n in lengths)
    weights = defaultdict[int, float](float)
    for length, weight in rows:
        if not _is_length(length):
            raise SurgeryError(f"choose_sizes: the length {length!r} is no whole number from 1; leave it out")
        if not _is_number(weight) or not 0 <= weight < math.inf:
            raise SurgeryError(f"choose_sizes: the length {length} is counted {weight!r} times; give 0 or more")
        weights[int(length)] += float(weight)
    counted = {length: weight for length, weight in weights.items() if weight}
    if not counted:
        raise SurgeryError("choose_sizes: there are no lengths; give a list, a histogram or a text file")
    return counted


def _is_length(value: Any) -> bool:
    return _is_number(value) and value >= 1 and value % 1 == 0


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _rows_of_file(path: Path) -> Iterable[tuple[int, float]]:
    """Yield (length, how often) from a text file.

    Raises:
        SurgeryError: it cannot be read, or a line is not a length, or a length and how often.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise SurgeryError(f"choose_sizes: cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        try:
            length, *weight = words
            yield int(length), float(*weight) if weight else 1.0
        except (ValueError, TypeError) as error:
            raise SurgeryError(
                f"choose_sizes: line {number} of {path} is {line!r}; write a length, or a length and how often"
            ) from error
