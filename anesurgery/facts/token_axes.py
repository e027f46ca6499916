"""Follow the tokens of a decoder through its ops: the role of each axis of each value.

`follow(block, inputs)` gives each axis that stands for tokens a role. In attention over T tokens with H heads
of width D:

======================== ========================= =====================================================
value                    shape                     roles of the axes
======================== ========================= =====================================================
hidden states, queries   (1, T, H * D)             {1: NEW}: a row for each token of this call
keys of all heads        (1, H, T, D)              {2: NEW}
scores                   (1, H, T, T)              {2: NEW, 3: SEEN}: a column for each token looked at
after the causal softmax (1, H, T, T)              {2: NEW, 3: WEIGHTS}: SEEN, and 0 for later tokens
weights times values     (1, H, T, D)              {2: NEW}
======================== ========================= =====================================================

A value that does not depend on the tokens has no roles. Only ops with a function in `RULES` may combine tokens:
causal attention, and convolutions that look back. Any other op that mixes tokens is refused. If nothing is
refused, the results of a token depend only on itself and on the keys and values (`Tokens.looked_at`) of earlier
tokens. So a cache of these is enough, and the pass `add_cache` builds a stateful decoder from the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from anesurgery.errors import Refusal
from anesurgery.facts import windows
from anesurgery.facts.attention import chain_to, mask_chain
from anesurgery.facts.masks import causal_window
from anesurgery.mil import Block, Operation, Var, consumers, operands, producer, static_shape
from anesurgery.ops import LOOKUPS, MOVING, POINTWISE, names
from anesurgery.semantics.reading import axis_of, flag, ints, sliced
from anesurgery.semantics.rows import Operand, Place, axes_not_squeezed, places_of

NEW, SEEN, WEIGHTS = "new", "seen", "weights"

Axes: TypeAlias = "Mapping[int, str]"
"""Axis -> its role."""

KEEPS_ZEROS = MOVING | names("cast identity mul real_div")
"""Ops that turn a weight of 0 into 0, so that `WEIGHTS` stays `WEIGHTS`."""

MIXES = (
    "it mixes tokens otherwise than causal attention, so no cache can be added; `generate` runs such a model "
    "without one"
)
"""The reason for refusing an op that is none of the ops below."""
LOST = {
    "conv": "its window is more than one token wide",
    "linear": "it sums over the tokens",
    "reshape": "it merges the axis of the tokens with others",
    "slice_update": "it writes only some of the tokens",
    "tile": "it repeats the tokens",
    **dict.fromkeys(("slice_by_index", "slice_by_size"), "it reads only some of the tokens"),
    **dict.fromkeys(LOOKUPS, "it picks some of the tokens"),
}
"""Op type -> the reason for refusing it, if it removes the axis of the tokens; for other ops it is `MIXES`."""


@dataclass
class Tokens:
    """The result of `follow`: roles of axes in each value of a block, and the ops that combine tokens."""

    axes: dict[Var, Axes] = field(default_factory=dict)
    """Value that depends on the tokens -> roles of its axes."""
    looked_at: dict[tuple[Operation, str], Var] = field(default_factory=dict)
    """(product or convolution, parameter) -> the operand that must be cached: keys, values, inputs."""
    tables: dict[Operation, dict[Var, Axes]] = field(default_factory=dict)
    """Op -> its operands that do not depend on the tokens but have a row or column for each (a mask, a table of
    positions) -> roles of their axes."""
    windows: dict[Operation, int] = field(default_factory=dict)
    """Softmax or fused attention -> the most tokens that one token sees, itself included."""
    masks: dict[object, int | Refusal] = field(default_factory=dict)
    """Mask -> its window, or why it is not causal; layers usually share one mask."""
    reaches: dict[Operation, int] = field(default_factory=dict)
    """Convolution along the tokens -> the number of earlier tokens that a result depends on."""
    zeros: dict[Var, Operation] = field(default_factory=dict)
    """Value with zeros before the first token -> the pad that adds them."""
    beyond: dict[Var, int] = field(default_factory=dict)
    """Value with more entries after those of the tokens, such as attention sinks -> the axis."""
    first: dict[Operation, int] = field(default_factory=dict)
    """Slice that takes only the tokens of such a value -> the axis of its result."""

    @property
    def length(self) -> int:
        """The number of tokens of a call."""
        var = next(iter(self.axes))
        return int(var.shape[self.new_axis(var)])

    def new_axis(self, var: Var) -> int:
        """Return the axis of a value with the role `NEW`."""
        return next(axis for axis, label in self.axes[var].items() if label == NEW)


def follow(block: Block, inputs: Mapping[Var, int]) -> Tokens | Refusal:
    """Return the roles of all values, or a refusal that names the op that mixes tokens as no cache can.

    Args:
        block: the block.
        inputs: input with an entry for each token -> the axis of the tokens.
    """
    tokens = Tokens({var: {axis: NEW} for var, axis in inputs.items()})
    for op in block.operations:
        if not any(v in tokens.axes for _, v in operands(op)):
            continue
        if any(static_shape(v) is None for v in op.outputs):
            return Refusal("a shape is dynamic", op)
        labels = labels_of(op, tokens)
        if isinstance(labels, Refusal):
            return Refusal(labels.reason, op)
        tokens.axes |= dict.fromkeys(op.outputs, labels)
        tokens.tables[op] = tables(op, tokens)
    with_others = [v for v in block.outputs if v in tokens.beyond or v in tokens.zeros]
    without_tokens = [v for v in block.outputs if NEW not in tokens.axes.get(v, {}).values()] + with_others
    if without_tokens:
        return Refusal(f"the output %{without_tokens[0].name} has no axis of tokens", without_tokens[0].op)
    return tokens


def lengthened(op: Operation, axes: Axes, length: Mapping[str, int]) -> dict[str, list[int] | list[bool]]:
    """Return the parameters of an op that state how many tokens there are, changed for another number of them.

    Args:
        op: the op.
        axes: the roles of the axes of its result.
        length: role -> the new length of axes with this role.
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
    """Return the entry of `Tokens.tables` for an op."""
    out = op.outputs[0]
    labels = tokens.axes.get(out, {})
    if op.op_type == "scaled_dot_product_attention":
        mask = op.inputs.get("attn_mask")
        shift = 0 if mask is None else out.rank - mask.rank
        columns = {out.rank - 2: NEW, out.rank - 1: SEEN}
        places = {} if mask is None else {mask: [a + shift for a in range(mask.rank)]}
        return _labels_of_long_axes(places, columns)
    if op.op_type in FREE_OF_TABLES or op in tokens.reaches:
        return {}
    return _labels_of_long_axes(
        {o.var: o.places for o in places_of(op) or () if o.var not in tokens.axes}, labels
    )


