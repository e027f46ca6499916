"""Gather, scatter, sorting, blocks, detection, quantization, random numbers: each against its definition."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close

from anesurgery.errors import InterpretError
from anesurgery.interpret import evaluate
from anesurgery.mil import Array, Var, ct, mb, types

RNG = np.random.default_rng(0)
OneOp = Callable[..., list[Array]]
ANY: Any = slice(None)
NEWEST: Any = ct.target.iOS18
OPSETS = [ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18]


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def whole(low: int, high: int, *shape: int) -> Array:
    return RNG.integers(low, high, shape).astype(np.int32)


# Scatter and gather -------------------------------------------------------------------------------

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "update": lambda old, new: new,
    "add": lambda old, new: old + new,
    "sub": lambda old, new: old - new,
    "mul": lambda old, new: old * new,
    "div": lambda old, new: old / new if old.dtype.kind == "f" else np.trunc(old / new),
    "max": np.maximum,
    "min": np.minimum,
}


def data_of(kind: str, *shape: int) -> Array:
    return floats(*shape) + 2 if kind == "f" else whole(1, 9, *shape)


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS17])
@pytest.mark.parametrize("kind", ["f", "i"])
@pytest.mark.parametrize("mode", COMBINE)
def test_scatter_one_slice_after_the_other(one_op: OneOp, mode: str, kind: str, opset: Any) -> None:
    for axis, count in itertools.product((0, 1, -1), (0, 1, 7)):
        data = data_of(kind, 4, 3, 5)
        length = data.shape[axis]
        index = whole(0 if opset == ct.target.iOS17 else -length, length, count)
        shape = list(data.shape)
        shape[axis] = count
        updates = data_of(kind, *shape)
        expected = np.moveaxis(data.copy(), axis, 0)
        for place, row in zip(index, np.moveaxis(updates, axis, 0), strict=True):
            expected[place] = COMBINE[mode](expected[place], row)
        (found,) = one_op("scatter", opset, data=data, indices=index, updates=updates, axis=axis, mode=mode)
        assert_close(found, np.moveaxis(expected, 0, axis))


@pytest.mark.parametrize("kind", ["f", "i"])
@pytest.mark.parametrize("mode", COMBINE)
def test_scatter_along_an_axis_one_element_after_the_other(one_op: OneOp, mode: str, kind: str) -> None:
    if mode != "update" and kind == "i":
        return
    for axis, count in itertools.product((0, 1, -1), (1, 7)):
        data = data_of(kind, 4, 3, 5)
        shape = list(data.shape)
        shape[axis] = count
        index, updates = whole(0, data.shape[axis], *shape), data_of(kind, *shape)
        expected = data.copy()
        for place in itertools.product(*map(range, shape)):
            at = list(place)
            at[axis] = index[place]
            expected[tuple(at)] = COMBINE[mode](expected[tuple(at)], updates[place])
        given = {"data": data, "indices": index, "updates": updates}
        (found,) = computed("scatter_along_axis", given, axis=axis, mode=mode)
        assert_close(found, expected)


def computed(op_type: str, values: dict[str, Array], opset: Any = NEWEST, **fixed: Any) -> list[Array]:
    """The results of an op whose inputs are dynamic, so that coremltools folds nothing."""
    specs = [
        mb.TensorSpec(v.shape, types.int32 if v.dtype == np.int32 else types.fp32) for v in values.values()
    ]
    made: list[Var] = []
    inputs: list[Var] = []

    def body(*given: Var) -> Any:
        result = getattr(mb, op_type)(**dict(zip(values, given, strict=True)), **fixed)
        inputs.extend(given)
        made.extend(result if isinstance(result, (tuple, list)) else [result])
        return made[-1]

    names = ", ".join(values)
    scope: dict[str, Any] = {"body": body}
    exec(f"def program({names}): return body({names})", scope)  # the builder reads the names
    mb.program(input_specs=specs, opset_version=opset)(scope["program"])
    bound = {v: torch.from_numpy(a) for v, a in zip(inputs, values.values(), strict=True)}
    assert made[0].op is not None
    return [v.numpy() for v in evaluate([made[0].op], bound, made)]


@pytest.mark.parametrize("mode", COMBINE)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_scatter_nd_one_slice_after_the_other(one_op: OneOp, mode: str, depth: int) -> None:
    data = floats(3, 2, 4) + 3
    index = np.stack([whole(0, n, 5, 2) for n in data.shape[:depth]], -1)
    updates = floats(5, 2, *data.shape[depth:]) + 3
    expected = data.copy()
    for place in itertools.product(range(5), range(2)):
        at = tuple(index[place])
        expected[at] = COMBINE[mode](expected[at], updates[place])
    (found,) = one_op("scatter_nd", data=data, indices=index, updates=updates, mode=mode)
    assert_close(found, expected, 1e-5)


def test_many_updates_of_one_place_are_fast_enough() -> None:
    data, index = np.zeros((50, 8), np.float32), whole(0, 50, 100_000)
    updates = floats(100_000, 8)
    given = {"data": data, "indices": index, "updates": updates}
    for mode, reduce in (("max", np.maximum), ("add", np.add)):
        expected = data.copy()
        reduce.at(expected, index, updates)
        assert_close(computed("scatter", given, mode=mode)[0], expected, 1e-4)
    (found,) = computed("scatter", given, mode="update")
    last = {int(place): i for i, place in enumerate(index)}
    assert_close(found, np.stack([updates[last[i]] for i in range(50)]))


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_gather_with_batches(one_op: OneOp, batch: int) -> None:
    x = floats(2, 3, 4, 5)
    for axis, inner in itertools.product(range(batch, 4), [(), (2,), (2, 1)]):
        index = whole(0, x.shape[axis], *x.shape[:batch], *inner)
        expected = np.empty((*x.shape[:axis], *inner, *x.shape[axis + 1 :]), np.float32)
        for lead in itertools.product(*map(range, x.shape[:batch])):
            expected[lead] = np.take(x[lead], index[lead], axis - batch)
        (found,) = one_op("gather", x=x, indices=index, axis=axis, batch_dims=batch)
        assert_close(found, expected)


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS16])
def test_negative_indices_count_from_the_end(opset: Any) -> None:
    x = floats(3, 4)
    index = np.array([-1, 0, -3], np.int32)
    assert_close(computed("gather", {"x": x, "indices": index}, opset)[0], x[index])
    pairs = np.stack([index, index], -1)
    found = computed("gather_nd", {"x": x, "indices": pairs}, opset)[0]
    assert_close(found, x[index, index])
    rows = np.stack([index] * 4, -1)
    found = computed("gather_along_axis", {"x": x, "indices": rows}, opset, axis=0)[0]
    assert_close(found, np.take_along_axis(x, rows, 0))


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_gather_nd_with_batches(one_op: OneOp, batch: int) -> None:
    x = floats(2, 3, 4, 5)
    for depth in range(1, 5 - batch):
        parts = [whole(0, n, *x.shape[:batch], 6) for n in x.shape[batch : batch + depth]]
        index = np.stack(parts, -1)
        expected = np.empty((*x.shape[:batch], 6, *x.shape[batch + depth :]), np.float32)
        for place in itertools.product(*map(range, (*x.shape[:batch], 6))):
            expected[place] = x[(*place[:-1], *index[place])]
        (found,) = one_op("gather_nd", x=x, indices=index, batch_dims=batch)
        assert_close(found, expected)


OUTSIDE = np.array([0, 3, -1], np.int32)
VALIDATED: dict[str, dict[str, Array]] = {
    "gather": {"x": floats(3, 4), "indices": OUTSIDE},
    "gather_nd": {"x": floats(3, 4), "indices": OUTSIDE[:, None]},
    "gather_along_axis": {"x": floats(3, 4), "indices": np.stack([OUTSIDE] * 4, -1)},
    "scatter": {"data": floats(3, 4), "indices": OUTSIDE, "updates": floats(3, 4)},
    "scatter_nd": {"data": floats(3, 4), "indices": OUTSIDE[:, None], "updates": floats(3, 4)},
    "scatter_along_axis": {
        "data": floats(3, 4),
        "indices": np.stack([OUTSIDE] * 4, -1),
        "updates": floats(3, 4),
    },
}


@pytest.mark.parametrize("op_type", VALIDATED)
def test_indices_outside(op_type: str) -> None:
    inputs = VALIDATED[op_type]
    with pytest.raises(InterpretError, match=r"an index is outside \[0, 3\)"):
        computed(op_type, inputs, validate_indices=True)
    (found,) = computed(op_type, inputs)  # undefined, but no error
    if op_type.startswith("scatter"):
        assert_close(found[0], inputs["data"][0] + inputs["updates"][0])
        assert_close(found[1:], inputs["data"][1:])
    else:
        assert_close(found, inputs["x"][[0, 2, 0]])


def test_nothing_to_gather_and_nothing_to_scatter() -> None:
    x, none = floats(3, 4), np.zeros((0,), np.int32)
    assert computed("gather", {"x": x, "indices": none}, axis=1)[0].shape == (3, 0)
    empty = {"data": x, "indices": none, "updates": np.zeros((0, 4), np.float32)}
    for mode in COMBINE:
        assert_close(computed("scatter", empty, mode=mode)[0], x)


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
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


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
