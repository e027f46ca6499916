"""Constant tables at other lengths and sizes: continue them, share them, or compute them at each call.

Converting at one length folds position embeddings, masks, the distances of ALiBi and the like into constants.

* Continue (`continued_table`, for `length_edits`): the rows may be the first rows of a longer table. Then a
  shorter size cuts it, and a longer size continues it if the rows follow a known formula (counting up, sines
  and cosines, slopes). Or they depend on the length itself (distances from the end, steps of 1/n, windows):
  then the table is refused.
* Share (`share_tables`, for `sizes`): where the constant of a shorter size is, bit for bit, the beginning of
  one of the largest size, it slices that one instead: `pos[:64]` of a stored (512, 768) table. A slice costs a
  little time, so small tables are stored for each size, unless that makes the weights more than `SHARE` larger
  than those of the largest size.
* Compute (`compute_tables`, for `sizes`): vision models interpolate position embeddings to the size of the
  image, and none of these tables begins another. So the original is stored once, and each size multiplies it by
  two matrices: table = rows @ grid @ columns. In fp16 this rounds in another way than the stored table did, so
  it is done only where the tables add more than `SHARE` to the weights, and `sizes` reports how near each
  computed table is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from anesurgery.checking.exactness import nearness
from anesurgery.errors import Refusal
from anesurgery.facts.attention import MASKED
from anesurgery.facts.dependence import slice_back
from anesurgery.frontend.resampling import Resampled
from anesurgery.interpret.core import evaluate
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Var,
    constant,
    consumers,
    is_output,
    mb,
    next_op,
    replace_uses,
    walk_ops,
)
from anesurgery.ops import POINTWISE

BASES = (10000.0, 500000.0, 1000000.0, 100000.0)
"""Bases of rotary and sinusoidal positions in published models."""

SLOW = 1e-3
"""Turns per position below which a wave cannot be told from a straight line in fp16."""


@dataclass(frozen=True)
class _Table:
    """A table that is long enough for every size."""

    whole: Array
    """Each size reads its first rows."""
    assumed: bool = False
    """Whether it is only assumed that shorter sizes read its first rows, as for learned positions."""


def continued_table(table: Array, most: Mapping[int, int], adds: bool) -> _Table | Refusal:
    """Return a table at least as long as the largest size, whose first rows are those at each shorter length.

    Args:
        table: the table at the length of the model.
        most: axis -> the largest length; one axis of positions, or two.
        adds: whether an op adds the table or looks rows up in it, as with learned positions.
    """
    constant_axes = {a for a in most if (table == table.take([0], a)).all()}
    whole = table
    for axis in constant_axes:
        whole = np.repeat(whole.take([0], axis), max(most[axis], table.shape[axis]), axis)
    other_axes = {a: max(n, table.shape[a]) for a, n in most.items() if a not in constant_axes}
    if not other_axes:
        return _Table(whole)
    if len(other_axes) > 1:
        return _by_distance(whole, other_axes)
    ((axis, length),) = other_axes.items()
    rows = np.moveaxis(whole, axis, 0)
    has_formula = _continued_by_formula(rows, rows.shape[0]) is not None or _is_wavy(rows)
    if not has_formula and (why := _dependence_on_length(rows)) is not None:
        return Refusal(why)
    if length > rows.shape[0]:
        longer = _continued_by_formula(rows, length)
        if longer is None:
            return Refusal(
                f"its {rows.shape[0]} rows follow no formula for {length} could be made; give the module, "
                "or a model of the largest size"
            )
        return _Table(np.ascontiguousarray(np.moveaxis(longer, 0, axis)))
    if has_formula:
        return _Table(whole)
    if not adds:
        return Refusal("its rows follow no formula, so that those of another length may be others")
    return _Table(whole, assumed=True)


def _dependence_on_length(rows: Array) -> str | None:
    """Return why the rows at another length would differ; None if nothing shows it. rows: (positions, ...)."""
    numbers = rows.astype(np.float64).reshape(rows.shape[0], -1)
    if rows.dtype.kind == "b" or (numbers <= MASKED).any():
        return "it hides some places, and those of another length may be others"
    if (numbers == numbers[::-1]).all() or (len(rows) > 3 and (numbers[1:] == numbers[:0:-1]).all()):
        return "it is the same from both ends, as a window is that is made for its length"
    steps = np.diff(numbers, axis=0)
    even = _linear_columns(numbers)
    if len(rows) > 2 and even.any():
        step = steps.mean(0)[even]
        if ((step < 0) & (np.abs(numbers[-1, even]) <= 1)).any():
            return "it counts down to its end"
        if (np.abs(step - np.round(step)) > 1e-3).any():
            return _slope_reason(float(step[0]))
    return None


def _linear_columns(numbers: Array) -> Array:
    """Return which columns rise by the same step from row to row. numbers: (positions, columns)."""
    with np.errstate(invalid="ignore"):  # what masks is infinite in neighbouring places
        steps = np.diff(numbers, axis=0)
    return np.abs(steps - steps.mean(0)).max(0) <= 2e-3 * (np.abs(numbers).max() or 1.0)


def _slope_reason(step: float) -> str:
    """Return the reason for a refusal of rows that rise by a fraction."""
    return f"it rises by {step:g} from place to place, as what is made of a length does"


def _single_slope_reason(rows: Array) -> str | None:
    """Return why distances may be counted in parts of the length; None if slopes differ between heads."""
    numbers = rows.astype(np.float64).reshape(rows.shape[0], -1)
    if rows.dtype.kind == "b" or len(rows) < 3 or not _linear_columns(numbers).all():
        return None
    slopes = {round(float(n), 4) for n in np.diff(numbers, axis=0).mean(0)}
    return _slope_reason(min(slopes)) if len(slopes) == 1 and min(slopes) % 1 else None


def _continued_by_formula(rows: Array, length: int) -> Array | None:
    """Return `length` rows by a formula that gives all known rows bit for bit; None without one."""
    for formula in (_counting_rows, _sinusoidal_rows, _alibi_rows):
        longer: Array | None = formula(rows, length)
        if longer is not None:
            return longer
    return None


def _counting_rows(rows: Array, length: int) -> Array | None:
    """Return rows that count up by one in every element; None where the known rows are others."""
    if rows.dtype.kind == "b" or not np.isfinite(rows[0]).all():  # a mask counts nothing
        return None
    places = np.arange(length).reshape([-1] + [1] * (rows.ndim - 1))
    longer = (rows[:1].astype(np.int64) + places).astype(rows.dtype)
    return longer if (longer[: len(rows)] == rows).all() else None


def _alibi_rows(rows: Array, length: int) -> Array | None:
    """Return rows that rise by 2 ** (-8 k / heads) for head k, as in ALiBi; None for other rows."""
    flat = rows.reshape(rows.shape[0], -1)
    heads = flat.shape[1]
    if rows.dtype.kind != "f" or heads < 2 or heads & (heads - 1):
        return None
    slopes = 2.0 ** (-8 / heads * np.arange(1, heads + 1))
    longer: Array = np.outer(np.arange(length), slopes).astype(rows.dtype)
    return longer.reshape(length, *rows.shape[1:]) if (longer[: len(rows)] == flat).all() else None


def _angles(length: int, width: int, base: float) -> torch.Tensor:
    """Return the angles of rotary positions: (positions, width / 2)."""
    inverse = 1.0 / (base ** (torch.arange(0, width, 2).float() / width))
    return torch.arange(length).float()[:, None] * inverse[None]


POSITION_FORMULAS: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (
    lambda angles: torch.cat([angles, angles], 1).cos(),
    lambda angles: torch.cat([angles, angles], 1).sin(),
    lambda angles: torch.cat([angles.sin(), angles.cos()], 1),
    lambda angles: torch.stack([angles.sin(), angles.cos()], 2).flatten(1),
    torch.cos,
    torch.sin,
)
"""How tables of positions are computed from angles; the last two hold each angle once."""


def _sinusoidal_rows(rows: Array, length: int) -> Array | None:
    """Return sines and cosines of positions, as in rotary and sinusoidal embeddings; None for other rows."""
    flat = rows.reshape(rows.shape[0], -1)
    if rows.dtype.kind != "f" or not 2 <= flat.shape[1] == max(rows.shape[1:], default=0):
        return None
    for base in BASES:
        for i, formula in enumerate(POSITION_FORMULAS):
            angles = _angles(length, flat.shape[1] * (2 if i > 3 else 1), base)
            longer: Array = formula(angles).numpy().astype(rows.dtype)
            if longer.shape[1] == flat.shape[1] and (longer[: len(rows)] == flat).all():
                return longer.reshape(length, *rows.shape[1:])
    return None


def _is_wavy(rows: Array) -> bool:
    """Return whether each column is a wave whose period no length explains.

    For a wave, x[i-1] + x[i+1] = 2 cos(angle) x[i], so that a fit gives the angle of each column.
    """
    if rows.dtype.kind != "f" or len(rows) < 5:
        return False
    x = rows.astype(np.float64).reshape(len(rows), -1)
    middle, sums = x[1:-1], x[2:] + x[:-2]
    factor = (middle * sums).sum(0) / np.maximum((middle**2).sum(0), 1e-30)
    if np.abs(sums - middle * factor).max() > 4e-3 * np.abs(x).max():
        return False
    turns = np.arccos(np.clip(factor / 2, -1, 1)) / (2 * np.pi)
    whole = [np.abs(turns * n - np.round(turns * n)) < 1e-3 for n in (len(rows), len(rows) - 1)]
    return bool((turns > SLOW).any()) and not ((turns > SLOW) & (whole[0] | whole[1])).any()


def _by_distance(table: Array, most: Mapping[int, int]) -> _Table | Refusal:
    """Continue a table that depends only on the distance between row and column, as causal masks do.

    Its first column and its first row then hold all its numbers: those behind the diagonal, and those ahead.
    """
    first, second = sorted(most)
    square = np.moveaxis(table, (first, second), (0, 1))
    rows, columns = square.shape[:2]
    if (square[1:, 1:] != square[:-1, :-1]).any():
        return Refusal("its elements depend on more than the distance between two positions")
    for side in (square[:, 0], square[0]):
        if (why := _single_slope_reason(side)) is not None:
            return Refusal(why)
    if most[first] <= rows and most[second] <= columns:
        return _Table(table)
    far, near = square[rows // 2 :, 0], square[0, columns // 2 :]
    if (far != far[-1:]).any() or (near != near[-1:]).any():
        return Refusal(f"what it holds at distances from {max(rows, columns)} on follows no formula")
    distance = np.arange(most[second])[None] - np.arange(most[first])[:, None]
    behind = square[np.clip(-distance, 0, rows - 1), 0]
    ahead = square[0, np.clip(distance, 0, columns - 1)]
    chosen = (distance >= 0).reshape(*distance.shape, *[1] * (square.ndim - 2))
    longer = np.where(chosen, ahead, behind).astype(table.dtype)
    return _Table(np.ascontiguousarray(np.moveaxis(longer, (0, 1), (first, second))))


SMALL_TABLE = 1024
"""Bytes below which a slice costs more than it saves."""
SHARE = 0.02
"""The share of the largest size's weights that tables of the other sizes may add. Beyond it, all tables that
can be sliced or computed are: such packages are promised to be hardly larger than one size."""
STORED, HEAD, GRAIN = 10, 64, 64
"""A constant of at least `STORED` elements is written to the weight file, after a header of `HEAD` bytes,
aligned to `GRAIN` bytes (`should_use_weight_file` and the storage of coremltools 9)."""


@dataclass(frozen=True)
class _TableSlice:
    """A table of a shorter size, and the longer table that begins with it."""

    size: str
    op: Operation
    longer: Array

    @property
    def table(self) -> Array:
        """Its array."""
        return _array_of(self.op)


def _array_of(op: Operation) -> Array:
    """Return the array of a constant."""
    return op.outputs[0].val


def share_tables(functions: Mapping[str, Function]) -> dict[str, int]:
    """Replace tables of shorter sizes by slices of the tables of the largest size, in place.

    Args:
        functions: name of a size -> its function, which is edited; in rising order, the last is the largest.

    Returns:
        Name of a size -> bytes that need not be stored for it.
    """
    *shorter, longest = functions
    long_tables = [op for op in functions[longest].operations if _is_table(op)]
    own_tables = {
        name: [
            op for op in functions[name].operations if _is_table(op) and not _is_shared_already(op, long_tables)
        ]
        for name in shorter
    }
    slices = [part for name, ops in own_tables.items() for part in _possible_slices(name, ops, long_tables)]
    saved = dict.fromkeys(shorter, 0)
    for part in _worthwhile_slices(slices, own_tables, _weights_of(functions[longest])):
        _slice(functions[part.size], part.op, part.longer)
        saved[part.size] += part.table.nbytes
    return saved


def _weights_of(function: Function) -> int:
    """Return the bytes of a function's constants."""
    values = [op.outputs[0].val for op in walk_ops(function) if op.op_type == "const"]
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


