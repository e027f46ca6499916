"""Forms by degree: the same function of numbers over a unit; what is none; a rule and its pass agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hazard_graphs import HAZARDS

from anesurgery import registry
from anesurgery.interpret import run
from anesurgery.mil import Operation, Program, Var, ct, mb, types, walk_ops
from anesurgery.numeric import means, products, squares
from anesurgery.numeric.forms import Form, form_of
from anesurgery.numeric.hazard import Hazard
from anesurgery.passes.scale_roots import ScaleRoots
from anesurgery.rewriting.repairs import Repair
from anesurgery.testing import apply_pass

HALF = np.float16
WEIGHTS = np.random.default_rng(1).uniform(0, 0.1, (5, 16)).astype(HALF)
ROWS: dict[str, Hazard[Any]] = {
    f"{module.__name__.rpartition('.')[2]}.{name}": row
    for module in (means, products, squares)
    for name, row in vars(module).items()
    if isinstance(row, Hazard)
}


def program(body: Callable[[Var], Var]) -> Program:
    spec = mb.TensorSpec((3, 4, 16), dtype=types.fp16)
    return mb.program(input_specs=[spec], opset_version=ct.target.iOS17)(lambda x: body(x))


def last(body: Callable[[Var], Var]) -> Operation:
    return [op for op in walk_ops(program(body)) if op.op_type != "const"][-1]


def total(x: Var, keep: bool = True) -> Var:
    return mb.reduce_sum(x=mb.square(x=x), axes=[-1], keep_dims=keep)


FOUND: dict[str, tuple[Callable[[Var], Var], float]] = {
    "a length": (lambda x: mb.sqrt(x=total(x)), 1.0),
    "its reciprocal": (lambda x: mb.rsqrt(x=total(x), epsilon=HALF(1e-3)), -1.0),
    "the root of mixed squares": (lambda x: mb.sqrt(x=mb.linear(x=mb.square(x=x), weight=WEIGHTS)), 1.0),
    "a row by its length": (lambda x: mb.real_div(x=x, y=mb.sqrt(x=total(x))), 0.0),
    "a square by a length": (lambda x: mb.real_div(x=total(x), y=mb.sqrt(x=total(x))), 1.0),
}


@pytest.mark.parametrize(("body", "degree"), FOUND.values(), ids=FOUND)
def test_a_form_scales_by_its_degree(body: Callable[[Var], Var], degree: float) -> None:
    """Guards left out, numbers times 4 give the result times 4 to its degree; the wrong degree is caught."""
    form = form_of(last(body))
    assert isinstance(form, Form)
    assert form.powers[form.root.outputs[0]] == (degree,)
    model, x = program(body), np.random.default_rng(0).uniform(1, 2, (3, 4, 16)).astype(HALF)
    (one,), (other,) = (run(model, {"x": x * HALF(f)}, precision="fp32").values() for f in (1, 4))
    assert np.allclose(other, one * 4.0**degree, rtol=1e-3)
    assert not np.allclose(other, one * 4.0 ** (degree + 1), rtol=1e-3)


OTHERS: dict[str, Callable[[Var], Var]] = {
    "a difference": lambda x: mb.sqrt(x=mb.sub(x=total(x), y=HALF(1))),
    "a cap": lambda x: mb.sqrt(x=mb.clip(x=total(x), alpha=HALF(1e-3), beta=HALF(9))),
    "another activation": lambda x: mb.sqrt(x=mb.tanh(x=total(x))),
    "rows along two axes": lambda x: mb.sqrt(x=mb.reduce_sum(x=total(x), axes=[1], keep_dims=True)),
    "squares beside a plain number": lambda x: mb.sqrt(x=mb.add(x=mb.square(x=x), y=mb.abs(x=x))),
    "weights below 0": lambda x: mb.sqrt(x=mb.linear(x=mb.square(x=x), weight=-WEIGHTS)),
}


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_others_are_no_forms(body: Callable[[Var], Var]) -> None:
    assert form_of(last(body)) is None


@pytest.mark.parametrize("size", [1e-2, 1.0, 3000.0])
@pytest.mark.parametrize("name", ["its reciprocal", "the root of mixed squares"])
def test_forms_that_no_pass_knew_one_by_one(name: str, size: float) -> None:
    """A root with an epsilon of its own, and one of mixed squares, are repaired as all others are."""
    model = program(FOUND[name][0])
    after, session = apply_pass(ScaleRoots(), model)
    assert len(session.changes) == 1
    x = (np.random.default_rng(0).uniform(0.5, 1, (3, 4, 16)) * size).astype(HALF)
    (wanted,) = run(model, {"x": x}, precision="fp32").values()
    (old,), (new,) = (run(p, {"x": x}, precision="fp16").values() for p in (model, after))
    assert np.allclose(new, wanted, rtol=4e-3)
    assert size < 1000 or not np.allclose(old, wanted, rtol=4e-3)


def findings(row: Hazard[Any], graph: Program) -> list[str]:
    """What a rule says of a graph."""
    return [words for op in walk_ops(graph) if (words := row.finding(op))]


def test_every_row_speaks_of_some_graph() -> None:
    assert {
        name for graph in HAZARDS for name, row in ROWS.items() if findings(row, graph.graph)
    } == ROWS.keys()


PASSES = [name for name in registry.op_pass_names() if issubclass(registry.pass_class(name), Repair)]


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_repairs_what_its_row_names_and_nothing_else(name: str) -> None:
    step = registry.make_pass(name)
    for graph in HAZARDS:
        named = findings(step.hazard, graph.graph)
        _, session = apply_pass(step, graph.graph, prove=False)
        assert bool(session.changes) == bool(named), (graph.name, named, session.changes)


def test_each_row_has_one_pass() -> None:
    assert {id(registry.pass_class(name).hazard) for name in PASSES} == {id(row) for row in ROWS.values()}


def test_a_long_chain_before_a_root_is_no_form() -> None:
    """A search without a bound on its depth reaches Python's limit of nested calls here."""

    def chain(x: Var) -> Var:
        for _ in range(1500):
            x = mb.mul(x=x, y=HALF(1.01))
        return mb.sqrt(x=x)

    assert form_of(last(chain)) is None


def test_a_form_has_at_most_24_ops() -> None:
    def length(products: int) -> Form | None:
        def body(x: Var) -> Var:
            value = total(x)
            for _ in range(products):
                value = mb.mul(x=value, y=HALF(1.5))
            return mb.sqrt(x=value)

        return form_of(last(body))

    form = length(21)
    assert form is not None
    assert len(form.steps) == 24
    assert length(22) is None


def test_the_larger_of_two_sums_is_no_product_of_them() -> None:
    """Sums of 16 squares are at most 16, and so is the larger of two; a product of both would be 256."""
    op = last(lambda x: mb.sqrt(x=mb.maximum(x=total(x), y=total(mb.abs(x=x)))))
    form = form_of(op)
    assert form is not None
    assert form.gains[op.x] == form.largest_square_sum == 16


def test_a_quotient_divides_the_gain_of_its_divisor() -> None:
    """sum(x * x) / |x| is 4 for 16 ones."""
    op = last(lambda x: mb.real_div(x=total(x), y=mb.sqrt(x=total(x))))
    form = form_of(op)
    assert form is not None
    assert form.gains[op.outputs[0]] == 4
    assert form.largest_square_sum == 16