def _labels_of_long_axes(places: Mapping[Var, Sequence[Place]], labels: Axes) -> dict[Var, Axes]:
    """Return the roles of operands' axes that are longer than 1."""
    axes = {
        var: {
            a: labels[at]
            for a, at in enumerate(of)
            if isinstance(at, int) and at in labels and var.shape[a] != 1
        }
        for var, of in places.items()
    }
    return {var: some for var, some in axes.items() if some}


Labels: TypeAlias = "Axes | Refusal"


def labels_of(op: Operation, tokens: Tokens) -> Labels:
    """Return the roles of the axes of an op's results, or why the tokens cannot be followed through it."""
    if any(v in tokens.beyond for _, v in operands(op)):
        return _with_more_entries(op, tokens)
    if op.op_type != "conv" and any(v in tokens.zeros for _, v in operands(op)):
        return Refusal("it reads tokens with zeros before the first one, as only a convolution may")
    return RULES.get(op.op_type, _labels_by_axes)(op, tokens)


def _labels_by_axes(op: Operation, tokens: Tokens) -> Labels:
    """Move the roles of the operands' axes to the axes of the result."""
    axes = places_of(op)
    if axes is None:
        return Refusal(LOST.get(op.op_type, f"how {op.op_type} treats the tokens is not known"))
    with_tokens = [o for o in axes if o.var in tokens.axes]
    if any(v in tokens.axes for _, v in operands(op) if v not in {o.var for o in with_tokens}):
        return Refusal("what it moves does not depend on the tokens, but where to does")
    labels = _combined_labels(op, with_tokens, tokens)
    if isinstance(labels, Refusal):
        return labels
    if len({label == NEW for label in labels.values()}) < len(labels):
        return Refusal("each token meets all others")
    for operand in with_tokens:
        placed = {operand.places[axis]: label for axis, label in tokens.axes[operand.var].items()}
        lacks_axis = any(place in labels.keys() - placed.keys() for place in operand.places)
        if lacks_axis or (NEW in labels.values() and NEW not in placed.values()):
            return Refusal(
                f"%{operand.var.name} depends on all tokens, but is combined with values of single tokens"
            )
    return labels if op.op_type in KEEPS_ZEROS else _weights_to_seen(labels)


