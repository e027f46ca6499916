"""Set a converted model beside the PyTorch module that it was made of: `against_torch`."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from anesurgery.checking.metrics import compare_arrays, psnr
from anesurgery.checking.module_calls import FUNCTION, Call, calls_of, numbers
from anesurgery.display import Drawn, finite
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
SAME_EPSILON = 0.05
"""Relative difference of an epsilon and itself in fp16, subnormal from 6e-5 down: 1e-6 has 4 bits left."""
LARGEST_EPSILON = 0.1
"""Below the variance of what is worth a norm."""
ALONE = 90.0
"""PSNR in dB that a call reaches by itself where it only carries an error on: rounding in fp32 leaves more."""
REPLAYS = 24
"""Values of the package that are given to a call again, to see whether it carries an error on. A choice."""
SPIKE = 16.0
"""So many times the middle of its row is a spike, beside which the rest of a norm would not be seen."""
NEARER = 3.0
"""dB by which another epsilon makes a norm nearer to its value where it explains what was wrong."""
LATER = 12
"""Later modules that are asked whether they hang on one that has no equal, nearest first."""


@dataclass(frozen=True)
class ModuleRow:
    """A call of a submodule or a function, and the value of the package that is nearest to what it gave.

    Attributes:
        name: of the submodule, as `named_modules` has it, or of the function behind the module that calls it;
            "#2" for its second call; "" is the whole module.
        kind: the class; "function" of a function.
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
    """Find the first submodule, or function between submodules, with which a model parts from PyTorch.

    Every submodule is watched while the module runs, and every function that a module with submodules calls.
    One is blamed if its own error is large: what the package gave to it is given to it again, and the result
    compared. Rows of a norm that have a spike are judged without it. What it gave is looked for among the
    values of the program, by number, in any order of axes, and by scope where a program in memory has kept
    them and no number fits. Where the program computes in fp16, the module runs with its weights rounded to
    fp16, so that what is left in fp32 arithmetic is a wrong conversion and not rounding, but for what the
    converter joined before it rounded. A package of fp32 shows smaller differences, as of an epsilon. The
    module itself is not changed.

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
    calls = calls_of(module, inputs, half)
    sizes = {tensor.numel() for call in calls for tensor in (call.tensor, *call.given)}
    kept = {precision: _values(program, function, inputs, precision, sizes) for precision in precisions}
    match = _Match(calls, kept["fp32"], gate, min(gate, ROUNDED) if half else gate, _epsilons(program))
    match.name(_scoped(function_of(program, function)))
    rows = [
        ModuleRow(call.name, call.kind, near.name if near else None, _in_each(call.array, near, kept), state)
        for call, near, state in zip(calls, match.nearest, map(match.state, range(len(calls))), strict=True)
    ]
    return AgainstTorch(tuple(rows), gate, half)


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
    given = {n: np.asarray(v) for n, v in inputs.items() if np.asarray(v).dtype.kind == "f"}
    entries = {n: v.astype(np.float32) for n, v in given.items() if v.size in sizes}
    return {**_constants(function_of(program, name), sizes), **entries, **keep.values}


def _constants(function: Function, sizes: set[int]) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for op in function.operations:
        for var in op.outputs if op.op_type == "const" else ():
            value = _number(var)
            if value is not None and value.size in sizes:
                arrays[var.name] = value
    return arrays


def _number(var: Var) -> Array | None:
    value = constant(var)
    array = None if value is None else np.asarray(value)
    return array.astype(np.float32) if array is not None and array.dtype.kind in "fiu" else None


class _Match:
    """The calls of a module beside the values of a program."""

    def __init__(
        self,
        calls: Sequence[Call],
        values: Mapping[str, Array],
        gate: float,
        sure: float,
        epsilons: Sequence[float],
    ) -> None:
        self._calls, self._values, self._gate, self._sure = calls, _Values(values), gate, sure
        self._epsilons = epsilons
        self._given: dict[int, float] = {}
        self._paired: dict[int, _Near] = {}
        self.nearest = [self._values.nearest(call.array) for call in calls]
        self._psnr = [self._near(call, near) for call, near in zip(calls, self.nearest, strict=True)]

    def _near(self, call: Call, near: _Near | None) -> float:
        """PSNR of a call and a value; of a norm, that of the rows without their spikes, if it is lower."""
        if near is None or call.epsilon is None:
            return -math.inf if near is None else near.psnr
        value = _laid(self._values.arrays[near.name], near.order, call.array.shape)
        return min(near.psnr, _without_spikes(call.array, value))

    def name(self, scoped: Mapping[tuple[str, ...], Sequence[str]]) -> None:
        """Take the value that came of a submodule by its scope, where no value agrees by number.

        Of a value that is quite wrong another one may be nearer by chance.
        """
        called = {call.path for call in self._calls}
        for k, call in enumerate(self._calls):
            names = [n for n in scoped.get(_chain(call.path, called), ()) if n in self._values.arrays]
            own = {names[-1]: self._values.arrays[names[-1]]} if names else {}
            near = _Values(own).nearest(call.array)
            if near is not None and self._psnr[k] < SEEN:
                self.nearest[k], self._psnr[k] = near, near.psnr

    def state(self, k: int) -> str:
        """Does a call agree, is it where an error enters, or is it not among the values?"""
        if self._psnr[k] >= self._gate:
            return "agrees"
        floor = min((self._of_given(tensor) for tensor in self._calls[k].given), default=math.inf)
        if self._psnr[k] >= SEEN and self._has_other_epsilon(k):
            return "parts"
        pairs = [self._given_by(tensor) for tensor in self._calls[k].given]
        inexact = any(pair is None or pair.psnr < self._gate for pair in pairs)
        if inexact and (own := self._own(k)) is not None:
            return "carries" if own >= min(self._gate, ALONE) else "parts"
        if floor < self._gate and self._psnr[k] >= floor - ENTERS:
            return "carries"
        if self._psnr[k] < SEEN and self._is_fused(k, min(self._sure, floor - ENTERS)):
            return "not kept"
        return "rounds" if self._psnr[k] >= self._sure else "parts"

    def _own(self, k: int) -> float | None:
        """The error of a call by itself: of what the package gave to it; None where that is not known.

        What the call makes of that, if the package has it too, is the value of the call from there on.
        """
        call, near = self._calls[k], self.nearest[k]
        nears = [one for tensor in call.given if (one := self._given_by(tensor)) is not None]
        if call.again is None or near is None or len(nears) < len(call.given):
            return None
        options = [self._options(tensor, one) for tensor, one in zip(call.given, nears, strict=True)]
        own = None
        for chosen in itertools.islice(itertools.product(*options), REPLAYS):
            array = call.again([self._as_given(*pair) for pair in zip(call.given, chosen, strict=True)])
            if array is None or array.shape != call.array.shape:
                return None
            same = self._values.nearest(array)
            if same is not None and same.psnr >= ALONE:
                self._pair(k, same)
                return same.psnr
            if own is None and all(one.psnr >= SEEN for one in chosen):
                own = _psnr(array, self._values.arrays[near.name], near.order)
        return own

    def _pair(self, k: int, same: _Near) -> None:
        """Take a value for what a call gave: the call makes it of what the package gave to it."""
        call = self._calls[k]
        value = _laid(self._values.arrays[same.name], same.order, call.array.shape)
        self._psnr[k] = _psnr(call.array, value, None)
        self.nearest[k] = _Near(same.name, same.order, self._psnr[k])
        self._paired[id(call.tensor)] = _Near(same.name, same.order, self._psnr[k])

    def _options(self, tensor: torch.Tensor, near: _Near) -> list[_Near]:
        """The values that may stand for a tensor: one that is right but for rounding, or all of its size."""
        if near.psnr >= self._sure:
            return [near]
        others = [one for one in self._values.all_near(numbers(tensor)) if one.name != near.name]
        return [near, *sorted(others, key=lambda one: -one.psnr)]

    def _given_by(self, tensor: torch.Tensor) -> _Near | None:
        """What the package has in the place of a tensor: the pair of the call that made it, or the nearest."""
        if not tensor.is_floating_point() or isinstance(tensor, torch.nn.Parameter):
            return _Near("", None, math.inf)
        return self._paired.get(id(tensor)) or self._values.nearest(numbers(tensor))

    def _as_given(self, tensor: torch.Tensor, near: _Near) -> torch.Tensor:
        if not near.name:
            return tensor
        value = _laid(self._values.arrays[near.name], near.order, tuple(tensor.shape))
        return torch.from_numpy(value.copy()).to(tensor.dtype)

    def _has_other_epsilon(self, k: int) -> bool:
        """Is a norm nearer to its value with an epsilon that the package has, and the module has not?"""
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

    def _of_given(self, tensor: torch.Tensor) -> float:
        """How near what a call was given is to a value; as right where there is none, and of integers."""
        if not tensor.is_floating_point():
            return math.inf
        if id(tensor) not in self._given:  # the calls hold their tensors, so no address comes twice
            near = self._values.nearest(numbers(tensor))
            self._given[id(tensor)] = near.psnr if near is not None and near.psnr >= SEEN else math.inf
        return self._given[id(tensor)]

    def _is_fused(self, k: int, enough: float) -> bool:
        """Does a later call that hangs on this one agree? Then the package computes it in another form.

        A later call on which this one has so little weight that its error would hardly be seen shows nothing.
        """
        call, near = self._calls[k], self.nearest[k]
        if not call.tensor.requires_grad:
            return False
        wrong = _peak(call.array) * 10 ** (-max(near.psnr if near else 0.0, 0.0) / 20)
        modules = (j for j in range(k + 1, len(self._calls)) if self._calls[j].kind != FUNCTION)
        later = (j for j in modules if self._psnr[j] >= enough)  # a softmax agrees whatever goes into it
        shown = ((j, _shown(self._calls[j].tensor, call.tensor, wrong)) for j in later)
        hanging = itertools.islice(((j, p) for j, p in shown if math.isfinite(p)), LATER)
        return any(self._psnr[j] >= p + ENTERS for j, p in hanging)


class _Values:
    """The values of a program, to be looked through by number."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays
        self._by_size: dict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
        for name, array in arrays.items():
            self._by_size[array.size][name] = _moments(array)

    def nearest(self, wanted: Array) -> _Near | None:
        """The value with the highest PSNR, in the order of axes that fits best.

        No order of elements brings two arrays nearer than their means and their norms are: those that cannot be
        the nearest are not looked at.
        """
        best: _Near | None = None
        for bound, name in sorted(self._bounds(wanted), key=lambda pair: -pair[0]):
            if best is not None and bound < best.psnr:
                break
            for order in _orders(self.arrays[name], wanted):
                psnr = _psnr(wanted, self.arrays[name], order)
                if best is None or psnr > best.psnr:
                    best = _Near(name, order, psnr)
        return best

    def all_near(self, wanted: Array) -> list[_Near]:
        """Each value of as many elements, in the first order of axes that fits."""
        orders = ((name, next(_orders(self.arrays[name], wanted), None)) for name in self._by_size[wanted.size])
        return [_Near(name, order, _psnr(wanted, self.arrays[name], order)) for name, order in orders]

    def _bounds(self, wanted: Array) -> Iterator[tuple[float, str]]:
        mean, root = _moments(wanted)
        slack = 1e-6 * (abs(mean) + root)  # sums in fp32
        for name, (other_mean, other_root) in self._by_size.get(wanted.size, {}).items():
            apart = max(abs(mean - other_mean), abs(root - other_root)) - slack
            yield (psnr(_peak(wanted), apart) if apart > 0 else math.inf), name  # NaN is above nothing


