"""Split a convolution of several images with run-time weights into one convolution for each image.

Before::

    main(%x: 2x1x4x4, %w: 1x1x3x3) {
      %y: 2x1x2x2 = conv(x=%x, weight=%w)
      return %y
    }

After::

    main(%x: 2x1x4x4, %w: 1x1x3x3) {
      %y_images_0: 1x1x4x4, %y_images_1: 1x1x4x4 = split(x=%x, num_splits=2, axis=0)
      %y_image: 1x1x2x2 = conv(x=%y_images_0, weight=%w)
      %y_image_1: 1x1x2x2 = conv(x=%y_images_1, weight=%w)
      %y: 2x1x2x2 = concat(values=(%y_image, %y_image_1), axis=0)
      return %y
    }

Refuses when the number of images is symbolic or above `most_images`.

Why it helps: run-time weights and more than one image made the compiler crash on M1 and were ignored on M3 Max
(reported, tables of the compiler); through Core ML a single image was placed on an M4 (measured, macOS 27.0.1).

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb


@dataclass(frozen=True)
class ConvolveEachImage(Rewrite):
    """`conv` with dynamic weights, image by image."""

    name = "convolve_each_image"
    kinds = frozenset({"conv"})
    most_images: int = 16
    """Most images that are taken apart."""

    def check(self, m: Match) -> Match | Refusal:
        """Match run-time weights over several images."""
        count = m.x.shape[0]
        if an.is_stored(m.weight) or count == 1:
            return an.NO_MATCH
        if an.is_symbolic(count):
            return Refusal(f"%{m.x.name} holds {count} images", m.root)
        if int(count) > self.most_images:
            return Refusal(f"there are {count} images, above {self.most_images}", m.root)
        return m.bind(count=int(count))

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Convolve each image, and concatenate the results."""
        name = m.root.outputs[0].name
        inputs = an.op_inputs(m.root)
        images = mb.split(x=m.x, num_splits=m.count, axis=0, name=f"{name}_images")
        results = [mb.conv(**{**inputs, "x": image}, name=f"{name}_image") for image in images]
        return mb.concat(values=results, axis=0)


@an.example((2, 1, 4, 4), (1, 1, 3, 3))
def example(x: Var, w: Var) -> Var:
    """Two images, and a kernel that is an input."""
    return mb.conv(x=x, weight=w, name="y")
