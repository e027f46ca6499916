"""Ops that the engine computes wrongly: its faults as rules, and masks that fused attention ignores.

A fault is a claim on the chips and systems of the report, and a warning on others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from anesurgery.interpret.arithmetic.engine_faults import FAULTS, Fault
from anesurgery.mil import Operation, Program, Var, dtype_name, is_stored, walk_ops
from anesurgery.ops import CARRIERS, POINTWISE, names
from anesurgery.placement.evidence import Finding, Grade, Rule, Scope
from anesurgery.placement.target import CHIPS, Target
from anesurgery.semantics.intervals import interval
from anesurgery.semantics.rows import runtime

ELSEWHERE = "-elsewhere"
"""How the ids of warnings end."""


CORE_ML = "Core ML"


def concerns(fault: Fault, target: Target, format: str = CORE_ML) -> bool:
    """Was it reported of the format on a chip of the target's generations, and on its OS?"""
    if fault.format != format or not fault.chips or not _runs(fault, target):
        return False
    reported = {CHIPS[name].family for name in fault.chips}
    if fault.common and (target.os is None or not target.families <= reported):
        return False
    system = target.os is None or not fault.systems or (target.platform, target.os) in fault.systems
    return system and bool(reported & target.families)


def _runs(fault: Fault, target: Target) -> bool:
    """May Core ML use the unit of the report?"""
    return target.uses_gpu if fault.gpu_only else target.uses_ane


FIRST_CORE_AI = 27
"""The release of iOS and macOS that brought Core AI."""


def may_run_core_ai(fault: Fault, target: Target) -> bool:
    """Has the target Core AI, by its release? Where it names none, the chip of the report decides."""
    if target.os is not None:
        return target.os >= FIRST_CORE_AI
    return bool(fault.chips) and set(target.chips) <= {
        n for n in CHIPS if CHIPS[n].family in {CHIPS[c].family for c in fault.chips}
    }


def faults_on(target: Target) -> list[Fault]:
    """The rows of chips of a target, and those whose report names no chip."""
    families = {name: CHIPS[name].family for fault in FAULTS for name in fault.chips}
    return [f for f in FAULTS if not f.chips or {families[name] for name in f.chips} & target.families]


def reached(fault: Fault, op: Operation, layer: bool = False) -> str:
    """What of an op is wrong, in words; "" where it has another form or its values stay below the range.

    Args:
        fault: a row of the table.
        op: of a program.
        layer: is it that of a layer of a neural network?
    """
    said = fault.found(op, layer)
    if not said or fault.least is None:
        return said
    least = fault.least(op)
    return "" if interval(op.x)[1] < least else f"{said}; %{op.x.name} may be {least:.4g} or more"


def faults_of(ops: Iterable[Operation], target: Target) -> Iterator[tuple[Fault, Operation, str]]:
    """The ops that are wrong on a target, with what is wrong of each."""
    for op in ops:
        for fault in FAULTS:
            if concerns(fault, target) and (said := reached(fault, op)):
                yield fault, op, said


def _claim(fault: Fault, format: str, op: Operation, target: Target, layer: bool = False) -> str:
    said = reached(fault, op, layer) if concerns(fault, target, format) else ""
    wrong = [n for n in target.chips if CHIPS[n].family in {CHIPS[c].family for c in fault.chips}]
    what = "ends the process" if fault.ends_process else "wrong"
    return f"{what} on {', '.join(wrong)}: {said}" if said else ""


def _warning(fault: Fault, format: str, op: Operation, target: Target, layer: bool = False) -> str:
    silent = fault.common or concerns(fault, target, format) or not (_runs(fault, target) or fault.any_unit)
    silent |= fault.format != format == CORE_ML and not may_run_core_ai(fault, target)
    said = "" if silent else reached(fault, op, layer)
    elsewhere = f"on {', '.join(fault.chips)}" if fault.chips else "on a chip that is not named"
    what = "reported to end the process" if fault.ends_process else "reported wrong"
    return f"{what} {elsewhere}{f', by {fault.format}' * (fault.format != format)}: {said}" if said else ""


