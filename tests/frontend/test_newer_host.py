"""`frontend.register()` beside a newer coremltools: what that converts itself stays its own, op by op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY, register_torch_op

from anesurgery import frontend

NEWER = (
    "upsample_bicubic2d",
    "upsample_bicubic2d.vec",
    "masked_scatter",
    "deform_conv2d",
    "torchvision::deform_conv2d",
    "logaddexp",
)
"""What a host may come to convert; the last is one that is decomposed here."""


def hosts_own(context: Any, node: Any) -> None:
    """A converter of the host."""


@pytest.fixture
def table() -> Iterator[dict[str, Any]]:
    """The host's table of converters, put back afterwards."""
    frontend.register()  # what the rest of the process has
    table = _TORCH_OPS_REGISTRY.name_to_func_mapping
    kept = dict(table)
    yield table
    table.clear()
    table.update(kept)


def test_what_the_host_converts_is_kept(table: dict[str, Any]) -> None:
    for name in NEWER:
        table[name] = hosts_own
    del table["_upsample_bicubic2d_aa"]
    for _ in range(2):
        frontend.register()
        assert {table[name] for name in NEWER} == {hosts_own}
    assert table["_upsample_bicubic2d_aa"] is frontend.CONVERSIONS["_upsample_bicubic2d_aa"]


def test_a_host_that_no_longer_has_a_wrapped_operation(table: dict[str, Any]) -> None:
    for name in frontend.WRAPPERS:
        table.pop(name, None)
    frontend.register()
    assert "scaled_dot_product_attention" not in table


@pytest.mark.parametrize("name", ["masked_scatter", "logaddexp", "multiply"])
def test_a_converter_registered_later_takes_the_place_of_ours(name: str, table: dict[str, Any]) -> None:
    def convert(context: Any, node: Any) -> None: ...

    convert.__name__ = name
    register_torch_op(convert)
    frontend.register()
    assert table[name] is convert


def test_a_registration_that_fails_leaves_ours(table: dict[str, Any]) -> None:
    def masked_scatter(context: Any, node: Any) -> None: ...

    with pytest.raises(ValueError, match="relu already registered"):
        register_torch_op(masked_scatter, torch_alias=["relu"])
    assert "masked_scatter" in table


def test_the_hosts_own_are_still_registered_once() -> None:
    def relu(context: Any, node: Any) -> None: ...

    with pytest.raises(ValueError, match="relu already registered"):
        register_torch_op(relu)
