"""The first op at which two programs differ, by name and by position."""

from __future__ import annotations

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
    assert ane.first_divergence(a, b) is None  # no name in common
    found = ane.first_divergence(a, b, by="position")
    assert found is not None
    assert (found.name, found.other) == ("other_second", "second")
    assert "against second" in str(found)
    assert ane.first_divergence(a, chain(2, "other_", extra=True), by="position") is None


def test_an_unknown_pairing_is_refused() -> None:
    with pytest.raises(SurgeryError, match="by='shape'; it may be 'name' or 'position'"):
        ane.first_divergence(chain(1), chain(1), by="shape")
