"""Scatters at constant and at dynamic places: every kind, every mode, doubles and places outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from pass_cases import refuses, table

import anesurgery as ane
from anesurgery.errors import ProofError
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types, walk_ops
from anesurgery.passes import replace_scatter
from anesurgery.passes.replace_scatter import MODES, ReplaceScatter
from anesurgery.testing import apply_pass, assert_same_numbers, random_inputs

SCATTERS = {"scatter", "scatter_along_axis", "scatter_nd"}
EVERY_MODE = ["update", *MODES]


def scattered(
    kind: str, places: Any, shape: tuple[int, ...], updates: tuple[int, ...], dynamic: bool = False, **more: Any
) -> Program:
    """A scatter, with the places as a constant or as an input."""
    places = np.asarray(places, np.int32)
    specs = [mb.TensorSpec(shape), mb.TensorSpec(updates), mb.TensorSpec(places.shape, dtype=types.int32)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS16)
    def program(x: Var, u: Var, k: Var) -> Any:
        made = getattr(mb, kind)(data=x, indices=k if dynamic else places, updates=u, **more)
        return made if dynamic else (made, mb.identity(x=k))

    return program


def held(program: Program, places: Any = None) -> Program:
    """No scatter is left, each site was checked, and the numbers are the same, bit by bit."""
    after, session = apply_pass(ReplaceScatter(), program)
    assert not SCATTERS & {op.op_type for op in walk_ops(after)}, session.refusals
    assert all(change.proof is not None for change in session.changes)
    inputs = random_inputs(program, seed=1)
    if places is not None:
        inputs["k"] = np.asarray(places, np.int32)
    assert_same_numbers(program, after, inputs)
    assert isinstance(after, Program)
    return after


@pytest.mark.one_of(5)
@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_constant_rows(mode: str, axis: int) -> None:
    updates = [4, 5, 6]
    updates[axis] = 3
    held(scattered("scatter", [3, 0, 1], (4, 5, 6), tuple(updates), axis=axis, mode=mode))


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_a_row_that_is_written_twice(mode: str) -> None:
    held(scattered("scatter", [2, 0, 2, -1], (4, 3), (4, 3), axis=0, mode=mode))


@pytest.mark.parametrize("places", [[[0, 1], [3, 2]], [[0, 0]], [[-1, -2]]], ids=["two", "first", "last"])
def test_coordinates(places: Any) -> None:
    held(scattered("scatter_nd", places, (4, 3, 2), (len(places), 2), mode="update"))
    held(scattered("scatter_nd", places, (4, 3), (len(places),), mode="add"))


@pytest.mark.parametrize("places", [[[1, 1, 1], [0, 0, 0]], [[0, 1, 1], [1, 0, 0]]], ids=["rows", "elements"])
def test_places_along_an_axis(places: Any) -> None:
    held(scattered("scatter_along_axis", places, (2, 3), (2, 3), axis=0, mode="update"))


def test_places_of_two_axes() -> None:
    held(scattered("scatter", [[0, 1], [3, 2]], (4, 3), (2, 2, 3), axis=0, mode="add"))


@pytest.mark.one_of(5)
@pytest.mark.parametrize("mode", EVERY_MODE)
@pytest.mark.parametrize("places", [[1], [-1], [3]])
def test_a_dynamic_row(mode: str, places: Any) -> None:
    held(scattered("scatter", [0], (2, 4, 3), (2, 1, 3), dynamic=True, axis=1, mode=mode), places)


def test_dynamic_rows_one_after_another() -> None:
    held(scattered("scatter", [0, 0], (4, 3), (2, 3), dynamic=True, axis=0, mode="add"), [2, 2])
    held(scattered("scatter_nd", [[0], [0]], (4, 3), (2, 3), dynamic=True, mode="update"), [[2], [3]])
    held(
        scattered("scatter_along_axis", [[0, 1, 2]], (4, 3), (1, 3), dynamic=True, axis=0, mode="update"),
        [[3, 0, 3]],
    )


def columns(places: Any, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where the elements of a slice of the last axis lie in the flat tensor."""
    return np.arange(np.prod(shape)).reshape(shape)[..., places].ravel()


