"""What goes into a run and what it tells: inputs, states, nested blocks, errors, listeners, values by name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import get_new_symbol
from stateful_program import stateful

from anesurgery.errors import InterpretError, UnknownName
from anesurgery.interpret import Executable, run
from anesurgery.interpret.state import Box
from anesurgery.mil import Array, Program, Var, ct, mb, types

RNG = np.random.default_rng(0)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


KINDS: dict[str, Any] = {
    "tokens": types.int32,
    "scale": types.fp16,
    "small": types.int8,
    "middle": types.int16,
    "byte": types.uint8,
    "flag": types.bool,
}


def taking_every_type() -> Program:
    """Inputs of every type, as the int32 or fp16 outputs `<name>_out`."""
    specs = [mb.TensorSpec((2, 3), dtype=kind) for kind in KINDS.values()]

    return mb.program(input_specs=specs, opset_version=ct.target.iOS17)(
        lambda tokens, scale, small, middle, byte, flag: (
            mb.add(x=tokens, y=1, name="tokens_out"),
            mb.mul(x=scale, y=np.float16(2), name="scale_out"),
            *(mb.cast(x=v, dtype="int32", name=f"{v.name}_out") for v in (small, middle, byte, flag)),
        )
    )


GOOD: dict[str, Any] = {name: np.ones((2, 3)) for name in KINDS}


def holding(number: Any) -> Array:
    return np.array([[0, 1, number], [1, 0, 1]])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tokens", np.ones(3), "has shape (3,), expected (2, 3)"),
        ("tokens", np.ones((3, 2)), "has shape (3, 2), expected (2, 3)"),
        ("tokens", np.ones((2, 3), complex), "holds complex128, expected int32"),
        ("scale", np.full((2, 3), None), "holds object, expected float16"),
        ("tokens", holding(0.5), "holds float64, expected int32; numbers such as 0.5 do not fit"),
        ("tokens", holding(np.nan), "numbers such as nan do not fit into int32"),
        ("tokens", [[1, 2], [3]], "is not an array: its rows differ in length"),
        ("tokens", holding(2**31), "holds int64, expected int32; numbers such as 2147483648"),
        ("small", holding(128), "numbers such as 128 do not fit into int8"),
        ("middle", holding(-32769), "numbers such as -32769 do not fit into int16"),
        ("byte", holding(-1), "numbers such as -1 do not fit into uint8"),
        ("flag", holding(2), "numbers such as 2 do not fit into bool"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(InterpretError) as raised:
        run(taking_every_type(), GOOD | {name: value})
    assert str(raised.value).startswith(f"input {name!r} ")
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"tokens": None}, InterpretError, "missing inputs: tokens; the model takes tokens, scale"),
        ({"tokenz": 1}, UnknownName, "unknown input 'tokenz'; did you mean 'tokens'?"),
        ({"xyzzy": 1}, UnknownName, "unknown input 'xyzzy'; known: byte, flag, middle, scale"),
    ],
)
def test_names_of_inputs_are_checked(change: Mapping[str, Any], error: type[Exception], words: str) -> None:
    given = {k: v for k, v in (GOOD | dict(change)).items() if v is not None}
    with pytest.raises(error) as raised:
        run(taking_every_type(), given)
    assert words in str(raised.value)


def test_numbers_that_fit_are_taken_from_any_type() -> None:
    whole = [[1, 0, 1], [0, 1, 1]]
    wanted, tensor = np.array(whole), torch.tensor(whole)
    for given in (whole, wanted.astype(np.float32), wanted == 1, tensor, tensor.bfloat16()):
        made = run(taking_every_type(), dict.fromkeys(KINDS, given))
        np.testing.assert_array_equal(made.pop("tokens_out"), wanted + 1)
        np.testing.assert_array_equal(made.pop("scale_out"), wanted * 2)
        for value in made.values():
            np.testing.assert_array_equal(value, wanted)
            assert value.dtype == np.int32


def test_extremes_pass_unharmed_and_large_floats_become_infinite() -> None:
    extremes = {"small": -128, "middle": 32767, "byte": 255, "tokens": -(2**31)}
    given = GOOD | {name: holding(n) for name, n in extremes.items()} | {"scale": holding(-1e9)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = run(taking_every_type(), given)
    for name, number in extremes.items():
        assert made[f"{name}_out"][0, 2] == number + (name == "tokens")
    assert made["scale_out"][0, 2] == -np.inf


def test_numbers_of_few_bits_inside_and_as_outputs() -> None:
    @mb.program(input_specs=[mb.TensorSpec((4,))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        def cast(dtype: str, name: str | None = None) -> Var:
            return mb.cast(x=x, dtype=dtype, name=name or f"as_{dtype}")

        low = mb.gather(x=np.arange(10, dtype=np.int8), indices=cast("uint16"), axis=0, name="low")
        both = mb.logical_and(x=cast("bool"), y=[True, False, True, True], name="both")
        return cast("int8"), cast("int16"), cast("uint8"), low, both, mb.shape(x=x, name="shape")

    x = np.array([0, 3, 7, 9], np.float32)
    expected: dict[str, Array] = {
        "as_int8": x.astype(np.int8),
        "as_int16": x.astype(np.int16),
        "as_uint8": x.astype(np.uint8),
        "low": x.astype(np.int8),
        "both": np.array([False, False, True, True]),
        "shape": np.array([4], np.int32),
    }
    for name, value in run(program, {"x": x}).items():
        np.testing.assert_array_equal(value, expected[name])
        assert value.dtype == expected[name].dtype


@pytest.mark.parametrize("n", [0, 1, 4])
def test_an_axis_may_be_empty(n: int) -> None:
    weight, more = floats(3, 2), floats(2, 3)

    program = mb.program(input_specs=[mb.TensorSpec((get_new_symbol(), 3))], opset_version=ct.target.iOS17)(
        lambda x: (
            mb.matmul(x=x, y=weight, name="product"),
            mb.reduce_sum(x=mb.relu(x=x), axes=[0], name="sum"),
            mb.concat(values=(x, more), axis=0, name="joined"),
            mb.transpose(x=x, perm=[1, 0], name="turned"),
        )
    )

    x = floats(n, 3)
    expected = {
        "product": x @ weight,
        "sum": x.clip(min=0).sum(0),
        "joined": np.concatenate([x, more]),
        "turned": x.T,
    }
    made = run(program, {"x": x})
    for name, value in expected.items():
        assert made[name].shape == value.shape
        np.testing.assert_allclose(made[name], value, rtol=1e-5, atol=1e-6)


def test_lengths_of_one_symbol_must_agree() -> None:
    n = get_new_symbol()
    specs = [mb.TensorSpec((n,)), mb.TensorSpec((2, n))]

    program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(
        lambda x, y: mb.add(x=x, y=y, name="sum")
    )

    x, y = floats(3), floats(2, 3)
    with pytest.raises(InterpretError, match=r"'y' has shape \(2, 1\), expected \(2, 3\)"):
        run(program, {"x": x, "y": y[:, :1]})
    with pytest.raises(InterpretError, match=r"'x' has shape \(2, 3\), expected \(any,\)"):
        run(program, {"x": y, "y": y})


@pytest.mark.parametrize("given", [3.0, np.float64(3), [3.0], torch.tensor(3), np.array(3)])
def test_scalars_go_in_and_come_out(given: Any) -> None:
    scalar = mb.placeholder(shape=(), dtype=types.fp32, allow_rank0_input=True)

    @mb.program(input_specs=[scalar, mb.TensorSpec((2,))], opset_version=ct.target.iOS17)
    def program(s: Var, x: Var) -> Any:
        total = mb.reduce_sum(x=x, axes=[0], keep_dims=False)
        return mb.mul(x=s, y=total, name="y"), mb.greater(x=s, y=total, name="more")

    made = run(program, {"s": given, "x": np.array([1, 4])})
    for name, value in {"y": np.float32(15), "more": np.False_}.items():
        assert (made[name].shape, made[name].dtype) == ((), value.dtype)
        assert made[name] == value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"total": Box(torch.zeros(3))}, "{'total': (3,)}, expected {'total': (2,)}"),
        ({"sum": Box(torch.zeros(2))}, "{'sum': (2,)}, expected {'total': (2,)}"),
        ({}, "{}, expected {'total': (2,)}"),
    ],
)
def test_the_state_of_another_model_is_refused(given: dict[str, Box], words: str) -> None:
    with pytest.raises(InterpretError) as raised:
        run(stateful(), {"x": floats(2)}, state=given)
    assert f"the state is of another model: {words}; make it with make_state()" in str(raised.value)


def test_a_state_serves_each_function_that_declares_it_alike() -> None:
    state, x = Executable(stateful()).make_state(), np.array([1, 2], np.float16)
    for n in (1, 2):
        (made,) = run(stateful(), {"x": x}, state=state).values()
        np.testing.assert_array_equal(made, n * x + 1)
    np.testing.assert_array_equal(state["total"].value, 2 * x)


def test_a_state_is_rounded_as_it_is_stored() -> None:
    x = np.array([2048, 0.1], np.float16)
    for precision, expected in (("fp16", [2048, 0.1]), ("fp32", [2049, 0.1])):
        state = {"total": Box(torch.tensor([1.0, 0.0]))}
        run(stateful(), {"x": x}, state=state, precision=precision)
        dtype = np.float16 if precision == "fp16" else np.float32
        np.testing.assert_allclose(state["total"].value, np.array(expected, dtype), rtol=3e-4)
        assert state["total"].value[0] == expected[0]
