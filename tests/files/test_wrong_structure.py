"""Specifications that contradict themselves, each refused in words; the fuzzer found them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzzing
import pytest
import structural
from bad_networks import build as network
from structure import ops

import anesurgery as ane
from anesurgery.errors import InterpretError, LoadError
from anesurgery.files.mil_text import write_mil
from anesurgery.files.package import read_spec, save
from anesurgery.loading import load


def spec_of(build: Callable[[], Any], folder: Path) -> Any:
    return read_spec(structural.place(save(load(build()), folder / "model.mlpackage")))


def constant(spec: Any) -> Any:
    return next(op for op in ops(spec) if op.type == "const").attributes["val"]


def no_type(spec: Any) -> None:
    constant(spec).type.Clear()


def unknown_type(spec: Any) -> None:
    constant(spec).type.tensorType.dataType = 99


def no_value(spec: Any) -> None:
    constant(spec).ClearField("value")


def half_a_number(spec: Any) -> None:
    constant(spec).immediateValue.tensor.bytes.values = b"abc"
    constant(spec).type.tensorType.dataType = 10


def words_for_numbers(spec: Any) -> None:
    constant(spec).immediateValue.tensor.strings.values.append("seven")
    constant(spec).type.tensorType.dataType = 23


def other_opset(spec: Any) -> None:
    spec.mlProgram.functions["main"].opset = "CoreML99"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_type, "a value has no type"),
        (unknown_type, "elements of type 99"),
        (no_value, "a constant has no value"),
        (half_a_number, "a constant of fp16 has 3 bytes"),
        (words_for_numbers, "a constant of int32 holds something else"),
        (other_opset, "the function 'main' has no block of its opset 'CoreML99'"),
    ],
)
def test_what_no_text_can_say(tmp_path: Path, spoil: Callable[[Any], None], words: str) -> None:
    spec = spec_of(fuzzing.loop, tmp_path)
    spoil(spec)
    before = spec.SerializeToString(deterministic=True)
    with pytest.raises(LoadError, match=f"{words}.*; convert the model again"):
        write_mil(spec.mlProgram)
    assert spec.SerializeToString(deterministic=True) == before


def body_without_an_input(loop: Any) -> None:
    del loop.blocks[1].inputs[-1]


def condition_without_an_output(loop: Any) -> None:
    del loop.blocks[0].outputs[:]


def body_that_gives_more(loop: Any) -> None:
    loop.blocks[1].outputs.append(loop.blocks[1].outputs[0])


def no_body(loop: Any) -> None:
    del loop.blocks[1]


@pytest.mark.parametrize(
    "spoil", [body_without_an_input, condition_without_an_output, body_that_gives_more, no_body]
)
def test_a_loop_that_does_not_fit_its_blocks(tmp_path: Path, spoil: Callable[[Any], None]) -> None:
    spec = spec_of(fuzzing.loop, tmp_path)
    spoil(next(op for op in ops(spec) if op.type == "while_loop"))
    structural.place(tmp_path / "model.mlpackage").write_bytes(spec.SerializeToString())
    with pytest.raises(
        LoadError, match=r"the while_loop '\w+' does not have the blocks that it needs; convert"
    ):
        load(tmp_path / "model.mlpackage")


def test_a_branch_that_does_not_fit_its_blocks(tmp_path: Path) -> None:
    spec = spec_of(fuzzing.loop, tmp_path)
    del next(op for op in ops(spec) if op.type == "cond").blocks[0].outputs[:]
    structural.place(tmp_path / "model.mlpackage").write_bytes(spec.SerializeToString())
    with pytest.raises(LoadError, match="the cond 'y' does not have the blocks that it needs; convert"):
        load(tmp_path / "model.mlpackage")


def test_an_op_that_reads_a_value_of_another_block(tmp_path: Path) -> None:
    spec = spec_of(fuzzing.loop, tmp_path)
    branch, loop = (next(op for op in ops(spec) if op.type == kind) for kind in ("cond", "while_loop"))
    inside = loop.blocks[1].operations[-1].outputs[0].name
    branch.blocks[0].operations[-1].inputs["x"].arguments[0].name = inside
    structural.place(tmp_path / "model.mlpackage").write_bytes(spec.SerializeToString())
    with pytest.raises(LoadError, match="which is not defined before it; convert"):
        load(tmp_path / "model.mlpackage")


def test_an_output_that_no_member_makes(tmp_path: Path) -> None:
    spec = structural.pipeline(network(), structural.second())
    del spec.pipeline.models[1]
    model = tmp_path / "model.mlmodel"
    model.write_bytes(spec.SerializeToString())
    with pytest.raises(InterpretError, match="the output 'z' of the pipeline is made by none of its models"):
        ane.Predictor(model)
