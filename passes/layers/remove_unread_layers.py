"""Remove the layers that no output of the network depends on.

Before::

    network(%x: 1x2x4x4) {
      %left: 2x1x1 = loadConstantND(shape=[2, 1, 1], data=[2, 3])
      %abs: 1x2x4x4 = unary(%x, type=ABS)
      %more: 1x2x4x4 = activation(%abs, ReLU={})
      %y: 1x2x4x4 = activation(%x, ReLU={})
      return %y
    }

After::

    network(%x: 1x2x4x4) {
      %y: 1x2x4x4 = activation(%x, ReLU={})
      return %y
    }

Refuses when a layer holds networks of its own (a branch, a loop): what it does inside is not looked at. A layer
that makes a blob which such a network speaks of stays for the same reason.

Why it helps: a smaller file and less work. That Core ML does not remove them by itself was not measured.
Exact: the outputs do not read them.

Grade: none: no output depends on what goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anesurgery import authoring as an
from anesurgery.authoring import LayerPass, Session


@dataclass(frozen=True)
class RemoveUnreadLayers(LayerPass):
    """Layers that no output depends on go, constants above all."""

    name = "remove_unread_layers"
    follows = ("*",)  # they leave layers that nobody reads

    def run(self, network: an.Network, session: Session) -> None:
        """Remove them from the last to the first."""
        for node in network.remove_unread():
            words = "no output depends on it"
            session.changes.append(an.Change(self.name, node.name, (str(node),), (), unchecked=words))


def example() -> Any:
    """A constant and two layers in a row that nobody reads."""
    layers = [
        an.make_constant("left", [[[2]], [[3]]]),
        an.make_layer("unary", ["x"], ["abs"], type="ABS"),
        an.make_layer("activation", ["abs"], ["more"], ReLU={}),
        an.make_layer("activation", ["x"], ["y"], ReLU={}),
    ]
    return an.make_network({"x": (1, 2, 4, 4)}, layers, ["y"])
