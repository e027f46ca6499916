"""Merge and split axes around an op: which neighbouring axes an op treats alike, and the op on merged axes.

A *view* is a list of groups of adjacent axes. Each group becomes one axis, and an empty group a new axis of
length 1: `[(0, 1), (2,)]` views `2x3x4` as `6x4`, `[(), (0,), (1,)]` views `2x3` as `1x2x3`. No element moves.
`frame(op)` says which views an op allows and builds it on one; passes use it to bring ops to rank 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise, permutations
from typing import Any, TypeAlias

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.mil import (
    Maker,
    Operation,
    Var,
    constant,
    fixed_shape,
    op_inputs,
    operands,
    producer,
    static_shape,
)
from anesurgery.ops import BROADCASTING, REDUCTIONS, UNARY, VIEWS
from anesurgery.semantics.reading import axes_of, axis_of, each_axis, ints, permutation
from anesurgery.semantics.rows import CONTRACTED, places_of


def joins_of_result(op: Operation) -> tuple[bool, ...]:
    """For each axis of the result but the last: do it and the next have the same operands?

    An axis of length 1 goes with its neighbour. Operands without axes are broadcast along all. For the sum of
    (2, 3, 4) and (3, 4) this is (False, True): axis 0 has only one of the operands.
    """
    operands, sizes = places_of(op) or (), fixed_shape(op.outputs[0])
    read = [o.places for o in operands if o.places]
    keys = [tuple(axis in places for places in read) if n != 1 else None for axis, n in enumerate(sizes)]
    last = next((key for key in keys if key is not None), None)
    for axis, key in enumerate(keys):
        last = keys[axis] = last if key is None else key
    return tuple(one == other for one, other in pairwise(keys))


def joins_of_operand(op: Operation, var: Var) -> tuple[bool, ...]:
    """For each axis of an operand but the last: do it and the next go to neighbours, or are both contracted?

    Mixed axes are never joined. An axis of length 1 that is kept may join any other kept axis. For a transpose
    of (2, 3, 4) with perm (1, 2, 0) this is (False, True): axes 1 and 2 stay neighbours.
    """
    sizes = fixed_shape(var)
    places = next((o.places for o in places_of(op) or () if o.var is var), ())
    kept_places = [p for p, n in zip(places, sizes, strict=False) if isinstance(p, int) and n != 1]
    order = {place: at for at, place in enumerate(sorted(kept_places))}
    joins, last_place = [], -1  # place of the last kept axis longer than 1, after one that is not kept
    for axis, (one, other) in enumerate(pairwise(places)):
        if isinstance(one, str) or isinstance(other, str):
            joins.append(one == other == CONTRACTED)
            last_place = -1
            continue
        last_place = order[one] if sizes[axis] != 1 else last_place
        joins.append(last_place < 0 or sizes[axis + 1] == 1 or order[other] == last_place + 1)
    return tuple(joins) if places else (False,) * (len(sizes) - 1)


Groups: TypeAlias = "Sequence[tuple[int, ...]]"
Build: TypeAlias = "Callable[[Maker, Groups], list[Var]]"


@dataclass(frozen=True)
class Frame:
    """The axes of an op: their lengths, which neighbours may merge, and how the op is built on a view."""

    sizes: tuple[int, ...]
    joins: tuple[bool, ...]
    """For each axis but the last: may it merge with the next one?"""
    build: Build
    """Builds the op on a view; its results still have to be reshaped to the old shape."""

    def merged(self, most: int) -> list[tuple[int, ...]] | None:
        """Return a view of at most `most` axes, or None; short axes merge first, as long ones leave the ANE."""
        groups: list[tuple[int, ...]] = [(axis,) for axis in range(len(self.sizes))]
        while len(groups) > most:
            pairs = [
                (math.prod(self.sizes[a] for a in (*groups[i], *groups[i + 1])), i)
                for i in range(len(groups) - 1)
                if self.joins[groups[i][-1]]
            ]
            if not pairs:
                return None
            i = min(pairs)[1]
            groups[i : i + 2] = [(*groups[i], *groups[i + 1])]
        return groups

    def lifted(self, rank: int) -> list[tuple[int, ...]]:
        """Return a view with new axes of length 1 in front, up to a rank."""
        new = rank - len(self.sizes)
        return [*[()] * new, *((axis,) for axis in range(len(self.sizes)))]


def tensors(op: Operation) -> list[Var]:
    """Return the operands that an op computes with and its results, without constant parameters."""
    read = [v for k, v in operands(op) if k in ("x", "y", "cond", "a", "b", "values")]
    return [*read, *op.outputs]


def seen_as(mb: Maker, var: Var, shape: Sequence[int]) -> Var:
    """Return the same elements in another shape; constants are reshaped once, views of views are skipped."""
    shape, old = tuple(shape), fixed_shape(var)
    if shape == old or not old:
        return var
    value = constant(var)
    if value is not None:
        name = f"{var.name}_{'x'.join(map(str, shape))}"
        return mb.shared(("seen_as", var, shape), lambda: np.reshape(value, shape), name)
    source = var
    while (view := producer(source, *VIEWS)) is not None and static_shape(view.x):
        source = view.x
        if fixed_shape(source) == shape:
            return source
    if shape_rank(source) <= max(len(old), len(shape)):
        var, old = source, fixed_shape(source)
    new = len(shape) - len(old)
    if new > 0 and shape == (1,) * new + old:
        return mb.expand_dims(x=var, axes=list(range(new)))
    if new < 0 and old == (1,) * -new + shape:
        return mb.squeeze(x=var, axes=list(range(-new)))
    return mb.reshape(x=var, shape=list(shape))


def shape_rank(var: Var) -> int:
    """Return the number of axes."""
    return len(var.shape or ())


def frame(op: Operation) -> Frame | Refusal:
    """Return the axes of an op, or why they are not known."""
    make = FRAMES.get(op.op_type)
    return Refusal(f"nothing is known of the axes of {op.op_type}", op) if make is None else make(op)


def _built_again(op: Operation, mb: Maker, **changed: Any) -> list[Var]:
    """Build an op again with some inputs changed."""
    results = getattr(mb, op.op_type)(**{**op_inputs(op), **changed})
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _group_lengths(shape: Sequence[int], groups: Groups) -> list[int]:
    """Return the lengths of the groups of a view."""
    return [math.prod(shape[axis] for axis in group) for group in groups]


def _operand_on_view(mb: Maker, var: Var, rank: int, groups: Groups) -> Var:
    """Return an operand of a broadcasting op on a view of the op's axes; scalars stay scalars."""
    shape = fixed_shape(var)
    return seen_as(mb, var, _group_lengths((1,) * (rank - len(shape)) + shape, groups))


