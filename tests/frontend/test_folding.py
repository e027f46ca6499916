"""`fold` in every form: overlaps, dilation, padding and a remainder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import assert_close
from conversion import convert

from anesurgery import frontend
from anesurgery.interpret import run

FORMS: dict[str, dict[str, Any]] = {
    "tiles": {"output_size": (4, 6), "kernel_size": 2, "stride": 2},
    "remainder": {"output_size": (5, 7), "kernel_size": 2, "stride": 2},
    "overlap": {"output_size": (4, 5), "kernel_size": (2, 3)},
    "overlap_and_padding": {"output_size": (4, 5), "kernel_size": 3, "padding": (1, 2), "stride": (1, 2)},
    "dilation": {"output_size": (5, 6), "kernel_size": 2, "dilation": (2, 3)},
    "gaps": {"output_size": (5, 8), "kernel_size": 2, "stride": 3},
}


@pytest.mark.one_of(9)
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize(("form", "batch"), [*((form, (2,)) for form in FORMS), ("tiles", ()), ("overlap", ())])
def test_each_form_agrees_with_torch(form: str, batch: tuple[int, ...], how: str) -> None:
    frontend.register()
    fold = torch.nn.Fold(**FORMS[form])
    windows = torch.nn.Unfold(**{k: v for k, v in FORMS[form].items() if k != "output_size"})(
        torch.zeros(1, 3, *FORMS[form]["output_size"])
    )
    x = torch.randn(*batch, *windows.shape[1:], generator=torch.Generator().manual_seed(0))
    model = convert(fold, {"x": x}, how, "iOS17", "FLOAT32")
    for given in (x, x.flip(-1)):
        (found,) = run(model, {"x": given.numpy()}).values()
        assert found.shape == fold(given).shape
        assert_close(found, fold(given).numpy(), rtol=1e-6)
