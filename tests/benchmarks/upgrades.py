"""What of each neural network of the corpus, or of those named, can run on the ANE before and after an upgrade.

The measure is the same on both sides, `Score.can_run`: the share of the ops and of the flop that the ANE can
run, of the layers by the rules of the old format, of the program by those for ML Programs. (What Core ML would
choose cannot be compared: networks have no cost model. Casts of inputs and outputs do not count, which no layer
says either.) The bar: neither share is lower after the upgrade.

    python tests/benchmarks/upgrades.py
    python tests/benchmarks/upgrades.py my.mlmodel --targets "M2/macOS 15"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import anesurgery as ane
from anesurgery.errors import SurgeryError
from anesurgery.loading import load
from anesurgery.mil import quiet_host
from anesurgery.placement.score import Score
from anesurgery.placement.target import Target

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
TARGETS = ("M1/macOS 14", "M4/macOS 15", "A15/iOS 17")
SHARES = ("ops", "flop")


def rows(path: Path, targets: Sequence[str], auto: bool) -> Iterator[tuple[bool, str]]:
    """Is the bar met, and a line for each target.

    Raises:
        SurgeryError: it cannot be read or upgraded.
    """
    upgraded = ane.upgrade(path)
    for words in targets:
        target = Target.parse(words)
        layers = Score.of_layers(ane.inspect(path, words))
        program = Score.of_upgraded(load(upgraded), target)
        worse = program.loss(layers, ["can run"])
        shares = [_words(layers), _words(program)]
        if auto:
            surgery = ane.apply(upgraded, "auto", target=words, prove=None, quiet=True)
            shares.append(_words(Score.of_upgraded(load(surgery.model), target)))
        yield not worse, f"{path.name} | {words} | {' | '.join(shares)} | {worse or 'met'}"


def _words(score: Score) -> str:
    return ", ".join(f"{score.can_run[share]:.3f}" for share in SHARES)


def main() -> None:
    """Print the table; the exit code says whether the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=sorted(CORPUS.glob("*.mlmodel")))
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--auto", action="store_true", help="what `auto` makes of the upgraded one, too")
    chosen, met = parser.parse_args(), True
    print(f"network | target | layers: ops, flop | upgraded{' | after auto' * chosen.auto} | bar")
    for path in chosen.paths:
        try:
            with quiet_host():
                for well, line in rows(path, chosen.targets, chosen.auto):
                    met &= well
                    print(line, flush=True)
        except SurgeryError as error:
            print(f"{path.name} | {str(error).splitlines()[0]}", flush=True)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
