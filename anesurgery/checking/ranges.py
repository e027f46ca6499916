"""The range certificate (`ane.ranges`): run a calibration set, and report values that leave fp16 or the engine.

Ranges come from exact runs. What overflows, saturates or becomes NaN is watched for in runs in fp16 and in the
arithmetic that was measured on Neural Engines; the latter is an estimate. Shares of a set can run on several
workers, and their results are merged.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.display import Drawn
from anesurgery.doors import door
from anesurgery.errors import DAMAGED, SurgeryError
from anesurgery.files.sharing import Shard, share, workers
from anesurgery.interpret import Listener, Predictor
from anesurgery.interpret.arithmetic.neural_engine import SUMS, bound
from anesurgery.interpret.features import as_array
from anesurgery.mil import Operation, Var, np_dtype, producer, walk_ops

Values = Mapping[str, Any]

MASK_OPS = frozenset({"band_part", "fill", "fill_like", "select", "sub", "mul", "add"})
"""Ops that make masks."""
SCALED = frozenset({"overflow", "saturates", "may saturate"})
"""Kinds of hazards of numbers that are too large."""


@dataclass(frozen=True)
class Hazard:
    """One way in which an op's values leave an arithmetic."""

    arithmetic: str
    """ "fp32", "fp16" or "ane" (with its chip)."""
    kind: str
    """ "overflow" (beyond 65504), "saturates" (a sum of products reaches 32768), "may saturate" (it can, in
    some order of its terms), "nan", "infinite"."""
    value: float
    """The magnitude in the exact run that shows it; NaN where only this arithmetic reached the op."""
    remedy: str | None
    """The pass that may help; None when there is none."""

    def __str__(self) -> str:
        unseen = math.isnan(self.value) and self.arithmetic != "fp32"
        value = "only reached there" if unseen else f"{self.value:.4g}"
        help_ = f"see pass {self.remedy}" if self.remedy else "no pass helps yet"
        return f"{self.kind} in {self.arithmetic}: {value}, {help_}"


@dataclass
class OpRange:
    """What one op gave over the calibration set, in exact arithmetic.

    The minimum is above the maximum where only the run in fp16 or the engine's took the op's branch.
    """

    name: str
    op_type: str
    minimum: float = math.inf
    maximum: float = -math.inf
    partial_sum: float | None = None
    """Largest magnitude that a partial sum can reach in any order, where the op is a sum of products."""
    hazards: list[Hazard] = field(default_factory=list)

    @property
    def reached(self) -> bool:
        """Whether the exact run computed the op."""
        return not self.minimum > self.maximum

    @property
    def largest(self) -> float:
        """The largest magnitude; NaN if there was a NaN."""
        if math.isnan(self.minimum):
            return math.nan
        return max(abs(self.minimum), abs(self.maximum)) if self.reached else 0.0

    def joined(self, other: OpRange) -> OpRange:
        """Return the row of the whole set from those of two shares, of which each may show other hazards."""
        low, high = min(self.minimum, other.minimum), max(self.maximum, other.maximum)
        if math.isnan(self.minimum) or math.isnan(other.minimum):
            low = high = math.nan
        sums = [s for s in (self.partial_sum, other.partial_sum) if s is not None]
        joint = OpRange(self.name, self.op_type, low, high, max(sums, default=None))
        hazards = (*self.hazards, *other.hazards)
        broken: dict[str, bool] = {}
        for hazard in sorted(hazards, key=lambda h: h.arithmetic, reverse=True):  # fp16 before the engine
            if hazard.kind != "may saturate":
                broken[hazard.arithmetic] = broken.get(hazard.arithmetic, False) or hazard.kind == "nan"
        for arithmetic, nan in broken.items():
            _add_hazard(joint, arithmetic, nan)
        for engine in {hazard.arithmetic for hazard in hazards} - {"fp32", "fp16"}:
            _add_may_saturate(joint, engine)
        return joint

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> OpRange:
        """Return a row that was written as JSON, where infinities are words."""
        partial = content["partial_sum"]
        hazards = [
            Hazard(str(h["arithmetic"]), str(h["kind"]), float(h["value"]), h["remedy"])
            for h in content["hazards"]
        ]
        low, high = float(content["minimum"]), float(content["maximum"])
        partial_sum = None if partial is None else float(partial)
        return cls(str(content["name"]), str(content["op_type"]), low, high, partial_sum, hazards)


