"""Sizes that differ by several lengths are filled up along each for which that is proved."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from coremltools.converters.mil.mil import get_new_symbol

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types

RNG = np.random.default_rng(0)
SIZES = {"x": [(1, 3, 2, 3), (1, 3, 4, 5)]}
KERNEL = RNG.standard_normal((3, 3, 3, 3)).astype(np.float32)


def pictures(build: Callable[[Var], Any]) -> Program:
    sides = [get_new_symbol(), get_new_symbol()]

    return mb.program(
        input_specs=[mb.TensorSpec((1, 3, *sides), dtype=types.fp32)], opset_version=ct.target.iOS18
    )(lambda x: build(x))


def texts(build: Callable[[Var, Var], Any]) -> Program:
    """Of an encoder and of a decoder: each of its own length."""
    shapes = [(1, get_new_symbol(), 4), (1, get_new_symbol(), 4)]

    return mb.program(
        input_specs=[mb.TensorSpec(shape, dtype=types.fp32) for shape in shapes], opset_version=ct.target.iOS18
    )(lambda source, target: build(source, target))


def points(x: Var) -> Var:
    """Each place by itself, and its column's number."""
    count = mb.gather(x=mb.shape(x=x), indices=np.int32(3), axis=0)
    numbers = mb.cast(x=mb.range_1d(start=np.int32(0), end=count, step=np.int32(1)), dtype="fp32")
    return mb.tanh(x=mb.add(x=x, y=numbers), name="y")


def windows(x: Var) -> Var:
    """Two convolutions, whose borders read zeros."""
    y = mb.sigmoid(x=mb.conv(x=x, weight=KERNEL, pad_type="custom", pad=[1, 1, 1, 1]))
    return mb.conv(x=y, weight=KERNEL, pad_type="custom", pad=[1, 1, 1, 1], name="y")


def strided(x: Var) -> Var:
    """Windows that move by 2 down and by 1 across, and end at their place across."""
    y = mb.pad(x=mb.exp(x=x), pad=[0, 0, 0, 0, 0, 0, 2, 0])
    return mb.conv(x=y, weight=KERNEL, strides=[2, 1], pad_type="custom", pad=[1, 1, 0, 0], name="y")


def crossing(source: Var, target: Var) -> Var:
    """A sum over the source, whose zeros add nothing, read by each place of the target."""
    pairs = mb.matmul(x=target, y=source, transpose_y=True)
    return mb.matmul(x=pairs, y=source, name="y")


def lowest(x: Var) -> Var:
    """Each row by itself, of the columns a mean."""
    return mb.reduce_mean(x=mb.tanh(x=x), axes=[3], keep_dims=True, name="y")


def every(sized: Any, program: Program, lengths: Any, at: Callable[..., Any], tmp_path: Path) -> None:
    """Every pair of lengths against the model at that pair."""
    folder = sized.save(tmp_path / "sized")
    for pair in product(*lengths):
        values = at(*pair)
        own = {name: values[name] for name in program.functions["main"].inputs}
        expected, found = ane.run(program, own)["y"], ane.run(folder, values)["y"]
        assert found.shape == expected.shape
        assert_close(found, expected)


def picture(height: int, width: int) -> dict[str, Any]:
    return {"x": RNG.standard_normal((1, 3, height, width)).astype(np.float32)}


@pytest.mark.parametrize(("build", "step"), [(points, 1), (strided, 2)])
def test_pictures_of_every_size(build: Callable[[Var], Any], step: int, tmp_path: Path) -> None:
    program = pictures(build)
    sized = ane.sizes(program, SIZES)
    assert [one.inputs for one in sized.padding.by_length] == [{"x": 2}, {"x": 3}]
    assert [one.outputs for one in sized.padding.by_length] == [{"y": 2}, {"y": 3}]
    assert [one.multiple for one in sized.padding.by_length] == [step, 1]
    assert "along axis 2 of x" in str(sized.padding)
    every(sized, program, (range(step, 5, step), range(1, 6)), picture, tmp_path)


