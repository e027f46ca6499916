"""Every call of a submodule while a PyTorch module runs, by hooks, or by the nodes of an exported program."""

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

from anesurgery.errors import SurgeryError
from anesurgery.mil import Array

EPSILONS = ("eps", "epsilon", "variance_epsilon")
"""What modules call the number that guards their division."""


@dataclass
class Call:
    """A call of a submodule: what it gave, with its history and as numbers, and what it was given."""

    name: str
    kind: str
    tensor: torch.Tensor
    array: Array
    given: tuple[torch.Tensor, ...]
    epsilon: float | None = None
    """The number that guards the division of a norm; None of other modules."""
    with_epsilon: Callable[[float], Array | None] | None = None
    """What a norm gives with another one."""

    @property
    def path(self) -> str:
        """The name of the submodule, whichever call of it this is."""
        return self.name.partition("#")[0]


def calls_of(module: torch.nn.Module | ExportedProgram, inputs: Mapping[str, Array], half: bool) -> list[Call]:
    """Every call of a submodule, in the order in which the calls end.

    Args:
        module: it is not changed.
        inputs: by name.
        half: are parameters and buffers rounded to fp16?

    Raises:
        SurgeryError: the module does not take the inputs.
    """
    values = {
        name: torch.from_numpy(np.array(v, np.int64 if np.asarray(v).dtype.kind in "iu" else np.float32))
        for name, v in inputs.items()
    }
    if isinstance(module, ExportedProgram):
        return _of_program(module, values, half)
    return _recorded(_rounded(module) if half else copy.deepcopy(module), values)


def _rounded(module: torch.nn.Module) -> torch.nn.Module:
    """A copy with parameters and buffers as fp16 holds them."""
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for tensor in itertools.chain(twin.parameters(), twin.buffers()):
            tensor.copy_(_as_half(tensor))
    return twin


def _as_half(tensor: torch.Tensor) -> torch.Tensor:
    """Floats as fp16 holds them, in their own type."""
    return tensor.half().clamp(-65504, 65504).to(tensor.dtype) if tensor.is_floating_point() else tensor


def _recorded(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> list[Call]:
    """The calls of a module, by hooks."""
    calls: list[Call] = []
    by_name = set(values) <= set(inspect.signature(module.forward).parameters)
    with _watched(module, calls), torch.enable_grad(), _said(values):
        module.eval()(**values) if by_name else module.eval()(*values.values())
    return calls


@contextmanager
def _said(values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a module raises what it likes
        raise SurgeryError(f"the module does not take {list(values)}: {error}") from error


@contextmanager
def _watched(module: torch.nn.Module, calls: list[Call]) -> Iterator[None]:
    counts: dict[str, int] = defaultdict(int)

    def note(name: str) -> Any:
        def hook(
            part: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any], output: Any
        ) -> None:
            counts[name] += 1
            again = f"#{counts[name]}" if counts[name] > 1 else ""
            read = tuple(v for v in (*positional, *named.values()) if isinstance(v, torch.Tensor))
            if (tensor := tensor_of(output)) is not None:
                kind = type(part).__name__
                calls.append(Call(f"{name}{again}", kind, tensor, numbers(tensor), read, *_guard(part, read)))

        return hook

    hooks = [part.register_forward_hook(note(name), with_kwargs=True) for name, part in module.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _guard(part: torch.nn.Module, read: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """The epsilon of a norm of one tensor, and what it gives with another; None twice of other modules."""
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
    return None if tensor is None else numbers(tensor)


def numbers(tensor: torch.Tensor) -> Array:
    """A copy in fp32."""
    return tensor.detach().float().numpy().copy()


def tensor_of(output: Any) -> torch.Tensor | None:
    """The first tensor of what a module gave."""
    if isinstance(output, torch.Tensor):
        return output
    parts = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    )
    return next((tensor for part in parts if (tensor := tensor_of(part)) is not None), None)


def _of_program(program: ExportedProgram, values: Mapping[str, torch.Tensor], half: bool) -> list[Call]:
    """The calls of an exported program: the nodes that came of each, and the last of them as what it gave."""
    graph: Any = program.module()
    entries = [node for node in graph.graph.nodes if node.op == "placeholder"]
    names = [node.name for node in entries]
    by_name = set(values) == set(names)
    inputs = [values[n] for n in names] if by_name else list(values.values())
    runner = _Runner(graph, half)
    with torch.enable_grad(), _said(values):
        if len(inputs) != len(names):
            raise SurgeryError(f"it takes {', '.join(names)}")
        runner.run(*inputs, enable_io_processing=False)
    counts: dict[str, int] = defaultdict(int)
    calls = []
    for name, kind, nodes in _scopes(list(graph.graph.nodes)):
        tensor = tensor_of(runner.seen.get(nodes[-1]))
        if tensor is None:
            continue
        counts[name] += 1
        again = f"#{counts[name]}" if counts[name] > 1 else ""
        read = [runner.seen[n] for n in _read(nodes) if isinstance(runner.seen.get(n), torch.Tensor)]
        calls.append(Call(f"{name}{again}", kind, tensor, numbers(tensor), tuple(read), *runner.guard(nodes)))
    return calls


class _Runner(Interpreter):
    """Runs a graph and keeps what its nodes gave; parameters are copies."""

    def __init__(self, graph: GraphModule, half: bool) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._half = half
        self.seen: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        """What a node gives."""
        result = super().run_node(n)
        if n.op == "get_attr" and isinstance(result, torch.Tensor):
            result = (_as_half(result) if self._half else result).detach().clone()
            result.requires_grad_(result.is_floating_point())
        self.seen[n] = result
        return result

    def guard(self, nodes: Sequence[Node]) -> tuple[Any, Any]:
        """The epsilon of a norm that is one of some nodes, and what comes of another; else None twice."""
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


def _scopes(nodes: Sequence[Node]) -> list[tuple[str, str, list[Node]]]:
    """Name, class and nodes of each call of a submodule, in the order in which the calls end."""
    calls: dict[str, tuple[str, str, list[Node]]] = {}
    for node in nodes:
        for key, (name, kind) in (node.meta.get("nn_module_stack") or {}).items():
            if node.op == "call_function":
                calls.setdefault(key, (name, str(kind).rpartition(".")[2].rstrip("'>"), []))[2].append(node)
    place = {node: k for k, node in enumerate(nodes)}
    return sorted(calls.values(), key=lambda call: (place[call[2][-1]], -len(call[0])))


def _read(nodes: Sequence[Node]) -> list[Node]:
    """The nodes outside of a call that it reads, parameters left out."""
    inside = set(nodes)
    outside = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    return [source for source in outside if source.op != "get_attr"]
