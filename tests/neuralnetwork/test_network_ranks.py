"""The axes of blobs: five in the mapping of specification 1 to 3, fewer where a later layer takes some away.

There an input [C, H, W] is (1, 1, C, H, W). Each network ends in `getShape`, which tells its axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_layer import floats, network, run

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.mil import Array, quiet_host
from anesurgery.neuralnetwork.importing import import_network

with quiet_host():
    from coremltools.models.neural_network import NeuralNetworkBuilder

X = floats(2, 3, 4)
FIVE = X[None, None]
"""X as its blob is."""

Step = tuple[Callable[[Any, str, str], Any], Callable[[Array], Array]]
"""What adds a layer (builder, blob it reads, blob it makes), and the same for an array."""


def _run(*steps: Step, x: Array = X) -> None:
    """Run layers in a row, and compare what they make, and its shape."""

    def fill(b: Any) -> None:
        for i, (add, _) in enumerate(steps):
            add(b, f"b{i}" if i else "x", f"b{i + 1}")
        b.add_get_shape("shape", f"b{len(steps)}", "shape")
        b.add_activation("last", "LINEAR", f"b{len(steps)}", "y", [1, 0])

    wanted = x.reshape((1,) * (5 - x.ndim) + x.shape) if x.ndim == 3 else x
    for _, apply in steps:
        wanted = apply(wanted)
    found, shape = run(fill, x, outputs=("y", "shape"), legacy=True)
    assert shape.ravel().astype(int).tolist() == (list(wanted.shape) or [1])
    largest = np.abs(wanted).max(initial=0)  # a chain may end in zeros
    np.testing.assert_allclose(found.ravel(), wanted.ravel(), rtol=1e-5, atol=1e-6 * largest)


def _softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def relu() -> Step:
    return (lambda b, i, o: b.add_activation(o, "LEAKYRELU", i, o, [0.5]), lambda x: np.where(x > 0, x, x / 2))


def twice() -> Step:
    return lambda b, i, o: b.add_elementwise(o, [i, i], o, "ADD"), lambda x: x + x


def transpose(*axes: int) -> Step:
    return lambda b, i, o: b.add_transpose(o, axes, i, o), lambda x: np.transpose(x, axes)


def squeeze(*axes: int) -> Step:
    return lambda b, i, o: b.add_squeeze(o, i, o, list(axes)), lambda x: np.squeeze(x, axes)


def expand(*axes: int) -> Step:
    return lambda b, i, o: b.add_expand_dims(o, i, o, axes), lambda x: np.expand_dims(x, axes)


def reshape(*shape: int) -> Step:
    return lambda b, i, o: b.add_reshape_static(o, i, o, shape), lambda x: x.reshape(shape)


def softmax(axis: int) -> Step:
    return lambda b, i, o: b.add_softmax_nd(o, i, o, axis), lambda x: _softmax(x, axis)


def total(axis: int, keep: bool) -> Step:
    return (
        lambda b, i, o: b.add_reduce_sum(o, i, o, [axis], keepdims=keep),
        lambda x: x.sum(axis, keepdims=keep),
    )


def stack(axis: int) -> Step:
    return lambda b, i, o: b.add_stack(o, [i, i], o, axis), lambda x: np.stack([x, x], axis)


def cumsum(axis: int) -> Step:
    return lambda b, i, o: b.add_cumsum(o, [i], o, axis=axis), lambda x: np.cumsum(x, axis)


def joined(axis: int) -> Step:
    return (lambda b, i, o: b.add_concat_nd(o, [i, i], o, axis), lambda x: np.concatenate([x, x], axis))


def first(axis: int) -> Step:
    def add(b: Any, i: str, o: str) -> None:
        b.add_split_nd(o, i, [o, f"{o} rest"], axis, split_sizes=[1, 1])

    return add, lambda x: np.split(x, 2, axis)[0]


def largest(axis: int, remove: bool) -> Step:
    return (
        lambda b, i, o: b.add_argmax(o, i, o, axis, keepdims=not remove),
        lambda x: np.argmax(x, axis, keepdims=not remove).astype(np.float32),
    )


def taken(axis: int) -> Step:
    def add(b: Any, i: str, o: str) -> None:
        b.add_load_constant_nd(f"{o} at", f"{o} at", np.array([1.0, 0, 1]), (3,))
        b.add_gather(o, [i, f"{o} at"], o, axis)

    return add, lambda x: np.take(x, [1, 0, 1], axis)


FOUR = squeeze(0)
"""(1, 2, 3, 4), which is held as (batch, channel, height, width) is."""


@pytest.mark.one_of(5)
@pytest.mark.parametrize(
    "steps",
    [
        [softmax(2)],
        [total(2, True)],
        [total(2, False)],
        [stack(1)],
        [cumsum(3)],
        [joined(2)],
        [first(2)],
        [largest(3, True)],
        [largest(2, False)],
        [taken(2)],
        [transpose(0, 1, 4, 2, 3)],
        [squeeze(1), squeeze(0), softmax(1)],
    ],
)
@pytest.mark.parametrize("before", [[], [relu()], [relu(), twice()]], ids=["input", "one", "two"])
def test_layers_after_old_ones_count_five_axes(steps: list[Step], before: list[Step]) -> None:
    _run(*before, *steps)


@pytest.mark.one_of(5)
@pytest.mark.parametrize(
    "steps",
    [
        [softmax(1)],
        [softmax(2)],
        [total(1, True)],
        [total(1, False)],
        [stack(1)],
        [cumsum(2)],
        [joined(1)],
        [first(1)],
        [largest(2, True)],
        [largest(1, False)],
        [taken(1)],
        [transpose(0, 3, 1, 2)],
        [expand(1)],
        [reshape(2, 1, 3, 4), softmax(3)],
        [total(1, False), softmax(1)],
    ],
)
@pytest.mark.parametrize("between", [[], [relu()], [twice(), relu()]], ids=["none", "one", "two"])
def test_layers_after_a_squeeze_count_four_axes(steps: list[Step], between: list[Step]) -> None:
    _run(relu(), FOUR, *between, *steps)


def test_a_blob_gets_its_fifth_axis_back() -> None:
    _run(FOUR, softmax(1), expand(0), relu(), softmax(2), transpose(0, 1, 3, 4, 2))


def _chain(draw: Any, shape: tuple[int, ...]) -> Step:
    """Any layer that a blob of this shape can go through."""
    rank, axes = len(shape), range(len(shape))
    ones = [a for a in axes if shape[a] == 1]
    pairs = [a for a in axes if shape[a] == 2]
    axis = draw(st.sampled_from(axes))
    steps = [
        relu(),
        twice(),
        softmax(axis),
        cumsum(axis),
        total(axis, True),
        largest(axis, False),
        transpose(*draw(st.permutations(axes))),
        reshape(*draw(st.permutations(shape))),
    ]
    steps += [first(draw(st.sampled_from(pairs)))] if pairs else [joined(axis)]
    if rank < 5:
        steps += [expand(draw(st.integers(0, rank))), stack(draw(st.integers(0, rank)))]
    if rank > 1:
        steps += [total(axis, False), largest(axis, True)]
        steps += [squeeze(draw(st.sampled_from(ones)))] if ones else []
    return draw(st.sampled_from(steps))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_chains_of_layers(data: Any) -> None:
    steps: list[Step] = []
    made = FIVE
    for _ in range(data.draw(st.integers(2, 6))):
        steps.append(_chain(data.draw, made.shape))
        made = steps[-1][1](made)
    _run(*steps)


# -- two inputs --------------------------------------------------------------------------------------------


def _shape_of(fill: Callable[[Any], Any], *inputs: Array) -> list[int]:
    def both(b: Any) -> None:
        fill(b)
        b.add_get_shape("shape", "y", "shape")

    found = run(both, *inputs, outputs=("y", "shape"), legacy=True)[1]
    return [int(n) for n in found.ravel()]


def test_four_axes_and_five_are_five() -> None:
    def fill(b: Any) -> None:
        b.add_squeeze("four", "x", "four", axes=[0])
        b.add_add_broadcastable("sum", ["four", "x"], "sum")
        b.add_softmax_nd("y", "sum", "y", axis=2)

    found = run(fill, X, legacy=True)
    np.testing.assert_allclose(found, _softmax(X + X, 0), rtol=1e-5)
    assert _shape_of(fill, X) == [1, 1, 2, 3, 4]


def test_a_crop_has_the_axes_of_its_first_input() -> None:
    def fill(b: Any) -> None:
        b.add_squeeze("four", "x", "four", axes=[0])
        b.add_crop("y", 0, 0, 0, 0, [1, 1], ["four", "z"], "y")

    assert _shape_of(fill, X, floats(2, 2, 2)) == [1, 2, 2, 2]


def test_a_constant_of_the_first_specification_has_five_axes() -> None:
    def fill(b: Any) -> None:
        b.add_load_constant("c", "c", X, X.shape)
        b.add_softmax_nd("y", "c", "y", axis=3)

    found = run(fill, X, legacy=True)
    np.testing.assert_allclose(found, _softmax(X, 1), rtol=1e-5)


def test_a_constant_of_four_axes_has_four() -> None:
    def fill(b: Any) -> None:
        b.add_load_constant_nd("c", "c", X[None], (1, 2, 3, 4))
        b.add_softmax_nd("s", "c", "s", axis=1)
        b.add_add_broadcastable("y", ["s", "x"], "y")

    np.testing.assert_allclose(run(fill, X, legacy=True), _softmax(X, 0) + X, rtol=1e-5)


def test_volumes_of_one_example() -> None:
    """(batch, channel, depth, height, width), where the batch of 1 is that of a sequence elsewhere."""

    def fill(b: Any) -> None:
        b.add_pooling3d("p", "x", "p", "MAX", 1, 1, 1, 1, 1, 1)
        w = np.ones((1, 1, 1, 1, 2), np.float32)
        b.add_convolution3d("y", 1, 1, 1, 1, 2, w, None, False, input_name="p", output_name="y")

    x = floats(1, 1, 2, 3, 4)
    found = run(fill, x, legacy=True)
    np.testing.assert_allclose(found.ravel(), (x[..., 1:] + x[..., :-1]).ravel(), rtol=1e-5)


# -- branches and loops -------------------------------------------------------------------------------------


def _inside(network_: Any) -> Any:
    return NeuralNetworkBuilder(nn_spec=network_, disable_rank5_shape_mapping=False)


def _branch(b: Any, otherwise: str) -> None:
    """Where the sum is not 0, "four" twice, else another blob."""
    b.add_squeeze("four", "x", "four", axes=[0])
    b.add_reduce_sum("sum", "x", "sum", axes=None, keepdims=False, reduce_all=True)
    sides = b.add_branch("branch", "sum").branch
    _inside(sides.ifBranch).add_elementwise("twice", ["four", "four"], "b", "ADD")
    _inside(sides.elseBranch).add_copy("copy", otherwise, "b")
    b.add_softmax_nd("y", "b", "y", axis=1)


@pytest.mark.parametrize("factor", [0, 1])
def test_both_sides_of_a_branch_have_four_axes(factor: float) -> None:
    found = run(lambda b: _branch(b, "four"), X * factor, legacy=True)
    np.testing.assert_allclose(found, _softmax(2 * X * factor, 0), rtol=1e-5)


def test_a_branch_that_makes_four_axes_or_five_is_refused() -> None:
    spec = network(lambda b: _branch(b, "x"), X, legacy=True)
    with pytest.raises(LoadError, match=r"layer 'branch' \(branch\): gives 'b' 4 axes or 5"):
        import_network(spec)


def _loop(b: Any, body: Callable[[Any], Any]) -> None:
    b.add_squeeze("four", "x", "four", axes=[0])
    b.add_copy("start", "four", "b")
    body(_inside(b.add_loop("loop", max_iterations=3).loop.bodyNetwork))
    b.add_softmax_nd("y", "b", "y", axis=1)


def test_a_loop_carries_four_axes() -> None:
    def body(b: Any) -> None:
        b.add_cumsum("sums", ["b"], "sums", axis=1)
        b.add_copy("again", "sums", "b")

    wanted = X
    for _ in range(3):
        wanted = np.cumsum(wanted, 0)
    found = run(lambda b: _loop(b, body), X, legacy=True)
    np.testing.assert_allclose(found, _softmax(wanted, 0), rtol=1e-5)


def test_a_loop_that_makes_five_axes_of_four_is_refused() -> None:
    def body(b: Any) -> None:
        b.add_expand_dims("five", "b", "five", axes=[0])
        b.add_copy("again", "five", "b")

    spec = network(lambda b: _loop(b, body), X, legacy=True)
    with pytest.raises(LoadError, match=r"gives 'b' 4 axes or 5, depending on the round of a loop"):
        import_network(spec)


# -- no axes -----------------------------------------------------------------------------------------------


def test_a_vector_loses_its_axis_and_gets_it_back() -> None:
    """As coremltools' test `TestRank0ExpandDimsSwap` expects it of a Mac."""

    def fill(b: Any) -> None:
        b.add_slice_static("s", "x", "s", [1], [2], [1], [False], [False], squeeze_masks=[True])
        b.add_elementwise("sum", ["s"], "sum", "ADD", alpha=2)
        b.add_expand_dims("y", "sum", "y", axes=[0])
        b.add_stack("z", ["sum", "sum", "sum"], "z", axis=0)
        b.add_concat_nd("w", ["sum", "y"], "w", 0)

    x = floats(3)
    y, z, w, alone = run(fill, x, outputs=("y", "z", "w", "sum"))
    assert [v.shape for v in (y, z, w, alone)] == [(1,), (3,), (2,), (1,)]
    for found in (y, z, w, alone):
        np.testing.assert_allclose(found, x[1] + 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([total(0, False), expand(0, 1)], lambda x: x.sum().reshape(1, 1)),
        ([largest(0, True), expand(0)], lambda x: x.argmax().reshape(1)),
        ([first(0), squeeze(0), expand(0)], lambda x: x[:1]),
    ],
    ids=["sum", "place", "squeeze"],
)
def test_results_without_axes(steps: list[Step], wanted: Callable[[Array], Array]) -> None:
    def fill(b: Any) -> None:
        for i, (add, _) in enumerate(steps):
            add(b, f"b{i}" if i else "x", "y" if i == len(steps) - 1 else f"b{i + 1}")

    x = floats(2)
    found = run(fill, x)
    assert found.shape == wanted(x).shape
    np.testing.assert_allclose(found, wanted(x), rtol=1e-6)


