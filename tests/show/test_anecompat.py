"""The ANE segments of an inspection as ANECompat prints them."""

from __future__ import annotations

import json

import pytest

from anesurgery.commands.inspecting import five, model_keys
from anesurgery.placement import Inspection, Segment, Target

ANY = Target.parse(None)


def segment(index: int, unit: str | None, **values: tuple[int, ...]) -> Segment:
    """A segment that reads the values whose names begin with i, and makes the others."""
    inputs = {n: s for n, s in values.items() if n.startswith("i")}
    return Segment(index, unit, (), inputs, {n: s for n, s in values.items() if n not in inputs})


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # published by ANECompat
        ((3, 416, 416), [416, 416, 1, 3, 1]),
        ((21, 65, 65), [65, 65, 1, 21, 1]),
        ((10647, 80, 1), [1, 80, 1, 10647, 1]),
        ((1, 28, 28), [28, 28, 1, 1, 1]),
        ((10, 1, 1), [1, 1, 1, 10, 1]),
        ((1, 720, 1280, 12), [12, 1280, 1, 720, 1]),
        # our choice
        ((8, 16), [16, 8, 1, 1, 1]),
        ((7,), [7, 1, 1, 1, 1]),
        ((), [1, 1, 1, 1, 1]),
        ((2, 3, 4, 5, 6), [6, 5, 4, 3, 2]),
        # not known
        ((-1,), []),
        ((1, -1, 4), []),
        ((1, 2, 3, 4, 5, 6), []),
    ],
)
def test_shapes_have_five_numbers(shape: tuple[int, ...], expected: list[int]) -> None:
    assert five(shape) == expected


def test_a_segment_is_a_key() -> None:
    found = Inspection("", ANY, (), (segment(0, "ane", image=(3, 416, 416), y=(4, 10647, 1)),))
    (key,) = model_keys(found)
    assert json.dumps(key, separators=(",", ":")) == (
        '{"isegment":0,"inputs":{"image":{"shape":[416,416,1,3,1]}},"outputs":{"y":{"shape":[1,10647,1,4,1]}}}'
    )


def test_only_segments_on_the_engine_are_counted() -> None:
    segments = (
        segment(0, "cpu", i=(1,)),
        segment(1, "ane", i1=(2,)),
        segment(2, None, i2=(3,)),
        segment(3, "ane", i3=(-1,)),
        segment(4, "gpu", i4=(5,)),
    )
    keys = model_keys(Inspection("", ANY, (), segments))
    assert [(k["isegment"], list(k["inputs"])) for k in keys] == [(0, ["i1"]), (1, ["i3"])]
    assert keys[1]["inputs"]["i3"] == {"shape": []}


def test_parts_of_a_pipeline_follow_each_other() -> None:
    parts = {name: Inspection("", ANY, (), (segment(0, "ane", **{f"i{name}": (1,)}),)) for name in "ab"}
    keys = model_keys(Inspection("", ANY, (), parts=parts))
    assert [(k["isegment"], list(k["inputs"])) for k in keys] == [(0, ["ia"]), (0, ["ib"])]


def test_a_model_off_the_engine_has_no_keys() -> None:
    assert model_keys(Inspection("", ANY, (), (segment(0, "cpu", i=(1,)),))) == []
    assert model_keys(Inspection("", ANY, ())) == []
