"""What the proof of one model against another found: the grade, where it ends, how many ops reached which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anesurgery.checking.grades import Grade, on_lengths
from anesurgery.checking.proofs import words
from anesurgery.checking.trials import Trial

SHOWN = 8
"""Ops below proved that a report names: about what a terminal shows beside the rest of it."""


@dataclass(frozen=True)
class Seam:
    """An op of the second model whose value is not proved to be a value of the first."""

    op: str
    other: str
    """The op of the first model that it was compared with; empty if there is none."""
    grade: str
    """ "checked", or "not matched"."""
    note: str = ""

    def __str__(self) -> str:
        other = f" against {self.other}" if self.other else ""
        return f"{self.grade}: {self.op}{other}{f' ({self.note})' if self.note else ''}"


@dataclass(frozen=True)
class ModelProof:
    """How sure it is that two models compute the same."""

    grade: Grade | None
    """The weakest grade on any path to the outputs; None where an output could not be matched."""
    bound: float
    """Bound on the probability of a match that is none, where ops are matched bit for bit or proved."""
    outputs: Mapping[str, str]
    """The grade of each output in words, or "not matched"."""
    counts: Mapping[str, int]
    """Ops of the second model by grade; those inside a rewritten part have no counterpart."""
    seams: tuple[Seam, ...]
    """The ops at which the proof ends, in file order."""
    seed: int
    trial: Trial | None = None
    """What adversarial inputs showed."""
    lengths: tuple[int, ...] = ()
    """The least and the largest length of dynamic axes that was tried, where nothing is known of others."""
    gap: str = ""
    """Why nothing is known of other lengths."""

    def on_lengths(self, least: int, most: int, gap: str) -> ModelProof:
        """The same as far as it was shown: on lengths up to one; see `SiteCheck.on_lengths`."""
        grade = None if self.grade is None else min(self.grade, Grade.NUMBERS)
        return replace(self, grade=grade, lengths=(least, most), gap=gap)

    def weaker(self, other: ModelProof) -> ModelProof:
        """The weaker of two proofs of the same models at different lengths, with what both rest on."""
        order = [-1 if p.grade is None else p.grade for p in (self, other)]
        return replace(self if order[0] <= order[1] else other, bound=self.bound + other.bound)

    def tried(self, trial: Trial) -> ModelProof:
        """The same with what adversarial inputs showed; nothing is proved where they tell both apart."""
        return replace(self, trial=trial, grade=None if trial.failure else self.grade)

    def but_for(self, differences: Sequence[str]) -> ModelProof:
        """The same where the second model is called differently; nothing is proved of what one model lacks."""
        seams = (Seam(words, "", "not matched") for words in differences)
        return replace(self, grade=None, seams=(*self.seams, *seams)) if differences else self

    def beside(self, name: str, other: ModelProof) -> ModelProof:
        """The proof of several functions: the weakest, with what is said of another function by its name."""
        grades = [p.grade for p in (self, other) if p.grade is not None]
        failed = other.trial is not None and bool(other.trial.failure)
        return replace(
            self,
            grade=min(grades) if len(grades) == 2 else None,
            bound=self.bound + other.bound,
            outputs={**self.outputs, **{f"{name}: {n}": words for n, words in other.outputs.items()}},
            counts=Counter(self.counts) + Counter(other.counts),
            seams=(*self.seams, *(replace(s, op=f"{name}: {s.op}") for s in other.seams)),
            trial=other.trial if failed else self.trial,
            lengths=min(filter(None, (self.lengths, other.lengths)), key=max, default=()),
            gap=self.gap or other.gap,
        )

    @property
    def proved(self) -> bool:
        """Is every output proved, or bit for bit the same?"""
        return self.grade is not None and self.grade >= Grade.PROVED

    @property
    def words(self) -> str:
        """The grade, the bound, and how many ops reached which grade."""
        ops = ", ".join(f"{n} {what}" for what, n in self.counts.items() if n)
        if self.trial is not None and self.trial.failure:
            return f"not proved: {self.trial.failure} ({ops})"
        if self.grade is None:
            return f"not proved ({ops})"
        if self.grade < Grade.PROVED:
            return f"not proved, but {self._grade} ({ops})"
        return f"{self.grade.words}, probability of error below {words(self.bound)} ({ops})"

    @property
    def _grade(self) -> str:
        """The grade in words, with the lengths on which it was reached."""
        if self.grade is None or not self.lengths:
            return "" if self.grade is None else self.grade.words
        return on_lengths(self.lengths)

    @property
    def lines(self) -> list[str]:
        """The report: the grade, where the proof ends, and the other ops below proved."""
        ends = [f"the proof ends at {_count(len(self.seams))}:"] if self.seams else []
        more = len(self.seams) - SHOWN
        rest = [f"... and {more} more"] if more > 0 else []
        shown = [] if self.trial is None else [self.trial.words, *self.trial.counterexample.splitlines()]
        others = [f"other lengths are not proved: {self.gap}"] if self.gap else []
        return [self.words, *others, *shown, *ends, *(f"  {s}" for s in self.seams[:SHOWN]), *rest]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "grade": self._grade or None,
            "proved": self.proved,
            "bound": self.bound,
            "outputs": dict(self.outputs),
            "ops": dict(self.counts),
            "seams": [vars(s) for s in self.seams],
            "seed": self.seed,
            **({"lengths": list(self.lengths), "gap": self.gap} if self.lengths else {}),
            **({} if self.trial is None else {"trial": vars(self.trial)}),
        }


def _count(n: int) -> str:
    return "one op" if n == 1 else f"{n} ops, in file order"