def _axes_in_view(axes: Sequence[int], groups: Groups) -> list[int]:
    """Return where axes of an op are in a view."""
    return [i for i, group in enumerate(groups) if group and group[0] in axes]


def _elementwise(op: Operation) -> Frame:
    sizes = fixed_shape(op.outputs[0])
    names = [k for k in ("x", "y", "cond", "a", "b") if isinstance(op.inputs.get(k), Var)]

    def build(mb: Maker, groups: Groups) -> list[Var]:
        return _built_again(
            op, mb, **{k: _operand_on_view(mb, op.inputs[k], len(sizes), groups) for k in names}
        )

    return Frame(sizes, joins_of_result(op), build)


def _along_axes(op: Operation) -> Frame:
    """Return the frame of a reduction or layer_norm; the other axes may merge."""
    sizes, axes = fixed_shape(op.x), axes_of(op)
    # a scalar has no axes to keep
    kept = {"keep_dims": bool(op.outputs[0].shape)} if op.op_type in REDUCTIONS else {}

    def build(mb: Maker, groups: Groups) -> list[Var]:
        x = _operand_on_view(mb, op.x, len(sizes), groups)
        return _built_again(op, mb, x=x, axes=_axes_in_view(axes, groups), **kept)

    return Frame(sizes, joins_of_operand(op, op.x), build)


def _along_one_axis(op: Operation) -> Frame:
    """Return the frame of softmax, cumsum, argmax, split or concat: one axis is theirs, others may merge."""
    first = op.inputs["values"][0] if "values" in op.inputs else op.x
    sizes, axis = fixed_shape(first), axis_of(op)

    def build(mb: Maker, groups: Groups) -> list[Var]:
        changed: dict[str, Any] = {"axis": _axes_in_view([axis], groups)[0]}
        if "values" in op.inputs:
            changed["values"] = [_operand_on_view(mb, v, len(sizes), groups) for v in op.inputs["values"]]
        else:
            changed["x"] = _operand_on_view(mb, op.x, len(sizes), groups)
        if op.inputs.get("keep_dims") is not None:
            changed["keep_dims"] = bool(op.outputs[0].shape)
        return _built_again(op, mb, **changed)

    return Frame(sizes, joins_of_operand(op, first), build)


