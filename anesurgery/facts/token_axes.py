"""Follow the tokens of a decoder through its ops: on which axis each value holds them.

From the input on, each value that depends on the tokens has labels on its axes:

* `NEW`: one row for each token that is given;
* `SEEN`: one column for each token that is looked at (attention scores);
* `WEIGHTS`: the same after a causal softmax, so that what lies ahead of a token weighs nothing.

An op that mixes tokens in another way than causal attention or a convolution that looks back is a refusal.
What is left then depends, for each token, on that token and on what was looked at of those before it: a cache
of this is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from anesurgery.errors import Refusal
from anesurgery.facts import windows
from anesurgery.facts.attention import chain_to, mask_chain
from anesurgery.facts.masks import causal_window, window_of
from anesurgery.mil import Block, Operation, Var, consumers, operands, producer, static_shape
from anesurgery.ops import LOOKUPS, MOVING, POINTWISE, names
from anesurgery.semantics.reading import axis_of, flag, ints, sliced
from anesurgery.semantics.rows import Operand, Place, axes_not_squeezed, places_of

NEW, SEEN, WEIGHTS = "new", "seen", "weights"

Axes: TypeAlias = "Mapping[int, str]"
"""Axis -> its label."""

KEEPS_ZEROS = MOVING | names("cast identity mul real_div")
"""Ops after which a weight of 0 is still 0."""

LOST = {
    "conv": "its window is more than one token wide",
    "linear": "it sums over the tokens",
    "reshape": "it merges the axis of the tokens with others",
    "slice_update": "it writes some of the tokens only",
    "tile": "it repeats the tokens",
    **dict.fromkeys(("slice_by_index", "slice_by_size"), "it takes some of the tokens only"),
    **dict.fromkeys(LOOKUPS, "it picks some of the tokens"),
}
"""Why an axis of tokens does not come out of an op; of others: it mixes tokens."""


@dataclass
class Tokens:
    """Where the values of a block hold the tokens."""

    axes: dict[Var, Axes] = field(default_factory=dict)
    """Of each value that depends on the tokens."""
    looked_at: dict[tuple[Operation, str], Var] = field(default_factory=dict)
    """The keys and values: (product, its parameter) -> the operand."""
    tables: dict[Operation, dict[Var, Axes]] = field(default_factory=dict)
    """What each op reads that does not depend on the tokens but has a row or a column for each."""
    windows: dict[Operation, int] = field(default_factory=dict)
    """Softmax or fused attention -> how many tokens each one sees at most, itself counted."""
    masks: dict[object, int | Refusal] = field(default_factory=dict)
    """The window of each mask, or why it is not causal; all layers share one, as a rule."""
    reaches: dict[Operation, int] = field(default_factory=dict)
    """Convolution along the tokens -> how many before its own each result looks at."""
    zeros: dict[Var, Operation] = field(default_factory=dict)
    """What has zeros before the first token -> the pad that puts them there."""
    beyond: dict[Var, int] = field(default_factory=dict)
    """What holds more than the tokens, behind them -> the axis."""
    first: dict[Operation, int] = field(default_factory=dict)
    """Slice that takes the tokens, and nothing behind them -> the axis of its result."""

    @property
    def length(self) -> int:
        """How many tokens are given."""
        var = next(iter(self.axes))
        return int(var.shape[self.new_axis(var)])

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
        made = labels_of(op, found)
        if isinstance(made, Refusal):
            return Refusal(made.reason, op)
        found.axes |= dict.fromkeys(op.outputs, made)
        found.tables[op] = tables(op, found)
    more = [v for v in block.outputs if v in found.beyond or v in found.zeros]
    lost = [v for v in block.outputs if NEW not in found.axes.get(v, {}).values()] + more
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
    sized = {"reshape": "shape", "slice_by_size": "size"}
    if op.op_type in sized:
        shape = enumerate(op.outputs[0].shape)
        return {sized[op.op_type]: [length[axes[a]] if a in axes else int(d) for a, d in shape]}
    if op.op_type in ("slice_by_index", "slice_update"):
        masks = {name: ints(op, name) or [0] * op.x.rank for name in ("begin_mask", "end_mask")}
        whole = {a for place, a in enumerate(axes_not_squeezed(op)) if place in axes}
        return {name: [bool(m) or a in whole for a, m in enumerate(given)] for name, given in masks.items()}
    if op.op_type == "squeeze" and op.inputs.get("axes") is None:
        return {"axes": [a for a, d in enumerate(op.x.shape) if d == 1]}
    return {}


def tables(op: Operation, tokens: Tokens) -> dict[Var, Axes]:
    """The operands that do not depend on the tokens but have a row or a column for each, with these axes."""
    out = op.outputs[0]
    labels = tokens.axes.get(out, {})
    if op.op_type == "scaled_dot_product_attention":
        mask = op.inputs.get("attn_mask")
        shift = 0 if mask is None else out.rank - mask.rank
        columns = {out.rank - 2: NEW, out.rank - 1: SEEN}
        places = {} if mask is None else {mask: [a + shift for a in range(mask.rank)]}
        return _long(places, columns)
    if op.op_type in FREE_OF_TABLES or op in tokens.reaches:
        return {}
    return _long({o.var: o.places for o in places_of(op) or () if o.var not in tokens.axes}, labels)


def _long(places: Mapping[Var, Sequence[Place]], labels: Axes) -> dict[Var, Axes]:
    """The labels of the axes of operands that are longer than 1."""
    axes = {
        var: {
            a: labels[at]
            for a, at in enumerate(of)
            if isinstance(at, int) and at in labels and var.shape[a] != 1
        }
        for var, of in places.items()
    }
    return {var: some for var, some in axes.items() if some}


Made: TypeAlias = "Axes | Refusal"


def labels_of(op: Operation, tokens: Tokens) -> Made:
    """The labels of what an op makes, or why the tokens cannot be followed through it."""
    if any(v in tokens.beyond for _, v in operands(op)):
        return _beyond(op, tokens)
    if op.op_type != "conv" and any(v in tokens.zeros for _, v in operands(op)):
        return Refusal("it reads tokens with zeros before the first one, as only a convolution may")
    return RULES.get(op.op_type, _carried)(op, tokens)


def _carried(op: Operation, tokens: Tokens) -> Made:
    """Labels go where the axes of the operands go."""
    axes = places_of(op)
    if axes is None:
        return Refusal(LOST.get(op.op_type, f"how {op.op_type} treats the tokens is not known"))
    holding = [o for o in axes if o.var in tokens.axes]
    if any(v in tokens.axes for _, v in operands(op) if v not in {o.var for o in holding}):
        return Refusal("what it moves does not depend on the tokens, but where to does")
    labels = _met(op, holding, tokens)
    if isinstance(labels, Refusal):
        return labels
    if len({label == NEW for label in labels.values()}) < len(labels):
        return Refusal("each token meets all others")
    for operand in holding:
        held = {operand.places[axis]: label for axis, label in tokens.axes[operand.var].items()}
        whole = any(place in labels.keys() - held.keys() for place in operand.places)
        if whole or (NEW in labels.values() and NEW not in held.values()):
            return Refusal(f"%{operand.var.name} depends on all tokens, and meets values of single ones")
    return labels if op.op_type in KEEPS_ZEROS else _opened(labels)


def _met(op: Operation, holding: Sequence[Operand], tokens: Tokens) -> dict[int, str] | Refusal:
    """The labels of all operands where their axes go, or why one has no place there."""
    labels: dict[int, str] = {}
    for operand in holding:
        for axis, label in tokens.axes[operand.var].items():
            place = operand.places[axis]
            if not isinstance(place, int):
                return Refusal(LOST.get(op.op_type, "it mixes tokens"))
            before = labels.setdefault(place, label)
            if {before, label} == {SEEN, WEIGHTS}:
                labels[place] = WEIGHTS
            elif before != label:
                return Refusal(f"%{operand.var.name} meets values of other tokens")
    return labels


def _opened(axes: Axes) -> dict[int, str]:
    """Weights that were changed may be other than 0 ahead of a token."""
    return {axis: SEEN if label == WEIGHTS else label for axis, label in axes.items()}


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


def _conv(op: Operation, tokens: Tokens) -> Made:
    """A window along the tokens that looks back; what it reads is kept, as keys are."""
    labels = tokens.axes.get(op.x, {})
    axis = next((a for a, label in labels.items() if label == NEW), 0)
    pad = tokens.zeros.get(op.x)
    if op.weight in tokens.axes or (pad is None and (axis < 2 or windows.pointwise(op, axis))):
        return _carried(op, tokens)
    zeros = windows.zeros_before(pad, axis) if pad is not None else 0
    if isinstance(zeros, Refusal) or set(labels.values()) != {NEW}:
        return Refusal("it does not hold the tokens on one axis") if not isinstance(zeros, Refusal) else zeros
    reach = windows.reach(op, axis, zeros)
    if isinstance(reach, Refusal):
        return reach
    out, source = op.outputs[0], op.x if pad is None else pad.x
    tokens.looked_at[op, "x"] = source
    tokens.reaches[op] = reach
    if out.shape[axis] != source.shape[axis]:
        tokens.beyond[out] = axis
    return {axis: NEW}


def _pad(op: Operation, tokens: Tokens) -> Made:
    """Zeros before the first token, for a convolution to look at."""
    labels = tokens.axes[op.x]
    moved = [a for a, label in labels.items() if op.x.shape[a] != op.outputs[0].shape[a]]
    if not moved or set(labels.values()) != {NEW}:
        return _carried(op, tokens)
    zeros = windows.zeros_before(op, moved[0])
    if isinstance(zeros, Refusal):
        return zeros
    tokens.zeros[op.outputs[0]] = op
    return labels


def _concat(op: Operation, tokens: Tokens) -> Made:
    """Scores of sinks, which are no tokens, may stand behind those of the tokens."""
    first, rest = op.values[0], op.values[1:]
    labels, along = tokens.axes.get(first, {}), (ints(op, "axis") or [0])[0] % op.outputs[0].rank
    if labels.get(along) != SEEN or any(v in tokens.axes for v in rest):
        return _carried(op, tokens)
    tokens.beyond[op.outputs[0]] = along
    return _opened(labels)


def _log_sum(op: Operation, tokens: Tokens) -> Made:
    """The weight of all scores that a causal mask keeps, as sinks are compared with."""
    labels, along = tokens.axes[op.x], ints(op, "axes")
    masked = [a for a, label in labels.items() if label == SEEN]
    if [a % op.x.rank for a in along] != masked or masked != [op.x.rank - 1]:
        return _carried(op, tokens)
    window = window_of(chain_to(op.x), op)
    if isinstance(window, Refusal):
        return window
    tokens.windows[op] = window
    return {a: label for a, label in labels.items() if a not in masked}


def _reduce_max(op: Operation, tokens: Tokens) -> Made:
    """The maximum of scores, where it is only taken away before their softmax: that changes nothing."""
    labels = tokens.axes[op.x]
    along = next((a for a, label in labels.items() if label == SEEN), -1)
    if not is_maximum_of(op, along):
        return _carried(op, tokens)
    return {a: label for a, label in labels.items() if a != along}


def _sub(op: Operation, tokens: Tokens) -> Made:
    """Scores without their maximum are scores."""
    if op.x in tokens.axes and SEEN in tokens.axes[op.x].values() and shifted_by_maximum(op):
        return tokens.axes[op.x]
    return _carried(op, tokens)


def _beyond(op: Operation, tokens: Tokens) -> Made:
    """What holds more than the tokens is changed element by element, weighed, or cut to the tokens."""
    out, held = op.outputs[0], [v for _, v in operands(op) if v in tokens.beyond]
    axis = tokens.beyond[held[0]]
    if len({(tokens.beyond[v] - v.rank) for v in held}) > 1:
        return Refusal("it reads what stands behind the tokens")
    if op.op_type in ("slice_by_index", "slice_by_size"):
        return _first(op, axis, tokens)
    labels = RULES.get(op.op_type, _carried)(op, tokens)
    if isinstance(labels, Refusal) or op.op_type == "reduce_max":
        return labels
    others = [v for _, v in operands(op) if v not in held]
    if op.op_type == "transpose":
        axis = (ints(op, "perm")).index(axis)
    elif op.op_type not in POINTWISE | names("cast softmax") or any(_reaches(v, axis, out) for v in others):
        return Refusal("it reads what stands behind the tokens")
    tokens.beyond[out] = axis
    return labels


def _reaches(var: Var, axis: int, out: Var) -> bool:
    """Has an operand a place for each of an axis of the result?"""
    at = axis - out.rank + var.rank
    return at >= 0 and var.shape[at] != 1


def _first(op: Operation, axis: int, tokens: Tokens) -> Made:
    """A slice of the tokens at the beginning of an axis, and of all of the other ones."""
    x, out, labels = op.x, op.outputs[0], tokens.axes[op.x]
    whole = [a for a in range(x.rank) if a != axis and a in labels]
    parts = sliced(op)
    if any(part.begin is None or part.stride != 1 for part in parts) or out.rank != x.rank:
        return Refusal("how it takes tokens is not known")
    starts = all(parts[a].begin == 0 for a in (axis, *whole))
    if not starts or out.shape[axis] != tokens.length or any(out.shape[a] != x.shape[a] for a in whole):
        return Refusal("it takes other than the tokens of what holds more")
    tokens.first[op] = axis
    return labels


def _softmax(op: Operation, tokens: Tokens) -> Made:
    """A softmax along those that are looked at makes weights of scores."""
    axes, along = tokens.axes[op.x], axis_of(op)
    if axes.get(along) != SEEN:
        return _carried(op, tokens)
    window = _window(op, tokens.masks)
    if isinstance(window, Refusal):
        return window
    tokens.windows[op] = window
    return {**axes, along: WEIGHTS}


def _window(op: Operation, known: dict[object, int | Refusal]) -> int | Refusal:
    """How far a softmax looks back, or why it is not causal; a chain of the same masks is read once."""
    scores = masked_scores(op)
    chain = mask_chain(op) if scores is op.x else chain_to(scores)
    if isinstance(chain, Refusal):
        return window_of(chain, op)
    key = (chain.masks, chain.size, tuple(op.op_type for op in chain.ops))
    if key not in known:
        known[key] = window_of(chain, op)
    return known[key]


Rule: TypeAlias = "Callable[[Operation, Tokens], Made]"

RULES: dict[str, Rule] = {
    "concat": _concat,
    "conv": _conv,
    "matmul": _matmul,
    "pad": _pad,
    "reduce_log_sum_exp": _log_sum,
    "reduce_max": _reduce_max,
    "scaled_dot_product_attention": _fused,
    "softmax": _softmax,
    "sub": _sub,
}
"""Ops in which tokens meet as attention lets them; in all others their labels go where the axes go."""

FREE_OF_TABLES = names("matmul softmax")
"""Ops of which no operand has a row for each token."""


# Attention sinks: columns beside the scores that take their share of a softmax, and are dropped after it.
#
# Their scores do not depend on the keys. They follow the scores of the tokens. The maximum of each row may be
# subtracted before the softmax, which changes nothing.


def is_maximum_of(op: Operation, axis: int) -> bool:
    """Is it the maximum along an axis that is only taken away before a softmax along it?"""
    along = [a % op.x.rank for a in ints(op, "axes") or ()]
    if op.op_type != "reduce_max" or along != [axis] or not flag(op, "keep_dims"):
        return False
    shifted = consumers(op.outputs[0])
    return bool(shifted) and all(_shifts(s, op) and _only_weighed(s, axis) for s in shifted)


def _shifts(op: Operation, maximum: Operation) -> bool:
    """Does it take the maximum away from what it is the maximum of?"""
    return op.op_type == "sub" and op.x is maximum.x and op.y is maximum.outputs[0]


def _only_weighed(op: Operation, axis: int) -> bool:
    """Do only softmaxes along an axis read it, perhaps in another type?"""
    readers = consumers(op.outputs[0])
    return bool(readers) and all(
        _only_weighed(r, axis)
        if r.op_type == "cast"
        else r.op_type == "softmax" and (ints(r, "axis") or [-1])[0] % r.x.rank == axis
        for r in readers
    )


def shifted_by_maximum(op: Operation) -> bool:
    """Is it a value from which its own maximum is taken away, which softmaxes alone read?"""
    maximum = producer(op.y, "reduce_max") if op.op_type == "sub" else None
    if maximum is None or op.x is not maximum.x:
        return False
    along = [a % maximum.x.rank for a in ints(maximum, "axes") or ()]
    return len(along) == 1 and is_maximum_of(maximum, along[0])


def masked_scores(softmax: Operation) -> Var:
    """The scores of tokens that a softmax weighs: what it reads, without sinks and maxima."""
    end = found = softmax.x
    while (op := producer(end, "cast", "sub", "concat")) is not None:
        if op.op_type == "concat":
            return op.values[0]
        if op.op_type == "sub" and not shifted_by_maximum(op):
            break
        end = op.x
        found = end if op.op_type == "sub" else found
    return found
