"""Patterns: what they match, what they name, which branch wins, and what a near miss says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anesurgery.errors import NO_MATCH, PatternError, Refusal
from anesurgery.mil import Operation, Program, Var, mb, walk_ops
from anesurgery.rewriting.pattern import RESERVED, Match, OpPattern, any_of, matches, op, var


def program_of(body: Any) -> Program:
    specs = [mb.TensorSpec((2, 3)), mb.TensorSpec((2, 3))]
    made: Program = mb.program(input_specs=specs)(lambda a, b: body(a, b))
    return made


def last(program: Program) -> Operation:
    made: Var = program.functions["main"].outputs[0]
    assert made.op is not None
    return made.op


def found(pattern: OpPattern, body: Any) -> Match:
    """The first way to match."""
    ways, _ = matches(pattern, last(program_of(body)))
    return ways[0]


def missed(pattern: OpPattern, body: Any) -> str | None:
    """Why it does not match: a reason, or None for "not this kind of op"."""
    ways, refusal = matches(pattern, last(program_of(body)))
    assert not ways
    return None if refusal is NO_MATCH else refusal.reason


def test_another_kind_of_op_is_no_near_miss() -> None:
    assert missed(op.exp(x=var("x")), lambda a, b: mb.relu(x=a)) is None
    assert missed(op.exp(x=op.relu()), lambda a, b: mb.exp(x=a)) is None


def test_names_of_values_and_ops_are_attributes() -> None:
    pattern = op.mul(x=op.exp(x=var("inner"), as_="e"), y=var("factor"), as_="product")
    m = found(pattern, lambda a, b: mb.mul(x=mb.exp(x=a, name="e"), y=b, name="m"))
    assert (m.inner.name, m.factor.name, m.e.name, m.product.name) == ("a", "b", "e", "m")
    assert m.root is m.product
    assert [o.op_type for o in m.ops] == ["mul", "exp"]
    assert m.block is m.root.enclosing_block


def test_operands_that_commute_fit_in_both_orders_unless_they_are_one() -> None:
    pattern = op.mul(x=var("x"), y=var("y"), commutes=True)
    both, _ = matches(pattern, last(program_of(lambda a, b: mb.mul(x=a, y=b))))
    assert [(m.x.name, m.y.name) for m in both] == [("a", "b"), ("b", "a")]
    once, _ = matches(pattern, last(program_of(lambda a, b: mb.mul(x=a, y=a))))
    assert [(m.x.name, m.y.name) for m in once] == [("a", "a")]


def test_an_unknown_name_lists_the_known_ones() -> None:
    m = found(op.exp(x=var("x")), lambda a, b: mb.exp(x=a))
    with pytest.raises(AttributeError, match=r"the match has no 'y'; it has \['x'\]"):
        _ = m.y


def test_operands_of_the_root_are_attributes_where_no_name_hides_them() -> None:
    m = found(op.any("sub")(), lambda a, b: mb.sub(x=a, y=b))
    assert (m.x.name, m.y.name) == ("a", "b")
    turned = found(op.sub(x=var("y"), y=var("x")), lambda a, b: mb.sub(x=a, y=b))
    assert (turned.x.name, turned.y.name) == ("b", "a")


def test_bind_adds_and_keeps() -> None:
    m = found(op.exp(x=var("x")), lambda a, b: mb.exp(x=a))
    longer = m.bind(n=3, ops=(m.root, m.root))
    assert (longer.n, longer.x, longer.ops) == (3, m.x, (m.root, m.root))
    assert "n" not in m.bindings
    assert longer.bind(n=4).n == 4


def test_commuting_operands_are_tried_in_both_orders() -> None:
    pattern = op.add(x=op.exp(x=var("a")), y=var("b"), commutes=True)
    straight = found(pattern, lambda a, b: mb.add(x=mb.exp(x=a), y=b))
    crossed = found(pattern, lambda a, b: mb.add(x=b, y=mb.exp(x=a)))
    for m in (straight, crossed):
        assert (m.a.name, m.b.name) == ("a", "b")
    strict = op.add(x=op.exp(x=var("a")), y=var("b"))
    assert missed(strict, lambda a, b: mb.add(x=b, y=mb.exp(x=a))) is None


def test_commuting_inside_commuting_finds_the_one_way() -> None:
    inner = op.mul(x=op.tanh(x=var("t")), y=var("u"), commutes=True)
    pattern = op.add(x=inner, y=op.mul(x=var("t"), y=var("u"), commutes=True), commutes=True)

    def body(a: Var, b: Var) -> Any:
        return mb.add(x=mb.mul(x=b, y=a), y=mb.mul(x=b, y=mb.tanh(x=a)))

    m = found(pattern, body)
    assert (m.t.name, m.u.name) == ("a", "b")


def test_the_same_name_twice_is_the_same_value() -> None:
    pattern = op.mul(x=var("x"), y=op.sigmoid(x=var("x")))
    found(pattern, lambda a, b: mb.mul(x=a, y=mb.sigmoid(x=a)))
    reason = missed(pattern, lambda a, b: mb.mul(x=a, y=mb.sigmoid(x=b)))
    assert reason == "x is %a and %b"


def test_one_op_may_be_matched_twice() -> None:
    pattern = op.mul(x=op.exp(x=var("x")), y=op.exp(x=var("x")))

    def body(a: Var, b: Var) -> Any:
        e = mb.exp(x=a)
        return mb.mul(x=e, y=e)

    assert len(set(found(pattern, body).ops)) == 2


def test_alternatives_are_tried_in_order() -> None:
    pattern = op.add(x=any_of(op.exp(x=var("e")), op.any("relu", "tanh")(x=var("r")), var("v")), y=var("b"))
    assert found(pattern, lambda a, b: mb.add(x=mb.exp(x=a), y=b)).e.name == "a"
    assert found(pattern, lambda a, b: mb.add(x=mb.tanh(x=a), y=b)).r.name == "a"
    assert found(pattern, lambda a, b: mb.add(x=a, y=b)).v.name == "a"
    m = found(pattern, lambda a, b: mb.add(x=mb.exp(x=a), y=b))
    assert set(m.bindings) == {"e", "b"}  # nothing of the alternatives that lost


def test_a_later_conflict_goes_back_to_another_alternative() -> None:
    """The first alternative fits by itself, but not together with what follows."""
    pattern = op.add(x=any_of(op.exp(x=var("x")), var("x")), y=var("x"))

    def body(a: Var, b: Var) -> Any:
        e = mb.exp(x=a)
        return mb.add(x=e, y=e)

    assert found(pattern, body).x.op.op_type == "exp"


def test_several_op_types() -> None:
    pattern = op.any("sub", "add")(x=var("x"), y=var("y"), as_="either")
    assert found(pattern, lambda a, b: mb.sub(x=a, y=b)).either.op_type == "sub"
    assert found(pattern, lambda a, b: mb.add(x=a, y=b)).either.op_type == "add"


def test_constants_are_values() -> None:
    m = found(op.mul(x=var("x"), y=var("c")), lambda a, b: mb.mul(x=a, y=np.float32(2)))
    assert m.c.val == 2


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda a, b: mb.exp(x=mb.relu(x=a)), "%a comes from an input, not tanh"),
        (lambda a, b: mb.exp(x=mb.relu(x=mb.abs(x=a, name="n"))), "%n comes from abs, not tanh"),
    ],
)
def test_the_deepest_near_miss_is_told(body: Any, reason: str) -> None:
    pattern = op.exp(x=op.relu(x=op.tanh(x=var("x"))))
    assert missed(pattern, body) == reason


def test_a_near_miss_of_alternatives_names_what_was_wanted() -> None:
    pattern = op.exp(x=op.relu(x=op.any("tanh", "sigmoid")(x=var("x"))))
    assert missed(pattern, lambda a, b: mb.exp(x=mb.relu(x=a))) == (
        "%a comes from an input, not tanh or sigmoid"
    )


def test_an_input_that_is_a_list_or_absent() -> None:
    pattern = op.relu(x=op.concat(values=var("v")))
    reason = missed(pattern, lambda a, b: mb.relu(x=mb.concat(values=[a, b], axis=0)))
    assert reason == "concat has no single values"
    pattern = op.relu(x=op.reduce_sum(axes=var("axes"), x=var("x")))
    assert missed(pattern, lambda a, b: mb.relu(x=mb.reduce_sum(x=a))) == "reduce_sum has no single axes"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: op.mul(x=var("x"), y=0.5), r"mul\(y=...\) needs a pattern, got 0.5"),
        (lambda: op.mul(x=None), r"mul\(x=...\) needs a pattern, got None"),
        (lambda: op.mul(x=var("x"), commutes=True), "commutes=True exchanges x and y"),
        (lambda: op.select(a=var("x"), b=var("y"), commutes=True), "both must be given"),
        (lambda: op.cumsumm(x=var("x")), "there is no op 'cumsumm'; did you mean 'cumsum'"),
        (lambda: op.any("add", "subb")(x=var("x")), "there is no op 'subb'; did you mean 'sub'"),
        (lambda: op.relu(data=var("x")), "relu has no parameter 'data'; known: x"),
        (lambda: op.matmul(x=var("x"), transpose=var("t")), "did you mean 'transpose_y' or 'transpose_x'"),
        (lambda: op.any("add", "relu")(x=var("x"), y=var("y")), "relu has no parameter 'y'; known: x"),
    ],
)
def test_patterns_that_cannot_be_meant(make: Any, words: str) -> None:
    with pytest.raises(PatternError, match=words):
        make()


@pytest.mark.parametrize("name", ["bind", "bindings", "block", "ops", "root"])
def test_names_that_a_match_uses_itself(name: str) -> None:
    for make in (lambda: var(name), lambda: op.relu(as_=name)):
        with pytest.raises(PatternError, match=f"can be named '{name}': a match uses bind, bindings, block, "):
            make()
    assert set(RESERVED) == {
        n for n in dir(Match(last(program_of(lambda a, b: mb.add(x=a, y=b))), ())) if n[0] != "_"
    }


def test_bind_refuses_names_that_a_match_uses_itself() -> None:
    m = found(op.exp(x=var("x")), lambda a, b: mb.exp(x=a))
    with pytest.raises(PatternError, match="can be named 'root'"):
        m.bind(root=m.root)


def test_parameters_of_any_opset_are_known() -> None:
    assert op.gather(validate_indices=var("v")).inputs  # from iOS 17 on
    assert op.coreml_update_state(state=var("s")).op_types == ("coreml_update_state",)  # of a dialect


def test_a_refusal_is_false_and_says_where() -> None:
    root = last(program_of(lambda a, b: mb.exp(x=a, name="e")))
    assert not Refusal("no")
    assert str(Refusal("no")) == "no"
    assert str(Refusal("no", root)) == "e: no"


OPS = ("exp", "relu", "tanh", "abs")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(OPS), min_size=1, max_size=6),
    st.lists(st.sampled_from(OPS), min_size=1, max_size=4),
)
def test_a_chain_matches_when_its_end_does(made: list[str], wanted: list[str]) -> None:
    """`made` and `wanted` from the input to the output: the pattern fits when it is the end of the program."""

    def body(a: Var, b: Var) -> Any:
        for kind in made:
            a = getattr(mb, kind)(x=a)
        return a

    pattern: Any = var("x")
    for kind in wanted:
        pattern = op.any(kind)(x=pattern)
    program = program_of(body)
    ways, _ = matches(pattern, last(program))
    assert len(ways) == (made[-len(wanted) :] == wanted)
    for m in ways:
        assert [o.op_type for o in m.ops] == wanted[::-1]
        assert set(m.ops) <= set(walk_ops(program))
