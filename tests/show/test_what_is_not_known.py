"""What nobody knows is a range or said to be unknown: no ratio without a time, no share without its most."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from report_models import inspection, row

import anesurgery as ane
from anesurgery.mil import Program, ct, mb, types
from anesurgery.placement.inspection import between
from anesurgery.placement.score import Score
from anesurgery.show.headline import compared_shares, headline
from anesurgery.show.surgeries import time_line

RATIO = re.compile(r"times as|faster|slower")


def program() -> Program:
    """A difference in front of a convolution, and one in front of nothing."""

    return mb.program(
        input_specs=[mb.TensorSpec((1, 64, 32, 32), dtype=types.fp16)], opset_version=ct.target.iOS16
    )(lambda x: mb.relu(x=mb.sub(x=x, y=np.float16(1)), name="y"))


@pytest.mark.parametrize("target", ["any", "M4+"])
def test_without_a_time_the_report_says_so_once_and_ranks_by_cost(target: str) -> None:
    """The wrong version: microseconds of Core ML's cost as the expected time, and a ratio of them."""
    surgery = ane.apply(program(), "negate_subtract", target=target, prove=None, quiet=True)
    said = " ".join(surgery.details.split())
    assert surgery.time is None
    assert said.count("no time: ") == 1
    assert "name one chip" in said
    assert "relative cost 1 -> " in said
    assert not RATIO.search(said)
    assert "µs" not in said
    ranked = float(said.split("relative cost 1 -> ")[1].split()[0])
    assert surgery.to_json()["relative_cost"] == pytest.approx(ranked, rel=0.01)


def test_a_chip_with_a_time_has_no_relative_cost() -> None:
    surgery = ane.apply(program(), "negate_subtract", target="M4", prove=None, quiet=True)
    assert time_line(surgery).startswith("time ")
    assert "relative cost" not in time_line(surgery)


THERE = "run on the Neural Engine"


def test_ops_of_unknown_unit_are_a_range_in_the_first_line() -> None:
    """The wrong version: "0% of the ops", where 9 of 10 may be there."""
    unknown = inspection([row(0, "x", "cpu"), *(row(k, "x", None) for k in range(1, 10))])
    assert compared_shares(unknown, unknown) == f"On M1/macOS 14: 0 to 90% of the ops {THERE}, as before"
    stands = Score.of([unknown])
    assert (stands.perhaps_ops, stands.share_at_most["ops"]) == (9, 0.9)
    surgery = ane.apply(program(), "causal_mask_tensor", target="M1/macOS 14", prove=None, quiet=True)
    surgery.scores = (stands, stands)
    assert headline(surgery) == f"Nothing was changed; on M1/macOS 14, 0 to 90% of the ops {THERE}"
    illegal = inspection([row(0, "x", "cpu"), *(replace(row(k, "x", None), legal=False) for k in range(1, 10))])
    assert compared_shares(illegal, illegal) == f"On M1/macOS 14: 0% of the ops {THERE}, as before"


@pytest.mark.parametrize(
    ("least", "most", "words"), [(0.0, 0.92, "0 to 92%"), (0.5, 0.5, "50%"), (0.0, 0.001, "0 to 0.1%")]
)
def test_between(least: float, most: float, words: str) -> None:
    assert between(least, most) == words
