"""How often `ane.against_torch` names a planted wrong module first, on the example models.

    python tests/benchmarks/planted.py --exported

Every submodule with a weight gets one that is off by 1 %, every square weight also swapped axes, every norm
also an epsilon that is 100 times as large; one at a time, against the fp16 package of the right module. With
`--exported` the wrong module is given as an exported program.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import anesurgery as ane
from anesurgery.examples.example_models import EXAMPLES, Example
from anesurgery.mil import Array, quiet_host

NAMES = ("gpt2", "vit", "whisper", "unet")


def inputs_of(example: Example) -> dict[str, Array]:
    """Random inputs."""
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 90, shape).astype(np.int32)
        if kind is np.int32
        else rng.standard_normal(shape).astype(np.float32)
        for name, (shape, kind) in example.inputs.items()
    }


def planted(module: torch.nn.Module) -> Iterator[tuple[str, str, torch.nn.Module]]:
    """Name of a submodule, what is wrong with it, and the module with it."""
    for name, part in module.named_modules():
        weight = getattr(part, "weight", None)
        ways = []
        if isinstance(weight, torch.Tensor) and not list(part.children()):
            square = weight.ndim > 1 and weight.shape[0] == weight.shape[1]
            ways = ["weight off by 1 %", *(["swapped axis"] if square else [])]
        for way in [*ways, *(["epsilon"] if hasattr(part, "eps") else [])]:
            wrong = copy.deepcopy(module)
            _spoil(wrong.get_submodule(name), way)
            yield name, way, wrong


def _spoil(part: Any, way: str) -> None:
    with torch.no_grad():
        if way == "epsilon":
            part.eps *= 100
        elif way == "swapped axis":
            part.weight.copy_(part.weight.transpose(0, 1).clone())
        else:
            part.weight.mul_(1.01)


def exported(module: torch.nn.Module, inputs: dict[str, Array]) -> torch.export.ExportedProgram:
    """The module as torch.export gives it."""
    values = tuple(torch.from_numpy(v.astype(np.int64) if v.dtype == np.int32 else v) for v in inputs.values())
    with quiet_host():
        return torch.export.export(module, values).run_decompositions({})


def measure(name: str, folder: Path, export: bool) -> None:
    """Print how many of each kind are named first."""
    example = EXAMPLES[name]
    torch.manual_seed(0)  # as `ane.example` does
    module, inputs = example.module().eval(), inputs_of(example)
    model = ane.load(ane.example(name, folder / f"{name}.mlpackage"))
    first, every = Counter[str](), Counter[str]()
    for at, way, wrong in planted(module):
        given = exported(wrong, inputs) if export else wrong
        found = ane.against_torch(given, model, inputs, precisions=("fp32",)).first
        every[way] += 1
        first[way] += found is not None and found.name == at
    right = ane.against_torch(exported(module, inputs) if export else module, model, inputs).ok
    said = ", ".join(f"{way}: {first[way]} of {count}" for way, count in every.items())
    print(f"{name}: {said}; the right one {'agrees' if right else 'does not agree'}", flush=True)


def main() -> None:
    """Measure each example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--exported", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names:
            measure(name, Path(folder), options.exported)


if __name__ == "__main__":
    main()
