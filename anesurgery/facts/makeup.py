"""What a network consists of: attention, convolutions, lookups, pictures; and which outputs are logits.

Recipes ask `makeup` whether they apply to a model; comparisons and compression ask `logits_of`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from anesurgery.errors import NO_MATCH, Refusal
from anesurgery.facts.attention import MASKED, mask_chain
from anesurgery.facts.masks import against_causal, take_apart
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
from anesurgery.semantics.reading import (
    channels,
    reaches_output,
    readers_after,
    shape_in_words,
    value_before,
    weight,
)

SIDE = 8
"""The least height and width of a picture: above the 7 x 7 of the last feature maps of classifiers."""


@dataclass(frozen=True)
class Makeup:
    """Counts over all functions of a program, and its inputs and outputs by kind."""

    attentions: int
    causal: int
    open: int
    """Attentions that see positions ahead of the query; those whose mask is an input are not counted."""
    convolutions: int
    lookups: int
    ids: int
    """Inputs of integers. A model may have some but no lookup: short tables are read by products."""
    states: int
    pictures: tuple[Var, ...]
    """Float inputs of rank 4, or 5 for films, at least `SIDE` high and wide."""
    signals: tuple[Var, ...]
    """Other float inputs: sound, or features from another model."""
    patches: tuple[Var, ...]
    """Signals that a product with weights reads directly, as patches into which a picture was cut before."""
    drawn: tuple[Var, ...]
    """Outputs in the form of pictures."""
    head: Var | None
    """The result of a product with weights at each position, if it is an output up to elementwise ops."""

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
        """Does it turn token ids into features with attention, and predict no next tokens?"""
        words = (self.lookups or (self.ids and not self.signals)) and not (self.pictures or self.states)
        predicts = self.causal and (self.open or self.head is not None)
        return bool(self.attentions and words and not predicts)

    @property
    def without_attention(self) -> Refusal | None:
        """Return why this is not a transformer; None if it has attention."""
        if self.attentions:
            return None
        return Refusal(f"no attention was recognized (a softmax between two matrix products); {self}")


def makeup(program: Program | Function) -> Makeup:
    """Return the makeup of a program or of one function."""
    functions = list(program.functions.values()) if isinstance(program, Program) else [program]
    ops = [op for function in functions for op in walk_ops(function)]
    op_counts = Counter(op.op_type for op in ops)
    softmaxes = (op for op in ops if op.op_type == "softmax")
    mask_kinds = Counter(_mask_kind(a.weights) for function in functions for a in attentions(function))
    inputs = [v for function in functions for v in function.inputs.values() if _is_float(v)]
    pictures = tuple(v for v in inputs if is_picture(v))
    signals = tuple(v for v in inputs if v not in pictures)
    return Makeup(
        attentions=sum(mask_kinds.values()) + sum(_has_sinks(op) for op in softmaxes),
        causal=mask_kinds["causal"],
        open=mask_kinds["open"],
        convolutions=op_counts["conv"] + op_counts["conv_transpose"],
        lookups=sum(op.op_type == "gather" and constant(op.x) is not None for op in ops),
        ids=sum(hasattr(v, "rank") and np_dtype(v).kind in "iu" for f in functions for v in f.inputs.values()),
        states=sum(op_counts[kind] for kind in STATEFUL),
        pictures=pictures,
        signals=signals,
        patches=tuple(v for v in signals if _is_embedded(v)),
        drawn=tuple(v for function in functions for v in function.outputs if is_picture(v)),
        head=next((op.outputs[0] for op in ops if _is_head(op)), None),
    )


def described(var: Var) -> str:
    """Return a value and its shape in words: "%image (1x3x224x224)"."""
    return f"%{var.name} ({shape_in_words(var.shape)})"


def is_picture(var: Var) -> bool:
    """Is a value a float of rank 4 (5 for films), high and wide enough? Dynamic sides count."""
    sides = [d for d in var.shape[-2:] if isinstance(d, int)] if _is_float(var) else []
    return _is_float(var) and var.rank in (4, 5) and all(d >= SIDE for d in sides)


def _is_embedded(var: Var) -> bool:
    """Do products with weights read the vectors directly or rescaled? Features of tokens are normed first."""
    moves = CARRIERS | names("add sub mul real_div")
    readers = readers_after(var, moves) if var.rank in (2, 3) else []
    return bool(readers) and all(
        op.op_type in ("linear", "matmul") and weight(op) is not None for op in readers
    )


def _mask_kind(op: Operation) -> str:
    """Return what the queries of an attention see: "causal", "open" or "unknown"."""
    chain = mask_chain(op)
    if chain is NO_MATCH:
        return "unknown" if _adds_dynamic_mask(op) else "open"
    parts = chain if isinstance(chain, Refusal) else take_apart(chain)
    if isinstance(parts, Refusal):
        return "unknown"
    if against_causal(parts.keep) is None:
        return "causal"
    return "unknown" if parts.dynamic_terms else "open"


def _adds_dynamic_mask(op: Operation) -> bool:
    """Are scores added to a select between dynamic numbers and a fill, perhaps repeated for shared heads?"""
    added = producer(op.x, "add") if op.op_type == "softmax" else None
    for term in () if added is None else (added.x, added.y):
        chosen = producer(value_before(term, CARRIERS | {"tile"}), "select")
        fills = [] if chosen is None else [constant(v) for v in (chosen.a, chosen.b)]
        if any(fill is not None and np.max(fill) <= MASKED for fill in fills):
            return True
    return False


def _has_sinks(op: Operation) -> bool:
    """Does a softmax have attention sinks: scores and one more column, which is dropped afterwards?"""
    maker = producer(op.x)
    while maker is not None and maker.op_type in ("sub", "cast", "identity"):  # less its largest
        maker = producer(maker.x)
    if maker is None or maker.op_type != "concat":
        return False
    products = readers_after(op.outputs[0], SCALES | {"slice_by_index"})
    return any(map(_are_scores, maker.values)) and any(map(_is_product, products))


def _are_scores(var: Var) -> bool:
    """Is a value a product of two dynamic values, perhaps scaled and masked?"""
    op = producer(var)
    while op is not None and op.op_type in BETWEEN:
        op = producer(op.b if op.op_type == "select" else op.x)
    return op is not None and _is_product(op)


def _is_product(op: Operation) -> bool:
    """Does an op multiply two dynamic values?"""
    return op.op_type in ("matmul", "einsum") and weight(op) is None


def _is_float(var: Var) -> bool:
    return hasattr(var, "rank") and var.rank > 0 and np_dtype(var).kind == "f"


def _is_head(op: Operation) -> bool:
    """Is an op a product with weights whose result is an output up to elementwise ops?"""
    made = op.outputs[0] if op.op_type in ("linear", "matmul") and weight(op) is not None else None
    return made is not None and made.rank == 3 and reaches_output(made, CARRIERS | UNARY)


AFTER_HEADS = CARRIERS | names("mul real_div add sub tanh clip minimum maximum concat softmax")
"""Ops that may stand between a head and the logits."""
LOGIT_NAMES = re.compile(r"logit|prob|score|class", re.IGNORECASE)
"""Words in the names of outputs that are logits."""
WIDER = 2
"""A head has at least this many times as many outputs as inputs; other projections have about as many."""


def logits_of(function: Function) -> frozenset[str]:
    """Return the names of outputs that are logits, by name, by a softmax, or by the product that makes them."""
    return frozenset(v.name for v in function.outputs if LOGIT_NAMES.search(v.name) or _are_logits(v))


def _are_logits(var: Var) -> bool:
    """Does a softmax, or a product with many more outputs than inputs, make a value?"""
    while (op := var.op) is not None:
        if op.op_type == "softmax":
            return True
        if op.op_type in PRODUCTS:
            size = channels(op)
            return size is not None and size.outputs >= WIDER * size.inputs
        data = [v for _, v in operands(op) if not is_stored(v)]
        if op.op_type not in AFTER_HEADS or len(data) != 1:
            return False
        var = data[0]
    return False
