"""The one module that touches Apple's `coreai` package, parts of which are declared unversioned."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from coreai.authoring import AIModelAsset, Context

# isort: split
from coreai._compiler import ir  # half made before coreai.authoring is imported
from coreai.runtime import NDArray as RuntimeArray
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]


def run_asset(path: Path, arrays: Arrays, function: str | None) -> tuple[None, Arrays]:
    """Run a model once: "input:NAME" and "state:NAME" go in, "output:NAME" and "state:NAME" come out."""
    return None, asyncio.run(_run(path, arrays, function))


async def _run(path: Path, arrays: Arrays, function: str | None) -> Arrays:
    async with AIModelAsset.load(path).executable() as model:
        names = list(model.function_names)
        chosen = function or ("main" if "main" in names else names[0])
        if chosen not in names:
            raise ValueError(f"it has no function {chosen!r}, but {', '.join(names)}")
        call = model.load_function(chosen)
        described = call.desc
        inputs = {n: described.input_descriptor(n) for n in described.input_names}
        states = {n: described.state_descriptor(n) for n in described.state_names}
        given = _given("input", inputs, arrays)
        held = _given("state", states, _empty(states) | arrays)
        outputs = await call(given, held)
        found = {f"output:{n}": _plain(v.numpy()) for n, v in outputs.items()}
        return found | {f"state:{n}": _plain(v.numpy()) for n, v in held.items()}


def _empty(states: Mapping[str, Any]) -> Arrays:
    """States as a model finds them at its first call."""
    return {f"state:{n}": np.zeros([d or 1 for d in s.shape], np.float32) for n, s in states.items()}


def _given(kind: str, described: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
    """What a function takes, in the dtypes that it states."""
    values = {n.partition(":")[2]: v for n, v in arrays.items() if n.startswith(f"{kind}:")}
    if missing := described.keys() - values.keys():
        raise ValueError(f"missing {kind} {sorted(missing)[0]!r}")
    if unknown := values.keys() - described.keys():
        raise ValueError(f"unknown {kind} {sorted(unknown)[0]!r}; it takes {', '.join(described) or 'none'}")
    for name, array in values.items():
        shape = described[name].shape
        fits = len(shape) == array.ndim and all(d in (None, n) for d, n in zip(shape, array.shape, strict=True))
        if not fits:
            raise ValueError(f"{kind} {name!r} has shape {array.shape}, expected {tuple(shape)}")
    return {n: RuntimeArray(np.ascontiguousarray(v, numpy_type(described[n].dtype))) for n, v in values.items()}


def numpy_type(name: str) -> np.dtype[Any]:
    """The numpy type of what the runtime names."""
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """An array that a file of numpy holds: short floats as float32, integers of few bits as int8."""
    if array.dtype.kind == "V" or array.dtype.name in vars(ml_dtypes):
        return array.astype(np.float32 if "float" in array.dtype.name else np.int8)
    return np.array(array)


# A program as plain data, for who reads it.

HINT = re.compile(r'identifiers = \["([^"]*)"\]')
"""Where a location says which op of PyTorch an op was made of; the last is the nearest."""
CALLEE = re.compile(r"@\"?([^\">\s]+)")
RESOURCE = re.compile(r'dense_resource<"?(.*?)"?> : ')
HANDLE = re.compile(r"handle<(tensor<.*>)>")


def walk_asset(path: Path, arrays: Arrays) -> tuple[list[dict[str, Any]], Arrays]:
    """The graphs of a program as plain data, and its small constants by number."""
    context = Context()._mlir_context
    with context:
        module = AIModelAsset.load(path).program._module._mlir_module
        constants: Arrays = {}
        graphs = [_Walk(constants).graph(op.operation) for op in _graphs(module.operation)]
        return graphs, constants


def _graphs(op: Any) -> Iterator[Any]:
    """Every graph, those in namespaces too."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                if inner.operation.name == "coreai.graph":
                    yield inner
                else:
                    yield from _graphs(inner.operation)


