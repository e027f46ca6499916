"""Biases take up what rounding a weight does to the mean of its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.compressing.correcting import Correction, find_candidates, takes_bias
from anesurgery.compressing.storing import shift_biases, store
from anesurgery.files.package import Loaded
from anesurgery.mil import Program, Var, ct, function_of, mb, types

RNG = np.random.default_rng(3)
BIAS = RNG.standard_normal(8).astype(np.float32)


def numbers(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def linear(x: Var) -> Var:
    return mb.linear(x=mb.reshape(x=x, shape=(-1, 36)), weight=numbers(8, 36))


def linear_with_bias(x: Var) -> Var:
    return mb.linear(x=mb.reshape(x=x, shape=(-1, 36)), weight=numbers(8, 36), bias=BIAS)


def conv(x: Var) -> Var:
    return mb.conv(x=x, weight=numbers(8, 2, 3, 3), groups=2, strides=[2, 1], pad_type="same", bias=BIAS)


def transposed(x: Var) -> Var:
    return mb.conv_transpose(
        x=x, weight=numbers(4, 8, 3, 3), strides=[2, 2], pad=[1, 0, 1, 0], pad_type="custom"
    )


def transposed_groups(x: Var) -> Var:
    """Channels of two groups, which have a scale in common and a bias each."""
    return mb.conv_transpose(x=x, weight=numbers(4, 8, 3, 3), strides=[2, 2], groups=2, pad_type="same")


def program_of(build: Callable[[Var], Var]) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 4, 6, 6))], opset_version=ct.target.iOS18)(
        lambda x: mb.identity(x=build(x), name="y")
    )


def samples(count: int = 8) -> list[dict[str, Any]]:
    """Numbers whose mean is far from 0, as behind a relu."""
    return [{"x": (numbers(2, 4, 6, 6) + 2)} for _ in range(count)]


def compressed(program: Program, given: Any, may_shift_bias: bool) -> tuple[list[dict[str, Any]], Any]:
    """The outputs of the run that compressed, and the program that holds what came out."""
    chosen, _ = find_candidates(function_of(program, None), 8)
    work = Correction(
        Loaded(program), "main", given, chosen, lambda _: "palette1", may_shift_bias=lambda _: may_shift_bias
    )
    outputs = work.run()
    for one in work.corrected:
        shift_biases(one, [r.op for r in one.candidate.readers])
    store([program], work.corrected)
    return outputs, program


def off(outputs: Any, expected: Any) -> Any:
    """The mean error of each output channel."""
    difference = np.stack([a["y"] - b["y"] for a, b in zip(outputs, expected, strict=True)])
    axis = 2 if difference.ndim > 3 else difference.ndim - 1
    return np.abs(difference.mean(tuple(a for a in range(difference.ndim) if a != axis)))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("build", [linear, linear_with_bias, conv, transposed, transposed_groups])
def test_the_mean_of_each_channel_stays(build: Callable[[Var], Var]) -> None:
    """The wrong version leaves the biases; one that is off by an axis or a group leaves a mean."""
    program, given = program_of(build), samples()
    expected = [ane.run(program, values) for values in given]
    plain = Correction(
        Loaded(program), "main", given, find_candidates(function_of(program, None), 8)[0], lambda _: "palette1"
    )
    plain.may_shift_bias = lambda _: False
    without = off(plain.run(), expected)
    outputs, changed = compressed(program, given, True)
    assert off(outputs, expected).max() < 1e-3 * without.max()
    for values, made in zip(given, outputs, strict=True):
        np.testing.assert_allclose(ane.run(changed, values)["y"], made["y"], rtol=1e-4, atol=1e-4)


def test_a_bias_that_nobody_reads_any_more_is_not_stored() -> None:
    """The wrong version leaves the old constant in the program, and a package grows by its biases."""
    _, changed = compressed(program_of(linear_with_bias), samples(), True)
    unread = [
        op.name for op in function_of(changed, None).operations if not any(v.child_ops for v in op.outputs)
    ]
    assert unread == ["y"]


def test_layers_that_share_a_bias_get_one_each() -> None:
    @mb.program(input_specs=[mb.TensorSpec((16, 8))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        zeros = mb.const(val=np.zeros(8, np.float32), name="zeros")
        h = mb.linear(x=x, weight=numbers(8, 8), bias=zeros)
        return mb.linear(x=mb.relu(x=h), weight=numbers(8, 8), bias=zeros, name="y")

    given = [{"x": numbers(16, 8) + 1} for _ in range(8)]
    _, changed = compressed(program, given, True)
    biases = [op.bias.val for op in function_of(changed, None).operations if op.op_type == "linear"]
    assert all(b.any() for b in biases)
    assert not np.allclose(*biases)


def small(rows: int, product: str) -> Program:
    weight = np.arange(64, dtype=np.float16).reshape(8, 8) / 16

    @mb.program(input_specs=[mb.TensorSpec((rows, 8), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        if product == "matmul":
            return mb.matmul(x=x, y=weight, transpose_y=True, name="y")
        return mb.linear(x=x, weight=weight, name="y")

    return program


@pytest.mark.parametrize(("product", "count"), [("linear", 2), ("matmul", 0)])
def test_functions_that_share_a_weight_share_what_its_biases_gain(
    product: str, count: int, tmp_path: Any
) -> None:
    """A product without a bias elsewhere keeps the biases as they are: it would keep half of the correction."""
    parts = {
        name: ane.save(ane.load(small(rows, kind)), tmp_path / f"{name}.mlpackage")
        for name, rows, kind in (("long", 16, "linear"), ("short", 1, product))
    }
    both = ane.merge(parts, tmp_path / "both.mlpackage")
    given = [{"x": (numbers(16, 8) + 1).astype(np.float16)} for _ in range(8)]
    found = ane.compress(both, 3, inputs=given, function="long", for_="size", mixed=False, smallest=8)
    functions = found.subject.loaded.program.functions.values()
    ops = [op for f in functions for op in f.operations if takes_bias(op)]
    biases = [op.bias.val for op in ops if op.inputs.get("bias") is not None and op.bias.val.any()]
    assert len(biases) == count
    assert all(np.array_equal(biases[0], b) for b in biases)


def test_a_bias_that_is_computed_stays() -> None:
    program = mb.program(
        input_specs=[mb.TensorSpec((16, 8)), mb.TensorSpec((8,))], opset_version=ct.target.iOS18
    )(lambda x, b: mb.conv(x=mb.reshape(x=x, shape=(1, 8, 4, 4)), weight=numbers(8, 8, 1, 1), bias=b, name="y"))

    (op,) = (op for op in function_of(program, None).operations if op.op_type == "conv")
    assert not takes_bias(op)


def test_one_row_of_inputs_says_nothing_of_what_a_bias_leaves() -> None:
    """About its mean its moments are 0, so any weight would do, whose results a bias puts right on that row."""

    @mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Any:
        for _ in range(2):
            x = mb.relu(x=mb.linear(x=x, weight=numbers(64, 64) / 8, bias=numbers(64)))
        return x

    single = {"x": numbers(1, 64) + 1}
    found = ane.compress(program, 8, inputs=[single], for_="size", mixed=False, smallest=8)
    other = {"x": numbers(1, 64)}
    assert ane.compare(program, found.model, other, gate=30).ok
