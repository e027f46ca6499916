"""Models that overflow in fp16 are finite after it, and what cannot be scaled is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from closeness import assert_close

from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.errors import PassError
from anesurgery.interpret import run
from anesurgery.loading import to_text
from anesurgery.mil import Array, Program, Var, ct, mb, new_symbol, types
from anesurgery.passes.scale_ranges import ScaleRanges
from anesurgery.rewriting import scaled_regions
from anesurgery.testing import apply_pass, assert_refuses, reasons

WIDTH, LENGTH, HIDDEN = 32, 8, 64


def gemma_like(residual: float) -> Program:
    """Two blocks with norms before and after attention and MLP, which add large values to the stream."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> Array:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float16)

    def norm(x: Var, gain: float) -> Var:
        mean = mb.reduce_mean(x=mb.pow(x=x, y=np.float16(2)), axes=[-1], keep_dims=True)
        root = mb.rsqrt(x=mb.add(x=mean, y=np.float16(1e-6)), epsilon=np.float16(1e-12))
        return mb.mul(x=mb.mul(x=x, y=root), y=(gain * (1 + rng.random(WIDTH))).astype(np.float16))

    def attention(x: Var) -> Var:
        q, k, v = (mb.linear(x=x, weight=weight(WIDTH, WIDTH)) for _ in range(3))
        mask = np.triu(np.full((LENGTH, LENGTH), -1e4, np.float16), 1)
        shares = mb.softmax(x=mb.add(x=mb.matmul(x=q, y=k, transpose_y=True), y=mask))
        return mb.linear(x=mb.matmul(x=shares, y=v), weight=weight(WIDTH, WIDTH))

    def mlp(x: Var) -> Var:
        gate = mb.gelu(x=mb.linear(x=x, weight=weight(HIDDEN, WIDTH)))
        up = mb.mul(x=gate, y=mb.linear(x=x, weight=weight(HIDDEN, WIDTH)))
        return mb.linear(x=up, weight=weight(WIDTH, HIDDEN))

    @mb.program(input_specs=[mb.TensorSpec((1, LENGTH), types.int32)])
    def program(ids: Var) -> Var:
        x = mb.mul(x=mb.gather(x=weight(50, WIDTH), indices=ids, axis=0), y=np.float16(WIDTH**0.5))
        for _ in range(2):
            x = mb.add(x=x, y=norm(attention(norm(x, 1)), residual))
            x = mb.add(x=x, y=norm(mlp(norm(x, 1)), residual))
        capped = mb.tanh(x=mb.real_div(x=mb.linear(x=norm(x, 1), weight=weight(50, WIDTH)), y=np.float16(30)))
        return mb.mul(x=capped, y=np.float16(30), name="y")

    return program


def psnr(program: Program, other: Program, precision: str) -> float:
    """Of a model in an arithmetic, against the first model in fp32; NaN where it is not finite."""
    (name,) = program.functions["main"].inputs
    values = {name: np.arange(LENGTH, dtype=np.int32)[None]}
    expected, found = run(program, values)["y"], run(other, values, precision=precision)["y"]
    return compare_arrays("y", expected, found).psnr if np.isfinite(found).all() else np.nan


@pytest.mark.one_of(2)
@pytest.mark.parametrize("residual", [300.0, 30000.0])
def test_a_gemma_like_block_is_finite(residual: float) -> None:
    program = gemma_like(residual)
    assert not psnr(program, program, "ane") > 30
    assert not psnr(program, program, "fp16") > 30
    after, session = apply_pass(ScaleRanges(), program)
    assert psnr(program, after, "fp32") > 100
    assert psnr(program, after, "fp16") > 50
    assert psnr(program, after, "ane") > 50
    assert "0 after" in session.notes[0]
    assert not session.refusals


def numbers(*shape: int, largest: float = 1.0) -> Array:
    return (np.random.default_rng(1).uniform(-1, 1, shape) * largest).astype(np.float16)


def scores(x: Var) -> Var:
    q, k = (mb.linear(x=x, weight=numbers(4, 4, largest=90)) for _ in range(2))
    shares = mb.softmax(x=mb.mul(x=mb.matmul(x=q, y=k, transpose_y=True), y=np.float16(1e-4)))
    return mb.matmul(x=shares, y=x, name="y")


