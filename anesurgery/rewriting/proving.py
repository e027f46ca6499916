"""Check a model after a surgery: its interface, the grade of every edit, and its numbers as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from anesurgery.checking.comparison import Comparison
from anesurgery.checking.grades import REQUIRED
from anesurgery.errors import InterfaceError, ProofError, Refusal, SurgeryError, UnknownName
from anesurgery.files.interface import Interface
from anesurgery.rewriting.ml_program import Comparing, Graph, Subject
from anesurgery.rewriting.passes import run_on
from anesurgery.rewriting.session import Change, Session
from anesurgery.semantics.reading import in_decibels


def check_requirement(require: str | None, prove: str | None) -> None:
    """Check that a required grade exists, and that sites are compared, without which no edit has a grade.

    Raises:
        SurgeryError: otherwise.
    """
    if require is not None and (require not in REQUIRED or prove not in ("sites", "both")):
        raise SurgeryError(
            f'require={require!r}; it may be {", ".join(REQUIRED)}, with prove="sites" or "both"'
        )


def check_grades(changes: Sequence[Change], require: str | None) -> None:
    """Check that every edit has the grade that is asked for.

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
    """Check that the interface changed only as passes declared.

    Raises:
        InterfaceError: an undeclared difference, in words.
    """
    declared = {name for change in session.contract for name in change.names}
    if difference := before.difference(after, ignore=declared):
        raise InterfaceError(f"the interface changed without being declared: {difference}")


def check_assumed(assume: Mapping[str, tuple[int, int]], graphs: Sequence[Graph]) -> None:
    """Refuse assumptions about inputs that do not exist, and empty ranges.

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


def check_inputs(inputs: Any, given: Subject) -> None:
    """Let a model refuse inputs, None or one or a list; else random ones would silently replace them."""
    for values in [inputs] if isinstance(inputs, Mapping) else inputs or ():
        given.check_inputs(values)


def prove_model(
    original: Subject, edited: Subject, session: Session, how: Comparing
) -> tuple[Comparison | None, list[str]]:
    """Compare the models as a whole; a gate of minus infinity only measures.

    Args:
        original: the model as given.
        edited: the model after the steps.
        session: in which these ran.
        how: what is promised.

    Returns:
        The worst comparison, None where there is none; and what a report notes of it.

    Raises:
        ProofError: the outputs differ by more than promised.
    """
    inputs = session.inputs[0] if isinstance(session.inputs, list) else session.inputs
    compared = partial(edited.compare, inputs=inputs, how=how)
    results, notes = compared(original), list[str]()
    if not all(r.ok for r in results if isinstance(r, Comparison)):
        results, notes = _beside_repairs(original, session, compared, results)
    notes += [f"not compared as a whole: {r}" for r in results if isinstance(r, Refusal)]
    comparisons = [r for r in results if isinstance(r, Comparison)]
    if failed := [r for r in comparisons if not r.ok]:
        raise ProofError(f"the outputs are not shown to agree: {failed[0].verdict}")
    notes += [r.instead for r in comparisons if r.instead]
    proof = min(comparisons, key=lambda r: r.psnr, default=None)
    if how.gate == -float("inf") and proof is not None:
        notes.append(f"outputs with the weights stored anew: {in_decibels(proof.psnr)}")
    return proof, notes


def _beside_repairs(
    original: Subject,
    session: Session,
    compared: Callable[[Subject], Sequence[Comparison | Refusal]],
    results: Sequence[Comparison | Refusal],
) -> tuple[Sequence[Comparison | Refusal], list[str]]:
    """Compare the end with the model after the numeric repairs alone, to judge the other steps.

    A repair changes outputs where the model before it is wrong, so that comparison may fail. The edits of the
    repairs were checked one by one, and notes name the inputs on which they changed outputs.

    Args:
        original: the model before.
        session: in which the steps ran.
        compared: compares the end with another model.
        results: of the comparison with the model before.

    Returns:
        The new results, and notes. The old results where there are no checked repairs, where outputs that are
        finite differ too, where the repairs fail on the model as given, or where the end differs from it after
        them.
    """
    repairs = list(dict.fromkeys(session.repairs))
    names = list(dict.fromkeys(step.name for step in repairs))
    edits = [change for change in session.changes if change.pass_name in names]
    failures = [r for r in results if isinstance(r, Comparison) and not r.ok]
    if not edits or any(change.proof is None for change in edits):
        return results, []
    if any(row.psnr < failure.gate for failure in failures for row in failure.outputs):
        return results, []
    repaired = original.clone()
    try:
        for step in repairs:
            run_on(step, repaired, session.again(prove_sites=False))
        repaired.finish()
        beside = compared(repaired)
    except SurgeryError:
        return results, []
    if not all(r.ok for r in beside if isinstance(r, Comparison)):
        return results, []
    words = f"the outputs agree except for the repairs by {', '.join(names)}, which are checked one by one"
    measured = [_with_first_figures(*pair) for pair in zip(results, beside, strict=True)]
    return measured, [f"{words}: {failure.verdict}" for failure in failures]


def _with_first_figures(given: Comparison | Refusal, repaired: Comparison | Refusal) -> Comparison | Refusal:
    """Return the figures against the given model, if finite, with the proof against the repaired one."""
    if isinstance(given, Comparison) and isinstance(repaired, Comparison):
        undefined = any(output.failure for output in given.outputs)
        return repaired if undefined else replace(given, proof=repaired.proof)
    return repaired
