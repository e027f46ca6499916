"""Rewrite in-place writes through views: `x[..., 0] = y`, `x[:, 1] += y`, `x.view(-1)[3:] *= y`.

A trace takes the view by `select`, `slice` and the like, and then writes into it. coremltools assumes that the
i-th of these is for axis i, whichever axis it names. It loses what ops other than `copy_` and `fill_` write,
and what is written through other views. Here each write becomes an ordinary op, and its result is put back into
the tensors that the views were taken from, from the innermost outwards. A buffer that is overwritten as a
whole, such as rotary frequencies, is replaced by the new value from there on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

from anesurgery.frontend.arguments import Convert, converted, dtype_of, inputs_of, known_value, wrapper
from anesurgery.frontend.parts import slice_of_axis
from anesurgery.mil import Var, mb, types

CUTTING = ("select", "slice")
"""Views of a part of a tensor; coremltools itself can fill one of these."""
COPYING = ("reshape", "flatten", "reshape_as")
"""Views of an ordinary tensor; copies of a tensor that is itself a view."""
SHAPING = ("view", "view_as", "unflatten", "squeeze", "unsqueeze", "detach", "alias", *COPYING)
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


def with_scattered_views(host: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap the pass that fuses assignments: writes into views are replaced before it."""

    def generate_tensor_assignment_ops(graph: Any) -> None:
        scatter_views(graph)
        host(graph)

    return generate_tensor_assignment_ops


def scatter_views(graph: Any) -> None:
    """Replace the writes that coremltools would misplace or lose.

    Raises:
        NotImplementedError: a value is written through a view that cannot be undone, or in a scripted branch
            or loop, and is read afterwards.
    """
    for node in graph.nodes:
        _refuse_lost_in_blocks(node)
    tensors = _Tensors(graph)
    copied = {node.inputs[1] for node in graph.nodes if node.kind == "copy_"}
    latest: dict[str, str] = {}
    nodes = []
    for place, node in enumerate(graph.nodes):
        target = node.inputs[0] if _writes(node) else None
        _read_newest(node, latest)
        if target is None:
            nodes.append(node)
            continue
        views, stale = tensors.views(target), tensors.stale_views(target, place)
        is_read = bool(stale) or any(tensors.last_read[name] > place for name in tensors.bases(target))
        if is_read:
            _refuse_lost(node, tensors.producers, views[0].inputs[0] if views else target)
        if node.kind == "copy_":
            cast = f"{node.outputs[0]}_in_its_dtype"
            nodes.append(_like(node, "written_as", [node.inputs[1], node.inputs[0]], cast))
            node.inputs[1] = cast
        if node.kind in COPIES:
            changed = any(view.outputs[0] in latest for view in views[:-1])  # no view of its tensor any more
            misplaced = bool(stale) or changed or not tensors.is_filled_by_host(target, views)
        else:
            misplaced = bool(views or stale) and node.outputs[0] not in copied and is_read
        if misplaced:
            nodes += _scattered(node, target, views, latest)
            nodes += _taken_again(stale, views, node.outputs[0], latest)
        else:
            nodes.append(node)
    graph.nodes = nodes
    graph.outputs = [latest.get(name, name) for name in graph.outputs]


def _writes(node: Any) -> bool:
    """Return whether a node writes into its first operand, as torch's names with a final underscore say."""
    return bool(node.inputs) and node.kind.endswith("_") and not node.kind.endswith("__")


def _names_read(node: Any) -> Iterator[str]:
    """Yield the names that a node reads, also in its blocks: the branches and loops of scripted functions."""
    yield from node.inputs
    yield from _names_read_in_blocks(node)


def _names_read_in_blocks(node: Any) -> Iterator[str]:
    for inner in (node, *_nodes_in_blocks(node)):
        yield from inner.inputs if inner is not node else ()
        yield from (name for block in inner.blocks for name in block.outputs)


def _read_newest(node: Any, latest: dict[str, str]) -> None:
    """Let a node and its blocks read the newest values of tensors."""
    node.inputs = [latest.get(name, name) for name in node.inputs]
    for block in node.blocks:
        for inner in block.nodes:
            _read_newest(inner, latest)
        block.outputs = [latest.get(name, name) for name in block.outputs]


