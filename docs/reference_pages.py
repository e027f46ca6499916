"""The reference pages of the site, made of the docstrings, tables and commands of the library."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anesurgery
from anesurgery import placement, registry
from anesurgery.commands.app import app
from anesurgery.commands.written_options import written_options
from anesurgery.mil import quiet_host
from anesurgery.placement.evidence import Rule
from anesurgery.placement.target import CHIPS, SOURCES
from anesurgery.testing import apply_pass

MODULES = ("passes", "recipes")
"""Public names that are packages."""
EXAMPLE = re.compile(r"^## `(\w+)`\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = {
    "load": "Models that a system cannot load",
    "legality": "Ops that the Neural Engine cannot run",
    "shape": "Shapes",
    "memory": "Memory",
    "interface": "Inputs and outputs",
    "speed": "Speed",
    "numeric": "Numbers",
}


def page(name: str) -> str:
    """The text of a page in `docs/reference/`, as reStructuredText."""
    makers = {"api": api, "rules": rules, "commands": commands}
    return makers[name]() if name in makers else documented(name)


def _title(words: str, line: str) -> str:
    return f"{words}\n{line * len(words)}\n\n"


def _block(text: str, language: str = "text") -> str:
    return f".. code-block:: {language}\n\n" + "".join(f"   {line}\n" for line in text.splitlines()) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    made = ".. list-table::\n   :header-rows: 1\n\n"
    for row in [head, *rows]:
        made += "".join(f"   {'*' if not k else ' '} - {escaped(cell)}\n" for k, cell in enumerate(row))
    return made + "\n"


def escaped(words: str) -> str:
    """A line of prose: words in backticks as code, what reStructuredText would obey as it is."""
    parts = re.split(r"(``?[^`]+``?)", words)
    code = [f"``{part.strip('`')}``" for part in parts[1::2]]
    prose = [re.sub(r"([\\*|]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    return "".join(a + b for a, b in zip(prose, [*code, ""], strict=True))


def examples() -> dict[str, str]:
    """Public name -> the example of docs/api.md, which the tests run."""
    return dict(EXAMPLE.findall((Path(__file__).parent / "api.md").read_text(encoding="utf-8")))


def api() -> str:
    """A directive for every public name, with its example."""
    shown, made = examples(), ""
    for name in anesurgery.__all__:
        if name in MODULES:
            continue
        kind = "class" if isinstance(getattr(anesurgery, name), type) else "function"
        options = "   :members:\n   :exclude-members: __init__\n" * (kind == "class")
        made += f".. auto{kind}:: anesurgery.{name}\n{options}\n"
        made += f"Example:\n\n{_block(shown[name], 'python')}" if name in shown else ""
    return made


def documented(kind: str) -> str:
    """Every pass or recipe as `anesurgery explain` prints it, with its options and pictures."""
    listed = {"passes": "op_pass_names", "layers": "layer_pass_names", "recipes": "recipe_names"}
    made = ""
    for name in getattr(registry, listed[kind])():
        lines = registry.documentation(name).strip().splitlines()
        text = "\n".join(line if line[:1] == " " else _prose(line) for line in lines)
        made += f"{_title(name, '-')}{text}\n\n{_options(name)}"
        made += _pictures(name) if kind == "passes" else ""
    return made


def _prose(line: str) -> str:
    """A line of a docstring; a bullet stays one."""
    bullet = "* " if line.startswith("* ") else ""
    return bullet + escaped(line.removeprefix(bullet))


def _options(name: str) -> str:
    found = written_options(name) or {}
    rows = [
        [f"`{step}`", f"`{key}`", f"`{value!r}`"]
        for step, values in found.items()
        for key, value in values.items()
    ]
    if rows and name in found:
        return _table(["option", "default"], [row[1:] for row in rows])
    return _table(["step", "option", "value"], rows) if rows else ""


def _pictures(name: str) -> str:
    """The program of the sketch, drawn before and after."""
    with quiet_host():
        example = importlib.import_module(f"anesurgery.passes.{name}").example()
        after, _ = apply_pass(registry.make_pass(name), example)
    drawn = [
        f"<figure><figcaption>{when}</figcaption>{anesurgery.draw(program).svg}</figure>"
        for when, program in (("before", example), ("after", after))
    ]
    return f'.. raw:: html\n\n   <div class="sketches">{"".join(drawn)}</div>\n\n'.replace("\n.", " .")


def every_rule() -> list[Rule]:
    """Every rule that a module of placement holds, alone or in a table, each once."""
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(placement.__path__, "anesurgery.placement.")
        if not info.name.endswith("._template")
    ]
    values = (value for module in modules for value in vars(module).values())
    return list(dict.fromkeys(rule for value in values for rule in _held(value)))


def _held(value: Any) -> Iterator[Rule]:
    if isinstance(value, Rule):
        yield value
    elif isinstance(value, (tuple, list, frozenset)):
        yield from (rule for inner in value for rule in _held(inner))
    elif isinstance(value, dict):
        yield from (rule for inner in (*value.keys(), *value.values()) for rule in _held(inner))


def rules() -> str:
    """Every rule, by kind and name: ops, what it says, source, chips, system, grade, remedy."""
    known = every_rule()
    kinds = [*KINDS, *sorted({rule.kind for rule in known} - KINDS.keys())]
    made = ""
    for kind in kinds:
        here = [rule for rule in known if rule.kind == kind]
        made += _title(KINDS.get(kind, kind), "-") if here else ""
        for name in sorted({rule.id for rule in here}):
            made += f"{_title(name, '~')}" + "".join(_rule(rule) for rule in here if rule.id == name)
    head = ["chip", "engine", "cores", "GB/s", "since"]
    unknown = "not known"
    rows = [
        [c.name, f"H{c.family}", str(c.cores), str(c.bandwidth or unknown), f"{c.platform} {c.first_os}"]
        for c in CHIPS.values()
    ]
    sources = [[name, source] for name, source in SOURCES.items()]
    return f"{made}{_title('Chips', '-')}{_table(head, rows)}{_table(['name', 'source'], sources)}"


def _rule(rule: Rule) -> str:
    verdict = {False: "the ANE cannot run it", True: "the ANE can run it", None: "no verdict on the op"}
    ops = ", ".join(sorted(rule.ops)) or "all ops"
    help_ = f"pass `{rule.remedy}`" if rule.remedy else rule.advice or "see the table of remedies"
    condition = ", under a condition" if rule.test else ""
    lines = {
        "Ops": ops + condition,
        "Verdict": verdict[rule.legal],
        "Because": rule.because,
        "Source": rule.source,
        "Seen on": f"{rule.scope}, {rule.scope.model_type}",
        "Grade": rule.grade.value,
        "What helps": help_,
    }
    return "".join(f":{key}: {escaped(' '.join(words.split()))}\n" for key, words in lines.items()) + "\n"


def commands() -> str:
    """Every command with its arguments and options."""
    from typer.main import get_command

    found: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    made = ""
    for name, command in found.items():
        rows = [_parameter(p) for p in command.params]
        made += f"{_title(f'anesurgery {name}', '-')}{escaped(command.help or '')}\n\n"
        made += _table(["argument or option", "what it does", "default"], rows)
    return made


def _parameter(found: Any) -> list[str]:
    argument = found.param_type_name == "argument"
    names = (found.metavar or found.name.upper()) if argument else ", ".join(found.opts)
    default = "" if found.default in (None, False, ()) or found.required else f"`{found.default}`"
    return [f"`{names}`", found.help or "", "required" if found.required else default]
