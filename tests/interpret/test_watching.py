"""What a run tells: nested blocks, listeners, values by name, errors in their surroundings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stateful_program import stateful

from anesurgery.errors import InterpretError, UnknownName
from anesurgery.files.package import save
from anesurgery.interpret import TABLE, Executable, Listener, Unsupported, core, run
from anesurgery.interpret.table import Implementation
from anesurgery.loading import load
from anesurgery.mil import Array, Operation, Program, Var, ct, mb, types

RNG = np.random.default_rng(0)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


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
    monkeypatch.delitem(core.CONTROL_FLOW, "cond")
    with pytest.raises(Unsupported, match="op y: the interpreter does not know 'cond'"):
        Executable(branching())


def test_a_loop_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "LOOP_LIMIT", 5)
    values = {"x": floats(4), "n": [5]}
    with pytest.raises(InterpretError, match=r"op loop: the loop still runs after 5 rounds"):
        run(branching(), values)
    monkeypatch.setattr(core, "LOOP_LIMIT", 6)
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

    monkeypatch.setitem(TABLE, "tanh", Implementation(broken, False))
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

    monkeypatch.setitem(TABLE, "add", Implementation(broken, False))
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
