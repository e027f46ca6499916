"""Look cosines and sines of run-time positions up in a table, and swap halves of heads by a product.

A cosine or sine that is computed from one integer position becomes a row of a table. The table has `positions`
rows, computed in fp32 when the pass runs. `form` says how a row is read. "one_hot" multiplies with the one-hot
row of the position. "gather" is a lookup. "inputs" lets the caller pass the rows; the table is saved beside the
package. "constants" takes the positions to be 0, 1, 2 and so on, and stores the rows. If the tables are already
constants, as in decoders that read all tokens at once, "inputs" turns them into inputs `cos` and `sin`. Parts
of the last axis that rotary positions reorder, with signs, become a product with a matrix of ones, up to
`widest` numbers.

Refuses when the number of positions is unknown, when rows are computed from several positions, when shapes are
dynamic, when there are more positions than one product holds, and, for "inputs" and "constants", when the
positions are computed, or read elsewhere.

Why it helps: sines and cosines are not on the engine before A17 and M3 (tables of the compiler, reported);
rotary positions belong in constants or inputs (Apple, for Core AI); fp16 counts exactly up to 2048 only. Slices
of the last axis that begin within it turned numbers of 4095 or more into infinity on M1 and M2, and their
concat gave wrong elements on M2 (measured, by the compiler and not through Core ML: sbryngelson/ane-guide).
What the products cost was not measured, so recipes use it only on request.

Grade: checked: a table holds what the interpreter computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, OpPattern, Ops, Refusal, Rewrite, Var, mb
from anesurgery.mil import fixed_shape
from anesurgery.regions import one_hot, rotary, views
from anesurgery.semantics.intervals import interval

MOST = 16384
"""Rows of a table that one product reads: the longest axis of the engine up to H15."""


@dataclass(frozen=True)
class RotaryTables(Rewrite):
    """Cosines and sines of positions from tables; exchanged halves by a product."""

    name = "rotary_tables"
    follows = ("fold_constants", "channels_first")
    tolerance = an.Tolerance(1e-3)
    """A table in fp16 is rounded; in fp32 the cosine of a large angle is as exact as the angle."""
    tolerates_nonfinite = False
    """The zeros of an exchange make NaN of an infinity."""
    shares_inner = True
    positions: int = an.option(0, least=0, most=MOST)
    """How many there are: positions are below it; 0 for what intervals show."""
    form: str = an.option("one_hot", among=("one_hot", "gather", "inputs", "constants"))
    """Either "one_hot", "gather", "inputs", or "constants"."""
    widest: int = 256
    """Longest axis whose parts are exchanged by a product; 0 for none."""

    def pattern(self, op: Ops) -> OpPattern:
        """Look for cosines, sines and concats, and for products that may read a table."""
        return op.any("cos", "sin", "concat", *(("mul",) if self.form == "inputs" else ()))()

    def check(self, m: Match) -> Match | Refusal:
        """Match rows of positions, or parts that are exchanged."""
        if m.root.op_type == "concat":
            return self.check_exchange(m)
        if m.root.op_type == "mul":
            product = rotary.table_product(m.root)
            return an.NO_MATCH if product is None else m.bind(product=product)
        rows = rotary.of_positions(m.root.outputs[0])
        if not isinstance(rows, rotary.PositionRows):
            return rows
        name = rows.positions.name
        if not (count := self.count(rows.positions)):
            return Refusal(f"how many positions %{name} may hold is not known: say positions=", m.root)
        if self.form in ("inputs", "constants"):
            inputs = m.block.inputs if isinstance(m.block, an.Function) else {}
            if inputs.get(name) is not rows.positions:
                return Refusal(f"the positions %{name} are computed, not an input", m.root)
        if self.form == "constants" and fixed_shape(m.root.outputs[0])[rows.axis] > count:
            return Refusal(f"there are more rows than {count} positions", m.root)
        return m.bind(rows=rows, count=count)

    def count(self, positions: Var) -> int:
        """Return how many positions there are: as the caller says, or as intervals show; 0 if unknown."""
        low, high = interval(positions)
        return self.positions or (int(high) + 1 if low >= 0 and high < MOST else 0)

    def check_exchange(self, m: Match) -> Match | Refusal:
        """Match parts of the last axis in another order or with other signs."""
        exchanged = rotary.exchange(m.root)
        if exchanged is None or an.reading.axis_of(m.root) != m.root.outputs[0].rank - 1:
            return an.NO_MATCH
        source, matrix = exchanged
        if len(matrix) > self.widest or np.array_equal(matrix, np.eye(len(matrix))):
            return an.NO_MATCH
        return m.bind(source=source, matrix=matrix)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw positions of the table: in order for "constants", and fixed ones for rows that are an input."""
        if m.root.op_type == "mul":
            is_table = var is not m.product.other and an.static_shape(var) == m.product.table.shape
            return m.product.table if is_table else None
        if m.root.op_type == "concat" or (var is not m.rows.positions and self.form != "inputs"):
            return None
        shape = fixed_shape(m.rows.positions)
        ordered = self.form == "constants"
        draw = np.random.default_rng(0) if self.form == "inputs" else rng
        places = np.arange(np.prod(shape)) if ordered else draw.integers(0, m.count, np.prod(shape))
        if var is m.rows.positions:
            return places.reshape(shape).astype(an.np_dtype(var))
        return m.rows.shaped(self.table(m)[places]).astype(an.np_dtype(var))

    def table(self, m: Match) -> an.Array:
        """Return the rows of all positions in the float type of the program."""
        return m.rows.table(m.count).astype(an.np_dtype(m.root.outputs[0]))

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the product, the rows, or the input."""
        value: Var
        if m.root.op_type == "concat":
            kind = an.np_dtype(m.source).type
            value = mb.matmul(x=m.source, y=m.matrix.T.astype(kind))
        elif m.root.op_type == "mul":
            product = m.product
            value = mb.mul(x=product.other, y=_table_as_input(mb, product.word, product.table, product.axis))
        elif self.form == "inputs":
            value = self.as_input(mb, m)
        elif self.form == "constants":
            self.drop_positions(mb, m)
            rows = m.rows.shaped(self.table(m)[: fixed_shape(m.root.outputs[0])[m.rows.axis]])
            value = mb.identity(x=rows)
        else:
            value = m.rows.placed(mb, self.looked_up(mb, m))
        return value

    def looked_up(self, mb: Builder, m: Match) -> Var:
        """Build the row of the table for each position."""
        ids, table = m.rows.positions, self.table(m)

        def flat(maker: Builder) -> Var:
            whole = ids if an.np_dtype(ids) == np.int32 else maker.cast(x=ids, dtype="int32")
            return views.seen_as(maker, whole, (int(np.prod(fixed_shape(ids))),))

        def one_hot_rows(maker: Builder) -> Var:
            most = MOST + an.fp16.LAST_INTEGER  # so that there is one piece
            ((_, rows),) = one_hot.one_hot_pieces(maker, flat(maker), m.count, table.dtype, most)
            return rows

        if self.form == "gather":
            return mb.gather(x=table, indices=flat(mb), axis=0)
        row = mb.shared_value(("one_hot", ids, m.count, table.dtype.name), [ids], one_hot_rows)
        return mb.matmul(x=row, y=np.pad(table, ((0, int(row.shape[-1]) - len(table)), (0, 0))))

    def as_input(self, mb: Builder, m: Match) -> Var:
        """Declare the rows as an input, and drop the positions where nothing else reads them."""
        rows, words, drops = m.rows, (m.root.op_type, "positions"), m.rows.serve_only(m.root)
        return mb.rows_as_input(self.table(m), rows.positions, m.root.outputs[0], words, drops, rows.shaped)

    def drop_positions(self, mb: Builder, m: Match) -> None:
        """Note which positions are assumed, and drop their input where nothing else reads it."""
        name = m.rows.positions.name
        assumed = f"{name} is taken to be 0, 1, 2 and so on"
        mb.note(assumed)
        if m.rows.serve_only(m.root):

            def without_positions(values: an.Values) -> an.Values:
                return {k: v for k, v in values.items() if k != name}

            change = an.InterfaceChange(f"{assumed}: do not give it", (name,), inputs=without_positions)
            mb.declare(change)
            mb.drop_input(name)


def _table_as_input(mb: Builder, wish: str, table: an.Array, axis: int) -> Var:
    """Declare a constant with a row for each position as an input, and save its rows beside the package.

    Args:
        mb: the builder of the edit; edits with an equal table share the input.
        wish: the wished name of the input.
        table: the constant.
        axis: the axis of its positions.
    """
    name = mb.leave_beside(wish, np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1))
    values = table.astype(mb.input_dtype(table.dtype))
    words = f"give {name}: the rows of <package>.{name}.npy at the positions of the tokens ({values.dtype})"
    change = an.InterfaceChange(words, (name,), inputs=lambda others: {**others, name: values})
    return mb.add_float_input(values.shape, table.dtype, change)


@an.example(mb.TensorSpec((3,), dtype=an.types.int32), (3, 4), opset="iOS17")
def example(places: Var, x: Var) -> Var:
    """Cosines of positions from 0 to 3, and heads whose halves are exchanged."""
    least = mb.maximum(x=mb.minimum(x=places, y=np.int32(3), name="most"), y=np.int32(0), name="position")
    number = mb.expand_dims(x=mb.cast(x=least, dtype="fp32", name="number"), axes=[1], name="row")
    angle = mb.mul(x=number, y=np.array([1, 0.1, 1, 0.1], np.float32), name="angle")
    first = mb.slice_by_index(x=x, begin=[0, 0], end=[3, 2], name="first")
    second = mb.slice_by_index(x=x, begin=[0, 2], end=[3, 4], name="second")
    turned = mb.concat(values=[mb.mul(x=second, y=np.float32(-1), name="minus"), first], axis=1, name="turned")
    return mb.mul(x=turned, y=mb.cos(x=angle, name="cosines"), name="y")