def _is_shared_already(op: Operation, long_tables: list[Operation]) -> bool:
    """Return whether the writer stores a table with another: same name and shape, or same bytes."""
    table = _array_of(op)
    same_shape = [one for one in long_tables if _array_of(one).shape == table.shape]
    return any(one.name == op.name or _array_of(one).tobytes() == table.tobytes() for one in same_shape)


def _possible_slices(size: str, ops: list[Operation], long_tables: list[Operation]) -> Iterator[_TableSlice]:
    """Yield the tables of a size that may be replaced by a slice of one of `long_tables`."""
    long_arrays = [_array_of(one) for one in long_tables]
    for op in ops:
        longer = next((array for array in long_arrays if _begins_with(array, _array_of(op))), None)
        if longer is not None and _is_read_elementwise(op.outputs[0]):
            yield _TableSlice(size, op, longer)


def _worthwhile_slices(
    slices: list[_TableSlice], own_tables: Mapping[str, list[Operation]], weights: int
) -> Iterator[_TableSlice]:
    """Yield the slices to make: all large ones; then small ones, largest first, until `SHARE` is kept."""
    small = [part for part in slices if part.table.nbytes < SMALL_TABLE]
    large = {part.op for part in slices if part.table.nbytes >= SMALL_TABLE}
    yield from (part for part in slices if part.op in large)
    stored = [_array_of(op) for ops in own_tables.values() for op in ops if op not in large]
    added_bytes = {table.tobytes(): HEAD + -(-table.nbytes // GRAIN) * GRAIN for table in stored}
    for part in sorted(small, key=lambda part: -part.table.nbytes):
        if sum(added_bytes.values()) <= SHARE * weights:
            return
        added_bytes.pop(part.table.tobytes(), None)
        yield part


def _is_table(op: Operation) -> bool:
    """Return whether an op is a plain constant of floats in the weight file."""
    value = constant(op.outputs[0]) if op.outputs else None
    return isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size >= STORED


def _is_read_elementwise(var: Var) -> bool:
    """Return whether only element-wise ops, which need no constant operand, read a value."""
    return not is_output(var) and all(op.op_type in POINTWISE for op in consumers(var))


def _begins_with(longer: Array, table: Array) -> bool:
    """Return whether `longer` begins with `table`, bit for bit."""
    if longer.dtype != table.dtype or longer.ndim != table.ndim or longer.shape == table.shape:
        return False
    if any(n > m for n, m in zip(table.shape, longer.shape, strict=True)):
        return False
    beginning = longer[tuple(slice(n) for n in table.shape)]
    return beginning.tobytes() == table.tobytes()


def _slice(function: Function, op: Operation, longer: Array) -> None:
    """Replace a constant by a slice of a longer table."""
    old = op.outputs[0]
    with function:
        new = mb.slice_by_index(
            x=longer,
            begin=np.zeros(longer.ndim, np.int32),
            end=np.array(old.shape, np.int32),
            before_op=next_op(op),
            name=f"{op.name}_rows",
        )
    replace_uses(function, anchor_op=new.op, old_var=old, new_var=new)
    function.remove_ops([op])


LEAST_NEARNESS = 70.0
"""Lowest accepted PSNR in dB of a computed table beside the stored one. Rounding to fp16 gives about 80."""


@dataclass(frozen=True)
class _ResampledTable:
    """A constant that ends with a resampled table."""

    op: Operation
    """The constant."""
    source: Resampled
    """The original table and the matrices that resample it."""
    head: Array
    """The rows before it, such as the positions of class tokens: (rows, channels), or empty."""
    channels_last: bool
    """Whether the resampled part is (height, width, channels)."""

    @property
    def array(self) -> Array:
        """The constant's array."""
        return _array_of(self.op)

    @property
    def grid(self) -> Array:
        """The original table, in the axis order and dtype of the constant."""
        grid = self.source.x[0].transpose(1, 2, 0) if self.channels_last else self.source.x[0]
        return np.ascontiguousarray(grid.astype(self.array.dtype))

    @property
    def matrices(self) -> list[Array]:
        """The matrix of the rows and that of the columns, in the constant's dtype."""
        return [m.astype(self.array.dtype) for m in (self.source.rows, self.source.columns)]


def compute_tables(
    functions: Mapping[str, Function], resampled: Mapping[str, Sequence[Resampled]]
) -> list[str]:
    """Replace resampled constants by computations from the original table, where that is worth it.

    Args:
        functions: name of a size -> its function, which is edited; in rising order, the last is the largest.
        resampled: name of a size -> the constants that its conversion resampled.

    Returns:
        A sentence for each table that is computed.
    """
    tables = {
        name: [t for one in resampled[name] if (t := _table_of(function, one)) is not None]
        for name, function in functions.items()
    }
    all_tables = [t for listed in tables.values() for t in listed]
    last = list(functions)[-1]
    stored_bytes = sum(t.array.nbytes for t in all_tables)
    added_bytes = stored_bytes - sum(t.array.nbytes for t in tables[last])
    if added_bytes <= SHARE * _weights_of(functions[last]) or _computed_bytes(all_tables) >= stored_bytes:
        return []
    return [
        words
        for name, function in functions.items()
        for table in tables[name]
        if (words := _replace_by_computation(function, name, table))
    ]


def _computed_bytes(tables: Sequence[_ResampledTable]) -> int:
    """Return the bytes from which tables are computed; equal parts are stored once."""
    parts = [part for t in tables for part in (t.grid, t.head, *t.matrices)]
    return sum({part.tobytes(): part.nbytes for part in parts}.values())


def _table_of(function: Function, source: Resampled) -> _ResampledTable | None:
    """Return the constant of a function that ends, bit for bit, with a resampled table."""
    for op in function.operations:
        value = op.outputs[0].val if op.op_type == "const" else None
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and _is_read_elementwise(op.outputs[0]):
            for last in (True, False):
                if (head := _rows_before(value, source, last)) is not None:
                    return _ResampledTable(op, source, head, last)
    return None


def _rows_before(value: Array, source: Resampled, channels_last: bool) -> Array | None:
    """Return the rows before the resampled part; None where a constant does not end with it."""
    picture = source.result[0]
    tail = (picture.transpose(1, 2, 0) if channels_last else picture).astype(value.dtype).ravel()
    flat, channels = value.ravel(), picture.shape[0]
    if len(source.x) != 1 or flat.size < tail.size or flat[-tail.size :].tobytes() != tail.tobytes():
        return None
    head = flat[: -tail.size]
    rows = channels_last and value.ndim > 1 and value.shape[-1] == channels
    is_grid_of_rows = rows and value.shape[-2] * channels == value.size
    if is_grid_of_rows:
        return head.reshape(-1, channels)
    return None if head.size else head


def _replace_by_computation(function: Function, name: str, table: _ResampledTable) -> str:
    """Replace a table by its computation; return a sentence, or "" where that is too inexact."""
    op, array = table.op, table.array
    with function:
        new = _build_computation(table, next_op(op))
    (value,) = evaluate(slice_back([new], set()), {}, [new], "fp16")
    near = nearness({"table": array.astype(np.float64)}, {"table": value.to(torch.float64).numpy()})
    added = slice_back([new], set())
    if near < LEAST_NEARNESS:
        function.remove_ops(added[::-1])
        return ""
    replace_uses(function, anchor_op=new.op, old_var=op.outputs[0], new_var=new)
    function.remove_ops([op])
    size = "bit for bit" if np.isinf(near) else f"{near:.0f} dB near the table"
    return f"{name} computes %{op.name} at each call, from the one table that all sizes store: {size}"


def _build_computation(table: _ResampledTable, before: Operation) -> Var:
    """Build the ops that compute a table."""
    grid, name, shape = table.grid, table.op.name, table.array.shape
    (rows, columns), height = table.matrices, table.source.x.shape[2]
    is_identity = [np.array_equal(m, np.eye(*m.shape)) for m in (rows, columns)]
    if table.channels_last:
        value = mb.const(val=grid.reshape(height, -1), before_op=before, name=f"{name}_grid")
        if not is_identity[0]:
            value = mb.matmul(x=rows, y=value, before_op=before, name=f"{name}_rows")
        picture = (len(rows), grid.shape[1], grid.shape[2])
        value = mb.reshape(x=value, shape=picture, before_op=before, name=f"{name}_picture")
        if not is_identity[1]:
            value = mb.matmul(x=columns[None], y=value, before_op=before, name=f"{name}_columns")
    else:
        value = mb.const(val=grid, before_op=before, name=f"{name}_grid")
        if not is_identity[0]:
            value = mb.matmul(x=rows[None], y=value, before_op=before, name=f"{name}_rows")
        if not is_identity[1]:
            value = mb.matmul(x=value, y=columns.T[None], before_op=before, name=f"{name}_columns")
    if not table.head.size:
        return mb.reshape(x=value, shape=shape, before_op=before, name=f"{name}_computed")
    lead = shape[:-2]
    tail = mb.reshape(x=value, shape=(*lead, -1, shape[-1]), before_op=before, name=f"{name}_places")
    head = table.head.reshape(*lead, -1, shape[-1])
    return mb.concat(values=[head, tail], axis=len(shape) - 2, before_op=before, name=f"{name}_computed")
