"""Sorting, counting, ranges, padding, blocks of space and batch: each against its definition."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from computed_ops import OneOp, computed

from anesurgery.mil import Array, ct

RNG = np.random.default_rng(0)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def whole(low: int, high: int, *shape: int) -> Array:
    return RNG.integers(low, high, shape).astype(np.int32)


ANY: Any = slice(None)
OPSETS = [ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18]


# Sorting, counting, shapes ------------------------------------------------------------------------


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("ascending", [True, False])
def test_topk_and_argsort(one_op: OneOp, ascending: bool, opset: Any) -> None:
    for x, axis in itertools.product((floats(3, 4, 5), whole(0, 3, 3, 4, 5)), (0, 1, -1)):
        order = np.argsort(x if ascending else -x, axis=axis, kind="stable")
        values = np.take_along_axis(x, order, axis)
        first = [slice(0, 2) if a == axis % 3 else ANY for a in range(3)]
        found = one_op("topk", opset, x=x, k=2, axis=axis, ascending=ascending)
        assert_close(found[0], values[tuple(first)])
        assert_close(found[1], order[tuple(first)])
        assert_close(one_op("argsort", opset, x=x, axis=axis, ascending=ascending)[0], order)


def test_forms_of_topk(one_op: OneOp) -> None:
    x = floats(3, 5)
    (alone,) = one_op("topk", x=x, k=2, return_indices=False)
    assert_close(alone, -np.sort(-x, -1)[:, :2])
    _, places = one_op("topk", x=x, k=2, output_indices_dtype="uint16")
    assert_close(places, np.argsort(-x, -1)[:, :2].astype(np.uint16))
    unsorted, _ = one_op("topk", x=x, k=3, sort=False)
    assert_close(np.sort(unsorted, -1), np.sort(x, -1)[:, 2:])
    everything = evaluate_alone("topk", x=x, k=-1)
    assert_close(everything[0], -np.sort(-x, -1))


def evaluate_alone(op_type: str, **inputs: Any) -> list[Array]:
    """The function itself, where coremltools cannot build the form."""
    from anesurgery.interpret import TABLE

    given = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    made = TABLE[op_type].function(**given)
    return [v.numpy() for v in (made if isinstance(made, tuple) else (made,))]


@pytest.mark.parametrize("axis", [-3, -2, -1, 0, 1, 2])
@pytest.mark.parametrize(("on", "off"), [(1, 0), (5.0, -1.0), (True, False)])
def test_one_hot(one_op: OneOp, axis: int, on: Any, off: Any) -> None:
    index = np.array([[0, 3, -1], [4, 2, 1]], np.int32)
    kind: Any = np.float32 if isinstance(on, float) else type(on) if on is True else np.int32
    expected = np.full((2, 3, 4), off)
    for place in itertools.product(range(2), range(3)):
        if 0 <= index[place] < 4:
            expected[place][index[place]] = on
    (found,) = one_op(
        "one_hot", indices=index, one_hot_vector_size=4, axis=axis, on_value=kind(on), off_value=kind(off)
    )
    assert_close(found * 1, np.moveaxis(expected, -1, axis) * 1)


def test_non_zero_of_every_kind_and_rank(one_op: OneOp) -> None:
    for x in (floats(3) > 0, floats(2, 3) * (floats(2, 3) > 0), whole(0, 2, 2, 1, 3), whole(0, 1, 4)):
        assert_close(one_op("non_zero", x=x)[0], np.argwhere(x).astype(np.int32))


def test_shapes_of_scalars_and_empty_tensors() -> None:
    for shape in ((), (0, 3), (2, 1)):
        (found,) = evaluate_alone("shape", x=np.zeros(shape, np.float32))
        assert found.tolist() == list(shape)


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_running_sums(exclusive: bool, reverse: bool) -> None:
    x = floats(2, 4, 3)
    x[0, 2, 1] = np.inf  # the sum before an infinite element is finite
    for axis in (0, 1, 2, -1):
        lines = np.moveaxis(x, axis, 0)
        lines = lines[::-1] if reverse else lines
        sums = np.cumsum(lines, 0)
        sums = np.concatenate([0 * sums[:1].clip(0, 0), sums[:-1]]) if exclusive else sums
        expected = np.moveaxis(sums[::-1] if reverse else sums, 0, axis)
        (found,) = computed("cumsum", {"x": x}, axis=axis, exclusive=exclusive, reverse=reverse)
        assert_close(found, expected)


@pytest.mark.parametrize(
    ("start", "end", "step"),
    [(0, 7, 2), (5, -3, -2), (3, 3, 1), (0.0, 1.0, 0.1), (0.0, 0.3, 0.1), (1.0, -1.0, -0.25), (2, 0, 1)],
)
def test_ranges(start: Any, end: Any, step: Any) -> None:
    kind: Any = np.float32 if isinstance(step, float) else np.int32
    count = int(max(np.ceil((kind(end) - kind(start)) / kind(step)), 0))
    given = {"start": np.array(start, kind), "end": np.array(end, kind), "step": np.array(step, kind)}
    (found,) = evaluate_alone("range_1d", **given)
    assert found.dtype == kind
    assert_close(found, (start + step * np.arange(count)).astype(kind))


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
def test_pads_of_every_rank(one_op: OneOp, mode: str) -> None:
    for rank, given in itertools.product(range(1, 6), range(1, 6)):
        if given > rank:
            continue
        x = floats(*[3, 4, 3, 3, 4][:rank])
        pairs = [(int(a), int(b)) for a, b in whole(0, 3, given, 2)]
        kind: Any = {"replicate": "edge"}.get(mode, mode)
        extra: dict[str, Any] = {"constant_values": 1.5} if mode == "constant" else {}
        expected = np.pad(x, [(0, 0)] * (rank - given) + pairs, kind, **extra)
        (found,) = one_op(
            "pad", x=x, pad=[n for pair in pairs for n in pair], mode=mode, constant_val=np.float32(1.5)
        )
        assert_close(found, expected)


@pytest.mark.parametrize(("size", "pad"), [(3, (4, 9)), (2, (5, 1)), (1, (2, 3)), (4, (0, 3))])
def test_a_mirror_may_be_wider_than_the_axis(one_op: OneOp, size: int, pad: tuple[int, int]) -> None:
    x = floats(2, size)
    (found,) = one_op("pad", x=x, pad=list(pad), mode="reflect", constant_val=np.float32(0))
    assert_close(found, np.pad(x, [(0, 0), pad], "reflect"))


@pytest.mark.parametrize(
    ("equation", "a", "b"),
    [
        ("nchw,nwhu->nchu", (2, 3, 4, 5), (2, 5, 4, 6)),
        ("abcd,adce->abce", (1, 3, 4, 5), (2, 5, 1, 6)),
        ("chw,whr->chr", (3, 4, 5), (5, 4, 6)),
        ("ijk,kjl->ijl", (3, 1, 5), (5, 4, 6)),
        ("nchw,nwhu->nchu", (2, 3, 1, 5), (1, 5, 4, 6)),
    ],
)
def test_every_equation_of_einsum(one_op: OneOp, equation: str, a: Any, b: Any) -> None:
    x, y = floats(*a), floats(*b)
    (found,) = one_op("einsum", values=(x, y), equation=equation)
    rows, columns = np.moveaxis(x, -2, -3), np.moveaxis(y, -2, -3)
    assert_close(found, np.moveaxis(rows @ columns, -3, -2), 1e-5)


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS17])
def test_sliding_windows(one_op: OneOp, opset: Any) -> None:
    x = floats(2, 9, 3)
    for axis, size, stride in [(1, 4, 1), (1, 4, 3), (-2, 9, 1), (0, 1, 1), (-1, 2, 1)]:
        place = axis % 3
        count = (x.shape[place] - size) // stride + 1
        windows = [x.take(range(i * stride, i * stride + size), place) for i in range(count)]
        (found,) = one_op("sliding_windows", opset, x=x, axis=axis, size=size, stride=stride)
        assert_close(found, np.stack(windows, place))


def test_reverse_sequence() -> None:
    x = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    lengths = np.array([2, 3], np.int32)
    form = {"seq_axis": 1, "batch_axis": 0}
    (found,) = computed("reverse_sequence", {"x": x, "lengths": lengths}, **form)
    documented = [[[2, 3], [0, 1], [4, 5]], [[10, 11], [8, 9], [6, 7]]]
    assert_close(found, np.array(documented, np.float32))
    x, lengths = floats(4, 3, 5), whole(0, 5, 5)
    (found,) = computed("reverse_sequence", {"x": x, "lengths": lengths}, seq_axis=0, batch_axis=-1)
    for i, length in enumerate(np.minimum(lengths, 4)):
        assert_close(found[:length, :, i], x[:length, :, i][::-1])
        assert_close(found[length:, :, i], x[length:, :, i])


def test_space_and_batches(one_op: OneOp) -> None:
    x, (a, b) = floats(2, 3, 4, 7), (2, 3)
    form = {"block_shape": [a, b], "paddings": np.array([[1, 1], [0, 2]], np.int32)}
    (found,) = one_op("space_to_batch", x=x, **form)
    padded = np.pad(x, [(0, 0), (0, 0), (1, 1), (0, 2)])
    for i, j, n in itertools.product(range(a), range(b), range(2)):
        assert_close(found[(i * b + j) * 2 + n], padded[n, :, i::a, j::b])
    crops = np.array([[1, 1], [0, 2]], np.int32)
    (back,) = one_op("batch_to_space", x=found, block_shape=[a, b], crops=crops)
    assert_close(back, x)


@pytest.mark.parametrize(
    ("shape", "wanted", "made"),
    [
        ((0, 4, 3), [0, -1], (4, 0)),
        ((2, 0), [0, 0], (2, 0)),
        ((0, 3), [0, 3, -1], (1, 3, 0)),
        ((1, 2, 0, 4), [-1, 1, 1, 3, 0], (0, 1, 1, 3, 4)),
        ((4, 0), [0, 7], (0, 7)),
        ((4, 3), [0, -1], (4, 3)),
    ],
)
def test_reshapes_of_tensors_without_elements(
    shape: tuple[int, ...], wanted: list[int], made: tuple[int, ...]
) -> None:
    (found,) = computed("reshape", {"x": np.zeros(shape, np.float32), "shape": np.array(wanted, np.int32)})
    assert found.shape == made


def test_a_flat_tensor_without_elements(one_op: OneOp) -> None:
    (found,) = one_op("flatten2d", x=np.zeros((3, 2, 0, 1), np.float32), axis=-1)
    assert found.shape == (0, 1)


def test_a_squeezed_axis_with_a_masked_begin_takes_the_first(one_op: OneOp) -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    form = {"begin": [2, 0], "end": [3, 2], "begin_mask": [True, False]}
    (found,) = one_op("slice_by_index", x=x, **form, squeeze_mask=[True, False])
    assert_close(found, x[0])