@pytest.mark.parametrize("places", [slice(0, 3), slice(2, 5), [4], [0, 2], [3, 1]], ids=str)
@pytest.mark.parametrize("mode", ["update", "add"])
def test_a_slice_of_an_inner_axis_is_columns(places: Any, mode: str) -> None:
    flat = columns(places, (8, 5, 5))
    program = scattered("scatter", flat, (200,), (len(flat),), axis=0, mode=mode)
    after = held(program)
    assert [op.op_type for op in walk_ops(after)].count("concat") == 1


def test_two_halves_are_one_concat() -> None:
    """As a trace writes `q[..., :3] = a; q[..., 3:] = b`: the buffer, and its flat shape, are gone."""
    left, right = columns(slice(0, 3), (4, 10, 5)), columns(slice(3, 5), (4, 10, 5))

    @mb.program(input_specs=[mb.TensorSpec((4, 10, 3)), mb.TensorSpec((4, 10, 2))])
    def program(a: Var, b: Var) -> Any:
        made: Any = np.zeros(200, np.float32)
        for places, u in ((left, a), (right, b)):
            flat = mb.reshape(x=u, shape=[len(places)])
            made = mb.scatter(data=made, indices=places.astype(np.int32), updates=flat, axis=0, mode="update")
        return mb.relu(x=mb.reshape(x=made, shape=[4, 10, 5]))

    after, session = apply_pass(ReplaceScatter(), program)
    assert len(session.changes) == 2
    kinds = [op.op_type for op in walk_ops(after) if op.op_type != "const"]
    assert kinds == ["reshape", "reshape", "concat", "reshape", "relu"]
    assert_same_numbers(program, after)


def test_places_that_do_not_repeat_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: the first period is taken for all of them."""
    right = columns(slice(0, 3), (40, 5)).reshape(40, 3)
    right[7] += 1
    program = scattered("scatter", right.ravel(), (200,), (120,), axis=0, mode="update")
    after, _ = apply_pass(ReplaceScatter(), program)
    assert any(op.op_type == "scatter" for op in walk_ops(after))
    monkeypatch.setattr(
        replace_scatter._Rows, "folded", lambda self: replace_scatter._Rows(1, (40, 5), (40, 3), np.arange(3))
    )
    with pytest.raises(ProofError, match="old and new differ"):
        apply_pass(ReplaceScatter(), program)


def test_an_update_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: of two updates of a row, the first one counts."""
    right = replace_scatter._Rows.pieces

    def wrong(self: Any, mode: str) -> Any:
        back = replace_scatter._Rows(self.axis, self.data, self.updates, self.places.copy())
        back.places[-1] = back.places[1]
        return right(back, mode)

    monkeypatch.setattr(replace_scatter._Rows, "pieces", wrong)
    with pytest.raises(ProofError, match="old and new differ"):
        apply_pass(ReplaceScatter(), scattered("scatter", [2, 0, 2], (4, 3), (3, 3), axis=0, mode="update"))


def test_a_converted_scatter() -> None:
    class Written(torch.nn.Module):
        def forward(self, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            return (x * 1).scatter(1, torch.tensor([[1, 2], [1, 2]]), u) + 1

    x, u = torch.randn(2, 5), torch.randn(2, 2)
    with quiet_host():
        model = ct.convert(
            torch.jit.trace(Written().eval(), (x, u)),  # type: ignore[no-untyped-call]
            inputs=[ct.TensorType("x", x.shape), ct.TensorType("u", u.shape)],
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
        )
    before = SCATTERS & {op.op_type for op in walk_ops(ane.load(model).program)}
    surgery = ane.apply(model, ["fold_constants", "replace_scatter"], quiet=True)
    assert before
    assert not SCATTERS & {op.op_type for op in walk_ops(surgery.program)}, surgery.refusals
    (found,) = ane.run(surgery.program, {"x": x.numpy(), "u": u.numpy()}).values()
    assert_close(found, Written()(x, u).numpy(), rtol=1e-6)


test_cases, test_surroundings = table(
    ReplaceScatter(),
    refuses("78 pieces would be needed", scattered, "scatter", np.arange(40) ** 2, (1600,), (40,), axis=0),
    refuses("9 rows are written at dynamic", scattered, "scatter", range(9), (80,), (9,), dynamic=True, axis=0),
    refuses("fp16 counts up to 2047", scattered, "scatter", [0], (2048,), (1,), dynamic=True, axis=0),
    refuses("have 2 coordinates", scattered, "scatter_nd", [[0, 0]], (3, 3), (1,), dynamic=True),
)
