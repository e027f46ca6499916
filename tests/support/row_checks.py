"""Hold what tables say of an op against the interpreter; each check gives a counterexample, or "".

A table that is asked says less than it could, or nothing: only what it does say is held against the op.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from random_ops import NUMPY, TYPES, Sample, numbers, plain_numbers, promised

from anesurgery import fp16, ops
from anesurgery.checking import edit_sites
from anesurgery.errors import Refusal
from anesurgery.facts import loops, row_tails, token_axes
from anesurgery.facts.whole_numbers import (
    MOVES,
    WholeNumbers,
    integer_op,
    is_whole,
    number_operands,
    whole_results,
)
from anesurgery.facts.whole_numbers import symbolic_reason as symbolic_shape
from anesurgery.interpret import Evaluator, evaluate
from anesurgery.interpret.arithmetic.precision import Double
from anesurgery.mil import Array, Maker, Operation, Var, add_input, constant, mb, np_dtype, static_shape
from anesurgery.mil import operands as mil_operands
from anesurgery.passes.integers_as_floats import _Floats
from anesurgery.regions import padding, views
from anesurgery.regions.small_builds import tail_on_row
from anesurgery.semantics import degrees, rows
from anesurgery.semantics.bounds import EXACT as EXACT_ENDS
from anesurgery.semantics.bounds import widened_by_rounding
from anesurgery.semantics.intervals import Intervals
from anesurgery.semantics.reading import ints
from anesurgery.semantics.rows import ALWAYS, CONTRACTED, OF_WHOLE, PlacedOperands, places_of, slices_read

DRAWS = 2
"""Sets of numbers that each op is tried on, half of them in fp64."""
NEAR = 1e-6
"""Rounding of fp32, relative to an end of an interval."""
SAME = 1e-5
"""How far results may differ that are computed in another order (a few meanings compute in fp32)."""

Values = Mapping[Var, torch.Tensor]
Rows = Mapping[Var, int]


def outside_its_interval(sample: Sample) -> str:
    """A result outside of the interval that its row gives for the intervals of the operands."""
    return _outside(sample, lambda ranges, var: Intervals(1, {v.name: r for v, r in ranges.items()}).at(var))


def outside_its_stored_interval(sample: Sample) -> str:
    """A result as stored, in fp16 and fp32, outside of the interval of what is computed so."""
    rng = random.Random(sample.seed)
    for _ in range(DRAWS):
        ranges = promised(sample, rng)
        values = {var: numbers(operand, ranges[var], rng) for var, operand in sample.operands.items()}
        for var in (v for v in values if np_dtype(v).kind == "f"):
            ranges[var] = widened_by_rounding(ranges[var], np_dtype(var), EXACT_ENDS)
            values[var] = values[var].to(torch.from_numpy(np.zeros(0, np_dtype(var))).dtype).float()
        for var in sample.op.outputs:
            low, high = Intervals(1, {v.name: r for v, r in ranges.items()}, stored=True).at(var)
            (result,) = evaluate(sample.ops, values, [var], "fp16")
            held = result.double()[~torch.isnan(result.double())]
            if held.numel() and not low <= float(held.min()) <= float(held.max()) <= high:
                read = {v.name: (ranges[v], values[v].tolist()) for v in values}
                return f"{held.tolist()} is not in [{low:.9g}, {high:.9g}]: {sample}, of {read}"
    return ""


def outside_its_integers(sample: Sample) -> str:
    """The same for `whole_numbers`, which knows integers."""
    if any(integer_op(v) is None for v in sample.op.outputs):
        return ""
    return _outside(sample, lambda ranges, var: WholeNumbers({v.name: r for v, r in ranges.items()}).known(var))


def _outside(sample: Sample, asked: Callable[[Any, Var], tuple[float, float]]) -> str:
    rng = random.Random(sample.seed)
    for precision in ("fp32", Double()) * (DRAWS // 2):
        ranges = promised(sample, rng)
        values = {var: numbers(operand, ranges[var], rng) for var, operand in sample.operands.items()}
        for var in sample.op.outputs:
            low, high = asked(ranges, var)
            if (low, high) == (-math.inf, math.inf):
                continue
            (result,) = evaluate(sample.ops, values, [var], precision)
            worst = _beyond(result, low, high, var, precision == "fp32")
            if worst is not None:
                read = {v.name: (ranges[v], values[v].tolist()) for v in values}
                return f"{worst:g} is not in [{low:g}, {high:g}]: {sample}, of {read}"
    return ""


def _beyond(result: torch.Tensor, low: float, high: float, var: Var, single: bool) -> float | None:
    """A number outside of an interval; where floats overflow, an infinity stands for a number within it."""
    held = result.double().reshape(-1)
    held = held[~torch.isnan(held)]
    slack = NEAR if np_dtype(var).kind == "f" else 0.0
    ends = [abs(v) for v in (low, high) if math.isfinite(v)]
    if single and max(ends, default=math.inf) > 1e18:
        held = held[torch.isfinite(held)]
    for value in (held.min(), held.max()) if held.numel() else ():
        number = float(value)
        if number < low - slack * max((1e-30, *ends)) or number > high + slack * max((1e-30, *ends)):
            return number
    return None


def mixes(
    made_by: Sequence[Operation],
    result: Var,
    axis: int,
    rows: Rows,
    values: Values,
    rng: np.random.Generator,
    part: slice = slice(None),
) -> str:
    """Do the slices of a result not depend on those of the operands alone, each in the same way?

    Args:
        made_by: what makes the result.
        result: the value.
        axis: its axis whose slices are looked at.
        rows: operand -> the axis of its slices.
        values: of all operands.
        rng: draws other numbers for the slices.
        part: the slices of the result that are looked at.
    """
    places = torch.arange(static_shape(result)[axis])[part]  # type: ignore[index]
    count = len(places)
    if any(values[v].shape[at] != count for v, at in rows.items()):
        return f"slices of { ({v.name: (at, values[v].shape[at]) for v, at in rows.items()}) } for {count}"
    compute = _evaluator(tuple(made_by), result)

    def computed(numbers: Values) -> torch.Tensor:
        return compute(numbers)[0].index_select(axis, places)

    whole = computed(values)
    kept = int(rng.integers(count))
    others = dict(values)
    for var, at in rows.items():
        drawn = (
            values[var]
            .flatten()[torch.from_numpy(rng.permutation(values[var].numel()))]
            .reshape(values[var].shape)
        )
        drawn = 1 - drawn if drawn.is_floating_point() else drawn
        others[var] = drawn.index_copy(at, torch.tensor([kept]), values[var].select(at, kept).unsqueeze(at))
    changed = computed(others)
    if not same(whole.select(axis, kept), changed.select(axis, kept)):
        return f"slice {kept} of axis {axis} depends on others"
    order = torch.from_numpy(rng.permutation(count))
    turned = {**values, **{v: values[v].index_select(at, order) for v, at in rows.items()}}
    moved = computed(turned)
    return (
        "" if same(whole.index_select(axis, order), moved) else f"slices of axis {axis} are not treated alike"
    )


@functools.lru_cache(maxsize=8)
def _evaluator(made_by: tuple[Operation, ...], result: Var) -> Evaluator:
    """What computes a value in fp64, made once for all checks of an op."""
    return Evaluator(made_by, [result], Double())


@functools.lru_cache(maxsize=64)
def _mixes_once(sample: Sample, result: Var, axis: int, rows: tuple[tuple[Var, int], ...]) -> str:
    """`mixes`, where several tables say the same of an op and would be held against it again."""
    rng = _draws(sample)
    return mixes(sample.ops, result, axis, dict(rows), plain_numbers(sample, rng), rng)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for the order of sums; NaN is NaN."""
    if one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    scale = torch.nan_to_num(one.double(), 0.0, 0.0, 0.0).abs().max() if one.numel() else torch.tensor(0.0)
    return torch.allclose(one.double(), other.double(), SAME, float(SAME * scale), equal_nan=True)


