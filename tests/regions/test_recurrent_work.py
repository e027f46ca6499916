"""What a recurrent op computes, against its steps written out."""

from __future__ import annotations

import numpy as np
import pytest

from anesurgery.mil import Program, Var, mb, walk_ops
from anesurgery.passes.unroll_recurrent import UnrollRecurrent
from anesurgery.semantics.rows import work_of
from anesurgery.testing import apply_pass

GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def flop(program: Program) -> int:
    return sum(work_of(op).flop for op in walk_ops(program))


@pytest.mark.one_of(4)
@pytest.mark.parametrize("kind", GATES)
def test_a_recurrent_op_computes_what_its_steps_do(kind: str) -> None:
    rows, shape = GATES[kind] * 3, (5, 2, 4)
    weights = {"weight_ih": np.ones((rows, 4), np.float32), "weight_hh": np.ones((rows, 3), np.float32)}

    @mb.program(input_specs=[mb.TensorSpec(shape), mb.TensorSpec((2, 3))])
    def program(x: Var, h: Var) -> Var:
        states = {"initial_h": h, **({"initial_c": h} if kind == "lstm" else {})}
        return getattr(mb, kind)(x=x, **states, **weights)[0]

    after, session = apply_pass(UnrollRecurrent(), program)
    assert session.changes
    assert flop(program) == flop(after) == 2 * 5 * 2 * rows * (4 + 3)
