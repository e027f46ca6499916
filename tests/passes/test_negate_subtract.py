"""x - y is x + (-y): for tensors, scalars and broadcasts, floats and integers, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from coremltools.converters.mil.mil import get_new_symbol
from hypothesis import given, settings
from hypothesis import strategies as st

from anesurgery.interpret import run
from anesurgery.mil import Program, Var, constant, ct, dtype_name, mb, types, walk_ops
from anesurgery.passes.negate_subtract import NegateSubtract
from anesurgery.testing import apply_pass, assert_refuses, assert_rewrites, assert_same_numbers, random_inputs
from anesurgery.text import to_text

STEP = NegateSubtract()
IOS17 = ct.target.iOS17


def difference(
    x: tuple[Any, ...],
    y: tuple[Any, ...] | np.ndarray[Any, Any] | np.generic | None = None,
    dtype: Any = types.fp32,
    swap: bool = False,
) -> Program:
    """`a - y`, where y is an input of that shape or a constant; swapped: `y - a`."""
    specs = [mb.TensorSpec(x, dtype=dtype)]
    specs += [mb.TensorSpec(y, dtype=dtype)] if isinstance(y, tuple) else []

    def one(a: Var) -> Any:
        return mb.sub(x=y, y=a, name="y") if swap else mb.sub(x=a, y=y, name="y")

    def two(a: Var, b: Var) -> Any:
        return mb.sub(x=b, y=a, name="y") if swap else mb.sub(x=a, y=b, name="y")

    body = two if isinstance(y, tuple) else one
    made: Program = mb.program(input_specs=specs, opset_version=IOS17)(body)
    return made


def check(program: Program, precision: str = "fp32") -> Program:
    after, session = apply_pass(STEP, program)
    assert session.changes, session.refusals
    assert all(c.proof and c.proof.max_abs == 0 for c in session.changes)
    assert not [op for op in walk_ops(after) if op.op_type == "sub"]
    assert_same_numbers(program, after, precision=precision)
    assert not apply_pass(STEP, after)[1].changes
    return after


@pytest.mark.one_of(3)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("dtype", [types.fp32, types.fp16, types.int32])
@pytest.mark.parametrize(
    ("x", "y"), [((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((4,), (2, 3, 4)), ((1,), (1, 1, 1, 1, 2))]
)
def test_dynamic_values(x: Any, y: Any, dtype: Any, swap: bool) -> None:
    after = check(difference(x, y, dtype, swap))
    kinds = {dtype_name(v) for op in walk_ops(after) for v in op.outputs}
    assert kinds == {types.builtin_to_string(dtype)}  # -1 has the dtype of the program


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_in_both_arithmetics(precision: str) -> None:
    check(difference((3, 5), (5,), types.fp16), precision)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (4, 1, 1)])
def test_constants(shape: tuple[int, ...], dtype: Any, swap: bool) -> None:
    value = dtype(np.random.default_rng(1).integers(-9, 9, shape))
    kind = types.numpy_type_to_builtin_type(dtype)
    after = check(difference((2, 3), value, kind, swap))
    ops = [op.op_type for op in walk_ops(after) if op.op_type != "const"]
    assert ops == (["mul", "add"] if swap else ["add"]), to_text(after)


def test_the_constant_itself_is_negated() -> None:
    program = difference((1, 3), np.arange(1, 4, dtype=np.float32))
    assert_rewrites(STEP, program, after=NEGATED)


NEGATED = """
main(%a: 1x3) {
  %y: 1x3 = add(x=%a, y=[-1, -2, -3])
  return %y
}
"""


def test_a_constant_minus_a_value() -> None:
    assert_rewrites(STEP, difference((1, 3), np.float32(1), swap=True), after=FROM_ONE)


FROM_ONE = """
main(%a: 1x3) {
  %y_negate_subtract_mul: 1x3 = mul(x=%a, y=-1)
  %y: 1x3 = add(x=1, y=%y_negate_subtract_mul)
  return %y
}
"""


def test_infinities_zeros_and_the_edges_of_integers() -> None:
    edge = np.array([np.inf, -np.inf, 0, -0.0, 3e38], np.float32)
    program = difference((5,), (5,))
    after = check(program)
    for a in edge:
        inputs: dict[str, Any] = {"a": np.full(5, a, np.float32), "b": edge}
        assert_same_numbers(program, after, inputs)
    program = difference((3,), (3,), types.int32)
    ends = np.array([-(2**31), 2**31 - 1, 0], np.int32)
    inputs = {"a": ends, "b": ends[::-1].copy()}  # wraps round, before and after alike
    assert_same_numbers(program, check(program), inputs)


def test_the_same_value_twice() -> None:
    program = mb.program(input_specs=[mb.TensorSpec((2, 3))])(lambda a: mb.sub(x=a, y=a, name="y"))
    after = check(program)
    assert not np.any(run(after, random_inputs(program))["y"])


def test_two_consumers_chains_and_outputs_in_the_middle() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((3,))])
    def program(a: Var, b: Var) -> Any:
        first = mb.sub(x=a, y=b, name="first")
        second = mb.sub(x=first, y=b, name="second")
        return first, mb.sub(x=mb.exp(x=first), y=second, name="third"), mb.relu(x=second)

    after = check(program)
    assert [v.name for v in after.functions["main"].outputs][:2] == ["first", "third"]


def test_a_constant_with_other_readers_stays_for_them() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 9))])
    def program(a: Var) -> Any:
        row = mb.const(val=np.arange(9, dtype=np.float32), name="row")
        return mb.mul(x=mb.sub(x=a, y=row), y=row)

    after = check(program)
    rows = [constant(op.outputs[0]) for op in walk_ops(after) if op.op_type == "const"]
    assert sorted(float(np.sum(r)) for r in rows) == [-36, 36]


def test_nested_blocks_and_their_outputs() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((1,), dtype=types.bool)])
    def program(a: Var, flag: Var) -> Any:
        return mb.cond(
            pred=mb.squeeze(x=flag),
            _true_fn=lambda: mb.sub(x=a, y=mb.exp(x=a)),
            _false_fn=lambda: mb.sub(x=np.float32(1), y=a),
        )

    check(program)


def test_the_body_of_a_loop() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2,))])
    def program(a: Var) -> Any:
        return mb.while_loop(
            _cond=lambda i, x: mb.greater(x=i, y=np.int32(0)),
            _body=lambda i, x: (mb.sub(x=i, y=np.int32(1)), mb.sub(x=x, y=a)),
            loop_vars=(np.int32(3), a),
        )[1]

    check(program)


def test_symbolic_shapes_are_no_obstacle() -> None:
    shape = (get_new_symbol(), 3)
    check(difference(shape, (3,)))


def test_refuses_the_most_negative_integer() -> None:
    low = np.array([1, -(2**31)], np.int32)
    assert_refuses(STEP, difference((2,), low, types.int32), "holds -2147483648, which has no")


def test_leaves_the_one_that_is_subtracted_from_alone() -> None:
    """Only y is negated: the most negative integer may be an x."""
    check(difference((2,), np.array([1, -(2**31)], np.int32), types.int32, swap=True))


@pytest.mark.parametrize("dtype", [types.int16, types.uint16])
def test_refuses_other_integers(dtype: Any) -> None:
    @mb.program(input_specs=[mb.TensorSpec((2,), dtype=types.int32)], opset_version=IOS17)
    def program(a: Var) -> Any:
        return mb.sub(x=a, y=a)

    sub = next(op for op in walk_ops(program) if op.op_type == "sub")
    # Such a program passes no builder of coremltools, but a package may hold it.
    sub.y._sym_type = types.tensor(dtype, (2,))
    from anesurgery.errors import Refusal
    from anesurgery.rewriting.pattern import matches, op

    (m,), _ = matches(STEP.pattern(op), sub)
    refusal = STEP.check(m)
    assert isinstance(refusal, Refusal)
    assert f"the operands are {types.builtin_to_string(dtype)}" in refusal.reason


def test_survives_the_default_pipeline(settled: Callable[[Program], Program]) -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((3,))], opset_version=IOS17)
    def program(a: Var, b: Var) -> Any:
        x = mb.sub(x=mb.sub(x=np.float32(1), y=a), y=b)
        return mb.sub(x=x, y=np.arange(3, dtype=np.float32))

    after = settled(check(program))
    assert_same_numbers(program, after)
    assert not [op for op in walk_ops(after) if op.op_type == "sub"]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shapes_and_dtypes(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 5))
    full = data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    x, y = (
        tuple(n if data.draw(st.booleans()) else 1 for n in full)[data.draw(st.integers(0, rank - 1)) :]
        for _ in range(2)
    )
    check(difference(x, y, data.draw(st.sampled_from([types.fp16, types.fp32, types.int32]))))


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_converted_program(precision: str) -> None:
    """`1 - x`, `x - mean` and a subtraction of a buffer, as the torch front end writes them."""
    import torch

    class Subtracts(torch.nn.Module):
        row: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("row", torch.arange(1.0, 7.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            centred = x - x.mean(-1, keepdim=True)
            return (1.0 - torch.sigmoid(centred)) - self.row

    from anesurgery.mil import quiet_host

    x = torch.randn(2, 6)
    with quiet_host():
        model = ct.convert(
            torch.jit.trace(Subtracts(), x),  # type: ignore[no-untyped-call]
            inputs=[ct.TensorType(name="x", shape=(2, 6))],
            compute_precision=getattr(ct.precision, f"FLOAT{precision[2:]}"),
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
        )
    program: Program = model._mil_program
    assert [op for op in walk_ops(program) if op.op_type == "sub"]
    after, session = apply_pass(STEP, program)
    assert session.changes
    assert not [op for op in walk_ops(after) if op.op_type == "sub"]
    assert_same_numbers(program, after, {"x": x.numpy()})
    expected = Subtracts()(x).numpy()
    (found,) = run(after, {"x": x.numpy()}).values()
    assert_close(found, expected, rtol=2e-3 if precision == "fp16" else 1e-5)