def _draws(sample: Sample) -> np.random.Generator:
    return np.random.default_rng([*sample.seed.encode(), *sample.op.op_type.encode()])


def mixes_axes(sample: Sample) -> str:
    """Axes that go elsewhere than their row says, or are mixed."""
    axes, rng = places_of(sample.op), _draws(sample)
    if axes is None or any(not static_shape(v) for v in sample.op.outputs):
        return ""
    values = plain_numbers(sample, rng)
    for out in sample.op.outputs:
        for axis in range(out.rank):
            rows = slices_read(axes, axis)
            if rows is None or any(v not in values for v in rows):
                continue  # a constant cannot be drawn again
            if why := _mixes_once(sample, out, axis, tuple(rows.items())):
                return f"{why}: {sample}, axis {axis} of { ({v.name: at for v, at in rows.items()}) }"
    return _orders(sample, axes, values, rng)


def _orders(sample: Sample, axes: PlacedOperands, values: Values, rng: np.random.Generator) -> str:
    """An axis that is said to be contracted by one operand alone, but whose order matters."""
    contracted = [(o.var, a) for o in axes for a, place in enumerate(o.places) if place == CONTRACTED]
    for var, axis in contracted if len({v for v, _ in contracted}) == 1 else ():
        if var not in values:
            continue
        order = torch.from_numpy(rng.permutation(values[var].shape[axis]))
        turned = {**values, var: values[var].index_select(axis, order)}
        plain, other = (evaluate(sample.ops, v, sample.op.outputs, Double()) for v in (values, turned))
        if not all(map(same, plain, other)):
            return f"the order along axis {axis} of {var.name} matters: {sample}"
    return ""


