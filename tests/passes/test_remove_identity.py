"""Identities go, but for those that give an output its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pass_cases import ignores, refuses, rewrites, rewrites_each, table
from scores import scored

import anesurgery as ane
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, walk_ops
from anesurgery.passes.remove_identity import RemoveIdentity
from anesurgery.placement.target import Target


def kinds(program: Program) -> list[str]:
    return [op.op_type for op in walk_ops(program) if op.op_type != "const"]


@pytest.mark.slow
def test_a_real_style_transfer_loses_its_identities(corpus: Path) -> None:
    program = load(str(corpus / "mlc_mosaic.mlpackage")).program
    surgery = ane.apply(program, "auto", target="M4/macOS 15", prove=None, quiet=True)
    assert "identity" in kinds(program)
    assert "identity" not in kinds(surgery.program)
    before, after = (scored(p, Target.parse("M4/macOS 15"))[0] for p in (program, surgery.program))
    assert after.share["ops"] > before.share["ops"]


def chains_and_several_readers() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 4))], opset_version=ct.target.iOS17)
    def program(x: Var) -> tuple[Var, Var]:
        same = mb.identity(x=mb.identity(x=x))
        return mb.add(x=same, y=same, name="y"), mb.tanh(x=same, name="z")

    return program


def an_output_keeps_its_name() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 4))], opset_version=ct.target.iOS17)(
        lambda x: mb.identity(x=mb.relu(x=x), name="y")
    )


def cut(shape: tuple[int, ...], is_output: bool = False, **ends: Any) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(shape)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        y = mb.slice_by_index(x=mb.relu(x=x), **ends, name="y")
        return y if is_output else mb.tanh(x=y)

    return program


CASES = {
    "a slice of everything": cut((2, 4), begin=[0, 0], end=[2, 4]),
    "open ends": cut((2, 4), begin=[0, 1], end=[1, 2], begin_mask=[True, True], end_mask=[True, True]),
    "the last of one": cut((2, 1, 4), begin=[0, -1, 0], end=[2, 0, 4], squeeze_mask=[False, True, False]),
    "the last of one, as an output": cut((1, 4), True, begin=[-1, 0], end=[0, 4], squeeze_mask=[True, False]),
    "the last of one, and part of another": cut((1, 4), begin=[-1, 1], end=[1, 3]),
    "every second of another": cut((1, 4), begin=[-1, 0], end=[1, 4], stride=[1, 2]),
}


test_cases, test_surroundings = table(
    RemoveIdentity(),
    rewrites(chains_and_several_readers),
    *rewrites_each(CASES, rtol=0),
    ignores(cut, (2, 4), begin=[0, -1], end=[2, 4]),
    ignores(cut, (2, 4), begin=[0, 0], end=[2, 4], stride=[1, 2]),
    refuses("it makes the output %y", cut, (2, 4), True, begin=[0, 0], end=[2, 4]),
    refuses("it makes the output %y", an_output_keeps_its_name),
)
