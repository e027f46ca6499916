"""What the driver replaces, names and cleans up, in any order of outputs and inner values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from small_rewrites import DoubleRelu, kinds, one_input, outputs, small_rewrite

from anesurgery.checking.grades import REASSOCIATED, Tolerance
from anesurgery.errors import PassError, Refusal
from anesurgery.files.interface import InterfaceChange
from anesurgery.mil import Array, Program, Var, mb, types, walk_ops
from anesurgery.passes.negate_subtract import NegateSubtract
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.passes import run_pass
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.rewriting.session import Session
from anesurgery.testing import apply_pass, assert_same_numbers

# Replacing


DropRelu = small_rewrite(
    "drop_relu",
    lambda op: op.relu(x=op.abs(x=var("x"), as_="inner")),
    lambda mb, m: m.inner.outputs[0],
    shares_inner=True,
)
"""`relu(abs(x))` is `abs(x)`."""


def test_a_value_that_exists_already_takes_its_place() -> None:
    program = one_input(lambda x: mb.exp(x=mb.relu(x=mb.abs(x=x, name="a")), name="y"))
    after, _ = apply_pass(DropRelu(), program)
    assert kinds(after) == ["abs", "exp"]
    assert_same_numbers(program, after)


def test_an_output_that_becomes_another_output() -> None:
    def body(x: Var) -> Any:
        a = mb.abs(x=x, name="a")
        return a, mb.relu(x=a, name="r")

    program = one_input(body)
    after, _ = apply_pass(DropRelu(), program)
    assert outputs(after) == ["a", "r"]
    assert kinds(after) == ["abs", "identity"]
    assert_same_numbers(program, after)


def test_an_output_that_becomes_an_inner_value_keeps_its_name() -> None:
    program = one_input(lambda x: mb.relu(x=mb.abs(x=x, name="a"), name="r"))
    after, _ = apply_pass(DropRelu(), program)
    assert outputs(after) == ["r"]
    assert_same_numbers(program, after)


DropIdentity = small_rewrite("drop_zero", lambda op: op.add(x=var("x"), y=var("zero")), lambda mb, m: m.x)
"""`x + 0` is `x`."""


def test_an_output_that_becomes_an_input() -> None:
    program = one_input(lambda x: mb.add(x=x, y=np.float32(0), name="y"))
    after, _ = apply_pass(DropIdentity(), program)
    assert outputs(after) == ["y"]
    assert kinds(after) == ["identity"]
    assert list(after.functions["main"].inputs) == ["x"]
    assert_same_numbers(program, after)


@dataclass(frozen=True)
class SplitByHand(Rewrite):
    """A split in two becomes slices; `only` may ask for the first output alone."""

    name: ClassVar[str] = "split_by_hand"
    only: int = 2

    def pattern(self, op: Ops) -> OpPattern:
        return op.split(x=var("x"))

    def rewrite(self, mb: Builder, m: Match) -> Any:
        first = mb.slice_by_size(x=m.x, begin=[0, 0], size=[2, 2])
        if self.only == 1:
            return {m.root.outputs[0]: first}
        return first, mb.slice_by_size(x=m.x, begin=[0, 2], size=[2, 2])


def halves(x: Var) -> Any:
    a, b = mb.split(x=x, num_splits=2, axis=1, name="s")
    return a, mb.exp(x=b, name="e")


def test_an_op_of_several_outputs() -> None:
    program = one_input(halves, (2, 4))
    after, session = apply_pass(SplitByHand(), program)
    assert kinds(after) == ["slice_by_size", "slice_by_size", "exp"]
    assert outputs(after) == outputs(program)
    assert session.changes[0].proof
    assert_same_numbers(program, after)


def test_one_of_several_outputs() -> None:
    """The other output keeps the old op alive, whose first output then has another name."""
    program = one_input(halves, (2, 4))
    after = apply_pass_once(SplitByHand(only=1), program)
    assert kinds(after) == ["slice_by_size", "split", "exp"]
    assert outputs(after) == outputs(program)
    assert_same_numbers(program, after)
    assert_unique_names(after)


def apply_pass_once(step: Rewrite, program: Program) -> Program:
    """One round over the ops as they are (a pass that keeps its root has no fixed point)."""

    @dataclass(frozen=True)
    class Once(type(step)):  # type: ignore[misc]
        def check(self, m: Match) -> Match | None:
            first = m.root.outputs[0]
            return m if first.child_ops or first.consuming_blocks else None

    return apply_pass(Once(**step.options()), program)[0]


@dataclass(frozen=True)
class Region(Rewrite):
    """`exp(x)` and `relu(exp(x))`, both read, are made anew at once."""

    name: ClassVar[str] = "region"

    def pattern(self, op: Ops) -> OpPattern:
        return op.relu(x=var("e"))

    def check(self, m: Match) -> Match | Refusal | None:
        return m if m.e.op is not None and m.e.op.op_type == "exp" else None

    def rewrite(self, mb: Builder, m: Match) -> Mapping[Var, Var]:
        before = mb.before(m.e.op)
        half = before.exp(x=before.mul(x=m.e.op.x, y=np.float32(0.5)))
        square = before.mul(x=half, y=half)
        return {m.e: square, m.root.outputs[0]: mb.abs(x=square)}

    tolerance: ClassVar[Tolerance] = REASSOCIATED


def test_a_region_with_two_results() -> None:
    def body(x: Var) -> Any:
        e = mb.exp(x=x, name="e")
        between = mb.sqrt(x=e, name="between")
        return mb.relu(x=e, name="r"), between, e

    program = one_input(body)
    after, session = apply_pass(Region(), program)
    assert kinds(after) == ["mul", "exp", "mul", "sqrt", "abs"]
    assert outputs(after) == ["r", "between", "e"]
    assert sorted(session.changes[0].before) == ["exp e", "relu r"]
    assert_same_numbers(program, after, rtol=1e-5)


def test_two_outputs_that_become_one_value_keep_both_names() -> None:
    @dataclass(frozen=True)
    class Same(Rewrite):
        name: ClassVar[str] = "same"

        def pattern(self, op: Ops) -> OpPattern:
            return op.relu(x=op.relu(x=var("x"), as_="inner"))

        shares_inner: ClassVar[bool] = True

        def rewrite(self, mb: Builder, m: Match) -> Any:
            new = mb.before(m.inner).maximum(x=m.x, y=np.float32(0))
            return {m.inner.outputs[0]: new, m.root.outputs[0]: new}

    def body(x: Var) -> Any:
        inner = mb.relu(x=x, name="first")
        return inner, mb.relu(x=inner, name="second"), mb.exp(x=inner, name="third")

    program = one_input(body)
    after, _ = apply_pass(Same(), program)
    assert outputs(after) == ["first", "second", "third"]
    assert len(set(after.functions["main"].outputs)) == 3
    assert_unique_names(after)
    assert_same_numbers(program, after)


# Names, scopes, constants


def assert_unique_names(program: Program) -> None:
    for function in program.functions.values():
        names = [op.name for op in walk_ops(function)]
        assert len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)
        values = [v.name for op in walk_ops(function) for v in op.outputs] + list(function.inputs)
        assert len(set(values)) == len(values), sorted(v for v in values if values.count(v) > 1)


def test_names_stay_unique_over_many_edits_and_passes() -> None:
    def body(x: Var) -> Any:
        for i in range(15):
            x = mb.sub(x=mb.sub(x=np.float32(i), y=x), y=mb.exp(x=x))
        return mb.sub(x=x, y=x, name="y")

    program = one_input(body)
    after, session = apply_pass(NegateSubtract(), program)
    assert len(session.changes) == 31
    assert_unique_names(after)
    assert outputs(after) == ["y"]

    @dataclass(frozen=True)
    class Back(Rewrite):
        name: ClassVar[str] = "negate_subtract"  # wants the very names that are taken

        def pattern(self, op: Ops) -> OpPattern:
            return op.add(x=var("x"), y=op.mul(x=var("y"), y=var("minus_one")))

        def rewrite(self, mb: Builder, m: Match) -> Any:
            return mb.sub(x=m.x, y=mb.mul(x=m.y, y=np.float32(1)))

    again, second = apply_pass(Back(), after)
    assert second.changes
    assert_unique_names(again)
    assert_same_numbers(program, again)


def test_new_ops_bear_the_name_of_what_they_replace_and_its_scopes() -> None:
    from coremltools.converters.mil.mil.scope import ScopeInfo, ScopeSource

    with mb.scope(ScopeInfo(ScopeSource.TORCHSCRIPT_MODULE_TYPE, ["Layer"])):
        program = one_input(lambda x: mb.sub(x=x, y=mb.exp(x=x), name="y"))
    sub = next(op for op in walk_ops(program) if op.op_type == "sub")
    expected = dict(sub.scopes)
    run_pass(NegateSubtract(), program, Session())
    new = [op for op in walk_ops(program) if op.op_type in ("add", "mul")]
    assert [op.name for op in new] == ["y_negate_subtract_mul", "y"]
    assert all(dict(op.scopes) == expected for op in new)


@dataclass(frozen=True)
class AddsShared(Rewrite):
    """`exp(x)` becomes `exp(x) * ones`, with the ones shared by all, made once per rank."""

    name: ClassVar[str] = "adds_shared"
    made: ClassVar[list[int]] = []

    def pattern(self, op: Ops) -> OpPattern:
        return op.exp(x=var("x"))

    def check(self, m: Match) -> Match | None:
        return m if not any(op.op_type == "mul" for op in m.root.outputs[0].child_ops) else None

    def rewrite(self, mb: Builder, m: Match) -> Any:
        def make() -> Array:
            self.made.append(1)
            return np.ones((1, 3), np.float32)

        return mb.mul(x=mb.exp(x=m.x), y=mb.shared(("ones", 3), make, "ones"))


def test_shared_constants_are_made_once_and_stand_first() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((1,), dtype=types.bool)])
    def program(x: Var, flag: Var) -> Any:
        nested = mb.cond(pred=mb.squeeze(x=flag), _true_fn=lambda: mb.exp(x=x), _false_fn=lambda: mb.abs(x=x))
        return nested, mb.exp(x=mb.exp(x=x))

    AddsShared.made.clear()
    after, session = apply_pass(AddsShared(), program)
    assert len(session.changes) == 3
    assert AddsShared.made == [1]
    ones = [op for op in walk_ops(after) if op.name == "ones"]
    assert len(ones) == 1
    assert after.functions["main"].operations[0] is ones[0]
    assert_same_numbers(program, after)


def test_what_a_rewrite_makes_and_does_not_use_is_removed() -> None:
    @dataclass(frozen=True)
    class Wasteful(DoubleRelu):
        name: ClassVar[str] = "wasteful"

        def rewrite(self, mb: Builder, m: Match) -> Any:
            mb.exp(x=mb.abs(x=m.x))
            return mb.relu(x=m.x)

    program = one_input(lambda x: mb.relu(x=mb.relu(x=x)))
    after, session = apply_pass(Wasteful(), program)
    assert kinds(after) == ["relu"]
    assert len(session.changes[0].after) == 1


# Interface changes


@dataclass(frozen=True)
class ScaleAsInput(Rewrite):
    """A constant factor becomes an input."""

    name: ClassVar[str] = "scale_as_input"

    def pattern(self, op: Ops) -> OpPattern:
        return op.mul(x=var("x"), y=var("factor"))

    def check(self, m: Match) -> Match | None:
        return m if m.factor.op is not None else None

    def rewrite(self, mb: Builder, m: Match) -> Any:
        value = np.full((1, 1), m.factor.val, np.float32)
        change = InterfaceChange("give the scale", ("scale",), inputs=lambda values: {**values, "scale": value})
        return mb.mul(x=m.x, y=mb.add_input((1, 1), types.fp32, change))

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> Array | None:
        return np.full((1, 1), m.factor.val, np.float32) if var.name == "scale" else None


def test_a_declared_input_is_added_once() -> None:
    def body(x: Var) -> Any:
        return mb.mul(x=mb.exp(x=mb.mul(x=x, y=np.float32(0.5))), y=np.float32(0.5), name="y")

    program = one_input(body)
    after, session = apply_pass(ScaleAsInput(), program)
    assert list(after.functions["main"].inputs) == ["x", "scale"]
    assert [change.names for change in session.contract] == [("scale",)]
    assert_same_numbers(program, after, session=session)


def test_an_input_that_exists_is_not_taken() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((1, 1))])
    def program(x: Var, scale: Var) -> Any:
        return mb.add(x=mb.mul(x=x, y=np.float32(0.5)), y=scale)

    with pytest.raises(PassError, match="there is an input named scale already"):
        apply_pass(ScaleAsInput(), program)
