"""Passes that repair a hazard of numbers, made of its row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from anesurgery.errors import Refusal
from anesurgery.mil import Var
from anesurgery.numeric.hazard import Hazard
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops
from anesurgery.rewriting.rewrite import Rewrite


@dataclass(frozen=True)
class Repair(Rewrite, abstract=True):
    """The pass of a hazard: what the row finds in fp16, and may go wrong, is built as the row says."""

    hazard: ClassVar[Hazard[Any]]
    tolerates_nonfinite = False
    """An infinity is what the hazard makes of large numbers."""

    def pattern(self, op: Ops) -> OpPattern:
        """What ends the hazard."""
        return op.any(*sorted(self.hazard.kinds))()

    def check(self, m: Match) -> Match | Refusal:
        """Something may go wrong, and the repair applies."""
        site = self.hazard.found(m.root)
        return site if isinstance(site, Refusal) else m.bind(ops=site.ops, site=site)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The same, where nothing goes wrong."""
        return self.hazard.build(mb, m.site)
