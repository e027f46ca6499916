"""`legacy_concat`: every axis in both mappings, and inputs that do not lie side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import refuses, rewrites, table
from two_sided import Shape, with_any_batch

from anesurgery.interpret import run
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.layers.cutting import LegacyConcat
from anesurgery.testing import apply_pass

STEP = LegacyConcat()


def joined(*shapes: Shape, axis: int, interleave: bool = False, rank5: bool = False) -> Any:
    names = [f"x{i}" for i in range(len(shapes))]
    layer = make_layer("concatND", names, ["y"], axis=axis, interleave=interleave)
    return make_network(dict(zip(names, shapes, strict=True)), [layer], ["y"], rank5=rank5)


def test_infinite_numbers_stay_where_they_are_along_rows() -> None:
    spec = joined((1, 1, 2, 2), (1, 1, 1, 2), axis=2)
    after, _ = apply_pass(STEP, spec)
    program = import_network(after, keep_names=True).program
    x0 = np.array([[[[np.inf, -1], [np.nan, -np.inf]]]], np.float32)
    x1 = np.array([[[[2, np.inf]]]], np.float32)
    found = run(program, {"x0": x0, "x1": x1})["y"]
    np.testing.assert_array_equal(found, np.concatenate([x0, x1], 2))


test_cases, test_surroundings = table(
    STEP,
    rewrites(with_any_batch, joined((1, 2, 4, 5), (1, 3, 4, 5), axis=1)),
    refuses("along axis -4 of 4, the batch", joined, (1, 2, 4, 5), (2, 2, 4, 5), axis=0),
    refuses("along axis -6 of 6;", joined, (1, 1, 1, 2, 2, 2), (1, 1, 1, 2, 2, 2), axis=0),
    refuses("the width of 1 axes; Core ML's own check wants 2", joined, (5,), (6,), axis=0),
    refuses("along axis -2 of 4", joined, (2, 3, 4, 5), (2, 3, 4, 5), axis=2, interleave=True),
    refuses("of 4 axes or more", joined, (3, 4, 5), (3, 4, 5), axis=0, interleave=True),
    refuses(
        "300, 300 channels, not equally many, 512",
        joined,
        (1, 300, 1, 1),
        (1, 300, 1, 1),
        axis=1,
        interleave=True,
    ),
    refuses("unknown", joined, (1, 2, 4, 5), (1, 2, 3, 5), axis=1),
    refuses("dynamic", with_any_batch, joined((1, 5), (1, 5), axis=0)),
    *(
        rewrites(joined, first, second, axis=axis)
        for first, second, axis in [
            ((1, 2, 4, 5), (1, 3, 4, 5), 1),
            ((1, 2, 4, 5), (1, 3, 4, 5), -3),
            ((2, 4, 5), (3, 4, 5), 0),
            ((2, 3, 2, 4, 5), (2, 3, 1, 4, 5), 2),
            ((2, 3, 2, 4, 5), (1, 3, 2, 4, 5), 0),
            ((1, 2, 4, 5), (1, 2, 1, 5), 2),
            ((2, 4, 5), (2, 4, 3), -1),
            ((4, 5), (1, 5), 0),
            ((1, 2, 2, 4, 5), (1, 2, 2, 4, 6), 4),
        ]
    ),
    *(
        rewrites(joined, (2, 4, 5), second, axis=axis, rank5=True)
        for second, axis in [((1, 4, 5), 2), ((2, 4, 5), 0), ((2, 1, 5), 3), ((2, 4, 7), -1)]
    ),
    rewrites(joined, (1, 2, 3, 1), (1, 2, 3, 4), (1, 2, 3, 2), axis=3),
    *(
        rewrites(joined, *[x] * count, axis=axis, interleave=True)
        for x, count, axis in [((1, 2, 3, 4), 2, 1), ((2, 3, 2, 2), 3, 1), ((1, 2, 2, 3, 4), 2, -3)]
    ),
    refuses("switched off", joined, (1, 2, 4, 5), (1, 2, 1, 5), axis=2, step=LegacyConcat(spatial=False)),
    rewrites(joined, (1, 2, 4, 5), (1, 2, 4, 5), axis=1, step=LegacyConcat(spatial=False)),
)
