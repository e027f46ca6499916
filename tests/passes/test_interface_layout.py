"""Inputs and outputs in the order of axes that the inside of a model has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.interface_layout import InterfaceLayout
from anesurgery.testing import apply_pass, reasons

FIRST, LAST = [0, 3, 1, 2], [0, 2, 3, 1]


def weight(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


def exported(dtype: Any = types.fp32) -> Program:
    """Channels last, scaled and centred before the first transpose; casts at the ends."""

    @mb.program(input_specs=[mb.TensorSpec((1, 8, 8, 3), dtype)], opset_version=ct.target.iOS17)
    def program(image: Var) -> Var:
        x = mb.cast(x=image, dtype="fp16")
        x = mb.sub(x=mb.mul(x=x, y=np.float16(0.25)), y=np.array([1, 2, 3], np.float16))
        x = mb.conv(x=mb.transpose(x=x, perm=FIRST), weight=weight(4, 3, 3, 3), pad_type="same")
        return mb.cast(x=mb.relu(x=mb.transpose(x=x, perm=LAST)), dtype="fp32", name="mask")

    return program


def transposes(program: Program) -> int:
    return sum(op.op_type == "transpose" for op in walk_ops(program))


def test_both_ends_change_and_the_numbers_are_the_same() -> None:
    program = exported()
    surgery = ane.apply(program, [InterfaceLayout()], quiet=True)
    assert transposes(surgery.program) == 0
    main = surgery.program.functions["main"]
    assert main.inputs["image"].shape == (1, 3, 8, 8)
    assert main.outputs[0].shape == (1, 4, 8, 8)
    assert [change.words for change in surgery.contract] == [
        "give image as 1x3x8x8, with its axes in the order [0, 3, 1, 2]",
        "mask is 1x4x8x8, with its axes in the order [0, 3, 1, 2]",
    ]
    found = ane.compare(program, surgery.program, contract=surgery.contract)
    assert found.ok


def test_a_declared_order_that_is_wrong_is_seen() -> None:
    """The wrong version: the declared change turns the axes the other way."""
    program = exported()
    surgery = ane.apply(program, [InterfaceLayout(ends=("mask",))], quiet=True)
    (change,) = surgery.contract
    assert transposes(surgery.program) == 1
    wrong = type(change)(
        change.words, change.names, outputs=lambda found, _: {"mask": found["mask"].transpose(0, 3, 2, 1)}
    )
    assert ane.compare(program, surgery.program, contract=[change]).ok
    assert not ane.compare(program, surgery.program, contract=[wrong]).ok


def test_an_end_by_which_no_transpose_goes_stays() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 8, 8, 3))], opset_version=ct.target.iOS17)
    def program(x: Var) -> tuple[Var, Var]:
        return mb.transpose(x=x, perm=FIRST, name="y"), mb.softmax(x=x, axis=1, name="z")

    after, session = apply_pass(InterfaceLayout(ends=("x",)), program)
    assert not session.changes
    assert transposes(after) == 1
    assert any("no transpose goes when %x is in the order [0, 3, 1, 2]" in r for r in reasons(session))


def test_a_symbolic_shape_is_refused() -> None:
    from coremltools.converters.mil.mil import get_new_symbol

    @mb.program(input_specs=[mb.TensorSpec((1, get_new_symbol(), 8, 3))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.transpose(x=x, perm=FIRST, name="y")

    assert any("has the symbolic shape" in r for r in reasons(apply_pass(InterfaceLayout(), program)[1]))


@pytest.mark.parametrize("target", ["M1/macOS 14", "M4/macOS 15"])
def test_auto_leaves_the_interface(target: str) -> None:
    surgery = ane.apply(exported(), "auto", target=target, quiet=True, prove=None)
    assert surgery.program.functions["main"].inputs["image"].shape == (1, 8, 8, 3)