@pytest.mark.parametrize("every", [False, True])
def test_a_number_without_axes_is_reduced(every: bool) -> None:
    def fill(b: Any) -> None:
        b.add_slice_static("s", "x", "s", [1], [2], [1], [False], [False], squeeze_masks=[True])
        b.add_reduce_l2("p", "s", "p", None if every else [0], keepdims=True, reduce_all=every)
        b.add_expand_dims("y", "p", "y", axes=[0])

    assert run(fill, np.array([3, -2], np.float32)).tolist() == [2]


@pytest.mark.parametrize(("place", "wanted"), [(0, 5), (1, 3), (-1, 2)])
def test_one_of_the_sizes_is_dynamic(place: int, wanted: int) -> None:
    def fill(b: Any) -> None:
        b.add_get_shape("shape", "x", "shape")
        ends = [place + 1 or 9]
        b.add_slice_static("s", "shape", "s", [place], ends, [1], [False], [False], squeeze_masks=[True])
        b.add_elementwise("sum", ["s"], "sum", "ADD", alpha=1)
        b.add_expand_dims("y", "sum", "y", axes=[0])

    spec = network(fill, floats(5, 3, 2))
    for _ in range(3):
        spec.description.input[0].type.multiArrayType.shapeRange.sizeRanges.add(lowerBound=1, upperBound=9)
    found = ane.run(import_network(spec), {"x": floats(5, 3, 2)})["y"]
    assert found.tolist() == [wanted + 1]
