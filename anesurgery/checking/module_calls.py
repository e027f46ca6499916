"""Record every call of a submodule while a PyTorch module runs, and of the functions between submodules.

`against_torch` compares each recorded `Call` with the values of the converted program. Modules are watched by
hooks and functions by a torch function mode; for an exported program, the nodes of its graph tell both.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.fx
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from anesurgery import fp16
from anesurgery.errors import SurgeryError
from anesurgery.mil import Array
from anesurgery.ops import names

# Every call of a submodule while a PyTorch module runs, and of the functions between submodules.
#
# Modules are watched by hooks, functions by a torch function mode; of an exported program the nodes tell both.


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
FUNCTION = "function"
"""The kind of a call of a function between submodules."""


@dataclass
class Call:
    """A call of a submodule or a function, with the tensors that it read and gave."""

    name: str
    kind: str
    tensor: torch.Tensor
    array: Array
    given: tuple[torch.Tensor, ...]
    epsilon: float | None = None
    """The epsilon of a norm; None for other modules."""
    with_epsilon: Callable[[float], Array | None] | None = None
    """Computes the norm's result with another epsilon."""
    again: Callable[[Sequence[torch.Tensor]], Array | None] | None = None
    """Computes the result from other tensors in the place of `given`."""

    @property
    def path(self) -> str:
        """The name of the submodule, without the number of the call."""
        return self.name.partition("#")[0]


def calls_of(module: torch.nn.Module | ExportedProgram, inputs: Mapping[str, Array], half: bool) -> list[Call]:
    """Return every call of a submodule, in the order in which the calls end.

    Args:
        module: the module, which is not changed.
        inputs: input name -> array.
        half: whether parameters and buffers are rounded to fp16.

    Raises:
        SurgeryError: the module does not take the inputs.
    """
    values = {
        name: torch.from_numpy(np.array(v, np.int64 if np.asarray(v).dtype.kind in "iu" else np.float32))
        for name, v in inputs.items()
    }
    if isinstance(module, ExportedProgram):
        return _calls_of_program(module, values, half)
    return _calls_of_module(_rounded_copy(module) if half else copy.deepcopy(module), values)


def _rounded_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module with parameters and buffers rounded to fp16."""
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for tensor in itertools.chain(twin.parameters(), twin.buffers()):
            tensor.copy_(_as_half(tensor))
    return twin


def _as_half(tensor: torch.Tensor) -> torch.Tensor:
    """Round floats to fp16, in their own dtype."""
    return (
        tensor.half().clamp(-fp16.LARGEST, fp16.LARGEST).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
    )


def _calls_of_module(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> list[Call]:
    """Run a module, and return its calls and those of functions between its submodules."""
    calls: list[Call] = []
    by_name = set(values) <= set(inspect.signature(module.forward).parameters)
    functions = _FunctionRecorder(calls)
    mark_from_input(values)
    with _recording_hooks(module, calls, functions), torch.enable_grad(), _named_errors(values), functions:
        module.eval()(**values) if by_name else module.eval()(*values.values())
    return calls


class _FunctionRecorder(TorchFunctionMode):
    """A torch function mode that records each function that a module with submodules calls itself."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self._calls, self._counts = calls, defaultdict[str, int](int)
        self.inside: list[tuple[str, bool]] = []
        """The modules that are running: (name, whether functions in it are recorded). They are in modules with
        submodules, and in the whole module."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and record its result if it depends on an input."""
        result = func(*args, **(kwargs or {}))
        name = str(getattr(func, "__name__", ""))
        if is_from_input((args, kwargs)):
            mark_from_input(result)
            in_place = name.endswith("_") != name.startswith("_") or name.startswith("__i")
            between = bool(self.inside) and self.inside[-1][1]
            if between and isinstance(result, torch.Tensor) and not in_place and name not in MOVES:
                self._note(func, name.strip("_"), args, kwargs or {}, result)
        return result

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        path = ".".join(filter(None, (self.inside[-1][0], name)))
        self._counts[path] += 1
        whole = f"{path}#{self._counts[path]}" if self._counts[path] > 1 else path
        read, again = tensors_and_replay(func, args, kwargs)
        guard = _function_epsilon(func, args, kwargs)
        self._calls.append(Call(whole, FUNCTION, result, fp32_copy(result), read, *guard, again))


