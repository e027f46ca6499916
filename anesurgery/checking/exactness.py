"""Measure how near a model comes, in fp16 and in the engine's arithmetic, to its results in fp32.

`Yardstick(program).measure(...)` compares edited programs with the program as given, in fp32 as stored, on
sampled inputs; `rewriting.checks` uses it to refuse edits that lose digits. A program that computes in fp32
runs on no engine. "fp16" then means that every value is rounded, as a conversion to fp16, or a GPU for a neural
network, would do.

Two things would mislead a plain comparison. A `topk` may choose another row among nearly equal scores: the
second run repeats the indices of the first (`_SameIndices`), and is judged by how near the values are that it
would have chosen. And fp32 itself may be the limit: `log(softmax(x))` of scores that are 104 apart gives -103.3
whatever the scores are, as it adds the epsilon 1.4e-45 to a probability of 0. The model means the difference of
the scores, which a repaired model computes (`_Meant`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.checking.output_comparison import psnr
from anesurgery.errors import InterpretError, Refusal
from anesurgery.facts.loops import ops_with_run_counts
from anesurgery.facts.written_exponentials import LOGS_OF_SHARES, WrittenExponential, written_exponential
from anesurgery.files.interface import InterfaceChange, adapt_inputs, adapt_outputs, call_of
from anesurgery.interpret import Listener, Predictor, run
from anesurgery.interpret.arithmetic import neural_engine
from anesurgery.interpret.arithmetic.neural_engine import chip_of
from anesurgery.interpret.arithmetic.precision import Arithmetic, Double, is_mixed, meaning
from anesurgery.interpret.sampling import sample_function
from anesurgery.interpret.table import Implementation
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Program,
    Var,
    constant,
    np_dtype,
    operands,
    static_shape,
    types,
    walk_ops,
)
from anesurgery.numeric.squares import NORMS
from anesurgery.ops import names
from anesurgery.semantics.reading import in_decibels, number, shape_in_words
from anesurgery.semantics.rows import work_of

SHARES = frozenset({"softmax", "sigmoid"})


def _unguarded_log(op: Operation) -> WrittenExponential | None:
    """Return the form of a logarithm of a softmax or sigmoid without an epsilon that guards it, else None."""
    form = written_exponential(op) if op.op_type == "log" else None
    return form if form is not None and form.op_type in LOGS_OF_SHARES and not form.guard else None


def _rounded_to_infinity(op: Operation) -> frozenset[str]:
    """Return the inputs of an op that are constants of fp16, and infinite."""
    read = operands(op) if op.op_type in _MASKING else ()
    halves = [(name, v) for name, v in read if constant(v) is not None and np_dtype(v) == np.float16]
    return frozenset(name for name, v in halves if np.isinf(constant(v)).any())


_MASKING = names("add sub mul real_div select")
"""The ops with which masks are written."""
_LARGEST = float(np.finfo(np.float32).max)


class _Meant(Double):
    """The arithmetic of fp64 in which masks are finite, and log-softmax reads the operand of the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.exponents: dict[Operation, torch.Tensor] = {}
        """Softmax or sigmoid -> its operand in this run."""

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """Return the function of an op; a softmax or sigmoid keeps its operand for the logarithm."""
        plain = super().meaning(op, row)
        if infinite := _rounded_to_infinity(op):
            return lambda **read: plain(**{k: _finite(v) if k in infinite else v for k, v in read.items()})
        if (form := _unguarded_log(op)) is not None:
            return lambda **operands: self._log(form)
        if op.op_type not in SHARES:
            return plain

        def compute(**operands: Any) -> Any:
            self.exponents[op] = operands["x"].double()
            return plain(**operands)

        return compute

    def _log(self, form: WrittenExponential) -> torch.Tensor:
        x, share = self.exponents[form.exponential], form.exponential
        if form.op_type == "log_sigmoid":
            return torch.nn.functional.logsigmoid(-x if form.opposite else x)
        return torch.log_softmax(x, int(number(share.axis) or 0))


