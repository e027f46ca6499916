"""Multiply the tables of a palette by its scales once, when the pass runs.

Before::

    main(%x: 1x12xfp16) {
      %t: 1x12x4x1xfp16 = constexpr_blockwise_shift_scale(data=const<1x12x4x1xfp16>, scale=const<1x12x1x1xfp16>)
      %w: 4x12xfp16 = constexpr_lut_to_dense(indices=const<4x12xuint2>, lut=%t)
      %y: 1x4xfp16 = linear(x=%x, weight=%w)
      return %y
    }

After::

    main(%x: 1x12xfp16) {
      %w: 4x12xfp16 = constexpr_lut_to_dense(indices=const<4x12xuint2>, lut=const<1x12x4x1xfp16>)
      %y: 1x4xfp16 = linear(x=%x, weight=%w)
      return %y
    }

The products are rounded as Core ML would round them at load, so no bit changes. Tables of fp16 keep their size;
tables of 8 bits double in size. The indices stay as they are.

Refuses when the tables or the scales are computed at run time.

Why it helps: palettes with scales for channels crashed at load (an abort of MPSGraph, reported on M4,
macOS 26.6.2; coremltools pull request 2688). What the pass gains in time was not measured.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb


@dataclass(frozen=True)
class FoldPaletteScales(Rewrite):
    """`constexpr_lut_to_dense` of scaled tables reads plain tables."""

    name = "fold_palette_scales"
    precedes = ("scale_after_product",)
    kinds = frozenset({"constexpr_lut_to_dense"})

    def check(self, m: Match) -> Match | Refusal:
        """Match a palette whose tables are a stored constant times stored scales."""
        maker = an.producer(m.root.lut, "constexpr_blockwise_shift_scale")
        if maker is None:
            return an.NO_MATCH
        for name, var in an.operands(maker):
            if not an.is_stored(var):
                return Refusal(f"{name} %{var.name} is made at run time", m.root)
        return m.bind(tables=an.decoded(m.root.lut))

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the palette with the scaled tables."""
        dense: Var = mb.constexpr_lut_to_dense(**an.op_inputs(m.root, "lut"), lut=m.tables)
        return dense


@an.example((1, 12), dtype="fp16", opset="iOS18")
def example(x: Var) -> Var:
    """Four rows of a palette with a table of four numbers for each input."""
    rng = np.random.default_rng(0)
    indices: Any = rng.integers(0, 4, (4, 12)).astype(an.types.nptype_from_builtin(an.types.uint2))
    data = rng.standard_normal((1, 12, 4, 1)).astype(np.float16)
    scale = rng.uniform(1, 2, (1, 12, 1, 1)).astype(np.float16)
    table = mb.constexpr_blockwise_shift_scale(data=data, scale=scale, name="t")
    return mb.linear(x=x, weight=mb.constexpr_lut_to_dense(indices=indices, lut=table, name="w"), name="y")
