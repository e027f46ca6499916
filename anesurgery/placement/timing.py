"""Estimate how long a function takes on the Neural Engine of one chip, from what its ops ask of the hardware.

An op takes the larger of two times: Core ML's own estimate (`cost.py`) times a factor of the engine's
generation, or the time to read its weights. Each prediction adds a fixed cost, a cost for each change of the
unit, and a least time for each op on the longest chain of dependent ops. `inspect` calls `time_of_shaped`
with the judged ops; a `Load` holds what they ask of the hardware, and `Rates` the numbers of one chip. All
numbers are in `time_table.json`, which `tests/benchmarks/time_fit.py` fits to published measurements;
docs/latency.md shows the errors.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anesurgery.display import short_name
from anesurgery.errors import DAMAGED, LoadError
from anesurgery.mil import Operation, Var, is_constexpr, is_stored, operands, producer
from anesurgery.placement.durations import Key, Time
from anesurgery.placement.rules.slow import notch_payload, weight_decoders
from anesurgery.placement.target import CHIPS, Target
from anesurgery.placement.verdicts import Judged, Shaped
from anesurgery.semantics.reading import elements, kind_of, shape_of, size_of
from anesurgery.semantics.rows import runtime

LONG = 1024
"""From this number of positions on, attention is slower than estimated. Measured at 197 (it is not) and 1,500
(it is)."""
PRODUCTS = frozenset({"conv", "conv_transpose", "linear", "matmul", "einsum", "scaled_dot_product_attention"})
PLAIN, PALETTE, INT8, INT4, SPARSE, W8A8, JOINT = "", "palette", "int8", "int4", "sparse", "w8a8", "joint"
"""How weights are stored; int8 and int4 have one scale, or one for each output channel."""
FORMS = {
    PALETTE: "a palette",
    INT8: "int8",
    INT4: "int4",
    SPARSE: "sparse weights",
    W8A8: "int8, with int8 activations",
    JOINT: "several compressions in one",
}
"""The compressed forms of weights in words."""


class OpLoad(NamedTuple):
    """The work of one op, or of `count` equal ops, in one run."""

    op_type: str
    """The op type of MIL."""
    us: float
    """Core ML's own estimate on its unit, in microseconds."""
    weight: int = 0
    """Bytes of weights that it reads, as stored."""
    long: bool = False
    """Is it part of attention over at least `LONG` positions?"""
    cpu: bool = False
    """Does it run on the CPU?"""
    chain: bool = False
    """Is it on the longest chain of dependent ops?"""
    form: str = PLAIN
    """How its weights are stored."""
    rows: int = 0
    """Positions that share each weight, where the form of the weights matters; else 0."""
    notch: bool = False
    """Does reading its weights stall, as `rules.slow.dma_notch` finds?"""
    count: int = 1  # type: ignore[assignment]  # a field here, and a method of tuples
    """How many such ops there are; an op in a loop counts once for each round."""


@dataclass(frozen=True)
class Load:
    """The work of a function."""

    ops: tuple[OpLoad, ...]
    """The work of its ops, in file order, or merged."""
    switches: int = 0
    """How often the unit changes at a cost."""
    doubtful: Load | None = None
    """The work if all ops of unknown unit run on the CPU; None if there are no such ops."""

    @property
    def on_cpu(self) -> bool:
        """Does all of it run on the CPU?"""
        return all(op.cpu for op in self.ops)

    def merged(self) -> Load:
        """Return the load with one entry for all equal ops."""
        counted: Counter[OpLoad] = Counter()
        for op in self.ops:
            counted[op._replace(count=1)] += op.count
        return Load(tuple(op._replace(count=n) for op, n in counted.items()), self.switches)


def load_of(judged: Sequence[Judged], units: Sequence[str | None], doubted: bool = False) -> Load:
    """Return the work of judged ops; ops of unknown unit count on the ANE unless it cannot run them.

    Args:
        judged: the ops.
        units: the unit of each op.
        doubted: may all of it run on the CPU, for a reason that concerns the whole model?
    """
    chain = longest_chain([j.op for j in judged])
    on_cpu = [unit == "cpu" or j.legal is False for j, unit in zip(judged, units, strict=True)]
    load = _load(judged, on_cpu, chain)
    at_most_on_cpu = [doubted or cpu or j.legal is None for cpu, j in zip(on_cpu, judged, strict=True)]
    if at_most_on_cpu == on_cpu:
        return load
    return replace(load, doubtful=_load(judged, at_most_on_cpu, chain))