def _moments(array: Array) -> tuple[float, float]:
    """Mean and root of the mean square."""
    if not array.size:
        return 0.0, 0.0
    flat = array.reshape(-1)
    return float(flat.mean(dtype=np.float64)), float(np.linalg.norm(flat)) / math.sqrt(array.size)


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


def _laid(value: Array, order: tuple[int, ...] | None, shape: tuple[int, ...]) -> Array:
    """A value with its long axes in an order, in another shape."""
    if order is not None:
        value = value.reshape([n for n in value.shape if n > 1]).transpose(order)
    return value.reshape(shape)


def _without_spikes(wanted: Array, value: Array) -> float:
    """PSNR of what is no spike of its row: beside one, percents of the rest would not be seen."""
    if not wanted.ndim or wanted.shape[-1] < 2:
        return math.inf
    sizes = np.abs(wanted)
    rest = sizes <= SPIKE * np.median(sizes, axis=-1, keepdims=True)
    return math.inf if rest.all() or not rest.any() else _psnr(wanted[rest], value[rest], None)


def _psnr(wanted: Array, value: Array, order: tuple[int, ...] | None) -> float:
    wanted, value = wanted.reshape(-1), _laid(value, order, (-1,))
    with np.errstate(invalid="ignore", over="ignore"):  # infinities are looked at below
        noise = float(np.linalg.norm(wanted - value)) / math.sqrt(max(wanted.size, 1))
    if math.isfinite(noise):
        return psnr(_peak(wanted), noise)
    row = compare_arrays("", wanted, value)
    return -math.inf if row.bad or math.isnan(row.psnr) else row.psnr


