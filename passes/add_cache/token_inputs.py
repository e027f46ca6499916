"""Which inputs of a decoder hold its tokens, and which hold a row for each of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from anesurgery.errors import PassError, Refusal
from anesurgery.interpret.decoder_calls import token_input
from anesurgery.mil import Array, Function, Var, np_dtype, static_shape

ADVICE = "make the others constants by `fixed`, as attention_mask=1, or position_ids=range(n)"


def token_axis(tokens: Var) -> int:
    """Return the axis of the tokens in their input: the first, or the one after the batch."""
    return min(1, tokens.rank - 1)


def inputs_of(function: Function, fixed: Collection[str]) -> list[dict[str, int]] | Refusal:
    """Return inputs that depend on the tokens or on their positions -> the axis of the tokens.

    There is an element for each choice of the axes; the tokens come first in it.
    """
    inputs = {n: v for n, v in function.inputs.items() if n not in fixed}
    name = token_input(inputs)
    if name is None:
        return unclear(inputs)
    tokens = inputs[name]
    if (refusal := _unfit(tokens)) is not None:
        return refusal
    length = tokens.shape[token_axis(tokens)]
    others = [n for n in inputs if n != name]
    axes = [_axes(inputs[n], int(length)) for n in others]
    if not all(axes):
        return unclear(inputs)
    return [{name: token_axis(tokens)} | dict(zip(others, chosen, strict=True)) for chosen in product(*axes)]


def unclear(inputs: Collection[str], why: str = "") -> Refusal:
    """Return the refusal of a model with inputs besides its tokens."""
    names = ", ".join(f"%{n}" for n in inputs)
    return Refusal(f"which input holds the tokens? There are {names}; {ADVICE}{why}")


def _unfit(tokens: Var) -> Refusal | None:
    """Return why an input does not hold the tokens of one text; None where it does."""
    if (shape := static_shape(tokens)) is None:
        return Refusal(f"%{tokens.name} has the symbolic shape {tuple(tokens.shape)}")
    if len(shape) > 1 and shape[0] != 1:
        return Refusal(f"%{tokens.name} holds a batch of {shape[0]}")
    return Refusal(f"%{tokens.name} holds one token") if shape[token_axis(tokens)] < 2 else None


def _axes(var: Var, length: int) -> Sequence[int]:
    """Return the axes that may hold a row for each position; the usual one, the last but one, comes first."""
    shape = static_shape(var) or ()
    axes = [a for a, d in enumerate(shape) if d == length and np_dtype(var).kind == "f"]
    return sorted(axes, key=lambda a: a != len(shape) - 2)


def fixed_value(var: Var, stated: Any) -> Array:
    """Return the value of an input that becomes a constant, from one number or an array that fits.

    Raises:
        PassError: it does not fit.
    """
    shape, dtype = static_shape(var) or (), np_dtype(var)
    try:
        value = np.broadcast_to(np.asarray(stated), shape)
    except ValueError:
        raise PassError(
            f"add_cache: fixed gives %{var.name} the shape {np.shape(stated)}, and it has the shape {shape}"
        ) from None
    if value.dtype.kind not in "fiub" or (dtype.kind != "f" and not np.array_equal(value.astype(dtype), value)):
        raise PassError(f"add_cache: fixed gives %{var.name} {stated!r:.60}, and it holds {dtype}")
    return value.astype(dtype)


def rows_in_words(chosen: Mapping[str, int]) -> str:
    """Return what the caller gives besides the tokens, in words."""
    _, *rows = chosen
    return f", the rows of {', '.join(rows)} at these positions" if rows else ""
