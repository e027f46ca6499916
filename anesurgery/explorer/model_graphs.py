"""A model as graphs for Model Explorer, and values of its ops to colour them by; plain data.

Ops are grouped by the modules that they were converted from, where the program says so, and else by the
segments in which they run, in order.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from anesurgery.display import printable
from anesurgery.loading import load_graph
from anesurgery.mil import Function, Operation, operands, reads
from anesurgery.placement.inspection import Inspection, OpRow
from anesurgery.placement.inspector import inspect
from anesurgery.text import to_text, type_text

MODULES = "TORCHSCRIPT_MODULE_NAME"
"""The scope that has the names of torch's modules, outermost first."""
UNITS = {"ane": "ANE", "cpu": "CPU", "gpu": "GPU", None: "unknown"}
COLOURS = {"ANE": "#cfe6fa", "CPU": "#fbe0c3", "GPU": "#e9d8f6", "unknown": "#e4e7ea"}
TEXT = "#1b2026"
"""On each of these it has a contrast above 10."""
TARGET = "M1/macOS 14"
"""The default target of units and times: the chip with the most measurements."""


@dataclass(frozen=True)
class Node:
    """An op, or an input."""

    name: str
    """The name of the op's first output; unique in its graph."""
    label: str
    """The op's type, or "input"."""
    group: str
    """Names of the groups that it is in, joined by "/"."""
    facts: dict[str, str]
    """Name -> text, for the side panel."""
    reads: tuple[tuple[str, str, str], ...]
    """(node, number of its output, name of the parameter) for each value that it reads."""
    gives: tuple[tuple[str, str], ...]
    """(name, type in words) of each output."""


def graph_id(path: str | os.PathLike[str], function: str) -> str:
    """Return the name of a graph; it begins with the file, since functions of two models have one name."""
    return f"{Path(path).stem}: {function}"


def function_of_graph(name: str) -> str:
    """Return the function that a graph shows; Model Explorer numbers graphs that have the same name."""
    return re.sub(r" \(\d+\)$", "", name.rpartition(": ")[2])


def graphs(path: str | os.PathLike[str], target: str | None = None) -> dict[str, list[Node]]:
    """Return the nodes of each function of a model.

    Args:
        path: of a package, an .mlmodel, a compiled model or whatever `load` takes.
        target: chip and OS on which units are estimated; that of `inspect` by default.

    Raises:
        LoadError: the model cannot be read.
    """
    loaded = load_graph(path)
    by_function = {}
    for name, function in loaded.program.functions.items():
        rows = {row.name: row for row in inspect(loaded, target, function=name).ops}
        by_function[name] = _nodes(function, rows)
    return by_function


def _nodes(function: Function, rows: dict[str, OpRow]) -> list[Node]:
    inputs = function.inputs.values()
    nodes = [Node(v.name, "input", "", {}, (), ((v.name, type_text(v)),)) for v in inputs]
    places = {v.name: (v.name, "0") for v in inputs}
    for op in function.operations:
        if op.op_type == "const" or not op.outputs:
            continue
        name = str(op.outputs[0].name)
        places |= {v.name: (name, str(i)) for i, v in enumerate(op.outputs)}
        named = {id(v): parameter for parameter, v in operands(op)}
        # a dict keeps each edge once, in order; `reads` of an op with blocks names values made in them too
        edges = {(*places[v.name], named.get(id(v), "inside")): None for v in reads(op) if v.name in places}
        row = rows.get(name)
        gives = tuple((str(v.name), type_text(v)) for v in op.outputs)
        read = tuple(e for e in edges if e[0] != name)
        nodes.append(Node(name, op.op_type, _group(op, row), _facts(op, row), read, gives))
    return nodes


def _group(op: Operation, row: OpRow | None) -> str:
    """Return the modules of an op, from its scopes, else the segment that it runs in."""
    scopes = next((v for k, v in op.scopes.items() if MODULES in str(k)), ())
    parts = [str(part) for part in scopes if part]
    if parts:
        return "/".join(printable(part).replace("/", "_") for part in parts)
    return "" if row is None else f"segment {row.segment} on {UNITS[row.preferred]}"


def _facts(op: Operation, row: OpRow | None) -> dict[str, str]:
    facts = {"op": printable(to_text(op))}
    if row is None:
        return facts
    facts |= {"unit (estimated)": UNITS[row.preferred], "flop": f"{row.flop:,}"}
    if row.ms is not None:
        facts["ms (estimated)"] = f"{row.ms:.3g}"
    for i, finding in enumerate(row.findings, start=1):
        repair = f"; repaired by {finding.remedy}" if finding.remedy else ""
        facts[f"finding {i}: {finding.rule}"] = printable(f"{finding.message}: {finding.because}{repair}")
    return facts


def values(inspection: Inspection, overlay: str) -> dict[str, tuple[float | str, str | None]]:
    """Return what an overlay shows at each op, by name: a value, and a colour if the value has its own.

    Args:
        inspection: of the model.
        overlay: "units", "time" (milliseconds, estimated), "findings" (how many), or "numbers" (rules that name
            a numeric hazard).
    """
    rows = inspection.ops
    if overlay == "units":
        return {r.name: (UNITS[r.preferred], COLOURS[UNITS[r.preferred]]) for r in rows}
    if overlay == "time":
        return {r.name: (r.ms, None) for r in rows if r.ms is not None}
    if overlay == "numbers":
        hazards = {r.name: [f.rule for f in r.findings if f.kind == "numeric"] for r in rows}
        return {name: (", ".join(names), COLOURS["CPU"]) for name, names in hazards.items() if names}
    return {r.name: (len(r.findings), None) for r in rows if r.findings}
