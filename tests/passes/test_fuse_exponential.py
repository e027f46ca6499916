"""Softplus and sigmoid written out: where they are wrong they are named and repaired; others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol
from pass_cases import stays, table

import anesurgery as ane
from anesurgery.facts.written_exponentials import written_exponential
from anesurgery.mil import Program, Var, mb, types, walk_ops
from anesurgery.passes.fuse_exponential import FuseExponential
from anesurgery.testing import apply_pass

ONE, NONE = np.float16(1), np.float16(0)
X = np.array([[-40, -14, -12, -3, -1, 0, 1, 3, 12, 40]], np.float16)


def program(body: Callable[[Any], Any]) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(X.shape, dtype=types.fp16)], opset_version=ct.target.iOS16)(
        lambda x: body(x)
    )


def minus(x: Any) -> Any:
    return mb.mul(x=x, y=np.float16(-1))


def more(x: Any) -> Any:
    return mb.add(x=mb.exp(x=x), y=ONE)


def ratio(x: Any) -> Any:
    e = mb.exp(x=x)
    return mb.real_div(x=e, y=mb.add(x=ONE, y=e))


def ratio_by_inverse(x: Any) -> Any:
    e = mb.exp(x=x)
    return mb.mul(x=mb.inverse(x=mb.add(x=e, y=ONE), epsilon=NONE), y=e)


def shares(x: Any) -> Any:
    e = mb.exp(x=x)
    return mb.real_div(x=e, y=mb.reduce_sum(x=e, axes=[-1], keep_dims=True))


def log_of_sum(x: Any, keep: bool, epsilon: float) -> Any:
    return mb.log(x=mb.reduce_sum(x=mb.exp(x=x), axes=[-1], keep_dims=keep), epsilon=np.float16(epsilon))


def tanh_of_two(x: Any) -> Any:
    e, inverse = mb.exp(x=x), mb.exp(x=minus(x))
    return mb.real_div(x=mb.sub(x=e, y=inverse), y=mb.add(x=e, y=inverse))


def tanh_of_half(x: Any, first: bool = False) -> Any:
    e = mb.exp(x=x)
    return mb.real_div(x=mb.sub(x=ONE, y=e) if first else mb.sub(x=e, y=ONE), y=mb.add(x=e, y=ONE))


def other_tanh(x: Any) -> Any:
    """The exponentials are of different numbers."""
    e, other = mb.exp(x=x), mb.exp(x=mb.mul(x=x, y=np.float16(-2)))
    return mb.real_div(x=mb.sub(x=e, y=other), y=mb.add(x=e, y=other))


def grows_with_it(x: Any) -> Any:
    """A numerator that overflows as the exponential does, and would be multiplied with 0."""
    e = mb.exp(x=x)
    return mb.real_div(x=mb.add(x=mb.mul(x=e, y=np.float16(2)), y=np.float16(3)), y=mb.add(x=e, y=ONE))


LOGS = {
    "log sigmoid": lambda x: mb.log(x=mb.sigmoid(x=x), epsilon=NONE),
    "of 1 less a sigmoid": lambda x: mb.log(x=mb.sub(x=ONE, y=mb.sigmoid(x=x)), epsilon=NONE),
    "log softmax": lambda x: mb.log(x=mb.softmax(x=x, axis=-1), epsilon=NONE),
    "with a guard": lambda x: mb.log(x=mb.add(x=mb.softmax(x=x, axis=-1), y=np.float16(1e-7)), epsilon=NONE),
    "with a least": lambda x: mb.log(x=mb.maximum(x=mb.sigmoid(x=x), y=np.float16(1e-7)), epsilon=NONE),
    "clipped": lambda x: mb.log(x=mb.clip(x=mb.sigmoid(x=x), alpha=np.float16(1e-7), beta=ONE), epsilon=NONE),
}
"""Logarithms of what vanishes in fp16."""

SOFTPLUS = ["minimum", "softplus", "sub", "relu", "add"]
"""The op of numbers up to 10, and a line above."""
BREAKS = {
    "softplus": (lambda x: mb.log(x=more(x), epsilon=NONE), SOFTPLUS),
    "softplus, 1 first": (lambda x: mb.log(x=mb.add(x=ONE, y=mb.exp(x=x)), epsilon=NONE), SOFTPLUS),
    "logistic loss": (lambda x: mb.log(x=more(minus(x)), epsilon=NONE), ["mul", *SOFTPLUS]),
    "log1p": (lambda x: mb.log(x=mb.exp(x=x), epsilon=ONE), SOFTPLUS),
    "ratio": (ratio, ["sigmoid"]),
    "tanh": (tanh_of_two, ["tanh"]),
    "tanh of sinh": (lambda x: mb.real_div(x=mb.sinh(x=x), y=mb.cosh(x=x)), ["tanh"]),
    "tanh of half": (tanh_of_half, ["mul", "tanh"]),
    "tanh of half, 1 first": (lambda x: tanh_of_half(x, first=True), ["mul", "tanh"]),
    "log of cosh": (lambda x: mb.log(x=mb.cosh(x=x)), ["abs", "mul", "exp", "mul", "add", "log", "add"]),
    "ratio by inverse": (ratio_by_inverse, None),
}
"""Name -> the form, and the ops that are left (None: whichever)."""
SAME = {
    "inverse": (lambda x: mb.inverse(x=more(minus(x)), epsilon=NONE), ["sigmoid"]),
    "inverse with its epsilon": (lambda x: mb.inverse(x=more(minus(x))), ["sigmoid"]),
    "divided": (lambda x: mb.real_div(x=ONE, y=more(mb.sub(x=NONE, y=x))), ["sigmoid"]),
    "power": (lambda x: mb.pow(x=more(minus(x)), y=np.float16(-1)), ["sigmoid"]),
    "not negated": (lambda x: mb.real_div(x=ONE, y=more(x)), ["mul", "sigmoid"]),
    "silu": (lambda x: mb.real_div(x=x, y=more(minus(x))), ["sigmoid", "mul"]),
}
"""Forms whose exponential overflows too, and of which IEEE's infinity makes the right 0."""
FORMS = {**BREAKS, **SAME}
SUMS = {
    "softmax": shares,
    "softmax of two exponentials": lambda x: mb.real_div(
        x=mb.exp(x=x), y=mb.reduce_sum(x=mb.exp(x=x), axes=[-1], keep_dims=True)
    ),
    "logsumexp": lambda x: log_of_sum(x, True, 0),
    "logsumexp without its axis": lambda x: log_of_sum(x, False, 0),
    "logsumexp with an epsilon": lambda x: log_of_sum(x, True, 6e-8),
}
"""Sums of exponentials, of which one overflows."""


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", LOGS)
def test_logarithms_of_shares(name: str) -> None:
    before = program(LOGS[name])
    assert named(before, "num-log-softmax") == ["num-log-softmax"]
    after, session = apply_pass(FuseExponential(), before)
    assert session.changes
    right = numbers(before, "fp32")
    for precision in ("fp16", "ane"):
        assert decibels(right[np.isfinite(right)], numbers(after, precision)[np.isfinite(right)]) > 60
    assert not named(after, "num-log-softmax")


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", [*LOGS, "logsumexp with the default", "of two with the default"])
def test_the_default_guard_of_a_logarithm_guards_nothing(name: str) -> None:
    """Converters leave epsilon out; what they write is fused, and checked where the guard does not decide."""
    forms = {
        **LOGS,
        "logsumexp with the default": lambda x: log_of_sum(x, True, 1e-45),
        "of two with the default": lambda x: mb.log(
            x=mb.add(x=mb.exp(x=x), y=mb.exp(x=mb.abs(x=x))), epsilon=NONE
        ),
    }
    before = program(lambda x: with_the_default(forms[name], x))
    _, session = apply_pass(FuseExponential(), before)
    assert session.changes
    assert all(change.proof is not None for change in session.changes)


