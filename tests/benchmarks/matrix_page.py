"""docs/architectures.md: the figures of `matrix.py` as tables, and what they come to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from families import ARCHITECTURES, DECODERS, ENCODERS, OTHERS, PICTURES, SEQUENCES
from real_widths import REAL

Row = dict[str, Any]

SECTIONS = {
    "Causal language models": DECODERS,
    "Text encoders": ENCODERS,
    "Speech, and encoders with decoders": SEQUENCES,
    "Pictures": PICTURES,
    "timm and diffusers": OTHERS,
}
EXACT, LOST = 80.0, 3.0
"""Bars in dB: fp32 against torch at least, fp16 against the package as given at most less."""

HEAD = """# Architectures

For each architecture, we build one small model with random weights, with transformers, timm or diffusers. We
convert it to fp16 for iOS 17 with `frontend.register()` and `rerank`, and apply a recipe (the *method*): the
recipe of the family, or else `auto`. `make matrix` writes this page.

* **trace, export**: PSNR in dB of the fp32 conversion, compared with torch. We convert with `torch.jit.trace`
  and with `torch.export` (`draft_export` if a branch depends on data). If a conversion fails, the reason.
* **fp16**: PSNR in dB of the fp16 package, compared with torch: of all outputs before the method, and of those
  that it keeps after it. The summary compares the same outputs.
* **ops, flop**: the share in percent that `inspect` expects on the Neural Engine, before and after. We did
  not measure this on a device. The models are tiny, so one op is about a percent. If the unit of an op is
  unknown, the share is a range, and it drops if its lower end drops.
* **off**: the op types that do not run on the engine of the second target; "?" marks an unknown unit.
* **s**: CPU seconds of the method, without proofs.
* **-**: not measured.

Mixtures of experts compute every expert for every token (`frontend.register_experts()`). We also
checked A15 with iOS 17, which the tables leave out. The summary names each share that drops.
"""

REAL_TITLE = "## Real widths"
REAL_HEAD = f"""{REAL_TITLE}

