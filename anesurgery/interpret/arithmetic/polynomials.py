"""The arithmetic of a prime field: its constants, and what its rules are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.field import Image, add, divide, multiply, negated
from anesurgery.interpret.arithmetic.symbolic import LARGEST, Symbolic


class Algebraic(Symbolic):
    """Numbers of the field; the rules are in `algebraic`."""

    name = "field"
    span: Callable[[Any], tuple[float, float]] = staticmethod(lambda var: (-math.inf, math.inf))
    """Where an integer lies, by whoever knows."""

    def __init__(self, seed: int = 0, largest: int = LARGEST) -> None:
        super().__init__(seed, largest)
        self.primes = field.drawn(seed)
        self._whole: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        """Names of integers that were rounded, sorted, and the integers."""

    def within(self, var: Any, limit: float) -> bool:
        """Are all integers of a value known to be no larger than this?"""
        low, high = self.span(var)
        return -limit <= low and high <= limit

    def lift(self, value: Any) -> Image:
        """Numbers are themselves."""
        return Image(field.exact(self.primes, value), self.primes, 0)

    def rounded(self, dtype: str, x: Image) -> Image:
        """Integers as floats that may not hold them."""
        image = self.function(("rounded", dtype), x)
        order = field.packed(image).reshape(-1).sort()
        self._whole.append((order.values, [v.reshape(-1)[order.indices] for v in x.lanes]))
        return image

    def unrounded(self, x: Any) -> Any:
        """The integers that were rounded, where all elements are such; else the value itself."""
        if not isinstance(x, Image) or not x.numel():
            return x
        names = field.packed(x)
        for rounded, lanes in self._whole:
            at = torch.searchsorted(rounded, names.reshape(-1)).clamp(max=len(rounded) - 1).reshape(names.shape)
            if torch.equal(rounded[at], names):
                return Image([v[at] for v in lanes], x.primes, x.degree)
        return x

    def even(self, name: Any, x: Image) -> Image:
        """A random function with f(-x) = f(x)."""
        return self.function(name, field.signed(x)[0])

    def odd(self, name: Any, x: Image) -> Image:
        """A random function with f(-x) = -f(x)."""
        one, turned = field.signed(x)
        return field.with_sign(self.function(name, one), turned)

    def choose(self, cond: Image, x: Image, y: Image) -> Image:
        """The condition is 0 or 1."""
        return add(y, multiply(cond, add(x, negated(y))))

    def minus(self, x: Any, y: Any) -> Image:
        """X - y."""
        return add(self.image(x), negated(self.image(y)))

    def times(self, x: Any, y: Any) -> Image:
        """X y."""
        return multiply(self.image(x), self.image(y))

    def plus(self, x: Any, y: Any) -> Image:
        """X + y."""
        return add(self.image(x), self.image(y))

    def larger(self, x: Any, y: Any) -> Image:
        """(x + y + |x - y|) / 2."""
        return self.shared(add(self.plus(x, y), self.even("abs", self.minus(x, y))), 2)

    def smaller(self, x: Any, y: Any) -> Image:
        """(x + y - |x - y|) / 2."""
        return self.shared(add(self.plus(x, y), negated(self.even("abs", self.minus(x, y)))), 2)

    def shared(self, x: Image, counts: Any) -> Image:
        """X / counts, which are whole numbers above 0."""
        return Image(divide(x, self.lift(counts)).lanes, x.primes, x.degree, x.fraction)

    def root(self, x: Image) -> Image:
        """The square root, a random function."""
        return self.function("sqrt", x)

    def mean(self, x: Image, axes: list[int]) -> Image:
        """The mean over some axes, which stay."""
        count = math.prod(x.shape[a] for a in axes)
        return self.shared(field.summed(x, axes, True), count)

    def normalized(self, x: Image, axes: list[int], epsilon: float) -> Image:
        """Zero mean and unit variance over some axes."""
        centered = add(x, negated(self.mean(x, axes)))
        variance = self.mean(multiply(centered, centered), axes)
        return divide(centered, self.root(self.plus(variance, float(epsilon))))
