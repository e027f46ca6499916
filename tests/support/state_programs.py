"""Programs with a state in all the ways in which a model may read and write one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from anesurgery.interpret.predictor import Predictor
from anesurgery.mil import Array, Program, Var, ct, mb, types

H = np.float16
SHAPE = (2, 4)


def read(s: Var) -> Var:
    made: Var = mb.read_state(input=s)
    return made


def write(s: Var, value: Any) -> Var:
    made: Var = mb.coreml_update_state(state=s, value=value)
    return made


def shifted(x: Var, held: Var) -> tuple[Var, Var]:
    """The window of a stream, and what is kept of it."""
    window = mb.concat(values=(held, x), axis=0)
    return window, mb.slice_by_index(x=window, begin=[2, 0], end=[4, 4])


def total(x: Var) -> Var:
    return mb.reduce_sum(x=x, axes=[0], keep_dims=True, name="y")


def streaming(x: Var, s: Var) -> Var:
    window, kept = shifted(x, read(s))
    write(s, kept)
    return total(window)


def written_first(x: Var, s: Var) -> Var:
    write(s, mb.mul(x=x, y=H(2)))
    return total(mb.add(x=x, y=read(s)))


def written_twice(x: Var, s: Var) -> Var:
    first = write(s, mb.add(x=read(s), y=x))
    second = write(s, mb.mul(x=first, y=H(0.5)))
    return total(mb.add(x=first, y=mb.mul(x=second, y=read(s))))


def written_twice_unread(x: Var, s: Var) -> Var:
    held = read(s)
    write(s, mb.add(x=held, y=x))
    write(s, mb.add(x=read(s), y=x))
    return total(held)


def never_written(x: Var, s: Var) -> Var:
    return total(mb.add(x=x, y=read(s)))


def never_read(x: Var, s: Var) -> Var:
    write(s, mb.mul(x=x, y=H(2)))
    return total(x)


def reset(x: Var, s: Var) -> Var:
    held = read(s)
    write(s, np.ones(SHAPE, H))
    return total(mb.add(x=held, y=x))


def what_was_held(x: Var, s: Var) -> tuple[Var, Var]:
    held = mb.read_state(input=s, name="held")
    write(s, x)
    return held, total(x)


def what_is_held(x: Var, s: Var) -> tuple[Var, Var]:
    value = mb.add(x=read(s), y=x)
    return mb.coreml_update_state(state=s, value=value, name="held"), total(x)


def the_input(x: Var, s: Var) -> Var:
    held = read(s)
    write(s, x)
    return total(held)


def chosen(x: Var, s: Var) -> Var:
    """Read outside of a branch, used inside."""
    held = read(s)
    write(s, mb.add(x=held, y=x))
    positive = mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1]), y=H(0))
    return total(
        mb.cond(pred=positive, _true_fn=lambda: mb.mul(x=held, y=H(2)), _false_fn=lambda: mb.relu(x=x))
    )


def given_by_a_branch(x: Var, s: Var) -> Var:
    held = read(s)
    now = write(s, mb.add(x=held, y=x))
    positive = mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1]), y=H(0))
    return total(mb.cond(pred=positive, _true_fn=lambda: mb.identity(x=now), _false_fn=lambda: mb.relu(x=held)))


def looped(x: Var, s: Var) -> Var:
    """Used inside a loop."""
    now = write(s, mb.add(x=read(s), y=x))
    rounds = mb.while_loop(
        _cond=lambda i, v: mb.less(x=i, y=np.int32(2)),
        _body=lambda i, v: (mb.add(x=i, y=np.int32(1)), mb.add(x=v, y=now)),
        loop_vars=(np.int32(0), x),
    )
    return total(rounds[1])


def loop_begins(x: Var, s: Var) -> Var:
    held = read(s)
    write(s, x)
    rounds = mb.while_loop(
        _cond=lambda i, v: mb.less(x=i, y=np.int32(2)),
        _body=lambda i, v: (mb.add(x=i, y=np.int32(1)), mb.add(x=v, y=x)),
        loop_vars=(np.int32(0), held),
    )
    return total(rounds[1])


def read_in_a_branch(x: Var, s: Var) -> Var:
    positive = mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1]), y=H(0))
    chosen = mb.cond(pred=positive, _true_fn=lambda: mb.add(x=read(s), y=x), _false_fn=lambda: mb.relu(x=x))
    return total(mb.add(x=chosen, y=write(s, x)))


def read_in_a_loop(x: Var, s: Var) -> Var:
    rounds = mb.while_loop(
        _cond=lambda i, v: mb.less(x=i, y=np.int32(2)),
        _body=lambda i, v: (mb.add(x=i, y=np.int32(1)), mb.add(x=v, y=read(s))),
        loop_vars=(np.int32(0), x),
    )
    return total(rounds[1])


def read_in_a_condition(x: Var, s: Var) -> Var:
    rounds = mb.while_loop(
        _cond=lambda i, v: mb.less(x=mb.reduce_sum(x=mb.add(x=read(s), y=v), axes=[0, 1]), y=H(2)),
        _body=lambda i, v: (mb.add(x=i, y=np.int32(1)), mb.add(x=mb.abs(x=v), y=H(1))),
        loop_vars=(np.int32(0), x),
    )
    return total(rounds[1])


def written_in_a_branch(x: Var, s: Var) -> Var:
    positive = mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1]), y=H(0))
    return total(
        mb.cond(pred=positive, _true_fn=lambda: write(s, mb.relu(x=x)), _false_fn=lambda: mb.relu(x=x))
    )


EDITED: tuple[Callable[..., Any], ...] = (
    streaming,
    written_first,
    written_twice,
    written_twice_unread,
    never_written,
    never_read,
    reset,
    what_was_held,
    what_is_held,
    the_input,
    chosen,
    given_by_a_branch,
    looped,
    loop_begins,
)
"""Programs whose states may get another form."""
NESTED: tuple[Callable[..., Any], ...] = (
    read_in_a_branch,
    read_in_a_loop,
    read_in_a_condition,
    written_in_a_branch,
)
"""Programs that read or write a state inside a branch or a loop."""


def program(body: Callable[..., Any]) -> Program:
    specs = [mb.TensorSpec(SHAPE, dtype=types.fp16), mb.StateTensorSpec(SHAPE, dtype=types.fp16)]
    made: Program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(body)
    return made


def stream(model: Program, function: str | None = None) -> list[Mapping[str, Array]]:
    """What three calls give, one after the other."""
    predict = Predictor(model, function=function)
    state, rng = predict.make_state(), np.random.default_rng(0)
    return [predict({"x": rng.integers(-3, 4, SHAPE).astype(H)}, state=state) for _ in range(3)]


def stream_of_inputs(model: Program, function: str | None = None) -> list[Mapping[str, Array]]:
    """What three calls give, each with what the one before gave for the state."""
    predict, rng = Predictor(model, function=function), np.random.default_rng(0)
    held = np.zeros(SHAPE, H)
    calls: list[Mapping[str, Array]] = []
    for _ in range(3):
        outputs = dict(predict({"x": rng.integers(-3, 4, SHAPE).astype(H), "s": held}))
        held = np.asarray(outputs.pop("s_out"), H)
        calls.append(outputs)
    return calls
