"""Compare two models (`anesurgery.compare`): by the numbers that they give, and with `prove=True` by a proof.

The report has PSNR, errors, KL divergence and top-k for each output, and the first op that differs. Both models
run on the interpreter, on given or sampled inputs. Beside the numbers it says in words where the models are
called differently (`_call_differences`), but for what a contract declares (`Surgery.contract`). The last part
of the file proves one function against another at every length that says something about other lengths
(`prove_function`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from anesurgery.checking.divergence import first_divergence
from anesurgery.checking.length_use import Use, use_of
from anesurgery.checking.lengths import (
    Declared,
    declared_lengths,
    drawn_shape,
    sizes_of,
    symbols_of,
    with_lengths,
)
from anesurgery.checking.lockstep import ModelProof, prove_models
from anesurgery.checking.output_comparison import OutputComparison, compare_arrays
from anesurgery.checking.trial_lengths import TrialLengths, apart_lengths, lengths_to_try
from anesurgery.checking.trials import run_trial
from anesurgery.display import Drawn, finite
from anesurgery.doors import door
from anesurgery.errors import (
    InterfaceError,
    InterpretError,
    IsPipeline,
    LoadError,
    NotExpressible,
    SurgeryError,
)
from anesurgery.facts.makeup import logits_of
from anesurgery.files.interface import InterfaceChange, adapt_inputs, adapt_outputs, call_of
from anesurgery.files.joining import join
from anesurgery.files.package import Loaded
from anesurgery.interpret.arithmetic.precision import Double
from anesurgery.interpret.features import allows, bind, default_shapes, images
from anesurgery.interpret.predictor import Predictor, bound, run
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.loading import load, load_exact, load_member
from anesurgery.mil import (
    Array,
    Function,
    Program,
    Var,
    function_of,
    is_symbolic,
    np_dtype,
    static_shape,
    types,
)
from anesurgery.registry import INTERPRETER
from anesurgery.semantics.reading import in_decibels
from anesurgery.text import type_text

# Say where two models are not called alike: functions that one lacks, and other inputs, outputs and states.


def _call_differences(
    a: Program, b: Program, function: str | None, declared: Collection[str] = ()
) -> list[str]:
    """Return how the second model is called differently from the first, in words.

    If both have a single function, its name does not matter, since callers need not give it.

    Args:
        a: the first model.
        b: the second model.
        function: the only function that counts; all by default.
        declared: inputs, outputs and states that differ on purpose.
    """
    words = []
    if function is None and max(len(a.functions), len(b.functions)) > 1:
        words += [f"the second model has no function {n}" for n in a.functions if n not in b.functions]
        words += [f"only the second model has a function {n}" for n in b.functions if n not in a.functions]
    words += _signature_differences(function_of(a, function), function_of(b, function), declared)
    for name in _functions_in_common(a, b) if function is None else ():
        apart = _signature_differences(a.functions[name], b.functions[name], declared)
        words += [f"function {name}: {difference}" for difference in apart]
    return words


def _functions_in_common(a: Program, b: Program) -> list[str]:
    """Return the names of functions that both models have, without the first model's default one."""
    default = function_of(a, None)
    return [n for n, f in a.functions.items() if f is not default and n in b.functions]


def _signature_differences(a: Function, b: Function, declared: Collection[str] = ()) -> list[str]:
    """Return how one function is called differently from another, in words."""
    words = []
    for kind, old, new in zip(("input", "state", "output"), _ports(a), _ports(b), strict=True):
        for name in sorted((old.keys() | new.keys()) - set(declared)):
            if difference := _value_difference(old.get(name), new.get(name)):
                words.append(f"{kind} {name} {difference}")
    return words


def _ports(function: Function) -> tuple[Mapping[str, Var], ...]:
    """Return the inputs, states and outputs of a function by name."""
    states = {n: v for n, v in function.inputs.items() if types.is_state(v.sym_type)}
    inputs = {n: v for n, v in function.inputs.items() if n not in states}
    return inputs, states, {v.name: v for v in function.outputs}