def mixes_rows(sample: Sample) -> str:
    """Slices of a result that depend on others than `rows_read` says."""
    return _mixes_by(sample, row_tails.rows_read)


def mixes_rows_of_excerpts(sample: Sample) -> str:
    """Slices of a result that depend on others than an excerpt takes."""
    return _mixes_by(sample, lambda op, axis: edit_sites._rows_read(op, {op.outputs[0]: axis}))


def _mixes_by(sample: Sample, asked: Callable[[Operation, int], Rows | None]) -> str:
    out = sample.op.outputs[0]
    for axis in range(out.rank):
        rows = asked(sample.op, axis)
        if rows is None or len(sample.op.outputs) != 1:
            continue
        if any(v not in sample.operands for v in rows):
            continue  # a constant cannot be drawn again
        if why := _mixes_once(sample, out, axis, tuple(rows.items())):
            return f"{why}: {sample}, axis {axis} of { ({v.name: at for v, at in rows.items()}) }"
    return ""


def rebuilds_another_row(sample: Sample) -> str:
    """A row that is rebuilt by `tail_on_row` from one position is not that row of the whole."""
    (out, *more), rng = sample.op.outputs, _draws(sample)
    values = plain_numbers(sample, rng)
    for axis in range(out.rank):
        rows = row_tails.rows_read(sample.op, axis)
        if not rows or more or len(rows) != 1 or sample.ops != (sample.op,):
            continue
        ((source, at),) = rows.items()
        shape = [1 if a == at else n for a, n in enumerate(source.shape)]
        place = add_input(sample.function, f"row{axis}", shape, TYPES[sample.operands[source].dtype])
        with sample.function:
            row = tail_on_row(cast(Maker, mb), row_tails.Tail(source, at, ((sample.op, axis),)), place)
        at_place = int(rng.integers(source.shape[at]))
        (whole,) = evaluate([sample.op], values, [out], Double())
        given = {**values, place: values[source].select(at, at_place).unsqueeze(at)}
        (rebuilt,) = evaluate([row.op] if row.op is not None else [], given, [row], Double())
        if not same(whole.select(axis, at_place).unsqueeze(axis), rebuilt):
            return f"row {at_place} of axis {axis} is rebuilt as another: {sample}"
    return ""


def mixes_planes(sample: Sample) -> str:
    """Images or channels that `planes` calls independent are not."""
    out, rng = sample.op.outputs[0], _draws(sample)
    shape = static_shape(out)
    if shape is None or len(shape) < 3 or not edit_sites._plane_by_plane(sample.op, {shape[:2]}):
        return ""
    values = plain_numbers(sample, rng)
    for axis in (0, 1):
        rows = {v: axis for v, o in sample.operands.items() if len(o.shape) > 2}
        if why := mixes(sample.ops, out, axis, rows, values, rng):
            return f"{why}: {sample}"
    return ""


