"""Replace a pool with a large window by a chain of pools with small windows.

Before::

    main(%x: 1x2x80x80) {
      %y: 1x2x2x2 = avg_pool(x=%x, kernel_sizes=[40, 40], strides=[40, 40], pad_type="valid")
      return %y
    }

After::

    main(%x: 1x2x80x80) {
      %y_chain_pools_avg_pool: 1x2x10x10 = avg_pool(x=%x, kernel_sizes=[8, 8], strides=[8, 8], pad_type="valid")
      %y: 1x2x2x2 = avg_pool(x=%y_chain_pools_avg_pool, kernel_sizes=[5, 5], strides=[5, 5], pad_type="valid")
      return %y
    }

If the window is as long as the stride, it is split into windows of windows: 40 is 5 windows of 8. Any other
maximum becomes a chain of pools with stride 1 whose last pool has the stride: the largest of 11 neighbours is
the largest of 4 windows of 8. Any other average becomes a sum of shifted averages over parts of the window,
axis by axis; a window that covers a whole axis is a mean. If padding is not counted, or only partly, constants
scale the averages. A root of a sum of squares (l2_pool) becomes a chain of such roots if windows do not
overlap, and otherwise a root of averaged squares.

Refuses when a length is symbolic, when a window lies entirely in the padding, and when fp16 windows of l2_pool
overlap: the squares could exceed fp16.

Why it helps: max_pool is taken up to 8 wide, or 32 (measured through Core ML on M4, macOS 27), average pools up
to 29 on M1 and 31 from M2 on (tables of the compiler). Maxima are proved bit-exact, averages proved.

Grade: proved.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.facts import windows

LONGEST = 29
"""The longest window of averages that every chip takes."""
Links = list[tuple[int, int]]
"""(window, stride) of one axis, pool by pool."""


@dataclass(frozen=True)
class ChainPools(Rewrite):
    """max_pool, avg_pool and l2_pool with large windows become several."""

    name = "chain_pools"
    kinds = frozenset({"max_pool", "avg_pool", "l2_pool"})
    tolerance = an.REASSOCIATED
    most: int = an.option(8, least=2)
    """Longest window that stays, and that a pool of a chain may have."""

    def check(self, m: Match) -> Match | Refusal:
        """Match a pool with a large window over known lengths."""
        op = m.root
        limit = self.most if op.op_type == "max_pool" else max(self.most, LONGEST)
        if max(an.ints(op, "kernel_sizes"), default=0) <= limit:
            return an.NO_MATCH
        if an.static_shape(m.x) is None:
            return Refusal(f"%{m.x.name} has the symbolic shape {tuple(m.x.shape)}", op)
        axes = windows.window_axes(op)
        if any(min(axis.counted(exclude=True)) < 1 for axis in axes):
            return Refusal(
                f"a window of {an.ints(op, 'kernel_sizes')} lies in the padding {windows.window_pads(op)}", op
            )
        if op.op_type == "l2_pool" and an.np_dtype(m.x) == np.float16 and not _tiles(axes, self.most):
            return Refusal(
                "windows that overlap would need squares, which leave fp16 below 2e-4 and above 256", op
            )
        return m.bind(axes=axes)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the largest element, the mean, or the root of the sum of squares of each window."""
        if m.root.op_type == "max_pool":
            return self.largest(mb, m.x, m.axes)
        if m.root.op_type == "avg_pool":
            return self.averages(mb, m.x, m.axes, an.flag(m.root, "exclude_padding_from_average"))
        if chains := _tiles(m.axes, self.most):
            return _chain(mb.l2_pool, m.x, chains, list(map(_edges, m.axes, chains)))
        mean = self.averages(mb, mb.square(x=m.x), m.axes, None)
        window = math.prod(axis.size for axis in m.axes)
        return mb.sqrt(x=mb.mul(x=mean, y=an.np_dtype(m.x).type(window)))

    def largest(self, mb: Builder, x: Var, axes: Sequence[windows.WindowAxis]) -> Var:
        """Pool after pool; axes with shorter chains end with windows of one element."""
        chains: list[Links] = []
        for axis in axes:
            factors = _factors(axis.size, self.most) if axis.stride == axis.size > self.most else []
            apart = bool(factors) and max(axis.before, axis.after) < factors[0]
            chains.append(_pairs(factors) if apart else _steps(axis, self.most))
        return _chain(mb.max_pool, x, chains, [_edges(a, c) for a, c in zip(axes, chains, strict=True)])

    def averages(self, mb: Builder, x: Var, axes: Sequence[windows.WindowAxis], exclude: bool | None) -> Var:
        """Build the mean of each window; with `exclude` None, padding counts as 0."""
        limit = max(self.most, LONGEST)
        chains = [_averaged(axis, self.most, limit) for axis in axes]
        early = [
            not chain or max(axis.before, axis.after) >= chain[0][0]
            for axis, chain in zip(axes, chains, strict=True)
        ]
        x = _padded(mb, x, [axis for axis, now in zip(axes, early, strict=True) if now])
        if any(chains):
            pads = [[(0, 0) if now else axis.around] for axis, now in zip(axes, early, strict=True)]
            x = _chain(mb.avg_pool, x, chains, pads)
        rest = [axis for axis, chain in zip(axes, chains, strict=True) if not chain]
        if whole := [axis.at for axis in rest if axis.whole]:
            x = mb.reduce_mean(x=x, axes=whole, keep_dims=True)
        for axis in rest:
            x = x if axis.whole else _in_parts(mb, x, axis, limit)
        counts = np.ones((1,) * x.rank)
        for axis in axes if exclude is not None else ():
            counts = counts * axis.counted(bool(exclude)).reshape(
                [-1 if a == axis.at else 1 for a in range(x.rank)]
            )
        return _counting(mb, x, counts, math.prod(axis.size for axis in axes)) if exclude is not None else x


