"""A cache of the answers about a program while nothing edits it: many rules ask the same of one op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_ANSWERS: ContextVar[dict[Any, Any] | None] = ContextVar("answers", default=None)


@contextmanager
def caching() -> Iterator[Callable[[], None]]:
    """Cache the results of `cached` functions within; yields what empties the cache, for after each edit."""
    answers = dict[Any, Any]()
    token = _ANSWERS.set(answers)
    try:
        yield answers.clear
    finally:
        _ANSWERS.reset(token)


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """Cache a function's results until the program is edited; outside `caching` nothing is cached."""

    @wraps(function)
    def asked(*args: P.args, **kwargs: P.kwargs) -> R:
        answers = _ANSWERS.get()
        if answers is None:
            return function(*args, **kwargs)
        key = (function, args, tuple(kwargs.items())) if kwargs else (function, args)
        answer: Any = answers.get(key, answers)
        if answer is answers:
            answer = answers[key] = function(*args, **kwargs)
        known: R = answer
        return known

    return asked
