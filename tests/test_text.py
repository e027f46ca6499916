"""The canonical text: stable, complete enough to compare programs by, short enough to read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol

from anesurgery.loading import clone
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.text import operand_text, to_text, type_text


def program_of(body: Any, *specs: Any, ios: Any = ct.target.iOS18) -> Program:
    specs = specs or (mb.TensorSpec((2, 3)),)
    bodies = {1: lambda a: body(a), 2: lambda a, b: body(a, b)}
    made: Program = mb.program(input_specs=list(specs), opset_version=ios)(bodies[len(specs)])
    return made


def lines(program: Program) -> list[str]:
    """The lines of the ops."""
    return [line.strip() for line in to_text(program).splitlines()[1:-2]]


def line(body: Any, *specs: Any) -> str:
    return lines(program_of(body, *specs))[-1]


def test_a_whole_program() -> None:
    def body(a: Var) -> Any:
        return mb.mul(x=a, y=np.float32(-1), name="y"), mb.exp(x=a, name="e")

    assert to_text(program_of(body)) == (
        "main(%a: 2x3) {\n  %y: 2x3 = mul(x=%a, y=-1)\n  %e: 2x3 = exp(x=%a)\n  return %y, %e\n}"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32(0.1), "0.1"),
        (np.float32(1e-12), "1e-12"),
        (np.float32(-np.inf), "-inf"),
        (np.float32(np.nan), "nan"),
        (np.float32(3), "3"),
        (np.arange(3, dtype=np.float32), "[0, 1, 2]"),
        (np.array([[1], [2]], np.float32), "[[1], [2]]"),
        (np.zeros((2, 4), np.float32), "[[0, 0, 0, 0], [0, 0, 0, 0]]"),
        (np.zeros((3, 3), np.float32), "const<3x3>"),
    ],
)
def test_constants(value: Any, text: str) -> None:
    constant = mb_const(value)
    assert operand_text(constant) == text


def mb_const(value: Any) -> Var:
    holder: dict[str, Var] = {}

    def body(a: Var) -> Any:
        holder["c"] = mb.const(val=value, name="c")
        return mb.identity(x=holder["c"]), mb.exp(x=a)

    program_of(body)
    return holder["c"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "True"), ("same", '"same"'), (np.int32(7), "7"), (np.array([True, False]), "[True, False]")],
)
def test_constants_of_other_kinds(value: Any, text: str) -> None:
    assert operand_text(mb_const(value)) == text


def test_element_types() -> None:
    spec = mb.TensorSpec((2, 3), dtype=types.fp16)
    found = line(lambda a: mb.cast(x=a, dtype="int32", name="y"), spec)
    assert found == '%y: 2x3xint32 = cast(x=%a, dtype="int32")'
    found = line(lambda a: mb.add(x=a, y=np.arange(9, dtype=np.float16)[:, None, None], name="y"), spec)
    assert found == "%y: 9x2x3xfp16 = add(x=%a, y=const<9x1x1xfp16>)"
    found = line(lambda a: mb.greater(x=a, y=np.float16(0), name="y"), spec)
    assert found == "%y: 2x3xbool = greater(x=%a, y=0)"


def test_scalars_name_their_type() -> None:
    assert line(lambda a: mb.reduce_sum(x=a, keep_dims=False, name="y")) == "%y: fp32 = reduce_sum(x=%a)"


def test_shared_large_constants_have_a_name_in_front() -> None:
    def body(a: Var) -> Any:
        table = mb.const(val=np.ones((3, 3), np.float32), name="table")
        return mb.add(x=mb.matmul(x=a, y=table, name="p"), y=mb.matmul(x=a, y=table, name="q"), name="y")

    found = lines(program_of(body))
    assert found[0] == "%p: 2x3 = matmul(x=%a, y=%table:const<3x3>)"
    assert found[1] == "%q: 2x3 = matmul(x=%a, y=%table:const<3x3>)"


def test_defaults_are_left_out_and_others_stand() -> None:
    plain = line(lambda a: mb.matmul(x=a, y=a, transpose_y=True, name="y"))
    assert plain == "%y: 2x2 = matmul(x=%a, y=%a, transpose_y=True)"
    assert line(lambda a: mb.softmax(x=a, axis=-1, name="y")) == "%y: 2x3 = softmax(x=%a)"
    assert line(lambda a: mb.softmax(x=a, axis=0, name="y")) == "%y: 2x3 = softmax(x=%a, axis=0)"


def test_several_outputs_and_lists() -> None:
    def body(a: Var) -> Any:
        p, q = mb.split(x=a, split_sizes=[1, 2], axis=1, name="s")
        return mb.concat(values=[q, p], axis=1, name="y")

    found = lines(program_of(body))
    assert found[0].startswith("%s_0: 2x1, %s_1: 2x2 = split(x=%a, split_sizes=[1, 2], axis=1")
    assert found[1] == "%y: 2x3 = concat(values=(%s_1, %s_0), axis=1)"


def test_nested_blocks_are_indented() -> None:
    def body(a: Var, flag: Var) -> Any:
        return mb.cond(
            pred=mb.squeeze(x=flag, name="p"),
            _true_fn=lambda: mb.exp(x=a, name="e"),
            _false_fn=lambda: mb.relu(x=a, name="r"),
            name="y",
        )

    text = to_text(program_of(body, mb.TensorSpec((2, 3)), mb.TensorSpec((1,), dtype=types.bool)))
    assert "  %y: 2x3 = cond(pred=%p)\n    block() {\n      %e: 2x3 = exp(x=%a)\n" in text
    assert "      return %r\n    }\n  return %y\n}" in text


def test_states_and_symbols() -> None:
    specs = [mb.StateTensorSpec((2, 3), dtype=types.fp16), mb.TensorSpec((2, 3), dtype=types.fp16)]
    program = program_of(lambda a, b: mb.add(x=mb.read_state(input=a), y=b, name="y"), *specs)
    assert to_text(program).startswith("main(%a: state<2x3xfp16>, %b: 2x3xfp16) {")
    program = program_of(lambda a: mb.exp(x=a), mb.TensorSpec((get_new_symbol(), 3)))
    assert type_text(program.functions["main"].inputs["a"]) == "?x3"


def test_functions_stand_one_after_another() -> None:
    program = program_of(lambda a: mb.exp(x=a))
    program.functions["other"] = program_of(lambda a: mb.relu(x=a)).functions["main"]
    first, second = to_text(program).split("\n\n")
    assert first.startswith("main(")
    assert second.startswith("other(")


def test_one_op_alone_and_one_block_alone() -> None:
    program = program_of(lambda a: mb.exp(x=a, name="y"))
    op = next(walk_ops(program))
    assert to_text(op) == "%y: 2x3 = exp(x=%a)"
    assert to_text(program.functions["main"]).endswith("return %y\n}")


def test_the_text_is_stable_and_a_copy_has_the_same() -> None:
    def body(a: Var) -> Any:
        x = mb.layer_norm(x=a, axes=[-1], gamma=np.ones(3, np.float32), epsilon=np.float32(1e-5))
        return mb.gelu(x=mb.linear(x=x, weight=np.ones((4, 3), np.float32)), mode="TANH_APPROXIMATION")

    program = program_of(body)
    assert to_text(program) == to_text(program)
    assert to_text(clone(program).program) == to_text(program)


def test_a_change_of_one_small_number_shows() -> None:
    first = program_of(lambda a: mb.add(x=a, y=np.float32(1), name="y"))
    second = program_of(lambda a: mb.add(x=a, y=np.float32(1.001), name="y"))
    assert to_text(first) != to_text(second)
