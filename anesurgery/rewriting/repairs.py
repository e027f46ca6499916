"""Base classes of passes that repair a hazard of numbers: everything comes from the row of the hazard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from anesurgery import fp16
from anesurgery.errors import NO_MATCH, Refusal
from anesurgery.mil import Var
from anesurgery.numeric.forms import Form
from anesurgery.numeric.hazard import Hazard
from anesurgery.numeric.squares import root_norm
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.passes import option
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


@dataclass(frozen=True)
class NormForm(Repair, abstract=True):
    """A norm whose squares may overflow in fp16, of numbers up to 1 or as a layer norm."""

    magnitude = fp16.LARGEST
    """Beyond it, the old form overflows in fp32 too."""
    follows = ("compute_fp16", "scale_ranges", "channels_first")
    form: str = option("largest", among=("largest", "layer_norm"))
    """Either "largest", or "layer_norm"."""
    only: tuple[str, ...] = ()
    """Names of the squares in the norms that are meant; all by default."""

    def check(self, m: Match) -> Match | Refusal:
        """Is it such a norm, among those that are meant, and may its squares overflow?"""
        norm = root_norm(m.root)
        if norm is None or (self.only and not {v.name for op in norm.ops for v in op.outputs} & {*self.only}):
            return NO_MATCH
        match = super().check(m)
        return match.bind(ops=norm.all_ops) if isinstance(match, Match) else match

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Return the norm in the other form."""
        return super().rewrite(mb, m) if self.form == "largest" else self.layer_norm(mb, m.site)

    def layer_norm(self, mb: Builder, norm: Form) -> Var:
        """Return the norm by the op of that name."""
        raise NotImplementedError
