"""Norms over a root in another form: what `rms_norm` and `group_norm` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from anesurgery.errors import PassError, Refusal
from anesurgery.mil import Var
from anesurgery.regions.root_norms import RootNorm, by_largest, cannot_overflow, root_norm
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops
from anesurgery.rewriting.scaled_squares import LargeSquares

FORMS = ("largest", "layer_norm")


@dataclass(frozen=True)
class NormForm(LargeSquares, abstract=True):
    """A norm whose squares may overflow in fp16, of numbers up to 1 or as a layer norm."""

    follows: ClassVar[tuple[str, ...]] = ("compute_fp16", "scale_ranges", "channels_first")
    centred: ClassVar[bool]
    """Does the norm take the mean away?"""
    form: str = "largest"
    """Either "largest", or "layer_norm"."""
    only: tuple[str, ...] = ()
    """Names of the squares in the norms that are meant; all by default."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise PassError(f"{self.name}: form={self.form!r}; it may be {' or '.join(map(repr, FORMS))}")

    def pattern(self, op: Ops) -> OpPattern:
        """What ends such a norm."""
        return op.any("mul", "real_div")()

    def check(self, m: Match) -> Match | Refusal | None:
        """Is it such a norm, and may its squares overflow?"""
        norm = root_norm(m.root)
        if norm is None or norm.centred != self.centred or not self.means(norm):
            return None
        if (refusal := cannot_overflow(norm)) is not None:
            return refusal
        return m.bind(ops=norm.ops, norm=norm)

    def means(self, norm: RootNorm) -> bool:
        """Is the norm among those that are meant?"""
        return not self.only or any(v.name in self.only for op in norm.ops for v in op.outputs)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The norm in the other form."""
        return by_largest(mb, m.norm) if self.form == "largest" else self.layer_norm(mb, m.norm)

    def layer_norm(self, mb: Builder, norm: RootNorm) -> Var:
        """The norm by the op of that name."""
        raise NotImplementedError
