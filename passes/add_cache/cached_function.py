"""Edit a decoder so that it reads a few tokens at a position, with the keys and values of earlier ones cached.

The edit is in place: every op stays, with its name and its weights. Values shrink from all tokens to those of
one call. The operands that need all tokens (keys, values, inputs of causal convolutions) come from the cache,
and rows of tables are sliced at the position.

A store is one tensor of the cache: a state, or an input that comes back as an output. It holds the kept values
of one shape, stacked along its first axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from anesurgery import mil
from anesurgery.errors import Refusal, UnknownName
from anesurgery.facts import windows
from anesurgery.facts.masks import evaluate_static
from anesurgery.facts.token_axes import NEW, SEEN, WEIGHTS, Tokens, follow, lengthened
from anesurgery.files.copying import copy_program
from anesurgery.frontend.length_choices import advice_for_limit, limit_passed
from anesurgery.mil import Function, Operation, Program, Var, dtype_name, operands, types
from anesurgery.passes.add_cache import caches, frequencies
from anesurgery.passes.add_cache.caches import Kept, Ring, Tables
from anesurgery.passes.add_cache.token_inputs import fixed_value
from anesurgery.placement.rules.shapes import MOST_STATES, two_states_may_fail
from anesurgery.placement.target import Target
from anesurgery.regions import rotary
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.driver import remove_dead
from anesurgery.rewriting.session import Session


class StoreShape(NamedTuple):
    """What kept values have in common that are stacked in one store."""

    chunk: int
    """The chunk that makes them, if the model will be cut."""
    heads: int
    width: int
    dtype: str
    rows: int
    """The slots for tokens, those of a ring included."""


MASKS_NOTE = (
    "add_cache: sliding windows are masks over the whole context: rings would take one more state than the "
    'target is known to run; windows="ring" takes it'
)

OTHER_LENGTHS = (
    "shorter texts may have to get others: convert the model with no more tokens than it was trained with "
    "(original_max_position_embeddings), or say fixed_rope=True where they hold for texts of every length"
)


@dataclass(frozen=True)
class CallSize:
    """The sizes of one function."""

    length: int
    """The number of tokens in a call."""
    context: int
    """The most tokens that it sees, including those of the call."""


@dataclass(frozen=True)
class CacheOptions:
    """The options that all functions which share a cache have in common."""

    tokens: Mapping[str, int]
    """Input that holds the tokens, or a row for each position -> the axis of the tokens."""
    context: int
    """The most tokens that the cache holds."""
    as_state: bool
    """Whether the cache is in states; else it is in inputs and outputs."""
    windows: str | None = None
    """How sliding windows are kept: "ring" or "mask"; None: as the target allows."""
    blended: bool = False
    """Whether new rows are blended in by products with one-hot rows; else they are written as a slice."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Input that becomes a constant -> a number, or an array that fits."""
    fixed_rope: bool = False
    """Whether the caller promised that rotary frequencies hold for texts of every length."""
    chunk_of: Mapping[str, int] = field(default_factory=dict)
    """Name of a value -> the chunk that will make it; each chunk has stores of its own."""


def cached_functions(
    session: Session, program: Program, calls: Mapping[str, CallSize], how: CacheOptions
) -> dict[str, Function] | Refusal:
    """Return a cached copy of the one function of a program for each call size; or why there is none.

    If rings would need more states than the target can run, the copies keep masks instead, and a note says so.
    """
    (name,) = program.functions
    target = None if session.target is None else Target.parse(session.target)
    most = 1 if how.windows is None and target is not None and two_states_may_fail(target) else MOST_STATES
    longest = max(call.length for call in calls.values())
    functions: dict[str, Function] = {}
    attempts = (False,) if how.windows == "mask" else (True, False)
    for in_rings in attempts:
        stores_per_chunk: Counter[int] = Counter()
        for word, call in calls.items():
            functions[word] = copy_program(program).functions[name]
            cached = CachedFunction(
                session=session,
                function=functions[word],
                how=how,
                length=call.length,
                context=call.context,
                longest=longest,
                in_rings=in_rings,
            )
            if (refusal := cached.edit()) is not None:
                return refusal
            stores_per_chunk = Counter(shape.chunk for shape in cached.stores)  # alike in all functions
        if not how.as_state or how.windows == "ring" or max(stores_per_chunk.values(), default=0) <= most:
            break
        session.notes += [MASKS_NOTE] if in_rings else []
    return functions


