"""Rewrite in-place writes through views: `x[..., 0] = y`, `x[:, 1] += y`, `x.view(-1)[3:] *= y`.

A trace takes the view by `select`, `slice` and the like, and then writes into it. coremltools assumes that the
i-th of these is for axis i, whichever axis it names. It loses what ops other than `copy_` and `fill_` write,
and what is written through other views. Here each write becomes an ordinary op, and its result is put back into
the tensors that the views were taken from, from the innermost outwards. A buffer that is overwritten as a
whole, such as rotary frequencies, is replaced by the new value from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from anesurgery.frontend.arguments import dtype_of, inputs_of, known_value
from anesurgery.mil import mb

CUTTING = ("select", "slice")
"""Views of a part of a tensor; coremltools itself can fill one of these."""
COPYING = ("reshape", "flatten", "reshape_as")
"""Views of an ordinary tensor; copies of a tensor that is itself a view."""
SHAPING = ("view", "view_as", "unflatten", "squeeze", "unsqueeze", *COPYING)
"""Views with the same elements in the same order; a reshape to the old shape undoes them."""
TURNING = ("t", "numpy_t", "transpose", "swapaxes", "swapdims", "mt")
"""Views that exchange two axes; the same exchange undoes them."""
VIEWS = (*CUTTING, *SHAPING, *TURNING, "narrow")
LISTS = ("chunk", "constantchunk", "split", "split_with_sizes", "tensor_split", "unbind", "listunpack")
OTHER_VIEWS = (*LISTS, "permute", "movedim", "diagonal", "expand")
"""Views through which a write is refused."""
ANY_VIEW = (*VIEWS, *OTHER_VIEWS)
COPIES = ("copy_", "fill_")
FRESH = ("empty", *CUTTING)
"""Operations whose results coremltools itself lets a copy fill, also downstream of a cast."""

Nodes = dict[str, Any]
GraphPass = Callable[[Any], None]


def write_through_views() -> None:
    """Replace writes into views before coremltools fuses assignments; a second call changes nothing."""
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
    """Replace the writes that coremltools would misplace or lose.

    Raises:
        NotImplementedError: a value is written through a view that cannot be undone, and is read afterwards.
    """
    producers = {name: node for node in graph.nodes for name in node.outputs}
    copied = {node.inputs[1] for node in graph.nodes if node.kind == "copy_"}
    behind = _read_behind(graph, producers)
    latest: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        node.inputs = [latest.get(name, name) for name in node.inputs]
        if not _writes(node):
            nodes.append(node)
            continue
        views = _views(node.inputs[0], producers)
        is_read = node.outputs[0] in behind
        if is_read:
            _refuse_lost(node, views, producers)
        if node.kind in COPIES:
            filled = all(view.kind in CUTTING for view in views) and _in_order(views, producers)
            misplaced = not filled or not (views or _is_fresh(node.inputs[0], producers))
        else:
            misplaced = bool(views) and node.outputs[0] not in copied and is_read
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


def _is_fresh(name: str, producers: Nodes) -> bool:
    """Was a tensor made to be filled? A cast that changes nothing is what it was made of."""
    while name in producers and producers[name].kind == "to":
        name = producers[name].inputs[0]
    return name in producers and producers[name].kind in FRESH


def _views(name: str, producers: Nodes) -> list[Any]:
    """The views from a tensor to this value, the outermost first."""
    outermost_first: list[Any] = []
    while _is_view(name, producers, VIEWS):
        outermost_first.insert(0, producers[name])
        name = producers[name].inputs[0]
    return outermost_first


def _is_view(name: str, producers: Nodes, kinds: tuple[str, ...]) -> bool:
    if name not in producers or producers[name].kind not in kinds:
        return False
    before = producers[name].inputs[0]
    copies = producers[name].kind in COPYING and before in producers
    return not (copies and producers[before].kind in ANY_VIEW)


def _read_behind(graph: Any, producers: Nodes) -> set[str]:
    """What writes in place into a view, where a tensor that it is a view of is read later."""
    last_read = {name: place for place, node in enumerate(graph.nodes) for name in node.inputs}
    last_read |= dict.fromkeys(graph.outputs, len(graph.nodes))
    writing = [(place, node) for place, node in enumerate(graph.nodes) if _writes(node)]
    return {
        node.outputs[0]
        for place, node in writing
        if any(last_read[name] > place for name in _bases(node.inputs[0], producers))
    }


def _bases(name: str, producers: Nodes) -> list[str]:
    """The tensors that a value is a view of."""
    found = []
    while _is_view(name, producers, ANY_VIEW):
        name = producers[name].inputs[0]
        found.append(name)
    return found


def _refuse_lost(node: Any, views: list[Any], producers: Nodes) -> None:
    """Raise where what is written would be lost: the numbers would be wrong without a word."""
    name = views[0].inputs[0] if views else node.inputs[0]
    if not _is_view(name, producers, OTHER_VIEWS):
        return
    if producers[name].kind == "listunpack":
        name = producers[name].inputs[0]
    raise NotImplementedError(
        f"{node.kind} writes in place through {producers[name].kind}, and the tensor behind it is read later: "
        f"write a new tensor, or into a slice"
    )


def _in_order(views: list[Any], producers: Nodes) -> bool:
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
        yield _like(node, *_undone(view, tensor, value), written_name)
        latest |= {old: written_name for old, new in latest.items() if new == tensor} | {
            name: written_name,
            tensor: written_name,
        }
        value = written_name
    latest[views[-1].outputs[0] if views else node.inputs[0]] = written


def _undone(view: Any, tensor: str, value: str) -> tuple[str, list[str]]:
    """The operation that puts a value back into the tensor of which the view was taken, and its inputs."""
    if view.kind in SHAPING:
        return "reshape_as", [value, tensor]
    if view.kind in TURNING:
        return view.kind, [value, *view.inputs[1:]]
    return f"{view.kind}_scatter", [tensor, value, *view.inputs[1:]]


def _like(node: Any, kind: str, inputs: list[str], output: str) -> Any:
    from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRNode

    return InternalTorchIRNode(
        kind=kind, inputs=inputs, outputs=[output], blocks=[], model_hierarchy=node.model_hierarchy
    )


def narrow_scatter(context: Any, node: Any) -> None:
    """Puts a part back into x: `narrow_scatter(x, part, axis, first, length)`, of ours."""
    x, part = inputs_of(context, node)[:2]
    axis, first, length = (int(known_value(v)) for v in inputs_of(context, node)[2:5])
    axis, first = axis % x.rank, first % int(x.shape[axis])
    kept = []
    for begin, end in ((0, first), (first + length, int(x.shape[axis]))):
        ends = (
            [begin if i == axis else 0 for i in range(x.rank)],
            [end if i == axis else 0 for i in range(x.rank)],
        )
        whole = [i != axis for i in range(x.rank)]
        sides = {"begin": ends[0], "end": ends[1], "begin_mask": whole, "end_mask": whole}
        kept.append([mb.slice_by_index(x=x, **sides)] if begin < end else [])
    cast = part if part.dtype == x.dtype else mb.cast(x=part, dtype=dtype_of(x))
    context.add(mb.concat(values=[*kept[0], cast, *kept[1]], axis=axis, name=node.name))
