"""Pages begin with what is gained on a phone that people have, and the numbers are those of a run."""

from __future__ import annotations

import re

import pytest
from gains import BEGIN, PAGES, ROOT, faster, filled


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_a_run_gains(page: str) -> None:
    assert filled(page) == (ROOT / page).read_text(encoding="utf-8"), "python tests/support/gains.py writes it"


GAIN = re.compile(r"an iPhone \d+\b.*?from ([\d.]+) ?(ms|MB|dB|) .*?to ([\d.]+)")
RISE = re.compile(r"an iPhone \d+ runs [^.]*?(\d+)% to (\d+)%.*?(?:this to|we expect) (\d+)%")


def gained(text: str) -> bool:
    """Does the text say two numbers on a phone of which the second is the better one, or a share that rises?"""
    if share := RISE.search(text):
        low, high, after = map(float, share.groups())
        return low < after and high <= after
    found = GAIN.search(text)
    if found is None:
        return False
    before, after = float(found[1]), float(found[3])
    return after > before if found[2] == "dB" else after < before


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_a_phone_and_a_gain_at_its_head(page: str) -> None:
    """Without a run, which the test above makes."""
    head = (ROOT / page).read_text(encoding="utf-8")[:1000]
    assert BEGIN in head
    assert gained(head), f"{page} says no gain in its first 1,000 characters"


@pytest.mark.parametrize(
    "text",
    [
        "on an iPhone 13 from 2.5 ms to 15.5 ms",
        "on an iPhone 13 from 78 dB to 8 dB",
        "an iPhone 13 runs 98% to 98% of it. The repair raises this to 98%",
        "an iPhone 13 runs 60% to 90% of it. The repair raises this to 80%",
        "on an iPhone 12 from 3 layers off the engine to 3",
        "on an M4 from 15.5 ms to 2.5 ms",
    ],
)
def test_a_loss_is_no_gain(text: str) -> None:
    assert not gained(text)


@pytest.mark.slow
def test_what_gains_nothing_is_no_sentence() -> None:
    with pytest.raises(AssertionError, match="a page shows a gain"):
        faster("bert", "encoder_ane", "iPhone 16")
