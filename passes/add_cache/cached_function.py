"""Edit a decoder so that it reads a few tokens at a position, and keeps the keys and values of all before.

The edit is in place: every op stays, with its name and its weights. What changes is how many tokens the values
hold, and where the keys, the values and the rows of tables come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anesurgery import mil
from anesurgery.errors import Refusal, UnknownName
from anesurgery.facts import windows
from anesurgery.facts.masks import evaluate_static
from anesurgery.facts.token_axes import NEW, SEEN, WEIGHTS, Tokens, follow, lengthened
from anesurgery.files.copying import copied
from anesurgery.frontend.length_choices import advice_for_limit, limit_passed
from anesurgery.interpret.decoder_calls import fixed_value
from anesurgery.mil import Function, Operation, Program, Var, dtype_name, operands, types
from anesurgery.passes.add_cache import caches, frequencies
from anesurgery.passes.add_cache.caches import Kept, Ring, Tables
from anesurgery.placement.rules.shapes import MOST_STATES, two_states_may_fail
from anesurgery.placement.target import Target
from anesurgery.regions import rotary
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.driver import remove_dead
from anesurgery.rewriting.session import Session

Shape = tuple[int, int, int, str, int]
"""Chunk, heads, width, type and rows of what is kept."""

MASKS = (
    "add_cache: sliding windows are masks over the whole context: rings would take one more state than the "
    'target is known to run; windows="ring" takes it'
)

OTHERWISE = (
    "shorter texts may have to get others: convert the model with no more tokens than it was trained with "
    "(original_max_position_embeddings), or say fixed_rope=True where they hold for texts of every length"
)


@dataclass(frozen=True)
class Reading:
    """What one function reads."""

    length: int
    """Tokens in a call."""
    context: int
    """The most tokens, those of the call among them."""


@dataclass(frozen=True)
class Caching:
    """What the functions that share a cache agree about."""

    tokens: Mapping[str, int]
    """The inputs that hold them, or a row for each position -> the axis of the tokens."""
    context: int
    """The most tokens that are kept."""
    as_state: bool
    """Is what is kept in states, or in inputs and outputs?"""
    windows: str | None = None
    """How sliding windows are kept: "ring" or "mask"; None: as the target takes it."""
    blended: bool = False
    """Is what is new blended in by products with one-hot rows, and not written as a slice?"""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Inputs that become constants -> a number, or an array that fits."""
    fixed_rope: bool = False
    """Are the frequencies of rotary positions said to hold for texts of every length?"""
    chunk_of: Mapping[str, int] = field(default_factory=dict)
    """Value -> the chunk that makes it, once the model is cut; what is kept for two chunks is kept apart."""


def cached_functions(
    session: Session, program: Program, calls: Mapping[str, Reading], how: Caching
) -> dict[str, Function] | Refusal:
    """Copies of the one function of a program, each for what it reads; or why not.

    The note of the session says where rings would take a state too many, and masks are kept for that.
    """
    (name,) = program.functions
    target = None if session.target is None else Target.parse(session.target)
    most = 1 if how.windows is None and target is not None and two_states_may_fail(target) else MOST_STATES
    functions: dict[str, Function] = {}
    for in_rings in (True, False) if how.windows != "mask" else (False,):
        stores = 0
        longest = max(call.length for call in calls.values())
        for word, call in calls.items():
            functions[word] = copied(program).functions[name]
            plan = CachedFunction(session, functions[word], how, call.length, call.context, longest, in_rings)
            if (refusal := plan.edit()) is not None:
                return refusal
            stores = max(Counter(chunk for chunk, *_ in plan.stores).values(), default=0)
        if not how.as_state or stores <= most or how.windows == "ring":
            break
        session.notes += [MASKS] if in_rings else []
    return functions


