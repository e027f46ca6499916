"""One op in the terminal, with every rule that was asked about it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from anesurgery.placement.inspection import Estimate
from anesurgery.placement.why import Consulted, Why
from anesurgery.show.console import plain
from anesurgery.show.summary import LEGAL_WORDS, UNIT_WORDS


def why_group(reasons: Why) -> Group:
    """The op, the rules that found something in full, and a line for each of the others."""
    row = reasons.row
    verdict = f"legal on the ANE: {LEGAL_WORDS[row.legal]}; expected on: {UNIT_WORDS[row.preferred]}"
    head = Text.assemble(plain(row.name, "bold"), plain(f"  {row.op_type} {row.shape} {row.dtype}; {verdict}"))
    spoke = [line for asked in reasons.rules if asked.found for line in _in_full(asked)]
    silent = [_inset(f"{asked.rule.id}: {asked.said}") for asked in reasons.rules if not asked.found]
    return Group(head, *spoke, _estimate(row.estimate), Text(f"{len(silent)} more rules were asked:"), *silent)


def _in_full(asked: Consulted) -> Iterator[Text | Padding]:
    rule = asked.rule
    yield Text.assemble(plain(f"{rule.kind} ", "bold"), plain(f"{rule.id}: {asked.said}"))
    yield _inset(rule.because)
    yield _inset(f"{rule.grade.value}; {rule.scope}; {rule.source}")
    if rule.remedy or rule.advice:
        yield _inset(f"what helps: {f'pass {rule.remedy}' if rule.remedy else rule.advice}")


def _estimate(estimate: Estimate | None) -> Text:
    if estimate is None:
        return Text("estimates: none is known")
    times = " and ".join(f"{factor:.3g}" for factor in estimate.off)
    units = (("ANE", estimate.ane), ("CPU", estimate.cpu))
    words = ", ".join(f"{unit} {value:.3g} us" for unit, value in units if value is not None)
    return plain(f"estimates: {words}; they may be off {times} times")


def _inset(words: str) -> Padding:
    return Padding(plain(words), (0, 0, 0, 2))
