"""A scale and a shift that broadcast one channel to many are no batch norm.

coremltools fuses `mul` and `add` of constants into a `batch_norm` by the constants' shapes alone: an x of one
channel then keeps one, and the conversion fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anesurgery.mil import is_symbolic


def register() -> None:
    """Fuse a scale and a shift only where x has their channels; doing it again changes nothing."""
    from coremltools.converters.mil.mil.passes.defs.optimize_elementwise_binary import (
        fuse_elementwise_to_batchnorm,
    )

    host = fuse_elementwise_to_batchnorm._try_to_transform
    if host.__module__ != __name__:
        fuse_elementwise_to_batchnorm._try_to_transform = staticmethod(_with_the_same_channels(host))


def _with_the_same_channels(host: Callable[[Any, Any, Any], bool]) -> Callable[[Any, Any, Any], bool]:
    def try_to_transform(mul_op: Any, add_op: Any, block: Any) -> bool:
        before, after = mul_op.outputs[0].shape, add_op.outputs[0].shape
        x = mul_op.x if mul_op.x.val is None else mul_op.y
        sizes = [shape[-3] for shape in (x.shape, before, after) if len(shape) == 4]
        constants = [
            v.shape[-3] for op in (mul_op, add_op) for v in (op.x, op.y) if v.val is not None and v.rank > 2
        ]
        static = [n for n in (*sizes, *constants) if not is_symbolic(n)]
        return len(set(static)) <= 1 and host(mul_op, add_op, block)

    return try_to_transform
