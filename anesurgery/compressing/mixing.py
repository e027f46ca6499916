"""How many bits each weight gets: its forms are corrected and measured at the outputs, one by one.

Each weight is tried alone, in the plain model, on the calibration samples; `assignment` then takes the forms
with the least damage for the average that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anesurgery.compressing.assignment import Option, Row, propose
from anesurgery.compressing.correcting import Candidate, plain_moments
from anesurgery.compressing.costs import Cost
from anesurgery.compressing.finished import Finished
from anesurgery.facts.logits import logits_of
from anesurgery.files.package import Loaded
from anesurgery.interpret.core import Executable
from anesurgery.interpret.forks import Forks
from anesurgery.mil import Var
from anesurgery.regions.reencoding import stored_bytes


def assigned(
    loaded: Loaded,
    name: str,
    samples: Sequence[Mapping[str, Any]],
    kinds: Mapping[Candidate, Sequence[str]],
    bits: float,
    version: int,
    finished: Finished,
    room: int | None = None,
) -> dict[Var, str]:
    """The form of each weight for an average number of bits.

    Args:
        loaded: the model.
        name: of the function.
        samples: as it takes them.
        kinds: the forms that each weight may have.
        bits: of a number, on average.
        version: of the specification.
        finished: corrects weights.
        room: bytes that all may take, in place of those bits.

    Raises:
        SurgeryError: even the smallest forms have more bits.
    """
    met = plain_moments(loaded, name, samples, list(kinds))
    executable = Executable(loaded.program, function=name, fuse=False)
    by_var, chosen = {one.var: one for one in kinds}, logits_of(executable.function)
    runs = [Forks(executable, values, list(by_var)) for values in samples]
    expected = [run.whole() for run in runs]
    rows = []
    for number, forks in enumerate(zip(*runs, strict=True)):
        one = by_var[forks[0].weight]
        options = {}
        due = {kind: finished.hand_in(one, kind, met[one.var], version) for kind in kinds[one]}
        for kind, waiting in due.items():
            made, cost = waiting(), Cost(chosen=chosen)
            for fork, outputs in zip(forks, expected, strict=True):
                cost.add(outputs, fork(made.array))
            options[kind] = Option(made.bytes, cost.psnr, cost.kl, cost.top1)
        types = tuple(r.op.op_type for r in one.readers)
        size = int(np.prod(one.var.shape))
        rows.append(Row(number, one.var.name, types, size, stored_bytes(one.var), options, {}))
    modes = propose(rows, bits=bits if room is None else None, max_bytes=room, smallest=0).modes
    return {var: modes[var.name] for var in by_var if var.name in modes}
