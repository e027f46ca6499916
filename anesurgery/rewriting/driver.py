"""Drive rewrites, in the same way for both formats: build, compare, replace, record.

`operate` does this at one `Place`, an op or a layer. Each format has its own subclass, which builds the new ops
and lets them replace the old ones.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from anesurgery.checking.grades import EXACT, EarlierChecks, Grade, SiteCheck
from anesurgery.errors import NO_MATCH, InterpretError, PassError, ProofError, Refusal, Refused, SurgeryError
from anesurgery.mil import Array, Operation, Var, any_symbolic, is_symbolic, nested_ops, reads, types
from anesurgery.ops import CONTROL, IMPURE
from anesurgery.placement.target import Target
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import SHAPE, Change, Needs, Session

if TYPE_CHECKING:
    from anesurgery.checking.adversarial import Sampler


def remove_dead(ops: Sequence[Operation]) -> list[Operation]:
    """Remove the ops that nobody reads, then what only these read; return the removed ops in that order."""
    pending, removed = list(ops), []
    while pending:
        op = pending.pop()
        block = op.enclosing_block
        if block is None or _has_effects(op):
            continue
        if any(v.child_ops or v.consuming_blocks for v in op.outputs):
            continue
        sources = [v.op for v in reads(op) if v.op is not None]
        block.remove_ops([op])
        removed.append(op)
        pending += sources
    return removed


def _has_effects(op: Operation) -> bool:
    """Does an op, or one nested in it, do more than compute its results, as a write to a state?"""
    return op.op_type in IMPURE - CONTROL or any(o.op_type in IMPURE - CONTROL for o in nested_ops(op))


@dataclass(frozen=True)
class Built:
    """What a rewrite built at a place, beside the old ops, which are still there."""

    pairs: Sequence[tuple[Var, Var]]
    """Old values, each with its replacement."""
    made: Sequence[Operation]
    """The new ops, in the order in which they can run."""
    matched: Sequence[Operation] = ()
    """The old ops that the rewrite looked at."""
    uncompared: Refusal | None = None
    """Why the numbers cannot be compared at this place."""
    limits: Mapping[Var, float] = field(default_factory=dict)
    """Values that both sides read, with the largest magnitude up to which the edit holds."""


class Place(ABC):
    """An op or a layer at which a rewrite may act."""

    step: Pass
    session: Session

    @abstractmethod
    def __str__(self) -> str:
        """Return the name of the op or layer, for errors."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """The type of the op or layer."""

    @abstractmethod
    def build(self) -> Built | Refusal:
        """Guard, check and build.

        Returns:
            Both sides; a refusal with the reason; `NO_MATCH` where the rewrite does not apply.

        Raises:
            Refused: a helper was asked for a value that it cannot give.
        """

    @abstractmethod
    def refusal(self, reason: str) -> Refusal:
        """Return a refusal at the op or layer."""

    @abstractmethod
    def sample(self, var: Var, rng: np.random.Generator) -> Array | None:
        """Draw numbers for a value that both sides read; None for the default."""

    @abstractmethod
    def replace(self, built: Built) -> Change:
        """Let the new ops take the place of the old ones, and return the record of it."""

    def needs(self, built: Built) -> Needs | Refusal | None:
        """See what the edit needs of the values that it reads.

        Returns:
            The `Needs` that only a run shows; a `Refusal` where a value is larger; None for no needs.
        """
        return None

    @abstractmethod
    def undo(self) -> None:
        """Remove what was built, since it cannot take the old one's place."""

    def error(self, words: str) -> PassError:
        """Return an error that names the pass and the place."""
        return PassError(f"pass {self.step.name} at {self}: {words}")


def operate(place: Place) -> bool:
    """Apply the rewrite at a place if it fits, and return whether there was an edit.

    Raises:
        PassError: the pass raised; the cause is chained.
        ProofError: the numbers differ by more than the pass promises.
    """
    try:
        built = _built(place)
        if isinstance(built, Refusal):
            if built is not NO_MATCH:
                place.session.refusals.append((place.step.name, built))
            return False
        if fault := _new_fault(built, place.session.target):
            where = place.session.target or "some chips"
            words = f"it would write an op that is reported wrong on {where}: {fault}"
            if place.step.name not in place.session.named:
                place.undo()
                place.session.refusals.append((place.step.name, place.refusal(words)))
                return False
            place.session.alarm(f"{place.step.name}: asked for, and done although {words}")
        proof_fields = proof_of(place.step, place.session, built, place.sample, str(place))
        proof = proof_fields.get("proof")  # a proof of the bits holds for numbers of any magnitude
        needs = None if proof is not None and proof.grade is Grade.BITS else place.needs(built)
        if isinstance(needs, Refusal):
            place.undo()
            place.session.refusals.append((place.step.name, place.refusal(needs.reason)))
            return False
    except SurgeryError as error:
        _undo(place, error)
        raise
    except Exception as error:
        words = f"failed: {type(error).__name__}: {error}; the model given to it is unchanged"
        wrapped = PassError(f"pass {place.step.name} at {place} ({place.kind}) {words}")
        _undo(place, wrapped)
        raise wrapped from error
    place.session.changes.append(replace(place.replace(built), **proof_fields, needs=needs))
    return True


