"""`legacy_slice`: indices of every kind against what the layers keep, and slices out of reach."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table
from two_sided import Shape, kinds_after, with_any_batch

from anesurgery.interpret import run
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.passes.layers.cutting import LegacySlice
from anesurgery.testing import apply_pass

STEP = LegacySlice()
X = (2, 6, 7, 8)
ALL = slice(None)


def sliced(
    x: Shape, *parts: slice, squeeze: tuple[bool, ...] = (), rank5: bool = False, read: str = "y"
) -> Any:
    fields: dict[str, Any] = {
        "beginIds": [p.start or 0 for p in parts],
        "beginMasks": [p.start is None for p in parts],
        "endIds": [p.stop or 0 for p in parts],
        "endMasks": [p.stop is None for p in parts],
        "strides": [p.step or 1 for p in parts],
        "squeezeMasks": squeeze,
    }
    layers = [make_layer("sliceStatic", ["x"], ["y"], **fields), make_layer("unary", ["y"], ["z"], type="ABS")]
    return make_network({"x": x}, layers, [read], rank5=rank5)


CASES: dict[str, tuple[tuple[slice, ...], list[str]]] = {
    "channels": ((ALL, slice(1, 4), ALL, ALL), ["slice"]),
    "from the end": ((ALL, slice(-3, -1), ALL, ALL), ["slice"]),
    "without a beginning": ((ALL, ALL, slice(None, 3), ALL), ["slice"]),
    "without an end": ((ALL, ALL, ALL, slice(5, None)), ["slice"]),
    "by two": ((ALL, slice(None, None, 2), ALL, ALL), ["slice"]),
    "by three, to an end between": ((ALL, ALL, slice(1, 6, 3), ALL), ["slice"]),
    "beyond both ends": ((ALL, ALL, slice(-100, 3), slice(2, 100)), ["crop"]),
    "a window": ((ALL, ALL, slice(1, -1), slice(2, 7)), ["crop"]),
    "rows and columns by two": ((ALL, ALL, slice(0, None, 2), slice(1, None, 2)), ["slice"] * 2),
    "a window of channels": ((ALL, slice(5, 6), slice(1, 3), slice(2, 3)), ["slice", "crop"]),
    "stated as whole": ((slice(0, 2), slice(0, 6), slice(0, 7), slice(3, 4)), ["slice"]),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", CASES)
def test_what_stays(name: str) -> None:
    parts, expected = CASES[name]
    spec = sliced(X, *parts)
    assert kinds_after(STEP, spec) == [*expected, "unary"]
    after, _ = apply_pass(STEP, spec)
    x = np.random.default_rng(0).standard_normal(X).astype(np.float32)
    program = import_network(after, keep_names=True).program
    np.testing.assert_array_equal(run(program, {"x": x})["y"], x[parts])


def by_size(x: Shape, axis: int, size: int, begin: float | None) -> Any:
    inputs = {"x": x} if begin is not None else {"x": x, "b": (1,)}
    number = make_layer("loadConstantND", [], ["b"], shape=[1], data=weights(np.array([begin or 0])))
    layer = make_layer("sliceBySize", ["x", "b"], ["y"], axis=axis, size=size)
    return make_network(inputs, [layer] if begin is None else [number, layer], ["y"])


test_cases, test_surroundings = table(
    STEP,
    rewrites(with_any_batch, sliced(X, ALL, slice(1, 3), ALL, ALL)),
    refuses("it slices axis -4 of 4", sliced, X, slice(1, 2), ALL, ALL, ALL),
    refuses("stride along axis -2 is -1", sliced, X, ALL, ALL, slice(None, None, -1), ALL),
    refuses("removes an axis", sliced, X, ALL, ALL, slice(2, 3), ALL, squeeze=(False, False, True, False)),
    refuses("states 4 axes for a blob of 5", sliced, (1, *X), ALL, slice(1, 3), ALL, ALL),
    refuses("dynamic", with_any_batch, sliced((4,), slice(1, 3))),
    refuses("it slices axis -4 of 4", by_size, X, 0, 1, 0),
    refuses("its beginning is dynamic", by_size, X, 1, 3, None),
    refuses("it takes 3 from -3 on, of 6", by_size, X, 1, 3, -3),
    *(
        rewrites(sliced, x, *parts)
        for x, parts in [
            ((7,), (slice(2, 4),)),
            ((5, 7), (slice(2, 4), slice(1, 3))),
            ((5, 6, 7), (ALL, slice(2, 4), slice(1, 3))),
            ((2, 3, 5, 6, 7), (ALL, ALL, slice(1, 3), slice(2, 4), ALL)),
        ]
    ),
    rewrites(sliced, (6, 7, 8), ALL, ALL, slice(1, 3), slice(1, -1), slice(0, 5), rank5=True),
    rewrites(sliced, X, *[ALL] * 4, read="z"),
    *(rewrites(by_size, X, axis, 3, begin) for axis in (1, 2, 3, -1) for begin in (0, 2)),
)
