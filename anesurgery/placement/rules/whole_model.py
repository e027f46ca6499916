"""Rules that make it doubtful whether the ANE runs anything of a function: its tables, shapes or size.

`inspect` passes the findings of `doubts` and `failing` to `verdicts.choose`, which then also computes the units
without the ANE. An op keeps a unit only if it is the same with and without it; no op is said to prefer the ANE.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from anesurgery.byte_counts import byte_words
from anesurgery.mil import Function, Operation, producer, walk_ops
from anesurgery.placement.evidence import Finding, Grade, Rule, Scope, general
from anesurgery.placement.flexible import Flexible, dynamic_inputs
from anesurgery.placement.inspection import Memory
from anesurgery.placement.rules.conditions import CHANNELS, is_lookup
from anesurgery.placement.target import CHIPS, SOURCES, Target
from anesurgery.semantics.reading import elements, shape_in_words, shape_of

_reported = partial(general, grade=Grade.REPORTED)

LARGE_TABLE = _reported(
    "embedding-rows",
    "with a table of 151669 rows inside, one model ran on the CPU as a whole (a Mac, not named), and without "
    "it on the ANE; on an M5 Pro a prefill with such a table had 1918 of 1919 ops there, on an M1 Max an "
    "encoder with 262144 rows 2015 of 2024 (macOS 27.0), and an iPhone and a Mac decoded one token at a time "
    "there with 248,000 rows",
    "joeblau/voice: convert_coreml.py; FluidInference/mobius pull request 77; ironblock/sidekick: "
    "docs/MODELS.md; john-rocky/CoreML-LLM: QWEN35_LESSONS.md, QWEN35_2B_CHUNKED_HANDOFF.md",
    scope=Scope(os="seen on a Mac, not named, and not on M1 Max, M5 Pro, A19"),
    advice='look the rows up on the host, and make the embeddings an input: embedding_matmul(mode="input")',
)
WITH_TABLE = frozenset({"M1", "M5"})
"""Chips whose ANE was seen to run models that read many rows of a large table."""

DISPUTED_LIST = _reported(
    "dyn-enumerated-disputed",
    "an encoder with enumerated shapes failed to compile for the ANE and ran on the CPU, 86 against 2.4 ms (M1 "
    "Max, macOS 26 and 27), one on an M4 Pro took 236 to 240 ms there and 13.6 ms with a fixed shape, one "
    "failed when it ran; others stayed on the ANE (M4 Max, macOS 26.6; macOS 15: 77 % at the default "
    "shape, and 2 % where each call had another one)",
    "ironblock/sidekick: docs/DECISIONS.md D15; coremltools issues 2730, 2370; eyalamirmusic/eacp",
    scope=Scope(os="seen on M1 Max, M4 Pro, M4 Max, macOS 15, 26 and 27", since=(("macOS", 15), ("iOS", 18))),
    advice="a function for each shape (`ane.sizes`), or look at the compute plan on the device",
)
DISPUTED_RANGE = _reported(
    "dyn-range-disputed",
    "ranges kept whole models on the CPU (M2 Max, macOS 15.6.1, with a state; M5 Pro, macOS 26.5; M2 Ultra, "
    "1561 against 49.7 ms of the fixed model; a Mac, not named, in February 2023), while others took the "
    "time of the fixed model (July 2023), or were on the ANE to 75 to 78 % at the default shape (macOS 15)",
    "coremltools issues 2600, 2370, 1909, 1764; FluidInference/FluidAudio: ANE_Profiler.md; "
    "mattmireles/kokoro-coreml",
    scope=Scope(os="seen on M2 Max, M2 Ultra, M5 Pro, macOS 13, 15 and 26"),
    advice="fix the shape, or make a few sizes as functions that share their weights (`ane.sizes`)",
)
RANGE_ELSEWHERE = general(
    "dyn-range-unknown",
    "from iOS 18 on no report says what the ANE of an iPhone or iPad runs of a model with a range of shapes: "
    "up to iOS 17.3 the default shape ran there, and on Macs some such models stayed on the CPU as a whole",
    f"developer.apple.com/forums/thread/724930; {DISPUTED_RANGE.source}",
    grade=Grade.GUESS,
    scope=Scope(os="later systems were seen on Macs alone", since=(("iOS", 18),)),
    advice=DISPUTED_RANGE.advice,
)
NORM_IN_LIST = _reported(
    "dyn-enum-norm",
    "a model of one layer_norm of rank 3 left the ANE with enumerated shapes (175 against 20 ms), and stayed "
    "there with a fixed one; norms of rank 4 stayed. Later systems were not tried",
    "coremltools issue 1909; smpanaro/more-ane-transformers: NOTES.md",
    scope=Scope(os="seen on M1 Max, macOS 13"),
    advice="expand to rank 4 around the norms, or one function for each shape",
)
LARGEST_COMPRESSED = 950_000_000
"""Bytes of compressed weights that were seen to run although they exceed the limit when expanded: 899 MB of
int4 ran, 1.88 GB of int8 did not."""
TOO_LARGE = _reported(
    "size-leaves",
    "packages above the limit had no op on the ANE: 3.77 GB of fp16 (a Mac, not named) and the same weights as "
    "1.88 GB of int8 (A19 Pro, killed while it loaded), GPT-2 XL of 3.1 GB (M1 Max), while 1.4 GB of fp16 and "
    "899 MB of int4 ran there",
    f"john-rocky/CoreML-LLM: QWEN35_2B_CHUNKED_HANDOFF.md; smpanaro/more-ane-transformers: NOTES.md; limits: "
    f"{SOURCES['program']}",
    scope=Scope(os="seen on A19 Pro, iOS 26, and M1 Max, macOS 13"),
    advice="split it into chunks below the limit, or compress it",
)
RULES = (LARGE_TABLE, DISPUTED_LIST, DISPUTED_RANGE, RANGE_ELSEWHERE, NORM_IN_LIST, TOO_LARGE)


def doubts(function: Function, shapes: Flexible | None, memory: Memory, target: Target) -> tuple[Finding, ...]:
    """Return the findings that make it uncertain what the ANE runs of a function; none without the ANE."""
    if not target.uses_ane:
        return ()
    messages = [*_tables(function, target), *_shapes(function, shapes, target), *_size(memory, target)]
    return tuple(rule.finding(message) for rule, message in messages if rule.scope.concerns(target))


FAILING: dict[str, frozenset[str]] = {
    "abort-int8-gpu": frozenset(),
    "compile-memory": frozenset({"A17"}),
    "compile-history": frozenset({"M5"}),
    "compile-late-shape": frozenset(),
    "hang-nearest-pool": frozenset(),
    "refused-cache-scatter": frozenset(),
    "size-big-image": frozenset(),
    "state-width-32": frozenset(),
}
"""Id of a finding that says that the engine's compiler failed -> chips on which it did; empty for any chip."""


