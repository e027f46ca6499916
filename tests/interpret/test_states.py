"""States are updated in their own memory, and what reads an old value still sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anesurgery.interpret import Listener, Predictor, state
from anesurgery.mil import Array, Program, Var, ct, mb, types

ROW = [mb.TensorSpec((1, 4), types.fp16), mb.TensorSpec((1,), types.int32)]


def made(build: Callable[[Var, Callable[[Var, int], Var], Var], Any]) -> Program:
    """A model with one state of 8x4; `build` gets the row, what writes it into a value, and the state."""
    states = [mb.StateTensorSpec((8, 4), dtype=types.fp16)]

    @mb.program(input_specs=[*ROW, *states], opset_version=ct.target.iOS18)
    def program(row: Var, at: Var, held: Var) -> Any:
        begin = mb.concat(values=(at, np.array([0], np.int32)), axis=0)

        def updated(value: Var, factor: int = 1) -> Var:
            end = mb.add(x=begin, y=np.array([1, 4], np.int32))
            return mb.slice_update(x=value, update=mb.mul(x=row, y=np.float16(factor)), begin=begin, end=end)

        return build(row, updated, held)

    return program


def plain(row: Var, updated: Any, held: Var) -> Var:
    value = mb.coreml_update_state(state=held, value=updated(mb.read_state(input=held)))
    return mb.reduce_sum(x=value, axes=[0], name="y")


def old_is_read(row: Var, updated: Any, held: Var) -> Var:
    old = mb.read_state(input=held)
    value = mb.coreml_update_state(state=held, value=updated(old))
    return mb.sub(x=value, y=old, name="y")


def view_is_read(row: Var, updated: Any, held: Var) -> Var:
    old = mb.read_state(input=held)
    view = mb.slice_by_index(x=old, begin=[2, 0], end=[4, 4])
    value = mb.coreml_update_state(state=held, value=updated(old))
    return mb.add(x=mb.reduce_sum(x=value, axes=[0], keep_dims=True), y=view, name="y")


def twice(row: Var, updated: Any, held: Var) -> Var:
    first = mb.coreml_update_state(state=held, value=updated(mb.read_state(input=held)))
    second = mb.coreml_update_state(state=held, value=updated(mb.read_state(input=held), 3))
    return mb.sub(x=second, y=first, name="y")


def update_is_read_first(row: Var, updated: Any, held: Var) -> Var:
    value = updated(mb.read_state(input=held))
    again = mb.read_state(input=held)
    mb.coreml_update_state(state=held, value=value)
    return mb.sub(x=value, y=again, name="y")


def steps(program: Program, listener: Listener | None = None) -> tuple[list[Array], list[int]]:
    """What some calls give, and where the state lies after each."""
    predict, rng = Predictor(program), np.random.default_rng(0)
    held, found, places = predict.make_state(), [], []
    for at in (2, 5, 3, 2, 0):
        row = rng.standard_normal((1, 4)).astype(np.float16)
        found.append(predict({"row": row, "at": [at]}, state=held, listener=listener)["y"].copy())
        (box,) = held.values()
        places.append(box.value.data_ptr())
    return found, places


BUILDS = [plain, old_is_read, view_is_read, twice, update_is_read_first]


@pytest.mark.parametrize("build", BUILDS)
def test_what_reads_an_old_value_still_sees_it(build: Any) -> None:
    """With a listener, nothing is updated in place."""
    program = made(build)
    np.testing.assert_array_equal(steps(program)[0], steps(program, Listener())[0])


def test_the_memory_stays_the_same() -> None:
    assert len(set(steps(made(plain))[1])) == 1
    assert len(set(steps(made(plain), Listener())[1])) > 1


@pytest.mark.parametrize("build", [old_is_read, view_is_read, twice])
def test_an_update_that_does_not_look_would_be_found(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_overlaps", lambda part, others: False)
    program = made(build)
    assert not np.array_equal(steps(program)[0], steps(program, Listener())[0])


def test_a_slice_update_alone_leaves_what_it_reads() -> None:
    @mb.program(input_specs=[mb.TensorSpec((6,))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        backward = {"begin": [4], "end": [0], "stride": [-2]}
        value = mb.slice_update(x=x, update=np.array([1, 2], np.float32), **backward)
        return mb.add(x=value, y=x, name="y")

    x = np.arange(6, dtype=np.float32)
    expected = x.copy()
    expected[4:0:-2] = [1, 2]
    np.testing.assert_array_equal(Predictor(program)({"x": x})["y"], expected + x)