def _averaged(axis: windows.WindowAxis, most: int, limit: int) -> Links:
    """Return the chain of averages along an axis; empty if the window is cut into parts instead."""
    if axis.size <= limit:
        return [(axis.size, axis.stride)]
    apart = axis.stride == axis.size
    return _pairs(_factors(axis.size, most) or _factors(axis.size, limit)) if apart else []


def _tiles(axes: Sequence[windows.WindowAxis], most: int) -> list[Links]:
    """Return chains whose windows do not overlap, so each element is read once; empty if there are none."""
    chains = list[Links]()
    for axis in axes:
        factors = _factors(axis.size, most) if axis.stride == axis.size > most else []
        chains.append(_pairs(factors) or [(axis.size, axis.stride)] * (axis.size <= most))
    apart = all(c and max(a.before, a.after) < c[0][0] for a, c in zip(axes, chains, strict=True))
    return chains if apart else []


def _pairs(factors: Sequence[int]) -> Links:
    """Return the links of windows that do not overlap: each stride is the window."""
    return [(factor, factor) for factor in factors]


def _steps(axis: windows.WindowAxis, most: int) -> Links:
    """Return the links of windows that overlap; only the last one has the stride."""
    steps, rest = divmod(axis.size - 1, most - 1)
    chain = [most] * steps + ([rest + 1] if rest or not steps else [])
    return [*((window, 1) for window in chain[:-1]), (chain[-1], axis.stride)]


def _edges(axis: windows.WindowAxis, links: Links) -> Links:
    """What each pool pads: the first ones as much as leaves one element in each window."""
    pairs, (before, after) = [], axis.around
    for window, _ in links:
        pair = min(before, window - 1), min(after, window - 1)
        pairs.append(pair)
        before, after = before - pair[0], after - pair[1]
    return pairs


def _chain(pool: Callable[..., Var], x: Var, chains: Sequence[Links], pads: Sequence[Links]) -> Var:
    """Pool after pool, each with its part of the padding."""
    for i in range(max(map(len, chains))):
        links = [chain[i] if i < len(chain) else (1, 1) for chain in chains]
        edges = [n for pairs in pads for n in (pairs[i] if i < len(pairs) else (0, 0))]
        windows: dict[str, Any] = {"kernel_sizes": [k for k, _ in links], "strides": [s for _, s in links]}
        windows |= {"pad_type": "custom", "pad": edges} if any(edges) else {"pad_type": "valid"}
        x = pool(x=x, **windows)
    return x


def _padded(mb: Builder, x: Var, axes: Sequence[windows.WindowAxis]) -> Var:
    """Pad some axes with zeros at both ends."""
    pad = [0] * 2 * x.rank
    for axis in axes:
        pad[2 * axis.at : 2 * axis.at + 2] = axis.around
    return mb.pad(x=x, pad=pad) if any(pad) else x


def _counting(mb: Builder, x: Var, counts: an.Array, size: int) -> Var:
    """Rescale averages so that `counts` of the `size` elements count, by numbers that fp16 holds."""
    if (counts == size).all():
        return x
    kind, unit = an.np_dtype(x), 2 ** math.ceil(math.log2(size))
    return mb.real_div(x=mb.mul(x=x, y=kind.type(size / unit)), y=(counts / unit).astype(kind))


def _in_parts(mb: Builder, x: Var, axis: windows.WindowAxis, limit: int) -> Var:
    """Build averages of parts of the window, shifted, weighted with their lengths, and added."""
    parts = math.ceil(axis.size / limit)
    size = axis.size // parts if axis.size % parts == 0 else 2 ** int(math.log2(limit))
    step, kind = math.gcd(axis.stride, size), an.np_dtype(x).type
    lengths = [size] * (axis.size // size) + ([axis.size % size] if axis.size % size else [])
    terms: list[Var] = []
    pooled: dict[int, Var] = {}
    for place, length in enumerate(lengths):
        if length not in pooled:
            window, by = ([n if a == axis.at else 1 for a in range(2, x.rank)] for n in (length, step))
            average = mb.avg_pool(x=x, kernel_sizes=window, strides=by, pad_type="valid")
            average = average if length == size else mb.mul(x=average, y=kind(length / size))
            pooled[length] = mb.real_div(x=average, y=kind(axis.size / size))
        terms.append(_every(mb, pooled[length], axis, place * size // step, axis.stride // step))
    return functools.reduce(lambda a, b: mb.add(x=a, y=b), terms)


def _every(mb: Builder, x: Var, axis: windows.WindowAxis, begin: int, step: int) -> Var:
    """Take every element at the stride from `begin` on, one for each window."""
    whole = [a != axis.at for a in range(x.rank)]
    first, last = ([0 if keep else n for keep in whole] for n in (begin, begin + (axis.count - 1) * step + 1))
    steps = [1 if keep else step for keep in whole]
    return mb.slice_by_index(x=x, begin=first, end=last, stride=steps, begin_mask=whole, end_mask=whole)


def _factors(size: int, most: int) -> list[int]:
    """Return the factors of a size up to `most`, large ones first; empty if it has a larger prime."""
    factors = []
    while size > 1:
        factor = next((n for n in range(most, 1, -1) if size % n == 0), 0)
        if not factor:
            return []
        factors.append(factor)
        size //= factor
    return factors


@an.example((1, 2, 80, 80))
def example(x: Var) -> Var:
    """Averages of 40 x 40 elements."""
    return mb.avg_pool(x=x, kernel_sizes=[40, 40], strides=[40, 40], pad_type="valid", name="y")
