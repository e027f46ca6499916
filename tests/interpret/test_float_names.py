"""Names of floats: looked up or computed, they are the same."""

from __future__ import annotations

import pytest
import torch

from anesurgery.interpret.arithmetic import bitwise, field
from anesurgery.interpret.arithmetic.bitwise import Bitwise


def weights(terms: int) -> torch.Tensor:
    made = torch.randn(1 + bitwise.HALVES // terms, terms, generator=torch.Generator().manual_seed(0))
    return made.half()


@pytest.mark.parametrize("terms", [768, field.LONGEST, field.LONGEST + 1])
def test_sums_are_those_of_the_names(terms: int) -> None:
    """As stored, in float32, and through the names of each number."""
    stored = weights(terms)
    apart = Bitwise()
    expected = apart._rows_of(apart.image(stored.float()))
    assert Bitwise().rows(stored).same(expected)
    assert Bitwise().rows(stored.float()).same(expected)
    assert (bitwise.sums(stored, apart.places(terms)) is None) == (terms > field.LONGEST)


def test_one_other_bit_is_another_name() -> None:
    stored = weights(768)
    other = stored.clone()
    other.view(torch.int16)[-1, -1] ^= 1
    first, second = (Bitwise().rows(w) for w in (stored, other))
    assert [torch.equal(a[:-1], b[:-1]) for a, b in zip(first.lanes, second.lanes, strict=True)] == [True] * 3
    assert not any(bool(a[-1] == b[-1]) for a, b in zip(first.lanes, second.lanes, strict=True))


def test_numbers_that_fp16_does_not_hold_are_not_looked_up() -> None:
    wide = weights(768).float()
    assert bitwise.bits(wide) is not None
    for at in (0, wide.numel() - 1):  # among the first few, and after them
        other = wide.clone()
        other.view(-1)[at] += 1e-6
        assert bitwise.bits(other) is None


def test_signs_and_zeros() -> None:
    """-w has the negative name; 0 and -0 differ."""
    numbers = torch.tensor([0.5, -0.5, 0.0, -0.0, 65504.0, 6e-8]).half().repeat(1 + bitwise.HALVES // 6)
    looked_up, computed = bitwise.of(numbers.numpy()), bitwise.of(numbers[:6].numpy())
    for a, b, prime in zip(looked_up.lanes, computed.lanes, field.PRIMES, strict=True):
        assert torch.equal(a[:6], b)
        assert int(b[0] + b[1]) == prime
        assert int(b[2]) != int(b[3])
