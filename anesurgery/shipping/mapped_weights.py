"""Weights that stay in files while a checkpoint is converted, so that memory need not hold them.

What is mapped from a file is read when it is needed, and the system takes its memory back whenever it wants
some. `widened` maps the weights of the module, and `mapped_constants` those that coremltools makes of them: a
conversion then holds a few copies of the largest weight, and not of all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.files import arrays
from anesurgery.mil import Array, patched, quiet_host

LEAST = 1 << 20
"""Bytes from which on an array is worth a file of its own: a choice, so that a model is not thousands of files.
"""
SHARD = 1 << 28
"""Bytes of a file of widened weights; one weight may be more. A choice: 268 MB, so that a machine has room for
one at a time."""
PIECE = 1 << 20
"""Elements that are looked at at once: 4.2 MB of fp32."""
BEYOND = 1e38
"""Magnitude from which on coremltools takes a number for an infinity."""


def widened(folder: Path, to: Path) -> Path:
    """A checkpoint whose floats are fp32, which can be mapped; the folder itself where they all are.

    Args:
        folder: with safetensors.
        to: the folder to make; one with the same files otherwise.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    files = sorted(folder.glob("*.safetensors"))
    if not _narrow(files):
        return folder
    to.mkdir(parents=True)
    for file in folder.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy2(file, to)
    place: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def write() -> None:
        name = f"model-{len(set(place.values()))}.safetensors"
        save_file(shard, to / name, {"format": "pt"})
        place.update(dict.fromkeys(shard, name))
        shard.clear()

    for file in files:
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - no mapping
                tensor = stored.get_tensor(name)
                shard[name] = tensor.float() if tensor.is_floating_point() else tensor
                if sum(t.nbytes for t in shard.values()) > SHARD:
                    write()
    if shard:
        write()
    arrays.write_text(to / "model.safetensors.index.json", _index(place))
    return to


def _narrow(files: list[Path]) -> bool:
    """Are there floats of 16 bits?"""
    from safetensors import safe_open

    kinds = set()
    for file in files:
        with safe_open(file, "pt") as stored:
            kinds |= {stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118 - no mapping
    return bool(kinds & {"F16", "BF16"})


def _index(place: dict[str, str]) -> str:
    import json

    return json.dumps({"metadata": {}, "weight_map": place})


@contextmanager
def mapped_constants(folder: Path) -> Iterator[None]:
    """In the body, large constants that coremltools makes lie in files of a folder, which nobody else sees."""
    with quiet_host():
        from coremltools.converters.mil.mil.operation import Operation
        from coremltools.converters.mil.mil.passes.defs.quantization import FP16ComputePrecision
    names, infer = count(), Operation._auto_val

    def mapped(value: Any) -> Any:
        return _mapped(value, folder / str(next(names))) if _is_held(value) else value

    def values(op: Any, output_types: Any) -> Any:
        inferred = infer(op, output_types)
        for one in inferred:
            if one is not None:
                one.val = mapped(one.val)
        return inferred

    with ExitStack() as stack:
        stack.enter_context(patched(Operation, "_auto_val", values))
        overflows = staticmethod(_in_pieces(FP16ComputePrecision.fp16_overflow))
        stack.enter_context(patched(FP16ComputePrecision, "fp16_overflow", overflows))
        yield


def _is_held(value: Any) -> bool:
    """Is it a large array in memory of its own, and not one of torch, whose weights are mapped?"""
    if not isinstance(value, np.ndarray) or value.nbytes < LEAST or value.dtype.kind not in "fiub":
        return False
    owner: Any = value
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return isinstance(owner, np.ndarray)


def _mapped(value: Array, file: Path) -> Array:
    """The same array in a file, which is gone when nobody reads it any more."""
    held = torch.from_file(str(file), shared=True, size=value.nbytes, dtype=torch.uint8)
    file.unlink()
    stored: Array = held.numpy().view(value.dtype).reshape(value.shape)
    stored[...] = value
    return stored


def _in_pieces(host: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Does a constant of an op leave fp16? As the host says it, but without copies of what is large."""

    def overflows(op: Any) -> bool:
        lists = [v if isinstance(v, (list, tuple)) else [v] for v in op.inputs.values()]
        every = list(chain.from_iterable(lists))
        constants = [v.op.val.val for v in every if v.op is not None and v.op.op_type == "const"]
        large = [c for c in constants if isinstance(c, np.ndarray) and c.size > PIECE]
        if not large:
            return host(op)
        return any(_leaves(np.asarray(c)) for c in constants if getattr(c, "dtype", None) == np.float32)

    return overflows


def _leaves(values: Array) -> bool:
    """Is a number beyond fp16, and no infinity?"""
    flat = values.reshape(-1)
    pieces = (np.abs(flat[at : at + PIECE]) for at in range(0, flat.size, PIECE))
    return any(bool(((p > fp16.LARGEST) & (p < BEYOND)).any()) for p in pieces)
