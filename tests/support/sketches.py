"""The sketches of passes: what the text of an example is before and after.

The example of a pass over ops is a program that its file builds, and the sketch is its text. The example of a
pass over layers is its sketch, read.

    python tests/support/sketches.py NAME

writes the sketch of a pass: a long one into `sketches/` beside the passes, a short one on the screen, for its
docstring.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from types import ModuleType
from typing import Any

import numpy as np

from anesurgery import registry
from anesurgery.files.protobuf import proto
from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.testing import apply_pass, text_of

LONG = 14
"""Lines of both programs together from which a sketch stands in a file."""


UNSAID: dict[str, dict[str, Any]] = {"fuse_clip": {"rank5": True}, "legacy_embedding": {"integers": ["x"]}}
"""Pass over layers -> what its sketch does not say of the network."""
LINE = re.compile(r"\s*(?P<outputs>%.+?) = (?P<kind>\w+)\((?P<inputs>(?:%\w+(?:, )?)*)(?P<fields>.*)\)")


def example_of(name: str) -> Any:
    """The program or network of a sketch."""
    if name in registry.layer_pass_names():
        return network_of(sketch(name, "Before"), **UNSAID.get(name, {}))
    module: Any = importlib.import_module(registry.pass_class(name).__module__)
    return module.example()


def network_of(text: str, **options: Any) -> Any:
    """The specification of a network from its text; stored numbers that it leaves out are 0, 1, 2, ..."""
    first, *lines, last, _ = text.splitlines()
    sizes = re.findall(r"%(\w+): ([\dx]+)", first)
    inputs = {name: [int(d) for d in shape.split("x")] for name, shape in sizes}
    if options.get("rank5"):
        inputs = {name: shape[2:] for name, shape in inputs.items()}
    return make_network(inputs, [_layer(line) for line in lines], re.findall(r"%(\w+)", last), **options)


def _layer(line: str) -> Any:
    found = LINE.match(line)
    assert found is not None, line
    kind, message = found["kind"], proto.NeuralNetwork_pb2.NeuralNetworkLayer()
    types = getattr(message, kind).DESCRIPTOR.fields_by_name
    outputs, inputs = (re.findall(r"%(\w+)", found[part]) for part in ("outputs", "inputs"))
    fields: dict[str, Any] = _literal(f"{{{found['fields']}}}")
    for field in fields:
        if getattr(types[field].message_type, "name", "") == "WeightParams":
            fields[field] = weights(np.array(fields[field]))
    return make_layer(kind, inputs, outputs, **fields)


def _literal(text: str) -> Any:
    """A value that `network_text` prints: braces hold fields, a bare word is an enumerated value."""
    text = re.sub(r"const<(\d+)>", lambda m: str(list(range(int(m[1])))), text)
    text = re.sub(r"\b([A-Za-z]\w*)=", r"'\1': ", text)
    text = re.sub(r"(?<!['\w.])(?!True\b|False\b)([A-Z]\w+)(?!')", r"'\1'", text)
    return ast.literal_eval(text)


def words_of(described: ModuleType | type | str) -> str:
    """What `explain` prints of a pass, given by its module or name; the templates are no passes."""
    if isinstance(described, type):
        return inspect.getdoc(described) or ""
    if isinstance(described, ModuleType):
        name = described.__name__.rsplit(".", 1)[1]
        return described.__doc__ or "" if name.startswith("_") else registry.documentation(name)
    return registry.documentation(described)


def sketch(described: ModuleType | type | str, title: str) -> str:
    """The block under `Before::` or `After::`."""
    after_title = words_of(described).split(f"{title}::\n", 1)[1]
    lines = []
    for line in after_title.splitlines()[1:]:
        if line and not line.startswith("    "):
            break
        lines.append(line)
    return textwrap.dedent("\n".join(lines)).strip("\n")


def write(name: str) -> None:
    """Make the sketch of a pass from its example."""
    step, before = registry.make_pass(name), example_of(name)
    texts = [text_of(before), text_of(apply_pass(step, before)[0])]
    pairs = zip(("Before", "After"), texts, strict=True)
    made = "\n".join(f"{title}::\n\n{textwrap.indent(text, '    ')}\n" for title, text in pairs)
    room = "passes" if step.subject.converts else registry.LAYERS
    home = registry.ROOT / room / "sketches"
    if sum(len(text.splitlines()) for text in texts) > LONG:
        home.mkdir(exist_ok=True)
        (home / f"{name}.txt").write_text(made, encoding="utf-8")
    else:
        print(made)


if __name__ == "__main__":
    for one in sys.argv[1:]:
        write(one)