def _linear(op: Operation) -> Frame:
    sizes = fixed_shape(op.x)

    def build(mb: Maker, groups: Groups) -> list[Var]:
        return _built_again(op, mb, x=_operand_on_view(mb, op.x, len(sizes), groups))

    return Frame(sizes, joins_of_operand(op, op.x), build)


def _matmul(op: Operation) -> Frame | Refusal:
    rank = max(shape_rank(op.x), shape_rank(op.y))
    if min(shape_rank(op.x), shape_rank(op.y)) < 2:
        return Refusal("one factor is a vector")
    sizes = fixed_shape(op.outputs[0])

    def build(mb: Maker, groups: Groups) -> list[Var]:
        x, y = (_operand_on_view(mb, v, rank, groups) for v in (op.x, op.y))
        return _built_again(op, mb, x=x, y=y)

    batched = max(len(sizes) - 3, 0)  # joins; rows and columns stay alone, for the op needs both
    alone = [False] * (len(sizes) - 1 - batched)
    return Frame(sizes, (*joins_of_result(op)[:batched], *alone), build)


def _slice(op: Operation) -> Frame | Refusal:
    sizes = fixed_shape(op.x)
    if constant(op.begin) is None or constant(op.end) is None:
        return Refusal("where it starts or ends is dynamic")
    rank = len(sizes)
    begin, end = ([int(i) for i in v.val] for v in (op.begin, op.end))
    masks = {k: each_axis(op, k, False) for k in ("begin_mask", "end_mask", "squeeze_mask")}
    stride = each_axis(op, "stride", 1)
    squeezed = masks["squeeze_mask"]
    is_full = [
        not squeezed[i]
        and stride[i] == 1
        and (masks["begin_mask"][i] or begin[i] == 0)
        and (masks["end_mask"][i] or end[i] == sizes[i])
        for i in range(rank)
    ]
    begin = [0 if masks["begin_mask"][i] else begin[i] for i in range(rank)]
    stride = [1 if squeezed[i] else stride[i] for i in range(rank)]  # one element, whatever the stride
    end = [begin[i] + 1 if squeezed[i] else end[i] for i in range(rank)]
    from_start = [m and not s for m, s in zip(masks["begin_mask"], squeezed, strict=True)]
    # an end of 0 behind the element at -1 would lie before it
    to_end = [begin[i] == -1 if squeezed[i] else masks["end_mask"][i] for i in range(rank)]

    def build(mb: Maker, groups: Groups) -> list[Var]:
        cut_axes = [g[0] if len(g) == 1 and not is_full[g[0]] else None for g in groups]

        def pick(values: Sequence[Any], default: Any) -> list[Any]:
            return [default if axis is None else values[axis] for axis in cut_axes]

        return [
            mb.slice_by_index(
                x=_operand_on_view(mb, op.x, rank, groups),
                begin=pick(begin, 0),
                end=pick(end, 0),
                stride=pick(stride, 1),
                begin_mask=pick(from_start, True),
                end_mask=pick(to_end, True),
            )
        ]

    return Frame(sizes, joins_of_operand(op, op.x), build)


def _tile(op: Operation) -> Frame | Refusal:
    """Return the frame of a tile: an axis takes a later one that is not repeated along, as one block."""
    sizes, repeats = fixed_shape(op.x), ints(op, "reps")
    if not repeats:
        return Refusal("how often it repeats is dynamic")
    plain = [n == 1 and times == 1 for n, times in zip(sizes, repeats, strict=True)]
    joins = tuple(repeats[axis] == 1 or all(plain[:axis]) for axis in range(1, len(sizes)))

    def build(mb: Maker, groups: Groups) -> list[Var]:
        x = _operand_on_view(mb, op.x, len(sizes), groups)
        return [mb.tile(x=x, reps=_group_lengths(repeats, groups))]

    return Frame(sizes, joins, build)


def _pad(op: Operation) -> Frame | Refusal:
    """Return the frame of a pad: an axis takes later ones that are not padded, as one block.

    Blocks of a constant can be padded; edges are repeated or mirrored number by number.
    """
    sizes, given = fixed_shape(op.x), ints(op, "pad")
    if not given:
        return Refusal("how much it pads is dynamic")
    pads = [*[0] * (2 * len(sizes) - len(given)), *given]
    bare = [not any(pads[2 * axis : 2 * axis + 2]) for axis in range(len(sizes))]
    plain = [n == 1 and is_bare for n, is_bare in zip(sizes, bare, strict=True)]
    blocks = constant(op.mode) == "constant"
    joins = tuple(
        (bare[axis] and (blocks or bare[axis - 1])) or all(plain[:axis]) for axis in range(1, len(sizes))
    )

    def build(mb: Maker, groups: Groups) -> list[Var]:
        x, amounts = _operand_on_view(mb, op.x, len(sizes), groups), list[int]()
        for group in groups:
            padded = next((axis for axis in group if not bare[axis]), None)
            block = 1 if padded is None else math.prod(sizes[axis] for axis in group if axis > padded)
            amounts += [0, 0] if padded is None else [block * n for n in pads[2 * padded : 2 * padded + 2]]
        first = next((at for at, n in enumerate(amounts) if n), 0) // 2 * 2
        return _built_again(op, mb, x=x, pad=amounts[first:])

    return Frame(sizes, joins, build)


