"""Record the calls of a PyTorch module while it runs: those of its submodules, and of functions between them.

Modules are watched by hooks, functions by a torch function mode. Of an exported program the nodes tell both.
Only what depends on an input is recorded: a converter computes everything else ahead, and rounds the results.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.fx
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from anesurgery import fp16
from anesurgery.errors import SurgeryError
from anesurgery.mil import Array
from anesurgery.ops import names

EPSILONS = ("eps", "epsilon", "variance_epsilon")
"""Attributes in which norm modules keep their epsilon."""
MOVES = names(
    """
    view reshape transpose permute unsqueeze squeeze expand expand_as contiguous to float half clone detach
    flatten unflatten chunk split unbind t mT swapaxes swapdims narrow select movedim repeat size dim numel type
    __get__ __getitem__ __len__ type_as view_as as_strided slice alias _to_copy _unsafe_view bool int long
    """
)
"""Functions that only move numbers; they are not recorded, since an error in one shows in its readers."""
FILLS = names(
    """
    zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty _shape_as_tensor
    """
)
"""Functions that read only the shape of their operand."""
LINEAR = names("add sub rsub mul div true_divide")
"""Functions that pass on an error of their operands."""
MARK = "_depends_on_an_input"
"""The attribute of tensors that depend on an input."""
FUNCTION = "function"
"""The kind of a call of a function between submodules."""


class Replay(Protocol):
    """Computes a call again."""

    def __call__(self, tensors: Sequence[torch.Tensor], rounded: bool = True) -> Array | None:
        """Return the result of other operands; None where the call cannot be repeated.

        Args:
            tensors: in the place of the operands.
            rounded: whether weights are rounded as they were in the call; else the module's own are taken.
        """


@dataclass
class Operands:
    """The tensors that a call reads and that depend on an input."""

    tensors: tuple[torch.Tensor, ...]
    replay: Replay | None

    def __post_init__(self) -> None:
        self._versions = [tensor._version for tensor in self.tensors]

    @property
    def are_overwritten(self) -> bool:
        """Whether one was written into since the call began."""
        return self._versions != [tensor._version for tensor in self.tensors]


@dataclass
class Call:
    """A call of a submodule or a function, with the tensors that it read and gave."""

    name: str
    kind: str
    tensor: torch.Tensor
    operands: Operands
    epsilon: float | None = None
    """The epsilon of a norm; None for other modules."""
    with_epsilon: Callable[[float], Array | None] | None = None
    """Computes the norm's result with another epsilon."""
    needed: bool = True
    """Whether an input flows into the result and the result into an output; other calls are not converted."""

    def __post_init__(self) -> None:
        self.array, self._version = fp32_copy(self.tensor), self.tensor._version

    @property
    def is_overwritten(self) -> bool:
        """Whether one of its tensors was written into after the call."""
        return self._version != self.tensor._version or self.operands.are_overwritten

    @property
    def path(self) -> str:
        """The name of the submodule, without the number of the call."""
        return self.name.partition("#")[0]

    @property
    def shows_operands(self) -> bool:
        """Whether a right result shows that the operands are right; a softmax may agree with wrong ones."""
        return self.kind != FUNCTION or self.path.rpartition(".")[2] in LINEAR


def calls_of(module: torch.nn.Module | ExportedProgram, inputs: Mapping[str, Array], half: bool) -> list[Call]:
    """Return every call of a submodule, in the order in which the calls end.

    Args:
        module: the module, which is not changed.
        inputs: input name -> array.
        half: whether parameters, buffers and what is computed of them are rounded to fp16.

    Raises:
        SurgeryError: the module does not take the inputs, or it was traced or scripted.
    """
    values = {name: _input_tensor(np.asarray(array)) for name, array in inputs.items()}
    with torch.autograd.graph.saved_tensors_hooks(_saved_copy, lambda saved: saved), torch.enable_grad():
        if isinstance(module, ExportedProgram):
            return _calls_of_program(module, values, half)
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            raise SurgeryError("calls in a traced or scripted module cannot be watched: give the module itself")
        return _calls_of_module(_twin(module), values, half)


def _input_tensor(array: Array) -> torch.Tensor:
    """Return a tensor that has a gradient if it holds floats, and that a module may write into."""
    if array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64))
    return torch.from_numpy(array.astype(np.float32)).requires_grad_().clone()


def _saved_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return what autograd saves of a result: a copy, since `y += x` may write over it."""
    return tensor if tensor.is_leaf else tensor.detach().clone()


def _twin(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module whose parameters have gradients."""
    computed = [v for part in module.modules() for v in vars(part).values() if isinstance(v, torch.Tensor)]
    # a tensor that a module computes, as a weight norm does, cannot be copied deeply
    twin = copy.deepcopy(module, {id(v): v.detach().clone() for v in computed})
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return twin


