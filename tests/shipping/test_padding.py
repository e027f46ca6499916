"""Inputs between two sizes are filled up where that is proved to change nothing, and refused elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from coremltools.converters.mil.mil import get_new_symbol

import anesurgery as ane
from anesurgery.files.size_index import Padding, SizeRow, choose_call
from anesurgery.mil import Program, Var, ct, mb, types

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((8, 4)).astype(np.float32)
STEPS = [(1, 5, 4), (1, 9, 4)]


def dynamic(build: Callable[[Var], Any], shape: tuple[Any, ...] = (1, None, 4)) -> Program:
    sizes = [get_new_symbol() if n is None else n for n in shape]

    return mb.program(input_specs=[mb.TensorSpec(sizes, dtype=types.fp32)], opset_version=ct.target.iOS18)(
        lambda x: build(x)
    )


def heads(x: Var) -> Var:
    """Each position by itself, in two heads: the reshape counts the length."""
    wide = mb.linear(x=x, weight=WEIGHT)
    length = mb.gather(x=mb.shape(x=wide), indices=np.int32(1), axis=0)
    form = mb.concat(values=(np.int32(1), length, np.int32(2), np.int32(4)), axis=0)
    turned = mb.transpose(x=mb.reshape(x=wide, shape=form), perm=(0, 2, 1, 3))
    return mb.layer_norm(x=turned, axes=[-1], name="y")


def recurrent(x: Var) -> Var:
    """The steps of a layer that runs forward, then a running sum."""
    weights = [RNG.standard_normal(shape).astype(np.float32) for shape in ((12, 4), (12, 3), (12,))]
    zeros = np.zeros((1, 3), np.float32)
    steps, _, _ = mb.lstm(
        x=mb.transpose(x=x, perm=(1, 0, 2)),
        initial_h=zeros,
        initial_c=zeros,
        weight_ih=weights[0],
        weight_hh=weights[1],
        bias=weights[2],
        output_sequence=True,
    )
    return mb.cumsum(x=steps, axis=0, name="y")


def pointwise(x: Var) -> Var:
    return mb.conv(x=mb.transpose(x=x, perm=(0, 2, 1)), weight=WEIGHT[:, :, None], name="y")


def positions(x: Var) -> Var:
    """Places from the first on are the same at every length."""
    return mb.add(x=x, y=mb.expand_dims(x=mb.cast(x=places(x), dtype="fp32"), axes=[1]), name="y")


def neighbours(x: Var) -> Var:
    """How much each place is beyond the one before it, as packed sequences are looked for."""
    row = mb.expand_dims(x=places(x), axes=[0])
    first = mb.slice_by_index(x=row, begin=[0, 0], end=[1, 1])
    longer = mb.concat(values=(mb.sub(x=first, y=np.int32(1)), row), axis=1)
    after = mb.slice_by_index(x=longer, begin=[0, 1], end=[0, 0], end_mask=[True, True])
    before = mb.slice_by_index(x=longer, begin=[0, 0], end=[0, -1], end_mask=[True, False])
    steps = mb.cast(x=mb.sub(x=after, y=before), dtype="fp32")
    return mb.add(x=x, y=mb.expand_dims(x=steps, axes=[2]), name="y")


def causal_by_lookup(x: Var) -> Var:
    """A causal mask whose places are looked up in a table, of which the shape is read too."""
    row = mb.expand_dims(x=places(x), axes=[0])
    row = mb.tile(x=row, reps=mb.real_div(x=mb.shape(x=row), y=mb.shape(x=row)))
    turned = [mb.expand_dims(x=row, axes=[axis]) for axis in (2, 1)]  # places of queries, and of keys
    zeros = [mb.sub(x=v, y=v) for v in turned]
    pairs = [mb.stack(values=pair, axis=3) for pair in zip(zeros, turned, strict=True)]
    query, key = (mb.gather_nd(x=row, indices=pair) for pair in pairs)
    mask = mb.select(cond=mb.less_equal(x=key, y=query), a=np.float32(0), b=np.float32(-np.inf))
    scores = mb.add(x=mb.matmul(x=x, y=x, transpose_y=True), y=mask)
    return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=x, name="y")


def places(x: Var) -> Var:
    return mb.range_1d(start=np.int32(0), end=counted(x), step=np.int32(1))


def counted(x: Var) -> Var:
    return mb.gather(x=mb.shape(x=x), indices=np.int32(1), axis=0)


def hidden(x: Var) -> Var:
    """A softmax along the axis that is filled up: with what weighs nothing."""
    return mb.softmax(x=x, axis=1, name="y")


def windows(x: Var) -> Var:
    """Of zeros, which are those of the border too."""
    kernel = np.ones((4, 4, 3), np.float32)
    return mb.conv(x=mb.transpose(x=x, perm=(0, 2, 1)), weight=kernel, pad_type="same", name="y")


def chomped(x: Var, before: int = 4, begin: int = 0) -> Var:
    """Windows that end at their own place, written as ones that pad both ends, of which the end is cut."""
    kernel = RNG.standard_normal((4, 4, 3)).astype(np.float32)
    wide = mb.conv(
        x=mb.transpose(x=x, perm=(0, 2, 1)), weight=kernel, dilations=[2], pad_type="custom", pad=[before, 4]
    )
    steps = [begin - before, 0]  # as many places as there were
    return mb.slice_by_index(
        x=wide,
        begin=[0, 0, begin],
        end=[0, 0, steps[0]],
        begin_mask=[True, True, False],
        end_mask=[True, True, not steps[0]],
        name="y",
    )


@pytest.mark.one_of(9)
@pytest.mark.parametrize(
    ("build", "axis"),
    [
        (chomped, 2),
        (heads, 2),
        (recurrent, 0),
        (pointwise, 2),
        (positions, 1),
        (neighbours, 1),
        (causal_by_lookup, 1),
        (hidden, 1),
        (windows, 2),
    ],
)
def test_every_length_is_what_the_model_gives_at_it(
    build: Callable[[Var], Any], axis: int, tmp_path: Path
) -> None:
    program = dynamic(build)
    sized = ane.sizes(program, {"x": STEPS})
    assert (sized.padding.inputs, sized.padding.outputs, sized.padding.why_not) == ({"x": 1}, {"y": axis}, "")
    assert "between sizes: padded at the end, proved" in str(sized)
    folder = sized.save(tmp_path / "sized")
    for length in range(1, 10):
        values = {"x": RNG.standard_normal((1, length, 4)).astype(np.float32)}
        expected = ane.run(program, values)["y"]
        found = ane.run(folder, values)["y"]
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ane.SurgeryError, match="no size takes"):
        ane.run(folder, {"x": np.zeros((1, 10, 4), np.float32)})


def last_state(x: Var) -> Var:
    return mb.gather(x=x, indices=np.array([2], np.int32), axis=1, name="y")


def from_the_end(x: Var) -> Var:
    """Places that are counted from the last one."""
    turned = mb.sub(x=counted(x), y=places(x))
    return mb.add(x=x, y=mb.expand_dims(x=mb.cast(x=turned, dtype="fp32"), axes=[1]), name="y")


def jumping(x: Var) -> Var:
    """Places times a number that is the same at the largest length and at the one that is followed."""
    turned = mb.mul(x=places(x), y=mb.mod(x=counted(x), y=np.int32(3)))
    return mb.add(x=x, y=mb.expand_dims(x=mb.cast(x=turned, dtype="fp32"), axes=[1]), name="y")


def tiled_count(x: Var) -> Var:
    """A number that depends on the length, as long as the input."""
    one = mb.expand_dims(x=mb.mod(x=counted(x), y=np.int32(3)), axes=[0])
    many = mb.tile(x=one, reps=mb.expand_dims(x=counted(x), axes=[0]))
    return mb.add(x=x, y=mb.expand_dims(x=mb.cast(x=many, dtype="fp32"), axes=[1]), name="y")


def shifted(x: Var) -> Var:
    """The last rows of a table: it ends where the input does."""
    table = np.ones((1, 64, 4), np.float32)
    begin = mb.concat(values=(np.int32(0), mb.mul(x=counted(x), y=np.int32(-1)), np.int32(0)), axis=0)
    rows = mb.slice_by_index(x=table, begin=begin, end=[1, 64, 4], begin_mask=[True, False, True])
    return mb.add(x=x, y=rows, name="y")


def backwards(x: Var) -> Var:
    return mb.cumsum(x=x, axis=1, reverse=True, name="y")


def attention(x: Var) -> Var:
    scores = mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True), axis=-1)
    return mb.matmul(x=scores, y=x, name="y")


def flat(x: Var) -> Var:
    return mb.reshape(x=x, shape=(1, -1), name="y")


def regrouped(x: Var) -> Var:
    """As long as the input only where that is 4."""
    return mb.reshape(x=x, shape=(1, 4, -1), name="y")


def counted_too(x: Var) -> Any:
    """An output that is a number of the length, which filling up would change."""
    return mb.relu(x=x, name="y"), mb.mod(x=counted(x), y=np.int32(3), name="left")


def less(x: Var, other: Var) -> Any:
    """A softmax over the length of what is larger than 0 where the input hides."""
    return mb.softmax(x=mb.sub(x=x, y=other), axis=1, name="y")


WRONG: dict[str, tuple[Callable[[Var], Any], str]] = {
    "a mask less its sum": (lambda x: less(x, mb.reduce_sum(x=x, axes=[2], keep_dims=True)), "no mask hides"),
    "a mask less what went before": (lambda x: less(x, mb.cumsum(x=x, axis=1)), "no mask hides"),
    "a mask less a product": (
        lambda x: less(x, mb.linear(x=x, weight=np.eye(4, dtype=np.float32) * 2)),
        "no mask hides",
    ),
    "windows that are cut at the beginning": (lambda x: chomped(x, 4, 4), "conv"),
    "windows that are cut in part": (lambda x: chomped(x, 4, 2), "conv"),
    "windows that look ahead, and are cut": (lambda x: chomped(mb.exp(x=x), 2), "2 places beyond the end"),
    "a row is taken": (last_state, "gather"),
    "places from the end": (from_the_end, "is another at 1 than at 8"),
    "a number of the length as an output": (counted_too, "computed from the length"),
    "a number that jumps": (jumping, "is another at"),
    "a number that jumps, repeated": (tiled_count, "is another at"),
    "a table from its end": (shifted, "computes with the length"),
    "a sum from the end": (backwards, "cumsum reads across"),
    "a mean of all": (lambda x: mb.reduce_mean(x=x, axes=[1], keep_dims=True, name="y"), "reduce_mean reads"),
    "a softmax": (lambda x: mb.softmax(x=mb.relu(x=x), axis=1, name="y"), "softmax reads across"),
    "a norm": (lambda x: mb.layer_norm(x=x, axes=[1, 2], name="y"), "layer_norm"),
    "attention": (attention, "no mask hides"),
    "a window": (lambda x: windows(mb.exp(x=x)), "conv reads 1 place beyond the end"),
    "flattened": (flat, "reshape"),
    "regrouped": (regrouped, "reshape"),
}


@pytest.mark.parametrize("factors", [(-1e4,), (-100.0, 100.0)])
def test_an_unknown_number_times_a_large_one_hides_nothing(factors: tuple[float, ...]) -> None:
    """1 less how many positions came before, times -10,000, is no mask: it is 0 at the first, and rises."""
    n = get_new_symbol()

    @mb.program(input_specs=[mb.TensorSpec((1, n, 4)), mb.TensorSpec((1, n, 1))], opset_version=ct.target.iOS18)
    def program(x: Var, mask: Var) -> Any:
        bias = mb.sub(x=np.float32(1), y=mb.cumsum(x=mask, axis=1))
        for factor in factors:
            bias = mb.mul(x=bias, y=np.float32(factor))
        return mb.softmax(x=mb.add(x=x, y=bias), axis=1, name="y")

    sized = ane.sizes(program, {"x": STEPS, "mask": [(1, 5, 1), (1, 9, 1)]})
    assert "no mask hides" in sized.padding.why_not


@pytest.mark.one_of(2)
@pytest.mark.parametrize("case", WRONG)
def test_what_reads_across_is_refused(case: str, tmp_path: Path) -> None:
    build, words = WRONG[case]
    sized = ane.sizes(dynamic(build), {"x": [(1, 4, 4), (1, 8, 4)]})
    assert words in sized.padding.why_not
    assert not sized.padding.inputs
    folder = sized.save(tmp_path / "sized")
    with pytest.raises(ane.SurgeryError, match="it is not padded"):
        ane.run(folder, {"x": np.zeros((1, 3, 4), np.float32)})


def test_one_length_along_several_axes_is_not_padded() -> None:
    length = get_new_symbol()

    program = mb.program(input_specs=[mb.TensorSpec((1, length, length))], opset_version=ct.target.iOS18)(
        lambda x: mb.relu(x=x, name="y")
    )

    sized = ane.sizes(program, {"x": [(1, 5, 5), (1, 9, 9)]})
    assert sized.padding.why_not.startswith("several axes of x have the same length")


def moving(x: Var, window: int, pads: tuple[int, int], step: int = 2) -> Var:
    """Windows of channels first that move by some places."""
    kernel = np.random.default_rng(window).standard_normal((4, 4, window)).astype(np.float32)
    return mb.conv(x=x, weight=kernel, strides=[step], pad_type="custom", pad=pads)


def halved(x: Var) -> Var:
    """The last window ends at the last place, whatever stands behind it."""
    return mb.tanh(x=moving(mb.exp(x=x), 3, (1, 1)), name="y")


def halved_twice(x: Var) -> Var:
    """Windows of two lengths, then each place by itself, and its number."""
    y = moving(mb.exp(x=moving(mb.exp(x=x), 3, (1, 1))), 2, (0, 0))
    count = mb.gather(x=mb.shape(x=y), indices=np.int32(2), axis=0)
    numbers = mb.cast(x=mb.range_1d(start=np.int32(0), end=count, step=np.int32(1)), dtype="fp32")
    return mb.add(x=y, y=numbers, name="y")


def over_zeros(x: Var) -> Var:
    """Windows that reach beyond the end, where zeros are."""
    return mb.identity(x=moving(x, 5, (2, 2)), name="y")


def every_second(x: Var) -> Var:
    """Places that are taken, beside windows that move as far."""
    taken = mb.slice_by_index(
        x=x, begin=[0, 0, 0], end=[1, 4, 0], stride=[1, 1, 2], end_mask=[True, True, True]
    )
    return mb.mul(x=taken, y=moving(x, 3, (1, 1)), name="y")


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("build", "share"), [(halved, 2), (halved_twice, 4), (over_zeros, 2), (every_second, 2)]
)
def test_windows_that_move_further_pad_multiples(
    build: Callable[[Var], Any], share: int, tmp_path: Path
) -> None:
    program = dynamic(build, (1, 4, None))
    sized = ane.sizes(program, {"x": [(1, 4, 3), (1, 4, 8), (1, 4, 16)]})
    assert (sized.padding.shares, sized.padding.multiple) == ({"y": share}, share)
    assert f"to a multiple of {share}, proved" in str(sized)
    folder = sized.save(tmp_path / "sized")
    for length in range(share, 17, share):
        values = {"x": RNG.standard_normal((1, 4, length)).astype(np.float32)}
        expected, found = ane.run(program, values)["y"], ane.run(folder, values)["y"]
        assert found.shape == expected.shape
        assert_close(found, expected)
    with pytest.raises(ane.SurgeryError, match=f"only lengths that are multiples of {share} are padded"):
        ane.run(folder, {"x": np.zeros((1, 4, 5), np.float32)})
    assert ane.run(folder, {"x": np.zeros((1, 4, 3), np.float32)})


def crossing(x: Var) -> Var:
    """Each place beside each of half as many: axes of two lengths."""
    return mb.matmul(x=x, y=moving(x, 3, (1, 1)), transpose_x=True, name="y")


def odd_places(x: Var) -> Var:
    taken = mb.slice_by_index(
        x=x, begin=[0, 0, 1], end=[1, 4, 0], stride=[1, 1, 2], end_mask=[True, True, True]
    )
    return mb.mul(x=taken, y=moving(x, 3, (1, 1)), name="y")


UNEVEN: dict[str, tuple[Callable[[Var], Any], str]] = {
    "windows that reach further": (lambda x: moving(mb.exp(x=x), 5, (2, 2)), "1 place beyond the end"),
    "windows that leave a rest": (lambda x: moving(x, 3, (0, 0)), "changes the length"),
    "windows beyond the length": (lambda x: moving(x, 3, (2, 2)), "changes the length"),
    "axes of two lengths": (crossing, "changes the length"),
    "places from the second on": (odd_places, "slice_by_index reads across"),
    "a mean behind them": (
        lambda x: mb.reduce_mean(x=halved(x), axes=[2], keep_dims=True, name="z"),
        "reduce_mean reads across",
    ),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_windows_that_move_further_and_read_across_are_refused(case: str) -> None:
    build, words = UNEVEN[case]
    sized = ane.sizes(dynamic(build, (1, 4, None)), {"x": [(1, 4, 8), (1, 4, 16)]})
    assert words in sized.padding.why_not


def test_an_added_mask_has_a_place_for_each_step() -> None:
    """Softmaxes behind windows that move by 2 are hidden by every second place of the mask."""

    def build(x: Var) -> Var:
        y = mb.transpose(x=moving(x, 5, (2, 2)), perm=(0, 2, 1))
        scores = mb.softmax(x=mb.matmul(x=y, y=y, transpose_y=True), axis=-1)
        return mb.matmul(x=scores, y=y, name="y")

    program = dynamic(build, (1, 4, None))
    sized = ane.sizes(program, {"x": [(1, 4, 8), (1, 4, 16)]}, mask="mask")
    assert (sized.padding.why_not, sized.padding.multiple, sized.padding.shares) == ("", 2, {"y": 2})
    largest = sized.models["size_16"]
    values = RNG.standard_normal((1, 4, 10)).astype(np.float32)
    filled = np.pad(values, ((0, 0), (0, 0), (0, 6)), constant_values=3)  # what is hidden does not count
    mask = (np.arange(16) < 10).astype(np.float32)[None]
    found = ane.run(largest, {"x": filled, "mask": mask})["y"][:, :5]
    assert_close(found, ane.run(program, {"x": values})["y"])


@pytest.mark.parametrize("fill", [-math.inf, -1e4])
@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int64, np.float32])
def test_a_mask_of_integers_is_filled_with_what_hides(fill: float, dtype: type[Any]) -> None:
    rows = (SizeRow("size_4", None, "model.mlpackage", {"mask": (1, 4)}),)
    padding = Padding({"mask": 1}, {}, fill={"mask": fill}, hiding={"mask": True})
    call = choose_call(rows, padding, {"mask": np.zeros((1, 2), dtype)})
    np.testing.assert_array_equal(call.values["mask"], [[0, 0, fill, fill]])