def _combined_labels(op: Operation, holding: Sequence[Operand], tokens: Tokens) -> dict[int, str] | Refusal:
    """Return the roles of all operands by axis of the result, or why two do not agree."""
    labels: dict[int, str] = {}
    for operand in holding:
        for axis, label in tokens.axes[operand.var].items():
            place = operand.places[axis]
            if not isinstance(place, int):
                return Refusal(LOST.get(op.op_type, MIXES))
            before = labels.setdefault(place, label)
            if {before, label} == {SEEN, WEIGHTS}:
                labels[place] = WEIGHTS
            elif before != label:
                return Refusal(f"%{operand.var.name} is combined with values of other tokens")
    return labels


def _weights_to_seen(axes: Axes) -> dict[int, str]:
    """Turn `WEIGHTS` into `SEEN`, since weights that were changed may be other than 0 ahead of a token."""
    return {axis: SEEN if label == WEIGHTS else label for axis, label in axes.items()}


def _matmul(op: Operation, tokens: Tokens) -> Labels:
    """Give roles to a product's result; if both factors depend on the tokens, the second must be cached."""
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
    if (refusal := _batch_refusal(op, sides, batch)) is not None:
        return refusal
    labels = dict(batch)
    if inner == (WEIGHTS, NEW) and rows == NEW and columns is None:
        tokens.looked_at[op, "y"] = op.y
        labels[-2] = NEW
    elif inner != (None, None):
        word = "scores that no causal softmax has masked" if SEEN in inner else "tokens"
        return Refusal(f"it sums over {word}")
    elif rows == NEW and columns == NEW:
        tokens.looked_at[op, "y"] = op.y
        labels |= {-2: NEW, -1: SEEN}
    elif rows is not None and columns is not None:
        return Refusal("both its factors hold tokens, and one of them scores")
    else:
        labels |= {axis: label for axis, label in ((-2, rows), (-1, columns)) if label is not None}
        if op.x in tokens.axes and op.y in tokens.axes and NEW not in batch.values():
            return Refusal("one of its factors depends on all tokens")
    return _weights_to_seen({axis + out.rank: label for axis, label in labels.items()})


def _batch_refusal(op: Operation, sides: Mapping[str, Axes], batch: Axes) -> Refusal | None:
    """Return why a product with a matrix for each token mixes tokens; None if it does not.

    Axes in `sides` and `batch` are counted from the end.
    """
    for name, labels in sides.items():
        var = op.inputs[name]
        if any(labels.get(axis, label) != label for axis, label in batch.items()):
            return Refusal("its factors hold different tokens")
        if any(-a <= var.rank and a not in labels and var.shape[a] != 1 for a in batch):
            return Refusal(f"%{var.name} holds a matrix for each token")
    if NEW in batch.values() and NEW in (sides["x"].get(-2), sides["y"].get(-1)):
        return Refusal("its factors hold the tokens on different axes")
    return None


def _fused_attention(op: Operation, tokens: Tokens) -> Labels:
    """Give roles to the result of fused attention."""
    factors = {name: op.inputs[name] for name in ("query", "key", "value")}
    for var in factors.values():
        if tokens.axes.get(var) != {var.rank - 2: NEW}:
            return Refusal(f"%{var.name} does not hold the tokens on its last axis but one")
    window = causal_window(mask_chain(op), op)
    if isinstance(window, Refusal):
        return window
    tokens.windows[op] = window
    tokens.looked_at |= {(op, name): factors[name] for name in ("key", "value")}
    return {op.query.rank - 2: NEW}


def _conv(op: Operation, tokens: Tokens) -> Labels:
    """Give roles to the result of a convolution that looks back; its operand must be cached, like keys."""
    labels = tokens.axes.get(op.x, {})
    axis = next((a for a, label in labels.items() if label == NEW), 0)
    pad = tokens.zeros.get(op.x)
    if op.weight in tokens.axes or (pad is None and (axis < 2 or windows.is_pointwise_along(op, axis))):
        return _labels_by_axes(op, tokens)
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


