"""Products that only pick rows, and weights that are widened block by block: the same as the whole product."""

from __future__ import annotations

import pytest
import torch

from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.ops import computing

WIDTHS = [2048, 2053]
"""A multiple of what is looked at together, and a prime."""


def table(width: int) -> torch.Tensor:
    return torch.randn(width, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("width", WIDTHS)
def test_one_number_in_each_row_picks_a_row(width: int) -> None:
    x, y = torch.zeros(2, 3, width), table(width)
    for row, (place, value) in enumerate([(0, 1.0), (width - 1, -2.5), (255, 1e-30), (256, 3.0), (700, 0.0)]):
        x[row // 3, row % 3, place] = value
    rows = computing._picked_rows(x, y)
    assert rows is not None
    assert torch.equal(rows, x @ y)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("second", [4, 300])
def test_two_numbers_in_a_row_are_a_sum(width: int, second: int) -> None:
    x, y = torch.zeros(2, width), table(width)
    x[0, 3], x[0, second] = 1.0, -1.0
    assert computing._picked_rows(x, y) is None
    torch.testing.assert_close(computing.matmul(x, y)[0], y[3] - y[second])


def test_what_is_not_finite_poisons_every_sum() -> None:
    x, y = torch.zeros(1, 2048), table(2048)
    x[0, 5], y[7, 1] = 1.0, torch.inf
    assert computing.matmul(x, y).isnan().tolist() == [[False, True, False]]
    x[0, 5] = torch.nan
    assert computing.matmul(x, table(2048)).isnan().all()


def test_no_rows_pick_no_rows() -> None:
    assert computing.matmul(torch.zeros(2, 0, 2048), table(2048)).shape == (2, 0, 3)


@pytest.mark.parametrize("biased", [True, False])
def test_weights_widened_by_blocks(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "WEIGHTS_AT_ONCE", 16)
    made = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 5, 7, generator=made), torch.randn(9, 7, generator=made).half()
    bias = torch.randn(9, generator=made) if biased else None
    whole = torch.nn.functional.linear(x, weight.float(), bias)
    torch.testing.assert_close(computing.linear(x, weight, bias), whole, rtol=1e-6, atol=1e-6)
    one = torch.tensor(0.5)
    torch.testing.assert_close(
        computing.linear(x, weight, one),
        torch.nn.functional.linear(x, weight.float()) + 0.5,
        rtol=1e-6,
        atol=1e-6,
    )


def splitmix(h: int) -> int:
    """The finaliser of splitmix64, on Python's integers."""
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    h = (h ^ h >> 27) * 0x94D049BB133111EB % 2**64
    return h ^ h >> 31


def test_hashes_do_not_depend_on_how_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(-9, 9).reshape(3, 6)
    whole, mixed = field.opaque(field.PRIMES, 7, values.T, torch.arange(3)), field.mix(values)
    assert [h % 2**64 for h in mixed.flatten().tolist()] == [splitmix(v % 2**64) for v in range(-9, 9)]
    monkeypatch.setattr(field, "CACHED", 5)
    assert whole.same(field.opaque(field.PRIMES, 7, values.T, torch.arange(3)))
    assert torch.equal(mixed, field.mix(values))
    assert values.flatten().tolist() == list(range(-9, 9)), "the argument is not written to"
