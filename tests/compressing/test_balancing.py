"""Scales of channels moved into weights: the model computes the same, and rounds better."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.compressing import balancing
from anesurgery.compressing.balancing import Group, apply_scales, balance_channels, find_groups
from anesurgery.compressing.correcting import find_candidates
from anesurgery.files.package import Loaded
from anesurgery.mil import Program, Var, ct, function_of, mb, types

RNG = np.random.default_rng(23)
WIDTH = 32
LOUD = np.where(np.arange(WIDTH) % 11 == 3, 64.0, 1.0)
"""Sizes of channels, a few of which are far larger, as in language models."""


def half(*shape: int, size: Any = 1.0) -> Any:
    """Multiples of a 64th of a power of two, so that scaling them by such powers changes no bit."""
    return (np.rint(64 * RNG.standard_normal(shape)) / 64 * size).astype(np.float16)


GAMMA, BETA = half(WIDTH, size=0.125 * LOUD) + LOUD.astype(np.float16), half(WIDTH, size=0.125)
UP, GATE = half(2 * WIDTH, WIDTH, size=0.25 / LOUD), half(2 * WIDTH, WIDTH, size=0.25 / LOUD)
DOWN = half(WIDTH, 2 * WIDTH, size=0.125)


def norm(x: Var) -> Var:
    return mb.layer_norm(x=x, axes=[-1], gamma=GAMMA, beta=BETA)


def read_by_one(x: Var) -> Var:
    return mb.linear(x=mb.reshape(x=norm(x), shape=(24, WIDTH)), weight=UP, name="y")


def read_by_two(x: Var) -> Var:
    h = norm(x)
    return mb.add(x=mb.linear(x=h, weight=UP), y=mb.matmul(x=h, y=np.ascontiguousarray(GATE.T)), name="y")


def root_mean_square(x: Var) -> Var:
    size = mb.rsqrt(x=mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1], keep_dims=True))
    h = mb.mul(x=mb.mul(x=x, y=size), y=GAMMA)
    return mb.linear(x=mb.transpose(x=h, perm=(0, 1, 2)), weight=UP, name="y")


def gated(x: Var) -> Var:
    a, b = mb.linear(x=x, weight=UP * 8), mb.linear(x=x, weight=GATE * 8, bias=half(2 * WIDTH))
    return mb.linear(x=mb.mul(x=mb.silu(x=a), y=b), weight=DOWN, name="y")


def behind_a_sum(x: Var) -> Var:
    h = mb.relu(x=mb.add(x=mb.matmul(x=x, y=UP, transpose_y=True), y=half(2 * WIDTH)))
    return mb.linear(x=h, weight=DOWN, name="y")


def convolutions(x: Var) -> Var:
    weight = half(WIDTH, 8, 3, 3, size=0.125) * LOUD.astype(np.float16)[:, None, None, None]
    x = mb.reshape(x=x, shape=(2, 8, 4, 12))
    h = mb.relu(x=mb.conv(x=x, weight=weight, bias=half(WIDTH), pad_type="same"))
    second = half(8, 8, 3, 3, size=0.125) / LOUD.reshape(4, 8)[0].astype(np.float16)[None, :, None, None]
    return mb.conv(x=h, weight=second, groups=4, pad_type="same", name="y")


def transposed_convolution(x: Var) -> Var:
    x = mb.reshape(x=x, shape=(2, 8, 4, 12))
    weight = half(8, WIDTH, 3, 3, size=0.125) * LOUD.astype(np.float16)[:, None, None]
    h = mb.conv_transpose(x=x, weight=weight, bias=half(WIDTH))
    return mb.conv(x=h, weight=half(8, WIDTH, 1, 1, size=0.125), name="y")


def batch_norm(x: Var) -> Var:
    x = mb.reshape(x=x, shape=(1, WIDTH, 4, 6))
    ones = np.ones(WIDTH, np.float16)
    h = mb.batch_norm(x=x, mean=0 * ones, variance=ones, gamma=GAMMA, beta=BETA)
    return mb.conv(x=h, weight=UP[:, :, None, None], name="y")


BUILDS = {
    f.__name__: f
    for f in (
        read_by_one,
        read_by_two,
        root_mean_square,
        gated,
        behind_a_sum,
        convolutions,
        transposed_convolution,
        batch_norm,
    )
}


def program_of(build: Callable[[Var], Var], rows: int = 24) -> Program:
    return mb.program(
        input_specs=[mb.TensorSpec((1, rows, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS18
    )(lambda x: build(x))


def samples(count: int = 12, rows: int = 24) -> list[dict[str, Any]]:
    return [{"x": half(1, rows, WIDTH)} for _ in range(count)]


def the_group(program: Program) -> Group:
    (group,) = find_groups(function_of(program, None))[0]
    return group


@pytest.mark.parametrize("name", BUILDS)
def test_the_model_computes_the_same(name: str) -> None:
    """The wrong version scales another axis, forgets a bias, or scales both factors of a product."""
    see_the_same(BUILDS[name])


def see_the_same(build: Callable[[Var], Var]) -> None:
    program, values = program_of(build), samples(1)[0]
    expected = ane.run(program, values)["y"]
    group = the_group(program)
    channels = int(group.x.shape[group.axis])
    apply_scales(group, np.arange(channels) % 5 - 2)
    assert np.array_equal(ane.run(program, values)["y"], expected)
    names = [op.name for op in function_of(program, None).operations if op.name.endswith("_balanced")]
    assert len(names) == len(group.weights) + len(group.sources)


@pytest.mark.parametrize("part", ["weights", "sources"])
def test_scales_on_one_side_alone_are_noticed(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    program, values = program_of(read_by_one), samples(1)[0]
    expected = ane.run(program, values)["y"]
    group = the_group(program)
    one = [(held, 1 if part == "weights" else -1) for held in getattr(group, part)]
    monkeypatch.setattr(balancing, "_signed_constants", lambda _: iter(one))
    apply_scales(group, np.arange(WIDTH) % 5 - 2)
    assert not np.allclose(ane.run(program, values)["y"], expected, rtol=0.1)


@pytest.mark.parametrize("activations", ["max", None])
def test_channels_that_differ_are_balanced(activations: str | None) -> None:
    """Inputs of 8 bits lose all channels but the loud ones; 4 bits lose most where weights meet those."""
    bits = 8 if activations else 4
    options: dict[str, Any] = {
        "inputs": samples(),
        "activations": activations,
        "target": "A17",
        "smallest": 100,
    }
    program = program_of(read_by_two if activations else wide_channels)
    plain, found = (ane.compress(program, bits, balance=on, **options) for on in (False, True))
    assert [one.why for one in found.balanced] == [""]
    assert plain.loss is not None
    assert found.loss is not None
    assert found.loss.psnr > plain.loss.psnr + (6 if activations else 0.5)
    assert "1 of 1 values balanced" in str(found)
    assert found.to_json()["balanced"][0]["error"][1] < 0.8 * found.to_json()["balanced"][0]["error"][0]


def wide_channels(x: Var) -> Var:
    """Weights of equal sizes that meet channels of different ones."""
    return mb.linear(x=norm(x), weight=half(2 * WIDTH, WIDTH, size=0.25), name="y")


def test_it_is_the_default_where_inputs_are_quantized() -> None:
    """A layer whose products would not stand 8 bits keeps them so."""
    options: dict[str, Any] = {"inputs": samples(), "activations": "max", "target": "A17", "smallest": 100}
    found = ane.compress(program_of(read_by_one), 8, **options)
    assert [row.inputs for row in found.compressed] == ["int8"]
    plain = ane.compress(program_of(read_by_one), 8, balance=False, **options)
    assert "have a cosine of" in plain.compressed[0].inputs
    assert ane.compress(program_of(read_by_one), 8, inputs=samples(), smallest=100).balanced == ()


def returned(x: Var) -> tuple[Var, Var]:
    h = mb.layer_norm(x=x, axes=[-1], gamma=GAMMA, beta=BETA, name="h")
    return mb.linear(x=h, weight=UP, name="y"), h


def read_by_a_sum(x: Var) -> Var:
    h = norm(x)
    return mb.add(x=mb.linear(x=h, weight=UP[:WIDTH]), y=h, name="y")


def shared_weight(x: Var) -> Var:
    weight = mb.const(val=UP[:WIDTH], name="shared")
    return mb.linear(x=mb.linear(x=norm(x), weight=weight), weight=weight, name="y")


def of_two_values(x: Var) -> Var:
    return mb.linear(x=mb.add(x=mb.linear(x=x, weight=UP[:WIDTH]), y=x), weight=GATE, name="y")


REFUSED: dict[str, tuple[Callable[[Var], Any], str]] = {
    "an input": (lambda x: mb.linear(x=x, weight=UP, name="y"), "it is an input"),
    "an output": (returned, "the model returns it"),
    "a sum": (read_by_a_sum, "add 'y' reads it"),
    "a shared weight": (shared_weight, "the weight of 'y' is read elsewhere too"),
    "two values": (of_two_values, "makes it of two values"),
    "another function": (
        lambda x: mb.linear(x=mb.gelu(x=norm(x), name="g"), weight=UP, name="y"),
        "gelu 'g' makes it, which has no constant for each of its channels",
    ),
    "a norm of all": (
        lambda x: mb.linear(x=mb.l2_norm(x=norm(x), name="n"), weight=UP, name="y"),
        "l2_norm 'n' makes it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_balanced_is_said(name: str) -> None:
    see_why(*REFUSED[name])


def see_why(build: Callable[[Var], Any], words: str) -> None:
    program = program_of(build)
    before = ane.to_text(program)
    forms = {one.var: "int4" for one in find_candidates(function_of(program, None), 100)[0]}
    rows = balance_channels(Loaded(program), "main", samples(4), forms)
    assert rows
    assert any(words in row.why for row in rows), [row.why for row in rows]
    assert ane.to_text(program) == before


def test_a_table_is_not_spread_by_scales() -> None:
    program = program_of(behind_a_sum)
    forms = {one.var: "palette4" for one in find_candidates(function_of(program, None), 100)[0]}
    rows = balance_channels(Loaded(program), "main", samples(4), forms)
    assert any("has one table, which scales would spread" in row.why for row in rows)


def test_numbers_that_scales_would_change_keep_theirs() -> None:
    """The wrong version lets the smallest numbers of fp16 lose bits, and the largest overflow."""
    program = program_of(read_by_one)
    group = the_group(program)
    exponents = np.full(WIDTH, 6)
    trials = balancing._Trials(group, {}, None)
    assert trials._without_loss(exponents, np.ones(WIDTH)).all()
    weight: Any = group.weights[0].var
    weight._sym_val.val[0, 5] = 6e4
    weight._sym_val.val[:, 6] = 0
    source: Any = group.sources[0].var
    source._sym_val.val[7] = 7e-5
    np.testing.assert_array_equal(np.flatnonzero(trials._without_loss(exponents, np.ones(WIDTH)) == 0), [5, 7])


def test_functions_are_balanced_alike(tmp_path: Path) -> None:
    parts = {
        name: ane.save(ane.load(program_of(read_by_one_of(rows), rows)), tmp_path / f"{name}.mlpackage")
        for name, rows in (("long", 24), ("short", 1))
    }
    both = ane.merge(parts, tmp_path / "both.mlpackage")
    options: dict[str, Any] = {"inputs": samples(), "activations": "max", "target": "A17", "smallest": 100}
    found = ane.compress(both, 8, function="long", **options)
    assert [one.why for one in found.balanced] == [""]
    values = samples(1, 1)[0]
    expected, outputs = (ane.run(m, values, function="short")["y"] for m in (both, found.model))
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=0.05 * np.abs(expected).max())
    functions = found.subject.loaded.program.functions.values()
    norms = [op.gamma.val for f in functions for op in f.operations if op.op_type == "layer_norm"]
    assert len(norms) == 2
    assert np.array_equal(*norms)


def test_a_weight_that_another_function_reads_otherwise_stays(tmp_path: Path) -> None:
    """The wrong version scales one function, and the package holds two weights where it held one."""
    parts = {
        name: ane.save(ane.load(program_of(build, rows)), tmp_path / f"{name}.mlpackage")
        for name, rows, build in (("long", 24, read_by_one_of(24)), ("short", 1, bare))
    }
    both = ane.merge(parts, tmp_path / "both.mlpackage")
    options: dict[str, Any] = {"inputs": samples(), "activations": "max", "target": "A17", "smallest": 100}
    found = ane.compress(both, 8, function="long", **options)
    assert [one.why for one in found.balanced] == ["the function 'short' reads one of the weights otherwise"]


def read_by_one_of(rows: int) -> Callable[[Var], Var]:
    return lambda x: mb.linear(x=mb.reshape(x=norm(x), shape=(rows, WIDTH)), weight=UP, name="y")


def bare(x: Var) -> Var:
    return mb.linear(x=mb.gelu(x=x), weight=UP, name="y")


def heads(x: Var, weight: Any) -> Var:
    """[1, 4 heads, places, 8]."""
    value = mb.reshape(x=mb.linear(x=x, weight=weight, bias=half(WIDTH)), shape=(1, 24, 4, 8))
    return mb.transpose(x=value, perm=(0, 2, 1, 3))


def projected(seen: Var) -> Var:
    merged = mb.reshape(x=mb.transpose(x=seen, perm=(0, 2, 1, 3)), shape=(1, 24, WIDTH))
    return mb.linear(x=merged, weight=half(WIDTH, WIDTH, size=0.125), name="y")


def attention(x: Var) -> Var:
    scores = mb.matmul(x=heads(x, UP[:WIDTH]), y=heads(x, GATE[:WIDTH]), transpose_y=True)
    values = heads(x, LOUD[:, None].astype(np.float16) * UP[WIDTH:])
    return projected(mb.matmul(x=mb.softmax(x=scores, axis=-1), y=values, name="seen"))


def attention_of_turned_values(x: Var) -> Var:
    scores = mb.matmul(x=heads(x, UP[:WIDTH]), y=heads(x, GATE[:WIDTH]), transpose_y=True)
    turned = mb.transpose(x=heads(x, UP[WIDTH:]), perm=(0, 1, 3, 2))
    return projected(mb.matmul(x=mb.softmax(x=scores, axis=-1), y=turned, transpose_y=True))


def fused_attention(x: Var) -> Var:
    query, key, value = (heads(x, w) for w in (UP[:WIDTH], GATE[:WIDTH], UP[WIDTH:]))
    return projected(mb.scaled_dot_product_attention(query=query, key=key, value=value))


ATTENTIONS = {f.__name__: f for f in (attention, attention_of_turned_values, fused_attention)}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_values_of_an_attention_are_scaled_with_its_output_projection(name: str) -> None:
    """The wrong version scales the axis of the heads alone, or of the places."""
    see_the_same(ATTENTIONS[name])


@pytest.mark.parametrize("activations", ["max", "percentile"])
def test_loud_values_of_an_attention_break_it_without_balancing(activations: str) -> None:
    """Planted channels: the output projection is refused as it is, and stands 8 bits once they are balanced."""
    options: dict[str, Any] = {
        "inputs": samples(),
        "activations": activations,
        "target": "A17",
        "smallest": 100,
    }
    plain, found = (ane.compress(program_of(loud_attention), 8, balance=on, **options) for on in (False, True))
    last = [one for one in plain.weights if "y" in one.ops], [one for one in found.weights if "y" in one.ops]
    assert "have a cosine of" in last[0][0].inputs
    assert last[1][0].inputs == "int8"
    assert next(one for one in found.balanced if one.readers == ("y",)).why == ""
    assert found.loss is not None
    assert plain.loss is not None
    assert found.loss.psnr > 30


def loud_attention(x: Var) -> Var:
    """Values of which a few channels are far larger, that the output projection weighs down."""
    scores = mb.matmul(x=heads(x, UP[:WIDTH] / 8), y=heads(x, GATE[:WIDTH] / 8), transpose_y=True)
    loud = (LOUD[:, None] * UP[WIDTH:].astype(np.float64)).astype(np.float16)
    seen = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=heads(x, loud), name="seen")
    merged = mb.reshape(x=mb.transpose(x=seen, perm=(0, 2, 1, 3)), shape=(1, 24, WIDTH))
    return mb.linear(x=merged, weight=half(WIDTH, WIDTH, size=0.125 / LOUD), name="y")


def squared(x: Var) -> Var:
    value = mb.linear(x=x, weight=UP[:24])
    return mb.linear(x=mb.matmul(x=value, y=value, name="s"), weight=DOWN[:, :24], name="y")


def kept_values(x: Var) -> tuple[Var, Var]:
    """As a cache keeps them."""
    scores = mb.matmul(x=heads(x, UP[:WIDTH]), y=heads(x, GATE[:WIDTH]), transpose_y=True)
    values = heads(x, UP[WIDTH:])
    return projected(mb.matmul(x=mb.softmax(x=scores), y=values)), mb.identity(x=values, name="kept")


@pytest.mark.parametrize(
    ("build", "words"),
    [(squared, "matmul 's' makes it of one value twice"), (kept_values, "its source, is read elsewhere too")],
)
def test_values_that_cannot_be_scaled_are_said(build: Callable[[Var], Any], words: str) -> None:
    see_why(build, words)


def test_weights_with_a_table_are_tried_with_scales_from_a_norm() -> None:
    """The wrong version multiplies inputs of fp64 with the numbers of a table, which are fp32, and ends."""
    found = ane.compress(
        program_of(wide_channels), 4, inputs=samples(), for_="size", balance=True, smallest=100
    )
    assert [str(row.form) for row in found.compressed] == ["palette4"]
    assert len(found.balanced) == 1
