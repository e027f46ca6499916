"""Programs as MIL text and back: the same ops, names, numbers and types."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import anesurgery as ane
from anesurgery.errors import LoadError, UnknownName
from anesurgery.files.mil_text import read_mil, write_mil
from anesurgery.loading import load, program_text
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types

PACKAGES = [
    "anemll_multifunction",
    "basic_pitch_nmp",
    "dtln_aec_128_part1_fp16",
    "dtln_aec_128_part2_fp16",
    "mlc_mosaic",
    "silero_unified",
    "silero_unified_palette_4bit",
]


def check(model: Any, folder: Path) -> str:
    """Text to protobuf to text, and text to program to text, are the identity; the short text too."""
    loaded = load(model)
    text = ane.to_text(loaded, dialect="mil")
    assert write_mil(read_mil(text).program) == text
    (folder / "made.mil").write_text(text, encoding="utf-8")
    if loaded.weights is not None:
        shutil.copytree(loaded.weights.path.parent, folder / "weights")
    again = load(folder / "made.mil")
    assert ane.to_text(again, dialect="mil") == text
    assert ane.to_text(again) == ane.to_text(loaded.program)
    return text


@pytest.mark.one_of(9)
@pytest.mark.parametrize("name", PACKAGES)
def test_packages_survive_the_text(name: str, corpus: Path, tmp_path: Path) -> None:
    package = corpus / f"{name}.mlpackage"
    text = check(package, tmp_path)
    weights = load(package).weights
    assert (weights is not None and weights.path.stat().st_size > 0) == ("BLOBFILE" in text)


@pytest.mark.parametrize("name", ["fluid_argmax", "silero_unified", "silero_unified_palette_4bit"])
def test_a_program_is_written_as_the_compiler_did(name: str, corpus: Path) -> None:
    """All but the order of the inputs of the function, which the description gives."""
    ours = program_text(load(corpus / f"{name}.mlmodelc"), "1.0").splitlines()
    theirs = (corpus / f"{name}.mlmodelc" / "model.mil").read_text(encoding="utf-8").splitlines()
    places = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    assert places == ([] if name == "fluid_argmax" else [3])
    assert all("func main" in theirs[i] for i in places)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", ["gpt2", "whisper", "vit"])
def test_converted_models_survive_the_text(name: str, converted: Callable[..., Any], tmp_path: Path) -> None:
    check(converted(name).model, tmp_path)


def test_the_numbers_survive_the_text(corpus: Path, tmp_path: Path) -> None:
    package = corpus / "silero_unified.mlpackage"
    check(package, tmp_path)
    predictor = ane.Predictor(package)
    values = predictor.sample(3)
    found, expected = ane.run(tmp_path / "made.mil", values), predictor(values)
    for name in expected:
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(expected[name]))


def test_one_other_number_is_another_text(corpus: Path) -> None:
    """The comparison of texts can fail."""
    text = ane.to_text(corpus / "fluid_argmax.mlmodelc", dialect="mil")
    other = read_mil(text.replace("int32(-1)", "int32(0)", 1)).program
    assert write_mil(other) != text


@pytest.mark.slow
def test_weights_without_a_file_are_written_out(corpus: Path) -> None:
    package = corpus / "silero_unified.mlpackage"
    loaded = ane.apply(package, "negate_subtract", prove=None, quiet=True)
    assert ane.to_text(loaded.program, dialect="mil").count("BLOBFILE") == 0
    assert ane.to_text(package, dialect="mil").count("BLOBFILE") > 10


def control_flow() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1,)), mb.TensorSpec((2,))], opset_version=ct.target.iOS18)
    def program(n: Var, x: Var) -> Var:
        def inner(a: Var, b: Var) -> tuple[Var, Var]:
            return mb.add(x=a, y=1.0), mb.cond(
                pred=mb.squeeze(x=mb.greater(x=a, y=2.0)),
                _true_fn=lambda: mb.mul(x=b, y=2.0),
                _false_fn=lambda: mb.relu(x=b),
            )

        def more(a: Var, b: Var) -> Var:
            return mb.squeeze(x=mb.less(x=a, y=4.0))

        return mb.while_loop(_cond=more, _body=inner, loop_vars=(n, x))[1]

    return program


def states() -> Program:
    return mb.program(
        input_specs=[mb.TensorSpec((2, 3), dtype=types.fp16), mb.StateTensorSpec((2, 3), dtype=types.fp16)],
        opset_version=ct.target.iOS18,
    )(lambda x, cache: mb.coreml_update_state(state=cache, value=mb.add(x=mb.read_state(input=cache), y=x)))


@pytest.mark.parametrize("make", [control_flow, states])
def test_blocks_and_states_survive_the_text(make: Callable[[], Program], tmp_path: Path) -> None:
    check(make(), tmp_path)


def test_a_part_of_a_program_has_no_mil_text() -> None:
    program = states()
    op = next(iter(program.functions["main"].operations))
    assert ane.to_text(op)
    with pytest.raises(LoadError, match="a part of a program has no MIL text"):
        ane.to_text(op, dialect="mil")
    with pytest.raises(UnknownName, match="unknown dialect 'mlir'"):
        ane.to_text(program, dialect="mlir")


UNARY = ["relu", "abs", "exp", "sqrt", "square", "sigmoid", "identity"]
BINARY = ["add", "mul", "sub", "maximum", "real_div"]
VALUES = st.one_of(
    st.floats(width=16, allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 2.0**-24, 65504.0, -1.0]),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A program of up to eight ops over one input, with constants of any number and values of several types."""
    dtype, kind = draw(st.sampled_from([(np.float16, types.fp16), (np.float32, types.fp32)]))
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    steps = draw(st.lists(st.tuples(st.sampled_from(UNARY + BINARY), st.lists(VALUES, min_size=1, max_size=1))))
    names = draw(st.lists(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), unique=True))
    reshape = draw(st.booleans())

    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=kind)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        y = mb.identity(x=x)
        for at, (op, numbers) in enumerate(steps[:8]):
            name = {"name": f"{names[at]}_{at}"} if at < len(names) else {}
            constant = np.broadcast_to(np.asarray(numbers, dtype), shape).copy()
            y = getattr(mb, op)(x=y, **({"y": constant} if op in BINARY else {}), **name)
        if reshape:
            y = mb.reshape(x=y, shape=np.asarray([-1], np.int32))
            y = mb.cast(x=mb.greater(x=y, y=dtype(0)), dtype="int32")
        return y

    return program


@settings(max_examples=12, deadline=None)
@given(programs())
def test_any_small_program_survives_the_text(
    tmp_path_factory: pytest.TempPathFactory, program: Program
) -> None:
    with quiet_host():
        check(program, tmp_path_factory.mktemp("mil"))