def _transpose(op: Operation) -> Frame:
    sizes, perm = fixed_shape(op.x), permutation(op)

    def build(mb: Maker, groups: Groups) -> list[Var]:
        positions = [_transposed_place(group, sizes, perm) for group in groups]
        moved = sorted(range(len(groups)), key=lambda g: positions[g])
        return [mb.transpose(x=_operand_on_view(mb, op.x, len(sizes), groups), perm=moved)]

    return Frame(sizes, joins_of_operand(op, op.x), build)


def _transposed_place(group: tuple[int, ...], sizes: Sequence[int], perm: list[int]) -> int:
    """Return where a transpose takes a group: where its first axis longer than 1 goes."""
    if not group:
        return -1
    return perm.index(next((axis for axis in group if sizes[axis] != 1), group[0]))


FOUR = 4
"""Four axes are enough to exchange two neighbouring blocks of axes, whatever stands around them."""


def transpose_by_blocks(mb: Maker, op: Operation, at_most: int) -> Var:
    """Build a transposition as a few with at most `at_most` axes (or four); axes of length 1 are left out.

    For the wanted order 2 0 3 1 of axes 0 1 2 3, `_runs` finds no two axes that already follow each other. Each
    move permutes blocks of runs, so that fewer runs are left, until one run has all axes.
    """
    sizes, x = fixed_shape(op.x), op.x
    target = [axis for axis in permutation(op) if sizes[axis] != 1]
    order = sorted(target)
    while len(runs := _runs(order, target)) > 1:
        blocks, perm = _best_move(runs, target, sizes, max(at_most, FOUR))
        x = seen_as(mb, x, [_length(block, sizes) for block in blocks])
        x = mb.transpose(x=x, perm=perm)
        order = [axis for place in perm for axis in blocks[place]]
    return x


def _runs(order: Sequence[int], target: Sequence[int]) -> list[list[int]]:
    """Return the axes in their order, grouped into runs that also follow each other in the wanted order."""
    position = {axis: i for i, axis in enumerate(target)}
    runs: list[list[int]] = []
    for axis in order:
        if runs and position[axis] == position[runs[-1][-1]] + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return runs


def _best_move(
    runs: list[list[int]], wanted: Sequence[int], sizes: Sequence[int], at_most: int
) -> tuple[list[list[int]], list[int]]:
    """Return blocks of runs, and the permutation of these blocks that leaves the fewest runs.

    Among equals, prefer one that keeps the last axis, whose rows are stored padded, then one with shorter axes.
    """

    def cost(move: tuple[list[list[int]], tuple[int, ...]]) -> tuple[int, bool, int]:
        blocks, perm = move
        remaining = len(_runs([axis for number in perm for axis in blocks[number]], wanted))
        return remaining, perm[-1] != len(blocks) - 1, max(_length(block, sizes) for block in blocks)

    cuts = combinations(range(1, len(runs)), min(len(runs), at_most) - 1)
    all_blocks = [[[*chain(*runs[i:j])] for i, j in pairwise((0, *cut, len(runs)))] for cut in cuts]
    moves = ((blocks, perm) for blocks in all_blocks for perm in permutations(range(len(blocks))))
    blocks, perm = min(moves, key=cost)
    return blocks, list(perm)


def _length(block: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the number of elements of a block of axes."""
    return math.prod(sizes[axis] for axis in block)


FRAMES: dict[str, Callable[[Operation], Frame | Refusal]] = {
    **dict.fromkeys((*BROADCASTING, *UNARY), _elementwise),
    **dict.fromkeys((*REDUCTIONS, "layer_norm"), _along_axes),
    **dict.fromkeys(
        ("softmax", "cumsum", "reduce_argmax", "reduce_argmin", "split", "concat"), _along_one_axis
    ),
    "linear": _linear,
    "matmul": _matmul,
    "pad": _pad,
    "slice_by_index": _slice,
    "tile": _tile,
    "transpose": _transpose,
}
"""Op type -> the function that returns its frame."""