def _value_difference(old: Var | None, new: Var | None) -> str:
    """Return how two values of one name differ, in words; "" where they can hold the same numbers."""
    if old is None or new is None:
        return f"is only in the {'second' if old is None else 'first'} model"
    if types.is_state(old.sym_type):
        same = old.sym_type.wrapped_type().get_shape() == new.sym_type.wrapped_type().get_shape()
    elif types.is_tensor(old.sym_type) and types.is_tensor(new.sym_type):
        shapes = static_shape(old), static_shape(new)
        same = None in shapes or shapes[0] == shapes[1]
        same = same and len(old.shape) == len(new.shape) and _can_hold(np_dtype(new), np_dtype(old))
    else:
        same = True
    return "" if same else f"is {type_text(old)} in the first model and {type_text(new)} in the second"


def _can_hold(new: np.dtype[Any], old: np.dtype[Any]) -> bool:
    """Return whether numbers of the old dtype can be given as the new one; floats may be rounded."""
    return np.can_cast(old, new) if old.kind in "iu" and new.kind in "iu" else old.kind == new.kind


def _description_differences(a: Any, b: Any, declared: Collection[str] = ()) -> list[str]:
    """Return how two specifications describe values of the same name differently, in words.

    Args:
        a: the specification of the first model, or None: then nothing is compared.
        b: that of the second.
        declared: inputs and outputs that differ on purpose.
    """
    if a is None or b is None:
        return []
    words = []
    for kind in ("input", "output"):
        old, new = ({f.name: _feature_facts(f) for f in getattr(spec.description, kind)} for spec in (a, b))
        for name in sorted((old.keys() & new.keys()) - set(declared)):
            apart = [k for k in old[name] if old[name][k] != new[name][k]]
            words += [
                f"{kind} {name} has another {what}: {old[name][what]}, then {new[name][what]}" for what in apart
            ]
    return words


def _length_differences(a: Loaded, b: Loaded, declared: Collection[str] = ()) -> list[str]:
    """Return the lengths that the first model takes along a dynamic axis and the second does not, in words.

    Args:
        a: the first model.
        b: the second.
        declared: inputs that differ on purpose.
    """
    first, second = (declared_lengths(model.program, model.spec) for model in (a, b))
    old, new = (function_of(model.program, None).inputs for model in (a, b))
    words = []
    for name in sorted((old.keys() & new.keys()) - set(declared) if a.spec and b.spec else ()):
        for axis, (d, e) in enumerate(zip(sizes_of(old[name]), sizes_of(new[name]), strict=False)):
            if not (is_symbolic(d) and is_symbolic(e)):
                continue
            (low, high), (least, most) = first.range_of(d), second.range_of(e)
            if low < least or (most is not None and (high is None or most < high)):
                words.append(
                    f"input {name} takes {_range_words(low, high)} along axis {axis}, "
                    f"then {_range_words(least, most)}"
                )
    return words


def _range_words(low: int, high: int | None) -> str:
    return f"{low} or more" if high is None else f"{low} to {high}"


def _feature_facts(feature: Any) -> dict[str, str]:
    """Return what a caller must know of a value besides its shape and dtype."""
    form = feature.type.WhichOneof("Type") or "unknown"
    picture, array = feature.type.imageType, feature.type.multiArrayType
    colors = picture.ColorSpace.Name(picture.colorSpace) if form == "imageType" else "none"
    default = array.WhichOneof("defaultOptionalValue") if form == "multiArrayType" else None
    given = "none" if default is None else f"{getattr(array, default):g}"
    return {"form": form, "order of colors": colors, "default": given}