MARK = "_comes_of_an_input"


def mark_from_input(values: Any) -> None:
    """Mark tensors that depend on an input; a converter computes others ahead."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            setattr(leaf, MARK, True)


def is_from_input(values: Any) -> bool:
    """Return whether one of some tensors depends on an input."""
    return any(getattr(leaf, MARK, False) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def tensors_and_replay(
    compute: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[torch.Tensor, ...], Callable[[Sequence[torch.Tensor]], Array | None]]:
    """Return the tensors in the arguments of a call, and a function that calls it again with other tensors."""
    leaves, form = tree_flatten((tuple(args), dict(kwargs)))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def again(tensors: Sequence[torch.Tensor]) -> Array | None:
        new = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            new[place] = tensor
        positional, named = tree_unflatten(new, form)
        return _numbers_of(lambda: compute(*positional, **named))

    return tuple(leaves[k] for k in places), again


def _function_epsilon(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return (`eps` of a normalising function, a function of another `eps`); (None, None) for others."""
    if not isinstance(kwargs.get("eps"), float):
        return None, None
    return kwargs["eps"], lambda epsilon: _numbers_of(lambda: func(*args, **{**kwargs, "eps": epsilon}))


@contextmanager
def _named_errors(values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a module raises what it likes
        raise SurgeryError(f"the module does not take {list(values)}: {error}") from error


@contextmanager
def _recording_hooks(
    module: torch.nn.Module, calls: list[Call], functions: _FunctionRecorder
) -> Iterator[None]:
    counts: dict[str, int] = defaultdict(int)

    def enter(name: str, between: bool) -> Any:
        return lambda part, positional: functions.inside.append((name, between))

    def note(name: str) -> Any:
        def hook(
            part: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any], output: Any
        ) -> None:
            functions.inside.pop()
            if is_from_input((positional, named)):
                mark_from_input(output)
            counts[name] += 1
            number = f"#{counts[name]}" if counts[name] > 1 else ""
            read, again = tensors_and_replay(part.forward, positional, named)
            if (tensor := tensor_of(output)) is not None:
                kind = type(part).__name__
                guard = _module_epsilon(part, read)
                calls.append(Call(f"{name}{number}", kind, tensor, fp32_copy(tensor), read, *guard, again))

        return hook

    parts = dict(module.named_modules())
    hooks = [part.register_forward_hook(note(name), with_kwargs=True) for name, part in parts.items()]
    hooks += [
        part.register_forward_pre_hook(enter(name, not name or any(part.children())))
        for name, part in parts.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _module_epsilon(part: torch.nn.Module, read: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """Return (epsilon of a norm module, a function of another epsilon); (None, None) for others."""
    names = [name for name in EPSILONS if isinstance(getattr(part, name, None), float)]
    if not names or len(read) != 1:
        return None, None

    def again(epsilon: float) -> Array | None:
        twin = copy.copy(part)  # tables of hooks and parameters are shared, and not written to
        for name in names:
            setattr(twin, name, epsilon)
        return _numbers_of(lambda: twin(*read))

    return getattr(part, names[0]), again


def _numbers_of(compute: Callable[[], Any]) -> Array | None:
    with torch.no_grad():
        tensor = tensor_of(compute())
    return None if tensor is None else fp32_copy(tensor)


def fp32_copy(tensor: torch.Tensor) -> Array:
    """Return a copy in fp32."""
    return tensor.detach().float().numpy().copy()


def tensor_of(output: Any) -> torch.Tensor | None:
    """Return the first tensor in a module's output."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        parts = list(output.values())
    else:
        parts = list(output) if isinstance(output, (list, tuple)) else []
    return next((tensor for part in parts if (tensor := tensor_of(part)) is not None), None)


def _calls_of_program(program: ExportedProgram, values: Mapping[str, torch.Tensor], half: bool) -> list[Call]:
    """Run an exported program, and return its calls: the nodes of each, the last of which gives the result."""
    graph: Any = program.module()
    entries = [node for node in graph.graph.nodes if node.op == "placeholder"]
    names = [node.name for node in entries]
    by_name = set(values) == set(names)
    inputs = [values[n] for n in names] if by_name else list(values.values())
    runner = _GraphRunner(graph, half)
    with torch.enable_grad(), _named_errors(values):
        if len(inputs) != len(names):
            raise SurgeryError(f"it takes {', '.join(names)}")
        runner.run(*inputs, enable_io_processing=False)
    counts: dict[str, int] = defaultdict(int)
    calls = []
    for name, kind, nodes in _grouped_nodes(list(graph.graph.nodes)):
        tensor = tensor_of(runner.seen.get(nodes[-1]))
        if tensor is None:
            continue
        counts[name] += 1
        number = f"#{counts[name]}" if counts[name] > 1 else ""
        reads = [n for n in _nodes_read(nodes) if isinstance(runner.seen.get(n), torch.Tensor)]
        given = tuple(runner.seen[n] for n in reads)
        guard, again = runner.epsilon(nodes), runner.replay(nodes, reads)
        calls.append(Call(f"{name}{number}", kind, tensor, fp32_copy(tensor), given, *guard, again))
    return calls


class _GraphRunner(Interpreter):
    """Runs a graph and keeps the results of its nodes; parameters are copies."""

    def __init__(self, graph: GraphModule, half: bool) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._half = half
        self.seen: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        """Return the result of a node."""
        result = super().run_node(n)
        if n.op == "get_attr" and isinstance(result, torch.Tensor):
            result = (_as_half(result) if self._half else result).detach().clone()
            result.requires_grad_(result.is_floating_point())
        self.seen[n] = result
        return result

    def replay(
        self, nodes: Sequence[Node], reads: Sequence[Node]
    ) -> Callable[[Sequence[torch.Tensor]], Array | None]:
        """Return a function that computes some nodes from other tensors in the place of what they read."""

        def compute(tensors: Sequence[torch.Tensor]) -> Any:
            values = {**self.seen, **dict(zip(reads, tensors, strict=True))}
            for node in nodes:
                args: Any = torch.fx.node.map_arg(node.args, values.__getitem__)
                kwargs: Any = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
                target: Any = node.target
                values[node] = target(*args, **kwargs)
            return values[nodes[-1]]

        return lambda tensors: _numbers_of(lambda: compute(tensors))

    def epsilon(self, nodes: Sequence[Node]) -> tuple[Any, Any]:
        """Return (epsilon of the last node, a function of another epsilon); (None, None) without one."""
        last, schema = nodes[-1], getattr(nodes[-1].target, "_schema", None)
        names = [] if schema is None else [argument.name for argument in schema.arguments]
        place = names.index("eps") if "eps" in names else len(last.args)
        if place >= len(last.args):
            return None, None

        def again(epsilon: float) -> Array | None:
            args = list(torch.fx.node.map_arg(last.args, self.seen.__getitem__))
            args[place] = epsilon
            target: Any = last.target
            return _numbers_of(
                lambda: target(*args, **torch.fx.node.map_arg(last.kwargs, self.seen.__getitem__))
            )

        return last.args[place], again


def _grouped_nodes(nodes: Sequence[Node]) -> list[tuple[str, str, list[Node]]]:
    """Return (name, kind, nodes) of each call of a submodule or function, in the order in which they end."""
    calls: dict[str, tuple[str, str, list[Node]]] = {}
    computing, moved = [node for node in nodes if node.op == "call_function"], set[Node]()
    for node in nodes:
        if node.op == "placeholder" or moved.intersection(node.all_input_nodes):
            moved.add(node)
    stacks = {node: list((node.meta.get("nn_module_stack") or {}).items()) for node in computing}
    for node, stack in stacks.items():
        for key, (name, kind) in stack:
            calls.setdefault(key, (name, str(kind).rpartition(".")[2].rstrip("'>"), []))[2].append(node)
    parents = {stack[k][0] for stack in stacks.values() for k in range(len(stack) - 1)}
    functions = [
        (".".join(filter(None, (stack[-1][1][0], _function_name(node)))), FUNCTION, [node])
        for node, stack in stacks.items()
        if stack and (stack[-1][0] in parents or not stack[-1][1][0])
        if node in moved and _function_name(node) not in MOVES
    ]
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