def _load(judged: Sequence[Judged], on_cpu: Sequence[bool], chain: set[Operation]) -> Load:
    """Return the work of ops on the CPU and on the ANE."""
    ops = tuple(_op_load(j, cpu, j.op in chain) for j, cpu in zip(judged, on_cpu, strict=True))
    return Load(ops, _count_switches(on_cpu))


def _count_switches(on_cpu: Sequence[bool]) -> int:
    """Count the changes of the unit that cost something.

    A last change to the CPU is free: the result comes back to the CPU in any case, and Core ML's segmenter
    charges as much for a last op on the ANE as for a change before it.
    """
    changes_to_cpu = [after for before, after in pairwise(on_cpu) if before != after]
    if changes_to_cpu and changes_to_cpu[-1]:
        return len(changes_to_cpu) - 1
    return len(changes_to_cpu)


def _op_load(one: Judged, cpu: bool, chained: bool) -> OpLoad:
    """Return the work of one op in one round of its loop; the estimate of a judged op is for all rounds."""
    op, estimate = one.op, one.estimate
    us = 0.0
    if estimate is not None:
        us = (estimate.cpu if cpu else estimate.ane) or 0.0
    us /= max(one.rounds, 1)
    us *= taps_that_count(op) if cpu else 1.0
    if op.op_type not in PRODUCTS:
        long = op.op_type == "softmax" and shape_of(op.outputs[0])[-1:] >= (LONG,)
        return OpLoad(op.op_type, us, weight=0, long=long, cpu=cpu, chain=chained, count=one.rounds)
    form, stored = form_of(op)
    rows = 0 if form == PLAIN else rows_of(op)
    weight = one.work.constant if form == PLAIN else stored
    stalls = form == PLAIN and notch_payload(op) > 0
    return OpLoad(
        op.op_type,
        us,
        weight=weight,
        long=_is_long(op),
        cpu=cpu,
        chain=chained,
        form=form,
        rows=rows,
        notch=stalls,
        count=one.rounds,
    )


def taps_that_count(op: Operation) -> float:
    """Return the share of a transposed convolution's products whose operand is no inserted zero; else 1.

    Core ML's estimate, by which it chooses units, counts them all: 572 ms for the inverse spectra of 64 frames
    of 1024 samples at a stride of 256. That the CPU leaves the zeros out is a guess; no time is published.
    """
    if op.op_type != "conv_transpose" or op.strides is None:
        return 1.0
    taps = zip(shape_of(op.weight)[2:], np.ravel(op.strides.val), strict=True)
    return math.prod(math.ceil(width / int(stride)) / width for width, stride in taps)


def _is_long(op: Operation) -> bool:
    """Is an op a product of two run-time values over at least `LONG` positions, as in attention?"""
    if op.op_type != "matmul" or len(runtime(op)) < 2:
        return False
    return max((*shape_of(op.x)[-2:], *shape_of(op.y)[-2:])) >= LONG


def rows_of(op: Operation) -> int:
    """Return how many positions share each weight of a product: its outputs divided by its output channels."""
    operands = (op.inputs.get(name) for name in ("weight", "y", "x"))
    if not any(v is not None and is_stored(v) for v in operands):
        return 0
    out = shape_of(op.outputs[0])
    channels = out[1] if op.op_type in ("conv", "conv_transpose") else out[-1]
    return elements(op.outputs[0]) // max(channels, 1)


def form_of(op: Operation) -> tuple[str, int]:
    """Return the form of a product's compressed weights and their bytes; (`PLAIN`, 0) if not compressed."""
    decoders = weight_decoders(op)
    if not decoders:
        return PLAIN, 0
    return _weight_form(op, decoders), _stored_bytes(decoders[0])


def _weight_form(op: Operation, decoders: Sequence[Operation]) -> str:
    kind = decoders[0].op_type
    if kind == "constexpr_cast":
        return PLAIN
    if len(decoders) > 1:
        return JOINT
    if kind in ("constexpr_lut_to_dense", "constexpr_sparse_to_dense"):
        return PALETTE if kind == "constexpr_lut_to_dense" else SPARSE
    quantized = producer(op.x, "dequantize") is not None
    data = decoders[0].inputs.get("quantized_data") or decoders[0].inputs.get("data")
    wide = data is None or kind_of(data).itemsize >= 1
    return (W8A8 if quantized else INT8) if wide else INT4


def _stored_bytes(maker: Operation) -> int:
    """Return the bytes of all constants from which a weight is decompressed."""
    total = 0
    for value in maker.inputs.values():
        if isinstance(value, Var) and value.op is not None:
            inner = is_constexpr(value.op)
            total += _stored_bytes(value.op) if inner else size_of(value)
    return total


