"""Errors in fp16 and on the engine, for `certify`: of each op, and over many calls of the model.

The error of an op is measured alone, and with the errors of earlier ops. Errors are PSNR in dB against exact
arithmetic, by arithmetic ("fp16", "ane"). A histogram shows the values of an op in each arithmetic.

Outputs that feed inputs, and states, carry errors from call to call. `step_errors` calls the model several
times in each arithmetic and compares the outputs of each call. It finds the pairs of outputs and inputs by
their names, or else by their shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.checking.exactness import nearness
from anesurgery.checking.output_comparison import psnr
from anesurgery.display import counted
from anesurgery.errors import SurgeryError, near_matches
from anesurgery.facts.integer_masks import only_softmax_reads
from anesurgery.files.package import Loaded
from anesurgery.interpret import Predictor
from anesurgery.interpret.arithmetic.neural_engine import largest_of
from anesurgery.interpret.several_arithmetics import OpResults
from anesurgery.mil import Array, Var, np_dtype, operands, static_shape, types
from anesurgery.ops import names
from anesurgery.semantics.intervals import MASKED
from anesurgery.semantics.reading import in_decibels

_SIDES = names("in out input output new next old prev previous past present updated n t")
"""Words in names that tell an input from an output: `past_key` and `present_key` are a pair."""


@dataclass(frozen=True)
class StepErrors:
    """The errors of the outputs over many calls, with outputs fed back to inputs."""

    feedback: Mapping[str, str]
    """Output -> the input that it feeds in the next call."""
    guessed: bool
    """Were the pairs found by their shapes, and not by their names or by the caller?"""
    states: tuple[str, ...]
    """Names of the states, which keep their values from call to call."""
    decibels: Mapping[str, tuple[float, ...]]
    """Arithmetic -> PSNR in dB of the worst output of each call."""

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
        return f"{counted(self.count, 'step')}, fed back: {fed}: {ends}"


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
    pairs, guessed = (dict(feedback), False) if feedback else _pairs_of(entries, exits, bool(states))
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


def _pairs_of(
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
    """Return a name without the words of `_SIDES`."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
    return "_".join(w.lower() for w in words if w.lower() not in _SIDES) or name


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


BINS = 24
"""Bins of a histogram: as many as can be seen in half of a narrow page."""
MOST_SAMPLES = 4096
"""Elements of a value that its histogram counts, evenly spaced; the shares of the bins are right to 2 %."""


@dataclass(frozen=True)
class Histogram:
    """The histogram of a value in exact arithmetic and in the others, over the same bins."""

    low: float
    """The start of the first bin, a little below the least finite number in exact arithmetic."""
    high: float
    """The end of the last bin, a little above the largest finite number."""
    counts: Mapping[str, tuple[int, ...]]
    """Arithmetic ("fp32" is exact) -> elements in each bin."""
    outside: Mapping[str, int]
    """Arithmetic -> elements below or above all bins, or not finite."""


@dataclass(frozen=True)
class OpError:
    """The error of one op."""

    name: str
    """The name of its first output."""
    op_type: str
    """MIL op type; a loop or a branch is one op."""
    own: Mapping[str, float]
    """Arithmetic -> PSNR in dB of its worst output, computed from exact operands."""
    grown: Mapping[str, float]
    """Arithmetic -> the same, computed from operands with the errors of the ops before it."""
    largest: float
    """The largest magnitude of its outputs in exact arithmetic, without masked scores."""
    rules: tuple[str, ...] = ()
    """Ids of numeric findings of `inspect` about it."""
    repairs: tuple[str, ...] = ()
    """Passes that these findings name; for an op below the gate without one, those of its neighbours."""
    reads: tuple[str, ...] = ()
    """Names of the first outputs of the ops that it reads, constants among them."""
    histogram: Histogram | None = field(default=None, repr=False)
    """Histogram of its first output of floats, with the errors of the ops before it."""

    @property
    def worst(self) -> float:
        """The lowest of its own PSNRs over all arithmetics."""
        return min(self.own.values(), default=math.inf)


