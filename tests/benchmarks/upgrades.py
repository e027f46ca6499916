"""What of each neural network of the corpus, or of those named, can run on the ANE before and after an upgrade.

The measure is the same on both sides, `Standing.can_run`: the share of the ops and of the flop that the ANE can
run, of the layers by the rules of the old format, of the program by those for ML Programs. (What Core ML would
choose cannot be compared: networks have no cost model. Casts of inputs and outputs do not count, which no layer
says either.) The bar: neither share is lower after the upgrade.

    python tests/benchmarks/upgrades.py
    python tests/benchmarks/upgrades.py my.mlmodel --targets "M2/macOS 15"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

import anesurgery as ane
from anesurgery.errors import SurgeryError
from anesurgery.loading import load
from anesurgery.mil import quiet_host
from anesurgery.placement.standing import Standing
from anesurgery.placement.target import Target

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
TARGETS = ("M1/macOS 14", "M4/macOS 15", "A15/iOS 17")
SHARES = ("ops", "flop")


def measured(path: Path, targets: tuple[str, ...]) -> Iterator[tuple[str, str, Standing, Standing, str]]:
    """Target, layers, program, and the program after `auto`.

    Raises:
        SurgeryError: it cannot be read or upgraded.
    """
    upgraded = ane.upgrade(path)
    for words in targets:
        target = Target.parse(words)
        layers = Standing.of_layers(ane.inspect(path, words))
        yield words, path.name, layers, Standing.of_upgraded(load(upgraded), target), _after(upgraded, words)


def _after(upgraded: object, target: str) -> str:
    """The shares after `auto`."""
    surgery = ane.apply(upgraded, "auto", target=target, prove=None, quiet=True)
    return _words(Standing.of_upgraded(load(surgery.model), Target.parse(target)))


def _words(standing: Standing) -> str:
    return ", ".join(f"{standing.can_run[share]:.3f}" for share in SHARES)


def main() -> None:
    """Print the table; the exit code says whether the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=sorted(CORPUS.glob("*.mlmodel")))
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    chosen = parser.parse_args()
    console, met = Console(width=160), True
    table = Table("network", "target", "layers: ops, flop", "upgraded", "after auto", "bar")
    for path in chosen.paths:
        try:
            with quiet_host():
                for target, name, layers, program, after in measured(path, tuple(chosen.targets)):
                    worse = program.can_run_less(layers)
                    met &= not worse
                    table.add_row(name, target, _words(layers), _words(program), after, worse or "met")
        except SurgeryError as error:
            table.add_row(path.name, "", "", "", "", str(error).splitlines()[0][:60])
    console.print(table)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