def mixes_tokens(sample: Sample) -> str:
    """Tokens that `token_axes` follows through an op meet others, or are lost."""
    rng = _draws(sample)
    held = [v for v, o in sample.operands.items() if o.shape]
    if not held or any(not static_shape(v) for v in sample.op.outputs):
        return ""
    values = plain_numbers(sample, rng)
    for label in (token_axes.NEW, token_axes.SEEN, token_axes.NEW):
        chosen = [v for v in held if rng.random() < 0.6] or held[:1]
        count = int(rng.integers(2, 5))
        places = {v: [a for a, n in enumerate(v.shape) if n == count] for v in chosen}
        axes = {v: {int(rng.choice(at)): label} for v, at in places.items() if at}
        if not axes:
            continue
        tokens = token_axes.Tokens(dict(axes))
        made = token_axes.labels_of(sample.op, tokens)
        if isinstance(made, Refusal):
            continue
        tokens.axes |= dict.fromkeys(sample.op.outputs, made)
        tables = token_axes.tables(sample.op, tokens)
        if any(v not in values for v in tables):
            continue  # a constant cannot be drawn again
        for out in sample.op.outputs:
            if why := _tokens_of(sample, out, label, tokens, tables, values, rng):
                at = {v.name: a for v, a in axes.items()}
                return f"{why}: {sample}, {label} at {at}, labels {dict(made)}"
    return ""


def _tokens_of(
    sample: Sample,
    out: Var,
    label: str,
    tokens: token_axes.Tokens,
    tables: Mapping[Var, token_axes.Axes],
    values: Values,
    rng: np.random.Generator,
) -> str:
    """One result: each of its labels goes with the operands that have it."""
    labels = tokens.axes[out]
    if label not in labels.values():
        return "the tokens are lost"
    looked_at = set(tokens.looked_at.values())
    for axis, kind in labels.items():
        rows = {}
        for var in values:
            held = {**tokens.axes, **tables}.get(var, {})
            columns = kind == token_axes.SEEN != label
            if columns and var in looked_at:
                rows[var] = next(iter(held))
            elif not columns and var not in looked_at:
                rows |= {var: a for a in held if held[a] == kind}  # noqa: B035
        if why := mixes(sample.ops, out, axis, rows, values, rng, _of_tokens(out, axis, tokens)):
            return why
    return ""


def _of_tokens(out: Var, axis: int, tokens: token_axes.Tokens) -> slice:
    """The places of an axis that hold tokens: in front of what stands beyond them, behind zeros."""
    count = next(n for v, labels in tokens.axes.items() if v is not out for n in [v.shape[next(iter(labels))]])
    if tokens.beyond.get(out) == axis:
        return slice(count)
    return slice(out.shape[axis] - count, None) if out in tokens.zeros else slice(None)


class PlainMaker:
    """coremltools' builder with constants of its own, as views build with."""

    def __getattr__(self, op_type: str) -> Any:
        return getattr(mb, op_type)

    def shared(self, key: tuple[Any, ...], make: Callable[[], Array], name: str) -> Var:
        made: Var = mb.const(val=np.ascontiguousarray(make()))
        return made

    def shared_value(self, key: tuple[Any, ...], reads: Sequence[Var], build: Callable[[Any], Var]) -> Var:
        return build(self)


def differs_as_a_view(sample: Sample) -> str:
    """The op on a view of its axes makes other numbers."""
    if not all(static_shape(v) for v in (*sample.operands, *sample.op.outputs)):
        return ""
    frame, rng = views.frame(sample.op), _draws(sample)
    if isinstance(frame, Refusal):
        return ""
    values = plain_numbers(sample, rng)
    groups: list[tuple[int, ...]] = [(0,)]
    for axis, joins in enumerate(frame.joins, 1):
        groups[-1:] = [(*groups[-1], axis)] if joins and rng.random() < 0.6 else [groups[-1], (axis,)]
    for view in (groups, frame.lifted(len(frame.sizes) + 1)) if len(frame.sizes) < 5 else (groups,):
        with sample.function:
            before = set(sample.function.operations)
            try:
                built = frame.build(PlainMaker(), view)
            except (ValueError, IndexError) as error:
                return f"cannot be built as {view}: {error}"
        added = [op for op in sample.function.operations if op not in before and op.op_type != "const"]
        found = evaluate([*sample.ops, *added], values, [*sample.op.outputs, *built], Double())
        for one, other in zip(found[: len(built)], found[len(built) :], strict=True):
            if one.numel() != other.numel() or not same(one.flatten(), other.flatten()):
                return f"other numbers as {view}: {sample}"
    return ""


