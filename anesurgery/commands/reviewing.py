"""`anesurgery review`: the models of a repository beside those of an older commit, for pull requests."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery.checking.comparison import Comparison
from anesurgery.commands.options import Aim, Quiet
from anesurgery.commands.waiting import load_engine, waiting
from anesurgery.errors import SurgeryError
from anesurgery.placement.durations import change
from anesurgery.placement.inspection import SOFT, Inspection, OpRow
from anesurgery.show import summary
from anesurgery.show.summary import UNIT_WORDS


def review(
    models: Annotated[list[Path], typer.Argument(help="Models, as paths in the repository.")],
    base: Annotated[str, typer.Option(help="The commit to compare with.")],
    target: Aim = None,
    script: Annotated[
        str | None, typer.Option(help="A shell command that makes the models. It runs in both trees.")
    ] = None,
    points: Annotated[
        float, typer.Option(min=0, help="How many percent of the share on the ANE may be lost.")
    ] = 0.1,
    numbers: Annotated[bool, typer.Option(help="Compare the outputs too.")] = True,
    gate: Annotated[float, typer.Option(help="The least PSNR of every output, in dB.")] = 60.0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A file to append the Markdown to.")] = None,
    quiet: Quiet = False,
) -> None:
    """Print in Markdown what got better and worse since a commit. Exit code 1 if something got worse."""
    load_engine(True)
    from anesurgery.commands.reviewing import review_markdown

    here = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel"))
    with _older(here, base) as there, waiting("comparing", quiet):
        for tree in (there, here) if script else ():
            _made(script or "", tree)
        reviews = [_reviewed(path, here, there, target, gate if numbers else None) for path in models]
    text = review_markdown(reviews, points)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(text)
    if not quiet:
        print(text)
    if any(one.worse(points) for one in reviews):
        raise typer.Exit(1)


def _reviewed(path: Path, here: Path, there: Path, target: str | None, gate: float | None) -> Any:
    """A model in both trees."""
    from anesurgery.checking.comparison import compare
    from anesurgery.commands.reviewing import Review
    from anesurgery.placement.inspector import inspect

    place = (Path.cwd() / path).relative_to(here) if not path.is_absolute() else path.relative_to(here)
    after = inspect(here / place, target)
    if not (there / place).exists():
        return Review(str(place), None, after)
    before = inspect(there / place, target)
    if gate is None:
        return Review(str(place), before, after)
    try:
        return Review(
            str(place), before, after, compare(there / place, here / place, precision="fp16", gate=gate)
        )
    except SurgeryError as error:
        return Review(str(place), before, after, apart=str(error).splitlines()[0])


@contextmanager
def _older(here: Path, base: str) -> Iterator[Path]:
    """The tree of a commit, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="anesurgery-review-") as folder:
        tree = Path(folder).resolve() / "base"
        _git(here, "worktree", "add", "--detach", "--quiet", str(tree), "--", base)
        try:
            yield tree
        finally:
            _git(here, "worktree", "remove", "--force", str(tree))


def _git(folder: Path, *words: str) -> str:
    """What git prints.

    Raises:
        SurgeryError: git is not there, or refuses.
    """
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SurgeryError("review needs git, which is not on the PATH") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise SurgeryError(
            f"git {words[0]}: {said[-1] if said else 'failed'}; fetch the commit (fetch-depth: 0)"
        )
    return done.stdout.strip()


