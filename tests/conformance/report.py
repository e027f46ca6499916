"""The tables of a conformance run: from one JSON line per test to counts, and every test that did not pass."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]

OUTSIDE: dict[str, str] = {
    r"has no layers and no ops|renamed_feature": (
        "a model that is no network: a linear regressor (the tests share it, and a failure leaves it renamed)"
    ),
    r"torchvision|torchao|executorch|tensorflow|torchaudio|peft|No module named|is required for": (
        "a package that is not installed"
    ),
    r"mps devices": "a Mac's GPU in torch",
    r"MLComputePlan|compute_plan|remote|MLModelAsset|ComputeDevice|devicectl|xcrun|_MLModelProxy'? has no"
    r"|get_compiled_model_path|not loaded or compiled with the Core ML|MLModelBenchmarker.Statistics": (
        "Core ML itself: compute plans, devices, assets, its own times"
    ),
}
"""Pattern in the reason -> what the test needs that is outside an interpreter of ML Programs and networks."""

EXPLAINED: dict[str, str] = {
    r"TestCropResize::.*ios1[67]|TestResample::.*iOS1[67]": (
        "the expected numbers are typed with three or four digits, and held to 1e-5 in the fp32 form"
    ),
    r"TestResample::test_builder_to_backend_smoke\[.*fp32": (
        "counts the casts of the fp16 form, in the fp32 form too"
    ),
    r"TestExecuTorchExamples": "expects the stack traces of an older torch",
    r"TestLSTMWithPackedSequence": (
        "with this torch the converter reads the batch of a packed sequence from the wrong axis: "
        "the initial state has another batch than the input"
    ),
    r"test_stack_dynamic_range_dim": (
        "expects that Core ML refuses the default size of a flexible input; the size that is given fits"
    ),
    r"test_index_bool_indices.*fp16": (
        "compares random numbers with 0.5: one of them is 0.5 in half precision and falls on the other side"
    ),
    r"TestFill::test_fill_.*int32": "the converter fills an integer tensor with 0.2",
    r"test_batchnorm_dynamic": "torch refuses the module itself",
    r"test_gather_nd_int16_indices": "looks at the dtype that the converter chose, before any number",
    r"test_calculate_dft_matrix": "expects the names that a builder gives first; an earlier test had them",
    r"test_move_transpose_before_subblock": "branches on an array of 200 numbers",
    r"test_nms_[cg]pu|test_slice_dynamic_[cg]pu": (
        "gives as a blob what must be a constant in an ML Program: thresholds, strides"
    ),
    r"TestNormalizationBatchNorm::.*float16.*float16": (
        "mixes fp16 and fp32 in one op, which coremltools writes and cannot read"
    ),
}
"""Pattern in the name of a test that fails -> why, found by reading it. It counts as failed all the same."""

LOOSE: dict[str, str] = {
    r"quantiz|Quantized|half_precision": (
        "the weights are stored in fewer bits than those of which the expected numbers are made"
    ),
    r"test_gelu_activation": "approximations of GELU are compared with GELU itself",
    r"test_unary_(inverse|rsqrt)": "the expected numbers leave epsilon out",
    r"test_tiny_upsample": "the expected numbers are typed with three digits",
    r"test_categorical_distribution": "counts of random numbers are compared with probabilities",
}
"""Pattern in the name of a test that passes only loosely -> why, found by reading it."""

EXACT, HALF = 1e-5, 2.0**-10
FEW = 8
"""Half-float units that a whole test may lose before it is listed."""


def read(file: Path) -> list[Row]:
    """The rows of a run, one per test."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return list({row["test"]: row for row in rows}.values())


def group(row: Row) -> str:
    """Where a test belongs: "passed", "xfail ...", "skipped", "outside", "before a prediction" or "failed"."""
    if row["xfail"]:
        return "xfail passes" if row["outcome"] == "passed" else "xfail fails"
    if row["outcome"] != "failed":
        return str(row["outcome"])
    if outside(row):
        return "outside"
    return "before a prediction" if not row["predictions"] else "failed"


def outside(row: Row) -> str:
    """What a failed test needs that is not here; "" for nothing known."""
    return _first(OUTSIDE, row["reason"])


def _first(table: dict[str, str], text: str) -> str:
    """What the first pattern that fits says; "" where none does."""
    return next((what for pattern, what in table.items() if re.search(pattern, text)), "")


def explained(row: Row) -> str:
    """Why a test fails, where somebody looked; "" elsewhere."""
    if row["outcome"] != "failed":
        return ""
    return _first(EXPLAINED, row["test"])


def loose(row: Row) -> bool:
    """Did a test pass only by a tolerance wider than its arithmetic explains?"""
    gate = FEW * HALF if row["stored"] == "fp16" else EXACT
    return bool(row["outcome"] == "passed" and row["compared"] and row["predictions"] and row["error"] > gate)


def held_to_half(row: Row) -> bool:
    """Would a test have failed by its own tolerance, and passed as a program of half floats (`comparing`)?"""
    return bool(row["outcome"] == "passed" and row["half"])