def _finite(value: Any) -> torch.Tensor:
    """Return a constant with the largest numbers of fp32 for infinities."""
    return torch.as_tensor(value).double().clamp(-_LARGEST, _LARGEST)


def _arithmetic_of(program: Program) -> Any:
    """Return the arithmetic that computes what a program means: fp32, or `_Meant` where that differs."""
    ops = (op for function in program.functions.values() for op in walk_ops(function))
    return _Meant() if any(_unguarded_log(op) is not None or _rounded_to_infinity(op) for op in ops) else "fp32"


_INDEX_OUTPUT = {"topk": 1, "argsort": 0, "reduce_argmax": 0, "reduce_argmin": 0}
"""Op that chooses indices along one axis -> which of its outputs holds them."""


def _has_index_choices(program: Program) -> bool:
    """Return whether an op of the program chooses indices."""
    return any(op.op_type in _INDEX_OUTPUT for op in walk_ops(program))


class _ChosenIndices(Listener):
    """A listener that records chosen indices: name of the value that holds them -> indices."""

    def __init__(self) -> None:
        self.chosen: dict[str, torch.Tensor] = {}

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Keep the indices."""
        if op.op_type in _INDEX_OUTPUT and len(outputs) > _INDEX_OUTPUT[op.op_type]:
            at = _INDEX_OUTPUT[op.op_type]
            self.chosen[op.outputs[at].name] = outputs[at].clone()


@dataclass
class _SameIndices(Listener):
    """A listener that makes the ops of a run give the indices of another run."""

    chosen: Mapping[str, torch.Tensor]
    """Name of a value -> its indices. An op without them, or of another shape, keeps its own choice."""
    moved: list[str] = field(default_factory=list)
    """A sentence for each op that would have chosen other indices."""
    near: float = float("inf")
    """The least PSNR of all ops, in dB, between the values at both sets of indices."""

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        """Keep the values among which an op is about to choose."""
        self._read = inputs

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Replace the indices by those of the other run, with the values at them."""
        at = _INDEX_OUTPUT.get(op.op_type, len(outputs))
        given = self.chosen.get(op.outputs[at].name) if at < len(outputs) else None
        if given is None or given.shape != outputs[at].shape or torch.equal(given, outputs[at]):
            return
        own, x, axis = outputs[at], self._read["x"].float(), int(self._read.get("axis", -1))
        keeps_axis = own.dim() == x.dim()
        own_values, other_values = (
            torch.gather(x, axis, (places if keeps_axis else places.unsqueeze(axis)).long())
            for places in (own, given)
        )
        difference = own_values - other_values
        self.near = min(self.near, psnr(float(x.abs().max()), float(difference.square().mean().sqrt())))
        apart = float(difference.abs().max())
        values = f"values at most {apart:.2g} apart" if apart else "equal values"
        count = f"{int((given != own).sum()):,} of {own.numel():,} places"
        self.moved.append(f"{op.op_type} {op.name} gives {count} otherwise, of {values}")
        own.copy_(given)
        if op.op_type == "topk":
            outputs[0].copy_(other_values)


Values = Mapping[str, Array]
SLACK = 1.0
"""dB by which two orders of rounding differ: an edit that is not worse in exact arithmetic may be so in one."""
SAME = 90.0
"""dB from which fp16 is as near as it can be; nothing beyond is counted."""
SEEDS = 2
"""The number of drawn inputs where none are given: with one, chance in rounding decides too often."""
MOST_FLOP = 1 << 31
"""Programs with more operations are not measured: each of ten runs would take much of a second."""


class EachInHalf:
    """An arithmetic that rounds every value to fp16 whatever its dtype, when read and when computed."""

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """Return the op's function between roundings."""
        return lambda **operands: rounded_halves(
            row.function(**{k: rounded_halves(v) for k, v in operands.items()})
        )


