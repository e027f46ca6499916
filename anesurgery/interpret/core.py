"""Run a program: plan once which function computes each op and where, then evaluate the ops in order.

A value is freed after its last use. Constants are views of the stored weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.doors import short_of_memory
from anesurgery.errors import InterpretError, OutOfMemory, SurgeryError
from anesurgery.files.arrays import set_aside
from anesurgery.files.source import SourceFile
from anesurgery.files.weights import source_of
from anesurgery.interpret import attentions, sampling, state
from anesurgery.interpret.arithmetic import precision as dtypes
from anesurgery.interpret.ops import constexpr, control, tensor
from anesurgery.interpret.ops.reduction import linear
from anesurgery.interpret.ops.tensor import sliced_at
from anesurgery.interpret.state import Box
from anesurgery.interpret.table import TABLE, Listener, Unsupported
from anesurgery.mil import (
    Array,
    Block,
    Operation,
    Program,
    Var,
    function_of,
    is_constexpr,
    is_symbolic,
    operands,
    static_shape,
    types,
)
from anesurgery.ops import MOVING
from anesurgery.text import to_text

CPU = "cpu"


def check(device: str) -> str:
    """The device, if torch has it.

    Raises:
        InterpretError: it does not.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        said = str(error).splitlines()[0]
        raise InterpretError(
            f"device={device!r} cannot be used ({said}); leave it out for the processor"
        ) from error
    return device


def move(value: Any, device: str) -> Any:
    """A tensor, or the value of a state, on a device."""
    if device == CPU:
        return value
    if isinstance(value, Box):
        value.value = value.value.to(device)
        return value
    return value.to(device) if isinstance(value, torch.Tensor) else value


def default(device: str) -> AbstractContextManager[Any]:
    """While it lasts, new tensors are made on the device."""
    return nullcontext() if device == CPU else torch.device(device)


Env = dict[Var, Any]

OFTEN = 2
"""Runs after which it pays to bind the steps to their constants, which are all kept by then."""


@dataclass
class Step:
    """One op, ready to run."""

    op: Operation
    function: Any
    """From the table; None for control flow, which runs blocks."""
    fixed: dict[str, Any]
    """Inputs that are constants."""
    reads: list[tuple[str, Any]]
    """Inputs that are values: (parameter, Var or tuple of Vars)."""
    stored: list[str]
    """Parameters whose constants are not yet as this op computes with them (`dtypes.is_stored`)."""
    outs: list[tuple[Var, torch.dtype | None, dtypes.Rounding | None]]
    dead: list[Var]