def longest_chain(ops: Sequence[Operation]) -> set[Operation]:
    """Return the ops on a longest chain in which each op reads a result of the op before it."""
    lengths: dict[Operation, int] = {}  # of the longest chain that ends with an op
    before: dict[Operation, Operation | None] = {}  # the op before it on that chain
    makers = {v: op for op in ops for v in op.outputs}
    for op in ops:
        sources = (makers[v] for _, v in operands(op) if v in makers and makers[v] in lengths)
        before[op] = source = max(sources, key=lengths.__getitem__, default=None)
        lengths[op] = 1 if source is None else lengths[source] + 1
    chain, step = set[Operation](), max(lengths, key=lengths.__getitem__, default=None)
    while step is not None:
        chain.add(step)
        step = before[step]
    return chain


TABLE = Path(__file__).with_name("time_table.json")
VARIABLE = "ANESURGERY_TIME_TABLE"
"""Environment variable: path of a table to use instead, as `anesurgery calibrate` writes it."""
FORMAT = "anesurgery.times/1"
FEW = 16
"""Up to this number of rows a product is bound by reading its weights, whatever their form."""
MOST_DIFFERENCE = 3.0
"""No time is given if it differs more than so many times between ops of unknown unit on the ANE and on the
CPU: errors against published times are smaller than that."""
CPU_DEVIATION = 1.4
"""Standard deviation of the logarithm of the time where all ops run on the CPU. DenseNet-121 took 1.45 times
the estimate (M1 Max), and Qwen3-0.6B over 128 positions a seventh of it (M5 Pro, 46 ms with CPU_ONLY:
FluidInference/mobius#77)."""
OF_CPU = "Core ML's own estimate of the CPU"
"""The source of a time where all ops run on the CPU."""


class Spent(NamedTuple):
    """Microseconds that one run of an op takes."""

    kind: str
    """Source of cost: "CPU", "products" or "memory"."""
    own: float
    """Core ML's estimate, times the factors of the chip."""
    reading: float = 0.0
    """What reading the weights takes beyond that."""
    waiting: float = 0.0
    """What the least time of an op on the longest chain adds to both."""

    @property
    def total(self) -> float:
        """The sum of the three."""
        return self.own + self.reading + self.waiting


@dataclass(frozen=True)
class Rates:
    """The fitted numbers of one chip."""

    factor: float
    """The factor of its generation; it multiplies Core ML's estimates."""
    gb: float
    """GB/s at which it reads weights."""
    fixed: float
    """Microseconds of a prediction."""
    switch: float
    """Microseconds of a change of the unit."""
    floor: float
    """The least microseconds of an op on the longest chain."""
    long: float
    """How many times longer attention over long sequences takes."""
    notch: float
    """How many times longer it takes to read weights that `rules.slow.dma_notch` finds."""
    forms: Mapping[str, Mapping[str, Any]]
    """Form of weights -> its factors "reading", "computing" and "grows" (with rows)."""

    @classmethod
    def of(cls, table: Mapping[str, Any], family: int, chip: str) -> Rates:
        """Return the numbers of a chip by the name under which it is sold ("M4 Pro")."""
        own = str(family)
        return cls(
            factor=table["factor"][own],
            gb=bandwidth(table["bandwidth"], family, chip),
            fixed=table["fixed_us"][own],
            switch=table["switch_us"][own],
            floor=table["floor_us"],
            long=table["long"],
            notch=table["notch"].get(own, 1.0),
            forms={
                name: _form_on_generation(form, own)
                for name, form in table["forms"].items()
                if family in form["families"]
            },
        )

    def spent(self, op: OpLoad) -> Spent:
        """Return the microseconds of one run of an op."""
        if op.cpu:
            reading = op.weight / self.gb / 1e3
            return Spent("CPU", op.us) if op.us >= reading else Spent("CPU", 0.0, reading)
        own = op.us * self.factor * (self.long if op.long else 1.0)
        bytes_ = op.weight * (self.notch if op.notch else 1.0)
        if op.form != PLAIN:
            own, bytes_ = own * self._computing_factor(op), bytes_ * self.forms[op.form].get("reading", 1.0)
        reading = max(bytes_ / self.gb / 1e3 - own, 0.0)
        waiting = max(self.floor - own - reading, 0.0) if op.chain else 0.0
        return Spent("products" if op.op_type in PRODUCTS else "memory", own, reading, waiting)

    def _computing_factor(self, op: OpLoad) -> float:
        """Return how many times longer a product computes with compressed weights."""
        if op.rows <= FEW:
            return 1.0
        form = self.forms[op.form]
        return float(form.get("computing", 1.0) * (op.rows / FEW) ** form.get("grows", 0.0))


