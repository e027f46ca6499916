"""Tables of cosines and sines in each form, exchanged halves, refusals, and wrong versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from coremltools.converters.mil.mil import get_new_symbol
from pass_cases import stays, table

from anesurgery.errors import PassError
from anesurgery.interpret import run
from anesurgery.mil import Array, Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.rotary_tables import RotaryTables
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers

TOKENS, WIDTH = 5, 8
SPEEDS = (10000 ** -(np.arange(WIDTH // 2) / (WIDTH // 2))).astype(np.float32)


def kinds(program: Program) -> Counter[str]:
    return Counter(op.op_type for op in walk_ops(program) if op.op_type != "const")


def turned(x: Var) -> Var:
    """Halves of a head exchanged."""
    half = WIDTH // 2
    first = mb.slice_by_index(x=x, begin=[0] * 4, end=[1, 2, TOKENS, half])
    second = mb.slice_by_index(x=x, begin=[0, 0, 0, half], end=[1, 2, TOKENS, WIDTH])
    return mb.concat(values=[mb.mul(x=second, y=np.float32(-1)), first], axis=-1)


def as_converted(places: Var) -> Var:
    """An outer product of speeds and positions, transposed and put beside itself."""
    number = mb.cast(x=mb.expand_dims(x=places, axes=[1]), dtype="fp32")
    angle = mb.transpose(x=mb.matmul(x=SPEEDS[None, :, None], y=number), perm=[0, 2, 1])
    return mb.expand_dims(x=mb.concat(values=[angle, angle], axis=-1), axes=[1])


def by_hand(places: Var) -> Var:
    number = mb.reshape(x=mb.cast(x=places, dtype="fp32"), shape=[1, 1, TOKENS, 1])
    return mb.mul(x=number, y=np.concatenate([SPEEDS, SPEEDS]))


def rotary(angle_of: Callable[[Var], Var] = as_converted, shape: tuple[int, ...] = (1, TOKENS)) -> Program:
    specs = [mb.TensorSpec(shape, dtype=types.int32), mb.TensorSpec((1, 2, TOKENS, WIDTH))]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(places: Var, x: Var) -> Var:
        angle = angle_of(places)
        straight = mb.mul(x=x, y=mb.cos(x=angle))
        return mb.add(x=straight, y=mb.mul(x=turned(x), y=mb.sin(x=angle)))

    return program


def inputs(places: Any = (7, 0, 3, 39, 12)) -> dict[str, Array]:
    x = np.random.default_rng(0).standard_normal((1, 2, TOKENS, WIDTH)).astype(np.float32)
    return {"places": np.array([places], np.int32), "x": x}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("angle_of", [as_converted, by_hand])
@pytest.mark.parametrize("form", ["one_hot", "gather", "inputs"])
def test_rows_of_positions(form: str, angle_of: Callable[[Var], Var]) -> None:
    step = RotaryTables(positions=40, form=form)
    after, session = apply_pass(step, program := rotary(angle_of))
    assert len(session.changes) == 3
    assert not {"cos", "sin", "slice_by_index"} & kinds(after).keys()
    assert_same_numbers(program, after, inputs(), rtol=1e-5, session=session)
    names = set(after.functions["main"].inputs)
    assert names == ({"x", "places_cos", "places_sin"} if form == "inputs" else {"places", "x"})
    if form == "one_hot":
        assert kinds(after)["equal"] == 1  # one row serves both tables


@pytest.mark.slow
def test_many_positions_have_two_digits() -> None:
    program = rotary()
    after, _ = apply_pass(RotaryTables(positions=3000), program)
    assert kinds(after)["floor_div"] == 1
    assert_same_numbers(program, after, inputs((2999, 0, 2047, 2048, 63)), rtol=1e-4)


def test_positions_that_are_always_the_same() -> None:
    after, session = apply_pass(RotaryTables(positions=40, form="constants"), program := rotary())
    assert set(after.functions["main"].inputs) == {"x"}
    assert "places is taken to be 0, 1, 2 and so on" in session.notes
    assert_same_numbers(program, after, inputs(range(TOKENS)), rtol=1e-5, session=session)


def test_large_angles_are_exact_in_fp16() -> None:
    """In fp16 arithmetic an angle of 2001 is rounded to a multiple of 1, and its cosine is another one."""
    program, given = rotary(), inputs((2001, 2002, 1999, 1501, 1301))
    after, _ = apply_pass(RotaryTables(positions=2048), program)
    (exact,), (new,) = run(program, given).values(), run(after, given, precision="fp16").values()
    assert_close(new, exact, rtol=2e-3)


@pytest.mark.parametrize(
    ("step", "program", "reason"),
    [
        (RotaryTables(), rotary, "how many positions %places may hold is not known: say positions="),
        (
            RotaryTables(positions=9),
            lambda: rotary(lambda p: by_hand(mb.cumsum(x=mb.cast(x=p, dtype="fp32"), axis=1))),
            "are not made from one position each",
        ),
        (
            RotaryTables(positions=9, form="inputs"),
            lambda: rotary(lambda p: by_hand(mb.add(x=p, y=np.int32(1)))),
            "are computed, not an input",
        ),
    ],
)
def test_refuses(step: RotaryTables, program: Callable[[], Program], reason: str) -> None:
    after, session = apply_pass(step, program())
    assert "cos" in kinds(after)
    assert any(reason in r.reason for _, r in session.refusals), [r.reason for _, r in session.refusals]


def test_refuses_several_axes_of_positions() -> None:
    specs = [mb.TensorSpec((2, 3), dtype=types.int32)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(places: Var) -> Var:
        return mb.sin(x=mb.cast(x=places, dtype="fp32"))

    assert_refuses(RotaryTables(positions=9), program, "has more than one axis of positions")
    with pytest.raises(PassError, match="form='table'"):
        RotaryTables(form="table")


def test_rows_that_do_not_come_first() -> None:
    """Positions in the last axis, after the numbers of each: rows are transposed into their place."""
    specs = [mb.TensorSpec((TOKENS,), dtype=types.int32)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(places: Var) -> Var:
        angle = mb.mul(x=mb.cast(x=places, dtype="fp32"), y=SPEEDS[None, :, None])
        return mb.mul(x=mb.cos(x=angle), y=np.float32(2))

    after, session = apply_pass(RotaryTables(positions=40), program)
    assert session.changes
    assert_same_numbers(program, after, {"places": inputs()["places"][0]}, rtol=1e-5)


TURNS = np.outer(np.arange(TOKENS), SPEEDS)[None]


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (np.cos(TURNS), "cos"),
        (1.2 * np.sin(TURNS), "sin"),
        (np.sin(TURNS).swapaxes(1, 2), "sin"),
        (np.random.default_rng(0).standard_normal(TURNS.shape), None),  # wrong: anything
        (np.ones(TURNS.shape), None),  # wrong: the same for all positions
        (np.cos(TURNS) ** 3, None),  # wrong: the cosines of no speed
    ],
)
def test_which_constants_are_tables(table: Array, name: str | None) -> None:
    table = table.astype(np.float32)

    @mb.program(input_specs=[mb.TensorSpec(table.shape)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.mul(x=x, y=table)

    after, session = apply_pass(RotaryTables(form="inputs"), program)
    assert list(session.artifacts) == ([] if name is None else [name])
    assert len(after.functions["main"].inputs) == (1 if name is None else 2)


def parts_in_their_order_are_no_exchange() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 4))])
    def program(x: Var) -> Var:
        parts = [mb.slice_by_index(x=x, begin=[0, i], end=[2, i + 2]) for i in (0, 2)]
        return mb.concat(values=parts, axis=1)

    return program


def parts_that_interleave_are_no_exchange() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 4))])
    def program(x: Var) -> Var:
        parts = [mb.slice_by_index(x=x, begin=[0, i], end=[2, i + 2]) for i in (2, 0)]
        return mb.concat(values=parts, axis=1, interleave=True)

    return program


test_cases, test_surroundings = table(
    RotaryTables(), stays(parts_in_their_order_are_no_exchange), stays(parts_that_interleave_are_no_exchange)
)


def test_parts_of_a_dynamic_axis_are_no_exchange() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, get_new_symbol()))], opset_version=ct.target.iOS17)
    def turned(x: Var) -> Var:
        first = mb.slice_by_index(x=x, begin=[0, 0], end=[2, 4])
        return mb.concat(values=[mb.slice_by_index(x=x, begin=[0, 4], end=[2, 8]), first, x], axis=1, name="y")

    assert not apply_pass(RotaryTables(), turned)[1].changes
