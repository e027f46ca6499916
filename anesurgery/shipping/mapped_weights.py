"""Keep the weights in memory-mapped files while a checkpoint is converted, to need less memory.

`build` uses both context helpers. The operating system reads a mapped array when it is used, and drops it when
memory is short. `fp32_checkpoint` maps the weights of the PyTorch module, and `mapped_constants` the constants
that coremltools makes of them. A conversion then holds a few copies of the largest weight, not of all weights.
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
"""Smallest array, in bytes, that gets a file of its own. A choice: 1 MB keeps the number of files small."""
SHARD = 1 << 28
"""Bytes of one file of fp32 weights; a single larger weight exceeds it. A choice: 268 MB at a time fit in
memory."""
PIECE = 1 << 20
"""Elements that are checked for overflow at once: 4.2 MB of fp32."""
INFINITE = 1e38
"""Magnitude from which coremltools takes a number for an infinity, which it leaves as it is."""


def fp32_checkpoint(folder: Path, to: Path) -> Path:
    """Copy a checkpoint with all floats in fp32, because only fp32 weights can be mapped into the module.

    Args:
        folder: the checkpoint, with its safetensors.
        to: the folder to make; its config files are the same.

    Returns:
        `to`, or `folder` itself where all its floats are fp32 already.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    files = sorted(folder.glob("*.safetensors"))
    if not _has_half_floats(files):
        return folder
    to.mkdir(parents=True)
    for file in folder.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy2(file, to)
    file_of_weight: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def write_shard() -> None:
        name = f"model-{len(set(file_of_weight.values()))}.safetensors"
        save_file(shard, to / name, {"format": "pt"})
        file_of_weight.update(dict.fromkeys(shard, name))
        shard.clear()

    for file in files:
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - no mapping
                tensor = stored.get_tensor(name)
                shard[name] = tensor.float() if tensor.is_floating_point() else tensor
                if sum(t.nbytes for t in shard.values()) > SHARD:
                    write_shard()
    if shard:
        write_shard()
    arrays.write_text(to / "model.safetensors.index.json", _index_json(file_of_weight))
    return to


def _has_half_floats(files: list[Path]) -> bool:
    """Return whether any weight is fp16 or bf16."""
    from safetensors import safe_open

    dtypes = set()
    for file in files:
        with safe_open(file, "pt") as stored:
            dtypes |= {stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118 - no mapping
    return bool(dtypes & {"F16", "BF16"})


def _index_json(file_of_weight: dict[str, str]) -> str:
    """Return the text of `model.safetensors.index.json`."""
    import json

    return json.dumps({"metadata": {}, "weight_map": file_of_weight})


@contextmanager
def mapped_constants(folder: Path) -> Iterator[None]:
    """Within the context, map the large constants that coremltools makes from files in a folder."""
    with quiet_host():
        from coremltools.converters.mil.mil.operation import Operation
        from coremltools.converters.mil.mil.passes.defs.quantization import FP16ComputePrecision
    names, infer = count(), Operation._auto_val

    def map_if_large(value: Any) -> Any:
        return _mapped_copy(value, folder / str(next(names))) if _should_be_mapped(value) else value

    def infer_mapped(op: Any, output_types: Any) -> Any:
        inferred = infer(op, output_types)
        for result in inferred:
            if result is not None:
                result.val = map_if_large(result.val)
        return inferred

    with ExitStack() as stack:
        stack.enter_context(patched(Operation, "_auto_val", infer_mapped))
        overflows = staticmethod(_overflow_check(FP16ComputePrecision.fp16_overflow))
        stack.enter_context(patched(FP16ComputePrecision, "fp16_overflow", overflows))
        yield


def _should_be_mapped(value: Any) -> bool:
    """Return whether a value is a large array in numpy's own memory; torch's are mapped already."""
    if not isinstance(value, np.ndarray) or value.nbytes < LEAST or value.dtype.kind not in "fiub":
        return False
    owner: Any = value
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return isinstance(owner, np.ndarray)


def _mapped_copy(value: Array, file: Path) -> Array:
    """Copy an array into a mapped file; unlinked at once, it vanishes with its last reader."""
    buffer = torch.from_file(str(file), shared=True, size=value.nbytes, dtype=torch.uint8)
    file.unlink()
    copy: Array = buffer.numpy().view(value.dtype).reshape(value.shape)
    copy[...] = value
    return copy


def _overflow_check(host: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wrap coremltools' test whether a constant overflows fp16, to avoid copies of large ones."""

    def overflows(op: Any) -> bool:
        lists = [v if isinstance(v, (list, tuple)) else [v] for v in op.inputs.values()]
        operands = list(chain.from_iterable(lists))
        constants = [v.op.val.val for v in operands if v.op is not None and v.op.op_type == "const"]
        large = [c for c in constants if isinstance(c, np.ndarray) and c.size > PIECE]
        if not large:
            return host(op)
        return any(
            _has_finite_overflow(np.asarray(c)) for c in constants if getattr(c, "dtype", None) == np.float32
        )

    return overflows


def _has_finite_overflow(values: Array) -> bool:
    """Return whether a finite number is beyond the range of fp16."""
    flat = values.reshape(-1)
    pieces = (np.abs(flat[at : at + PIECE]) for at in range(0, flat.size, PIECE))
    return any(bool(((p > fp16.LARGEST) & (p < INFINITE)).any()) for p in pieces)
