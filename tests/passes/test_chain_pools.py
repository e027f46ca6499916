"""Large windows as chains of small ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import ignores, refuses, rewrites, table

import anesurgery as ane
from anesurgery.checking.grades import Grade
from anesurgery.mil import Program, ct, mb, types, walk_ops
from anesurgery.passes.chain_pools import ChainPools
from anesurgery.testing import apply_pass, assert_same_numbers


def pool(kind: str, shape: tuple[Any, ...], window: list[int], strides: list[int], **more: Any) -> Program:
    options = {"pad_type": "valid", **more}
    dtype = options.pop("dtype", types.fp32)

    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=dtype)], opset_version=ct.target.iOS16)(
        lambda x: getattr(mb, kind)(x=x, kernel_sizes=window, strides=strides, name="y", **options)
    )


CASES: dict[str, tuple[str, tuple[int, ...], list[int], list[int]]] = {
    "non-overlapping averages": ("avg_pool", (2, 3, 80, 80), [80, 80], [80, 80]),
    "different axes": ("avg_pool", (1, 2, 60, 36), [30, 36], [30, 36]),
    "one long axis": ("avg_pool", (1, 2, 7, 48), [2, 48], [2, 48]),
    "maxima, non-overlapping": ("max_pool", (1, 2, 48, 48), [24, 12], [24, 12]),
    "maxima, overlapping": ("max_pool", (1, 2, 30, 40), [11, 9], [2, 3]),
    "maxima, stride 1": ("max_pool", (1, 2, 40, 40), [1, 15], [1, 1]),
    "maxima of 22": ("max_pool", (1, 2, 40, 50), [3, 22], [1, 4]),
    "one dimension": ("max_pool", (1, 2, 50), [13], [5]),
}


PADDED: dict[str, Program] = {
    "same": pool("max_pool", (1, 2, 44, 43), [9, 9], [9, 9], pad_type="same"),
    "same, overlapping": pool("max_pool", (1, 2, 40, 41), [13, 9], [2, 1], pad_type="same"),
    "custom": pool("max_pool", (1, 2, 40, 41), [13, 3], [1, 2], pad_type="custom", pad=[6, 5, 1, 0]),
    "wide edges": pool("max_pool", (1, 2, 40, 40), [16, 9], [1, 9], pad_type="custom", pad=[9, 15, 8, 8]),
    "rounded up": pool("max_pool", (1, 2, 40, 40), [9, 9], [4, 4], ceil_mode=True),
    "averages": pool("avg_pool", (1, 2, 78, 75), [40, 40], [40, 40], pad_type="custom", pad=[1, 1, 2, 3]),
}

AVERAGES: dict[str, Program] = {
    "overlapping": pool("avg_pool", (1, 2, 80, 80), [40, 40], [20, 20]),
    "of an odd part": pool("avg_pool", (2, 2, 70, 9), [37, 3], [2, 3], pad_type="same"),
    "prime": pool("avg_pool", (1, 2, 80, 37), [37, 37], [37, 37]),
    "of everything": pool("avg_pool", (1, 2, 37, 41), [37, 41], [1, 1]),
    "in one dimension": pool("avg_pool", (1, 2, 90), [60], [1]),
    "edges that do not count": pool(
        "avg_pool", (1, 2, 60, 60), [31, 40], [5, 40], pad_type="same", exclude_padding_from_average=True
    ),
    "rounded up": pool(
        "avg_pool", (1, 2, 70, 70), [40, 3], [9, 2], pad_type="custom", pad=[5, 5, 1, 1], ceil_mode=True
    ),
    "squares": pool("l2_pool", (1, 2, 70, 33), [40, 31], [10, 1], pad_type="same"),
}


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", AVERAGES)
def test_averages_of_any_window_are_proved(name: str) -> None:
    after, session = apply_pass(ChainPools(), AVERAGES[name])
    windows = [max(op.kernel_sizes.val) for op in walk_ops(after) if "pool" in op.op_type]
    assert max(windows, default=0) <= 29, session.refusals
    assert "l2_pool" not in {op.op_type for op in walk_ops(after)}
    proof = session.changes[0].proof
    assert proof is not None
    assert proof.grade == Grade.PROVED, proof.no_proof
    assert_same_numbers(AVERAGES[name], after, rtol=1e-5)


@pytest.mark.slow
def test_many_channels_are_proved_as_one() -> None:
    program = pool("max_pool", (1, 512, 40, 40), [13, 13], [1, 1], pad_type="same")
    _, session = apply_pass(ChainPools(), program)
    proof = session.changes[0].proof
    assert proof is not None
    assert proof.grade == Grade.BITS, proof.no_proof


@pytest.mark.parametrize("size", [1e-4, 1.0, 2e4])
def test_roots_of_windows_that_do_not_overlap_keep_small_and_large_numbers(size: float) -> None:
    program = pool("l2_pool", (1, 2, 80, 80), [40, 40], [40, 40], dtype=types.fp16)
    after, session = apply_pass(ChainPools(), program)
    windows = [max(op.kernel_sizes.val) for op in walk_ops(after) if op.op_type == "l2_pool"]
    assert len(windows) > 1
    assert max(windows) <= 8
    x = np.zeros((1, 2, 80, 80), np.float16)
    x[:, :, ::40, ::40] = size
    x[:, :, ::40, 3::40] = size
    old, new = (ane.run(p, {"x": x}, precision="fp16")["y"].astype(np.float64) for p in (program, after))
    assert np.isfinite(old).all()
    np.testing.assert_allclose(new, old, rtol=2e-3)
    assert session.changes[0].proof is not None
    assert not session.changes[0].proof.underflow


test_cases, test_surroundings = table(
    ChainPools(),
    *(
        rewrites(pool, *CASES[name], rtol=0.0 if CASES[name][0] == "max_pool" else 1e-05, id=str(name))
        for name in CASES
    ),
    refuses(
        "a window of [16, 16] lies in the padding [16, 0, 0, 0]",
        pool,
        "max_pool",
        (1, 2, 40, 40),
        [16, 16],
        [1, 1],
        pad_type="custom",
        pad=[16, 0, 0, 0],
    ),
    refuses("squares, which leave fp16", pool, "l2_pool", (1, 2, 80, 80), [40, 40], [20, 20], dtype=types.fp16),
    ignores(pool, "max_pool", (1, 2, 30, 30), [8, 8], [1, 1]),
    ignores(pool, "avg_pool", (1, 2, 30, 30), [14, 14], [1, 1]),
    *(rewrites(PADDED.__getitem__, name, rtol=1e-5 if name == "averages" else 0.0, id=name) for name in PADDED),
)