def _pad(op: Operation, tokens: Tokens) -> Labels:
    """Accept zeros before the first token, for a convolution to look at."""
    labels = tokens.axes[op.x]
    moved = [a for a, label in labels.items() if op.x.shape[a] != op.outputs[0].shape[a]]
    if not moved or set(labels.values()) != {NEW}:
        return _labels_by_axes(op, tokens)
    zeros = windows.zeros_before(op, moved[0])
    if isinstance(zeros, Refusal):
        return zeros
    tokens.zeros[op.outputs[0]] = op
    return labels


def _concat(op: Operation, tokens: Tokens) -> Labels:
    """Accept scores of attention sinks, which are not tokens, after those of the tokens."""
    first, rest = op.values[0], op.values[1:]
    labels, along = tokens.axes.get(first, {}), (ints(op, "axis") or [0])[0] % op.outputs[0].rank
    if labels.get(along) != SEEN or any(v in tokens.axes for v in rest):
        return _labels_by_axes(op, tokens)
    tokens.beyond[op.outputs[0]] = along
    return _weights_to_seen(labels)


def _log_sum_of_scores(op: Operation, tokens: Tokens) -> Labels:
    """Accept the log-sum-exp of scores that a causal mask keeps, as attention sinks use."""
    labels, along = tokens.axes[op.x], ints(op, "axes")
    masked = [a for a, label in labels.items() if label == SEEN]
    if [a % op.x.rank for a in along] != masked or masked != [op.x.rank - 1]:
        return _labels_by_axes(op, tokens)
    window = causal_window(chain_to(op.x), op)
    if isinstance(window, Refusal):
        return window
    tokens.windows[op] = window
    return {a: label for a, label in labels.items() if a not in masked}


def _reduce_max(op: Operation, tokens: Tokens) -> Labels:
    """Accept the maximum of scores if it is only subtracted before their softmax, which changes nothing."""
    labels = tokens.axes[op.x]
    along = next((a for a, label in labels.items() if label == SEEN), -1)
    if not is_maximum_of(op, along):
        return _labels_by_axes(op, tokens)
    return {a: label for a, label in labels.items() if a != along}


def _sub(op: Operation, tokens: Tokens) -> Labels:
    """Accept scores minus their maximum as scores."""
    if op.x in tokens.axes and SEEN in tokens.axes[op.x].values() and shifted_by_maximum(op):
        return tokens.axes[op.x]
    return _labels_by_axes(op, tokens)


def _with_more_entries(op: Operation, tokens: Tokens) -> Labels:
    """Give roles to an op on values with more entries than tokens: pointwise, softmax, slice of the tokens."""
    out, longer = op.outputs[0], [v for _, v in operands(op) if v in tokens.beyond]
    axis = tokens.beyond[longer[0]]
    if len({(tokens.beyond[v] - v.rank) for v in longer}) > 1:
        return Refusal("it reads what stands behind the tokens")
    if op.op_type in ("slice_by_index", "slice_by_size"):
        return _slice_of_tokens(op, axis, tokens)
    labels = RULES.get(op.op_type, _labels_by_axes)(op, tokens)
    if isinstance(labels, Refusal) or op.op_type == "reduce_max":
        return labels
    others = [v for _, v in operands(op) if v not in longer]
    if op.op_type == "transpose":
        axis = (ints(op, "perm")).index(axis)
    elif op.op_type not in POINTWISE | names("cast softmax") or any(
        _varies_along(v, axis, out) for v in others
    ):
        return Refusal("it reads what stands behind the tokens")
    tokens.beyond[out] = axis
    return labels


def _varies_along(var: Var, axis: int, out: Var) -> bool:
    """Does an operand have an element for each index of an axis of the result?"""
    at = axis - out.rank + var.rank
    return at >= 0 and var.shape[at] != 1


def _slice_of_tokens(op: Operation, axis: int, tokens: Tokens) -> Labels:
    """Accept a slice that takes exactly the tokens at the start of an axis, and all of the other axes."""
    x, out, labels = op.x, op.outputs[0], tokens.axes[op.x]
    other_axes = [a for a in range(x.rank) if a != axis and a in labels]
    parts = sliced(op)
    if any(part.begin is None or part.stride != 1 for part in parts) or out.rank != x.rank:
        return Refusal("how it takes tokens is not known")
    starts = all(parts[a].begin == 0 for a in (axis, *other_axes))
    if not starts or out.shape[axis] != tokens.length or any(out.shape[a] != x.shape[a] for a in other_axes):
        return Refusal("it takes other than the tokens of what holds more")
    tokens.first[op] = axis
    return labels


