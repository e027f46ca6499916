"""How long six sizes of a ranged model of 100 MB take, against coremltools' own null round trip of it.

Each runs in a fresh process on one thread, in turn; its seconds are those of the processor (user and system),
without imports. Only ratios within a round mean anything: the median of several rounds, and the spread.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import coremltools as ct
import numpy as np
import torch
from recipe import HOST, measure, spread
from sized_figures import stored

from anesurgery.mil import quiet_host

SIZES = (16, 32, 64, 96, 128, 192)
LARGEST = SIZES[-1]
OURS = f"""
import torch, coremltools
import anesurgery as ane
ane.sizes
begin()
ane.sizes(source, {{"ids": [(1, n) for n in {SIZES}]}}).save(target)
"""
GOAL = 3.0


class Encoder(torch.nn.Module):
    """Learned positions and layers with attention: 50 million weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(24000, 512), torch.nn.Embedding(LARGEST, 512)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(12))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(torch.nn.Module):
    """Attention of eight heads and two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(512), torch.nn.LayerNorm(512)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(512, 512) for _ in range(4))
        self.wide, self.narrow = torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q, k, v = (one(y).view(1, -1, 8, 64).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = ((q @ k.transpose(-1, -2) / 8).softmax(-1) @ v).transpose(1, 2).reshape(1, -1, 512)
        x = x + self.out(mixed)
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.second(x))))


def write(target: Path) -> None:
    """The package of a range."""
    torch.manual_seed(0)
    with torch.no_grad(), quiet_host():
        graph = torch.jit.trace(Encoder().eval(), torch.ones(1, 64, dtype=torch.int32))  # type: ignore[no-untyped-call]
        model = ct.convert(
            graph,
            inputs=[ct.TensorType("ids", (1, ct.RangeDim(1, LARGEST, default=64)), dtype=np.int32)],
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )
    model.save(str(target))


def ratios(folder: Path, runs: int) -> tuple[list[float], int]:
    """Our seconds by those of the null round trip, of each round; and the bytes of weights of the package."""
    source = folder / "ranged.mlpackage"
    subprocess.run([sys.executable, __file__, "--write", str(source)], check=True)
    measure(HOST, source, folder)  # what is read from the disk once
    rounds = [[measure(body, source, folder)["seconds"] for body in (OURS, HOST)] for _ in range(runs)]
    return [ours / host for ours, host in rounds], stored(source)


def main() -> None:
    """Measure and print; or write the package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", type=Path)
    chosen = parser.parse_args()
    if chosen.write is not None:
        write(chosen.write)
        return
    with tempfile.TemporaryDirectory() as folder:
        figures, size = ratios(Path(folder), chosen.runs)
    print(f"six sizes of {size / 1e6:.0f} MB / null round trip: {spread(figures)}, at most {GOAL:g}")


if __name__ == "__main__":
    main()
