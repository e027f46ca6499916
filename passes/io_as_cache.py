"""Turn an input that comes back as an output into a state, which the model keeps.

By default the pass pairs each input `NAME` with an output `NAME_out` of the same type; `pairs` names others:
`{"keys": "new_keys"}`. If several slices are written one after another, each is written to the state at once,
and later ops read the state. A state begins with zeros, so the caller's first input must be zeros too.

Refuses when no input comes back, when a pair does not have one static shape in fp16 (states hold nothing else),
when the output is not computed, and when the model is older than iOS 18.

Why it helps: the cache is no longer passed in and out at each call; a state that is read, updated by
`slice_update` and written back stays on the ANE (reported: M4, macOS 27.0, and macOS 15, by
4rg0naut/silicon-ledger-public). What the pass gains in time was not measured.

Grade: none: the interface changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anesurgery import authoring as an
from anesurgery.authoring import Pass, Program, Refusal, Session, Var, mb
from anesurgery.errors import UnknownName
from anesurgery.interpret.predictor import Predictor
from anesurgery.rewriting.passes import cache_inputs

BACK = "_out"
"""The ending of outputs that are inputs of the next call."""


@dataclass(frozen=True)
class IoAsCache(Pass):
    """Inputs that come back become states."""

    name = "io_as_cache"
    precedes = ("join_states", "pad_state")
    pairs: Mapping[str, str] | None = None
    """Input -> the output that it takes in the next call; by default those with the same name and `_out`."""

    def requires(self, program: Program) -> Refusal | None:
        """Refuse programs older than iOS 18, and programs of which no input comes back.

        Raises:
            UnknownName: there is no such input or output.
        """
        for function in program.functions.values():
            if function.opset_version < an.ct.target.iOS18:
                return Refusal("states came with iOS 18; convert with minimum_deployment_target=iOS18")
            if not self.found(function):
                return Refusal(f"no input comes back as an output: {', '.join(function.inputs)}")
        return None

    def found(self, function: an.Function) -> dict[str, Var]:
        """Return each input and the output that it takes in the next call."""
        outputs = {v.name: v for v in function.outputs}
        if self.pairs is None:
            return {n: outputs[n + BACK] for n in function.inputs if n + BACK in outputs}
        for name, other in self.pairs.items():
            if name not in function.inputs:
                raise UnknownName("input", name, function.inputs)
            if other not in outputs:
                raise UnknownName("output", other, outputs)
        return {name: outputs[other] for name, other in self.pairs.items()}

    def run(self, program: Program, session: Session) -> None:
        """Turn each pair into a state, in all functions alike."""
        matched = [(function, self.found(function)) for function in program.functions.values()]
        pairs = {name: out.name for _, outs in matched for name, out in outs.items()}
        for name in list(pairs):
            ends = [(function, outs.get(name)) for function, outs in matched]
            refusals = [against(f.inputs.get(name), out) for f, out in ends]
            if (refusal := next((r for r in refusals if r is not None), None)) is not None:
                session.refuse(self.name, refusal)
                del pairs[name]
                continue
            for function, out in ends:
                assert out is not None
                with an.GraphEdits(self, session, function) as edits:
                    move(edits, name, out)
        for name, back in pairs.items():
            words = f"{name} is a state, zeros at first; {back} is no output any more"
            change = an.InterfaceChange(words, (name, back), call=_called(pairs))
            session.declare(self.name, name, change, (back,), ())


def against(entry: Var | None, out: Var | None) -> Refusal | None:
    """Why an input and an output cannot be a state."""
    if entry is None or out is None:
        return Refusal("not every function has both the input and the output")
    if an.is_output(entry):
        return Refusal(f"%{entry.name} is an input and an output")
    shapes = [an.static_shape(entry), an.static_shape(out)]
    if shapes[0] is None or shapes[0] != shapes[1]:
        return Refusal(f"%{entry.name} has the shape {entry.shape}, and %{out.name} {out.shape}", out.op)
    held = [an.dtype_name(v) for v in (entry, out)]
    if set(held) != {"fp16"}:
        return Refusal(f"%{entry.name} is {held[0]} and %{out.name} is {held[1]}; states hold fp16", out.op)
    return Refusal(f"%{out.name} is the input unchanged") if out.op is None else None


def move(edits: an.GraphEdits, name: str, out: Var) -> None:
    """Turn one input and output of a function into a state."""
    old = edits.function.inputs[name]
    state = edits.new_input(name, an.static_shape(old) or (), an.types.fp16, state=True)
    held = edits.first().read_state(input=state, name=f"{name}_before")
    edits.replace(old, held)
    edits.replace_output(out)
    for value in _written(out, held):
        after = edits.after(value).coreml_update_state(state=state, value=value, name=f"{value.name}_after")
        edits.replace(value, after)


def _written(out: Var, held: Var) -> list[Var]:
    """Return the values that the state takes: each slice that is written, or the last value alone."""
    chain, var = [out], out
    while (op := an.producer(var, "slice_update")) is not None:
        if op.x is held:
            return chain[::-1]
        var = op.x
        chain.append(var)
    return [out]


def _called(pairs: Mapping[str, str]) -> Callable[[Any, an.Values, str], an.Values]:
    """Return a call that begins with the state given to the old model, and returns the state at the end."""

    def call(model: Any, values: an.Values, precision: str) -> an.Values:
        predict = Predictor(model, precision=precision)
        state = predict.make_state()
        for name in pairs:
            state[name].value = torch.from_numpy(np.asarray(values[name], np.float32))
        outputs = predict({n: v for n, v in values.items() if n not in pairs}, state=state)
        return {**outputs, **{back: state[name].value.numpy() for name, back in pairs.items()}}

    return call


@an.example(*cache_inputs[:2], mb.TensorSpec((8, 4), an.types.fp16), opset="iOS18")
def example(n: Var, at: Var, cache: Var) -> tuple[Var, Var]:
    """A cache of four numbers for each of eight tokens."""
    b = mb.concat(values=(at, np.array([0], np.int32)), axis=0, name="b")
    e = mb.add(x=b, y=np.array([1, 4], np.int32), name="e")
    out = mb.slice_update(x=cache, update=n, begin=b, end=e, name="cache_out")
    return mb.reduce_sum(x=out, axes=[0], keep_dims=True, name="sum"), out
