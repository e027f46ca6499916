"""What goes into a run and what it tells: inputs, states, nested blocks, errors, listeners, values by name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import get_new_symbol

from anesurgery.errors import InterpretError, UnknownName
from anesurgery.files.package import save
from anesurgery.interpret import TABLE, Executable, Listener, Unsupported, run
from anesurgery.interpret.ops import control
from anesurgery.interpret.state import Box
from anesurgery.interpret.table import Meaning
from anesurgery.loading import load
from anesurgery.mil import Array, Operation, Program, Var, ct, mb, types

RNG = np.random.default_rng(0)
KINDS: dict[str, Any] = {
    "tokens": types.int32,
    "scale": types.fp16,
    "small": types.int8,
    "middle": types.int16,
    "byte": types.uint8,
    "flag": types.bool,
}


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def taking_every_type() -> Program:
    """Inputs of every type, as the int32 or fp16 outputs `<name>_out`."""
    specs = [mb.TensorSpec((2, 3), dtype=kind) for kind in KINDS.values()]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(tokens: Var, scale: Var, small: Var, middle: Var, byte: Var, flag: Var) -> Any:
        return (
            mb.add(x=tokens, y=1, name="tokens_out"),
            mb.mul(x=scale, y=np.float16(2), name="scale_out"),
            *(mb.cast(x=v, dtype="int32", name=f"{v.name}_out") for v in (small, middle, byte, flag)),
        )

    return program


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

    @mb.program(input_specs=[mb.TensorSpec((get_new_symbol(), 3))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        return (
            mb.matmul(x=x, y=weight, name="product"),
            mb.reduce_sum(x=mb.relu(x=x), axes=[0], name="sum"),
            mb.concat(values=(x, more), axis=0, name="joined"),
            mb.transpose(x=x, perm=[1, 0], name="turned"),
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

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(x: Var, y: Var) -> Var:
        return mb.add(x=x, y=y, name="sum")

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


def stateful() -> Program:
    specs = [mb.TensorSpec((2,), types.fp16), mb.StateTensorSpec((2,), types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Var, total: Var) -> Var:
        grown = mb.add(x=mb.read_state(input=total), y=x)
        return mb.add(x=mb.coreml_update_state(state=total, value=grown), y=np.float16(1))

    return program


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


PALETTE = np.array([0.5, -2, 3, 7], np.float32)


def branching() -> Program:
    """A loop in a branch; both read constants, compressed weights and values from outside.

    `y` is x doubled and shifted n times if n is positive, else x times the palette.
    """
    packed = np.array([0b11100100], np.uint8)  # the places 0, 1, 2, 3

    @mb.program(input_specs=[mb.TensorSpec((4,)), mb.TensorSpec((1,), dtype=types.int32)])
    def program(x: Var, n: Var) -> Var:
        def unpack(name: str) -> Var:
            return mb.constexpr_lut_to_dense(
                lut=PALETTE, indices=packed, shape=np.array([4], np.uint32), name=name
            )

        times, outside, shift = mb.squeeze(x=n), unpack("outside"), mb.relu(x=x, name="shift")

        def body(i: Var, value: Var) -> tuple[Var, Var]:
            scaled = mb.mul(x=value, y=unpack("inside"), name="scaled")
            return mb.add(x=i, y=1), mb.add(x=mb.add(x=scaled, y=shift), y=outside)

        def loop() -> Var:
            start = (np.int32(0), mb.mul(x=x, y=np.float32(2), name="doubled"))
            return mb.while_loop(
                _cond=lambda i, value: mb.less(x=i, y=times), _body=body, loop_vars=start, name="loop"
            )[1]

        positive = mb.greater(x=times, y=0, name="positive")
        return mb.cond(pred=positive, _true_fn=loop, _false_fn=lambda: mb.mul(x=x, y=outside), name="y")

    return program


def branched(x: Array, n: int) -> Array:
    if n <= 0:
        return x * PALETTE
    value = x * np.float32(2)
    for _ in range(n):
        value = value * PALETTE + np.maximum(x, 0) + PALETTE
    return value


def test_nested_blocks_see_what_is_outside(tmp_path: Path) -> None:
    program, x = branching(), floats(4)
    path = save(load(program), tmp_path / "branching.mlpackage")
    for model in (program, path):
        for n in (3, 0, 1):
            (made,) = run(model, {"x": x, "n": [n]}).values()
            np.testing.assert_allclose(made, branched(x, n), rtol=1e-5)


class Log(Listener):
    """What happens, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        self.lines.append(f"<{op.op_type}")
        assert op.name != "scaled" or set(inputs) == {"x", "y"}

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        assert len(outputs) == len(op.outputs)
        self.lines.append(f"{op.op_type}>")


