"""Rules of legality: what the Neural Engine can run, on which chip, and how well that is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol
from statement import conv, op

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.placement import Grade, Target
from anesurgery.placement.rules import conditions
from anesurgery.placement.rules.legality import FORBIDDEN, LEGAL, NEVER
from anesurgery.placement.verdicts import Legality

M4, M1 = "M4/macOS 27", "M1/macOS 14"


def half(*shape: int) -> Any:
    return (np.random.default_rng(0).standard_normal(shape) * 0.05).astype(np.float16)


def palette(*shape: int) -> Var:
    """Weights of 16 values."""
    table = half(*[1] * len(shape), 16, 1)
    return mb.constexpr_lut_to_dense(indices=np.zeros(shape, types.np_uint4_dtype), lut=table)


def program_of(build: Callable[[Var], Any], shape: tuple[Any, ...], dtype: Any) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=dtype)], opset_version=ct.target.iOS18)(
        lambda x: build(x)
    )


def last(
    build: Callable[[Var], Any], target: str, shape: tuple[Any, ...] = (1, 64, 32, 32), dtype: Any = types.fp16
) -> tuple[bool | None, str]:
    """Legality of the last op and the rule that forbids it or makes it doubtful."""
    row = ane.inspect(program_of(build, shape, dtype), target).ops[-1]
    return row.legal, next((f.rule for f in row.findings if f.kind == "legality"), "")


KERNEL = "conv-kernel"
Case = tuple[Callable[[Var], Any], str, tuple[bool | None, str], dict[str, Any]]


def case(build: Callable[[Var], Any], target: str, legal: bool | None, rule: str = "", **options: Any) -> Case:
    """What is last, on which target, and what is said of it; options are those of `last`."""
    return build, target, (legal, rule), options


VERDICTS: dict[str, Case] = {
    "65537 channels that a conv makes": case(
        lambda x: mb.conv(x=x, weight=half(65537, 1, 1, 1)), "A19", True, shape=(1, 1, 3, 3)
    ),
    "a depth of 65538 that a conv makes": case(
        lambda x: mb.conv(x=x, weight=half(2, 1, 1, 1, 1), pad_type="custom", pad=[1] * 6),
        "A19",
        False,
        "axis",
        shape=(1, 1, 65536, 1, 1),
    ),
    "an activation": case(op("gelu"), M4, True),
    "a kernel of 15": case(conv(8, 64, 1, 15), M4, True),
    "a kernel of 16": case(conv(8, 64, 1, 16), M4, False, KERNEL),
    "16 by 16": case(conv(8, 64, 16, 16), M4, True),
    "31 high": case(conv(8, 64, 31, 1), M4, True),
    "32 high": case(conv(8, 64, 32, 1), M4, False, KERNEL),
    "14 wide on M1": case(conv(8, 64, 1, 14), M1, False, "conv-kernel-old"),
    "a wide pool": case(
        op("max_pool", kernel_sizes=[1, 9], strides=[1, 1], pad_type="same"), M4, False, "max-pool-width"
    ),
    "a high pool": case(op("max_pool", kernel_sizes=[9, 1], strides=[1, 1], pad_type="same"), M4, True),
    "a long axis": case(op("relu"), M4, False, "axis", shape=(1, 1, 1, 65537)),
    "an axis too long for M1": case(op("relu"), M1, False, "axis", shape=(1, 16385)),
    "the same on M4": case(op("relu"), M4, True, shape=(1, 16385)),
    "channels on M1": case(op("relu"), M1, True, shape=(1, 65536, 1, 1)),
    "six axes": case(op("relu"), M4, False, "rank", shape=(1, 2, 2, 2, 2, 2)),
    "fp32": case(op("relu"), M4, False, "fp32", dtype=types.fp32),
    "int32": case(op("add", y=1), M4, False, "int32", dtype=types.int32),
    "a product of integers": case(
        op("linear", weight=np.ones((2, 8), np.int32)),
        M4,
        False,
        "int32-product",
        shape=(4, 8),
        dtype=types.int32,
    ),
    "a cast from fp32": case(op("cast", dtype="fp16"), M4, True, dtype=types.fp32),
    "on an older OS": case(op("cast", dtype="fp16"), M1, False, "fp32-cast", dtype=types.fp32),
    "on a newer OS": case(op("cast", dtype="fp16"), "M1/macOS 15", None, "fp32-cast-later", dtype=types.fp32),
    "a product of rank 5": case(
        lambda x: mb.matmul(x=x, y=mb.relu(x=x)), "M1/macOS 14", None, "matmul-rank", shape=(1, 2, 2, 8, 8)
    ),
    "rank 5 on M4": case(lambda x: mb.matmul(x=x, y=mb.relu(x=x)), M4, True, shape=(1, 2, 2, 8, 8)),
    "rank 5 with a constant": case(
        op("matmul", y=half(1, 2, 2, 8, 8)), "M1/macOS 14", True, shape=(1, 2, 2, 8, 8)
    ),
    "constant indices": case(op("gather", indices=[0, 3], axis=1), M4, True),
    "indices of the run": case(
        lambda x: mb.gather(x=half(2, 3, 4), indices=x, axis=1),
        M4,
        False,
        "gather-runtime",
        shape=(4,),
        dtype=types.int32,
    ),
    "an embedding": case(
        lambda x: mb.gather(x=half(100, 4), indices=x, axis=0),
        M4,
        False,
        "embedding",
        shape=(1, 8),
        dtype=types.int32,
    ),
    "a running sum": case(op("cumsum", axis=1), M4, False, "op-cumsum"),
    "the best index": case(op("reduce_argmax", axis=1), M4, False, "op-reduce_argmax"),
    "values of topk": case(lambda x: mb.topk(x=x, k=2)[0], M4, True),
    "topk on M2": case(lambda x: mb.topk(x=x, k=2)[0], "M2/macOS 15", False, "topk-m2"),
    "topk on M3": case(lambda x: mb.topk(x=x, k=2)[0], "M3/macOS 15", None, "topk-disputed"),
    "topk on M5": case(lambda x: mb.topk(x=x, k=2)[0], "M5", True),
    "topk on M1": case(lambda x: mb.topk(x=x, k=2)[0], M1, False, "topk-old"),
    "sine": case(op("sin"), M4, True),
    "sine on M2": case(op("sin"), "M2", False, "sin-cos"),
    "sine on any chip": case(op("sin"), "any", False, "sin-cos"),
    "three dimensions": case(op("conv", weight=half(4, 4, 3, 3, 3)), M4, True, shape=(1, 4, 8, 8, 8)),
    "three dimensions on M1": case(
        op("conv", weight=half(4, 4, 3, 3, 3)), M1, None, "conv3d", shape=(1, 4, 8, 8, 8)
    ),
    "a long sum": case(op("matmul", y=half(40000, 2)), M4, False, "matmul-inner", shape=(2, 40000)),
    "no row knows it": case(
        lambda x: mb.logical_xor(x=mb.greater(x=x, y=np.float16(0)), y=mb.less(x=x, y=np.float16(1))), M4, None
    ),
    "the best index in 16 bits": case(op("reduce_argmax", axis=1, output_dtype="uint16"), M4, None),
    "columns of a table": case(
        lambda x: mb.gather(x=half(100, 4), indices=x, axis=1),
        M4,
        False,
        "gather-runtime",
        shape=(1, 8),
        dtype=types.int32,
    ),
    "8-bit integers, reshaped": case(
        lambda x: mb.reverse(x=mb.quantize(input=x, scale=np.float16(1), output_dtype="int8"), axes=[3]),
        M4,
        None,
    ),
    "8-bit integers, read back": case(
        lambda x: mb.dequantize(
            input=mb.quantize(input=x, scale=np.float16(1), output_dtype="int8"), scale=np.float16(1)
        ),
        M4,
        True,
    ),
    "an update of no state": case(
        op("slice_update", update=half(2, 8), begin=[0, 0], end=[2, 8]),
        M4,
        False,
        "slice-update-alone",
        shape=(8, 8),
    ),
    "mirrored edges": case(op("pad", pad=[1, 1], mode="reflect"), M4, True),
    "mirrored edges on M1": case(op("pad", pad=[1, 1], mode="reflect"), M1, None, "pad-mirror"),
    "a mean over 32": case(op("avg_pool", kernel_sizes=[32, 32], pad_type="valid"), M4, None, "pool-window"),
    "a mean over 32 on M1": case(
        op("avg_pool", kernel_sizes=[32, 32], pad_type="valid"), M1, False, "pool-window"
    ),
    "logic on M1": case(
        lambda x: mb.logical_and(x=mb.greater(x=x, y=np.float16(0)), y=mb.less(x=x, y=np.float16(1))),
        M1,
        None,
        "logical-and",
    ),
    "linear of five axes": case(
        op("linear", weight=half(4, 8)), M4, None, "linear-rank", shape=(1, 2, 2, 4, 8)
    ),
    "a large step over unknown lengths": case(
        op("conv", weight=half(4, 4, 3, 3), strides=[3, 3]),
        M4,
        None,
        "conv-dynamic",
        shape=(1, 4, get_new_symbol(), 8),
    ),
    "a small one": case(
        op("conv", weight=half(4, 4, 3, 3), strides=[2, 2]), M4, True, shape=(1, 4, get_new_symbol(), 8)
    ),
    "a palette that is scaled": case(
        lambda x: mb.linear(
            x=x, weight=mb.constexpr_blockwise_shift_scale(data=palette(32, 64), scale=half(32, 1))
        ),
        M4,
        False,
        "comp-pcs",
        shape=(1, 64),
    ),
    "a palette": case(lambda x: mb.linear(x=x, weight=palette(32, 64)), M4, True, shape=(1, 64)),
    "a palette and a step of 4": case(
        lambda x: mb.conv(x=x, weight=palette(4, 64, 3, 3), strides=[4, 4]), M4, None, "comp-stride"
    ),
    "a palette and a step of 2": case(
        lambda x: mb.conv(x=x, weight=palette(4, 64, 3, 3), strides=[2, 2]), M4, True
    ),
    "a list": case(
        lambda x: mb.list_read(
            ls=mb.list_write(ls=mb.make_list(init_length=1, elem_shape=(4,), dtype="fp16"), index=0, value=x),
            index=0,
        ),
        M4,
        False,
        "op-list_read",
        shape=(4,),
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name: str) -> None:
    build, target, expected, options = VERDICTS[name]
    assert last(build, target, **options) == expected


def of_state(build: Callable[[Var, Var, Var], Any]) -> tuple[bool | None, str]:
    """Legality of the slice_update of a program with a state, and the rule that speaks about it."""

    program = mb.program(
        input_specs=[
            mb.TensorSpec((2, 8), dtype=types.fp16),
            mb.TensorSpec((2,), dtype=types.int32),
            mb.StateTensorSpec((8, 8), types.fp16),
        ],
        opset_version=ct.target.iOS18,
    )(lambda x, at, cache: build(x, at, cache))

    row = next(r for r in ane.inspect(program, M4).ops if r.op_type == "slice_update")
    return row.legal, next((f.rule for f in row.findings if f.kind == "legality"), "")


def updated(x: Var, at: Any, cache: Var, **more: Any) -> Var:
    return mb.slice_update(x=mb.read_state(input=cache), update=x, begin=at, end=[2, 8], **more)


def kept(cache: Var, value: Var) -> Var:
    return mb.relu(x=mb.coreml_update_state(state=cache, value=value))


def kept_and_read(x: Var, cache: Var) -> tuple[Var, Var]:
    new = updated(x, [0, 0], cache)
    return kept(cache, new), mb.relu(x=new)


def kept_and_given(x: Var, cache: Var) -> tuple[Var, Var]:
    new = updated(x, [0, 0], cache)
    return kept(cache, new), new


UPDATES: dict[str, tuple[Callable[[Var, Var, Var], Any], tuple[bool | None, str]]] = {
    "of a state": (lambda x, at, s: kept(s, updated(x, [0, 0], s)), (True, "")),
    "at a place of the run": (lambda x, at, s: kept(s, updated(x, at, s)), (True, "")),
    "of every second row": (
        lambda x, at, s: kept(
            s, mb.slice_update(x=mb.read_state(input=s), update=x, begin=[0, 0], end=[4, 8], stride=[2, 1])
        ),
        (None, "slice-update-stride"),
    ),
    "that is not stored": (lambda x, at, s: mb.relu(x=updated(x, [0, 0], s)), (False, "slice-update-alone")),
    "read by another op": (lambda x, at, s: kept_and_read(x, s), (False, "slice-update-alone")),
    "given to the caller": (lambda x, at, s: kept_and_given(x, s), (False, "slice-update-alone")),
    "of an activation": (
        lambda x, at, s: kept(
            s, mb.slice_update(x=mb.relu(x=mb.read_state(input=s)), update=x, begin=[0, 0], end=[2, 8])
        ),
        (False, "slice-update-alone"),
    ),
}


@pytest.mark.parametrize("case", UPDATES)
def test_an_update_stays_only_between_the_ops_of_its_state(case: str) -> None:
    build, expected = UPDATES[case]
    assert of_state(build) == expected


def head(outputs: int, palettized: bool) -> Callable[[Var], Any]:
    """A product with many outputs, and an op that reads them."""

    def build(x: Var) -> Any:
        weight = palette(outputs, 2) if palettized else half(outputs, 2)
        return mb.relu(x=mb.linear(x=x, weight=weight))

    return build


@pytest.mark.parametrize(
    ("outputs", "palettized", "target", "legal", "rule"),
    [
        (16384, False, "M1", True, ""),
        (49152, False, "M1", None, "head-size"),
        (49153, False, "M1", False, "axis"),
        (49152, False, "M2", False, "axis"),
        (65536, False, M4, True, ""),
        (151936, True, M4, None, "head-size"),
        (151936, False, M4, False, "axis"),
        (151937, True, M4, False, "axis"),
        (151936, True, "M1-M3", False, "axis"),
    ],
)
def test_a_long_head_is_unknown_where_it_was_seen_and_its_readers_are_refused(
    outputs: int, palettized: bool, target: str, legal: bool | None, rule: str
) -> None:
    *_, linear, relu = ane.inspect(program_of(head(outputs, palettized), (1, 2), types.fp16), target).ops
    said = next((f.rule for f in linear.findings if f.kind == "legality"), "")
    assert (linear.op_type, linear.legal, said) == ("linear", legal, rule)
    assert relu.legal is (legal is True)


def test_a_long_head_names_the_longest_that_every_chip_ran() -> None:
    *_, linear, _ = walk_ops(program_of(head(49152, palettized=True), (1, 2), types.fp16))
    target = dataclasses.replace(Target.parse(M4), chips=("M4", "M1"))
    assert conditions.long_head(linear, target).endswith("others saw up to 49152")


def int8(*shape: int) -> Any:
    return np.ones(shape, np.int8)


def scaled(shape: tuple[int, ...], *scales: int, offset: Any = None) -> Var:
    """Weights of 8 bits with scales for blocks, and offsets of a dtype."""
    more = {} if offset is None else {"offset": np.ones(scales, offset)}
    return mb.constexpr_blockwise_shift_scale(data=int8(*shape), scale=half(*scales), **more)


def affine(shape: tuple[int, ...], axis: int, count: int) -> Var:
    """Weights of 8 bits with scales along an axis."""
    return mb.constexpr_affine_dequantize(
        quantized_data=int8(*shape), scale=half(count), zero_point=np.zeros(count, np.int8), axis=axis
    )


BLOCKED, TAKEN = (False, "comp-blockwise"), (True, "")
SCALES: dict[str, tuple[Callable[[Var], Any], tuple[bool | None, str], tuple[int, ...]]] = {
    "conv, groups of inputs": (
        lambda x: mb.conv(x=x, weight=scaled((32, 64, 1, 1), 32, 2, 1, 1)),
        BLOCKED,
        (1, 64, 8, 8),
    ),
    "conv, each output": (
        lambda x: mb.conv(x=x, weight=scaled((32, 64, 1, 1), 32, 1, 1, 1)),
        TAKEN,
        (1, 64, 8, 8),
    ),
    "conv, one scale": (
        lambda x: mb.conv(x=x, weight=scaled((32, 64, 1, 1), 1, 1, 1, 1)),
        TAKEN,
        (1, 64, 8, 8),
    ),
    "linear, groups of inputs": (lambda x: mb.linear(x=x, weight=scaled((32, 64), 32, 4)), BLOCKED, (1, 64)),
    "linear, groups of outputs": (lambda x: mb.linear(x=x, weight=scaled((32, 64), 16, 1)), BLOCKED, (1, 64)),
    "linear, each input": (lambda x: mb.linear(x=x, weight=scaled((32, 64), 1, 64)), BLOCKED, (1, 64)),
    "linear, each output": (lambda x: mb.linear(x=x, weight=scaled((32, 64), 32, 1)), TAKEN, (1, 64)),
    "linear, affine by output": (lambda x: mb.linear(x=x, weight=affine((32, 64), 0, 32)), TAKEN, (1, 64)),
    "linear, affine by input": (lambda x: mb.linear(x=x, weight=affine((32, 64), 1, 64)), BLOCKED, (1, 64)),
    "linear, fp16 offsets": (
        lambda x: mb.linear(x=x, weight=scaled((32, 64), 32, 1, offset=np.float16)),
        (None, "comp-offset"),
        (1, 64),
    ),
    "conv, fp16 offset": (
        lambda x: mb.conv(x=x, weight=scaled((32, 64, 1, 1), 1, 1, 1, 1, offset=np.float16)),
        (None, "comp-offset"),
        (1, 64, 8, 8),
    ),
    "matmul, fp16 offsets": (
        lambda x: mb.matmul(x=x, y=scaled((64, 32), 1, 32, offset=np.float16)),
        (None, "comp-offset"),
        (1, 64),
    ),
    "linear, integer offsets": (
        lambda x: mb.linear(x=x, weight=scaled((32, 64), 32, 1, offset=np.int8)),
        TAKEN,
        (1, 64),
    ),
    "matmul, groups of inputs": (lambda x: mb.matmul(x=x, y=scaled((64, 32), 2, 32)), BLOCKED, (1, 64)),
    "matmul, each output": (lambda x: mb.matmul(x=x, y=scaled((64, 32), 1, 32)), TAKEN, (1, 64)),
    "matmul, each input": (lambda x: mb.matmul(x=x, y=scaled((64, 32), 64, 1)), BLOCKED, (1, 64)),
    "turned matmul, each output": (
        lambda x: mb.matmul(x=x, y=scaled((32, 64), 32, 1), transpose_y=True),
        TAKEN,
        (1, 64),
    ),
}


@pytest.mark.parametrize("case", SCALES)
@pytest.mark.parametrize("target", [M4, "M2/macOS 15", "M5/macOS 27"])
def test_scales_are_for_the_tensor_or_for_each_output_channel(case: str, target: str) -> None:
    build, expected, shape = SCALES[case]
    assert last(build, target, shape) == expected


def test_each_rule_cites_its_source_and_none_is_written_twice() -> None:
    assert len({rule.id for rule in FORBIDDEN}) == len(FORBIDDEN)
    for rule in FORBIDDEN:
        assert rule.source
        assert rule.because
        unmeasured = rule.scope.via == "compiler" or rule.grade in (Grade.GUESS, Grade.REPORTED)
        assert rule.legal is False or (rule.legal is None and unmeasured)
        assert rule.grade is not Grade.GUESS or "seen on" not in rule.scope.os
        assert isinstance(rule.grade, Grade)
    never = {op for ops, *_ in NEVER for op in ops.split()}
    assert not never & LEGAL


def test_the_compiler_forbids_nothing_on_the_chip_where_core_ml_was_measured() -> None:
    compiler = [r for r in FORBIDDEN if r.scope.via != "Core ML"]
    m4, m1 = (Legality(Target.parse(name)) for name in ("M4", "M1"))
    assert not [r.id for r in compiler if m4.forbids(r)]
    assert [r.id for r in compiler if m1.forbids(r)]


def test_what_was_not_put_through_core_ml_is_not_called_measured() -> None:
    untried = ("reduce_argmin", "scatter_nd", "reverse_sequence", "cond", "while_loop", "list_read")
    rows = {op: rule for rule in FORBIDDEN for op in rule.ops}
    assert {rows[op].grade for op in untried} == {Grade.REPORTED}


@pytest.mark.parametrize(
    ("rows", "computed", "repaired"), [(512, False, True), (1024, False, False), (1024, True, True)]
)
def test_a_lookup_becomes_a_product_where_that_pays(rows: int, computed: bool, repaired: bool) -> None:
    """The wrong version names the pass for a longer table at the front, where no switch pays for it."""

    def build(x: Var) -> Var:
        shifted = mb.add(x=mb.relu(x=x), y=x) if computed else x
        return mb.gather(x=half(rows, 4), indices=mb.cast(x=shifted, dtype="int32"), axis=0)

    findings = ane.inspect(program_of(build, (1, 8), types.fp16), M4).all_findings
    (remedy,) = {f.remedy for f in findings if f.rule == "embedding"}
    assert (remedy == "embedding_matmul") is repaired