def pair(x: Var) -> Var:
    h = mb.relu(x=mb.linear(x=x, weight=numbers(8, 4, largest=30000), bias=numbers(8, largest=1000)))
    return mb.linear(x=h, weight=numbers(4, 8, largest=2**-10), name="y")


def logits(x: Var) -> Var:
    h = mb.linear(x=x, weight=numbers(8, 4, largest=30000))
    return mb.tanh(x=mb.real_div(x=h, y=np.float16(20000)), name="y")


def gated(x: Var) -> Var:
    a, b = (mb.linear(x=x, weight=numbers(8, 4, largest=largest)) for largest in (900, 800))
    return mb.linear(x=mb.mul(x=a, y=b), weight=numbers(4, 8, largest=2**-10), name="y")


def normed(x: Var) -> Var:
    h = mb.mul(x=mb.tanh(x=x), y=np.float16(60000))
    return mb.layer_norm(x=mb.add(x=h, y=h), axes=[-1], epsilon=np.float16(1e-3), name="y")


def entered(x: Var) -> Var:
    """The input is part of the stream."""
    h = mb.add(x=x, y=mb.linear(x=x, weight=numbers(4, 4, largest=30000)))
    return mb.layer_norm(x=mb.add(x=x, y=h), axes=[-1], epsilon=np.float16(1e-3), name="y")


def built(make: Callable[[Var], Var]) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((3, 4), types.fp16)])(lambda x: make(x))


X = {"x": np.random.default_rng(2).uniform(1, 4, (3, 4)).astype(np.float16)}


@pytest.mark.parametrize("make", [scores, pair, logits, gated, normed, entered])
def test_each_kind_of_region(make: Callable[[Var], Var]) -> None:
    program = built(make)
    assert not compare_arrays("y", run(program, X)["y"], run(program, X, precision="ane")["y"]).psnr > 30
    after, session = apply_pass(ScaleRanges(inputs=[X]), program)
    assert not session.refusals
    expected = run(program, X)["y"]
    assert_close(run(after, X)["y"], expected, rtol=1e-5)
    assert compare_arrays("y", expected, run(after, X, precision="ane")["y"]).psnr > 45


def test_an_op_whose_constant_cannot_be_scaled_reads_its_operands_as_they_were() -> None:
    least = np.array([3, 0.5, 2.0**-24, 1], np.float16)  # half of the third is no number of fp16
    program = built(
        lambda x: mb.add(x=np.float16(-1), y=mb.add(x=mb.mul(x=x, y=np.float16(3e4)), y=least), name="y")
    )
    after, _ = apply_pass(ScaleRanges(inputs=[X]), program)
    assert_close(run(after, X)["y"], run(program, X)["y"], rtol=1e-6)


def test_what_is_added_before_a_root_is_a_guard_only_where_it_is_positive() -> None:
    low = np.array([3, 0.5, -2e4, 1], np.float16)
    program = built(lambda x: mb.sqrt(x=mb.add(x=mb.mul(x=x, y=np.float16(3e4)), y=low), name="y"))
    after, session = apply_pass(ScaleRanges(inputs=[X]), program)
    assert session.changes
    assert_close(run(after, X)["y"], run(program, X)["y"], rtol=1e-6)


def test_refusals() -> None:
    assert_refuses(ScaleRanges(inputs=X), built(lambda x: mb.relu(x=x)), "no value exceeds the limits")
    before = built(lambda x: mb.mul(x=x, y=np.float16(30000), name="y"))
    after, session = apply_pass(ScaleRanges(inputs=X), before)
    first, last = reasons(session)
    assert first.startswith("%y is an output, so it is scaled back beyond the limit (largest: ")
    assert "scaling would gain nothing" in last
    assert to_text(after) == to_text(before), "what gains nothing is undone"


ACTIVATIONS: dict[str, Callable[[Var], Var]] = {
    "gelu": lambda x: mb.gelu(x=x, mode="EXACT"),
    "gelu by tanh": lambda x: mb.gelu(x=x, mode="TANH_APPROXIMATION"),
    "silu": lambda x: mb.silu(x=x),
    "softplus": lambda x: mb.softplus(x=x),
    "elu": lambda x: mb.elu(x=x, alpha=np.float16(0.75)),
    "sigmoid": lambda x: mb.mul(x=mb.sigmoid(x=x), y=np.float16(100)),
}


