"""A program in other surroundings: inside a condition or a loop, with values read elsewhere, with any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from anesurgery.mil import (
    Function,
    Operation,
    Program,
    Var,
    constant,
    ct,
    fixed_shape,
    mb,
    new_symbol,
    op_inputs,
    quiet_host,
    static_shape,
    types,
)


class UnbuildableError(Exception):
    """The program has a part that cannot be built there: a block, a state, a shape for one batch only."""


def in_condition(program: Program) -> Program:
    """Both branches of a condition compute the program; an input decides which."""

    def body(inputs: dict[str, Var], ops: Copier) -> list[Var]:
        chosen = mb.greater(x=mb.reduce_sum(x=inputs.pop("choice"), keep_dims=False), y=np.float32(0))
        made = mb.cond(pred=chosen, _true_fn=lambda: ops(inputs), _false_fn=lambda: ops(inputs))
        return list(made) if isinstance(made, (tuple, list)) else [made]

    return _around(program, body, choice=((1,), types.fp32))


def in_loop(program: Program) -> Program:
    """The body of a loop of two rounds computes the program."""

    def body(inputs: dict[str, Var], ops: Copier) -> list[Var]:
        first = [mb.fill(shape=fixed_shape(v), value=_zero(v)) for v in ops.outputs]
        made = mb.while_loop(
            _cond=lambda i, *values: mb.less(x=i, y=np.int32(2)),
            _body=lambda i, *values: (mb.add(x=i, y=np.int32(1)), *ops(inputs)),
            loop_vars=(np.int32(0), *first),
        )
        return list(made[1:])

    if any(static_shape(v) is None or v.dtype is types.bool for v in _main(program).outputs):
        raise UnbuildableError("a loop cannot begin with such outputs")
    return _around(program, body)


def read_elsewhere(program: Program) -> Program:
    """Each value that an op makes is an output too."""
    inner = [v for op in _main(program).operations if op.op_type != "const" for v in op.outputs]
    outputs = list(_main(program).outputs)
    others = [v for v in inner if v not in outputs and constant(v) is None and types.is_tensor(v.sym_type)]
    return _around(program, lambda inputs, ops: ops(inputs, [*outputs, *others]))


def any_batch(program: Program) -> Program:
    """The first axis of each input is dynamic, the same for all that have the size of the first input's."""
    shapes = [static_shape(v) for v in _main(program).inputs.values()]
    if not shapes or not all(shapes) or len({s[0] for s in shapes if s}) > 1:
        raise UnbuildableError("the inputs have no common batch")
    return _around(program, lambda inputs, ops: ops(inputs), batch=new_symbol())


SURROUNDINGS: dict[str, Callable[[Program], Program]] = {
    "in a condition": in_condition,
    "in a loop": in_loop,
    "read elsewhere": read_elsewhere,
    "any batch": any_batch,
}


class Copier:
    """Builds the ops of a function again, where the builder stands."""

    def __init__(self, function: Function) -> None:
        self.operations, self.outputs = list(function.operations), list(function.outputs)
        if any(op.blocks or op.op_type in ("read_state", "coreml_update_state") for op in self.operations):
            raise UnbuildableError("the program has blocks or states")

    def __call__(self, inputs: dict[str, Var], outputs: Sequence[Var] | None = None) -> list[Var]:
        """The outputs, computed from other inputs."""
        copied: dict[Var, Any] = {}
        for op in self.operations:
            given = {name: _other(value, inputs, copied) for name, value in op_inputs(op).items()}
            for old, new in zip(op.outputs, _outputs(_make(op, given)), strict=True):
                copied[old] = new
        return [_other(v, inputs, copied) for v in (self.outputs if outputs is None else outputs)]


def _make(op: Operation, given: dict[str, Any]) -> Any:
    if op.op_type == "const":
        return mb.const(val=op.outputs[0].val)
    return getattr(mb, op.op_type)(**given)


def _outputs(made: Any) -> Iterable[Var]:
    return made if isinstance(made, (tuple, list)) else [made]


def _other(value: Any, inputs: dict[str, Var], copied: dict[Var, Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return [_other(one, inputs, copied) for one in value]
    if value in copied:
        return copied[value]
    return value.val if value.op is not None else inputs[value.name]


def _main(program: Program) -> Function:
    if list(program.functions) != ["main"]:
        raise UnbuildableError("the program has several functions")
    return program.functions["main"]


def _zero(var: Var) -> Any:
    return types.nptype_from_builtin(var.dtype)(0)


def _around(
    program: Program, body: Callable[[dict[str, Var], Copier], list[Var]], batch: Any = None, **more: Any
) -> Program:
    """A program of the same inputs, and more, that computes what `body` builds."""
    main = _main(program)
    specs = {
        n: ((batch, *v.shape[1:]) if batch is not None else v.shape, v.dtype) for n, v in main.inputs.items()
    }
    placeholders = {n: mb.placeholder(shape, dtype=dtype) for n, (shape, dtype) in (specs | more).items()}
    ops = Copier(main)
    made = Program()
    with Function(placeholders, opset_version=main.opset_version) as function:
        try:
            found = body(dict(function.inputs), ops)
        except (ValueError, TypeError, NotImplementedError, IndexError) as error:
            raise UnbuildableError(str(error)) from error
        names = [v.name for v in main.outputs]
        names += [f"also_{i}" for i in range(len(found) - len(names))]
        function.set_outputs([mb.identity(x=v, name=name) for v, name in zip(found, names, strict=True)])
    made.add_function("main", function)
    return made


def settled(program: Program) -> Program:
    """A copy of a program after coremltools' default pipeline, which must not undo what a pass did."""
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    from anesurgery.loading import clone

    copy = clone(program).program
    pipeline = ct.PassPipeline.DEFAULT
    # The dtypes were chosen when the model was converted; choosing fp16 again would change the numbers.
    pipeline.remove_passes({"common::add_fp16_cast", "common::add_int16_cast"})
    with quiet_host():
        PassPipelineManager.apply_pipeline(copy, pipeline)
    return copy
