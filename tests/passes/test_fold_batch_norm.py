"""Batch norms in the weights of convolutions: groups, strides, missing parameters; fp16 is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, table

from anesurgery.mil import Program, Var, mb, types, walk_ops
from anesurgery.passes.fold_batch_norm import FoldBatchNorm
from anesurgery.testing import apply_pass, assert_refuses


def program_of(
    weight: tuple[int, ...] = (4, 3, 3, 3), variance: Any = (1, 2, 3, 0.5), half: bool = False, **more: Any
) -> Program:
    kind = np.float16 if half else np.float32
    groups, without = more.pop("groups", 1), more.pop("without", ())
    given = {"gamma": [0.5, -2, 3, 0], "beta": [1, 2, -3, 4]}
    norm = {k: np.array(v, kind) for k, v in given.items() if k not in without}
    values = np.random.default_rng(0).standard_normal(weight).astype(kind)
    shape = (2, weight[1] * groups, *[9] * (len(weight) - 2))

    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16 if half else types.fp32)])
    def program(x: Var) -> Var:
        c = mb.conv(x=x, weight=values, groups=groups, **more)
        mean = np.array([1, -1, 0.25, 2], kind)
        return mb.batch_norm(x=c, mean=mean, variance=np.array(variance, kind), **norm, name="y")

    return program


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias, stride and padding": {
        "bias": np.arange(4, dtype=np.float32),
        "strides": [2, 1],
        "pad_type": "custom",
        "pad": [1, 0, 2, 1],
    },
    "groups": {"weight": (4, 2, 3, 3), "groups": 2, "dilations": [2, 1]},
    "one dimension": {"weight": (4, 3, 5)},
    "no gamma and beta": {"without": ("gamma", "beta")},
}


def test_refusals_name_the_value() -> None:
    after, session = apply_pass(FoldBatchNorm(allow_rounding=True), program_of(half=True), prove=False)
    assert session.changes
    assert "batch_norm" not in [op.op_type for op in walk_ops(after)]

    @mb.program(input_specs=[mb.TensorSpec((1, 3, 9, 9))])
    def shared(x: Var) -> Any:
        c = mb.conv(x=x, weight=np.ones((2, 3, 3, 3), np.float32), name="c")
        ones = np.ones(2, np.float32)
        return mb.batch_norm(x=c, mean=ones, variance=ones), mb.relu(x=c)

    assert_refuses(FoldBatchNorm(), shared, "%c is read elsewhere")


test_cases, test_surroundings = table(
    FoldBatchNorm(),
    *(rewrites(program_of, **CASES[name], rtol=1e-5, id=name) for name in CASES),
    refuses("is fp16; its products would be rounded again", program_of, half=True),
    refuses("the scale of a channel is nan", program_of, variance=(1, -2, 3, 4)),
)