def activated(make: Callable[[Var], Var]) -> Program:
    """An activation of numbers up to some hundred thousand."""
    draw = np.random.default_rng(0).standard_normal
    up, down = ((draw(s) * k).astype(np.float16) for s, k in (((16, 4), 16000), ((4, 16), 1)))

    def made(x: Var) -> Var:
        x = mb.linear(x=make(mb.linear(x=x, weight=up)), weight=down)
        mean = mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=True)
        return mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float16(1e-3)), name="y")

    return built(made)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_large_numbers(name: str) -> None:
    program = activated(ACTIVATIONS[name])
    expected = run(program, X)["y"]
    assert not compare_arrays("y", expected, run(program, X, precision="ane")["y"]).psnr > 40
    after, session = apply_pass(ScaleRanges(inputs=[X]), program)
    assert not session.refusals
    assert compare_arrays("y", expected, run(after, X)["y"]).psnr > 90
    assert compare_arrays("y", expected, run(after, X, precision="ane")["y"]).psnr > 50


def test_a_tail_that_begins_too_early_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_regions, "TAIL", 2.0**-4)
    with pytest.raises(PassError, match="scaled and unscaled model differ in fp32"):
        apply_pass(ScaleRanges(inputs=[X]), activated(ACTIVATIONS["sigmoid"]))


def test_an_epsilon_that_is_too_large_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_regions, "LEAST_EPSILON", 1.0)
    with pytest.raises(PassError, match="scaled and unscaled model differ in fp32"):
        apply_pass(ScaleRanges(), gemma_like(300.0))


def test_a_mean_over_a_dynamic_length() -> None:
    """How many numbers a sum adds first is not known there; what was observed counts."""

    @mb.program(
        input_specs=[mb.TensorSpec((1, new_symbol(), 8), dtype=types.fp16)], opset_version=ct.target.iOS17
    )
    def program(x: Var) -> Var:
        large = mb.mul(x=x, y=np.float16(3e4))
        return mb.mul(x=mb.reduce_mean(x=large, axes=[1, 2], keep_dims=True), y=np.float16(1e-4), name="y")

    inputs = {"x": np.ones((1, 4, 8), np.float16)}
    assert_refuses(ScaleRanges(inputs=[inputs]), program, "exceeds the limit before it can be scaled")


@pytest.mark.parametrize("kind", ["branch", "returned by a branch", "loop"])
def test_blocks_read_values_multiplied_back(kind: str) -> None:
    """Wrong otherwise in the branch that no sampled input takes, which the comparison does not see."""
    specs = [mb.TensorSpec((1, 4), types.fp16), mb.TensorSpec((1,), types.int32)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(x: Var, which: Var) -> Var:
        large = mb.mul(x=mb.tanh(x=x), y=np.float16(50000))
        stream = mb.add(x=large, y=large, name="stream")
        is_first = mb.cast(x=mb.squeeze(x=which, axes=[0]), dtype="bool")
        small = np.float16(1e-5)
        if kind == "loop":
            rounds = {"_cond": lambda n, v: mb.less(x=n, y=2), "loop_vars": (np.int32(0), x)}
            body = lambda n, v: (mb.add(x=n, y=1), mb.add(x=v, y=mb.mul(x=stream, y=small)))  # noqa: E731
            _, y = mb.while_loop(_body=body, **rounds)
        else:
            inner = {"branch": lambda: mb.mul(x=stream, y=small), "returned by a branch": lambda: stream}[kind]
            y = mb.cond(pred=is_first, _true_fn=inner, _false_fn=lambda: mb.identity(x=x))
            y = y if kind == "branch" else mb.mul(x=y, y=small)
        return mb.add(x=y, y=mb.mul(x=stream, y=small), name="y")

    x = np.array([[0.5, -0.25, 1, 2]], np.float16)
    after, session = apply_pass(ScaleRanges(inputs={"x": x, "which": np.zeros(1, np.int32)}), program)
    assert session.changes
    for which in (0, 1):
        inputs = {"x": x, "which": np.full(1, which, np.int32)}
        assert_close(run(after, inputs)["y"], run(program, inputs)["y"], rtol=1e-6)
