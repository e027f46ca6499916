"""`anesurgery review`: the models of a repository beside those of an older commit, for pull requests."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery.commands.options import Aim, Quiet
from anesurgery.commands.waiting import load_engine, waiting
from anesurgery.errors import SurgeryError


def review(
    models: Annotated[list[Path], typer.Argument(help="Models, as paths in the repository.")],
    base: Annotated[str, typer.Option(help="The commit to compare with.")],
    target: Aim = None,
    script: Annotated[
        str | None, typer.Option(help="A shell command that makes the models. It runs in both trees.")
    ] = None,
    points: Annotated[
        float,
        typer.Option(min=0, help="How many percentage points of the share on the Neural Engine may be lost."),
    ] = 0.1,
    numbers: Annotated[bool, typer.Option(help="Compare the outputs too.")] = True,
    gate: Annotated[float, typer.Option(help="The least PSNR of every output, in dB.")] = 60.0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A file to append the Markdown to.")] = None,
    quiet: Quiet = False,
) -> None:
    """Print in Markdown what got better and worse since a commit. Exit code 1 if something got worse."""
    load_engine(True)
    from anesurgery.show.markdown import review_markdown

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
    """Compare one model in both trees."""
    from anesurgery.checking.comparison import compare
    from anesurgery.placement.inspector import inspect
    from anesurgery.show.markdown import Review

    whole = Path(os.path.normpath(path.expanduser().absolute()))  # a link stays what it is in both trees
    if not whole.is_relative_to(here):
        raise SurgeryError(f"{path} is not in the repository {here}; name models in it")
    place = whole.relative_to(here)
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
    """Check out the tree of a commit in a temporary folder, and yield its path."""
    with tempfile.TemporaryDirectory(prefix="anesurgery-review-") as folder:
        tree = Path(folder).resolve() / "base"
        _git(here, "worktree", "add", "--detach", "--quiet", str(tree), "--", base)
        try:
            yield tree
        finally:
            _git(here, "worktree", "remove", "--force", str(tree))


def _git(folder: Path, *words: str) -> str:
    """Run git, and return what it prints.

    Raises:
        SurgeryError: git is not there, or refuses.
    """
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SurgeryError("review needs git, which is not on the PATH") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["failed"])[-1]
        is_clone = "not a git repository" not in said
        cure = "fetch the commit (fetch-depth: 0)" if is_clone else "name models in a clone of your repository"
        raise SurgeryError(f"git {words[0]}: {said}; {cure}")
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
