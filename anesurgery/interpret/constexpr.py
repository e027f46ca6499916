"""Compressed weights (`constexpr_*`): decompressed by coremltools' own definition of each form."""

from __future__ import annotations

import numpy as np

from anesurgery.errors import InterpretError
from anesurgery.mil import Array, Operation


def decompress(op: Operation) -> Array:
    """The dense weight of a `constexpr_*` op.

    Raises:
        InterpretError: coremltools cannot decompress this form.
    """
    try:
        value = op.materialized_val_inference()
    except Exception as error:
        raise InterpretError(
            f"op {op.name}: {op.op_type} cannot be decompressed: {error}"
        ) from error
    return np.asarray(value)