These models have two layers of random weights, but the width, vocabulary and image size of real models. An
error that grows with the width shows here. `make matrix-real` measures them, only with `torch.jit.trace`.
"""


def page(figures: dict[str, Row], targets: Sequence[str]) -> str:
    """The whole page, but for models of real width."""
    parts = [HEAD, "\n".join(summary(figures, targets))]
    for title, rows in SECTIONS.items():
        known = {name: figures[name] for name in rows if name in figures}
        parts.append("\n".join([f"## {title}", "", *table(known, targets)]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def with_real_widths(text: str, figures: dict[str, Row], targets: Sequence[str]) -> str:
    """A page with its last section anew."""
    rest = text.partition(REAL_TITLE)[0].rstrip() + "\n"
    return "\n".join([rest, *real_widths(figures, targets), ""])


def real_section(text: str) -> list[str]:
    """The last section of a page, where it has one."""
    _, title, rest = text.partition(REAL_TITLE)
    return [title + rest] if title else []


def real_widths(figures: dict[str, Row], targets: Sequence[str]) -> Iterator[str]:
    """Two layers as wide as models in use, where another op may be the one that does not fit."""
    yield REAL_HEAD
    commits = Counter(row.get("commit") or "unknown" for row in figures.values())
    yield f"* of {len(REAL)}, {len(figures)} are measured, at {in_counts(commits)}"
    known = {name: figures[name] for name in REAL if name in figures}
    for name, cases in misses(known).items():
        yield f"* {name}: {in_words(cases)}"
    yield ""
    yield from table(known, targets)


def summary(figures: dict[str, Row], targets: Sequence[str]) -> Iterator[str]:
    """Counts, medians, and each case that misses a bar."""
    ways = {name: row.get("convert", {}) for name, row in figures.items()}
    yield "## Summary\n"
    on = [f"{sum(t in row.get('targets', {}) for row in figures.values())} on {t}" for t in targets]
    count = f"of {len(ARCHITECTURES)} architectures, {len(figures)} are measured"
    yield f"* {count}: {', '.join(on)}"
    commits = Counter(row.get("commit") or "unknown" for row in figures.values())
    yield f"* models at each commit: {in_counts(commits)}"
    for how in ("trace", "export"):
        good = [n for n, w in ways.items() if how in w and w[how]["error"] is None]
        failed = set(figures) - set(good)
        names = f"; not {in_words(failed)}" if failed else ""
        yield f"* by {how}, {len(good)} of {len(figures)} convert{names}"
    low = [n for n, w in ways.items() for v in w.values() if v["error"] is None and not v["fp32"] >= EXACT]
    yield f"* below {EXACT:.0f} dB in fp32 against torch: {in_words(low)}"
    for name, cases in misses(figures).items():
        yield f"* {name}: {in_words(cases)}"
    for target in targets[:2]:
        for what in ("ops", "flop"):
            known = [new for n in DECODERS if n in figures and (new := after(figures[n], target))]
            if known:
                ends = (median(new[what] for new in known), median(new["most"][what] for new in known))
                middle = f"median share of {what} {ranged(*ends)} % ({len(known)} models)"
                yield f"* causal language models on {target}: {middle}"


def misses(figures: dict[str, Row]) -> dict[str, list[str]]:
    """Each case that misses a bar, by bar."""
    lowered, noisy, failed, undefined = list[str](), list[str](), list[str](), list[str]()
    for name, row in figures.items():
        undefined += [name] if row.get("fp16") is not None and math.isnan(row["fp16"]) else []
        for target, found in row.get("targets", {}).items():
            for method, new in found["after"].items():
                case = f"{name} ({method}, {target})"
                if new["error"] is not None:
                    failed.append(case)
                    continue
                lowered += [case] if any(new[k] < found["before"][k] for k in ("ops", "flop")) else []
                noisy += [case] if new["fp16"] < new.get("fp16_before", row["fp16"]) - LOST else []
    return {
        "a share drops": lowered,
        f"fp16 drops by more than {LOST:.0f} dB": noisy,
        "the method failed or refused": failed,
        "fp16 gives NaN before the method": undefined,
    }


def table(figures: dict[str, Row], targets: Sequence[str]) -> Iterator[str]:
    """One row for each architecture."""
    heads = [f"{target.split('/')[0]} {what}" for target in targets[:2] for what in ("ops", "flop")]
    cells = ["architecture", "trace", "export", "fp16", "method", *heads, "off", "s"]
    yield line(cells)
    yield line(["---"] * len(cells))
    for name, row in figures.items():
        ways = row.get("convert", {})
        method, new = chosen(row), [after(row, t) for t in targets[:2]]
        shares = [
            share(row.get("targets", {}).get(t), n, what)
            for t, n in zip(targets[:2], new, strict=True)
            for what in ("ops", "flop")
        ]
        known = new[0] or new[1]
        off = (shortened(staying(new[1])) or "nothing") if new[1] else "-"
        yield line(
            [
                f"`{name}`",
                *(way(ways.get(how)) for how in ("trace", "export")),
                f"{decibel(row.get('fp16'))} → {decibel(known.get('fp16'))}",
                f"`{method}`" if method else "-",
                *shares,
                off,
                f"{known['seconds']:.1f}" if known else "-",
            ]
        )


def share(found: Row | None, new: Row, what: str) -> str:
    """A share before and after, or that it was not measured."""
    if found is None:
        return "-"
    old, now = (ranged(one[what], one["most"][what]) if one else "-" for one in (found["before"], new))
    return f"{old} → {now}"


def staying(new: Row) -> str:
    """What is off the ANE, and what may be, by type."""
    counts = [(new["off"], ""), (new["unknown"], "?")]
    return ", ".join(f"{n} {kind}{mark}" for ops, mark in counts for kind, n in ops.items())


def chosen(row: Row) -> str:
    """The recipe of the family where it was measured, else `auto`."""
    methods = [m for found in row.get("targets", {}).values() for m in found["after"]]
    return row["recipe"] if row.get("recipe") in methods else ("auto" if methods else "")


def after(row: Row, target: str) -> Row:
    """What the method made of it; empty where it failed."""
    found: Row = row.get("targets", {}).get(target, {"after": {}})["after"].get(chosen(row), {"error": "-"})
    return {} if found["error"] is not None else found


def way(figures: Row | None) -> str:
    """The PSNR of a conversion, or why there is none."""
    if figures is None:
        return "-"
    return decibel(figures["fp32"]) if figures["error"] is None else shortened(figures["error"], 60)


def decibel(value: float | None) -> str:
    """A PSNR."""
    if value is None:
        return "-"
    return "NaN" if math.isnan(value) else ("equal" if math.isinf(value) else f"{value:.0f}")


def percent(share: float) -> str:
    """A share, never rounded up to all."""
    return "100" if share == 1 else f"{math.floor(share * 1000) / 10:.1f}"


def ranged(least: float, most: float) -> str:
    """Both ends of a share, once where they read alike."""
    return "-".join(dict.fromkeys((percent(least), percent(most))))


def shortened(text: str, most: int = 70) -> str:
    """A cell of a table."""
    plain = text.replace("|", "/")
    return plain if len(plain) <= most else plain[: most - 3] + "..."


def in_words(cases: Iterable[str]) -> str:
    """Names, each once."""
    return ", ".join(Counter(sorted(cases))) or "none"


def in_counts(counted: Counter[str]) -> str:
    """Names with their counts, the most frequent first."""
    return ", ".join(f"{name} ({count})" for name, count in counted.most_common())


def line(cells: Sequence[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"
