"""Nested blocks as straight code: what a loop computes round by round, as long as its condition is known.

A value is known where it depends on no input: counters, and what is computed of them. The same walk is made
without a maker, to count the rounds, and with one, to write the ops down.
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
"""Most elements of a value that is computed beforehand: indices and shapes have fewer, and weights are left as
they are."""


class Inliner:
    """One walk through nested blocks; with a maker, the ops are written down on the way."""

    def __init__(self, maker: Maker | None, most_rounds: int, most_ops: int) -> None:
        self.maker, self.most_rounds, self.left = maker, most_rounds, most_ops
        self.known: dict[Var, Any] = {}
        self.made: dict[Var, Var | None] = {}
        self.rows: dict[Var, Rows] = {}
        """Buffers that are written row by row, not put together yet."""
        self.row_maker = RowMaker(maker)
        self.varying: set[Var] = set()
        """What changes from round to round."""
        self.most_ops = most_ops

    def value(self, var: Var | Rows) -> Any:
        """What is known of a value; None where it depends on an input."""
        if isinstance(var, Rows):
            return None
        stored = constant(var)
        return self.known.get(var) if stored is None else stored

    def control(self, op: Operation) -> list[Var | Rows]:
        """A `cond` or `while_loop` as straight code: the values that stand for its outputs.

        Raises:
            Refused: the number of rounds is not known or too large, or the branches cannot both run.
        """
        if op.op_type == "cond":
            return self.branches(op)
        condition, body = op.blocks
        values: list[Var | Rows] = list(op.loop_vars)
        self.find_varying(body, condition)
        for round_ in range(self.most_rounds + 1):
            (go_on,) = self.block(condition, values)
            if (going := self.value(go_on)) is None:
                raise Refused(f"whether round {round_ + 1} runs depends on %{self.whole(go_on).name}")
            if not np.all(going):
                return values
            values = self.block(body, values)
        raise Refused(f"the loop runs more than {self.most_rounds} rounds")

    def branches(self, op: Operation) -> list[Var | Rows]:
        """The branch that runs; where that is dynamic, both, and the outputs of one are selected."""
        condition = self.value(op.pred)
        if condition is not None:
            return self.block(op.blocks[0 if np.all(condition) else 1], [])
        yes, no = ([self.whole(v) for v in self.block(block, [])] for block in op.blocks)
        for v in (v for pair in zip(yes, no, strict=True) for v in pair):
            if not types.is_tensor(v.sym_type) and not types.is_scalar(v.sym_type):
                raise Refused(f"%{v.name} is a list, which cannot be selected by the dynamic %{op.pred.name}")
            if static_shape(v) is None:
                raise Refused(f"%{v.name} of a branch has the symbolic shape {tuple(v.shape)}")
        results = list[Var | Rows]()
        for old, a, b in zip(op.outputs, yes, no, strict=True):
            if self.maker is None:
                results.append(old)
            else:
                cond = self.read(op.pred)
                results.append(self.maker.select(cond=cond, a=self.read(a), b=self.read(b)))
        return results

    def block(self, block: Block, arguments: Sequence[Var | Rows]) -> list[Var | Rows]:
        """The outputs of a block, given its inputs."""
        numbers = [self.value(v) for v in arguments]
        values = [v if isinstance(v, Rows) else self.rows.get(v) or self.made.get(v, v) for v in arguments]
        for var, value, new in zip(block.inputs, numbers, values, strict=True):
            self.stands_for(var, new)
            if value is not None:
                self.known[var] = value
        for op in block.operations:
            if op.op_type != "const":
                self.op(op)
        return [self.carried(v) for v in block.outputs]

    def stands_for(self, var: Var, new: Var | Rows | None) -> None:
        """Forget what stood for a value, and note what does now."""
        self.known.pop(var, None)
        self.rows.pop(var, None)
        self.made.pop(var, None)
        if isinstance(new, Rows):
            self.rows[var] = new
        else:
            self.made[var] = new

    def carried(self, var: Var) -> Var | Rows:
        """A value that leaves a block: as it was made, so that another round does not change it."""
        if constant(var) is not None:
            return var
        if var in self.rows:
            return self.rows[var]
        if (new := self.made.get(var)) is not None and new is not var:
            if var in self.known:
                self.known[new] = self.known[var]
            return new
        return var if self.maker is None or var not in self.known else self.stored(var)

    def whole(self, var: Var | Rows) -> Var:
        """A value that was written row by row, put together."""
        return self.row_maker.join(var) if isinstance(var, Rows) else var

    def stored(self, var: Var) -> Var:
        """A known value as a constant."""
        assert self.maker is not None
        value = np.asarray(self.known[var], np_dtype(var))
        return self.maker.const(val=value if value.ndim else value[()])

    def op(self, op: Operation) -> None:
        """One op: computed now, or written down."""
        if op.op_type in RANDOM or op.op_type == "coreml_update_state":
            raise Refused(f"{op.name} ({op.op_type}) does more than compute its results")
        first = op.outputs[0] if op.outputs else None
        if not self.varying.intersection(reads(op)) and (first in self.made or first in self.rows):
            return  # the same in every round
        if not op.blocks and (self.compute(op) or self.rowwise(op)):
            return
        self.left -= 1
        if self.left < 0:
            raise Refused(f"more than {self.most_ops} ops would be written")
        if op.op_type in CONTROL:
            news: Sequence[Var | Rows] = self.control(op)
        elif self.maker is None:
            news = op.outputs
        else:
            inputs = {k: self.argument(v) for k, v in op_inputs(op).items()}
            built = getattr(self.maker, op.op_type)(name=op.name, **inputs)
            news = built if isinstance(built, (list, tuple)) else [built]
        for old, new in zip(op.outputs, news, strict=True):
            self.stands_for(old, new)
            if (value := self.value(new)) is not None:
                self.known[old] = value

    def rowwise(self, op: Operation) -> bool:
        """An op that writes, reads or casts rows of a buffer at a known place, without an op of its own."""
        if op.op_type == "scatter" and writes_rows(op):
            return self.write_row(op)
        if op.op_type == "cast":
            return self.cast(op)
        rows = self.rows.get(op.x) if op.op_type == "gather" and reads_a_row(op) else None
        at = None if rows is None else place_of(self.value(op.indices), rows.length)
        if rows is None or at is None:
            return False
        (out,) = op.outputs
        if (row := self.row_maker.row(rows, at, out.rank)) is not None:
            self.stands_for(out, row)
        elif isinstance(rows.base, np.ndarray):
            self.stands_for(out, None)
            self.known[out] = rows.base[at].reshape(static_shape(out) or ())
        return row is not None or isinstance(rows.base, np.ndarray)

    def write_row(self, op: Operation) -> bool:
        """A scatter to one row."""
        (out,) = op.outputs
        at = place_of(self.value(op.indices), int(out.shape[0]))
        if at is None or op.updates.rank < out.rank - 1:
            return False
        rows, numbers = self.rows.get(op.data), self.value(op.data)
        if rows is None:
            base = op.data if self.maker is None else self.read(op.data)
            rows = Rows(out, base if numbers is None else np.asarray(numbers), {})
        updates = op.updates if self.maker is None else self.read(op.updates)
        if not isinstance(updates, Var) or not replaces(op, rows, at):
            return False
        self.stands_for(out, Rows(out, rows.base, {**rows.written, at: updates}))
        return True

    def cast(self, op: Operation) -> bool:
        """A cast of rows, or one that undoes a cast that lost nothing."""
        (out,), rows = op.outputs, self.rows.get(op.x)
        if rows is not None:
            self.stands_for(out, self.row_maker.cast_rows(rows, out))
            return True
        if self.maker is None or types.is_list(op.x.sym_type):
            return False
        self.stands_for(out, self.row_maker.cast(self.read(op.x), dtype_name(out), op.name))
        return True

    def compute(self, op: Operation) -> bool:
        """Compute an op of known operands; was it?"""
        needed = reads(op)
        if op.op_type in LISTS or is_constexpr(op) or any(self.value(v) is None for v in needed):
            return False
        if any(np.prod(static_shape(v) or (1,)) > LARGEST or static_shape(v) is None for v in op.outputs):
            return False
        for var, value in zip(op.outputs, self.results(op, needed), strict=True):
            self.known[var] = value
            self.made.pop(var, None)
        return True

    def results(self, op: Operation, needed: Sequence[Var]) -> list[Array]:
        """What an op gives, in the arithmetic of the program."""
        import torch

        from anesurgery.interpret.core import evaluate

        bound = {v: torch.as_tensor(np.array(self.known[v])) for v in needed if v in self.known}
        try:
            tensors = evaluate([op], bound, op.outputs, precision="fp16")
        except InterpretError as error:
            raise Refused(f"{op.name} was not computed: {str(error).splitlines()[0]}") from error
        return [np.asarray(t.numpy()).astype(np_dtype(v)) for t, v in zip(tensors, op.outputs, strict=True)]

    def argument(self, operand: Any) -> Any:
        """An operand of a new op."""
        if isinstance(operand, (list, tuple)):
            return tuple(self.read(v) for v in operand)
        return self.read(operand)

    def read(self, var: Var | Rows) -> Any:
        """What stands for a value in the new ops; constants of a block move out of it."""
        assert self.maker is not None
        if isinstance(var, Rows) or var in self.rows:
            return self.whole(var if isinstance(var, Rows) else self.rows[var])
        if (new := self.made.get(var)) is not None:
            var = new
        if var in self.known and constant(var) is None:
            return self.stored(var)
        value = constant(var)
        if value is None:
            return var
        if isinstance(value, np.ndarray) and value.ndim and not self.visible(var):
            return self.maker.shared((var,), lambda: value, var.name)
        return var if self.visible(var) else value

    def visible(self, var: Var) -> bool:
        """Is a constant in a block around the new ops?"""
        assert self.maker is not None
        assert var.op is not None
        block: Block | None = self.maker.block
        while block is not None and block is not var.op.enclosing_block:
            block = block.outer_op.enclosing_block if block.outer_op is not None else None
        return block is not None

    def find_varying(self, *blocks: Block) -> None:
        """Note what depends on the inputs of blocks, or on nested ones."""
        for block in blocks:
            self.varying.update(block.inputs)
            for op in block.operations:
                if op.blocks or self.varying.intersection(reads(op)):
                    self.varying.update(op.outputs)
                self.find_varying(*op.blocks)


# A tensor whose rows are written one by one at known places: what stands in each row, until it is joined.
#
# A loop that collects its results by `scatter` reads and writes such a buffer in every round. In straight code
# each row is a value of its own; one concatenation at the end makes the tensor.

WIDER = {("fp16", "fp32"), ("int16", "int32"), ("uint16", "int32")}
"""Casts that lose nothing: the cast back gives what was there."""


@dataclass(frozen=True, eq=False)
class Rows:
    """A tensor, and what was written to some of its rows since.

    Attributes:
        like: a value of its type and shape.
        base: the tensor before; an array where it is known.
        written: number of the row -> a tensor of one row.
    """

    like: Var
    base: Var | Array
    written: Mapping[int, Var]

    @property
    def length(self) -> int:
        """How many rows there are."""
        return int(self.like.shape[0])


def place_of(indices: Any, length: int) -> int | None:
    """The row that known indices name; None where they name several, or none of the tensor."""
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
    """Is a row afterwards what a scatter writes, by its mode or since it adds to zeros?"""
    mode, base = str(constant(op.mode)), rows.base
    zeros = at not in rows.written and isinstance(base, np.ndarray) and not np.any(base[at])
    return mode == "update" or (mode == "add" and zeros)


def reads_a_row(op: Operation) -> bool:
    """Does a gather read along the first axis?"""
    axis, batch = constant(op.axis), op.inputs.get("batch_dims")
    return axis is not None and int(axis) in (0, -op.x.rank) and (batch is None or not constant(batch))


class RowMaker:
    """Makes the ops that rows need; each cast once. Without a maker, it only counts with placeholders."""

    def __init__(self, maker: Maker | None) -> None:
        self.maker = maker
        self.casts: dict[tuple[Var, str], Var] = {}
        self.sources: dict[Var, Var] = {}
        """A cast that lost nothing -> what it was made of."""
        self.joined: dict[Rows, Var] = {}

    def cast(self, value: Var, dtype: str, name: str | None = None) -> Var:
        """A value in another type; a cast back is the value itself."""
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
        """Every row in the type of another value."""
        dtype, base = dtype_name(like), rows.base
        new = base.astype(np_dtype(like)) if isinstance(base, np.ndarray) else self.cast(base, dtype)
        return Rows(like, new, {at: self.cast(v, dtype) for at, v in rows.written.items()})

    def row(self, rows: Rows, at: int, rank: int) -> Var | None:
        """One row, with a first axis of length 1 or without it; None where it is one of the base."""
        held = rows.written.get(at)
        if held is None or self.maker is None or held.rank == rank:
            return held
        change = self.maker.expand_dims if held.rank < rank else self.maker.squeeze
        return change(x=held, axes=[0])

    def join(self, rows: Rows) -> Var:
        """The tensor; where casts made its rows that lost nothing, it is joined before one cast."""
        if self.maker is None:
            return rows.like
        if rows not in self.joined:
            whole = self.concat(self.before_cast(rows) or rows)
            self.joined[rows] = self.cast(whole, dtype_name(rows.like))
        return self.joined[rows]

    def before_cast(self, rows: Rows) -> Rows | None:
        """The rows that casts were made of; None where one was not made so, or the base would be rounded."""
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
        """The rows of the base and those that were written, in order."""
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
        """Some rows of the base; of an array, computed now."""
        assert self.maker is not None
        part: Var
        if isinstance(base, np.ndarray):
            part = self.maker.const(val=base[first : first + count])
        else:
            rest = base.rank - 1
            part = self.maker.slice_by_size(x=base, begin=[first] + [0] * rest, size=[count] + [-1] * rest)
        return part
