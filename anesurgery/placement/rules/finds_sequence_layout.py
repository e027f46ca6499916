"""Where Apple's layout for transformers was measured: which models, which chips, and what it gained there.

`SEEN` is all that is known of it. The rows that decide name chips on which a model became several times as
fast; there `sequence_layout` is chosen by default. Anywhere else, and for other kinds of model, it runs on
request: what an M1 Max did says nothing of an M2, and where a model was on the engine as a whole, little was
gained and the GPU lost.
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
"""The one kind of model of which there are rows that decide."""


@dataclass(frozen=True)
class Seen:
    """One measurement of the layout.

    Attributes:
        kind: of the models that it speaks about.
        figure: what changed, in words.
        where: chip and OS, as far as they are named.
        grade: how well it is supported.
        source: who measured or said it.
        chips: those for which it decides, as `Target.marketed` names them; empty where it decides nothing.
    """

    kind: str
    figure: str
    where: str
    grade: Grade
    source: str
    chips: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.figure} ({self.grade.value}, {self.where}: {self.source})"


APPLE = "apple/ml-ane-transformers"
SEEN = (
    Seen(
        TEXT,
        "DistilBERT went from 55 to 8.7 ms",
        "M1 Max, OS not named",
        Grade.MEASURED,
        APPLE,
        ("M1", "M1 Max"),
    ),
    Seen(
        TEXT,
        "DistilBERT became 2.84 times as fast at 128 tokens, and up to 10 times at 512 in batches of 8",
        "iPhone 13 (A15), OS not named",
        Grade.DOCUMENTED,
        APPLE,
        ("A15",),
    ),
    Seen(
        "vision transformers",
        "SigLIP, on the engine as a whole before, gained 13 and 10 %; on the GPU it lost 16 and 34 %",
        "M4 Pro, macOS 26.5.1, and M5 Max, macOS 26.6",
        Grade.MEASURED,
        "erwinzhang7/coreml-compute-placement",
    ),
    Seen(
        "UNets of diffusion",
        "that of Stable Diffusion 1.4 went from 1040 to 726 ms on the engine, and from 280 to 377 ms on the "
        "GPU",
        "M1 Max, macOS 13",
        Grade.REPORTED,
        "smpanaro/more-ane-transformers: NOTES.md (March 30, 2023)",
    ),
)
"""Of decoders nothing was measured."""


def decided(target: Target) -> tuple[Seen, ...] | Refusal:
    """The rows that decide for each chip of a target, or the reason why there are none."""
    if not target.uses_ane or target.uses_gpu:
        return Refusal("the layout is for the Neural Engine, and slower on the GPU")
    deciding = {chip: row for row in SEEN for chip in row.chips}
    if unknown := [chip for chip in target.marketed if chip not in deciding]:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        return Refusal(f"no measurement says that the layout helps on {unknown[0]}{more}")
    return tuple(dict.fromkeys(deciding[chip] for chip in target.marketed))


def evidence(program: Program | Function, target: Target) -> tuple[Seen, ...] | Refusal:
    """What was measured of the layout, where the model is of the kind that was."""
    decision = decided(target)
    if isinstance(decision, Refusal) or makeup(program).encodes_text:
        return decision
    return Refusal(f"the layout was measured to help {TEXT}, and this is none")


@cached
def _first(function: Function) -> Attention | None:
    """The first attention of a function."""
    return next(attentions(function), None)


def rows_of_tokens(op: Operation, target: Target) -> str:
    """The first attention of a text encoder, where its heads are computed together."""
    function = op.enclosing_block
    first = _first(function) if isinstance(function, Function) else None
    apart = first is not None and first.product is not None and first.product.op_type == "einsum"
    if not isinstance(function, Function) or first is None or first.weights is not op or apart:
        return ""
    seen = evidence(function, target)
    return "" if isinstance(seen, Refusal) else f"%{op.outputs[0].name} is over all heads together"


RULES = (
    Rule(
        "rows-of-tokens",
        names("softmax scaled_dot_product_attention"),
        f"with channels first, and head by head, {'; '.join(str(row) for row in SEEN if row.chips)}",
        "; ".join(dict.fromkeys(row.source for row in SEEN if row.chips)),
        test=rows_of_tokens,
        kind="speed",
        scope=Scope(frozenset({13, 14}), "seen on M1 Max and iPhone 13 (A15)"),
        remedy="sequence_layout",
        advice="write the model in this layout; on a GPU it is slower so",
    ),
)
