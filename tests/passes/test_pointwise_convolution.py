"""Products of one row as convolutions: which, with which weights, and what stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, stays, table
from scores import scored

import anesurgery as ane
from anesurgery.checking.grades import Grade
from anesurgery.mil import Program, Var, ct, mb, new_symbol, types, walk_ops
from anesurgery.passes.pointwise_convolution import PointwiseConvolution
from anesurgery.passes.split_head import SplitHead
from anesurgery.placement.target import Target
from anesurgery.testing import apply_pass, assert_same_numbers


def weights(*shape: int) -> np.ndarray[Any, np.dtype[np.float16]]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


def built(build: Callable[[Var], Any], shape: tuple[Any, ...] = (1, 1, 8)) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)], opset_version=ct.target.iOS18)(
        lambda x: build(x)
    )


def kinds(program: Program) -> list[str]:
    return [op.op_type for op in walk_ops(program) if not op.op_type.startswith("const")]


def palette(x: Var) -> Var:
    indices = np.random.default_rng(1).integers(0, 16, (6, 8)).astype(types.np_uint4_dtype)
    return mb.linear(x=x, weight=mb.constexpr_lut_to_dense(indices=indices, lut=weights(1, 1, 16, 1)))


CASES: dict[str, Program] = {
    "linear": built(lambda x: mb.linear(x=x, weight=weights(6, 8), bias=weights(6))),
    "two axes": built(lambda x: mb.linear(x=x, weight=weights(6, 8)), (1, 8)),
    "four axes": built(lambda x: mb.linear(x=x, weight=weights(6, 8)), (1, 1, 1, 8)),
    "matmul": built(lambda x: mb.matmul(x=x, y=weights(8, 6))),
    "matmul, turned": built(lambda x: mb.matmul(x=x, y=weights(6, 8), transpose_y=True)),
    "palette": built(palette),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_becomes_a_pixel(name: str) -> None:
    program = CASES[name]
    after, session = apply_pass(PointwiseConvolution(), program)
    assert kinds(after) == ["reshape", "conv", "reshape"], session.refusals
    assert session.changes[0].proof is not None
    assert session.changes[0].proof.grade is Grade.BITS
    assert_same_numbers(program, after, rtol=1e-5)
    assert not apply_pass(PointwiseConvolution(), after)[1].changes


def test_a_palette_stays_one() -> None:
    after, _ = apply_pass(PointwiseConvolution(), CASES["palette"])
    (found,) = (op for op in walk_ops(after) if op.op_type == "constexpr_lut_to_dense")
    assert found.outputs[0].shape == (6, 8, 1, 1)


def test_products_of_one_row_share_its_reshape() -> None:
    program = built(lambda x: (mb.linear(x=x, weight=weights(6, 8)), mb.linear(x=x, weight=weights(4, 8))))
    after, _ = apply_pass(PointwiseConvolution(), program)
    assert sorted(kinds(after)) == ["conv"] * 2 + ["reshape"] * 3


@pytest.mark.parametrize(
    ("target", "expected"), [("M1/macOS 14", 16384), ("M4/macOS 15", None), ("any", 16384)]
)
def test_it_is_tried_where_rows_were_seen_on_the_cpu(target: str, expected: int | None) -> None:
    found = PointwiseConvolution.variants(Target.parse(target))
    assert [step.most for step in found if isinstance(step, PointwiseConvolution)] == [expected] * (
        expected is not None
    )


def long_head(x: Var) -> Var:
    x = mb.layer_norm(x=x, axes=[-1])
    for _ in range(4):
        x = mb.relu(x=mb.linear(x=x, weight=weights(512, 512)))
    last = mb.slice_by_index(x=x, begin=[0, 127, 0], end=[1, 128, 512])
    return mb.linear(x=last, weight=weights(20000, 512), name="logits")


def test_a_head_in_pieces_has_a_known_unit_on_m1() -> None:
    program, target = built(long_head, (1, 128, 512)), Target.parse("M1/macOS 14")
    pieces = ane.apply(program, [SplitHead()], prove=None, target="M1/macOS 14").program
    pixels = ane.apply(pieces, [PointwiseConvolution()], prove=None, target="M1/macOS 14").program
    before, after = (scored(p, target)[0] for p in (pieces, pixels))
    assert before.share["flop"] < 1 == after.share["flop"]
    assert after.share["ops"] > before.share["ops"]
    (found,) = {f.remedy for p in scored(pieces, target)[1] for f in p.all_findings if f.rule == "single-row"}
    assert found == "pointwise_convolution"
    assert all(f.rule != "single-row" for p in scored(pieces, Target.parse("M4"))[1] for f in p.all_findings)


test_cases, test_surroundings = table(
    PointwiseConvolution(),
    stays(built, lambda x: mb.linear(x=x, weight=weights(6, 8)), (1, 2, 8)),
    stays(built, lambda x: mb.matmul(x=x, y=mb.relu(x=x), transpose_y=True)),
    stays(built, lambda x: mb.matmul(x=x, y=weights(6, 8), transpose_x=True), (1, 6, 1)),
    refuses(
        "has the dynamic shape", built, lambda x: mb.linear(x=x, weight=weights(6, 8)), (1, new_symbol(), 8)
    ),
    refuses(
        "6 outputs of 8 inputs; 7 is the limit",
        built,
        lambda x: mb.linear(x=x, weight=weights(6, 8)),
        step=PointwiseConvolution(most=7),
    ),
)