def of_layers(program: Program, target: Target) -> Iterator[Finding]:
    """What is said of the layers of a neural network, by the ops that mean the same."""
    for op in (op for function in program.functions.values() for op in walk_ops(function)):
        for fault in FAULTS:
            for rule, test in zip(_rules(fault), (_claim, _warning), strict=True):
                if words := test(fault, CORE_ML, op, target, layer=True):
                    yield rule.finding(words, op.outputs[0].name)


def _rules(fault: Fault, format: str = CORE_ML) -> Iterator[Rule]:
    """The claim, and the warning of a lower grade."""
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
"""The id of a claim -> its row."""
WARNINGS = {f"{rule}{ELSEWHERE}": fault for rule, fault in CLAIMS.items()}
"""The id of a warning about other chips -> its row."""


def rules_of(format: str) -> tuple[Rule, ...]:
    """Two rules for each row, about models of Core ML or Core AI: of a target one of them speaks."""
    return tuple(rule for fault in FAULTS for rule in _rules(fault, format))


RULES = rules_of(CORE_ML)
"""Those about models of Core ML."""


FUSED = names("scaled_dot_product_attention")
SOURCE = "ironblock/sidekick: docs/MODELS.md, docs/DECISIONS.md (D24, D25, D27)"
ON_27 = (("macOS", 27), ("iOS", 27))
ENGINE_READS = frozenset({"fp16", "bool"})
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


MASK_STEPS = 32
"""Ops between an input and a mask that are looked at; masks of transformers take up to ten."""
MAKES_MASKS = POINTWISE | CARRIERS | names("slice_by_index tile")
"""Light ops, which go where the op before them goes."""


def outside_mask(op: Operation, target: Target) -> str:
    """A mask that no op of the engine's own makes: an input, a constant, or what a cast on the CPU begins."""
    mask = op.inputs.get("attn_mask")
    if mask is None:
        return ""
    if mask.op is None:
        return f"the mask %{mask.name} is an input"
    if is_stored(mask):
        return f"the mask %{mask.name} is a constant"
    return cast_mask(op, target)


def cast_mask(op: Operation, target: Target) -> str:
    """A mask that light ops make of integers or fp32, which the engine does not read."""
    mask = op.inputs.get("attn_mask")
    waiting, path = [] if mask is None or mask.op is None else [mask.op], list[Operation]()
    outside: list[Var] = []
    while waiting and len(path) < MASK_STEPS:
        now = waiting.pop()
        if now.op_type not in MAKES_MASKS:
            return ""  # an op that may be on the engine has a part in it
        path.append(now)
        outside += [v for v in runtime(now) if dtype_name(v) not in ENGINE_READS and v not in outside]
        waiting += [v.op for v in runtime(now) if v.op is not None and v not in outside and v.op not in path]
    if mask is None or not outside or waiting:
        return ""
    steps = ", ".join(dict.fromkeys(maker.op_type for maker in reversed(path)))
    return f"the mask %{mask.name} is made of %{outside[0].name} ({dtype_name(outside[0])}) through {steps}"


CAST_MASK = Rule(
    "sdpa-mask-cast",
    FUSED,
    "the plan named no device for fused attentions whose mask came from integers, by cast, subtraction and "
    "product; with an fp16 mask beside it a lone one was legal on an M4",
    SOURCE,
    test=cast_mask,
    grade=Grade.REPORTED,
    scope=Scope(frozenset({13, 14, 15, 17, 18}), "seen on M1 Max, macOS 27.0", since=ON_27),
    advice=EXPLICIT,
    remedy="decompose_attention",
    far="any",
)
MASK_IGNORED = Rule(
    "sdpa-mask",
    FUSED,
    "fused attention did not apply a mask unless an op of the same part of the engine's program made it: wrong "
    "numbers, and no error",
    SOURCE,
    test=outside_mask,
    grade=Grade.REPORTED,
    kind="numeric",
    scope=Scope(os="seen on M1 Max, macOS 27.0", since=ON_27),
    remedy="decompose_attention",
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
MASK_RULES = (MASK_IGNORED, SILU)
