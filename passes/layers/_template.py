"""One sentence: which layers become what.

(A template: copy it to passes/layers/<name>.py, rename the class, and write
tests/passes/layers/test_<name>.py.)

Before::

    network(%x: 1x2x3x3) {
      %r: 1x2x3x3 = activation(%x, ReLU={})
      %y: 1x2x3x3 = activation(%r, ReLU={})
      return %y
    }

After::

    network(%x: 1x2x3x3) {
      %y: 1x2x3x3 = activation(%x, ReLU={})
      return %y
    }

Refuses when ... (every guard below, in words; the driver refuses shapes that are not known).

Why it helps: what was seen of such layers on which chip and OS, by whom; or "not measured".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site


@dataclass(frozen=True)
class Template(LayerRewrite):
    """ReLU of ReLU becomes ReLU."""

    name = "template"  # the name of the file
    kinds = frozenset({"activation"})  # the layer types to look at
    most_axes: int = 5
    """Options are fields, each with a default and a line about it."""

    def rewrite(self, site: Site) -> Refusal | None:
        """Guards, each with the value that it found; then the new layers, the last with the old outputs."""
        (x,) = site.inputs
        inner = site.network.maker(x, "activation")
        if not _is_relu(site.node) or inner is None or not _is_relu(inner):
            return None  # does not apply
        if len(shape := site.shape(x)) > self.most_axes:
            return Refusal(f"{x!r} has {len(shape)} axes, above {self.most_axes}")
        site.emit("activation", inner.inputs, site.outputs, ReLU={})
        return None


def _is_relu(node: Any) -> bool:
    return str(node.params.WhichOneof("NonlinearityType")) == "ReLU"


def example() -> Any:
    """The smallest network on which the pass acts: the sketch above is its text."""
    layers = [
        an.make_layer("activation", ["x"], ["r"], ReLU={}),
        an.make_layer("activation", ["r"], ["y"], ReLU={}),
    ]
    return an.make_network({"x": (1, 2, 3, 3)}, layers, ["y"])