def _softmax(op: Operation, tokens: Tokens) -> Labels:
    """Turn scores (`SEEN`) into `WEIGHTS` by a causal softmax."""
    axes, along = tokens.axes[op.x], axis_of(op)
    if axes.get(along) != SEEN:
        return _labels_by_axes(op, tokens)
    window = _window(op, tokens.masks)
    if isinstance(window, Refusal):
        return window
    tokens.windows[op] = window
    return {**axes, along: WEIGHTS}


def _window(op: Operation, known: dict[object, int | Refusal]) -> int | Refusal:
    """Return the most tokens that a softmax sees, or why it is not causal; each mask is read once."""
    scores = masked_scores(op)
    chain = mask_chain(op) if scores is op.x else chain_to(scores)
    if isinstance(chain, Refusal):
        return causal_window(chain, op)
    key = (chain.masks, chain.size, tuple(op.op_type for op in chain.ops))
    if key not in known:
        known[key] = causal_window(chain, op)
    return known[key]


Rule: TypeAlias = "Callable[[Operation, Tokens], Labels]"

RULES: dict[str, Rule] = {
    "concat": _concat,
    "conv": _conv,
    "matmul": _matmul,
    "pad": _pad,
    "reduce_log_sum_exp": _log_sum_of_scores,
    "reduce_max": _reduce_max,
    "scaled_dot_product_attention": _fused_attention,
    "softmax": _softmax,
    "sub": _sub,
}
"""Op type -> its rule; for all other ops the roles follow the axes (`_labels_by_axes`)."""

FREE_OF_TABLES = names("matmul softmax")
"""Ops without operands of the kind of `Tokens.tables`."""


# Attention sinks: additional columns after the scores of the tokens. They do not depend on the keys, take a
# share of the softmax and are removed after it. The maximum of each row may be subtracted before the softmax,
# which does not change the result.


def is_maximum_of(op: Operation, axis: int) -> bool:
    """Is an op the maximum along an axis that is only subtracted before a softmax along that axis?"""
    along = [a % op.x.rank for a in ints(op, "axes") or ()]
    if op.op_type != "reduce_max" or along != [axis] or not flag(op, "keep_dims"):
        return False
    shifted = consumers(op.outputs[0])
    return bool(shifted) and all(_subtracts_maximum(s, op) and _only_softmax_reads(s, axis) for s in shifted)


def _subtracts_maximum(op: Operation, maximum: Operation) -> bool:
    """Does an op subtract the maximum from the value that it is the maximum of?"""
    return op.op_type == "sub" and op.x is maximum.x and op.y is maximum.outputs[0]


def _only_softmax_reads(op: Operation, axis: int) -> bool:
    """Do only softmaxes along an axis read the result, perhaps through casts?"""
    values = [op.outputs[0]]
    for value in values:
        readers = list(consumers(value))
        values += [r.outputs[0] for r in readers if r.op_type == "cast"]
        others = [r for r in readers if r.op_type != "cast"]
        if not readers or any(r.op_type != "softmax" or axis_of(r) != axis for r in others):
            return False
    return True


def shifted_by_maximum(op: Operation) -> bool:
    """Does an op subtract the maximum of a value from it, for softmaxes only?"""
    maximum = producer(op.y, "reduce_max") if op.op_type == "sub" else None
    if maximum is None or op.x is not maximum.x:
        return False
    along = [a % maximum.x.rank for a in ints(maximum, "axes") or ()]
    return len(along) == 1 and is_maximum_of(maximum, along[0])


def masked_scores(softmax: Operation) -> Var:
    """Return the scores of the tokens in a softmax: without sinks, and before maxima are subtracted."""
    end = scores = softmax.x
    while (op := producer(end, "cast", "sub", "concat")) is not None:
        if op.op_type == "concat":  # along another axis the parts are heads, each with a mask of its own
            return op.values[0] if axis_of(op) == axis_of(softmax) else scores
        if op.op_type == "sub" and not shifted_by_maximum(op):
            break
        end = op.x
        scores = end if op.op_type == "sub" else scores
    return scores
