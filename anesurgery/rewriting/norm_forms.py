"""Norms whose squares overflow in fp16, in one of two other forms: what their passes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from anesurgery import fp16
from anesurgery.errors import NO_MATCH, Refusal
from anesurgery.mil import Var
from anesurgery.numeric.forms import Form
from anesurgery.numeric.squares import by_largest, cannot_overflow, root_norm
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.passes import option
from anesurgery.rewriting.pattern import Match
from anesurgery.rewriting.rewrite import Rewrite


@dataclass(frozen=True)
class NormForm(Rewrite, abstract=True):
    """A norm whose squares may overflow in fp16, of numbers up to 1 or as a layer norm."""

    tolerates_nonfinite = False
    magnitude = fp16.LARGEST
    """Beyond it, the old form overflows in fp32 too."""
    shares_inner = True
    kinds = frozenset({"mul", "real_div"})
    """What ends such a norm."""
    follows = ("compute_fp16", "scale_ranges", "channels_first")
    centred: ClassVar[bool]
    """Does the norm take the mean away?"""
    form: str = option("largest", among=("largest", "layer_norm"))
    """Either "largest", or "layer_norm"."""
    only: tuple[str, ...] = ()
    """Names of the squares in the norms that are meant; all by default."""

    def check(self, m: Match) -> Match | Refusal:
        """Is it such a norm, and may its squares overflow?"""
        norm = root_norm(m.root)
        if norm is None or norm.is_centred != self.centred or not self.means(norm):
            return NO_MATCH
        if (refusal := cannot_overflow(norm)) is not None:
            return refusal
        return m.bind(ops=norm.all_ops, norm=norm)

    def means(self, norm: Form) -> bool:
        """Is the norm among those that are meant?"""
        return not self.only or any(v.name in self.only for op in norm.ops for v in op.outputs)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The norm in the other form."""
        return by_largest(mb, m.norm) if self.form == "largest" else self.layer_norm(mb, m.norm)

    def layer_norm(self, mb: Builder, norm: Form) -> Var:
        """The norm by the op of that name."""
        raise NotImplementedError
