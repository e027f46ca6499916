"""The rule about Apple's layout for transformers, and the measurements that it rests on.

`MEASUREMENTS` lists all published ones: which kind of model, which chip, and how the time changed. Rows with
`chips` decide: on these chips a text encoder became several times as fast, so `sequence_layout` runs there by
default. Elsewhere, and for other kinds of model, it runs only on request: an M1 Max says nothing about an M2,
and a model that already ran on the engine as a whole gained little, and became slower on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery.errors import Refusal
from anesurgery.facts.makeup import makeup
from anesurgery.interpret.attentions import Attention, attentions
from anesurgery.mil import Function, Operation, Program
from anesurgery.ops import names
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.target import Target
from anesurgery.semantics.analysis_cache import cached

TEXT = "text encoders"
"""The only kind of model with rows that decide."""


@dataclass(frozen=True)
class Measurement:
    """One published measurement of the layout."""

    kind: str
    """The kind of model that was measured."""
    figure: str
    """How the time changed, in words."""
    where: str
    """Chip and OS, as far as they are named."""
    grade: Grade
    """How well it is supported."""
    source: str
    """Who measured or said it."""
    chips: tuple[str, ...] = ()
    """The chips for which it decides, as `Target.marketed` names them; empty where it decides nothing."""

    def __str__(self) -> str:
        return f"{self.figure} ({self.grade.value}, {self.where}: {self.source})"


APPLE = "apple/ml-ane-transformers"
MEASUREMENTS = (
    Measurement(
        TEXT,
        "DistilBERT went from 55 to 8.7 ms",
        "M1 Max, OS not given",
        Grade.MEASURED,
        APPLE,
        ("M1", "M1 Max"),
    ),
    Measurement(
        TEXT,
        "DistilBERT became 2.84 times as fast at 128 tokens, and up to 10 times at 512 in batches of 8",
        "iPhone 13 (A15), OS not given",
        Grade.DOCUMENTED,
        APPLE,
        ("A15",),
    ),
    Measurement(
        "vision transformers",
        "SigLIP, which already ran on the engine, was 13 and 10 % faster; on the GPU it was 16 and 34 % slower",
        "M4 Pro, macOS 26.5.1, and M5 Max, macOS 26.6",
        Grade.MEASURED,
        "erwinzhang7/coreml-compute-placement",
    ),
    Measurement(
        "diffusion UNets",
        "the UNet of Stable Diffusion 1.4 went from 1040 to 726 ms on the engine, and from 280 to 377 ms on "
        "the GPU",
        "M1 Max, macOS 13",
        Grade.REPORTED,
        "smpanaro/more-ane-transformers: NOTES.md (March 30, 2023)",
    ),
)
"""No decoder was measured."""


def deciding_measurements(target: Target) -> tuple[Measurement, ...] | Refusal:
    """Return the rows that decide for the chips of a target, or the reason why there are none."""
    if not target.uses_ane or target.uses_gpu:
        return Refusal("the layout is for the Neural Engine, and slower on the GPU")
    deciding = {chip: row for row in MEASUREMENTS for chip in row.chips}
    if unknown := [chip for chip in target.marketed if chip not in deciding]:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        return Refusal(f"no measurement says that the layout helps on {unknown[0]}{more}")
    return tuple(dict.fromkeys(deciding[chip] for chip in target.marketed))


def evidence(program: Program | Function, target: Target) -> tuple[Measurement, ...] | Refusal:
    """Return the rows that decide for a model on a target, or why none does (another chip or kind of model)."""
    decision = deciding_measurements(target)
    if isinstance(decision, Refusal) or makeup(program).encodes_text:
        return decision
    return Refusal(f"the layout was measured to help {TEXT}, and this is none")


@cached
def _first_attention(function: Function) -> Attention | None:
    """Return the first attention of a function; None without one."""
    return next(attentions(function), None)


def joint_heads(op: Operation, target: Target) -> str:
    """Report the first attention of a text encoder on a measured chip, if its heads are computed together."""
    function = op.enclosing_block
    first = _first_attention(function) if isinstance(function, Function) else None
    if not isinstance(function, Function) or first is None or first.weights is not op:
        return ""
    has_split_heads = first.product is not None and first.product.op_type == "einsum"
    if has_split_heads or isinstance(evidence(function, target), Refusal):
        return ""
    return f"%{op.outputs[0].name} is over all heads together"


RULES = (
    Rule(
        "rows-of-tokens",
        names("softmax scaled_dot_product_attention"),
        f"with channels first, and head by head, {'; '.join(str(row) for row in MEASUREMENTS if row.chips)}",
        "; ".join(dict.fromkeys(row.source for row in MEASUREMENTS if row.chips)),
        test=joint_heads,
        kind="speed",
        scope=Scope(frozenset({13, 14}), "seen on M1 Max and iPhone 13 (A15)"),
        remedy="sequence_layout",
        advice="write the model in this layout; on a GPU it is slower so",
    ),
)
