"""Compute attention head by head, with channels before tokens.

Queries, keys and values are brought to (batch, channels, 1, tokens), unless `channels_first` has already done
that; keys are transposed once, before they are split. Each head is two einsums with a softmax over axis 1
between them. Masks are transposed and split; for constant masks this is done when the pass runs. Keys and
values that several query heads share are not repeated.

Refuses when scores or weights of attention are read elsewhere, when anything other than elementwise ops stands
between them, when a factor does not have four axes, and when there are more than `most` heads.

Why it helps: part of the layout with which Apple's port of DistilBERT went from 55 to 8.7 ms (measured, M1 Max:
apple/ml-ane-transformers); the UNet of Stable Diffusion went from 1040 to 726 ms on the engine, and from 280 to
377 ms on the GPU (apple/ml-stable-diffusion). A SigLIP that was on the engine as a whole gained 10 to 13 %
(measured, M4 Pro and M5 Max: erwinzhang7/coreml-compute-placement). So recipes use it only on request, except
for text encoders on M1, M1 Max and A15 (`sequence_layout`).

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Pass, Refusal, Rewrite, Var, mb
from anesurgery.mil import fixed_shape
from anesurgery.passes.channels_first import ChannelsFirst
from anesurgery.regions import channel_steps, layouts, small_builds, views
from anesurgery.regions import heads as heads_regions
from anesurgery.regions.small_builds import again, parted


@dataclass(frozen=True)
class SplitHeads(Rewrite):
    """Two einsums and a softmax for each head."""

    name = "split_heads"
    kinds = frozenset({"matmul"})
    """The product that sums the values."""
    follows = ("channels_first", "causal_mask_tensor", "fold_constants")
    tolerance = an.REASSOCIATED
    shares_inner = True
    most: int = 64
    """Heads above which an attention stays as it is, since each becomes several ops."""

    @classmethod
    def variants(cls, target: an.Target) -> tuple[Pass, ...]:
        """Return the pass where channels go first."""
        return (cls(),) if ChannelsFirst.variants(target) else ()

    def check(self, m: Match) -> Match | Refusal:
        """Match the end of an attention that can be taken apart.

        Binds `core`, the `heads.Core` with product, softmax and what stands between, and its `operands`,
        the `heads.HeadOperands`: queries, keys and values.
        """
        core = heads_regions.core_of(m.root)
        if not isinstance(core, heads_regions.Core):
            return core
        operands = heads_regions.operands_of(core)
        if isinstance(operands, Refusal):
            return operands
        scores = fixed_shape(core.softmax.outputs[0])
        if scores[1] > self.most:
            return Refusal(f"{scores[1]} heads are more than {self.most}", m.root)
        for op, carried in core.between:
            for var in core.others(op, carried).values():
                shape = an.static_shape(var)
                if shape is None or (not heads_regions.is_scalar(var) and len(shape) > 4):
                    return Refusal(f"%{var.name} has the shape {tuple(map(str, var.shape))}", m.root)
        return m.bind(ops=tuple(core.ops), core=core, operands=operands)

    def rewrite(self, mb: Builder, m: Match) -> dict[Var, Var]:
        """Build the heads, and their concat in the old layout, or in a later view that is nearer to it."""
        core, operands = m.core, m.operands
        heads = len(operands.query.heads)
        queries, keys, values = (
            _split(channel_steps.NamingMaker(mb, x.var), x, axis)
            for x, axis in ((operands.query, 1), (operands.key, 3), (operands.value, 1))
        )
        masks = [_masks(mb, core, op, carried) for op, carried in core.between]
        seen = []
        for i in range(heads):
            scores = _at(mb, core.product).einsum(values=(keys[i], queries[i]), equation=heads_regions.SCORES)
            for (op, carried), others in zip(core.between, masks, strict=True):
                rest = {k: v[i] for k, v in others.items()}
                scores = again(_at(mb, op), op, **rest, **{carried: scores})
            weights = _at(mb, core.softmax).softmax(x=scores, axis=1)
            seen.append(_at(mb, m.root).einsum(values=(values[i], weights), equation=heads_regions.SUM))
        make = _at(mb, m.root)
        joined = small_builds.joined(make, seen, 1)
        end, layout = heads_regions.last_view_of_result(core)
        return {end: channel_steps.leaving_value(make, joined, end, layout)}


def _at(mb: Builder, op: an.Operation) -> Any:
    """Return a builder that names new ops after the result of an op."""
    return channel_steps.NamingMaker(mb, op.outputs[0])


def _split(mb: Any, operand: heads_regions.HeadOperand, axis: int) -> list[Var]:
    """Give each head its part of an operand."""
    var, count = operand.build(mb), max(operand.heads) + 1
    parts = parted(mb, var, axis, [int(var.shape[axis]) // count] * count)
    return [parts[i] for i in operand.heads]


def _masks(mb: Builder, core: heads_regions.Core, op: an.Operation, carried: str) -> dict[str, list[Var]]:
    """Return what each head reads of the other operands of an elementwise op."""
    heads = int(core.softmax.x.shape[1])
    return {k: _mask(channel_steps.NamingMaker(mb, v), v, heads) for k, v in core.others(op, carried).items()}


def _mask(mb: Any, var: Var, heads: int) -> list[Var]:
    """Build a mask as (batch, keys, 1, queries) for each head."""
    if heads_regions.is_scalar(var):
        return [var] * heads
    shape = fixed_shape(var)
    whole = (1,) * (4 - len(shape)) + shape
    layout = heads_regions.mask_layout(shape)
    keys = layout.axes[3]
    groups = (layout.having(layouts.BATCH), layout.axes[1] + keys, (), layout.having(layouts.TOKENS))
    value = an.constant(var)
    if value is None:
        moved = mb.shared_value(
            ("mask", var),
            [var],
            lambda m: channel_steps.build_twin(
                channel_steps.NamingMaker(m, var),
                views.seen_as(channel_steps.NamingMaker(m, var), var, whole),
                layout,
                groups,
            ),
        )
        if whole[1] == 1:
            return [moved] * heads
        return list(mb.split(x=moved, split_sizes=[whole[3]] * heads, axis=1))

    def part(i: int) -> an.Array:
        return np.moveaxis(np.reshape(value, whole)[:, i : i + 1], (3, 1), (1, 2))

    count = whole[1]
    masks = [mb.shared(("mask", var, i), lambda i=i: part(i), f"{var.name}_{i}") for i in range(count)]
    return masks if count == heads else masks * heads


@an.example((1, 8, 1, 3), (1, 8, 1, 3), (1, 8, 1, 3))
def example(q: Var, k: Var, v: Var) -> Var:
    """Two heads of four channels over three tokens, with a bias."""
    nearness = np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32)
    heads = [mb.reshape(x=x, shape=[1, 2, 4, 3], name=f"{x.name}h") for x in (q, k, v)]
    scores = mb.matmul(x=heads[0], y=heads[1], transpose_x=True, name="scores")
    weights = mb.softmax(
        x=mb.add(x=scores, y=mb.const(val=nearness, name="nearness"), name="masked"), axis=-1, name="weights"
    )
    out = mb.matmul(x=heads[2], y=weights, transpose_y=True, name="out")
    return mb.reshape(x=out, shape=[1, 8, 1, 3], name="y")
