"""Lengths of dynamic axes: which are tried, what is told apart there, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol

from anesurgery.checking.comparison import compare
from anesurgery.checking.grades import Grade, summary
from anesurgery.checking.length_use import Use, use_of
from anesurgery.checking.lengths import Declared, declared_lengths
from anesurgery.checking.lockstep import ModelProof
from anesurgery.checking.trial_lengths import lengths_to_try
from anesurgery.errors import ProofError
from anesurgery.files.interface import new_spec
from anesurgery.files.package import Loaded
from anesurgery.mil import Program, Var, ct, mb
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.surgery import Surgery, apply

f, i = np.float32, np.int32
RNG = np.random.default_rng(0)
POSITIONS = RNG.standard_normal((2048, 2)).astype(f)
BAND = np.where(np.abs(np.subtract.outer(np.arange(30), np.arange(30))) < 22, 0, 1).astype(f)
RANGE, SHORT = ((1, 2048),), ((1, 30),)
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
    """A sum of rows, weighted by a square cut out of a table."""

    def body(b: Any, x: Var) -> Any:
        n = b.expand_dims(x=count(b, x), axes=[0])
        square = b.slice_by_size(x=mask, begin=[0, 0], size=b.concat(values=[n, n], axis=0))
        weights = b.expand_dims(x=b.reduce_sum(x=square, axes=[1], keep_dims=True), axes=[0])
        return b.reduce_sum(x=b.mul(x=x, y=weights), axes=[1])

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


def positive(b: Any, x: Var) -> Any:
    """How many numbers of each column are positive."""
    return b.reduce_sum(x=b.cast(x=b.greater(x=x, y=f(0)), dtype="fp32"), axes=[1])


def sliced(*ends: tuple[int | None, int | None]) -> Body:
    """The sum of rows that are sliced several times, from a begin to an end."""

    def body(b: Any, x: Var) -> Any:
        for begin, end in ends:
            ends_of_rows = {"begin": [0, begin or 0, 0], "end": [1, end or 0, 2]}
            masks = {"begin_mask": [True, begin is None, True], "end_mask": [True, end is None, True]}
            x = b.slice_by_index(x=x, **ends_of_rows, **masks)
        return b.reduce_sum(x=x, axes=[1])

    return body


def within(low: float, high: float, *added: float) -> Body:
    """The input, plus 1 if the length with some numbers added is within a range."""

    def body(b: Any, x: Var) -> Any:
        n = b.cast(x=count(b, x), dtype="fp32")
        for number in added:
            n = b.add(x=n, y=f(number))
        is_within = b.logical_and(x=b.greater(x=n, y=f(low)), y=b.less(x=n, y=f(high)))
        return b.add(x=x, y=b.cast(x=is_within, dtype="fp32"))

    return body


class Case(NamedTuple):
    """Two computations of one input, (1, length, 2), and the lengths that are declared."""

    old: Body
    new: Body
    declared: Any = RANGE


def twice(body: Body, *, turned: bool) -> Body:
    """A computation of twice the input, as a product in one order or the other."""
    return lambda b, x: body(b, b.mul(x=f(2), y=x) if turned else b.mul(x=x, y=f(2)))


WRONG = {
    "positions end at 1,000 or at 1,500": Case(clipped(1000), clipped(1500)),
    "the first 600 rows": Case(first(600), total),
    "a table that begins again": Case(repeated(700), repeated(650)),
    "a band of 22": Case(banded(BAND), banded(0 * BAND), SHORT),
    "a smallest length": Case(shortest(900), shortest(4096)),
    "a shape of a list": Case(first(2900), total, LISTED),
    "every fourth row": Case(by_four(False), by_four(True)),
    "the last length only": Case(first(2047), total),
    "how many are positive, up to 900": Case(lambda b, x: b.minimum(x=positive(b, x), y=f(900)), positive),
    "slices that meet at lengths 41 to 49 only": Case(
        sliced((13, None), (27, None), (None, 10), (-5, None)),
        sliced((13, None), (27, None), (None, 10), (5, 10)),
    ),
    "lengths between two that are no integers": Case(within(300.5, 310.5), lambda b, x: x),
    "lengths between two, with 50 added": Case(within(300, 307, 50), lambda b, x: x),
    "lengths between two, with 1 added often": Case(within(300, 304, *[1] * 7), lambda b, x: x),
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
"""What is computed of twice the input, the lengths that are declared, and whether a proof holds for each."""


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
    surgery = operated(Case(twice(body, turned=False), twice(body, turned=True), declared))
    (check,) = [change.proof for change in surgery.changes]
    assert check is not None
    assert (check.grade >= Grade.PROVED) is shown, check
    assert bool(check.lengths) is not shown


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_model_has_the_grade_that_it_was_shown(name: str) -> None:
    body, declared, shown = RIGHT[name]
    found = proof(Case(twice(body, turned=False), twice(body, turned=True), declared))
    assert found.proved is shown, found.lines
    assert ("checked on lengths 1 to " in found.words) is not shown


def test_what_is_said_of_other_lengths() -> None:
    """The report begins with the lengths that were tried, and says why others are not known."""
    body = clipped(1000)
    case = Case(twice(body, turned=False), twice(body, turned=True), None)
    surgery, found = operated(case), proof(case)
    (check,) = [change.proof for change in surgery.changes]
    assert check is not None
    assert check.to_json()["grade"] == "checked on lengths 1 to 4096"
    assert summary([check, check]).startswith(
        "2 checked on lengths 1 to 4096, 2 not proved: the model declares no"
    )
    assert found.to_json()["grade"] == "checked on lengths 1 to 4096"
    assert found.lines[0].startswith("not proved, but checked on lengths 1 to 4096 (")
    assert found.lines[1] == "other lengths are not proved: the model declares no largest length"
    with pytest.raises(ProofError, match=r"than 'proved'; first becomes at y \(checked on lengths 1 to 4096\)"):
        operated(case, require="proved")
    operated(case, require="checked")


def test_a_length_with_too_many_numbers_is_not_tried() -> None:
    square = lambda b, x: b.matmul(x=b.matmul(x=x, y=x, transpose_y=True), y=b.mul(x=x, y=clipped(1900)(b, x)))  # noqa: E731
    found = proof(Case(twice(square, turned=False), twice(square, turned=True), ((1, 4096),)))
    assert found.gap == "longer lengths take too many numbers"
    assert "checked on lengths 1 to 17" in found.words


def last_of(body: Body) -> Body:
    """The last row of a computation."""
    return lambda b, x: b.slice_by_index(
        x=body(b, x), begin=[0, -1, 0], end=[1, 0, 2], end_mask=[True, True, True]
    )


def test_an_interface_that_changes_is_compared_at_one_length() -> None:
    """What is selected of several positions is compared with the last of them, at the lengths of the inputs."""
    every, one = model(clipped(1000), RANGE), model(last_of(clipped(1000)), RANGE)
    found = compare(every, one, prove=True, last=True).proof
    assert found is not None
    assert "but checked on length 4 (" in found.words


OPS: dict[str, tuple[Body, Use]] = {
    "pointwise": (lambda b, x: b.add(x=x, y=b.exp(x=x)), Use.ALIKE),
    "a row for all": (lambda b, x: b.mul(x=x, y=np.ones((1, 1, 2), f)), Use.ALIKE),
    "a table of rows": (lambda b, x: b.mul(x=x, y=np.ones((1, 700, 2), f)), Use.NUMBERS),
    "softmax of all rows": (lambda b, x: b.softmax(x=x, axis=1), Use.ALIKE),
    "a mean of all rows": (lambda b, x: b.reduce_mean(x=x, axes=[1]), Use.ALIKE),
    "attention": (lambda b, x: b.matmul(x=b.matmul(x=x, y=x, transpose_y=True), y=x), Use.ALIKE),
    "a weight of rows": (lambda b, x: b.matmul(x=np.ones((3, 700), f), y=x), Use.NUMBERS),
    "a norm of rows": (lambda b, x: b.layer_norm(x=x, axes=[2], epsilon=f(1e-5)), Use.ALIKE),
    "rows in another order": (lambda b, x: b.transpose(x=x, perm=[1, 0, 2]), Use.ALIKE),
    "heads": (lambda b, x: b.reshape(x=x, shape=[-1, 1, 2]), Use.ALIKE),
    "heads by the shape": (
        lambda b, x: b.reshape(
            x=x, shape=b.concat(values=[b.expand_dims(x=count(b, x), axes=[0]), np.array([2], i)], axis=0)
        ),
        Use.ALIKE,
    ),
    "rows in fours": (lambda b, x: b.reshape(x=x, shape=[-1, 4, 2]), Use.LOCAL),
    "half of each row": (
        lambda b, x: b.slice_by_index(
            x=x, begin=[0, 0, 0], end=[1, 9, 1], end_mask=[True, True, False], begin_mask=[True] * 3
        ),
        Use.ALIKE,
    ),
    "the first rows": (first(600), Use.LOCAL),
    "a window": (
        lambda b, x: b.max_pool(
            x=b.transpose(x=x, perm=[0, 2, 1]), kernel_sizes=[3], strides=[2], pad_type="valid"
        ),
        Use.LOCAL,
    ),
    "one more row": (lambda b, x: b.concat(values=[x, np.ones((1, 1, 2), f)], axis=1), Use.LOCAL),
    "the order of rows": (lambda b, x: b.argsort(x=x, axis=1), Use.NUMBERS),
    "sums so far": (lambda b, x: b.cumsum(x=x, axis=1), Use.ALIKE),
    "how many are positive": (lambda b, x: positive(b, x), Use.NUMBERS),
    "rows by constant places": (
        lambda b, x: b.gather(x=x, indices=np.arange(700, dtype=i), axis=1),
        Use.NUMBERS,
    ),
    "the length": (lambda b, x: b.add(x=x, y=b.cast(x=count(b, x), dtype="fp32")), Use.NUMBERS),
    "positions": (clipped(1000), Use.NUMBERS),
    "angles of positions": (
        lambda b, x: b.add(
            x=x, y=b.expand_dims(x=b.cos(x=b.mul(x=b.cast(x=places(b, x), dtype="fp32"), y=f(0.1))), axes=[1])
        ),
        Use.NUMBERS,
    ),
    "half of the length": (
        lambda b, x: b.range_1d(start=i(0), end=b.floor_div(x=count(b, x), y=i(2)), step=i(1)),
        Use.SCALED,
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_how_ops_use_a_length(name: str) -> None:
    body, use = OPS[name]
    program = model(body, None)
    assert isinstance(program, Program)
    assert use_of([program.functions["main"].operations]).kind is use


def longer(b: Any, x: Var, z: Var) -> Any:
    """By how much, less 3, one input is longer than the other."""
    return b.add(x=b.sub(x=count(b, z), y=count(b, x)), y=i(-3))


def with_0(b: Any, x: Var, z: Var) -> Any:
    return b.cast(x=b.stack(values=[i(0), longer(b, x, z)], axis=0), dtype="fp32")


MEETING: dict[str, tuple[Callable[[Any, Var, Var], Any], bool]] = {
    "a difference as a boolean": (lambda b, x, z: b.cast(x=longer(b, x, z), dtype="bool"), True),
    "the larger one": (lambda b, x, z: b.reduce_max(x=with_0(b, x, z)), True),
    "which one is larger": (lambda b, x, z: b.reduce_argmax(x=with_0(b, x, z), axis=0), True),
    "the order of both": (lambda b, x, z: b.argsort(x=with_0(b, x, z), axis=0), True),
    "a difference that is looked up": (
        lambda b, x, z: b.one_hot(indices=b.expand_dims(x=longer(b, x, z), axes=[0]), one_hot_vector_size=i(3)),
        True,
    ),
    "from one to the other": (lambda b, x, z: b.range_1d(start=count(b, x), end=count(b, z), step=i(1)), True),
    "places of one": (lambda b, x, z: b.mul(x=places(b, x), y=count(b, z)), False),
    "a square of both": (
        lambda b, x, z: b.fill(shape=b.stack(values=[count(b, x), count(b, z)], axis=0), value=f(1)),
        False,
    ),
}
"""What is computed of the lengths of two inputs, and whether these are compared."""


@pytest.mark.parametrize("name", MEETING)
def test_two_lengths_that_meet_are_compared(name: str) -> None:
    body, joint = MEETING[name]
    specs = [mb.TensorSpec((1, get_new_symbol(), 2)) for _ in range(2)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(x: Var, z: Var) -> Any:
        return body(mb, x, z)

    assert use_of([program.functions["main"].operations]).joint is joint


@pytest.mark.parametrize(("high", "gap"), [(8, ""), (30, "several lengths are compared with each other")])
def test_places_of_two_joined_values_are_known_where_all_combinations_are_tried(high: int, gap: str) -> None:
    """The wrong version: each length alone and all together, so that (5, 2) was never tried."""
    s, t = get_new_symbol(), get_new_symbol()

    @mb.program(input_specs=[mb.TensorSpec((1, n, 2)) for n in (s, t)], opset_version=ct.target.iOS17)
    def program(x: Var, z: Var) -> Any:
        return first(3)(mb, mb.concat(values=[x, z], axis=1))

    main = program.functions["main"]
    ranges = Declared({s: (1, high), t: (1, high)})
    plan = lengths_to_try([*main.inputs.values()], [main.operations], declared=ranges)
    assert ({s: 5, t: 2} in plan.all) == (not gap)
    assert plan.gap == gap


def test_the_lengths_of_several_inputs_are_declared() -> None:
    """A range of each; or a list, of which the shapes of one place go together."""
    s, t = get_new_symbol(), get_new_symbol()
    specs = [mb.TensorSpec((1, s)), mb.TensorSpec((t, 2))]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(x: Var, z: Var) -> Any:
        return mb.relu(x=x), mb.relu(x=z)

    spec = new_spec(program, 8)
    x, z = (feature.type.multiArrayType for feature in spec.description.input)
    for array, ranges in ((x, ((1, 1), (3, 2048))), (z, ((5, -1), (2, 2)))):
        array.ClearField("shapeRange")
        for low, high in ranges:
            array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)
    assert dict(declared_lengths(program, spec).ranges) == {s: (3, 2048), t: (5, None)}
    for array, shapes in ((x, ([1, 3], [1, 4])), (z, ([5, 2], [8, 2]))):
        array.ClearField("shapeRange")
        for shape in shapes:
            array.enumeratedShapes.shapes.add(shape=shape)
    assert declared_lengths(program, spec).together([s, t]) == [{s: 3, t: 5}, {s: 4, t: 8}]


def test_a_constant_meets_a_size_that_is_made_of_the_length() -> None:
    """2 s is 600 where s is 300."""

    @mb.program(input_specs=[mb.TensorSpec((1, get_new_symbol(), 4))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        return first(600)(mb, mb.reshape(x=x, shape=[1, -1, 2]))

    main = program.functions["main"]
    plan = lengths_to_try([*main.inputs.values()], [main.operations])
    assert {299, 300, 301} <= {n for lengths in plan.all for n in lengths.values()}
    assert not plan.gap


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("least", [1, 64])
def test_each_remainder_of_a_stride_is_tried(least: int, numbers: bool) -> None:
    """Windows of 4 are alike at lengths of one remainder, wherever the declared range begins."""

    @mb.program(input_specs=[mb.TensorSpec((1, 3, get_new_symbol()))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        y = mb.max_pool(x=x, kernel_sizes=[4], strides=[4], pad_type="valid")
        return (y, mb.greater(x=count(mb, x, 2), y=i(700))) if numbers else y

    main = program.functions["main"]
    (symbol,) = (d for d in main.inputs["x"].shape if not isinstance(d, int))
    plan = lengths_to_try(
        [*main.inputs.values()], [main.operations], declared=Declared({symbol: (least, 1000)})
    )
    beyond = [n for lengths in plan.all for n in lengths.values() if max(least, 16) <= n < 690]
    assert {n % 4 for n in beyond} == {0, 1, 2, 3}
    assert not plan.gap


def test_strides_of_two_axes_repeat_after_their_common_multiple() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 1, get_new_symbol(), get_new_symbol()))])
    def program(x: Var) -> Any:
        return mb.max_pool(x=x, kernel_sizes=[2, 3], strides=[2, 3], pad_type="valid")

    assert use_of([program.functions["main"].operations]).period == 6


def test_too_many_places_leave_lengths_unknown() -> None:
    """Seven slices may meet at more lengths than are tried; seven rows fewer meet at few."""

    def gap(*begins: int) -> str:
        program = model(sliced(*((begin, None) for begin in begins)), None)
        assert isinstance(program, Program)
        main = program.functions["main"]
        return lengths_to_try([*main.inputs.values()], [main.operations]).gap

    assert gap(3, 10, 31, 94, 283, 850, 2551) == "too many constants name places along the length"
    assert not gap(1, 1, 1, 1, 1, 1, 600)
