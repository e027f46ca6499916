"""Core AI models for the tests, written by Apple's converter here, and run in child processes."""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

needs_core_ai = pytest.mark.skipif(
    importlib.util.find_spec("coreai_torch") is None,
    reason="coreai-core and coreai-torch are not installed; they need Python 3.11",
)

PROGRAM, HASH = "main.mlirb", "main.hash"


def rehash(folder: Path) -> None:
    """Let the hash fit, so that only Apple's reader can notice what is wrong."""
    (folder / HASH).write_bytes(hashlib.sha256((folder / PROGRAM).read_bytes()).digest())


def save_asset(
    path: Path, module: torch.nn.Module, inputs: Sequence[Any], outputs: Sequence[str] = ("y",), **how: Any
) -> Path:
    """What coreai-torch writes of a module; inputs are named x, x1, x2, ...

    Args:
        path: of the folder.
        module: with its weights.
        inputs: examples.
        outputs: names.
        how: `dynamic_shapes` of `torch.export`, `state_names` of the converter.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import coreai_torch

        states = how.pop("state_names", ())
        exported = torch.export.export(module.eval(), tuple(inputs), **how)
        converter = coreai_torch.TorchConverter()
        converter.add_exported_program(
            exported.run_decompositions(coreai_torch.get_decomp_table()),
            input_names=[f"x{i or ''}" for i in range(len(inputs))],
            output_names=list(outputs),
            state_names=list(states),
        )
        converter.to_coreai().save_asset(path)
    return path


def linear_asset(path: Path) -> Path:
    """A linear layer with a weight that is large enough for a place of its own in the file, and an addition."""

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 256), torch.nn.Linear(256, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    torch.manual_seed(0)
    return save_asset(path, Linear(), [torch.ones(2, 3)])
