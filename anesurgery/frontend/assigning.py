"""What a trace writes in place into a view, `x[..., 0] = y` or `x[:, 1] += y`.

A trace takes the view by `select` and `slice`, each naming an axis, and then writes into it. coremltools takes
the i-th of these for axis i whichever it names, and loses what other ops than `copy_` and `fill_` write. Both
become what they are without views: `select_scatter` and `slice_scatter`, from the innermost view outwards. A
whole buffer that is overwritten, as the frequencies of rotary positions are, is what was written from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

VIEWS = ("select", "slice")
COPIES = ("copy_", "fill_")
FRESH = ("empty", *VIEWS)
"""What coremltools itself lets a copy fill, also behind a cast."""

GraphPass = Callable[[Any], None]


def register() -> None:
    """Do it before coremltools fuses assignments; doing it again changes nothing."""
    from coremltools.converters.mil.frontend.torch import converter

    host = converter.generate_tensor_assignment_ops
    if host.__module__ != __name__:
        converter.generate_tensor_assignment_ops = _after_scatters(host)


def _after_scatters(host: GraphPass) -> GraphPass:
    def generate_tensor_assignment_ops(graph: Any) -> None:
        scatter_views(graph)
        host(graph)

    return generate_tensor_assignment_ops


def scatter_views(graph: Any) -> None:
    """Replace the writes that coremltools would misplace or lose."""
    producers = {name: node for node in graph.nodes for name in node.outputs}
    copied = {node.inputs[1] for node in graph.nodes if node.kind == "copy_"}
    latest: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        node.inputs = [latest.get(name, name) for name in node.inputs]
        if not _writes(node):
            nodes.append(node)
            continue
        views = _views(node.inputs[0], producers)
        if node.kind in COPIES:
            misplaced = not (views or _is_fresh(node.inputs[0], producers)) or not _in_order(views, producers)
        else:
            misplaced = bool(views) and node.outputs[0] not in copied
        if not misplaced:
            nodes.append(node)
            continue
        for scattered in _scattered(node, views, latest):
            nodes.append(scattered)
            producers |= dict.fromkeys(scattered.outputs, scattered)
    graph.nodes = nodes
    graph.outputs = [latest.get(name, name) for name in graph.outputs]


def _writes(node: Any) -> bool:
    """Does it write into its first operand, as torch's names with a final underscore say?"""
    return bool(node.inputs) and node.kind.endswith("_") and not node.kind.endswith("__")


def _is_fresh(name: str, producers: dict[str, Any]) -> bool:
    """Was a tensor made to be filled? A cast that changes nothing is what it was made of."""
    while name in producers and producers[name].kind == "to":
        name = producers[name].inputs[0]
    return name in producers and producers[name].kind in FRESH


def _views(name: str, producers: dict[str, Any]) -> list[Any]:
    """The views from a tensor to this value, the outermost first."""
    outermost_first: list[Any] = []
    while name in producers and producers[name].kind in VIEWS:
        outermost_first.insert(0, producers[name])
        name = producers[name].inputs[0]
    return outermost_first


def _in_order(views: list[Any], producers: dict[str, Any]) -> bool:
    """Is the i-th view that of axis i? Each selection before it has removed an axis."""
    selected = 0
    for i, view in enumerate(views):
        axis = producers[view.inputs[1]].attr["value"] if view.inputs[1] in producers else None
        if axis is not None and axis + selected != i:
            return False
        selected += view.kind == "select"
    return True


def _scattered(node: Any, views: list[Any], latest: dict[str, str]) -> Iterator[Any]:
    """The nodes that compute what is written, and what each tensor is afterwards."""
    written = node.outputs[0]
    if node.kind in COPIES:
        kind = "expand_as" if node.kind == "copy_" else "full_like"
        operands = node.inputs[1::-1] if kind == "expand_as" else node.inputs[:2]
        yield _like(node, kind, list(operands), written)
    else:
        yield node
    value = written
    for view in reversed(views):
        name = view.inputs[0]
        tensor = latest.get(name, name)
        written_name = f"{tensor}_with_{written}"
        yield _like(node, f"{view.kind}_scatter", [tensor, value, *view.inputs[1:]], written_name)
        latest |= {old: written_name for old, new in latest.items() if new == tensor} | {
            name: written_name,
            tensor: written_name,
        }
        value = written_name
    latest[views[-1].outputs[0] if views else node.inputs[0]] = written


def _like(node: Any, kind: str, inputs: list[str], output: str) -> Any:
    from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRNode

    return InternalTorchIRNode(
        kind=kind, inputs=inputs, outputs=[output], blocks=[], model_hierarchy=node.model_hierarchy
    )
