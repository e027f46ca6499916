"""Compare a chain with the model that was cut, where that costs little, and say what was found."""

from __future__ import annotations

import math

from anesurgery.checking.comparison import compare
from anesurgery.errors import SurgeryError
from anesurgery.files.package import Loaded
from anesurgery.files.sequence import Chain, is_network
from anesurgery.mil import function_of, walk_ops
from anesurgery.semantics.reading import in_words
from anesurgery.semantics.rows import work_of

MOST_BYTES = 256 << 20
"""Weights up to which the models are run: as fp32 they take twice as much memory, of both in turn."""
MOST_FLOP = 20 * 10**9
"""Floating point operations of one run up to which they are run: seconds on one core."""
PRECISION = "fp16"
"""The arithmetic as stored, in which a cut may change nothing."""


def checked(whole: Loaded, chain: Chain, function: str | None) -> str:
    """What one run of both on sampled inputs shows, in words; why there was none, where it is left out."""
    if dear := _too_dear(chain):
        return f"not compared with the whole: {dear}; anesurgery.compare does it"
    try:
        if chain.functions or function is not None:
            return "not compared with the whole: name the function to anesurgery.compare, or prove=True"
        compared = compare(whole, chain, precision=PRECISION, gate=math.inf)
    except SurgeryError as error:
        return f"not compared with the whole: {error}"
    if compared.ok:
        return "equal to the whole bit for bit, as stored, on one sampled input"
    return f"NOT equal to the whole, as stored, on one sampled input: {compared.verdict}"


def _too_dear(chain: Chain) -> str:
    """What makes a run cost too much; empty where it does not."""
    size = sum(chain.weights)
    if size > MOST_BYTES:
        return f"{in_words(size)} of weights"
    programs = [c.program for c in chain.chunks if not is_network(c)]
    flop = sum(work_of(op).flop for p in programs for op in walk_ops(function_of(p, None)))
    return f"{flop / 1e9:.0f} billion operations" if flop > MOST_FLOP else ""