def with_the_default(form: Callable[[Any], Any], x: Any) -> Any:
    """A form whose logarithm has no epsilon of its own."""
    log = form(x).op
    return mb.log(x=log.x)


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", ["ratio", *SAME])
def test_the_form_that_keeps_digits(name: str) -> None:
    """On M1 a sigmoid is a table, which is right to 54 dB between its points."""
    before = program(FORMS[name][0])
    after, session = apply_pass(FuseExponential(form="digits"), before)
    assert len(session.changes) == 1
    between = np.array([[-40, -7.8, -3.3, -1.2, -0.2, 0.3, 1.3, 2.2, 3.8, 40]], np.float16)
    right = 1 / (1 + np.exp((1 if name == "not negated" else -1) * between.astype(np.float64)))
    right = right * between if name == "silu" else right
    fused = apply_pass(FuseExponential(), before)[0]
    for precision in ("fp16", "ane", "ane:M1"):
        (value,) = ane.run(after, {"x": between}, precision=precision).values()
        assert decibels(right, value.astype(np.float64)) > 60, precision
    (value,) = ane.run(fused, {"x": between}, precision="ane:M1").values()
    assert decibels(right, value.astype(np.float64)) < (90 if name == "silu" else 60)  # of numbers up to 40
    assert not named(after, "num-exp")
    assert not apply_pass(FuseExponential(form="digits"), after)[1].changes


