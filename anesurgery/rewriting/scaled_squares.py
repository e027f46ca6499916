"""Squares that overflow in fp16, of numbers that are divided by a unit first: what such passes share."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anesurgery import fp16
from anesurgery.checking.grades import REASSOCIATED
from anesurgery.errors import NO_MATCH, Refusal
from anesurgery.facts.sums_of_squares import LEAST, is_scaled
from anesurgery.mil import Operation, Var, np_dtype, static_shape
from anesurgery.regions.root_norms import RootNorm, by_largest, cannot_overflow, root_norm
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.passes import option
from anesurgery.rewriting.pattern import Match
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.semantics.reading import ints


@dataclass(frozen=True)
class LargeSquares(Rewrite, abstract=True):
    """A pass over fp16 numbers whose squares may overflow."""

    tolerates_nonfinite = False
    """An infinity makes a NaN of all that is divided by it."""
    magnitude = fp16.LARGEST
    """The values are of fp16; beyond it, the old form overflows in fp32 too."""
    shares_inner = True


@dataclass(frozen=True)
class ScaledSquares(LargeSquares, abstract=True):
    """A pass that divides numbers by a unit, of the largest magnitude of their row, before it squares them."""

    static = True
    tolerance = REASSOCIATED

    @staticmethod
    def applies(inner: Var, values: Sequence[Var]) -> bool:
        """Is it computed in fp16, and are the numbers not divided so already?"""
        return np_dtype(inner) == np.float16 and not all(map(is_scaled, values))

    @staticmethod
    def averaged(total: Operation | None) -> int:
        """How many squares a reduction takes the mean of; 1 where there is none, or it is a sum."""
        shape = None if total is None else static_shape(total.x)
        if total is None or shape is None or total.op_type != "reduce_mean":
            return 1
        return math.prod(int(shape[axis]) for axis in ints(total, "axes"))

    @staticmethod
    def floor(guard: float) -> float:
        """The least number that is divided by: a power of two, below the root of what guards the sum.

        Args:
            guard: what is added to the sum, or what it is clipped from below with; 0 for none.
        """
        return max(LEAST, 2.0 ** math.floor(math.log2(guard) / 2) if guard else 0.0)

    @staticmethod
    def largest(mb: Builder, values: Sequence[Var], axes: Sequence[int]) -> Var:
        """The largest magnitude of several values in each place, and over axes that stay with size 1."""
        sizes = [mb.abs(x=value) for value in values]
        size: Var = functools.reduce(lambda a, b: mb.maximum(x=a, y=b), sizes)
        return mb.reduce_max(x=size, axes=list(axes), keep_dims=True) if axes else size

    @staticmethod
    def summed_squares(mb: Builder, values: Sequence[Var], unit: Var) -> Var:
        """The squares of several values over a unit, added up."""
        squares = [mb.square(x=mb.real_div(x=value, y=unit)) for value in values]
        return functools.reduce(lambda a, b: mb.add(x=a, y=b), squares)


@dataclass(frozen=True)
class NormForm(LargeSquares, abstract=True):
    """A norm whose squares may overflow in fp16, of numbers up to 1 or as a layer norm."""

    kinds = frozenset({"mul", "real_div"})
    """What ends such a norm."""
    follows = ("compute_fp16", "scale_ranges", "channels_first")
    centred: ClassVar[bool]
    """Does the norm take the mean away?"""
    form: str = option("largest", among=("largest", "layer_norm"))
    """Either "largest", or "layer_norm"."""
    only: tuple[str, ...] = ()
    """Names of the squares in the norms that are meant; all by default."""

    def check(self, m: Match) -> Match | Refusal:
        """Is it such a norm, and may its squares overflow?"""
        norm = root_norm(m.root)
        if norm is None or norm.centred != self.centred or not self.means(norm):
            return NO_MATCH
        if (refusal := cannot_overflow(norm)) is not None:
            return refusal
        return m.bind(ops=norm.ops, norm=norm)

    def means(self, norm: RootNorm) -> bool:
        """Is the norm among those that are meant?"""
        return not self.only or any(v.name in self.only for op in norm.ops for v in op.outputs)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The norm in the other form."""
        return by_largest(mb, m.norm) if self.form == "largest" else self.layer_norm(mb, m.norm)

    def layer_norm(self, mb: Builder, norm: RootNorm) -> Var:
        """The norm by the op of that name."""
        raise NotImplementedError