def _form_on_generation(form: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    """Return the factors of a form of weights on a generation; some expand it and read more than is stored."""
    folded = form.get("reading_on", {}).get(family)
    return form if folded is None else {**form, "reading": folded}


def bandwidth(rates: Mapping[str, float], family: int, chip: str) -> float:
    """Return the GB/s at which a chip reads weights.

    For a chip without a rate this is the geometric mean of the chips of its kind (plain, or one of Pro, Max
    and Ultra) in the nearest generation; of all chips if none of its kind has a rate; infinite without any
    rates.
    """
    if chip in rates:
        return float(rates[chip])
    of_kind = [name for name in rates if (" " in name) == (" " in chip)]
    distances = {name: abs(CHIPS[name.split()[0]].family - family) for name in of_kind}
    if not of_kind:
        distances = dict.fromkeys(rates, 0)
    nearest = [math.log(rates[name]) for name, d in distances.items() if d == min(distances.values())]
    return math.exp(math.fsum(nearest) / len(nearest)) if nearest else math.inf


def table() -> dict[str, Any]:
    """Return the fitted numbers, or those of the file that `ANESURGERY_TIME_TABLE` names.

    Raises:
        LoadError: that file is not a table of times.
    """
    return read_table(os.environ.get(VARIABLE) or TABLE)


@lru_cache(maxsize=4)
def read_table(path: str | Path) -> dict[str, Any]:
    """Read and check a table of times.

    Raises:
        LoadError: the file cannot be read, or is not a table of times.
    """
    try:
        read: dict[str, Any] = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        if read["format"] != FORMAT:
            raise ValueError(f"its format is {read['format']!r}, expected {FORMAT!r}")
        for family in read["factor"]:
            Rates.of(read, int(family), "")
        return read
    except (OSError, *DAMAGED) as error:
        raise LoadError(f"{path} is no table of times: {error}; `anesurgery calibrate` writes one") from error


def microseconds(load: Load, rates: Rates) -> dict[Key, float]:
    """Return the microseconds of a load by source of cost and op type."""
    return sum_costs(load, rates, [rates.spent(op) for op in load.ops])


def sum_costs(load: Load, rates: Rates, each: Iterable[Spent]) -> dict[Key, float]:
    """Add up the microseconds of each op by source of cost and op type, with switches and dispatch."""
    spent: defaultdict[Key, float] = defaultdict(float)
    reading = waiting = 0.0
    for op, one in zip(load.ops, each, strict=True):
        detail = "long" if op.long else op.form
        name = f"{op.op_type} ({detail})" if detail else op.op_type
        spent[one.kind, name] += one.own * op.count
        reading += one.reading * op.count
        waiting += one.waiting * op.count
    spent["weights", ""], spent["waiting", ""] = reading, waiting
    spent["switches", ""] = load.switches * rates.switch
    spent["dispatch", ""] = 0.0 if load.on_cpu else rates.fixed
    return {key: us for key, us in spent.items() if us}


def deviation(key: Key, table: Mapping[str, Any]) -> float:
    """Return the standard deviation of the logarithm of the time of a source of cost."""
    kind, name = key
    form = name.rpartition(" (")[2].rstrip(")") if name.endswith(")") else ""
    form_off = table["forms"][form]["off"] if form in table["forms"] else 0.0
    off = table["off"]["long"] if form == "long" else table["off"].get(kind, table["off"]["op"])
    return math.hypot(off, form_off)


@dataclass(frozen=True)
class Timed:
    """The time of a function, or the reason why there is none."""

    time: Time | None
    """The time of one prediction; None if nothing allows an estimate."""
    why: str = ""
    """Why there is no time, in words; "" if there is one."""
    each: tuple[float, ...] = ()
    """Milliseconds of each op, in file order; empty without a time."""


def why_not_of(target: Target, numbers: Mapping[str, Any] | None = None) -> str:
    """Return why no model has a time on a target, in words; "" if models may have one."""
    if len(target.families) != 1:
        return "name one chip (target M4, A16): generations of the engine differ several times"
    (family,) = target.families
    if target.uses_gpu or not target.uses_ane:
        return f"published times carry estimates for CPU_AND_NE only, not for {target.compute_units}"
    if str(family) not in (table() if numbers is None else numbers)["factor"]:
        return f"no published time on the generation of {target.name} is in the table"
    return ""


def _unmeasured_form(load: Load, target: Target, numbers: Mapping[str, Any]) -> str:
    """Return which form of weights was not measured on a generation, in words; "" if all were."""
    (family,) = target.families
    for form in sorted({op.form for op in load.ops if op.form != PLAIN and not op.cpu}):
        measured_form = numbers["forms"].get(form)
        if form == JOINT or measured_form is None:
            return f"weights are stored as {FORMS[form]}, and no time of that was published"
        wide = any(op.form == form and op.rows > FEW for op in load.ops)
        measured = measured_form["computing_families" if wide else "families"]
        if family not in measured:
            names = ", ".join(f"H{f}" for f in measured)
            many = f" for more than {FEW} positions" if wide else ""
            return (
                f"weights are stored as {FORMS[form]}{many}, and times of that were published on {names} only"
            )
    return ""


def time_of(load: Load, target: Target, numbers: Mapping[str, Any] | None = None) -> Time | str:
    """Return the time on the engine of one chip, or why there is none.

    Args:
        load: the work of the function.
        target: names one chip, or chips of one generation.
        numbers: a table of times; the fitted one by default.
    """
    result = timed(load, target, numbers)
    return result.why if result.time is None else result.time


def timed(load: Load, target: Target, numbers: Mapping[str, Any] | None = None) -> Timed:
    """Return the time with that of each op, or why there is none; see `time_of`."""
    numbers = table() if numbers is None else numbers
    if why := why_not_of(target, numbers) or _unmeasured_form(load, target, numbers):
        return Timed(None, why)
    time, each = _time_and_ops(load, target, numbers)
    if not time.ms:
        return Timed(None, "no estimate of any op is known")
    if load.on_cpu and time.parts.get("CPU", 0.0) >= time.ms / 2:
        return Timed(_cpu_time(time), each=each)
    if load.doubtful is None:
        return Timed(time, each=each)
    other, _ = _time_and_ops(load.doubtful, target, numbers)
    if max(time.ms, other.ms) > MOST_DIFFERENCE * min(time.ms, other.ms):
        both = f"{time.ms:.3g} ms if it does, {other.ms:.3g} ms if not"
        return Timed(
            None, f"of {_doubtful_ops_in_words(load)} it is not known if the Neural Engine runs them: {both}"
        )
    return Timed(time.spanning(other), each=each)


def _cpu_time(time: Time) -> Time:
    """Return the time with the wide band of the CPU, whose estimates rest on next to no measurements."""
    off = {key: CPU_DEVIATION if key[0] == "CPU" else own for key, own in time.off.items()}
    return Time.of(time.by_op, off, 0.0, **{**time.rest, "measurements": 0, "source": OF_CPU})


def _doubtful_ops_in_words(load: Load) -> str:
    return "all ops" if load.doubtful is not None and load.doubtful.on_cpu else "some ops"


def _time_and_ops(load: Load, target: Target, numbers: Mapping[str, Any]) -> tuple[Time, tuple[float, ...]]:
    """Return the time, and the milliseconds of each op with all its runs, without dispatch and switches."""
    (family,) = target.families
    own, rates = str(family), Rates.of(numbers, family, target.marketed[0])
    each = [rates.spent(op) for op in load.ops]
    spent = {key: us / 1e3 for key, us in sum_costs(load, rates, each).items()}
    off = {key: deviation(key, numbers) for key in spent}
    provenance = {name: numbers[name][own] for name in ("measurements", "source")}
    common = 0.0 if load.on_cpu else numbers["deviation"][own]
    time = Time.of(spent, off, common, reach=numbers["reach"], unlike=numbers["unlike"], **provenance)
    return time, tuple(sum(one[1:]) * op.count / 1e3 for op, one in zip(load.ops, each, strict=True))


def time_of_shaped(shaped: Shaped, units: Sequence[str | None], target: Target, doubted: bool = False) -> Timed:
    """Return the time of a judged function, or why there is none.

    Args:
        shaped: the function and its judged ops.
        units: the unit of each op.
        target: names one chip, or chips of one generation.
        doubted: may all of it run on the CPU, for a reason that concerns the whole model?
    """
    if why := why_not_of(target):
        return Timed(None, why)
    if shaped.flexible is not None:
        return Timed(None, "its shapes vary, and published times of such models disagree several times")
    if not all(j.decided for j in shaped.judged):
        return Timed(None, "how often a loop runs, or which branch, is not known")
    if (late := next((j.name for j in shaped.judged if j.dynamic), None)) is not None:
        return Timed(None, f"the shape of %{short_name(late)} depends on values")
    return timed(load_of(shaped.judged, units, doubted), target)
