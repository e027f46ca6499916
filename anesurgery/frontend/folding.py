"""`torch.nn.functional.fold` as a transposed convolution: overlaps, dilation, padding and remainders.

coremltools folds windows that tile the padded image; it gathers, and refuses the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.frontend.arguments import Convert, inputs_of, known_value
from anesurgery.mil import Array, is_symbolic, mb, np_dtype


def folding(host: Convert) -> Convert:
    """`fold(x, output_size, kernel_size, dilation, padding, stride)`: elements at one place are added."""

    def col2im(context: Any, node: Any) -> None:
        x, *numbers = inputs_of(context, node)[:6]
        size, kernel, dilation, padding, stride = (np.resize(known_value(v), 2).astype(int) for v in numbers)
        tiled = (dilation == 1).all() and (stride >= kernel).all() and not ((size + 2 * padding) % stride).any()
        if tiled and x.rank == 3:
            host(context, node)
            return
        if any(map(is_symbolic, x.shape)):
            raise NotImplementedError(f"{node.name}: fold of a dynamic shape {x.shape}")
        span = dilation * (kernel - 1) + 1
        count = (size + 2 * padding - span) // stride + 1
        channels = int(x.shape[-2])
        windows = mb.reshape(x=x, shape=[-1, channels, *count])
        image = mb.conv_transpose(
            x=windows,
            weight=_one_place_each(channels, kernel, np_dtype(x)),
            strides=stride,
            dilations=dilation,
            groups=int(channels // kernel.prod()),
            pad_type="valid",
        )
        ends = np.maximum(size + 2 * padding - ((count - 1) * stride + span), 0)
        if ends.any():
            image = mb.pad(
                x=image, pad=[0, 0, 0, 0, 0, int(ends[0]), 0, int(ends[1])], constant_val=np_dtype(x).type(0)
            )
        shape = [int(image.shape[0]), int(image.shape[1]), *map(int, size)]
        image = mb.slice_by_size(x=image, begin=[0, 0, *padding], size=shape)
        context.add(mb.reshape(x=image, shape=shape[3 - x.rank :], name=node.name))

    return col2im


def _one_place_each(channels: int, kernel: Array, dtype: np.dtype[Any]) -> Array:
    """The weight of a transposed convolution that puts each channel to its place in the window."""
    places = int(kernel.prod())
    one = np.eye(places, dtype=dtype).reshape(places, 1, *kernel)
    return np.tile(one, (channels // places, 1, 1, 1))