@dataclass(frozen=True)
class Comparison(Drawn):
    """The result of `compare`, against a stated gate."""

    outputs: tuple[OutputComparison, ...]
    """A row for each output of the first model."""
    precision: str
    """The arithmetic in which both ran: "fp32" or "fp16"."""
    gate: float
    """PSNR in dB that every output must reach."""
    first_divergence: str | None = None
    """The first op (in file order of `b`) whose value differs by more than the gate, when not `ok`."""
    words: tuple[str, ...] = field(default=())
    """The declared interface changes under which the models were compared."""
    proof: ModelProof | None = None
    """What `prove=True` found."""
    called: tuple[str, ...] = ()
    """Where the second model is called differently: functions that one lacks, other inputs; in words."""
    instead: str = ""
    """Why the models were compared in another arithmetic than asked for, in words; "" where they were not."""
    engine: str = INTERPRETER
    """What ran the second model: "interpreter", or "coreai"."""

    @property
    def psnr(self) -> float:
        """The PSNR of the worst output. NaN if an output was not measured."""
        decibels = [o.psnr for o in self.outputs]
        return math.nan if any(map(math.isnan, decibels)) else min(decibels, default=math.inf)

    @property
    def ok(self) -> bool:
        """Whether the interfaces are the same and all outputs reach the gate."""
        return not self.called and self.outputs_agree

    @property
    def outputs_agree(self) -> bool:
        """Whether every output reaches the gate. NaN never does, infinities only if they are meant."""
        any_compared = any(o.compared for o in self.outputs)
        if self.proof is not None and self.proof.trial is not None and self.proof.trial.failure:
            return False
        return any_compared and all(o.psnr >= self.gate and not o.failure for o in self.outputs)

    @property
    def verdict(self) -> str:
        """The verdict in words: the numbers, the gate, and where the difference begins."""
        failures = [*self.called, *(o.failure for o in self.outputs if o.failure)]
        trial = None if self.proof is None else self.proof.trial
        if trial is not None and trial.failure:
            failures.append("; for example\n".join(filter(None, (trial.failure, trial.counterexample))))
        if not failures and not any(o.compared for o in self.outputs):
            failures = ["no output holds a number: nothing was compared"]
        measured = [o.psnr for o in self.outputs if o.compared]
        least = in_decibels(min(measured, default=math.inf), "worst PSNR ")
        worst = [f"{least}, gate {self.gate:g} dB"] if measured and min(measured) < math.inf else []
        worst += ["identical"] if not (failures or worst) else []
        place = [f"first diverging op: {self.first_divergence}"] if self.first_divergence else []
        return "; ".join([*failures, *worst, *place])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [finite(vars(o)) for o in self.outputs]
        return {
            "ok": self.ok,
            "precision": self.precision,
            "engine": self.engine,
            "gate_db": self.gate,
            "psnr_db": finite(self.psnr),
            "verdict": self.verdict,
            "first_divergence": self.first_divergence,
            "called_differently": list(self.called),
            "outputs": rows,
            "interface_changes": list(self.words),
            **({} if self.proof is None else {"proof": self.proof.to_json()}),
        }


def _several_calls(contract: Sequence[InterfaceChange], prove: bool, engine: str) -> Any:
    """Return the function that makes several calls of one, where a contract says so; else None.

    Raises:
        InterfaceError: the contract does, but a proof or another engine was asked for.
    """
    call = call_of(contract)
    if call is not None and prove:
        raise InterfaceError("one call became several, which no proof follows; compare the numbers")
    if call is not None and engine != INTERPRETER:
        raise InterfaceError("one call became several, which only the interpreter makes; leave engine= out")
    return call


def _check_gate(gate: float) -> None:
    """Check that a gate is a PSNR to reach; minus infinity means to measure only.

    Raises:
        SurgeryError: the gate is NaN, or below 0 dB, where differences are larger than the values.
    """
    if math.isnan(gate) or -math.inf < gate < 0:
        raise SurgeryError(f"gate={gate:g} is no PSNR in dB to reach; give 0 or more, or -inf to measure only")


