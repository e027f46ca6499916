"""An inspection in one sentence that needs none of our words: share, time, what runs elsewhere, what helps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anesurgery.placement.evidence import Finding

if TYPE_CHECKING:
    from anesurgery.placement.inspection import Inspection, OpRow

NAMED = 3
"""Passes that are named at most; the report has the rest."""
SOFT = ("speed", "numeric")
"""Kinds of findings that do not take an op off the ANE."""


def sentence(inspection: Inspection, rows: Sequence[OpRow]) -> str:
    """``ANE: 33 % of flop, 98 of 100 ops on M1/macOS 14, about 15.5 ms (6.71 to 35.7); ...``.

    Args:
        inspection: what is said.
        rows: its ops, those of its parts included.
    """
    if inspection.refused:
        return f"It does not load on {inspection.target}: {inspection.refused}."
    if not rows:
        return "There are no ops to place."
    first = f"ANE: {_shares(inspection, rows)} on {inspection.target}"
    time = "" if inspection.time is None else f", about {inspection.time}"
    return "; ".join(filter(None, [first + time, _elsewhere(rows), _help(rows)]))


def _shares(inspection: Inspection, rows: Sequence[OpRow]) -> str:
    """The share of the flop where they were counted, and how many ops."""
    mine = sum(row.preferred == "ane" for row in rows)
    if mine == len(rows):
        return "every op"
    unknown = sum(row.preferred is None for row in rows)
    if unknown == len(rows):
        return "nothing is known of where its ops run"
    doubt = f" ({unknown:,} more perhaps)" if unknown else ""
    ops = f"{mine:,} of {len(rows):,} ops{doubt}" if mine else f"no op{doubt}"
    if not mine or not any(row.flop for row in rows):
        return ops
    least, most = (percent(s["flop"]) for s in (inspection.residency, inspection.residency_at_most))
    flop = least if least == most else f"{least.removesuffix(' %')} to {most}"
    return f"{flop} of flop, {ops}"


def _elsewhere(rows: Sequence[OpRow]) -> str:
    """The op that takes the most time off the engine, by the estimate, or computes the most there; and why."""
    away = [row for row in rows if row.preferred not in ("ane", None) and _blocking(row)]
    if not away:
        return ""
    row = max(away, key=lambda r: (r.ms or 0.0, r.flop))
    why = _blocking(row)[0].message.replace(f"%{row.name} ", "it ", 1)
    return f"{row.op_type} {row.name} runs elsewhere: {why}"


def _help(rows: Sequence[OpRow]) -> str:
    """The passes for what keeps ops away, those for most time first."""
    found: dict[str, float] = {}
    for row in rows:
        for finding in _blocking(row):
            if finding.remedy:
                found[finding.remedy] = found.get(finding.remedy, 0.0) + (row.ms or 0.0)
    if not found:
        return ""
    named = sorted(found, key=lambda name: (-found[name], name))
    more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
    return f"may help: {', '.join(named[:NAMED])}{more}"


def _blocking(row: OpRow) -> list[Finding]:
    """What keeps an op off the engine."""
    return [f for f in row.findings if f.kind not in SOFT] if row.preferred != "ane" else []


def percent(share: float) -> str:
    """A share in whole percent; 0 and 100 are exact, and what is near them has a digit more."""
    digits = 1 if 0 < share < 0.01 or 0.99 <= share < 1 else 0
    shown = f"{100 * share:.{digits}f}"
    return f"{'99.9' if shown == '100.0' else '<0.1' if share and shown == '0.0' else shown} %"
