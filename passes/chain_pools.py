"""A pool with a large window becomes a chain of pools with small windows.

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

A window that steps by its own length is cut into windows of windows: 40 is 5 windows of 8. Other maxima are a
chain of pools with stride 1, and the stride last: the largest of 11 neighbours is that of 4 windows of 8.

Padded edges are those of the first pool.

Refuses when the op rounds lengths up or has a symbolic length, when edges are padded by more than the first
pool is wide or do not count in an average, when averages overlap (their elements would not count alike), and
when the length of an average has a prime factor above `most`.

Why it helps: max_pool is taken up to 8 wide, or 32 (measured through Core ML on M4, macOS 27), average pools
up to 29 on M1 and 31 from M2 on (tables of the compiler). Maxima are proved bit-exact; averages are the same
sums in another order, checked at each site in fp32.

Grade: proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from anesurgery.checking.site import REASSOCIATED, Tolerance
from anesurgery.errors import PassError, Refusal
from anesurgery.facts.reading import flag, ints
from anesurgery.facts.window_pads import window_pads
from anesurgery.mil import Operation, Program, Var, constant, mb, static_shape
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.rewrite import Rewrite

Links = list[tuple[int, int]]
"""(window, stride) of one axis, pool by pool."""


@dataclass(frozen=True)
class ChainPools(Rewrite):
    """max_pool and avg_pool with large windows become several."""

    name: ClassVar[str] = "chain_pools"
    tolerance: ClassVar[Tolerance] = REASSOCIATED
    most: int = 8
    """Longest window that stays, and that a pool of a chain may have."""

    def __post_init__(self) -> None:
        if type(self.most) is not int or self.most < 2:
            raise PassError(f"{self.name}: most={self.most!r}; it must be an integer above 1")

    def pattern(self, op: Ops) -> OpPattern:
        """Every pool of maxima or averages."""
        return op.any("max_pool", "avg_pool")(x=var("x"))

    def check(self, m: Match) -> Match | Refusal | None:
        """Windows that can be cut, on every axis."""
        op, window = m.root, ints(m.root, "kernel_sizes")
        strides = ints(op, "strides") or [1] * len(window)
        limit = self.most if op.op_type == "max_pool" else max(self.most, 29)
        if max(window, default=0) <= limit:
            return None
        if flag(op, "ceil_mode"):
            return Refusal("the lengths are rounded up (ceil_mode)", op)
        if static_shape(m.x) is None:
            return Refusal(f"%{m.x.name} has the symbolic shape {tuple(m.x.shape)}", op)
        pads = window_pads(op)
        if any(pads) and flag(op, "exclude_padding_from_average"):
            return Refusal("padded edges do not count in the averages (exclude_padding_from_average)", op)
        axes: list[Links] = []
        for size, stride in zip(window, strides, strict=True):
            links = self.links(size, stride, op.op_type == "max_pool")
            if isinstance(links, Refusal):
                return links
            axes.append(links)
        for i, links in enumerate(axes):
            if max(pads[2 * i : 2 * i + 2]) >= max(links[0][0], 2):
                return Refusal(f"the edges are padded by {pads}, more than a pool of the chain is wide", op)
        return m.bind(axes=axes, pads=pads)

    def links(self, size: int, stride: int, largest: bool) -> Links | Refusal:
        """The chain of one axis, or why there is none."""
        if size <= self.most:
            return [(size, stride)]
        if stride == size and (factors := _factors(size, self.most)):
            return [(factor, factor) for factor in factors]
        if largest:
            steps, rest = divmod(size - 1, self.most - 1)
            chain = [(self.most, 1)] * steps + ([(rest + 1, 1)] if rest else [])
            return [*chain[:-1], (chain[-1][0], stride)]
        if stride != size:
            return Refusal(f"averages of {size} elements, {stride} apart, overlap")
        return Refusal(f"the window {size} has a prime factor above {self.most}")

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Pool after pool; axes with shorter chains end with windows of one element."""
        made: Var = m.x
        for i in range(max(map(len, m.axes))):
            links = [axis[i] if i < len(axis) else (1, 1) for axis in m.axes]
            pool: dict[str, Any] = {
                "kernel_sizes": [k for k, _ in links],
                "strides": [s for _, s in links],
                "pad_type": "valid",
            }
            if any(m.pads) and not i:  # the first pool sees the edges
                pool |= {"pad_type": "custom", "pad": m.pads}
            made = getattr(mb, m.root.op_type)(x=made, **pool)
        return made


def _factors(size: int, most: int) -> list[int]:
    """Factors up to `most`, large ones first; none where a prime is larger."""
    found = []
    while size > 1:
        factor = next((n for n in range(most, 1, -1) if size % n == 0), 0)
        if not factor:
            return []
        found.append(factor)
        size //= factor
    return found


def example() -> Program:
    """Averages of 40 x 40 elements."""

    @mb.program(input_specs=[mb.TensorSpec((1, 2, 80, 80))])
    def program(x: Var) -> Var:
        return mb.avg_pool(x=x, kernel_sizes=[40, 40], strides=[40, 40], pad_type="valid", name="y")

    return program
