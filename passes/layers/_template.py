"""A template: copy its class into the file of this folder that it belongs to, or into a new one, and rename it.

The docstring of the class is its documentation. A sketch of more than a few lines stands in
`sketches/<name>.txt`, which `python tests/support/sketches.py NAME` writes; the tests of the class are
tests/passes/layers/test_<name>.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anesurgery.authoring import Refused
from anesurgery.network_editing.layer_pass import LayerRewrite, Site


@dataclass(frozen=True)
class Template(LayerRewrite):
    """ReLU of ReLU becomes ReLU.

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

    Grade: bit for bit.
    """

    name = "template"  # the class is found by it
    kinds = frozenset({"activation"})  # the layer types to look at
    most_axes: int = 5
    """Options are fields, each with a default and a line about it."""

    def rewrite(self, site: Site) -> None:
        """Guards, each with the value that it found; then the new layers, the last with the old outputs."""
        (x,) = site.inputs
        inner = site.network.maker(x, "activation")
        if not _is_relu(site.node) or inner is None or not _is_relu(inner):
            return  # does not apply
        if len(shape := site.shape(x)) > self.most_axes:
            raise Refused(f"{x!r} has {len(shape)} axes, above {self.most_axes}")
        site.emit("activation", inner.inputs, site.outputs, ReLU={})


def _is_relu(node: Any) -> bool:
    return str(node.params.WhichOneof("NonlinearityType")) == "ReLU"
