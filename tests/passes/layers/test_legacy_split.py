"""`legacy_split`: equal channels, other parts, outputs that nobody reads."""

from __future__ import annotations

from typing import Any

import pytest
from pass_cases import refuses, rewrites, table
from two_sided import Shape, with_any_batch

from anesurgery.errors import PassError, Refusal
from anesurgery.network_editing.layer_pass import LayerRewrite, Site
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.layers.cutting import LegacySplit
from anesurgery.testing import apply_pass

STEP = LegacySplit()


def parts(
    x: Shape, axis: int, sizes: list[int] | int, read: tuple[int, ...] | None = None, rank5: bool = False
) -> Any:
    """`sizes`: of each part, or how many equal ones; `read`: the parts that leave the network."""
    count = sizes if isinstance(sizes, int) else len(sizes)
    how = {"numSplits": sizes} if isinstance(sizes, int) else {"splitSizes": sizes}
    names = [f"y{i}" for i in range(count)]
    layer = make_layer("splitND", ["x"], names, axis=axis, **how)
    return make_network({"x": x}, [layer], [names[i] for i in read or range(count)], rank5=rank5)


def test_what_is_read_is_never_left_out() -> None:
    class Forgets(LayerRewrite):
        name = "forgets"
        kinds = frozenset({"splitND"})

        def rewrite(self, site: Site) -> Refusal | None:
            site.linear(site.inputs[0], 1.0, 0.0, [site.outputs[0]])
            return None

    with pytest.raises(PassError, match="nothing makes 'y1' any more, which is read"):
        apply_pass(Forgets(), parts((1, 6, 4, 5), 1, [6, 0]))


test_cases, test_surroundings = table(
    STEP,
    refuses("it splits axis -4 of 4", parts, (4, 6, 4, 5), 0, 2),
    refuses("7 do not divide into 2 equal parts", parts, (1, 7, 4, 5), 1, 2),
    refuses("dynamic", with_any_batch, parts((3, 4), 0, [1, 2])),
    *(
        rewrites(parts, x, axis, sizes)
        for x, axis, sizes in [
            ((1, 6, 4, 5), 1, 3),
            ((1, 6, 4, 5), -3, [2, 2, 2]),
            ((6, 4, 5), 0, 2),
            ((2, 3, 6, 4, 5), 2, 2),
            ((1, 6, 4, 5), 1, [1, 5]),
            ((1, 6, 4, 5), 2, 2),
            ((1, 6, 4, 5), -1, [1, 3, 1]),
            ((6,), 0, 2),
            ((4, 6), 0, 2),
        ]
    ),
    *(rewrites(parts, (6, 4, 5), axis, sizes, rank5=True) for axis, sizes in [(2, 3), (2, [1, 5]), (4, 5)]),
    rewrites(
        make_network,
        {"x": (7,)},
        [
            make_layer("splitND", ["x"], ["y"], axis=0, numSplits=1),
            make_layer("unary", ["y"], ["z"], type="ABS"),
        ],
        ["z"],
    ),
    rewrites(parts, (1, 6, 4, 5), 2, [1, 2, 1], read=(1,)),
    rewrites(with_any_batch, parts((1, 6, 4, 5), 1, 2)),
)
