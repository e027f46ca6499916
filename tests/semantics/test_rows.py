"""Every row of every table about what an op means, against the interpreter, on random ops."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import row_checks
from random_ops import CHAINS, RECIPES, Sample, chain, dtypes_of, latest, parameters_of, sample
from row_checks import CHECKS, FOR_INTEGERS

from anesurgery import ops
from anesurgery.facts import token_axes, whole_numbers
from anesurgery.mil import Program, Var, mb, np_dtype, walk_ops
from anesurgery.regions import views
from anesurgery.semantics import degrees
from anesurgery.semantics.rows import SPECS, places_of, results_at, slices_read

FEW, MANY = 20, 200
"""Random programs of each op in every run of the tests, and in the long one."""

TABLES = {
    "SPECS": SPECS,
    "integers": whole_numbers.MOVES,
    "RULES of token_axes": token_axes.RULES,
    "FRAMES": views.FRAMES,
    "DEGREES": degrees.DEGREES,
    "UNROUNDED": ops.UNROUNDED,
    "ALONG": ops.ALONG,
    "traits": ops.POINTWISE | ops.MOVING | ops.JOINING | ops.REDUCTIONS | ops.PADDING,
}


def test_every_op_with_a_row_has_random_programs() -> None:
    without = {name: sorted(set(table) - set(RECIPES)) for name, table in TABLES.items()}
    assert {name: missing for name, missing in without.items() if missing} == {}


def faults(drawn: Iterator[Sample]) -> list[str]:
    """What every check says of some programs."""
    return [f"{check.__name__}: {why}" for one in drawn for check in CHECKS if (why := check(one))]


def programs(op_type: str, seed: str, count: int) -> Iterator[Sample]:
    for i in range(count):
        yield sample(op_type, f"{seed}.{i}")


def whole_faults(op_type: str, seed: str, count: int) -> list[str]:
    """What the checks of integers say of programs of integers."""
    if "int32" not in dtypes_of(op_type, latest(op_type)):
        return []
    drawn = [sample(op_type, f"{seed} of integers.{i}", dtypes=("int32",)) for i in range(count)]
    return [why for one in drawn for check in FOR_INTEGERS if (why := check(one))]


@pytest.mark.parametrize("op_type", sorted(RECIPES))
def test_rows_hold_on_random_programs(op_type: str) -> None:
    assert faults(programs(op_type, "few", FEW)) + whole_faults(op_type, "few", FEW) == []


@pytest.mark.slow
@pytest.mark.parametrize("op_type", sorted(RECIPES))
def test_rows_hold_on_many_random_programs(op_type: str) -> None:
    assert faults(programs(op_type, "many", MANY)) + whole_faults(op_type, "many", MANY) == []


UNDRAWN = {
    "conv_transpose": {"output_shape"},  # says in other words what strides and padding say
    "einsum": {"values"},
    "reshape_like": {"begins", "ends", "end_masks", "ref_tensors"},
}
"""Parameters that are absent, or always of one length."""


@pytest.mark.slow
@pytest.mark.parametrize("op_type", sorted(RECIPES))
def test_every_parameter_is_drawn(op_type: str) -> None:
    drawn: dict[str, set[str]] = {name: set() for name in parameters_of(op_type)}
    for one in programs(op_type, "many", MANY):
        for name in drawn:
            value = one.op.inputs.get(name)
            stored = value.val if isinstance(value, Var) else f"{len(value or ())} values"
            drawn[name].add(str(stored))
    fixed = {name for name, values in drawn.items() if len(values) < 2 and values != {str(None)}}
    absent = {
        name for name in drawn if all(one.op.inputs.get(name) is None for one in programs(op_type, "few", MANY))
    }
    assert fixed | absent == UNDRAWN.get(op_type, set())


@pytest.mark.parametrize("name", sorted(CHAINS))
def test_forms_of_a_few_ops_hold(name: str) -> None:
    drawn = [chain(name, f"few.{i}") for i in range(3 * FEW)]
    assert [why for one in drawn if (why := row_checks.outside_its_interval(one))] == []


def test_a_value_that_is_read_in_two_ways_has_no_slices_of_its_own() -> None:
    @mb.program(input_specs=[mb.TensorSpec((3, 3)), mb.TensorSpec((3, 3))])
    def program(x: Var, y: Var) -> tuple[Var, Var, Var]:
        return mb.matmul(x=x, y=x, transpose_y=True), mb.matmul(x=x, y=y), mb.mul(x=x, y=x)

    scores, product, square = (places_of(v.op) for v in program.functions["main"].outputs)
    x, y = program.functions["main"].inputs.values()
    assert scores is not None
    assert product is not None
    assert square is not None
    assert [slices_read(scores, axis) for axis in (0, 1)] == [None, None]
    assert [slices_read(product, axis) for axis in (0, 1)] == [{x: 0}, {y: 1}]
    assert [slices_read(square, axis) for axis in (0, 1)] == [{x: 0}, {x: 1}]


def test_programs_are_drawn_again_by_their_seed() -> None:
    one, other = sample("mod", "again"), sample("mod", "again")
    assert str(one) == str(other)
    assert {np_dtype(v) for v in one.operands} == {np_dtype(v) for v in other.operands}


def test_each_operand_of_a_row_has_the_name_of_its_parameter() -> None:
    ones, drawn = np.ones(4, np.float32), [sample(op_type, "names") for op_type in ("linear", "conv", "select")]

    @mb.program(input_specs=[mb.TensorSpec((3, 4))])
    def program(x: Var) -> Var:
        return mb.layer_norm(x=x, axes=[1], gamma=ones, beta=ones + 1)

    for op in (program.functions["main"].outputs[0].op, *(one.op for one in drawn)):
        assert op is not None
        axes = places_of(op)
        assert axes
        assert {o.name: o.var for o in axes} == {o.name: op.inputs[o.name] for o in axes}
        assert len({o.name for o in axes}) == len(axes)


@pytest.mark.parametrize("op_type", ["sub", "real_div", "pow", "maximum", "floor_div", "greater", "equal"])
def test_a_number_may_stand_first(op_type: str) -> None:
    """The wrong version hands torch a number where it takes tensors only."""

    program: Program = mb.program(input_specs=[mb.TensorSpec((2, 8))])(
        lambda x: getattr(mb, op_type)(x=np.float32(3), y=x)
    )
    (op,) = (op for op in walk_ops(program) if op.op_type == op_type)
    exact = {
        "sub": 1.0,
        "real_div": 1.5,
        "pow": 9.0,
        "maximum": 3.0,
        "floor_div": 1.0,
        "greater": 1.0,
        "equal": 0.0,
    }
    assert results_at(op, {"y": [2.0]}) == [exact[op_type]]