@dataclass
class CachedFunction:
    """One function, for one number of tokens in a call."""

    session: Session
    function: Function
    how: Caching
    length: int
    context: int
    """The most tokens that it looks at, of those that are kept."""
    longest: int
    """The most tokens in a call of any function that shares what is kept."""
    in_rings: bool
    """Are windows kept in rings?"""
    stores: dict[Shape, Var] = field(default_factory=dict)
    """What each state or input holds now."""
    caches: dict[Operation, Ring | None] = field(default_factory=dict)
    """The ops of an attention -> the ring that it looks at; none where it looks at all that was read."""
    places: dict[Var, int] = field(default_factory=dict)
    """Kept value -> its place in the store of its shape."""
    store_of: dict[Var, Shape] = field(default_factory=dict)
    """Kept value -> the shape of its store."""
    filled: dict[Kept, Var] = field(default_factory=dict)
    """What is kept -> the operand of a product that looks at all tokens."""
    rows: dict[Var, Var] = field(default_factory=dict)
    """Kept value -> the rows of all tokens that are kept, those of this call among them."""
    blends: dict[Shape, dict[int, Var]] = field(default_factory=dict)
    """Store -> place -> what it holds after what is new was blended in."""
    held: dict[Shape, Var] = field(default_factory=dict)
    """Store -> what it held before the call, where it is read once."""

    def edit(self) -> Refusal | None:
        """Edit the function; the refusal says why not, and then it is not to be used."""
        with self.function:
            self.fix_inputs(self.how.fixed)
            chosen = map(chosen_by_length, self.function.operations)
            if (refusal := next((r for r in chosen if r is not None), None)) is not None:
                return refusal
            inputs = {self.function.inputs[name]: axis for name, axis in self.how.tokens.items()}
            tokens = follow(self.function, inputs)
            if isinstance(tokens, Refusal):
                return tokens
            if not tokens.looked_at:
                return Refusal("no op looks at tokens before its own: there is nothing to keep")
            self.tokens: Tokens = tokens
            ops = [op for op in self.function.operations if any(v in tokens.axes for _, v in operands(op))]
            if not self.how.fixed_rope and (refusal := _of_one_length(ops, tokens)) is not None:
                return refusal
            self.kept = {key: caches.kept_for(v, tokens) for key, v in tokens.looked_at.items()}
            self.rings = self.made_rings()
            if (refusal := self.kept_twice()) is not None:
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
            self.store_blends()
            self.function.set_outputs([*self.function.outputs, *self.given_back()])
        remove_dead(list(self.function.operations))
        return None

    def made_rings(self) -> dict[Operation, Ring | None]:
        """The rings of attentions and of convolutions that look back a few tokens only."""
        spans = {op: reach + 1 for op, reach in self.tokens.reaches.items()}
        if self.in_rings:
            seen = {key: kept.value for key, kept in self.kept.items() if key[0] not in spans}
            spans |= caches.windows(self.tokens, seen)
        over = not self.how.blended
        return {
            op: caches.ring(span, self.longest, self.how.context, runs_over=over) for op, span in spans.items()
        }

    def kept_twice(self) -> Refusal | None:
        """Why what is kept cannot be kept once: two that look at it need other rings."""
        ring_of: dict[Var, Ring | None] = {}
        for (op, _), kept in self.kept.items():
            ring = self.rings.get(op)
            if ring_of.setdefault(kept.value, ring) != ring:
                return Refusal(f"%{kept.value.name} is looked at by convolutions and attentions at once", op)
        return None

    def before(self, op: Operation) -> Builder:
        """A builder that makes ops right before another."""
        return Builder(self.session, self.function, "add_cache", op)

    def add_input(self, name: str, shape: tuple[int, ...], dtype: Any, state: bool = False) -> Var:
        """An input or a state of a fresh name."""
        return mil.add_input(
            self.function, self.session.fresh_name(self.function, name), shape, dtype, state=state
        )

    def fix_inputs(self, fixed: Mapping[str, Any]) -> None:
        """Inputs that the caller makes constants."""
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
        """The tokens, or the rows, of one call in place of all."""
        shape = [self.length if a == axis else int(d) for a, d in enumerate(tokens.shape)]
        new = mil.add_input(self.function, tokens.name, shape, tokens.dtype)
        self.tokens.axes[new] = self.tokens.axes[tokens]
        self.substitute(tokens, new)
        self.kept = {key: replace(k, value=new) if k.value is tokens else k for key, k in self.kept.items()}

    def add_stores(self) -> None:
        """A state or an input for each shape of what is kept."""
        count: Counter[Shape] = Counter()
        for (product, _), kept in self.kept.items():
            if kept.value not in self.places:
                shape = self.store_of[kept.value] = self.shape(product, kept)
                self.places[kept.value] = count[shape]
                count[shape] += 1
        for i, (shape, number) in enumerate(count.items()):
            _, heads, width, dtype, rows = shape
            held = types.fp16 if dtype == "fp16" or self.how.as_state else types.fp32
            var = self.add_input(f"cache_{i}", (number, heads, rows, width), held, self.how.as_state)
            self.stores[shape] = var

    def shape(self, product: Operation, kept: Kept) -> Shape:
        """What must be equal for two to be kept together."""
        ring, chunk = self.rings.get(product), self.how.chunk_of.get(product.outputs[0].name, 0)
        rows = self.how.context if ring is None else ring.rows
        return chunk, kept.heads, kept.width, dtype_name(kept.value), rows

    def given_back(self) -> list[Var]:
        """The outputs that hold what is kept, where that is no state."""
        if self.how.as_state:
            return []
        outputs = []
        for i, var in enumerate(self.stores.values()):
            var.name = self.session.fresh_name(self.function, f"cache_{i}_out")
            outputs.append(var)
        return outputs

    def edit_op(self, op: Operation) -> Refusal | None:
        """Give an op its shorter operands, the rows of its tables, and the keys and values that are kept."""
        new: dict[Var, Var] = {}
        self.tables.mb = self.before(op)
        ring = self.rings.get(op)
        seen = self.context if ring is None else ring.size
        for var, axes in self.tokens.tables[op].items():
            cut = self.tables.cut(var, axes, ring)
            if cut is None:
                return Refusal(f"%{var.name} holds something for each token, and cannot be evaluated", op)
            new[var] = cut
        changed = self.swapped(op, new)
        for (product, name), kept in self.kept.items():
            if product is op and op in self.tokens.reaches:
                changed |= self.convolved(op, kept)
            elif product is op:
                changed[name] = self.look_back(op, kept, seen)
        axes = self.tokens.axes[op.outputs[0]]
        length = {NEW: self.length, SEEN: seen, WEIGHTS: seen}
        for name, value in lengthened(op, axes, length).items():
            array = np.array(value, bool if name.endswith("mask") else np.int32)
            changed[name] = self.before(op).const(val=array, name=f"{op.name}_{name}")
        if (axis := self.tokens.first.get(op)) is not None:
            changed |= self.first(op, axis, length[axes[axis]])
        op.set_inputs(no_check_var_types=True, **changed)
        op.type_value_inference(overwrite_output=True)
        return None

    def convolved(self, op: Operation, kept: Kept) -> dict[str, Any]:
        """The parameters of a convolution that looks at the tokens before those of this call."""
        mb, ring, reach = self.before(op), self.rings.get(op), self.tokens.reaches[op]
        rows = self.written(mb, kept, ring)
        last = self.tables.last(ring, reach, dtype_name(rows))
        seen = mb.matmul(x=last, y=rows, name=f"{kept.value.name}_last")
        length = reach + self.length
        value = caches.from_rows(mb, kept, seen, length)
        x = caches.through(mb, kept.way, value, self.tokens, length)
        pads = windows.without_pads(op, self.tokens.new_axis(op.outputs[0]))
        return {"x": x, **{n: mb.const(val=value, name=f"{op.name}_{n}") for n, value in pads.items()}}

    def first(self, op: Operation, axis: int, length: int) -> dict[str, Any]:
        """The parameters of a slice that takes as many from the beginning of an axis."""
        if op.op_type == "slice_by_size":
            return {}
        mb, x = self.before(op), op.x
        mask = np.array([True] * x.rank)
        mask[axis] = False
        stop = [length if a == axis else int(d) for a, d in enumerate(x.shape)]
        parts = {"begin": np.zeros(x.rank, np.int32), "end": np.array(stop, np.int32)}
        parts |= {"begin_mask": mask, "end_mask": mask}
        return {n: mb.const(val=value, name=f"{op.name}_{n}") for n, value in parts.items()}

    def swapped(self, op: Operation, new: Mapping[Var, Var]) -> dict[str, Any]:
        """The inputs of an op that read a value with another in its place."""
        operands: dict[str, Any] = {}
        for name, value in op.inputs.items():
            if isinstance(value, (list, tuple)) and any(v in new for v in value):
                operands[name] = tuple(new.get(v, v) for v in value)
            elif isinstance(value, Var) and value in new:
                operands[name] = new[value]
        return operands

    def look_back(self, product: Operation, kept: Kept, seen: int) -> Var:
        """Keep what is new at the position, and give all that is kept to a product."""
        if kept not in self.filled:
            mb = self.before(product)
            rows = self.written(mb, kept, self.rings.get(product))
            value = caches.from_rows(mb, kept, rows, seen)
            self.filled[kept] = caches.through(mb, kept.way, value, self.tokens, seen)
        return self.filled[kept]

    def written(self, mb: Builder, kept: Kept, ring: Ring | None) -> Var:
        """The rows of all tokens, after those of this call were written, once."""
        if kept.value not in self.rows:
            self.rows[kept.value] = self.write(mb, kept, ring)
        return self.rows[kept.value]

    def write(self, mb: Builder, kept: Kept, ring: Ring | None) -> Var:
        """Write what is new, and read the rows of all tokens."""
        shape, at, name = self.store_of[kept.value], self.places[kept.value], kept.value.name
        rows = caches.as_rows(mb, kept, self.length)
        narrowed = self.how.as_state and dtype_name(kept.value) != "fp16"
        rows = mb.cast(x=rows, dtype="fp16", name=f"{name}_fp16") if narrowed else rows
        if self.how.blended:
            value = self.blend(mb, kept, rows, ring)
            return mb.cast(x=value, dtype="fp32", name=f"{name}_fp32") if narrowed else value
        begin = caches.place(mb, [at, 0], self.tables.slot(ring), [0], name=f"{name}_begin")
        size = np.array([1, kept.heads, self.length, kept.width], np.int32)
        end = mb.add(x=begin, y=size, name=f"{name}_end")
        store = self.stores[shape]
        held = mb.read_state(input=store, name=f"{name}_before") if self.how.as_state else store
        value = self.stored(mb, shape, f"{name}", x=held, update=rows, begin=begin, end=end)

        def part(first: int, last: int, word: str) -> Var:
            ends = {"begin": [at, 0, first, 0], "end": [at + 1, kept.heads, last, kept.width]}
            return mb.slice_by_index(x=value, **ends, name=f"{name}_{word}")

        if ring is not None and self.length > 1:
            over, first = part(ring.size, ring.size + self.length, "over"), part(0, self.length, "first")
            first = mb.select(cond=self.tables.ran_over(ring), a=over, b=first, name=f"{name}_around")
            ends = {"begin": [at, 0, 0, 0], "end": [at + 1, kept.heads, self.length, kept.width]}
            value = self.stored(mb, shape, f"{name}_around", x=value, update=first, **ends)
        all_rows = part(0, self.context if ring is None else ring.size, "kept")
        return mb.cast(x=all_rows, dtype="fp32", name=f"{name}_fp32") if narrowed else all_rows

    def blend(self, mb: Builder, kept: Kept, rows: Var, ring: Ring | None) -> Var:
        """The rows of all tokens: those of this call at their slots, the others as they are held.

        Each number is a sum with one term that is not 0, and so exact.
        """
        shape, at, name = self.store_of[kept.value], self.places[kept.value], kept.value.name
        if shape not in self.held:
            self.held[shape] = store = self.stores[shape]
            if self.how.as_state:
                self.held[shape] = mb.read_state(input=store, name=f"{store.name}_before")
        slots = self.context if ring is None else shape[-1]
        ends = {"begin": [at, 0, 0, 0], "end": [at + 1, kept.heads, slots, kept.width]}
        old = mb.slice_by_index(x=self.held[shape], **ends, name=f"{name}_before")
        stays, places = self.tables.blend(ring, dtype_name(rows))
        placed = mb.mul if self.length == 1 else mb.matmul
        new = placed(x=places, y=rows, name=f"{name}_placed")
        blended: Var = mb.add(x=mb.mul(x=old, y=stays, name=f"{name}_stays"), y=new, name=f"{name}_kept")
        self.blends.setdefault(shape, {})[at] = blended
        return blended

    def store_blends(self) -> None:
        """Write each store once, at the end; a state by an update of all of it, which stays on the ANE."""
        mb = self.before(self.function.operations[-1])
        for shape, by_place in self.blends.items():
            parts, store = tuple(by_place[at] for at in sorted(by_place)), self.stores[shape]
            value = mb.concat(values=parts, axis=0, name=f"{store.name}_after") if len(parts) > 1 else parts[0]
            if self.how.as_state:
                ends = {"begin": [0] * value.rank, "end": [int(d) for d in value.shape]}
                self.stored(mb, shape, store.name, x=self.held[shape], update=value, **ends)
            elif value.shape[2] < shape[-1]:  # what a larger context keeps
                begin = [0, 0, int(value.shape[2]), 0]
                rest = mb.slice_by_size(x=self.held[shape], begin=begin, size=[-1] * value.rank)
                self.stores[shape] = mb.concat(values=(value, rest), axis=2, name=f"{store.name}_all")
            else:
                self.stores[shape] = value

    def stored(self, mb: Builder, shape: Shape, name: str, **written: Any) -> Var:
        """What a state or an input holds after a slice of it was written."""
        value: Var = mb.slice_update(**written, name=f"{name}_update")
        if self.how.as_state:
            value = mb.coreml_update_state(state=self.stores[shape], value=value, name=f"{name}_after")
        else:
            self.stores[shape] = value
        return value


