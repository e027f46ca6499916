"""Build commands from public calls: what a call takes are the options, and how it ends is shown in one way."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_args

import typer
from typer.models import ArgumentInfo

from anesurgery.commands.next_steps import FULL, command, ended
from anesurgery.commands.options import LEAST, SHARED, Full, Json, OldOut, Out, Quiet
from anesurgery.commands.waiting import load_engine, progress, waiting
from anesurgery.commands.written_options import Parameter, parameters_of
from anesurgery.display import drawn, finite, printable
from anesurgery.errors import SurgeryError, SurgeryWarning

Place: TypeAlias = Annotated[Path, "a place"]
"""Where to write, by --out or as the last argument."""
MaybePlace: TypeAlias = Annotated[Path | None, "a place"]
"""The same, where none need be named."""
LINES = 14
"""The most lines that a command prints by default, where it has `--full`."""
SHORT = {"count": ("-k",), "out": ("-o",)}


@dataclass(frozen=True)
class Call:
    """The public call of a command, with what the user gave: ``call["target"]``."""

    name: str
    """Module below `anesurgery` and function."""
    waits: str
    """Words for the terminal while it works: what it does ("cutting"); or what is counted ("weights"), if the
    call takes `progress`."""
    options: Mapping[str, Any]
    """The options of the command line that are parameters of the call."""
    silent: bool
    """Is nothing said?"""

    def __getitem__(self, name: str) -> Any:
        return self.options[name]

    def of(self, name: str, waits: str = "") -> Call:
        """Return another call, with the same options as far as it takes them."""
        return replace(self, name=name, waits=waits)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        """Call it; what is given here comes before what the user gave."""
        load_engine(self.silent)
        module, _, name = self.name.partition(":")
        function = getattr(importlib.import_module(f"anesurgery.{module}"), name)
        parameters = inspect.signature(function).parameters
        takes_any_keyword = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        options = {
            name: value
            for name, value in {"quiet": self.silent, **self.options}.items()
            if (takes_any_keyword or name in parameters) and value not in (None, [])
        }
        if "progress" in parameters and "progress" not in named:
            with progress(self.waits, self.silent) as bar:
                return function(*positional, progress=bar, **{**options, **named})
        with waiting(self.waits, self.silent or not self.waits):
            return function(*positional, **{**options, **named})


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    result: Any
    """Plain data, or what has `to_json`: for JSON, and for the console."""
    shown: Any = None
    """What the console shows, where that is something else. A list has parts of a report, a tuple has lines
    that are not folded."""
    wrote: Sequence[object] = ()
    """Files and folders; None for one that was not asked for."""
    then: str = field(kw_only=True)
    """The command to run next, "" where none follows."""
    more: str = ""
    """What else there is to ask for."""
    code: int = 0
    """The exit code."""
    error: str = ""
    """What went wrong all the same, "" where nothing did."""
    after: Callable[[], object] | None = None
    """What is left to do, which prints by itself."""

    def print(self, as_json: bool, quiet: bool, full: bool = True) -> None:
        """Print it, and end the process where its exit code is not 0.

        Args:
            as_json: as JSON?
            quiet: nothing?
            full: the whole report, and not what fits on a screen?

        Raises:
            SurgeryError: the error that it holds.
        """
        if as_json:
            plain = self.result.to_json() if hasattr(self.result, "to_json") else self.result
            from json import dumps

            print(dumps(finite(plain), indent=2, allow_nan=False))
        elif not quiet:
            more = "\n".join(filter(None, [FULL * (not full), self.more]))
            last = ended((path for path in self.wrote if path is not None), self.then, more)
            self._show(0 if full else LINES - len(last.splitlines()))
            if last:
                print(last)
        if self.after is not None:
            self.after()
        if self.error:
            raise SurgeryError(self.error)
        if self.code:
            raise typer.Exit(self.code)

    def _show(self, lines: int) -> None:
        """Print the report: so many lines of it, or all for 0."""
        if isinstance(self.shown, tuple):
            for line in self.shown:
                print(printable(line))
            return
        from anesurgery.show.console import PlainConsole

        shown = self.shown
        if shown is None:
            shown = self.result if hasattr(self.result, "__rich__") else str(self.result)
        parts = shown if isinstance(shown, list) else [shown] * (shown != "")
        if lines:
            from anesurgery.show.costs import fitted

            first, *others = [drawn(part, "report") for part in parts]
            parts = [fitted(replace(first, parts=[*first.parts, *others]), lines)]
        for part in parts:
            PlainConsole().print(part, crop=False)


Body: TypeAlias = Callable[..., Outcome | None]


def subcommand(
    *calls: str,
    waits: str = "",
    engine: bool = True,
    json: bool = True,
    screen: bool = False,
    names: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> Callable[[Body], Callable[..., None]]:
    """Make a function a command, with the options of public calls, `--json` and `--quiet`.

    Its first parameter is the `Call`, where one is named; the others are arguments and options of its own.

    Args:
        calls: module below `anesurgery` and function, as "splitting.split:split"; `Call.of` gives later ones.
        waits: see `Call`.
        engine: are torch and coremltools loaded first? Else the `Call` loads them, behind checks of the usage.
        json: has it an option `--json`? One that prints as it goes gives no outcome.
        screen: does it print what fits on a screen, and all of its report with `--full`?
        names: parameter of the call -> what its option is called.
        without: parameters of the call that get no option.
    """

    def built(body: Body) -> Callable[..., None]:
        own = dict(inspect.signature(body, eval_str=True).parameters)
        own.pop("call", None)
        of_calls = {name: one for call in reversed(calls) for name, one in parameters_of(call).items()}
        derived = [one for name, one in of_calls.items() if name not in {*own, *without, "quiet", "progress"}]

        def run(**values: Any) -> None:
            as_json, quiet = values.pop("as_json", False), values.pop("quiet")
            whole = values.pop("whole", True)
            options = {parameter.name: values.pop(parameter.name) for parameter in derived}
            if "positional_out" in values:
                values["out"] = _place(values.pop("positional_out"), values["out"], own["out"])
            if engine:
                load_engine(quiet)
            if isinstance(values.get("inputs"), list):
                from anesurgery.files.arrays import read_all

                values["inputs"] = read_all(values["inputs"])
            first_call = [Call(name, waits, options, silent=as_json or quiet) for name in calls[:1]]
            with warnings.catch_warnings():
                if quiet:
                    warnings.simplefilter("ignore", SurgeryWarning)
                try:
                    outcome = body(*first_call, **values)
                except SurgeryError as error:
                    error.args = (_with_options(str(error), run_options),)
                    raise
            if outcome is not None:
                outcome.print(as_json, quiet, whole)

        run_options = _flags(derived, names or {}) | {name: f"--{name}" for name in own if name == "inputs"}
        common = [_keyword("whole", Full, False)] * screen + [_keyword("as_json", Json, False)] * json
        common += [_keyword("quiet", Quiet, False)]
        parameters = [*_parameters(own, derived, names or {}), *common]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__doc__, run.__name__, run.__annotations__ = body.__doc__, body.__name__, {}
        return run

    return built


def _with_options(words: str, flags: Mapping[str, str]) -> str:
    """Return an error of a call with its parameters as they are written on the command line."""
    for name, flag in flags.items():
        words = re.sub(rf" \({name}=True\)", "", words)  # beside the option
        words = re.sub(rf"\b{name}=True\b", flag, words)
        words = re.sub(
            rf"(?<!\w\()\b{name}=", f"{flag} ", words
        )  # but not the option of a pass, `name(option=`
        if "_" in name:  # others are words of sentences too: "the smallest forms"
            words = re.sub(rf"\b{name}\b", flag, words)
    return words


def _parameters(
    own: Mapping[str, inspect.Parameter], derived: list[Parameter], names: Mapping[str, str]
) -> list[inspect.Parameter]:
    """Return the parameters of a command: arguments, options of its call, and options of its own."""
    of_body = [expanded for one in own.values() for expanded in _expanded(one)]
    arguments = [one for one in of_body if isinstance(get_args(one.annotation)[1], ArgumentInfo)]
    flags = _flags(derived, names)
    shown_as = {one.name: one.name.upper() if one in arguments else f"--{one.name}" for one in of_body} | flags
    of_call = [_option(one, flags[one.name], shown_as) for one in derived]
    return [*arguments, *of_call, *(one for one in of_body if one not in arguments)]


def _flags(derived: list[Parameter], names: Mapping[str, str]) -> dict[str, str]:
    """Return {parameter of a call: its option}."""
    return {one.name: f"--{names.get(one.name, one.name).strip('_').replace('_', '-')}" for one in derived}


def _keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _expanded(one: inspect.Parameter) -> list[inspect.Parameter]:
    """Return a parameter as typer takes it; a place to write to is an argument and an option."""
    if one.annotation in (Place, MaybePlace):
        return [_keyword("positional_out", OldOut, None), _keyword("out", Out, None)]
    return [_keyword(one.name, one.annotation, one.default)]


def _option(one: Parameter, flag: str, shown_as: Mapping[str, str]) -> inspect.Parameter:
    """Return the option for a parameter of a call; one that is False by default becomes a flag.

    Args:
        one: the parameter.
        flag: the name of the option.
        shown_as: parameter -> what it is called on the command line.
    """
    words = re.sub(r"`(\w+)`", lambda name: shown_as.get(name[1], name[0]), SHARED.get(one.name, one.words))
    words += " Repeat for more." if one.kind in (list[str], list[int]) else ""
    has_negation = one.kind is bool and one.default is not False  # typer then adds --no-<name> by itself
    flags = () if has_negation else (flag, *SHORT.get(one.name, ()))
    info = typer.Option(*flags, help=words, min=LEAST.get(one.name))
    kind = one.kind if one.default is not None else one.kind | None
    return _keyword(one.name, Annotated[kind, info], one.default)


def _place(positional: Path | None, out: Path | None, wanted: inspect.Parameter) -> Path | None:
    """Return where to write, by `--out` or as the last argument.

    Raises:
        SurgeryError: both are given, and differ; or none is, where one is needed.
    """
    if out is not None and positional is not None and out != positional:
        raise SurgeryError(f"two places to write are named, {positional} and --out {out}; keep one")
    if out is None and positional is None and wanted.annotation == Place:
        raise SurgeryError(f"where to write is missing; add it: {command(*sys.argv[1:], '--out', 'NAME')}")
    return positional if out is None else out