def scales_otherwise(sample: Sample) -> str:
    """Operands times powers of two do not give the result times the power that `exponents` says."""
    rng = _draws(sample)
    powers = {v: int(rng.integers(-4, 5)) for v, o in sample.operands.items() if o.dtype.startswith("fp")}
    if rng.random() < 0.4:
        powers = dict.fromkeys(powers, 2 * int(rng.integers(-2, 3)))
    found = degrees.scaled(sample.op, lambda v: powers.get(v, 0))
    if found is None:
        return ""
    values = plain_numbers(sample, rng)
    scaled = {v: t * 2.0 ** powers.get(v, 0) if v in powers else t for v, t in values.items()}
    given = {k: v for k, v in sample.op.inputs.items() if v is not None and k[0] != "_"}
    for name, power in found.constants.items():
        if given.get(name) is not None:
            value = np.asarray(constant(given[name]))
            with np.errstate(over="ignore"):
                given[name] = (value * 2.0**power).astype(value.dtype)
            if not np.array_equal(given[name] * 2.0**-power, value):
                return ""  # it becomes subnormal
    with sample.function:
        before = set(sample.function.operations)
        made = getattr(mb, sample.op.op_type)(**given)
        outputs = list(made) if isinstance(made, (list, tuple)) else [made]
    added = [op for op in sample.function.operations if op not in before and op.op_type != "const"]
    for old, new in zip(sample.op.outputs, outputs, strict=True):
        (plain,), (other,) = (
            evaluate(sample.ops, values, [old], Double()),
            evaluate(added, scaled, [new], Double()),
        )
        if not same(plain.double() * 2.0**found.result, other):
            return f"not {found} of { ({v.name: e for v, e in powers.items()}) }: {sample}"
    return ""


UNPADDED = ("valid", None)
COUNTED = frozenset({"conv", "einsum", "linear", "matmul"})
"""Products whose multiplications are counted: with ones on both sides, the result sums to their number."""


def counts_otherwise(sample: Sample) -> str:
    """The operations or bytes of an op are not those of the computation."""
    ones = {v: torch.ones(o.shape, dtype=torch.float64) for v, o in sample.operands.items()}
    results = evaluate(sample.ops, plain_numbers(sample, _draws(sample)), sample.op.outputs)
    written = sum(t.numel() * np_dtype(v).itemsize for t, v in zip(results, sample.op.outputs, strict=True))
    read = sum(math.prod(o.shape) * np.dtype(NUMPY[o.dtype]).itemsize for o in sample.operands.values())
    counted = rows.work_of(sample.op)
    if (counted.written, counted.read) != (written, read) and all(map(static_shape, sample.op.outputs)):
        return f"reads {counted.read} and writes {counted.written} bytes, not {read} and {written}: {sample}"
    padded = sample.op.op_type == "conv" and constant(sample.op.inputs.get("pad_type")) not in UNPADDED
    if sample.op.op_type not in COUNTED or padded:
        return ""
    with sample.function:
        given = {k: v for k, v in sample.op.inputs.items() if v is not None and k not in ("bias", "_")}
        for name in ("weight", "x", "y"):
            if (value := constant(given.get(name))) is not None:
                given[name] = np.ones_like(value)
        made = getattr(mb, sample.op.op_type)(**given)
    (result,) = evaluate([made.op], ones, [made], Double())
    flop = 2 * int(result.sum())
    return "" if flop == counted.flop else f"{counted.flop} operations, not {flop}: {sample}"