@door("inputs", "seed", "precision")
def compare(
    a: Any,
    b: Any,
    inputs: Mapping[str, Array] | None = None,
    *,
    precision: str = "fp32",
    contract: Sequence[InterfaceChange] = (),
    gate: float = 60.0,
    function: str | None = None,
    seed: int = 0,
    last: bool = False,
    member: str | int | None = None,
    prove: bool = False,
    assume: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    engine: str = INTERPRETER,
) -> Comparison:
    """Run two models on the same inputs with the interpreter and measure how far apart they are.

    NaN is never a success, even if both sides have it. An infinity is a success only if the first model gives
    it in fp64 too, as in a mask with -inf.

    Args:
        a: the reference: path, MLModel or program.
        b: the candidate.
        inputs: of `a`, by name. Default: random inputs from `sample_inputs`.
        precision: "fp32", or "fp16" for the arithmetic as stored.
        contract: declared interface changes from `a` to `b` (`Surgery.contract`).
        gate: the least PSNR of every output, in dB.
        function: which function to run; `main` or the first by default.
        seed: of the sampled inputs.
        last: if an output of `b` has one position and that of `a` several, compare the last one.
        member: of pipelines, the one model to compare, by name or number; the whole pipelines when absent.
        prove: also prove `b` against `a` op by op: bit for bit, over prime fields, or else on numbers
            (docs/proofs.md). The result's `proof` has the grade and the first op that is not proved. Chains and
            pipelines are proved as a whole. All functions that both models have are proved, unless you name
            one.
        assume: least and largest value of integer inputs, {"input_ids": (0, 50256)}: no others are tried.
        engine: what runs `b`: "interpreter", or "coreai" for Apple's Core AI runtime, as it is stored. An
            output that is the same for two sets of inputs is then no success.

    Returns:
        The `Comparison`: for each output shape, PSNR in dB, largest absolute and relative difference, and of
        logits the KL divergence in nats; `ok` says whether all reach the gate, and whether both models have the
        same functions, inputs, outputs and states, except as the contract declares.

    Raises:
        InterfaceError: the models have no output in common, or one has another shape, though none was declared.
        InterpretError: inputs that do not fit.
        LoadError: a model cannot be read; or a pipeline is to be proved whose models have several opsets.
        SurgeryError: an argument is not what the call takes.
    """
    _check_gate(gate)
    call = _several_calls(contract, prove, engine)
    try:
        if member is not None and all(isinstance(model, (Program, Loaded)) for model in (a, b)):
            raise LoadError(f"neither model is a pipeline; leave member={member!r} out")
        first, second = _one_model(a, member), _one_model(b, member)
    except IsPipeline:
        if engine != INTERPRETER:
            raise
        whole = _compare_pipelines(a, b, inputs, precision, contract, gate, seed, last)
        return replace(whole, proof=_prove_pipelines(a, b, inputs, gate, seed, last)) if prove else whole
    if not contract:
        _check_inputs_in_common(first, second, function)
    inputs, old = _reference(first, second, inputs, contract, function, seed, precision, assume)
    expected = adapt_outputs(contract, old, inputs)
    candidate = second.program if engine == INTERPRETER else b
    outputs = _candidate(candidate, adapt_inputs(contract, inputs), call, precision, function, engine)
    rows = _rows(expected, outputs, last)
    if any(row.undefined for row in rows):
        exact = run(first.program, inputs, precision=Double(), function=function)  # type: ignore[arg-type]
        rows = _rows(expected, outputs, last, adapt_outputs(contract, exact, inputs))
    chosen = logits_of(function_of(second.program, function))
    rows = tuple(replace(row, logits=row.name in chosen) for row in rows)
    words = tuple(change.words for change in contract)
    proving = {"contract": contract, "gate": gate, "seed": seed, "assume": assume}
    declared = {name for change in contract for name in change.names} | (set(expected) if last else set())
    called = () if call else tuple(_call_differences(first.program, second.program, function, declared))
    called = tuple(dict.fromkeys((*called, *_not_in_common(expected, outputs))))
    if not (call or function):
        called += _described_differences(first, second, declared)
    called += () if engine == INTERPRETER else _constant_outputs(first, function, inputs, old, seed)
    proof = _prove_functions(first, second, inputs, function, last, **proving) if prove else None
    proof = None if proof is None else proof.with_differences(called)
    result = Comparison(rows, precision, gate, None, words, proof, called, engine=engine)
    if result.outputs_agree or call is not None:
        return result
    how = {"precision": precision, "gate": gate, "contract": contract, "function": function}
    where = first_divergence(first, second, inputs, **how)  # type: ignore[arg-type]
    return replace(result, first_divergence=None if where is None else str(where))


def _described_differences(first: Loaded, second: Loaded, declared: set[str]) -> tuple[str, ...]:
    """Return how the models' descriptions differ, in words."""
    differing = _description_differences(first.spec, second.spec, declared)
    return (*differing, *_length_differences(first, second, declared))


def _constant_outputs(
    model: Loaded, function: str | None, inputs: Mapping[str, Any], outputs: Mapping[str, Any], seed: int
) -> tuple[str, ...]:
    """Return the outputs that are the same for other inputs of the same shapes, in words."""
    shapes = {name: np.shape(value) for name, value in inputs.items()}
    other = sample_inputs(model.program, function=function, seed=seed + 1, shapes=shapes)
    other_outputs = run(model.program, other, function=function)
    constant = [n for n, v in outputs.items() if np.array_equal(v, other_outputs[n], equal_nan=True)]
    return tuple(f"no input changes output {name}, so it was not compared" for name in constant)