@dataclass
class CachedFunction:
    """The edit of one function."""

    session: Session
    function: Function
    how: CacheOptions
    length: int
    context: int
    """The most tokens that the function sees, at most those that the cache holds."""
    longest: int
    """The most tokens in a call of any function that shares the cache."""
    in_rings: bool
    """Whether windows are kept in rings."""
    tokens: Tokens = field(init=False)
    """Where the tokens are in each value; `edit` finds it, and the next four."""
    kept: dict[tuple[Operation, str], Kept] = field(init=False)
    """(op, parameter) that reads earlier tokens -> what is kept for it."""
    rings: dict[Operation, Ring | None] = field(init=False)
    """Op with a window -> the ring in which it is kept; None where it is kept as a whole."""
    position: Var = field(init=False)
    """The new input with the number of earlier tokens: (1,), int32."""
    tables: Tables = field(init=False)
    """Slices of tables at the position, each built once."""
    stores: dict[StoreShape, Var] = field(default_factory=dict)
    """Store -> its content after the edits so far."""
    places: dict[Var, int] = field(default_factory=dict)
    """Kept value -> its index along the first axis of its store."""
    store_of: dict[Var, StoreShape] = field(default_factory=dict)
    """Kept value -> its store."""
    operand_of: dict[Kept, Var] = field(default_factory=dict)
    """Kept value -> the operand of a product that reads all tokens."""
    rows: dict[Var, Var] = field(default_factory=dict)
    """Kept value -> the cached rows of all tokens, including those of this call."""
    blends: dict[StoreShape, dict[int, Var]] = field(default_factory=dict)
    """Store -> index -> its rows after the new ones were blended in."""
    content_before: dict[StoreShape, Var] = field(default_factory=dict)
    """Store -> its content before the call, which blending reads once."""

    def edit(self) -> Refusal | None:
        """Edit the function; after a refusal the function is half edited and must be dropped."""
        with self.function:
            self.fix_inputs(self.how.fixed)
            choices = map(chosen_by_length, self.function.operations)
            if (refusal := next((r for r in choices if r is not None), None)) is not None:
                return refusal
            inputs = {self.function.inputs[name]: axis for name, axis in self.how.tokens.items()}
            tokens = follow(self.function, inputs)
            if isinstance(tokens, Refusal):
                return tokens
            if not tokens.looked_at:
                return Refusal("no op looks at tokens before its own: there is nothing to keep")
            self.tokens = tokens
            ops = [op for op in self.function.operations if any(v in tokens.axes for _, v in operands(op))]
            if not self.how.fixed_rope and (refusal := _of_one_length(ops, tokens)) is not None:
                return refusal
            self.kept = {key: caches.kept_for(v, tokens) for key, v in tokens.looked_at.items()}
            self.rings = self.find_rings()
            if (refusal := self.ring_conflict()) is not None:
                return refusal
            for var, axis in inputs.items():
                self.shorten_input(var, axis)
            self.position = self.add_input("position", (1,), types.int32)
            first = self.before(self.function.operations[0])
            self.tables = Tables(first, self.position, self.length, self.context, self.how.context)
            self.add_stores()
            for op in ops:
                if (refusal := self.edit_op(op)) is not None:
                    return refusal
            self.write_blends()
            self.function.set_outputs([*self.function.outputs, *self.cache_outputs()])
        remove_dead(list(self.function.operations))
        return None

    def find_rings(self) -> dict[Operation, Ring | None]:
        """Return the rings of ops in attentions with a window, and of causal convolutions."""
        spans = {op: reach + 1 for op, reach in self.tokens.reaches.items()}
        if self.in_rings:
            seen = {key: kept.value for key, kept in self.kept.items() if key[0] not in spans}
            spans |= caches.windows(self.tokens, seen)
        context, runs_over = self.how.context, not self.how.blended
        return {op: caches.ring(n, self.longest, context, runs_over=runs_over) for op, n in spans.items()}

    def ring_conflict(self) -> Refusal | None:
        """Return a refusal if two readers of one kept value need different rings."""
        ring_of: dict[Var, Ring | None] = {}
        for (op, _), kept in self.kept.items():
            ring = self.rings.get(op)
            if ring_of.setdefault(kept.value, ring) != ring:
                return Refusal(f"%{kept.value.name} is looked at by convolutions and attentions at once", op)
        return None

    def before(self, op: Operation) -> Builder:
        """Return a builder that makes ops right before another."""
        return Builder(self.session, self.function, "add_cache", op)

    def add_input(self, name: str, shape: tuple[int, ...], dtype: Any, state: bool = False) -> Var:
        """Add an input or a state with a fresh name."""
        fresh = self.session.fresh_name(self.function, name)
        return mil.add_input(self.function, fresh, shape, dtype, state=state)

    def fix_inputs(self, fixed: Mapping[str, Any]) -> None:
        """Turn inputs into constants."""
        for name, number in fixed.items():
            if name not in self.function.inputs:
                raise UnknownName("input", name, self.function.inputs)
            old = self.function.inputs[name]
            value = fixed_value(old, number)
            stored = self.before(self.function.operations[0]).const(val=value, name=f"{name}_fixed")
            self.substitute(old, stored)
            mil.remove_input(self.function, name)

    def substitute(self, old: Var, new: Var) -> None:
        """Let all readers of an input read another value."""
        mil.replace_uses(
            self.function,
            anchor_op=old.op,
            old_var=old,
            new_var=new,
            no_check_var_types=True,
            force_replace=True,
        )

    def shorten_input(self, tokens: Var, axis: int) -> None:
        """Shorten an input of all tokens, or of a row for each, to those of one call."""
        shape = [self.length if a == axis else int(d) for a, d in enumerate(tokens.shape)]
        new = mil.add_input(self.function, tokens.name, shape, tokens.dtype)
        self.tokens.axes[new] = self.tokens.axes[tokens]
        self.substitute(tokens, new)
        self.kept = {key: replace(k, value=new) if k.value is tokens else k for key, k in self.kept.items()}

    def add_stores(self) -> None:
        """Add a state or an input for each shape of kept values."""
        count: Counter[StoreShape] = Counter()
        for (product, _), kept in self.kept.items():
            if kept.value not in self.places:
                shape = self.store_of[kept.value] = self.store_shape(product, kept)
                self.places[kept.value] = count[shape]
                count[shape] += 1
        for i, (store, number) in enumerate(count.items()):
            dtype = types.fp16 if store.dtype == "fp16" or self.how.as_state else types.fp32
            sizes = (number, store.heads, store.rows, store.width)
            self.stores[store] = self.add_input(f"cache_{i}", sizes, dtype, self.how.as_state)

    def store_shape(self, product: Operation, kept: Kept) -> StoreShape:
        """Return the store of a kept value, which a product reads."""
        ring, chunk = self.rings.get(product), self.how.chunk_of.get(product.outputs[0].name, 0)
        rows = self.how.context if ring is None else ring.rows
        return StoreShape(chunk, kept.heads, kept.width, dtype_name(kept.value), rows)

    def cache_outputs(self) -> list[Var]:
        """Return the outputs that hand the cache back to the caller; none if it is in states."""
        if self.how.as_state:
            return []
        outputs = []
        for i, var in enumerate(self.stores.values()):
            var.name = self.session.fresh_name(self.function, f"cache_{i}_out")
            outputs.append(var)
        return outputs

    def edit_op(self, op: Operation) -> Refusal | None:
        """Give an op the slices of its tables, and its cached operands; adapt parameters with a length."""
        new: dict[Var, Var] = {}
        self.tables.mb = self.before(op)
        ring = self.rings.get(op)
        seen = self.context if ring is None else ring.size
        for var, axes in self.tokens.tables[op].items():
            cut = self.tables.cut(var, axes, ring)
            if cut is None:
                return Refusal(f"%{var.name} holds something for each token, and cannot be evaluated", op)
            new[var] = cut
        changed = self.replaced_inputs(op, new)
        for (product, name), kept in self.kept.items():
            if product is op and op in self.tokens.reaches:
                changed |= self.convolution_inputs(op, kept)
            elif product is op:
                changed[name] = self.cached_operand(op, kept, seen)
        axes = self.tokens.axes[op.outputs[0]]
        length = {NEW: self.length, SEEN: seen, WEIGHTS: seen}
        for name, value in lengthened(op, axes, length).items():
            array = np.array(value, bool if name.endswith("mask") else np.int32)
            changed[name] = self.before(op).const(val=array, name=f"{op.name}_{name}")
        if (axis := self.tokens.first.get(op)) is not None:
            changed |= self.first_slice_inputs(op, axis, length[axes[axis]])
        op.set_inputs(no_check_var_types=True, **changed)
        op.type_value_inference(overwrite_output=True)
        return None

    def convolution_inputs(self, op: Operation, kept: Kept) -> dict[str, Any]:
        """Return the inputs of a causal convolution that reads cached tokens in place of padding."""
        mb, ring, reach = self.before(op), self.rings.get(op), self.tokens.reaches[op]
        rows = self.updated_rows(mb, kept, ring)
        last = self.tables.last(ring, reach, dtype_name(rows))
        seen = mb.matmul(x=last, y=rows, name=f"{kept.value.name}_last")
        length = reach + self.length
        value = caches.from_rows(mb, kept, seen, length)
        x = caches.through(mb, kept.path, value, self.tokens, length)
        pads = windows.without_pads(op, self.tokens.new_axis(op.outputs[0]))
        return {"x": x, **{n: mb.const(val=value, name=f"{op.name}_{n}") for n, value in pads.items()}}

    def first_slice_inputs(self, op: Operation, axis: int, length: int) -> dict[str, Any]:
        """Return the inputs of a slice that takes the first `length` elements of an axis."""
        if op.op_type == "slice_by_size":
            return {}
        mb, x = self.before(op), op.x
        mask = np.array([True] * x.rank)
        mask[axis] = False
        stop = [length if a == axis else int(d) for a, d in enumerate(x.shape)]
        parts = {"begin": np.zeros(x.rank, np.int32), "end": np.array(stop, np.int32)}
        parts |= {"begin_mask": mask, "end_mask": mask}
        return {n: mb.const(val=value, name=f"{op.name}_{n}") for n, value in parts.items()}

    def replaced_inputs(self, op: Operation, new: Mapping[Var, Var]) -> dict[str, Any]:
        """Return the inputs of an op that read replaced values, with the new ones."""
        operands: dict[str, Any] = {}
        for name, value in op.inputs.items():
            if isinstance(value, (list, tuple)) and any(v in new for v in value):
                operands[name] = tuple(new.get(v, v) for v in value)
            elif isinstance(value, Var) and value in new:
                operands[name] = new[value]
        return operands

    def cached_operand(self, product: Operation, kept: Kept, seen: int) -> Var:
        """Return the operand of a product with the cached tokens; it is built once for a kept value."""
        if kept not in self.operand_of:
            mb = self.before(product)
            rows = self.updated_rows(mb, kept, self.rings.get(product))
            value = caches.from_rows(mb, kept, rows, seen)
            self.operand_of[kept] = caches.through(mb, kept.path, value, self.tokens, seen)
        return self.operand_of[kept]

    def updated_rows(self, mb: Builder, kept: Kept, ring: Ring | None) -> Var:
        """Return the cached rows of all tokens after this call's were written; the write is built once."""
        if kept.value not in self.rows:
            self.rows[kept.value] = self.write(mb, kept, ring)
        return self.rows[kept.value]

    def write(self, mb: Builder, kept: Kept, ring: Ring | None) -> Var:
        """Write the rows of this call into the store, and read the rows of all tokens."""
        shape, at, name = self.store_of[kept.value], self.places[kept.value], kept.value.name
        rows = caches.as_rows(mb, kept, self.length)  # 1 x heads x tokens x width; `at` is the place of the 1
        narrowed = self.how.as_state and dtype_name(kept.value) != "fp16"
        rows = mb.cast(x=rows, dtype="fp16", name=f"{name}_fp16") if narrowed else rows
        if self.how.blended:
            value = self.blend(mb, kept, rows, ring)
            return mb.cast(x=value, dtype="fp32", name=f"{name}_fp32") if narrowed else value
        begin = caches.index_vector(mb, [at, 0], self.tables.slot(ring), [0], name=f"{name}_begin")
        size = np.array([1, kept.heads, self.length, kept.width], np.int32)
        end = mb.add(x=begin, y=size, name=f"{name}_end")
        store = self.stores[shape]
        content = mb.read_state(input=store, name=f"{name}_before") if self.how.as_state else store
        value = self.update_store(mb, shape, name, x=content, update=rows, begin=begin, end=end)

        def part(first: int, last: int, word: str) -> Var:
            ends = {"begin": [at, 0, first, 0], "end": [at + 1, kept.heads, last, kept.width]}
            return mb.slice_by_index(x=value, **ends, name=f"{name}_{word}")

        if ring is not None and self.length > 1:
            over, first = part(ring.size, ring.size + self.length, "over"), part(0, self.length, "first")
            first = mb.select(cond=self.tables.ran_over(ring), a=over, b=first, name=f"{name}_around")
            ends = {"begin": [at, 0, 0, 0], "end": [at + 1, kept.heads, self.length, kept.width]}
            value = self.update_store(mb, shape, f"{name}_around", x=value, update=first, **ends)
        all_rows = part(0, self.context if ring is None else ring.size, "kept")
        return mb.cast(x=all_rows, dtype="fp32", name=f"{name}_fp32") if narrowed else all_rows

    def blend(self, mb: Builder, kept: Kept, rows: Var, ring: Ring | None) -> Var:
        """Return the rows of all tokens: this call's in their slots, the others as the store holds them.

        Each number is a sum with one non-zero term, and so exact.
        """
        shape, at, name = self.store_of[kept.value], self.places[kept.value], kept.value.name
        if shape not in self.content_before:
            self.content_before[shape] = store = self.stores[shape]
            if self.how.as_state:
                self.content_before[shape] = mb.read_state(input=store, name=f"{store.name}_before")
        slots = self.context if ring is None else shape.rows
        ends = {"begin": [at, 0, 0, 0], "end": [at + 1, kept.heads, slots, kept.width]}
        old = mb.slice_by_index(x=self.content_before[shape], **ends, name=f"{name}_before")
        stays, places = self.tables.blend(ring, dtype_name(rows))
        product = mb.mul if self.length == 1 else mb.matmul
        new = product(x=places, y=rows, name=f"{name}_placed")
        blended: Var = mb.add(x=mb.mul(x=old, y=stays, name=f"{name}_stays"), y=new, name=f"{name}_kept")
        self.blends.setdefault(shape, {})[at] = blended
        return blended

    def write_blends(self) -> None:
        """Write each store once, at the end; a state by an update of all of it, which stays on the ANE."""
        mb = self.before(self.function.operations[-1])
        for shape, by_place in self.blends.items():
            parts, store = tuple(by_place[at] for at in sorted(by_place)), self.stores[shape]
            value = mb.concat(values=parts, axis=0, name=f"{store.name}_after") if len(parts) > 1 else parts[0]
            if self.how.as_state:
                ends = {"begin": [0] * value.rank, "end": [int(d) for d in value.shape]}
                self.update_store(mb, shape, store.name, x=self.content_before[shape], update=value, **ends)
            elif value.shape[2] < shape.rows:  # functions of larger contexts use the rest of the store
                begin = [0, 0, int(value.shape[2]), 0]
                rest = mb.slice_by_size(x=self.content_before[shape], begin=begin, size=[-1] * value.rank)
                self.stores[shape] = mb.concat(values=(value, rest), axis=2, name=f"{store.name}_all")
            else:
                self.stores[shape] = value

    def update_store(self, mb: Builder, shape: StoreShape, name: str, **written: Any) -> Var:
        """Write a slice of a store; return its content afterwards."""
        value: Var = mb.slice_update(**written, name=f"{name}_update")
        if self.how.as_state:
            value = mb.coreml_update_state(state=self.stores[shape], value=value, name=f"{name}_after")
        else:
            self.stores[shape] = value
        return value


