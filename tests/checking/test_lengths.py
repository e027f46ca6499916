"""Lengths of dynamic axes: which are tried, what is told apart there, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol

from anesurgery.checking.comparison import compare
from anesurgery.checking.grades import Grade
from anesurgery.checking.length_use import Use, use_of
from anesurgery.checking.lengths import Declared, declared_lengths, symbols_of
from anesurgery.checking.model_proofs import ModelProof
from anesurgery.checking.trial_lengths import plan_of
from anesurgery.errors import ProofError
from anesurgery.files.description import new_spec
from anesurgery.files.package import Loaded
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.surgery import Surgery, apply

f, i = np.float32, np.int32
RNG = np.random.default_rng(0)
POSITIONS = RNG.standard_normal((2048, 2)).astype(f)
BAND = np.where(np.abs(np.subtract.outer(np.arange(1024), np.arange(1024))) < 800, 0, 1).astype(f)
RANGE, LONG, SHORT = ((1, 2048),), ((1, 4096),), ((1, 1024),)
LISTED = ((1,), (512,), (3000,))
Body = Callable[[Any, Var], Any]


def count(b: Any, x: Var, axis: int = 1) -> Any:
    """The length of an axis."""
    return b.gather(x=b.shape(x=x), indices=i(axis), axis=i(0))


def places(b: Any, x: Var) -> Any:
    return b.range_1d(start=i(0), end=count(b, x), step=i(1))


def clipped(end: int) -> Body:
    """Positions of a table, up to the last that is used."""
    return lambda b, x: b.add(
        x=x, y=b.gather(x=POSITIONS, indices=b.minimum(x=places(b, x), y=i(end)), axis=i(0))
    )


def first(end: int) -> Body:
    """The sum of the first rows."""
    return lambda b, x: b.reduce_sum(
        x=b.slice_by_index(x=x, begin=[0, 0, 0], end=[1, end, 2], end_mask=[True, False, True]), axes=[1]
    )


def total(b: Any, x: Var) -> Any:
    return b.reduce_sum(x=x, axes=[1])


def repeated(rows: int) -> Body:
    """Positions begin again after some rows."""
    return lambda b, x: b.add(
        x=x, y=b.gather(x=POSITIONS[:700], indices=b.mod(x=places(b, x), y=i(rows)), axis=i(0))
    )


def banded(mask: Any) -> Body:
    """Rows are mixed by a square cut out of a table."""

    def body(b: Any, x: Var) -> Any:
        n = b.expand_dims(x=count(b, x), axes=[0])
        square = b.slice_by_size(x=mask, begin=[0, 0], size=b.concat(values=[n, n], axis=0))
        return b.add(x=x, y=b.expand_dims(x=b.reduce_sum(x=square, axes=[1], keep_dims=True), axes=[0]))

    return body


def shortest(end: int) -> Body:
    """The mean by a length that does not grow forever."""

    def body(b: Any, x: Var) -> Any:
        n = b.cast(x=b.minimum(x=count(b, x), y=i(end)), dtype="fp32")
        return b.real_div(x=b.reduce_sum(x=x, axes=[1]), y=n)

    return body


def by_four(turned: bool) -> Body:
    """Sums of four rows, or of every fourth one: the same where there are four."""

    def body(b: Any, x: Var) -> Any:
        shape = [4, -1, 2] if turned else [-1, 4, 2]
        return b.reduce_sum(x=b.reduce_max(x=b.reshape(x=x, shape=shape), axes=[0 if turned else 1]), axes=[0])

    return body


def reversed_sum(b: Any, x: Var) -> Any:
    return b.reduce_sum(x=b.reverse(x=x, axes=[1]), axes=[1])


class Case(NamedTuple):
    """Two computations of one input, (1, length, 2), and the lengths that are declared."""

    old: Body
    new: Body
    declared: Any = RANGE


def positive(body: Body, op: str) -> Body:
    """A computation of what is positive in the input."""
    operand = {} if op == "relu" else {"y": f(0)}
    return lambda b, x: body(b, getattr(b, op)(x=x, **operand))


WRONG = {
    "positions end at 1,000 or at 1,500": Case(clipped(1000), clipped(1500)),
    "the first 600 rows": Case(first(600), total),
    "a table that begins again": Case(repeated(700), repeated(650)),
    "a band of 800": Case(banded(BAND), banded(0 * BAND), SHORT),
    "a smallest length": Case(shortest(900), shortest(4096)),
    "a shape of a list": Case(first(2900), total, LISTED),
    "every fourth row": Case(by_four(False), by_four(True)),
    "the last length only": Case(first(2047), total),
    "no lengths are declared": Case(clipped(1000), clipped(1500), None),
}
RIGHT = {
    "rows by themselves": (lambda b, x: x, RANGE, True),
    "rows by themselves, whatever is declared": (lambda b, x: x, None, True),
    "a sum of all rows": (total, None, True),
    "the first 600 rows": (first(600), RANGE, True),
    "the first 600 rows of any number": (first(600), None, True),
    "positions": (clipped(1000), RANGE, True),
    "positions of any length": (clipped(1000), None, False),
    "positions that begin again": (repeated(700), RANGE, False),
    "shapes of a list": (first(2900), LISTED, True),
}
"""What is computed of a relu, the lengths that are declared, and whether a proof holds for each of them."""


@dataclass(frozen=True)
class Becomes(Rewrite):
    """The value %y becomes another computation of the input."""

    name: ClassVar[str] = "becomes"
    new: Body = field(default=total)

    def pattern(self, op: Ops) -> OpPattern:
        return op.identity(x=var("x"))

    def rewrite(self, mb: Builder, m: Match) -> Any:
        return self.new(mb, m.block.inputs["x"])


def model(body: Body, declared: Any) -> Loaded | Program:
    """A program of rows; one of a specification where lengths are declared: a range, or a list."""

    @mb.program(input_specs=[mb.TensorSpec((1, get_new_symbol(), 2))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.identity(x=body(mb, x), name="y")

    if declared is None:
        return program
    spec = new_spec(program, 8)
    array = next(feature.type.multiArrayType for feature in spec.description.input)
    array.ClearField("shapeRange")
    if len(declared) > 1:
        for (length,) in declared:
            array.enumeratedShapes.shapes.add(shape=[1, length, 2])
    else:
        for low, high in ((1, 1), declared[0], (2, 2)):
            array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)
    return Loaded(program, spec)


def operated(case: Case, **options: Any) -> Surgery:
    return apply(model(case.old, case.declared), Becomes(case.new), quiet=True, **options)


def proof(case: Case) -> ModelProof:
    found = compare(model(case.old, case.declared), model(case.new, case.declared), prove=True).proof
    assert found is not None
    return found


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_edit_is_told_apart_where_lengths_differ(name: str) -> None:
    with pytest.raises(ProofError, match="old and new differ"):
        operated(WRONG[name])


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_model_is_told_apart_where_lengths_differ(name: str) -> None:
    found = proof(WRONG[name])
    assert found.grade is None
    assert "give another y" in found.words


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_edit_has_the_grade_that_it_was_shown(name: str) -> None:
    body, declared, shown = RIGHT[name]
    surgery = operated(Case(positive(body, "relu"), positive(body, "maximum"), declared))
    (check,) = [change.proof for change in surgery.changes]
    assert check is not None
    assert (check.grade >= Grade.PROVED) is shown, check
    assert bool(check.lengths) is not shown


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_model_has_the_grade_that_it_was_shown(name: str) -> None:
    body, declared, shown = RIGHT[name]
    found = proof(Case(positive(body, "relu"), positive(body, "maximum"), declared))
    assert found.proved is shown, found.lines
    assert ("checked on lengths 1 to " in found.words) is not shown
