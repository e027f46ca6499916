"""Transposes that go into the weight or the reduction after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pass_cases import refuses_each, rewrites, rewrites_each, table

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.passes.absorb_transpose import AbsorbTranspose

Body = Callable[[Var], Any]
LAST, FIRST = [0, 2, 3, 1], [0, 3, 1, 2]


def numbers(*shape: int) -> Any:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def program_of(body: Body, shape: tuple[int, ...] = (1, 2, 3, 4)) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape)], opset_version=ct.target.iOS17)(lambda x: body(x))


def flat(x: Var, *shape: int, perm: Any = LAST) -> Var:
    return mb.reshape(x=mb.transpose(x=x, perm=perm), shape=shape)


def normed(x: Var, axes: list[int], perm: Any = FIRST, then: Any = mb.relu) -> Var:
    last = mb.transpose(x=x, perm=LAST)
    sizes = [last.shape[a] for a in axes]
    norm = mb.layer_norm(x=last, axes=axes, gamma=numbers(*sizes), beta=numbers(*sizes), epsilon=1e-3)
    made: Var = mb.transpose(x=then(x=norm), perm=perm)
    return made


CASES: dict[str, Program] = {
    "linear": program_of(lambda x: mb.linear(x=flat(x, 1, 24), weight=numbers(5, 24), bias=numbers(5))),
    "several images": program_of(lambda x: mb.linear(x=flat(x, 3, 24), weight=numbers(5, 24)), (3, 2, 3, 4)),
    "matmul": program_of(lambda x: mb.matmul(x=flat(x, 1, 24), y=numbers(24, 5))),
    "matmul, transposed": program_of(lambda x: mb.matmul(x=flat(x, 1, 24), y=numbers(5, 24), transpose_y=True)),
    "rows": program_of(lambda x: mb.linear(x=flat(x, 2, 12, perm=[0, 1, 3, 2]), weight=numbers(5, 12))),
    "pointwise between": program_of(
        lambda x: mb.linear(
            x=mb.reshape(x=mb.relu(x=mb.transpose(x=x, perm=[0, 3, 1, 2])), shape=[1, 24]),
            weight=numbers(5, 24),
        )
    ),
    "mean": program_of(lambda x: mb.reduce_mean(x=mb.transpose(x=x, perm=LAST), axes=[1, 2])),
    "sum of the channels": program_of(lambda x: mb.reduce_sum(x=mb.transpose(x=x, perm=LAST), axes=[-1])),
    "layer norm of channels": program_of(lambda x: normed(x, [-1])),
    "layer norm of rows, a gelu": program_of(lambda x: normed(mb.relu(x=x), [1], then=mb.gelu)),
    "softmax of channels": program_of(
        lambda x: mb.transpose(x=mb.softmax(x=mb.transpose(x=x, perm=LAST), axis=-1), perm=FIRST)
    ),
    "all": program_of(lambda x: mb.reduce_max(x=mb.transpose(x=x, perm=LAST))),
}


REFUSALS: dict[str, Program] = {
    "rows of 12 are flattened across the axes [0, 2, 3, 1]": program_of(
        lambda x: mb.linear(x=flat(x, 2, 12), weight=numbers(5, 12))
    ),
    "its weight is dynamic": program_of(lambda x: mb.matmul(x=flat(x, 1, 24), y=flat(x, 24, 1))),
    "the reduction leaves the axes in the order [0, 3, 2, 1]": program_of(
        lambda x: mb.reduce_mean(x=mb.transpose(x=x, perm=[0, 3, 2, 1]), axes=[1])
    ),
    "the layer_norm is over the axes [1, 2], not over one": program_of(lambda x: normed(x, [1, 2])),
    "the transpose after it does not undo [0, 2, 3, 1]": program_of(lambda x: normed(x, [3], LAST)),
    "is read elsewhere": program_of(
        lambda x: (mb.linear(x=(last := flat(x, 1, 24)), weight=numbers(5, 24)), mb.relu(x=last))
    ),
}


def test_inspect_names_the_pass() -> None:
    for name in ("linear", "mean"):
        found = ane.inspect(CASES[name], target="M1/macOS 14").all_findings
        assert ("transpose-absorbed", "absorb_transpose") in {(f.rule, f.remedy) for f in found}


test_cases, test_surroundings = table(
    AbsorbTranspose(),
    rewrites(
        mb.program(input_specs=[mb.TensorSpec((1, 2, 3, 4))], opset_version=ct.target.iOS18),
        lambda x: mb.linear(
            x=flat(x, 1, 24),
            weight=mb.constexpr_lut_to_dense(
                indices=np.random.default_rng(0).integers(0, 4, (5, 24)).astype(types.np_uint2_dtype),
                lut=np.array([-1, 0, 0.5, 2], np.float32).reshape(1, 1, 4, 1),
            ),
        ),
        rtol=1e-05,
    ),
    *rewrites_each(
        CASES,
        rtol=1e-5,
        alone={"all": {"after the default pipeline": "coremltools asks each reduction for its axes"}},
    ),
    *refuses_each(REFUSALS),
)
