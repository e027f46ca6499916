"""Edits that treat each image and channel alike are looked at in one plane; others are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from anesurgery.checking.edit_sites import site_of, treats_planes_alike
from anesurgery.checking.proofs import Proof, prove
from anesurgery.mil import Program, Var, mb

Body = Callable[[Var], Var]


def pool(x: Var, size: int = 3) -> Var:
    return mb.max_pool(x=x, kernel_sizes=[size, size], strides=[1, 1], pad_type="valid")


def both(old: Body, new: Body, shape: tuple[int, ...] = (2, 3, 9, 9)) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape)])(lambda x: (old(x), new(x)))


def looked_at(program: Program) -> tuple[bool, bool]:
    """Is one plane enough, and is the edit proved?"""
    main = program.functions["main"]
    (old, new), ops = main.outputs, [op for op in main.operations if op.op_type != "const"]
    assert old.op is not None
    site = site_of([(old, new)], ops[ops.index(old.op) + 1 :], [old.op])
    return treats_planes_alike(site), isinstance(prove(site), Proof)


CHANNELS = np.array([1, 1, 2], np.float32).reshape(3, 1, 1)
TURNED = [False, True, False, False]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (lambda x: pool(x, 5), lambda x: pool(pool(x)), (True, True)),
        (lambda x: pool(x, 5), lambda x: pool(mb.identity(x=pool(x))), (True, True)),
        (lambda x: pool(x, 3), lambda x: mb.mul(x=pool(x), y=CHANNELS), (False, False)),
        (lambda x: pool(x, 3), lambda x: mb.mul(x=pool(x), y=np.float32(2)), (True, False)),
        (lambda x: pool(x, 3), lambda x: pool(mb.reverse(x=x, axes=[1])), (False, False)),
        (lambda x: pool(x, 3), lambda x: mb.softmax(x=pool(x), axis=1), (False, False)),
        (
            lambda x: pool(x, 3),
            lambda x: mb.slice_by_index(
                x=pool(x),
                begin=[0] * 4,
                end=[2, 3, 7, 7],
                stride=[1, -1, 1, 1],
                begin_mask=TURNED,
                end_mask=TURNED,
            ),
            (False, False),
        ),
        (
            lambda x: mb.reduce_mean(x=x, axes=[2, 3], keep_dims=True),
            lambda x: mb.avg_pool(x=x, kernel_sizes=[9, 9], pad_type="valid"),
            (True, True),
        ),
        (
            lambda x: mb.reduce_mean(x=x, axes=[0, 1], keep_dims=True),
            lambda x: mb.slice_by_size(x=x, begin=[0] * 4, size=[1, 1, 9, 9]),
            (False, False),
        ),
        (lambda x: pool(x, 3), lambda x: pool(mb.pad(x=x, pad=[0, 0, 0, 0])), (True, True)),
        (lambda x: pool(x, 3), lambda x: mb.concat(values=[pool(x)], axis=1), (False, True)),
    ],
)
def test_one_plane_is_enough_where_all_are_alike(old: Body, new: Body, expected: tuple[bool, bool]) -> None:
    assert looked_at(both(old, new)) == expected


def test_values_of_other_channels_are_looked_at_as_they_are() -> None:
    """Without the guard one plane would be compared with itself: a sum over channels."""

    def total(x: Var) -> Var:
        return mb.reduce_sum(x=pool(x), axes=[1], keep_dims=True)

    assert looked_at(both(lambda x: pool(x, 3), total, (1, 1, 9, 9)))[0] is False
