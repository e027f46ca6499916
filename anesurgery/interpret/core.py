"""Run the ops of a function on torch: a `Plan` decides once how each is computed, an `Executable` runs it.

A plan is a list of steps, one for each op that is not a constant. A run takes them in order on an environment,
a mapping of vars to values, and drops a value after its last use. Constants are views of the stored weights;
fp16 ones are widened to fp32 when an op needs them, and from the second run on kept so if memory allows.
`predictor.Predictor` runs whole models this way, and the checks of rewrites run lists of ops by `evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
import torch

from anesurgery.doors import REPEATABLE, short_of_memory
from anesurgery.errors import InterpretError, OutOfMemory, SurgeryError
from anesurgery.files.arrays import set_aside
from anesurgery.files.source import SourceFile
from anesurgery.files.weights import source_of
from anesurgery.interpret import attentions, sampling, state
from anesurgery.interpret.arithmetic import constant_memory
from anesurgery.interpret.arithmetic import precision as dtypes
from anesurgery.interpret.arithmetic.constant_memory import as_tensor, needs_widening, release_pages, widen
from anesurgery.interpret.arithmetic.field import Image
from anesurgery.interpret.ops import constexpr
from anesurgery.interpret.ops.tensor import sliced_at
from anesurgery.interpret.state import Box
from anesurgery.interpret.steps import BoundStep, Env, Result, Step, bind_step
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
    nested_ops,
    operands,
)
from anesurgery.ops import MOVING
from anesurgery.text import to_text

CPU = "cpu"


def check_device(device: str) -> str:
    """Return the name of a device; raise `InterpretError` if torch does not have it."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InterpretError(
            f"device={device!r} cannot be used ({reason}); leave it out for the processor"
        ) from error
    return device


def move(value: Any, device: str) -> Any:
    """Return a tensor on a device; the tensor of a state is moved in place, other values stay."""
    if device == CPU:
        return value
    if isinstance(value, Box):
        value.value = value.value.to(device)
        return value
    return value.to(device) if isinstance(value, torch.Tensor) else value


def default_device(device: str) -> AbstractContextManager[Any]:
    """Return a context in which new tensors are made on the device."""
    return nullcontext() if device == CPU else torch.device(device)


OFTEN = 2
"""After so many runs, steps are bound to their constants, all of which are widened by then."""


