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
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.facts import windows

LONGEST = 29
"""The longest window of averages that every chip takes."""


class _Link(NamedTuple):
    """A pool of a chain along one axis."""

    window: int
    stride: int
    pad: tuple[int, int] = (0, 0)
    """The padding before and after the axis."""


Chain = list[_Link]
"""The pools along one axis, in the order in which they run."""


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
            sizes, pads = an.ints(op, "kernel_sizes"), windows.window_pads(op)
            return Refusal(f"a window of {sizes} lies in the padding {pads}", op)
        if op.op_type == "l2_pool" and an.np_dtype(m.x) == np.float16 and not self.tiles(axes):
            words = "windows that overlap would need squares, which leave fp16 below 2e-4 and above 256"
            return Refusal(words, op)
        return m.bind(axes=axes)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the largest element, the mean, or the root of the sum of squares of each window."""
        if m.root.op_type == "max_pool":
            return _chained(mb.max_pool, m.x, [self.overlapping(axis) for axis in m.axes])
        if m.root.op_type == "avg_pool":
            means = self.means(mb, m.x, m.axes)
            return _counting(mb, means, m.axes, an.flag(m.root, "exclude_padding_from_average"))
        if chains := self.tiles(m.axes):
            return _chained(mb.l2_pool, m.x, chains)
        mean = self.means(mb, mb.square(x=m.x), m.axes)
        window = math.prod(axis.size for axis in m.axes)
        return mb.sqrt(x=mb.mul(x=mean, y=an.np_dtype(m.x).type(window)))

    def overlapping(self, axis: windows.WindowAxis) -> Chain:
        """Return the chain of a maximum: windows side by side if they fit, else windows that overlap."""
        factors = _factors(axis.size, self.most) if axis.stride == axis.size > self.most else []
        if factors and max(axis.around) < factors[0]:
            return _with_padding(axis, [_Link(n, n) for n in factors])
        steps, rest = divmod(axis.size - 1, self.most - 1)  # 20 = 1 + 2 * 7 + 5: windows of 8, 8 and 6
        sizes = [self.most] * steps + ([rest + 1] if rest or not steps else [])
        return _with_padding(axis, [*(_Link(n, 1) for n in sizes[:-1]), _Link(sizes[-1], axis.stride)])

    def tiles(self, axes: Sequence[windows.WindowAxis]) -> list[Chain]:
        """Return chains whose windows do not overlap, so each element is read once; empty if there are none."""
        chains = list[Chain]()
        for axis in axes:
            factors = _factors(axis.size, self.most) if axis.stride == axis.size > self.most else []
            small = [_Link(axis.size, axis.stride)] if axis.size <= self.most else []
            chain = [_Link(n, n) for n in factors] or small
            if not chain or max(axis.around) >= chain[0].window:
                return []
            chains.append(_with_padding(axis, chain))
        return chains

    def means(self, mb: Builder, x: Var, axes: Sequence[windows.WindowAxis]) -> Var:
        """Build the mean of each window, in which padding counts as 0."""
        limit = max(self.most, LONGEST)
        pad, chains, without_chain = [0] * 2 * x.rank, list[Chain](), list[windows.WindowAxis]()
        for axis in axes:
            chain = self.averaging(axis, limit)
            if not chain:
                without_chain.append(axis)
            if chain and max(axis.around) < chain[0].window:
                chain[0] = chain[0]._replace(pad=axis.around)
            else:  # the first pool cannot pad so much
                pad[2 * axis.at : 2 * axis.at + 2] = axis.around
            chains.append(chain)
        x = mb.pad(x=x, pad=pad) if any(pad) else x
        x = _chained(mb.avg_pool, x, chains) if any(chains) else x
        if whole := [axis.at for axis in without_chain if axis.whole]:
            x = mb.reduce_mean(x=x, axes=whole, keep_dims=True)
        for axis in without_chain:
            x = x if axis.whole else _in_parts(mb, x, axis, limit)
        return x

    def averaging(self, axis: windows.WindowAxis, limit: int) -> Chain:
        """Return the chain of averages along an axis; empty if the window is cut into parts instead."""
        if axis.size <= limit:
            return [_Link(axis.size, axis.stride)]
        factors = _factors(axis.size, self.most) or _factors(axis.size, limit)
        return [_Link(n, n) for n in factors] if axis.stride == axis.size else []


def _with_padding(axis: windows.WindowAxis, chain: Chain) -> Chain:
    """Share the padding of an axis out: each pool pads as much as leaves one element in each window."""
    (before, after), padded = axis.around, list[_Link]()
    for link in chain:
        pad = min(before, link.window - 1), min(after, link.window - 1)
        padded.append(link._replace(pad=pad))
        before, after = before - pad[0], after - pad[1]
    return padded


def _chained(pool: Callable[..., Var], x: Var, chains: Sequence[Chain]) -> Var:
    """Build pool after pool; axes with shorter chains end with windows of one element."""
    for links in zip_longest(*chains, fillvalue=_Link(1, 1)):
        pads = [n for link in links for n in link.pad]
        padding: dict[str, Any] = {"pad_type": "custom", "pad": pads} if any(pads) else {"pad_type": "valid"}
        sizes, strides = [link.window for link in links], [link.stride for link in links]
        x = pool(x=x, kernel_sizes=sizes, strides=strides, **padding)
    return x


def _counting(mb: Builder, x: Var, axes: Sequence[windows.WindowAxis], exclude: bool) -> Var:
    """Rescale means so that only some elements of a window count: with `exclude`, no padding does."""
    counts, size = np.ones((1,) * x.rank), math.prod(axis.size for axis in axes)
    for axis in axes:
        along = [-1 if a == axis.at else 1 for a in range(x.rank)]
        counts = counts * axis.counted(exclude).reshape(along)
    if (counts == size).all():
        return x
    dtype, unit = (
        an.np_dtype(x),
        2 ** math.ceil(math.log2(size)),
    )  # both factors are at most 1, so fp16 holds them
    return mb.real_div(x=mb.mul(x=x, y=dtype.type(size / unit)), y=(counts / unit).astype(dtype))


def _in_parts(mb: Builder, x: Var, axis: windows.WindowAxis, limit: int) -> Var:
    """Build averages of parts of the window, shifted, weighted with their lengths, and added.

    Example: a window of 58 within a limit of 29 is the sum of halves of two averages of 29, the second one of
    the elements from 29 on.
    """
    parts = math.ceil(axis.size / limit)
    size = axis.size // parts if axis.size % parts == 0 else 2 ** int(math.log2(limit))
    step, dtype = math.gcd(axis.stride, size), an.np_dtype(x).type
    lengths = [size] * (axis.size // size) + ([axis.size % size] if axis.size % size else [])
    terms: list[Var] = []
    averages: dict[int, Var] = {}
    for place, length in enumerate(lengths):
        if length not in averages:
            window, by = ([n if a == axis.at else 1 for a in range(2, x.rank)] for n in (length, step))
            average = mb.avg_pool(x=x, kernel_sizes=window, strides=by, pad_type="valid")
            average = average if length == size else mb.mul(x=average, y=dtype(length / size))
            averages[length] = mb.real_div(x=average, y=dtype(axis.size / size))
        terms.append(_every(mb, averages[length], axis, place * size // step, axis.stride // step))
    return functools.reduce(lambda a, b: mb.add(x=a, y=b), terms)


def _every(mb: Builder, x: Var, axis: windows.WindowAxis, begin: int, step: int) -> Var:
    """Take every `step`-th element from `begin` on, one for each window."""
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