@dataclass(frozen=True)
class Ranges(Drawn):
    """The certificate: a row for each op, in the order of the exact run; last, those that it did not reach."""

    rows: tuple[OpRange, ...]
    samples: int
    arithmetic: str
    model: str = ""
    """A digest of the names and types of all ops, the same for each share of a calibration set."""
    unsound: tuple[str, ...] = ()
    """Inputs that hold NaN or infinities: what comes of them says nothing about the model."""

    @property
    def ok(self) -> bool:
        """Whether the inputs were finite, and nothing leaves fp16 or the engine's arithmetic."""
        return not self.unsound and not any(row.hazards for row in self.rows)

    @property
    def verdict(self) -> str:
        """What the certificate says, in words."""
        if self.unsound:
            return f"not checked: {', '.join(self.unsound)} holds NaN or infinities; give finite inputs"
        outside = sum(bool(row.hazards) for row in self.rows)
        ops = f"{outside} op{' leaves' if outside == 1 else 's leave'}" if outside else "no op leaves"
        return f"{ops} the range of fp16 or of the engine"

    @property
    def first(self) -> dict[str, OpRange]:
        """Arithmetic -> the first op that overflows, saturates or makes a NaN in it."""
        first_rows: dict[str, OpRange] = {}
        for row in self.rows:
            for hazard in row.hazards:
                if hazard.kind != "may saturate":
                    first_rows.setdefault(hazard.arithmetic, row)
        return first_rows

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [{**vars(r), "hazards": [vars(h) for h in r.hazards]} for r in self.rows]
        first = {arithmetic: row.name for arithmetic, row in self.first.items()}
        return {
            "ok": self.ok,
            "samples": self.samples,
            "arithmetic": self.arithmetic,
            "model": self.model,
            "verdict": self.verdict,
            "unsound_inputs": list(self.unsound),
            "first": first,
            "ops": rows,
        }

    def merge(self, *others: Ranges) -> Ranges:
        """Join the results of several shares of a calibration set, which may have taken different branches.

        Raises:
            SurgeryError: they are of different models or arithmetics.
        """
        rows = _numbered(self.rows)
        for part in others:
            more = _numbered(part.rows)
            if (part.model, part.arithmetic) != (self.model, self.arithmetic):
                raise SurgeryError("the results are of different models or arithmetics; run them again")
            rows |= {key: rows[key].joined(row) if key in rows else row for key, row in more.items()}
        samples = self.samples + sum(part.samples for part in others)
        unsound = dict.fromkeys(name for part in (self, *others) for name in part.unsound)
        return Ranges(tuple(rows.values()), samples, self.arithmetic, self.model, tuple(unsound))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Ranges:
        """Read a result from JSON data.

        Raises:
            SurgeryError: it is something else.
        """
        try:
            rows = tuple(OpRange.from_json(row) for row in content["ops"])
            unsound = tuple(map(str, content["unsound_inputs"]))
            return cls(
                rows, int(content["samples"]), str(content["arithmetic"]), str(content["model"]), unsound
            )
        except DAMAGED as error:
            raise SurgeryError(f"this is no result of `ranges`: {error!r}; run it again") from error

    def __repr__(self) -> str:
        return str(self)


def _numbered(rows: Iterable[OpRange]) -> dict[tuple[str, str, int], OpRange]:
    """Return {(name, op type, how many such rows come before): row}; models of a pipeline may share names."""
    seen = Counter[tuple[str, str]]()
    numbered: dict[tuple[str, str, int], OpRange] = {}
    for row in rows:
        key = row.name, row.op_type
        numbered[(*key, seen[key])] = row
        seen[key] += 1
    return numbered


