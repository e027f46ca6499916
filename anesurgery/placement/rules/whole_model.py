"""What makes the place of a whole model doubtful: reports that contradict each other, or one that stands alone.

Where one of these rules finds something, no op is said to prefer the ANE; what is certain to run on the CPU
stays.
"""

from __future__ import annotations

from collections.abc import Iterator

from anesurgery.facts.reading import shape_in_words
from anesurgery.facts.work import shape_of
from anesurgery.mil import Function, walk_ops
from anesurgery.placement.evidence import Finding, Grade, Rule, Scope
from anesurgery.placement.flexible import Flexible
from anesurgery.placement.rules.conditions import CHANNELS, is_lookup
from anesurgery.placement.target import Target

LARGE_TABLE = Rule(
    "embedding-rows",
    frozenset(),
    "with a table of 151669 rows inside, one model ran on the CPU as a whole, and without it on the ANE",
    "joeblau/voice: convert_coreml.py (Mac, unnamed)",
    grade=Grade.REPORTED,
    advice='look the rows up on the host, and make the embeddings an input: embedding_matmul(mode="input")',
)
DISPUTED_LIST = Rule(
    "dyn-enumerated-disputed",
    frozenset(),
    "none of 362 ops of a model with enumerated shapes was on the ANE (M1 Max, macOS 26 and 27), and one "
    "failed when it "
    "ran; on an M4 Max (macOS 26.6) another stayed on it",
    "ironblock/sidekick; coremltools issue 2730; eyalamirmusic/eacp",
    grade=Grade.REPORTED,
    scope=Scope(frozenset({13}), "seen on M1 Max, macOS 26 and 27", since=(("macOS", 26), ("iOS", 26))),
    advice="one function for each shape, or look at the compute plan on the device",
)
RULES = (LARGE_TABLE, DISPUTED_LIST)


def doubts(function: Function, shapes: Flexible | None, target: Target) -> tuple[Finding, ...]:
    """Why it is not known what the ANE runs of a function; nothing where nothing says so."""
    if not target.uses_ane:
        return ()
    found = [*_tables(function), *_lists(shapes)]
    return tuple(rule.finding(message) for rule, message in found if rule.scope.concerns(target))


def _tables(function: Function) -> Iterator[tuple[Rule, str]]:
    for op in walk_ops(function):
        if is_lookup(op) and shape_of(op.x)[0] > CHANNELS:
            words = shape_in_words(shape_of(op.x))
            yield (LARGE_TABLE, f"%{op.outputs[0].name} reads a table of {words}, more than {CHANNELS} rows")
            return


def _lists(shapes: Flexible | None) -> Iterator[tuple[Rule, str]]:
    if shapes is not None and shapes.listed:
        yield DISPUTED_LIST, f"{len(shapes.listed)} enumerated shapes"
