"""Rules of legality: what the Neural Engine can run, on which chip, and how well that is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement import Grade, Target
from anesurgery.placement.legal import Legality
from anesurgery.placement.rules.legality import FORBIDDEN, LEGAL, NEVER

M4, M1 = "M4/macOS 27", "M1/macOS 14"


def half(*shape: int) -> Any:
    return (np.random.default_rng(0).standard_normal(shape) * 0.05).astype(np.float16)


def palette(*shape: int) -> Var:
    """Weights of 16 values."""
    table = half(*[1] * len(shape), 16, 1)
    return mb.constexpr_lut_to_dense(indices=np.zeros(shape, types.np_uint4_dtype), lut=table)


def program_of(build: Callable[[Var], Any], shape: tuple[Any, ...], dtype: Any) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=dtype)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Any:
        return build(x)

    return program


def last(
    build: Callable[[Var], Any], target: str, shape: tuple[Any, ...] = (1, 64, 32, 32), dtype: Any = types.fp16
) -> tuple[bool | None, str]:
    """Legality of the last op and the rule that forbids it or makes it doubtful."""
    row = ane.inspect(program_of(build, shape, dtype), target).ops[-1]
    return row.legal, next((f.rule for f in row.findings if f.kind == "legality"), "")


CONV, KERNEL = {"pad_type": "same"}, "conv-kernel"
VERDICTS: dict[str, tuple[Callable[[Var], Any], str, tuple[bool | None, str], dict[str, Any]]] = {
    "an activation": (lambda x: mb.gelu(x=x), M4, (True, ""), {}),
    "a kernel of 15": (lambda x: mb.conv(x=x, weight=half(8, 64, 1, 15), **CONV), M4, (True, ""), {}),
    "a kernel of 16": (lambda x: mb.conv(x=x, weight=half(8, 64, 1, 16), **CONV), M4, (False, KERNEL), {}),
    "16 by 16": (lambda x: mb.conv(x=x, weight=half(8, 64, 16, 16), **CONV), M4, (True, ""), {}),
    "31 high": (lambda x: mb.conv(x=x, weight=half(8, 64, 31, 1), **CONV), M4, (True, ""), {}),
    "32 high": (lambda x: mb.conv(x=x, weight=half(8, 64, 32, 1), **CONV), M4, (False, KERNEL), {}),
    "14 wide on M1": (
        lambda x: mb.conv(x=x, weight=half(8, 64, 1, 14), **CONV),
        M1,
        (False, "conv-kernel-old"),
        {},
    ),
    "a wide pool": (
        lambda x: mb.max_pool(x=x, kernel_sizes=[1, 9], strides=[1, 1], pad_type="same"),
        M4,
        (False, "max-pool-width"),
        {},
    ),
    "a high pool": (
        lambda x: mb.max_pool(x=x, kernel_sizes=[9, 1], strides=[1, 1], pad_type="same"),
        M4,
        (True, ""),
        {},
    ),
    "a long axis": (lambda x: mb.relu(x=x), M4, (False, "axis"), {"shape": (1, 1, 1, 65537)}),
    "an axis too long for M1": (lambda x: mb.relu(x=x), M1, (False, "axis"), {"shape": (1, 16385)}),
    "the same on M4": (lambda x: mb.relu(x=x), M4, (True, ""), {"shape": (1, 16385)}),
    "channels on M1": (lambda x: mb.relu(x=x), M1, (True, ""), {"shape": (1, 65536, 1, 1)}),
    "six axes": (lambda x: mb.relu(x=x), M4, (False, "rank"), {"shape": (1, 2, 2, 2, 2, 2)}),
    "fp32": (lambda x: mb.relu(x=x), M4, (False, "fp32"), {"dtype": types.fp32}),
    "int32": (lambda x: mb.add(x=x, y=1), M4, (False, "int32"), {"dtype": types.int32}),
    "a cast from fp32": (lambda x: mb.cast(x=x, dtype="fp16"), M4, (True, ""), {"dtype": types.fp32}),
    "on an older OS": (lambda x: mb.cast(x=x, dtype="fp16"), M1, (False, "fp32-cast"), {"dtype": types.fp32}),
    "on a newer OS": (lambda x: mb.cast(x=x, dtype="fp16"), "M1/macOS 15", (True, ""), {"dtype": types.fp32}),
    "constant indices": (lambda x: mb.gather(x=x, indices=[0, 3], axis=1), M4, (True, ""), {}),
    "indices of the run": (
        lambda x: mb.gather(x=half(2, 3, 4), indices=x, axis=1),
        M4,
        (False, "gather-runtime"),
        {"shape": (4,), "dtype": types.int32},
    ),
    "an embedding": (
        lambda x: mb.gather(x=half(100, 4), indices=x, axis=0),
        M4,
        (False, "embedding"),
        {"shape": (1, 8), "dtype": types.int32},
    ),
    "a running sum": (lambda x: mb.cumsum(x=x, axis=1), M4, (False, "op-cumsum"), {}),
    "the best index": (lambda x: mb.reduce_argmax(x=x, axis=1), M4, (False, "op-reduce_argmax"), {}),
    "values of topk": (lambda x: mb.topk(x=x, k=2)[0], M4, (True, ""), {}),
    "topk on M1": (lambda x: mb.topk(x=x, k=2)[0], M1, (False, "topk-old"), {}),
    "sine": (lambda x: mb.sin(x=x), M4, (True, ""), {}),
    "sine on M2": (lambda x: mb.sin(x=x), "M2", (False, "sin-cos"), {}),
    "sine on any chip": (lambda x: mb.sin(x=x), "any", (False, "sin-cos"), {}),
    "three dimensions": (
        lambda x: mb.conv(x=x, weight=half(4, 4, 3, 3, 3)),
        M4,
        (True, ""),
        {"shape": (1, 4, 8, 8, 8)},
    ),
    "three dimensions on M1": (
        lambda x: mb.conv(x=x, weight=half(4, 4, 3, 3, 3)),
        M1,
        (None, "conv3d"),
        {"shape": (1, 4, 8, 8, 8)},
    ),
    "a long sum": (
        lambda x: mb.matmul(x=x, y=half(40000, 2)),
        M4,
        (False, "matmul-inner"),
        {"shape": (2, 40000)},
    ),
    "no row knows it": (
        lambda x: mb.logical_xor(x=mb.greater(x=x, y=np.float16(0)), y=mb.less(x=x, y=np.float16(1))),
        M4,
        (None, ""),
        {},
    ),
    "the best index in 16 bits": (
        lambda x: mb.reduce_argmax(x=x, axis=1, output_dtype="uint16"),
        M4,
        (None, ""),
        {},
    ),
    "columns of a table": (
        lambda x: mb.gather(x=half(100, 4), indices=x, axis=1),
        M4,
        (False, "gather-runtime"),
        {"shape": (1, 8), "dtype": types.int32},
    ),
    "8-bit integers, reshaped": (
        lambda x: mb.reverse(x=mb.quantize(input=x, scale=np.float16(1), output_dtype="int8"), axes=[3]),
        M4,
        (None, ""),
        {},
    ),
    "8-bit integers, read back": (
        lambda x: mb.dequantize(
            input=mb.quantize(input=x, scale=np.float16(1), output_dtype="int8"), scale=np.float16(1)
        ),
        M4,
        (True, ""),
        {},
    ),
    "an update at a place of the run": (
        lambda x: mb.slice_update(x=half(8, 8), update=half(2, 8), begin=x, end=[2, 8]),
        M4,
        (True, ""),
        {"shape": (2,), "dtype": types.int32},
    ),
    "an update of every second row": (
        lambda x: mb.slice_update(x=x, update=half(2, 8), begin=[0, 0], end=[4, 8], stride=[2, 1]),
        M4,
        (None, "slice-update-stride"),
        {"shape": (8, 8)},
    ),
    "mirrored edges": (lambda x: mb.pad(x=x, pad=[1, 1], mode="reflect"), M4, (True, ""), {}),
    "mirrored edges on M1": (lambda x: mb.pad(x=x, pad=[1, 1], mode="reflect"), M1, (False, "pad-mirror"), {}),
    "a mean over 32": (
        lambda x: mb.avg_pool(x=x, kernel_sizes=[32, 32], pad_type="valid"),
        M4,
        (None, "pool-window"),
        {},
    ),
    "a mean over 32 on M1": (
        lambda x: mb.avg_pool(x=x, kernel_sizes=[32, 32], pad_type="valid"),
        M1,
        (False, "pool-window"),
        {},
    ),
    "logic on M1": (
        lambda x: mb.logical_and(x=mb.greater(x=x, y=np.float16(0)), y=mb.less(x=x, y=np.float16(1))),
        M1,
        (None, "logical-and"),
        {},
    ),
    "linear of five axes": (
        lambda x: mb.linear(x=x, weight=half(4, 8)),
        M4,
        (None, "linear-rank"),
        {"shape": (1, 2, 2, 4, 8)},
    ),
    "a large step over unknown lengths": (
        lambda x: mb.conv(x=x, weight=half(4, 4, 3, 3), strides=[3, 3]),
        M4,
        (None, "conv-dynamic"),
        {"shape": (1, 4, get_new_symbol(), 8)},
    ),
    "a small one": (
        lambda x: mb.conv(x=x, weight=half(4, 4, 3, 3), strides=[2, 2]),
        M4,
        (True, ""),
        {"shape": (1, 4, get_new_symbol(), 8)},
    ),
    "a palette that is scaled": (
        lambda x: mb.linear(
            x=x, weight=mb.constexpr_blockwise_shift_scale(data=palette(32, 64), scale=half(32, 1))
        ),
        M4,
        (False, "comp-pcs"),
        {"shape": (1, 64)},
    ),
    "a palette": (lambda x: mb.linear(x=x, weight=palette(32, 64)), M4, (True, ""), {"shape": (1, 64)}),
    "a palette and a step of 4": (
        lambda x: mb.conv(x=x, weight=palette(4, 64, 3, 3), strides=[4, 4]),
        M4,
        (None, "comp-stride"),
        {},
    ),
    "a palette and a step of 2": (
        lambda x: mb.conv(x=x, weight=palette(4, 64, 3, 3), strides=[2, 2]),
        M4,
        (True, ""),
        {},
    ),
    "a list": (
        lambda x: mb.list_read(
            ls=mb.list_write(ls=mb.make_list(init_length=1, elem_shape=(4,), dtype="fp16"), index=0, value=x),
            index=0,
        ),
        M4,
        (False, "op-list_read"),
        {"shape": (4,)},
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_verdicts(case: str) -> None:
    build, target, expected, options = VERDICTS[case]
    assert last(build, target, **options) == expected


def test_each_rule_cites_its_source_and_none_is_written_twice() -> None:
    assert len({rule.id for rule in FORBIDDEN}) == len(FORBIDDEN)
    for rule in FORBIDDEN:
        assert rule.source
        assert rule.because
        unmeasured = rule.scope.via == "compiler" or rule.grade is Grade.GUESS
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
