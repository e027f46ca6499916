"""Programs of ExecuTorch (`.pte`), made here with FlatBuffers' own builder, by the published schema."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flatbuffers

INLINE, SEGMENT = 0, 1


def flattened(folder: Path, edit: Callable[[list[dict[str, Any]]], None] = lambda _: None) -> bytes:
    """A folder as Core ML's backend stores it: all files, then the list of them, backwards."""
    content, nodes = b"", list[dict[str, Any]]()

    def add(place: Path) -> int:
        nonlocal content
        node: dict[str, Any] = {"name": place.name, "kind": int(place.is_dir()), "children": {}}
        data = b"" if place.is_dir() else place.read_bytes()
        node["dataRegion"] = {"offset": len(content), "size": len(data)}
        content += data
        if place.is_dir():
            node["children"] = {child.name: add(child) for child in sorted(place.iterdir())}
        nodes.append(node)
        return len(nodes) - 1

    add(folder)
    edit(nodes)
    return content + json.dumps({"nodes": nodes}, ensure_ascii=False).encode()[::-1]


@dataclass(frozen=True)
class Call:
    """A delegate of a method: its backend, and where its bytes are."""

    backend: str
    index: int
    location: int = SEGMENT


def program(
    methods: dict[str, Sequence[Call]],
    segments: Sequence[bytes] = (),
    inline: Sequence[bytes] = (),
    named: dict[str, int] | None = None,
) -> bytes:
    """The bytes of a file; each method also calls the operator aten::add.out outside of its delegates."""
    b = flatbuffers.Builder(1024)
    plans = [_plan(b, name, calls) for name, calls in methods.items()]
    at, places = 0, []
    for data in segments:
        places.append(at)
        at += -(-len(data) // 16) * 16
    fields = {
        1: _vector(b, plans),
        3: _vector(b, [_table(b, {0: b.CreateByteVector(data)}) for data in inline]),
        4: _vector(b, [_sizes(b, at, len(s)) for at, s in zip(places, segments, strict=True)]),
        7: _vector(b, [_named(b, key, index) for key, index in (named or {}).items()]),
    }
    b.Finish(_table(b, fields), file_identifier=b"ET12")
    plain = bytes(b.Output())
    size = -(-(len(plain) + 32) // 16) * 16
    header = struct.pack("<4sIQQQ", b"eh00", 32, len(plain) + 32, size, at)
    head = struct.pack("<I", struct.unpack_from("<I", plain)[0] + 32) + plain[4:8] + header + plain[8:]
    return head.ljust(size, b"\0") + b"".join(s.ljust(-(-len(s) // 16) * 16, b"\0") for s in segments)


def _plan(b: Any, name: str, calls: Sequence[Call]) -> int:
    text = b.CreateString(name)
    add = _table(b, {0: b.CreateString("aten::add"), 1: b.CreateString("out")})
    delegates = []
    for call in calls:
        backend = b.CreateString(call.backend)
        b.StartObject(2)
        b.PrependUint8Slot(0, call.location, 0)
        b.PrependUint32Slot(1, call.index, 0)
        delegates.append(_table(b, {0: backend, 1: b.EndObject()}))
    return _table(b, {0: text, 6: _vector(b, [add]), 7: _vector(b, delegates)})


def _sizes(b: Any, at: int, size: int) -> int:
    b.StartObject(2)
    b.PrependUint64Slot(0, at, 0)
    b.PrependUint64Slot(1, size, 0)
    return int(b.EndObject())


def _named(b: Any, key: str, index: int) -> int:
    text = b.CreateString(key)
    b.StartObject(2)
    b.PrependUOffsetTRelativeSlot(0, text, 0)
    b.PrependUint32Slot(1, index, 0)
    return int(b.EndObject())


def _table(b: Any, fields: dict[int, int]) -> int:
    b.StartObject(max(fields) + 1)
    for field, place in fields.items():
        b.PrependUOffsetTRelativeSlot(field, place, 0)
    return int(b.EndObject())


def _vector(b: Any, places: Sequence[int]) -> int:
    b.StartVector(4, len(places), 4)
    for place in reversed(places):
        b.PrependUOffsetTRelative(place)
    return int(b.EndVector())
