"""A program with a state."""

from __future__ import annotations

import numpy as np

from anesurgery.mil import Program, Var, ct, mb, types


def stateful() -> Program:
    specs = [mb.TensorSpec((2,), types.fp16), mb.StateTensorSpec((2,), types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Var, total: Var) -> Var:
        grown = mb.add(x=mb.read_state(input=total), y=x)
        return mb.add(x=mb.coreml_update_state(state=total, value=grown), y=np.float16(1))

    return program