def test_a_logarithm_of_shares_keeps_digits() -> None:
    before = program(LOGS["log softmax"])
    after, session = apply_pass(FuseExponential(form="digits"), before)
    assert {"select", "softmax"} <= {op.op_type for op in walk_ops(after)}
    assert len(session.changes) == 1
    right = numbers(before, "fp32")
    assert decibels(right, numbers(after, "fp16")) > 60


def test_a_recipe_takes_the_form_that_keeps_digits() -> None:
    """Of drawn numbers no exponential overflows, and the table of a sigmoid would cost 20 dB."""
    before = program(SAME["divided"][0])
    surgery = ane.apply(before, "safe_numbers", target="M1/macOS 14", prove="sites", quiet=True)
    assert {change.pass_name for change in surgery.changes} == {"fuse_exponential"}
    assert "exp" in {op.op_type for op in walk_ops(surgery.program)}


def test_numbers_are_drawn_where_a_length_is_dynamic() -> None:
    """The guard of 1e-45 needs numbers near 0, of any length."""

    @mb.program(input_specs=[mb.TensorSpec((2, get_new_symbol()))], opset_version=ct.target.iOS17)
    def softplus(x: Var) -> Var:
        return mb.log(x=mb.add(x=mb.exp(x=x), y=np.float32(1)), epsilon=np.float32(1e-45), name="y")

    after, session = apply_pass(FuseExponential(), softplus)
    assert len(session.changes) == 1
    assert "log" not in {op.op_type for op in walk_ops(after)}


@pytest.mark.parametrize("name", ["log sigmoid", "of 1 less a sigmoid", "log softmax"])
def test_of_small_numbers_no_logarithm_is_named(name: str) -> None:
    small = program(lambda x: LOGS[name](mb.tanh(x=x)))
    rules = {f.rule for row in ane.inspect(small, target="M1/macOS 14").ops for f in row.findings}
    assert not {rule for rule in rules if rule.startswith("num-")}


def numbers(model: Program, precision: str) -> Any:
    return next(iter(ane.run(model, {"x": X}, precision=precision).values())).astype(np.float64)


def decibels(right: Any, value: Any) -> float:
    error = np.mean((right - value) ** 2)
    if not np.isfinite(error) or error == 0:
        return np.inf if error == 0 else -np.inf
    return float(10 * np.log10(np.max(np.abs(right)) ** 2 / error))


def named(model: Program, rule: str = "num-exp") -> list[str]:
    rows = ane.inspect(model, target="M1/macOS 14").ops
    return [f.rule for row in rows for f in row.findings if f.rule == rule]


@pytest.mark.parametrize("name", BREAKS)
def test_the_form_breaks_in_fp16(name: str) -> None:
    before = program(BREAKS[name][0])
    assert decibels(numbers(before, "fp32"), numbers(before, "fp16")) < 20


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", FORMS)
def test_is_named_and_repaired(name: str) -> None:
    body, left = FORMS[name]
    before = program(body)
    assert named(before) == ["num-exp"] * len(named(before)) != []
    after, session = apply_pass(FuseExponential(), before)
    assert session.changes
    for precision in ("fp16", "ane"):
        assert decibels(numbers(before, "fp32"), numbers(after, precision)) > 60
    kinds = [op.op_type for op in walk_ops(after) if op.op_type != "const"]
    assert left in (None, kinds)
    assert not named(after)
    assert not named(after, "num-exp-range")


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_exponentials_is_named_and_repaired_once(name: str) -> None:
    before = program(SUMS[name])
    assert named(before, "num-softmax") == ["num-softmax"]
    assert decibels(numbers(before, "fp32"), numbers(before, "fp16")) < 20
    after, session = apply_pass(FuseExponential(), before)
    assert len(session.changes) == 1
    for precision in ("fp16", "ane"):
        assert decibels(numbers(before, "fp32"), numbers(after, precision)) > 60
    assert not named(after, "num-softmax")
    assert not apply_pass(FuseExponential(), after)[1].changes


