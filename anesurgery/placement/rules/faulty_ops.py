"""Rules about ops that the engine computes wrongly: the faults of reports, and two about one embedder.

Each row of `interpret.arithmetic.engine_faults.FAULTS` becomes two rules, of which at most one applies to a
target: a claim ("fault-<name>", wrong on the chips and systems of the report) and a warning of a lower grade
for other chips ("fault-<name>-elsewhere"). `NO_DEVICE` and `CAST_MASK` are among the rows of `legality.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from anesurgery.interpret.arithmetic.engine_faults import FAULTS, Fault, cast_mask
from anesurgery.mil import Operation, Program, walk_ops
from anesurgery.ops import names
from anesurgery.placement.evidence import Finding, Grade, Rule, Scope
from anesurgery.placement.target import CHIPS, Target
from anesurgery.semantics.intervals import interval

ELSEWHERE = "-elsewhere"
"""The suffix of the ids of warnings."""
CORE_ML = "Core ML"


def concerns(fault: Fault, target: Target, format: str = CORE_ML) -> bool:
    """Was a fault reported for this format on a chip of the target's generations, and on its OS?"""
    if fault.runtime != format or not fault.chips or not _may_use_unit(fault, target):
        return False
    reported = {CHIPS[name].family for name in fault.chips}
    if fault.common and (target.os is None or not target.families <= reported):
        return False
    on_system = target.os is None or not fault.systems or (target.platform, target.os) in fault.systems
    return on_system and bool(reported & target.families)


def _may_use_unit(fault: Fault, target: Target) -> bool:
    """May Core ML use the unit on which the fault was seen (GPU or engine)?"""
    if fault.units == "engine alone":
        return target.uses_ane and not target.uses_gpu
    return target.uses_gpu if fault.units == "gpu" else target.uses_ane


FIRST_CORE_AI = 27
"""The release of iOS and macOS that introduced Core AI."""


def may_run_core_ai(fault: Fault, target: Target) -> bool:
    """Does the target's OS have Core AI? Without an OS: is each of its generations one of the report?"""
    if target.os is not None:
        return target.os >= FIRST_CORE_AI
    return bool(fault.chips) and target.families <= {CHIPS[chip].family for chip in fault.chips}


def may_concern(fault: Fault, target: Target) -> bool:
    """Is a target warned of a fault: may Core ML use the unit, on a release from `since` on?"""
    first = dict(fault.since).get(target.platform or "", 0)
    beside_gpu = fault.units == "engine alone" and target.uses_ane  # warned of with the GPU as well
    is_asked = _may_use_unit(fault, target) or fault.units == "any" or beside_gpu
    return is_asked and (target.os is None or target.os >= first)


def faults_on(target: Target) -> list[Fault]:
    """Return the faults reported on a generation of the target, and those whose report names no chip."""
    families = {name: CHIPS[name].family for fault in FAULTS for name in fault.chips}
    return [f for f in FAULTS if not f.chips or {families[name] for name in f.chips} & target.families]


def fault_words(fault: Fault, op: Operation, layer: bool = False) -> str:
    """Return what is wrong with an op, in words; "" where its form differs or its values stay below the range.

    Args:
        fault: a row of the table.
        op: an op of a program.
        layer: does the op stand for a layer of a neural network?
    """
    said = fault.found(op, layer)
    if not said or fault.least_input is None:
        return said
    least = fault.least_input(op)
    return "" if interval(op.x)[1] < least else f"{said}; %{op.x.name} may be {least:.4g} or more"


def faulty_ops_on(ops: Iterable[Operation], target: Target) -> Iterator[tuple[Fault, Operation, str]]:
    """Yield (fault, op, what is wrong in words) for each op that a target computes wrongly."""
    for op in ops:
        for fault in FAULTS:
            if concerns(fault, target) and (said := fault_words(fault, op)):
                yield fault, op, said


def _claim(fault: Fault, format: str, op: Operation, target: Target, layer: bool = False) -> str:
    said = fault_words(fault, op, layer) if concerns(fault, target, format) else ""
    wrong = [n for n in target.chips if CHIPS[n].family in {CHIPS[c].family for c in fault.chips}]
    what = "crashes" if fault.ends_process else "wrong"
    return f"{what} on {', '.join(wrong)}: {said}" if said else ""


