"""Answers that are kept while no program is edited: many rules ask the same of one op."""

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
def unedited() -> Iterator[Callable[[], None]]:
    """Keep answers of `kept` functions within; what it gives forgets them, to be called after each edit."""
    answers = dict[Any, Any]()
    token = _ANSWERS.set(answers)
    try:
        yield answers.clear
    finally:
        _ANSWERS.reset(token)


def kept(function: Callable[P, R]) -> Callable[P, R]:
    """Cache a function's results until the program is edited; outside `unedited` nothing is cached."""

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