def moves_other_numbers(sample: Sample) -> str:
    """An op that only moves numbers makes others, or loses some; compared by their bits."""
    kind, rng = sample.op.op_type, random.Random(sample.seed)
    values = {v: numbers(o, (o.low, o.high), rng) for v, o in sample.operands.items()}
    name = "values" if kind in ops.JOINING else "x"
    read = sample.op.inputs.get(name)
    moved = [v for v in (read if isinstance(read, (list, tuple)) else [read]) if isinstance(v, Var)]
    if kind not in ops.MOVING | ops.JOINING | ops.VIEWS | ops.PADDING or not moved:
        return ""
    before = np.concatenate(
        [_bits(values[v] if v in values else torch.from_numpy(np.asarray(v.val))) for v in moved]
    )
    after = np.concatenate([_bits(t) for t in evaluate(sample.ops, values, sample.op.outputs)])
    if kind in ops.VIEWS:
        kept = np.array_equal(before, after)
    elif kind in ops.REARRANGING | ops.JOINING:
        kept = np.array_equal(np.sort(before), np.sort(after))
    else:
        filled = (
            set()
            if kind in ops.MOVING
            else {*_bits(torch.tensor([float(v.val) for v in _fill(sample)] + [0.0]))}
        )
        kept = set(after) <= set(before) | filled
    return "" if kept else f"other numbers than it reads: {sample}"


def _fill(sample: Sample) -> list[Var]:
    return [v for v in (sample.op.inputs.get("constant_val"),) if v is not None]


def _bits(value: torch.Tensor) -> Array:
    """Integers that stand for the bits of numbers."""
    held = value.numpy().reshape(-1)
    held = np.where(np.isnan(held), np.nan, held).astype(held.dtype) if held.dtype.kind == "f" else held
    return held.astype(np.float32).view(np.int32) if held.dtype.kind == "f" else held.astype(np.int32)


def rounds_its_results(sample: Sample) -> str:
    """An op that is said to compute without rounding makes numbers that its type does not hold."""
    out = sample.op.outputs[0]
    if sample.op.op_type not in ops.UNROUNDED or sample.op.op_type == "cast" or np_dtype(out).kind != "f":
        return ""
    rng = _draws(sample)
    values = {
        v: t.to(torch.from_numpy(np.zeros(0, NUMPY[sample.operands[v].dtype])).dtype)
        for v, t in plain_numbers(sample, rng).items()
    }
    for result in evaluate(sample.ops, values, sample.op.outputs, Double()):
        held = result.double().numpy()
        if not np.array_equal(held.astype(np_dtype(out)).astype(np.float64), held, equal_nan=True):
            return f"makes numbers between those of {np_dtype(out)}: {sample}"
    return ""


def mixes_other_axes(sample: Sample) -> str:
    """An op that is said to read rows along one parameter's axes mixes others."""
    name, x = ops.ALONG.get(sample.op.op_type), sample.op.inputs.get("x")
    if name is None or x not in sample.operands:
        return ""
    along = {a % x.rank for a in ints(sample.op, name)} or {x.rank - 1}
    rng = _draws(sample)
    values = plain_numbers(sample, rng)
    for out in sample.op.outputs:
        for axis in set(range(x.rank)) - along if out.rank == x.rank else ():
            if why := mixes(sample.ops, out, axis, {x: axis}, values, rng):
                return f"{why}: {sample}"
    return ""


def differs_in_floats(sample: Sample) -> str:
    """Integers that `whole_numbers` computes in fp16 are others there."""
    (out, *more), rng = sample.op.outputs, random.Random(sample.seed)
    ranges = {v: (max(low, -40.0), min(high, 40.0)) for v, (low, high) in promised(sample, rng).items()}
    if any(low > high for low, high in ranges.values()) or more or integer_op(out) is None:
        return ""
    whole = WholeNumbers({v.name: r for v, r in ranges.items() if np_dtype(v).kind != "f"})  # NaN is no integer
    if whole.leaves(out, fp16.LAST_INTEGER) or symbolic_shape(out):
        return ""
    values = {var: numbers(operand, ranges[var], rng) for var, operand in sample.operands.items()}
    with sample.function:
        before = set(sample.function.operations)
        floats = _Floats(PlainMaker(), np.dtype(np.float16)).of(out)
    added = [op for op in sample.function.operations if op not in before and op.op_type != "const"]
    found = evaluate([*sample.ops, *added], values, [out, floats], "fp16")
    return "" if torch.equal(found[0].double(), found[1].double()) else f"other numbers in fp16: {sample}"


