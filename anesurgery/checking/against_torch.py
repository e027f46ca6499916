"""Compare a converted model with the PyTorch module that it was made from, call by call: `against_torch`.

For each call of a submodule, or of a function between submodules (`torch_calls`), the nearest value of the
converted program is looked up by number, since conversions rename, fuse and transpose (`_Values`). `_Match`
then decides for each call whether it agrees, or where an error enters. The report names the first such call.
"""

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

from anesurgery.checking.output_comparison import compare_arrays, psnr
from anesurgery.checking.torch_calls import Call, calls_of, fp32_copy
from anesurgery.display import Drawn, finite
from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.interpret import Executable, Listener
from anesurgery.loading import load
from anesurgery.mil import Array, Function, Operation, Program, Var, constant, dtype_name, function_of, walk_ops

GATE = 105.0
"""PSNR in dB from which a value agrees by default: rounding in fp32 leaves 110 or more. A wrong weight in one
block of a deep model is diluted by the residual stream, so that later blocks still reach 80 to 100."""
ORDERS = 24
"""The most orders of axes that are tried for each value: all of four axes."""
ENTERS = 10.0
"""dB that a module loses beside its inputs where an error enters in it; less means that it carries one on."""
ROUNDED = 70.0
"""PSNR in dB that rounding to fp16 leaves where weights were first fused with others, or with a table."""
FUSED = 6.0
"""dB by which weights that were joined first may differ more than by rounding each alone. A choice."""
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
    """A call of a submodule or a function, and the value of the package that is nearest to what it gave."""

    name: str
    """The submodule's name as in `named_modules`, or the calling module's name and the function; "#2" for its
    second call; "" is the whole module."""
    kind: str
    """The class; "function" for a function."""
    value: str | None
    """Name of the value in the program; None where none has as many elements."""
    psnr: Mapping[str, float]
    """Arithmetic -> dB between the two; minus infinite without a value."""
    state: str
    """One of "agrees"; "parts" where an error enters; "rounds" where rounding of fused weights to fp16 may
    explain it; "carries" where its inputs are off already; or "not kept": no value is equal, but a later module
    that depends on it agrees, since the converter fused it with its neighbours; or it goes into no output."""
    rounding: float = math.inf
    """dB between what PyTorch gives with weights rounded to fp16 and with its own, from the inputs of the model
    on; infinite if they are not rounded."""


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
        rows = [finite(vars(row) | {"psnr": dict(row.psnr)}) for row in self.rows]
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
    so rounding does not count as a wrong conversion. The module itself is not changed. For an image, give
    pixels from 0 to 255: the module gets them with the scale and bias of `ct.ImageType`.

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
        SurgeryError: `module` does not take these inputs or was traced, or "fp32" is not among the arithmetics.
        InterpretError: the model does not take them.
    """
    if "fp32" not in precisions:
        raise SurgeryError(f"precisions={tuple(precisions)!r} lacks 'fp32', in which modules are compared")
    program = load(model).program
    consts = (op for op in walk_ops(program) if op.op_type == "const")
    half = any(dtype_name(var) == "fp16" for op in consts for var in op.outputs)
    inputs = _rounded_inputs(function_of(program, function), inputs)
    given = _without_pixels(function_of(program, function), inputs)
    calls = calls_of(module, given, half)
    exact = calls_of(module, given, half=False) if half else calls
    sizes = {tensor.numel() for call in calls for tensor in (call.tensor, *call.operands.tensors)}
    kept = {precision: _values(program, function, inputs, precision, sizes) for precision in precisions}
    ends = [_as_numbers(var).name for var in function_of(program, function).outputs]
    match = _Match(calls, kept["fp32"], ends, gate, min(gate, ROUNDED) if half else gate, _epsilons(program))
    match.name(_values_by_scope(function_of(program, function)))
    found = zip(calls, match.nearest, match.states(), _costs_of_rounding(calls, exact), strict=True)
    rows = [
        ModuleRow(
            call.name,
            call.kind,
            near.name if near else None,
            _psnr_in_each(call.array, near, kept),
            state,
            rounding,
        )
        for call, near, state, rounding in found
    ]
    return AgainstTorch(tuple(rows), gate, half)


def _costs_of_rounding(rounded: Sequence[Call], exact: Sequence[Call]) -> list[float]:
    """Return the dB between the same calls with rounded and with exact weights; infinite if they differ."""
    same = [(c.name, c.array.shape) for c in rounded] == [(c.name, c.array.shape) for c in exact]
    if rounded is exact or not same:
        return [math.inf] * len(rounded)
    return [_psnr(one.array, other.array, None) for one, other in zip(exact, rounded, strict=True)]


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


def _without_pixels(function: Function, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs as the module reads them: with the scale and bias that `ct.ImageType` put before it."""
    read = dict(inputs)
    for op in function.operations:
        name, _, step = op.name.rpartition("__")[0].rpartition("__")
        if name in read and step in ("scaled", "biased"):
            factor = np.asarray(constant(op.y), np.float32)
            read[name] = read[name] * factor if step == "scaled" else read[name] + factor
    return read


