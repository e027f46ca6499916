"""Checks of sites: what is computed, what is drawn, what counts as equal, and what cannot be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from both_sides import checked
from coremltools.converters.mil.mil import get_new_symbol

from anesurgery.checking.addresses import address_bounds
from anesurgery.checking.adversarial import ROUNDS, Drawing
from anesurgery.checking.grades import Grade, SiteCheck, Tolerance
from anesurgery.checking.lengths import SYMBOL_LENGTH
from anesurgery.checking.site import LARGEST_SITE
from anesurgery.checking.trial_lengths import APART_LENGTHS, LONG_LENGTH
from anesurgery.errors import ProofError
from anesurgery.facts.dependence import slice_back
from anesurgery.interpret import TABLE
from anesurgery.mil import Array, Program, Var, ct, mb, types, walk_ops
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.testing import apply_pass


def program_of(body: Any, shape: tuple[Any, ...] = (2, 3), dtype: Any = types.fp32) -> Program:
    specs = [mb.TensorSpec(shape, dtype=dtype)]
    made: Program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(lambda x: body(x))
    return made


@dataclass(frozen=True)
class Swap(Rewrite):
    """An op of type `old` becomes one of type `new`, on the same operands."""

    name: ClassVar[str] = "swap"
    old: str = "sqrt"
    new: str = "identity"

    def pattern(self, op: Ops) -> OpPattern:
        return op.any(self.old)(x=var("x"))

    def rewrite(self, mb: Builder, m: Match) -> Any:
        return getattr(mb, self.new)(x=m.x)


@dataclass(frozen=True)
class Maximum(Swap):
    """A relu becomes a maximum with 0, which is right."""

    old: str = "relu"

    def rewrite(self, mb: Builder, m: Match) -> Any:
        return mb.maximum(x=m.x, y=np.float32(0))


@dataclass(frozen=True)
class Thrice(Swap):
    """Three times x becomes a sum, which rounds alike."""

    old: str = "mul"

    def rewrite(self, mb: Builder, m: Match) -> Any:
        return mb.add(x=mb.add(x=m.x, y=m.x), y=m.x)


def proof_of(step: Rewrite, program: Program) -> SiteCheck:
    _, session = apply_pass(step, program)
    (change,) = session.changes
    assert change.proof is not None, change.unchecked
    return change.proof


def unchecked(step: Rewrite, program: Program) -> str:
    _, session = apply_pass(step, program)
    (change,) = session.changes
    assert change.proof is None
    return change.unchecked


def test_only_the_site_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ops before it make is drawn: they are not even known here."""
    monkeypatch.delitem(TABLE, "cos")
    program = program_of(lambda x: mb.relu(x=mb.cos(x=mb.reduce_sum(x=x, axes=[0]))), (500, 3))
    assert proof_of(Maximum(), program).values % 3 == 0


def test_values_and_elements() -> None:
    proof = proof_of(Maximum(), program_of(lambda x: mb.relu(x=x), (4, 5)))
    assert (proof.values, proof.grade) == (20, Grade.BITS)
    proof = proof_of(Thrice(), program_of(lambda x: mb.mul(x=x, y=np.float32(3)), (4, 5)))
    assert (proof.max_abs, proof.max_rel, proof.grade) == (0, 0, Grade.PROVED)
    assert proof.values > 20 * len(ROUNDS)


def test_what_the_old_side_does_not_define_is_left_out() -> None:
    """The root of a negative number is not a number; what stands there now does not matter."""

    @dataclass(frozen=True)
    class Root(Swap):
        def rewrite(self, mb: Builder, m: Match) -> Any:
            return mb.sqrt(x=mb.abs(x=m.x))

        def check(self, m: Match) -> Match | None:
            return None if m.x.op is not None else m

        tolerates_nonfinite: ClassVar[bool] = False

    proof = proof_of(Root(), program_of(lambda x: mb.sqrt(x=x), (50, 2)))
    assert proof.max_abs == 0
    assert proof.values > 0


def test_a_new_infinity_or_nan_is_a_difference() -> None:
    @dataclass(frozen=True)
    class ToNan(Swap):
        def rewrite(self, mb: Builder, m: Match) -> Any:
            return mb.log(x=mb.mul(x=mb.abs(x=m.x), y=np.float32(-1)))

    @dataclass(frozen=True)
    class ToInfinity(Swap):
        def rewrite(self, mb: Builder, m: Match) -> Any:
            return mb.real_div(x=m.x, y=np.float32(0))

    for step in (ToNan("exp"), ToInfinity("exp")):
        with pytest.raises(ProofError, match="differ by inf"):
            apply_pass(step, program_of(lambda x: mb.exp(x=x)))


