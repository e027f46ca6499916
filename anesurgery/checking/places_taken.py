"""Find up to where the old side takes integers that say where or how many: they are drawn from 0 to there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from anesurgery.checking.addresses import Bounds
from anesurgery.checking.adversarial import FEW_PLACES
from anesurgery.checking.lengths import drawn_shape
from anesurgery.mil import Var

FARTHEST = 1 << 10
"""Up to where places are tried. A choice: caches are longer, but nothing else happens farther on."""


def places_taken(values: Iterable[Var], taken: Callable[[Bounds], bool]) -> Bounds:
    """The largest place that is taken for each number of some values, beside zeros for all others.

    Args:
        values: integers that say where or how many.
        taken: can the old side be computed with these?
    """
    none: Bounds = {var: (np.zeros(drawn_shape(var)),) * 2 for var in values}
    ends: Bounds = {}
    for var in none:
        most = np.zeros(drawn_shape(var))
        for at in np.ndindex(most.shape) if most.size <= FEW_PLACES else ():
            least, beyond = 0, FARTHEST
            while beyond - least > 1:
                place = min(2 * least + 1, (least + beyond) // 2)
                tried = np.zeros(drawn_shape(var))
                tried[at] = place
                least, beyond = (place, beyond) if taken(none | {var: (tried, tried)}) else (least, place)
            most[at] = least
        ends[var] = 0, most
    return ends