class Plan:
    """The steps of a list of ops, and of the blocks nested in them."""

    def __init__(
        self,
        ops: Iterable[Operation],
        keep: Iterable[Var],
        arithmetic: str | dtypes.Arithmetic,
        outside: Plan | None = None,
        *,
        fuse: bool = False,
        device: str = "cpu",
        room: int | None = None,
    ) -> None:
        self.arithmetic, self.device = dtypes.check(arithmetic), check(device)
        self.room = dtypes.KEPT if room is None else room
        self.constants: Env = dict(outside.constants) if outside else {}
        self.decompressed: dict[Var, Array] = dict(outside.decompressed) if outside else {}
        self.steps: list[Step] = []
        self.made = set[Var]()
        """What is rounded when it is made: it is not rounded again where it is only moved."""
        self.blocks: dict[Block, Plan] = {}
        ops = list(ops)
        self.mixed: bool = outside.mixed if outside else dtypes.is_mixed(ops)
        self.sources = _sources(ops)
        self._check_sources()
        ops = [op for op in ops if not self._constant(op)]
        self.constants |= {v: self._tensor(a) for v, a in self.decompressed.items()}
        keep = list(keep)
        reads = [self._reads(op) for op in ops]
        self.outer = _from_outside(ops, reads, keep)
        last = _last_uses(ops, reads, set(keep))
        for i, op in enumerate(ops):
            self.steps.append(self._step(op, last.get(i, [])))
        fuse = fuse and arithmetic == "fp32"
        self.direct = self._fuse(ops, set(keep)) if fuse else self.steps
        self.in_place = state.updates(ops) if outside is None else set[Operation]()
        sources = [v for v in self.outer if v not in self.constants and not _is_const(v)]
        self.beside = state.beside(((step.op, step.dead) for step in self.direct), sources)
        self.runs, self.kept = 0, dict[Var, torch.Tensor]()
        self.quick: list[Quick | None] | None = None
        self.ready_bytes = sum(4 * s.fixed[k].numel() for s in self.steps for k in s.stored)

    def _constant(self, op: Operation) -> bool:
        if op.op_type == "const":
            return True
        if is_constexpr(op):
            arrays = constexpr.decompress(op, self.decompressed)
            if sum(array.nbytes for array in (*self.decompressed.values(), *arrays)) > dtypes.KEPT:
                arrays = [set_aside(array) for array in arrays]
            self.decompressed |= zip(op.outputs, arrays, strict=True)
            return True
        return False

    def _reads(self, op: Operation) -> list[Var]:
        """What an op reads, its blocks included, which are planned here: each once, however deep it is."""
        if op.blocks and op.op_type not in control.TABLE:
            raise Unsupported(f"op {op.name}: the interpreter does not know {op.op_type!r}")
        read = [v for _, v in operands(op)]
        for block in op.blocks:
            nested = Plan(block.operations, block.outputs, self.arithmetic, self, device=self.device)
            self.blocks[block] = nested
            own = set(block.inputs)
            read += [v for v in nested.outer if v not in own]
        return read

    def _step(self, op: Operation, dead: list[Var]) -> Step:
        if not op.blocks and op.op_type not in TABLE:
            raise Unsupported(
                f"op {op.name}: the interpreter does not know {op.op_type!r}; "
                "add a meaning with @impl (anesurgery.interpret.table)"
            )
        meaning = None if op.blocks else TABLE[op.op_type]
        fixed, reads, stored = self._inputs(op, moves=meaning is not None and meaning.moves)
        arithmetic = dtypes.computes_in(op, self.arithmetic, self.mixed)
        rounded = self.arithmetic == "fp16" and op.op_type in MOVING and op.inputs.get("x") in self.made
        outs = [
            (v, dtypes.run_dtype(v, arithmetic), None if rounded else dtypes.rounding(v, arithmetic))
            for v in op.outputs
        ]
        self.made |= set(op.outputs)
        function = meaning and dtypes.meaning(op, meaning, arithmetic)
        return Step(op, function, fixed, reads, stored, outs, dead)

    def _fuse(self, ops: list[Operation], keep: set[Var]) -> list[Step]:
        """The steps of a run that nobody listens to."""
        steps = {step.op: step for step in self.steps}
        for attention in attentions.find(ops, keep):
            fixed, reads, last = dict(attention.options), list[tuple[str, Any]](), attention.ops[-1]
            others = (s for s in self.steps[: ops.index(last)] if s.op not in attention.ops)
            if {v for s in others for v in s.dead} & {v for _, v in attention.reads}:
                continue  # freed before the last of its ops
            for name, var in attention.reads:
                if var in self.constants or _is_const(var):
                    fixed[name] = dtypes.widen(self.value({}, var))
                else:
                    reads.append((name, var))
            dead = [v for op in attention.ops for v in steps[op].dead]
            outs = steps[last].outs
            steps[last] = Step(last, attentions.attend, fixed, reads, [], outs, dead)
            for op in attention.ops[:-1]:
                del steps[op]
        return [_placed(_unbiased(step)) for step in steps.values()]

    def _inputs(self, op: Operation, moves: bool) -> tuple[dict[str, Any], list[tuple[str, Any]], list[str]]:
        fixed: dict[str, Any] = {}
        reads: list[tuple[str, Any]] = []
        for name, value in op.inputs.items():
            if value is None or name.startswith("_"):
                continue
            if isinstance(value, (list, tuple)):
                self.constants |= {v: self._fixed(op, name, v) for v in value if _is_const(v)}
                reads.append((name, tuple(value)))
            elif _is_const(value):
                fixed[name] = self._fixed(op, name, value)
            elif value in self.constants:
                fixed[name] = self.constants[value]
            else:
                reads.append((name, value))
        stored = [k for k, v in fixed.items() if dtypes.is_stored(v)]
        return fixed, reads, [] if moves else stored

    def _tensor(self, array: Any) -> torch.Tensor:
        return move(dtypes.as_tensor(array), self.device)

    def _fixed(self, op: Operation, name: str, var: Var) -> Any:
        """A constant operand: tensors for what an op computes with, plain Python for what describes it."""
        value = var.val
        if isinstance(value, np.ndarray) and value.dtype == object:
            # symbols of a program in memory; saved, each says "what is left"
            value = np.array([-1 if is_symbolic(v) else int(v) for v in value], np.int32)
        described = getattr(op.input_spec.input_types.get(name), "const", False)
        if isinstance(value, (np.ndarray, np.generic)):
            if described and (value.ndim == 0 or (value.ndim == 1 and value.dtype.kind != "f")):
                return value.tolist()
            return self._tensor(value)
        if described or isinstance(value, str) or not isinstance(value, (bool, int, float)):
            return value
        return self._tensor(np.asarray(value, np.float32) if isinstance(value, float) else value)

    def _ready(self, step: Step, name: str, stored: torch.Tensor) -> torch.Tensor:
        """A stored constant as an op computes with it: kept from the second run on, if all find room."""
        var = step.op.inputs[name]
        if (kept := self.kept.get(var)) is not None:
            return kept
        if name == "weight" and getattr(self.arithmetic, "reads_stored", False):
            return stored
        if name == "weight" and step.op.op_type == "linear" and self._widens_in_parts:
            return stored
        wide = stored.float()
        if self.runs > 1 and self.ready_bytes <= self.room:
            self.kept[var] = wide
            dtypes.forget(var.val)
        return wide

    @property
    def _widens_in_parts(self) -> bool:
        """Is the weight of a linear widened as it is multiplied, where it would not be kept anyway?"""
        return self.arithmetic in ("fp32", "fp16") and self.ready_bytes > self.room

    def run(self, env: Env, listener: Listener | None) -> None:
        """Evaluate the steps; `env` holds the values and loses those that are no longer needed."""
        self.runs += 1
        self._check_sources()
        if listener is not None:
            for step in self.steps:
                self.take(step, env, listener)
            return
        if self.runs > OFTEN and self.quick is None:
            self.quick = [self._quick(step) for step in self.direct]
        for step, short in zip(self.direct, self.quick or repeat(None), strict=False):
            if short is None:
                self.take(step, env)
                continue
            try:
                short(env)
            except Exception:  # taken as a whole it says what is wrong
                self.take(step, env)

    def _quick(self, step: Step) -> Quick | None:
        """A step bound to its constants, where they are all there."""
        fixed = dict(step.fixed)
        for name in step.stored:
            kept = self.kept.get(step.op.inputs[name])
            if kept is None:
                return None
            fixed[name] = kept
        return None if step.op in self.in_place else quick(step, fixed, self.constants)

    def take(self, step: Step, env: Env, listener: Listener | None = None) -> None:
        """Evaluate one step."""
        arguments = self.arguments(step, env)
        for name in step.stored:
            arguments[name] = self._ready(step, name, arguments[name])
        if listener is not None:
            listener.before(step.op, arguments)
        results = self._compute(step, arguments, env, listener)
        if step.stored and (self.runs == 1 or self.ready_bytes > self.room):  # else kept from the second run on
            for name in step.stored:
                dtypes.forget(step.op.inputs[name].val)
        given = None if step.function is None else arguments.values()
        for (var, dtype, rounding), value in zip(step.outs, results, strict=True):
            ready = rounding is None and getattr(value, "dtype", None) is dtype
            env[var] = value if ready else dtypes.finish(value, dtype, rounding, given)
        if listener is not None:
            listener.after(step.op, [env[var] for var, _, _ in step.outs])
        for var in step.dead:
            env.pop(var, None)

    def _compute(self, step: Step, arguments: dict[str, Any], env: Env, listener: Listener | None) -> Any:
        try:
            if step.function is None:
                return control.TABLE[step.op.op_type](self, step.op, arguments, env, listener)
            if listener is None and step.op in self.in_place:
                spent, others = step.op.x in step.dead, self.beside[step.op]
                result = state.update(step.op, env, arguments, spent=spent, others=others)
            else:
                result = step.function(**arguments)
        except Exception as error:
            foreseen = isinstance(error, InterpretError)
            if isinstance(error, SurgeryError) and (step.op.blocks or not foreseen):
                raise  # an op of a nested block has said it all
            if short := short_of_memory(error):
                raise OutOfMemory(f"op {step.op.name} ({step.op.op_type}): {short}") from error
            at = next(i for i, s in enumerate(self.steps) if s.op is step.op)
            around = "".join(
                f"\n  {'>' if s.op is step.op else ' '} {to_text(s.op).splitlines()[0]}"
                for s in self.steps[max(at - 2, 0) : at + 3]
            )
            got = ", ".join(f"{k}={sampling.describe(v)}" for k, v in arguments.items())
            what = str(error) if foreseen else f"{type(error).__name__}: {error}"
            raise (type(error) if foreseen else InterpretError)(
                f"op {step.op.name} failed: {what}{around}\n  on {got}"
            ) from error
        return result if isinstance(result, (tuple, list)) and len(step.outs) > 1 else (result,)

    def arguments(self, step: Step, env: Env) -> dict[str, Any]:
        """What a step reads, by parameter; constants as they are stored."""
        read = dict(step.fixed)
        for name, wanted in step.reads:
            several = wanted.__class__ is tuple
            read[name] = [dtypes.widen(self.value(env, v)) for v in wanted] if several else env[wanted]
        return read

    def _check_sources(self) -> None:
        """See that nobody wrote to the weight files: reading one that was cut short ends the process."""
        for source in self.sources:
            source.check()

    def stored(self) -> list[Any]:
        """The constants that the steps and the nested blocks read."""
        here = [x for step in self.steps for x in step.fixed.values()] + list(self.constants.values())
        return here + [x for plan in self.blocks.values() for x in plan.stored()]

    def value(self, env: Env, var: Var) -> Any:
        """The value of a var: computed, or a constant."""
        if var in env:
            return env[var]
        if var not in self.constants:
            if not _is_const(var):
                raise InterpretError(f"%{var.name} has no value here")
            self.constants[var] = self._tensor(var.val)
        return self.constants[var]