def _warning(fault: Fault, format: str, op: Operation, target: Target, layer: bool = False) -> str:
    if fault.common or concerns(fault, target, format) or not may_concern(fault, target):
        return ""
    if fault.runtime != format == CORE_ML and not may_run_core_ai(fault, target):
        return ""
    if not (words := fault_words(fault, op, layer)):
        return ""
    what = "reported to crash" if fault.ends_process else "reported wrong"
    chips = f" on {', '.join(fault.chips)}" if fault.chips else ""
    other_format = "" if fault.runtime == format else f", by {fault.runtime}"
    return f"{what}{chips}{other_format}: {words}{'' if fault.chips else ' (chip not given)'}"


def findings_of_layers(program: Program, target: Target) -> Iterator[Finding]:
    """Yield the findings about the layers of a neural network, given as a program of equivalent ops."""
    for op in (op for function in program.functions.values() for op in walk_ops(function)):
        for fault in (fault for fault in FAULTS if op.op_type in fault.ops):
            for rule, test in zip(_claim_and_warning(fault), (_claim, _warning), strict=True):
                if words := test(fault, CORE_ML, op, target, layer=True):
                    yield rule.finding(words, op.outputs[0].name)


def _claim_and_warning(fault: Fault, format: str = CORE_ML) -> Iterator[Rule]:
    """Yield the two rules of a fault: the claim, and the warning of a lower grade."""
    families = frozenset(CHIPS[name].family for name in fault.chips)
    for suffix, test, grade, scope in (
        ("", _claim, Grade.REPORTED, Scope(families, f"seen on {fault.seen}")),
        (ELSEWHERE, _warning, Grade.GUESS, Scope(os=f"seen on {fault.seen}")),
    ):
        yield Rule(
            f"fault-{fault.name}{suffix}",
            fault.ops,
            fault.what,
            fault.source,
            test=partial(test, fault, format),
            grade=grade,
            scope=scope,
            kind="memory" if fault.ends_process else "numeric",
            remedy=fault.remedy,
            advice=fault.advice,
        )


CLAIMS = {f"fault-{fault.name}": fault for fault in FAULTS}
"""The id of a claim -> its fault."""
WARNINGS = {f"{rule}{ELSEWHERE}": fault for rule, fault in CLAIMS.items()}
"""The id of a warning -> its fault."""


def rules_of(format: str) -> tuple[Rule, ...]:
    """Return the claim and the warning of each fault, for models of a format ("Core ML" or "Core AI")."""
    return tuple(rule for fault in FAULTS for rule in _claim_and_warning(fault, format))


RULES = rules_of(CORE_ML)
"""The rules about Core ML models."""


# Fused attention to which the plan gives no device, and the SiLU of an embedder.

FUSED = names("scaled_dot_product_attention")
SOURCE = "ironblock/sidekick: docs/MODELS.md, docs/DECISIONS.md (D24, D25, D27)"
ON_27 = (("macOS", 27), ("iOS", 27))
EXPLICIT = "write it as matmul, softmax and matmul (decompose_attention), or use the math kernel of torch"

NO_DEVICE = Rule(
    "sdpa-no-device",
    FUSED,
    "the plan named no device for the 12 fused attentions of one model, while a lone one was legal on an M4",
    SOURCE,
    grade=Grade.REPORTED,
    scope=Scope(frozenset({13}), "seen on M1 Max, macOS 27.0", since=ON_27),
    advice=EXPLICIT,
    remedy="decompose_attention",
)
CAST_MASK = Rule(
    "sdpa-mask-cast",
    FUSED,
    "the plan named no device for fused attentions whose mask came from integers, by cast, subtraction and "
    "product; with an fp16 mask beside it a lone one was legal on an M4",
    SOURCE,
    test=lambda op, target: cast_mask(op),
    grade=Grade.REPORTED,
    scope=Scope(frozenset({13, 14, 15, 17, 18}), "seen on M1 Max, macOS 27.0", since=ON_27),
    advice=EXPLICIT,
    remedy="decompose_attention",
    looks_beyond="any",
)
SILU = Rule(
    "num-silu",
    names("silu"),
    "in one embedder the native SiLU was what lost most precision on the engine",
    "ironblock/sidekick",
    test=lambda op, target: f"%{op.outputs[0].name} is a silu",
    grade=Grade.REPORTED,
    kind="numeric",
    scope=Scope(frozenset({13}), "seen on M1 Max, macOS 27.0", since=ON_27),
    advice="compare with x * sigmoid(x) on the device",
)
