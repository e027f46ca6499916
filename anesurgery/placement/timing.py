"""Estimate how long a function takes on the Neural Engine of one chip.

The time is a factor of the engine's generation times Core ML's own estimates, or the time in which an op's
weights are read where that is longer, plus a fixed cost. All factors stand in `time_table.json`, which
`tests/benchmarks/latency.py` fits to published measurements and writes; docs/latency.md shows the errors.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from anesurgery.placement.durations import Time
from anesurgery.placement.partition import SWITCH
from anesurgery.placement.shaped import Shaped
from anesurgery.placement.target import CHIPS, Target
from anesurgery.placement.verdicts import Judged
from anesurgery.semantics.work import runtime, shape_of

TABLE = Path(__file__).with_name("time_table.json")
LONG = 1024
"""Positions from which attention is slower than estimated: measured at 197 (it is not) and 1,500 (it is)."""
DOUBTFUL = 0.1
"""Share of the time that may lie in ops of unknown legality; more would leave the bands that were checked."""
PRODUCTS = frozenset({"conv", "conv_transpose", "linear", "matmul", "einsum", "scaled_dot_product_attention"})


@dataclass(frozen=True)
class OpLoad:
    """What an op, or `count` equal ones, asks for: Core ML's estimate in microseconds and bytes of weights."""

    op_type: str
    us: float
    weight: int = 0
    long: bool = False
    """Is it part of attention over `LONG` positions or more?"""
    cpu: bool = False
    count: int = 1


@dataclass(frozen=True)
class Load:
    """What a function asks for, op by op, and how often it changes the unit."""

    ops: tuple[OpLoad, ...]
    switches: int = 0
    forms: frozenset[str] = frozenset()
    """The ops that decode its weights; empty where they are plain."""
    doubtful: float = 0.0
    """Share of the estimates that belongs to ops of unknown legality."""


def load_of(judged: Sequence[Judged], units: Sequence[str | None], switches: int | None = None) -> Load:
    """What judged ops ask for; ops of unknown unit count on the ANE where it may run them."""
    ops, doubtful, forms = [], 0.0, set[str]()
    on_cpu = [unit == "cpu" or j.legal is False for j, unit in zip(judged, units, strict=True)]
    for one, cpu in zip(judged, on_cpu, strict=True):
        us = 0.0 if one.estimate is None else (one.estimate.cpu if cpu else one.estimate.ane) or 0.0
        doubtful += us if one.legal is None else 0.0
        weight = one.work.constant if one.op.op_type in PRODUCTS else 0
        forms |= {v.op.op_type for v in _decoded(one.op)}
        ops.append(OpLoad(one.op.op_type, us, weight, _is_long(one), cpu))
    changes = sum(a != b for a, b in pairwise(on_cpu)) if switches is None else switches
    counted = Counter(ops)
    merged = (OpLoad(o.op_type, o.us, o.weight, o.long, o.cpu, n) for o, n in counted.items())
    return Load(tuple(merged), changes, frozenset(forms), doubtful / max(sum(o.us for o in ops), 1e-9))


def _decoded(op: Any) -> Iterable[Any]:
    values = (v for v in op.inputs.values() if not isinstance(v, (list, tuple)))
    return (v for v in values if v is not None and v.op is not None and v.op.op_type.startswith("constexpr_"))


def _is_long(one: Judged) -> bool:
    op = one.op
    if op.op_type == "softmax":
        return shape_of(op.outputs[0])[-1:] >= (LONG,)
    lengths = [n for v in (op.inputs.get("x"), op.inputs.get("y")) if v is not None for n in shape_of(v)[-2:]]
    return op.op_type == "matmul" and len(runtime(op)) > 1 and max(lengths, default=0) >= LONG


@cache
def table() -> dict[str, Any]:
    """The factors as fitted."""
    read: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return read


def microseconds(
    load: Load, factors: Mapping[str, Any], family: int, chip: str
) -> dict[tuple[str, str], float]:
    """Microseconds by source of cost and op type.

    Args:
        load: what the function asks for.
        factors: the table; `factor` and `fixed_us` by generation, `bandwidth` in GB/s by chip, `long`.
        family: the generation of the engine.
        chip: as it is sold ("M4 Pro").
    """
    factor, bandwidth = factors["factor"][str(family)], _bandwidth(factors, family, chip)
    spent: defaultdict[tuple[str, str], float] = defaultdict(float)
    for op in load.ops:
        us = op.us if op.cpu else op.us * factor * (factors["long"] if op.long else 1.0)
        kind = "CPU" if op.cpu else "products" if op.op_type in PRODUCTS else "memory"
        spent[kind, op.op_type] += us * op.count
        spent["weights", op.op_type] += max(op.weight / bandwidth / 1e3 - us, 0.0) * op.count
    spent["switches", ""] += load.switches * SWITCH * factor
    spent["dispatch", ""] += factors["fixed_us"][str(family)]
    return {key: us for key, us in spent.items() if us}


def _bandwidth(factors: Mapping[str, Any], family: int, chip: str) -> float:
    """GB/s of the chip; else the least that was measured in its generation, or in any."""
    rates = factors["bandwidth"]
    alike = [rate for name, rate in rates.items() if CHIPS[name.split()[0]].family == family]
    return float(rates.get(chip) or min(alike or rates.values(), default=math.inf))


def time_of(load: Load, target: Target, factors: Mapping[str, Any] | None = None) -> Time | str:
    """The time on the engine of one generation, or why there is none.

    Args:
        load: what the function asks for.
        target: names one chip, or chips of one generation.
        factors: the table as fitted by default.
    """
    factors = table() if factors is None else factors
    if len(target.families) != 1:
        return "name one chip (target M4, A16): generations of the engine differ several times"
    (family,) = target.families
    if target.uses_gpu or not target.uses_ane:
        return f"published times carry estimates for CPU_AND_NE only, not for {target.compute_units}"
    if str(family) not in factors["factor"]:
        return f"no published time of a whole model on {target.label} is in the table"
    if load.doubtful > DOUBTFUL:
        return f"{load.doubtful:.0%} of the estimate lies in ops of which it is not known if the ANE runs them"
    if load.forms:
        return f"weights are compressed ({', '.join(sorted(load.forms))}): their times are not in the table"
    spent = {key: us / 1e3 for key, us in microseconds(load, factors, family, target.marketed[0]).items()}
    parts: defaultdict[str, float] = defaultdict(float)
    for (kind, _), ms in spent.items():
        parts[kind] += ms
    if parts["CPU"] > sum(spent.values()) / 2:
        return "most of the time lies in ops of the CPU, of which no time was published"
    ms, off = sum(spent.values()), factors["band"]
    count, source = factors["measurements"][str(family)], factors["source"][str(family)]
    return Time(ms, ms / off, ms * off, count, source, dict(parts), spent, load.forms)


def time_of_shaped(
    shaped: Shaped, units: Sequence[str | None], target: Target, doubted: bool = False
) -> Time | str:
    """The time of a judged function, or why there is none; ops that were judged are not judged again.

    Args:
        shaped: the function and its judged ops.
        units: of the ops.
        target: names one chip, or chips of one generation.
        doubted: does something known of the whole model leave open where it runs?
    """
    if shaped.flexible is not None:
        return "its shapes vary, and published times of such models disagree several times"
    if doubted:
        return "where it runs as a whole is not known, as findings say"
    if any(j.depth for j in shaped.judged):
        return "it has control flow, of which no time was published"
    return time_of(load_of(shaped.judged, units), target)
