"""Identities go, but for those that give an output its name."""

from __future__ import annotations

from pathlib import Path

import pytest
from scores import scored

import anesurgery as ane
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, walk_ops
from anesurgery.passes.remove_identity import RemoveIdentity
from anesurgery.placement.target import Target
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def kinds(program: Program) -> list[str]:
    return [op.op_type for op in walk_ops(program) if op.op_type != "const"]


def test_chains_and_several_readers() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 4))], opset_version=ct.target.iOS17)
    def program(x: Var) -> tuple[Var, Var]:
        same = mb.identity(x=mb.identity(x=x))
        return mb.add(x=same, y=same, name="y"), mb.tanh(x=same, name="z")

    after, session = apply_pass(RemoveIdentity(), program)
    assert kinds(after) == ["add", "tanh"]
    assert len(session.changes) == 2
    assert_same_numbers(program, after)


def test_an_output_keeps_its_name() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 4))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.identity(x=mb.relu(x=x), name="y")

    assert_refuses(RemoveIdentity(), program, "it makes the output %y")


@pytest.mark.slow
def test_a_real_style_transfer_loses_its_identities(corpus: Path) -> None:
    program = load(str(corpus / "mlc_mosaic.mlpackage")).program
    surgery = ane.apply(program, "auto", target="M4/macOS 15", prove=None, quiet=True)
    assert "identity" in kinds(program)
    assert "identity" not in kinds(surgery.program)
    before, after = (scored(p, Target.parse("M4/macOS 15"))[0] for p in (program, surgery.program))
    assert after.share["ops"] > before.share["ops"]
