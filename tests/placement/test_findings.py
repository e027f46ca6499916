"""Findings beyond legality: for each rule a program on which it speaks, and one on which it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import assert_linear
from hazard_graphs import HAZARDS

from anesurgery.interpret import run
from anesurgery.loading import load
from anesurgery.mil import Array, Operation, Program, Var, ct, mb, types, walk_ops
from anesurgery.placement.evidence import Finding, Grade, Rule
from anesurgery.placement.findings_in_words import hidden_risks, report_lines, unrepaired
from anesurgery.placement.rules import numeric, shapes, slow
from anesurgery.placement.rules.faulty_ops import CLAIMS
from anesurgery.placement.target import Target
from anesurgery.registry import make_pass, pass_names
from anesurgery.surgery import apply

ANY = Target.parse("any")
RULES = (*slow.RULES, *numeric.RULES, *shapes.RULES)
BY_ID = {rule.id: rule for rule in RULES}
Body = Callable[..., Any]


def program(body: Body, *inputs: tuple[int, ...] | Var, dtype: Any = types.fp16, opset: Any = None) -> Program:
    """A program of inputs of these shapes."""
    specs = [mb.TensorSpec(shape, dtype=dtype) for shape in inputs]
    made: Program = mb.program(input_specs=specs, opset_version=opset or ct.target.iOS17)(body)
    return made


def said(rule: Rule, found: Program, target: Target = ANY) -> list[str]:
    """What a rule says about the ops of a program."""
    assert rule.test is not None
    ops = [op for op in walk_ops(found) if op.op_type != "const"]
    return [m for op in ops if not rule.ops or op.op_type in rule.ops if (m := rule.test(op, target))]


def half(*shape: int, value: float | None = None) -> Array:
    """A constant: random, or of one value."""
    if value is not None:
        return np.full(shape, value, np.float16)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


def conv(kernel: tuple[int, ...], **options: Any) -> Body:
    return lambda x: mb.conv(x=x, weight=half(*kernel), pad_type="same", **options)


def lut(kernel: tuple[int, ...], tables: tuple[int, ...], colours: int = 16) -> Any:
    """Palettized weights of iOS 18."""
    bits = {2: types.np_uint1_dtype, 4: types.np_uint2_dtype, 16: types.np_uint4_dtype}[colours]
    return mb.constexpr_lut_to_dense(indices=np.zeros(kernel, bits), lut=half(*tables, colours, 1))


def scaled(weight: Any, scales: tuple[int, ...]) -> Any:
    return mb.constexpr_blockwise_shift_scale(data=weight, scale=half(*scales))


def int8(*shape: int) -> Array:
    return np.zeros(shape, np.int8)


def attention(q: Any, k: Any, scale: float = 1.0, mask: Any = None) -> Any:
    scores = mb.matmul(x=q, y=k, transpose_y=True)
    scores = mb.mul(x=scores, y=np.float16(scale)) if scale != 1 else scores
    return mb.softmax(x=scores if mask is None else mb.add(x=scores, y=mask), axis=-1)


def norm(x: Any, epsilon: float, centred: bool) -> Any:
    """A norm written out."""
    if centred:
        x = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[-1], keep_dims=True))
    mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1], keep_dims=True)
    return mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=mean, y=np.float16(epsilon)), epsilon=1e-12))


def blended_cache(step: Any, chosen: Any, cache: Any) -> Any:
    """A cache that is written whole, with a step where a mask chooses it."""
    kept = mb.mul(x=cache, y=mb.sub(x=np.float16(1), y=chosen))
    return mb.add(x=kept, y=mb.mul(x=step, y=chosen))


def triangle(n: int, fill: float) -> Array:
    return (
        np.triu(np.full((n, n), fill, np.float16), 1)
        if np.isfinite(fill)
        else np.where(np.tri(n) > 0, 0, fill).astype(np.float16)
    )


def lookup(ids: Any) -> Any:
    """One-hot rows of ids in fp16."""
    return mb.equal(x=mb.cast(x=ids, dtype="fp16"), y=np.arange(100, dtype=np.float16))


def positions(end: int) -> Body:
    return lambda x: mb.add(x=x, y=mb.cast(x=mb.range_1d(start=0, end=end, step=1), dtype="fp16"))


def run_time_mask(q: Any, k: Any, ids: Any, fill: float = -np.inf) -> Any:
    scores = mb.matmul(x=q, y=k, transpose_y=True)
    keep = mb.greater(x=ids, y=np.float16(0))
    return mb.softmax(x=mb.select(cond=keep, a=scores, b=np.float16(fill)), axis=-1)


def magnitude_shares(x: Var) -> Var:
    return mb.real_div(x=x, y=mb.reduce_sum(x=mb.abs(x=x), axes=[-1], keep_dims=True))


def written_softmax(x: Any, safe: bool) -> Any:
    if safe:
        x = mb.sub(x=x, y=mb.reduce_max(x=x, axes=[-1], keep_dims=True))
    e = mb.exp(x=x)
    return mb.real_div(x=e, y=mb.reduce_sum(x=e, axes=[-1], keep_dims=True))


def divided_by_largest(x: Any) -> Any:
    top = mb.reduce_max(x=mb.abs(x=x), axes=[-1], keep_dims=True)
    return mb.square(x=mb.real_div(x=x, y=top))


def linear(outputs: int, inputs: int, value: float | None = None) -> Body:
    return lambda x: mb.linear(x=x, weight=half(outputs, inputs, value=value))


HEADS = [(1, 2, 16, 32)] * 2
IOS18 = {"opset": ct.target.iOS18}
Case = tuple[Program, str]
TABLE: dict[str, tuple[Callable[[], Program], str, Callable[[], Program]]] = {
    # rule: where it speaks, what it says (in part), where it says nothing
    "perf-dma-notch": (
        lambda: program(linear(2048, 4096), (1, 4096)),
        "2048x4096: 1,048,576 bytes per core, 0 from 1 * 2^20; 2 parts",
        lambda: program(linear(2016, 4096), (1, 4096)),
    ),
    "conv-kernel-slow": (
        lambda: program(conv((8, 4, 3, 11)), (1, 4, 32, 32)),
        "3x11, 11 wide",
        lambda: program(conv((8, 4, 11, 3)), (1, 4, 32, 32)),
    ),
    "conv-stride": (
        lambda: program(conv((8, 4, 7, 7), strides=[5, 5]), (1, 4, 35, 35)),
        "stride is 5x5",
        lambda: program(conv((8, 4, 7, 7), strides=[4, 4]), (1, 4, 32, 32)),
    ),
    "conv-groups-core": (
        lambda: program(conv((16, 2, 3, 3), groups=8), (1, 16, 32, 32)),
        "8 groups of 2 channels on 4 lanes",
        lambda: program(conv((16, 1, 3, 3), groups=16), (1, 16, 32, 32)),
    ),
    "conv-dilation-slow": (
        lambda: program(conv((4, 4, 3, 3), dilations=[8, 8]), (1, 4, 32, 32)),
        "dilation is 8x8",
        lambda: program(conv((4, 4, 1, 1), dilations=[8, 8]), (1, 4, 32, 32)),
    ),
    "comp-group": (
        lambda: program(lambda x: mb.linear(x=x, weight=lut((32, 64), (16, 1))), (1, 64), **IOS18),
        "16 look-up tables, one for each 2 channels",
        lambda: program(lambda x: mb.linear(x=x, weight=lut((32, 64), (4, 1))), (1, 64), **IOS18),
    ),
    "comp-bits": (
        lambda: program(lambda x: mb.linear(x=x, weight=lut((32, 64), (1, 1), 4)), (1, 64), **IOS18),
        "4 values",
        lambda: program(lambda x: mb.linear(x=x, weight=lut((32, 64), (1, 1))), (1, 64), **IOS18),
    ),
    "perf-reshape": (
        lambda: program(lambda x: mb.relu(x=mb.transpose(x=x, perm=[0, 2, 1])), (1, 512, 512)),
        "1x512x512 is moved, 524 kB",
        lambda: program(lambda x: mb.relu(x=mb.transpose(x=x, perm=[0, 2, 1, 3])), (1, 64, 64, 64)),
    ),
    "sdpa-op": (
        lambda: program(lambda q, k: mb.scaled_dot_product_attention(query=q, key=k, value=k), *HEADS, **IOS18),
        "1x2x16x32 has 1,024 elements",
        lambda: program(
            lambda q, k: mb.scaled_dot_product_attention(query=q, key=k, value=k),
            *[(1, 16, 2048, 64)] * 2,
            **IOS18,
        ),
    ),
    "sdpa-os26": (
        lambda: program(lambda q, k: mb.scaled_dot_product_attention(query=q, key=k, value=k), *HEADS, **IOS18),
        "NaN from fused attention of 1x2x16x32",
        lambda: program(lambda q, k: attention(q, k), *HEADS),
    ),
    "attn-query-tile": (
        lambda: program(lambda q, k: attention(q, k), *[(1, 4, 1024, 64)] * 2),
        "1x4x1024x1024 take 8.39 MB",
        lambda: program(lambda q, k: attention(q, k), *HEADS),
    ),
    "identity": (
        lambda: program(lambda x: mb.relu(x=mb.identity(x=x, name="same")), (1, 4)),
        "%same is %x",
        lambda: program(lambda x: mb.identity(x=mb.relu(x=x)), (1, 4)),
    ),
    "patch-embedding": (
        lambda: program(conv((8, 4, 16, 16), strides=[16, 16]), (1, 4, 32, 32)),
        "patches of 16x16",
        lambda: program(conv((8, 4, 16, 16), strides=[8, 8]), (1, 4, 32, 32)),
    ),
    "constant-gather": (
        lambda: program(lambda x: mb.gather(x=x, indices=[1, 0], axis=1, name="turned"), (1, 2)),
        "%turned takes rows at constant indices",
        lambda: program(lambda x: mb.gather_nd(x=x, indices=[[0, 0], [1, 1]]), (2, 2)),
    ),
    "lmhead-axis": (
        lambda: program(linear(65600, 2), (1, 2)),
        "65600 outputs; only what reads them needs pieces of at most 65536",
        lambda: program(linear(65536, 2), (1, 2)),
    ),
    "lmhead-split": (
        lambda: program(linear(32000, 4), (1, 4)),
        "32000 outputs: 2 parts of at most 16384",
        lambda: program(linear(16384, 4), (1, 4)),
    ),
    "lmhead-whole": (
        lambda: program(conv((70000, 4, 1, 1)), (1, 4, 1, 1)),
        "70000 outputs; only what reads them needs pieces",
        lambda: program(linear(70000, 4), (1, 4)),
    ),
    "lmhead-last-token": (
        lambda: program(linear(4096, 32), (1, 16, 32)),
        "4096 logits for each of 16 positions; generating text needs one",
        lambda: program(linear(4096, 32), (1, 1, 32)),
    ),
    "perf-softmax": (
        lambda: program(lambda x: written_softmax(x, True), (1, 64)),
        "is a softmax, written as exp",
        lambda: program(lambda x: mb.real_div(x=mb.exp(x=x), y=np.float16(3)), (1, 64)),
    ),
    "perf-norm": (
        lambda: program(lambda x: norm(x, 1e-4, True), (1, 8, 64)),
        "the layer norm of %x is written out",
        lambda: program(lambda x: norm(x, 1e-4, False), (1, 8, 64)),
    ),
    "gqa-repeat": (
        lambda: program(
            lambda q, k: attention(q, mb.tile(x=k, reps=[1, 4, 1, 1])), (1, 4, 16, 32), (1, 1, 16, 32)
        ),
        "1x1x16x32 is repeated 4 times",
        lambda: program(lambda q, k: mb.relu(x=mb.tile(x=k, reps=[1, 4, 1, 1])), *HEADS),
    ),
    "rewritten-cache": (
        lambda: program(blended_cache, (1, 1, 4, 16), (1, 64, 1, 1), (1, 64, 4, 16)),
        "all 1x64x4x16 of %cache are written for one step",
        lambda: program(blended_cache, (1, 64, 4, 16), (1, 64, 1, 1), (1, 64, 4, 16)),
    ),
    "compile-fanin": (
        lambda: program(
            lambda x: mb.concat(values=[mb.mul(x=x, y=np.float16(i)) for i in range(2, 15)], axis=1), (1, 64)
        ),
        "13 branches meet",
        lambda: program(
            lambda x: mb.concat(values=[mb.mul(x=x, y=np.float16(i)) for i in range(2, 8)], axis=1), (1, 64)
        ),
    ),
    "topk-slow": (
        lambda: program(lambda x: mb.topk(x=x, k=4, axis=-1), (1, 64)),
        "topk of 1x64",
        lambda: program(lambda x: mb.relu(x=x), (1, 64)),
    ),
    "num-mac-32768": (
        lambda: program(lambda x: linear(8, 1024, 40)(mb.sigmoid(x=x)), (1, 1024)),
        "reaches 4.1e+04; the ceiling is 32768",
        lambda: program(linear(8, 1024, 40), (1, 1024)),
    ),
    "num-square": (
        lambda: program(lambda x: mb.pow(x=x, y=np.float16(2)), (1, 64)),
        "the square of %x overflows above 256; %x has no known bound",
        lambda: program(divided_by_largest, (1, 64)),
    ),
    "num-gate": (
        lambda: program(lambda x: gated(x, 10), (1, 8, 64)),
        "times %up may reach",
        lambda: program(lambda x: gated(x, 0.02), (1, 8, 64)),
    ),
    "num-scale-after": (
        lambda: program(lambda q, k: attention(q, k, 0.125), *HEADS),
        "multiplied by 0.125 only after the product",
        lambda: program(lambda q, k: attention(mb.mul(x=q, y=np.float16(0.125)), k), *HEADS),
    ),
    "num-scores": (
        lambda: program(lambda x: mb.softmax(x=mb.mul(x=x, y=np.float16(100)), axis=-1), (4, 16)),
        "is 100 times %x, and overflows above 655",
        lambda: program(lambda x: mb.softmax(x=mb.mul(x=x, y=np.float16(16)), axis=-1), (4, 16)),
    ),
    "num-mask-causal": (
        lambda: program(lambda q, k: attention(q, k, mask=triangle(16, -np.inf)), *HEADS),
        "masks scores with -inf: may give NaN",
        lambda: program(lambda q, k: attention(q, k, mask=triangle(16, -1e4)), *HEADS),
    ),
    "num-mask": (
        lambda: program(lambda q, k, i: run_time_mask(q, k, i, -4e4), *HEADS, (1, 1, 1, 16)),
        "masks scores with -4e+04",
        lambda: program(lambda q, k, i: run_time_mask(q, k, i, -1e4), *HEADS, (1, 1, 1, 16)),
    ),
    "num-mask-rows": (
        lambda: program(lambda q, k, i: run_time_mask(q, k, i), *HEADS, (1, 1, 1, 16)),
        "keeps no score gives NaN",
        lambda: program(lambda q, k: attention(q, k, mask=triangle(16, -np.inf)), *HEADS),
    ),
    "num-mask-product": (
        lambda: program(
            lambda q, k, m: attention(q, k, mask=mb.mul(x=m, y=np.float16(-np.inf))), *HEADS, (1, 1, 1, 16)
        ),
        "is -inf",
        lambda: program(
            lambda q, k, m: attention(q, k, mask=mb.mul(x=m, y=np.float16(-1e4))), *HEADS, (1, 1, 1, 16)
        ),
    ),
    "num-nan-test": (
        lambda: program(lambda x: mb.cast(x=mb.not_equal(x=x, y=x), dtype="fp16"), (1, 64)),
        "finds no NaN in %x",
        lambda: program(lambda x, y: mb.cast(x=mb.not_equal(x=x, y=y), dtype="fp16"), (1, 64), (1, 64)),
    ),
    "num-constant": (
        lambda: program(lambda x: mb.add(x=x, y=half(64, value=np.inf)), (1, 64)),
        "holds inf",
        lambda: program(lambda x: mb.add(x=x, y=half(64, value=65504)), (1, 64)),
    ),
    "num-eps": (
        lambda: program(lambda x: mb.layer_norm(x=x, axes=[-1], epsilon=np.float16(1e-12)), (1, 8, 64)),
        "is 0 in fp16",
        lambda: program(lambda x: mb.layer_norm(x=x, axes=[-1], epsilon=np.float16(1e-5)), (1, 8, 64)),
    ),
    "num-eps-subnormal": (
        lambda: program(lambda x: norm(x, 1e-6, False), (1, 8, 64)),
        "is subnormal in fp16",
        lambda: program(lambda x: norm(x, 1e-4, False), (1, 8, 64)),
    ),
    "num-int": (
        lambda: program(lookup, (1, 1), dtype=types.int32),
        "%ids, integers of unknown size, becomes fp16",
        lambda: program(
            lambda x: mb.sub(x=np.float16(1), y=mb.cast(x=x, dtype="fp16")), (1, 8), dtype=types.int32
        ),
    ),
    "num-int-table": (
        lambda: program(lambda x: mb.equal(x=x, y=np.arange(4096).astype(np.float16)), (1, 1)),
        "integers up to 4096",
        lambda: program(lambda x: mb.equal(x=x, y=np.arange(2048).astype(np.float16)), (1, 1)),
    ),
    "num-reduce": (
        lambda: program(lambda x: mb.reduce_sum(x=x, axes=[-2, -1]), (1, 4, 128, 128)),
        "16384 values are added, which overflows",
        lambda: program(lambda x: mb.reduce_sum(x=mb.sigmoid(x=x), axes=[-2, -1]), (1, 4, 128, 128)),
    ),
    "num-quotient": (
        lambda: program(magnitude_shares, (1, 64)),
        "64 values are added for the quotient",
        lambda: program(lambda x: magnitude_shares(mb.tanh(x=x)), (1, 64)),
    ),
    "num-slice-q4": (
        lambda: program(lambda x: mb.slice_by_index(x=x, begin=[0, 16], end=[1, 32]), (1, 64)),
        "%x is cut, element 16 on",
        lambda: program(lambda x: mb.slice_by_index(x=mb.tanh(x=x), begin=[0, 16], end=[1, 32]), (1, 64)),
    ),
    "num-softmax": (
        lambda: program(lambda x: written_softmax(x, False), (1, 64)),
        "exp of %x, which has no known bound, overflows above 11.09",
        lambda: program(lambda x: written_softmax(x, True), (1, 64)),
    ),
    "num-exp": (
        lambda: program(lambda x: mb.log(x=mb.add(x=mb.exp(x=x), y=np.float16(1))), (1, 64)),
        "a softplus is written out: exp of %x, which has no known bound",
        lambda: program(lambda x: mb.log(x=mb.add(x=mb.exp(x=mb.tanh(x=x)), y=np.float16(1))), (1, 64)),
    ),
    "last-axis-align": (
        lambda: program(linear(37, 64), (1, 64)),
        "1x37 is stored as 64: 1.73 times the memory",
        lambda: program(linear(96, 64), (1, 64)),
    ),
    "last-axis-memory": (
        lambda: program(lambda x: mb.reduce_mean(x=x, axes=[2, 3], keep_dims=True), (1, 32768, 2, 2)),
        "1x32768x1x1 is stored as 32: 32 times the memory (2.1 MB)",
        lambda: program(lambda x: mb.reduce_mean(x=x, axes=[2, 3], keep_dims=True), (1, 8192, 2, 2)),
    ),
}


FROM_THE_CATALOGUE = {
    "num-root": "overflows from 256 on",
    "num-folded-cast": "is cast from fp16",
    "num-spectrum": "overflows from 256 on",
    "num-cosine": "are multiplied before they are divided by their lengths",
    "num-variance": "nearly equal where %x is far from 0",
    "num-log-softmax": "a share below 6e-08 is 0",
    "num-count": "above 2048 fp16 skips integers",
    "num-angle": "fp16 holds an angle to",
    "num-points": "lies up to 0.12 pixels off in an image of 1024",
    "num-exp-range": "overflows above 11.09",
    "num-atan": "0 / 0 is NaN",
    "num-gather-nd": "known only at run time",
    "num-mean": "a mean of 1048576 values",
    "num-qdq": "is quantized by another scale",
    "num-shares": "of 4096 keys",
    "num-between": "overflows above 65504, though",
    "num-cancel": "leaves of 1, and it may be next to 1",
}
"""Rule -> words of it about its hazard."""
for _hazard in HAZARDS:
    if _hazard.rule in FROM_THE_CATALOGUE:
        graph, twin = partial(getattr, _hazard, "graph"), partial(getattr, _hazard, "twin")
        TABLE[_hazard.rule] = (graph, FROM_THE_CATALOGUE[_hazard.rule], twin)


def test_every_rule_is_in_the_table() -> None:
    assert set(TABLE) == set(BY_ID)
    assert len(RULES) == len(BY_ID)


@pytest.mark.parametrize("name", TABLE)
def test_speaks_and_keeps_silent(name: str) -> None:
    speaks, words, silent = TABLE[name]
    found = said(BY_ID[name], speaks())
    assert len(found) >= 1
    assert words in found[0]
    assert said(BY_ID[name], silent()) == []


def silu(x: Any) -> Any:
    return mb.silu(x=x)


def gated(x: Any, scale: float, *, gate: Callable[[Any], Any] = silu, norm: bool = True) -> Any:
    """A feed-forward layer whose weights have a spread of `scale`; `gate` makes one of the two factors."""
    x = mb.layer_norm(x=x, axes=[-1], epsilon=np.float16(1e-5)) if norm else x
    spread = (np.random.default_rng(0).standard_normal((2, 128, 64)) * scale).astype(np.float16)
    up = mb.linear(x=x, weight=spread[0], name="up")
    inner = mb.mul(x=gate(mb.linear(x=x, weight=spread[1])), y=up)
    return mb.linear(x=inner, weight=half(64, 128, value=0.001))


GATES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "gelu": (lambda x: gated(x, 10, gate=lambda g: mb.gelu(x=g)), True),
    "a sigmoid": (lambda x: gated(x, 10, gate=lambda g: mb.sigmoid(x=g)), False),
    "a written silu": (lambda x: gated(x, 10, gate=lambda g: mb.mul(x=g, y=mb.sigmoid(x=g))), True),
    "without a norm": (lambda x: gated(x, 0.02, norm=False), True),
    "no gate": (lambda x: gated(x, 10, gate=lambda g: g), False),
    "a square": (lambda x: linear(8, 64)(mb.square(x=mb.relu(x=x))), False),
    "not read by a product": (lambda x: mb.mul(x=mb.silu(x=x), y=mb.sin(x=x)), False),
}


@pytest.mark.parametrize("name", GATES)
def test_a_gated_layer_overflows_if_both_factors_are_large(name: str) -> None:
    build, overflows = GATES[name]
    assert bool(said(BY_ID["num-gate"], program(build, (1, 8, 64)))) == overflows


def test_the_advice_for_a_gated_layer_works() -> None:
    model = program(lambda x: gated(x, 25), (1, 8, 64))
    x = {"x": np.random.default_rng(1).standard_normal((1, 8, 64)).astype(np.float16)}
    scaled = apply(model, "scale_ranges", inputs=x, quiet=True).program
    before, after = (next(iter(run(p, x, precision="fp16").values())) for p in (model, scaled))
    assert not np.isfinite(before).all()
    assert np.isfinite(after).all()


SMALL: dict[str, Callable[[Any], Any]] = {
    "instance norm": lambda x: mb.instance_norm(x=x, epsilon=np.float16(1e-5)),
    "gelu of a norm": lambda x: mb.gelu(x=mb.layer_norm(x=x, axes=[-1], epsilon=np.float16(1e-5))),
    "silu of a norm": lambda x: mb.silu(x=mb.layer_norm(x=x, axes=[-1], epsilon=np.float16(1e-5))),
    "inverse": lambda x: mb.inverse(x=mb.add(x=mb.abs(x=x), y=np.float16(1))),
    "inverse root": lambda x: mb.rsqrt(x=mb.abs(x=x), epsilon=np.float16(1e-3)),
    "logarithm": lambda x: mb.log(x=x),
    "logarithm without its mean": lambda x: mb.sub(
        x=(log := mb.log(x=x)), y=mb.reduce_mean(x=log, axes=[-1], keep_dims=True)
    ),
}
"""Values whose squares no input makes overflow."""


@pytest.mark.parametrize("name", SMALL)
def test_squares_of_small_values_are_no_finding(name: str) -> None:
    squares = program(lambda x: mb.square(x=SMALL[name](x)), (1, 8, 64))
    assert said(BY_ID["num-square"], squares) == []


@pytest.mark.parametrize(
    "loud",
    [
        lambda x: mb.gelu(x=x),
        lambda x: mb.inverse(x=x),
        lambda x: mb.rsqrt(x=x, epsilon=np.float16(1e-3)),
        lambda x: mb.sub(x=mb.log(x=x), y=mb.reduce_mean(x=x, axes=[-1], keep_dims=True)),
    ],
    ids=["gelu", "inverse", "inverse root", "logarithm without another mean"],
)
def test_squares_of_what_has_no_bound_are(loud: Callable[[Any], Any]) -> None:
    assert said(BY_ID["num-square"], program(lambda x: mb.square(x=loud(x)), (1, 8, 64)))


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.id)
def test_a_rule_is_whole(rule: Rule) -> None:
    assert rule.legal is None
    assert rule.kind in ("speed", "numeric", "shape", "interface")
    assert rule.because
    assert rule.source
    assert rule.remedy or rule.advice
    assert rule.remedy is None or rule.remedy in pass_names()


def test_rules_of_other_chips_do_not_concern() -> None:
    m1, m4 = Target.parse("M1"), Target.parse("M4")
    assert not BY_ID["perf-dma-notch"].scope.concerns(m1)
    assert BY_ID["perf-dma-notch"].scope.concerns(m4)
    assert BY_ID["lmhead-split"].scope.concerns(m1)
    assert not BY_ID["lmhead-split"].scope.concerns(m4)
    assert not BY_ID["num-slice-q4"].scope.concerns(m4)
    assert not BY_ID["sdpa-os26"].scope.concerns(Target.parse("M4/macOS 27"))


def test_fused_attention_is_wrong_on_one_release() -> None:
    found = TABLE["sdpa-os26"][0]()
    rule = BY_ID["sdpa-os26"]
    assert said(rule, found, Target.parse("M4/macOS 26"))
    assert not said(rule, found, Target.parse("M4/macOS 15"))


@pytest.mark.parametrize(("outputs", "inputs"), [(2048, 4096), (4096, 4096), (2048, 8192), (4096, 14336)])
def test_the_notch_is_where_it_was_measured(outputs: int, inputs: int) -> None:
    payload = slow._payload(outputs, inputs, 1)
    assert slow._in_notch(payload)
    assert not slow._in_notch(slow._payload(2016, 4096, 1))


def convolutions(blocks: int) -> Program:
    """A plain convolutional net."""

    def body(x: Any) -> Any:
        weight, bias = half(32, 32, 3, 3), half(32)
        for _ in range(blocks):
            y = mb.relu(x=mb.conv(x=x, weight=weight, bias=bias, pad_type="same"))
            x = mb.add(x=x, y=mb.conv(x=y, weight=weight, pad_type="same"))
            x = mb.instance_norm(x=x, epsilon=np.float16(1e-5))
        return mb.softmax(x=x, axis=1)

    return program(body, (1, 32, 64, 64))


def test_nothing_is_said_of_a_plain_net() -> None:
    assert [m for rule in RULES for m in said(rule, convolutions(3))] == []


def every(found: Program) -> Iterator[tuple[Rule, Operation]]:
    by_type: dict[str, list[Rule]] = {}
    always = [r for r in RULES if not r.ops]
    for rule in RULES:
        for name in rule.ops:
            by_type.setdefault(name, []).append(rule)
    for op in walk_ops(found):
        if op.op_type != "const":
            yield from ((rule, op) for rule in (*by_type.get(op.op_type, ()), *always))


def test_judging_is_linear_in_the_number_of_ops() -> None:
    def judge(network: Program) -> None:
        for rule, op in every(network):
            assert rule.test is not None
            rule.test(op, ANY)

    assert_linear(judge, convolutions(40), convolutions(80))


@pytest.mark.parametrize(
    ("outputs", "ids", "speaks"), [(512, True, True), (512, False, False), (5000, False, True)]
)
def test_logits_are_over_words(outputs: int, ids: bool, speaks: bool) -> None:
    """A head of a pose network has some hundred outputs at each key point, and the model reads no ids."""

    def body(x: Any) -> Any:
        rows = mb.gather(x=half(9, 16), indices=x, axis=0) if ids else mb.relu(x=x)
        return mb.linear(x=rows, weight=half(outputs, 16))

    spec = mb.TensorSpec((1, 8) if ids else (1, 8, 16), dtype=types.int32 if ids else types.fp16)
    network = mb.program(input_specs=[spec], opset_version=ct.target.iOS17)(lambda x: body(x))
    assert bool(said(BY_ID["lmhead-last-token"], network)) == speaks


@pytest.mark.parametrize("shape", [(1, 3, 8, 20), (1, 80, 32), (1, 1600)])
def test_transcription_needs_the_logits_of_every_position(shape: tuple[int, ...]) -> None:
    """A CTC head reads an image, a spectrum or sound; the wrong version would keep its last position."""

    def body(x: Any, lengths: Any) -> Any:
        rows = mb.reshape(x=x, shape=[1, -1, 16])
        logits = mb.linear(x=rows, weight=half(5000, 16))
        return mb.softmax(x=logits, axis=-1), mb.add(x=lengths, y=1)

    specs = [mb.TensorSpec(shape, dtype=types.fp16), mb.TensorSpec((1,), dtype=types.int32)]
    network = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(body)
    assert not said(BY_ID["lmhead-last-token"], network)


@pytest.mark.slow
def test_a_converted_decoder(converted: Callable[..., Any], tmp_path: Path) -> None:
    converted("gpt2").model.save(str(tmp_path / "gpt2.mlpackage"))
    model = load(tmp_path / "gpt2.mlpackage").program
    found: dict[str, int] = {}
    for rule, op in every(model):
        if rule.test is not None and rule.test(op, ANY):
            found[rule.id] = found.get(rule.id, 0) + 1
    assert found == {"num-mask-causal": 1, "lmhead-last-token": 1, "last-axis-align": 1}


REPAIRED = [rule for rule in RULES if rule.remedy]
NOT_IN_GPT = {"constant-gather", "identity", "lmhead-axis", "lmhead-split", "patch-embedding"} | {
    *FROM_THE_CATALOGUE,
    "num-mac-32768",
    "num-scale-after",
    "num-slice-q4",
    "num-exp",
    "num-mask",
    "num-mask-product",
    "num-mask-rows",
    "num-quotient",
    "num-scores",
    "num-eps-subnormal",
    "num-softmax",
    "sdpa-os26",
}
"""Rules that find nothing in a small GPT: no identities, no patches, a narrow head, gathers by its inputs, no
sigmoid, softmax or quotient of a sum written out, a constant mask, attention in parts, and weights that bound
its scores."""


@pytest.mark.one_of(36)
@pytest.mark.parametrize("rule", REPAIRED, ids=lambda r: r.id)
def test_the_remedy_repairs_it(rule: Rule, converted: Callable[..., Any]) -> None:
    assert rule.remedy is not None
    programs = [TABLE[rule.id][0]()]
    if rule.id not in NOT_IN_GPT:
        programs.append(load(converted("nanogpt").model).program)
    for found in programs:
        assert said(rule, found)
        repaired = apply(found, [make_pass(rule.remedy)], prove=None, quiet=True)
        assert said(rule, repaired.program) == []


def test_a_line_without_pass_and_advice_says_that_there_is_none() -> None:
    claim = next(name for name, fault in CLAIMS.items() if fault.simulate is None)
    finding = Finding(claim, "numeric", "wrong numbers", "a reason", "a source", Grade.REPORTED)
    for line in (hidden_risks([finding])[1], *report_lines([finding]), *unrepaired([finding])):
        assert line.endswith("a reason (a source); no pass repairs it")
