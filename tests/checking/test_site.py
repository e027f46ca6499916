"""Site proofs: what is computed, what is drawn, what counts as equal, and what cannot be proven."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol

from anesurgery.checking.site import LARGEST_SITE, SiteProof, Tolerance, draw
from anesurgery.errors import ProofError
from anesurgery.facts.slices import slice_back
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


def proof_of(step: Rewrite, program: Program) -> SiteProof:
    _, session = apply_pass(step, program)
    (change,) = session.changes
    assert change.proof is not None, change.unproven
    return change.proof


def unproven(step: Rewrite, program: Program) -> str:
    _, session = apply_pass(step, program)
    (change,) = session.changes
    assert change.proof is None
    return change.unproven


def test_only_the_site_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ops before it make is drawn: they are not even known here."""
    monkeypatch.delitem(TABLE, "erf")
    program = program_of(lambda x: mb.relu(x=mb.erf(x=mb.reduce_sum(x=x, axes=[0]))), (500, 3))
    assert proof_of(Swap("relu", "relu6"), program).values == 3


def test_values_and_elements() -> None:
    proof = proof_of(Swap("relu", "relu6"), program_of(lambda x: mb.relu(x=x), (4, 5)))
    assert proof == SiteProof(0.0, 0.0, 20)  # normal numbers stay below 6


def test_what_the_old_side_does_not_define_is_left_out() -> None:
    """The root of a negative number is not a number; what stands there now does not matter."""

    @dataclass(frozen=True)
    class Root(Swap):
        def rewrite(self, mb: Builder, m: Match) -> Any:
            return mb.sqrt(x=mb.abs(x=m.x))

        def check(self, m: Match) -> Match | None:
            return None if m.x.op is not None else m

    proof = proof_of(Root(), program_of(lambda x: mb.sqrt(x=x), (50, 2)))
    assert proof.max_abs == 0
    assert 0 < proof.values < 100


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

    assert unproven(Far(), program_of(body)) == f"depends on {LARGEST_SITE + 1} ops"


def test_an_op_that_the_interpreter_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TABLE, "erf")
    reason = unproven(Swap("erf", "tanh"), program_of(lambda x: mb.erf(x=x)))
    assert "does not know 'erf'" in reason


def test_symbolic_dimensions_get_a_length() -> None:
    program = program_of(lambda x: mb.relu(x=x), (get_new_symbol(), 4))
    assert proof_of(Swap("relu", "relu6"), program).values == 12


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

    assert "is no tensor" in unproven(Again(), program_of(body))


def test_the_pass_says_which_values_are_possible() -> None:
    """The logarithm of ids is defined for positive ones only; the pass knows that they are."""
    seen: list[str] = []

    @dataclass(frozen=True)
    class Sampled(Swap):
        def sample(self, m: Match, var: Var, rng: np.random.Generator) -> Array | None:
            seen.append(var.name)
            return np.full((2, 3), 3.0, np.float32)

    assert proof_of(Sampled("relu6", "abs"), program_of(lambda x: mb.relu6(x=x))).max_abs == 0
    assert seen == ["x"]
    with pytest.raises(ProofError):
        apply_pass(Swap("relu6", "abs"), program_of(lambda x: mb.relu6(x=x)))


@pytest.mark.parametrize(
    ("dtype", "values"), [(types.fp32, None), (types.fp16, None), (types.int32, {0, 1}), (types.bool, {0, 1})]
)
def test_drawn_values(dtype: Any, values: set[int] | None) -> None:
    program = program_of(lambda x: mb.identity(x=x), (40, 3), dtype)
    x = program.functions["main"].inputs["x"]
    found = draw(x, lambda v, rng: None, np.random.default_rng(0)).numpy()
    assert found.shape == (40, 3)
    assert found.dtype == types.nptype_from_builtin(dtype)
    if values is None:
        assert found.min() < -1
        assert found.max() > 1
    else:
        assert set(found.ravel().astype(int)) == values


def test_the_same_seed_draws_the_same() -> None:
    x = program_of(lambda x: mb.exp(x=x)).functions["main"].inputs["x"]
    first, second = (draw(x, lambda v, rng: None, np.random.default_rng(7)) for _ in range(2))
    assert bool((first == second).all())


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


def test_tolerances_read_as_promises() -> None:
    exact, near = Tolerance(), Tolerance(1e-5)
    assert str(exact) == "bit-exact"
    assert str(near) == "within 1e-05 of the largest value"
    assert SiteProof(0, 0, 1).within(exact)
    assert not SiteProof(1e-30, 1e-30, 1).within(exact)
    assert SiteProof(1, 1e-5, 1).within(near)
    assert not SiteProof(1, 1.1e-5, 1).within(near)