def _of_one_length(ops: Sequence[Operation], tokens: Tokens) -> Refusal | None:
    """Return a refusal if a table of rotary cosines may hold for texts of one length only."""
    factors = {v: (op, axes) for op in ops if op.op_type == "mul" for v, axes in tokens.tables[op].items()}
    for var, (op, axes) in factors.items():
        table = evaluate_static(var) if list(axes.values()) == [NEW] else None
        if table is None or table.dtype.kind != "f":
            continue
        (axis,) = axes
        rows = np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1)
        if len(rows) < rotary.LEAST_ROWS or rotary.cos_or_sin(rows.astype(np.float64)) != "cos":
            continue
        if (why := frequencies.of_one_length(rows)) is not None:
            return Refusal(f"%{var.name}: {why}; {OTHER_LENGTHS}", op)
    return None


# A choice of numbers by the length of the text: `select(max(position) + 1 > limit, long, short)`.
#
# In a model with a fixed number of positions the condition is constant. If it is true, every text gets the
# numbers for long texts, although shorter texts should get the other ones.


def number_in(var: Var) -> float | None:
    """Return the one number that a value holds whatever the inputs are, or None."""
    value = evaluate_static(var)
    return float(np.asarray(value).item()) if value is not None and np.size(value) == 1 else None


def chosen_by_length(op: Operation) -> Refusal | None:
    """Return a refusal if an op is a `select` between constants by the length of the text."""
    if op.op_type != "select" or (limit := limit_passed(op.cond, number_in)) is None:
        return None
    a, b = evaluate_static(op.a), evaluate_static(op.b)
    if a is None or b is None or np.array_equal(a, b):
        return None
    return Refusal(f"its constants depend on the length of the text: {advice_for_limit(limit)}", op)