def _made(script: str, tree: Path) -> None:
    """Run the script that makes the models, in a tree.

    Raises:
        SurgeryError: it failed.
    """
    done = subprocess.run(script, cwd=tree, shell=True, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise SurgeryError(f"{script!r} ended with {done.returncode}: {said[-1] if said else 'no message'}")


NAMED = 10
"""Ops that left the engine, of which each has a row; the rest are counted."""


@dataclass(frozen=True)
class Review:
    """A model before and after a change.

    Attributes:
        name: of the model, as the reader knows it.
        before: None where there was none.
        after: how it stands now.
        comparison: of the numbers of both, where they were compared.
        apart: why they could not be compared, in words; "" where they were, or nobody asked.
    """

    name: str
    before: Inspection | None
    after: Inspection
    comparison: Comparison | None = None
    apart: str = ""

    def worse(self, points: float = 0.1) -> list[str]:
        """What got worse, a sentence each.

        Args:
            points: of a share that may be lost, in percent.
        """
        if self.before is None:
            return []
        said = [f"{label} {old} -> {new}" for label, old, new in self._lost(points)]
        old_time, new_time = self.before.time, self.after.time
        if old_time is not None and new_time is not None and change(old_time, new_time).low > 1:
            said.append(change(old_time, new_time).verdict)
        if self.comparison is not None and not self.comparison.ok:
            said.append(f"the outputs differ: {self.comparison.verdict.splitlines()[0]}")
        return said + ([f"the outputs cannot be compared: {self.apart}"] if self.apart else [])

    def _lost(self, points: float) -> list[tuple[str, str, str]]:
        assert self.before is not None
        old, new = self.before.residency, self.after.residency
        share = summary.share_words
        return [
            (f"share of the {what} on the ANE", share(self.before, what), share(self.after, what))
            for what in old
            if 100 * (old[what] - new[what]) > points
        ]

    def left(self) -> list[OpRow]:
        """The ops that are not expected on the engine now, and were, or were not there."""
        old = {} if self.before is None else {row.name: row for row in summary.all_rows(self.before)}
        off = [row for row in summary.all_rows(self.after) if summary.needs_attention(row)]
        return [row for row in off if row.name not in old or not summary.needs_attention(old[row.name])]


def review_markdown(reviews: Sequence[Review], points: float = 0.1) -> str:
    """A heading, a table and the ops that left the engine, for each model."""
    return "\n".join(line for one in reviews for line in _model(one, points)) + "\n"


def _model(one: Review, points: float) -> list[str]:
    worse = one.worse(points)
    verdict = f"worse: {'; '.join(worse)}" if worse else "not worse" if one.before else "new"
    lines = [f"### {_cell(one.name)} on {_cell(str(one.after.target))}", "", f"**{_cell(verdict)}**", ""]
    return [*lines, *(_new(one) if one.before is None else _table(one.before, one)), "", *_left(one), ""]


def _table(before: Inspection, one: Review) -> list[str]:
    words = {True: "better", False: "**worse**", None: ""}
    rows = ["| | before | after | |", "|---|---|---|---|"]
    for c in summary.changes(before, one.after):
        rows.append(f"| {c.label} | {_cell(c.before)} | {_cell(c.after)} | {words[c.better]} |")
    if one.comparison is not None:
        met = "" if one.comparison.ok else "**worse**"
        rows.append(f"| numbers | | {_cell(one.comparison.verdict.splitlines()[0])} | {met} |")
    return rows


def _new(one: Review) -> list[str]:
    rows = ["| | |", "|---|---|"]
    return rows + [f"| {c.label} | {_cell(c.after)} |" for c in summary.changes(one.after, one.after)]


def _left(one: Review) -> list[str]:
    rows = one.left()
    if not rows or one.before is None:
        return []
    lines = ["| op that is not expected on the ANE now | type | where | why |", "|---|---|---|---|"]
    for row in rows[:NAMED]:
        uses = one.after.target.uses_ane
        said = (f.message for f in row.findings if f.kind not in SOFT)
        why = next(said, summary.without_rule(row, uses))
        lines.append(f"| `{_cell(row.name)}` | {row.op_type} | {UNIT_WORDS[row.preferred]} | {_cell(why)} |")
    return lines + ([f"\nand {len(rows) - NAMED} more"] if len(rows) > NAMED else [])


def _cell(text: str) -> str:
    """Text as one cell: names of ops and files are not ours, and may hold anything."""
    plain = " ".join(text.split())
    return plain.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
