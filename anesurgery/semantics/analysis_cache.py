"""Cache what rules ask about a program while nothing edits it: many rules ask the same about one op.

Functions decorated with `cached` keep their results inside a `with caching() as clear:` block. Whoever edits
the program calls `clear()` after each edit, since results are keyed by the ops and values themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_RESULTS: ContextVar[dict[Any, Any] | None] = ContextVar("answers", default=None)


@contextmanager
def caching() -> Iterator[Callable[[], None]]:
    """Cache the results of `cached` functions inside the block; yields the function that empties the cache."""
    results = dict[Any, Any]()
    token = _RESULTS.set(results)
    try:
        yield results.clear
    finally:
        _RESULTS.reset(token)


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """Cache a function's results until the program is edited; outside `caching` nothing is cached."""

    @wraps(function)
    def with_cache(*args: P.args, **kwargs: P.kwargs) -> R:
        results = _RESULTS.get()
        if results is None:
            return function(*args, **kwargs)
        key = (function, args, tuple(kwargs.items())) if kwargs else (function, args)
        cached_result: Any = results.get(key, results)
        if cached_result is results:
            cached_result = results[key] = function(*args, **kwargs)
        result: R = cached_result
        return result

    return with_cache