class _Tensors:
    """The names of a graph's values as it was traced, and which of them are views of others.

    Attributes:
        producers: name -> the node that makes it.
        places: name -> the place of that node.
        last_read: name -> the place of the last node that reads it, behind all nodes for an output; else -1.
    """

    def __init__(self, graph: Any) -> None:
        self.producers = {name: copy(node) for node in graph.nodes for name in node.outputs}
        self.places = {name: place for place, node in enumerate(graph.nodes) for name in node.outputs}
        self.last_read: dict[str, int] = defaultdict(lambda: -1)
        self.last_read |= {name: place for place, node in enumerate(graph.nodes) for name in _names_read(node)}
        self.last_read |= dict.fromkeys(graph.outputs, len(graph.nodes))
        self._in_blocks = {name for node in graph.nodes for name in _names_read_in_blocks(node)}

    def views(self, name: str) -> list[Any]:
        """Return the views from a tensor to this value, the outermost first."""
        outermost_first: list[Any] = []
        while self._is_view(name := self._before_writes(name), VIEWS):
            outermost_first.insert(0, self.producers[name])
            name = self.producers[name].inputs[0]
        return outermost_first

    def bases(self, name: str) -> list[str]:
        """Return the tensors that a value is a view of, the nearest first."""
        found = []
        while self._is_view(name := self._before_writes(name), ANY_VIEW):
            name = self.producers[name].inputs[0]
            found.append(name)
        return found

    def _before_writes(self, name: str) -> str:
        """Return the first name of a tensor: each write gives it another."""
        while name in self.producers and _writes(self.producers[name]):
            name = self.producers[name].inputs[0]
        return name

    def _is_view(self, name: str, kinds: tuple[str, ...]) -> bool:
        if name not in self.producers or self.producers[name].kind not in kinds:
            return False
        before = self.producers[name].inputs[0]
        copies = self.producers[name].kind in COPYING and before in self.producers
        return not (copies and self.producers[before].kind in ANY_VIEW)

    def stale_views(self, target: str, place: int) -> list[tuple[str, Any]]:
        """Return the views of a written tensor that are taken before the write and read after it.

        These are the views of which they are taken, too; but none where the write is to one of several parts.
        """
        root = self._root(target)
        if self._root_of_list(target) != root:
            return []
        stale: dict[str, None] = {}
        for name, made in self.places.items():
            if made < place < self.last_read[name] and name != root and self._root(name) == root:
                between = [self._before_writes(base) for base in self.bases(name)]
                stale |= dict.fromkeys(base for base in reversed(between) if base != root)
                stale |= dict.fromkeys([self._before_writes(name)] if self._before_writes(name) != root else [])
        return [(name, self.producers[name]) for name in stale]

    def _root(self, name: str) -> str:
        return self._before_writes([name, *self.bases(name)][-1])

    def _root_of_list(self, name: str) -> str:
        views = self.views(name)
        return self._before_writes(views[0].inputs[0] if views else name)

    def is_filled_by_host(self, target: str, views: list[Any]) -> bool:
        """Return whether coremltools fills this part of a tensor itself."""
        if not all(view.kind in CUTTING for view in views) or not self._in_order(views):
            return False
        if self._in_blocks & {views[0].inputs[0] if views else target}:  # where coremltools renames nothing
            return False
        return bool(views) or self._is_fresh(target)

    def _is_fresh(self, name: str) -> bool:
        """Return whether a tensor was made to be filled; a cast counts as what it was made of."""
        while name in self.producers and self.producers[name].kind == "to":
            name = self.producers[name].inputs[0]
        return name in self.producers and self.producers[name].kind in FRESH

    def _in_order(self, views: list[Any]) -> bool:
        """Return whether the i-th view is of axis i, counted before earlier selections removed axes."""
        selected = 0
        for i, view in enumerate(views):
            known = view.inputs[1] in self.producers
            axis = self.producers[view.inputs[1]].attr["value"] if known else None
            if axis is not None and axis + selected != i:
                return False
            selected += view.kind == "select"
        return True


def _refuse_lost(node: Any, producers: dict[str, Any], name: str) -> None:
    """Raise where what is written would be lost: the numbers would be wrong without a word."""
    kind = producers[name].kind if name in producers else ""
    if kind not in OTHER_VIEWS:
        return
    if kind == "listunpack":
        kind = producers[producers[name].inputs[0]].kind
    raise NotImplementedError(
        f"{node.kind} writes in place through {kind}, and the tensor behind it is read later: "
        f"write a new tensor, or into a slice"
    )