def test_equal_infinities_are_equal() -> None:
    def body(x: Var) -> Any:
        return mb.relu(x=mb.mul(x=mb.abs(x=x), y=np.float32(np.inf)))

    @dataclass(frozen=True)
    class Twice(Rewrite):
        name: ClassVar[str] = "twice"

        def pattern(self, op: Ops) -> OpPattern:
            return op.relu(x=op.mul(x=op.abs(x=var("x")), y=var("y")))

        def rewrite(self, mb: Builder, m: Match) -> Any:
            return mb.mul(x=mb.abs(x=m.x), y=m.y)

    assert proof_of(Twice(), program_of(body)).max_abs == 0


def test_a_matched_inner_value_is_computed_where_the_new_side_reads_it() -> None:
    """`relu(abs(x))` is `abs(x)`, though it is not so for numbers drawn in place of `abs(x)`."""

    @dataclass(frozen=True)
    class Drop(Rewrite):
        name: ClassVar[str] = "drop"
        shares_inner: ClassVar[bool] = True

        def pattern(self, op: Ops) -> OpPattern:
            return op.relu(x=op.abs(x=var("x"), as_="inner"))

        def rewrite(self, mb: Builder, m: Match) -> Any:
            return mb.mul(x=m.inner.outputs[0], y=np.float32(1))

    def body(x: Var) -> Any:
        for _ in range(LARGEST_SITE + 10):
            x = mb.sin(x=x)
        return mb.relu(x=mb.abs(x=x))

    assert proof_of(Drop(), program_of(body)).max_abs == 0  # and what stands before does not count


def test_a_site_that_depends_on_too_much() -> None:
    """The new side reads a value far before the old root, so all between would be run."""

    @dataclass(frozen=True)
    class Far(Rewrite):
        name: ClassVar[str] = "far"

        def pattern(self, op: Ops) -> OpPattern:
            return op.cos(x=var("x"))

        def rewrite(self, mb: Builder, m: Match) -> Any:
            first = next(op for op in m.block.operations if op.op_type == "sin").x
            return mb.mul(x=first, y=np.float32(2))

    def body(x: Var) -> Any:
        for _ in range(LARGEST_SITE):
            x = mb.sin(x=x)
        return mb.cos(x=x)

    assert unchecked(Far(), program_of(body)) == f"depends on {LARGEST_SITE + 1} ops"


def test_an_op_that_the_interpreter_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TABLE, "erf")
    reason = unchecked(Swap("erf", "tanh"), program_of(lambda x: mb.erf(x=x)))
    assert "does not know 'erf'" in reason


def test_symbolic_dimensions_get_a_length() -> None:
    program = program_of(lambda x: mb.relu(x=x), (get_new_symbol(), 4))
    assert proof_of(Maximum(), program).values == 4 * (SYMBOL_LENGTH + APART_LENGTHS[0] + LONG_LENGTH + 1)


def test_what_is_no_tensor_cannot_be_drawn() -> None:
    def body(x: Var) -> Any:
        ls = mb.make_list(init_length=1, elem_shape=(2, 3), dtype="fp32")
        ls = mb.list_write(ls=ls, index=0, value=x)
        return mb.list_read(ls=ls, index=0)

    @dataclass(frozen=True)
    class Again(Rewrite):
        name: ClassVar[str] = "again"

        def pattern(self, op: Ops) -> OpPattern:
            return op.list_read(ls=var("ls"), index=var("index"))

        def check(self, m: Match) -> Match | None:
            return m if m.root.name.startswith("list_read") else None

        def rewrite(self, mb: Builder, m: Match) -> Any:
            return mb.identity(x=mb.list_read(ls=m.ls, index=m.index, name="other"))

    assert "is not a tensor" in unchecked(Again(), program_of(body))


def test_the_pass_says_which_values_are_possible() -> None:
    """The logarithm of ids is defined for positive ones only; the pass knows that they are."""
    seen: list[str] = []

    @dataclass(frozen=True)
    class Sampled(Swap):
        def sample(self, m: Match, var: Var, rng: np.random.Generator) -> Array | None:
            seen.append(var.name)
            return np.full((2, 3), 3.0, np.float32)

    assert proof_of(Sampled("relu6", "abs"), program_of(lambda x: mb.relu6(x=x))).max_abs == 0
    assert set(seen) == {"x"}
    with pytest.raises(ProofError):
        apply_pass(Swap("relu6", "abs"), program_of(lambda x: mb.relu6(x=x)))


