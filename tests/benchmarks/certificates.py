"""What a certificate costs, in runs of the model: `ane.certify` over one run in fp32, by turns in one process.

    python tests/benchmarks/certificates.py

The run is that of a plan that was made before, with its weights widened; a certificate plans anew. GPT-2 124M
is built from its configuration with random weights. The processor's time is read, at one thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gpt2
import numpy as np
import torch

import anesurgery as ane
from anesurgery.interpret import Executable
from anesurgery.mil import Array, Program

TOKENS = 128
MOST = 10.0
"""Runs in fp32 that a certificate of GPT-2 124M may take."""


def models(folder: Path) -> dict[str, tuple[Program, dict[str, Array]]]:
    """Name -> program and one set of inputs."""
    large = gpt2.program(12, 768, 50257, TOKENS, folder)
    ids = np.random.default_rng(0).integers(0, 50257, (1, TOKENS)).astype(np.int32)
    small = ane.load(ane.example("gpt2", folder / "gpt2.mlpackage")).program
    return {"GPT-2 124M": (large, {"ids": ids}), "small GPT-2": (small, ane.Predictor(small).sample(0))}


def ratios(program: Program, values: dict[str, Array], rounds: int) -> list[float]:
    """The ratio of each round, after one round that does not count."""
    executable, found = Executable(program), []
    for _ in range(rounds + 2):
        times = [_seconds(call) for call in (lambda: executable(values), lambda: ane.certify(program, values))]
        found.append(times[1] / times[0])
    return found[2:]  # weights are widened in the second run


def _seconds(call: Any) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def main() -> None:
    """Print the median, the least and the largest ratio of each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, (program, values) in models(Path(folder)).items():
            found = ratios(program, values, rounds)
            middle = statistics.median(found)
            print(f"{name}: {middle:.1f} runs ({min(found):.1f} to {max(found):.1f}), goal {MOST:g}")


if __name__ == "__main__":
    main()