def op_error(results: OpResults) -> OpError | None:
    """Return the errors of one op; None if it has no outputs of floats."""
    floats = [k for k, v in enumerate(results.exact) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    if not floats:
        return None
    exact = [results.exact[k] for k in floats]
    sizes = [largest_of(v) for v in exact]

    def worst_psnr(outputs: Sequence[torch.Tensor]) -> float:
        return min(decibels(v, outputs[k], size) for k, v, size in zip(floats, exact, sizes, strict=True))

    op, first = results.op, floats[0]
    values = {"fp32": exact[0]} | {a: outputs[first] for a, outputs in results.grown.items()}
    return OpError(
        name=op.outputs[0].name,
        op_type=op.op_type,
        own={arithmetic: worst_psnr(outputs) for arithmetic, outputs in results.own.items()},
        grown={arithmetic: worst_psnr(outputs) for arithmetic, outputs in results.grown.items()},
        largest=max(unmasked_size(op.outputs[k], v) for k, v in zip(floats, exact, strict=True)),
        reads=tuple(dict.fromkeys(v.op.outputs[0].name for _, v in operands(op) if v.op is not None)),
        histogram=histogram(values),
    )


def unmasked_size(var: Var, value: torch.Tensor) -> float:
    """Return the largest magnitude of a value; of scores, without those that a mask takes out of a softmax."""
    if only_softmax_reads(var):
        value = value[~(value <= MASKED)]
    return largest_of(value)


def with_repairs_of_neighbours(rows: Sequence[OpError], gate: float) -> tuple[OpError, ...]:
    """Give each op below the gate that has no repair those of the ops that it reads or that read it.

    Example: the finding is about the op that fills a mask, while the error appears in the softmax behind it.

    Args:
        rows: ops in file order.
        gate: PSNR in dB.
    """
    neighbours: dict[str, set[str]] = {row.name: set() for row in rows}
    for row in rows:
        for read in neighbours.keys() & set(row.reads):
            neighbours[row.name].add(read)
            neighbours[read].add(row.name)
    repairs = {row.name: row.repairs for row in rows}

    def with_repairs(row: OpError) -> OpError:
        if row.worst >= gate or row.repairs:
            return row
        nearby = (repair for name in sorted(neighbours[row.name]) for repair in repairs[name])
        return replace(row, repairs=tuple(dict.fromkeys(nearby)))

    return tuple(map(with_repairs, rows))


def decibels(exact: torch.Tensor, rounded: torch.Tensor, largest: float) -> float:
    """Return the PSNR in dB over the elements that are finite in `exact`.

    It is minus infinity if the shapes differ, or if `rounded` is not finite at one of these elements.

    Args:
        exact: the value in exact arithmetic.
        rounded: the value in another arithmetic.
        largest: the largest magnitude in `exact`.
    """
    if exact.shape != rounded.shape:
        return -math.inf
    if not exact.numel() or not exact.is_floating_point():
        return math.inf
    rounded = rounded.float()
    if not math.isfinite(largest):
        finite = torch.isfinite(exact)
        exact, rounded = exact[finite], rounded[finite]
        largest = largest_of(exact)
    noise = float(torch.linalg.vector_norm(exact - rounded))
    if not math.isfinite(noise):
        return -math.inf
    return psnr(largest, noise / math.sqrt(max(exact.numel(), 1)))


def histogram(values: Mapping[str, torch.Tensor]) -> Histogram | None:
    """Return the histogram of a value in each arithmetic; None if no number is finite in "fp32"."""
    samples = {arithmetic: _evenly_spaced(value) for arithmetic, value in values.items()}
    finite = samples["fp32"][np.isfinite(samples["fp32"])]
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    margin = (high - low) / BINS or max(abs(low), 1.0) * fp16.EPSILON  # room for rounding
    low, high = low - margin, high + margin
    counts, outside = {}, {}
    for arithmetic, numbers in samples.items():
        inside = np.histogram(numbers[np.isfinite(numbers)], bins=BINS, range=(low, high))[0]
        counts[arithmetic], outside[arithmetic] = tuple(map(int, inside)), numbers.size - int(inside.sum())
    return Histogram(low, high, counts, outside)


def _evenly_spaced(value: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return at most `MOST_SAMPLES` elements of a value."""
    flat = value.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // MOST_SAMPLES))].double().numpy()
