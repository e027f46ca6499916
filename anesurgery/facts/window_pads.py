"""How many elements a convolution or a pool pads before and after each spatial axis, whatever its padding is called."""

from __future__ import annotations

from anesurgery.facts.reading import ints
from anesurgery.mil import Operation, constant


def window_pads(op: Operation) -> list[int]:
    """The padding of a conv or pool of static shape: before and after each spatial axis in turn."""
    kind, spatial = str(constant(op.inputs.get("pad_type")) or "valid"), len(op.x.shape) - 2
    if kind == "custom":
        return ints(op, "pad") or [0] * 2 * spatial
    if kind == "valid":
        return [0] * 2 * spatial
    window = ints(op, "kernel_sizes") or [int(d) for d in op.weight.shape[2:]]
    strides, dilations = (ints(op, n) or [1] * spatial for n in ("strides", "dilations"))
    found = []
    for i in range(spatial):
        reach = dilations[i] * (window[i] - 1) + 1
        length, made = int(op.x.shape[2 + i]), int(op.outputs[0].shape[2 + i])
        total = max((made - 1) * strides[i] + reach - length, 0)
        less, more = total // 2, total - total // 2
        found += [more, less] if kind == "same_lower" else [less, more]
    return found