def test_an_epsilon_still_counts_where_all_exponents_are_small() -> None:
    before = program(lambda x: log_of_sum(mb.sub(x=x, y=np.float16(60)), True, 6e-8))
    after, _ = apply_pass(FuseExponential(), before)
    assert numbers(after, "fp32") == pytest.approx(numbers(before, "fp32"), rel=1e-6)


HARMLESS = {
    "bounded": lambda x: mb.log(x=more(mb.tanh(x=x)), epsilon=NONE),
    "clipped": lambda x: mb.inverse(x=more(mb.clip(x=x, alpha=NONE - 8, beta=NONE + 8)), epsilon=NONE),
    "never positive": lambda x: mb.log(x=more(minus(mb.abs(x=x))), epsilon=NONE),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_nothing_is_said_where_nothing_overflows(name: str) -> None:
    before = program(HARMLESS[name])
    assert named(before) == []
    assert decibels(numbers(before, "fp32"), numbers(before, "fp16")) > 60


OTHERS = {
    "a sum of other exponentials": lambda x: mb.real_div(
        x=mb.exp(x=x), y=mb.reduce_sum(x=mb.exp(x=minus(x)), axes=[-1], keep_dims=True)
    ),
    "logsumexp with a large epsilon": lambda x: log_of_sum(x, True, 0.5),
    "logsumexp without the largest": lambda x: log_of_sum(
        mb.sub(x=x, y=mb.reduce_max(x=x, axes=[-1], keep_dims=True)), True, 0
    ),
    "log of 2 + exp": lambda x: mb.log(x=mb.add(x=mb.exp(x=x), y=np.float16(2)), epsilon=NONE),
    "an epsilon of 0.5": lambda x: mb.inverse(x=more(x), epsilon=np.float16(0.5)),
    "exp2": lambda x: mb.log(x=mb.add(x=mb.exp2(x=x), y=ONE), epsilon=NONE),
    "square of the reciprocal": lambda x: mb.pow(x=more(x), y=np.float16(-2)),
    "another exponent": lambda x: mb.mul(x=mb.exp(x=mb.abs(x=x)), y=mb.sigmoid(x=minus(x))),
}


test_cases, test_surroundings = table(
    FuseExponential(),
    *(stays(program, body) for body in [other_tanh, grows_with_it]),
    *(stays(program, OTHERS[name], id=str(name)) for name in OTHERS),
)


def test_an_exponential_times_its_ratio_is_no_sigmoid() -> None:
    """Only the ratio is one: the wrong version takes it for the reciprocal of 1 + exp(x)."""

    def body(x: Any) -> Any:
        e = mb.exp(x=x)
        return mb.mul(x=e, y=mb.real_div(x=e, y=mb.add(x=ONE, y=e)))

    (last,) = (op for op in walk_ops(program(body)) if op.op_type == "mul")
    assert written_exponential(last) is None


@pytest.mark.parametrize("by_inverse", [False, True])
def test_a_ratio_of_two_equal_exponentials_is_a_sigmoid(by_inverse: bool) -> None:
    """The wrong version keeps the numerator as a factor, which overflows."""

    def body(x: Any) -> Any:
        if by_inverse:
            return mb.mul(x=mb.exp(x=x), y=mb.inverse(x=more(x), epsilon=NONE))
        return mb.real_div(x=mb.exp(x=x), y=more(x))

    (last,) = (op for op in walk_ops(program(body)) if op.op_type in ("mul", "real_div"))
    form = written_exponential(last)
    assert form is not None
    assert form.factor is None
    assert not form.opposite
    assert [op.op_type for op in form.ops].count("exp") == 2
