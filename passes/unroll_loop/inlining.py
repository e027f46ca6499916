"""Inline nested blocks: the rounds of a loop one after another, as long as its condition is known.

A value is known if it depends on no input: a counter, or a value computed from one. The inliner walks the
blocks twice: without a maker, to check that all conditions are known and to count the rounds, and then with a
maker, which builds the ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from anesurgery.errors import InterpretError, Refused
from anesurgery.mil import (
    Array,
    Block,
    Maker,
    Operation,
    Var,
    constant,
    dtype_name,
    is_constexpr,
    np_dtype,
    op_inputs,
    reads,
    static_shape,
    types,
)
from anesurgery.ops import CONTROL, LISTS, RANDOM
from anesurgery.regions.small_builds import joined

LARGEST = 4096
"""The most elements of a value that is computed beforehand: indices and shapes, but not weights."""


class Inliner:
    """One walk through nested blocks; with a maker, it builds the ops on the way.

    Example: in the round with i = 2 of a loop over x[i], `known` has i -> 2, and `made` has the result of
    `gather(x, i)` in the body -> the gather of x at 2 that was built outside.

    A value of the block is in `rows` or in `made`, not in both. One in `known` alone is built as a constant
    when it is read.
    """

    def __init__(self, maker: Maker | None, most_rounds: int, most_ops: int) -> None:
        self.maker, self.most_rounds, self.most_ops = maker, most_rounds, most_ops
        self.ops_left = most_ops
        """How many more ops may be built."""
        self.known: dict[Var, Any] = {}
        """Value of a block -> its number, if it depends on no input."""
        self.made: dict[Var, Var | None] = {}
        """Value of a block -> the value outside that stands for it in this round."""
        self.rows: dict[Var, Rows] = {}
        """Value of a block -> a buffer that is written row by row, not concatenated yet."""
        self.row_maker = RowMaker(maker)
        self.varying: set[Var] = set()
        """The values that change from round to round."""

    def value(self, var: Var | Rows) -> Any:
        """Return the number of a known value; None if it depends on an input."""
        if isinstance(var, Rows):
            return None
        stored = constant(var)
        return self.known.get(var) if stored is None else stored

    def inline_control(self, op: Operation) -> list[Var | Rows]:
        """Inline a `cond` or `while_loop`; return the values that stand for its outputs.

        Raises:
            Refused: the number of rounds is not known or too large, or the branches cannot both run.
        """
        if op.op_type == "cond":
            return self.inline_cond(op)
        condition, body = op.blocks
        values = [self.output_of_block(v) for v in op.loop_vars]  # no round may run, and return them
        self.find_varying(body, condition)
        for round_ in range(self.most_rounds + 1):
            (go_on,) = self.inline_block(condition, values)
            if (runs := self.value(go_on)) is None:
                raise Refused(f"whether round {round_ + 1} runs depends on %{self.as_var(go_on).name}")
            if not np.all(runs):
                return values
            values = self.inline_block(body, values)
        raise Refused(f"the loop runs more than {self.most_rounds} rounds")

    def inline_cond(self, op: Operation) -> list[Var | Rows]:
        """Inline the branch that runs; if that depends on an input, both, and select the outputs of one."""
        condition = self.value(op.pred)
        if condition is not None:
            return self.inline_block(op.blocks[0 if np.all(condition) else 1], [])
        yes, no = ([self.as_var(v) for v in self.inline_block(block, [])] for block in op.blocks)
        for v in (v for pair in zip(yes, no, strict=True) for v in pair):
            if not types.is_tensor(v.sym_type) and not types.is_scalar(v.sym_type):
                raise Refused(f"%{v.name} is a list, which cannot be selected by the dynamic %{op.pred.name}")
            if static_shape(v) is None:
                raise Refused(f"%{v.name} of a branch has the symbolic shape {tuple(v.shape)}")
        if self.maker is None:
            return list(op.outputs)
        pairs = zip(yes, no, strict=True)
        return [self.maker.select(cond=self.read(op.pred), a=self.read(a), b=self.read(b)) for a, b in pairs]

    def inline_block(self, block: Block, arguments: Sequence[Var | Rows]) -> list[Var | Rows]:
        """Inline a block with the given inputs; return its outputs."""
        numbers = [self.value(v) for v in arguments]
        values = [v if isinstance(v, Rows) else self.rows.get(v) or self.made.get(v, v) for v in arguments]
        for var, value, new in zip(block.inputs, numbers, values, strict=True):
            self.bind(var, new)
            if value is not None:
                self.known[var] = value
        for op in block.operations:
            if op.op_type != "const":
                self.inline_op(op)
        return [self.output_of_block(v) for v in block.outputs]

    def bind(self, var: Var, new: Var | Rows | None) -> None:
        """Let a new value stand for a value of a block; what stood for it in the round before is dropped."""
        self.known.pop(var, None)
        self.rows.pop(var, None)
        self.made.pop(var, None)
        if isinstance(new, Rows):
            self.rows[var] = new
        else:
            self.made[var] = new

    def output_of_block(self, var: Var) -> Var | Rows:
        """Return what stands now for an output of a block, or for a start of a loop; a round binds it anew."""
        if constant(var) is not None:
            return var
        if var in self.rows:
            return self.rows[var]
        if (new := self.made.get(var)) is not None and new is not var:
            if var in self.known:
                self.known[new] = self.known[var]
            return new
        return var if self.maker is None or var not in self.known else self.as_constant(var)

    def as_var(self, var: Var | Rows) -> Var:
        """Return a value; rows are concatenated."""
        return self.row_maker.join(var) if isinstance(var, Rows) else var

    def as_constant(self, var: Var) -> Var:
        """Build a constant of a known value."""
        assert self.maker is not None
        value = np.asarray(self.known[var], np_dtype(var))
        return self.maker.const(val=value if value.ndim else value[()])

    def inline_op(self, op: Operation) -> None:
        """Compute an op now if its operands are known, or else build it."""
        if op.op_type in RANDOM or op.op_type == "coreml_update_state":
            raise Refused(f"{op.name} ({op.op_type}) does more than compute its results")
        first = op.outputs[0] if op.outputs else None
        if not self.varying.intersection(reads(op)) and (first in self.made or first in self.rows):
            return  # the same in every round
        if not op.blocks and (self.compute(op) or self.use_rows(op)):
            return
        self.ops_left -= 1
        if self.ops_left < 0:
            raise Refused(f"more than {self.most_ops} ops would be written")
        if op.op_type in CONTROL:
            news: Sequence[Var | Rows] = self.inline_control(op)
        elif self.maker is None:
            news = op.outputs
        else:
            inputs = {k: self.read(v) for k, v in op_inputs(op).items()}
            built = getattr(self.maker, op.op_type)(name=op.name, **inputs)
            news = built if isinstance(built, (list, tuple)) else [built]
        for old, new in zip(op.outputs, news, strict=True):
            self.bind(old, new)
            if (value := self.value(new)) is not None:
                self.known[old] = value

    def use_rows(self, op: Operation) -> bool:
        """Inline an op that writes, reads or casts rows of a buffer at a known index; was it one?"""
        if op.op_type == "scatter" and writes_rows(op):
            return self.write_row(op)
        if op.op_type == "cast":
            return self.inline_cast(op)
        rows = self.rows.get(op.x) if op.op_type == "gather" and reads_a_row(op) else None
        at = None if rows is None else row_index(self.value(op.indices), rows.length)
        if rows is None or at is None:
            return False
        (out,) = op.outputs
        if (row := self.row_maker.row(rows, at, out.rank)) is not None:
            self.bind(out, row)
        elif isinstance(rows.base, np.ndarray):
            self.bind(out, None)
            self.known[out] = rows.base[at].reshape(static_shape(out) or ())
        return row is not None or isinstance(rows.base, np.ndarray)

    def write_row(self, op: Operation) -> bool:
        """Inline a scatter to one row at a known index; was it one?"""
        (out,) = op.outputs
        at = row_index(self.value(op.indices), int(out.shape[0]))
        if at is None or op.updates.rank < out.rank - 1:
            return False
        rows, numbers = self.rows.get(op.data), self.value(op.data)
        if rows is None:
            base = op.data if self.maker is None else self.read(op.data)
            rows = Rows(out, base if numbers is None else np.asarray(numbers), {})
        updates = op.updates if self.maker is None else self.read(op.updates)
        if not isinstance(updates, Var) or not replaces(op, rows, at):
            return False
        self.bind(out, Rows(out, rows.base, {**rows.written, at: updates}))
        return True

    def inline_cast(self, op: Operation) -> bool:
        """Inline a cast: of each row, or left out if it undoes a cast that lost nothing; was it inlined?"""
        (out,), rows = op.outputs, self.rows.get(op.x)
        if rows is not None:
            self.bind(out, self.row_maker.cast_rows(rows, out))
            return True
        if self.maker is None or types.is_list(op.x.sym_type):
            return False
        self.bind(out, self.row_maker.cast(self.read(op.x), dtype_name(out), op.name))
        return True

    def compute(self, op: Operation) -> bool:
        """Compute an op whose operands are known; was it computed?"""
        needed = reads(op)
        if op.op_type in LISTS or is_constexpr(op) or any(self.value(v) is None for v in needed):
            return False
        if any(np.prod(static_shape(v) or (1,)) > LARGEST or static_shape(v) is None for v in op.outputs):
            return False
        for var, value in zip(op.outputs, self.results(op, needed), strict=True):
            self.known[var] = value
            self.made.pop(var, None)
            self.rows.pop(var, None)
        return True

    def results(self, op: Operation, needed: Sequence[Var]) -> list[Array]:
        """Return the results of an op, computed in the arithmetic of the program."""
        import torch

        from anesurgery.interpret.core import evaluate

        bound = {v: torch.as_tensor(np.array(self.known[v])) for v in needed if v in self.known}
        try:
            tensors = evaluate([op], bound, op.outputs, precision="fp16")
        except InterpretError as error:
            raise Refused(f"{op.name} was not computed: {str(error).splitlines()[0]}") from error
        return [np.asarray(t.numpy()).astype(np_dtype(v)) for t, v in zip(tensors, op.outputs, strict=True)]

    def read(self, var: Var | Rows | Sequence[Var]) -> Any:
        """Return what stands for a value, or for several, in the new ops; constants leave their block."""
        assert self.maker is not None
        if isinstance(var, (list, tuple)):
            return tuple(self.read(v) for v in var)
        assert isinstance(var, (Var, Rows))
        if isinstance(var, Rows) or var in self.rows:
            return self.as_var(var if isinstance(var, Rows) else self.rows[var])
        if (new := self.made.get(var)) is not None:
            var = new
        if var in self.known and constant(var) is None:
            return self.as_constant(var)
        value = constant(var)
        if value is None:
            return var
        if isinstance(value, np.ndarray) and value.ndim and not self.is_in_scope(var):
            return self.maker.shared((var,), lambda: value, var.name)
        return var if self.is_in_scope(var) else value

    def is_in_scope(self, var: Var) -> bool:
        """Can the new ops read a constant where it stands?"""
        assert self.maker is not None
        assert var.op is not None
        block: Block | None = self.maker.block
        while block is not None and block is not var.op.enclosing_block:
            block = block.outer_op.enclosing_block if block.outer_op is not None else None
        return block is not None

    def find_varying(self, *blocks: Block) -> None:
        """Add the values that depend on inputs of the blocks, or on nested blocks, to `varying`."""
        for block in blocks:
            self.varying.update(block.inputs)
            for op in block.operations:
                if op.blocks or self.varying.intersection(reads(op)):
                    self.varying.update(op.outputs)
                self.find_varying(*op.blocks)


# Buffers whose rows are written one by one at known indices.
#
# A loop that collects its results by `scatter` reads and writes such a buffer in every round. Inlined, each row
# is a value of its own, and one concatenation at the end makes the tensor.

WIDER = {("fp16", "fp32"), ("int16", "int32"), ("uint16", "int32")}
"""Casts that lose nothing: the cast back gives what was there."""


@dataclass(frozen=True, eq=False)
class Rows:
    """A tensor, and the values that were written to some of its rows."""

    like: Var
    """A value of its type and shape."""
    base: Var | Array
    """The tensor before the writes; an array if it is known."""
    written: Mapping[int, Var]
    """Index of a row -> its value, a tensor of one row."""

    @property
    def length(self) -> int:
        """The number of rows."""
        return int(self.like.shape[0])


def row_index(indices: Any, length: int) -> int | None:
    """Return the one row that known indices name; None if they name several, or none of the tensor."""
    if indices is None or np.size(indices) != 1 or np.ndim(indices) > 1:
        return None
    at = int(np.ravel(indices)[0])
    at += length if at < 0 else 0
    return at if 0 <= at < length else None


def writes_rows(op: Operation) -> bool:
    """Does a scatter write along the first axis of a tensor of static shape?"""
    axis, shape = constant(op.axis), static_shape(op.data)
    return bool(shape) and axis is not None and int(axis) in (0, -len(shape or ()))


def replaces(op: Operation, rows: Rows, at: int) -> bool:
    """Does a scatter replace a row: by its mode, or because it adds to zeros?"""
    mode, base = str(constant(op.mode)), rows.base
    zeros = at not in rows.written and isinstance(base, np.ndarray) and not np.any(base[at])
    return mode == "update" or (mode == "add" and zeros)


def reads_a_row(op: Operation) -> bool:
    """Does a gather read along the first axis?"""
    axis, batch = constant(op.axis), op.inputs.get("batch_dims")
    return axis is not None and int(axis) in (0, -op.x.rank) and (batch is None or not constant(batch))


class RowMaker:
    """Builds the ops for rows, each cast once; without a maker it returns placeholders."""

    def __init__(self, maker: Maker | None) -> None:
        self.maker = maker
        self.casts: dict[tuple[Var, str], Var] = {}
        self.sources: dict[Var, Var] = {}
        """Result of a cast that lost nothing -> its operand."""
        self.joined: dict[Rows, Var] = {}

    def cast(self, value: Var, dtype: str, name: str | None = None) -> Var:
        """Cast a value to another type; casting back returns the value itself."""
        source = self.sources.get(value)
        if source is not None and dtype_name(source) == dtype:
            return source
        if self.maker is None or dtype_name(value) == dtype:
            return value
        if (value, dtype) not in self.casts:
            result: Var = self.maker.cast(x=value, dtype=dtype, **({"name": name} if name else {}))
            self.casts[value, dtype] = result
            if (dtype_name(value), dtype) in WIDER:
                self.sources[result] = value
        return self.casts[value, dtype]

    def cast_rows(self, rows: Rows, like: Var) -> Rows:
        """Cast every row to the type of another value."""
        dtype, base = dtype_name(like), rows.base
        new = base.astype(np_dtype(like)) if isinstance(base, np.ndarray) else self.cast(base, dtype)
        return Rows(like, new, {at: self.cast(v, dtype) for at, v in rows.written.items()})

    def row(self, rows: Rows, at: int, rank: int) -> Var | None:
        """Return a written row, with a first axis of length 1 or without it; None if it was not written."""
        value = rows.written.get(at)
        if value is None or self.maker is None or value.rank == rank:
            return value
        change_rank = self.maker.expand_dims if value.rank < rank else self.maker.squeeze
        return change_rank(x=value, axes=[0])

    def join(self, rows: Rows) -> Var:
        """Concatenate rows to their tensor; rows that were cast without loss are joined before one cast."""
        if self.maker is None:
            return rows.like
        if rows not in self.joined:
            whole = self.concat(self.before_cast(rows) or rows)
            self.joined[rows] = self.cast(whole, dtype_name(rows.like))
        return self.joined[rows]

    def before_cast(self, rows: Rows) -> Rows | None:
        """Return the rows before their casts; None if one was not cast, or the base would be rounded."""
        sources = {at: self.sources.get(v) for at, v in rows.written.items()}
        cast_from = {at: v for at, v in sources.items() if v is not None}
        like = next(iter(cast_from.values()), None)
        if like is None or len(cast_from) < len(sources) or len({v.dtype for v in cast_from.values()}) > 1:
            return None
        base = rows.base
        if isinstance(base, np.ndarray):
            narrow = base.astype(np_dtype(like))
            return Rows(rows.like, narrow, cast_from) if np.array_equal(narrow, base) else None
        source = self.sources.get(base)
        same = source is not None and source.dtype == like.dtype
        return Rows(rows.like, source, cast_from) if same and source is not None else None

    def concat(self, rows: Rows) -> Var:
        """Concatenate the rows of the base and the written ones, in order."""
        assert self.maker is not None
        rank, parts = rows.like.rank, list[Var]()
        for old, run in groupby(range(rows.length), lambda at: at not in rows.written):
            places = list(run)
            if old:
                parts.append(self.piece(rows.base, places[0], len(places)))
            else:
                parts += [v for at in places if (v := self.row(rows, at, rank)) is not None]
        return joined(self.maker, parts, 0)

    def piece(self, base: Var | Array, first: int, count: int) -> Var:
        """Return some rows of the base: a slice, or a constant if the base is an array."""
        assert self.maker is not None
        part: Var
        if isinstance(base, np.ndarray):
            part = self.maker.const(val=base[first : first + count])
        else:
            rest = base.rank - 1
            part = self.maker.slice_by_size(x=base, begin=[first] + [0] * rest, size=[count] + [-1] * rest)
        return part
