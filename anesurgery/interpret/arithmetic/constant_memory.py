"""Constants in a run: as tensors, kept in fp32 or widened at each use, and their memory given back.

The weights of a model are views of its memory-mapped file. A plan of the interpreter widens fp16 weights to
fp32, keeps as many of these as `CACHE_LIMIT` allows, and gives the pages of the others back after each use.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery.mil import quiet_host

SMALL_CONSTANT = 1 << 16
"""Constants of up to this many elements are always kept in fp32; larger ones are widened when an op needs
them."""

CACHE_LIMIT = 1 << 30
"""The most bytes of large constants that a plan keeps in fp32, from its second run on."""


SMALL_CACHE_LIMIT = 1 << 26
"""The same for a few ops that run a few times: keeping more costs memory and saves nothing."""


def cache_limit_for_many_runs() -> int:
    """Return a limit for a program that will run many times: half of the memory that is available."""
    with suppress(OSError, IndexError, ValueError):  # Linux says what it can take back from its file cache
        kilobytes = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]
        return max(CACHE_LIMIT, 1024 * int(kilobytes) // 2)
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on every system
        return CACHE_LIMIT
    return max(CACHE_LIMIT, free // 2)


def widen(value: Any) -> Any:
    """Return fp16 as float32, and everything else as it is."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.float16 else value


def needs_widening(value: Any) -> bool:
    """Must a constant be widened before use, or is it so large that its memory is given back after it?"""
    if not isinstance(value, torch.Tensor):
        return False
    return value.dtype == torch.float16 or (value.dtype == torch.float32 and value.numel() > SMALL_CONSTANT)


def release_pages(array: Any) -> None:
    """Give back the memory of a view of a mapped file; the file is read again when the view is."""
    owner = array
    while isinstance(getattr(owner, "base", None), np.ndarray):
        owner = owner.base
    mapped: Any = getattr(owner, "base", None)
    stored_bytes = getattr(owner, "stored_bytes", None)
    is_clean = isinstance(owner, np.memmap) and (owner.mode == "r" or stored_bytes is not None)
    if not (is_clean and hasattr(mapped, "madvise")):
        return
    mapped_bytes = np.frombuffer(mapped, np.uint8)
    begin, end = (
        address - mapped_bytes.ctypes.data for address in (array.ctypes.data, array.ctypes.data + array.nbytes)
    )
    if stored_bytes is not None:  # the pages of the zeros are in no file
        end = min(end, owner.ctypes.data - mapped_bytes.ctypes.data + stored_bytes)
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        mapped.madvise(mmap.MADV_DONTNEED, first, length)


def trim_heap() -> None:
    """Give freed memory back to the system: glibc keeps it, and memory mapped later would come on top."""
    with suppress(OSError, TypeError, AttributeError):  # not on every system
        ctypes.CDLL(None).malloc_trim(0)


def as_tensor(array: Any) -> torch.Tensor:
    """Return a constant as a tensor: a view of the (memory-mapped) array where torch has its dtype."""
    array = np.asarray(array)
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64 if array.dtype.itemsize > 2 else np.int32)
    with quiet_host():  # the array is not writable, and nobody writes to it
        tensor = torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
    if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
        tensor = tensor.float() if tensor.dtype == torch.float64 else tensor
        return tensor.float() if tensor.dtype == torch.float16 and tensor.numel() <= SMALL_CONSTANT else tensor
    return tensor.to(torch.int32)