def _unbiased(step: Step) -> Step:
    """A linear without its bias, where that is all zeros: BLAS is faster without."""
    bias = step.fixed.get("bias")
    if step.op.op_type != "linear" or bias is None or bool(bias.any()):
        return step
    fixed = {name: value for name, value in step.fixed.items() if name != "bias"}
    return replace(step, fixed=fixed, stored=[name for name in step.stored if name != "bias"])


def _placed(step: Step) -> Step:
    """A slice with constant places, which are worked out once."""
    if step.op.op_type != "slice_by_index" or [name for name, _ in step.reads] != ["x"] or step.stored:
        return step
    return replace(step, function=sliced_at(step.fixed))


def _place(value: Any) -> int | None:
    """Where the memory of a tensor begins."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


def _is_const(var: Any) -> bool:
    return isinstance(var, Var) and var.op is not None and var.op.op_type == "const"


def _sources(ops: Iterable[Operation]) -> set[SourceFile]:
    """The files that hold the constants of some ops."""
    constants = (v.val for op in ops for _, v in operands(op) if _is_const(v))
    return {source for value in constants if (source := source_of(value)) is not None}


def _from_outside(ops: list[Operation], reads: list[list[Var]], keep: list[Var]) -> list[Var]:
    """The values that ops read, or that are kept, and that none of them makes; each once."""
    makes = {v for op in ops for v in op.outputs}
    return [v for v in dict.fromkeys([*(v for read in reads for v in read), *keep]) if v not in makes]


def _last_uses(ops: list[Operation], reads: list[list[Var]], keep: set[Var]) -> dict[int, list[Var]]:
    """Index of an op -> the values made by `ops` that nobody needs after it."""
    last: dict[Var, int] = {}
    for i, op in enumerate(ops):
        last |= dict.fromkeys(op.outputs, i)
        last |= {v: i for v in reads[i] if v in last}
    uses: dict[int, list[Var]] = {}
    for var, i in last.items():
        if var not in keep:
            uses.setdefault(i, []).append(var)
    return uses


class Executable:
    """A function of a program, planned once and called many times.

    Args:
        program: the program.
        function: which function; `main` or the first by default.
        precision: the arithmetic: "fp32", "fp16", "ane" or "ane:CHIP".
        fuse: may "fp32" compute attention at once where nobody listens (`fusion`)? Its sums then come in
            another order.
        device: "cpu", or "cuda" where torch has one.

    Raises:
        InterpretError: an op that is not known, an unknown precision, or no such device.
        UnknownName: no such function.
    """

    def __init__(
        self,
        program: Program,
        *,
        function: str | None = None,
        precision: str = "fp32",
        fuse: bool = True,
        device: str = "cpu",
    ) -> None:
        self.function = function_of(program, function)
        ops, outputs = self.function.operations, self.function.outputs
        self.plan = Plan(ops, outputs, precision, fuse=fuse, device=device)
        self.stored = {_place(t) for t in self.plan.stored()}
        self.bind = sampling.Binder(self.function)
        self.exact: Collection[str] = ()
        """The inputs that are not rounded to their type, as they come from another part of one model."""

    def __call__(
        self, values: Mapping[str, Any], *, listener: Listener | None = None, state: state.States | None = None
    ) -> dict[str, Array]:
        """The outputs by name, as numpy arrays.

        Args:
            values: numpy arrays or tensors by input name.
            listener: told about each op.
            state: states that live on between calls (`make_state`); fresh ones, all zero, when absent.

        Raises:
            InterpretError: inputs that do not fit, or an op that fails.
        """
        device = self.plan.device
        bound = self.bind(values, state, self.exact)
        env = {var: move(value, device) for var, value in bound.items()}
        with torch.inference_mode(), default(device):
            self.plan.run(env, listener)
            return self.outputs(env, bound.values())

    def outputs(self, env: Env, bound: Iterable[Any]) -> dict[str, Array]:
        """The outputs by name after a run, as arrays that share no memory with what was bound."""
        arithmetic = self.plan.arithmetic
        return {v.name: dtypes.to_numpy(self._own(env, v, bound), v, arithmetic) for v in self.function.outputs}

    def _own(self, env: Env, output: Var, bound: Iterable[Any]) -> Any:
        """The value of an output, copied where its memory is that of a constant, an input or a state."""
        value = self.plan.value(env, output)
        if not isinstance(value, torch.Tensor):
            return value
        memory = {_place(b.value if isinstance(b, state.Box) else b) for b in bound}
        place = _place(value)
        return value.clone() if place in self.stored or place in memory else value

    def make_state(self) -> state.States:
        """States of this function, all zero."""
        return state.make(self.function)


class Evaluator:
    """A list of ops of one block, planned once and run many times.

    Args:
        ops: in an order in which they can run.
        wanted: vars made by `ops`, bound, or constant.
        precision: the arithmetic.
    """

    def __init__(
        self, ops: Sequence[Operation], wanted: Sequence[Var], precision: str | dtypes.Arithmetic = "fp32"
    ) -> None:
        self.wanted = list(wanted)
        self.plan = Plan(ops, wanted, precision, room=dtypes.KEPT_BRIEFLY)

    def reshaping(self, shapes: Mapping[Var, Sequence[int]]) -> Evaluator:
        """Itself, with the shapes that reshapes are to make: they read fewer rows than the ops say."""
        for step in self.plan.steps:
            if step.op.op_type == "reshape" and (shape := shapes.get(step.op.outputs[0])) is not None:
                step.fixed = {**step.fixed, "shape": list(shape)}
        return self

    def __call__(
        self, bindings: Mapping[Var, torch.Tensor], listener: Listener | None = None
    ) -> list[torch.Tensor]:
        """The wanted values, given those that the ops read from outside; constants are read by themselves."""
        arithmetic = self.plan.arithmetic
        env: Env = {v: dtypes.finish(t, dtypes.run_dtype(v, arithmetic), None) for v, t in bindings.items()}
        with torch.inference_mode():
            self.plan.run(env, listener)
            return [dtypes.widen(self.plan.value(env, v)) for v in self.wanted]


def evaluate(
    ops: Sequence[Operation],
    bindings: Mapping[Var, torch.Tensor],
    wanted: Sequence[Var],
    precision: str | dtypes.Arithmetic = "fp32",
) -> list[torch.Tensor]:
    """The values of some vars after running a list of ops of one block once: see `Evaluator`."""
    return Evaluator(ops, wanted, precision)(bindings)


# Steps of a program that runs again and again, each as one function with all that is constant bound to it.
#
# A program that writes a token has hundreds of small ops: what is looked up for each costs as much as they do.
# The numbers are the same bits, as the same functions of torch compute them.

QuickEnv = dict[Var, Any]
Quick = Callable[[QuickEnv], None]
Call = Callable[[QuickEnv], Any]
VIEWS = (tensor.reshape, tensor.expand_dims, tensor.squeeze)
"""What gives its input another shape, which is known where it is static."""


def quick(step: Any, fixed: Mapping[str, Any], constants: Mapping[Var, Any]) -> Quick | None:
    """A step as a function of the values.

    Args:
        step: of a plan.
        fixed: its constants, as it computes with them.
        constants: of the plan; some are among several values that a step reads.

    Returns:
        The function, or None where the step must be taken with all that there is to look at.
    """
    if step.function is None or len(step.outs) != 1:
        return None
    call = _moved(step, fixed) or _plain(step, fixed) or _product(step, fixed)
    call = call or _called(step, fixed, constants)
    if call is None:
        return None
    ((var, dtype, rounding),) = step.outs
    dead = tuple(step.dead)

    def take(env: QuickEnv) -> None:
        value = call(env)
        if rounding is not None or value.dtype is not dtype:
            value = dtypes.finish(value, dtype, rounding)
        env[var] = value
        for other in dead:
            env.pop(other, None)

    return take


def _moved(step: Any, fixed: Mapping[str, Any]) -> Call | None:
    """Ops that only move numbers, at places that are known."""
    op: Operation = step.op
    if [name for name, _ in step.reads] != ["x"] or "x" in fixed:
        return None
    ((_, source),) = step.reads
    before, after = (static_shape(v) for v in (source, op.outputs[0]))
    if not before or not after or 0 in before or 0 in after or isinstance(source, tuple):
        return None
    function = getattr(step.function, "stands_for", step.function)
    if function in VIEWS:
        return lambda env: env[source].reshape(after)
    if function is tensor.transpose:
        order = tuple(fixed["perm"])
        return lambda env: env[source].permute(order)
    if function is tensor.slice_by_index:
        taken = tensor.sliced_by(before, *(fixed.get(name) for name in tensor.SLICE))
        return lambda env: taken(env[source])
    return None


def _plain(step: Any, fixed: Mapping[str, Any]) -> Call | None:
    """A function of torch of one value or two, one of which may be a constant."""
    function = getattr(step.function, "plain", None)
    if function is None or not fixed.keys() <= {"x", "y"}:
        return None
    reads = dict(step.reads)
    values = [reads[name] for name in ("x", "y") if name in reads]
    if len(values) == 1 and fixed:
        (value,), (known,) = values, fixed.values()
        if "x" in fixed:
            return lambda env: function(known, env[value])
        return lambda env: function(env[value], known)
    return _in_order(function, values, dense=False)


def _product(step: Any, fixed: Mapping[str, Any]) -> Call | None:
    """A product with a constant weight of floats."""
    weight, bias = fixed.get("weight"), fixed.get("bias")
    function, dense = dtypes.undressed(step.function)
    if function is not linear or not dense or [name for name, _ in step.reads] != ["x"]:
        return None
    if weight is None or weight.dtype != torch.float32:
        return None
    ((_, x),) = step.reads
    if not types.is_float(x.dtype):
        return None
    weight = weight.contiguous()
    bias = None if bias is None else torch.as_tensor(bias).to(torch.float32).expand(len(weight)).contiguous()
    return lambda env: F.linear(env[x].contiguous(), weight, bias)


def _called(step: Any, fixed: Mapping[str, Any], constants: Mapping[Var, Any]) -> Call | None:
    """The function of a step with its constants bound, its values in the order of its parameters."""
    function, dense = dtypes.undressed(step.function)
    reads = dict(step.reads)
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:
        return None
    order = [name for name in names if name in reads]
    if set(order) != reads.keys() or names[: len(order)] != order or set(fixed) - set(names):
        return _by_name(step, fixed) if not dense else None
    if dense:
        fixed = {k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in fixed.items()}
    bound = partial(function, **fixed) if fixed else function
    values = [reads[name] for name in order]
    if any(isinstance(v, tuple) for v in values):
        return _of_several(bound, values, constants) if not dense else None
    return _in_order(bound, values, dense)


def _in_order(function: Callable[..., Any], values: Sequence[Var], dense: bool) -> Call:
    """A function of one, two or more values."""
    if len(values) == 1:
        (x,) = values
        if dense:
            return lambda env: function(env[x].contiguous())
        return lambda env: function(env[x])
    if dense:
        return lambda env: function(*[env[v].contiguous() for v in values])
    if len(values) == 2:
        x, y = values
        return lambda env: function(env[x], env[y])
    return lambda env: function(*[env[v] for v in values])


def _by_name(step: Any, fixed: Mapping[str, Any]) -> Call | None:
    """A function whose values do not come first."""
    function, reads = step.function, step.reads
    if any(isinstance(v, tuple) for _, v in reads):
        return None
    return lambda env: function(**fixed, **{name: env[v] for name, v in reads})


def _of_several(
    function: Callable[..., Any], values: Sequence[Any], constants: Mapping[Var, Any]
) -> Call | None:
    """A function of a list of values, some of which may be constants."""
    if len(values) != 1:
        return None
    several = [(v, dtypes.widen(constants[v]) if v in constants else None) for v in values[0]]
    return lambda env: function([env[v] if known is None else known for v, known in several])