def known_loose(row: Row) -> str:
    """Why a test passes only loosely, where somebody looked; "" elsewhere."""
    return _first(LOOSE, row["test"])


GROUPS = ("passed", "failed", "before a prediction", "outside", "skipped", "xfail passes", "xfail fails")


def table(suites: dict[str, list[Row]]) -> str:
    """Counts by suite, as Markdown."""
    lines = [
        f"| suite | tests | {' | '.join(GROUPS)} | share passed | predictions | loose | held to fp16 |",
        "|---" * 13 + "|",
    ]
    for name, rows in suites.items():
        counts = Counter(map(group, rows))
        ran = counts["passed"] + counts["failed"]
        share = f"{100 * counts['passed'] / ran:.2f} %" if ran else "-"
        predictions = sum(row["predictions"] for row in rows)
        lines.append(
            f"| {name} | {len(rows)} | {' | '.join(str(counts[g]) for g in GROUPS)} | {share} | {predictions} "
            f"| {sum(map(loose, rows))} | {sum(map(held_to_half, rows))} |"
        )
    return "\n".join(lines)


def listing(suites: dict[str, list[Row]]) -> str:
    """Every test that did not pass, and every one that passed by a loose tolerance, with the reason."""
    parts = []
    for wanted in GROUPS[1:]:
        found: dict[str, list[str]] = defaultdict(list)
        for row in (r for rows in suites.values() for r in rows if group(r) == wanted):
            reason = (
                outside(row) or explained(row) or re.sub(r"\s+", " ", row["reason"])[:160] or "no reason given"
            )
            found[reason].append(row["test"])
        parts.append(_section(wanted, found))
    wide: dict[str, list[str]] = defaultdict(list)
    for row in (r for rows in suites.values() for r in rows if loose(r)):
        size = f"{row['stored']}, relative error {row['error']:.1e}"
        wide[known_loose(row) or size].append(row["test"])
    halves: dict[str, list[str]] = defaultdict(list)
    for row in (r for rows in suites.values() for r in rows if held_to_half(r)):
        halves[f"off by {row['error'] / HALF:.1f} units in the last place of fp16"].append(row["test"])
    return "\n".join(
        [
            *parts,
            _section("passed by a loose tolerance", wide),
            _section("outside their own tolerance for fp32, within that of a program of half floats", halves),
        ]
    )


def _section(title: str, found: dict[str, list[str]]) -> str:
    lines = [f"\n## {title}: {sum(map(len, found.values()))}\n"]
    for reason, tests in sorted(found.items(), key=lambda item: -len(item[1])):
        lines.append(f"* {len(tests)} x {reason}")
        lines += [f"  * `{test}`" for test in tests[:50]]
        lines += [f"  * and {len(tests) - 50} more"] if len(tests) > 50 else []
    return "\n".join(lines)


def mutation_table(suites: dict[str, list[Row]], spoiled: dict[str, dict[str, list[Row]]]) -> str:
    """How many tests notice spoiled outputs: by their own tolerance, and by the error noted here."""
    good = {r["test"]: r for rows in suites.values() for r in rows if group(r) == "passed" and r["compared"]}
    lines = ["| outputs | tests that compare | fail | fail or are listed as loose |", "|---|---|---|---|"]
    for name, runs in spoiled.items():
        again = [r for rows in runs.values() for r in rows if r["test"] in good]
        failed = sum(r["outcome"] == "failed" for r in again)
        seen = sum(
            r["outcome"] == "failed" or r["error"] > 10 * good[r["test"]]["error"] + EXACT for r in again
        )
        lines.append(f"| {name} | {len(again)} | {failed} | {seen} |")
    return "\n".join(lines)


def pass_table(rows: list[Row]) -> str:
    """What coremltools' own passes do to the numbers: how many were compared, and those that changed them."""
    notes = [(row["test"], note) for row in rows for note in row["passes"]]
    ran = [(test, note) for test, note in notes if not note["why"]]
    changed: dict[str, list[str]] = defaultdict(list)
    for test, note in ran:
        if not note["error"] <= 4 * HALF:
            changed[f"{note['pass']}: relative error {note['error']:.1e}"].append(test)
    reasons: dict[str, list[str]] = defaultdict(list)
    for test, note in notes:
        if note["why"]:
            reasons[re.sub(r"\s+", " ", note["why"])[:160]].append(test)
    title = f"passes of coremltools compared before and after: {len(ran)} of {len(notes)}; that changed numbers"
    return _section(title, changed) + _section("passes that could not be compared", reasons)


def rewriting_table(rows: list[Row]) -> str:
    """What each pass did to the programs of a run, as Markdown."""
    names: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for one in row["rewriting"]:
            names[one["name"]].update(
                {
                    "programs": 1,
                    "rewritten": bool(one["changes"]),
                    "rewrites": one["changes"],
                    "refusals": one["refusals"],
                    one["outcome"]: 1,
                }
            )
    head = ("programs", "rewritten", "rewrites", "refusals", "wrong", "crash")
    lines = [f"| pass | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    return "\n".join(
        lines
        + [f"| {name} | {' | '.join(str(int(c[h])) for h in head)} |" for name, c in sorted(names.items())]
    )
