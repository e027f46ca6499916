"""Follow the tokens of a decoder through its ops: on which axis each value holds them.

From the input on, each value that depends on the tokens has labels on its axes:

* `NEW`: one row for each token that is given;
* `SEEN`: one column for each token that is looked at (attention scores);
* `WEIGHTS`: the same after a causal softmax, so that what lies ahead of a token weighs nothing.

An op that mixes tokens in another way than causal attention does is a refusal. What is left then depends, for
each token, on that token and on the keys and values of those before it: a cache of these is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from anesurgery.errors import Refusal
from anesurgery.facts.attention import mask_chain
from anesurgery.facts.masks import causal_window
from anesurgery.mil import Block, Operation, Var, constant, operands, static_shape
from anesurgery.ops import POINTWISE, REDUCTIONS
from anesurgery.semantics.reading import flag, ints

NEW, SEEN, WEIGHTS = "new", "seen", "weights"

Axes: TypeAlias = "Mapping[int, str]"
"""Axis -> its label."""

KEEPS_ZEROS = frozenset({"cast", "identity", "mul", "real_div"})
"""Ops after which a weight of 0 is still 0."""

WHERE = frozenset({"begin", "end", "stride", "begin_mask", "end_mask", "squeeze_mask"})
"""Operands that say which part of a value an op reads or writes."""

ALONG = frozenset(
    {"argsort", "concat", "cumsum", "layer_norm", "reduce_argmax", "reduce_argmin", "softmax", "split", "topk"}
)
"""Ops along `axis` or `axes`, each place of the other axes by itself."""


@dataclass
class Tokens:
    """Where the values of a block hold the tokens."""

    axes: dict[Var, Axes] = field(default_factory=dict)
    """Of each value that depends on the tokens."""
    looked_at: dict[tuple[Operation, str], Var] = field(default_factory=dict)
    """The keys and values: (product, its parameter) -> the operand."""
    windows: dict[Operation, int] = field(default_factory=dict)
    """Softmax or fused attention -> how many tokens each one sees at most, itself counted."""
    masks: dict[object, int | Refusal] = field(default_factory=dict)
    """The window of each mask, or why it is not causal; all layers share one, as a rule."""

    def new_axis(self, var: Var) -> int:
        """The axis of a value that holds the given tokens."""
        return next(axis for axis, label in self.axes[var].items() if label == NEW)


def follow(block: Block, inputs: Mapping[Var, int]) -> Tokens | Refusal:
    """Where the tokens go, or which op mixes them in a way that a cache cannot follow.

    Args:
        block: the block.
        inputs: the inputs that hold something for each token, and on which axis.
    """
    found = Tokens({var: {axis: NEW} for var, axis in inputs.items()})
    for op in block.operations:
        if not any(v in found.axes for _, v in operands(op)):
            continue
        if any(static_shape(v) is None for v in op.outputs):
            return Refusal("a shape is dynamic", op)
        rule = RULES.get(op.op_type)
        if rule is None:
            return Refusal(f"how {op.op_type} treats the tokens is not known", op)
        made = rule(op, found)
        if isinstance(made, Refusal):
            return Refusal(made.reason, op)
        found.axes |= dict.fromkeys(op.outputs, made)
    lost = [v for v in block.outputs if NEW not in found.axes.get(v, {}).values()]
    if lost:
        return Refusal(f"the output %{lost[0].name} has no axis of tokens", lost[0].op)
    return found


def lengthened(op: Operation, axes: Axes, length: Mapping[str, int]) -> dict[str, list[int] | list[bool]]:
    """The parameters of an op that say how many tokens there are, for another number of them.

    Args:
        op: the op.
        axes: the labels of its result.
        length: the length of axes with each label.
    """
    out = op.outputs[0]
    if op.op_type == "reshape":
        return {"shape": [length[axes[a]] if a in axes else int(d) for a, d in enumerate(out.shape)]}
    if op.op_type in ("slice_by_index", "slice_update"):
        masks = {name: ints(op, name) or [0] * op.x.rank for name in ("begin_mask", "end_mask")}
        whole = {a for place, a in enumerate(_staying(op)) if place in axes}
        return {name: [bool(m) or a in whole for a, m in enumerate(given)] for name, given in masks.items()}
    if op.op_type == "slice_by_size":
        return {"size": [length[axes[a]] if a in axes else int(d) for a, d in enumerate(out.shape)]}
    if op.op_type == "squeeze" and op.inputs.get("axes") is None:
        return {"axes": [a for a, d in enumerate(op.x.shape) if d == 1]}
    return {}


def tables(op: Operation, tokens: Tokens) -> dict[Var, Axes]:
    """The operands that do not depend on the tokens but have a row or a column for each, with these axes."""
    out = op.outputs[0]
    labels = tokens.axes.get(out, {})
    if op.op_type == "scaled_dot_product_attention":
        mask, out = op.inputs.get("attn_mask"), op.query
        given, labels = ([] if mask is None else [mask]), {out.rank - 2: NEW, out.rank - 1: SEEN}
    elif op.op_type in POINTWISE | {"concat", "gather_along_axis", "slice_update"}:
        given = [v for name, v in operands(op) if v.rank and v not in tokens.axes and name not in WHERE]
    else:
        given = []
    found: dict[Var, Axes] = {}
    for var in given:
        shift = out.rank - var.rank
        axes = {a - shift: label for a, label in labels.items() if a >= shift and var.shape[a - shift] != 1}
        if axes:
            found[var] = axes
    return found


Made: TypeAlias = "Axes | Refusal"


def _pointwise(op: Operation, tokens: Tokens) -> Made:
    """Operands whose axes are aligned at the end."""
    out, found = op.outputs[0], dict[int, str]()
    given = [v for _, v in operands(op) if v in tokens.axes]
    for var in given:
        for axis, label in _aligned(var, out, tokens).items():
            known = found.setdefault(axis, label)
            if {known, label} == {SEEN, WEIGHTS}:
                found[axis] = WEIGHTS
            elif known != label:
                return Refusal(f"%{var.name} meets values of other tokens")
    if len({label == NEW for label in found.values()}) < len(found):
        return Refusal("each token meets all others")
    for var in given:
        axes = _aligned(var, out, tokens)
        whole = [a for a in found if a not in axes and a >= out.rank - var.rank]
        whole = [a for a in whole if var.shape[a - out.rank] != 1]
        if whole or (NEW in found.values() and NEW not in axes.values()):
            return Refusal(f"%{var.name} depends on all tokens, and meets values of single ones")
    return found if op.op_type in KEEPS_ZEROS else _opened(found)


def _aligned(var: Var, out: Var, tokens: Tokens) -> Axes:
    return {axis + out.rank - var.rank: label for axis, label in tokens.axes[var].items()}


def _opened(axes: Axes) -> dict[int, str]:
    """Weights that were changed may be other than 0 ahead of a token."""
    return {axis: SEEN if label == WEIGHTS else label for axis, label in axes.items()}


def _linear(op: Operation, tokens: Tokens) -> Made:
    if op.x not in tokens.axes or any(op.inputs.get(name) in tokens.axes for name in ("weight", "bias")):
        return Refusal("its weight depends on the tokens")
    axes = tokens.axes[op.x]
    return Refusal("it sums over the tokens") if op.x.rank - 1 in axes else _opened(axes)


def _matmul(op: Operation, tokens: Tokens) -> Made:
    """Rows and columns; where both factors depend on the tokens, the second holds what is looked at."""
    out, sides = op.outputs[0], {}
    for name, flipped in (("x", flag(op, "transpose_x")), ("y", flag(op, "transpose_y"))):
        var = op.inputs[name]
        if var.rank < 2:
            return Refusal(f"%{var.name} is a vector")
        axes = {axis - var.rank: label for axis, label in tokens.axes.get(var, {}).items()}
        if flipped:
            axes = {{-1: -2, -2: -1}.get(axis, axis): label for axis, label in axes.items()}
        sides[name] = axes
    x, y = sides["x"], sides["y"]
    batch = {axis: label for axis, label in (x | y).items() if axis < -2}
    inner, rows, columns = (x.get(-1), y.get(-2)), x.get(-2), y.get(-1)
    if (apart := _apart(op, sides, batch)) is not None:
        return apart
    found = dict(batch)
    if inner == (WEIGHTS, NEW) and rows == NEW and columns is None:
        tokens.looked_at[op, "y"] = op.y
        found[-2] = NEW
    elif inner != (None, None):
        word = "scores that no causal softmax has masked" if SEEN in inner else "tokens"
        return Refusal(f"it sums over {word}")
    elif rows == NEW and columns == NEW:
        tokens.looked_at[op, "y"] = op.y
        found |= {-2: NEW, -1: SEEN}
    elif rows is not None and columns is not None:
        return Refusal("both its factors hold tokens, and one of them scores")
    else:
        found |= {axis: label for axis, label in ((-2, rows), (-1, columns)) if label is not None}
        if op.x in tokens.axes and op.y in tokens.axes and NEW not in batch.values():
            return Refusal("one of its factors depends on all tokens")
    return _opened({axis + out.rank: label for axis, label in found.items()})


def _apart(op: Operation, sides: Mapping[str, Axes], batch: Axes) -> Refusal | None:
    """Why a product of matrices for each token (of axes from the end) mixes tokens; None if it does not."""
    for name, labels in sides.items():
        var = op.inputs[name]
        if any(labels.get(axis, label) != label for axis, label in batch.items()):
            return Refusal("its factors hold different tokens")
        if any(-a <= var.rank and a not in labels and var.shape[a] != 1 for a in batch):
            return Refusal(f"%{var.name} holds a matrix for each token")
    if NEW in batch.values() and NEW in (sides["x"].get(-2), sides["y"].get(-1)):
        return Refusal("its factors hold the tokens on different axes")
    return None


def _fused(op: Operation, tokens: Tokens) -> Made:
    """Attention in one op."""
    given = {name: op.inputs[name] for name in ("query", "key", "value")}
    for var in given.values():
        if tokens.axes.get(var) != {var.rank - 2: NEW}:
            return Refusal(f"%{var.name} does not hold the tokens on its last axis but one")
    window = causal_window(op)
    if isinstance(window, Refusal):
        return window
    tokens.windows[op] = window
    tokens.looked_at |= {(op, name): given[name] for name in ("key", "value")}
    return {op.query.rank - 2: NEW}


def _along(op: Operation, tokens: Tokens) -> Made:
    """Along axes that hold no tokens; a softmax along those that are looked at makes weights of scores."""
    values = [v for v in op.inputs["values"] if v in tokens.axes] if "values" in op.inputs else [op.x]
    axes, rank = tokens.axes.get(values[0]), values[0].rank
    if axes is None or any(tokens.axes[v] != axes for v in values):
        return Refusal("its operands hold the tokens on different axes")
    given = ints(op, "axes") or ints(op, "axis")
    along = {a % rank for a in given} or (set(range(rank)) if op.op_type in REDUCTIONS else {rank - 1})
    labels = {axes[a] for a in along if a in axes}
    if op.op_type == "softmax" and labels == {SEEN}:
        window = _window(op, tokens.masks)
        if isinstance(window, Refusal):
            return window
        tokens.windows[op] = window
        return {a: WEIGHTS if a in along else label for a, label in axes.items()}
    if labels:
        return Refusal("it mixes tokens")
    if op.op_type in REDUCTIONS | {"reduce_argmax", "reduce_argmin"} and not flag(op, "keep_dims"):
        axes = {a - sum(b < a for b in along): label for a, label in axes.items()}
    return _opened(axes)


def _window(op: Operation, known: dict[object, int | Refusal]) -> int | Refusal:
    """How far a softmax looks back, or why it is not causal; a chain of the same masks is read once."""
    chain = mask_chain(op)
    if chain is None or isinstance(chain, Refusal):
        return causal_window(op)
    key = (chain.masks, chain.size, tuple(op.op_type for op in chain.ops))
    if key not in known:
        known[key] = causal_window(op)
    return known[key]


def _moved(op: Operation, tokens: Tokens, places: Mapping[int, int]) -> Made:
    """Axes that stand elsewhere in the result: old axis -> new axis."""
    axes = tokens.axes.get(op.x)
    if axes is None:
        return Refusal("what it moves does not depend on the tokens, but where to does")
    if not axes.keys() <= places.keys():
        return Refusal("it does away with the axis of the tokens")
    return {places[axis]: label for axis, label in axes.items()}


def _transpose(op: Operation, tokens: Tokens) -> Made:
    perm = [axis % op.x.rank for axis in ints(op, "perm")]
    return _moved(op, tokens, {axis: place for place, axis in enumerate(perm)})


def _expand_dims(op: Operation, tokens: Tokens) -> Made:
    rank = op.outputs[0].rank
    new = {axis % rank for axis in ints(op, "axes")}
    return _moved(op, tokens, dict(enumerate(a for a in range(rank) if a not in new)))


def _stack(op: Operation, tokens: Tokens) -> Made:
    """Values with the tokens on the same axes, along a new one."""
    given = [tokens.axes.get(v) for v in op.inputs["values"]]
    first, axis = given[0], ints(op, "axis")[0] % op.outputs[0].rank
    if first is None or any(axes != first for axes in given):
        return Refusal("its operands hold the tokens on different axes")
    return _opened({a if a < axis else a + 1: label for a, label in first.items()})


def _squeeze(op: Operation, tokens: Tokens) -> Made:
    given = op.inputs.get("axes")
    gone = [a % op.x.rank for a in ints(op, "axes")] if given is not None else []
    if given is None:
        gone = [a for a, d in enumerate(op.x.shape) if d == 1]
    kept = [a for a in range(op.x.rank) if a not in gone]
    return _moved(op, tokens, {axis: place for place, axis in enumerate(kept)})


def _reshape(op: Operation, tokens: Tokens) -> Made:
    """An axis stays the same where as many elements as before stand before it, and it is as long."""
    old, new = static_shape(op.x), static_shape(op.outputs[0])
    assert old is not None
    assert new is not None
    if constant(op.shape) is None or op.x not in tokens.axes:
        return Refusal("its shape is dynamic")
    places = {}
    for axis in tokens.axes[op.x]:
        before = math.prod(old[:axis])
        fits = [a for a, d in enumerate(new) if d == old[axis] and math.prod(new[:a]) == before]
        if not fits:
            return Refusal("it merges the axis of the tokens with others")
        places[axis] = fits[-1]
    return _moved(op, tokens, places)


def _slice(op: Operation, tokens: Tokens) -> Made:
    """Slices of other axes."""
    axes, places = tokens.axes.get(op.x, {}), {a: i for i, a in enumerate(_staying(op))}
    same = all(a in places and op.outputs[0].shape[places[a]] == op.x.shape[a] for a in axes)
    if op.op_type == "slice_by_index" and any(ints(op, "stride")[a : a + 1] in ([-1],) for a in axes):
        same = False
    if not axes or not same or constant(op.begin) is None:
        return Refusal("it takes some of the tokens only")
    return _moved(op, tokens, places)


def _staying(op: Operation) -> list[int]:
    """The axes of what is sliced that the result has."""
    gone = ints(op, "squeeze_mask") if op.op_type == "slice_by_index" else []
    return [a for a in range(op.x.rank) if not any(gone[a : a + 1])]


def _written(op: Operation, tokens: Tokens) -> Made:
    """Values of all tokens that replace others, or constants, on other axes."""
    axes = tokens.axes.get(op.update)
    if axes is None or tokens.axes.get(op.x, axes) != axes:
        return Refusal("what it writes holds other tokens than what it writes to")
    whole = all(op.update.shape[a] == op.x.shape[a] for a in axes)
    if not whole or any(constant(op.inputs[name]) is None for name in ("begin", "end")):
        return Refusal("it writes some of the tokens only")
    strided = any(ints(op, "stride")[a : a + 1] == [-1] for a in axes)
    squeezed = any(any(ints(op, "squeeze_mask")[a : a + 1]) for a in range(op.x.rank))
    return Refusal("it turns the tokens") if strided or squeezed else _opened(axes)


def _tile(op: Operation, tokens: Tokens) -> Made:
    reps = ints(op, "reps")
    if not reps or op.x not in tokens.axes or any(reps[axis] != 1 for axis in tokens.axes[op.x]):
        return Refusal("it repeats the tokens")
    return tokens.axes[op.x]


def _gather(op: Operation, tokens: Tokens) -> Made:
    """Rows of a table by tokens, or some of what each token has."""
    if ints(op, "batch_dims") not in ([], [0]):
        return Refusal("it gathers by batches")
    axis = (ints(op, "axis") or [0])[0] % op.x.rank
    if op.x not in tokens.axes:
        return {a + axis: label for a, label in tokens.axes[op.indices].items()}
    axes = tokens.axes[op.x]
    if op.indices in tokens.axes or axis in axes:
        return Refusal("it picks some of the tokens")
    return {a if a < axis else a + op.indices.rank - 1: label for a, label in axes.items()}


def _gather_along_axis(op: Operation, tokens: Tokens) -> Made:
    axis = (ints(op, "axis") or [0])[0] % op.x.rank
    given = [tokens.axes[v] for v in (op.x, op.indices) if v in tokens.axes]
    if axis in given[0] or given[0] != given[-1] or (op.indices not in tokens.axes):
        return Refusal("it picks some of the tokens")
    return given[0]


def _conv(op: Operation, tokens: Tokens) -> Made:
    """A convolution whose window is one token wide."""
    axes = tokens.axes.get(op.x, {})
    spatial = [axis - 2 for axis in axes if axis > 1]
    strides = ints(op, "strides") or [1] * (op.x.rank - 2)
    wide = any(int(op.weight.shape[axis + 2]) != 1 or strides[axis] != 1 for axis in spatial)
    padded = any(op.outputs[0].shape[axis] != op.x.shape[axis] for axis in axes if axis != 1)
    if 1 in axes or wide or padded or op.weight in tokens.axes:
        return Refusal("its window is more than one token wide")
    return axes


Rule: TypeAlias = "Callable[[Operation, Tokens], Made]"

RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(ALONG | REDUCTIONS, _along),
    "conv": _conv,
    "expand_dims": _expand_dims,
    "gather": _gather,
    "gather_along_axis": _gather_along_axis,
    "linear": _linear,
    "matmul": _matmul,
    "reshape": _reshape,
    "scaled_dot_product_attention": _fused,
    "slice_by_index": _slice,
    "slice_by_size": _slice,
    "slice_update": _written,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "transpose": _transpose,
}
"""Op type -> the labels of its results."""

__all__ = ["NEW", "SEEN", "WEIGHTS", "Axes", "Tokens", "follow", "lengthened", "tables"]