def compare_as_stored(a: Loaded, b: Loaded, inputs: Mapping[str, Array] | None, **how: Any) -> Comparison:
    """Compare in fp16; in fp32 if `a` itself is wrong in fp16, and `b` is no further from `a` in fp32.

    An edit that repairs an overflow changes the outputs in fp16, so that the fp16 outputs of the model as given
    are no reference. Nor are they where both models are NaN or infinite at the same elements, and agree at all
    others.

    Args:
        a: the model as given.
        b: the edited model.
        inputs: inputs of `a`, by name; sampled by default.
        how: the arguments of `compare`, without the precision.
    """
    half = compare(a, b, inputs, precision="fp16", **how)
    contract, trial = how.get("contract", ()), None if half.proof is None else half.proof.trial
    if half.ok or call_of(contract) is not None or (trial is not None and trial.failure):
        return half
    whole = compare(a, b, inputs, precision="fp32", **{**how, "prove": False})
    if not whole.ok:
        return half
    sampling = (how.get("seed", 0), "fp32", how.get("assume", {}))
    inputs, meant = _reference(a, b, inputs, contract, None, *sampling)
    expected = adapt_outputs(contract, meant, inputs)
    stored = adapt_outputs(contract, run(a.program, inputs, precision="fp16"), inputs)
    changed = run(b.program, adapt_inputs(contract, inputs), precision="fp16")
    before, after = (
        Comparison(_rows(expected, dict(v), last=False), "fp16", whole.gate) for v in (stored, changed)
    )
    if not _is_finite(after) and not any(row.bad or row.psnr < half.gate for row in half.outputs):
        words = "the models are not finite in fp16, in the same places"
        return replace(whole, proof=half.proof, instead=f"compared in fp32, since {words}")
    if not _is_finite(after) or (_is_finite(before) and before.psnr > after.psnr):
        return half
    ends = [f"{c.psnr:.0f} dB" if _is_finite(c) else "not finite" for c in (before, after)]
    wrong = f"the model as given is wrong in fp16: {ends[0]} from what it means, now {ends[1]}"
    return replace(whole, proof=half.proof, instead=f"compared in fp32, since {wrong}")


def _is_finite(comparison: Comparison) -> bool:
    return not any(row.failure for row in comparison.outputs) and not math.isnan(comparison.psnr)


def _check_inputs_in_common(first: Loaded, second: Loaded, function: str | None) -> None:
    """Check that two models have an input in common; else they are not two forms of one.

    Raises:
        InterpretError: they have no input in common.
    """
    names = [sorted(function_of(one.program, function).inputs) for one in (first, second)]
    if all(names) and set(names[0]).isdisjoint(names[1]):
        words = " and ".join(map(", ".join, names))
        raise InterpretError(f"the models take different inputs, {words}; give two forms of one model")


