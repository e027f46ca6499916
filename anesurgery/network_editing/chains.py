"""Layers in a row, each of which is read by nobody but the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anesurgery.network_editing.network import Network, Node

T = TypeVar("T")


def chain_to(network: Network, node: Node, link: Callable[[Node], T | None]) -> list[tuple[Node, T]]:
    """The longest chain of links that ends with a layer, first layer first.

    Args:
        network: the network of the layer.
        node: the last layer of the chain.
        link: what a layer of one input and one output does, None if it cannot be part of the chain.
    """
    links: list[tuple[Node, T]] = []
    at: Node | None = node
    while at is not None and (what := _link(at, link)) is not None:
        links.append((at, what))
        at = sole_maker(network, at)
    return links[::-1]


def sole_maker(network: Network, node: Node) -> Node | None:
    """The layer that makes the first input of another, which alone reads it.

    None too if a blob that the former reads is overwritten later, so that it cannot be read in its place.
    """
    blob = node.inputs[0]
    maker = network.maker(blob) if network.only_reader(blob, node) else None
    return maker if maker is not None and all(map(network.plain, maker.inputs)) else None


def _link(node: Node, link: Callable[[Node], T | None]) -> T | None:
    return link(node) if len(node.inputs) == len(node.outputs) == 1 else None
