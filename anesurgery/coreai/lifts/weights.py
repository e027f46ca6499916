"""Lift constants, and weights in a compressed form."""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.coreai.dtypes import bits_of, name_of
from anesurgery.coreai.lifts.table import TABLE, Site, Unliftable, Value, as_var, is_fixed, lift, sizes_of
from anesurgery.mil import is_stored, mb, types


def _as_stored(o: Site, i: int) -> Value:
    """Return an operand as it is stored, in the dtype that tells coremltools its bits."""
    value, name = o.operands[i], name_of(o.scope.types[o.op["operands"][i]]["dtype"])
    if not isinstance(value, np.ndarray):
        if is_stored(value):
            return value
        raise Unliftable(f"operand {i} is computed; MIL decompresses constants alone")
    if bits_of(name) < 8:
        return value.view(types.nptype_from_builtin(types.string_to_builtin(name)))
    return value


@lift("blockwise_shift_scale")
def blockwise_shift_scale(o: Site) -> Value:
    """Build integers with a scale and an offset for each block."""
    if np.any(o.numbers(3)):
        raise Unliftable("it adds an offset after the scale, which MIL's form has not")
    offset = {"offset": _as_stored(o, 2)} if np.any(o.numbers(2)) else {}
    return mb.constexpr_blockwise_shift_scale(data=_as_stored(o, 0), scale=_as_stored(o, 1), **offset)


@lift("lut_to_dense")
def lut_to_dense(o: Site) -> Value:
    """Build indices into a table of numbers, or of vectors along an axis."""
    lut = _as_stored(o, 1)
    axis = {"vector_axis": o.integer(2)} if sizes_of(lut)[-1] > 1 else {}
    return mb.constexpr_lut_to_dense(indices=_as_stored(o, 0), lut=lut, **axis)


@lift("quantize", "dequantize")
def quantize(o: Site) -> Value:
    """Build a quantization to 8 bits or back, with one scale or one for each channel."""
    if np.any(o.numbers(3)):
        raise Unliftable("it shifts by a least value, which MIL's form does not")
    scale, point = o.numbers(1), o.operands[2]
    if not isinstance(point, np.ndarray):
        raise Unliftable("its zero point is computed, and MIL takes a constant there")
    per_axis = o.numbers(4).ndim == 0 and scale.ndim == 1
    how: dict[str, Any] = {"scale": scale[()], "axis": o.axes(4)[0] if per_axis else None}
    how |= {"zero_point": point[()]} if np.any(point) else {}
    how = {k: v for k, v in how.items() if v is not None}
    if o.op["kind"] == "dequantize":
        return mb.dequantize(input=as_var(o.operands[0]), **how)
    kind = o.result["dtype"]
    if kind not in ("si8", "ui8") or not is_fixed(o[0]):
        raise Unliftable(f"MIL quantizes to 8 bits, and this to {kind}")
    return mb.quantize(input=o[0], output_dtype="int8" if kind == "si8" else "uint8", **how)


TABLE |= {
    "constant": lambda o: o.scope.constant(o.attribute("value")),
    "build_sparse_with_bitmask": lambda o: mb.constexpr_sparse_to_dense(
        nonzero_data=o.numbers(0), mask=_as_stored(o, 1)
    ),
    "sparse_with_bitmask_to_dense": lambda o: o[0],  # it is dense where the sparse form was built
}
