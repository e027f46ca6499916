"""Set a converted model beside the PyTorch module that it was made of: `against_torch`."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anesurgery.checking.metrics import compare_arrays
from anesurgery.display import Drawn
from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.interpret import Executable, Listener
from anesurgery.loading import load
from anesurgery.mil import Array, Function, Operation, Program, Var, constant, dtype_name, function_of, walk_ops

GATE = 105.0
"""PSNR in dB: rounding in fp32 leaves 110 and more of a right value. A wrong weight in one block of a deep
model is diluted by what goes around the block, so that the blocks behind it still reach 80 to 100."""
ORDERS = 24
"""Orders of axes that are tried for each value: all of four axes."""
ENTERS = 10.0
"""dB that a module loses on what it was given where an error enters in it; less is carried on."""
ROUNDED = 70.0
"""PSNR in dB that rounding to fp16 leaves where weights were joined with others, or with a table, first."""
SEEN = 40.0
"""PSNR in dB from which on a value is taken for what a module gave, and wrong; below, for another one."""
LATER = 12
"""Later modules that are asked whether they hang on one that has no equal, nearest first."""


@dataclass(frozen=True)
class ModuleRow:
    """A call of a submodule, and the value of the package that is nearest to what it gave.

    Attributes:
        name: of the submodule, as `named_modules` has it; "#2" for its second call; "" is the whole module.
        kind: its class.
        value: name of the value in the program; None where none has as many elements.
        psnr: arithmetic -> dB between the two; minus infinite without a value.
        state: "agrees"; "parts" where an error enters; "rounds" where it may be the rounding of what the
            converter joined, in a package of fp16; "carries" where what it was given is off already; or "not
            kept": no value is equal, and a later module that hangs on it agrees, since the converter fused it
            with its neighbours.
    """

    name: str
    kind: str
    value: str | None
    psnr: Mapping[str, float]
    state: str


@dataclass(frozen=True)
class AgainstTorch(Drawn):
    """What `against_torch` found: a row for each call of a submodule, in the order in which the calls end.

    Attributes:
        rows: the calls.
        gate: PSNR in dB in fp32 from which on a value agrees.
        rounded: were the module's weights rounded to fp16, as those of the package are?
    """

    rows: tuple[ModuleRow, ...]
    gate: float
    rounded: bool

    @property
    def first(self) -> ModuleRow | None:
        """The innermost module with which package and PyTorch begin to part; None where they agree."""
        return next((row for row in self.rows if row.state == "parts"), None)

    @property
    def ok(self) -> bool:
        """Does every module agree that the package kept?"""
        return self.first is None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [vars(row) | {"psnr": {k: _finite(v) for k, v in row.psnr.items()}} for row in self.rows]
        first = None if self.first is None else self.first.name
        return {"ok": self.ok, "gate_db": self.gate, "rounded": self.rounded, "first": first, "modules": rows}


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


@door("inputs")
def against_torch(
    module: torch.nn.Module,
    model: Any,
    inputs: Mapping[str, Array],
    *,
    gate: float = GATE,
    precisions: Sequence[str] = ("fp32", "fp16", "ane"),
    function: str | None = None,
) -> AgainstTorch:
    """Find the first submodule with which a converted model parts from the PyTorch module it was made of.

    Every submodule is watched while the module runs. What it gave is looked for among the values of the
    program, by number, in any order of axes. Where the program computes in fp16, the module runs with its
    weights rounded to fp16, so that what is left in fp32 arithmetic is a wrong conversion and not rounding, but
    for what the converter joined before it rounded. A package of fp32 shows smaller differences, as of an
    epsilon. The module itself is not changed.

    Args:
        module: as it was converted, in fp32, in evaluation mode.
        model: path of a package, MLModel, or MIL program.
        inputs: of the model, by name. They are given to the module by name where its `forward` has these names,
            else in their order.
        gate: PSNR in dB in fp32 from which on two values agree.
        precisions: arithmetics of the interpreter; "fp32" is the one that decides.
        function: of the model; `main` or the first by default.

    Returns:
        A row for each call of a submodule; `first` is where they part.

    Raises:
        SurgeryError: `module` does not take these inputs, or "fp32" is not among the arithmetics.
        InterpretError: the model does not take them.
    """
    if "fp32" not in precisions:
        raise SurgeryError(f"precisions={tuple(precisions)!r} lacks 'fp32', in which modules are compared")
    program = load(model).program
    half = _computes_in_half(program)
    inputs = _as_read(function_of(program, function), inputs)
    calls = _recorded(_rounded(module) if half else copy.deepcopy(module), inputs)
    sizes = {tensor.numel() for call in calls for tensor in (call.tensor, *call.given)}
    kept = {precision: _values(program, function, inputs, precision, sizes) for precision in precisions}
    match = _Match(calls, kept["fp32"], gate, min(gate, ROUNDED) if half else gate)
    rows = [
        ModuleRow(call.name, call.kind, near.name if near else None, _in_each(call.array, near, kept), state)
        for call, near, state in zip(calls, match.nearest, map(match.state, range(len(calls))), strict=True)
    ]
    return AgainstTorch(tuple(rows), gate, half)


@dataclass
class _Call:
    """A call of a submodule: what it gave, with its history and as numbers, and what it was given."""

    name: str
    kind: str
    tensor: torch.Tensor
    array: Array
    given: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Near:
    name: str
    order: tuple[int, ...] | None
    """Of the axes that are longer than 1; None where the elements are read as they lie."""
    psnr: float


def _as_read(function: Function, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs as the program reads them: those of fp16 are rounded for the module too."""
    halves = {name for name, var in function.inputs.items() if dtype_name(var) == "fp16"}
    rounded = {n: np.asarray(v).astype(np.float16).astype(np.float32) for n, v in inputs.items() if n in halves}
    return {**inputs, **rounded}