def test_a_mask_for_each_side_is_added_on_request(tmp_path: Path) -> None:
    program = pictures(windows)
    assert "axis 2 of x: " in ane.sizes(program, SIZES).padding.why_not
    sized = ane.sizes(program, {"x": [(1, 3, 2, 2), (1, 3, 4, 4)]}, mask="mask")  # sides of one length
    masks = [name for name in sized.shapes["size_4"] if name != "x"]
    assert masks == ["mask_x_2", "mask_x_3"]

    def at(height: int, width: int) -> dict[str, Any]:
        sides = dict(zip(masks, (height, width), strict=True))
        return picture(height, width) | {n: np.ones((1, side), np.float32) for n, side in sides.items()}

    every(sized, program, (range(1, 5), range(1, 5)), at, tmp_path)


def test_two_texts(tmp_path: Path) -> None:
    program = texts(crossing)
    sized = ane.sizes(program, {"source": [(1, 2, 4), (1, 4, 4)], "target": [(1, 2, 4), (1, 3, 4)]})
    assert [one.outputs for one in sized.padding.by_length] == [{}, {"y": 1}]

    def at(source: int, target: int) -> dict[str, Any]:
        lengths = {"source": source, "target": target}
        return {n: RNG.standard_normal((1, k, 4)).astype(np.float32) for n, k in lengths.items()}

    every(sized, program, (range(1, 5), range(1, 4)), at, tmp_path)


def test_one_length_may_be_filled_up_where_the_other_may_not(tmp_path: Path) -> None:
    sized = ane.sizes(pictures(lowest), SIZES)
    assert (sized.padding.inputs, sized.padding.more) == ({"x": 2}, ())
    assert "axis 3 of x: " in sized.padding.others
    assert "reduce_mean reads across" in sized.padding.others
    folder = sized.save(tmp_path / "sized")
    assert ane.run(folder, picture(3, 5))["y"].shape == (1, 3, 3, 1)
    with pytest.raises(ane.SurgeryError, match="it is not padded along axis 3 of x: .*reduce_mean"):
        ane.run(folder, picture(3, 4))


def by_the_other(x: Var) -> Var:
    """Rows before the last 4 - width are another at each width: none at the largest."""
    shape = mb.shape(x=x)
    width = mb.gather(x=shape, indices=np.int32(3), axis=0)
    height = mb.gather(x=shape, indices=np.int32(2), axis=0)
    less = mb.sub(x=width, y=np.int32(4))
    ahead = mb.sub(x=mb.range_1d(start=np.int32(0), end=height, step=np.int32(1)), y=mb.mul(x=less, y=height))
    return mb.add(x=x, y=mb.expand_dims(x=mb.cast(x=ahead, dtype="fp32"), axes=[1]), name="y")


def turned(x: Var) -> Var:
    """Rows that meet columns: neither length can change by itself."""
    return mb.add(x=x, y=mb.transpose(x=x, perm=(0, 1, 3, 2)), name="y")


WRONG: dict[str, tuple[Callable[[Var], Any], str]] = {
    "what depends on both lengths": (by_the_other, "axis 2 of x: "),
    "sides that meet": (turned, "axis 2 of x: "),
    "a norm over both": (lambda x: mb.layer_norm(x=x, axes=[2, 3], name="y"), "layer_norm"),
    "sides that become one": (lambda x: mb.reshape(x=x, shape=(1, 3, -1), name="y"), "reshape"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_reads_across_is_refused(case: str) -> None:
    build, words = WRONG[case]
    padding = ane.sizes(pictures(build), {"x": [(1, 3, 2, 2), (1, 3, 4, 4)]}).padding
    assert words in padding.why_not + padding.others
    assert {"x": 2} not in [one.inputs for one in padding.by_length]
