"""Which outputs of a model are logits or probabilities: a choice among classes or tokens."""

from __future__ import annotations

import re

from anesurgery.mil import Function, Var, is_stored, operands
from anesurgery.ops import CARRIERS, PRODUCTS, names
from anesurgery.semantics.reading import channels

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