def _computes_in_half(program: Program) -> bool:
    return any(dtype_name(v) == "fp16" for op in walk_ops(program) if op.op_type == "const" for v in op.outputs)


def _rounded(module: torch.nn.Module) -> torch.nn.Module:
    """A copy with parameters and buffers as fp16 holds them."""
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for tensor in itertools.chain(twin.parameters(), twin.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(tensor.half().clamp(-65504, 65504).to(tensor.dtype))
    return twin


def _recorded(module: torch.nn.Module, inputs: Mapping[str, Array]) -> list[_Call]:
    """Every call of a submodule, in the order in which the calls end.

    Raises:
        SurgeryError: the module does not take the inputs.
    """
    calls: list[_Call] = []
    given = {
        name: torch.from_numpy(np.array(v, np.int64 if np.asarray(v).dtype.kind in "iu" else np.float32))
        for name, v in inputs.items()
    }
    by_name = set(given) <= set(inspect.signature(module.forward).parameters)
    with _watched(module, calls), torch.enable_grad():
        try:
            module.eval()(**given) if by_name else module.eval()(*given.values())
        except Exception as error:  # a module raises what it likes
            raise SurgeryError(f"the module does not take {list(given)}: {error}") from error
    return calls


@contextmanager
def _watched(module: torch.nn.Module, calls: list[_Call]) -> Iterator[None]:
    counts: dict[str, int] = defaultdict(int)

    def note(name: str) -> Any:
        def hook(part: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            counts[name] += 1
            again = f"#{counts[name]}" if counts[name] > 1 else ""
            read = tuple(v for v in (*given, *named.values()) if isinstance(v, torch.Tensor))
            if (tensor := _tensor(output)) is not None:
                calls.append(_Call(f"{name}{again}", type(part).__name__, tensor, _array(tensor), read))

        return hook

    hooks = [part.register_forward_hook(note(name), with_kwargs=True) for name, part in module.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _array(tensor: torch.Tensor) -> Array:
    return tensor.detach().float().numpy().copy()


def _tensor(output: Any) -> torch.Tensor | None:
    """The first tensor of what a module gave."""
    if isinstance(output, torch.Tensor):
        return output
    parts = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    )
    return next((found for part in parts if (found := _tensor(part)) is not None), None)


class _Keep(Listener):
    """Keeps the values that have as many elements as some module gave."""

    def __init__(self, sizes: set[int]) -> None:
        self._sizes = sizes
        self.values: dict[str, Array] = {}

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Copy what may be looked for."""
        for var, value in zip(op.outputs, outputs, strict=True):
            if hasattr(value, "detach") and value.numel() in self._sizes:
                self.values[var.name] = value.detach().cpu().float().numpy().copy()


def _values(
    program: Program, name: str | None, inputs: Mapping[str, Array], precision: str, sizes: set[int]
) -> dict[str, Array]:
    """The values of a program by name, its constants among them."""
    keep = _Keep(sizes)
    Executable(program, function=name, precision=precision)(inputs, listener=keep)
    return {**_constants(function_of(program, name), sizes), **keep.values}


def _constants(function: Function, sizes: set[int]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for op in function.operations:
        for var in op.outputs if op.op_type == "const" else ():
            value = _number(var)
            if value is not None and value.size in sizes:
                found[var.name] = value
    return found


def _number(var: Var) -> Array | None:
    value = constant(var)
    array = None if value is None else np.asarray(value)
    return array.astype(np.float32) if array is not None and array.dtype.kind in "fiu" else None


class _Match:
    """The calls of a module beside the values of a program."""

    def __init__(self, calls: Sequence[_Call], values: Mapping[str, Array], gate: float, sure: float) -> None:
        self._calls, self._values, self._gate, self._sure = calls, values, gate, sure
        self._given: dict[int, float] = {}
        self.nearest = [_nearest(call.array, values) for call in calls]
        self._psnr = [-math.inf if near is None else near.psnr for near in self.nearest]

    def state(self, k: int) -> str:
        """Does a call agree, is it where an error enters, or is it not among the values?"""
        if self._psnr[k] >= self._gate:
            return "agrees"
        floor = min((self._of_given(tensor) for tensor in self._calls[k].given), default=math.inf)
        if floor < self._gate and self._psnr[k] >= floor - ENTERS:
            return "carries"
        if self._psnr[k] < SEEN and self._is_fused(k, min(self._sure, floor - ENTERS)):
            return "not kept"
        return "rounds" if self._psnr[k] >= self._sure else "parts"

    def _of_given(self, tensor: torch.Tensor) -> float:
        """How near what a call was given is to a value; as right where there is none, and of integers."""
        if not tensor.is_floating_point():
            return math.inf
        if id(tensor) not in self._given:  # the calls hold their tensors, so no address comes twice
            near = _nearest(_array(tensor), self._values)
            self._given[id(tensor)] = near.psnr if near is not None and near.psnr >= SEEN else math.inf
        return self._given[id(tensor)]

    def _is_fused(self, k: int, enough: float) -> bool:
        """Does a later call that hangs on this one agree? Then the package computes it in another form."""
        made = self._calls[k].tensor
        later = [j for j in range(k + 1, len(self._calls)) if self._psnr[j] >= enough][:LATER]
        return made.requires_grad and any(_hangs_on(self._calls[j].tensor, made) for j in later)


def _nearest(wanted: Array, values: Mapping[str, Array]) -> _Near | None:
    """The value with the highest PSNR, in the order of axes that fits best."""
    best: _Near | None = None
    for name, value in values.items():
        for order in _orders(value, wanted):
            psnr = _psnr(wanted, value, order)
            if best is None or psnr > best.psnr:
                best = _Near(name, order, psnr)
    return best


def _orders(value: Array, wanted: Array) -> Iterator[tuple[int, ...] | None]:
    """The orders of the long axes of a value that give the shape of another."""
    if value.size != wanted.size:
        return
    mine, theirs = ([n for n in array.shape if n > 1] for array in (value, wanted))
    yield None
    if sorted(mine) == sorted(theirs):
        for order in itertools.islice(itertools.permutations(range(len(mine))), 1, ORDERS):
            if [mine[k] for k in order] == theirs:
                yield order


def _psnr(wanted: Array, value: Array, order: tuple[int, ...] | None) -> float:
    if order is not None:
        value = value.reshape([n for n in value.shape if n > 1]).transpose(order)
    row = compare_arrays("", wanted.reshape(-1), value.reshape(-1))
    return -math.inf if row.bad or math.isnan(row.psnr) else row.psnr


def _in_each(wanted: Array, near: _Near | None, kept: Mapping[str, Mapping[str, Array]]) -> dict[str, float]:
    """How near the same value is in each arithmetic."""
    if near is None:
        return dict.fromkeys(kept, -math.inf)
    return {
        precision: _psnr(wanted, values[near.name], near.order) if near.name in values else -math.inf
        for precision, values in kept.items()
    }


def _hangs_on(later: torch.Tensor, earlier: torch.Tensor) -> bool:
    if not later.requires_grad or later is earlier:
        return False
    (found,) = torch.autograd.grad(later.sum(), earlier, retain_graph=True, allow_unused=True)
    return found is not None