class Plan:
    """The steps of a list of ops, and of the blocks nested in them.

    Args:
        ops: in an order in which they can run.
        keep: vars that are needed after the run.
        arithmetic: a precision, or an arithmetic of its own.
        outside: the plan of the block around, for a nested block.
        fuse: compute attention at once where nobody listens?
        device: of torch.
        cache_limit: the most bytes of widened constants to keep; `CACHE_LIMIT` by default.
    """

    def __init__(
        self,
        ops: Iterable[Operation],
        keep: Iterable[Var],
        arithmetic: str | dtypes.Arithmetic,
        outside: Plan | None = None,
        *,
        fuse: bool = False,
        device: str = "cpu",
        cache_limit: int | None = None,
    ) -> None:
        self.arithmetic, self.device = dtypes.checked_precision(arithmetic), check_device(device)
        self.cache_limit = constant_memory.CACHE_LIMIT if cache_limit is None else cache_limit
        self.constants: Env = dict(outside.constants) if outside else {}
        """Constants that are read by their var: those in lists, outputs, and what was decompressed."""
        self.decompressed: dict[Var, Array] = dict(outside.decompressed) if outside else {}
        self.steps: list[Step] = []
        self.rounded = set[Var]()
        """Values that are rounded when they are computed: an op that only moves one need not round again."""
        self.blocks: dict[Block, Plan] = {}
        self.drawing = 0
        """How many random ops got a seed, so that they draw the same in each run (`doors.REPEATABLE`)."""
        ops = list(ops)
        self.mixed: bool = outside.mixed if outside else dtypes.is_mixed(ops)
        self.sources = _sources(ops)
        self._check_sources()
        self._decompress(ops)
        ops = [op for op in ops if op.op_type != "const" and not is_constexpr(op)]
        self.constants |= {v: self._tensor(a) for v, a in self.decompressed.items()}
        keep = list(keep)
        reads = [self._reads(op) for op in ops]
        self.outside_values = _from_outside(ops, reads, keep)
        last = _last_uses(ops, reads, set(keep))
        for i, op in enumerate(ops):
            self.steps.append(self._step(op, last.get(i, [])))
        fuse = fuse and arithmetic == "fp32"
        self.fused_steps = self._fuse(ops, set(keep)) if fuse else self.steps
        """The steps of a run without a listener."""
        self.in_place = state.updates(ops) if outside is None else set[Operation]()
        """The slice_updates that may write into the memory of their state."""
        inputs = [v for v in self.outside_values if v not in self.constants and not _is_const(v)]
        self.aliases = state.possible_aliases([(step.op, step.dead) for step in self.fused_steps], inputs)
        self.runs, self.widened = 0, dict[Var, torch.Tensor]()
        """How often the plan ran, and constants that are kept in fp32 from the second run on."""
        self.bound_steps: list[BoundStep | None] | None = None
        """The steps as functions of the environment, after `OFTEN` runs; None for one that cannot be one."""
        self.widened_bytes = sum(4 * s.fixed[k].numel() for s in self.steps for k in s.to_widen)

    def _decompress(self, ops: Iterable[Operation]) -> None:
        """Decompress the constexpr ops; what exceeds `CACHE_LIMIT` together goes to files."""
        for op in filter(is_constexpr, ops):
            arrays = constexpr.decompress(op, self.decompressed)
            size = sum(array.nbytes for array in (*self.decompressed.values(), *arrays))
            if size > constant_memory.CACHE_LIMIT:
                arrays = [set_aside(array) for array in arrays]
            self.decompressed |= zip(op.outputs, arrays, strict=True)

    def _reads(self, op: Operation) -> list[Var]:
        """Return what an op and its nested blocks read from outside; the blocks are planned here, each once."""
        if op.blocks and op.op_type not in CONTROL_FLOW:
            raise Unsupported(f"op {op.name}: the interpreter does not know {op.op_type!r}")
        read = [v for _, v in operands(op)]
        for block in op.blocks:
            nested = Plan(block.operations, block.outputs, self.arithmetic, self, device=self.device)
            self.blocks[block] = nested
            inputs = set(block.inputs)
            read += [v for v in nested.outside_values if v not in inputs]
        return read

    def _step(self, op: Operation, dead: list[Var]) -> Step:
        """Return the step of an op, after which some values are dead."""
        if not op.blocks and op.op_type not in TABLE:
            raise Unsupported(
                f"op {op.name}: the interpreter does not know {op.op_type!r}; "
                "add a meaning with @impl (anesurgery.interpret.table)"
            )
        row = None if op.blocks else TABLE[op.op_type]
        fixed, reads = self._inputs(op)
        large = [name for name, value in fixed.items() if needs_widening(value)]
        to_widen, moved = ([], large) if row is not None and row.moves else (large, [])
        if fixed.get("seed") == -1 and REPEATABLE.get():
            self.drawing += 1  # by order, since edits may rename an op
            fixed["seed"] = self.drawing
        arithmetic = dtypes.computes_in(op, self.arithmetic, self.mixed)
        is_rounded = self.arithmetic == "fp16" and op.op_type in MOVING and op.inputs.get("x") in self.rounded
        outs = [
            Result(v, dtypes.run_dtype(v, arithmetic), None if is_rounded else dtypes.rounding(v, arithmetic))
            for v in op.outputs
        ]
        self.rounded |= set(op.outputs)
        function = row and dtypes.meaning(op, row, arithmetic)
        return Step(
            op, function, fixed=fixed, reads=reads, to_widen=to_widen, outs=outs, dead=dead, moved=moved
        )

    def _fuse(self, ops: list[Operation], keep: set[Var]) -> list[Step]:
        """Return the steps with each attention as one, without zero biases, constant slices resolved."""
        steps = {step.op: step for step in self.steps}
        for attention in attentions.find(ops, keep):
            fixed, reads, last = dict(attention.options), list[tuple[str, Any]](), attention.ops[-1]
            others = (s for s in self.steps[: ops.index(last)] if s.op not in attention.ops)
            if {v for s in others for v in s.dead} & {v for _, v in attention.reads}:
                continue  # an input is dropped before the last op, where all is computed
            for name, var in attention.reads:
                if var in self.constants or _is_const(var):
                    fixed[name] = widen(self.value({}, var))
                else:
                    reads.append((name, var))
            dead = [v for op in attention.ops for v in steps[op].dead]
            outs = steps[last].outs
            steps[last] = Step(
                last, attentions.attend, fixed=fixed, reads=reads, to_widen=[], outs=outs, dead=dead
            )
            for op in attention.ops[:-1]:
                del steps[op]
        return [_with_constant_slice(_without_zero_bias(step)) for step in steps.values()]

    def _inputs(self, op: Operation) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
        """Return `fixed` and `reads` of a step."""
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
        return fixed, reads

    def _tensor(self, array: Any) -> torch.Tensor:
        """Return an array as a tensor on the device."""
        return move(as_tensor(array), self.device)

    def _fixed(self, op: Operation, name: str, var: Var) -> Any:
        """Return a constant input: a tensor for what an op computes with, plain Python for its settings."""
        value = var.val
        if isinstance(value, np.ndarray) and value.dtype == object:
            # symbolic sizes of a program in memory; in a saved one they are -1, "what is left"
            value = np.array([-1 if is_symbolic(v) else int(v) for v in value], np.int32)
        is_setting = getattr(op.input_spec.input_types.get(name), "const", False)
        if isinstance(value, (np.ndarray, np.generic)):
            if is_setting and (value.ndim == 0 or (value.ndim == 1 and value.dtype.kind != "f")):
                return value.tolist()
            return self._tensor(value)
        if is_setting or isinstance(value, str) or not isinstance(value, (bool, int, float)):
            return value
        return self._tensor(np.asarray(value, np.float32) if isinstance(value, float) else value)

    def _widen(self, step: Step, name: str, stored: torch.Tensor) -> torch.Tensor:
        """Return a stored constant in fp32, from the second run on kept so, if all together fit the cache.

        Some linears widen their weight themselves, part by part, and get it as it is stored.
        """
        var = step.op.inputs[name]
        if (widened := self.widened.get(var)) is not None:
            return widened
        if name == "weight" and getattr(self.arithmetic, "reads_stored", False):
            return stored
        if name == "weight" and step.op.op_type == "linear" and self._widens_in_parts:
            return stored
        widened = stored.float()
        if self.runs > 1 and self.widened_bytes <= self.cache_limit:
            self.widened[var] = widened
            release_pages(var.val)
        return widened

    @property
    def _widens_in_parts(self) -> bool:
        """Is the weight of a linear widened part by part, since it would not be kept anyway?"""
        return self.arithmetic in ("fp32", "fp16") and self.widened_bytes > self.cache_limit

    def run(self, env: Env, listener: Listener | None) -> None:
        """Take all steps. The environment gains values of ops, and loses those that are no longer needed."""
        self.runs += 1
        self._check_sources()
        if listener is not None:
            for step in self.steps:
                self.take(step, env, listener)
            return
        if self.runs > OFTEN and self.bound_steps is None:
            self.bound_steps = [self._bind(step) for step in self.fused_steps]
        for step, bound in zip(self.fused_steps, self.bound_steps or repeat(None), strict=False):
            if bound is None:
                self.take(step, env)
                continue
            try:
                bound(env)
            except Exception:  # take it step by step, which says what is wrong
                self.take(step, env)

    def _bind(self, step: Step) -> BoundStep | None:
        """Return a step bound to its constants, if all of them are kept widened."""
        fixed = dict(step.fixed)
        for name in step.to_widen:
            widened = self.widened.get(step.op.inputs[name])
            if widened is None:
                return None
            fixed[name] = widened
        return None if step.op in self.in_place else bind_step(step, fixed, self.constants)

    def take(self, step: Step, env: Env, listener: Listener | None = None) -> None:
        """Compute one op, and drop the values that are dead after it."""
        arguments = self.arguments(step, env)
        for name in step.to_widen:
            arguments[name] = self._widen(step, name, arguments[name])
        if listener is not None:
            listener.before(step.op, arguments)
        results = self._compute(step, arguments, env, listener)
        operands = None if step.function is None else arguments.values()
        for (var, dtype, rounding), value in zip(step.outs, results, strict=True):
            is_final = rounding is None and getattr(value, "dtype", None) is dtype
            env[var] = value if is_final else dtypes.in_run_dtype(value, dtype, rounding, operands)
        is_kept = self.runs > 1 and self.widened_bytes <= self.cache_limit
        for name in (*step.moved, *(() if is_kept else step.to_widen)):
            release_pages(step.op.inputs[name].val)
        if listener is not None:
            listener.after(step.op, [env[var] for var, _, _ in step.outs])
        for var in step.dead:
            env.pop(var, None)

    def _compute(self, step: Step, arguments: dict[str, Any], env: Env, listener: Listener | None) -> Any:
        """Return the results of an op as a sequence; an error names the op and what it read."""
        try:
            if step.function is None:
                return CONTROL_FLOW[step.op.op_type](self, step.op, arguments, env, listener)
            if listener is None and step.op in self.in_place:
                spent, others = step.op.x in step.dead, self.aliases[step.op]
                result = state.write_in_place(step.op, env, arguments, spent=spent, others=others)
            else:
                result = step.function(**arguments)
        except Exception as error:
            if isinstance(error, SurgeryError) and (step.op.blocks or not isinstance(error, InterpretError)):
                raise  # an op of a nested block has said it all
            if reason := short_of_memory(error):
                raise OutOfMemory(f"op {step.op.name} ({step.op.op_type}): {reason}") from error
            raise self._error(step, arguments, error) from error
        return result if isinstance(result, (tuple, list)) and len(step.outs) > 1 else (result,)

    def _error(self, step: Step, arguments: Mapping[str, Any], error: Exception) -> InterpretError:
        """Return the error of an op that failed, with the ops around it and what it read."""
        number = next(i for i, s in enumerate(self.steps) if s.op is step.op)
        around = "".join(
            f"\n  {'>' if s.op is step.op else ' '} {to_text(s.op).splitlines()[0]}"
            for s in self.steps[max(number - 2, 0) : number + 3]
        )
        inputs = ", ".join(f"{k}={sampling.describe(v)}" for k, v in arguments.items())
        what, kind = f"{type(error).__name__}: {error}", InterpretError
        if isinstance(error, InterpretError):
            what, kind = str(error), type(error)
        return kind(f"op {step.op.name} failed: {what}{around}\n  on {inputs}")

    def arguments(self, step: Step, env: Env) -> dict[str, Any]:
        """Return the arguments of a step by name; constants as they are stored."""
        arguments = dict(step.fixed)
        for name, source in step.reads:
            is_list = source.__class__ is tuple
            arguments[name] = [widen(self.value(env, v)) for v in source] if is_list else env[source]
        return arguments

    def _check_sources(self) -> None:
        """Check that nobody wrote to the weight files: reading one that was cut short ends the process."""
        for source in self.sources:
            source.check()

    def all_constants(self) -> list[Any]:
        """Return the constants that the steps and the nested blocks read."""
        here = [x for step in self.steps for x in step.fixed.values()] + list(self.constants.values())
        return here + [x for plan in self.blocks.values() for x in plan.all_constants()]

    def value(self, env: Env, var: Var) -> Any:
        """Return the value of a var, computed or constant."""
        if var in env:
            return env[var]
        if var not in self.constants:
            if not _is_const(var):
                raise InterpretError(f"%{var.name} has no value here")
            self.constants[var] = self._tensor(var.val)
        return self.constants[var]


