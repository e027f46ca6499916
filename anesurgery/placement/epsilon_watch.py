"""By how much norms are off whose epsilon grew in the conversion, on the inputs of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from anesurgery.interpret.abreast import Shown
from anesurgery.mil import Function, Var, walk_ops
from anesurgery.placement.evidence import Finding
from anesurgery.placement.rules.lost_in_conversion import LEAST_CHANGE, grown_epsilon

RULE = "lost-epsilon"


class EpsilonWatch:
    """What a walk shows of the norms of a function."""

    def __init__(self, function: Function) -> None:
        found = ((op.outputs[0].name, grown_epsilon(op)) for op in walk_ops(function))
        self._grown = {name: grown for name, grown in found if grown is not None}
        self._wanted = {v for grown in self._grown.values() for v in (grown.scale, grown.mean)}
        self._seen: dict[Var, Any] = {}

    def see(self, shown: Shown) -> None:
        """Keep what a norm is off by."""
        self._seen |= {
            var: value for var, value in zip(shown.op.outputs, shown.exact, strict=True) if var in self._wanted
        }

    @property
    def changes(self) -> dict[str, float]:
        """The op that adds the epsilon -> by how much of itself the norm is off."""
        return {
            name: grown.change(self._seen[grown.scale], self._seen[grown.mean])
            for name, grown in self._grown.items()
            if grown.scale in self._seen and grown.mean in self._seen
        }


def without_small(findings: Iterable[Finding], changes: dict[str, float]) -> Iterator[Finding]:
    """The findings, but for those of norms that are right on the inputs at hand."""
    for finding in findings:
        if finding.rule != RULE or not changes.get(finding.op, 1.0) < LEAST_CHANGE:
            yield finding
