"""What must hold around a surgery: the grade of every edit, the interface, what is assumed of inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anesurgery.checking.grades import REQUIRED
from anesurgery.errors import InterfaceError, ProofError, SurgeryError, UnknownName
from anesurgery.files.interface import Interface
from anesurgery.rewriting.session import Change, Session
from anesurgery.rewriting.subject import Graph


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
        grade = f"not checked: {first.unchecked}" if first.proof is None else first.proof.words
        words = f"{len(lower)} of {len(changes)} edits have a lower grade than {require!r}"
        raise ProofError(f"{words}; first {first.pass_name} at {first.where} ({grade})")


def check_interface(before: Interface, after: Interface, session: Session) -> None:
    """What goes in comes out, but for what was declared.

    Raises:
        InterfaceError: an undeclared difference, in words.
    """
    declared = {name for change in session.contract for name in change.names}
    if difference := before.difference(after, ignore=declared):
        raise InterfaceError(f"the interface changed without being declared: {difference}")


def check_assumed(assume: Mapping[str, tuple[int, int]], graphs: Sequence[Graph]) -> None:
    """Refuse what is assumed of inputs that do not exist, and ranges that are none.

    Raises:
        UnknownName: no such input.
        SurgeryError: a range that ends before it begins.
    """
    functions = [f for graph in graphs for f in getattr(graph, "functions", {}).values()]
    inputs = {name for function in functions for name in function.inputs}
    for name, (low, high) in assume.items():
        if name not in inputs:
            raise UnknownName("input", name, inputs)
        if low > high:
            raise SurgeryError(f"assume: the range of {name} ends at {high}, before it begins at {low}")
