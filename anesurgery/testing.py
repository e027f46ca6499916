"""Helpers to test a pass three ways: the text after, the numbers before and after, the refusals.

Public: users test their own passes with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from anesurgery.files.interface_change import adapt_inputs, adapt_outputs
from anesurgery.loading import clone
from anesurgery.mil import Array, Program, any_symbolic, np_dtype
from anesurgery.rewriting.passes import Pass, run_pass
from anesurgery.rewriting.session import Session
from anesurgery.text import to_text


def apply_pass(step: Pass, program: Program, *, prove: bool = True) -> tuple[Program, Session]:
    """A rewritten copy of `program`, and the session with its changes and refusals."""
    after = clone(program).program
    session = Session(prove_sites=prove)
    run_pass(step, after, session)
    return after, session


def assert_rewrites(step: Pass, program: Program, after: str) -> Session:
    """The pass turns `program` into exactly this text, each site proven, and a second run changes nothing."""
    rewritten, session = apply_pass(step, program)
    found = to_text(rewritten)
    assert found == after.strip("\n"), f"expected:\n{after}\nfound:\n{found}"
    assert session.changes, f"{step.name} changed nothing; refusals: {reasons(session)}"
    again, second = apply_pass(step, rewritten)
    assert not second.changes, f"{step.name} is not idempotent:\n{to_text(again)}"
    return session


def assert_refuses(step: Pass, program: Program, reason: str) -> None:
    """The pass leaves `program` alone and says why, in words that contain `reason`."""
    before = to_text(program)
    rewritten, session = apply_pass(step, program)
    assert to_text(rewritten) == before, f"{step.name} changed the program:\n{to_text(rewritten)}"
    found = reasons(session)
    assert any(reason in r for r in found), f"expected a refusal with {reason!r}; found {found}"


def reasons(session: Session) -> list[str]:
    """The texts of all refusals of a session."""
    return [refusal.reason for _, refusal in session.refusals]


def random_inputs(
    program: Program, *, seed: int = 0, ranges: Mapping[str, tuple[float, float]] | None = None
) -> dict[str, Array]:
    """Inputs for `main`: normal floats, integers of [0, 2), coin flips; `ranges` gives [low, high) by name.

    A symbolic dimension becomes 3.
    """
    rng = np.random.default_rng(seed)
    function = next(iter(program.functions.values()))
    made: dict[str, Array] = {}
    for name, var in function.inputs.items():
        shape = tuple(3 if any_symbolic([d]) else int(d) for d in var.shape)
        dtype, bounds = np_dtype(var), (ranges or {}).get(name)
        if dtype.kind == "f":
            values: Array = rng.standard_normal(shape) if bounds is None else rng.uniform(*bounds, shape)
        else:
            low, high = bounds or (0, 2)
            values = rng.integers(int(low), int(high), shape)
        made[name] = values.astype(dtype)
    return made


def assert_same_numbers(
    before: Program,
    after: Program,
    inputs: Mapping[str, Array] | None = None,
    *,
    rtol: float = 0.0,
    precision: str = "fp32",
    session: Session | None = None,
) -> None:
    """Both programs give the same outputs by the interpreter, within `rtol` of the largest magnitude.

    Args:
        before: the program as it was.
        after: the program as it is now.
        inputs: of `before`; random ones by default.
        rtol: 0 demands equality of every element (NaN equals NaN).
        precision: the arithmetic, "fp32" or "fp16".
        session: of the pass, when it declared interface changes: inputs and outputs are adapted.
    """
    from anesurgery.interpret import run

    contract = session.contract if session is not None else []
    inputs = dict(inputs if inputs is not None else random_inputs(before))
    expected: Any = adapt_outputs(contract, run(before, inputs, precision=precision), inputs)
    found = run(after, adapt_inputs(contract, inputs), precision=precision)
    assert set(expected) == set(found), f"outputs {sorted(expected)} became {sorted(found)}"
    for name, value in expected.items():
        _assert_close(name, np.asarray(value), np.asarray(found[name]), rtol)


def _assert_close(name: str, old: Array, new: Array, rtol: float) -> None:
    assert old.shape == new.shape, f"{name}: {old.shape} became {new.shape}"
    if rtol == 0:
        np.testing.assert_array_equal(new, old, err_msg=name)
        return
    old, new = old.astype(np.float64), new.astype(np.float64)
    scale = np.abs(old[np.isfinite(old)]).max(initial=0.0)
    np.testing.assert_allclose(new, old, rtol=0, atol=rtol * scale, err_msg=name)
