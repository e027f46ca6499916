"""Whole programs: control flow, lists, states, recurrence, arithmetic, inputs and errors, real packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anesurgery.errors import InterpretError, UnknownName
from anesurgery.interpret import TABLE, Evaluator, Executable, Listener, run
from anesurgery.interpret.arithmetic.precision import narrows
from anesurgery.interpret.ops.tensor import list_write
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.loading import load
from anesurgery.mil import Array, Operation, Program, Var, ct, mb, types

RNG = np.random.default_rng(0)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def test_a_loop_and_its_list() -> None:
    @mb.program(input_specs=[mb.TensorSpec((3,))], opset_version=ct.target.iOS15)
    def program(x: Var) -> Var:
        ls = mb.make_list(init_length=1, elem_shape=(3,), dynamic_length=True)

        def more(i: Var, value: Var, ls: Var) -> Var:
            return mb.less(x=i, y=4)

        def body(i: Var, value: Var, ls: Var) -> tuple[Var, Var, Var]:
            grown = mb.mul(x=value, y=np.float32(2))
            return mb.add(x=i, y=1), grown, mb.list_write(ls=ls, index=i, value=grown)

        _, _, ls = mb.while_loop(_cond=more, _body=body, loop_vars=(0, x, ls))
        return mb.list_gather(ls=ls, indices=[0, 3], name="rows"), mb.list_length(ls=ls, name="n")  # type: ignore[return-value]

    x = floats(3)
    made = run(program, {"x": x})
    np.testing.assert_allclose(made["rows"], np.stack([2 * x, 16 * x]), rtol=1e-6)
    assert int(made["n"]) == 4


def test_a_list_is_read_and_scattered() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS15)
    def program(x: Var) -> Var:
        ls = mb.make_list(init_length=2, elem_shape=(3,), dynamic_length=False)
        ls = mb.list_scatter(ls=ls, indices=[1, 0], value=x)
        return mb.list_read(ls=ls, index=0, name="row")

    x = floats(2, 3)
    np.testing.assert_array_equal(run(program, {"x": x})["row"], x[1])


@pytest.mark.parametrize("flag", [True, False])
def test_a_condition_picks_a_block(flag: bool) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1,), dtype=types.int32), mb.TensorSpec((3,))])
    def program(n: Var, x: Var) -> Var:
        pred = mb.squeeze(x=mb.greater(x=n, y=0))
        return mb.cond(
            pred=pred,
            _true_fn=lambda: mb.mul(x=x, y=np.float32(2)),
            _false_fn=lambda: mb.add(x=x, y=np.float32(1)),
            name="y",
        )

    x = floats(3)
    made = next(iter(run(program, {"n": np.array([int(flag)], np.int32), "x": x}).values()))
    np.testing.assert_allclose(made, 2 * x if flag else x + 1, rtol=1e-6)


def stateful() -> Program:
    @mb.program(
        input_specs=[mb.TensorSpec((2,), dtype=types.fp16), mb.StateTensorSpec((2,), dtype=types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def program(x: Var, total: Var) -> Var:
        grown = mb.add(x=mb.read_state(input=total), y=x)
        return mb.mul(x=mb.coreml_update_state(state=total, value=grown), y=np.float16(1), name="y")

    return program


def test_a_state_lives_between_calls_and_starts_fresh_without() -> None:
    executable, x = Executable(stateful()), np.array([1, 2], np.float16)
    state = executable.make_state()
    for n in (1, 2, 3):
        np.testing.assert_array_equal(executable({"x": x}, state=state)["y"], n * x)
    np.testing.assert_array_equal(executable({"x": x})["y"], x)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_lstm_as_torch_has_it(direction: str) -> None:
    torch.manual_seed(0)
    ours = torch.nn.LSTM(3, 4, bidirectional=direction == "bidirectional")
    x = torch.randn(5, 2, 3)

    def weights(suffix: str) -> list[Array]:  # torch orders the gates i, f, g, o and MIL i, f, o, g
        def order(name: str) -> Array:
            value = getattr(ours, f"{name}_l0{suffix}").detach().numpy()
            i, f, g, o = np.split(value, 4)
            return np.concatenate([i, f, o, g])

        return [order("weight_ih"), order("weight_hh"), order("bias_ih") + order("bias_hh")]

    wide = 8 if direction == "bidirectional" else 4

    @mb.program(input_specs=[mb.TensorSpec((5, 2, 3))], opset_version=ct.target.iOS15)
    def program(x: Var) -> Any:
        w = weights("")
        extra: dict[str, Any] = {}
        if direction == "bidirectional":
            b = weights("_reverse")
            extra = {"weight_ih_back": b[0], "weight_hh_back": b[1], "bias_back": b[2]}
        zero = np.zeros((2, wide), np.float32)
        return mb.lstm(
            x=x,
            initial_h=zero,
            initial_c=zero,
            weight_ih=w[0],
            weight_hh=w[1],
            bias=w[2],
            direction=direction,
            output_sequence=True,
            **extra,
        )

    made = list(run(program, {"x": x.numpy()}).values())
    with torch.no_grad():
        # the outputs of a reversed sequence stay in the order in which they were made
        y, (h, c) = ours(x.flip(0) if direction == "reverse" else x)
    for found, expected in zip(made, (y, torch.cat(list(h), -1), torch.cat(list(c), -1)), strict=True):
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-6)


def test_dynamic_shapes_are_bound_by_the_inputs() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, mb_symbol()))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        three = np.float32(3)
        return mb.shape(x=x, name="shape"), mb.fill_like(ref_tensor=x, value=three, name="filled")

    for n in (3, 5):
        made = run(program, {"x": floats(2, n)})
        np.testing.assert_array_equal(made["shape"], [2, n])
        np.testing.assert_array_equal(made["filled"], np.full((2, n), 3))


def test_a_shape_from_pieces_of_others() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 6)), mb.TensorSpec((3, 4))], opset_version=ct.target.iOS16)
    def program(x: Var, y: Var) -> Var:
        return mb.reshape_like(
            x=x, ref_tensors=(y, y), begins=[1, 0], ends=[0, 1], end_masks=[True, False], name="z"
        )

    x = floats(2, 6)
    np.testing.assert_array_equal(run(program, {"x": x, "y": floats(3, 4)})["z"], x.reshape(4, 3))


def mb_symbol() -> Any:
    from coremltools.converters.mil.mil import get_new_symbol

    return get_new_symbol()


def test_fp16_rounds_after_each_op_and_fp32_does_not() -> None:
    @mb.program(input_specs=[mb.TensorSpec((3,), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        return mb.sub(x=mb.add(x=x, y=np.float16(2048)), y=np.float16(2048), name="y")

    x = np.array([0.5, 1, 3], np.float16)
    exact, stored = run(program, {"x": x})["y"], run(program, {"x": x}, precision="fp16")["y"]
    np.testing.assert_array_equal(exact, [0.5, 1, 3])
    assert exact.dtype == np.float32
    assert stored.dtype == np.float16
    np.testing.assert_array_equal(stored, (x + np.float16(2048)) - np.float16(2048))
    assert stored[0] == 0


def test_fp16_sums_are_accumulated_in_fp32() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 4096), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        return mb.matmul(x=x, y=np.ones((4096, 1), np.float16), name="y")

    assert run(program, {"x": np.ones((1, 4096), np.float16)}, precision="fp16")["y"] == 4096


def adder() -> Program:
    specs = [mb.TensorSpec((2, 3)), mb.TensorSpec((3,), dtype=types.int32)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS16)
    def program(tokens: Var, mask: Var) -> Var:
        return mb.add(x=tokens, y=mb.cast(x=mask, dtype="fp32", name="wide"), name="y")

    return program


X, MASK = floats(2, 3), np.ones(3, np.int32)


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        ({"tokens": X}, InterpretError, "missing inputs: mask; the model takes tokens, mask"),
        ({"tokens": X, "mask": MASK, "masc": MASK}, UnknownName, "unknown input 'masc'; did you mean 'mask'"),
        ({"tokens": X.T, "mask": MASK}, InterpretError, "input 'tokens' has shape (3, 2), expected (2, 3)"),
        ({"tokens": X, "mask": X[0]}, InterpretError, "input 'mask' holds float32, expected int32"),
        ({"tokens": X, "mask": MASK.astype(np.int64) + 2**40}, InterpretError, "do not fit into int32"),
    ],
)
def test_bad_inputs_are_explained(inputs: Mapping[str, Array], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        run(adder(), inputs)
    assert words in str(raised.value)


def test_a_wrong_precision_is_an_error() -> None:
    with pytest.raises(InterpretError, match="precision='bf16'; it may be 'fp32' or 'fp16'"):
        run(adder(), {"tokens": X, "mask": MASK}, precision="bf16")


def test_an_unknown_op_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TABLE, "local_response_norm")

    @mb.program(input_specs=[mb.TensorSpec((1, 1, 4, 4))], opset_version=ct.target.iOS15)
    def program(x: Var) -> Var:
        return mb.local_response_norm(x=x, size=3, name="norm")

    with pytest.raises(InterpretError, match="op norm: the interpreter does not know 'local_response_norm'"):
        run(program, {"x": floats(1, 1, 4, 4)})


def test_a_failing_op_is_printed_with_what_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    from anesurgery.interpret.table import TABLE, Implementation

    def broken(x: Any, y: Any) -> Any:
        raise ValueError("out of order")

    monkeypatch.setitem(TABLE, "add", Implementation(broken, False))
    with pytest.raises(InterpretError) as raised:
        run(adder(), {"tokens": X, "mask": MASK})
    words = str(raised.value)
    assert "op y failed: ValueError: out of order" in words
    assert "%y: 2x3 = add(x=%tokens, y=%wide)" in words
    assert "x=2x3 float32, y=3 float32" in words


def test_values_by_name_and_a_listener() -> None:
    seen: list[str] = []

    class Log(Listener):
        def after(self, op: Operation, outputs: Sequence[Any]) -> None:
            seen.append(op.name)

    made = run(adder(), {"tokens": X, "mask": MASK}, outputs=["wide", "y"], listener=Log())
    np.testing.assert_array_equal(made["wide"], np.ones(3))
    np.testing.assert_allclose(made["y"], X + 1, rtol=1e-6)
    assert seen == ["wide", "y"]
    with pytest.raises(UnknownName, match="did you mean 'wide'"):
        run(adder(), {"tokens": X, "mask": MASK}, outputs=["wid"])


PACKAGES = [
    "anemll_multifunction",
    "basic_pitch_nmp",
    "dtln_aec_128_part1_fp16",
    "silero_unified",
    "silero_unified_palette_4bit",
]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", PACKAGES)
def test_real_packages_run_the_same_every_time(corpus: Path, name: str) -> None:
    program = load(corpus / f"{name}.mlpackage").program
    for function in program.functions:
        inputs = sample_inputs(program, function=function)
        once = run(program, inputs, function=function)
        again = run(program, inputs, function=function)
        assert once
        for output, value in once.items():
            np.testing.assert_array_equal(value, again[output])
            assert value.size
            assert np.any(value != 0) or name.startswith("dtln")


@pytest.mark.slow
def test_a_real_network_agrees_with_its_original(corpus: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    program = load(corpus / "basic_pitch_nmp.mlpackage").program
    inputs = sample_inputs(program)
    session = onnxruntime.InferenceSession(str(corpus / "basic_pitch_nmp.onnx"))
    reference = session.run(None, {session.get_inputs()[0].name: next(iter(inputs.values()))})
    found = {v.shape: [] for v in reference}  # type: ignore[var-annotated]
    for value in run(program, inputs).values():
        found[value.shape].append(value)
    for value in reference:
        best = min(np.abs(value - other).max() for other in found[value.shape])
        assert best <= 1e-4 * np.abs(value).max()


def test_a_large_result_is_rounded_without_touching_what_was_given() -> None:
    """The wrong version rounds in the memory of an input that is only seen in another shape."""

    @mb.program(input_specs=[mb.TensorSpec((512, 512), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Any:
        return mb.reshape(x=x, shape=[1, 512, 512], name="seen"), mb.mul(x=x, y=np.float16(3), name="made")

    function = program.functions["main"]
    ops = [op for op in function.operations if op.op_type != "const"]
    given = torch.full((512, 512), 1 + 2.0**-20)
    seen, made = Evaluator(ops, function.outputs, "fp16")({function.inputs["x"]: given})
    assert bool((given == 1 + 2.0**-20).all())
    assert bool((seen == 1).all())
    assert bool((made == 3).all())


def test_a_cast_to_fewer_bits_of_a_float_narrows() -> None:
    """The wrong version compares bytes alone: then casts to int8 and bool are roundings too."""

    def casts(x: Var) -> tuple[Var, ...]:
        half = mb.cast(x=x, dtype="fp16")
        wide = mb.cast(x=half, dtype="fp32")
        to_others = [mb.cast(x=v, dtype=dtype) for v in (x, half) for dtype in ("int32", "int8", "bool")]
        return half, wide, mb.cast(x=wide, dtype="fp16"), *to_others

    program = mb.program(input_specs=[mb.TensorSpec((2,))], opset_version=ct.target.iOS17)(casts)
    assert [narrows(v.op) for v in program.functions["main"].outputs] == [True] + [False] * 8


def test_outputs_share_no_memory_with_each_other() -> None:
    """The wrong version gives views: whoever writes into one output changes the other."""

    @mb.program(input_specs=[mb.TensorSpec((2, 3))])
    def program(x: Var) -> Any:
        bent = mb.relu(x=x, name="bent")
        return bent, mb.reshape(x=bent, shape=[3, 2], name="seen"), mb.squeeze(x=bent, name="squeezed")

    made = run(program, {"x": np.ones((2, 3), np.float32)})
    made["bent"][...] = 7
    assert made["seen"].sum() == made["squeezed"].sum() == 6


def test_a_list_is_written_from_its_end_as_it_is_read() -> None:
    numbers = [torch.tensor(n) for n in range(3)]
    assert list_write(numbers, torch.tensor(-1), torch.tensor(9)) == [0, 1, 9]
    with pytest.raises(InterpretError, match="index -4 on axis 0 of 3"):
        list_write(numbers, torch.tensor(-4), torch.tensor(9))
