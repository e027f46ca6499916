"""Identities go, but for those that give an output its name."""

from __future__ import annotations

from pathlib import Path

import pytest
from pass_cases import refuses, rewrites, table
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


test_cases, test_surroundings = table(
    RemoveIdentity(),
    rewrites(chains_and_several_readers),
    refuses("it makes the output %y", an_output_keeps_its_name),
)