def _in_each(wanted: Array, near: _Near | None, kept: Mapping[str, Mapping[str, Array]]) -> dict[str, float]:
    """How near the same value is in each arithmetic."""
    if near is None:
        return dict.fromkeys(kept, -math.inf)
    return {
        precision: _psnr(wanted, values[near.name], near.order) if near.name in values else -math.inf
        for precision, values in kept.items()
    }


def _peak(array: Array) -> float:
    return float(np.abs(array).max(initial=0.0))


def _shown(later: torch.Tensor, earlier: torch.Tensor, wrong: float) -> float:
    """PSNR in dB of a value that is right but for an error in another; infinite if it does not hang on that.

    The Frobenius norm of the Jacobian, of one random vector times it, says how much of an error comes through.
    """
    if not later.requires_grad or later is earlier:
        return math.inf
    drawn = torch.randn(later.shape, generator=torch.Generator().manual_seed(0))
    (slope,) = torch.autograd.grad(later, earlier, drawn, retain_graph=True, allow_unused=True)
    if slope is None:
        return math.inf
    rms = wrong * float(torch.linalg.vector_norm(slope)) / math.sqrt(max(later.numel(), 1))
    return psnr(_peak(numbers(later)), rms)


def _epsilons(program: Program) -> list[float]:
    """The numbers that guard divisions in a program: epsilons of norms, and what is added to a value."""
    epsilons = []
    for op in walk_ops(program):
        operand = op.inputs.get("epsilon") or (op.inputs.get("y") if op.op_type == "add" else None)
        value = constant(operand) if operand is not None else None
        if value is not None and np.size(value) == 1 and 0 < float(np.asarray(value).item()) < LARGEST_EPSILON:
            epsilons.append(float(np.asarray(value).item()))
    return sorted(set(epsilons))


def _chain(path: str, called: Collection[str]) -> tuple[str, ...]:
    """A submodule as a scope has it: the own names of those that were called, from the outermost on."""
    parts = path.split(".")
    above = (".".join(parts[: k + 1]) for k in range(len(parts)))
    return tuple(name.rpartition(".")[2] for name in above if name in called and name)


def _scoped(function: Function) -> dict[tuple[str, ...], list[str]]:
    """Scope -> the values that came of it, in file order; only programs in memory keep scopes."""
    by_scope: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for op in function.operations:
        names = {source.name: names for source, names in op.scopes.items()}.get("TORCHSCRIPT_MODULE_NAME", ())
        if op.op_type != "const" and len(names) > 1:  # the last one is that of the value
            by_scope[tuple(names[:-1])] += [var.name for var in op.outputs]
    return by_scope