@door("inputs", "seed")
def ranges(
    model: Any,
    inputs: Values | Iterable[Values] | None = None,
    *,
    chip: str | None = None,
    function: str | None = None,
    seed: int = 0,
    member: str | int | None = None,
    shard: Shard | str | tuple[int, int] | None = None,
    jobs: int = 1,
    scheduler: str | Any = None,
) -> Ranges:
    """Run a calibration set, and report the range of every op and each overflow.

    Args:
        model: path, MLModel or MIL program.
        inputs: one set of inputs by name (arrays, PIL images), or several; one sampled set when absent.
        chip: the chip whose arithmetic counts ("M1"). Default: limits that hold on every measured chip.
        function: which function; `main` or the first by default.
        seed: of the sampled inputs.
        member: of a pipeline, the one model to run, by name or number; all of them when absent.
        shard: a share of the sets of inputs, as "3/8"; `Ranges.merge` joins the results.
        jobs: number of processes.
        scheduler: address of a Dask scheduler, or a client; its workers replace the processes. They see the
            model, which is a path then, in the same place.

    Returns:
        The `Ranges`: least and largest value of each op in fp32, the largest partial sum, and the hazards in
        fp16 and in the engine's arithmetic; `ok` says whether there are none.

    Raises:
        InterpretError: inputs that do not fit, or an unknown chip.
        SurgeryError: an empty calibration set, one with fewer sets than shares, or no such workers.
    """
    if jobs != 1 or scheduler is not None:
        options = {"chip": chip, "function": function, "member": member}
        return _spread(model, inputs, share(shard), (jobs, scheduler), options, seed)
    first = Predictor(model, function=function, member=member)
    if inputs is None:
        inputs = first.sample(seed)
    whole = sets_of(inputs)
    samples = share(shard).of(whole)
    if not samples:
        of = f" of {len(whole)}" if whole else ""
        raise SurgeryError(
            f"the calibration set{of} is empty here; give at least one set of inputs to each share"
        )
    engine = f"ane:{chip}" if chip else "ane"
    exact = _Exact()
    watches = {name: _Breaks() for name in ("fp16", engine)}
    for precision, listener in {"fp32": exact, **watches}.items():
        predictor = Predictor(first, function=function, precision=precision)
        for values in samples:
            predictor(values, listener=listener)
    for precision, watch in watches.items():
        for var, nan in watch.broken.items():
            assert var.op is not None  # it was seen as the output of an op
            _add_hazard(exact.rows.setdefault(var, OpRange(var.name, var.op.op_type)), precision, nan)
    for row in exact.rows.values():
        _add_may_saturate(row, engine)
    unsound = _unsound(first, samples)
    return Ranges(tuple(exact.rows.values()), len(samples), engine, _digest(first), unsound)


def _digest(model: Predictor) -> str:
    """Return a digest of the names and types of the ops of a model."""
    ops = (op for executable in model.executables for op in walk_ops(executable.function))
    return hashlib.sha256("\n".join(f"{op.op_type} {op.name}" for op in ops).encode()).hexdigest()


def sets_of(inputs: Any) -> list[Any]:
    """Return the sets of inputs; what is no collection is one set, which the predictor refuses in words."""
    return [inputs] if isinstance(inputs, Mapping) or not isinstance(inputs, Iterable) else list(inputs)


def _spread(
    model: Any,
    inputs: Any,
    own: Shard,
    jobs_and_scheduler: tuple[int, Any],
    options: Mapping[str, Any],
    seed: int,
) -> Ranges:
    """Return the ranges over a share of the sets of inputs, which workers run."""
    if not isinstance(model, (str, os.PathLike)):
        raise SurgeryError("jobs= and scheduler= take the path of a model; save it first")
    path = str(Path(model).expanduser().absolute())
    if inputs is None:
        inputs = Predictor(path, function=options["function"], member=options["member"]).sample(seed)
    samples = own.of(sets_of(inputs))
    jobs, scheduler = jobs_and_scheduler
    if scheduler is None and jobs > 1 and len(samples) < 2:  # for one set, no process is started
        return ranges(path, samples, **options)
    with workers(*jobs_and_scheduler) as pool:
        count = max(1, min(pool.count, len(samples)))
        parts = (Shard(number, count).of(samples) for number in range(1, count + 1))
        first, *others = pool.each(_one, [(path, part, dict(options)) for part in parts])
    return Ranges.from_json(first).merge(*map(Ranges.from_json, others))


def _one(path: str, samples: Sequence[Values], options: dict[str, Any]) -> dict[str, Any]:
    """Return the ranges over some sets of inputs as plain data; a worker runs it."""
    return ranges(path, samples, **options).to_json()


