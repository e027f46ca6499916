"""What a network is made of: attention, convolutions, lookups, pictures; and which outputs are logits."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from anesurgery.errors import NO_MATCH, Refusal
from anesurgery.facts.attention import MASKED, mask_chain
from anesurgery.facts.masks import against_causal, take_apart, without_leading_biases
from anesurgery.interpret.attentions import BETWEEN, SCALES, attentions
from anesurgery.mil import (
    Function,
    Operation,
    Program,
    Var,
    constant,
    is_stored,
    np_dtype,
    operands,
    producer,
    walk_ops,
)
from anesurgery.ops import CARRIERS, PRODUCTS, STATEFUL, UNARY, names
from anesurgery.semantics.reading import channels, reaches_output, readers_after, shape_in_words, weight

SIDE = 8
"""A picture is at least so many numbers high and wide: a choice, above the 7 x 7 of the last feature maps of
classifiers."""


@dataclass(frozen=True)
class Makeup:
    """Counts over all functions of a program, and what stands at its ends."""

    attentions: int
    causal: int
    open: int
    """Attentions that see positions ahead of the query; of a mask that is an input this is not known."""
    convolutions: int
    lookups: int
    ids: int
    """Inputs of integers: short tables are read by products, and then there is no lookup."""
    states: int
    pictures: tuple[Var, ...]
    """Inputs of rank 4, or 5 for films, at least `SIDE` high and wide."""
    signals: tuple[Var, ...]
    """Float inputs of another rank: sound, or what another model made."""
    patches: tuple[Var, ...]
    """The signals that a product with weights reads at once, as patches of a picture that were cut before."""
    drawn: tuple[Var, ...]
    """Outputs that have the form of pictures."""
    head: Var | None
    """A product with a weight at each position, which is an output but for elementwise ops."""

    def __str__(self) -> str:
        found = {
            "attention": self.attentions,
            "causal attention": self.causal,
            "convolution": self.convolutions,
            "lookup": self.lookups,
            "state": self.states,
        }
        words = [f"{n or 'no'} {what}{'' if n == 1 else 's'}" for what, n in found.items()]
        return f"found {', '.join(words)}"

    @property
    def encodes_text(self) -> bool:
        """Does it turn token ids into features, with one attention after another and no next words?"""
        words = (self.lookups or (self.ids and not self.signals)) and not (self.pictures or self.states)
        predicts = self.causal and (self.open or self.head is not None)
        return bool(self.attentions and words and not predicts)

    @property
    def without_attention(self) -> Refusal | None:
        """Why this is not a transformer, or None."""
        if self.attentions:
            return None
        return Refusal(f"the model has no attention (no softmax between two matrix products); {self}")


def makeup(program: Program | Function) -> Makeup:
    """Read a program, or one function of it, once."""
    functions = list(program.functions.values()) if isinstance(program, Program) else [program]
    ops = [op for function in functions for op in walk_ops(function)]
    kinds = Counter(op.op_type for op in ops)
    softmaxes = (op for op in ops if op.op_type == "softmax")
    sights = Counter(_sight(a.weights) for function in functions for a in attentions(function))
    inputs = [v for function in functions for v in function.inputs.values() if _is_float(v)]
    pictures = tuple(v for v in inputs if is_picture(v))
    signals = tuple(v for v in inputs if v not in pictures)
    return Makeup(
        attentions=sum(sights.values()) + sum(_has_sinks(op) for op in softmaxes),
        causal=sights["causal"],
        open=sights["open"],
        convolutions=kinds["conv"] + kinds["conv_transpose"],
        lookups=sum(op.op_type == "gather" and constant(op.x) is not None for op in ops),
        ids=sum(hasattr(v, "rank") and np_dtype(v).kind in "iu" for f in functions for v in f.inputs.values()),
        states=sum(kinds[kind] for kind in STATEFUL),
        pictures=pictures,
        signals=signals,
        patches=tuple(v for v in signals if _is_embedded(v)),
        drawn=tuple(v for function in functions for v in function.outputs if is_picture(v)),
        head=next((op.outputs[0] for op in ops if _is_head(op)), None),
    )


def described(var: Var) -> str:
    """A value with its shape: "%image (1x3x224x224)"."""
    return f"%{var.name} ({shape_in_words(var.shape)})"


def is_picture(var: Var) -> bool:
    """Rank 4, or 5 for films, float, and high and wide enough; dynamic sides count."""
    sides = [d for d in var.shape[-2:] if isinstance(d, int)] if _is_float(var) else []
    return _is_float(var) and var.rank in (4, 5) and all(d >= SIDE for d in sides)


def _is_embedded(var: Var) -> bool:
    """Are vectors, rescaled at most, multiplied by weights at once? Those of words are normed before."""
    moves = CARRIERS | names("add sub mul real_div")
    readers = readers_after(var, moves) if var.rank in (2, 3) else []
    return bool(readers) and all(
        op.op_type in ("linear", "matmul") and weight(op) is not None for op in readers
    )


def _sight(op: Operation) -> str:
    """What the queries of an attention see: "causal", "open", or "unknown"."""
    chain = mask_chain(op)
    if chain is NO_MATCH:
        return "unknown" if _is_filled(op) else "open"
    parts = chain if isinstance(chain, Refusal) else take_apart(without_leading_biases(chain))
    if isinstance(parts, Refusal):
        return "unknown"
    if against_causal(parts.keep) is None:
        return "causal"
    return "unknown" if parts.free else "open"


def _is_filled(op: Operation) -> bool:
    """Is what is added to the scores a selection of dynamic numbers and of a fill, perhaps for shared heads?"""
    added = producer(op.x, "add") if op.op_type == "softmax" else None
    for term in () if added is None else (added.x, added.y):
        while (moved := producer(term, *CARRIERS, "tile")) is not None:
            term = moved.x
        chosen = producer(term, "select")
        fills = [] if chosen is None else [constant(v) for v in (chosen.a, chosen.b)]
        if any(fill is not None and np.max(fill) <= MASKED for fill in fills):
            return True
    return False


def _has_sinks(op: Operation) -> bool:
    """Is it the softmax of an attention with sinks: scores and a number more, whose weight is dropped again?"""
    maker = producer(op.x)
    while maker is not None and maker.op_type in ("sub", "cast", "identity"):  # less its largest
        maker = producer(maker.x)
    if maker is None or maker.op_type != "concat":
        return False
    products = readers_after(op.outputs[0], SCALES | {"slice_by_index"})
    return any(map(_is_scored, maker.values)) and any(map(_is_product, products))


def _is_scored(var: Var) -> bool:
    """Do products of two dynamic values give it, scaled and masked?"""
    op = producer(var)
    while op is not None and op.op_type in BETWEEN:
        op = producer(op.b if op.op_type == "select" else op.x)
    return op is not None and _is_product(op)


def _is_product(op: Operation) -> bool:
    return op.op_type in ("matmul", "einsum") and weight(op) is None


def _is_float(var: Var) -> bool:
    return hasattr(var, "rank") and var.rank > 0 and np_dtype(var).kind == "f"


def _is_head(op: Operation) -> bool:
    made = op.outputs[0] if op.op_type in ("linear", "matmul") and weight(op) is not None else None
    return made is not None and made.rank == 3 and reaches_output(made, CARRIERS | UNARY)


AFTER_HEADS = CARRIERS | names("mul real_div add sub tanh clip minimum maximum concat softmax")
"""What may stand between a head and the logits."""
SAYS_SO = re.compile(r"logit|prob|score|class", re.IGNORECASE)
"""In the name of an output."""
WIDER = 2
"""A head has at least so many times as many outputs as inputs; a projection of features has about as many."""


def logits_of(function: Function) -> frozenset[str]:
    """Names of the outputs that are logits: by their names, by a softmax, or by the product that makes them."""
    return frozenset(v.name for v in function.outputs if SAYS_SO.search(v.name) or _chosen_among(v))


def _chosen_among(var: Var) -> bool:
    """Does a softmax make it, or a product with many more outputs than inputs?"""
    while (op := var.op) is not None:
        if op.op_type == "softmax":
            return True
        if op.op_type in PRODUCTS:
            shape = channels(op)
            return shape is not None and shape[0] >= WIDER * shape[1]
        data = [v for _, v in operands(op) if not is_stored(v)]
        if op.op_type not in AFTER_HEADS or len(data) != 1:
            return False
        var = data[0]
    return False