@pytest.mark.parametrize("dtype", [types.fp32, types.fp16])
def test_drawn_floats(dtype: Any) -> None:
    """Zeros of both signs, subnormals, the largest number, and each constant with its neighbours."""
    program = program_of(lambda x: mb.identity(x=x), (200, 30), dtype)
    x, rng, kind = program.functions["main"].inputs["x"], np.random.default_rng(0), np_dtype_of(dtype)
    drawing = Drawing(lambda v, rng: None, (8.0,))
    found = {k: drawing.draw(x, k, rng) for k in ROUNDS}
    assert all(v.shape == (200, 30) and v.dtype == kind for v in found.values())
    special, info = set(found["special"].ravel().tolist()), np.finfo(kind)
    eight = kind.type(8)
    wanted = [0.0, 7.0, 8.0, 9.0, -8.0, np.nextafter(eight, kind.type(9)), np.nextafter(eight, kind.type(7))]
    assert {float(v) for v in [*wanted, info.smallest_subnormal, info.max]} <= special
    assert np.signbit(found["special"][found["special"] == 0]).any()
    assert np.isnan(found["nonfinite"]).any()
    assert np.isinf(found["nonfinite"]).any()
    assert np.abs(found["largest"].astype(np.float64)).max() > 0.9 * float(info.max)


def test_drawn_integers_and_conditions() -> None:
    rng, drawing = np.random.default_rng(0), Drawing(lambda v, rng: None, (4.0,))
    program = program_of(lambda x: mb.identity(x=x), (40, 3), types.int32)
    x = program.functions["main"].inputs["x"]
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    assert {0, 1, -1, 3, 4, 5, low, high} <= set(drawing.draw(x, "special", rng).ravel().tolist())
    assert np.abs(drawing.draw(x, "largest", rng).astype(np.int64)).max() > 2**30
    program = program_of(lambda x: mb.identity(x=x), (40, 3), types.bool)
    assert set(drawing.draw(program.functions["main"].inputs["x"], "normal", rng).ravel()) == {False, True}


def test_integers_that_address_something_stay_inside() -> None:
    def body(x: Var) -> Any:
        return mb.gather(x=np.ones((5, 2), np.float32), indices=mb.add(x=x, y=np.int32(0)), axis=0)

    program = program_of(body, (40,), types.int32)
    x = program.functions["main"].inputs["x"]
    assert address_bounds([x], program.functions["main"].operations) == {x: (0, 4)}


def test_what_is_known_of_a_value_bounds_what_is_drawn() -> None:
    program = program_of(lambda x: mb.sqrt(x=mb.softmax(x=x)))
    made = next(op for op in walk_ops(program) if op.op_type == "softmax").outputs[0]
    for kind in ROUNDS:
        found = Drawing(lambda v, rng: None).draw(made, kind, np.random.default_rng(1))
        assert not (found < 0).any()
        assert not (found > 1).any()


def test_the_same_seed_draws_the_same() -> None:
    x = program_of(lambda x: mb.exp(x=x)).functions["main"].inputs["x"]
    drawing = Drawing(lambda v, rng: None)
    first, second = (drawing.draw(x, "special", np.random.default_rng(7)) for _ in range(2))
    assert bool((first == second).all())


def np_dtype_of(dtype: Any) -> np.dtype[Any]:
    return np.dtype(types.nptype_from_builtin(dtype))


def test_slices_stand_in_an_order_that_can_run_and_end_where_told() -> None:
    def body(x: Var) -> Any:
        a = mb.exp(x=x, name="a")
        b = mb.add(x=a, y=mb.relu(x=a, name="r"), name="b")
        return mb.mul(x=b, y=a, name="c")

    program = program_of(body)
    named = {op.name: op for op in walk_ops(program)}
    c, a, b = (named[n].outputs[0] for n in "cab")
    assert [op.name for op in slice_back([c], set())] == ["a", "r", "b", "c"]
    assert [op.name for op in slice_back([c], {a})] == ["r", "b", "c"]
    assert [op.name for op in slice_back([c], {a, b})] == ["c"]
    assert slice_back([c], {c}) == []


def test_a_proof_holds_for_all_lengths_where_no_other_length_is_to_be_tried() -> None:
    """The wrong version gave the grade of numbers at lengths 1 to 17, as the largest length is not declared."""
    check = checked(
        lambda x: mb.add(x=mb.square(x=x), y=x),
        lambda x: mb.add(x=x, y=mb.square(x=x)),
        (types.fp32, (get_new_symbol(), 4)),
    )
    assert isinstance(check, SiteCheck)
    assert (check.grade, check.lengths) == (Grade.BITS, ())


def test_tolerances_read_as_promises() -> None:
    exact, near = Tolerance(), Tolerance(1e-5)
    assert str(exact) == "bit-exact"
    assert str(near) == "within 1e-05 of the largest value"
    assert SiteCheck(0, 0, 1).within(exact)
    assert not SiteCheck(1e-30, 1e-30, 1).within(exact)
    assert SiteCheck(1, 1e-5, 1).within(near)
    assert not SiteCheck(1, 1.1e-5, 1).within(near)
