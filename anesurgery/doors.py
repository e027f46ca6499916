"""Public calls say in words what they were given in place of what they take, and where the system fails them.

What a call takes is what its annotations say, read when it is first called, so that it is said once.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import errno
import inspect
import numbers
import re
import types
import typing
from collections.abc import Callable, Collection
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from anesurgery.display import byte_words
from anesurgery.errors import LoadError, OutOfMemory, SurgeryError
from anesurgery.registry import converter_of

P = ParamSpec("P")
R = TypeVar("R")

WIDER: dict[Any, tuple[Any, ...]] = {
    int: (numbers.Integral,),
    float: (numbers.Real,),
    bool: (bool, np.bool_, numbers.Integral),
    tuple: (tuple, list),
    frozenset: (frozenset, set),
}
"""What is taken in place of a type: numpy's numbers are numbers, and lists become tuples."""
IN_WORDS = {
    float: "a number",
    int: "a whole number",
    str: "a string",
    bool: "True or False",
    type(None): "None",
}


REPEATABLE: ContextVar[bool] = ContextVar("repeatable", default=False)
"""Do random ops without a seed draw the same numbers in each run? Two runs can only be compared if they do."""


def door(*own: str, modules: bool = False, draws: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the types of what a public function is called with, and say in words where the system fails.

    Args:
        own: parameters that the function checks itself, in words of its own.
        modules: does it take models of PyTorch, with `inputs`? They are converted.
        draws: does a model that it runs draw new random numbers in each run, as on a device?
    """

    def opened(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def at_the_door(*positional: P.args, **named: P.kwargs) -> R:
            repeatable = REPEATABLE.set(REPEATABLE.get() or not draws)
            try:
                if modules:
                    positional, named = _converted(function, positional, named)
                _check(function, positional, named, own)
                return function(*positional, **named)
            except Exception as error:
                if short := short_of_memory(error):
                    raise _without_memory(function, positional, named, error, short) from error
                if isinstance(error, OSError):
                    raise LoadError(_failure(function.__name__, error)) from error
                if isinstance(error, SurgeryError):
                    error.args = tuple(given_words(a) if isinstance(a, str) else a for a in error.args)
                raise
            finally:
                REPEATABLE.reset(repeatable)

        return at_the_door

    return opened


TEMPORARY = re.compile(r"(?:/[^/\s]+)*/\.anesurgery-[0-9a-f-]+/new/[^/\s]+/model\.mlpackage")
"""Where an MLModel is that a call gave back: a place that no caller named."""
THIS = "this MLModel"


def given_words(words: str) -> str:
    """Words without the places of temporary packages."""
    return TEMPORARY.sub(THIS, words)


ALLOCATORS = re.compile(r"(can't|cannot|unable to) allocate|not enough memory|out of memory|bad_alloc", re.I)
"""How numpy, torch and the system say that there is no memory left."""
AMOUNT = re.compile(r"allocate ([\d.]+) ?(bytes|[KMGTP]i?B)")
"""How much they asked for."""


def short_of_memory(error: BaseException | None) -> str:
    """What asked for how much memory, where an error or its cause is that there is none left; else ""."""
    seen: list[BaseException] = []
    while error is not None and not any(error is one for one in seen):  # an error may be its own cause
        seen.append(error)
        if isinstance(error, OutOfMemory):
            return error.what
        words = str(error)
        system = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if system or isinstance(error, MemoryError):
            return _amount(words)
        if isinstance(error, RuntimeError) and ALLOCATORS.search(words):
            return _amount(words)
        error = error.__cause__
    return ""


def _amount(words: str) -> str:
    """The memory that was asked for, in words."""
    amount = AMOUNT.search(words)
    if amount is None:
        return "a value found no place in it"
    number, unit = amount.groups()
    size = float(number) * (1 if unit == "bytes" else 1024 ** ("KMGTP".index(unit[0]) + 1))
    return f"a value asked for {byte_words(size)} at once"


def _without_memory(
    function: Callable[..., Any],
    positional: tuple[Any, ...],
    named: dict[str, Any],
    error: Exception,
    what: str,
) -> OutOfMemory:
    """The error of a call that found too little memory: who asked for it, and what to do."""
    bound = _parameters(function)[0].bind_partial(*positional, **named)
    bound.apply_defaults()
    smaller = {
        "both": ', or give prove="sites", which compares one edit at a time',
        True: ", or leave prove out",
    }
    smaller["model"] = smaller["both"]
    prove = bound.arguments.get("prove")
    less = smaller.get(prove, "") if isinstance(prove, (str, bool)) else ""
    short = OutOfMemory(what)
    short.args = (f"{function.__name__}: {short}; use a machine with more memory{less}",)
    if isinstance(error, SurgeryError):
        short.undone, short.surgery = error.undone, error.surgery
    return short


def _failure(call: str, error: OSError) -> str:
    """What the system said where a file could not be read or written, and what to do."""
    at = f" at {error.filename}" if error.filename else ""
    words = f"{call}: the system failed{at}: {error.strerror or error}"
    return f"{words}; see to the disk and the permissions, and call it again"


def _check(
    function: Callable[..., Any], positional: tuple[Any, ...], named: dict[str, Any], own: Collection[str]
) -> None:
    """See that each argument is of its parameter's type; Python itself tells of arguments too many or missing.

    Raises:
        SurgeryError: one is not; says which, what it is and what the call takes.
    """
    signature, kinds = _parameters(function)
    try:
        arguments = signature.bind_partial(*positional, **named).arguments
    except TypeError:  # an unknown or a doubled argument: the call raises it with the function's name
        return
    for name, value in arguments.items():
        if name not in own:
            _check_type(function.__name__, name, value, kinds.get(name, Any))


def _converted(
    function: Callable[..., Any], positional: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, Any]:
    """The arguments with a model of PyTorch converted."""
    signature, _ = _parameters(function)
    model = positional[0] if positional else named.get("model")
    if (convert := converter_of(model)) is None:
        return positional, named
    if list(signature.parameters)[1] == "target" and positional[1:] and not isinstance(positional[1], str):
        inputs = positional[1]  # inspect(module, inputs), or inspect(module, inputs, target)
        positional, named = (model, *positional[2:]), {"inputs": inputs, **named}
    try:
        arguments = signature.bind(*positional, **named).arguments
    except TypeError:  # as in `_check`
        return positional, named
    made, arguments["inputs"] = convert(model, arguments.get("inputs"), arguments.get("target"))
    return (), arguments | {"model": made}


def check_fields(values: Any) -> None:
    """See that each field of a dataclass is of its type, for its `__post_init__`.

    Raises:
        SurgeryError: one is not.
    """
    cls = type(values)
    _, kinds = _parameters(cls.__init__)
    for one in dataclasses.fields(values):
        _check_type(cls.__name__, one.name, getattr(values, one.name), kinds.get(one.name, Any))


def _check_type(what: str, name: str, value: Any, kind: Any) -> None:
    if not fits(value, kind):
        raise SurgeryError(
            f"{what}: {name}={_shown(value)} is of type {type(value).__name__}; it takes {in_words(kind)}"
        )


@cache
def _parameters(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """The signature, and the type of each parameter; Any where it is only known to type checkers."""
    inner = inspect.unwrap(function)
    kinds: dict[str, Any] = {}
    for name, annotation in getattr(inner, "__annotations__", {}).items():
        try:
            holder: Any = types.SimpleNamespace(__annotations__={"it": annotation})
            kinds[name] = typing.get_type_hints(holder, getattr(inner, "__globals__", {}))["it"]
        except NameError:
            kinds[name] = Any
    return inspect.signature(inner), kinds


def fits(value: Any, kind: Any) -> bool:
    """Is a value of a type? Of what containers hold the elements are looked at in lists and tuples alone."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or isinstance(kind, (TypeVar, str)):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, k) for k in inner)
    if origin is typing.Literal:
        return value in inner
    plain = origin or kind
    if not isinstance(plain, type) or plain is object:
        return True
    if isinstance(value, str) and plain in (
        collections.abc.Sequence,
        collections.abc.Iterable,
        collections.abc.Collection,
    ):
        return False
    if not isinstance(value, WIDER.get(plain, (plain,))):
        return False
    ordered = isinstance(value, (list, tuple)) and (len(inner) == 1 or inner[1:] == (...,))
    return not ordered or all(fits(v, inner[0]) for v in value)


def in_words(kind: Any) -> str:
    """A type as a person says it."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(in_words, typing.get_args(kind))))
    if kind in IN_WORDS:
        return IN_WORDS[kind]
    plain, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    name = str(getattr(plain, "__name__", plain))
    if name in ("Mapping", "dict"):
        return "a dictionary"
    if name in ("Sequence", "list", "tuple", "Collection", "Iterable"):
        return f"a list of {getattr(inner[0], '__name__', 'values')}" if inner else "a list"
    return {"PathLike": "a path", "Path": "a path"}.get(name, f"a {name}")


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else "..."
    return text if len(text) <= 40 else f"{text[:40]}..."