def _unsound(model: Predictor, samples: Iterable[Values]) -> tuple[str, ...]:
    """Return the names of inputs that hold NaN or infinities in the dtype that the model takes."""
    dtypes = {n: np_dtype(v) for e in model.executables for n, v in e.function.inputs.items()}
    unsound: dict[str, None] = {}
    for name, value in (pair for values in samples for pair in values.items()):
        array = as_array(name, value)
        if array.dtype.kind == "f":
            with np.errstate(over="ignore"):
                array = array.astype(dtypes.get(name, array.dtype))
            if not np.isfinite(array).all():
                unsound[name] = None
    return tuple(unsound)


def _hazard(row: OpRange, arithmetic: str, nan: bool) -> Hazard:
    """Return the hazard of an op that breaks in an arithmetic, or in fp32 already."""
    value = row.largest if row.reached else math.nan
    if row.reached and not math.isfinite(value):
        kind = "nan" if math.isnan(value) else "infinite"
        return Hazard("fp32", kind, value, _remedy(row.op_type, kind))
    if nan:
        return Hazard(arithmetic, "nan", value, _remedy(row.op_type, "nan"))
    saturates = arithmetic != "fp16" and row.op_type in SUMS and row.largest <= fp16.LARGEST
    kind = "saturates" if saturates else "overflow"
    shown = row.partial_sum if saturates and row.partial_sum is not None else value
    return Hazard(arithmetic, kind, shown, _remedy(row.op_type, kind))


def _remedy(op_type: str, kind: str) -> str | None:
    """Return the pass that may help with a hazard."""
    if kind == "infinite" and op_type in MASK_OPS:
        return "causal_mask_tensor"
    return "scale_ranges" if kind in SCALED else None


def _add_hazard(row: OpRange, arithmetic: str, nan: bool) -> None:
    hazard = _hazard(row, arithmetic, nan)
    if hazard not in row.hazards:
        row.hazards.append(hazard)


def _add_may_saturate(row: OpRange, engine: str) -> None:
    """Add the hazard of partial sums that may reach the engine's limit, unless its arithmetic showed one."""
    seen = any(h.arithmetic == engine for h in row.hazards)
    if row.partial_sum is not None and row.partial_sum >= fp16.CEILING and not seen:
        remedy = _remedy(row.op_type, "may saturate")
        row.hazards.append(Hazard(engine, "may saturate", row.partial_sum, remedy))


def _floats(op: Operation, outputs: Sequence[Any]) -> list[tuple[Var, torch.Tensor]]:
    values = zip(op.outputs, outputs, strict=True)
    return [(v, x) for v, x in values if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()]


class _Exact(Listener):
    """A listener that keeps the range of each float value, and bounds the partial sums."""

    def __init__(self) -> None:
        self.rows: dict[Var, OpRange] = {}
        self._bound: float | None = None

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        """Bound the partial sums from the operands."""
        self._bound = None
        if op.op_type in SUMS and inputs["x"].is_floating_point():
            with suppress(RuntimeError):  # of operands that do not fit, which the op says in words
                self._bound = bound(op.op_type, dict(inputs))

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Widen the range of each output."""
        for var, value in _floats(op, outputs):
            row = self.rows.setdefault(var, OpRange(var.name, op.op_type))
            low, high = (float(v) for v in torch.aminmax(value))
            row.minimum, row.maximum = min(row.minimum, low), max(row.maximum, high)
            if math.isnan(low):
                row.minimum = row.maximum = math.nan
            if self._bound is not None:
                row.partial_sum = max(row.partial_sum or 0.0, self._bound)


class _Breaks(Listener):
    """A listener that notes the ops that make infinities or NaN out of finite numbers."""

    def __init__(self) -> None:
        self.broken: dict[Var, bool] = {}
        """Value that is no longer finite -> whether it holds a NaN."""
        self._sound = True

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        """Note whether the operands are finite; an infinite constant counts as finite: this op lets it in."""
        self._sound = all(_finite(v) for k, v in inputs.items() if not _is_constant(op, k))

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Note an op that was given finite numbers and made others."""
        for var, value in _floats(op, outputs):
            if self._sound and not _finite(value):
                self.broken[var] = self.broken.get(var, False) or bool(torch.isnan(value).any())


def _is_constant(op: Operation, name: str) -> bool:
    var = op.inputs[name]
    return isinstance(var, Var) and producer(var, "const") is not None


def _finite(value: Any) -> bool:
    if isinstance(value, list):
        return all(_finite(v) for v in value)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return True
    return bool(torch.isfinite(value).all())
