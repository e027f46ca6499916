"""The interpreter against the torch module in eager mode: GPT-2 124M, 512 tokens, fp32, alternating runs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpt2 import torch_gpt2

from anesurgery.interpret import Executable
from anesurgery.program import load


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    """Measure and print the ratio of the best runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    chosen = parser.parse_args()
    module, converted, ids = torch_gpt2(chosen.length)
    executable = Executable(load(converted).program)
    inputs = {"ids": ids.numpy().astype(np.int32)}
    with torch.inference_mode():
        expected = module(ids).numpy()
        (found,) = executable(inputs).values()
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        pairs = [
            (timed(lambda: executable(inputs)), timed(lambda: module(ids)))
            for _ in range(chosen.runs)
        ]
    ours, theirs = (min(column) for column in zip(*pairs, strict=True))
    print(f"{chosen.length} tokens, {torch.get_num_threads()} threads")
    print(f"interpreter / torch {ours / theirs:.2f}, largest relative error {error:.1e}")


if __name__ == "__main__":
    main()