def makes_fractions(sample: Sample) -> str:
    """An op that is said to make whole numbers of whole ones (or of any) makes fractions."""
    kind, rng = sample.op.op_type, _draws(sample)
    made = OF_WHOLE if kind in MOVES else whole_results(sample.op)
    if made is None or np_dtype(sample.op.outputs[0]).kind != "f":
        return ""
    values = plain_numbers(sample, rng)
    if made != ALWAYS:
        values = {v: t.round() if t.is_floating_point() else t for v, t in values.items()}
        if any(
            v not in values and np_dtype(v).kind == "f" and not is_whole(v)
            for _, v in number_operands(sample.op)
        ):
            return ""
    for result in evaluate(sample.ops, values, sample.op.outputs, Double()):
        held = result[torch.isfinite(result)]
        if not torch.equal(held, held.round()):
            return f"makes fractions: {sample}"
    return ""


def counts_other_rounds(sample: Sample) -> str:
    """A single number that `loop_rounds` computes is not that of the program."""
    (out, *more), rng = sample.op.outputs, random.Random(sample.seed)
    if more or any(math.prod(v.shape) != 1 for v in (*sample.operands, out)):
        return ""
    ranges = promised(sample, rng)
    values = {var: numbers(operand, ranges[var], rng) for var, operand in sample.operands.items()}
    counted = loops._single_number(out, {v: t.reshape(-1)[0].item() for v, t in values.items()})
    if counted is None:
        return ""
    (result,) = evaluate(sample.ops, values, [out], "fp16")
    number = result.reshape(-1)[0].item()
    alike = counted == number or (counted != counted and number != number)
    return "" if alike else f"{counted!r}, not {number!r}: {sample} of {[t.item() for t in values.values()]}"


def pads_with_another_number(sample: Sample) -> str:
    """The padded lanes of a result do not hold what `padding` says."""
    (out, *more), rng = sample.op.outputs, random.Random(sample.seed)
    kind, alike = sample.op.op_type, rng.choice((0.0, 1.0, -2.0, 0.5))
    if more or kind not in padding.CARRIERS | padding.BINARY or np_dtype(out).kind != "f":
        return ""
    lanes: dict[Var, float | None] = {v: alike for v, o in sample.operands.items() if o.dtype.startswith("fp")}
    if len(lanes) != len(sample.operands) or not lanes:
        return ""
    fixed = [v for _, v in mil_operands(sample.op) if v not in lanes and v.rank]
    if fixed:
        return ""  # padded itself
    lane = padding.lane_after(sample.op, lanes, 0)
    values = {v: torch.full(o.shape, alike, dtype=torch.float64) for v, o in sample.operands.items()}
    (result,) = evaluate(sample.ops, values, [out], Double())
    held = result.double().reshape(-1)
    if lane is None:
        good = bool((held.abs() <= fp16.LARGEST).all())
    else:
        good = math.isnan(lane) or bool(
            torch.isclose(held, torch.tensor(lane, dtype=torch.float64), 1e-6, 0).all()
        )
    return "" if good else f"{lane}, not {held.tolist()[:3]} of lanes of {alike}: {sample}"


CHECKS: tuple[Callable[[Sample], str], ...] = (
    outside_its_interval,
    outside_its_stored_interval,
    outside_its_integers,
    mixes_axes,
    mixes_rows,
    mixes_rows_of_excerpts,
    mixes_planes,
    mixes_tokens,
    mixes_other_axes,
    moves_other_numbers,
    rounds_its_results,
    makes_fractions,
    counts_other_rounds,
    pads_with_another_number,
    rebuilds_another_row,
    differs_as_a_view,
    scales_otherwise,
    counts_otherwise,
    differs_in_floats,
)
FOR_INTEGERS = (outside_its_interval, outside_its_integers, differs_in_floats)