def _of_one_length(ops: Sequence[Operation], tokens: Tokens) -> Refusal | None:
    """Why a table of cosines may be that of texts of one length, where numbers are turned by it."""
    turned = {v: (op, axes) for op in ops if op.op_type == "mul" for v, axes in tokens.tables[op].items()}
    for var, (op, axes) in turned.items():
        table = evaluate_static(var) if list(axes.values()) == [NEW] else None
        if table is None or table.dtype.kind != "f":
            continue
        (axis,) = axes
        rows = np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1)
        if len(rows) < rotary.LEAST_ROWS or rotary.cos_or_sin(rows.astype(np.float64)) != "cos":
            continue
        if (why := frequencies.of_one_length(rows)) is not None:
            return Refusal(f"%{var.name}: {why}; {OTHERWISE}", op)
    return None


# A choice of numbers by the length of the text: `select(max(position) + 1 > limit, long, short)`.
#
# A model of a fixed number of positions makes such a choice once. Where it falls on the side of longer texts,
# the model is one of longer texts only: shorter ones, which it reads as well, were to get the other set.


def number_in(var: Var) -> float | None:
    """The one number that a value holds whatever the inputs are, or None."""
    found = evaluate_static(var)
    return float(np.asarray(found).item()) if found is not None and np.size(found) == 1 else None


def chosen_by_length(op: Operation) -> Refusal | None:
    """Why a `select` must not become a part of a model that reads texts of any length."""
    if op.op_type != "select" or (limit := limit_passed(op.cond, number_in)) is None:
        return None
    a, b = evaluate_static(op.a), evaluate_static(op.b)
    if a is None or b is None or np.array_equal(a, b):
        return None
    return Refusal(f"it chooses numbers by the length of the text: {advice_for_limit(limit)}", op)
