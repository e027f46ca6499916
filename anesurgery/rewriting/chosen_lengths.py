"""A choice of numbers by the length of the text: `select(max(position) + 1 > limit, long, short)`.

A model of a fixed number of positions makes such a choice once. Where it falls on the side of longer texts, the
model is one of longer texts only: shorter ones, which it reads as well, were to get the other set.
"""

from __future__ import annotations

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.facts.masks import evaluate_static
from anesurgery.frontend.length_choices import in_words, limit_passed
from anesurgery.mil import Operation, Var


def number_in(var: Var) -> float | None:
    """The one number that a value holds whatever the inputs are, or None."""
    found = evaluate_static(var)
    return float(np.asarray(found).item()) if found is not None and np.size(found) == 1 else None


def refusal(op: Operation) -> Refusal | None:
    """Why a `select` must not become a part of a model that reads texts of any length."""
    if op.op_type != "select" or (limit := limit_passed(op.cond, number_in)) is None:
        return None
    a, b = evaluate_static(op.a), evaluate_static(op.b)
    if a is None or b is None or np.array_equal(a, b):
        return None
    return Refusal(f"it chooses numbers by the length of the text: {in_words(limit)}", op)
