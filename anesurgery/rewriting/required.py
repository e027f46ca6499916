"""The grade that the caller requires of every edit (`require=`)."""

from __future__ import annotations

from collections.abc import Sequence

from anesurgery.checking.grades import REQUIRED
from anesurgery.errors import ProofError, SurgeryError
from anesurgery.rewriting.session import Change


def check_requirement(require: str | None, prove: str | None) -> None:
    """A grade must exist, and sites must be compared.

    Raises:
        SurgeryError: otherwise.
    """
    if require is not None and (require not in REQUIRED or prove not in ("sites", "both")):
        raise SurgeryError(
            f'require={require!r}; it may be {", ".join(REQUIRED)}, with prove="sites" or "both"'
        )


def check_grades(changes: Sequence[Change], require: str | None) -> None:
    """Every edit has the grade that is asked for.

    Raises:
        ProofError: one has not; the first is named.
    """
    if require is None:
        return
    lower = [c for c in changes if c.proof is None or c.proof.grade < REQUIRED[require]]
    if lower:
        first = lower[0]
        found = f"not checked: {first.unchecked}" if first.proof is None else first.proof.grade.words
        words = f"{len(lower)} of {len(changes)} edits have a lower grade than {require!r}"
        raise ProofError(f"{words}; first {first.pass_name} at {first.where} ({found})")
