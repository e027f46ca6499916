"""Pages begin with what is gained on a phone that people have, and the numbers are those of a run."""

from __future__ import annotations

import re

import pytest
from gains import BEGIN, PAGES, ROOT, filled, sentence


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_a_run_gains(page: str) -> None:
    assert filled(page) == (ROOT / page).read_text(encoding="utf-8"), "python tests/support/gains.py writes it"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_a_phone_and_a_gain_at_its_head(page: str) -> None:
    """Without a run, which the test above makes."""
    head = (ROOT / page).read_text(encoding="utf-8")[:1000]
    assert BEGIN in head
    gain = re.search(r"on an iPhone \d+: ([\d.]+) ms -> ([\d.]+) ms", head)
    assert gain, f"{page} says no gain in its first 1,000 characters"
    slow, fast = map(float, gain.groups())
    assert fast < slow


@pytest.mark.slow
def test_what_gains_nothing_is_no_sentence() -> None:
    with pytest.raises(AssertionError, match="a page shows a gain"):
        sentence("bert", "encoder_ane", "iPhone 16")