def _refuse_lost_in_blocks(node: Any) -> None:
    """Raise where a scripted branch or loop writes into a part of a tensor, and the tensor lives on."""
    inner = list(_nodes_in_blocks(node))
    made_by = {name: one for one in inner for name in one.outputs}
    reads = Counter(_names_read_in_blocks(node))
    for write in filter(_writes, inner):
        name, is_read = write.inputs[0], False
        while name in made_by and (_writes(made_by[name]) or made_by[name].kind in ANY_VIEW):
            is_view, name = made_by[name].kind in ANY_VIEW, made_by[name].inputs[0]
            is_read |= is_view and (reads[name] > 1 or name not in made_by)
        if is_read:
            raise NotImplementedError(
                f"{write.kind} writes in place into a part of a tensor in a scripted branch or loop, where the "
                "write would be lost: write a new tensor, or trace the function"
            )


def _nodes_in_blocks(node: Any) -> Iterator[Any]:
    for block in node.blocks:
        for inner in block.nodes:
            yield inner
            yield from _nodes_in_blocks(inner)


def _scattered(node: Any, target: str, views: list[Any], latest: dict[str, str]) -> Iterator[Any]:
    """Yield the nodes that compute what is written, and the tensor behind each view afterwards.

    For `x[:, 1] += y`, `views` are the slice and the select: the sum is put back into the slice, then that into
    x. `latest` maps the name of each tensor to the name of its newest value.
    """
    written = node.outputs[0]
    if node.kind in COPIES:
        kind = "expand_as" if node.kind == "copy_" else "full_like"
        operands = node.inputs[1::-1] if kind == "expand_as" else node.inputs[:2]
        yield _like(node, kind, list(operands), written)
    else:
        yield node
    value = written
    for view in reversed(views):
        tensor = latest.get(view.inputs[0], view.inputs[0])
        written_name = f"{tensor}_with_{written}"
        yield _like(node, *_undone(view, tensor, value), written_name)
        _rename(view.inputs[0], written_name, latest)
        value = written_name
    _rename(target, written, latest)


def _rename(name: str, newest: str, latest: dict[str, str]) -> None:
    """Let all names of a tensor mean its newest value."""
    old = latest.get(name, name)
    latest |= dict.fromkeys((name, old, *(n for n, value in latest.items() if value == old)), newest)


def _taken_again(
    stale: list[tuple[str, Any]], views: list[Any], written: str, latest: dict[str, str]
) -> Iterator[Any]:
    """Yield views that are taken again from a tensor after a write; those written through are known already."""
    known = {name for view in views for name in view.outputs}
    for name, view in stale:
        if name in known:
            continue
        again = copy(view)
        again.inputs = [latest.get(n, n) for n in view.inputs]
        again.outputs = [f"{n}_after_{written}" for n in view.outputs]
        again.name = again.outputs[0]
        for old, new in zip(view.outputs, again.outputs, strict=True):
            _rename(old, new, latest)
        known |= set(view.outputs)
        yield again


def _undone(view: Any, tensor: str, value: str) -> tuple[str, list[str]]:
    """Return (kind, inputs) of the operation that puts a value back into the tensor behind a view."""
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


def written_as(context: Any, node: Any) -> None:
    """Convert `written_as(value, target)`, which this file writes: the value in the dtype of the target."""
    value, target = inputs_of(context, node)[:2]
    context.add(_in_dtype_of(target, value), torch_name=node.name)


@wrapper
def with_written_dtype(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `copy(target, value)`, as exported programs have it, to keep the target's dtype."""
    target, value = inputs_of(context, node)[:2]
    (written,) = converted(host, context, node, {node.inputs[1]: _in_dtype_of(target, value)})
    context.add(written, torch_name=node.name)


def _in_dtype_of(target: Any, value: Any) -> Any:
    """Return a value in the dtype of a target. Complex values and plain numbers stay as they are."""
    if not isinstance(value, Var) or not isinstance(target, Var) or value.dtype == target.dtype:
        return value
    if any(types.is_complex(v.dtype) for v in (value, target)):
        return value
    return mb.cast(x=value, dtype=dtype_of(target))


def narrow_scatter(context: Any, node: Any) -> None:
    """Convert `narrow_scatter(x, part, axis, first, length)`, which this file writes, to a join."""
    x, part = inputs_of(context, node)[:2]
    axis, first, length = (int(known_value(v)) for v in inputs_of(context, node)[2:5])
    axis, first = axis % x.rank, first % int(x.shape[axis])
    ends = ((0, first), (first + length, int(x.shape[axis])))
    before, behind = ([slice_of_axis(x, axis, *end)] if end[0] < end[1] else [] for end in ends)
    cast = part if part.dtype == x.dtype else mb.cast(x=part, dtype=dtype_of(x))
    context.add(mb.concat(values=[*before, cast, *behind], axis=axis, name=node.name))
