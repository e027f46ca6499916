"""docs/core-ai-agreement.md: how often Apple's Core AI runtime and the interpreter agree, op by op.

`core_ai_judge.py` finds it out and keeps the counts beside this file; the page is made of them alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_ai_judge import AGREES, DIED, DIFFERS, NOT_WRITTEN, REFUSED, Verdict

from anesurgery.coreai.lowerings import TABLE
from anesurgery.interpret.table import TABLE as INTERPRETED

COUNTS = Path(__file__).with_name("core_ai_agreement.json")
RUN = "run on Linux with coreai-core 1.0.0b3"


@dataclass(frozen=True)
class Difference:
    """Something that both sides read differently, or that one of them does not do."""

    what: str
    """Of which op, and what."""
    ops: str
    """Pattern of the op types; one of the program must fit."""
    result: str
    """What became of the case."""
    why: str
    """Pattern in the reason, or in the name of the case."""
    right: str
    """Which side is right: "ours", "Apple's", "either" where MIL does not say, "nothing to compare"."""
    source: str

    def fits(self, one: Verdict) -> bool:
        """Is a verdict of this kind?"""
        words = f"{one.name} {one.why}"
        return (
            one.result == self.result
            and any(re.fullmatch(self.ops, op) for op in one.ops)
            and bool(re.search(self.why, words))
        )


MIL = "coremltools 9, documentation of the op"
ANY = ".*"
DIFFERENCES = (
    Difference("argmax, argsort and topk of NaN", "reduce_arg.*|argsort|topk", DIFFERS, ANY, "either", MIL),
    Difference(
        "resizing next to an infinity: Apple's runtime multiplies the infinity by 0, which gives NaN",
        "resize_.*|upsample_.*|resize",
        DIFFERS,
        "nan|inf",
        "ours",
        f"the sampling point is exactly on a pixel; {RUN}",
    ),
    Difference("1 / -0 with epsilon 0: the sum -0 + 0 is 0", "inverse", DIFFERS, "inf", "ours", MIL),
    Difference(
        "weights that are decompressed in fp16, with the operations in another order",
        "constexpr_.*",
        DIFFERS,
        ANY,
        "either",
        "both are within the rounding of fp16",
    ),
    Difference(
        "integer overflow, or an integer raised to a negative power: Apple's runtime crashes",
        "matmul|pow|cumsum|.*div|mod",
        DIED,
        ANY,
        "ours",
        RUN,
    ),
    Difference(
        "lists that grow: the tensors that replace them in Core AI cannot grow",
        "list_.*",
        REFUSED,
        "out of range",
        "ours",
        "coremltools' test",
    ),
    Difference("random numbers", "random_.*", NOT_WRITTEN, ANY, "nothing to compare", "Core AI has no such op"),
    Difference(
        "a sparse weight with an offset",
        "constexpr_.*",
        NOT_WRITTEN,
        "offset",
        "nothing to compare",
        "the offset would turn the zeros of the weight into other numbers",
    ),
    Difference(
        "a sparse weight that no `constexpr_sparse_to_dense` op reads",
        "constexpr_(lut_to_sparse|sparse.*)",
        NOT_WRITTEN,
        "broadcastable|MIL infers|no tensor",
        "nothing to compare",
        "only coremltools' own tests build it",
    ),
    Difference(
        "slices with a negative stride and a computed begin or end; writes to slices with a negative stride",
        "slice_.*",
        NOT_WRITTEN,
        "backwards",
        "nothing to compare",
        "in Core AI, a slice with a negative stride cannot reach index 0",
    ),
    Difference(
        "an index outside the tensor: our interpreter raises an error",
        "scatter.*|gather.*",
        NOT_WRITTEN,
        "outside",
        "ours",
        MIL,
    ),
    Difference(
        "a matrix product of int32 and fp16",
        "matmul",
        NOT_WRITTEN,
        "pre-compilation",
        "nothing to compare",
        "Apple's package refuses it",
    ),
    Difference(
        "an op whose formula in Core AI needs the length, if the length is dynamic",
        ANY,
        NOT_WRITTEN,
        "dynamic|is computed|Operation creation failed|lists|symbolic",
        "nothing to compare",
        "Core AI supports dynamic axes, but has no op that computes such a formula on them",
    ),
)
"""Every difference that was seen; the first row that fits a case counts it."""


def row_of(one: Verdict) -> Difference | None:
    """The row that explains a case; None where nobody looked into it."""
    return next((row for row in DIFFERENCES if row.fits(one)), None)


def counted(found: Mapping[str, Sequence[Verdict]]) -> dict[str, Any]:
    """The counts by op type, of each suite and of each row of the table."""
    ops: dict[str, Counter[str]] = defaultdict(Counter)
    rows, suites = Counter[str](), dict[str, dict[str, int]]()
    for suite, verdicts in found.items():
        suites[suite] = dict(sorted(Counter(one.result for one in verdicts).items()))
        for one in verdicts:
            row = row_of(one)
            rows[row.what if row else "unexplained"] += one.result != AGREES
            for op in one.ops:
                ops[op][one.result] += 1
    return {
        "suites": suites,
        "rows": {name: n for name, n in sorted(rows.items()) if n},
        "ops": {op: dict(sorted(counts.items())) for op, counts in sorted(ops.items())},
    }


def unexplained(found: Mapping[str, Sequence[Verdict]]) -> list[Verdict]:
    """The cases that differ, and that no row of the table explains."""
    return [one for verdicts in found.values() for one in verdicts if one.result != AGREES and not row_of(one)]


def report(found: Mapping[str, Sequence[Verdict]]) -> str:
    """The counts of each suite, and every case that nothing explains."""
    lines = [f"{suite}: {counts}" for suite, counts in counted(found)["suites"].items()]
    lines += [
        f"{one.result}: {one.name}: {', '.join(one.ops)}: {one.why} {one.psnr}" for one in unexplained(found)
    ]
    return "\n".join(lines)


def write(found: Mapping[str, Sequence[Verdict]], page: Path) -> None:
    """Keep the counts, and write the page."""
    counts = counted(found)
    COUNTS.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    page.write_text(text(counts), encoding="utf-8")


SUITES = {
    "ops": "coremltools' own tests of each op",
    "torch": "tests of its converter from PyTorch",
    "ml_program": "its tests of ML Programs",
    "random": "random programs of one op",
}
RESULTS = (AGREES, DIFFERS, DIED, REFUSED, NOT_WRITTEN)


def text(counts: Mapping[str, Any]) -> str:
    """The page."""
    return "\n".join(_lines(counts)) + "\n"


def _lines(counts: Mapping[str, Any]) -> Iterator[str]:
    every = Counter[str]()
    for results in counts["suites"].values():
        every.update(results)
    ran = every[AGREES] + every[DIFFERS]
    own = {implementation.function for implementation in INTERPRETED.values()}
    shared = sorted(op for op in counts["ops"] if TABLE.get(op) in own)
    yield from (
        "# Where Apple's Core AI runtime and the interpreter agree",
        "",
        "We run the same programs on the same inputs in Apple's runtime and in our interpreter, both in fp32.",
        f"Of {sum(every.values()):,} programs, {ran:,} ran on both, and {every[AGREES]:,} of these "
        f"({every[AGREES] / ran:.1%}) agree to 100 dB.",
        "We ran it on Linux, where Apple's runtime is a separate build for the CPU. So these results say "
        "nothing about a Mac.",
        "For some ops, we write our own formula into the Core AI program. For these, agreement only shows that "
        "Apple's runtime evaluates our formula the same way we do:",
        "",
        "```text",
        ", ".join(shared),
        "```",
        "",
        "`make conformance-coreai` runs the programs and writes this page.",
        "",
        f"| programs | {' | '.join(RESULTS)} |",
        "|---|" + "---|" * len(RESULTS),
    )
    for suite, results in counts["suites"].items():
        yield f"| {SUITES[suite]} | {' | '.join(str(results.get(r, 0)) for r in RESULTS)} |"
    yield from (
        "",
        f'"{DIED.capitalize()}": Apple\'s runtime crashed. "{REFUSED.capitalize()}": it returned an error. '
        f'"{NOT_WRITTEN.capitalize()}": Core AI has no counterpart for the op.',
        "",
        "## What differs",
        "",
        "We looked into each difference. If MIL does not define what an op does, either side may be right. If "
        "a program could not be written for Core AI, there is nothing to compare.",
        'The rows with 0 programs come from a longer run (`OPTIONS="--sample 6 --draws 4"`).',
        "",
        "| what | programs | which side is right | source |",
        "|---|---|---|---|",
    )
    for row in DIFFERENCES:
        yield f"| {row.what} | {counts['rows'].get(row.what, 0)} | {row.right} | {row.source} |"
    yield from ("", "## Op by op", "", "A program counts once for each op in it.", "")
    yield f"| op | {' | '.join(RESULTS)} |"
    yield "|---|" + "---|" * len(RESULTS)
    for op, results in counts["ops"].items():
        yield f"| `{op}` | {' | '.join(str(results.get(r, 0)) for r in RESULTS)} |"
