"""Numbers that agree up to rounding, judged by the largest of them."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_close(found: Any, expected: Any, rtol: float = 1e-6) -> None:
    """No element is off by more than `rtol` times the largest finite magnitude; integers are the same."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    finite = np.abs(expected[np.isfinite(expected)])
    assert finite.size or not expected.size, "nothing finite is compared"
    largest = 0 if expected.dtype.kind in "bi" else finite.max(initial=0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=rtol * largest)