def test_a_listener_hears_of_nested_ops_between_before_and_after() -> None:
    log = Log()
    run(branching(), {"x": floats(4), "n": [1]}, listener=log)

    def done(*ops: str) -> list[str]:
        return [line for op in ops for line in (f"<{op}", f"{op}>")]

    rounds = [*done("less"), *done("mul", "add", "add", "add"), *done("less")]
    inner = [*done("mul"), "<while_loop", *rounds, "while_loop>"]
    expected = [*done("squeeze", "relu", "greater"), "<cond", *inner, "cond>"]
    assert log.lines == expected


def test_values_are_given_by_name_constants_too() -> None:
    x, log = floats(4), Log()
    values = {"x": x, "n": [0]}
    made = run(branching(), values, outputs=["shift", "outside", "positive"], listener=log)
    assert list(made) == ["shift", "outside", "positive"]
    np.testing.assert_array_equal(made["shift"], x.clip(min=0))
    np.testing.assert_array_equal(made["outside"], PALETTE)
    assert not made["positive"]
    assert "cond>" in log.lines
    with pytest.raises(UnknownName, match="unknown value 'shif'; did you mean 'shift'"):
        run(branching(), values, outputs=["shif"])
    with pytest.raises(UnknownName, match="unknown value 'scaled'"):
        run(branching(), values, outputs=["scaled"])


def test_an_op_that_nobody_knows_is_named_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(TABLE, "mul")
        with pytest.raises(Unsupported, match=r"does not know 'mul'; add a meaning with @impl"):
            Executable(branching())
    monkeypatch.delitem(control.TABLE, "cond")
    with pytest.raises(Unsupported, match="op y: the interpreter does not know 'cond'"):
        Executable(branching())


def test_a_loop_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "LOOP_LIMIT", 5)
    values = {"x": floats(4), "n": [5]}
    with pytest.raises(InterpretError, match=r"op loop: the loop still runs after 5 rounds"):
        run(branching(), values)
    monkeypatch.setattr(control, "LOOP_LIMIT", 6)
    run(branching(), values)


@pytest.mark.parametrize("error", [ValueError("out of order"), Unsupported("only on Sundays")])
def test_a_failing_op_is_shown_in_its_surroundings(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 3), types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        for i, op_type in enumerate(("relu", "sin", "cos", "tanh", "sign", "exp", "abs")):
            x = getattr(mb, op_type)(x=x, name=f"v{i}")
        return x

    def broken(x: Any) -> Any:
        raise error

    monkeypatch.setitem(TABLE, "tanh", Meaning(broken, False))
    with pytest.raises(InterpretError) as raised:
        run(program, {"x": floats(2, 3)})
    kind = "" if isinstance(error, Unsupported) else "ValueError: "
    assert type(raised.value) is (InterpretError if kind else Unsupported)
    assert str(raised.value).splitlines() == [
        f"op v3 failed: {kind}{error}",
        "    %v1: 2x3xfp16 = sin(x=%v0)",
        "    %v2: 2x3xfp16 = cos(x=%v1)",
        "  > %v3: 2x3xfp16 = tanh(x=%v2)",
        "    %v4: 2x3xfp16 = sign(x=%v3)",
        "    %v5: 2x3xfp16 = exp(x=%v4)",
        "  on x=2x3 float32",
    ]


def test_a_failure_in_a_nested_block_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: Any, y: Any) -> Any:
        if x.ndim:
            raise ValueError("out of order")
        return x + y

    monkeypatch.setitem(TABLE, "add", Meaning(broken, False))
    with pytest.raises(InterpretError) as raised:
        run(branching(), {"x": floats(4), "n": [1]})
    words = str(raised.value)
    assert words.count("failed") == words.count(" > ") == 1
    assert "mul(x=%" in words


def test_what_is_no_state_is_told_from_one() -> None:
    executable, x = Executable(stateful()), np.array([1, 2], np.float16)
    for given in ({"acc": np.zeros(2)}, np.zeros(2)):
        with pytest.raises(InterpretError, match=r"is made with make_state\(\)"):
            executable({"x": x}, state=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", [None, "ane:", "ane:m1", "FP16"])
def test_a_precision_that_is_none(precision: Any) -> None:
    with pytest.raises(InterpretError, match="may be 'fp32'|nothing is known of the arithmetic"):
        Executable(stateful(), precision=precision)


def test_outputs_are_the_users_own() -> None:
    stored = np.arange(70000, dtype=np.float32)

    @mb.program(input_specs=[mb.TensorSpec((3,))])
    def program(x: Var) -> Any:
        return mb.identity(x=x, name="same"), mb.identity(x=mb.const(val=stored), name="stored")

    executable = Executable(program)
    for x in (np.zeros(3, np.float32), torch.zeros(3)):
        made = executable({"x": x})
        for value in made.values():
            value[0] = 99
        assert float(x[0]) == 0
        assert executable({"x": x})["stored"][0] == 0
