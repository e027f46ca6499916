"""Prove a function of a model against that of another at every length that says something about others.

The proof op by op is one of a single length; where something meets the length, it is repeated at the lengths
that are declared, or next to what is met. Numbers are compared at several lengths in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from anesurgery.checking.lengths import (
    NOTHING,
    Declared,
    declared_lengths,
    drawn_shape,
    sizes_of,
    symbols_of,
    with_lengths,
)
from anesurgery.checking.lockstep import prove_models
from anesurgery.checking.model_proofs import ModelProof
from anesurgery.checking.trial_lengths import Plan, plan_of
from anesurgery.checking.trials import tried
from anesurgery.errors import InterpretError
from anesurgery.files.package import Loaded
from anesurgery.interpret.features import images
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.mil import Function, Var, function_of, is_symbolic, types

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
    """The proof of a function, with what adversarial inputs showed.

    Args:
        a: the reference.
        b: the candidate.
        name: of the function; None for the default one.
        values: inputs of `a`.
        last: where an output has one position, compare it with the last of several.
        assume: input -> the least and the largest integer that is given.
        how: the other arguments of `prove_models`.
    """
    old, new = (function_of(model.program, name) for model in (a, b))
    proof = prove_models(old, new, values, last=last, **how)
    if last:
        return shown_at(proof, old, new, values)
    free = not how["contract"] and all(_alike(v, new.inputs.get(n)) for n, v in old.inputs.items())
    plan = _plan(old, new, declared_lengths(a.program, a.spec)) if free else Plan(())
    plan = replace(plan, others=(), gap="") if plan.alike and proof.proved else plan
    proof = proof.tried(tried(old, new, values, assume=assume, plan=plan, **how))
    if not free:
        return shown_at(proof, old, new, values)
    if plan.gap:
        assert proof.trial is not None
        lengths = [*_dynamic(old, values), *proof.trial.lengths]
        return proof.on_lengths(min(lengths), max(lengths), plan.gap)
    short = min(_dynamic(old, values), default=2) < 2  # what broadcasts is proved of nothing else
    for lengths_here in (plan.first[:1] if short else ()) if plan.alike else plan.all:
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


def shown_at(proof: ModelProof, old: Function, new: Function, values: Mapping[str, Any]) -> ModelProof:
    """A proof at the lengths of some inputs alone, as far as it says something about others."""
    lengths = _dynamic(old, values)
    if not lengths or not any(symbols_of([v]) for v in _tensors(new)) or _plan(old, new, NOTHING).alike:
        return proof
    return proof.on_lengths(min(lengths), max(lengths), NOT_TRIED)


def _plan(old: Function, new: Function, declared: Declared) -> Plan:
    """The lengths to try beside those of the sample, which stand for the first."""
    results, sides = [*old.outputs, *new.outputs], (old.operations, new.operations)
    plan = plan_of(_tensors(old), sides, results, declared, twins=_twins(old, new))
    return replace(plan, first=plan.first[1:] or plan.first)


def _twins(old: Function, new: Function) -> dict[Any, Any]:
    """Symbol of the second function -> that of the first which has its place."""
    pairs = ((v, old.inputs[v.name]) for v in _tensors(new) if v.name in old.inputs)
    places = (place for v, w in pairs for place in zip(sizes_of(v), sizes_of(w), strict=False))
    return {d: e for d, e in places if is_symbolic(d) and is_symbolic(e)}


def _tensors(function: Function) -> list[Var]:
    return [v for v in function.inputs.values() if not types.is_state(v.sym_type)]


def _dynamic(function: Function, values: Mapping[str, Any]) -> list[int]:
    """The lengths that some inputs have along dynamic axes."""
    pairs = (
        pair for v in _tensors(function) for pair in zip(v.shape or (), np.shape(values[v.name]), strict=True)
    )
    return [n for size, n in pairs if is_symbolic(size)]


def _alike(a: Var, b: Var | None) -> bool:
    """Have two inputs dynamic dimensions at the same places?"""
    return b is not None and [*map(is_symbolic, a.shape or ())] == [*map(is_symbolic, b.shape or ())]
