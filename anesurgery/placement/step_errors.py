"""Errors over many calls of a model, for `certify`: outputs that feed inputs, and states, carry them on.

`step_errors` calls the model several times in each arithmetic and compares the outputs of each call. It finds
the pairs of outputs and inputs by their names, or else by their shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.checking.exactness import nearness
from anesurgery.errors import SurgeryError, near_matches
from anesurgery.files.package import Loaded
from anesurgery.interpret import Predictor
from anesurgery.mil import Array, Var, np_dtype, static_shape, types
from anesurgery.ops import names
from anesurgery.semantics.reading import in_decibels

SIDES = names("in out input output new next old prev previous past present updated n t")
"""Words in names that tell an input from an output: `past_key` and `present_key` are a pair."""


@dataclass(frozen=True)
class StepErrors:
    """The errors of the outputs over many calls, with outputs fed back to inputs.

    Attributes:
        feedback: output -> the input that it feeds in the next call.
        guessed: were the pairs found by their shapes, and not by their names or by the caller?
        states: names of the states, which keep their values from call to call.
        decibels: arithmetic -> PSNR in dB of the worst output of each call.
    """

    feedback: Mapping[str, str]
    guessed: bool
    states: tuple[str, ...]
    decibels: Mapping[str, tuple[float, ...]]

    @property
    def count(self) -> int:
        """The number of calls."""
        return len(next(iter(self.decibels.values())))

    def below(self, gate: float) -> dict[str, int]:
        """Return {arithmetic: the first call, from 1, whose outputs miss the gate}, without those that pass."""
        first = {a: next((k for k, v in enumerate(row, 1) if v < gate), 0) for a, row in self.decibels.items()}
        return {a: k for a, k in first.items() if k}

    @property
    def words(self) -> str:
        """The feedback, and the errors of the first and of the last call, in words."""
        fed = ", ".join(f"{out} -> {name}" for out, name in self.feedback.items())
        fed += " (guessed from equal shapes; feedback= changes it)" if self.guessed else ""
        fed = "; ".join(filter(None, (fed, f"states {', '.join(self.states)}" if self.states else "")))
        ends = ", ".join(
            f"{in_decibels(v[0], digits=0)} -> {in_decibels(v[-1], digits=0)} in {a}"
            for a, v in self.decibels.items()
        )
        return f"{self.count} steps, fed back: {fed}: {ends}"


def step_errors(
    loaded: Loaded,
    function: str | None,
    arithmetics: Sequence[str],
    samples: Sequence[Mapping[str, Any]],
    steps: int,
    feedback: Mapping[str, str] | None,
) -> StepErrors:
    """Call a model again and again in each arithmetic, each with its own states and its own outputs.

    Args:
        loaded: the model.
        function: which function; `main` or the first by default.
        arithmetics: the arithmetics to compare with the exact one.
        samples: sets of inputs, used in turn; of an input that is fed back only the first set is used.
        steps: the number of calls.
        feedback: output -> input; found by names, and else by shapes, when absent.

    Raises:
        SurgeryError: no output feeds an input, or the pairs that were given do not fit.
    """
    predictors = {
        a: Predictor(loaded, function=function, precision=a, fuse=False) for a in ("fp32", *arithmetics)
    }
    entries, exits = predictors["fp32"].ports
    states = tuple(n for n, v in entries.items() if types.is_state(v.sym_type))
    pairs, guessed = (dict(feedback), False) if feedback else pairs_of(entries, exits, bool(states))
    _check_pairs(pairs, entries, exits, states)
    runs = [_outputs_of_calls(predictor, samples, pairs, steps) for predictor in predictors.values()]
    rows: list[list[float]] = [[] for _ in arithmetics]
    for exact, *others in zip(*runs, strict=True):
        for row, outputs in zip(rows, others, strict=True):
            row.append(nearness(exact, outputs))
    decibels = {a: tuple(row) for a, row in zip(arithmetics, rows, strict=True)}
    return StepErrors(pairs, guessed, states, decibels)


def _outputs_of_calls(
    predictor: Predictor, samples: Sequence[Mapping[str, Any]], pairs: Mapping[str, str], steps: int
) -> Iterator[Mapping[str, Any]]:
    """Yield the outputs of each call, and feed them back to the next one."""
    states = predictor.make_state() or None
    fed: dict[str, Array] = {}
    for k in range(steps):
        values = {**samples[k % len(samples)], **fed} if k else dict(samples[0])
        outputs = predictor(values, state=states)
        fed = {name: np.asarray(outputs[out]).astype(values[name].dtype) for out, name in pairs.items()}
        yield outputs


def pairs_of(
    entries: Mapping[str, Var], exits: Mapping[str, Var], has_states: bool = False
) -> tuple[dict[str, str], bool]:
    """Return {output: the input that it feeds}, and whether the pairs were guessed from shapes.

    Names that differ only in words such as "in" and "out" are pairs. If there are no such names and no
    states, an input and an output are a pair if no other one has their shape.
    """
    plain = {n: v for n, v in entries.items() if _is_array(v)}
    by_stem = {_stem(name): name for name in plain}
    named = {
        out: by_stem[_stem(out)]
        for out, var in exits.items()
        if _is_array(var) and _stem(out) in by_stem and _have_same_shape(var, plain[by_stem[_stem(out)]])
    }
    if named or has_states:
        return named, False
    arrays = {out: var for out, var in exits.items() if _is_array(var)}
    candidates = {out: [n for n, v in plain.items() if _have_same_shape(var, v)] for out, var in arrays.items()}
    single = {out: inputs[0] for out, inputs in candidates.items() if len(inputs) == 1}
    taken = list(single.values())
    return {out: name for out, name in single.items() if taken.count(name) == 1}, True


def _stem(name: str) -> str:
    """Return a name without the words of `SIDES`."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
    return "_".join(w.lower() for w in words if w.lower() not in SIDES) or name


def _is_array(var: Var) -> bool:
    return types.is_tensor(var.sym_type) and np_dtype(var).kind in "fiu"


def _have_same_shape(a: Var, b: Var) -> bool:
    """Do two values have the same static shape, and the same kind of dtype?"""
    shape = static_shape(a)
    return shape is not None and shape == static_shape(b) and np_dtype(a).kind == np_dtype(b).kind


def _check_pairs(
    pairs: Mapping[str, str], entries: Mapping[str, Var], exits: Mapping[str, Var], states: Sequence[str]
) -> None:
    """Raise a SurgeryError without pairs and states, for an unknown name, or for a pair of two shapes."""
    if not pairs and not states:
        raise SurgeryError(
            "steps= feeds outputs back, and none is like an input by name or shape; "
            'give feedback={"output": "input"}'
        )
    for out, name in pairs.items():
        for side, wanted, there in (("output", out, exits), ("input", name, entries)):
            if wanted not in there:
                raise SurgeryError(f"feedback: no {side} {wanted!r}; {near_matches(wanted, there)}")
        if not _have_same_shape(exits[out], entries[name]):
            shapes = [tuple(v.shape or ()) for v in (exits[out], entries[name])]
            raise SurgeryError(f"feedback: {out} is {shapes[0]}, and {name} is {shapes[1]}")
