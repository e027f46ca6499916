"""The driver: what it guards, proves, replaces, names and cleans up, and what it says when a pass is wrong."""

from __future__ import annotations

import cProfile
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol
from small_rewrites import DoubleRelu, kinds, one_input, outputs, small_rewrite, target

from anesurgery.checking.grades import REASSOCIATED, Tolerance
from anesurgery.errors import PassError, PatternError, ProofError, Refusal, Refused
from anesurgery.mil import Array, Var, mb, types
from anesurgery.passes.negate_subtract import NegateSubtract
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.passes import run_pass
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.rewriting.session import Session, counts
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers
from anesurgery.text import to_text

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


class Doubled(NegateSubtract):
    """A wrong version: the result has the length of y alone."""

    name: ClassVar[str] = "doubled"

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Add y to itself."""
        doubled: Var = mb.add(x=m.y, y=m.y)
        return doubled


class BuiltAgain(NegateSubtract):
    """Builds the sum and its maximum again, each with a new length."""

    name: ClassVar[str] = "built_again"

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Add the negative maximum to the sum."""
        total = mb.add(x=m.x.op.x, y=m.x.op.y)
        lowered: Var = mb.add(x=total, y=mb.mul(x=mb.reduce_max(x=total, axes=[0], keep_dims=True), y=-1.0))
        return lowered


def test_lengths_are_followed_through_ops_that_keep_them() -> None:
    lengths = [get_new_symbol() for _ in range(2)]

    @mb.program(input_specs=[mb.TensorSpec((2, length)) for length in lengths])
    def program(x: Var, z: Var) -> Var:
        total = mb.add(x=x, y=z)
        return mb.relu(x=mb.sub(x=total, y=mb.reduce_max(x=total, axes=[0], keep_dims=True)), name="y")

    after, _ = apply_pass(BuiltAgain(), program)
    assert kinds(after) == ["add", "reduce_max", "mul", "add", "relu"]


def test_a_result_that_is_broadcast_from_the_same_lengths_keeps_its_length() -> None:
    """Inference invents a length for each op on two dynamic lengths, as behind a convolution and beside it."""
    lengths = [get_new_symbol() for _ in range(2)]

    @mb.program(input_specs=[mb.TensorSpec((2, length)) for length in lengths])
    def program(x: Var, z: Var) -> Var:
        return mb.relu(x=mb.sub(x=mb.exp(x=mb.add(x=x, y=z)), y=z), name="y")

    after, session = apply_pass(NegateSubtract(), program)
    assert kinds(after) == ["add", "exp", "mul", "add", "relu"]
    assert session.changes
    with pytest.raises(PassError, match=r"%sub_\d+ is 2x\?, its replacement 2x\?;"):
        apply_pass(Doubled(), program)


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


@dataclass(frozen=True)
class AsksInVain(DoubleRelu):
    """Finds in the middle of its rewrite that a value cannot be had."""

    def rewrite(self, mb: Builder, m: Match) -> Any:
        raise Refused(f"nothing is known of %{mb.exp(x=m.x, name='begun').name}")


def test_a_helper_that_cannot_answer_in_mid_rewrite_is_a_refusal_at_the_op() -> None:
    program = one_input(lambda x: mb.relu(x=mb.relu(x=x), name="outer"))
    assert_refuses(AsksInVain(), program, "nothing is known of %begun")
    _, session = apply_pass(AsksInVain(), program)
    assert [str(refusal) for _, refusal in session.refusals] == ["outer: nothing is known of %begun"]


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


Endless = small_rewrite(
    "endless", lambda op: op.add(x=var("x"), y=var("y")), lambda mb, m: mb.add(x=m.y, y=m.x)
)
"""Exchanges the operands of every addition, for ever."""


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
            "a little": lambda: mb.exp2(x=mb.mul(x=m.x, y=np.float32(math.log2(math.e) + 1e-6))),
            "shape": lambda: mb.transpose(x=mb.exp2(x=m.x), perm=[1, 0]),
            "dtype": lambda: mb.cast(x=m.x, dtype="int32"),
            "nothing": lambda: None,
            "too many": lambda: [mb.exp2(x=m.x), mb.exp2(x=m.x)],
            "itself": lambda: mb.relu(x=m.root.outputs[0]),
            "builder": lambda: mb.exp2(x=m.x, banana=1),
            "nan": lambda: mb.log(x=mb.sub(x=m.x, y=np.float32(1e6))),
        }
        return made[self.how]()


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


def test_the_work_of_edits_grows_with_the_ops() -> None:
    """Function calls, which no clock disturbs: an edit looks at what it changes, not at the whole function."""

    def calls(count: int) -> float:
        def body(x: Var) -> Var:
            for _ in range(count):
                x = mb.sub(x=x, y=mb.relu(x=x))
            return x

        program, profile = one_input(body), cProfile.Profile()
        profile.runcall(apply_pass, NegateSubtract(), program, prove=False)
        return sum(entry.callcount for entry in profile.getstats())

    calls(4)  # what is computed once in a process
    assert calls(160) < 2.3 * calls(80)