def _reference(
    first: Loaded,
    second: Loaded,
    inputs: Mapping[str, Array] | None,
    contract: Sequence[InterfaceChange],
    function: str | None,
    seed: int,
    precision: str,
    assume: Mapping[str, tuple[int, int]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return inputs, sampled where none are given, and the first model's outputs for them."""
    if inputs is not None:
        values = bound(first, inputs, function)
        return values, run(first.program, values, precision=precision, function=function)
    call = call_of(contract)
    shapes = _static_shapes(first, second, function if call is None else None)
    if call is None and not contract:
        shapes = _separate_lengths(first, second, function, seed) or shapes
    shapes = _described_shapes(first, function, seed) | shapes
    return _sampled(first, function, shapes, seed, precision, assume)


def _candidate(
    candidate: Any, inputs: Mapping[str, Any], call: Any, precision: str, function: str | None, engine: str
) -> dict[str, Any]:
    """Return the outputs of the second model, from several calls where the contract says so."""
    if call is not None:
        return dict(call(candidate, inputs, precision))
    how: dict[str, Any] = {"precision": precision} if engine == INTERPRETER else {"engine": engine}
    return dict(run(candidate, inputs, function=function, **how))


def _sampled(
    model: Loaded,
    function: str | None,
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    precision: str,
    assume: Mapping[str, tuple[int, int]],
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return sampled inputs with the outputs; inputs are made positive where that gives more finite numbers."""
    described = images(model.described_inputs)
    inputs = sample_inputs(model.program, function=function, seed=seed, shapes=shapes, images=described)
    inputs |= {n: np.clip(inputs[n], *ends) for n, ends in assume.items() if n in inputs}
    outputs = run(model.program, inputs, precision=precision, function=function)
    if (defined := _least_finite_share(outputs)) == 1:
        return inputs, outputs
    positive = {n: np.abs(v) if np.asarray(v).dtype.kind == "f" else v for n, v in inputs.items()}
    again = run(model.program, positive, precision=precision, function=function)
    return (positive, again) if _least_finite_share(again) > defined else (inputs, outputs)


def _least_finite_share(outputs: Mapping[str, Any]) -> float:
    """Return the share of finite numbers in the output with the fewest."""
    arrays = [np.asarray(v) for v in outputs.values()]
    return min((float(np.isfinite(v).mean()) for v in arrays if v.dtype.kind == "f" and v.size), default=1.0)


def _prove_functions(
    a: Loaded, b: Loaded, inputs: Mapping[str, Any], function: str | None, last: bool, **how: Any
) -> ModelProof:
    """Return the proof of one function; where none is named, of all functions that are called alike."""
    proof = prove_function(a, b, function, inputs, last=last, **how)
    if function is not None or how["contract"] or last:
        return proof
    for name in _functions_in_common(a.program, b.program):
        if _signature_differences(a.program.functions[name], b.program.functions[name]):
            continue
        shapes = _static_shapes(a, b, name)
        values = sample_inputs(
            a.program, function=name, seed=how["seed"], shapes=shapes, images=images(a.described_inputs)
        )
        proof = proof.with_function(name, prove_function(a, b, name, values, **how))
    return proof


def _static_shapes(a: Loaded, b: Loaded, function: str | None) -> dict[str, tuple[int, ...]]:
    """Return the static shapes of the second model's inputs where those of the first are dynamic."""
    old, new = (function_of(loaded.program, function).inputs for loaded in (a, b))
    dynamic = {name for name, var in old.items() if static_shape(var) is None}
    return {n: shape for n, v in new.items() if n in dynamic and (shape := static_shape(v)) is not None}


def _described_shapes(model: Loaded, function: str | None, seed: int) -> dict[str, tuple[int, ...]]:
    """Return the described default shapes, where sampled shapes are not allowed, or inputs are images."""
    features = [f for f in model.described_inputs if f.name in function_of(model.program, function).inputs]
    drawn = {n: v.shape for n, v in sample_inputs(model.program, function=function, seed=seed).items()}
    pictures, default = images(features), default_shapes(features)
    if allows(features, drawn) and not pictures:
        return {}
    return {name: shape for name, shape in default.items() if shape}


def _separate_lengths(a: Loaded, b: Loaded, function: str | None, seed: int) -> dict[str, tuple[int, ...]]:
    """Return shapes in which each dynamic axis has its own length; {} where a model does not take them."""
    variables = [v for v in function_of(a.program, function).inputs.values() if not types.is_state(v.sym_type)]
    lengths = apart_lengths(symbols_of(variables))
    if len(lengths) < 2 or _static_shapes(a, b, function):
        return {}
    with with_lengths(lengths):
        shapes = {v.name: drawn_shape(v) for v in variables}
    if not all(allows(model.described_inputs, shapes) for model in (a, b)):
        return {}
    try:
        inputs = sample_inputs(a.program, function=function, seed=seed, shapes=shapes)
        for model in (a, b):
            run(model.program, inputs, function=function)
    except InterpretError:
        return {}  # several of them have to be equal
    return shapes


def _one_model(model: Any, member: str | int | None) -> Loaded:
    """Load a model, or a member of a pipeline."""
    if not (member is None or isinstance(model, (Program, Loaded))):
        return load_member(model, member or 0)
    try:
        return load(model)
    except NotExpressible:
        return load_exact(model)


def _compare_pipelines(
    a: Any,
    b: Any,
    inputs: Mapping[str, Array] | None,
    precision: str,
    contract: Sequence[InterfaceChange],
    gate: float,
    seed: int,
    last: bool,
) -> Comparison:
    """Compare the final outputs of two pipelines, or of a pipeline and a model; see `compare`."""
    first, call = Predictor(a, precision=precision, fuse=False), call_of(contract)
    values = first.sample(seed) if inputs is None else inputs
    expected, adapted = adapt_outputs(contract, first(values), values), adapt_inputs(contract, values)
    if call is not None:
        outputs = dict(call(b, adapted, precision))
    else:
        outputs = Predictor(b, precision=precision, fuse=False)(adapted)
    rows = _rows(expected, outputs, last)
    if any(row.undefined for row in rows):
        exact = Predictor(a, precision=Double(), fuse=False)(values)  # type: ignore[arg-type]
        rows = _rows(expected, outputs, last, adapt_outputs(contract, exact, values))
    called = tuple(_not_in_common(expected, outputs))
    return Comparison(rows, precision, gate, None, tuple(change.words for change in contract), called=called)


def _prove_pipelines(
    a: Any, b: Any, inputs: Mapping[str, Array] | None, gate: float, seed: int, last: bool
) -> ModelProof:
    """Prove the final outputs of two pipelines, or of a pipeline and a model, with their ops in one row."""
    first, second = (Predictor(model, fuse=False) for model in (a, b))
    values = dict(first.sample(seed) if inputs is None else inputs)
    bound_values = bind(first.inputs, values) if first.inputs else values
    old, new = (function_of(join(p.models, p.outputs), None) for p in (first, second))
    proof = prove_models(old, new, bound_values, gate=gate, seed=seed, last=last)
    return limited_to_lengths(proof, old, new, bound_values)


def _rows(
    expected: Mapping[str, Any], outputs: Mapping[str, Any], last: bool, exact: Mapping[str, Any] | None = None
) -> tuple[OutputComparison, ...]:
    """Return the measures of each output that both models have.

    Args:
        expected: the outputs of the reference.
        outputs: the outputs of the candidate.
        last: whether to compare the last position of several.
        exact: the outputs of the reference in fp64, which show the infinities that are meant.

    Raises:
        InterfaceError: no output has the name that it had, or one has another shape.
    """
    if expected and expected.keys().isdisjoint(outputs):
        raise InterfaceError(
            f"the outputs {sorted(expected)} became {sorted(outputs)}; compare models with an output in common"
        )
    rows = []
    for name in (n for n in expected if n in outputs):
        x, y = _last_positions(name, *_numbers(expected[name], outputs[name]), last)
        meant = None if exact is None else np.asarray(exact[name])
        if meant is not None and meant.dtype.kind != "f":
            meant = None
        if meant is not None and meant.shape != x.shape:
            meant = _last_positions(name, meant, y, last)[0]
        rows.append(compare_arrays(name, x, y, meant))
    return tuple(rows)


def _not_in_common(expected: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[str]:
    """Return the outputs that only one model gives, in words."""
    apart = sorted(expected.keys() ^ outputs.keys())
    return [f"output {n} is only in the {'first' if n in expected else 'second'} model" for n in apart]


def _last_positions(name: str, a: Array, b: Array, last: bool) -> tuple[Array, Array]:
    """Return two outputs; if `b` has one position, with the last position of `a`, where `last` is set.

    Raises:
        InterfaceError: `b` has one position of several, and `last` is not set.
    """
    apart = [axis for axis, (m, n) in enumerate(zip(a.shape, b.shape, strict=False)) if m != n]
    if a.ndim != b.ndim or len(apart) != 1 or b.shape[apart[0]] != 1:
        return a, b
    if not last:
        raise InterfaceError(
            f"output {name!r} has shape {a.shape} in one model and {b.shape} in the other, one of "
            f"{a.shape[apart[0]]} positions; `--last` (last=True) compares only the last one"
        )
    return a.take([-1], axis=apart[0]), b


def _numbers(a: Any, b: Any) -> tuple[Array, Array]:
    """Return two outputs as arrays: dictionaries in the order of keys, labels as whether they are equal.

    A dictionary beside an array, which has no keys, is in its own order: that of the classes.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = sorted(a.keys() | b.keys())
        x, y = (np.array([value.get(key, np.nan) for key in keys]) for value in (a, b))
        return x, y
    x, y = (np.array([*v.values()]) if isinstance(v, Mapping) else np.asarray(v) for v in (a, b))
    if isinstance(a, Mapping) != isinstance(b, Mapping) and x.size == y.size:
        x, y = x.reshape(-1), y.reshape(-1)
    if x.dtype.kind in "US":
        return np.ones(x.shape, bool), np.asarray(x == y)
    return x, y


# -- a proof of one function at several lengths -----------------------------------------------------------
#
# The proof op by op (`lockstep`) holds for a single length. Where an op depends on the length, it is repeated
# at the declared lengths, or next to the constants that a length meets. Numbers are compared at several lengths
# in any case (`trials`).


NOT_TRIED = "only the lengths of the inputs were tried"


def prove_function(
    a: Loaded,
    b: Loaded,
    name: str | None,
    values: Mapping[str, Any],
    *,
    last: bool = False,
    assume: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    **how: Any,
) -> ModelProof:
    """Prove one function of a model against that of another, and run both on adversarial inputs.

    Args:
        a: the reference.
        b: the candidate.
        name: the name of the function; None for the default one.
        values: inputs of `a`, by name.
        last: where an output has one position, compare it with the last of several.
        assume: input -> (least, largest) integer that is tried.
        how: the other arguments of `prove_models`.
    """
    old, new = (function_of(model.program, name) for model in (a, b))
    proof = prove_models(old, new, values, last=last, **how)
    if last:
        return limited_to_lengths(proof, old, new, values)
    dynamic_alike = all(_are_dynamic_alike(v, new.inputs.get(n)) for n, v in old.inputs.items())
    may_vary = dynamic_alike and not how["contract"]
    plan = _length_plan(old, new, declared_lengths(a.program, a.spec)) if may_vary else TrialLengths(())
    plan = replace(plan, others=(), gap="") if plan.alike and proof.proved else plan
    proof = proof.with_trial(run_trial(old, new, values, assume=assume, plan=plan, **how))
    if not may_vary:
        return limited_to_lengths(proof, old, new, values)
    if plan.gap:
        assert proof.trial is not None
        tried = [*_dynamic_lengths(old, values), *proof.trial.lengths]
        return proof.on_lengths(min(tried), max(tried), plan.gap)
    lengths = plan.all
    if plan.alike:  # one length is enough, unless the sample broadcasts: length 1 stands for no other
        lengths = plan.first[:1] if min(_dynamic_lengths(old, values), default=2) < 2 else ()
    for lengths_here in lengths:
        if not proof.proved:
            break
        with with_lengths(lengths_here):
            shapes = {v.name: drawn_shape(v) for v in _tensors(old)}
        there = sample_inputs(
            a.program, function=name, seed=how["seed"], shapes=shapes, images=images(a.described_inputs)
        )
        there |= {n: np.clip(there[n], *ends) for n, ends in assume.items() if n in there}
        try:
            proof = proof.weaker(prove_models(old, new, there, **how))
        except InterpretError:
            continue  # the first model takes no such length; where it does, the trial has run both
    return proof


def limited_to_lengths(
    proof: ModelProof, old: Function, new: Function, values: Mapping[str, Any]
) -> ModelProof:
    """Return a proof, limited to the lengths of some inputs where it says nothing about others."""
    lengths = _dynamic_lengths(old, values)
    if not lengths or not symbols_of(_tensors(new)):
        return proof
    use = use_of((old.operations, new.operations), [*old.outputs, *new.outputs])
    if use.kind is Use.ALIKE:
        return proof
    return proof.on_lengths(min(lengths), max(lengths), NOT_TRIED)


def _length_plan(old: Function, new: Function, declared: Declared) -> TrialLengths:
    """Return the lengths to try besides those of the sample."""
    results, sides = [*old.outputs, *new.outputs], (old.operations, new.operations)
    plan = lengths_to_try(_tensors(old), sides, results, declared, _matching_symbols(old, new))
    return replace(plan, first=plan.first[1:] or plan.first)


def _matching_symbols(old: Function, new: Function) -> dict[Any, Any]:
    """Return symbol of the second function -> the symbol of the first at the same axis."""
    pairs = ((v, old.inputs[v.name]) for v in _tensors(new) if v.name in old.inputs)
    places = (place for v, w in pairs for place in zip(sizes_of(v), sizes_of(w), strict=False))
    return {d: e for d, e in places if is_symbolic(d) and is_symbolic(e)}


def _tensors(function: Function) -> list[Var]:
    return [v for v in function.inputs.values() if not types.is_state(v.sym_type)]


def _dynamic_lengths(function: Function, values: Mapping[str, Any]) -> list[int]:
    """Return the lengths of some inputs along dynamic axes."""
    shapes = ((v.shape or (), np.shape(values[v.name])) for v in _tensors(function))
    return [n for shape, given in shapes for size, n in zip(shape, given, strict=True) if is_symbolic(size)]


def _are_dynamic_alike(a: Var, b: Var | None) -> bool:
    """Return whether two inputs have dynamic axes at the same positions."""
    return b is not None and [*map(is_symbolic, a.shape or ())] == [*map(is_symbolic, b.shape or ())]
