"""Which cases of a test `make test` runs: markers beside it say so; all others are slow, for `make test-all`.

A case stays for each thing that can break by itself: a way of conversion, an opset, a precision, a family.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest


def mark_slow(items: Iterable[pytest.Item]) -> list[str]:
    """Mark the cases that are left out of `make test`.

    Returns:
        The cases that a marker names and that are not there, as `test[case]`.
    """
    named, there = dict[str, set[str]](), defaultdict[str, set[str]](set)
    stayed = Counter[str]()
    for item in items:
        test, _, case = item.nodeid.removesuffix("]").partition("[")
        quick, slow = (_words(item, name) for name in ("quick_cases", "slow_cases"))
        named[test] = quick | slow
        there[test].add(case)
        every = item.get_closest_marker("one_of")
        if case in slow or (quick and case not in quick):
            item.add_marker(pytest.mark.slow)
        elif item.get_closest_marker("slow") is None:
            if every is not None and stayed[test] % every.args[0]:
                item.add_marker(pytest.mark.slow)
            stayed[test] += 1
    return [f"{test}[{case}]" for test, cases in named.items() for case in sorted(cases - there[test])]


def _words(item: pytest.Item, name: str) -> set[str]:
    marker = item.get_closest_marker(name)
    return set() if marker is None else set(marker.args)