def _without_zero_bias(step: Step) -> Step:
    """Return a linear without its bias if that is all zeros: BLAS is faster without."""
    bias = step.fixed.get("bias")
    if step.op.op_type != "linear" or bias is None or bool(torch.as_tensor(bias).any()):
        return step
    fixed = {name: value for name, value in step.fixed.items() if name != "bias"}
    return replace(step, fixed=fixed, to_widen=[name for name in step.to_widen if name != "bias"])


def _with_constant_slice(step: Step) -> Step:
    """Return a slice_by_index with constant places as a function that has resolved them."""
    if step.op.op_type != "slice_by_index" or [name for name, _ in step.reads] != ["x"] or step.to_widen:
        return step
    return replace(step, function=sliced_at(step.fixed))


def _address(value: Any) -> int | None:
    """Return the address of a tensor's memory; None for other values."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


def _is_const(var: Any) -> bool:
    """Is it the output of a const?"""
    return isinstance(var, Var) and var.op is not None and var.op.op_type == "const"


def _sources(ops: Iterable[Operation]) -> set[SourceFile]:
    """Return the files that hold the constants of some ops."""
    constants = (v.val for op in ops for _, v in operands(op) if _is_const(v))
    return {source for value in constants if (source := source_of(value)) is not None}


def _from_outside(ops: list[Operation], reads: list[list[Var]], keep: list[Var]) -> list[Var]:
    """Return the values that ops read, or that are kept, and that none of the ops computes; each once."""
    computed = {v for op in ops for v in op.outputs}
    return [v for v in dict.fromkeys([*(v for read in reads for v in read), *keep]) if v not in computed]


def _last_uses(ops: list[Operation], reads: list[list[Var]], keep: set[Var]) -> dict[int, list[Var]]:
    """Return for the index of each op the values computed by `ops` that nothing needs after it."""
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
        fuse: may "fp32" compute attention at once where nobody listens (`attentions`)? Its sums then come in
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
        self.constant_addresses = {_address(t) for t in self.plan.all_constants()}
        self.bind = sampling.Binder(self.function)
        self.exact: Collection[str] = ()
        """The inputs that are not rounded to their type, as they come from another part of one model."""

    def __call__(
        self, values: Mapping[str, Any], *, listener: Listener | None = None, state: state.States | None = None
    ) -> dict[str, Array]:
        """Run the function, and return its outputs by name, as numpy arrays.

        Args:
            values: numpy arrays or tensors by input name.
            listener: called for each op.
            state: states that live on between calls (`make_state`); fresh ones, all zero, by default.

        Raises:
            InterpretError: inputs that do not fit, or an op that fails.
        """
        device = self.plan.device
        bound = self.bind(values, state, self.exact)
        env = {var: move(value, device) for var, value in bound.items()}
        with torch.inference_mode(), default_device(device):
            self.plan.run(env, listener)
            return self.outputs(env, bound.values())

    def outputs(self, env: Env, bound: Iterable[Any]) -> dict[str, Array]:
        """Return the outputs by name after a run; they share no memory with what was bound, or each other."""
        arithmetic = self.plan.arithmetic
        taken = {_address(b.value if isinstance(b, state.Box) else b) for b in bound}
        return {v.name: dtypes.to_numpy(self._own(env, v, taken), v, arithmetic) for v in self.function.outputs}

    def _own(self, env: Env, output: Var, taken: set[int | None]) -> Any:
        """Return the value of an output, copied if its memory is taken; its memory then is."""
        value = self.plan.value(env, output)
        if not isinstance(value, torch.Tensor):
            return value
        address = _address(value)
        if address in taken or address in self.constant_addresses:
            return value.clone()
        taken.add(address)
        return value

    def make_state(self) -> state.States:
        """Return new states of this function, all zero."""
        return state.make(self.function)


class Evaluator:
    """A list of ops of one block, planned once and run many times.

    Args:
        ops: in an order in which they can run.
        wanted: vars computed by `ops`, bound, or constant.
        precision: the arithmetic.
    """

    def __init__(
        self, ops: Sequence[Operation], wanted: Sequence[Var], precision: str | dtypes.Arithmetic = "fp32"
    ) -> None:
        self.wanted = list(wanted)
        self.plan = Plan(ops, wanted, precision, cache_limit=constant_memory.SMALL_CACHE_LIMIT)

    def reshaping(self, shapes: Mapping[Var, Sequence[int]]) -> Evaluator:
        """Set the result shapes of reshapes, and return itself: for runs on fewer rows than the ops say."""
        for step in self.plan.steps:
            if step.op.op_type == "reshape" and (shape := shapes.get(step.op.outputs[0])) is not None:
                step.fixed = {**step.fixed, "shape": list(shape)}
        return self

    def __call__(
        self, bindings: Mapping[Var, torch.Tensor], listener: Listener | None = None
    ) -> list[torch.Tensor]:
        """Return the wanted values, given those that the ops read from outside, without constants."""
        arithmetic = self.plan.arithmetic
        env: Env = {
            v: dtypes.in_run_dtype(t, dtypes.run_dtype(v, arithmetic), None) for v, t in bindings.items()
        }
        with torch.inference_mode():
            self.plan.run(env, listener)
            return [widen(self.plan.value(env, v)) for v in self.wanted]


def evaluate(
    ops: Sequence[Operation],
    bindings: Mapping[Var, torch.Tensor],
    wanted: Sequence[Var],
    precision: str | dtypes.Arithmetic = "fp32",
) -> list[torch.Tensor]:
    """Run a list of ops of one block once, and return the values of some vars: see `Evaluator`."""
    return Evaluator(ops, wanted, precision)(bindings)


LOOP_LIMIT = 100_000
"""After so many rounds a `while_loop` counts as endless: no sequence has so many steps."""


def _run_block(plan: Plan, block: Any, values: list[Any], env: Env, listener: Listener | None) -> list[Any]:
    """Run a nested block, which can read the values outside, and return its outputs."""
    inner = {**env, **dict(zip(block.inputs, values, strict=True))}
    nested = plan.blocks[block]
    nested.run(inner, listener)
    return [nested.value(inner, v) for v in block.outputs]


def _while_loop(plan: Any, op: Operation, arguments: dict[str, Any], env: Any, listener: Any) -> Any:
    """Run the second block as long as the first returns true."""
    condition, body = op.blocks
    values = list(arguments["loop_vars"])
    for _ in range(LOOP_LIMIT):
        if not bool(_run_block(plan, condition, values, env, listener)[0]):
            return values
        values = _run_block(plan, body, values, env, listener)
    raise InterpretError(f"op {op.name}: the loop still runs after {LOOP_LIMIT} rounds")


def _cond(plan: Any, op: Operation, arguments: dict[str, Any], env: Any, listener: Any) -> Any:
    """Run one of two blocks; in a symbolic arithmetic, with an unknown condition, run both and choose."""
    pred = arguments["pred"]
    if not isinstance(pred, Image):
        return _run_block(plan, op.blocks[0] if bool(pred) else op.blocks[1], [], env, listener)
    if any(o.op_type == "coreml_update_state" for o in nested_ops(op)):
        raise Unsupported("a state that is written under a condition")
    sides = [_run_block(plan, block, [], env, listener) for block in op.blocks]
    if any(isinstance(v, list) for side in sides for v in side):
        raise Unsupported("a list that depends on a condition")
    arithmetic, scalar = plan.arithmetic, pred.map(lambda v: v.reshape(()))
    return [
        arithmetic.choose(scalar, arithmetic.image(x), arithmetic.image(y)) for x, y in zip(*sides, strict=True)
    ]


CONTROL_FLOW: dict[str, Callable[..., Any]] = {"while_loop": _while_loop, "cond": _cond}
"""Op type -> function of (plan, op, arguments, environment, listener)."""
