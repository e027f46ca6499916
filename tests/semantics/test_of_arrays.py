"""What is found of an array is there as long as the array, and for no other."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from anesurgery.mil import ct, mb
from anesurgery.semantics.bounds import LEAST_REMEMBERED, constant_range, facts_of_array


def test_what_is_found_goes_with_the_array() -> None:
    """The wrong version keeps answers by where an array lies, and gives them to the next one there."""
    seen = []
    for number in range(50):
        array = np.full(LEAST_REMEMBERED, number)
        assert facts_of_array(array).setdefault("first", number) == number == facts_of_array(array)["first"]
        seen.append(id(array))
        del array
        gc.collect()
    assert len(set(seen)) < 50  # the memory is used again


@pytest.mark.parametrize("small", [np.zeros(LEAST_REMEMBERED - 1), np.float16(1), "word", None])
def test_of_a_small_array_nothing_is_kept(small: object) -> None:
    facts_of_array(small)["first"] = 1
    assert facts_of_array(small) == {}


def test_the_range_of_a_small_constant_follows_what_is_written_into_it() -> None:
    made = mb.program(input_specs=[mb.TensorSpec((4,))], opset_version=ct.target.iOS17)(
        lambda x: mb.add(x=x, y=np.ones(4, np.float32))
    )
    ones = made.functions["main"].outputs[0].op.y
    assert constant_range(ones) == (1, 1)
    ones.val[1:] = 5
    assert constant_range(ones) == (1, 5)
