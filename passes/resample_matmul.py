"""Replace a crop, an affine map or a resampling with constant coordinates by a product with a constant matrix.

Before::

    main(%x: 1x2x4x4) {
      %y: 1x2x2x2 = crop_resize(x=%x, boxes=[[0, 1, 2, 3]], target_height=2, target_width=2)
      return %y
    }

After::

    main(%x: 1x2x4x4) {
      %y_resample_matmul_reshape: 1x2x16 = reshape(x=%x, shape=[1, 2, 16])
      %y_resample_matmul_matmul: 1x2x4 = matmul(x=%y_resample_matmul_reshape, y=const<1x16x4>)
      %y: 1x2x2x2 = reshape(x=%y_resample_matmul_matmul, shape=[1, 2, 2, 2])
      return %y
    }

Each output pixel is a weighted sum of input pixels, and the weights depend on the coordinates alone. The
interpreter computes them: it runs the op on images with a single 1. If pixels outside the image have a value,
that value is added.

Refuses when coordinates or shapes are dynamic, for batches of several images, for integers, and when the matrix
would have more than `most_numbers` numbers (the refusal says how many).

Why it helps: crop_resize ran on the CPU alone (measured through Core ML on M4, macOS 27); by the tables of the
compiler the older generations have no texture unit (reported). A product with a dense matrix reads all pixels
for each output pixel: that pays for small images only, and was not measured. It needs finite numbers.

Grade: checked: resampling is opaque in the field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery import interpret
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb


@dataclass(frozen=True)
class ResampleMatmul(Rewrite):
    """`crop_resize`, `resample` and `affine` at constant places as products."""

    name = "resample_matmul"
    kinds = frozenset({"crop_resize", "resample", "affine"})
    tolerance = an.REASSOCIATED
    tolerates_nonfinite = False
    """Pixels that do not count are multiplied by 0."""
    most_numbers: int = an.option(1 << 22, least=1)
    """Most numbers of the matrix."""

    def check(self, m: Match) -> Match | Refusal:
        """Match constant places in one image, if the matrix is not too large."""
        op, shape, out = m.root, an.static_shape(m.x), an.static_shape(m.root.outputs[0])
        if shape is None or out is None:
            return Refusal(f"%{m.x.name} has the symbolic shape {tuple(m.x.shape)}", op)
        dynamic = [v.name for name, v in an.operands(op) if name != "x" and an.constant(v) is None]
        if dynamic:
            return Refusal(f"%{dynamic[0]} is dynamic", op)
        if shape[0] != 1:
            return Refusal(f"%{m.x.name} holds {shape[0]} images", op)
        if an.np_dtype(m.x).kind != "f":
            return Refusal(f"%{m.x.name} holds integers", op)
        read, boxes, made = math.prod(shape[2:]), out[0], math.prod(out[-2:])
        if (numbers := read * boxes * made) > self.most_numbers:
            words = f"{boxes} x {read} x {made} = {numbers} numbers"
            return Refusal(f"the matrix would have {words}, above {self.most_numbers}", op)
        return m.bind(seen=(1, shape[1], read), boxes=boxes, made=made)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Multiply the pixels of each channel by the matrix."""
        op, dtype = m.root, an.np_dtype(m.x)
        weights, outside = _weights(op, m.boxes, m.made)
        pixels = mb.reshape(x=m.x, shape=list(m.seen))
        sums = mb.matmul(x=pixels, y=mb.const(val=weights.astype(dtype)))
        if outside.any():
            sums = mb.add(x=sums, y=outside.astype(dtype))
        return mb.reshape(x=sums, shape=[int(d) for d in op.outputs[0].shape])


def _weights(op: an.Operation, boxes: int, pixels: int) -> tuple[an.Array, an.Array]:
    """Return the matrix [box, pixel read, pixel made], and the result for an image of zeros."""
    import torch

    height, width = (int(d) for d in op.x.shape[2:])
    count = height * width
    images = torch.cat([torch.eye(count).reshape(1, count, height, width), torch.zeros(1, 1, height, width)], 1)
    (resampled,) = interpret.evaluate([op], {op.x: images}, op.outputs)
    every = np.asarray(resampled.float().numpy()).reshape(boxes, count + 1, pixels)
    outside = every[:, count:]
    return every[:, :count] - outside, outside


@an.example((1, 2, 4, 4), opset="iOS17")
def example(x: Var) -> Var:
    """A box of an image, with as many pixels."""
    box = np.array([[0.0, 1.0, 2.0, 3.0]], np.float32)
    return mb.crop_resize(
        x=x, boxes=box, box_indices=np.zeros(1, np.int32), target_height=2, target_width=2, name="y"
    )
