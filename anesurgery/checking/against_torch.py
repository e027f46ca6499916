"""Compare a converted model with the PyTorch module that it was made from, call by call: `against_torch`.

Every call of a submodule is recorded while the module runs, and every call of a function between submodules.
Modules are watched by hooks and functions by a torch function mode; for an exported program, the nodes of its
graph tell both. For each recorded tensor (`_Call`) the nearest value of the converted program is looked up by
number, since conversions rename, fuse and transpose (`_Values`). `_Match` then decides for each call whether it
agrees, or where an error enters. The report names the first such submodule.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.fx
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from anesurgery import fp16
from anesurgery.checking.grades import compare_arrays, psnr
from anesurgery.display import Drawn, finite
from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.interpret import Executable, Listener
from anesurgery.loading import load
from anesurgery.mil import Array, Function, Operation, Program, Var, constant, dtype_name, function_of, walk_ops
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
FILLS = names("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty")
"""Functions that read only the shape of their operand."""
LINEAR = names("add sub rsub mul div true_divide")
"""Functions that pass on an error of their operands."""
_FUNCTION = "function"
"""The kind of a call of a function between submodules."""


@dataclass
class _Call:
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
    versions: tuple[int, ...] = ()
    """How often `tensor` and `given` were written into when the call ended."""
    needed: bool = True
    """Do functions carry an input into the result, and the result into an output? Else it is not converted."""

    def __post_init__(self) -> None:
        self.versions = self._versions_now()

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in (self.tensor, *self.given))

    @property
    def is_overwritten(self) -> bool:
        """Was one of its tensors written into after the call?"""
        return self.versions != self._versions_now()

    @property
    def path(self) -> str:
        """The name of the submodule, without the number of the call."""
        return self.name.partition("#")[0]

    @property
    def tells(self) -> bool:
        """Does a right result tell that the operands are right? A softmax agrees whatever goes into it."""
        return self.kind != _FUNCTION or self.path.rpartition(".")[2] in LINEAR


def _calls_of(
    module: torch.nn.Module | ExportedProgram, inputs: Mapping[str, Array], half: bool
) -> list[_Call]:
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
    return _calls_of_module(_twin(module), values, half)


def _twin(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module whose parameters have gradients."""
    computed = [v for part in module.modules() for v in vars(part).values() if isinstance(v, torch.Tensor)]
    twin = copy.deepcopy(module, {id(v): v.detach().clone() for v in computed})  # of a weight norm
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return twin


def _as_half(tensor: torch.Tensor) -> torch.Tensor:
    """Round finite floats to fp16, in their own dtype."""
    if not tensor.is_floating_point():
        return tensor
    rounded = tensor.half().clamp(-fp16.LARGEST, fp16.LARGEST).to(tensor.dtype)
    return torch.where(tensor.isinf(), tensor, rounded)


def _calls_of_module(module: torch.nn.Module, values: Mapping[str, torch.Tensor], half: bool) -> list[_Call]:
    """Run a module, and return its calls and those of functions between its submodules."""
    calls: list[_Call] = []
    by_name = set(values) <= set(inspect.signature(module.forward).parameters)
    functions = _FunctionRecorder(calls, half)
    _mark_from_input(values)
    with _recording_hooks(module, calls, functions), torch.enable_grad(), _named_errors(values), functions:
        made = module.eval()(**values) if by_name else module.eval()(*values.values())
    functions.mark_unneeded(made)
    return calls


