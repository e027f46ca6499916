"""What depends on the position only is computed by a function of its own, once for each call.

Before::

    main(%x: 1x4xfp16, %position: 1xint32) {
      %begin: 2xint32 = concat(values=(%position, [0]), axis=0)
      %row: 1x4xfp16 = slice_by_size(x=const<8x4xfp16>, begin=%begin, size=[1, 4])
      %y: 1x4xfp16 = add(x=%x, y=%row)
      return %y
    }

After::

    main(%x: 1x4xfp16, %row: 1x4xfp16) {
      %y: 1x4xfp16 = add(x=%x, y=%row)
      return %y
    }

    main_inputs(%position: 1xint32) {
      %begin: 2xint32 = concat(values=(%position, [0]), axis=0)
      %row: 1x4xfp16 = slice_by_size(x=const<8x4xfp16>, begin=%begin, size=[1, 4])
      return %row
    }

The masks, cosines, sines and places of a decoder become inputs of `prefill` and `decode`. `decode_inputs` reads
`position` and gives them all, under the names of the inputs; `anesurgery.generate` calls it before `decode`. A
boolean passes as 0 or 1.

Refuses when no function has an input `position`, or nothing but other inputs depends on it, and below iOS 18,
where a model has one function.

Why it helps: int32 arithmetic and slices at a dynamic place run on the CPU (measured, M4, macOS 27.0.1, by
751K/Apple-Neural-Engine-Microarchitecture-Study-M6); between the layers of a decoder each of them costs two
switches. What it gains in time was not measured.

Grade: none: the interface changes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Function, Pass, Program, Refusal, Session, Var, mb
from anesurgery.files.protobuf import copy_program
from anesurgery.interpret.decoder_calls import INPUTS
from anesurgery.interpret.decoding import replay
from anesurgery.interpret.state import POSITION

UNCHECKED = "the interface changes; compare whole models"


@dataclass(frozen=True)
class PositionFunction(Pass):
    """Masks, tables and places at a position as inputs, and a function that makes them."""

    name: ClassVar[str] = "position_function"
    essential: ClassVar[bool] = True
    follows: ClassVar[tuple[str, ...]] = ("add_cache", "masked_write", "one_hot_lookup", "cache_as_io")

    def requires(self, program: Program) -> Refusal | None:
        """A position, and room for more functions."""
        functions = list(program.functions.values())
        if not any(POSITION in f.inputs for n, f in program.functions.items() if not n.endswith(INPUTS)):
            return Refusal(f"no function has an input {POSITION!r}; add_cache makes one")
        if any(f.opset_version < an.ct.target.iOS18 for f in functions):
            return Refusal("several functions came with iOS 18; convert with minimum_deployment_target=iOS18")
        return None

    def run(self, program: Program, session: Session) -> None:
        """Each function that reads a position gets one that makes its inputs."""
        copies = copy_program(program).functions
        for name, function in [(n, f) for n, f in program.functions.items() if not n.endswith(INPUTS)]:
            found = ends_at(function)
            word = f"{name}{INPUTS}"
            if not found:
                session.refusals.append((self.name, Refusal(f"no op of {name} depends on the position only")))
                continue
            names = [v.name for v in found]
            keep_only(copies[name], names)
            program.add_function(word, copies[name])
            made_inputs(session, function, found)
            words = f"call {word} with position, and give what it returns to {name}"
            change = an.InterfaceChange(words, (POSITION, word, *names), call=called)
            session.contract.append(change)
            session.changes.append(an.Change(self.name, name, (), (word,), "", None, UNCHECKED))


def called(model: Any, values: an.Values, precision: str) -> an.Values:
    """What a model gives at a position; where none is given, for all the tokens that it reads one by one."""
    if POSITION not in values:
        return replay(model, values, precision)
    name, function = next((n, f) for n, f in model.functions.items() if not n.endswith(INPUTS))
    at = {POSITION: values[POSITION]}
    made = an.interpret.run(model, at, function=f"{name}{INPUTS}", precision=precision)
    given = {n: v for n, v in {**values, **made}.items() if n in function.inputs}
    return an.interpret.run(model, given, function=name, precision=precision)


def ends_at(function: Function) -> list[Var]:
    """The values that depend on the position and constants only, and that other ops read, or the caller."""
    position = function.inputs.get(POSITION)
    if position is None:
        return []
    positional = {position}
    for op in function.operations:
        sources = {v for _, v in an.operands(op) if an.constant(v) is None}
        if sources and sources <= positional and not op.blocks and op.op_type not in an.ops.IMPURE:
            positional |= set(op.outputs)
    made = [v for op in function.operations for v in op.outputs if v in positional]
    return [v for v in made if an.is_output(v) or any(r.outputs[0] not in positional for r in an.consumers(v))]


def keep_only(function: Function, names: Collection[str]) -> None:
    """Let a function give these values, and nothing else."""
    ops = list(function.operations)
    values = {v.name: v for op in ops for v in op.outputs}
    with function:
        ends = [values[name] for name in names]
        function.set_outputs([_number(v, f"{v.name}_number") for v in ends])
    for name, var in zip(names, function.outputs, strict=True):
        values[name].name, var.name = f"{name}_truth" if values[name] is not var else name, name
    wanted = set(function.outputs)
    for op in reversed(list(function.operations)):  # a write to a state is no longer wanted either
        if wanted.isdisjoint(op.outputs):
            function.remove_ops([op])
        else:
            wanted |= {v for _, v in an.operands(op)}
    for name in [n for n in function.inputs if n != POSITION]:
        an.remove_input(function, name)


def _number(var: Var, name: str) -> Var:
    """A value that a model can give: no boolean."""
    made: Var = mb.cast(x=var, dtype="fp16", name=name) if an.np_dtype(var).kind == "b" else var
    return made


def made_inputs(session: Session, function: Function, ends: Collection[Var]) -> None:
    """Let these values be given by the caller."""
    first = function.operations[0]
    with function:
        for old in ends:
            truth = an.np_dtype(old).kind == "b"
            name, old.name = old.name, session.fresh_name(function, f"{old.name}_made")
            given = an.add_input(function, name, old.shape, an.types.fp16 if truth else old.dtype)
            if truth:
                wish = session.fresh_name(function, f"{name}_truth")
                given = mb.cast(x=given, dtype="bool", name=wish, before_op=first)
            function.replace_uses_of_var_after_op(
                anchor_op=None, old_var=old, new_var=given, no_check_var_types=True, force_replace=True
            )
    an.remove_dead(list(function.operations))
    if not an.consumers(function.inputs[POSITION]):
        an.remove_input(function, POSITION)


def example() -> Program:
    """A row of learned positions is added."""
    inputs = [mb.TensorSpec((1, 4), an.types.fp16), mb.TensorSpec((1,), an.types.int32)]
    table = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float16)

    @mb.program(input_specs=inputs, opset_version=an.ct.target.iOS18)
    def program(x: Var, position: Var) -> Var:
        begin = mb.concat(values=(position, np.array([0], np.int32)), axis=0, name="begin")
        row = mb.slice_by_size(x=table, begin=begin, size=np.array([1, 4], np.int32), name="row")
        return mb.add(x=x, y=row, name="y")

    return program
