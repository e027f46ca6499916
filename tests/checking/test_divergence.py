"""The first op at which two programs differ, by name and by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import SurgeryError
from anesurgery.mil import Program, Var, mb


def chain(factor: float, prefix: str = "", extra: bool = False) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 3))])
    def program(x: Var) -> Var:
        y: Any = mb.relu(x=x, name=f"{prefix}first")
        if extra:
            y = mb.identity(x=y, name=f"{prefix}between")
        y = mb.mul(x=y, y=np.float32(factor), name=f"{prefix}second")
        return mb.add(x=y, y=np.float32(1), name=f"{prefix}third")

    return program


def test_by_name() -> None:
    found = ane.first_divergence(chain(2), chain(2.1))
    assert found is not None
    assert (found.op_type, found.name, found.other) == ("mul", "second", "second")
    assert str(found).startswith("mul second: PSNR ")
    assert ane.first_divergence(chain(2), chain(2)) is None
    assert ane.first_divergence(chain(2), chain(2.1), gate=20) is None


def test_by_position_where_names_and_ops_differ() -> None:
    a, b = chain(2), chain(2.1, "other_", extra=True)
    found = ane.first_divergence(a, b)  # no name in common, but the outputs
    assert found is not None
    assert (found.name, found.other) == ("other_third", "third")
    found = ane.first_divergence(a, b, by="position")
    assert found is not None
    assert (found.name, found.other) == ("other_second", "second")
    assert "against second" in str(found)
    assert ane.first_divergence(a, chain(2, "other_", extra=True), by="position") is None


def test_an_unknown_pairing_is_refused() -> None:
    with pytest.raises(SurgeryError, match="by='shape'; it may be 'name' or 'position'"):
        ane.first_divergence(chain(1), chain(1), by="shape")


def one(build: Callable[[Var], Var]) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((3,))])(lambda x: build(x))


X = {"x": np.array([1, 2, 3], np.float32)}


def test_integers_have_to_be_equal() -> None:
    a = one(lambda x: mb.reduce_argmax(x=x, axis=0, name="place"))
    b = one(lambda x: mb.reduce_argmin(x=x, axis=0, name="place"))
    found = ane.first_divergence(a, b, X)
    assert found is not None
    assert (found.op_type, found.max_abs) == ("reduce_argmin", 2)
    assert ane.first_divergence(a, a, X) is None


def test_an_output_of_another_shape() -> None:
    a = one(lambda x: mb.expand_dims(x=x, axes=[0], name="o"))
    b = one(lambda x: mb.expand_dims(x=x, axes=[1], name="o"))
    assert "shape (3, 1) against (1, 3)" in str(ane.first_divergence(a, b, X))


def test_what_is_undefined_on_one_side() -> None:
    a = one(lambda x: mb.add(x=x, y=np.float32(1), name="o"))
    b = one(lambda x: mb.add(x=x, y=np.array([0, np.nan, 0], np.float32), name="o"))
    found = ane.first_divergence(a, b, X, gate=-1000)
    assert found is not None
    assert found.note == "1 elements are undefined on one side only"