def _as_half(tensor: torch.Tensor) -> torch.Tensor:
    """Round finite floats to fp16, in their own dtype."""
    if not tensor.is_floating_point():
        return tensor
    rounded = tensor.detach().half().clamp(-fp16.LARGEST, fp16.LARGEST).to(tensor.dtype)
    return torch.where(tensor.isinf(), tensor.detach(), rounded).requires_grad_(tensor.requires_grad)


def _calls_of_module(module: torch.nn.Module, values: Mapping[str, torch.Tensor], half: bool) -> list[Call]:
    """Run a module, and return its calls and those of functions between its submodules."""
    by_name = set(values) <= set(inspect.signature(module.forward).parameters)
    recorder = _Recorder(half)
    _mark_from_input(values)
    with recorder.watching(module), _named_errors(values), recorder:
        outputs = module.eval()(**values) if by_name else module.eval()(*values.values())
    recorder.mark_unneeded(outputs)
    return recorder.calls


class _Rounding(TorchFunctionMode):
    """A torch function mode that marks what depends on an input, and lets no activation write over its operand.

    If `half`, it rounds weights, and whatever is computed without an input, where such a value meets one that
    depends on an input: a converter computes ahead, and rounds the results.
    """

    def __init__(self, half: bool) -> None:
        super().__init__()
        self._half = half

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        kwargs, name = dict(kwargs or {}), str(getattr(func, "__name__", ""))
        if kwargs.get("inplace") is True:
            kwargs["inplace"] = False
        if name in FILLS or not _is_from_input((args, kwargs)):
            return func(*args, **kwargs)
        positional, named = args, kwargs
        if self._half and not _is_in_place(name):
            positional, named = tree_map_only(
                torch.Tensor, lambda v: v if _is_from_input(v) else _as_half(v), (args, kwargs)
            )
        result = func(*positional, **named)
        _mark_from_input(args[:1] if name == "__setitem__" else result)
        self._see(func, name, args, kwargs, result)
        return result

    def _see(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Record a call; `_Recorder` does."""


class _Running(NamedTuple):
    name: str
    is_composite: bool
    """Whether it has submodules or is the whole module; then functions that it calls are recorded."""
    operands: Operands


class _Recorder(_Rounding):
    """Records each call of a submodule, and of each function that a module with submodules calls itself."""

    def __init__(self, half: bool) -> None:
        super().__init__(half)
        self.calls: list[Call] = []
        self._counts = defaultdict[str, int](int)
        self._running: list[_Running] = []
        self._flows: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        """(results, operands) of each function and module that an input goes into."""

    @contextmanager
    def watching(self, module: torch.nn.Module) -> Iterator[None]:
        """Record the calls of submodules by hooks."""
        hooks = []
        for name, part in module.named_modules():
            has_parts = any(child != "parametrizations" for child, _ in part.named_children())
            enter = partial(self._enter, name, not name or has_parts)
            hooks.append(part.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(part.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str, is_composite: bool, part: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Note what a module reads before it runs: it may change a list that it gets."""
        operands = _operands(part.forward, args, kwargs, self._half)
        self._running.append(_Running(name, is_composite, operands))

    def _leave(self, part: torch.nn.Module, args: Any, output: Any) -> None:
        """Record the call of a module."""
        name, _, operands = self._running.pop()
        tensor = _tensor_of(output)
        if tensor is None or not _has_numbers(tensor) or not operands.tensors:
            return
        self._flow(operands.tensors, output)
        epsilon, with_epsilon = _module_epsilon(part, operands.tensors, self._half)
        needed = not name or _is_from_input(tensor)
        whole = _numbered(name, self._counts)
        kind = type(part).__name__
        self.calls.append(Call(whole, kind, tensor, operands, epsilon, with_epsilon, needed))

    def _see(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Record the call of a function."""
        self._flow((args, kwargs), result)
        between = bool(self._running) and self._running[-1].is_composite
        if between and _has_numbers(result) and not _is_in_place(name) and name not in MOVES:
            path = ".".join(filter(None, (self._running[-1].name, name.strip("_"))))
            operands = _operands(func, args, kwargs, self._half)
            epsilon = _function_epsilon(func, args, kwargs, self._half)
            self.calls.append(Call(_numbered(path, self._counts), FUNCTION, result, operands, *epsilon))

    def _flow(self, operands: Any, results: Any) -> None:
        """Note that results are computed of operands; a function that returns None writes into operands."""
        read, written = _tensors_in(operands), _tensors_in(results)
        if written or results is None:
            self._flows.append((written or read, read))

    def mark_unneeded(self, outputs: Any) -> None:
        """Mark the calls whose results go into no output of the module.

        Results are followed by memory, which views share; a view that nobody reads is found by its identity.
        """
        ends = _tensors_in(outputs)
        read = {id(tensor) for tensor in itertools.chain(ends, *(operands for _, operands in self._flows))}
        needed = set(map(_memory, ends))
        for results, operands in reversed(self._flows):
            if any(_memory(result) in needed for result in results):
                needed.update(map(_memory, operands))
        for call in self.calls:
            call.needed &= not call.name or (id(call.tensor) in read and _memory(call.tensor) in needed)


def _numbered(name: str, counts: dict[str, int]) -> str:
    """Return the name of the next call: "name", then "name#2"."""
    counts[name] += 1
    return f"{name}#{counts[name]}" if counts[name] > 1 else name


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_in_place(name: str) -> bool:
    """Return whether a function writes into its first operand: "add_", "__iadd__" or "__setitem__"."""
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}"))
    return name.endswith("_")


def _mark_from_input(values: Any) -> None:
    """Mark tensors that depend on an input; a converter computes others ahead."""
    for tensor in _tensors_in(values):
        setattr(tensor, MARK, True)


def _is_from_input(values: Any) -> bool:
    """Return whether one of some tensors depends on an input."""
    return any(getattr(tensor, MARK, False) for tensor in _tensors_in(values))


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _has_numbers(value: Any) -> bool:
    """Return whether a value is a tensor that is not empty."""
    return isinstance(value, torch.Tensor) and value.numel() > 0


def _operands(compute: Callable[..., Any], args: Any, kwargs: Any, half: bool) -> Operands:
    """Return the operands of a call.

    A call that is given an object that it may change, such as a cache, is not repeated.
    """
    leaves, form = tree_flatten((tuple(args), dict(kwargs)))
    changes = any(hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor) for leaf in leaves)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and _is_from_input(leaf)]

    def replay(tensors: Sequence[torch.Tensor], rounded: bool = True) -> Array | None:
        values = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        _mark_from_input(tensors)
        positional, named = tree_unflatten(values, form)
        return _repeated(lambda: compute(*positional, **named), half and rounded)

    return Operands(tuple(leaves[k] for k in places), None if changes else replay)


def _function_epsilon(func: Any, args: Any, kwargs: Any, half: bool) -> tuple[Any, Any]:
    """Return (`eps` of a normalising function, a function of another `eps`); (None, None) for others."""
    if not isinstance(kwargs.get("eps"), float):
        return None, None
    return kwargs["eps"], lambda epsilon: _repeated(lambda: func(*args, **{**kwargs, "eps": epsilon}), half)


def _module_epsilon(part: torch.nn.Module, read: Sequence[torch.Tensor], half: bool) -> tuple[Any, Any]:
    """Return (epsilon of a norm module, a function of another epsilon); (None, None) for others."""
    attributes = [name for name in EPSILONS if isinstance(getattr(part, name, None), float)]
    if not attributes or len(read) != 1:
        return None, None

    def with_epsilon(epsilon: float) -> Array | None:
        twin = copy.copy(part)  # tables of hooks and parameters are shared, and not written to
        for name in attributes:
            setattr(twin, name, epsilon)
        return _repeated(lambda: twin(*read), half)

    return getattr(part, attributes[0]), with_epsilon


@contextmanager
def _named_errors(values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a module raises what it likes
        raise SurgeryError(f"the module does not take {list(values)}: {error}") from error


def _repeated(compute: Callable[[], Any], half: bool) -> Array | None:
    """Return what a call gives when it is repeated; None where it cannot be, as its arguments were changed."""
    try:
        with torch.no_grad(), _Rounding(half):
            tensor = _tensor_of(compute())
    except Exception:  # a module raises what it likes
        return None
    return None if tensor is None else fp32_copy(tensor)


def fp32_copy(tensor: torch.Tensor) -> Array:
    """Return a copy in fp32, unseen by the recorder."""
    with torch._C.DisableTorchFunction():
        return tensor.detach().float().numpy().copy()


def _tensor_of(output: Any) -> torch.Tensor | None:
    """Return the first tensor in a module's output."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        parts = list(output.values())
    else:
        parts = list(output) if isinstance(output, (list, tuple)) else []
    return next((tensor for part in parts if (tensor := _tensor_of(part)) is not None), None)


def _calls_of_program(program: ExportedProgram, values: Mapping[str, torch.Tensor], half: bool) -> list[Call]:
    """Run an exported program, and return its calls: the nodes of each, the last of which gives the result."""
    graph: Any = program.module()
    entries = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    by_name = set(values) == set(entries)
    inputs = [values[n] for n in entries] if by_name else list(values.values())
    runner = _GraphRunner(graph, half)
    with _named_errors(values):
        if len(inputs) != len(entries):
            raise SurgeryError(f"it takes {', '.join(entries)}")
        runner.run(*inputs, enable_io_processing=False)
    counts, calls = defaultdict[str, int](int), []
    for name, kind, nodes in _grouped_nodes(list(graph.graph.nodes)):
        tensor = _tensor_of(runner.seen.get(nodes[-1]))
        if tensor is not None:
            operands, epsilon = runner.operands(nodes), runner.epsilon(nodes)
            calls.append(Call(_numbered(name, counts), kind, tensor, operands, *epsilon))
    return calls


class _GraphRunner(Interpreter):
    """Runs a graph and keeps the results of its nodes; parameters are copies."""

    def __init__(self, graph: GraphModule, half: bool) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._half = half
        self.seen: dict[Node, Any] = {}
        self._exact: dict[Node, torch.Tensor] = {}
        """The parameters before they were rounded."""

    def run_node(self, n: Node) -> Any:
        """Return the result of a node."""
        result = super().run_node(n)
        if n.op == "get_attr" and isinstance(result, torch.Tensor):
            self._exact[n] = result.detach()
            result = (_as_half(result) if self._half else result).detach().clone()
            result.requires_grad_(result.is_floating_point())
        self.seen[n] = result
        return result

    def operands(self, nodes: Sequence[Node]) -> Operands:
        """Return the results that some nodes read from others, and how to compute the nodes again."""
        reads = [node for node in _nodes_read(nodes) if isinstance(self.seen.get(node), torch.Tensor)]

        def replay(tensors: Sequence[torch.Tensor], rounded: bool = True) -> Array | None:
            weights = self.seen if rounded else {**self.seen, **self._exact}
            return _repeated(
                lambda: self._computed(nodes, {**weights, **dict(zip(reads, tensors, strict=True))}), half=False
            )

        return Operands(tuple(self.seen[node] for node in reads), replay)

    def _computed(self, nodes: Sequence[Node], values: dict[Node, Any]) -> Any:
        """Return what the last of some nodes gives."""
        for node in nodes:
            args: Any = torch.fx.node.map_arg(node.args, values.__getitem__)
            kwargs: Any = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
            target: Any = node.target
            values[node] = target(*args, **kwargs)
        return values[nodes[-1]]

    def epsilon(self, nodes: Sequence[Node]) -> tuple[Any, Any]:
        """Return (epsilon of the last node, a function of another epsilon); (None, None) without one."""
        last, schema = nodes[-1], getattr(nodes[-1].target, "_schema", None)
        options = [] if schema is None else [argument.name for argument in schema.arguments]
        place = options.index("eps") if "eps" in options else len(last.args)
        if place >= len(last.args):
            return None, None

        def with_epsilon(epsilon: float) -> Array | None:
            args = list(torch.fx.node.map_arg(last.args, self.seen.__getitem__))
            args[place] = epsilon
            kwargs, target = torch.fx.node.map_arg(last.kwargs, self.seen.__getitem__), last.target
            return _repeated(lambda: target(*args, **kwargs), half=False)  # type: ignore[operator]

        return last.args[place], with_epsilon


class _Frame(NamedTuple):
    """A submodule that runs while a node is computed."""

    key: str
    """Another one for each call of it."""
    path: str
    kind: str


def _frames(node: Node) -> list[_Frame]:
    """Return the submodules that run while a node is computed, from the outermost in."""
    stack = (node.meta.get("nn_module_stack") or {}).items()
    return [_Frame(key, path, str(kind).rpartition(".")[2].rstrip("'>")) for key, (path, kind) in stack]


def _grouped_nodes(nodes: Sequence[Node]) -> list[tuple[str, str, list[Node]]]:
    """Return (name, kind, nodes) of each call of a submodule or function, in the order in which they end."""
    calls: dict[str, tuple[str, str, list[Node]]] = {}
    frames_of = {node: _frames(node) for node in nodes if node.op == "call_function"}
    for node, frames in frames_of.items():
        for key, path, kind in frames:
            calls.setdefault(key, (path, kind, []))[2].append(node)
    have_parts = {frame.key for frames in frames_of.values() for frame in frames[:-1]}
    functions, from_input = [], set[Node]()
    for node in nodes:
        if node.op == "placeholder" or from_input.intersection(node.all_input_nodes):
            from_input.add(node)
        name, running = _function_name(node), frames_of.get(node)
        if not running or node not in from_input or name in MOVES:
            continue
        key, path, _ = running[-1]
        if key in have_parts or not path:
            functions.append((f"{path}.{name}" if path else name, FUNCTION, [node]))
    place = {node: k for k, node in enumerate(nodes)}
    return sorted([*functions, *calls.values()], key=lambda call: (place[call[2][-1]], -len(call[0])))


def _function_name(node: Node) -> str:
    """Return what a node calls, without its overload: "cumsum"."""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _nodes_read(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes outside a call that it reads, without parameters."""
    inside = set(nodes)
    outside = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    return [source for source in outside if source.op != "get_attr"]