def _new_fault(built: Built, target: str | None) -> str:
    """Return a reported fault of the target in the new ops but not in the old ones, in words; "" for none."""
    from anesurgery.placement.rules.faulty_ops import faulty_ops_on

    device = Target.parse(target)
    old = {fault.name for fault, _, _ in faulty_ops_on(built.matched, device)}
    for fault, _, words in faulty_ops_on(built.made, device):
        if fault.name not in old:
            return f"{fault.what} ({words}; {fault.source})"
    return ""


def _built(place: Place) -> Built | Refusal:
    """Return what `build` returns; a refusal, or a reason that a helper raised, gets the place."""
    try:
        built = place.build()
    except Refused as reason:
        place.undo()
        return place.refusal(str(reason))
    if isinstance(built, Refusal) and built.where is None and built is not NO_MATCH:
        return place.refusal(built.reason)
    return built


def _undo(place: Place, error: SurgeryError) -> None:
    """Remove what was built, and note in the error that the graph is as it was."""
    place.undo()
    error.undone = True


def proof_of(step: Pass, session: Session, built: Built, sample: Sampler, where: str) -> Mapping[str, Any]:
    """Run both sides of an edit on the same numbers, if the session asks for it. All checks of edits go here.

    Args:
        step: the pass, which promises something.
        session: of its application.
        built: old values and new ones, while the ops of both exist.
        sample: draws numbers for a value that both sides read, or returns None for the default.
        where: the op or layer, for errors.

    Returns:
        Fields of a `Change`: `proof`, or `unchecked` with the reason; none where the session asks for no proof.

    Raises:
        ProofError: they differ by more than the pass promises.
    """
    if not session.prove_sites:
        return {}
    if built.uncompared is not None:
        return {"unchecked": built.uncompared.reason}
    pairs = [
        (old, new)
        for old, new in built.pairs
        if alike(old, new, step.refines) and not types.is_list(old.sym_type)
    ]
    if not pairs:
        return {"unchecked": SHAPE}
    from anesurgery.checking.site import check_site

    earlier = session.checks.setdefault(str(step), EarlierChecks())
    try:
        promise = replace(step.promise, limits=built.limits)
        proof = check_site(
            pairs, built.made, sample, session.seed, built.matched, earlier, promise, session.declared
        )
    except InterpretError:
        if not any(any_symbolic(old.shape) for old, _ in pairs):
            raise
        return {"unchecked": "cannot be computed at the dynamic sizes that were tried"}
    if not isinstance(proof, SiteCheck):
        return {"unchecked": proof.reason}
    if not proof.within(step.tolerance):
        raise ProofError(
            f"pass {step.name} at {where}: old and new differ by {proof.max_abs:g} "
            f"({proof.max_rel:.2g} of the largest value); promised: {step.tolerance}"
            + _about_rounding(step, proof)
            + (f"; for example\n{proof.counterexample}" if proof.counterexample else "")
        )
    return {"proof": proof}


ROUNDING = 1e-2
"""A difference above this share of the largest value is no rounding, even of long sums in fp16."""


def _about_rounding(step: Pass, proof: SiteCheck) -> str:
    """Return what an author can do where a pass that promises equal bits only rounds in another way."""
    if step.tolerance != EXACT or not proof.max_rel < ROUNDING:
        return ""
    return (
        ". Where that is rounding, a pass may declare it: "
        f"`tolerance: ClassVar[Tolerance] = Tolerance({_above(proof.max_rel):g})`"
    )


def _above(share: float) -> float:
    """Return the next power of ten above twice a share, since other numbers round differently."""
    return float(10.0 ** math.ceil(math.log10(2 * share))) if share else 0.0


def alike(old: Var, new: Var, refines: bool = False) -> bool:
    """Have two values the same shape, dynamic sizes included? A list has none.

    Args:
        old: one value.
        new: the other.
        refines: may it have another size where that of the old one is dynamic?
    """
    if types.is_list(old.sym_type) or types.is_list(new.sym_type):
        return types.is_list(old.sym_type) and types.is_list(new.sym_type)
    olds, news = tuple(old.shape or ()), tuple(new.shape or ())
    if refines and len(olds) == len(news):
        olds = tuple(n if is_symbolic(o) else o for o, n in zip(olds, news, strict=True))
    return olds == news
