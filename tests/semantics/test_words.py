"""Numbers as a reader sees them: sizes without exponents, and no decibels of infinity."""

from __future__ import annotations

import math

import pytest

from anesurgery.semantics.reading import in_decibels, in_words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "0.977 KiB"),
        (1024, "1 KiB"),
        (1003 * 1024, "0.979 MiB"),
        (1023 * 1024, "0.999 MiB"),
        (1 << 20, "1 MiB"),
        (1023 << 20, "0.999 GiB"),
    ],
)
def test_sizes_have_three_digits(count: int, words: str) -> None:
    """The wrong version: 1e+03 KiB."""
    assert in_words(count) == words


def test_no_size_has_an_exponent() -> None:
    assert not [n for n in range(1, 1 << 21, 997) if "e" in in_words(n).replace("bytes", "")]


@pytest.mark.parametrize(
    ("value", "words"),
    [(41.23, "PSNR 41.2 dB"), (math.inf, "identical"), (-math.inf, "not finite"), (math.nan, "not finite")],
)
def test_what_is_identical_is_no_infinity_of_decibels(value: float, words: str) -> None:
    assert in_decibels(value, "PSNR ") == words
