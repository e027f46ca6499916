"""Every op of the table means to Apple's runtime what it means to the interpreter.

The runtime ends its process on some inputs, so that the cases of a family run in one child.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from core_ai_cases import CASES, Case
from core_ai_models import needs_core_ai

import anesurgery as ane
from anesurgery.coreai import running
from anesurgery.coreai.lowerings import TABLE
from anesurgery.mil import Var, mb, types

pytestmark = needs_core_ai

TYPES = {"float32": types.fp32, "int32": types.int32, "bool": types.bool}
ELSEWHERE = {
    "while_loop cond": "test_control_flow",
    "read_state coreml_update_state write_state": "test_states",
    "make_list list_write list_read list_gather list_scatter list_length": "test_lists",
    "classify": "test_translating",
}
"""Ops that only whole programs have -> the test that has them."""


def program_of(cases: Sequence[Case], opset: Any) -> Any:
    """One function with the inputs and outputs of all cases."""
    inputs = {f"in_{n}_{k}": array for n, case in enumerate(cases) for k, array in enumerate(case.inputs)}
    specs = {name: mb.TensorSpec(a.shape, TYPES[a.dtype.name]) for name, a in inputs.items()}

    def build(**values: Var) -> Any:
        made = []
        for n, case in enumerate(cases):
            result = case.build(*(values[f"in_{n}_{k}"] for k in range(len(case.inputs))))
            results = result if isinstance(result, (list, tuple)) else [result]
            made += [mb.identity(x=r, name=f"out_{n}_{k}") for k, r in enumerate(results)]
        return tuple(made)

    scope: dict[str, Any] = {"build": build}
    exec(f"def f({', '.join(inputs)}): return build(**locals())", scope)
    program = mb.program(input_specs=list(specs.values()), opset_version=opset)(scope["f"])
    return program, inputs


ROUNDED = {"compressed": 1e-3}
"""Family whose weights are decompressed in fp16 by both, in another order -> how far they may be apart."""


def differs(found: Any, wanted: Any, rtol: float = 1e-5) -> bool:
    """Is one number off by more than this part of the largest?"""
    try:
        assert_close(found, wanted, rtol)
    except AssertionError:
        return True
    return False


GROUPS = [
    (family, opset)
    for family, cases in CASES.items()
    for opset in sorted({case.opset for case in cases}, key=lambda o: o.value)
]


@pytest.mark.parametrize(("family", "opset"), GROUPS, ids=[f"{f}-{o.name}" for f, o in GROUPS])
def test_an_op_means_the_same_to_apple(family: str, opset: Any, tmp_path: Path) -> None:
    cases = [case for case in CASES[family] if case.opset == opset]
    program, inputs = program_of(cases, opset)
    path = ane.to_coreai(program, tmp_path / "ops.aimodel", mode="check").path
    outputs, _ = running.run(path, inputs)
    wanted = ane.run(program, inputs)
    assert outputs.keys() == wanted.keys()
    rtol = ROUNDED.get(family, 1e-5)
    names = [name for name, value in wanted.items() if differs(outputs[name], value, rtol)]
    assert [cases[int(name.split("_")[1])].name for name in names] == []


def test_every_op_of_the_table_has_a_case() -> None:
    tried = {case.op_type for cases in CASES.values() for case in cases}
    assert set(TABLE) - tried == {name for names in ELSEWHERE for name in names.split()}


def test_a_wrong_meaning_would_be_found() -> None:
    assert differs(np.array([1.0, 2.0]), np.array([1.0, 2.1]))
    assert not differs(np.array([1.0, 2.0]), np.array([1.0, 2.000001]))
