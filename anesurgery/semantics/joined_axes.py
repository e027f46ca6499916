"""Which neighbouring axes of an op travel together, so that one axis may stand for both: read from its row."""

from __future__ import annotations

from itertools import pairwise

from anesurgery.mil import Operation, Var, fixed_shape
from anesurgery.semantics.meaning import CONTRACTED
from anesurgery.semantics.rows import places_of


def joins_of_result(op: Operation) -> tuple[bool, ...]:
    """For each axis of the result but the last: is the next one of the same operands, and repeated for others?

    An axis of length 1 goes with its neighbour. Operands without axes are repeated along all.
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

    Axes that are mixed stay alone. One of length 1 that is kept goes along with any other that is.
    """
    sizes = fixed_shape(var)
    places = next((o.places for o in places_of(op) or () if o.var is var), ())
    kept = [p for p, n in zip(places, sizes, strict=False) if isinstance(p, int) and n != 1]
    order = {place: at for at, place in enumerate(sorted(kept))}
    joins, left = [], -1  # where the last kept axis that is longer than 1 goes, since one that is not kept
    for axis, (one, other) in enumerate(pairwise(places)):
        if isinstance(one, str) or isinstance(other, str):
            joins.append(one == other == CONTRACTED)
            left = -1
            continue
        left = order[one] if sizes[axis] != 1 else left
        joins.append(left < 0 or sizes[axis + 1] == 1 or order[other] == left + 1)
    return tuple(joins) if places else (False,) * (len(sizes) - 1)
