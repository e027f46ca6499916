"""Rows of legality that rest on one report or on tables of the compiler alone: their verdict is unknown."""

from __future__ import annotations

from anesurgery.mil import Operation, dtype_name
from anesurgery.ops import names
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.rules import conditions as when
from anesurgery.placement.target import Target

ANEMLL = "ANEMLL: tests/dev/MB_GRAPH_ISSUES.md"
TABLES = "sbryngelson/ane-guide, ANEForge (tables of the compiler)"
UNSIGNED = Scope(os="seen on a Mac, macOS 15; int16 was refused on M4, macOS 27.0.1")


def _is_unsigned(op: Operation) -> bool:
    return dtype_name(op.indices) == "uint16"


def signed_lookup(op: Operation, target: Target) -> str:
    """Looks up rows of a constant table at indices that may be negative, or of 32 bits."""
    return "" if _is_unsigned(op) else when.lookup(op, target)


def signed_indices(op: Operation, target: Target) -> str:
    """Gathers at such indices of the run."""
    return "" if _is_unsigned(op) else when.runtime_indices(op, target)


EMBEDDING = Rule(
    "embedding-uint16",
    names("gather"),
    "a gather at uint16 indices of the run was reported on the engine, while one at int16 was refused",
    ANEMLL,
    test=lambda op, target: when.lookup(op, target) if _is_unsigned(op) else "",
    grade=Grade.REPORTED,
    scope=UNSIGNED,
    advice="look the rows up on the host",
)
GATHER = Rule(
    "gather-uint16",
    names("gather"),
    EMBEDDING.because,
    ANEMLL,
    test=lambda op, target: when.runtime_indices(op, target) if _is_unsigned(op) else "",
    grade=Grade.REPORTED,
    scope=UNSIGNED,
    advice="make the indices constant, or gather on the host",
)
FLOOR = Rule(
    "op-floor",
    names(
        "softmax layer_norm instance_norm reduce_mean reduce_sum reduce_max reduce_min reduce_l1_norm "
        "reduce_l2_norm "
        "reduce_sum_square reduce_log_sum reduce_log_sum_exp resize resize_bilinear resize_nearest_neighbor "
        "upsample_bilinear upsample_nearest_neighbor quantize dequantize"
    ),
    "the compiler's tables give this op to H13 (A14, M1) and later; no measurement through Core ML was found",
    TABLES,
    grade=Grade.REPORTED,
    scope=Scope(frozenset({12}), via="compiler"),
    advice="look at the compute plan on the device",
)
MIRROR = Rule(
    "pad-mirror",
    names("pad"),
    "this generation mirrors edges in software, if at all",
    TABLES,
    test=when.mirrored,
    grade=Grade.REPORTED,
    scope=Scope(frozenset({12, 13}), via="compiler"),
    advice="pad with a constant, or concat reversed slices",
)
RULES = (EMBEDDING, GATHER, FLOOR, MIRROR)