def rounded_halves(value: Any, round_: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Return tensors and slopes rounded to fp16; a guard that fp16 would make 0 stays.

    Args:
        value: what an op reads or computes.
        round_: how tensors are rounded; to nearest by default.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(rounded_halves(v, round_) for v in value)
    if isinstance(value, float):
        half = float(torch.tensor(value).half())
        return half if half and math.isfinite(half) else value
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return (round_ or torch.Tensor.half)(value).float() if floats else value


def as_half(program: Program) -> str | Arithmetic:
    """Return the arithmetic of fp16: that of the dtypes, or every value rounded where no dtype is fp16."""
    return "fp16" if _has_halves(program) else EachInHalf()


def as_engine(program: Program, engine: str) -> str | Arithmetic:
    """Return the engine's arithmetic, which reads fp16 even if all dtypes, also of weights, are fp32."""
    return engine if _has_halves(program) else OnEngine(engine)


def _has_halves(program: Program) -> bool:
    return any(is_mixed(walk_ops(function)) for function in program.functions.values())


@dataclass(frozen=True)
class OnEngine:
    """The arithmetic of an engine for a program in fp32: operands are rounded to fp16 first."""

    engine: str
    """Its arithmetic, as "ane:M1"."""

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """Return the op's function between roundings."""
        function = meaning(op, row, self.engine)
        round_ = neural_engine.rounding(chip_of(self.engine), op.op_type)
        return lambda **operands: rounded_halves(
            function(**{k: rounded_halves(v) for k, v in operands.items()}), round_
        )


def nearness(wanted: Mapping[str, Any], outputs: Mapping[str, Any]) -> float:
    """Return the PSNR in dB of the least exact float output; minus infinite where one is not finite."""
    return min((_near(v, np.asarray(outputs[n])) for n, v in _floats(wanted).items()), default=math.inf)


NOTHING_ALIKE = 0.0
"""PSNR in dB of an error as large as the numbers, given to an output of another length."""


def _near(wanted: Array, value: Array) -> float:
    if wanted.shape != value.shape:  # as many rows as the values say, such as the keypoints of an image
        return NOTHING_ALIKE
    defined = np.isfinite(wanted)
    a, b = wanted[defined].astype(np.float64), value[defined].astype(np.float64)
    if not a.size:
        return math.inf
    if not np.isfinite(b).all():
        return -math.inf
    return psnr(float(np.abs(a).max()), float(np.sqrt(np.mean((a - b) ** 2))))


class Near(dict[str, float]):
    """Arithmetic -> the PSNR in dB of the least exact output in it."""

    notes: tuple[str, ...] = ()
    """Why outputs are far off, or between which runs they are near, in words."""
    blank: bool = False
    """Whether no number of the outputs is finite in fp32, so that nothing was compared."""

    @classmethod
    def worst(cls, parts: Sequence[Near | None]) -> Near | None:
        """Return the worst of each arithmetic over several programs; None where one is None, or for none."""
        known = [part for part in parts if part]
        if not known or len(known) < len(parts):
            return None
        near = cls({name: min(part[name] for part in known) for name in known[0]})
        near.notes = tuple(note for part in known for note in part.notes)
        near.blank = all(part.blank for part in known)
        return near


TINY = 100 * fp16.LEAST / math.sqrt(12)
"""The largest number below which fp16 rounding leaves less than 40 dB: 1.7e-6."""


class _FirstTiny(Listener):
    """Finds the first value whose numbers are all so small that fp16 keeps less than 40 dB of them."""

    def __init__(self) -> None:
        self.words = ""

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Look at the largest number of each value."""
        floats = (v for v in outputs if torch.is_tensor(v) and v.is_floating_point() and v.numel())
        largest = max((float(v.abs().max()) for v in floats), default=0.0)
        if not self.words and 0 < largest < TINY:
            steps = f"fp16 has steps of {fp16.LEAST:.2g} there (often so where weights were not trained)"
            self.words = f"{op.op_type} {op.name} is at most {largest:.2g}, and {steps}"


def _not_numbers(meant: Values, outputs: Values) -> str:
    """Return words about the first output that fp32 cannot judge, being NaN or infinite there; else ""."""
    for name, wanted in _floats(meant).items():
        undefined, value = np.isnan(wanted), np.asarray(outputs[name])
        if undefined.any():
            was = f"NaN to {undefined.mean():.0%}"
            if np.isfinite(value).all():
                return (
                    f"output %{name} is finite now: it was {was}, in fp32 too, so that these cannot be compared"
                )
            return f"output %{name} is {was}, in fp32 too"
        if value.shape == wanted.shape and (moved := np.isinf(wanted) & (value != wanted)).any():
            share = f"{moved.mean():.0%} of output %{name}"
            return f"{share} is infinite in fp32 and another number now, so that these cannot be compared"
    return ""


def _other_length(meant: Values, outputs: Values) -> str:
    """Return words about the first output of another shape than in fp32; else ""."""
    shapes = {name: (np.shape(v), np.shape(outputs[name])) for name, v in _floats(meant).items()}
    words = (
        f"output %{name} is {shape_in_words(new)}, and {shape_in_words(old)} in fp32"
        for name, (old, new) in shapes.items()
        if old != new
    )
    return next(words, "")


def _floats(values: Mapping[str, Any]) -> dict[str, Array]:
    arrays = {name: np.asarray(value) for name, value in values.items()}
    return {name: value for name, value in arrays.items() if value.dtype.kind == "f"}


def less_exact(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return in which arithmetic outputs are further from those in fp32 after an edit, in words; "" for none.

    Args:
        before: arithmetic -> dB, as `Yardstick.measure` gives it.
        after: the same after the edit.
    """
    for arithmetic, old in before.items():
        if (new := after[arithmetic]) < min(old, SAME) - SLACK:
            return (
                f"outputs would be less exact in {arithmetic} arithmetic on sampled inputs, "
                f"{in_decibels(old)} -> {in_decibels(new)} of what the model means"
            )
    return ""


Sample = tuple[str, int]
"""(function, number of a set of inputs for it)."""


@dataclass
class Yardstick:
    """What a program means on some inputs, and how near its edited forms come to that."""

    program: Program
    """The program as it was given; it must stay so while results are read."""
    engine: str = "ane"
    """The arithmetic that counts beside fp16: "ane", or that of a chip, as "ane:M1"."""
    inputs: Sequence[Values] = ()
    """Sets of arrays by input name, for programs of one function; drawn by default."""
    images: frozenset[str] = frozenset()
    """Names of inputs that are images."""
    seed: int = 0
    """The seed of the first set of inputs that is drawn."""
    seeds: int = SEEDS
    """How many sets are drawn."""
    most_flop: float = MOST_FLOP
    """A program of more is not measured."""
    constant_inputs: Sequence[float] = ()
    """Numbers that `undefined` puts into all inputs, one after the other."""
    meant: dict[Sample, Values] = field(default_factory=dict)
    """What the program means on each set of inputs that was needed so far."""
    places: dict[Sample, _ChosenIndices] = field(default_factory=dict)
    """The indices that ops chose there in fp32, in programs that choose any."""

    @cached_property
    def samples(self) -> dict[Sample, Values]:
        """All sets of inputs."""
        functions = self.program.functions
        if self.inputs and len(functions) == 1:
            return {(next(iter(functions)), i): values for i, values in enumerate(self.inputs)}
        return {
            (name, i): sample_function(function, seed=self.seed + i, images=self.images)
            for name, function in functions.items()
            for i in range(self.seeds)
        }

    def undefined(self, program: Program, contract: Iterable[InterfaceChange] = ()) -> int:
        """Return for how many `constant_inputs` an fp16 output is not finite.

        Masks hold 0 and 1, which are hardly ever drawn, and an infinite constant times 0 is NaN. The fp32
        result is no measure there, as it may be NaN itself. A model that cannot be run on them counts as 0.

        Args:
            program: this program, or what edits made of it.
            contract: how they changed the interface.
        """
        if self.flop > MOST_FLOP or call_of(contract := list(contract)) is not None:
            return 0
        half: Any = as_half(program)
        first_sets = [(name, values) for (name, i), values in self.samples.items() if i == 0]
        undefined = 0
        for (name, values), everywhere in itertools.product(first_sets, self.constant_inputs):
            sample = adapt_inputs(contract, {n: np.full_like(v, everywhere) for n, v in values.items()})
            try:
                outputs = run(program, sample, precision=half, function=name)
            except InterpretError:
                return 0
            undefined += not all(np.isfinite(v).all() for v in _floats(outputs).values())
        return undefined

    @cached_property
    def flop(self) -> float:
        """Floating point operations of one run of each function."""
        runs = (run for function in self.program.functions.values() for run in ops_with_run_counts(function))
        return sum(times * work_of(op).flop for op, times in runs if op.op_type != "const")

    @cached_property
    def is_small(self) -> bool:
        """Whether a run takes a second or so at most."""
        numbers = sum(map(stored, self.program.functions.values()))
        return self.flop <= self.most_flop and numbers <= MOST_NUMBERS

    def measure(self, program: Program, contract: Iterable[InterfaceChange] = ()) -> Near | None:
        """Return how near the outputs come to what the program means, over all inputs; None where unknown.

        Where an op chooses other places among nearly equal values than in fp32, outputs are judged at the same
        places, and by how near these values are. Nothing is known where edits changed what outputs hold: other
        results have other largest values.

        Args:
            program: this one, or what edits made of it.
            contract: how they changed the interface.
        """
        contract = list(contract)
        return self.seen_as(program, contract) if all(change.retypes for change in contract) else None

    def seen_as(
        self, program: Program, contract: Iterable[InterfaceChange], later: Iterable[InterfaceChange] = ()
    ) -> Near | None:
        """Return the same after further changes of the interface, such as to the last position alone.

        Args:
            program: this one, or what edits made of it.
            contract: how they changed the interface.
            later: what is done to its results, and to those that are meant, before they are compared.
        """
        contract, later = list(contract), list(later)
        if call_of([*contract, *later]) is not None or not self.is_small:
            return None
        arithmetics = {"fp16": as_half(program), self.engine: as_engine(program, self.engine)}
        nearest, notes = Near(), list[str]()
        try:
            for name, arithmetic in arithmetics.items():
                each = [self._near(program, arithmetic, contract, later, at) for at in self.samples]
                nearest[name] = min((near for near, _ in each), default=math.inf)
                notes = notes or [f"in {name} {note}" for _, note in each if note]
        except InterpretError:
            return None
        nearest.notes = tuple(dict.fromkeys(notes))
        wanted = [v for at in self.samples for v in _floats(self._meant(at)).values() if v.size]
        nearest.blank = bool(wanted) and not any(np.isfinite(v).any() for v in wanted)
        return nearest

    def _near(
        self,
        program: Program,
        arithmetic: str | Arithmetic,
        contract: list[InterfaceChange],
        later: list[InterfaceChange],
        at: Sample,
    ) -> tuple[float, str]:
        """Return how near the outputs come for one set of inputs, in dB, and a note on them or ""."""
        values = self.samples[at]
        meant = adapt_outputs([*contract, *later], self._meant(at), values)

        def outputs(listener: Listener | None = None) -> Values:
            how: Any = {"precision": arithmetic, "function": at[0], "listener": listener}
            return adapt_outputs(later, run(program, adapt_inputs(contract, values), **how), values)

        own = outputs()
        near = nearness(meant, own)
        if near >= SAME:
            return near, _not_numbers(meant, own)
        if at in self.places:
            same_places = _SameIndices(self.places[at].chosen)
            near_there = min(nearness(meant, outputs(same_places)), same_places.near)
            if near_there > near:
                both = f"{in_decibels(near_there)}, else {in_decibels(near)}"
                return near_there, f"{same_places.moved[0]}: at the places of fp32 outputs are within {both}"
        return near, _not_numbers(meant, own) or _other_length(meant, own)

    def why_far(self) -> str:
        """Return which op gives only numbers that are too small for fp16, in words; "" for none."""
        for at, values in self.samples.items():
            watch = _FirstTiny()
            run(self.program, values, precision="fp32", function=at[0], listener=watch)
            if watch.words:
                return watch.words
        return ""

    def _meant(self, at: Sample) -> Values:
        """Return what the program means on a set of inputs."""
        if at not in self.meant:
            if _has_index_choices(self.program):
                self.places[at] = _ChosenIndices()
            how: Any = {"function": at[0], "listener": self.places.get(at)}
            self.meant[at] = run(self.program, self.samples[at], precision=_arithmetic_of(self.program), **how)
        return self.meant[at]


MARGIN = 4.0
"""Other inputs may square to so many times what the sampled ones do: numbers of twice the size. A choice."""
MOST_NUMBERS = 1 << 29
"""The most stored numbers of a model that is run for this: one run reads each, in seconds."""


def large_squares(program: Program, seed: int = 0, inputs: Sequence[Values] = ()) -> dict[str, float]:
    """Return the squares of root norms that may overflow: name -> the largest value seen, infinite in fp16.

    Norms whose squares intervals bound are not looked at. Nothing is run where there is no other, where the
    model stores more than `MOST_NUMBERS`, or where it cannot be run on the inputs.

    Args:
        program: of one function or several.
        seed: of the sampled inputs.
        inputs: sets of arrays by input name, for programs of one function; one is sampled by default.
    """
    inputs = inputs if len(program.functions) == 1 else ()
    largest: dict[str, float] = {}
    for name, function in program.functions.items():
        if (squares := repairs_of_squares(function)) and stored(function) <= MOST_NUMBERS:
            largest |= _largest_seen(program, name, squares, seed, inputs)
    return {name: value for name, value in largest.items() if not value < fp16.LARGEST / MARGIN}


def repairs_of_squares(function: Function) -> dict[Var, str]:
    """Return the squares in root norms that nothing bounds -> the pass that writes the norm in another form."""
    repairs = {}
    for op in walk_ops(function):
        for hazard, name in NORMS:
            if not isinstance(norm := hazard.site_to_repair(op), Refusal):
                repairs[next(o for o in norm.ops if o.op_type == "reduce_mean").x] = name
    return repairs


def stored(function: Function) -> int:
    """Return how many numbers the constants of a function hold."""
    constants = (op.outputs[0] for op in walk_ops(function) if op.op_type == "const")
    return sum(math.prod(static_shape(v) or ()) for v in constants if types.is_tensor(v.sym_type))


def _largest_seen(
    program: Program, function: str, squares: Collection[Var], seed: int, inputs: Sequence[Values]
) -> Mapping[str, float]:
    """Return the largest magnitude of some values in fp16; empty where the model cannot be run."""
    watch = _LargestMagnitudes(squares)
    try:
        predictor = Predictor(program, function=function, precision="fp16", fuse=False)
        for values in inputs or [predictor.sample(seed)]:
            predictor(values, listener=watch)
    except InterpretError:
        return {}
    return watch.largest


class _LargestMagnitudes(Listener):
    """A listener that keeps the largest magnitude of some values, by name."""

    def __init__(self, wanted: Collection[Var]) -> None:
        self._wanted = wanted
        self.largest: dict[str, float] = {}

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Compare the magnitudes of the wanted values."""
        for var, value in zip(op.outputs, outputs, strict=True):
            if var in self._wanted:
                self.largest[var.name] = max(self.largest.get(var.name, 0.0), float(value.abs().max()))