class _Rounding(TorchFunctionMode):
    """A torch function mode that marks what depends on an input.

    If `half`, it rounds weights, and whatever is computed without an input, where such a value meets one that
    depends on an input: a converter computes ahead, and rounds the results.
    """

    def __init__(self, half: bool) -> None:
        super().__init__()
        self._half = half

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        kwargs, name = kwargs or {}, str(getattr(func, "__name__", ""))
        if name in FILLS or not _is_from_input((args, kwargs)):
            return func(*args, **kwargs)
        if self._half and not _is_in_place(name):
            args, kwargs = tree_map_only(torch.Tensor, _rounded_constant, (args, kwargs))
        result = func(*args, **kwargs)
        _mark_from_input(result)
        self._see(func, name, args, kwargs, result)
        return result

    def _see(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Record a call; `_FunctionRecorder` does."""

    def again(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls another one in this arithmetic, with values that depend on inputs."""

        def called(*args: Any, **kwargs: Any) -> Any:
            _mark_from_input((args, kwargs))
            with _Rounding(self._half):
                return compute(*args, **kwargs)

        return called


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_in_place(name: str) -> bool:
    return name.endswith("_") != name.startswith("_") or name.startswith("__i") or name == "__setitem__"


def _rounded_constant(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if getattr(tensor, MARK, False) else _as_half(tensor)


class _FunctionRecorder(_Rounding):
    """A torch function mode that records each function that a module with submodules calls itself."""

    def __init__(self, calls: list[_Call], half: bool) -> None:
        super().__init__(half)
        self._calls, self._counts = calls, defaultdict[str, int](int)
        self.inside: list[tuple[str, bool]] = []
        """The modules that are running: (name, whether functions in it are recorded). They are in modules with
        submodules, and in the whole module."""
        self._flows: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        """(results, operands) of each function and module that an input goes into."""

    def flow(self, operands: Any, results: Any) -> None:
        """Note that results are computed of operands; a function that returns None writes into operands."""
        read, made = _tensors_in(operands), _tensors_in(results)
        if made or results is None:
            self._flows.append((made or read, read))

    def mark_unneeded(self, outputs: Any) -> None:
        """Mark the calls whose results go into no output of the module. Views share their memory."""
        ends = _tensors_in(outputs)
        read = {id(tensor) for tensor in itertools.chain(ends, *(operands for _, operands in self._flows))}
        needed = set(map(_memory, ends))
        for results, operands in reversed(self._flows):
            if any(_memory(result) in needed for result in results):
                needed.update(map(_memory, operands))
        for call in self._calls:
            call.needed &= not call.name or (id(call.tensor) in read and _memory(call.tensor) in needed)

    def _see(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Record the result of a function."""
        self.flow((args, kwargs), result)
        between = bool(self.inside) and self.inside[-1][1]
        if between and _has_numbers(result) and not _is_in_place(name) and name not in MOVES:
            self._note(func, name.strip("_"), args, kwargs, result)

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        path = ".".join(filter(None, (self.inside[-1][0], name)))
        self._counts[path] += 1
        whole = f"{path}#{self._counts[path]}" if self._counts[path] > 1 else path
        read, again = _tensors_and_replay(func, args, kwargs)
        guard = _function_epsilon(func, args, kwargs)
        self._calls.append(_Call(whole, _FUNCTION, result, _fp32_copy(result), read, *guard, again))


MARK = "_comes_of_an_input"


def _mark_from_input(values: Any) -> None:
    """Mark tensors that depend on an input; a converter computes others ahead."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            setattr(leaf, MARK, True)


def _is_from_input(values: Any) -> bool:
    """Return whether one of some tensors depends on an input."""
    return any(getattr(leaf, MARK, False) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _has_numbers(value: Any) -> bool:
    """Return whether a value is a tensor that is not empty."""
    return isinstance(value, torch.Tensor) and value.numel() > 0


def _tensors_and_replay(
    compute: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[torch.Tensor, ...], Callable[[Sequence[torch.Tensor]], Array | None] | None]:
    """Return the tensors in the arguments of a call, and a function that calls it again with other tensors.

    A call that was given an object that it may have changed, such as a cache, is not called again.
    """
    leaves, form = tree_flatten((tuple(args), dict(kwargs)))
    changed = any(hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor) for leaf in leaves)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def again(tensors: Sequence[torch.Tensor]) -> Array | None:
        new = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            new[place] = tensor
        positional, named = tree_unflatten(new, form)
        return _numbers_of(lambda: compute(*positional, **named))

    return tuple(leaves[k] for k in places), None if changed else again


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
    module: torch.nn.Module, calls: list[_Call], functions: _FunctionRecorder
) -> Iterator[None]:
    counts: dict[str, int] = defaultdict(int)

    def enter(name: str, between: bool) -> Any:
        return lambda part, positional: functions.inside.append((name, between))

    def note(name: str) -> Any:
        def hook(
            part: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any], output: Any
        ) -> None:
            functions.inside.pop()
            tensor = _tensor_of(output)
            if tensor is None or not _has_numbers(tensor) or not _is_from_input((positional, named)):
                return
            needed = not name or _is_from_input(tensor)
            _mark_from_input(output)
            functions.flow((positional, named), output)
            counts[name] += 1
            whole = f"{name}#{counts[name]}" if counts[name] > 1 else name
            read, again = _tensors_and_replay(functions.again(part.forward), positional, named)
            guard, array = _module_epsilon(part, read, functions), _fp32_copy(tensor)
            calls.append(_Call(whole, type(part).__name__, tensor, array, read, *guard, again, needed=needed))

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


def _module_epsilon(
    part: torch.nn.Module, read: Sequence[torch.Tensor], functions: _Rounding
) -> tuple[Any, Any]:
    """Return (epsilon of a norm module, a function of another epsilon); (None, None) for others."""
    names = [name for name in EPSILONS if isinstance(getattr(part, name, None), float)]
    if not names or len(read) != 1:
        return None, None

    def again(epsilon: float) -> Array | None:
        twin = copy.copy(part)  # tables of hooks and parameters are shared, and not written to
        for name in names:
            setattr(twin, name, epsilon)
        return _numbers_of(lambda: functions.again(twin)(*read))

    return getattr(part, names[0]), again


def _numbers_of(compute: Callable[[], Any]) -> Array | None:
    """Return what a call gives when it is repeated; None where it cannot be, as its arguments were changed."""
    try:
        with torch.no_grad():
            tensor = _tensor_of(compute())
    except Exception:  # a module raises what it likes
        return None
    return None if tensor is None else _fp32_copy(tensor)


def _fp32_copy(tensor: torch.Tensor) -> Array:
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


def _calls_of_program(program: ExportedProgram, values: Mapping[str, torch.Tensor], half: bool) -> list[_Call]:
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
        tensor = _tensor_of(runner.seen.get(nodes[-1]))
        if tensor is None:
            continue
        counts[name] += 1
        number = f"#{counts[name]}" if counts[name] > 1 else ""
        reads = [n for n in _nodes_read(nodes) if isinstance(runner.seen.get(n), torch.Tensor)]
        given = tuple(runner.seen[n] for n in reads)
        guard, again = runner.epsilon(nodes), runner.replay(nodes, reads)
        calls.append(_Call(f"{name}{number}", kind, tensor, _fp32_copy(tensor), given, *guard, again))
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
        (".".join(filter(None, (stack[-1][1][0], _function_name(node)))), _FUNCTION, [node])
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


GATE = 105.0
"""PSNR in dB from which a value agrees by default: rounding in fp32 leaves 110 or more. A wrong weight in one
block of a deep model is diluted by the residual stream, so that later blocks still reach 80 to 100."""
ORDERS = 24
"""The most orders of axes that are tried for each value: all of four axes."""
ENTERS = 10.0
"""dB that a module loses beside its inputs where an error enters in it; less means that it carries one on."""
ROUNDED = 70.0
"""PSNR in dB that rounding to fp16 leaves where weights were first fused with others, or with a table."""
SEEN = 40.0
"""PSNR in dB from which a value counts as a module's result, if a wrong one; below, as another value."""
SAME_EPSILON = 0.05
"""Largest relative difference of an epsilon from itself in fp16: 1e-6 is subnormal there, with 4 bits."""
LARGEST_EPSILON = 0.1
"""Constants above are no epsilons: they would exceed the variance of what a norm reads."""
ALONE = 90.0
"""PSNR in dB that a call reaches on its own inputs if it only carries an error on: rounding in fp32 leaves
more."""
REPLAYS = 24
"""The most combinations of program values that a call is replayed on. A choice."""
SPIKE = 16.0
"""An element this many times the median of its row is a spike, which would hide errors in the rest."""
NEARER = 3.0
"""dB by which another epsilon must bring a norm nearer to its value to explain an error."""
LATER = 12
"""The most later modules that are tested for whether they depend on one without an equal value."""


@dataclass(frozen=True)
class ModuleRow:
    """A call of a submodule or a function, and the value of the package that is nearest to what it gave.

    Attributes:
        name: the submodule's name as in `named_modules`, or the calling module's name and the function; "#2"
            for its second call; "" is the whole module.
        kind: the class; "function" for a function.
        value: name of the value in the program; None where none has as many elements.
        psnr: arithmetic -> dB between the two; minus infinite without a value.
        state: "agrees"; "parts" where an error enters; "rounds" where rounding of fused weights to fp16 may
            explain it; "carries" where its inputs are off already; or "not kept": no value is equal, but a
            later module that depends on it agrees, since the converter fused it with its neighbours; or it
            goes into no output.
    """

    name: str
    kind: str
    value: str | None
    psnr: Mapping[str, float]
    state: str


@dataclass(frozen=True)
class AgainstTorch(Drawn):
    """The result of `against_torch`: a row for each call of a submodule, in the order in which the calls end.

    Attributes:
        rows: the calls.
        gate: the least PSNR in dB, in fp32, at which a value agrees.
        rounded: whether the module's weights were rounded to fp16, as those of the package are.
    """

    rows: tuple[ModuleRow, ...]
    gate: float
    rounded: bool

    @property
    def first(self) -> ModuleRow | None:
        """The innermost module at which package and PyTorch begin to differ. None if they agree."""
        return next((row for row in self.rows if row.state == "parts"), None)

    @property
    def ok(self) -> bool:
        """Whether every module that the package kept agrees."""
        return self.first is None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [vars(row) | {"psnr": finite(row.psnr)} for row in self.rows]
        first = None if self.first is None else self.first.name
        return {"ok": self.ok, "gate_db": self.gate, "rounded": self.rounded, "first": first, "modules": rows}


@door("inputs")
def against_torch(
    module: torch.nn.Module | ExportedProgram,
    model: Any,
    inputs: Mapping[str, Array],
    *,
    gate: float = GATE,
    precisions: Sequence[str] = ("fp32", "fp16", "ane"),
    function: str | None = None,
) -> AgainstTorch:
    """Find the first submodule, or function between submodules, at which a model differs from PyTorch.

    Every submodule is watched while the module runs, and every function that a module with submodules calls.
    A submodule is blamed if its own error is large: it runs again on the inputs that the package gave it. Its
    result is looked up among the values of the program, by number and in any order of axes, and that of the
    whole module among the outputs. Rows of a norm with a spike are judged without the spike. If the program
    computes in fp16, the module runs with weights rounded to fp16, and with what it computes of weights alone,
    so rounding does not count as a wrong conversion. The module itself is not changed.

    Args:
        module: as it was converted, in fp32, in evaluation mode; or the program that `torch.export.export` made
            of it, whose nodes say which submodule they came of.
        model: path of a package, MLModel, or MIL program.
        inputs: of the model, by name. They are given to the module by name where its `forward` has these names,
            else in their order.
        gate: PSNR in dB in fp32 from which on two values agree.
        precisions: arithmetics of the interpreter; "fp32" is the one that decides.
        function: of the model; `main` or the first by default.

    Returns:
        A row for each call of a submodule; `first` is the first difference.

    Raises:
        SurgeryError: `module` does not take these inputs, or "fp32" is not among the arithmetics.
        InterpretError: the model does not take them.
    """
    if "fp32" not in precisions:
        raise SurgeryError(f"precisions={tuple(precisions)!r} lacks 'fp32', in which modules are compared")
    program = load(model).program
    half = _computes_in_half(program)
    inputs = _rounded_inputs(function_of(program, function), inputs)
    calls = _calls_of(module, inputs, half)
    sizes = {tensor.numel() for call in calls for tensor in (call.tensor, *call.given)}
    kept = {precision: _values(program, function, inputs, precision, sizes) for precision in precisions}
    ends = [var.name for var in function_of(program, function).outputs]
    match = _Match(calls, kept["fp32"], ends, gate, min(gate, ROUNDED) if half else gate, _epsilons(program))
    match.name(_values_by_scope(function_of(program, function)))
    rows = [
        ModuleRow(
            call.name, call.kind, near.name if near else None, _psnr_in_each(call.array, near, kept), state
        )
        for call, near, state in zip(calls, match.nearest, match.states(), strict=True)
    ]
    return AgainstTorch(tuple(rows), gate, half)


@dataclass(frozen=True)
class _NearestValue:
    name: str
    order: tuple[int, ...] | None
    """Of the axes that are longer than 1; None where the elements are read as they lie."""
    psnr: float


def _rounded_inputs(function: Function, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs as the program reads them: fp16 inputs are rounded for the module too."""
    halves = {name for name, var in function.inputs.items() if dtype_name(var) == "fp16"}
    rounded = {n: np.asarray(v).astype(np.float16).astype(np.float32) for n, v in inputs.items() if n in halves}
    return {**inputs, **rounded}


def _computes_in_half(program: Program) -> bool:
    return any(dtype_name(v) == "fp16" for op in walk_ops(program) if op.op_type == "const" for v in op.outputs)


class _ValueKeeper(Listener):
    """A listener that keeps the values with as many elements as some module's tensor."""

    def __init__(self, sizes: set[int]) -> None:
        self._sizes = sizes
        self.values: dict[str, Array] = {}

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Copy the values that may be looked up."""
        for var, value in zip(op.outputs, outputs, strict=True):
            if hasattr(value, "detach") and value.numel() in self._sizes:
                self.values[var.name] = value.detach().cpu().float().numpy().copy()


def _values(
    program: Program, name: str | None, inputs: Mapping[str, Array], precision: str, sizes: set[int]
) -> dict[str, Array]:
    """Return the values of a program by name, with its constants and inputs."""
    keep = _ValueKeeper(sizes)
    Executable(program, function=name, precision=precision)(inputs, listener=keep)
    given = {n: np.asarray(v) for n, v in inputs.items() if np.asarray(v).dtype.kind == "f"}
    entries = {n: v.astype(np.float32) for n, v in given.items() if v.size in sizes}
    return {**_constants(function_of(program, name), sizes), **entries, **keep.values}


def _constants(function: Function, sizes: set[int]) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for op in function.operations:
        for var in op.outputs if op.op_type == "const" else ():
            value = _float_constant(var)
            if value is not None and value.size in sizes:
                arrays[var.name] = value
    return arrays


def _float_constant(var: Var) -> Array | None:
    value = constant(var)
    array = None if value is None else np.asarray(value)
    return array.astype(np.float32) if array is not None and array.dtype.kind in "fiu" else None


class _Match:
    """The recorded calls beside the values of the program."""

    def __init__(
        self,
        calls: Sequence[_Call],
        values: Mapping[str, Array],
        ends: Sequence[str],
        gate: float,
        sure: float,
        epsilons: Sequence[float],
    ) -> None:
        self._calls, self._values, self._gate, self._sure = calls, _Values(values), gate, sure
        self._epsilons = epsilons
        self._given: dict[int, float] = {}
        self._paired: dict[int, _NearestValue] = {}
        outputs = _Values({name: values[name] for name in ends if name in values})  # those of the whole module
        self.nearest = [(self._values if call.name else outputs).nearest(call.array) for call in calls]
        self._psnr = [self._near(call, near) for call, near in zip(calls, self.nearest, strict=True)]

    def _near(self, call: _Call, near: _NearestValue | None) -> float:
        """Return the PSNR of a call and a value; for a norm, without spikes if that is lower."""
        if near is None or call.epsilon is None:
            return -math.inf if near is None else near.psnr
        value = _with_layout(self._values.arrays[near.name], near.order, call.array.shape)
        return min(near.psnr, _without_spikes(call.array, value))

    def name(self, scoped: Mapping[tuple[str, ...], Sequence[str]]) -> None:
        """Take the value that has a submodule's scope where no value agrees by number.

        Where the result is quite wrong, another value may be nearer by chance.
        """
        called = {call.path for call in self._calls}
        for k, call in enumerate(self._calls):
            names = [n for n in scoped.get(_scope_of(call.path, called), ()) if n in self._values.arrays]
            own = {names[-1]: self._values.arrays[names[-1]]} if names else {}
            near = _Values(own).nearest(call.array)
            if near is not None and call.name and self._psnr[k] < SEEN:
                self.nearest[k], self._psnr[k] = near, near.psnr

    def states(self) -> list[str]:
        """Return the state of each call.

        Rounding adds up in a module of which no part is wrong alone.
        """
        states: list[str] = []
        for k, call in enumerate(self._calls):
            state = self._state(k)
            inner = {
                states[j]
                for j in range(k)
                if self._calls[j].name.startswith(f"{call.path}." if call.path else "")
            }
            if state == "parts" and self._psnr[k] >= SEEN and "rounds" in inner and "parts" not in inner:
                state = "rounds"
            states.append(state)
        return states

    def _state(self, k: int) -> str:
        """Return the state of a call: whether it agrees, or an error enters in it (`ModuleRow`)."""
        if self._psnr[k] >= self._gate:
            return "agrees"
        if not self._calls[k].needed:
            return "not kept"
        input_psnr = min((self._input_psnr(tensor) for tensor in self._calls[k].given), default=math.inf)
        if self._psnr[k] >= SEEN and self._has_other_epsilon(k):
            return "parts"
        pairs = [self._value_in_place_of(tensor) for tensor in self._calls[k].given]
        inexact = any(pair is None or pair.psnr < self._gate for pair in pairs)
        own_psnr = self._own_error(k) if inexact else None
        if own_psnr is not None and own_psnr >= min(self._gate, ALONE):
            return "carries"
        if own_psnr is None and input_psnr < self._gate and self._psnr[k] >= input_psnr - ENTERS:
            return "carries"
        if self._psnr[k] < SEEN and self._is_fused_away(k, min(self._sure, input_psnr - ENTERS)):
            return "not kept"
        return "rounds" if (self._psnr[k] if own_psnr is None else own_psnr) >= self._sure else "parts"

    def _own_error(self, k: int) -> float | None:
        """Return the PSNR of a call replayed on the program's values of its inputs; None where it is unknown.

        If the program has the replayed result too, that becomes the value of the call from there on.
        """
        call, near = self._calls[k], self.nearest[k]
        nears = [one for tensor in call.given if (one := self._value_in_place_of(tensor)) is not None]
        if call.again is None or near is None or len(nears) < len(call.given) or call.is_overwritten:
            return None
        options = [self._candidates(tensor, one) for tensor, one in zip(call.given, nears, strict=True)]
        own = None
        for chosen in itertools.islice(itertools.product(*options), REPLAYS):
            array = call.again([self._tensor_from(*pair) for pair in zip(call.given, chosen, strict=True)])
            if array is None or array.shape != call.array.shape:
                return None
            same = self._values.nearest(array)
            if same is not None and same.psnr >= ALONE:
                self._pair(k, same)
                return same.psnr
            if own is None and all(one.psnr >= SEEN for one in chosen):
                own = _psnr(array, self._values.arrays[near.name], near.order)
        return own

    def _pair(self, k: int, same: _NearestValue) -> None:
        """Take a value for the result of a call, since the call computes it from the program's own inputs."""
        call = self._calls[k]
        value = _with_layout(self._values.arrays[same.name], same.order, call.array.shape)
        self._psnr[k] = _psnr(call.array, value, None)
        self.nearest[k] = _NearestValue(same.name, same.order, self._psnr[k])
        self._paired[id(call.tensor)] = _NearestValue(same.name, same.order, self._psnr[k])

    def _candidates(self, tensor: torch.Tensor, near: _NearestValue) -> list[_NearestValue]:
        """Return the values that may stand for a tensor: one that is right but for rounding, or all."""
        if near.psnr >= self._sure:
            return [near]
        others = [one for one in self._values.all_near(_fp32_copy(tensor)) if one.name != near.name]
        return [near, *sorted(others, key=lambda one: -one.psnr)]

    def _value_in_place_of(self, tensor: torch.Tensor) -> _NearestValue | None:
        """Return the program's value for a tensor: that of the call that made it, or the nearest."""
        if not tensor.is_floating_point() or isinstance(tensor, torch.nn.Parameter):
            return _NearestValue("", None, math.inf)
        return self._paired.get(id(tensor)) or self._values.nearest(_fp32_copy(tensor))

    def _tensor_from(self, tensor: torch.Tensor, near: _NearestValue) -> torch.Tensor:
        if not near.name:
            return tensor
        value = _with_layout(self._values.arrays[near.name], near.order, tuple(tensor.shape))
        return torch.from_numpy(value.copy()).to(tensor.dtype)

    def _has_other_epsilon(self, k: int) -> bool:
        """Return whether a norm is nearer to its value with an epsilon that the program has."""
        call, near = self._calls[k], self.nearest[k]
        if near is None or call.epsilon is None or call.with_epsilon is None:
            return False
        others = [e for e in self._epsilons if not math.isclose(e, call.epsilon, rel_tol=SAME_EPSILON)]
        arrays = [call.with_epsilon(e) for e in others]
        fit = [
            _psnr(array, self._values.arrays[near.name], near.order)
            for array in arrays
            if array is not None and array.shape == call.array.shape
        ]
        return max(fit, default=-math.inf) >= self._psnr[k] + NEARER

    def _input_psnr(self, tensor: torch.Tensor) -> float:
        """Return how near a call's input is to a value; infinite where there is none, and for integers."""
        if not tensor.is_floating_point():
            return math.inf
        if id(tensor) not in self._given:  # the calls hold their tensors, so no address comes twice
            near = self._values.nearest(_fp32_copy(tensor))
            self._given[id(tensor)] = near.psnr if near is not None and near.psnr >= SEEN else math.inf
        return self._given[id(tensor)]

    def _is_fused_away(self, k: int, enough: float) -> bool:
        """Return whether a later call that depends on this one agrees: then the program fused it.

        A later call shows nothing if an error of this one would hardly change it.
        """
        call, near = self._calls[k], self.nearest[k]
        if not call.tensor.requires_grad:
            return False
        wrong = _peak(call.array) * 10 ** (-max(near.psnr if near else 0.0, 0.0) / 20)
        telling = (j for j in range(k + 1, len(self._calls)) if self._calls[j].tells)
        later = (j for j in telling if self._psnr[j] >= enough)
        shown = ((j, _psnr_of_error_through(self._calls[j].tensor, call.tensor, wrong)) for j in later)
        hanging = itertools.islice(((j, p) for j, p in shown if math.isfinite(p)), LATER)
        return any(self._psnr[j] >= p + ENTERS for j, p in hanging)


class _Values:
    """The values of a program, to be looked up by number."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays
        self._by_size: dict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
        for name, array in arrays.items():
            self._by_size[array.size][name] = _mean_and_rms(array)

    def nearest(self, wanted: Array) -> _NearestValue | None:
        """Return the value with the highest PSNR, in its best order of axes.

        Arrays in any order of elements differ at least as much as their means and norms, so that most values
        need not be compared.
        """
        best: _NearestValue | None = None
        for bound, name in sorted(self._bounds(wanted), key=lambda pair: -pair[0]):
            if best is not None and bound < best.psnr:
                break
            for order in _orders(self.arrays[name], wanted):
                psnr = _psnr(wanted, self.arrays[name], order)
                if best is None or psnr > best.psnr:
                    best = _NearestValue(name, order, psnr)
        return best

    def all_near(self, wanted: Array) -> list[_NearestValue]:
        """Return each value with as many elements, in the first order of axes that fits."""
        orders = ((name, next(_orders(self.arrays[name], wanted), None)) for name in self._by_size[wanted.size])
        return [_NearestValue(name, order, _psnr(wanted, self.arrays[name], order)) for name, order in orders]

    def _bounds(self, wanted: Array) -> Iterator[tuple[float, str]]:
        mean, root = _mean_and_rms(wanted)
        slack = 1e-6 * (abs(mean) + root)  # sums in fp32
        for name, (other_mean, other_root) in self._by_size.get(wanted.size, {}).items():
            apart = max(abs(mean - other_mean), abs(root - other_root)) - slack
            yield (psnr(_peak(wanted), apart) if apart > 0 else math.inf), name  # NaN is above nothing


def _mean_and_rms(array: Array) -> tuple[float, float]:
    """Return the mean and the root of the mean square."""
    if not array.size:
        return 0.0, 0.0
    flat = array.reshape(-1)
    return float(flat.mean(dtype=np.float64)), float(np.linalg.norm(flat)) / math.sqrt(array.size)


def _orders(value: Array, wanted: Array) -> Iterator[tuple[int, ...] | None]:
    """Yield the orders of a value's axes (those longer than 1) that give the shape of another array."""
    if value.size != wanted.size:
        return
    mine, theirs = ([n for n in array.shape if n > 1] for array in (value, wanted))
    yield None
    if sorted(mine) == sorted(theirs):
        for order in itertools.islice(itertools.permutations(range(len(mine))), 1, ORDERS):
            if [mine[k] for k in order] == theirs:
                yield order


def _with_layout(value: Array, order: tuple[int, ...] | None, shape: tuple[int, ...]) -> Array:
    """Return a value with its axes in an order, in another shape."""
    if order is not None:
        value = value.reshape([n for n in value.shape if n > 1]).transpose(order)
    return value.reshape(shape)


def _without_spikes(wanted: Array, value: Array) -> float:
    """Return the PSNR of the elements that are no spikes, beside which errors would not be seen."""
    if not wanted.ndim or wanted.shape[-1] < 2:
        return math.inf
    sizes = np.abs(wanted)
    rest = sizes <= SPIKE * np.median(sizes, axis=-1, keepdims=True)
    return math.inf if rest.all() or not rest.any() else _psnr(wanted[rest], value[rest], None)


def _psnr(wanted: Array, value: Array, order: tuple[int, ...] | None) -> float:
    wanted, value = wanted.reshape(-1), _with_layout(value, order, (-1,))
    with np.errstate(invalid="ignore", over="ignore"):  # infinities are looked at below
        noise = float(np.linalg.norm(wanted - value)) / math.sqrt(max(wanted.size, 1))
    if math.isfinite(noise):
        return psnr(_peak(wanted), noise)
    row = compare_arrays("", wanted, value)
    return -math.inf if row.bad or math.isnan(row.psnr) else row.psnr


def _psnr_in_each(
    wanted: Array, near: _NearestValue | None, kept: Mapping[str, Mapping[str, Array]]
) -> dict[str, float]:
    """Return arithmetic -> the PSNR of the same value there."""
    if near is None:
        return dict.fromkeys(kept, -math.inf)
    return {
        precision: _psnr(wanted, values[near.name], near.order) if near.name in values else -math.inf
        for precision, values in kept.items()
    }


def _peak(array: Array) -> float:
    return float(np.abs(array).max(initial=0.0))


def _psnr_of_error_through(later: torch.Tensor, earlier: torch.Tensor, wrong: float) -> float:
    """Return the PSNR in dB that an error in one tensor leaves in a later one; infinite if independent.

    The norm of one random vector times the Jacobian estimates how much of the error comes through.
    """
    if not later.requires_grad or later is earlier:
        return math.inf
    drawn = torch.randn(later.shape, generator=torch.Generator().manual_seed(0))
    (slope,) = torch.autograd.grad(later, earlier, drawn, retain_graph=True, allow_unused=True)
    if slope is None:
        return math.inf
    rms = wrong * float(torch.linalg.vector_norm(slope)) / math.sqrt(max(later.numel(), 1))
    return psnr(_peak(_fp32_copy(later)), rms)


def _epsilons(program: Program) -> list[float]:
    """Return the constants that may guard divisions: epsilons of norms, and small numbers that are added."""
    epsilons = []
    for op in walk_ops(program):
        operand = op.inputs.get("epsilon") or (op.inputs.get("y") if op.op_type == "add" else None)
        value = constant(operand) if operand is not None else None
        if value is not None and np.size(value) == 1 and 0 < float(np.asarray(value).item()) < LARGEST_EPSILON:
            epsilons.append(float(np.asarray(value).item()))
    return sorted(set(epsilons))


def _scope_of(path: str, called: Collection[str]) -> tuple[str, ...]:
    """Return the scope of a submodule: the own names of the modules called on the way, outermost first."""
    parts = path.split(".")
    above = (".".join(parts[: k + 1]) for k in range(len(parts)))
    return tuple(name.rpartition(".")[2] for name in above if name in called and name)


def _values_by_scope(function: Function) -> dict[tuple[str, ...], list[str]]:
    """Return scope -> its values, in file order; only programs in memory keep scopes."""
    by_scope: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for op in function.operations:
        names = {source.name: names for source, names in op.scopes.items()}.get("TORCHSCRIPT_MODULE_NAME", ())
        if op.op_type != "const" and len(names) > 1:  # the last one is that of the value
            by_scope[tuple(names[:-1])] += [var.name for var in op.outputs]
    return by_scope
