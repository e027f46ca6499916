"""Programs of blocks inside each other, and how many ops are looked at while something is done with one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from coremltools.converters.mil.mil.utils import CacheDoublyLinkedList

from anesurgery.mil import Program, Var, ct, mb


def branches(depth: int) -> Program:
    """Conditions in the first branch of each other; each branch reads a value from outside."""

    @mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        total = mb.reduce_sum(x=x, axes=[0, 1], keep_dims=False)
        positive = mb.greater(x=total, y=np.float32(0), name="positive")

        def level(n: int, value: Var) -> Any:
            if not n:
                return mb.relu(x=value)
            inner: Callable[[], Any] = lambda: level(n - 1, mb.add(x=value, y=np.float32(n)))  # noqa: E731
            return mb.cond(pred=positive, _true_fn=inner, _false_fn=lambda: mb.abs(x=x))

        return mb.identity(x=level(depth, x), name="y")

    return program


def loops(depth: int) -> Program:
    """Loops in the body of each other, which all end after one round."""

    @mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        def level(n: int, value: Var) -> Any:
            if not n:
                return mb.add(x=value, y=np.float32(1000))
            return mb.while_loop(_cond=small, _body=lambda v: (level(n - 1, deeper(n, v)),), loop_vars=(value,))

        def deeper(n: int, value: Var) -> Any:
            return mb.add(x=value, y=np.float32(n % 2))

        def small(value: Var) -> Any:
            return mb.less(x=mb.reduce_sum(x=value, axes=[0, 1], keep_dims=False), y=np.float32(1000))

        return mb.identity(x=level(depth, x), name="y")

    return program


def chain(length: int) -> Program:
    """Ops one after the other."""

    @mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        for n in range(length):
            x = mb.tanh(x=x) if n % 2 else mb.add(x=x, y=np.float32(n % 7))
        return mb.identity(x=x, name="y")

    return program


class TooManyError(AssertionError):
    """More ops were looked at than any walk of such a program needs."""


class Visits:
    """Counts the ops that walks over blocks come by."""

    def __init__(self, most: int) -> None:
        self.count, self.most = 0, most

    def one(self) -> None:
        self.count += 1
        if self.count > self.most:
            raise TooManyError(f"more than {self.most} ops were looked at")


@contextmanager
def visits(most: int = 10**9) -> Iterator[Visits]:
    """Count the ops looked at inside; raise `TooManyError` past `most`."""
    counted, each = Visits(most), CacheDoublyLinkedList.__iter__

    def told(self: Any) -> Iterator[Any]:
        for op in each(self):
            counted.one()
            yield op

    with mock.patch.object(CacheDoublyLinkedList, "__iter__", told):
        yield counted
