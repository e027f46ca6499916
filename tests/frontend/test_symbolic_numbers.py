"""Numbers that depend on data, in what torch.export asserts."""

from __future__ import annotations

import torch
from closeness import assert_close
from conversion import Function, convert

from anesurgery import frontend
from anesurgery.interpret import run

X = torch.arange(24.0).reshape(2, 3, 4).sin()


def test_a_branch_on_data_that_draft_export_takes() -> None:
    """Its assertions are dropped; which branch was taken is that of the example, as in a trace."""
    frontend.register()

    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if (x > 5).any().item() else x - 1

    model = convert(Function(branch), {"x": X}, "draft_export", "iOS17", "FLOAT32")
    (found,) = run(model, {"x": X.numpy()}).values()
    assert_close(found, branch(X).numpy(), rtol=1e-6)