def _as_numbers(output: Var) -> Var:
    """Return an output; for the label or the probabilities of a classifier, what they are made from."""
    op = output.op
    return op.probabilities if op is not None and op.op_type == "classify" else output


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
    floats = {n: np.asarray(v) for n, v in inputs.items() if np.asarray(v).dtype.kind == "f"}
    entries = {n: v.astype(np.float32) for n, v in floats.items() if v.size in sizes}
    return {**_constants(function_of(program, name), sizes), **entries, **keep.values}


def _constants(function: Function, sizes: set[int]) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for op in function.operations:
        for var in op.outputs if op.op_type == "const" else ():
            value = np.asarray(constant(var))  # an array of objects where it is not known
            if value.dtype.kind in "fiu" and value.size in sizes:
                arrays[var.name] = value.astype(np.float32)
    return arrays


class _Match:
    """The recorded calls beside the values of the program.

    From the PSNR `gate` on, a value agrees; from `sure` on, it is right but for the rounding of fused weights.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        values: Mapping[str, Array],
        ends: Sequence[str],
        gate: float,
        sure: float,
        epsilons: Sequence[float],
    ) -> None:
        self._calls, self._values, self._gate, self._sure = calls, _Values(values), gate, sure
        self._epsilons = epsilons
        self._operand_psnr: dict[int, float] = {}
        self._paired: dict[int, _NearestValue] = {}
        outputs = _Values({name: values[name] for name in ends if name in values})  # those of the whole module
        self.nearest = [(self._values if call.name else outputs).nearest(call.array) for call in calls]
        self._psnr = [self._near(call, near) for call, near in zip(calls, self.nearest, strict=True)]

    def _near(self, call: Call, near: _NearestValue | None) -> float:
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
        input_psnr = min(map(self._input_psnr, self._calls[k].operands.tensors), default=math.inf)
        if self._psnr[k] >= SEEN and self._has_other_epsilon(k):
            return "parts"
        pairs = map(self._value_in_place_of, self._calls[k].operands.tensors)
        inexact = any(pair is None or pair.psnr < self._gate for pair in pairs)
        own_psnr = self._own_error(k) if inexact else None
        if own_psnr is not None and own_psnr >= min(self._gate, ALONE):
            return "carries"
        if own_psnr is None and input_psnr < self._gate and self._psnr[k] >= input_psnr - ENTERS:
            return "carries"
        if self._psnr[k] < SEEN and self._is_fused_away(k, min(self._sure, input_psnr - ENTERS)):
            return "not kept"
        reached = self._psnr[k] if own_psnr is None else own_psnr
        return "rounds" if reached >= min(self._sure, self._own_rounding(k) - FUSED) else "parts"

    def _own_error(self, k: int) -> float | None:
        """Return the PSNR of a call replayed on the program's values of its inputs; None where it is unknown.

        If the program has the replayed result too, that becomes the value of the call from there on.
        """
        call, near = self._calls[k], self.nearest[k]
        tensors, replay = call.operands.tensors, call.operands.replay
        nears = [one for tensor in tensors if (one := self._value_in_place_of(tensor)) is not None]
        if replay is None or near is None or len(nears) < len(tensors) or call.is_overwritten:
            return None
        options = [self._candidates(tensor, one) for tensor, one in zip(tensors, nears, strict=True)]
        own = None
        for chosen in itertools.islice(itertools.product(*options), REPLAYS):
            array = replay([self._tensor_from(*pair) for pair in zip(tensors, chosen, strict=True)])
            if array is None or array.shape != call.array.shape:
                return None
            same = self._values.nearest(array)
            if same is not None and same.psnr >= ALONE:
                self._pair(k, same)
                return same.psnr
            if own is None and all(one.psnr >= SEEN for one in chosen):
                own = _psnr(array, self._values.arrays[near.name], near.order)
        return own

    def _own_rounding(self, k: int) -> float:
        """Return the PSNR that rounding its weights to fp16 costs a call; infinite where it is unknown."""
        call, replay = self._calls[k], self._calls[k].operands.replay
        if replay is None or call.is_overwritten:
            return math.inf
        rounded, exact = (replay(call.operands.tensors, half) for half in (True, False))
        if rounded is None or exact is None or {rounded.shape, exact.shape} != {call.array.shape}:
            return math.inf
        repeats = _psnr(call.array, rounded, None) >= ALONE  # a module with a memory does not
        return _psnr(exact, rounded, None) if repeats else math.inf

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
        others = [one for one in self._values.all_near(fp32_copy(tensor)) if one.name != near.name]
        return [near, *sorted(others, key=lambda one: -one.psnr)]

    def _value_in_place_of(self, tensor: torch.Tensor) -> _NearestValue | None:
        """Return the program's value for a tensor: that of the call that made it, or the nearest."""
        if not tensor.is_floating_point():
            return _NearestValue("", None, math.inf)
        return self._paired.get(id(tensor)) or self._values.nearest(fp32_copy(tensor))

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
        if id(tensor) not in self._operand_psnr:  # the calls hold their tensors, so no address comes twice
            near = self._values.nearest(fp32_copy(tensor))
            self._operand_psnr[id(tensor)] = near.psnr if near is not None and near.psnr >= SEEN else math.inf
        return self._operand_psnr[id(tensor)]

    def _is_fused_away(self, k: int, enough: float) -> bool:
        """Return whether a later call that depends on this one agrees: then the program fused it.

        A later call shows nothing if an error of this one would hardly change it.
        """
        call, near = self._calls[k], self.nearest[k]
        if not call.tensor.requires_grad:
            return False
        wrong = _peak(call.array) * 10 ** (-max(near.psnr if near else 0.0, 0.0) / 20)
        later = zip(self._calls[k + 1 :], self._psnr[k + 1 :], strict=True)
        agreeing = ((one, reached) for one, reached in later if one.shows_operands and reached >= enough)
        # what each would reach if the error of this call went into it
        both = ((reached, _psnr_of_error_through(one.tensor, call.tensor, wrong)) for one, reached in agreeing)
        dependent = itertools.islice((pair for pair in both if math.isfinite(pair[1])), LATER)
        return any(reached >= with_error + ENTERS for reached, with_error in dependent)


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
        orders = ((name, _first_order(self.arrays[name], wanted)) for name in self._by_size[wanted.size])
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


def _first_order(value: Array, wanted: Array) -> tuple[int, ...] | None:
    """Return the first order of axes that gives the shape of another array; None where none has to move."""
    mine, theirs = ([n for n in array.shape if n > 1] for array in (value, wanted))
    return None if mine == theirs else next(filter(None, _orders(value, wanted)), None)


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
    return psnr(_peak(fp32_copy(later)), rms)


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
