"""Outputs whose length follows from the values, such as keypoints, may have another one after rounding."""

from __future__ import annotations

import numpy as np

import anesurgery as ane
from anesurgery.checking.exactness import NOTHING_ALIKE, nearness
from anesurgery.mil import Program, Var, ct, mb


def keypoints() -> Program:
    """The places of numbers above one that fp16 rounds to it."""

    @mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        above = mb.greater(x=mb.mul(x=x, y=np.float32(1.0001)), y=np.float32(1))
        places = mb.non_zero(x=mb.cast(x=above, dtype="fp32"))
        return mb.cast(x=places, dtype="fp32", name="y")

    return program


def test_another_length_is_nothing_alike() -> None:
    assert nearness({"y": np.ones((3, 2))}, {"y": np.ones((4, 2))}) == NOTHING_ALIKE
    assert nearness({"y": np.ones((3, 2))}, {"y": np.ones((3, 2))}) == np.inf


def test_auto_takes_inputs_of_a_model_that_finds_places() -> None:
    done = ane.apply(keypoints(), "auto", target="M4/macOS 15", inputs={"x": np.ones((1, 64))}, quiet=True)
    assert min((done.plan.outputs[1] or {}).values()) == NOTHING_ALIKE
