"""Numbers as a reader sees them: sizes without exponents, and no decibels of infinity."""

from __future__ import annotations

import math

import pytest

from anesurgery.display import byte_words
from anesurgery.semantics.reading import in_decibels


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (1490, "1.49 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (76_849_152, "76.8 MB"),
        (1_450_000_000, "1.45 GB"),
        (1 << 48, "281 TB"),
    ],
)
def test_sizes_have_three_digits(count: int, words: str) -> None:
    """The wrong version: 1e+03 kB."""
    assert byte_words(count) == words


def test_no_size_has_an_exponent() -> None:
    assert not [n for n in range(1, 1 << 21, 997) if "e" in byte_words(n).replace("byte", "")]


@pytest.mark.parametrize(
    ("value", "words"),
    [(41.23, "PSNR 41.2 dB"), (math.inf, "identical"), (-math.inf, "not finite"), (math.nan, "not finite")],
)
def test_what_is_identical_is_no_infinity_of_decibels(value: float, words: str) -> None:
    assert in_decibels(value, "PSNR ") == words
