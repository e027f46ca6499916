"""The driver: what it guards, proves, replaces, names and cleans up, and what it says when a pass is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol

from anesurgery.checking.grades import REASSOCIATED, Tolerance
from anesurgery.errors import PassError, PatternError, ProofError, Refusal
from anesurgery.files.interface_change import InterfaceChange
from anesurgery.mil import Array, Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.negate_subtract import NegateSubtract
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.passes import Pass, Pipeline, run_pass
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.rewriting.session import Session, counts, grouped_refusals
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers, reasons
from anesurgery.text import to_text

IOS17 = ct.target.iOS17


def kinds(program: Program) -> list[str]:
    return [op.op_type for op in walk_ops(program) if op.op_type != "const"]


def outputs(program: Program) -> list[str]:
    return [v.name for v in program.functions["main"].outputs]


def one_input(body: Any, shape: tuple[Any, ...] = (2, 3), dtype: Any = types.fp32) -> Program:
    specs = [mb.TensorSpec(shape, dtype=dtype)]
    made: Program = mb.program(input_specs=specs, opset_version=IOS17)(lambda x: body(x))
    return made


@dataclass(frozen=True)
class DoubleRelu(Rewrite):
    """`relu(relu(x))` is `relu(x)`."""

    name: ClassVar[str] = "double_relu"

    def pattern(self, op: Ops) -> OpPattern:
        return op.relu(x=op.relu(x=var("x"), as_="inner"))

    def rewrite(self, mb: Builder, m: Match) -> Any:
        return mb.relu(x=m.x)


# What the guards refuse


def test_an_inner_value_that_is_read_elsewhere() -> None:
    def body(x: Var) -> Any:
        inner = mb.relu(x=x, name="inner")
        return mb.relu(x=inner), mb.exp(x=inner)

    assert_refuses(DoubleRelu(), one_input(body), "%inner is read elsewhere")


def test_an_inner_value_that_is_an_output() -> None:
    def body(x: Var) -> Any:
        inner = mb.relu(x=x, name="inner")
        return mb.relu(x=inner), inner

    assert_refuses(DoubleRelu(), one_input(body), "%inner is read elsewhere")


def test_an_inner_value_that_is_read_in_a_nested_block() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((1,), dtype=types.bool)])
    def program(x: Var, flag: Var) -> Any:
        inner = mb.relu(x=x, name="inner")
        nested = mb.cond(
            pred=mb.squeeze(x=flag), _true_fn=lambda: mb.exp(x=inner), _false_fn=lambda: mb.exp(x=x)
        )
        return mb.relu(x=inner), nested

    assert_refuses(DoubleRelu(), program, "%inner is read elsewhere")


def test_an_inner_op_of_another_block() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((1,), dtype=types.bool)])
    def program(x: Var, flag: Var) -> Any:
        inner = mb.relu(x=x, name="inner")
        return mb.cond(
            pred=mb.squeeze(x=flag), _true_fn=lambda: mb.relu(x=inner), _false_fn=lambda: mb.exp(x=x)
        )

    assert_refuses(DoubleRelu(), program, "inner is in another block")


@dataclass(frozen=True)
class SharesInner(DoubleRelu):
    """The same, but what it matched may be read elsewhere."""

    name: ClassVar[str] = "shares_inner"
    shares_inner: ClassVar[bool] = True


def test_shared_inner_values_stay_for_their_other_readers() -> None:
    def body(x: Var) -> Any:
        inner = mb.relu(x=x, name="inner")
        return mb.relu(x=inner, name="y"), mb.exp(x=inner, name="z")

    program = one_input(body)
    after, session = apply_pass(SharesInner(), program)
    assert len(session.changes) == 1
    assert kinds(after) == ["relu", "relu", "exp"]
    assert outputs(after) == ["y", "z"]
    assert_same_numbers(program, after)


@dataclass(frozen=True)
class StaticOnly(DoubleRelu):
    """The same, for static shapes."""

    name: ClassVar[str] = "static_only"
    static: ClassVar[bool] = True


def test_symbolic_shapes_where_a_pass_wants_static_ones() -> None:
    program = one_input(lambda x: mb.relu(x=mb.relu(x=x)), (get_new_symbol(), 3))
    assert_refuses(StaticOnly(), program, "has the symbolic shape (is")
    assert apply_pass(DoubleRelu(), program)[1].changes


@dataclass(frozen=True)
class ThirdRelu(DoubleRelu):
    """`relu(relu(relu(x)))` is `relu(x)`."""

    name: ClassVar[str] = "third_relu"

    def pattern(self, op: Ops) -> OpPattern:
        return op.relu(x=op.relu(x=op.relu(x=var("x"))))


def test_a_near_miss_says_what_was_found() -> None:
    program = one_input(lambda x: mb.relu(x=mb.relu(x=mb.exp(x=x, name="e"))))
    assert_refuses(ThirdRelu(), program, "%e comes from exp, not relu")


def test_another_op_is_no_near_miss() -> None:
    program = one_input(lambda x: mb.relu(x=mb.exp(x=mb.relu(x=x))))
    after, session = apply_pass(DoubleRelu(), program)
    assert not session.changes
    assert not session.refusals
    assert to_text(after) == to_text(program)


# Passes that are written wrong


def test_a_pattern_that_cannot_match_is_an_error_when_the_class_is_made() -> None:
    with pytest.raises(PatternError, match="there is no op 'cumsumm'; did you mean 'cumsum'"):

        @dataclass(frozen=True)
        class Wrong(Rewrite):
            name: ClassVar[str] = "wrong"

            def pattern(self, op: Ops) -> OpPattern:
                return op.cumsumm(x=var("x"))


def test_a_pattern_may_depend_on_options() -> None:
    @dataclass(frozen=True)
    class Chosen(DoubleRelu):
        kind: str
        axes: tuple[int, ...] = field(default_factory=tuple)

        def pattern(self, op: Ops) -> OpPattern:
            return op.any(self.kind)(x=var("x"))

    program = one_input(lambda x: mb.relu(x=x))
    with pytest.raises(PatternError, match="there is no op 'rellu'"):
        apply_pass(Chosen("rellu"), program)


@pytest.mark.parametrize("answer", [True, False, "no"])
def test_a_check_that_returns_no_answer_is_an_error(answer: Any) -> None:
    @dataclass(frozen=True)
    class Checked(DoubleRelu):
        def check(self, m: Match) -> Any:
            return answer

    program = one_input(lambda x: mb.relu(x=mb.relu(x=x), name="y"))
    with pytest.raises(
        PassError, match=rf"pass double_relu at y: `check` returned {answer!r}; return the match"
    ):
        apply_pass(Checked(), program)


# The worklist


def test_a_chain_becomes_one_in_one_run() -> None:
    def body(x: Var) -> Any:
        for _ in range(20):
            x = mb.relu(x=x)
        return mb.relu(x=x, name="y")

    program = one_input(body)
    after, session = apply_pass(DoubleRelu(), program)
    assert kinds(after) == ["relu"]
    assert outputs(after) == ["y"]
    assert counts(session.changes) == {"double_relu": 20}


def test_a_reader_in_a_nested_block_is_visited_in_its_own_block() -> None:
    """What an outer edit enables inside a nested block is built inside that block."""

    @mb.program(input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((1,), dtype=types.bool)])
    def program(x: Var, flag: Var) -> Any:
        outer = mb.sub(x=x, y=mb.exp(x=x), name="outer")
        return mb.cond(
            pred=mb.squeeze(x=flag),
            _true_fn=lambda: mb.sub(x=x, y=outer, name="inner"),
            _false_fn=lambda: mb.sub(x=outer, y=x),
        )

    after, session = apply_pass(NegateSubtract(), program)
    assert len(session.changes) == 3
    for flag in (True, False):
        inputs: dict[str, Array] = {"x": np.ones((2, 3), np.float32), "flag": np.array([flag])}
        assert_same_numbers(program, after, inputs)


def test_every_function_is_visited() -> None:
    program = one_input(lambda x: mb.relu(x=mb.relu(x=x)))
    other = one_input(lambda x: mb.relu(x=mb.relu(x=x)))
    program.functions["other"] = other.functions["main"]
    session = Session(prove_sites=True)
    run_pass(DoubleRelu(), program, session)
    assert len(session.changes) == 2
    assert [len(f.operations) for f in program.functions.values()] == [1, 1]


@dataclass(frozen=True)
class Endless(Rewrite):
    """Exchanges the operands of every addition, for ever."""

    name: ClassVar[str] = "endless"

    def pattern(self, op: Ops) -> OpPattern:
        return op.add(x=var("x"), y=var("y"))

    def rewrite(self, mb: Builder, m: Match) -> Any:
        return mb.add(x=m.y, y=m.x)


def test_a_pass_without_a_fixed_point() -> None:
    program = one_input(lambda x: mb.add(x=x, y=mb.exp(x=x), name="sum"))
    with pytest.raises(PassError, match="pass endless reaches no fixed point; last edit at sum"):
        apply_pass(Endless(), program)


# Wrong passes


@dataclass(frozen=True)
class Wrong(Rewrite):
    """Replaces `exp` by something else, as `how` says."""

    name: ClassVar[str] = "wrong"
    how: str = "numbers"

    def pattern(self, op: Ops) -> OpPattern:
        return op.exp(x=var("x"))

    def check(self, m: Match) -> Match | Refusal | None:
        if self.how == "check":
            raise KeyError("a bug in check")
        return m

    def rewrite(self, mb: Builder, m: Match) -> Any:
        if self.how == "raises":
            raise ZeroDivisionError("a bug in rewrite")
        made: dict[str, Callable[[], Any]] = {
            "numbers": lambda: mb.exp2(x=m.x),
            "a little": lambda: mb.exp2(x=mb.mul(x=m.x, y=np.float32(np.log2(np.e) + 1e-6))),
            "shape": lambda: mb.transpose(x=mb.exp2(x=m.x), perm=[1, 0]),
            "dtype": lambda: mb.cast(x=m.x, dtype="int32"),
            "nothing": lambda: None,
            "too many": lambda: [mb.exp2(x=m.x), mb.exp2(x=m.x)],
            "itself": lambda: mb.relu(x=m.root.outputs[0]),
            "builder": lambda: mb.exp2(x=m.x, banana=1),
            "nan": lambda: mb.log(x=mb.sub(x=m.x, y=np.float32(1e6))),
        }
        return made[self.how]()


def target() -> Program:
    return one_input(lambda x: mb.relu(x=mb.exp(x=x, name="e"), name="y"))


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("numbers", ProofError, r"pass wrong at e: old and new differ by .* promised: bit-exact"),
        ("a little", ProofError, "promised: bit-exact"),
        ("nan", ProofError, "differ by inf"),
        ("shape", PassError, "pass wrong at e: %e is 2x3, its replacement 3x2"),
        ("dtype", PassError, "pass wrong at e: %e is 2x3, its replacement 2x3xint32"),
        ("raises", PassError, r"pass wrong at e .*ZeroDivisionError: a bug in rewrite.*unchanged"),
        ("check", PassError, r"pass wrong at e .*KeyError: 'a bug in check'.*unchanged"),
        ("nothing", PassError, "pass wrong at e: .*None"),
        ("too many", PassError, "pass wrong at e: .*2 values for 1"),
        ("itself", PassError, "pass wrong at e: .*reads %e"),
        ("builder", PassError, "pass wrong at e .*banana"),
    ],
)
def test_a_wrong_pass_is_caught_and_named(how: str, error: type[Exception], words: str) -> None:
    program = target()
    before = to_text(program)
    with pytest.raises(error, match=words):
        apply_pass(Wrong(how), program)
    assert to_text(program) == before


def test_without_proof_a_wrong_number_passes() -> None:
    """The proof is what catches it, and nothing else."""
    after, session = apply_pass(Wrong("numbers"), target(), prove=False)
    assert kinds(after) == ["exp2", "relu"]
    assert session.changes[0].proof is None


@dataclass(frozen=True)
class Tolerant(Wrong):
    """The same, promising less."""

    name: ClassVar[str] = "tolerant"
    tolerance: ClassVar[Tolerance] = REASSOCIATED
    magnitude: ClassVar[float] = 4.0


def test_a_tolerance_is_a_limit() -> None:
    _, session = apply_pass(Tolerant("a little"), target())
    proof = session.changes[0].proof
    assert proof is not None
    assert 0 < proof.max_rel < 1e-5
    assert proof.values > 6
    assert proof.magnitude == 4
    with pytest.raises(ProofError, match="promised: within 1e-05 of the largest value"):
        apply_pass(Tolerant("numbers"), target())


# Replacing


@dataclass(frozen=True)
class DropRelu(Rewrite):
    """`relu(abs(x))` is `abs(x)`."""

    name: ClassVar[str] = "drop_relu"
    shares_inner: ClassVar[bool] = True

    def pattern(self, op: Ops) -> OpPattern:
        return op.relu(x=op.abs(x=var("x"), as_="inner"))

    def rewrite(self, mb: Builder, m: Match) -> Any:
        return m.inner.outputs[0]


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


@dataclass(frozen=True)
class DropIdentity(Rewrite):
    """`x + 0` is `x`."""

    name: ClassVar[str] = "drop_zero"

    def pattern(self, op: Ops) -> OpPattern:
        return op.add(x=var("x"), y=var("zero"))

    def rewrite(self, mb: Builder, m: Match) -> Any:
        return m.x


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


# Passes and pipelines


@dataclass(frozen=True)
class Note(Pass):
    """Writes down that it ran."""

    name: ClassVar[str] = "note"
    label: str = "a"

    def run(self, program: Program, session: Session) -> None:
        session.artifacts[f"{self.label}{len(session.artifacts)}"] = np.zeros(1)


@dataclass(frozen=True)
class Broken(Pass):
    """Promises or needs what is not so."""

    name: ClassVar[str] = "broken"
    how: str = "ensures"

    def requires(self, program: Program) -> Refusal | None:
        return Refusal("there is no attention") if self.how == "requires" else None

    def run(self, program: Program, session: Session) -> None:
        if self.how == "runs":
            raise RuntimeError("oh")

    def ensures(self, program: Program) -> Refusal | None:
        return Refusal("a sub is left", next(walk_ops(program))) if self.how == "ensures" else None


def test_what_a_pass_needs_and_promises() -> None:
    session = Session()
    run_pass(Broken("requires"), target(), session)
    assert reasons(session) == ["there is no attention"]
    with pytest.raises(PassError, match=r"pass broken did not keep its promise: .*a sub is left"):
        run_pass(Broken("ensures"), target(), session)
    with pytest.raises(PassError, match=r"pass broken failed: RuntimeError: oh; .*unchanged"):
        run_pass(Broken("runs"), target(), session)


def test_a_pipeline_runs_in_order_and_names_what_ran_before() -> None:
    session, seen = Session(), []
    steps = Pipeline((Note(), Note("b")), observer=lambda step, program: seen.append(str(step)))
    run_pass(steps, target(), session)
    assert list(session.artifacts) == ["a0", "b1"]
    assert seen == ["note", "note(label='b')"]
    with pytest.raises(PassError, match=r"oh; .*\(ran before it: note, note\)"):
        run_pass(Pipeline((Note(), Note(), Broken("runs"))), target(), Session())


def test_a_pipeline_until_stable() -> None:
    program = one_input(lambda x: mb.relu(x=mb.relu(x=mb.sub(x=x, y=mb.exp(x=x)))))
    session = Session()
    run_pass(Pipeline((DoubleRelu(), NegateSubtract()), until_stable=True), program, session)
    assert counts(session.changes) == {"double_relu": 1, "negate_subtract": 1}

    @dataclass(frozen=True)
    class Turn(Rewrite):
        name: ClassVar[str] = "turn"
        there: str = "exp"
        back: str = "exp2"

        def pattern(self, op: Ops) -> OpPattern:
            return op.any(self.there)(x=var("x"))

        def rewrite(self, mb: Builder, m: Match) -> Any:
            return getattr(mb, self.back)(x=m.x)

    endless = Pipeline((Turn(), Turn("exp2", "exp")), until_stable=True, limit=3)
    with pytest.raises(PassError, match="still changes the model after 3 rounds: turn, turn"):
        run_pass(endless, target(), Session())


@dataclass(frozen=True)
class First(Note):
    """Runs before notes."""

    name: ClassVar[str] = "first"
    precedes: ClassVar[tuple[str, ...]] = ("note",)


@dataclass(frozen=True)
class Last(Note):
    """Runs after notes."""

    name: ClassVar[str] = "last"
    follows: ClassVar[tuple[str, ...]] = ("note", "elsewhere")


def test_steps_are_sorted_by_what_they_declare_and_otherwise_stay() -> None:
    def names(*steps: Pass) -> list[str]:
        return [str(step) for step in Pipeline(steps).steps]

    assert names(Last(), Note(), First()) == ["first", "note", "last"]
    assert names(First(), Note(), Last()) == ["first", "note", "last"]
    assert names(Last(), DoubleRelu(), First()) == ["last", "double_relu", "first"]
    assert names(Note(), DoubleRelu(), Last("b"), Last(), Note("c")) == [
        "note",
        "double_relu",
        "last(label='b')",
        "last",
        "note(label='c')",
    ]


def test_an_order_that_contradicts_itself_names_the_passes() -> None:
    @dataclass(frozen=True)
    class Both(Note):
        name: ClassVar[str] = "both"
        precedes: ClassVar[tuple[str, ...]] = ("note",)
        follows: ClassVar[tuple[str, ...]] = ("note",)

    with pytest.raises(PassError, match="contradicts itself: (both before note|note before both), "):
        Pipeline((Note(), Both()))


def test_refusals_are_grouped_by_reason() -> None:
    def body(x: Var) -> Any:
        inner = mb.relu(x=x, name="inner")
        return mb.relu(x=inner, name="r1"), mb.relu(x=inner, name="r2")

    _, session = apply_pass(DoubleRelu(), one_input(body))
    assert grouped_refusals(session.refusals) == [("double_relu", "%inner is read elsewhere", 2, "r1")]
