"""The base class of passes that repair a hazard of numbers: everything comes from the row of the hazard."""

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
    """A pass that repairs each harmful site of its `hazard`."""

    hazard: ClassVar[Hazard[Any]]
    tolerates_nonfinite = False
    """The original may give infinities where the repair gives numbers: that is the hazard."""

    def pattern(self, op: Ops) -> OpPattern:
        """Match each op that a site of the hazard may end with."""
        return op.any(*sorted(self.hazard.kinds))()

    def check(self, m: Match) -> Match | Refusal:
        """Bind the site, or refuse where it does no harm or the repair does not apply."""
        site = self.hazard.site_to_repair(m.root)
        return site if isinstance(site, Refusal) else m.bind(ops=site.ops, site=site)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the repaired ops."""
        return self.hazard.repair(mb, m.site)
