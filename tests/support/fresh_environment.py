"""Install where nothing else is, and run what the README says; `make dist` ends with it.

``fresh_environment.py WHEEL`` installs a wheel and runs the first commands. ``fresh_environment.py --clone``
pastes every block of the README, its installation too, into a terminal of 80 columns in a new clone of what is
committed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
FIRST = re.compile(r"^## See, fix, prove$.*?(?=^## )", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(sh|python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def without_decibels(text: str) -> str:
    """What is printed without what the vector width of a processor may change."""
    return " ".join(re.sub(r"[\d.]+ dB", "N dB", text).split())


def missing(printed: str, readme: str = "") -> list[str]:
    """The lines that the README shows below its commands and that were not printed."""
    _, shown = first_commands(readme)
    lines = [line for line in shown.splitlines() if line != "..."]
    return [line for line in lines if without_decibels(line) not in without_decibels(printed)]


def first_commands(readme: str = "") -> tuple[str, str]:
    """The commands, and what the README says that they print."""
    part = FIRST.search(readme or README.read_text(encoding="utf-8"))
    blocks = BLOCK.findall(part[0]) if part else []
    commands, shown = ("".join(text for kind, text in blocks if kind == wanted) for wanted in ("sh", "text"))
    if not (commands and shown):
        raise SystemExit("README.md has no commands and output under `## See, fix, prove`")
    return commands, shown


def installed(wheel: Path, torch: str, python: str, folder: Path) -> dict[str, str]:
    """The variables of a new environment with the wheel in it."""
    programs = folder / "environment" / "bin"
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # a clone there counts as installed
    variables["PATH"] = f"{programs}{os.pathsep}{variables['PATH']}"
    subprocess.run([python, "-m", "venv", programs.parent], env=variables, check=True)
    for wanted in (torch.split(), [str(wheel.resolve())]):
        install = [str(programs / "python"), "-m", "pip", "install", "--quiet", *wanted]
        subprocess.run(install, env=variables, check=True)
    return variables


SUITE = re.compile(r"^make test\b.*\n", re.MULTILINE)
"""The whole suite, which is the one command that is not pasted."""


def pasted(readme: str = "") -> str:
    """Every block of the README as one script of bash; Python is given to the interpreter on the PATH."""
    blocks = BLOCK.findall(readme or README.read_text(encoding="utf-8"))
    sh = (
        SUITE.sub("", text) if kind == "sh" else f"python - <<'END'\n{text}END\n"
        for kind, text in blocks
        if kind != "text"
    )
    return "set -eo pipefail\n" + "".join(sh)


def paste(folder: Path) -> None:
    """Paste the README into a new clone.

    Raises:
        SystemExit: a command fails, or does not print what the README shows.
    """
    subprocess.run(["git", "clone", "--quiet", README.parent, folder / "clone"], check=True)
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"COLUMNS": "80", "PIP_QUIET": "1"}
    ran = subprocess.run(
        ["bash", "-c", pasted()],
        cwd=folder / "clone",
        env=variables,
        text=True,
        capture_output=True,
        check=False,
    )
    lacking = missing(ran.stdout) if ran.returncode == 0 else [ran.stdout[-1000:], ran.stderr[-2000:]]
    if lacking:
        raise SystemExit(
            "\n".join(["the README, pasted into a new clone, fails or prints something else:", *lacking])
        )
    print("the README, pasted into a new clone: every command runs and prints what it says")


def main() -> None:
    """Exit with 1, and the lines that are missing, where the commands print something else."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, nargs="?")
    parser.add_argument("--clone", action="store_true", help="paste the whole README into a new clone")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is told to install as PyTorch")
    parser.add_argument("--python", default=sys.executable, help="the Python to make the environment with")
    options = parser.parse_args()
    if options.clone:
        with tempfile.TemporaryDirectory() as name:
            paste(Path(name))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = installed(options.wheel, options.torch, options.python, folder)
        (folder / "empty").mkdir()
        commands = ["bash", "-e", "-c", first_commands()[0]]
        ran = subprocess.run(
            commands, cwd=folder / "empty", env=variables, text=True, capture_output=True, check=False
        )
    lacking = missing(ran.stdout) if ran.returncode == 0 else [ran.stderr[-2000:]]
    if lacking:
        raise SystemExit("\n".join(["the README's first commands do not print, from the wheel:", *lacking]))
    print(f"{options.wheel.name}: the README's first commands print what it says")


if __name__ == "__main__":
    main()