def failing(findings: Iterable[Finding], target: Target) -> tuple[Finding, ...]:
    """Return the findings after which the ANE may run nothing on a target."""
    chips = frozenset(target.chips)
    return tuple(f for f in findings if f.rule in FAILING and (not FAILING[f.rule] or FAILING[f.rule] & chips))


Messages = Iterator[tuple[Rule, str]]
"""Rules that apply, each with what it found in words."""


def _has_mac(target: Target) -> bool:
    """Is there a Mac among the chips? Most reports are about Macs."""
    return target.platform != "iOS" and any(CHIPS[n].platform == "macOS" for n in target.chips)


def _tables(function: Function, target: Target) -> Messages:
    if not _has_mac(target) or set(target.chips) <= WITH_TABLE:
        return
    for op in walk_ops(function):
        if op.op_type == "gather" and _reads_large_table(op):
            words = shape_in_words(shape_of(op.x))
            yield (LARGE_TABLE, f"%{op.outputs[0].name} reads a table of {words}, more than {CHANNELS} rows")
            return


def _reads_large_table(op: Operation) -> bool:
    """Does a gather read several rows of a large uncompressed table? Reading one row was seen to run."""
    large = is_lookup(op) and shape_of(op.x)[0] > CHANNELS and producer(op.x, "const") is not None
    return large and elements(op.indices) > 1


def _shapes(function: Function, shapes: Flexible | None, target: Target) -> Messages:
    dynamic = dynamic_inputs(function)
    if shapes is None or not dynamic:
        return
    if not shapes.listed:
        rule = DISPUTED_RANGE if _has_mac(target) else RANGE_ELSEWHERE
        yield rule, f"the length of %{next(iter(dynamic))} may vary"
        return
    if _has_mac(target):
        yield DISPUTED_LIST, f"{len(shapes.listed)} enumerated shapes"
    norms = [op for op in walk_ops(function) if op.op_type == "layer_norm" and op.x.rank == 3]
    if norms:
        first = norms[0].outputs[0].name
        yield NORM_IN_LIST, f"{len(norms)} layer_norm of rank 3, first %{first}, with enumerated shapes"


def _size(memory: Memory, target: Target) -> Messages:
    if memory.limit is None:
        return
    chip, limit = target.least("program")[1], byte_words(memory.limit)
    if memory.weights > memory.limit:
        yield (
            TOO_LARGE,
            f"{byte_words(memory.weights)} of weights in one program, above the {limit} of {chip}",
        )
    elif memory.weights > LARGEST_COMPRESSED and memory.expanded > memory.limit:
        words = f"{byte_words(memory.weights)} of weights, {byte_words(memory.expanded)} expanded"
        yield TOO_LARGE, f"{words}, in one program, above the {limit} of {chip}"
