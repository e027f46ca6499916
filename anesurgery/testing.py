"""Helpers to test a pass three ways: the text after, the numbers before and after, the refusals.

Public: users test their own passes with them. A model is a MIL program for passes over ops, and the
specification of a neural network for passes over layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from anesurgery.files.interface import adapt_inputs, adapt_outputs, call_of
from anesurgery.loading import load
from anesurgery.mil import Array, Program, any_symbolic, np_dtype, static_shape, types
from anesurgery.network_editing.network import Network
from anesurgery.network_editing.neural_network import NeuralNetwork
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.rewriting.passes import Pass, run_pass
from anesurgery.rewriting.session import Session
from anesurgery.semantics.reading import shape_in_words
from anesurgery.text import INLINE, to_text


def apply_pass(step: Pass, model: Any, *, prove: bool = True, target: str | None = None) -> tuple[Any, Session]:
    """A rewritten copy of a program or specification, and the session with its changes and refusals."""
    edited = (MLProgram(load(model)) if isinstance(model, Program) else NeuralNetwork(model)).clone()
    session = Session(prove_sites=prove, target=target)
    for graph in edited.graphs:
        run_pass(step, graph, session)
    edited.finish()
    return (edited.program if isinstance(model, Program) else edited.spec), session


def text_of(model: Any) -> str:
    """The canonical text of a program, or of the network in a specification."""
    return to_text(model) if isinstance(model, Program) else network_text(Network(model))


def assert_rewrites(step: Pass, model: Any, after: str, **sampling: Any) -> Session:
    """The pass turns `model` into exactly this text, each site is checked, and a second run changes nothing.

    The network in a specification must give the same numbers too, within what the pass promises.

    Args:
        step: the pass.
        model: a program, or a specification.
        after: the text.
        sampling: `inputs` of `assert_same_numbers`.
    """
    rewritten, session = apply_pass(step, model)
    text = text_of(rewritten)
    assert text == after.strip("\n"), f"expected:\n{after}\nfound:\n{text}"
    assert session.changes, f"{step.name} changed nothing; refusals: {reasons(session)}"
    if not isinstance(model, Program):
        assert_same_numbers(model, rewritten, rtol=step.tolerance.rtol, **sampling)
    again, second = apply_pass(step, rewritten)
    assert not second.changes, f"{step.name} is not idempotent:\n{text_of(again)}"
    return session


def assert_refuses(step: Pass, model: Any, reason: str) -> None:
    """The pass changes nothing, a specification byte for byte, and says why in words that contain `reason`."""
    before = text_of(model)
    rewritten, session = apply_pass(step, model)
    same = text_of(rewritten) == before and (isinstance(model, Program) or rewritten == model)
    assert same, f"{step.name} changed the model:\n{text_of(rewritten)}"
    said = reasons(session)
    assert any(reason in r for r in said), f"expected a refusal with {reason!r}; found {said}"


def reasons(session: Session) -> list[str]:
    """The texts of all refusals of a session."""
    return [refusal.reason for _, refusal in session.refusals]


def random_inputs(
    program: Program,
    *,
    seed: int = 0,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    like: Program | None = None,
) -> dict[str, Array]:
    """Inputs for `main`: normal floats, integers of [0, 2), coin flips; `ranges` gives [low, high) by name.

    A symbolic dimension becomes what it is in `like`, where it is static there, else 3.
    """
    rng = np.random.default_rng(seed)
    function = next(iter(program.functions.values()))
    others = {} if like is None else next(iter(like.functions.values())).inputs
    arrays: dict[str, Array] = {}
    for name, var in function.inputs.items():
        if types.is_state(var.sym_type):
            continue
        stated = static_shape(var) or (static_shape(others[name]) if name in others else None)
        shape = stated or tuple(3 if any_symbolic([d]) else int(d) for d in var.shape)
        dtype, bounds = np_dtype(var), (ranges or {}).get(name)
        if dtype.kind == "f":
            values: Array = rng.standard_normal(shape) if bounds is None else rng.uniform(*bounds, shape)
        else:
            low, high = bounds or (0, 2)
            values = rng.integers(int(low), int(high), shape)
        arrays[name] = values.astype(dtype)
    return arrays


def assert_same_numbers(
    before: Any,
    after: Any,
    inputs: Mapping[str, Array] | None = None,
    *,
    rtol: float = 0.0,
    precision: str = "fp32",
    session: Session | None = None,
) -> None:
    """Both models give the same outputs by the interpreter, within `rtol` of the largest magnitude.

    Args:
        before: the program or specification as it was.
        after: as it is now.
        inputs: of `before`; random ones by default.
        rtol: 0 demands equality of every element (NaN equals NaN).
        precision: the arithmetic, "fp32" or "fp16".
        session: of the pass, when it declared interface changes: inputs and outputs are adapted.
    """
    from anesurgery.interpret import run

    old, new = _program(before), _program(after)
    contract = session.contract if session is not None else []
    inputs = dict(inputs if inputs is not None else random_inputs(old, like=new))
    expected: Any = adapt_outputs(contract, run(old, inputs, precision=precision), inputs)
    adapted, call = adapt_inputs(contract, inputs), call_of(contract)
    outputs: Any = call(new, adapted, precision) if call else run(new, adapted, precision=precision)
    assert set(expected) == set(outputs), f"outputs {sorted(expected)} became {sorted(outputs)}"
    for name, value in expected.items():
        _assert_close(name, np.asarray(value), np.asarray(outputs[name]), rtol)


def _program(model: Any) -> Program:
    return model if isinstance(model, Program) else import_network(model, keep_names=True).program


def _assert_close(name: str, old: Array, new: Array, rtol: float) -> None:
    assert old.shape == new.shape, f"{name}: {old.shape} became {new.shape}"
    if rtol == 0:
        np.testing.assert_array_equal(new, old, err_msg=name)
        return
    old, new = old.astype(np.float64), new.astype(np.float64)
    scale = np.abs(old[np.isfinite(old)]).max(initial=0.0)
    np.testing.assert_allclose(new, old, rtol=0, atol=rtol * scale, err_msg=name)


# Print the layers of a network in one canonical form, as `anesurgery.text` prints programs.
#
# ::
#
#     network(%x: 1x3x8x8) {
#       %y: 1x3x8x8 = activation(%x, linear={alpha=-1})
#       return %y
#     }
#
# Fields that have the default of the format are left out, weights of more than eight numbers stand as
# ``const<24>``, and shapes that are not known as ``?``.


def network_text(network: Network) -> str:
    """The text of a network (no trailing newline)."""
    args = ", ".join(_typed(network, name) for name in network.inputs)
    lines = [f"network({args}) {{"]
    for node in network.nodes:
        outputs = ", ".join(_typed(network, name) for name in node.outputs)
        words = [*(f"%{name}" for name in node.inputs), *_fields(node.params)]
        lines.append(f"  {outputs} = {node.kind}({', '.join(words)})")
    results = ", ".join(f"%{f.name}" for f in network.spec.description.output)
    return "\n".join([*lines, f"  return {results}", "}"])


def _typed(network: Network, blob: str) -> str:
    shape = network.shape(blob)
    return f"%{blob}: {'?' if shape is None else shape_in_words(shape)}"


def _fields(message: Any) -> list[str]:
    return [f"{field.name}={_value(field, value)}" for field, value in message.ListFields()]


def _value(field: Any, value: Any) -> str:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return "{" + ", ".join(f"{k}={_scalar(inner, value[k])}" for k in sorted(value)) + "}"
    if hasattr(value, "__len__") and not isinstance(value, (str, bytes)):
        return f"[{', '.join(_scalar(field, v) for v in value)}]"
    return _scalar(field, value)


def _scalar(field: Any, value: Any) -> str:
    if field.message_type is not None and field.message_type.name == "WeightParams":
        return _weights(value)
    if field.message_type is not None:
        return f"{{{', '.join(_fields(value))}}}"
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[value].name)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _weights(params: Any) -> str:
    numbers = list(params.floatValue)
    if numbers and len(numbers) <= INLINE:
        return f"[{', '.join(f'{v:g}' for v in numbers)}]"
    if numbers:
        return f"const<{len(numbers)}>"
    if params.float16Value:
        return f"const<{len(params.float16Value) // 2}xfp16>"
    return f"const<{len(params.rawValue or params.int8RawValue)} bytes>"