class _Walk:
    """The walk through one graph: values are numbered in the order in which they are made."""

    def __init__(self, constants: Arrays) -> None:
        self.numbers: dict[Any, int] = {}
        self.constants = constants

    def graph(self, op: Any) -> dict[str, Any]:
        attributes = {a.name: a.attr for a in op.attributes}
        (block,) = op.regions[0].blocks
        return {
            "name": attributes["sym_name"].value,
            "private": "priv" in attributes,
            "composite": self.composite(attributes.get("composite_decl")),
            "inputs": [self.attribute(a) for a in attributes.get("arg_attrs", ())],
            "outputs": [self.attribute(a) for a in attributes.get("res_attrs", ())],
            **self.block(block),
        }

    def block(self, block: Any) -> dict[str, Any]:
        arguments = [self.value(v) for v in block.arguments]
        return {"arguments": arguments, "ops": [self.op(o.operation) for o in block.operations]}

    def op(self, op: Any) -> dict[str, Any]:
        hints = HINT.findall(str(op.location))
        return {
            "kind": op.name.removeprefix("coreai.").removeprefix("decomposable."),
            "hint": hints[-1] if hints else "",
            "operands": [self.numbers[v] for v in op.operands],
            "attributes": {a.name: self.attribute(a.attr) for a in op.attributes},
            "blocks": [self.block(b) for region in op.regions for b in region.blocks],
            "results": [self.value(v) for v in op.results],
        }

    def value(self, value: Any) -> dict[str, Any]:
        number = self.numbers[value] = len(self.numbers)
        return {"number": number, **tensor(value.type)}

    def composite(self, declared: Any) -> dict[str, Any] | None:
        if declared is None:
            return None
        words = str(declared)
        attributes = ir.DictAttr.parse(words[words.index("{") : -1])
        return {"name": words.split('"')[1], **self.attribute(attributes)}

    def attribute(self, attribute: Any) -> Any:
        """An attribute as plain data; a constant as {"constant": its number} or {"resource": its key}."""
        if isinstance(attribute, ir.DenseElementsAttr):
            return {"constant": self.constant(attribute), **tensor(attribute.type)}
        if isinstance(attribute, (ir.IntegerAttr, ir.FloatAttr, ir.BoolAttr, ir.StringAttr)):
            return attribute.value
        if isinstance(attribute, ir.ArrayAttr):
            return [self.attribute(a) for a in attribute]
        if isinstance(attribute, ir.DictAttr):
            return {a.name: self.attribute(a.attr) for a in attribute}
        words = str(attribute)
        if found := RESOURCE.match(words):
            return {"resource": found[1], **tensor(ir.DenseResourceElementsAttr(attribute).type)}
        if words.startswith("#param.constant<@"):
            return CALLEE.search(words)[1]  # type: ignore[index]
        found = re.fullmatch(r"#coreai\.\w+<(\w+)>", words)
        return found[1] if found else words

    def constant(self, attribute: Any) -> str:
        """The number of a constant that the file holds in place."""
        key = str(len(self.constants))
        held = attribute.get_splat_value() if attribute.is_splat else None
        array = np.array(attribute) if held is None else np.array(held.value)
        self.constants[key] = _plain(array)
        return key


def tensor(kind: Any) -> dict[str, Any]:
    """The type of a value: element type, shape with None for sizes that are not fixed; or its words."""
    words = str(kind)
    if (held := HANDLE.search(words)) is not None:
        return {**tensor(ir.Type.parse(held[1])), "state": True}
    try:
        ranked = ir.RankedTensorType(kind)
    except ValueError:
        return {"type": words}
    shape = [None if ranked.is_dynamic_dim(i) else ranked.get_dim_size(i) for i in range(ranked.rank)]
    return {"dtype": str(ranked.element_type), "shape": shape}
