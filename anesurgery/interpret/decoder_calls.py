"""What each function of a decoder reads and gives: tokens, rows of tables, a cache, logits.

*Tokens* are the only input besides `position`, or the one of integers. A model whose embeddings the caller
looks up reads their rows in place of tokens, as the input `..._embeds`. Every other input holds one row for
each position, as cosines and sines do. The tables of such inputs are given by the caller, or lie beside the
package, where passes leave them: `<package>.<name>.npy`. A function `decode_inputs` makes inputs of `decode`
from the position (`position_function`).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.errors import InterpretError
from anesurgery.files import arrays
from anesurgery.interpret.predictor import Predictor
from anesurgery.interpret.sampling import index_range
from anesurgery.interpret.state import POSITION, reached
from anesurgery.mil import Array, Var, consumers, np_dtype, static_shape, types

BACK = "_out"
"""The ending of outputs that are inputs of the next call."""

EMBEDDED = "_embeds"
"""The ending of inputs that hold the embeddings of tokens."""

INPUTS = "_inputs"
"""The ending of functions that compute the inputs of another one from the position."""

TOKENS, TOP_TOKENS, TOP_VALUES = "tokens", "top_tokens", "top_values"
"""Outputs in place of logits: the likeliest token of each row; or the likeliest few, with their logits."""
PART_TOKENS, PART_VALUES = "part_tokens", "part_values"
"""Outputs in place of logits: the likeliest token of each part of the vocabulary, with their logits."""
VALUES = {TOP_TOKENS: TOP_VALUES, PART_TOKENS: PART_VALUES}

VIEWS = ("cast", "expand_dims", "reshape")
"""Ops that may stand between an input that picks a token and the products with it."""

Tables = Mapping[str, Array]


@dataclass(frozen=True)
class Rows:
    """An input that holds a row of a table for each token, or for each position."""

    name: str
    shape: tuple[int, ...]
    axis: int
    """The axis of the tokens."""
    dtype: Any

    @property
    def others(self) -> tuple[int, ...]:
        """The shape of one row."""
        return tuple(d for a, d in enumerate(self.shape) if a != self.axis)

    def table(self, values: Any) -> Array:
        """Return a table with its rows on the first axis; it may come so, or with the axes of the input.

        Raises:
            InterpretError: its rows have another size.
        """
        array = np.asarray(values)
        others = tuple(d for a, d in enumerate(array.shape) if a != self.axis)
        if array.ndim == len(self.shape) and others == self.others:
            return np.moveaxis(array, self.axis, 0).reshape(array.shape[self.axis], *self.others)
        if not array.ndim or not len(array) or array[0].size != np.prod(self.others, dtype=int):
            raise InterpretError(
                f"the table of {self.name} has the shape {array.shape}; "
                f"the input takes rows of {' x '.join(map(str, self.others))}"
            )
        return array.reshape(len(array), *self.others)

    def look_up(self, table: Array, places: Array) -> Array:
        """Return the value of the input: a row of the table for each place, and zeros behind them."""
        rows = np.zeros((self.shape[self.axis], *self.others), self.dtype)
        rows[: len(places)] = table[places].reshape(-1, *self.others)
        return np.moveaxis(rows, 0, self.axis)


@dataclass(frozen=True)
class Call:
    """One function of a decoder: what it reads and gives."""

    predictor: Predictor
    tokens: str
    """The input with the tokens, or with their embeddings."""
    axis: int
    """The axis of the tokens."""
    length: int
    """The number of tokens that it reads at once."""
    shape: tuple[int, ...]
    """The shape of the tokens, static."""
    dtype: Any
    back: Mapping[str, str]
    """Input -> the output of the call before that it takes."""
    cached: bool
    """Does it keep what it has read, in states or in inputs that come back?"""
    output: str
    """The output with the logits, or with tokens in place of them."""
    vocabulary: int = sys.maxsize
    """The number of tokens, as far as a table or the logits tell it."""
    words: int = 0
    """The number of tokens, where the output holds tokens; else 0."""
    values: str = ""
    """The output with the logits of the tokens in `output`; "" where only the likeliest is given, and for
    logits."""
    embedded: Rows | None = None
    """The embeddings that it reads in place of tokens."""
    rows: tuple[Rows, ...] = ()
    """The inputs with a row for each position."""
    picker: str = ""
    """The input that picks one token by a 1 at its place, as `select_last_token(position="input")` adds it."""
    one_row: bool = False
    """Does it give the logits of one token only, of several that it reads?"""
    maker: Predictor | None = None
    """The function that computes some of its inputs from the position."""
    name: str = ""
    """The name of the function."""

    def inputs(self, values: Mapping[str, Any], position: int) -> dict[str, Any]:
        """Return all inputs: known values, the number of tokens before, and what `maker` computes."""
        known = dict(values) | ({POSITION: np.array([position], np.int32)} if self.cached else {})
        if self.maker is not None:
            entries = self.maker.ports[0]
            known |= self.maker({name: value for name, value in known.items() if name in entries})
        unused = {POSITION, self.tokens} - self.predictor.ports[0].keys()
        return {name: value for name, value in known.items() if name not in unused}

    @property
    def positions(self) -> list[Var]:
        """The inputs of its programs with the number of tokens before."""
        predictors = [self.predictor, *([] if self.maker is None else [self.maker])]
        inputs = [e.function.inputs for p in predictors for e in p.executables]
        return [values[POSITION] for values in inputs if POSITION in values]

    @cached_property
    def context(self) -> int:
        """The most tokens that it can have read, those of the call included."""
        if not self.cached:
            return self.length
        return min((count for p in self.positions for count, _ in reached(p)), default=sys.maxsize)

    def reads(self, position: int) -> bool:
        """Can it give the logits of the last token, if so many tokens are read with those of this call?"""
        is_full = position >= self.length if self.cached else position == self.length
        return is_full or not self.one_row or bool(self.picker)

    @property
    def greedy(self) -> bool:
        """Does it give only the likeliest token?"""
        return self.output in (TOKENS, PART_TOKENS)

    @property
    def looked_up(self) -> tuple[Rows, ...]:
        """All inputs that need a table."""
        return self.rows if self.embedded is None else (self.embedded, *self.rows)

    def with_words(self, vocabulary: int) -> Call:
        """Return the call with the number of tokens from a table, where nothing else tells it."""
        return replace(self, words=vocabulary) if self.words == sys.maxsize else self

    def logits(self, outputs: Mapping[str, Any]) -> Array:
        """Return the logits of a call, a row for each token; -inf for tokens that it did not give."""
        best = np.asarray(outputs[self.output])
        if not self.words:
            return best.reshape(-1, best.shape[-1])
        tokens = best.reshape(-1, best.shape[-1] if self.values else 1)
        values = (
            np.asarray(outputs[self.values]).reshape(tokens.shape) if self.values else np.zeros(tokens.shape)
        )
        rows = np.full((len(tokens), self.words), -np.inf, np.float32)
        np.put_along_axis(rows, tokens, values.astype(np.float32), -1)
        return rows

    def outputs(self, rows: Array) -> dict[str, Array]:
        """Return outputs as the function would give them, with a batch axis, from rows of logits."""
        if not self.words:
            return {self.output: rows[None]}
        if not self.values:
            return {self.output: np.argmax(rows, -1).astype(np.int32)[None]}
        key = np.isinf(rows) if self.output == PART_TOKENS else -rows  # parts are in the order of tokens
        order = np.argsort(key, axis=-1, kind="stable")[:, : int(np.isfinite(rows[0]).sum())]
        return {
            self.output: order.astype(np.int32)[None],
            self.values: np.take_along_axis(rows, order, -1)[None],
        }


def calls_of(whole: Predictor, precision: str, device: str, output: str | None) -> list[Call]:
    """Return the functions of a decoder: short calls first, and of equal ones those with a small context.

    Raises:
        InterpretError: this is not the interface of a decoder.
    """
    names = whole.functions
    predictors = {n: Predictor(whole, precision=precision, function=n, device=device) for n in names}
    makers = {n: predictors.pop(f"{n}{INPUTS}", None) for n in names if f"{n}{INPUTS}" in names}
    calls = (replace(call_of(predictor, output, makers.get(n)), name=n) for n, predictor in predictors.items())
    decoding = sorted(calls, key=lambda call: (call.length, call.context))
    if not all(call.cached for call in decoding) and len(decoding) > 1:
        raise InterpretError("several functions, but no input 'position': this is no decoder of add_cache")
    return decoding


def call_of(predictor: Predictor, output: str | None, maker: Predictor | None = None) -> Call:
    """Find out what a function reads and gives.

    Args:
        predictor: of the function.
        output: the name of the logits; None to find them.
        maker: the function that computes inputs of it from the position.

    Raises:
        InterpretError: this is not the interface of a decoder.
    """
    entries, outputs = predictor.ports
    inputs = {n: v for n, v in entries.items() if not types.is_state(v.sym_type)}
    back = {n: f"{n}{BACK}" for n in inputs if f"{n}{BACK}" in outputs}
    maker_inputs, computed = ({}, []) if maker is None else (maker.ports[0], maker.outputs)
    free = {n: v for n, v in (maker_inputs | inputs).items() if n not in (POSITION, *back, *computed)}
    name = token_input(free)
    if name is None:
        names = ", ".join(free) or "none"
        raise InterpretError(
            f"which input holds the tokens? Inputs: {names}; besides its cache, a decoder has one of integers"
        )
    tokens = free.pop(name)
    shape = static_shape(tokens)
    answer = _answer({n: v for n, v in outputs.items() if n not in back.values()}, output)
    if shape is None or not shape or answer is None:
        raise InterpretError("a decoder has tokens of a static shape and logits as an output")
    axis = min(1, len(shape) - 1)
    length, is_embedded = shape[axis], tokens.name.endswith(EMBEDDED) and len(shape) > 1
    gives_tokens, vocabulary = np_dtype(answer).kind == "i", index_range(tokens) or 0
    vocabulary = vocabulary or (0 if gives_tokens or is_embedded else int(answer.shape[-1])) or sys.maxsize
    pickers = [n for n, v in free.items() if _is_picker(v, length)]
    return Call(
        predictor,
        tokens=name,
        axis=axis,
        length=length,
        shape=(1, length) if is_embedded else shape,
        dtype=np.int64 if is_embedded else np_dtype(tokens),
        back=back,
        cached=POSITION in inputs or maker is not None or bool(back) or len(inputs) < len(entries),
        output=answer.name,
        vocabulary=vocabulary,
        words=vocabulary if gives_tokens else 0,
        values=VALUES.get(answer.name, ""),
        embedded=Rows(name, shape, axis, np_dtype(tokens)) if is_embedded else None,
        rows=tuple(_rows_of_input(v, length) for n, v in free.items() if n not in pickers),
        picker=pickers[0] if pickers else "",
        one_row=length > 1 and _token_count(answer, answer.name in VALUES or not gives_tokens) == 1,
        maker=maker,
    )


def _answer(outputs: Mapping[str, Var], name: str | None) -> Var | None:
    """Return the output of logits, or of tokens in place of them: the one of a name, or the widest."""
    logits = [v for n, v in outputs.items() if name in (None, n) and v.shape]
    if not logits or any(static_shape(v) is None for v in logits):
        return None
    best = max(logits, key=lambda v: int(v.shape[-1]))
    return next((outputs[n] for n in (TOKENS, *VALUES) if n in outputs and name is None), best)


def _token_count(var: Var, wide: bool) -> int:
    """Return for how many tokens an output holds something; `wide`: its last axis is the vocabulary."""
    return math.prod(int(d) for d in (var.shape[:-1] if wide else var.shape))


def _is_picker(var: Var, length: int) -> bool:
    """Is an input only used to pick one of so many tokens, as the left side of products?"""
    views = [var]
    for view in views:
        readers = list(consumers(view))
        views += [op.outputs[0] for op in readers if op.op_type in VIEWS and op.x is view]
        if not readers or not all(op.x is view and op.op_type in (*VIEWS, "matmul") for op in readers):
            return False
        if view.rank < 2 and any(op.op_type == "matmul" for op in readers):
            return False
    return all(_is_row_of(view, length) for view in views)


def _is_row_of(var: Var, length: int) -> bool:
    """Does a value hold so many floats, along its last axis?"""
    shape = static_shape(var) or ()
    return np_dtype(var).kind == "f" and math.prod(shape) == length and shape[-1:] == (length,)


def token_input(inputs: Mapping[str, Var]) -> str | None:
    """Return the input that holds the tokens: the only one, the one of integers, or the one of embeddings."""
    whole = [n for n, v in inputs.items() if np_dtype(v).kind in "iu"]
    embedded = [n for n in inputs if n.endswith(EMBEDDED)]
    choices = (list(inputs), whole, [] if whole else embedded)
    return next((names[0] for names in choices if len(names) == 1), None)


def _rows_of_input(var: Var, length: int) -> Rows:
    """Return an input as rows for tokens: along the last axis but one, if several axes have that length."""
    shape = static_shape(var) or ()
    axes = [a for a, d in enumerate(shape) if d == length]
    if not axes or np_dtype(var).kind != "f":
        raise InterpretError(
            f"the input {var.name} holds neither tokens nor a row for each of {length} tokens; "
            "make it a constant first"
        )
    usual = len(shape) - 2
    return Rows(var.name, shape, usual if usual in axes else axes[0], np_dtype(var))


def tables_of(model: Any, call: Call, tables: Tables) -> dict[str, Array]:
    """Return the tables of the inputs that need one, as the caller gives them or from files beside the package.

    Raises:
        InterpretError: one is missing, has rows of another size, or is of no such input.
    """
    if not isinstance(tables, Mapping):
        raise InterpretError(f"tables={tables!r:.60}; give arrays by the names of inputs")
    if unknown := sorted(map(str, tables.keys() - {rows.name for rows in call.looked_up})):
        needed = ", ".join(rows.name for rows in call.looked_up) or "none"
        raise InterpretError(f"tables: {unknown[0]!r} is no input that needs a table; those are: {needed}")
    places = [Path(model)] if isinstance(model, (str, os.PathLike)) else []
    tables_read = {}
    for rows in call.looked_up:
        beside = [arrays.path_beside(place, rows.name) for place in places]
        stored = next((path for path in beside if path.is_file()), None)
        if rows.name in tables:
            tables_read[rows.name] = rows.table(tables[rows.name])
        elif stored is not None:
            tables_read[rows.name] = rows.table(arrays.read_one(stored))
        else:
            where = f"; there is no {beside[0].name}" if beside else ""
            raise InterpretError(
                f"the input {rows.name} needs a table with a row for each "
                f"{'token' if rows is call.embedded else 'position'}: give it as "
                f"tables={{{rows.name!r}: ...}}{where}"
            )
    return tables_read
